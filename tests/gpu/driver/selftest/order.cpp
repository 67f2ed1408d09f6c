// The order of streams, events, copies, kernels, waits for values and host functions.

#include <atomic>
#include <chrono>
#include <thread>

#include "programs.h"

namespace selftest {

// How often in `rounds` a reader in one stream misses the write of another stream.
static int stale_reads(bool with_event, int rounds) {
    Pointer memory = allocate();
    unsigned char *from = pinned(), *to = pinned();
    int stale = 0;
    for (int round = 0; round < rounds; ++round) {
        CUstream writer = stream(), reader = stream();
        CUevent written = event();
        const auto value = static_cast<unsigned char>(round % 200);
        std::memset(from, value, kBytes);
        to_device(memory, from, kBytes, writer);
        if (with_event) {
            WORKS(cu("cuEventRecord", written, writer));
            WORKS(cu("cuStreamWaitEvent", reader, written, 0u));
            // A later record is not waited for.
            WORKS(cu("cuEventRecord", written, reader));
        }
        WORKS(to_host(to, memory, kBytes, reader));
        WORKS(synchronize(reader));
        stale += to[0] != value || to[kBytes - 1] != value;
        WORKS(synchronize(writer));
        WORKS(cu("cuEventDestroy_v2", written));
        WORKS(cu("cuStreamDestroy_v2", writer));
        WORKS(cu("cuStreamDestroy_v2", reader));
    }
    return stale;
}

void order_needs_events() {
    begin();
    CUevent never = event();
    WORKS(cu("cuStreamWaitEvent", stream(), never, 0u));
    WORKS(cu("cuEventQuery", never));
    CHECK(stale_reads(true, 100) == 0);
    CHECK(stale_reads(false, 100) > 0);
}

void legacy_stream_keeps_order() {
    begin();
    Pointer memory = allocate();
    unsigned char *from = pinned(), *to = pinned();
    for (int round = 0; round < 50; ++round) {
        CUstream writer = stream(0), reader = stream(0);
        std::memset(from, round, kBytes);
        to_device(memory, from, kBytes, writer);
        WORKS(cu("cuMemsetD8Async", memory + kBytes / 2, static_cast<unsigned char>(round + 1), kBytes / 2,
                 static_cast<CUstream>(nullptr)));
        WORKS(to_host(to, memory, kBytes, reader));
        WORKS(synchronize(reader));
        CHECK(to[0] == round && to[kBytes - 1] == round + 1);
        WORKS(cu("cuStreamDestroy_v2", writer));
        WORKS(cu("cuStreamDestroy_v2", reader));
    }
}

void pinned_copies_take_time() {
    begin();
    Pointer memory = allocate();
    unsigned char *from = pinned(), *to = pinned();
    std::vector<unsigned char> pageable(kBytes);
    int reused_too_early = 0, read_too_early = 0;
    for (int round = 1; round <= 100; ++round) {
        CUstream one = stream();
        const auto value = static_cast<unsigned char>(round);
        std::memset(from, value, kBytes);
        to_device(memory, from, kBytes, one);
        std::memset(from, 0, kBytes);
        std::memset(to, 0, kBytes);
        WORKS(to_host(to, memory, kBytes, one));
        read_too_early += to[kBytes - 1] != value;
        // A copy to pageable memory is complete on return.
        WORKS(to_host(pageable.data(), memory, kBytes, one));
        reused_too_early += pageable[kBytes - 1] != value;
        // After a copy from pageable memory, the memory may be reused.
        std::memset(pageable.data(), value, kBytes);
        to_device(memory, pageable.data(), kBytes, one);
        std::memset(pageable.data(), 0, kBytes);
        WORKS(to_host(pageable.data(), memory, kBytes, one));
        CHECK(pageable[0] == value && pageable[kBytes - 1] == value);
        WORKS(cu("cuStreamDestroy_v2", one));
    }
    CHECK(reused_too_early > 0 && read_too_early > 0);
}

void kernels_compute() {
    begin();
    constexpr size_t count = 1000;
    float *a = reinterpret_cast<float*>(pinned()), *result = reinterpret_cast<float*>(pinned());
    Pointer memory = allocate(count * 4);
    CUstream one = stream();
    for (size_t i = 0; i < count; ++i) a[i] = static_cast<float>(i);
    to_device(memory, a, count * 4, one);
    WORKS(launch(kernel("flexring_collective_float"), sum_of(memory, memory, mapped(a), count), 1, one));
    WORKS(to_host(result, memory, count * 4, one));
    WORKS(synchronize(one));
    for (size_t i = 0; i < count; ++i) CHECK(result[i] == 2.0f * static_cast<float>(i));

    CUmodule module = nullptr;
    CUfunction function = nullptr;
    CHECK(cu("cuModuleLoadData", &module, static_cast<const void*>(nullptr)) == CUDA_ERROR_INVALID_IMAGE);
    WORKS(cu("cuModuleLoadData", &module, static_cast<const void*>("anything")));
    CHECK(cu("cuModuleGetFunction", &function, module, "flexring_string") == CUDA_ERROR_NOT_FOUND);
    for (const char* name : {"flexring_collective_uint8", "flexring_collective_bfloat16", "flexring_collective_int64"}) {
        WORKS(cu("cuModuleGetFunction", &function, module, name));
    }
    int grid = 0, block = 0;
    CUoccupancyB2DSize none = nullptr;
    WORKS(cu("cuOccupancyMaxPotentialBlockSize", &grid, &block, function, none, size_t{0}, 0));
    CHECK(grid > 0 && block > 0);
}

void streams_wait_for_values() {
    begin();
    auto* word = reinterpret_cast<uint32_t*>(pinned());
    Pointer memory = allocate();
    CUstream one = stream(), two = stream();
    *word = 7;
    WORKS(cu("cuStreamWaitValue32_v2", one, mapped(word), 8u, 0u));
    WORKS(cu("cuStreamWriteValue32_v2", one, memory, 5u, 0u));
    WORKS(cu("cuStreamWaitValue32_v2", two, memory, 5u, 1u));
    WORKS(cu("cuStreamWriteValue32_v2", two, mapped(word + 1), 6u, 0u));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(cu("cuStreamQuery", one) == CUDA_ERROR_NOT_READY && cu("cuStreamQuery", two) == CUDA_ERROR_NOT_READY);
    __atomic_store_n(word, 9, __ATOMIC_RELEASE);
    WORKS(synchronize(two));
    CHECK(word[1] == 6);
    // The comparison is modulo 2^32: a value slightly behind is less, also across the wrap-around.
    *word = 1;
    WORKS(cu("cuStreamWaitValue32_v2", one, mapped(word), 0xfffffff0u, 0u));
    WORKS(synchronize(one));
    CHECK(cu("cuStreamWaitValue32_v2", one, memory + 2, 0u, 0u) == CUDA_ERROR_INVALID_VALUE);
    static uint32_t elsewhere;
    CHECK(cu("cuStreamWriteValue32_v2", one, address(&elsewhere), 0u, 0u) == CUDA_ERROR_INVALID_VALUE);
}

static std::atomic<int> called{0};
static std::atomic<bool> go{false};

void host_functions_run_one_at_a_time() {
    begin();
    CUstream one = stream(), two = stream();
    CUhostFn blocks = [](void*) {
        while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        CHECK(called++ == 0);
    };
    CUhostFn counts = [](void*) { ++called; };
    WORKS(cu("cuLaunchHostFunc", one, blocks, static_cast<void*>(nullptr)));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    // Another stream's host function runs only after the first one has ended.
    WORKS(cu("cuLaunchHostFunc", one, counts, static_cast<void*>(nullptr)));
    WORKS(cu("cuLaunchHostFunc", two, counts, static_cast<void*>(nullptr)));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(called == 0 && cu("cuStreamQuery", two) == CUDA_ERROR_NOT_READY);
    go = true;
    WORKS(synchronize(one));
    WORKS(synchronize(two));
    CHECK(called == 3);
}

void calls_in_host_functions_die() {
    begin();
    CUstream one = stream();
    CUhostFn calls = [](void*) {
        int count = 0;
        cu("cuDeviceGetCount", &count);
    };
    WORKS(cu("cuLaunchHostFunc", one, calls, static_cast<void*>(nullptr)));
    synchronize(one);
}

void threads_share_the_driver() {
    begin();
    CUcontext context = nullptr;
    WORKS(cu("cuCtxGetCurrent", &context));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 8; ++rank) {
        threads.emplace_back([context, rank] {
            WORKS(cu("cuCtxSetCurrent", context));
            unsigned char* host = pinned();
            for (int round = 0; round < 20; ++round) {
                CUstream one = stream();
                Pointer memory = allocate(kBytes);
                WORKS(cu("cuMemsetD8Async", memory, static_cast<unsigned char>(rank), kBytes, one));
                WORKS(to_host(host, memory, kBytes, one));
                WORKS(synchronize(one));
                CHECK(host[0] == rank && host[kBytes - 1] == rank);
                WORKS(cu("cuMemFree_v2", memory));
                WORKS(cu("cuStreamDestroy_v2", one));
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

}  // namespace selftest
