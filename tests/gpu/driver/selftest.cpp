// What the simulated driver promises, as programs see it: it is opened as flexring opens NVIDIA's.
//
// Without arguments, runs every scenario in a process of its own and looks at how that ends. A scenario is a function
// that asserts; one that is to die says so in the table below.

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "../../../kernels/batch.h"
#include "abi.h"

namespace {

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            _exit(1);                                                                 \
        }                                                                             \
    } while (false)
#define WORKS(call) CHECK((call) == CUDA_SUCCESS)

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

void begin(int gpu = 0) {
    CUcontext context = nullptr;
    WORKS(cu("cuInit", 0u));
    WORKS(cu("cuDevicePrimaryCtxRetain", &context, gpu));
    WORKS(cu("cuCtxSetCurrent", context));
}

Pointer allocate(size_t bytes = kBytes) {
    Pointer at = 0;
    WORKS(cu("cuMemAlloc_v2", &at, bytes));
    CHECK(at % 512 == 0);
    return at;
}

unsigned char* pinned(size_t bytes = kBytes) {
    void* at = nullptr;
    WORKS(cu("cuMemHostAlloc", &at, bytes, 0u));
    return static_cast<unsigned char*>(at);
}

CUstream stream(unsigned flags = CU_STREAM_NON_BLOCKING) {
    CUstream made = nullptr;
    WORKS(cu("cuStreamCreate", &made, flags));
    return made;
}

CUevent event() {
    CUevent made = nullptr;
    WORKS(cu("cuEventCreate", &made, unsigned{CU_EVENT_DISABLE_TIMING}));
    return made;
}

void to_device(Pointer to, const void* from, size_t bytes, CUstream stream) {
    WORKS(cu("cuMemcpyHtoDAsync_v2", to, from, bytes, stream));
}
CUresult to_host(void* to, Pointer from, size_t bytes, CUstream stream) {
    return cu("cuMemcpyDtoHAsync_v2", to, from, bytes, stream);
}
CUresult synchronize(CUstream stream) { return cu("cuStreamSynchronize", stream); }
Pointer address(const void* at) { return reinterpret_cast<Pointer>(at); }

CUfunction kernel(const char* name) {
    CUmodule module = nullptr;
    CUfunction function = nullptr;
    WORKS(cu("cuModuleLoadData", &module, static_cast<const void*>("anything")));
    WORKS(cu("cuModuleGetFunction", &function, module, name));
    return function;
}

CUresult launch(CUfunction function, flexring::Batch batch, unsigned tasks, CUstream stream) {
    void* parameters[] = {&batch};
    void** extra = nullptr;
    return cu("cuLaunchKernel", function, 2u, tasks, 1u, 64u, 1u, 1u, 0u, stream, &parameters[0], extra);
}

flexring::Batch sum_of(Pointer into, Pointer a, Pointer b, size_t count) {
    flexring::Batch batch{};
    batch.tasks[0] = {reinterpret_cast<void*>(into), count, 0, 2, 0, 0};
    batch.operands[0].at = reinterpret_cast<void*>(a);
    batch.operands[1].at = reinterpret_cast<void*>(b);
    return batch;
}

// How often in `rounds` a reader in one stream misses what another stream writes.
int stale_reads(bool with_event, int rounds) {
    Pointer memory = allocate();
    unsigned char *from = pinned(), *to = pinned();
    int stale = 0;
    for (int round = 0; round < rounds; ++round) {
        CUstream writer = stream(), reader = stream();
        CUevent written = event();
        const auto value = static_cast<unsigned char>(round % 200);
        std::memset(from, value, kBytes);
        to_device(memory, from, kBytes, writer);
        if (with_event) {
            WORKS(cu("cuEventRecord", written, writer));
            WORKS(cu("cuStreamWaitEvent", reader, written, 0u));
            // What is recorded later is not waited for.
            WORKS(cu("cuEventRecord", written, reader));
        }
        WORKS(to_host(to, memory, kBytes, reader));
        WORKS(synchronize(reader));
        stale += to[0] != value || to[kBytes - 1] != value;
        WORKS(synchronize(writer));
        WORKS(cu("cuEventDestroy_v2", written));
        WORKS(cu("cuStreamDestroy_v2", writer));
        WORKS(cu("cuStreamDestroy_v2", reader));
    }
    return stale;
}

