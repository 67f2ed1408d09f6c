// All memory that the driver knows: allocated, imported, or registered by the program.
//
// Owns addresses. Memory has two: the *device address*, a reservation without access rights that the program holds,
// and the *alias*, where the simulation accesses the bytes. Pinned host memory has a device address too, which differs from
// its host address, and its alias is the host address. Every access goes through `reach`. Must not know streams. The
// caller holds the world's lock in every function.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include <sys/types.h>

#include "abi.h"

namespace sim {

struct Context;

enum class Kind { Device, Pool, Managed, Imported, Mapped, HostAllocated, HostRegistered };

// The last page of an exportable allocation: shared state of its owner and of the processes that open it.
struct Control {
    std::atomic<uint64_t> nonce;
    std::atomic<bool> freed;
    std::array<std::atomic<pid_t>, 64> openers;
};

// Memory of cuMemCreate, of this process or imported. It lives as long as a handle or a mapping of it.
struct Physical {
    CUmemGenericAllocationHandle handle;
    int descriptor;
    size_t bytes;
    // The GPU's index in the machine.
    int gpu;
    unsigned handle_types;
    // Whose limit it counts for; null if it is imported.
    Context* counted;
    unsigned references = 1;
    unsigned mappings = 0;
};
using PhysicalRef = std::shared_ptr<Physical>;

// Addresses of cuMemAddressReserve.
struct Reservation {
    CUdeviceptr base;
    size_t bytes;
    char* alias;
    uint64_t id;
};
using ReservationRef = std::shared_ptr<Reservation>;

struct Range {
    Kind kind;
    // Where it starts for the program. `device`: for kernels; the same address except for pinned host memory.
    CUdeviceptr base;
    CUdeviceptr device;
    size_t bytes;
    char* alias;
    // The context and the function that allocated, opened or registered it.
    Context* context;
    const char* origin;
    // Unique in the process, unlike the address.
    uint64_t id;
    unsigned flags = 0;
    // Pool memory: whether its stream has reached the allocation, and whether its release was enqueued.
    bool begun = true;
    bool freeing = false;
    // Freed, closed or unregistered. Work may hold the range a little longer.
    bool gone = false;
    bool sync_memops = false;
    // Device and Imported.
    int descriptor = -1;
    Control* control = nullptr;
    // Imported: how many times it is open.
    unsigned opens = 0;
    size_t mapped = 0;
    // Mapped: what is mapped where, and by ordinal the GPUs that may access it.
    PhysicalRef physical;
    ReservationRef reservation;
    uint64_t accessible = 0;

    Range(Kind kind, CUdeviceptr base, size_t bytes, char* alias, Context* context, const char* origin);
    ~Range();
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;

    bool on_host() const { return kind == Kind::HostAllocated || kind == Kind::HostRegistered; }
    bool on_device() const { return kind == Kind::Device || kind == Kind::Pool || kind == Kind::Imported || kind == Kind::Mapped; }
    // Whether kernels of a context may use it.
    bool mapped_to_device() const;
    // The offset of an address in it, either by `base` or by `device`.
    size_t offset(CUdeviceptr address) const { return address - base < bytes ? address - base : address - device; }
};
using RangeRef = std::shared_ptr<Range>;

enum class Access { Read, Write };
enum class By { Kernel, Copy, MemoryOperation };

// Bytes that work may access while it holds this object.
struct View {
    char* at = nullptr;
    RangeRef range;
    // All that have the bytes.
    std::vector<RangeRef> parts;

    bool gone() const;
};

class Memory {
public:
    Memory();

    // Null if GPU memory or address space is exhausted.
    RangeRef allocate(Kind kind, size_t bytes, Context* context, const char* origin);
    // An address for memory whose `descriptor` and alias exist already.
    RangeRef adopt_import(int descriptor, char* alias, size_t bytes, Context* context, const char* origin);
    RangeRef adopt_host(char* at, size_t bytes, Context* context, const char* origin);
    // Addresses without memory, aligned to `kGranularity`; null if none are left.
    ReservationRef reserve_addresses(size_t bytes);
    void release(const ReservationRef& reservation);
    // That which contains this address.
    ReservationRef reservation(CUdeviceptr address) const;
    // Memory at a place of a reservation, where there is none yet.
    RangeRef map(const ReservationRef& reservation, CUdeviceptr base, size_t bytes, const PhysicalRef& physical,
                 Context* context);
    // Releases the address. The bytes are freed when no work holds them.
    void forget(const RangeRef& range);

    // The live range that contains this address, a host or a device address.
    RangeRef find(CUdeviceptr address) const;
    // What has these bytes, which begin in `range`: for a program, mappings side by side in a reservation are one memory.
    // Fewer bytes if the last one ends before.
    std::vector<RangeRef> parts_of(const RangeRef& range, CUdeviceptr address, size_t bytes) const;
    bool has_all(const RangeRef& range, CUdeviceptr address, size_t bytes) const;
    // Whether any live range overlaps.
    bool touches(CUdeviceptr address, size_t bytes) const;
    // Whether the address is in the range reserved for GPU memory.
    bool is_device_space(CUdeviceptr address) const { return address - space_ < space_bytes_; }
    std::vector<RangeRef> of(const Context* context) const;

    // Whether work of `context` may access these bytes: 0, or the resulting error, after a line on stderr.
    CUresult reach(const Context& context, const char* what, CUdeviceptr address, size_t bytes, Access access, By by,
                   View& view) const;

    // A unique handle value, at which nothing can be read.
    void* handle();

private:
    // A range of GPU addresses; 0 if none is left.
    CUdeviceptr reserve(size_t bytes);
    void insert(const RangeRef& range);
    // Gives pinned host memory a device address; false if none is left.
    bool map_to_device(Range& range);
    static RangeRef find_in(const std::map<CUdeviceptr, RangeRef>& ranges, CUdeviceptr Range::*start, CUdeviceptr address);

    CUdeviceptr space_ = 0;
    size_t space_bytes_ = 0;
    CUdeviceptr next_handle_ = 0;
    CUdeviceptr next_ = 0;
    std::map<CUdeviceptr, RangeRef> ranges_;
    // Pinned host memory by its device address.
    std::map<CUdeviceptr, RangeRef> mapped_;
    struct Hole {
        CUdeviceptr at;
        size_t bytes;
    };
    std::vector<Hole> holes_;
    std::map<CUdeviceptr, ReservationRef> reservations_;
    std::mt19937_64 random_;
};

// The unit of cuMemCreate and cuMemAddressReserve.
constexpr size_t kGranularity = size_t{2} << 20;

// Frees it if nothing refers to it any more.
void perhaps_free(const PhysicalRef& physical);

size_t pages(size_t bytes);

// How a range of this process's memory is mapped: partly unmapped, readable, or writable.
enum class Mapped { No, ReadOnly, Writable };
Mapped mapping_of(CUdeviceptr address, size_t bytes);

}  // namespace sim
