// Runs the kernels of collective.cu on a CPU; see kernels.h.
#include "kernels.h"

#include "../collective.cu"

namespace flexring {
namespace {

struct NamedCollectiveKernel {
    const char* name;
    CollectiveKernel kernel;
};

#define FLEXRING_NAMED_COLLECTIVE(name, Type) {"flexring_collective_" #name, flexring_collective_##name},
constexpr NamedCollectiveKernel kCollectiveKernels[] = {FLEXRING_TYPES(FLEXRING_NAMED_COLLECTIVE)};

}  // namespace

CollectiveKernel collective_kernel_named(const char* name) {
    for (const NamedCollectiveKernel& named : kCollectiveKernels) {
        if (std::strcmp(named.name, name) == 0) return named.kernel;
    }
    return nullptr;
}

void run_collective_cta(CollectiveKernel kernel, const CollectiveParameters& parameters, unsigned grid, unsigned cta, Machine& machine) {
    run_alone(kernel, parameters, grid, cta, machine);
}

void break_rule(unsigned rule) { broken_rule = rule; }

}  // namespace flexring
