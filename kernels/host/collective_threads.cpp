// Runs the kernels of collective.cu with CTAs of several threads on a CPU: a process plays a rank, whose only CTA has host threads.
//
//     g++ -O1 -g -std=c++17 -ffp-contract=off -pthread -DFLEXRING_STRESSED -DFLEXRING_CTA_THREADS -I kernels [-fsanitize=thread]
//         kernels/host/collective_threads.cpp
//     collective_threads SEED CALLS
//
// Sums, and exchanges of blocks, by all paths, with 1 to 12 threads. Barriers are the only order between the threads of a CTA, so
// ThreadSanitizer reports one that is missing.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>

// Others would take longer to compile than all runs.
#define FLEXRING_TYPES(with) with(uint8, Uint8) with(uint32, Uint32)

#include "shim.h"
#include "../collective.cu"

using namespace flexring;

namespace {

// A barrier whose threads also agree on whether any has passed a number.
class Meeting {
  public:
    void begin(unsigned threads) { threads_ = threads; }
    int meet(int any) {
        std::unique_lock<std::mutex> lock(mutex_);
        any_ |= any != 0;
        const unsigned turn = turn_;
        if (++arrived_ == threads_) {
            result_ = any_, any_ = 0, arrived_ = 0, ++turn_;
            met_.notify_all();
        } else {
            met_.wait(lock, [&] { return turn_ != turn; });
        }
        return result_;
    }

  private:
    std::mutex mutex_;
    std::condition_variable met_;
    unsigned threads_ = 1, arrived_ = 0, turn_ = 0;
    int any_ = 0, result_ = 0;
} meeting;

class YieldingMachine final : public Machine {
  public:
    void* reach(void* at, u64, u32, bool) override { return at; }
    void* reach_shared(void* at, u64, bool) override { return at; }
    void end_reach() override {}
    void pause() override { std::this_thread::yield(); }
    void published(const void*) override {}
};

void check(bool holds, const char* what, u64 call) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s in call %llu\n", what, call);
    std::fflush(stderr);
    _exit(1);
}

u32 number(u64 call, u32 from, u32 to, u64 nth) {
    return static_cast<u32>((call * 31 + from * 7 + to * 3 + nth) * 0x9e3779b97f4a7c15ull >> 40);
}

// Elements that a vector has room for.
constexpr u64 kRoom = 16384;

// What all processes have at one address.
struct Memory {
    CollectiveState* state;
    u32* vectors[kPlaces];
};

