// Functions about streams and events, host functions, and waits for values in memory.

#include <algorithm>

#include "world.h"

using namespace sim;

namespace {

// A stream by its handle in any context: queries and waits are allowed in every context.
StreamRef any_stream(Context& current, CUstream handle) {
    if (!handle || handle == CU_STREAM_LEGACY) return current.legacy;
    auto found = world().streams.find(handle);
    return found != world().streams.end() ? found->second : nullptr;
}

CUresult create(const char* name, CUstream* out, unsigned flags, int priority) {
    return in_context(name, [&](Context& context, Lock& lock) {
        if (!out || flags & ~CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
        context.reap(lock);
        const auto handle = static_cast<CUstream>(world().memory->handle());
        // Priorities are clamped to the range.
        auto stream = std::make_shared<Stream>(handle, &context, flags, std::clamp(priority, -5, 0), false);
        if (!stream->start()) return CUDA_ERROR_OUT_OF_MEMORY;
        stream->connection = context.connections_used++ % settings().connections;
        context.streams.push_back(stream);
        world().streams[handle] = stream;
        *out = handle;
        return CUDA_SUCCESS;
    });
}

// A function that queries any stream.
template <class Body>
CUresult about(const char* name, CUstream handle, Body body) {
    return in_context(name, [&](Context& context, Lock& lock) -> CUresult {
        if (handle == CU_STREAM_PER_THREAD) return CUDA_ERROR_NOT_SUPPORTED;
        StreamRef stream = any_stream(context, handle);
        if (!stream) return CUDA_ERROR_INVALID_HANDLE;
        return body(stream, lock);
    });
}

// Whether a function that needs the state of a stream must fail because of a capture, which it invalidates.
CUresult refuse_capturing(Stream& stream) {
    if (stream.legacy) {
        return invalidate_captures_behind_legacy(*stream.context) ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
                                                                  : CUDA_SUCCESS;
    }
    if (!stream.sequence) return CUDA_SUCCESS;
    stream.sequence->valid = false;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

// CUDA's comparison of a word in memory with a value.
template <class Word>
bool holds(Word word, Word value, unsigned how) {
    switch (how) {
        case CU_STREAM_WAIT_VALUE_GEQ: return static_cast<std::make_signed_t<Word>>(word - value) >= 0;
        case CU_STREAM_WAIT_VALUE_EQ: return word == value;
        default: return (word & value) != 0;
    }
}

// Whether a word of memory is valid for a memory operation, as far as that is known when it is enqueued.
template <class Word>
CUresult may_operate(CUdeviceptr address) {
    if (!settings().memops) return CUDA_ERROR_NOT_SUPPORTED;
    const RangeRef range = world().memory->find(address);
    if (address % sizeof(Word) != 0 || !range || range->kind == Kind::Managed) return CUDA_ERROR_INVALID_VALUE;
    return range->mapped_to_device() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult reach_word(Stream& stream, const char* name, CUdeviceptr address, size_t bytes, Access access, View& view) {
    Lock lock(world().mutex);
    return world().memory->reach(*stream.context, name, address, bytes, access, By::MemoryOperation, view);
}

template <class Word>
CUresult wait_value(const char* name, CUstream handle, CUdeviceptr address, Word value, unsigned flags) {
    return in_stream(name, handle, [&](Stream& stream, Lock&) {
        // This GPU supports neither a flush of remote writes nor NOR.
        if (flags > CU_STREAM_WAIT_VALUE_AND) return CUDA_ERROR_NOT_SUPPORTED;
        if (CUresult code = may_operate<Word>(address); code != CUDA_SUCCESS) return code;
        submit_wait(stream, name, [=](Stream& stream) {
            for (unsigned looks = 0; !stream.cancelled; ++looks) {
                // Looked up each time, to detect memory that is freed meanwhile.
                View view;
                CUresult code = reach_word(stream, name, address, sizeof(Word), Access::Read, view);
                if (code != CUDA_SUCCESS) return code;
                Word word = __atomic_load_n(reinterpret_cast<Word*>(view.at), __ATOMIC_ACQUIRE);
                if (holds(word, value, flags)) break;
                std::this_thread::sleep_for(std::chrono::microseconds(std::min(10 + 2 * looks, 500u)));
            }
            return CUDA_SUCCESS;
        });
        return CUDA_SUCCESS;
    });
}

template <class Word>
CUresult write_value(const char* name, CUstream handle, CUdeviceptr address, Word value, unsigned flags) {
    return in_stream(name, handle, [&](Stream& stream, Lock&) {
        if (flags & ~CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER) return CUDA_ERROR_INVALID_VALUE;
        if (CUresult code = may_operate<Word>(address); code != CUDA_SUCCESS) return code;
        submit(stream, name, [=](Stream& stream) {
            View view;
            CUresult code = reach_word(stream, name, address, sizeof(Word), Access::Write, view);
            if (code != CUDA_SUCCESS) return code;
            __atomic_store_n(reinterpret_cast<Word*>(view.at), value, __ATOMIC_RELEASE);
            return CUDA_SUCCESS;
        });
        return CUDA_SUCCESS;
    });
}

}  // namespace

SIMCUDA_EXPORT CUresult cuStreamCreate(CUstream* out, unsigned flags) { return create(__func__, out, flags, 0); }

SIMCUDA_EXPORT CUresult cuStreamCreateWithPriority(CUstream* out, unsigned flags, int priority) {
    return create(__func__, out, flags, priority);
}

SIMCUDA_EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
    // Its work continues. In a broken context the stream is released too, although the call returns the error.
    CUresult broken = CUDA_SUCCESS;
    const CUresult code = initialised(__func__, [&](Lock& lock) {
        auto found = world().streams.find(handle);
        if (found == world().streams.end()) return CUDA_ERROR_INVALID_HANDLE;
        StreamRef stream = found->second;
        Context& context = *stream->context;
        Holds holds(context, lock, "cuStreamDestroy_v2");
        if (!world().streams.count(handle)) return CUDA_ERROR_INVALID_HANDLE;
        abandon_capture(*stream);
        stream->closing = true;
        stream->arrived.notify_all();
        context.streams.erase(std::find(context.streams.begin(), context.streams.end(), stream));
        context.retired.push_back(stream);
        world().streams.erase(handle);
        broken = context.error;
        return CUDA_SUCCESS;
    });
    return code == CUDA_SUCCESS ? broken : code;
}

SIMCUDA_EXPORT CUresult cuStreamQuery(CUstream handle) {
    return about(__func__, handle, [](const StreamRef& stream, Lock&) {
        if (CUresult code = refuse_capturing(*stream); code != CUDA_SUCCESS) return code;
        if (stream->context->error != CUDA_SUCCESS) return stream->context->error;
        return stream->last->reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    });
}

SIMCUDA_EXPORT CUresult cuStreamSynchronize(CUstream handle) {
    const char* name = __func__;
    return in_context(name, [&](Context& context, Lock& lock) -> CUresult {
        if (handle == CU_STREAM_PER_THREAD) return CUDA_ERROR_NOT_SUPPORTED;
        StreamRef stream = any_stream(context, handle);
        if (!stream) return CUDA_ERROR_INVALID_HANDLE;
        if (CUresult code = refuse_capturing(*stream); code != CUDA_SUCCESS) return code;
        synchronize(context, lock, name, [&] { await(lock, stream->last, name); });
        return stream->context->error;
    });
}

SIMCUDA_EXPORT CUresult cuStreamGetCtx(CUstream handle, CUcontext* out) {
    return about(__func__, handle, [&](const StreamRef& stream, Lock&) {
        if (!out) return CUDA_ERROR_INVALID_VALUE;
        // As driver 580.159.04 does on an H200.
        if (status_of(*stream) == Capture::Invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        *out = stream->context->handle;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuStreamGetFlags(CUstream handle, unsigned* flags) {
    return about(__func__, handle, [&](const StreamRef& stream, Lock&) {
        if (!flags) return CUDA_ERROR_INVALID_VALUE;
        *flags = stream->flags;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuStreamGetPriority(CUstream handle, int* priority) {
    return about(__func__, handle, [&](const StreamRef& stream, Lock&) {
        if (!priority) return CUDA_ERROR_INVALID_VALUE;
        *priority = stream->priority;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuStreamGetId(CUstream handle, unsigned long long* id) {
    return about(__func__, handle, [&](const StreamRef& stream, Lock&) {
        if (!id) return CUDA_ERROR_INVALID_VALUE;
        // Seen with driver 580.159.04: not even the number of a stream may be asked for while it captures.
        if (CUresult code = refuse_capturing(*stream); code != CUDA_SUCCESS) return code;
        *id = stream->id;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
    return about(__func__, handle, [&](const StreamRef& stream, Lock& lock) {
        const EventRef found = world().event(event);
        if (!found) return CUDA_ERROR_INVALID_HANDLE;
        if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
        if (stream->sequence || found->sequence) return wait_in_capture(*stream, *found);
        if (CUresult code = refuse_capturing(*stream); code != CUDA_SUCCESS) return code;
        // The current record counts; later records do not.
        make_room(lock, *stream, "cuStreamWaitEvent");
        if (PointRef point = found->point) submit(*stream, "cuStreamWaitEvent", nullptr, {point});
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuEventCreate(CUevent* out, unsigned flags) {
    return in_context(__func__, [&](Context& context, Lock&) {
        constexpr unsigned all = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
        if (!out || flags & ~all) return CUDA_ERROR_INVALID_VALUE;
        if (flags & CU_EVENT_INTERPROCESS && !(flags & CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_VALUE;
        const auto handle = static_cast<CUevent>(world().memory->handle());
        world().events[handle] =
            std::make_shared<Event>(Event{handle, &context, flags, nullptr, nullptr, {}});
        *out = handle;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuEventRecord(CUevent event, CUstream handle) {
    const char* name = __func__;
    return in_context(name, [&](Context& context, Lock& lock) -> CUresult {
        if (handle == CU_STREAM_PER_THREAD) return CUDA_ERROR_NOT_SUPPORTED;
        StreamRef stream = world().stream(context, handle);
        const EventRef found = world().event(event);
        if (!stream || !found || found->context != &context) return CUDA_ERROR_INVALID_HANDLE;
        if (status_of(*stream) == Capture::Invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (stream->legacy && invalidate_captures_behind_legacy(context)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        found->sequence = stream->sequence;
        found->captured = stream->frontier;
        found->point = nullptr;
        if (stream->sequence) return CUDA_SUCCESS;
        make_room(lock, *stream, name);
        found->point = submit(*stream, name, nullptr);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuEventQuery(CUevent event) {
    return in_context(__func__, [&](Context&, Lock&) {
        const EventRef found = world().event(event);
        if (!found) return CUDA_ERROR_INVALID_HANDLE;
        if (found->sequence) return refuse_captured(*found);
        if (found->context->error != CUDA_SUCCESS) return found->context->error;
        return !found->point || found->point->reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    });
}

SIMCUDA_EXPORT CUresult cuEventSynchronize(CUevent event) {
    const char* name = __func__;
    return in_context(name, [&](Context& context, Lock& lock) {
        const EventRef found = world().event(event);
        if (!found) return CUDA_ERROR_INVALID_HANDLE;
        if (found->sequence) return refuse_captured(*found);
        if (PointRef point = found->point) synchronize(context, lock, name, [&] { await(lock, point, name); });
        return found->context->error;
    });
}

SIMCUDA_EXPORT CUresult cuEventElapsedTime(float* milliseconds, CUevent from, CUevent to) {
    return in_context(__func__, [&](Context&, Lock&) {
        const EventRef first = world().event(from), second = world().event(to);
        if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
        if (first && first->sequence) return refuse_captured(*first);
        if (second && second->sequence) return refuse_captured(*second);
        if (!first || !second || !first->point || !second->point) return CUDA_ERROR_INVALID_HANDLE;
        if ((first->flags | second->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
        if (!first->point->reached || !second->point->reached) return CUDA_ERROR_NOT_READY;
        *milliseconds = std::chrono::duration<float, std::milli>(second->point->when - first->point->when).count();
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuEventDestroy_v2(CUevent event) {
    return initialised(__func__, [&](Lock& lock) {
        const EventRef found = world().event(event);
        if (!found) return CUDA_ERROR_INVALID_HANDLE;
        Holds holds(*found->context, lock, "cuEventDestroy_v2");
        if (world().events.erase(event) == 0) return CUDA_ERROR_INVALID_HANDLE;
        return found->context->error;
    });
}

SIMCUDA_EXPORT CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags) {
    return wait_value<uint32_t>(__func__, stream, address, value, flags);
}
SIMCUDA_EXPORT CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags) {
    return wait_value<uint64_t>(__func__, stream, address, value, flags);
}
SIMCUDA_EXPORT CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags) {
    return write_value<uint32_t>(__func__, stream, address, value, flags);
}
SIMCUDA_EXPORT CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags) {
    return write_value<uint64_t>(__func__, stream, address, value, flags);
}

SIMCUDA_EXPORT CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* data) {
    return in_stream(
        __func__, handle,
        [&](Stream& stream, Lock&) {
            if (!function) return CUDA_ERROR_INVALID_VALUE;
            submit_wait(stream, "cuLaunchHostFunc", [=](Stream& stream) {
                stream.context->host_thread.run(stream, function, data);
                return CUDA_SUCCESS;
            });
            return CUDA_SUCCESS;
        },
        InCapture::Recorded);
}
