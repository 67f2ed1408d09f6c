// Functions that query the attributes of an address. They need no current context, but the lock of the memory's.

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "world.h"

using namespace sim;

namespace {

size_t size_of(CUpointer_attribute attribute) {
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: return sizeof(int);
        // Booleans have four bytes, because programs read them into an `unsigned int`.
        case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        case CU_POINTER_ATTRIBUTE_MAPPED:
        case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: return sizeof(unsigned);
        case CU_POINTER_ATTRIBUTE_CONTEXT:
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: return sizeof(uint64_t);
        // The tokens of GPUDirect RDMA are not simulated.
        case CU_POINTER_ATTRIBUTE_P2P_TOKENS: return 0;
    }
    return 0;
}

// One attribute of a known address; fails if the address does not have it.
CUresult value_of(const Range& range, CUdeviceptr address, CUpointer_attribute attribute, uint64_t& value) {
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_CONTEXT:
            // Pool memory and mappings belong to no context.
            value = range.kind == Kind::Pool || range.kind == Kind::Mapped ? 0 : reinterpret_cast<uint64_t>(range.context->handle);
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            value = range.on_host() ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
            value = range.device + range.offset(address);
            return range.mapped_to_device() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
            value = range.base + range.offset(address);
            return range.on_device() ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: value = range.sync_memops; return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_BUFFER_ID:
            // CUDA does not say whether another mapping at the same place gets another one.
            value = range.reservation ? range.reservation->id : range.id;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED: value = range.kind == Kind::Managed; return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            value = static_cast<uint64_t>(range.context->ordinal);
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: value = range.kind == Kind::Device; return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
            value = range.reservation ? range.reservation->base : range.base;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
            value = range.reservation ? range.reservation->bytes : range.bytes;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_MAPPED: value = 1; return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
            // Reading is 1, reading and writing 3.
            value = range.kind == Kind::HostRegistered && range.flags & CU_MEMHOSTREGISTER_READ_ONLY ? 1 : 3;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
            value = range.kind == Kind::Pool ? reinterpret_cast<uint64_t>(range.context->handle) + 1 : 0;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
            value = range.physical ? range.physical->handle_types : 0;
            return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: value = 0; return CUDA_SUCCESS;
        case CU_POINTER_ATTRIBUTE_P2P_TOKENS: break;
    }
    return CUDA_ERROR_NOT_SUPPORTED;
}

// The range of an address, with its context's lock held; null if there is none.
RangeRef known(const char* name, CUdeviceptr address, Lock& lock, Holds& holds) {
    const RangeRef range = world().memory->find(address);
    if (!range) return nullptr;
    holds.take(*range->context, lock, name);
    return range->gone ? nullptr : range;
}

}  // namespace

// Needs no current context: programs query pointers before they know their context.
SIMCUDA_EXPORT CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr address) {
    return initialised(__func__, [&](Lock& lock) {
        Holds holds;
        if (!out || size_of(attribute) == 0) return CUDA_ERROR_INVALID_VALUE;
        const RangeRef range = known("cuPointerGetAttribute", address, lock, holds);
        if (!range) return CUDA_ERROR_INVALID_VALUE;
        uint64_t value = 0;
        const CUresult code = value_of(*range, address, attribute, value);
        if (code == CUDA_SUCCESS) std::memcpy(out, &value, size_of(attribute));
        return code;
    });
}

// Where the host finds memory of a GPU, for adapters in memory (tests/verbs), which access it as RDMA devices do. It is no
// function of CUDA's, so no rule for those applies.
SIMCUDA_EXPORT CUresult cuSimulatedHostAddress(void** out, CUdeviceptr address) {
    const Lock lock(world().mutex);
    if (!world().memory) return CUDA_ERROR_NOT_INITIALIZED;
    const RangeRef range = world().memory->find(address);
    if (!range || range->gone || range->on_host()) return CUDA_ERROR_INVALID_VALUE;
    *out = range->alias + (address - range->base);
    return CUDA_SUCCESS;
}

SIMCUDA_EXPORT CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** out,
                                               CUdeviceptr address) {
    return initialised(__func__, [&](Lock& lock) {
        Holds holds;
        if (count == 0 || !attributes || !out) return CUDA_ERROR_INVALID_VALUE;
        const RangeRef range = known("cuPointerGetAttributes", address, lock, holds);
        for (unsigned i = 0; i < count; ++i) {
            const size_t size = size_of(attributes[i]);
            if (!out[i] || size == 0) return CUDA_ERROR_INVALID_VALUE;
            uint64_t value = 0;
            if (range && value_of(*range, address, attributes[i], value) != CUDA_SUCCESS) value = 0;
            std::memcpy(out[i], &value, size);
        }
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuPointerSetAttribute(const void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    return initialised(__func__, [&](Lock& lock) {
        Holds holds;
        const RangeRef range = known("cuPointerSetAttribute", address, lock, holds);
        if (!value || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS || !range) return CUDA_ERROR_INVALID_VALUE;
        if (range->kind == Kind::Pool) return CUDA_ERROR_NOT_SUPPORTED;
        unsigned wanted = 0;
        std::memcpy(&wanted, value, sizeof wanted);
        range->sync_memops = wanted != 0;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
    return in_context(__func__, [&](Context&, Lock&) {
        const RangeRef range = world().memory->find(address);
        if (!range || range->on_host()) return CUDA_ERROR_NOT_FOUND;
        if (base) *base = range->base;
        if (bytes) *bytes = range->bytes;
        return CUDA_SUCCESS;
    });
}

// The descriptor is a file that says where the host finds the memory, how long it is, and whether devices access it over PCI
// Express.
SIMCUDA_EXPORT CUresult cuMemGetHandleForAddressRange(void* out, CUdeviceptr address, size_t bytes, int type,
                                                      unsigned long long flags) {
    return in_context(__func__, [&](Context&, Lock&) {
        constexpr int kDmaBuf = 1;
        if (!settings().dmabuf || type != kDmaBuf) return CUDA_ERROR_NOT_SUPPORTED;
        // Memory may begin within the first page, as it may here at any multiple of 512.
        const RangeRef begun = world().memory->find(address);
        const RangeRef range = begun ? begun : world().memory->find(address + pages(1) - 1);
        const bool whole = address % pages(1) == 0 && bytes % pages(1) == 0;
        if (!out || !whole || flags > 1 || !range || range->on_host() || address + bytes > range->base + range->bytes + pages(1)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        const std::array<uint64_t, 3> found{reinterpret_cast<uint64_t>(range->alias) + (address - range->base), bytes, flags};
        const int descriptor = memfd_create("simulated DMA-BUF", MFD_CLOEXEC);
        if (descriptor < 0 || write(descriptor, found.data(), sizeof found) != sizeof found) return CUDA_ERROR_OPERATING_SYSTEM;
        std::memcpy(out, &descriptor, sizeof descriptor);
        return CUDA_SUCCESS;
    });
}
