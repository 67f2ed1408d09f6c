// Addresses: their attributes, access rights and lifetime.

#include <sys/mman.h>

#include "programs.h"

namespace selftest {

static uint64_t attribute(CUpointer_attribute which, Pointer at) {
    uint64_t value = 0;
    WORKS(cu("cuPointerGetAttribute", static_cast<void*>(&value), which, at));
    return value;
}

void unregistered_memory_is_out_of_reach() {
    begin();
    static float host[256];
    Pointer memory = allocate(), copy = 0;
    CUstream one = stream();
    CUfunction sum = kernel("flexring_collective_float");
    WORKS(cu("cuMemHostRegister_v2", static_cast<void*>(host), sizeof host, unsigned{CU_MEMHOSTREGISTER_DEVICEMAP}));
    WORKS(cu("cuMemHostGetDevicePointer_v2", &copy, static_cast<void*>(host), 0u));
    // A kernel uses the mapped address; a copy may use either.
    CHECK(copy != address(host) && copy % 512 == address(host) % 512);
    CHECK(mapped(host + 10) == copy + 10 * sizeof(float));
    CHECK(attribute(CU_POINTER_ATTRIBUTE_DEVICE_POINTER, address(host + 1)) == copy + sizeof(float));
    CHECK(attribute(CU_POINTER_ATTRIBUTE_HOST_POINTER, copy + sizeof(float)) == address(host + 1));
    WORKS(launch(sum, sum_of(memory, memory, copy, 256), 1, one));
    WORKS(synchronize(one));
    host[0] = 5;
    WORKS(cu("cuMemcpyAsync", copy + sizeof(float), address(host), sizeof(float), one));
    WORKS(synchronize(one));
    CHECK(host[1] == 5);
    CHECK(cu("cuMemHostRegister_v2", static_cast<void*>(host + 10), size_t{8}, 0u) ==
          CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    CHECK(cu("cuMemHostUnregister", static_cast<void*>(host + 10)) == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    WORKS(cu("cuMemHostUnregister", static_cast<void*>(host)));
    CHECK(cu("cuMemHostGetDevicePointer_v2", &copy, static_cast<void*>(host), 0u) == CUDA_ERROR_INVALID_VALUE);

    void* page = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(cu("cuMemHostRegister_v2", page, size_t{4096}, 2u) == CUDA_ERROR_INVALID_VALUE);
    WORKS(cu("cuMemHostRegister_v2", page, size_t{4096}, 10u));
    WORKS(launch(sum, sum_of(memory, memory, mapped(page), 256), 1, one));
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

void memory_is_limited() {
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

void pointers_report_their_attributes() {
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
    // An address is reused, its buffer id is not.
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
    // A stream that does not wait for a stream-ordered allocation uses it too early.
    static uint32_t word;
    WORKS(cu("cuMemHostRegister_v2", static_cast<void*>(&word), sizeof word, 2u));
    WORKS(cu("cuStreamWaitValue32_v2", one, mapped(&word), 1u, 0u));
    WORKS(cu("cuMemAllocAsync", &memory, kBytes, one));
    CUstream two = stream();
    WORKS(cu("cuMemsetD8Async", memory, static_cast<unsigned char>(4), kBytes, two));
    CHECK(synchronize(two) == CUDA_ERROR_ILLEGAL_ADDRESS);
}

void gpus_access_each_other_if_enabled() {
    begin(1);
    Pointer far = allocate();
    CUcontext there = nullptr;
    WORKS(cu("cuCtxGetCurrent", &there));
    CUstream theirs = stream();
    begin(0);
    Pointer near = allocate();
    CHECK(near != far);
    CUfunction sum = kernel("flexring_collective_float");
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

}  // namespace selftest
