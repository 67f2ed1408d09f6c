// Modules, functions and launches: flexring's kernels, from the same source compiled for the CPU.
//
// Owns what a kernel may access. A batch is copied when it is launched, as a GPU takes parameters by value. Its addresses
// are looked up when the stream reaches it. Its tasks run in any order, with pauses between them. A race between blocks of
// one launch ends the process.

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "../../../kernels/batch.h"
#include "world.h"

extern "C" int flexring_host_launch(const char* kernel, unsigned grid_x, unsigned grid_y, unsigned block,
                                    const void* batch);

using namespace sim;

namespace {

// Bytes of an element of a kernel; 0 if there is no such kernel.
size_t element_of(const std::string& name) {
    // Never destroyed, because threads may launch while the process exits.
    static const auto& sizes = *new std::map<std::string, size_t>{
        {"int8", 1},  {"uint8", 1}, {"int32", 4},  {"uint32", 4},   {"int64", 8},       {"uint64", 8},
        {"half", 2},  {"float", 4}, {"double", 8}, {"bfloat16", 2}, {"float8e4m3", 1}, {"float8e5m2", 1},
    };
    if (name == "flexring_copy") return 1;
    const size_t last = name.rfind('_');
    const auto size = last == std::string::npos ? sizes.end() : sizes.find(name.substr(last + 1));
    return size == sizes.end() ? 0 : size->second;
}

bool exists(const std::string& name) {
    // A kernel returns at once for a task without elements.
    flexring::Batch nothing{};
    return element_of(name) != 0 && flexring_host_launch(name.c_str(), 1, 1, 1, &nothing) == 0;
}

struct Piece {
    CUdeviceptr at;
    size_t bytes;
    bool overlaps(const Piece& other) const { return at < other.at + other.bytes && other.at < at + bytes; }
};

CUdeviceptr address(const void* at) { return reinterpret_cast<CUdeviceptr>(at); }

// Blocks run concurrently in any order, so a task must not write what another one reads or writes, nor what it reads itself
// except for exactly the same elements.
void check_for_races(const char* kernel, const flexring::Batch& batch, unsigned tasks, size_t element) {
    for (unsigned writer = 0; writer < tasks; ++writer) {
        const flexring::Task& task = batch.tasks[writer];
        const Piece into{address(task.into), task.count * element};
        for (unsigned reader = 0; into.bytes && reader < tasks; ++reader) {
            const flexring::Task& other = batch.tasks[reader];
            const Piece theirs{address(other.into), other.count * element};
            if (!theirs.bytes) continue;
            if (reader != writer && into.overlaps(theirs)) {
                die(kernel, "two tasks of a launch write to the same memory");
            }
            for (unsigned i = other.first; i < other.first + other.operands; ++i) {
                const Piece operand{address(batch.operands[i].at), theirs.bytes};
                const bool in_place = reader == writer && operand.at == into.at;
                if (!in_place && into.overlaps(operand)) {
                    die(kernel, "a task writes to what the same launch reads elsewhere");
                }
            }
        }
    }
}

void check_shape(const char* kernel, const flexring::Batch& batch, unsigned tasks) {
    if (tasks > flexring::kTasks) die(kernel, "the grid has more tasks than a batch");
    for (unsigned i = 0; i < tasks; ++i) {
        const flexring::Task& task = batch.tasks[i];
        if (task.count == 0) continue;
        if (task.operands == 0) die(kernel, "a task has no operands");
        if (task.first > flexring::kOperands || task.operands > flexring::kOperands - task.first) {
            die(kernel, "a task has operands beyond the end of the batch");
        }
    }
}

struct Launch {
    std::string kernel;
    size_t element;
    unsigned grid_x, grid_y, block;
    flexring::Batch batch;

    CUresult reach(const Context& context, CUdeviceptr at, size_t bytes, Access access,
                   std::vector<View>& views) const {
        if (at % element != 0) {
            say(kernel + ": " + hexadecimal(at) + " is not aligned to its elements");
            return CUDA_ERROR_MISALIGNED_ADDRESS;
        }
        views.emplace_back();
        return world().memory->reach(context, kernel.c_str(), at, bytes, access, By::Kernel, views.back());
    }

