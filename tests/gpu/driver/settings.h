// What the environment says about the simulated machine, and the failures that it asks for.
//
// Read once, when the library is loaded; a value that cannot be read ends the process, for a test that runs with another
// setting than it believes proves nothing. Knows no CUDA object.
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
    // The GPUs of the machine that this process sees, by their number in the machine.
    std::vector<int> gpus;
    uint64_t seed = 1;
    unsigned delay_us = 100;
    size_t memory = size_t{1} << 30;
    int major = 9, minor = 0;
    bool peer = true;
    bool read_only_register = true;
    bool memops = true;
    bool pools = true;
    bool implicit_sync = false;
    bool free_while_open = false;
    bool leaks = false;
    bool trace = false;
    unsigned hang_s = 120;
    std::multimap<std::string, Failure> failures;
    std::set<std::string> without;
};

const Settings& settings();

// Ends the process with a sentence: what `function` met is a bug of the program that the real driver would not report.
[[noreturn]] void die(const char* function, const std::string& cause);

// A line on stderr that begins like all of them.
void say(const std::string& line);

std::string hexadecimal(uint64_t number);

}  // namespace sim
