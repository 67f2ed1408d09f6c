// Kernels that run whole collectives: with other processes, in graphs, and what they must not access.

#include <chrono>
#include <thread>

#include <sys/wait.h>

#include "../../../../kernels/collective.h"
#include "processes.h"
#include "programs.h"

namespace selftest {
namespace {

using namespace flexring;
using std::chrono::milliseconds;

constexpr unsigned kCount = 40, kShortBytes = 4096, kSlices = 3;

// A rank's memory, as flexring has it, and its vectors.
class Rank {
public:
    Rank(unsigned rank, unsigned ranks) : rank_(rank), ranks_(ranks) {
        const size_t bytes = sizeof(CollectiveState) + size_t{2} * ranks * kShortBytes / 8 * sizeof(Packet) +
                             size_t{2} * kMostSlices * kStages * kStageBytes;
        state_ = allocate(bytes);
        WORKS(cu("cuMemsetD8_v2", state_, static_cast<unsigned char>(0), bytes));
        status_ = reinterpret_cast<CollectiveStatus*>(pinned());
        std::memset(status_, 0, sizeof *status_);
        input_ = allocate();
        output_ = allocate();
        WORKS(cu("cuCtxSynchronize"));
    }

    Pointer state() const { return state_; }
    CollectiveStatus& status() const { return *status_; }
    unsigned long long failure() const { return __atomic_load_n(&status_->failure, __ATOMIC_ACQUIRE); }

    void connect(const std::vector<Pointer>& states) {
        WORKS(cu("cuMemcpyHtoD_v2", state_ + offsetof(CollectiveState, peers),
                 static_cast<const void*>(states.data()), states.size() * sizeof(Pointer)));
        WORKS(cu("cuCtxSynchronize"));
    }

    // An all-reduce of this rank's vectors.
    void launch(CUfunction function, unsigned long long number, CUstream stream) {
        CollectiveParameters call{};
        call.state = reinterpret_cast<CollectiveState*>(state_);
        call.status = reinterpret_cast<CollectiveStatus*>(mapped(status_));
        call.launch = number;
        call.hash = 77;
        call.input = reinterpret_cast<const void*>(input_);
        call.output = reinterpret_cast<void*>(output_);
        call.count = kCount;
        call.sends = call.receives = (1u << ranks_) - 1;
        call.reduces = 1;
        call.operation = kSum;
        call.rank = rank_;
        call.ranks = ranks_;
        call.path = kShort;
        call.slices = kSlices;
        call.short_bytes = kShortBytes;
        void* pointers[] = {&call};
        void** extra = nullptr;
        // Ranks may have different grids.
        WORKS(
            cu("cuLaunchKernel", function, 1 + rank_, 1u, 1u, 64u, 1u, 1u, 0u, stream, &pointers[0], extra));
    }

