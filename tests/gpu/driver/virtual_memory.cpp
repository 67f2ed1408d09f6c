// Memory that a program maps by itself: allocations without an address (cuMemCreate), addresses without memory
// (cuMemAddressReserve), and mappings of the ones at the others.
//
// A handle is used again at once when its memory is freed, as an address may be: a program that compares handles must hold
// them. An exported descriptor is the file of the memory.

#include <algorithm>
#include <array>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "world.h"

using namespace sim;

namespace {

// Behind the memory in its file.
struct Label {
    std::array<char, 16> magic{'s', 'i', 'm', 'u', 'l', 'a', 't', 'e', 'd', ' ', 'm', 'e', 'm', 'o', 'r', 'y'};
    int gpu = 0;
    unsigned handle_types = 0;
};

PhysicalRef add(int descriptor, size_t bytes, const Label& label, Context* counted) {
    World& world = sim::world();
    CUmemGenericAllocationHandle handle = 0;
    if (world.free_handles.empty()) {
        handle = reinterpret_cast<CUmemGenericAllocationHandle>(world.memory->handle());
    } else {
        handle = world.free_handles.back();
        world.free_handles.pop_back();
    }
    const Physical physical{handle, descriptor, bytes, label.gpu, label.handle_types, counted};
    return world.physical[handle] = std::make_shared<Physical>(physical);
}

PhysicalRef physical_of(CUmemGenericAllocationHandle handle) {
    const auto found = world().physical.find(handle);
    return found == world().physical.end() ? nullptr : found->second;
}

Context* context_of(const CUmemLocation& location) {
    const bool known = location.type == CU_MEM_LOCATION_TYPE_DEVICE && location.id >= 0 &&
                       static_cast<size_t>(location.id) < world().contexts.size();
    return known ? world().contexts[static_cast<size_t>(location.id)].get() : nullptr;
}

// The mappings that lie in these addresses, in order; none if one is cut or, where `whole`, a place has no memory.
std::vector<RangeRef> mappings_in(CUdeviceptr start, size_t bytes, bool whole) {
    std::vector<RangeRef> found;
    const ReservationRef reservation = world().memory->reservation(start);
    if (!reservation || bytes > reservation->base + reservation->bytes - start) return {};
    for (CUdeviceptr at = start; at < start + bytes;) {
        const RangeRef range = world().memory->find(at);
        if (!range && whole) return {};
        if (range && (range->base != at || range->bytes > start + bytes - at)) return {};
        if (range) found.push_back(range);
        at += range ? range->bytes : kGranularity;
    }
    return found;
}

}  // namespace

