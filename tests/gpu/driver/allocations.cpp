// Functions that allocate and free GPU memory (also stream-ordered), managed memory and pinned host memory, and that register
// the program's own memory.

#include <cstring>

#include "ipc.h"
#include "world.h"

using namespace sim;

namespace {

CUresult allocate(const char* name, Kind kind, size_t bytes, unsigned flags, CUdeviceptr* out) {
    return in_context(name, [&](Context& context, Lock& lock) {
        if (!out || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
        context.perhaps_drain(lock, name);
        const RangeRef range = world().memory->allocate(kind, bytes, &context, name);
        if (!range) return CUDA_ERROR_OUT_OF_MEMORY;
        range->flags = flags;
        *out = range->base;
        return CUDA_SUCCESS;
    });
}

CUresult allocate_host(const char* name, size_t bytes, unsigned flags, void** out) {
    if (flags & ~7u || !out) return in_context(name, [](Context&, Lock&) { return CUDA_ERROR_INVALID_VALUE; });
    CUdeviceptr address = 0;
    const CUresult code = allocate(name, Kind::HostAllocated, bytes, flags, &address);
    if (code == CUDA_SUCCESS) *out = reinterpret_cast<void*>(address);
    return code;
}

// The range that starts at an address.
RangeRef beginning_at(CUdeviceptr address) {
    RangeRef range = world().memory->find(address);
    return range && range->base == address ? range : nullptr;
}

}  // namespace

SIMCUDA_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* out, size_t bytes) {
    return allocate(__func__, Kind::Device, bytes, 0, out);
}

SIMCUDA_EXPORT CUresult cuMemAllocManaged(CUdeviceptr* out, size_t bytes, unsigned flags) {
    if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST) {
        return in_context(__func__, [](Context&, Lock&) { return CUDA_ERROR_INVALID_VALUE; });
    }
    return allocate(__func__, Kind::Managed, bytes, flags, out);
}

SIMCUDA_EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
    return in_context(__func__, [&](Context&, Lock& lock) {
        if (address == 0) return CUDA_SUCCESS;
        RangeRef range = beginning_at(address);
        const bool freed_here =
            range && !range->on_host() && range->kind != Kind::Imported && range->kind != Kind::Mapped;
        if (!freed_here || range->freeing) return CUDA_ERROR_INVALID_VALUE;
        // Marked before the wait, so that only one of two threads frees it.
        range->freeing = true;
        Context& owner = *range->context;
        owner.drain(lock, "cuMemFree_v2");
        if (range->gone) return owner.error;
        check_not_open(*range, "cuMemFree_v2");
        world().memory->forget(range);
        return owner.error;
    });
}

