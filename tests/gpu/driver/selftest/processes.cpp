// Several processes: shared memory, forks, the end of processes, and reports of leaks and hangs.

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

#include "processes.h"

namespace selftest {

pid_t again(const char* scenario, const std::string& argument, int& input) {
    int ends[2];
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[0], 0);
        execl("/proc/self/exe", "selftest", scenario, argument.c_str(), static_cast<char*>(nullptr));
        _exit(127);
    }
    close(ends[0]);
    input = ends[1];
    return child;
}

bool succeeded(pid_t child) {
    int status = 0;
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

std::string text_of(const CUipcMemHandle& handle) {
    std::string text;
    for (char byte : handle.reserved) {
        char two[3];
        std::snprintf(two, sizeof two, "%02x", static_cast<unsigned char>(byte));
        text += two;
    }
    return text;
}

CUipcMemHandle told_handle() {
    CUipcMemHandle handle;
    for (size_t i = 0; i < 64; ++i) {
        handle.reserved[i] = static_cast<char>(std::stoi(argument.substr(2 * i, 2), nullptr, 16));
    }
    return handle;
}

void memory_is_shared_between_processes() {
    begin();
    Pointer memory = allocate(), pointer = 0;
    CUipcMemHandle handle;
    WORKS(cu("cuMemsetD8_v2", memory, static_cast<unsigned char>(5), kBytes));
    WORKS(cu("cuCtxSynchronize"));
    WORKS(cu("cuIpcGetMemHandle", &handle, memory));
    CHECK(cu("cuIpcOpenMemHandle_v2", &pointer, handle, 1u) == CUDA_ERROR_INVALID_CONTEXT);
    int input = -1;
    CHECK(succeeded(again("opens_a_handle", text_of(handle), input)));
    unsigned char first = 0;
    WORKS(cu("cuMemcpyDtoH_v2", static_cast<void*>(&first), memory, size_t{1}));
    CHECK(first == 6);
    WORKS(cu("cuMemFree_v2", memory));
}

void opens_a_handle() {
    begin();
    Pointer memory = 0, same = 0;
    WORKS(cu("cuIpcOpenMemHandle_v2", &memory, told_handle(), 1u));
    WORKS(cu("cuIpcOpenMemHandle_v2", &same, told_handle(), 1u));
    CHECK(memory == same);
    std::vector<unsigned char> host(kBytes);
    WORKS(cu("cuMemcpyDtoH_v2", static_cast<void*>(host.data()), memory, kBytes));
    CHECK(host[0] == 5 && host[kBytes - 1] == 5);
    WORKS(cu("cuMemsetD8_v2", memory, static_cast<unsigned char>(6), kBytes));
    WORKS(cu("cuCtxSynchronize"));
    CHECK(cu("cuMemFree_v2", memory) == CUDA_ERROR_INVALID_VALUE);
    WORKS(cu("cuIpcCloseMemHandle", memory));
    WORKS(cu("cuIpcCloseMemHandle", memory));
    CHECK(cu("cuIpcCloseMemHandle", memory) == CUDA_ERROR_INVALID_VALUE);
    CUipcMemHandle rubbish = told_handle();
    rubbish.reserved[0] ^= 1;
    CHECK(cu("cuIpcOpenMemHandle_v2", &memory, rubbish, 1u) == CUDA_ERROR_INVALID_HANDLE);
}

void holds_a_handle() {
    begin();
    Pointer memory = 0;
    WORKS(cu("cuIpcOpenMemHandle_v2", &memory, told_handle(), 1u));
    CHECK(write(std::stoi(std::getenv("SAY")), "x", 1) == 1);
    pause();
}

// Frees memory while another process, alive or killed, has it open.
static void free_while_open(bool alive) {
    begin();
    Pointer memory = allocate();
    CUipcMemHandle handle;
    WORKS(cu("cuIpcGetMemHandle", &handle, memory));
    int ready[2], input = -1;
    CHECK(pipe(ready) == 0);
    setenv("SAY", std::to_string(ready[1]).c_str(), 1);
    pid_t child = again("holds_a_handle", text_of(handle), input);
    char byte = 0;
    CHECK(read(ready[0], &byte, 1) == 1);
    if (!alive) {
        kill(child, SIGKILL);
        waitpid(child, nullptr, 0);
    }
    // It ends with this process.
    else if (fork() == 0) {
        usleep(300000);
        kill(child, SIGKILL);
        _exit(0);
    }
    WORKS(cu("cuMemFree_v2", memory));
}

void memory_open_elsewhere_is_not_freed() { free_while_open(true); }
void ended_processes_hold_no_memory() { free_while_open(false); }

void leaks_are_reported() {
    begin();
    allocate(12345);
    stream();
    event();
    static int registered[100];
    WORKS(cu("cuMemHostRegister_v2", static_cast<void*>(registered), sizeof registered, 0u));
}

void nothing_leaks() {
    begin();
    Pointer memory = allocate();
    CUstream one = stream();
    WORKS(cu("cuMemFree_v2", memory));
    WORKS(cu("cuStreamDestroy_v2", one));
    WORKS(cu("cuDevicePrimaryCtxRelease_v2", 0));
}

void hangs_are_reported() {
    begin();
    auto* word = reinterpret_cast<uint32_t*>(pinned());
    CUstream one = stream();
    *word = 0;
    WORKS(cu("cuStreamWaitValue32_v2", one, mapped(word), 1u, 0u));
    synchronize(one);
}

void processes_end_during_work() {
    begin();
    auto* word = reinterpret_cast<uint32_t*>(pinned());
    *word = 0;
    CUstream one = stream(), two = stream();
    CUevent later = event();
    WORKS(cu("cuStreamWaitValue32_v2", one, mapped(word), 1u, 0u));
    WORKS(cu("cuEventRecord", later, one));
    WORKS(cu("cuStreamWaitEvent", two, later, 0u));
    CUhostFn stuck = [](void*) { pause(); };
    WORKS(cu("cuLaunchHostFunc", stream(), stuck, static_cast<void*>(nullptr)));
    usleep(10000);
}

void forks_are_refused() {
    begin();
    pid_t child = fork();
    if (child == 0) {
        int count = 0;
        _exit(cu("cuDeviceGetCount", &count) == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
    }
    CHECK(succeeded(child));
}

}  // namespace selftest