void order_needs_events() {
    begin();
    CUevent never = event();
    WORKS(cu("cuStreamWaitEvent", stream(), never, 0u));
    WORKS(cu("cuEventQuery", never));
    CHECK(stale_reads(true, 100) == 0);
    CHECK(stale_reads(false, 100) > 0);
}

void legacy_stream_keeps_order() {
    begin();
    Pointer memory = allocate();
    unsigned char *from = pinned(), *to = pinned();
    for (int round = 0; round < 50; ++round) {
        CUstream writer = stream(0), reader = stream(0);
        std::memset(from, round, kBytes);
        to_device(memory, from, kBytes, writer);
        WORKS(cu("cuMemsetD8Async", memory + kBytes / 2, static_cast<unsigned char>(round + 1), kBytes / 2,
                 static_cast<CUstream>(nullptr)));
        WORKS(to_host(to, memory, kBytes, reader));
        WORKS(synchronize(reader));
        CHECK(to[0] == round && to[kBytes - 1] == round + 1);
        WORKS(cu("cuStreamDestroy_v2", writer));
        WORKS(cu("cuStreamDestroy_v2", reader));
    }
}

void pinned_copies_take_time() {
    begin();
    Pointer memory = allocate();
    unsigned char *from = pinned(), *to = pinned();
    std::vector<unsigned char> pageable(kBytes);
    int reused_too_early = 0, read_too_early = 0;
    for (int round = 1; round <= 100; ++round) {
        CUstream one = stream();
        const auto value = static_cast<unsigned char>(round);
        std::memset(from, value, kBytes);
        to_device(memory, from, kBytes, one);
        std::memset(from, 0, kBytes);
        std::memset(to, 0, kBytes);
        WORKS(to_host(to, memory, kBytes, one));
        read_too_early += to[kBytes - 1] != value;
        // Into pageable memory it is there on return.
        WORKS(to_host(pageable.data(), memory, kBytes, one));
        reused_too_early += pageable[kBytes - 1] != value;
        // And out of it, it may be reused.
        std::memset(pageable.data(), value, kBytes);
        to_device(memory, pageable.data(), kBytes, one);
        std::memset(pageable.data(), 0, kBytes);
        WORKS(to_host(pageable.data(), memory, kBytes, one));
        CHECK(pageable[0] == value && pageable[kBytes - 1] == value);
        WORKS(cu("cuStreamDestroy_v2", one));
    }
    CHECK(reused_too_early > 0 && read_too_early > 0);
}

void kernels_compute() {
    begin();
    constexpr size_t count = 1000;
    float *a = reinterpret_cast<float*>(pinned()), *result = reinterpret_cast<float*>(pinned());
    Pointer memory = allocate(count * 4);
    CUstream one = stream();
    for (size_t i = 0; i < count; ++i) a[i] = static_cast<float>(i);
    to_device(memory, a, count * 4, one);
    flexring::Batch batch = sum_of(memory, memory, address(a), count);
    WORKS(launch(kernel("flexring_sum_float"), batch, 1, one));
    WORKS(to_host(result, memory, count * 4, one));
    WORKS(synchronize(one));
    for (size_t i = 0; i < count; ++i) CHECK(result[i] == 2.0f * static_cast<float>(i));

    CUmodule module = nullptr;
    CUfunction function = nullptr;
    CHECK(cu("cuModuleLoadData", &module, static_cast<const void*>(nullptr)) == CUDA_ERROR_INVALID_IMAGE);
    WORKS(cu("cuModuleLoadData", &module, static_cast<const void*>("anything")));
    CHECK(cu("cuModuleGetFunction", &function, module, "flexring_sum_string") == CUDA_ERROR_NOT_FOUND);
    for (const char* name : {"flexring_copy", "flexring_max_bfloat16", "flexring_prod_int64"}) {
        WORKS(cu("cuModuleGetFunction", &function, module, name));
    }
    int grid = 0, block = 0;
    CUoccupancyB2DSize none = nullptr;
    WORKS(cu("cuOccupancyMaxPotentialBlockSize", &grid, &block, function, none, size_t{0}, 0));
    CHECK(grid > 0 && block > 0);
}

