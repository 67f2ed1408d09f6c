// Tests of the simulated driver through its public functions.
//
// Without arguments, runs every scenario in a process of its own and checks how it ends. A scenario is a function with
// assertions. The table below lists the expected signal of scenarios that must abort.

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#include "programs.h"

namespace selftest {

std::string argument;

}  // namespace selftest

using namespace selftest;

namespace {

struct Scenario {
    const char* name;
    void (*body)();
    std::vector<std::string> environment;
    // The expected signal, and the expected texts on stderr.
    int signal;
    std::vector<std::string> says;
};

#define SCENARIO(body, ...) Scenario{#body, body, __VA_ARGS__}

const std::vector<Scenario> scenarios = {
    SCENARIO(calls_need_a_context, {}, 0, {}),
#ifndef __SANITIZE_THREAD__
    // Their programs have data races on purpose, and check that they read wrong values.
    SCENARIO(order_needs_events, {"SIMCUDA_DELAY_US=300"}, 0, {}),
    SCENARIO(pinned_copies_take_time, {}, 0, {}),
#endif
    SCENARIO(legacy_stream_keeps_order, {}, 0, {}),
    SCENARIO(kernels_compute, {}, 0, {}),
    SCENARIO(racing_tiles_die, {}, SIGABRT, {"flexring_collective_float: a tile "}),
    SCENARIO(kernels_share_the_gpu, {"SIMCUDA_MULTIPROCESSORS=1"}, 0, {}),
    SCENARIO(broken_kernels_leave, {"SIMCUDA_FAIL=kernel:1:719"}, 0, {"ended in error 719"}),
    SCENARIO(workers_call_nothing_while_a_kernel_runs, {}, SIGABRT,
             {"cuDeviceGetCount: called by a worker of flexring while a kernel runs"}),
    SCENARIO(errors_are_sticky, {}, 0, {"goes beyond the end of its allocation"}),
    SCENARIO(unregistered_memory_is_out_of_reach, {}, 0, {"is host memory that is not registered"}),
    SCENARIO(the_host_cannot_touch_device_memory, {}, SIGSEGV, {}),
    SCENARIO(streams_wait_for_values, {}, 0, {}),
    SCENARIO(host_functions_run_one_at_a_time, {}, 0, {}),
    SCENARIO(calls_in_host_functions_die, {}, SIGABRT, {"cuDeviceGetCount: called from a host function"}),
    SCENARIO(calls_fail_on_demand,
             {"SIMCUDA_FAIL=cuMemAlloc_v2:3:2,work:2:214", "SIMCUDA_WITHOUT=cuMemHostUnregister"}, 0, {}),
    SCENARIO(memory_is_limited, {"SIMCUDA_MEMORY=1000000"}, 0, {}),
    SCENARIO(pointers_report_their_attributes, {}, 0, {}),
    SCENARIO(pool_memory_follows_its_stream, {}, 0,
             {"is allocated by a stream that has not reached the allocation yet"}),
    SCENARIO(gpus_access_each_other_if_enabled, {"SIMCUDA_GPUS=2"}, 0,
             {"is memory of a GPU that this one has no access to"}),
    SCENARIO(memory_is_shared_between_processes, {}, 0, {}),
    SCENARIO(memory_open_elsewhere_is_not_freed, {}, SIGABRT, {"is still open in process"}),
    SCENARIO(ended_processes_hold_no_memory, {}, 0, {}),
    SCENARIO(mappings_side_by_side_are_one_memory, {}, 0, {}),
    SCENARIO(handles_say_what_is_mapped, {}, 0, {}),
    SCENARIO(mappings_need_access, {}, 0, {"is mapped without access of this GPU (cuMemSetAccess)"}),
    SCENARIO(descriptors_share_physical_memory, {}, 0, {}),
    SCENARIO(leaks_are_reported, {"SIMCUDA_LEAKS=1"}, 0,
             {"leaked 1 stream of GPU 0", "leaked 1 event of GPU 0", "of 12345 bytes by cuMemAlloc_v2",
              "leaked registration", "leaked 1 retained context"}),
    SCENARIO(nothing_leaks, {"SIMCUDA_LEAKS=1"}, 0, {"!leaked"}),
    SCENARIO(hangs_are_reported, {"SIMCUDA_HANG_S=1"}, SIGABRT,
             {"cuStreamSynchronize: waits for 1 s already", "cuStreamWaitValue32_v2"}),
    SCENARIO(processes_end_during_work, {}, 0, {}),
    SCENARIO(forks_are_refused, {}, 0, {}),
    SCENARIO(threads_share_the_driver, {}, 0, {}),
    SCENARIO(calls_hold_the_lock_while_they_wait, {"SIMCUDA_IMPLICIT_SYNC=1"}, 0, {}),
    SCENARIO(other_calls_return_at_once, {"SIMCUDA_IMPLICIT_SYNC=0"}, 0, {}),
    SCENARIO(full_streams_block_launches, {}, 0, {}),
    SCENARIO(synchronizing_releases_the_lock_on_demand, {"SIMCUDA_SYNCHRONIZE_HOLDS=0"}, 0, {}),
    SCENARIO(deadlocks_behind_the_lock_are_reported, {"SIMCUDA_HANG_S=1"}, SIGABRT,
             {"waits for 1 s already", "holds the lock of the context", "cuEventQuery in thread"}),
    SCENARIO(exits_while_threads_wait_for_a_lock, {}, 0, {}),
    SCENARIO(one_queue_blocks_other_streams, {"CUDA_DEVICE_MAX_CONNECTIONS=1"}, 0, {}),
    SCENARIO(own_queues_do_not_block, {"CUDA_DEVICE_MAX_CONNECTIONS=32"}, 0, {}),
    SCENARIO(running_work_does_not_block_its_queue,
             {"CUDA_DEVICE_MAX_CONNECTIONS=1", "SIMCUDA_IMPLICIT_SYNC=0"}, 0, {}),
    SCENARIO(unsafe_calls_invalidate_captures, {}, 0, {}),
    SCENARIO(a_wait_for_earlier_work_invalidates_a_capture, {}, 0, {}),
    SCENARIO(captures_end_in_their_thread, {}, 0, {}),
    SCENARIO(forks_must_join, {}, 0, {}),
    SCENARIO(captures_do_not_mix, {}, 0, {}),
    SCENARIO(captured_work_has_no_state, {}, 0, {}),
    SCENARIO(graphs_replay, {}, 0, {}),
    SCENARIO(graphs_copy_parameters, {}, 0, {}),
    SCENARIO(graphs_follow_their_edges, {}, 0, {}),
    SCENARIO(launches_of_a_graph_are_serialised, {}, 0, {}),
    SCENARIO(captures_report_their_graph, {}, 0, {}),
    SCENARIO(graphs_are_cloned_and_nested, {}, 0, {}),
    SCENARIO(user_objects_outlive_launches, {}, 0, {}),
    SCENARIO(user_objects_die_with_captures, {}, 0, {}),
    SCENARIO(calls_in_destructors_die, {}, SIGABRT,
             {"cuDeviceGetCount: called from a host function or a destructor"}),
    SCENARIO(kernels_unloaded_under_a_graph_die, {}, SIGABRT,
             {"the module of a kernel of the graph was unloaded"}),
    SCENARIO(invalid_graph_calls_fail, {}, 0, {}),
    SCENARIO(destroyed_contexts_release_graphs, {"SIMCUDA_LEAKS=1"}, 0,
             {"leaked 1 graph of GPU 0", "leaked 1 executable graph of GPU 0"}),
    SCENARIO(collectives_run_between_processes, {}, 0, {}),
    SCENARIO(overlapping_collectives_report_it, {}, 0, {}),
    SCENARIO(collectives_with_wrong_peers_break, {}, 0, {"flexring_collective_float: 0x", "is no memory"}),
    SCENARIO(endless_collectives_are_reported, {"SIMCUDA_HANG_S=1"}, SIGABRT,
             {"flexring_collective_float: runs for 1 s already: launch 0x1 of rank 0"}),
    SCENARIO(memory_unregistered_under_a_collective_is_noticed, {"SIMCUDA_IMPLICIT_SYNC=0"}, SIGABRT,
             {"memory was freed or unregistered while the kernel used it"}),
};

// Runs a scenario in a process of its own for at most a minute. Returns what is wrong with its end, or nothing.
std::string run(const Scenario& scenario) {
    int ends[2];
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        for (const std::string& setting : scenario.environment) putenv(strdup(setting.c_str()));
        alarm(60);
        execl("/proc/self/exe", "selftest", scenario.name, static_cast<char*>(nullptr));
        _exit(127);
    }
    close(ends[1]);
    std::string said;
    char buffer[4096];
    int status = 0;
    bool ended = false;
    // Its children may keep the pipe open, so the process itself is checked too.
    for (pollfd reader{ends[0], POLLIN, 0};;) {
        if (poll(&reader, 1, 20) > 0) {
            const ssize_t got = read(ends[0], buffer, sizeof buffer);
            if (got <= 0) break;
            said.append(buffer, static_cast<size_t>(got));
        } else if (ended) {
            break;
        } else {
            ended = waitpid(child, &status, WNOHANG) == child;
        }
    }
    if (!ended) waitpid(child, &status, 0);
    close(ends[0]);
    const bool as_expected = scenario.signal ? WIFSIGNALED(status) && WTERMSIG(status) == scenario.signal
                                             : WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (!as_expected) return "ended with status " + std::to_string(status) + "\n" + said;
    for (const std::string& expected : scenario.says) {
        const bool absent = expected[0] == '!';
        if ((said.find(expected.substr(absent)) != std::string::npos) == absent) {
            return "did not print '" + expected + "'\n" + said;
        }
    }
    return "";
}

}  // namespace

int main(int count, char** arguments) {
    if (count > 1) {
        if (count > 2) argument = arguments[2];
        if (!std::strcmp(arguments[1], "opens_a_handle")) return opens_a_handle(), 0;
        if (!std::strcmp(arguments[1], "takes_part_in_collectives")) return takes_part_in_collectives(), 0;
        if (!std::strcmp(arguments[1], "imports_a_descriptor")) return imports_a_descriptor(), 0;
        if (!std::strcmp(arguments[1], "holds_a_handle")) return holds_a_handle(), 0;
        for (const Scenario& scenario : scenarios) {
            if (!std::strcmp(arguments[1], scenario.name)) return scenario.body(), 0;
        }
        return 2;
    }
    int failed = 0;
    for (const Scenario& scenario : scenarios) {
        const std::string wrong = run(scenario);
        std::printf("%s %s\n%s", wrong.empty() ? "ok    " : "FAILED", scenario.name, wrong.c_str());
        failed += !wrong.empty();
    }
    std::printf("%d of %zu scenarios failed\n", failed, scenarios.size());
    return failed != 0;
}
