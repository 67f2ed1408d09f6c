// Modules, functions and launches: flexring's kernels, from the same source compiled for the CPU.
//
// Owns what a launch may look like. Its parameters are copied when it is launched, as a GPU takes them by value.

#include <algorithm>

#include "kernel_runs.h"
#include "world.h"

using namespace sim;

namespace {

CUresult load(const char* name, CUmodule* out, const void* image) {
    return in_context(name, [&](Context& context, Lock& lock) {
        if (!out) return CUDA_ERROR_INVALID_VALUE;
        if (!image) return CUDA_ERROR_INVALID_IMAGE;
        context.perhaps_drain(lock, name);
        const auto handle = static_cast<CUmodule>(world().memory->handle());
        world().modules[handle] = {&context};
        *out = handle;
        return CUDA_SUCCESS;
    });
}

template <class Body>
CUresult about(const char* name, CUfunction function, Body body) {
    return in_context(name, [&](Context& context, Lock& lock) -> CUresult {
        auto found = world().functions.find(function);
        if (found == world().functions.end() || found->second.context != &context) return CUDA_ERROR_INVALID_HANDLE;
        return body(found->second, lock);
    });
}

// Checks and enqueues a launch. `shape` is a grid and a block.
CUresult launch_in(Stream& stream, Lock& lock, const char* name, CUfunction function, const std::array<unsigned, 6>& shape,
                   unsigned shared, void** parameters, void** extra) {
    auto& functions = world().functions;
    auto found = functions.find(function);
    if (found == functions.end() || found->second.context != stream.context) return CUDA_ERROR_INVALID_HANDLE;
    const auto [grid, grid_y, grid_z, block, block_y, block_z] = shape;
    if (grid == 0 || grid > 2147483647u || shared > 48u << 10) return CUDA_ERROR_INVALID_VALUE;
    if (block == 0 || block > flexring::largest_block) return CUDA_ERROR_INVALID_VALUE;
    // flexring's kernels use only x.
    if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1) return CUDA_ERROR_INVALID_VALUE;
    if (extra) return CUDA_ERROR_NOT_SUPPORTED;
    if (!parameters || !parameters[0]) return CUDA_ERROR_INVALID_VALUE;
    const KernelLaunch launch = read_launch(name, found->second.name, grid, block, parameters[0]);
    found->second.load(lock, name);
    auto run = [launch](Stream& stream) { return run_kernel(stream, launch); };
    if (stream.sequence) record(stream, name, run, function);
    else submit(stream, name, run);
    return CUDA_SUCCESS;
}

// Whether a GPU accepts these attributes of a launch: its priority, and its memory synchronisation domain from sm_90 on.
bool accepts(const CUlaunchAttribute& attribute) {
    switch (attribute.id) {
        case CU_LAUNCH_ATTRIBUTE_PRIORITY: return true;
        case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
            return settings().major >= 9 && attribute.value.domain >= 0 && attribute.value.domain <= 1;
        default: return false;
    }
}

}  // namespace

SIMCUDA_EXPORT CUresult cuModuleLoadData(CUmodule* out, const void* image) { return load(__func__, out, image); }

SIMCUDA_EXPORT CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned options, int* names,
                                           void** values) {
    if (options && (!names || !values)) {
        return in_context(__func__, [](Context&, Lock&) { return CUDA_ERROR_INVALID_VALUE; });
    }
    return load(__func__, out, image);
}

SIMCUDA_EXPORT CUresult cuModuleUnload(CUmodule module) {
    return in_context(__func__, [&](Context& context, Lock&) {
        auto found = world().modules.find(module);
        if (found == world().modules.end() || found->second.context != &context) return CUDA_ERROR_INVALID_HANDLE;
        world().modules.erase(found);
        auto& functions = world().functions;
        for (auto entry = functions.begin(); entry != functions.end();) {
            entry = entry->second.module == module ? functions.erase(entry) : std::next(entry);
        }
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuModuleGetFunction(CUfunction* out, CUmodule module, const char* name) {
    return in_context(__func__, [&](Context& context, Lock&) {
        if (!out || !name) return CUDA_ERROR_INVALID_VALUE;
        auto found = world().modules.find(module);
        if (found == world().modules.end() || found->second.context != &context) return CUDA_ERROR_INVALID_HANDLE;
        if (!is_kernel(name)) return CUDA_ERROR_NOT_FOUND;
        const auto handle = static_cast<CUfunction>(world().memory->handle());
        world().functions[handle] = {&context, module, name};
        *out = handle;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuFuncSetAttribute(CUfunction function, int attribute, int) {
    return about(__func__, function, [&](const Function&, Lock&) {
        // Only the size of dynamic shared memory and the carve-out can be set.
        return attribute == 8 || attribute == 9 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    });
}

SIMCUDA_EXPORT CUresult cuFuncGetAttribute(int* value, int attribute, CUfunction function) {
    return about(__func__, function, [&](const Function&, Lock&) {
        if (!value || attribute < 0 || attribute > 9) return CUDA_ERROR_INVALID_VALUE;
        constexpr int max_threads = 0, registers = 4;
        *value = attribute == max_threads ? static_cast<int>(flexring::largest_block) : attribute == registers ? 32 : 0;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int block,
                                                                    size_t) {
    return about(__func__, function, [&](const Function&, Lock&) {
        if (!blocks || block <= 0) return CUDA_ERROR_INVALID_VALUE;
        *blocks = static_cast<int>(ctas_per_multiprocessor(static_cast<unsigned>(block)));
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuOccupancyMaxPotentialBlockSize(int* grid, int* block, CUfunction function, CUoccupancyB2DSize,
                                                         size_t, int limit) {
    return about(__func__, function, [&](const Function&, Lock&) {
        if (!grid || !block || limit < 0) return CUDA_ERROR_INVALID_VALUE;
        *block = limit ? std::min(limit, static_cast<int>(flexring::largest_block)) : static_cast<int>(flexring::largest_block);
        *grid = static_cast<int>(settings().multiprocessors * ctas_per_multiprocessor(static_cast<unsigned>(*block)));
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                       CUstream handle, void** parameters, void** extra) {
    return in_stream(
        __func__, handle,
        [&](Stream& stream, Lock& lock) {
            return launch_in(stream, lock, "cuLaunchKernel", function,
                             {grid_x, grid_y, grid_z, block_x, block_y, block_z}, shared, parameters, extra);
        },
        InCapture::Recorded);
}

SIMCUDA_EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
    if (!config) return in_context(__func__, [](Context&, Lock&) { return CUDA_ERROR_INVALID_VALUE; });
    return in_stream(
        __func__, config->stream,
        [&](Stream& stream, Lock& lock) {
            if (config->count && !config->attributes) return CUDA_ERROR_INVALID_VALUE;
            for (unsigned nth = 0; nth < config->count; ++nth) {
                if (!accepts(config->attributes[nth])) return CUDA_ERROR_INVALID_VALUE;
            }
            const std::array<unsigned, 6> shape = {config->grid[0],  config->grid[1],  config->grid[2],
                                                   config->block[0], config->block[1], config->block[2]};
            return launch_in(stream, lock, "cuLaunchKernelEx", function, shape, config->shared, parameters,
                             extra);
        },
        InCapture::Recorded);
}
