// Functions that copy and fill memory, synchronously and in streams.
//
// Owns the time of return. CUDA returns early in more cases than programs expect. This driver returns as early as the
// documentation allows, and moves bytes in pieces with pauses between them.

#include <algorithm>
#include <cstring>

#include "world.h"

using namespace sim;

namespace {

enum class Place { Device, Managed, Pinned, Pageable, Wrong };
enum class Side { Any, Device, Host };
enum class When { Now, InStream };

Place place_of(const Context& context, CUdeviceptr at, size_t bytes) {
    const Memory& memory = *world().memory;
    const RangeRef range = memory.find(at);
    if (!range) return memory.is_device_space(at) || at == 0 ? Place::Wrong : Place::Pageable;
    if (!memory.has_all(range, at, bytes)) {
        // A host buffer may extend beyond the registered range; then it is not fully pinned.
        return range->kind == Kind::HostRegistered ? Place::Pageable : Place::Wrong;
    }
    if (range->kind == Kind::Managed) return Place::Managed;
    // Memory that another context registered without PORTABLE is pinned for that context only.
    const bool shared = range->context == &context || range->flags & CU_MEMHOSTREGISTER_PORTABLE;
    if (range->kind == Kind::HostRegistered && !shared) return Place::Pageable;
    return range->on_host() ? Place::Pinned : Place::Device;
}

bool fits(Place place, Side side) {
    if (place == Place::Wrong) return false;
    // A pinned buffer has a device address too, so it is valid where GPU memory is expected.
    if (side == Side::Device) return place != Place::Pageable;
    return side == Side::Any || place != Place::Device;
}

bool synchronous(CUdeviceptr at) {
    const RangeRef range = world().memory->find(at);
    return range && range->sync_memops;
}

void move(Stream& stream, char* to, const char* from, size_t bytes) {
    const size_t piece = std::max<size_t>(bytes / 3 + 1, 64);
    for (size_t done = 0; done < bytes; done += piece) {
        if (done) stream.dawdle();
        std::memmove(to + done, from + done, std::min(piece, bytes - done));
    }
}

void check_still_there(const View& view, const char* name) {
    Lock lock(world().mutex);
    if (view.gone()) die(name, "memory was freed or unregistered while the copy used it");
}

// The bytes at one end of a copy. Pageable memory is unknown to the driver.
CUresult reach_end(Stream& stream, const char* name, CUdeviceptr at, size_t bytes, Access access, bool pageable,
                   View& view) {
    if (pageable) {
        view.at = reinterpret_cast<char*>(at);
        return CUDA_SUCCESS;
    }
    Lock lock(world().mutex);
    return world().memory->reach(*stream.context, name, at, bytes, access, By::Copy, view);
}

CUresult copy(const char* name, Stream& stream, Lock& lock, CUdeviceptr to, Side to_side, CUdeviceptr from,
              Side from_side, size_t bytes, When when) {
    if (bytes == 0) return CUDA_SUCCESS;
    const Place to_place = place_of(*stream.context, to, bytes);
    const Place from_place = place_of(*stream.context, from, bytes);
    if (!fits(to_place, to_side) || !fits(from_place, from_side)) return CUDA_ERROR_INVALID_VALUE;
    if (to < from + bytes && from < to + bytes) die(name, "source and destination overlap");
    const bool to_device = to_place == Place::Device || to_place == Place::Managed;
    const bool from_device = from_place == Place::Device || from_place == Place::Managed;
    const bool to_pageable = to_place == Place::Pageable, from_pageable = from_place == Place::Pageable;

    // Pageable memory is copied to a staging buffer at once, and may reach the GPU after the return.
    std::shared_ptr<std::vector<char>> staged;
    if (from_pageable && to_device && !stream.sequence) {
        if (when == When::Now) await(lock, stream.last, name);
        const char* bytes_there = reinterpret_cast<const char*>(from);
        staged = std::make_shared<std::vector<char>>(bytes_there, bytes_there + bytes);
    }
    auto run = [=](Stream& stream) {
        View source, target;
        CUresult code = CUDA_SUCCESS;
        if (staged) source.at = staged->data();
        else code = reach_end(stream, name, from, bytes, Access::Read, from_pageable, source);
        if (code == CUDA_SUCCESS) code = reach_end(stream, name, to, bytes, Access::Write, to_pageable, target);
        if (code != CUDA_SUCCESS) return code;
        move(stream, target.at, source.at, bytes);
        check_still_there(source, name);
        check_still_there(target, name);
        return CUDA_SUCCESS;
    };
    const bool may_return = when == When::InStream ? !to_pageable && (to_device || from_device)
                                                   : to_device && (from_device || staged != nullptr);
    const bool waits = !may_return || synchronous(to) || synchronous(from);
    PointRef done = submit(stream, name, run);
    if (!waits || stream.sequence) return CUDA_SUCCESS;
    await(lock, done, name);
    return stream.context->error;
}

CUresult copy_now(const char* name, CUdeviceptr to, Side to_side, CUdeviceptr from, Side from_side, size_t bytes) {
    return in_stream(name, nullptr, [&](Stream& legacy, Lock& lock) {
        return copy(name, legacy, lock, to, to_side, from, from_side, bytes, When::Now);
    });
}

CUresult copy_in(const char* name, CUstream handle, CUdeviceptr to, Side to_side, CUdeviceptr from, Side from_side,
                 size_t bytes) {
    return in_stream(
        name, handle,
        [&](Stream& stream, Lock& lock) {
            return copy(name, stream, lock, to, to_side, from, from_side, bytes, When::InStream);
        },
        InCapture::Recorded);
}

CUresult fill(const char* name, Stream& stream, Lock& lock, CUdeviceptr to, unsigned char value, size_t bytes,
              When when) {
    if (bytes == 0) return CUDA_SUCCESS;
    if (!fits(place_of(*stream.context, to, bytes), Side::Device)) return CUDA_ERROR_INVALID_VALUE;
    const RangeRef range = world().memory->find(to);
    PointRef done = submit(stream, name, [=](Stream& stream) {
        View target;
        CUresult code = reach_end(stream, name, to, bytes, Access::Write, false, target);
        if (code != CUDA_SUCCESS) return code;
        std::memset(target.at, value, bytes);
        check_still_there(target, name);
        return CUDA_SUCCESS;
    });
    // Even the form without a stream is asynchronous, unless the host can access the memory.
    const bool visible = when == When::Now && !range->on_device();
    if (stream.sequence || (!visible && !range->sync_memops)) return CUDA_SUCCESS;
    await(lock, done, name);
    return stream.context->error;
}

CUdeviceptr address(const void* at) { return reinterpret_cast<CUdeviceptr>(at); }

}  // namespace

