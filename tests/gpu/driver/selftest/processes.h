// Further processes of a scenario.
#pragma once

#include <sys/types.h>

#include "programs.h"

namespace selftest {

// Runs this program again as another process. Returns its process id, and the write end of a pipe to it.
pid_t again(const char* scenario, const std::string& argument, int& input);
bool succeeded(pid_t child);

std::string text_of(const CUipcMemHandle& handle);
// The handle in the argument of this process.
CUipcMemHandle told_handle();

}  // namespace selftest
