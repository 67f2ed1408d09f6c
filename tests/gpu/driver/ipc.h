// Memory of one process, opened by another.
//
// Owns the format of a handle, and the shared state of the owner and the processes that opened it.
#pragma once

#include "memory.h"

namespace sim {

// Ends the process if it frees memory that a live process still has open, which is undefined in CUDA.
void check_not_open(const Range& range, const char* function);

// This process has closed it.
void sign_off(Range& imported);

}  // namespace sim