SIMCUDA_EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return copy_now(__func__, to, Side::Any, from, Side::Any, bytes);
}
SIMCUDA_EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
    return copy_now(__func__, to, Side::Device, address(from), Side::Host, bytes);
}
SIMCUDA_EXPORT CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
    return copy_now(__func__, address(to), Side::Host, from, Side::Device, bytes);
}
SIMCUDA_EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return copy_now(__func__, to, Side::Device, from, Side::Device, bytes);
}

SIMCUDA_EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy_in(__func__, stream, to, Side::Any, from, Side::Any, bytes);
}
SIMCUDA_EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    return copy_in(__func__, stream, to, Side::Device, address(from), Side::Host, bytes);
}
SIMCUDA_EXPORT CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy_in(__func__, stream, address(to), Side::Host, from, Side::Device, bytes);
}
SIMCUDA_EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy_in(__func__, stream, to, Side::Device, from, Side::Device, bytes);
}
SIMCUDA_EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                                          CUcontext from_context, size_t bytes, CUstream handle) {
    const char* name = __func__;
    return in_stream(
        name, handle,
        [&](Stream& stream, Lock& lock) {
            if (!world().context(to_context) || !world().context(from_context))
                return CUDA_ERROR_INVALID_CONTEXT;
            return copy(name, stream, lock, to, Side::Device, from, Side::Device, bytes, When::InStream);
        },
        InCapture::Recorded);
}

SIMCUDA_EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes) {
    const char* name = __func__;
    return in_stream(name, nullptr,
                     [&](Stream& legacy, Lock& lock) { return fill(name, legacy, lock, to, value, bytes, When::Now); });
}
SIMCUDA_EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream handle) {
    const char* name = __func__;
    return in_stream(
        name, handle,
        [&](Stream& stream, Lock& lock) {
            return fill(name, stream, lock, to, value, bytes, When::InStream);
        },
        InCapture::Recorded);
}
