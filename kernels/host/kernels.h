// The kernels on a CPU, for tests without a GPU. A program that uses them is linked with launch.cpp:
//
//     g++ -O2 -std=c++17 -ffp-contract=off -c kernels/host/launch.cpp -I kernels
#pragma once

#include "../collective.h"
#include "shim.h"

namespace flexring {

using Kernel = void (*)(CollectiveParameters);

// The kernel of this name; null if there is none.
Kernel kernel_named(const char* name);

// The largest number of threads in a CTA.
extern const unsigned largest_block;

// Runs CTA number `cta` of a grid to its end on this thread: it has one thread. Passes on what the machine throws.
void run_cta(Kernel kernel, const CollectiveParameters& parameters, unsigned grid, unsigned cta, Machine& machine);

// Has the kernels break a Rule.
void break_rule(unsigned rule);

}  // namespace flexring