    // Replaces the GPU's addresses by those at which the simulation accesses the bytes.
    CUresult translate(const Context& context, flexring::Batch& there, std::vector<View>& views) const {
        Lock lock(world().mutex);
        for (unsigned i = 0; i < grid_y; ++i) {
            flexring::Task& task = there.tasks[i];
            const size_t bytes = task.count * element;
            if (bytes == 0) continue;
            CUresult code = reach(context, address(task.into), bytes, Access::Write, views);
            if (code != CUDA_SUCCESS) return code;
            task.into = views.back().at;
            for (unsigned j = task.first; j < task.first + task.operands; ++j) {
                // Tasks may share an operand, so the launched addresses are looked up, not the replaced ones.
                code = reach(context, address(batch.operands[j].at), bytes, Access::Read, views);
                if (code != CUDA_SUCCESS) return code;
                there.operands[j].at = views.back().at;
            }
        }
        return CUDA_SUCCESS;
    }

    CUresult run(Stream& stream) const {
        flexring::Batch there = batch;
        std::vector<View> views;
        if (CUresult code = translate(*stream.context, there, views); code != CUDA_SUCCESS) return code;
        std::array<unsigned, flexring::kTasks> order;
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.begin() + grid_y, stream.random);
        for (unsigned i = 0; i < grid_y; ++i) {
            if (i) stream.dawdle();
            std::swap(there.tasks[0], there.tasks[order[i]]);
            if (flexring_host_launch(kernel.c_str(), grid_x, 1, block, &there) != 0) return CUDA_ERROR_LAUNCH_FAILED;
            std::swap(there.tasks[0], there.tasks[order[i]]);
        }
        Lock lock(world().mutex);
        for (const View& view : views) {
            if (view.range->gone) die(kernel.c_str(), "memory was freed or unregistered while the kernel used it");
        }
        return CUDA_SUCCESS;
    }
};

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
        if (!exists(name)) return CUDA_ERROR_NOT_FOUND;
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
        *value = attribute == max_threads ? flexring::kMaxThreads : attribute == registers ? 32 : 0;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int block,
                                                                    size_t) {
    return about(__func__, function, [&](const Function&, Lock&) {
        if (!blocks || block <= 0) return CUDA_ERROR_INVALID_VALUE;
        *blocks = block > flexring::kMaxThreads ? 0 : 2048 / block;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuOccupancyMaxPotentialBlockSize(int* grid, int* block, CUfunction function, CUoccupancyB2DSize,
                                                         size_t, int limit) {
    return about(__func__, function, [&](const Function&, Lock&) {
        if (!grid || !block || limit < 0) return CUDA_ERROR_INVALID_VALUE;
        *block = limit ? std::min(limit, flexring::kMaxThreads) : flexring::kMaxThreads;
        *grid = 2 * (2048 / *block);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                       CUstream handle, void** parameters, void** extra) {
    return in_stream(__func__, handle, [&](Stream& stream, Lock& lock) {
        auto& functions = world().functions;
        auto found = functions.find(function);
        if (found == functions.end() || found->second.context != stream.context) return CUDA_ERROR_INVALID_HANDLE;
        constexpr unsigned most = flexring::kMaxThreads;
        if (grid_x == 0 || grid_x > 2147483647u || grid_y == 0 || grid_y > 65535u) return CUDA_ERROR_INVALID_VALUE;
        if (block_x == 0 || block_x > most || shared > 48u << 10) return CUDA_ERROR_INVALID_VALUE;
        // flexring's kernels use neither z nor a block's y.
        if (grid_z != 1 || block_y != 1 || block_z != 1) return CUDA_ERROR_INVALID_VALUE;
        if (extra) return CUDA_ERROR_NOT_SUPPORTED;
        if (!parameters || !parameters[0]) return CUDA_ERROR_INVALID_VALUE;
        Launch launch{found->second.name, element_of(found->second.name), grid_x, grid_y, block_x, {}};
        std::memcpy(&launch.batch, parameters[0], sizeof launch.batch);
        check_shape(launch.kernel.c_str(), launch.batch, grid_y);
        check_for_races(launch.kernel.c_str(), launch.batch, grid_y, launch.element);
        found->second.load(lock, "cuLaunchKernel");
        submit(stream, "cuLaunchKernel", [launch](Stream& stream) { return launch.run(stream); });
        return CUDA_SUCCESS;
    });
}
