// Memory of one process in another.
//
// Owns the form of a handle, and what the owner of memory and those who opened it know of each other.
#pragma once

#include "memory.h"

namespace sim {

// Ends the process where memory is freed that a living process still has open, which CUDA leaves undefined.
void check_not_open(const Range& range, const char* function);

// This process has it open no longer.
void sign_off(Range& imported);

}  // namespace sim
