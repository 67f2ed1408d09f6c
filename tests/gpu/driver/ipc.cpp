// IPC handles: a process, a descriptor of its memory, and a number that distinguishes it from later memory with the same
// descriptor.

#include "ipc.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "world.h"

using namespace sim;

namespace {

constexpr uint64_t kMagic = 0x6c616e6f69746361;

struct Handle {
    uint64_t magic;
    int32_t process;
    int32_t descriptor;
    uint64_t bytes;
    uint64_t nonce;
    // The GPU's index in the machine.
    int32_t gpu;
    char rest[28];
};
static_assert(sizeof(Handle) == sizeof(CUipcMemHandle));

// Whether a process runs. A zombie does not.
bool lives(pid_t process) {
    FILE* file = std::fopen(("/proc/" + std::to_string(process) + "/stat").c_str(), "r");
    if (!file) return false;
    char state = 0;
    const int found = std::fscanf(file, "%*d (%*[^)]) %c", &state);
    std::fclose(file);
    return found != 1 || (state != 'Z' && state != 'X');
}

void sign_on(Range& imported) {
    for (auto& opener : imported.control->openers) {
        pid_t unused = 0;
        if (opener.compare_exchange_strong(unused, getpid())) return;
    }
}

// Maps the memory of a handle, with its control page behind it; null if it no longer exists.
char* map_handle(const Handle& handle, int& descriptor) {
    const std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.descriptor);
    descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (descriptor < 0) return nullptr;
    const size_t data = pages(handle.bytes), whole = data + pages(sizeof(Control));
    struct stat facts {};
    if (fstat(descriptor, &facts) == 0 && S_ISREG(facts.st_mode) && static_cast<size_t>(facts.st_size) == whole) {
        void* at = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
        if (at != MAP_FAILED) {
            char* alias = static_cast<char*>(at);
            const auto* control = reinterpret_cast<const Control*>(alias + data);
            if (control->nonce == handle.nonce && !control->freed) return alias;
            munmap(at, whole);
        }
    }
    close(descriptor);
    return nullptr;
}

RangeRef opened(const Context& context, uint64_t nonce) {
    for (const RangeRef& range : world().memory->of(&context)) {
        if (range->kind == Kind::Imported && range->control->nonce == nonce) return range;
    }
    return nullptr;
}

}  // namespace

namespace sim {

void check_not_open(const Range& range, const char* function) {
    if (range.kind != Kind::Device || settings().free_while_open) return;
    for (const auto& opener : range.control->openers) {
        const pid_t process = opener;
        if (process == 0 || !lives(process)) continue;
        die(function, hexadecimal(range.base) + " is still open in process " + std::to_string(process) +
                          ", which has not called cuIpcCloseMemHandle");
    }
}

void sign_off(Range& imported) {
    for (auto& opener : imported.control->openers) {
        pid_t me = getpid();
        if (opener.compare_exchange_strong(me, 0)) return;
    }
}

}  // namespace sim

SIMCUDA_EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle* out, CUdeviceptr address) {
    return in_context(__func__, [&](Context& context, Lock&) {
        const RangeRef range = world().memory->find(address);
        // The documentation allows only the base of an allocation of cuMemAlloc.
        if (!out || !range || range->kind != Kind::Device || range->base != address) return CUDA_ERROR_INVALID_VALUE;
        if (range->context != &context) return CUDA_ERROR_INVALID_CONTEXT;
        Handle handle{kMagic, getpid(), range->descriptor, range->bytes, range->control->nonce, context.number, {}};
        std::memcpy(out, &handle, sizeof handle);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* out, CUipcMemHandle bytes, unsigned flags) {
    return in_context(__func__, [&](Context& context, Lock& lock) {
        if (!out || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
        Handle handle;
        std::memcpy(&handle, &bytes, sizeof handle);
        if (handle.magic != kMagic) return CUDA_ERROR_INVALID_HANDLE;
        if (handle.process == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
        if (handle.gpu != context.number && !settings().peer) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
        context.perhaps_drain(lock, "cuIpcOpenMemHandle_v2");
        RangeRef range = opened(context, handle.nonce);
        if (!range) {
            int descriptor = -1;
            char* alias = map_handle(handle, descriptor);
            if (!alias) return CUDA_ERROR_MAP_FAILED;
            range = world().memory->adopt_import(descriptor, alias, handle.bytes, &context, "cuIpcOpenMemHandle_v2");
            if (!range) {
                munmap(alias, pages(handle.bytes) + pages(sizeof(Control)));
                close(descriptor);
                return CUDA_ERROR_MAP_FAILED;
            }
            sign_on(*range);
        }
        ++range->opens;
        *out = range->base;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    return in_context(__func__, [&](Context& context, Lock& lock) {
        const RangeRef range = world().memory->find(address);
        if (!range || range->kind != Kind::Imported || range->base != address) return CUDA_ERROR_INVALID_VALUE;
        if (range->context != &context) return CUDA_ERROR_INVALID_CONTEXT;
        context.perhaps_drain(lock, "cuIpcCloseMemHandle");
        // Later accesses to the memory are errors.
        if (--range->opens == 0) world().memory->forget(range);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuIpcGetEventHandle(CUipcEventHandle*, CUevent) {
    return in_context(__func__, [](Context&, Lock&) { return CUDA_ERROR_NOT_SUPPORTED; });
}

SIMCUDA_EXPORT CUresult cuIpcOpenEventHandle(CUevent*, CUipcEventHandle) {
    return in_context(__func__, [](Context&, Lock&) { return CUDA_ERROR_NOT_SUPPORTED; });
}
