// The kernels on a CPU, for tests without a GPU.
//
//     g++ -O2 -std=c++17 -ffp-contract=off -c kernels/host/launch.cpp -I kernels
#include "shim.h"

#include "../reduce.cu"

namespace {

using Kernel = void (*)(const flexring::Batch&);

struct NamedKernel {
    const char* name;
    Kernel kernel;
};

#define FLEXRING_NAMED(op, Op, name, Type) {"flexring_" #op "_" #name, flexring_##op##_##name},
constexpr NamedKernel kKernels[] = {FLEXRING_REDUCTIONS(FLEXRING_NAMED){"flexring_copy", flexring_copy}};

}  // namespace

// Runs every thread of a grid of grid_x times grid_y blocks, one after another. Returns 0, or -1 if there is no kernel of
// that name or a GPU would refuse the launch.
extern "C" int flexring_host_launch(const char* kernel, unsigned grid_x, unsigned grid_y, unsigned block,
                                    const void* batch) {
    const flexring::Batch& parameters = *static_cast<const flexring::Batch*>(batch);
    if (grid_x == 0 || grid_y == 0 || grid_y > flexring::kTasks) return -1;
    if (block == 0 || block > flexring::kMaxThreads) return -1;
    for (const NamedKernel& named : kKernels) {
        if (std::strcmp(named.name, kernel) != 0) continue;
        gridDim = {grid_x, grid_y, 1};
        blockDim = {block, 1, 1};
        for (blockIdx.y = 0; blockIdx.y < grid_y; ++blockIdx.y) {
            for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x) {
                for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) named.kernel(parameters);
            }
        }
        return 0;
    }
    return -1;
}
