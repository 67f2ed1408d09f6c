// The lock of a context, the calls that hold it while they wait, and the full queue of a stream.

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "programs.h"

namespace selftest {

static void sleep_ms(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

// A stream that waits until `open` is called.
class Gate {
public:
    explicit Gate(CUstream held) : word_(reinterpret_cast<uint32_t*>(pinned())) {
        *word_ = 0;
        WORKS(cu("cuStreamWaitValue32_v2", held, mapped(word_), 1u, 0u));
    }
    void open() { __atomic_store_n(word_, 1, __ATOMIC_RELEASE); }

private:
    uint32_t* word_;
};

// Runs a call in another thread that shares the context.
static std::thread elsewhere(std::function<void()> body) {
    CUcontext context = nullptr;
    WORKS(cu("cuCtxGetCurrent", &context));
    return std::thread([context, body] {
        WORKS(cu("cuCtxSetCurrent", context));
        body();
    });
}

// Checks that `blocking` waits for a gate in `held`, and that a query by another thread waits for `blocking` meanwhile.
static void check_waits(CUstream held, std::function<void()> blocking) {
    CUevent never = event();
    Gate gate(held);
    std::atomic<bool> returned{false}, queried{false};
    std::thread first = elsewhere([&] {
        blocking();
        returned = true;
    });
    sleep_ms(50);
    CHECK(!returned);
    std::thread second = elsewhere([&] {
        WORKS(cu("cuEventQuery", never));
        queried = true;
    });
    sleep_ms(50);
    CHECK(!returned && !queried);
    gate.open();
    first.join();
    second.join();
}

// With SIMCUDA_IMPLICIT_SYNC=1.
void calls_hold_the_lock_while_they_wait() {
    begin();
    CUstream one = stream(), two = stream();
    Pointer memory = allocate(), more = allocate();
    static unsigned char pageable[kBytes], registered[kBytes];
    unsigned char *host = pinned(), *other = pinned();
    CUevent recorded = event();
    CUfunction sum = kernel("flexring_collective_float");
    check_waits(one, [&] { WORKS(to_host(pageable, memory, kBytes, one)); });
    check_waits(one, [&] { WORKS(synchronize(one)); });
    check_waits(one, [&] {
        WORKS(cu("cuEventRecord", recorded, one));
        WORKS(cu("cuEventSynchronize", recorded));
    });
    check_waits(one, [&] { WORKS(cu("cuCtxSynchronize")); });
    check_waits(one, [&] { WORKS(cu("cuMemFree_v2", more)); });
    check_waits(one, [&] { allocate(); });
    check_waits(one, [&] { pinned(); });
    check_waits(one, [&] { WORKS(cu("cuMemFreeHost", static_cast<void*>(host))); });
    check_waits(one, [&] { WORKS(cu("cuMemHostRegister_v2", static_cast<void*>(registered), kBytes, 0u)); });
    check_waits(one, [&] { WORKS(cu("cuMemHostUnregister", static_cast<void*>(registered))); });
    check_waits(one, [&] { kernel("flexring_collective_uint8"); });
    // The first launch loads the kernel, also in another stream; the second one returns at once.
    check_waits(one, [&] { WORKS(launch(sum, sum_of(memory, memory, memory, 8), 1, two)); });
    Gate gate(one);
    WORKS(launch(sum, sum_of(memory, memory, memory, 8), 1, two));
    WORKS(to_host(other, memory, kBytes, two));
    gate.open();
    WORKS(cu("cuCtxSynchronize"));
}

// With SIMCUDA_IMPLICIT_SYNC=0.
void other_calls_return_at_once() {
    begin();
    CUstream one = stream(), two = stream();
    Pointer memory = allocate();
    CUevent never = event();
    Gate gate(one);
    // Each of the two streams has a hardware queue of its own.
    allocate();
    unsigned char* host = pinned();
    WORKS(launch(kernel("flexring_collective_float"), sum_of(memory, memory, memory, 8), 1, two));
    WORKS(to_host(host, memory, kBytes, two));
    WORKS(cu("cuEventRecord", never, two));
    WORKS(synchronize(two));
    CHECK(cu("cuStreamQuery", one) == CUDA_ERROR_NOT_READY);
    gate.open();
    WORKS(synchronize(one));
}

void full_streams_block_launches() {
    begin();
    CUstream one = stream();
    Pointer memory = allocate();
    std::atomic<int> queued{0};
    auto fill = [&] {
        for (int i = 0; i < 1100; ++i, ++queued) {
            WORKS(cu("cuMemsetD8Async", memory, static_cast<unsigned char>(i), size_t{16}, one));
        }
    };
    CUevent never = event();
    Gate gate(one);
    std::atomic<bool> queried{false};
    std::thread first = elsewhere(fill);
    // The wait at the gate counts too if the stream has not begun with it.
    while (queued < 1023) sleep_ms(1);
    sleep_ms(50);
    CHECK(queued <= 1024);
    std::thread second = elsewhere([&] {
        WORKS(cu("cuEventQuery", never));
        queried = true;
    });
    sleep_ms(50);
    CHECK(!queried);
    gate.open();
    first.join();
    second.join();
}

// With SIMCUDA_SYNCHRONIZE_HOLDS=0.
void synchronizing_releases_the_lock_on_demand() {
    begin();
    CUstream one = stream();
    CUevent never = event();
    Gate gate(one);
    std::thread first = elsewhere([&] { WORKS(synchronize(one)); });
    sleep_ms(20);
    WORKS(cu("cuEventQuery", never));
    gate.open();
    first.join();
}

// The thread that would open the gate waits for the lock: what the simulation exists to detect.
void deadlocks_behind_the_lock_are_reported() {
    begin();
    CUstream one = stream();
    CUevent never = event();
    Gate gate(one);
    std::thread first = elsewhere([&] { synchronize(one); });
    sleep_ms(50);
    WORKS(cu("cuEventQuery", never));
    gate.open();
    first.join();
}

void exits_while_threads_wait_for_a_lock() {
    begin();
    static CUstream one = stream();
    static CUevent never = event();
    static Gate gate(one);
    elsewhere([] { synchronize(one); }).detach();
    sleep_ms(20);
    elsewhere([] { cu("cuEventQuery", never); }).detach();
    sleep_ms(20);
}

}  // namespace selftest
