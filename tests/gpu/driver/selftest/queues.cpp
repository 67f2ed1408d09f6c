// Hardware queues that streams share.

#include <chrono>
#include <thread>

#include "programs.h"

namespace selftest {

// Whether a copy in a second stream is done while the first stream waits for a value, before or behind it in the queue.
static bool overtakes(bool wait_first) {
    CUstream one = stream(), two = stream();
    auto* word = reinterpret_cast<uint32_t*>(pinned());
    unsigned char* host = pinned();
    Pointer memory = allocate();
    *word = 0;
    if (wait_first) WORKS(cu("cuStreamWaitValue32_v2", one, mapped(word), 1u, 0u));
    WORKS(to_host(host, memory, kBytes, two));
    if (!wait_first) WORKS(cu("cuStreamWaitValue32_v2", one, mapped(word), 1u, 0u));
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    const bool done = cu("cuStreamQuery", two) == CUDA_SUCCESS;
    __atomic_store_n(word, 1, __ATOMIC_RELEASE);
    WORKS(synchronize(one));
    WORKS(synchronize(two));
    return done;
}

// With CUDA_DEVICE_MAX_CONNECTIONS=1: a wait blocks later work of other streams, but not earlier work.
void one_queue_blocks_other_streams() {
    begin();
    CHECK(!overtakes(true));
    CHECK(overtakes(false));
}

// With CUDA_DEVICE_MAX_CONNECTIONS=32.
void own_queues_do_not_block() {
    begin();
    CHECK(overtakes(true));
}

// With CUDA_DEVICE_MAX_CONNECTIONS=1: running work does not block the queue, but work that waits for it does.
void running_work_does_not_block_its_queue() {
    begin();
    constexpr size_t large = size_t{128} << 20;
    CUstream one = stream(), two = stream(), three = stream();
    CUevent copied = event();
    Pointer memory = allocate(large), other = allocate();
    unsigned char* host = pinned(large);
    WORKS(cu("cuMemsetD8Async", memory, static_cast<unsigned char>(7), large, one));
    WORKS(synchronize(one));
    WORKS(to_host(host, memory, large, one));
    WORKS(cu("cuMemsetD8Async", other, static_cast<unsigned char>(1), kBytes, two));
    WORKS(synchronize(two));
    CHECK(cu("cuStreamQuery", one) == CUDA_ERROR_NOT_READY);
    // The record waits for the copy, and what is behind it in the queue waits for the record.
    WORKS(cu("cuEventRecord", copied, one));
    WORKS(cu("cuMemsetD8Async", other, static_cast<unsigned char>(2), kBytes, three));
    WORKS(synchronize(three));
    CHECK(host[0] == 7 && host[large - 1] == 7);
}

}  // namespace selftest
