// Memory that a program maps by itself.

#include <fcntl.h>
#include <unistd.h>

#include "processes.h"

namespace selftest {

using Handle = CUmemGenericAllocationHandle;

constexpr size_t kUnit = size_t{2} << 20;
constexpr CUmemAccessDesc kAll{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

static Handle create(size_t bytes, unsigned handle_types = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    CUmemAllocationProp wanted{};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.requestedHandleTypes = handle_types;
    wanted.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    Handle made = 0;
    WORKS(cu("cuMemCreate", &made, bytes, &wanted, 0ULL));
    return made;
}

static Pointer reserve(size_t bytes) {
    Pointer at = 0;
    WORKS(cu("cuMemAddressReserve", &at, bytes, size_t{0}, Pointer{0}, 0ULL));
    return at;
}

static void map(Pointer at, size_t bytes, Handle memory) { WORKS(cu("cuMemMap", at, bytes, size_t{0}, memory, 0ULL)); }

static Handle retained(Pointer at) {
    Handle found = 0;
    WORKS(cu("cuMemRetainAllocationHandle", &found, reinterpret_cast<void*>(at)));
    return found;
}

static uint64_t attribute(CUpointer_attribute which, Pointer at) {
    uint64_t value = 0;
    WORKS(cu("cuPointerGetAttribute", static_cast<void*>(&value), which, at));
    return value;
}

void mappings_side_by_side_are_one_memory() {
    begin();
    CUstream one = stream();
    CUfunction sum = kernel("flexring_collective_float");
    const Handle first = create(kUnit), second = create(2 * kUnit);
    const Pointer start = reserve(4 * kUnit);
    CHECK(cu("cuMemMap", start, kUnit, kUnit, first, 0ULL) == CUDA_ERROR_INVALID_VALUE);
    map(start, kUnit, first);
    CHECK(cu("cuMemMap", start, kUnit, size_t{0}, second, 0ULL) == CUDA_ERROR_INVALID_VALUE);
    map(start + kUnit, 2 * kUnit, second);
    CHECK(cu("cuMemSetAccess", start, 4 * kUnit, &kAll, size_t{1}) == CUDA_ERROR_INVALID_VALUE);
    WORKS(cu("cuMemSetAccess", start, 3 * kUnit, &kAll, size_t{1}));
    std::vector<float> host(kUnit / 2, 3);
    to_device(start + kUnit / 2, host.data(), 2 * kUnit, one);
    // 1,024 elements around the end of the first.
    const Pointer around = start + kUnit - 2048;
    WORKS(launch(sum, sum_of(around, around, around, 1024), 1, one));
    WORKS(to_host(host.data(), start + kUnit / 2, 2 * kUnit, one));
    WORKS(synchronize(one));
    const size_t middle = kUnit / 2 / sizeof(float);
    CHECK(host[middle - 513] == 3 && host[middle - 512] == 6 && host[middle + 511] == 6 && host[middle + 512] == 3);

    // Attributes describe the reservation, the range of an address is its mapping.
    CHECK(attribute(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, start) == 0);
    CHECK(attribute(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, start + kUnit) == start);
    CHECK(attribute(CU_POINTER_ATTRIBUTE_RANGE_SIZE, start + kUnit) == 4 * kUnit);
    Pointer base = 0;
    size_t bytes = 0;
    WORKS(cu("cuMemGetAddressRange_v2", &base, &bytes, start + kUnit + 5));
    CHECK(base == start + kUnit && bytes == 2 * kUnit);
    CUipcMemHandle name;
    CHECK(cu("cuIpcGetMemHandle", &name, start) == CUDA_ERROR_INVALID_VALUE);

    WORKS(cu("cuMemGetAddressRange_v2", &base, &bytes, start));
    CHECK(cu("cuMemUnmap", start + kUnit, kUnit) == CUDA_ERROR_INVALID_VALUE);
    CHECK(cu("cuMemFree_v2", start) == CUDA_ERROR_INVALID_VALUE);
    CHECK(cu("cuMemAddressFree", start, 4 * kUnit) == CUDA_ERROR_INVALID_VALUE);
    WORKS(cu("cuMemUnmap", start, 3 * kUnit));
    WORKS(cu("cuMemAddressFree", start, 4 * kUnit));
}

void handles_say_what_is_mapped() {
    begin();
    const Pointer start = reserve(kUnit);
    size_t before = 0, after = 0, total = 0;
    WORKS(cu("cuMemGetInfo_v2", &before, &total));
    Handle memory = create(kUnit), none = 0;
    map(start, kUnit, memory);
    const uint64_t id = attribute(CU_POINTER_ATTRIBUTE_BUFFER_ID, start);
    WORKS(cu("cuMemRelease", memory));
    CHECK(cu("cuMemRelease", memory) == CUDA_ERROR_INVALID_VALUE);
    CHECK(retained(start + 100) == memory);
    WORKS(cu("cuMemUnmap", start, kUnit));
    CHECK(cu("cuMemRetainAllocationHandle", &none, reinterpret_cast<void*>(start)) == CUDA_ERROR_INVALID_VALUE);
    // While there is a reference, no other memory gets the handle.
    const Handle other = create(kUnit);
    CHECK(other != memory);
    map(start, kUnit, other);
    CHECK(retained(start) == other && attribute(CU_POINTER_ATTRIBUTE_BUFFER_ID, start) == id);
    WORKS(cu("cuMemRelease", memory));
    CHECK(create(kUnit) == memory);
    WORKS(cu("cuMemGetInfo_v2", &after, &total));
    CHECK(before - after == 2 * kUnit);
    const Pointer plain = allocate();
    CHECK(cu("cuMemRetainAllocationHandle", &none, reinterpret_cast<void*>(plain)) == CUDA_ERROR_INVALID_VALUE);
}

void mappings_need_access() {
    begin();
    CUstream one = stream();
    const Pointer start = reserve(2 * kUnit);
    map(start, kUnit, create(kUnit));
    map(start + kUnit, kUnit, create(kUnit));
    WORKS(cu("cuMemSetAccess", start, kUnit, &kAll, size_t{1}));
    WORKS(cu("cuMemsetD8Async", start, static_cast<unsigned char>(3), kUnit, one));
    WORKS(synchronize(one));
    WORKS(cu("cuMemsetD8Async", start, static_cast<unsigned char>(3), kUnit + 1, one));
    CHECK(synchronize(one) == CUDA_ERROR_ILLEGAL_ADDRESS);
}

void descriptors_share_physical_memory() {
    begin();
    const Handle memory = create(kUnit), hidden = create(kUnit, 0);
    const Pointer start = reserve(kUnit);
    map(start, kUnit, memory);
    WORKS(cu("cuMemSetAccess", start, kUnit, &kAll, size_t{1}));
    WORKS(cu("cuMemsetD8_v2", start, static_cast<unsigned char>(5), kUnit));
    WORKS(cu("cuCtxSynchronize"));
    int descriptor = -1, input = -1;
    CHECK(cu("cuMemExportToShareableHandle", static_cast<void*>(&descriptor), hidden, 1u, 0ULL) == CUDA_ERROR_INVALID_VALUE);
    WORKS(cu("cuMemExportToShareableHandle", static_cast<void*>(&descriptor), memory, 1u, 0ULL));
    CHECK(fcntl(descriptor, F_SETFD, 0) == 0);
    CHECK(succeeded(again("imports_a_descriptor", std::to_string(descriptor), input)));
    unsigned char last = 0;
    WORKS(cu("cuMemcpyDtoH_v2", static_cast<void*>(&last), start + kUnit - 1, size_t{1}));
    CHECK(last == 6);
}

void imports_a_descriptor() {
    begin();
    Handle memory = 0;
    void* shared = reinterpret_cast<void*>(static_cast<intptr_t>(std::stoi(argument)));
    CHECK(cu("cuMemImportFromShareableHandle", &memory, static_cast<void*>(nullptr), 1u) == CUDA_ERROR_INVALID_VALUE);
    WORKS(cu("cuMemImportFromShareableHandle", &memory, shared, 1u));
    const Pointer start = reserve(kUnit);
    map(start, kUnit, memory);
    WORKS(cu("cuMemRelease", memory));
    WORKS(cu("cuMemSetAccess", start, kUnit, &kAll, size_t{1}));
    unsigned char first = 0;
    WORKS(cu("cuMemcpyDtoH_v2", static_cast<void*>(&first), start, size_t{1}));
    CHECK(first == 5);
    WORKS(cu("cuMemsetD8_v2", start, static_cast<unsigned char>(6), kUnit));
    WORKS(cu("cuCtxSynchronize"));
    WORKS(cu("cuMemUnmap", start, kUnit));
    WORKS(cu("cuMemAddressFree", start, kUnit));
}

}  // namespace selftest
