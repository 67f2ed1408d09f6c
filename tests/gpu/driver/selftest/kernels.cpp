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

// The memory of a communicator, as flexring has it.
class Control {
public:
    Control() {
        std::vector<char> zeros(sizeof(GpuState));
        gpu_ = allocate(sizeof(GpuState));
        WORKS(cu("cuMemcpyHtoD_v2", gpu_, static_cast<const void*>(zeros.data()), zeros.size()));
        // Outlives the context.
        void* host = nullptr;
        CHECK(posix_memalign(&host, kBytes, sizeof(HostControl)) == 0);
        std::memset(host, 0, sizeof(HostControl));
        WORKS(cu("cuMemHostRegister_v2", host, sizeof(HostControl),
                 unsigned{CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP}));
        host_ = static_cast<HostControl*>(host);
        WORKS(cu("cuMemHostGetDevicePointer_v2", &mapped_, host, 0u));
    }

    HostControl* host() const { return host_; }

    // Publishes a sum.
    void publish(const FloatSum& sum) {
        Descriptor& job = host_->ring[kRingReduce][published_ % kEntries];
        job = {};
        job.into = sum.into;
        job.count = sum.count;
        job.operands = 2;
        job.tile = 64;
        job.tiles = static_cast<unsigned>((sum.count + 63) / 64);
        job.at[0] = sum.a;
        job.at[1] = sum.b;
        __atomic_store_n(&host_->host.head[kRingReduce], ++published_, __ATOMIC_RELEASE);
    }

    // Launches the kernel of the next call.
    CUresult launch(CUfunction function, unsigned ctas, CUstream stream) {
        LaunchParameters parameters{};
        parameters.gpu = reinterpret_cast<GpuState*>(gpu_);
        parameters.host = reinterpret_cast<HostControl*>(mapped_);
        parameters.call = ++calls_;
        void* pointers[] = {&parameters};
        void** extra = nullptr;
        return cu("cuLaunchKernel", function, ctas, 1u, 1u, 64u, 1u, 1u, 0u, stream, &pointers[0], extra);
    }

    bool is_done() const {
        const unsigned long long last = published_ - 1;
        return __atomic_load_n(&host_->done[kRingReduce][last % kEntries], __ATOMIC_ACQUIRE) == last + 1;
    }
    void finish() { __atomic_store_n(&host_->host.finished, calls_, __ATOMIC_RELEASE); }
    bool has_started() const { return __atomic_load_n(&host_->kernel.started, __ATOMIC_ACQUIRE) == calls_; }
    bool has_ended() const { return __atomic_load_n(&host_->kernel.ended, __ATOMIC_ACQUIRE) == calls_; }

private:
    Pointer gpu_ = 0, mapped_ = 0;
    HostControl* host_ = nullptr;
    unsigned long long published_ = 0, calls_ = 0;
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
    Control* const control = controls[launches++ % controls.size()];
    control->publish(sum);
    const CUresult code = control->launch(function, ctas, stream);
    if (code != CUDA_SUCCESS) return code;
    // Ends with the process.
    std::thread([control] {
        while (!control->is_done()) nap();
        control->finish();
    }).detach();
    return code;
}

void racing_tiles_die() {
    begin();
    Pointer memory = allocate(20000);
    CUstream one = stream();
    // Each element is written beside the one that is read for it, by this CTA or the next.
    launch(kernel("flexring_float"), sum_of(memory, memory + 4, memory, 4000), 4, one);
    synchronize(one);
}

// More kernels than CTAs fit run one after another, or at least with one CTA each.
void kernels_share_the_gpu() {
    begin();
    constexpr size_t count = 1000;
    constexpr unsigned kernels = 6;
    auto* ones = reinterpret_cast<float*>(pinned(count * 4));
    for (size_t i = 0; i < count; ++i) ones[i] = 1;
    CUfunction sum = kernel("flexring_float");
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
    CUfunction sum = kernel("flexring_float");
    CUstream one = stream();
    Control control;
    WORKS(control.launch(sum, 4, one));
    CHECK(synchronize(one) == 719u);
    CHECK(!control.has_ended());
    CHECK(cu("cuCtxSynchronize") == 719u);
}

void endless_kernels_are_reported() {
    begin();
    Pointer memory = allocate();
    CUfunction sum = kernel("flexring_float");
    CUstream one = stream();
    Control control;
    control.publish(sum_of(memory, memory, memory, 8));
    WORKS(control.launch(sum, 2, one));
    // The host never finishes the call.
    while (true) nap();
}

void overlapping_kernels_die() {
    begin();
    CUfunction sum = kernel("flexring_float");
    Control control;
    WORKS(control.launch(sum, 2, stream()));
    WORKS(control.launch(sum, 2, stream()));
    for (int nth = 0; nth < 5000; ++nth) nap();
}

void memory_freed_under_a_kernel_is_noticed() {
    begin();
    CUfunction sum = kernel("flexring_float");
    CUstream one = stream();
    Control control;
    WORKS(control.launch(sum, 2, one));
    while (!control.has_started()) nap();
    WORKS(cu("cuMemHostUnregister", static_cast<void*>(control.host())));
    control.finish();
    synchronize(one);
}

void workers_call_nothing_while_a_kernel_runs() {
    begin();
    CUfunction sum = kernel("flexring_float");
    Control control;
    int count = 0;
    auto named_call = [&](const char* name) {
        std::thread([&, name] {
            pthread_setname_np(pthread_self(), name);
            WORKS(cu("cuDeviceGetCount", &count));
        }).join();
    };
    named_call("flexring-worker");
    WORKS(control.launch(sum, 2, stream()));
    while (!control.has_started()) nap();
    named_call("another");
    named_call("flexring-worker");
}

}  // namespace selftest
