// Shared by the scenarios: the driver, opened as flexring opens NVIDIA's, and calls of it that must succeed.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../../../../kernels/collective.h"
#include "../abi.h"

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
            _exit(1);                                                                 \
        }                                                                             \
    } while (false)
#define WORKS(call) CHECK((call) == CUDA_SUCCESS)

namespace selftest {

template <class... Arguments>
CUresult cu(const char* name, Arguments... arguments) {
    static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(library);
    auto function = reinterpret_cast<CUresult (*)(Arguments...)>(dlsym(library, name));
    if (!function) std::fprintf(stderr, "%s is not there\n", name);
    CHECK(function);
    return function(arguments...);
}

using Pointer = CUdeviceptr;
constexpr size_t kBytes = 4096;

inline void begin(int gpu = 0) {
    CUcontext context = nullptr;
    WORKS(cu("cuInit", 0u));
    WORKS(cu("cuDevicePrimaryCtxRetain", &context, gpu));
    WORKS(cu("cuCtxSetCurrent", context));
}

inline Pointer allocate(size_t bytes = kBytes) {
    Pointer at = 0;
    WORKS(cu("cuMemAlloc_v2", &at, bytes));
    CHECK(at % 512 == 0);
    return at;
}

inline unsigned char* pinned(size_t bytes = kBytes) {
    void* at = nullptr;
    WORKS(cu("cuMemHostAlloc", &at, bytes, 0u));
    return static_cast<unsigned char*>(at);
}

inline CUstream stream(unsigned flags = CU_STREAM_NON_BLOCKING) {
    CUstream made = nullptr;
    WORKS(cu("cuStreamCreate", &made, flags));
    return made;
}

inline CUevent event() {
    CUevent made = nullptr;
    WORKS(cu("cuEventCreate", &made, unsigned{CU_EVENT_DISABLE_TIMING}));
    return made;
}

inline void to_device(Pointer to, const void* from, size_t bytes, CUstream stream) {
    WORKS(cu("cuMemcpyHtoDAsync_v2", to, from, bytes, stream));
}
inline CUresult to_host(void* to, Pointer from, size_t bytes, CUstream stream) {
    return cu("cuMemcpyDtoHAsync_v2", to, from, bytes, stream);
}
inline CUresult synchronize(CUstream stream) { return cu("cuStreamSynchronize", stream); }
inline Pointer address(const void* at) { return reinterpret_cast<Pointer>(at); }

// The address by which kernels use pinned memory.
inline Pointer mapped(const void* at) {
    Pointer there = 0;
    WORKS(cu("cuMemHostGetDevicePointer_v2", &there, const_cast<void*>(at), 0u));
    return there;
}

enum Mode { Global = 0, ThreadLocal = 1, Relaxed = 2 };

inline void begin_capture(CUstream stream, Mode mode = ThreadLocal) {
    WORKS(cu("cuStreamBeginCapture_v2", stream, static_cast<int>(mode)));
}

inline int status(CUstream stream) {
    int status = 0;
    WORKS(cu("cuStreamIsCapturing", stream, &status));
    return status;
}

// Allocates what launches need.
void prepare_launches();

inline CUfunction kernel(const char* name) {
    CUmodule module = nullptr;
    CUfunction function = nullptr;
    prepare_launches();
    WORKS(cu("cuModuleLoadData", &module, static_cast<const void*>("anything")));
    WORKS(cu("cuModuleGetFunction", &function, module, name));
    return function;
}

// A sum of two vectors of floats.
struct FloatSum {
    Pointer into, a, b;
    size_t count;
};
inline FloatSum sum_of(Pointer into, Pointer a, Pointer b, size_t count) { return {into, a, b, count}; }

// Launches a kernel that adds them.
CUresult launch(CUfunction function, const FloatSum& sum, unsigned ctas, CUstream stream);

// The arguments of a process that a scenario started.
extern std::string argument;

void order_needs_events();
void legacy_stream_keeps_order();
void pinned_copies_take_time();
void kernels_compute();
void racing_tiles_die();
void kernels_share_the_gpu();
void broken_kernels_leave();
void workers_call_nothing_while_a_kernel_runs();
void streams_wait_for_values();
void host_functions_run_one_at_a_time();
void calls_in_host_functions_die();
void threads_share_the_driver();
void calls_hold_the_lock_while_they_wait();
void other_calls_return_at_once();
void full_streams_block_launches();
void synchronizing_releases_the_lock_on_demand();
void deadlocks_behind_the_lock_are_reported();
void exits_while_threads_wait_for_a_lock();
void one_queue_blocks_other_streams();
void own_queues_do_not_block();
void running_work_does_not_block_its_queue();
void unsafe_calls_invalidate_captures();
void a_wait_for_earlier_work_invalidates_a_capture();
void captures_end_in_their_thread();
void forks_must_join();
void captures_do_not_mix();
void captured_work_has_no_state();
void graphs_replay();
void graphs_copy_parameters();
void graphs_follow_their_edges();
void launches_of_a_graph_are_serialised();
void captures_report_their_graph();
void graphs_are_cloned_and_nested();
void user_objects_outlive_launches();
void user_objects_die_with_captures();
void calls_in_destructors_die();
void kernels_unloaded_under_a_graph_die();
void invalid_graph_calls_fail();
void destroyed_contexts_release_graphs();
void collectives_run_between_processes();
void takes_part_in_collectives();
void overlapping_collectives_report_it();
void collectives_with_wrong_peers_break();
void endless_collectives_are_reported();
void memory_unregistered_under_a_collective_is_noticed();
void unregistered_memory_is_out_of_reach();
void the_host_cannot_touch_device_memory();
void memory_is_limited();
void pointers_report_their_attributes();
void pool_memory_follows_its_stream();
void gpus_access_each_other_if_enabled();
void memory_is_shared_between_processes();
void opens_a_handle();
void holds_a_handle();
void memory_open_elsewhere_is_not_freed();
void ended_processes_hold_no_memory();
void mappings_side_by_side_are_one_memory();
void handles_say_what_is_mapped();
void mappings_need_access();
void descriptors_share_physical_memory();
void imports_a_descriptor();
void leaks_are_reported();
void nothing_leaks();
void hangs_are_reported();
void processes_end_during_work();
void forks_are_refused();
void calls_need_a_context();
void calls_fail_on_demand();
void errors_are_sticky();

}  // namespace selftest
