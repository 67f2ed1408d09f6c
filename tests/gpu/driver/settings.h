// The settings of the simulated machine from the environment, and the failures to inject.
//
// Read once, at the first call. An invalid value ends the process, because a test with a setting other than intended
// proves nothing. Must not know CUDA objects.
//
// Functions are named by their symbols: `cuMemAlloc_v2`, not `cuMemAlloc`.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "abi.h"

namespace sim {

struct Failure {
    unsigned long call;
    CUresult code;
};

// Which of the calls that may wait for a whole context do.
enum class ImplicitSync { Never, Always, Random };

struct Settings {
    // SIMCUDA_GPUS: the number of GPUs of the machine. This lists those visible by CUDA_VISIBLE_DEVICES.
    std::vector<int> gpus;
    // SIMCUDA_SEED: seed of all random choices.
    uint64_t seed = 1;
    // SIMCUDA_DELAY_US: the longest sleep before an item of work.
    unsigned delay_us = 100;
    // SIMCUDA_MEMORY: bytes of a GPU's memory that a process may allocate.
    size_t memory = size_t{1} << 30;
    // SIMCUDA_CAPABILITY, such as 9.0.
    int major = 9, minor = 0;
    // SIMCUDA_PEER: whether GPUs can access each other's memory.
    bool peer = true;
    // SIMCUDA_READ_ONLY_REGISTER: whether memory that is mapped read-only can be registered.
    bool read_only_register = true;
    // SIMCUDA_MEMOPS: whether streams have memory operations.
    bool memops = true;
    // SIMCUDA_POOLS: whether stream-ordered allocation is supported.
    bool pools = true;
    // SIMCUDA_IMPLICIT_SYNC: whether functions that allocate, free, register, load or open wait for the whole context, with its
    // lock held. CUDA may, and which calls do depends on the driver: by default each one does or does not at random. Always
    // waiting hides memory that is released too early, never waiting hides deadlocks.
    ImplicitSync implicit_sync = ImplicitSync::Random;
    // SIMCUDA_SYNCHRONIZE_HOLDS: whether functions that synchronise with a stream, an event or a context hold the context's
    // lock while they wait. Some drivers do.
    bool synchronize_holds = true;
    // CUDA_MODULE_LOADING: whether a kernel is loaded by its first launch (LAZY, the default) or with its module (EAGER).
    bool lazy_loading = true;
    // SIMCUDA_DMABUF: whether the driver exports memory as DMA-BUFs, for adapters in memory (tests/verbs).
    bool dmabuf = false;
    // SIMCUDA_COHERENT: whether a coherent link connects the GPUs and the processors, as on GB300.
    bool coherent = false;
    // SIMCUDA_HOST_POINTERS: whether kernels and memory operations may use a host pointer of pinned memory, and
    // cuMemHostGetDevicePointer returns it. So it is on most systems, but CUDA does not promise it for all of them.
    bool host_pointers = false;
    // SIMCUDA_MULTIPROCESSORS of each GPU.
    unsigned multiprocessors = 8;
    // SIMCUDA_KERNEL_TIMEOUT: whether the GPUs report a limit on the time of kernels, as GPUs with a display do.
    bool kernel_timeout = false;
    // SIMCUDA_DRIVER_VERSION: the version of CUDA that the driver reports, such as 12000.
    int driver_version = 13000;
    // SIMCUDA_FREE_WHILE_OPEN: whether memory may be freed that another process has open, which is undefined in CUDA.
    bool free_while_open = false;
    // CUDA_DEVICE_MAX_CONNECTIONS: the number of hardware queues that all streams of a context share, 1 to 32.
    unsigned connections = 8;
    // SIMCUDA_LEAKS: whether objects left at the end of a context or process are reported on stderr.
    bool leaks = false;
    // SIMCUDA_CALLS_SKIPPED: after 20 collectives, a communicator's kernels count so many more at once, so that tests reach the
    // place where flags repeat. Even, and equal in all processes.
    uint64_t calls_skipped = 0;
    // SIMCUDA_TRACE: whether every call is reported on stderr.
    bool trace = false;
    // SIMCUDA_HANG_S: seconds after which a wait of the host counts as a hang and ends the process; 0: never.
    unsigned hang_s = 120;
    // SIMCUDA_FAIL=name:k:code,…: the k-th call of a function returns this code and has no effect. With the name `work`,
    // the k-th item of work in streams breaks its context.
    std::multimap<std::string, Failure> failures;
    // SIMCUDA_WITHOUT=name,…: these functions return CUDA_ERROR_NOT_SUPPORTED, and the attributes report that. dlsym still
    // finds them; HIDE in build.sh builds a driver without them.
    std::set<std::string> without;
};

const Settings& settings();

// Ends the process with a message: `function` detected a bug in the program that the real driver would not report.
[[noreturn]] void die(const char* function, const std::string& cause);

// Prints a line on stderr with the common prefix.
void say(const std::string& line);

std::string hexadecimal(uint64_t number);

}  // namespace sim
