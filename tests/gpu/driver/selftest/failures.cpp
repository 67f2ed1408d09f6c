// Calls with injected failures, and calls with invalid handles or arguments.

#include <thread>

#include "programs.h"

namespace selftest {

void calls_need_a_context() {
    CUstream one = nullptr;
    CHECK(cu("cuStreamCreate", &one, 0u) == CUDA_ERROR_NOT_INITIALIZED);
    WORKS(cu("cuInit", 0u));
    CHECK(cu("cuStreamCreate", &one, 0u) == CUDA_ERROR_INVALID_CONTEXT);
    begin();
    CUstream made = stream();
    // Each thread has its own current context.
    std::thread([] {
        CUstream none = nullptr;
        CHECK(cu("cuStreamCreate", &none, 0u) == CUDA_ERROR_INVALID_CONTEXT);
    }).join();
    int status = -1;
    void* graph = nullptr;
    WORKS(cu("cuStreamIsCapturing", made, &status));
    CHECK(status == 0);
    WORKS(cu("cuStreamBeginCapture_v2", made, 2));
    WORKS(cu("cuStreamIsCapturing", made, &status));
    CHECK(status == 1);
    CHECK(synchronize(made) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(cu("cuStreamEndCapture", made, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    WORKS(synchronize(made));
    WORKS(cu("cuStreamDestroy_v2", made));
    CHECK(synchronize(made) == CUDA_ERROR_INVALID_HANDLE);
}

void calls_fail_on_demand() {
    begin();
    allocate();
    allocate();
    Pointer memory = 0;
    CHECK(cu("cuMemAlloc_v2", &memory, kBytes) == CUDA_ERROR_OUT_OF_MEMORY);
    memory = allocate();
    CHECK(cu("cuMemHostUnregister", static_cast<void*>(nullptr)) == CUDA_ERROR_NOT_SUPPORTED);
    CUstream one = stream();
    WORKS(cu("cuMemsetD8Async", memory, static_cast<unsigned char>(0), kBytes, one));
    WORKS(synchronize(one));
    WORKS(cu("cuMemsetD8Async", memory, static_cast<unsigned char>(0), kBytes, one));
    CHECK(synchronize(one) == CUDA_ERROR_ECC_UNCORRECTABLE);
}

void errors_are_sticky() {
    begin();
    Pointer memory = allocate();
    CUstream one = stream();
    // One element more than the allocation has.
    WORKS(launch(kernel("flexring_collective_float"), sum_of(memory + 4, memory + 4, memory + 4, kBytes / 4), 1, one));
    CHECK(synchronize(one) == CUDA_ERROR_ILLEGAL_ADDRESS);
    Pointer more = 0;
    CHECK(cu("cuMemAlloc_v2", &more, kBytes) == CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(cu("cuStreamQuery", one) == CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(cu("cuStreamDestroy_v2", one) == CUDA_ERROR_ILLEGAL_ADDRESS);
    // A context that is created again works.
    WORKS(cu("cuDevicePrimaryCtxRelease_v2", 0));
    CHECK(cu("cuMemAlloc_v2", &more, kBytes) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
    begin();
    allocate();
}

}  // namespace selftest