    void fill(float value, CUstream stream) {
        const std::vector<float> values(kCount, value);
        to_device(input_, values.data(), kCount * 4, stream);
    }
    void check(float expected, CUstream stream) {
        std::vector<float> found(kCount);
        WORKS(to_host(found.data(), output_, kCount * 4, stream));
        WORKS(synchronize(stream));
        CHECK(failure() == kNoFailure);
        for (float value : found) CHECK(value == expected);
    }

private:
    unsigned rank_, ranks_;
    Pointer state_ = 0, input_ = 0, output_ = 0;
    CollectiveStatus* status_ = nullptr;
};

CUfunction collective() { return kernel("flexring_collective_float"); }

// The calls of a rank of two: launches, and graphs of three calls.
void run_calls(Rank& rank, unsigned number) {
    CUfunction function = collective();
    CUstream one = stream();
    unsigned long long launches = 0;
    rank.launch(function, 0, one);
    for (int call = 1; call <= 300; ++call) {
        rank.fill(static_cast<float>(call * (1 + number)), one);
        rank.launch(function, ++launches, one);
        if (call % 3 == 0) rank.check(static_cast<float>(call * 3), one);
    }
    begin_capture(one);
    for (int call = 0; call < 3; ++call) rank.launch(function, ++launches | 1ull << 63, one);
    CUgraph graph = nullptr;
    CUgraphExec replay = nullptr;
    WORKS(cu("cuStreamEndCapture", one, &graph));
    WORKS(cu("cuGraphInstantiateWithFlags", &replay, graph, 0ull));
    for (int round = 1; round <= 200; ++round) {
        rank.fill(static_cast<float>(round * (1 + number)), one);
        WORKS(cu("cuGraphLaunch", replay, one));
        // Launches between replays.
        if (round % 5 == 0) rank.launch(function, ++launches, one);
        if (round % 4 == 0) rank.check(static_cast<float>(round * 3), one);
    }
    WORKS(synchronize(one));
}

}  // namespace

void collectives_run_between_processes() {
    begin();
    Rank rank(0, 2);
    CUipcMemHandle mine, theirs;
    WORKS(cu("cuIpcGetMemHandle", &mine, rank.state()));
    int answer[2], input = -1;
    CHECK(pipe(answer) == 0);
    setenv("SAY", std::to_string(answer[1]).c_str(), 1);
    const pid_t child = again("takes_part_in_collectives", text_of(mine), input);
    CHECK(read(answer[0], &theirs, sizeof theirs) == sizeof theirs);
    Pointer peer = 0;
    WORKS(cu("cuIpcOpenMemHandle_v2", &peer, theirs, 1u));
    rank.connect({rank.state(), peer});
    run_calls(rank, 0);
    // Both have come to the end of their calls.
    WORKS(cu("cuIpcCloseMemHandle", peer));
    CHECK(write(input, "x", 1) == 1);
    CHECK(succeeded(child));
    WORKS(cu("cuMemFree_v2", rank.state()));
}

void takes_part_in_collectives() {
    begin();
    Rank rank(1, 2);
    CUipcMemHandle mine;
    WORKS(cu("cuIpcGetMemHandle", &mine, rank.state()));
    CHECK(write(std::stoi(std::getenv("SAY")), &mine, sizeof mine) == sizeof mine);
    Pointer peer = 0;
    WORKS(cu("cuIpcOpenMemHandle_v2", &peer, told_handle(), 1u));
    rank.connect({peer, rank.state()});
    run_calls(rank, 1);
    WORKS(cu("cuIpcCloseMemHandle", peer));
    char byte = 0;
    CHECK(read(0, &byte, 1) == 1);
    WORKS(cu("cuMemFree_v2", rank.state()));
}

// Two ranks of one process. Returns once both are connected.
static void connect(Rank& first, Rank& second) {
    first.connect({first.state(), second.state()});
    second.connect({first.state(), second.state()});
}

// Connects both, and launches the first one's kernel, which waits for the second's. Returns the kernel, which was loaded before.
static CUfunction begin_waiting(Rank& first, Rank& second, CUstream stream) {
    connect(first, second);
    CUfunction function = collective();
    first.launch(function, 1, stream);
    return function;
}

void overlapping_collectives_report_it() {
    begin();
    Rank first(0, 2), second(1, 2);
    CUstream one = stream(), two = stream();
    first.launch(begin_waiting(first, second, one), 2, two);
    WORKS(synchronize(one));
    WORKS(synchronize(two));
    CHECK(first.failure() == kOverlap);
}

void collectives_with_wrong_peers_break() {
    begin();
    Rank first(0, 2), second(1, 2);
    first.connect({first.state(), second.state() + (1ull << 30)});
    CUstream one = stream();
    first.launch(collective(), 1, one);
    CHECK(synchronize(one) == CUDA_ERROR_ILLEGAL_ADDRESS);
}

void endless_collectives_are_reported() {
    begin();
    Rank first(0, 2), second(1, 2);
    begin_waiting(first, second, stream());
    while (true) std::this_thread::sleep_for(milliseconds(1));
}

void memory_unregistered_under_a_collective_is_noticed() {
    begin();
    Rank first(0, 2), second(1, 2);
    CUstream one = stream(), two = stream();
    CUfunction function = begin_waiting(first, second, one);
    std::this_thread::sleep_for(milliseconds(30));
    WORKS(cu("cuMemFreeHost", static_cast<void*>(&first.status())));
    second.launch(function, 1, two);
    synchronize(one);
}

}  // namespace selftest