SIMCUDA_EXPORT CUresult cuMemAllocAsync(CUdeviceptr* out, size_t bytes, CUstream handle) {
    return in_stream(__func__, handle, [&](Stream& stream, Lock&) {
        if (!out || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
        if (!settings().pools) return CUDA_ERROR_NOT_SUPPORTED;
        const RangeRef range = world().memory->allocate(Kind::Pool, bytes, stream.context, "cuMemAllocAsync");
        if (!range) return CUDA_ERROR_OUT_OF_MEMORY;
        range->begun = false;
        submit(stream, "cuMemAllocAsync", [range](Stream&) {
            Lock lock(world().mutex);
            range->begun = true;
            return CUDA_SUCCESS;
        });
        *out = range->base;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
    return in_stream(__func__, handle, [&](Stream& stream, Lock&) {
        RangeRef range = beginning_at(address);
        const bool ours = range && (range->kind == Kind::Pool || range->kind == Kind::Device);
        if (!ours || range->freeing) return CUDA_ERROR_INVALID_VALUE;
        range->freeing = true;
        submit(stream, "cuMemFreeAsync", [range](Stream&) {
            Lock lock(world().mutex);
            check_not_open(*range, "cuMemFreeAsync");
            if (!range->gone) world().memory->forget(range);
            return CUDA_SUCCESS;
        });
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemHostAlloc(void** out, size_t bytes, unsigned flags) {
    return allocate_host(__func__, bytes, flags, out);
}

SIMCUDA_EXPORT CUresult cuMemAllocHost_v2(void** out, size_t bytes) { return allocate_host(__func__, bytes, 0, out); }

SIMCUDA_EXPORT CUresult cuMemFreeHost(void* at) {
    return in_context(__func__, [&](Context& context, Lock& lock) {
        RangeRef range = beginning_at(reinterpret_cast<CUdeviceptr>(at));
        if (!range || range->kind != Kind::HostAllocated) return CUDA_ERROR_INVALID_VALUE;
        context.perhaps_drain(lock, "cuMemFreeHost");
        if (range->gone) return CUDA_ERROR_INVALID_VALUE;
        world().memory->forget(range);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemHostRegister_v2(void* at, size_t bytes, unsigned flags) {
    return in_context(__func__, [&](Context& context, Lock& lock) {
        const auto address = reinterpret_cast<CUdeviceptr>(at);
        Memory& memory = *world().memory;
        if (!at || bytes == 0 || flags & ~15u || address + bytes < address) return CUDA_ERROR_INVALID_VALUE;
        if (memory.is_device_space(address)) return CUDA_ERROR_INVALID_VALUE;
        const bool read_only = flags & CU_MEMHOSTREGISTER_READ_ONLY;
        if (read_only && !settings().read_only_register) return CUDA_ERROR_NOT_SUPPORTED;
        if (memory.touches(address, bytes)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
        const Mapped mapped = mapping_of(address, bytes);
        if (mapped == Mapped::No || (mapped == Mapped::ReadOnly && !read_only)) return CUDA_ERROR_INVALID_VALUE;
        context.perhaps_drain(lock, "cuMemHostRegister_v2");
        // Another thread may have registered it during the wait. The lock of the context excludes that, except for another
        // context's.
        if (memory.touches(address, bytes)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
        const RangeRef range = memory.adopt_host(static_cast<char*>(at), bytes, &context, "cuMemHostRegister_v2");
        if (!range) return CUDA_ERROR_OUT_OF_MEMORY;
        range->flags = flags;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemHostUnregister(void* at) {
    return in_context(__func__, [&](Context& context, Lock& lock) {
        RangeRef range = beginning_at(reinterpret_cast<CUdeviceptr>(at));
        if (!range || range->kind != Kind::HostRegistered) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
        context.perhaps_drain(lock, "cuMemHostUnregister");
        if (range->gone) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
        world().memory->forget(range);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* out, void* at, unsigned flags) {
    return in_context(__func__, [&](Context&, Lock&) {
        const auto address = reinterpret_cast<CUdeviceptr>(at);
        const RangeRef range = world().memory->find(address);
        if (!out || flags != 0 || !range || !range->on_host()) return CUDA_ERROR_INVALID_VALUE;
        if (!range->mapped_to_device()) return CUDA_ERROR_INVALID_VALUE;
        *out = settings().host_pointers ? address : range->device + range->offset(address);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemHostGetFlags(unsigned* flags, void* at) {
    return in_context(__func__, [&](Context&, Lock&) {
        const RangeRef range = world().memory->find(reinterpret_cast<CUdeviceptr>(at));
        if (!flags || !range || range->kind != Kind::HostAllocated) return CUDA_ERROR_INVALID_VALUE;
        // With unified addressing all registered memory is mapped.
        *flags = range->flags | CU_MEMHOSTREGISTER_DEVICEMAP;
        return CUDA_SUCCESS;
    });
}

// Not of CUDA: the bytes of this process's own memory that are page-locked. Memory of other processes is mapped for reading only.
SIMCUDA_EXPORT CUresult cuSimulatedPinned(size_t* bytes) {
    return in_context(__func__, [&](Context& context, Lock&) {
        *bytes = 0;
        for (const RangeRef& range : world().memory->of(&context)) {
            if (range->on_host() && mapping_of(range->base, range->bytes) == Mapped::Writable) *bytes += range->bytes;
        }
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
    return in_context(__func__, [&](Context& context, Lock&) {
        if (!free || !total) return CUDA_ERROR_INVALID_VALUE;
        *total = settings().memory;
        *free = settings().memory - context.used;
        return CUDA_SUCCESS;
    });
}
