// Reads the settings; see settings.h. Owns the spelling of every variable.

#include "settings.h"

#include <cstdio>
#include <cstdlib>
#include <sstream>

#include <unistd.h>

namespace sim {
namespace {

[[noreturn]] void unreadable(const char* name, const std::string& value) {
    die(name, "cannot read '" + value + "'");
}

uint64_t number(const char* name, uint64_t otherwise) {
    const char* text = std::getenv(name);
    if (!text) return otherwise;
    char* end = nullptr;
    uint64_t value = std::strtoull(text, &end, 10);
    if (!*text || *end || *text == '-') unreadable(name, text);
    return value;
}

bool flag(const char* name, bool otherwise) {
    uint64_t value = number(name, otherwise);
    if (value > 1) unreadable(name, std::to_string(value));
    return value == 1;
}

std::vector<std::string> parts(const std::string& text, char separator) {
    std::vector<std::string> found;
    std::stringstream stream(text);
    for (std::string part; std::getline(stream, part, separator);) {
        if (!part.empty()) found.push_back(part);
    }
    return found;
}

std::vector<std::string> list(const char* name) {
    const char* text = std::getenv(name);
    return text ? parts(text, ',') : std::vector<std::string>{};
}

// As the real driver reads it: everything after the first number that is not a GPU is ignored.
std::vector<int> visible(int present) {
    std::vector<int> gpus;
    if (!std::getenv("CUDA_VISIBLE_DEVICES")) {
        for (int gpu = 0; gpu < present; ++gpu) gpus.push_back(gpu);
        return gpus;
    }
    for (const std::string& part : list("CUDA_VISIBLE_DEVICES")) {
        char* end = nullptr;
        long gpu = std::strtol(part.c_str(), &end, 10);
        if (*end || gpu < 0 || gpu >= present) break;
        gpus.push_back(static_cast<int>(gpu));
    }
    return gpus;
}

// As the real driver reads it: a value out of range is not used.
unsigned connections(unsigned otherwise) {
    const char* text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    if (!text) return otherwise;
    const unsigned long value = std::strtoul(text, nullptr, 10);
    return value >= 1 && value <= 32 ? static_cast<unsigned>(value) : otherwise;
}

Settings read() {
    Settings s;
    s.gpus = visible(static_cast<int>(number("SIMCUDA_GPUS", 1)));
    s.seed = number("SIMCUDA_SEED", s.seed);
    s.delay_us = static_cast<unsigned>(number("SIMCUDA_DELAY_US", s.delay_us));
    s.memory = number("SIMCUDA_MEMORY", s.memory);
    s.peer = flag("SIMCUDA_PEER", s.peer);
    s.read_only_register = flag("SIMCUDA_READ_ONLY_REGISTER", s.read_only_register);
    s.memops = flag("SIMCUDA_MEMOPS", s.memops);
    s.pools = flag("SIMCUDA_POOLS", s.pools);
    s.dmabuf = flag("SIMCUDA_DMABUF", s.dmabuf);
    s.coherent = flag("SIMCUDA_COHERENT", s.coherent);
    if (std::getenv("SIMCUDA_IMPLICIT_SYNC")) {
        s.implicit_sync = flag("SIMCUDA_IMPLICIT_SYNC", true) ? ImplicitSync::Always : ImplicitSync::Never;
    }
    s.synchronize_holds = flag("SIMCUDA_SYNCHRONIZE_HOLDS", s.synchronize_holds);
    if (const char* loading = std::getenv("CUDA_MODULE_LOADING")) s.lazy_loading = std::string(loading) != "EAGER";
    s.host_pointers = flag("SIMCUDA_HOST_POINTERS", s.host_pointers);
    s.multiprocessors = static_cast<unsigned>(number("SIMCUDA_MULTIPROCESSORS", s.multiprocessors));
    s.kernel_timeout = flag("SIMCUDA_KERNEL_TIMEOUT", s.kernel_timeout);
    s.driver_version = static_cast<int>(number("SIMCUDA_DRIVER_VERSION", static_cast<uint64_t>(s.driver_version)));
    s.free_while_open = flag("SIMCUDA_FREE_WHILE_OPEN", s.free_while_open);
    s.connections = connections(s.connections);
    s.leaks = flag("SIMCUDA_LEAKS", s.leaks);
    s.calls_skipped = number("SIMCUDA_CALLS_SKIPPED", s.calls_skipped);
    s.trace = flag("SIMCUDA_TRACE", s.trace);
    s.hang_s = static_cast<unsigned>(number("SIMCUDA_HANG_S", s.hang_s));
    if (const char* text = std::getenv("SIMCUDA_CAPABILITY")) {
        char rest = 0;
        if (std::sscanf(text, "%d.%d%c", &s.major, &s.minor, &rest) != 2) unreadable("SIMCUDA_CAPABILITY", text);
    }
    for (const std::string& failure : list("SIMCUDA_FAIL")) {
        std::vector<std::string> fields = parts(failure, ':');
        char *end = nullptr, *end_of_code = nullptr;
        if (fields.size() != 3) unreadable("SIMCUDA_FAIL", failure);
        unsigned long call = std::strtoul(fields[1].c_str(), &end, 10);
        unsigned long code = std::strtoul(fields[2].c_str(), &end_of_code, 10);
        if (*end || *end_of_code || call == 0 || code == 0) unreadable("SIMCUDA_FAIL", failure);
        s.failures.insert({fields[0], {call, static_cast<CUresult>(code)}});
    }
    for (const std::string& name : list("SIMCUDA_WITHOUT")) s.without.insert(name);
    return s;
}

}  // namespace

const Settings& settings() {
    // Never destroyed, because threads of the program may still call while the process exits.
    static const Settings* read_once = new Settings(read());
    return *read_once;
}

void say(const std::string& line) {
    std::string whole = "simcuda: " + line + "\n";
    // A single write, so that lines of several processes do not interleave.
    [[maybe_unused]] ssize_t written = write(STDERR_FILENO, whole.data(), whole.size());
}

void die(const char* function, const std::string& cause) {
    say(std::string(function) + ": " + cause);
    std::abort();
}

std::string hexadecimal(uint64_t number) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(number));
    return text;
}

}  // namespace sim
