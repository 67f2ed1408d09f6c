// Stream capture: the modes, and the calls that invalidate captures of other threads.

#include <thread>

#include "programs.h"

namespace selftest {

enum Mode { Global = 0, ThreadLocal = 1, Relaxed = 2 };

static void exchange(Mode mode, Mode expected) {
    int value = mode;
    WORKS(cu("cuThreadExchangeStreamCaptureMode", &value));
    CHECK(value == expected);
}

// The result of an event query by another thread of mode `theirs`, during a capture of mode `ours`, and of the end of the capture.
static void check_query(Mode ours, Mode theirs, CUresult query, CUresult end) {
    CUstream one = stream();
    CUevent never = event();
    CUcontext context = nullptr;
    void* graph = nullptr;
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
    constexpr CUresult refused = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, broken = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    check_query(Global, Global, refused, broken);
    check_query(Global, ThreadLocal, CUDA_SUCCESS, CUDA_SUCCESS);
    check_query(Global, Relaxed, CUDA_SUCCESS, CUDA_SUCCESS);
    check_query(ThreadLocal, Global, CUDA_SUCCESS, CUDA_SUCCESS);
    check_query(Relaxed, Global, CUDA_SUCCESS, CUDA_SUCCESS);

    // The capturing thread's own calls.
    Pointer memory = allocate();
    void* graph = nullptr;
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
    void* graph = nullptr;
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
    void* graph = nullptr;
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
    CHECK(cu("cuMemsetD8Async", memory, static_cast<unsigned char>(0), kBytes, static_cast<CUstream>(nullptr)) ==
          CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    CHECK(cu("cuStreamEndCapture", blocking, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

}  // namespace selftest
