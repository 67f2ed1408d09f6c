// The kernels on a CPU, for tests without a GPU. A program that uses them is linked with launch.cpp (engine.cu) or
// launch_collective.cpp (collective.cu):
//
//     g++ -O2 -std=c++17 -ffp-contract=off -c kernels/host/launch.cpp -I kernels
#pragma once

#include "../collective.h"
#include "../engine.h"
#include "shim.h"

namespace flexring {

using Kernel = void (*)(LaunchParameters);

// The kernel of this name; null if there is none.
Kernel kernel_named(const char* name);

using CollectiveKernel = void (*)(CollectiveParameters);

// As above, for the kernels of collective.cu.
CollectiveKernel collective_kernel_named(const char* name);

// Whether the shares of a descriptor of so many tiles, divided among so many workers, have each tile once.
bool shares_cover(unsigned workers, unsigned tiles, unsigned ring, bool on_host, unsigned long long index);

// Runs CTA number `cta` of a grid to its end on this thread. Passes on what the machine throws.
void run_cta(Kernel kernel, const LaunchParameters& parameters, unsigned grid, unsigned cta, Machine& machine);
void run_collective_cta(CollectiveKernel kernel, const CollectiveParameters& parameters, unsigned grid, unsigned cta, Machine& machine);

// What both do: the CTA has one thread.
template <class Parameters>
inline void run_alone(void (*kernel)(Parameters), const Parameters& parameters, unsigned grid, unsigned cta, Machine& machine) {
    gridDim = {grid, 1, 1};
    blockDim = {1, 1, 1};
    blockIdx = {cta, 0, 0};
    threadIdx = {0, 0, 0};
    flexring::machine = &machine;
    kernel(parameters);
    flexring::machine = nullptr;
}

// Has the kernels of collective.cu break a Rule.
void break_rule(unsigned rule);

}  // namespace flexring
