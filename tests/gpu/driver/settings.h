// What the environment says about the simulated machine, and the failures that it asks for.
//
// Read once, at the first call; a value that cannot be read ends the process, for a test that runs with another setting
// than it believes proves nothing. Knows no CUDA object.
//
// All failures and functions are named by their symbols, `cuMemAlloc_v2` rather than `cuMemAlloc`.
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

struct Settings {
    // SIMCUDA_GPUS: how many the machine has. Here are those of them that CUDA_VISIBLE_DEVICES leaves to this process.
    std::vector<int> gpus;
    // SIMCUDA_SEED: of all that is random.
    uint64_t seed = 1;
    // SIMCUDA_DELAY_US: the longest sleep before a piece of work.
    unsigned delay_us = 100;
    // SIMCUDA_MEMORY: bytes of a GPU that a process may have.
    size_t memory = size_t{1} << 30;
    // SIMCUDA_CAPABILITY, such as 9.0.
    int major = 9, minor = 0;
    // SIMCUDA_PEER: whether GPUs reach each other's memory.
    bool peer = true;
    // SIMCUDA_READ_ONLY_REGISTER: whether memory that is mapped read-only can be registered.
    bool read_only_register = true;
    // SIMCUDA_MEMOPS: whether streams wait for and write values.
    bool memops = true;
    // SIMCUDA_POOLS: whether memory can be allocated in a stream's order.
    bool pools = true;
    // SIMCUDA_IMPLICIT_SYNC: whether functions that allocate, register or load wait for the whole GPU, as they may.
    bool implicit_sync = false;
    // SIMCUDA_FREE_WHILE_OPEN: whether memory may be freed that another process has open, which CUDA leaves undefined.
    bool free_while_open = false;
    // SIMCUDA_CONNECTIONS: how many queues all streams of one priority share, in which one that waits for a value holds up
    // what comes later; 0: every stream has its own.
    unsigned connections = 0;
    // SIMCUDA_LEAKS: whether what is left at the end of a context or of the process is told on stderr.
    bool leaks = false;
    // SIMCUDA_TRACE: whether every call is.
    bool trace = false;
    // SIMCUDA_HANG_S: after how long a wait of the host is a hang, which ends the process with a sentence; 0: never.
    unsigned hang_s = 120;
    // SIMCUDA_FAIL=name:k:code,…: the k-th call of a function returns this code and does nothing. The name `work` is
    // that of what streams do: the k-th piece of work breaks its context.
    std::multimap<std::string, Failure> failures;
    // SIMCUDA_WITHOUT=name,…: these functions return CUDA_ERROR_NOT_SUPPORTED, and the attributes say so. dlsym finds
    // them all the same; for a driver that lacks them see HIDE in build.sh.
    std::set<std::string> without;
};

const Settings& settings();

// Ends the process with a sentence: what `function` met is a bug of the program that the real driver would not report.
[[noreturn]] void die(const char* function, const std::string& cause);

// A line on stderr that begins like all of them.
void say(const std::string& line);

std::string hexadecimal(uint64_t number);

}  // namespace sim
