// All memory that the driver knows: what it allocated, what it imported, what the program registered.
//
// Owns addresses. A GPU's memory has two: the *device address*, a reservation without access that the program holds,
// and the *alias*, where the simulation reaches the bytes. Every access goes through `reach`. Knows no stream; the
// caller holds the world's lock throughout.
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

enum class Kind { Device, Pool, Managed, Imported, HostAllocated, HostRegistered };

// The last page of an allocation that can be exported: what its owner and those who open it tell each other.
struct Control {
    std::atomic<uint64_t> nonce;
    std::atomic<bool> freed;
    std::array<std::atomic<pid_t>, 64> openers;
};

struct Range {
    Kind kind;
    CUdeviceptr base;
    size_t bytes;
    char* alias;
    // Where it was allocated, opened or registered, and by which function.
    Context* context;
    const char* origin;
    // Never used twice in a process, unlike the address.
    uint64_t id;
    unsigned flags = 0;
    // Pool memory: whether its stream has come to its allocation, and whether its freeing was asked for.
    bool begun = true;
    bool freeing = false;
    // Freed, closed or unregistered; work may hold the range a little longer.
    bool gone = false;
    bool sync_memops = false;
    // Device and Imported.
    int descriptor = -1;
    Control* control = nullptr;
    // Imported: how often it is open.
    unsigned opens = 0;
    size_t mapped = 0;

    Range(Kind kind, CUdeviceptr base, size_t bytes, char* alias, Context* context, const char* origin);
    ~Range();
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;

    bool on_host() const { return kind == Kind::HostAllocated || kind == Kind::HostRegistered; }
    bool on_device() const { return kind == Kind::Device || kind == Kind::Pool || kind == Kind::Imported; }
    // Whether kernels of some context may use it.
    bool mapped_to_device() const;
};
using RangeRef = std::shared_ptr<Range>;

enum class Access { Read, Write };
enum class By { Kernel, Copy, MemoryOperation };

// Bytes that work may touch while it holds this.
struct View {
    char* at = nullptr;
    RangeRef range;
};

class Memory {
public:
    Memory();

    // Null where nothing is left of the GPU's memory or of the address space.
    RangeRef allocate(Kind kind, size_t bytes, Context* context, const char* origin);
    // An address for memory whose `descriptor` and alias are at hand.
    RangeRef adopt_import(int descriptor, char* alias, size_t bytes, Context* context, const char* origin);
    RangeRef adopt_host(char* at, size_t bytes, Context* context, const char* origin);
    // Ends the life of its address; the bytes go when no work holds them.
    void forget(const RangeRef& range);

    // The living range that has this address in it.
    RangeRef find(CUdeviceptr address) const;
    // Whether any range has a byte in common.
    bool touches(CUdeviceptr address, size_t bytes) const;
    // Whether the address is one of those that only GPUs' memory has.
    bool is_device_space(CUdeviceptr address) const { return address - space_ < space_bytes_; }
    std::vector<RangeRef> of(const Context* context) const;

    // Whether the work of `context` may do this with these bytes: 0, or the error that it ends in, after a line on
    // stderr.
    CUresult reach(const Context& context, const char* what, CUdeviceptr address, size_t bytes, Access access, By by,
                   View& view) const;

    // A value that no other object has, at which nothing can be read.
    void* handle();

private:
    // Of the GPUs' addresses; 0 if there are no more.
    CUdeviceptr reserve(size_t bytes);
    void insert(const RangeRef& range);

    CUdeviceptr space_ = 0;
    size_t space_bytes_ = 0;
    CUdeviceptr next_handle_ = 0;
    CUdeviceptr next_ = 0;
    std::map<CUdeviceptr, RangeRef> ranges_;
    struct Hole {
        CUdeviceptr at;
        size_t bytes;
    };
    std::vector<Hole> holes_;
    std::mt19937_64 random_;
};

size_t pages(size_t bytes);

// How a stretch of this process's memory is mapped: not at all in part, all of it readable, or writable too.
enum class Mapped { No, ReadOnly, Writable };
Mapped mapping_of(CUdeviceptr address, size_t bytes);

}  // namespace sim