// Calls of one rank: all-reduces, reduce-scatters and all-to-alls of 32-bit integers.
void play(const Memory* memories, u32 rank, u32 ranks, u32 short_bytes, u64 seed, u64 calls) {
    std::mt19937_64 alike(seed), own(seed * 16 + rank);
    static CollectiveStatus status;
    CollectiveState& state = *memories[rank].state;
    for (u32 peer = 0; peer < ranks; ++peer) {
        state.peers[peer] = memories[peer].state;
        for (u32 kind = 0; kind < kPlaces; ++kind) state.memories[peer][kind] = reinterpret_cast<u64>(memories[peer].vectors[kind]);
    }
    for (u64 call = 1; call <= calls; ++call) {
        const u64 kind = alike() % 3, lengths[] = {alike() % 9, alike() % (short_bytes / 4), short_bytes / 4, 1 + alike() % 3000};
        const bool is_aligned = alike() % 2 == 0;
        const u64 count = lengths[alike() % 4], bytes = count * 4;
        const auto skew = [&] { return is_aligned ? 0 : own() % 4; };
        const bool differ = kind != 0, reduces = kind != 2, in_place = alike() % 3 == 0;
        const u64 outputs = count * (reduces ? 1 : ranks);
        u32* const from = memories[rank].vectors[0] + skew();
        u32* const into = in_place ? from + (kind == 1 ? rank * count : 0) : memories[rank].vectors[1] + skew();
        for (u32 to = 0; to < (differ ? ranks : 1); ++to) {
            for (u64 nth = 0; nth < count; ++nth) from[to * count + nth] = number(call, rank, differ ? to : 0, nth);
        }
        CollectiveParameters parameters{};
        parameters.state = &state;
        parameters.status = &status;
        parameters.launch = call;
        parameters.hash = seed + call;
        parameters.input = from;
        parameters.output = into;
        parameters.count = reduces ? count : bytes;
        parameters.sends = parameters.receives = (1u << ranks) - 1;
        parameters.send_stride = differ ? bytes : 0;
        parameters.receive_stride = reduces ? 0 : bytes;
        parameters.reduces = reduces;
        parameters.rank = rank;
        parameters.ranks = ranks;
        parameters.path = bytes <= short_bytes && alike() % 3 != 0 ? kShort : kStaged;
        parameters.slices = 1 + alike() % 3;
        parameters.short_bytes = short_bytes;

        const bool is_placed = parameters.path == kStaged && is_aligned && bytes % 16 == 0 && !(in_place && kind == 2);
        for (u32 nth = 0; is_placed && nth < kPlaces; ++nth) {
            const u64 offset = reinterpret_cast<u64>(nth == 0 ? from : into) - state.memories[rank][in_place ? 0 : nth];
            parameters.places[nth] = kPlaced | kInMemory | (in_place ? 0ull : nth) << kOffsetBits | offset;
        }

        const unsigned threads = own() % 3 == 0 ? 1 + own() % 3 : 1 + own() % 12;
        meeting.begin(threads);
        std::vector<std::thread> all;
        for (unsigned thread = 0; thread < threads; ++thread) {
            all.emplace_back([&, thread] {
                YieldingMachine machine;
                flexring::machine = &machine;
                gridDim = {1, 1, 1}, blockDim = {threads, 1, 1}, blockIdx = {0, 0, 0}, threadIdx = {thread, 0, 0};
                if (reduces) {
                    flexring_collective_uint32(parameters);
                } else {
                    flexring_collective_uint8(parameters);
                }
                flexring::machine = nullptr;
            });
        }
        for (std::thread& thread : all) thread.join();
        check(status.failure == kNoFailure, "a failure", call);
        for (u64 nth = 0; nth < outputs; ++nth) {
            const u32 block = static_cast<u32>(count == 0 ? 0 : nth / count);
            u32 must = 0;
            for (u32 peer = 0; peer < ranks && reduces; ++peer) must += number(call, peer, differ ? rank : 0, nth);
            if (!reduces) must = number(call, block, rank, nth % count);
            check(into[nth] == must, "a wrong element", call);
        }
    }
}

}  // namespace

int meet_threads(int any) { return meeting.meet(any); }

int main(int count, char** arguments) {
    const u64 seed = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1;
    const u64 calls = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 40;
    const u32 ranks = 2 + seed % 3, short_bytes = 2048;
    const u64 bytes = (sizeof(CollectiveState) + 4ull * ranks * short_bytes + 2ull * kMostSlices * kStages * kStageBytes + 4095) / 4096 * 4096;
    Memory memories[kMostRanks] = {};
    const auto shared = [](u64 bytes) { return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0); };
    for (u32 rank = 0; rank < ranks; ++rank) {
        memories[rank].state = static_cast<CollectiveState*>(shared(bytes));
        for (u32*& vector : memories[rank].vectors) vector = static_cast<u32*>(shared(kRoom * 4));
    }
    for (u32 rank = 0; rank < ranks; ++rank) {
        if (fork() != 0) continue;
        alarm(120);
        play(memories, rank, ranks, short_bytes, seed, calls);
        return 0;
    }
    int failed = 0;
    for (u32 rank = 0; rank < ranks; ++rank) {
        int status = 0;
        wait(&status);
        if (status != 0) std::fprintf(stderr, "failed: a rank ended with %d\n", status), failed = 1;
    }
    if (!failed) std::printf("%llu calls: every result is right\n", calls);
    return failed;
}