SIMCUDA_EXPORT CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp* wanted, int) {
    return initialised(__func__, [&](Lock&) {
        if (!bytes || !wanted || !context_of(wanted->location)) return CUDA_ERROR_INVALID_VALUE;
        *bytes = kGranularity;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t bytes, const CUmemAllocationProp* wanted,
                                    unsigned long long flags) {
    return in_context(__func__, [&](Context& context, Lock& lock) {
        if (!out || !wanted || flags != 0 || bytes == 0 || bytes % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
        Context* there = context_of(wanted->location);
        if (!there || wanted->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
        if (wanted->requestedHandleTypes & ~unsigned{CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR}) return CUDA_ERROR_NOT_SUPPORTED;
        context.perhaps_drain(lock, "cuMemCreate");
        if (bytes > settings().memory || there->used > settings().memory - bytes) return CUDA_ERROR_OUT_OF_MEMORY;
        Label label;
        label.gpu = there->number;
        label.handle_types = wanted->requestedHandleTypes;
        const int descriptor = memfd_create("simulated GPU memory", MFD_CLOEXEC);
        if (descriptor < 0) return CUDA_ERROR_OUT_OF_MEMORY;
        // New memory is filled with NaNs.
        void* at = MAP_FAILED;
        if (pwrite(descriptor, &label, sizeof label, static_cast<off_t>(bytes)) == sizeof label) {
            at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
        }
        if (at == MAP_FAILED) {
            close(descriptor);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        std::memset(at, 0xff, bytes);
        munmap(at, bytes);
        there->used += bytes;
        *out = add(descriptor, bytes, label, there)->handle;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    return initialised(__func__, [&](Lock&) {
        const PhysicalRef physical = physical_of(handle);
        if (!physical) return CUDA_ERROR_INVALID_VALUE;
        if (--physical->references == 0) world().physical.erase(handle);
        perhaps_free(physical);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* out, void* at) {
    return initialised(__func__, [&](Lock&) {
        const RangeRef range = world().memory->find(reinterpret_cast<CUdeviceptr>(at));
        if (!out || !range || range->kind != Kind::Mapped) return CUDA_ERROR_INVALID_VALUE;
        ++range->physical->references;
        world().physical[range->physical->handle] = range->physical;
        *out = range->physical->handle;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* out, CUmemGenericAllocationHandle handle) {
    return initialised(__func__, [&](Lock&) {
        const PhysicalRef physical = physical_of(handle);
        if (!out || !physical) return CUDA_ERROR_INVALID_VALUE;
        *out = {};
        out->type = CU_MEM_ALLOCATION_TYPE_PINNED;
        out->requestedHandleTypes = physical->handle_types;
        out->location = {CU_MEM_LOCATION_TYPE_DEVICE, -1};
        for (const auto& context : world().contexts) {
            if (context->number == physical->gpu) out->location.id = context->ordinal;
        }
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, unsigned type,
                                                     unsigned long long flags) {
    return initialised(__func__, [&](Lock&) {
        const PhysicalRef physical = physical_of(handle);
        if (!out || !physical || flags != 0) return CUDA_ERROR_INVALID_VALUE;
        const bool requested = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && physical->handle_types & type;
        if (!requested) return CUDA_ERROR_INVALID_VALUE;
        const int descriptor = fcntl(physical->descriptor, F_DUPFD_CLOEXEC, 0);
        if (descriptor < 0) return CUDA_ERROR_OPERATING_SYSTEM;
        std::memcpy(out, &descriptor, sizeof descriptor);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* out, void* shared, unsigned type) {
    return in_context(__func__, [&](Context& context, Lock& lock) {
        if (!out || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
        context.perhaps_drain(lock, "cuMemImportFromShareableHandle");
        const int descriptor = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(shared)), F_DUPFD_CLOEXEC, 0);
        struct stat facts {};
        Label label;
        const Label expected;
        if (descriptor < 0 || fstat(descriptor, &facts) != 0 || facts.st_size < static_cast<off_t>(sizeof label) ||
            pread(descriptor, &label, sizeof label, facts.st_size - static_cast<off_t>(sizeof label)) != sizeof label ||
            label.magic != expected.magic) {
            if (descriptor >= 0) close(descriptor);
            return CUDA_ERROR_INVALID_VALUE;
        }
        *out = add(descriptor, static_cast<size_t>(facts.st_size) - sizeof label, label, nullptr)->handle;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemAddressReserve(CUdeviceptr* out, size_t bytes, size_t alignment, CUdeviceptr,
                                            unsigned long long flags) {
    return in_context(__func__, [&](Context&, Lock&) {
        const bool aligned = alignment <= kGranularity && (alignment & (alignment - 1)) == 0;
        if (!out || bytes == 0 || bytes % kGranularity != 0 || !aligned || flags != 0) return CUDA_ERROR_INVALID_VALUE;
        const ReservationRef reservation = world().memory->reserve_addresses(bytes);
        if (!reservation) return CUDA_ERROR_OUT_OF_MEMORY;
        *out = reservation->base;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) {
    return in_context(__func__, [&](Context&, Lock&) {
        const ReservationRef reservation = world().memory->reservation(start);
        if (!reservation || reservation->base != start || reservation->bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
        if (world().memory->touches(start, bytes)) return CUDA_ERROR_INVALID_VALUE;
        world().memory->release(reservation);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                                 unsigned long long flags) {
    return in_context(__func__, [&](Context& context, Lock& lock) {
        const PhysicalRef physical = physical_of(handle);
        const ReservationRef reservation = world().memory->reservation(start);
        if (!physical || !reservation || offset != 0 || flags != 0 || start % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
        if (bytes == 0 || bytes % kGranularity != 0 || bytes > physical->bytes) return CUDA_ERROR_INVALID_VALUE;
        const bool fits = bytes <= reservation->base + reservation->bytes - start;
        if (!fits || world().memory->touches(start, bytes)) return CUDA_ERROR_INVALID_VALUE;
        context.perhaps_drain(lock, "cuMemMap");
        return world().memory->map(reservation, start, bytes, physical, &context) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    });
}

SIMCUDA_EXPORT CUresult cuMemSetAccess(CUdeviceptr start, size_t bytes, const CUmemAccessDesc* accesses, size_t count) {
    return in_context(__func__, [&](Context& context, Lock& lock) {
        const std::vector<RangeRef> ranges = mappings_in(start, bytes, true);
        if (ranges.empty() || !accesses || count == 0) return CUDA_ERROR_INVALID_VALUE;
        context.perhaps_drain(lock, "cuMemSetAccess");
        for (size_t i = 0; i < count; ++i) {
            const Context* there = context_of(accesses[i].location);
            if (!there || accesses[i].flags > CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return CUDA_ERROR_INVALID_VALUE;
            for (const RangeRef& range : ranges) {
                if (range->physical->gpu != there->number && !settings().peer) return CUDA_ERROR_INVALID_DEVICE;
                const uint64_t bit = uint64_t{1} << there->ordinal;
                const bool all = accesses[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
                range->accessible = all ? range->accessible | bit : range->accessible & ~bit;
            }
        }
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) {
    return in_context(__func__, [&](Context& context, Lock& lock) {
        if (mappings_in(start, bytes, false).empty()) return CUDA_ERROR_INVALID_VALUE;
        context.perhaps_drain(lock, "cuMemUnmap");
        for (const RangeRef& range : mappings_in(start, bytes, false)) {
            // This list and the table have it.
            if (range.use_count() > 2) die("cuMemUnmap", hexadecimal(range->base) + " is accessed by work that runs");
            world().memory->forget(range);
        }
        return CUDA_SUCCESS;
    });
}