void racing_tasks_die() {
    begin();
    Pointer memory = allocate();
    flexring::Batch batch = sum_of(memory, memory + 4, memory, 100);
    launch(kernel("flexring_sum_float"), batch, 1, stream());
}

void errors_stick() {
    begin();
    Pointer memory = allocate();
    CUstream one = stream();
    // One element more than there is.
    WORKS(launch(kernel("flexring_sum_float"), sum_of(memory, memory, memory, kBytes / 4 + 1), 1, one));
    CHECK(synchronize(one) == CUDA_ERROR_ILLEGAL_ADDRESS);
    Pointer more = 0;
    CHECK(cu("cuMemAlloc_v2", &more, kBytes) == CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(cu("cuStreamQuery", one) == CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(cu("cuStreamDestroy_v2", one) == CUDA_ERROR_ILLEGAL_ADDRESS);
    // A context that begins anew is sound.
    WORKS(cu("cuDevicePrimaryCtxRelease_v2", 0));
    CHECK(cu("cuMemAlloc_v2", &more, kBytes) == CUDA_ERROR_CONTEXT_IS_DESTROYED);
    begin();
    allocate();
}

void unregistered_memory_is_out_of_reach() {
    begin();
    static float host[256];
    Pointer memory = allocate(), copy = 0;
    CUstream one = stream();
    CUfunction sum = kernel("flexring_sum_float");
    WORKS(cu("cuMemHostRegister_v2", static_cast<void*>(host), sizeof host, unsigned{CU_MEMHOSTREGISTER_DEVICEMAP}));
    WORKS(cu("cuMemHostGetDevicePointer_v2", &copy, static_cast<void*>(host), 0u));
    CHECK(copy == address(host));
    WORKS(launch(sum, sum_of(memory, memory, address(host), 256), 1, one));
    WORKS(synchronize(one));
    CHECK(cu("cuMemHostRegister_v2", static_cast<void*>(host + 10), size_t{8}, 0u) ==
          CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    CHECK(cu("cuMemHostUnregister", static_cast<void*>(host + 10)) == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    WORKS(cu("cuMemHostUnregister", static_cast<void*>(host)));
    CHECK(cu("cuMemHostGetDevicePointer_v2", &copy, static_cast<void*>(host), 0u) == CUDA_ERROR_INVALID_VALUE);

    void* page = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(cu("cuMemHostRegister_v2", page, size_t{4096}, 2u) == CUDA_ERROR_INVALID_VALUE);
    WORKS(cu("cuMemHostRegister_v2", page, size_t{4096}, 10u));
    WORKS(launch(sum, sum_of(memory, memory, address(page), 256), 1, one));
    WORKS(synchronize(one));
    CHECK(cu("cuMemHostRegister_v2", reinterpret_cast<void*>(4096), size_t{4096}, 0u) == CUDA_ERROR_INVALID_VALUE);

    WORKS(launch(sum, sum_of(memory, memory, address(host), 256), 1, one));
    CHECK(synchronize(one) == CUDA_ERROR_ILLEGAL_ADDRESS);
}

void the_host_cannot_touch_device_memory() {
    begin();
    Pointer memory = allocate();
    *reinterpret_cast<volatile int*>(memory) = 1;
}

void values_are_waited_for() {
    begin();
    auto* word = reinterpret_cast<uint32_t*>(pinned());
    Pointer memory = allocate();
    CUstream one = stream(), two = stream();
    *word = 7;
    WORKS(cu("cuStreamWaitValue32_v2", one, address(word), 8u, 0u));
    WORKS(cu("cuStreamWriteValue32_v2", one, memory, 5u, 0u));
    WORKS(cu("cuStreamWaitValue32_v2", two, memory, 5u, 1u));
    WORKS(cu("cuStreamWriteValue32_v2", two, address(word + 1), 6u, 0u));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(cu("cuStreamQuery", one) == CUDA_ERROR_NOT_READY && cu("cuStreamQuery", two) == CUDA_ERROR_NOT_READY);
    __atomic_store_n(word, 9, __ATOMIC_RELEASE);
    WORKS(synchronize(two));
    CHECK(word[1] == 6);
    // The comparison goes round: what is a little behind is less, across the end of the numbers too.
    *word = 1;
    WORKS(cu("cuStreamWaitValue32_v2", one, address(word), 0xfffffff0u, 0u));
    WORKS(synchronize(one));
    CHECK(cu("cuStreamWaitValue32_v2", one, memory + 2, 0u, 0u) == CUDA_ERROR_INVALID_VALUE);
    static uint32_t elsewhere;
    CHECK(cu("cuStreamWriteValue32_v2", one, address(&elsewhere), 0u, 0u) == CUDA_ERROR_INVALID_VALUE);
}

std::atomic<int> called{0};
std::atomic<bool> go{false};

void host_functions_take_turns() {
    begin();
    CUstream one = stream(), two = stream();
    CUhostFn blocks = [](void*) {
        while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        CHECK(called++ == 0);
    };
    CUhostFn counts = [](void*) { ++called; };
    WORKS(cu("cuLaunchHostFunc", one, blocks, static_cast<void*>(nullptr)));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    // Another stream's function waits for the first to end, though it could run.
    WORKS(cu("cuLaunchHostFunc", one, counts, static_cast<void*>(nullptr)));
    WORKS(cu("cuLaunchHostFunc", two, counts, static_cast<void*>(nullptr)));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(called == 0 && cu("cuStreamQuery", two) == CUDA_ERROR_NOT_READY);
    go = true;
    WORKS(synchronize(one));
    WORKS(synchronize(two));
    CHECK(called == 3);
}

void calls_in_host_functions_die() {
    begin();
    CUstream one = stream();
    CUhostFn calls = [](void*) {
        int count = 0;
        cu("cuDeviceGetCount", &count);
    };
    WORKS(cu("cuLaunchHostFunc", one, calls, static_cast<void*>(nullptr)));
    synchronize(one);
}

void calls_fail_on_demand() {
    begin();
    allocate();
    allocate();
    Pointer memory = 0;
    CHECK(cu("cuMemAlloc_v2", &memory, kBytes) == CUDA_ERROR_OUT_OF_MEMORY);
    memory = allocate();
    CHECK(cu("cuMemHostUnregister", static_cast<void*>(nullptr)) == CUDA_ERROR_NOT_SUPPORTED);
    CUstream one = stream();
    WORKS(cu("cuMemsetD8Async", memory, static_cast<unsigned char>(0), kBytes, one));
    WORKS(synchronize(one));
    WORKS(cu("cuMemsetD8Async", memory, static_cast<unsigned char>(0), kBytes, one));
    CHECK(synchronize(one) == CUDA_ERROR_ECC_UNCORRECTABLE);
}

void memory_ends() {
    begin();
    Pointer first = allocate(600000), second = 0;
    size_t free = 0, total = 0;
    CHECK(cu("cuMemAlloc_v2", &second, size_t{600000}) == CUDA_ERROR_OUT_OF_MEMORY);
    WORKS(cu("cuMemGetInfo_v2", &free, &total));
    CHECK(total == 1000000 && free == 400000);
    WORKS(cu("cuMemFree_v2", first));
    CHECK(cu("cuMemFree_v2", first) == CUDA_ERROR_INVALID_VALUE);
    allocate(600000);
}

uint64_t attribute(CUpointer_attribute which, Pointer at) {
    uint64_t value = 0;
    WORKS(cu("cuPointerGetAttribute", static_cast<void*>(&value), which, at));
    return value;
}

void pointers_tell_what_they_are() {
    begin();
    Pointer memory = allocate(), managed = 0, pool = 0, base = 0;
    unsigned char* host = pinned();
    size_t bytes = 0;
    WORKS(cu("cuMemAllocManaged", &managed, kBytes, unsigned{CU_MEM_ATTACH_GLOBAL}));
    WORKS(cu("cuMemAllocAsync", &pool, kBytes, static_cast<CUstream>(nullptr)));
    *reinterpret_cast<volatile char*>(managed) = 1;
    CHECK(attribute(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory + 5) == CU_MEMORYTYPE_DEVICE);
    CHECK(attribute(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address(host)) == CU_MEMORYTYPE_HOST);
    CHECK(attribute(CU_POINTER_ATTRIBUTE_IS_MANAGED, managed) == 1);
    CHECK(attribute(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, memory) == 1);
    CHECK(attribute(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pool) == 0);
    WORKS(cu("cuMemGetAddressRange_v2", &base, &bytes, memory + 100));
    CHECK(base == memory && bytes == kBytes);
    int number = 0;
    uint64_t nothing[2] = {1, 1};
    CHECK(cu("cuPointerGetAttribute", static_cast<void*>(nothing), CU_POINTER_ATTRIBUTE_CONTEXT, address(&number)) ==
          CUDA_ERROR_INVALID_VALUE);
    CUpointer_attribute both[] = {CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_BUFFER_ID};
    void* out[] = {&nothing[0], &nothing[1]};
    WORKS(cu("cuPointerGetAttributes", 2u, &both[0], &out[0], address(&number)));
    CHECK(nothing[0] == 0 && nothing[1] == 0);
    // An address comes back, its number does not.
    const uint64_t id = attribute(CU_POINTER_ATTRIBUTE_BUFFER_ID, memory);
    bool came_back = false;
    for (int i = 0; i < 100 && !came_back; ++i) {
        WORKS(cu("cuMemFree_v2", memory));
        const Pointer next = allocate();
        came_back = next == memory;
        memory = next;
        CHECK(attribute(CU_POINTER_ATTRIBUTE_BUFFER_ID, memory) != id);
    }
    CHECK(came_back);
}

void pool_memory_follows_its_stream() {
    begin();
    CUstream one = stream();
    Pointer memory = 0;
    WORKS(cu("cuMemAllocAsync", &memory, kBytes, one));
    WORKS(cu("cuMemsetD8Async", memory, static_cast<unsigned char>(3), kBytes, one));
    std::vector<unsigned char> host(kBytes);
    WORKS(to_host(host.data(), memory, kBytes, one));
    CHECK(host[0] == 3 && host[kBytes - 1] == 3);
    WORKS(cu("cuMemsetD8Async", memory, static_cast<unsigned char>(4), kBytes, one));
    WORKS(cu("cuMemFreeAsync", memory, one));
    CHECK(cu("cuMemFreeAsync", memory, one) == CUDA_ERROR_INVALID_VALUE);
    WORKS(synchronize(one));
    // Another stream that does not wait for an allocation uses it too early.
    static uint32_t word;
    WORKS(cu("cuMemHostRegister_v2", static_cast<void*>(&word), sizeof word, 2u));
    WORKS(cu("cuStreamWaitValue32_v2", one, address(&word), 1u, 0u));
    WORKS(cu("cuMemAllocAsync", &memory, kBytes, one));
    CUstream two = stream();
    WORKS(cu("cuMemsetD8Async", memory, static_cast<unsigned char>(4), kBytes, two));
    CHECK(synchronize(two) == CUDA_ERROR_ILLEGAL_ADDRESS);
}

void gpus_reach_each_other_when_told() {
    begin(1);
    Pointer far = allocate();
    CUcontext there = nullptr;
    WORKS(cu("cuCtxGetCurrent", &there));
    CUstream theirs = stream();
    begin(0);
    Pointer near = allocate();
    CHECK(near != far);
    CUfunction sum = kernel("flexring_sum_float");
    CUstream one = stream();
    CHECK(launch(sum, sum_of(near, near, near, 10), 1, theirs) == CUDA_ERROR_INVALID_HANDLE);
    WORKS(cu("cuMemcpyDtoDAsync_v2", near, far, kBytes, one));
    WORKS(synchronize(one));
    WORKS(cu("cuCtxEnablePeerAccess", there, 0u));
    CHECK(cu("cuCtxEnablePeerAccess", there, 0u) == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    WORKS(launch(sum, sum_of(near, near, far, 10), 1, one));
    WORKS(synchronize(one));
    WORKS(cu("cuCtxDisablePeerAccess", there));
    WORKS(launch(sum, sum_of(near, near, far, 10), 1, one));
    CHECK(synchronize(one) == CUDA_ERROR_ILLEGAL_ADDRESS);
}

// Runs this program again as another process; returns its end of a pipe to write to and its id.
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

std::string argument;

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

// Frees memory while another process has it open, which is alive or was killed.
void free_while_open(bool alive) {
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
    // It dies with this process.
    else if (fork() == 0) {
        usleep(300000);
        kill(child, SIGKILL);
        _exit(0);
    }
    WORKS(cu("cuMemFree_v2", memory));
}

void memory_open_elsewhere_is_not_freed() { free_while_open(true); }
void the_dead_hold_nothing() { free_while_open(false); }

void leaks_are_told() {
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

void hangs_are_told() {
    begin();
    auto* word = reinterpret_cast<uint32_t*>(pinned());
    CUstream one = stream();
    *word = 0;
    WORKS(cu("cuStreamWaitValue32_v2", one, address(word), 1u, 0u));
    synchronize(one);
}

void processes_end_in_the_midst_of_work() {
    begin();
    auto* word = reinterpret_cast<uint32_t*>(pinned());
    *word = 0;
    CUstream one = stream(), two = stream();
    CUevent later = event();
    WORKS(cu("cuStreamWaitValue32_v2", one, address(word), 1u, 0u));
    WORKS(cu("cuEventRecord", later, one));
    WORKS(cu("cuStreamWaitEvent", two, later, 0u));
    CUhostFn stuck = [](void*) { pause(); };
    WORKS(cu("cuLaunchHostFunc", stream(), stuck, static_cast<void*>(nullptr)));
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
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

void calls_need_a_context() {
    CUstream one = nullptr;
    CHECK(cu("cuStreamCreate", &one, 0u) == CUDA_ERROR_NOT_INITIALIZED);
    WORKS(cu("cuInit", 0u));
    CHECK(cu("cuStreamCreate", &one, 0u) == CUDA_ERROR_INVALID_CONTEXT);
    begin();
    CUstream made = stream();
    // Of threads each has its own.
    std::thread([] {
        CUstream none = nullptr;
        CHECK(cu("cuStreamCreate", &none, 0u) == CUDA_ERROR_INVALID_CONTEXT);
    }).join();
    int status = -1;
    void* graph = nullptr;
    WORKS(cu("cuStreamIsCapturing", made, &status));
    CHECK(status == 0);
    WORKS(cu("cuStreamBeginCapture_v2", made, 2));
    WORKS(cu("cuStreamIsCapturing", made, &status));
    CHECK(status == 1);
    CHECK(synchronize(made) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(cu("cuStreamEndCapture", made, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    WORKS(synchronize(made));
    WORKS(cu("cuStreamDestroy_v2", made));
    CHECK(synchronize(made) == CUDA_ERROR_INVALID_HANDLE);
}

void threads_share_the_driver() {
    begin();
    CUcontext context = nullptr;
    WORKS(cu("cuCtxGetCurrent", &context));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 8; ++rank) {
        threads.emplace_back([context, rank] {
            WORKS(cu("cuCtxSetCurrent", context));
            unsigned char* host = pinned();
            for (int round = 0; round < 20; ++round) {
                CUstream one = stream();
                Pointer memory = allocate(kBytes);
                WORKS(cu("cuMemsetD8Async", memory, static_cast<unsigned char>(rank), kBytes, one));
                WORKS(to_host(host, memory, kBytes, one));
                WORKS(synchronize(one));
                CHECK(host[0] == rank && host[kBytes - 1] == rank);
                WORKS(cu("cuMemFree_v2", memory));
                WORKS(cu("cuStreamDestroy_v2", one));
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

struct Scenario {
    const char* name;
    void (*body)();
    std::vector<std::string> environment;
    // The signal that ends it, and what it says on stderr.
    int signal;
    std::vector<std::string> says;
};

#define SCENARIO(body, ...) Scenario{#body, body, __VA_ARGS__}

const std::vector<Scenario> scenarios = {
    SCENARIO(calls_need_a_context, {}, 0, {}),
    SCENARIO(order_needs_events, {"SIMCUDA_DELAY_US=300"}, 0, {}),
    SCENARIO(legacy_stream_keeps_order, {}, 0, {}),
    SCENARIO(pinned_copies_take_time, {}, 0, {}),
    SCENARIO(kernels_compute, {}, 0, {}),
    SCENARIO(racing_tasks_die, {}, SIGABRT,
             {"flexring_sum_float: a task writes to what the same launch reads elsewhere"}),
    SCENARIO(errors_stick, {}, 0, {"goes beyond the end of its allocation"}),
    SCENARIO(unregistered_memory_is_out_of_reach, {}, 0, {"is host memory that is not registered"}),
    SCENARIO(the_host_cannot_touch_device_memory, {}, SIGSEGV, {}),
    SCENARIO(values_are_waited_for, {}, 0, {}),
    SCENARIO(host_functions_take_turns, {}, 0, {}),
    SCENARIO(calls_in_host_functions_die, {}, SIGABRT, {"cuDeviceGetCount: called from a host function"}),
    SCENARIO(calls_fail_on_demand,
             {"SIMCUDA_FAIL=cuMemAlloc_v2:3:2,work:2:214", "SIMCUDA_WITHOUT=cuMemHostUnregister"}, 0, {}),
    SCENARIO(memory_ends, {"SIMCUDA_MEMORY=1000000"}, 0, {}),
    SCENARIO(pointers_tell_what_they_are, {}, 0, {}),
    SCENARIO(pool_memory_follows_its_stream, {}, 0, {"is allocated by a stream that has not come to it yet"}),
    SCENARIO(gpus_reach_each_other_when_told, {"SIMCUDA_GPUS=2"}, 0,
             {"is memory of a GPU that this one has no access to"}),
    SCENARIO(memory_is_shared_between_processes, {}, 0, {}),
    SCENARIO(memory_open_elsewhere_is_not_freed, {}, SIGABRT, {"is still open in process"}),
    SCENARIO(the_dead_hold_nothing, {}, 0, {}),
    SCENARIO(leaks_are_told, {"SIMCUDA_LEAKS=1"}, 0,
             {"leaked 1 stream of GPU 0", "leaked 1 event of GPU 0", "of 12345 bytes by cuMemAlloc_v2",
              "leaked registration", "leaked 1 retained context"}),
    SCENARIO(nothing_leaks, {"SIMCUDA_LEAKS=1"}, 0, {"!leaked"}),
    SCENARIO(hangs_are_told, {"SIMCUDA_HANG_S=1"}, SIGABRT,
             {"cuStreamSynchronize: waits for 1 s already", "cuStreamWaitValue32_v2"}),
    SCENARIO(processes_end_in_the_midst_of_work, {}, 0, {}),
    SCENARIO(forks_are_refused, {}, 0, {}),
    SCENARIO(threads_share_the_driver, {}, 0, {}),
};

// Runs a scenario as a process of its own, for at most a minute; returns what is wrong with how it ended.
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
    // Its own children may keep the pipe, so its end is looked for too.
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
    for (const std::string& words : scenario.says) {
        const bool absent = words[0] == '!';
        if ((said.find(words.substr(absent)) != std::string::npos) == absent) {
            return "did not say '" + words + "'\n" + said;
        }
    }
    return "";
}

}  // namespace

int main(int count, char** arguments) {
    if (count > 1) {
        if (count > 2) argument = arguments[2];
        if (!std::strcmp(arguments[1], "opens_a_handle")) return opens_a_handle(), 0;
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
