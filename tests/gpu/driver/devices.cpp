// Queries of the driver and of the GPUs. Only cuInit, which creates the world, changes anything.

#include <cstdio>
#include <cstring>

#include "world.h"

using namespace sim;

namespace {

Context* gpu(CUdevice device) {
    World& world = sim::world();
    if (device < 0 || static_cast<size_t>(device) >= world.contexts.size()) return nullptr;
    return world.contexts[static_cast<size_t>(device)].get();
}

int attribute_of(const Context& gpu, CUdevice_attribute attribute) {
    const Settings& s = settings();
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: return 65535;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 << 10;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return static_cast<int>(s.multiprocessors);
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
        case CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT: return s.kernel_timeout;
        case CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT: return s.major >= 9 ? 4 : 1;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 1 << 20;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 2;
        case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
        case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED: return 1;
        case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: return s.host_pointers;
        case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return gpu.number + 1;
        case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
        case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: return 0;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return s.major;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return s.minor;
        case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1:
        case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1:
        case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
            return s.memops && !s.without.count("cuStreamWaitValue32_v2") &&
                   !s.without.count("cuStreamWriteValue32_v2");
        case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED: return s.read_only_register;
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return s.pools && !s.without.count("cuMemAllocAsync");
        case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED: return s.dmabuf;
        case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: return s.coherent;
        case CU_DEVICE_ATTRIBUTE_NUMA_ID:
        case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: return -1;
        default: return 0;
    }
}

CUresult uuid_of(const char* name, CUuuid* uuid, CUdevice device) {
    return initialised(name, [&](Lock&) {
        if (!uuid) return CUDA_ERROR_INVALID_VALUE;
        const Context* found = gpu(device);
        if (!found) return CUDA_ERROR_INVALID_DEVICE;
        std::memcpy(uuid->bytes, "simulated GPU  \0", 16);
        uuid->bytes[15] = static_cast<char>(found->number);
        return CUDA_SUCCESS;
    });
}

}  // namespace

SIMCUDA_EXPORT CUresult cuInit(unsigned flags) {
    return always(__func__, [&](Lock&) {
        World& world = sim::world();
        if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
        if (settings().gpus.empty()) return CUDA_ERROR_NO_DEVICE;
        if (world.initialised) return CUDA_SUCCESS;
        world.memory = std::make_unique<Memory>();
        for (int number : settings().gpus) {
            auto context = std::make_unique<Context>();
            context->ordinal = static_cast<int>(world.contexts.size());
            context->number = number;
            context->handle = static_cast<CUcontext>(world.memory->handle());
            world.contexts.push_back(std::move(context));
        }
        world.initialised = true;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuDriverGetVersion(int* version) {
    return always(__func__, [&](Lock&) {
        if (!version) return CUDA_ERROR_INVALID_VALUE;
        *version = settings().driver_version;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuDeviceGetCount(int* count) {
    return initialised(__func__, [&](Lock&) {
        if (!count) return CUDA_ERROR_INVALID_VALUE;
        *count = static_cast<int>(world().contexts.size());
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    return initialised(__func__, [&](Lock&) {
        if (!device) return CUDA_ERROR_INVALID_VALUE;
        if (!gpu(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
        *device = ordinal;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
    return initialised(__func__, [&](Lock&) {
        if (!name || length <= 0) return CUDA_ERROR_INVALID_VALUE;
        if (!gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
        std::snprintf(name, static_cast<size_t>(length), "simulated GPU");
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) { return uuid_of(__func__, uuid, device); }
SIMCUDA_EXPORT CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) { return uuid_of(__func__, uuid, device); }

SIMCUDA_EXPORT CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
    return initialised(__func__, [&](Lock&) {
        if (!bytes) return CUDA_ERROR_INVALID_VALUE;
        if (!gpu(device)) return CUDA_ERROR_INVALID_DEVICE;
        *bytes = settings().memory;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    return initialised(__func__, [&](Lock&) {
        if (!value || attribute <= 0) return CUDA_ERROR_INVALID_VALUE;
        const Context* found = gpu(device);
        if (!found) return CUDA_ERROR_INVALID_DEVICE;
        *value = attribute_of(*found, attribute);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
    return initialised(__func__, [&](Lock&) {
        if (!id || length < 13) return CUDA_ERROR_INVALID_VALUE;
        const Context* found = gpu(device);
        if (!found) return CUDA_ERROR_INVALID_DEVICE;
        std::snprintf(id, static_cast<size_t>(length), "0000:%02X:00.0", static_cast<unsigned>(found->number + 1));
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice* device, const char* id) {
    return initialised(__func__, [&](Lock&) {
        unsigned domain = 0, bus = 0, slot = 0, function = 0;
        if (!device || !id) return CUDA_ERROR_INVALID_VALUE;
        if (std::sscanf(id, "%x:%x:%x.%x", &domain, &bus, &slot, &function) < 3) return CUDA_ERROR_INVALID_VALUE;
        for (const auto& context : world().contexts) {
            if (domain != 0 || slot != 0 || static_cast<int>(bus) != context->number + 1) continue;
            *device = context->ordinal;
            return CUDA_SUCCESS;
        }
        return CUDA_ERROR_INVALID_DEVICE;
    });
}

SIMCUDA_EXPORT CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
    return initialised(__func__, [&](Lock&) {
        if (!can) return CUDA_ERROR_INVALID_VALUE;
        if (!gpu(device) || !gpu(peer)) return CUDA_ERROR_INVALID_DEVICE;
        *can = device != peer && settings().peer;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuDeviceGetP2PAttribute(int* value, int attribute, CUdevice from, CUdevice to) {
    return initialised(__func__, [&](Lock&) {
        constexpr int access_supported = 2;
        if (!value || attribute < 1 || attribute > 4) return CUDA_ERROR_INVALID_VALUE;
        if (!gpu(from) || !gpu(to) || from == to) return CUDA_ERROR_INVALID_DEVICE;
        *value = attribute == access_supported && settings().peer;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
    return initialised(__func__, [&](Lock&) {
        if (!pool) return CUDA_ERROR_INVALID_VALUE;
        const Context* found = gpu(device);
        if (!found) return CUDA_ERROR_INVALID_DEVICE;
        if (!settings().pools) return CUDA_ERROR_NOT_SUPPORTED;
        // The only pool of a GPU needs no state, only a handle.
        *pool = reinterpret_cast<CUmemoryPool>(reinterpret_cast<char*>(found->handle) + 1);
        return CUDA_SUCCESS;
    });
}
