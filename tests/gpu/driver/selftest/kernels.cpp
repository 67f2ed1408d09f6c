// Launches: what kernels compute, where they run, and how they end.

#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include <pthread.h>

#include "programs.h"

namespace selftest {
namespace {

using namespace flexring;
using std::chrono::milliseconds;

// The memory of a communicator, as flexring has it. Its lists are in pinned memory, so that the host can change them while kernels run.
class Control {
public:
    Control() {
        // Of two ranks.
        state_ = allocate(sizeof(CollectiveState) + size_t{2} * kMostSlices * kStages * kStageBytes);
        WORKS(cu("cuMemsetD8_v2", state_, static_cast<unsigned char>(0), sizeof(CollectiveState)));
        const Pointer peers[2] = {state_, state_};
        WORKS(cu("cuMemcpyHtoD_v2", state_ + offsetof(CollectiveState, peers), static_cast<const void*>(peers), sizeof peers));
        status_ = static_cast<CollectiveStatus*>(registered(sizeof(CollectiveStatus)));
        list_ = static_cast<List*>(registered(sizeof(List)));
    }

    // A sum, in items of 64 elements.
    CUresult launch(CUfunction function, const FloatSum& sum, unsigned ctas, CUstream stream) {
        List& list = *list_;
        list = {};
        const auto at = [&](const void* part) { return reinterpret_cast<void*>(mapped(part)); };
        for (size_t first = 0; first < sum.count; first += kItem) {
            const unsigned nth = list.program.item_count++;
            CHECK(nth < kItems);
            ProgramItem& item = list.items[nth];
            item.elements = static_cast<unsigned>(sum.count - first < kItem ? sum.count - first : kItem);
            item.first_place = 3 * nth, item.sources = 2, item.destinations = 1;
            ProgramPlace* const places = list.places + item.first_place;
            // The rank's vectors begin at address 0.
            const Pointer vectors[] = {sum.a, sum.b, sum.into};
            for (int place = 0; place < 3; ++place) {
                places[place] = {place < 2 ? kInputPlace : kOutputPlace, 0, vectors[place] / sizeof(float) + first};
            }
        }
        list.program.items = static_cast<ProgramItem*>(at(list.items));
        list.program.places = static_cast<ProgramPlace*>(at(list.places));
        list.program.done = static_cast<unsigned long long*>(at(list.done));
        CollectiveParameters call = parameters();
        call.program = static_cast<Program*>(at(&list.program));
        call.path = kListed, call.ranks = 1, call.slices = 1;
        return launch(function, call, ctas, stream);
    }

    // Launches a kernel that waits for another rank.
    CUresult wait(CUfunction function, unsigned ctas, CUstream stream) {
        CollectiveParameters call = parameters();
        call.path = kShort, call.ranks = 2, call.slices = 1;
        return launch(function, call, ctas, stream);
    }
    bool is_waiting() const { return __atomic_load_n(&status_->waiting_epoch, __ATOMIC_ACQUIRE) != 0; }

private:
    static constexpr size_t kItem = 64, kItems = 64;
    struct List {
        Program program;
        ProgramItem items[kItems];
        ProgramPlace places[3 * kItems];
        unsigned long long done[kItems];
    };

    // Zeros that outlive the context.
    static void* registered(size_t bytes) {
        void* host = nullptr;
        CHECK(posix_memalign(&host, kBytes, bytes) == 0);
        std::memset(host, 0, bytes);
        WORKS(cu("cuMemHostRegister_v2", host, bytes, unsigned{CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP}));
        return host;
    }
    CollectiveParameters parameters() {
        CollectiveParameters call{};
        call.state = reinterpret_cast<CollectiveState*>(state_);
        call.status = reinterpret_cast<CollectiveStatus*>(mapped(status_));
        call.launch = ++launches_;
        return call;
    }
    static CUresult launch(CUfunction function, CollectiveParameters& call, unsigned ctas, CUstream stream) {
        void* pointers[] = {&call};
        void** extra = nullptr;
        return cu("cuLaunchKernel", function, ctas, 1u, 1u, 64u, 1u, 1u, 0u, stream, &pointers[0], extra);
    }

    Pointer state_ = 0;
    CollectiveStatus* status_ = nullptr;
    List* list_ = nullptr;
    unsigned long long launches_ = 0;
};

// Used in turn, because kernels of one communicator must not overlap.
std::vector<Control*> controls;
std::atomic<unsigned> launches{0};

void nap() { std::this_thread::sleep_for(milliseconds(1)); }

}  // namespace

void prepare_launches() {
    while (controls.size() < 8) controls.push_back(new Control);
}

CUresult launch(CUfunction function, const FloatSum& sum, unsigned ctas, CUstream stream) {
    prepare_launches();
    return controls[launches++ % controls.size()]->launch(function, sum, ctas, stream);
}

void racing_tiles_die() {
    begin();
    Pointer memory = allocate(20000);
    CUstream one = stream();
    // Each element is written beside the one that is read for it, by this CTA or the next.
    launch(kernel("flexring_collective_float"), sum_of(memory, memory + 4, memory, 4000), 4, one);
    synchronize(one);
}

// More kernels than CTAs fit run one after another, or at least with one CTA each.
void kernels_share_the_gpu() {
    begin();
    constexpr size_t count = 1000;
    constexpr unsigned kernels = 6;
    auto* ones = reinterpret_cast<float*>(pinned(count * 4));
    for (size_t i = 0; i < count; ++i) ones[i] = 1;
    CUfunction sum = kernel("flexring_collective_float");
    std::vector<CUstream> streams;
    std::vector<Pointer> results;
    for (unsigned nth = 0; nth < kernels; ++nth) {
        streams.push_back(stream());
        results.push_back(allocate(count * 4));
        to_device(results[nth], ones, count * 4, streams[nth]);
        WORKS(launch(sum, sum_of(results[nth], results[nth], mapped(ones), count), 16, streams[nth]));
    }
    for (unsigned nth = 0; nth < kernels; ++nth) {
        std::vector<float> found(count);
        WORKS(to_host(found.data(), results[nth], count * 4, streams[nth]));
        WORKS(synchronize(streams[nth]));
        for (float value : found) CHECK(value == 2);
    }
}

void broken_kernels_leave() {
    begin();
    CUfunction sum = kernel("flexring_collective_float");
    CUstream one = stream();
    Control control;
    WORKS(control.wait(sum, 4, one));
    CHECK(synchronize(one) == 719u);
    CHECK(cu("cuCtxSynchronize") == 719u);
}

void workers_call_nothing_while_a_kernel_runs() {
    begin();
    CUfunction sum = kernel("flexring_collective_float");
    Control control;
    int count = 0;
    auto named_call = [&](const char* name) {
        std::thread([&, name] {
            pthread_setname_np(pthread_self(), name);
            WORKS(cu("cuDeviceGetCount", &count));
        }).join();
    };
    named_call("flexring-worker");
    WORKS(control.wait(sum, 2, stream()));
    while (!control.is_waiting()) nap();
    named_call("another");
    named_call("flexring-worker");
}

}  // namespace selftest
