// Stream capture: the modes, the calls that invalidate captures, and dependencies into, out of and between
// captures.

#include <thread>

#include "programs.h"

namespace selftest {

static void exchange(Mode mode, Mode expected) {
    int value = mode;
    WORKS(cu("cuThreadExchangeStreamCaptureMode", &value));
    CHECK(value == expected);
}

// The result of an event query by another thread of mode `theirs`, during a capture of mode `ours`, and of
// the end of the capture.
static void check_query(Mode ours, Mode theirs, CUresult query, CUresult end) {
    CUstream one = stream();
    CUevent never = event();
    CUcontext context = nullptr;
    CUgraph graph = nullptr;
    WORKS(cu("cuCtxGetCurrent", &context));
    WORKS(cu("cuStreamBeginCapture_v2", one, static_cast<int>(ours)));
    std::thread([&] {
        WORKS(cu("cuCtxSetCurrent", context));
        exchange(theirs, Global);
        CHECK(cu("cuEventQuery", never) == query);
    }).join();
    CHECK(cu("cuStreamEndCapture", one, &graph) == end);
    WORKS(cu("cuEventQuery", never));
}

void unsafe_calls_invalidate_captures() {
    begin();
    constexpr CUresult refused = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                       broken = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    check_query(Global, Global, refused, broken);
    check_query(Global, ThreadLocal, CUDA_SUCCESS, CUDA_SUCCESS);
    check_query(Global, Relaxed, CUDA_SUCCESS, CUDA_SUCCESS);
    check_query(ThreadLocal, Global, CUDA_SUCCESS, CUDA_SUCCESS);
    check_query(Relaxed, Global, CUDA_SUCCESS, CUDA_SUCCESS);

    // The capturing thread's own calls.
    Pointer memory = allocate();
    CUgraph graph = nullptr;
    for (Mode mode : {Global, ThreadLocal}) {
        CUstream one = stream();
        WORKS(cu("cuStreamBeginCapture_v2", one, static_cast<int>(mode)));
        Pointer more = 0;
        CHECK(cu("cuMemAlloc_v2", &more, kBytes) == refused);
        CHECK(cu("cuStreamEndCapture", one, &graph) == broken);
    }
    CUstream one = stream();
    WORKS(cu("cuStreamBeginCapture_v2", one, static_cast<int>(Global)));
    exchange(Relaxed, Global);
    WORKS(cu("cuMemFree_v2", memory));
    exchange(Global, Relaxed);
    // Work in other streams is safe.
    memory = 0;
    CUevent recorded = event();
    WORKS(cu("cuEventRecord", recorded, stream()));
    WORKS(cu("cuStreamEndCapture", one, &graph));
    int wrong = 3;
    CHECK(cu("cuThreadExchangeStreamCaptureMode", &wrong) == CUDA_ERROR_INVALID_VALUE);
}

void a_wait_for_earlier_work_invalidates_a_capture() {
    begin();
    constexpr CUresult broken = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    CUstream one = stream();
    CUevent earlier = event();
    CUcontext context = nullptr;
    CUgraph graph = nullptr;
    WORKS(cu("cuStreamBeginCapture_v2", one, static_cast<int>(Relaxed)));
    WORKS(cu("cuStreamGetCtx", one, &context));
    CHECK(cu("cuStreamWaitEvent", one, earlier, 0u) == CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    CHECK(cu("cuStreamGetCtx", one, &context) == broken);
    int status = 0;
    WORKS(cu("cuStreamIsCapturing", one, &status));
    CHECK(status == 2);
    CHECK(cu("cuStreamEndCapture", one, &graph) == broken);
    WORKS(cu("cuStreamGetCtx", one, &context));
}

void captures_end_in_their_thread() {
    begin();
    CUstream one = stream();
    CUcontext context = nullptr;
    CUgraph graph = nullptr;
    WORKS(cu("cuCtxGetCurrent", &context));
    auto end_elsewhere = [&] {
        CUresult code = CUDA_SUCCESS;
        std::thread([&] {
            WORKS(cu("cuCtxSetCurrent", context));
            code = cu("cuStreamEndCapture", one, &graph);
        }).join();
        return code;
    };
    WORKS(cu("cuStreamBeginCapture_v2", one, static_cast<int>(ThreadLocal)));
    CHECK(end_elsewhere() == CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    WORKS(cu("cuStreamEndCapture", one, &graph));
    WORKS(cu("cuStreamBeginCapture_v2", one, static_cast<int>(Relaxed)));
    WORKS(end_elsewhere());
    // The legacy stream must not depend on a capturing stream.
    CUstream blocking = stream(0);
    Pointer memory = allocate();
    WORKS(cu("cuStreamBeginCapture_v2", blocking, static_cast<int>(Relaxed)));
    CHECK(cu("cuMemsetD8Async", memory, static_cast<unsigned char>(0), kBytes,
             static_cast<CUstream>(nullptr)) == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    CHECK(cu("cuStreamEndCapture", blocking, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

static CUresult end_capture(CUstream stream) {
    CUgraph graph = nullptr;
    const CUresult code = cu("cuStreamEndCapture", stream, &graph);
    CHECK((graph != nullptr) == (code == CUDA_SUCCESS));
    return code;
}

void forks_must_join() {
    begin();
    Pointer memory = allocate();
    CUstream one = stream(), two = stream();
    CUevent forked = event(), joined = event();
    auto fill = [&](CUstream stream) {
        return cu("cuMemsetD8Async", memory, static_cast<unsigned char>(1), kBytes, stream);
    };
    auto fork = [&] {
        begin_capture(one, ThreadLocal);
        WORKS(cu("cuEventRecord", forked, one));
        WORKS(cu("cuStreamWaitEvent", two, forked, 0u));
        CHECK(status(two) == 1);
    };
    auto join = [&] {
        WORKS(cu("cuEventRecord", joined, two));
        WORKS(cu("cuStreamWaitEvent", one, joined, 0u));
    };
    // Without work there is nothing to join.
    fork();
    WORKS(end_capture(one));
    CHECK(status(two) == 0);
    fork();
    WORKS(fill(two));
    CHECK(end_capture(two) == CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    CHECK(end_capture(one) == CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    CHECK(status(one) == 0 && status(two) == 0);
    fork();
    WORKS(fill(two));
    join();
    WORKS(end_capture(one));
    // Work after the join is not joined.
    fork();
    WORKS(fill(two));
    join();
    WORKS(fill(two));
    CHECK(end_capture(one) == CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
    // A destroyed stream cannot join.
    fork();
    WORKS(cu("cuStreamDestroy_v2", two));
    CHECK(end_capture(one) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK(end_capture(one) == CUDA_ERROR_ILLEGAL_STATE);
    // Nothing was run.
    WORKS(cu("cuCtxSynchronize"));
    unsigned char first = 0;
    WORKS(cu("cuMemcpyDtoH_v2", static_cast<void*>(&first), memory, size_t{1}));
    CHECK(first == 0xff);
}

void captures_do_not_mix() {
    begin();
    constexpr CUresult broken = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    CUstream one = stream(), two = stream(), other = stream();
    CUevent event_of_one = event();
    begin_capture(one, Relaxed);
    CHECK(cu("cuStreamBeginCapture_v2", one, static_cast<int>(Relaxed)) == CUDA_ERROR_ILLEGAL_STATE);
    begin_capture(two, Relaxed);
    WORKS(cu("cuEventRecord", event_of_one, one));
    CHECK(cu("cuStreamWaitEvent", two, event_of_one, 0u) == CUDA_ERROR_STREAM_CAPTURE_MERGE);
    CHECK(cu("cuStreamWaitEvent", other, event_of_one, 0u) == broken);
    CHECK(end_capture(one) == broken);
    CHECK(end_capture(two) == broken);
    // An event that was captured means nothing outside of the capture.
    begin_capture(one, Relaxed);
    WORKS(cu("cuEventRecord", event_of_one, one));
    WORKS(end_capture(one));
    CHECK(cu("cuEventQuery", event_of_one) == CUDA_ERROR_CAPTURED_EVENT);
    CHECK(cu("cuEventSynchronize", event_of_one) == CUDA_ERROR_CAPTURED_EVENT);
    CHECK(cu("cuStreamWaitEvent", other, event_of_one, 0u) == CUDA_ERROR_CAPTURED_EVENT);
    begin_capture(two, Relaxed);
    CHECK(cu("cuStreamWaitEvent", two, event_of_one, 0u) == CUDA_ERROR_CAPTURED_EVENT);
    CHECK(end_capture(two) == broken);
    WORKS(cu("cuEventRecord", event_of_one, other));
    WORKS(cu("cuEventSynchronize", event_of_one));
    WORKS(cu("cuStreamWaitEvent", two, event_of_one, 0u));
}

// In every mode, because they concern the capture itself.
void captured_work_has_no_state() {
    begin();
    constexpr CUresult broken = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    constexpr CUresult refused = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    CUstream blocking = stream(0);
    CUevent captured = event();
    Pointer memory = allocate();
    auto check = [&](CUresult expected, auto call) {
        for (Mode mode : {Global, ThreadLocal, Relaxed}) {
            int value = Relaxed;
            begin_capture(blocking, mode);
            WORKS(cu("cuEventRecord", captured, blocking));
            WORKS(cu("cuThreadExchangeStreamCaptureMode", &value));
            CHECK(call() == expected);
            WORKS(cu("cuThreadExchangeStreamCaptureMode", &value));
            CHECK(cu("cuEventRecord", captured, blocking) == broken);
            CHECK(cu("cuMemsetD8Async", memory, static_cast<unsigned char>(1), kBytes, blocking) == broken);
            CHECK(end_capture(blocking) == broken);
        }
    };
    check(refused, [&] { return cu("cuStreamSynchronize", blocking); });
    check(refused, [&] { return cu("cuStreamQuery", blocking); });
    check(CUDA_ERROR_CAPTURED_EVENT, [&] { return cu("cuEventQuery", captured); });
    check(CUDA_ERROR_CAPTURED_EVENT, [&] { return cu("cuEventSynchronize", captured); });
    check(refused, [&] { return cu("cuCtxSynchronize"); });
    check(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
          [&] { return cu("cuStreamSynchronize", static_cast<CUstream>(nullptr)); });
    check(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
          [&] { return cu("cuMemsetD8_v2", memory, static_cast<unsigned char>(1), kBytes); });
    check(refused, [&] {
        Pointer more = 0;
        return cu("cuMemAllocAsync", &more, kBytes, blocking);
    });
    // The state of the legacy stream is unknown then, but a query does no harm.
    begin_capture(blocking, Global);
    int value = 0;
    CHECK(cu("cuStreamIsCapturing", static_cast<CUstream>(nullptr), &value) ==
          CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    WORKS(end_capture(blocking));
    WORKS(cu("cuStreamIsCapturing", static_cast<CUstream>(nullptr), &value));
}

}  // namespace selftest
