// Kernels that run: every resident CTA is a host thread.
//
// Owns residency, what kernels may access, and the races between them. A kernel starts with a random number of resident CTAs,
// often with one; the others become resident when these leave, or at a random time. All kernels of a context share the CTAs
// that its GPU has room for. Must not know how kernels are launched.
#pragma once

#include <string>

#include "../../../kernels/host/kernels.h"
#include "streams.h"

namespace sim {

struct KernelLaunch {
    std::string name;
    unsigned grid;
    unsigned block;
    flexring::Kernel kernel;
    flexring::CollectiveParameters parameters;
};

// Whether there is a kernel of this name.
bool is_kernel(const std::string& name);

// A launch with copied parameters. Ends the process if they make no sense.
KernelLaunch read_launch(const char* function, const std::string& name, unsigned grid, unsigned block,
                         const void* parameters);

// Number of CTAs of this many threads that a multiprocessor has room for.
unsigned ctas_per_multiprocessor(unsigned block);

// Runs a kernel to its end, as the work of a stream.
CUresult run_kernel(Stream& stream, const KernelLaunch& launch);

}  // namespace sim
