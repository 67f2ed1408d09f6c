// Allocations, their addresses and access rights; see memory.h.

#include "memory.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

#include "ipc.h"
#include "settings.h"
#include "world.h"

namespace sim {
namespace {

constexpr size_t kSpace = size_t{256} << 30;
constexpr size_t kHandles = size_t{1} << 30;
constexpr size_t kSlot = size_t{2} << 20;
constexpr size_t kAlignment = 512;
// New memory is filled with this byte, which gives a NaN in every floating-point type.
constexpr int kPoison = 0xff;
constexpr size_t kPoisoned = size_t{16} << 20;

uint64_t fresh_id() {
    static uint64_t next = 0x1000;
    return ++next;
}

// Bytes of addresses that memory takes. One extra slot separates neighbours, so that an overrun does not reach another
// allocation.
size_t taken_by(size_t bytes) { return (bytes + 4 * kAlignment + kSlot - 1) / kSlot * kSlot + kSlot; }

char* map_anonymous(size_t bytes) {
    void* at = mmap(nullptr, pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? nullptr : static_cast<char*>(at);
}

}  // namespace

size_t pages(size_t bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return (bytes + page - 1) / page * page;
}

Range::Range(Kind kind, CUdeviceptr base, size_t bytes, char* alias, Context* context, const char* origin)
    : kind(kind), base(base), device(base), bytes(bytes), alias(alias), context(context), origin(origin), id(fresh_id()) {}

Range::~Range() {
    // The alias of a mapping belongs to its reservation.
    if (kind != Kind::HostRegistered && kind != Kind::Mapped) munmap(alias, mapped);
    if (descriptor >= 0) close(descriptor);
}

bool Range::mapped_to_device() const {
    return kind != Kind::HostRegistered || (flags & CU_MEMHOSTREGISTER_DEVICEMAP) != 0;
}

bool View::gone() const {
    return std::any_of(parts.begin(), parts.end(), [](const RangeRef& part) { return part->gone; });
}

Memory::Memory() : random_(settings().seed) {
    void* at = mmap(nullptr, kSpace, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) die("cuInit", "cannot reserve addresses for the GPUs' memory");
    space_ = reinterpret_cast<CUdeviceptr>(at);
    space_bytes_ = kSpace;
    next_handle_ = space_;
    next_ = (space_ + kHandles + kSlot - 1) / kSlot * kSlot;
}

void* Memory::handle() {
    next_handle_ += 64;
    if (next_handle_ >= space_ + kHandles) die("the simulation", "there are no more handles");
    return reinterpret_cast<void*>(next_handle_);
}

CUdeviceptr Memory::reserve(size_t bytes) {
    const size_t taken = taken_by(bytes);
    CUdeviceptr at = 0;
    // Real drivers reuse an address at once, which caches by address must tolerate; but reuse hides accesses to freed
    // memory. So an address is reused half of the time.
    auto hole = std::find_if(holes_.rbegin(), holes_.rend(), [&](const Hole& h) { return h.bytes == taken; });
    if (hole != holes_.rend() && random_() % 2) {
        at = hole->at;
        holes_.erase(std::next(hole).base());
        return at;
    }
    if (next_ + taken > space_ + space_bytes_) return 0;
    at = next_ + random_() % 4 * kAlignment;
    next_ += taken;
    return at;
}

void Memory::insert(const RangeRef& range) {
    ranges_[range->base] = range;
    if (range->on_host()) mapped_[range->device] = range;
}

bool Memory::map_to_device(Range& range) {
    // As aligned as the host address, up to a slot's alignment.
    const size_t extra = range.base % kAlignment;
    const CUdeviceptr at = reserve(range.bytes + extra);
    if (!at) return false;
    range.device = at + extra;
    return true;
}

RangeRef Memory::allocate(Kind kind, size_t bytes, Context* context, const char* origin) {
    const bool counted = kind == Kind::Device || kind == Kind::Pool || kind == Kind::Managed;
    if (counted && (bytes > settings().memory || context->used > settings().memory - bytes)) return nullptr;
    RangeRef range;
    if (kind == Kind::Device || kind == Kind::Pool) {
        const CUdeviceptr base = reserve(bytes);
        if (!base) return nullptr;
        const size_t whole = pages(bytes) + pages(sizeof(Control));
        const int descriptor = memfd_create("simulated GPU memory", MFD_CLOEXEC);
        if (descriptor < 0 || ftruncate(descriptor, static_cast<off_t>(whole)) != 0) {
            if (descriptor >= 0) close(descriptor);
            return nullptr;
        }
        void* alias = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
        if (alias == MAP_FAILED) {
            close(descriptor);
            return nullptr;
        }
        range = std::make_shared<Range>(kind, base, bytes, static_cast<char*>(alias), context, origin);
        range->mapped = whole;
        range->control = reinterpret_cast<Control*>(range->alias + pages(bytes));
        // Only exportable memory keeps its descriptor: a process may have many allocations but few descriptors.
        if (kind == Kind::Device) range->descriptor = descriptor;
        else close(descriptor);
        range->control->nonce = (uint64_t{static_cast<uint32_t>(getpid())} << 32) ^ std::random_device{}() ^ range->id;
    } else {
        char* alias = map_anonymous(bytes);
        if (!alias) return nullptr;
        range = std::make_shared<Range>(kind, reinterpret_cast<CUdeviceptr>(alias), bytes, alias, context, origin);
        range->mapped = pages(bytes);
        if (kind == Kind::HostAllocated && !map_to_device(*range)) return nullptr;
    }
    std::memset(range->alias, kPoison, std::min(bytes, kPoisoned));
    if (counted) context->used += bytes;
    insert(range);
    return range;
}

RangeRef Memory::adopt_import(int descriptor, char* alias, size_t bytes, Context* context, const char* origin) {
    const CUdeviceptr base = reserve(bytes);
    if (!base) return nullptr;
    auto range = std::make_shared<Range>(Kind::Imported, base, bytes, alias, context, origin);
    range->descriptor = descriptor;
    range->mapped = pages(bytes) + pages(sizeof(Control));
    range->control = reinterpret_cast<Control*>(alias + pages(bytes));
    insert(range);
    return range;
}

RangeRef Memory::adopt_host(char* at, size_t bytes, Context* context, const char* origin) {
    auto range =
        std::make_shared<Range>(Kind::HostRegistered, reinterpret_cast<CUdeviceptr>(at), bytes, at, context, origin);
    if (!map_to_device(*range)) return nullptr;
    insert(range);
    return range;
}

ReservationRef Memory::reserve_addresses(size_t bytes) {
    const size_t taken = taken_by(bytes);
    if (next_ + taken > space_ + space_bytes_) return nullptr;
    void* alias = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (alias == MAP_FAILED) return nullptr;
    const auto made = std::make_shared<Reservation>(Reservation{next_, bytes, static_cast<char*>(alias), fresh_id()});
    next_ += taken;
    return reservations_[made->base] = made;
}

void Memory::release(const ReservationRef& reservation) {
    munmap(reservation->alias, reservation->bytes);
    reservations_.erase(reservation->base);
}

ReservationRef Memory::reservation(CUdeviceptr address) const {
    auto after = reservations_.upper_bound(address);
    if (after == reservations_.begin()) return nullptr;
    const ReservationRef& found = std::prev(after)->second;
    return address - found->base < found->bytes ? found : nullptr;
}

RangeRef Memory::map(const ReservationRef& reservation, CUdeviceptr base, size_t bytes, const PhysicalRef& physical,
                     Context* context) {
    char* alias = reservation->alias + (base - reservation->base);
    void* at = mmap(alias, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->descriptor, 0);
    if (at == MAP_FAILED) return nullptr;
    auto range = std::make_shared<Range>(Kind::Mapped, base, bytes, alias, context, "cuMemMap");
    range->physical = physical;
    range->reservation = reservation;
    ++physical->mappings;
    insert(range);
    return range;
}

void perhaps_free(const PhysicalRef& physical) {
    if (physical->references > 0 || physical->mappings > 0) return;
    if (physical->counted) physical->counted->used -= physical->bytes;
    close(physical->descriptor);
    world().free_handles.push_back(physical->handle);
}

void Memory::forget(const RangeRef& range) {
    range->gone = true;
    ranges_.erase(range->base);
    if (range->kind == Kind::Mapped) {
        mmap(range->alias, range->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        --range->physical->mappings;
        return perhaps_free(range->physical);
    }
    if (range->kind == Kind::Imported) sign_off(*range);
    else if (range->control) range->control->freed = true;
    if (range->on_host()) mapped_.erase(range->device);
    if (is_device_space(range->device)) {
        const size_t extra = range->on_host() ? range->base % kAlignment : 0;
        holes_.push_back({range->device - extra, taken_by(range->bytes + extra)});
    }
    if (range->kind == Kind::Device || range->kind == Kind::Pool || range->kind == Kind::Managed) {
        range->context->used -= range->bytes;
    }
}

RangeRef Memory::find_in(const std::map<CUdeviceptr, RangeRef>& ranges, CUdeviceptr Range::*start, CUdeviceptr address) {
    auto after = ranges.upper_bound(address);
    if (after == ranges.begin()) return nullptr;
    const RangeRef& range = std::prev(after)->second;
    return address - (*range).*start < range->bytes ? range : nullptr;
}

RangeRef Memory::find(CUdeviceptr address) const {
    RangeRef range = find_in(ranges_, &Range::base, address);
    return range ? range : find_in(mapped_, &Range::device, address);
}

std::vector<RangeRef> Memory::parts_of(const RangeRef& range, CUdeviceptr address, size_t bytes) const {
    std::vector<RangeRef> parts{range};
    while (range->reservation && parts.back()->base + parts.back()->bytes < address + bytes) {
        const RangeRef next = find(parts.back()->base + parts.back()->bytes);
        if (!next || next->reservation != range->reservation) break;
        parts.push_back(next);
    }
    return parts;
}

bool Memory::has_all(const RangeRef& range, CUdeviceptr address, size_t bytes) const {
    size_t there = 0;
    for (const RangeRef& part : parts_of(range, address, bytes)) there += part->bytes;
    return bytes <= there - range->offset(address);
}

bool Memory::touches(CUdeviceptr address, size_t bytes) const {
    auto next = ranges_.lower_bound(address);
    return find(address) || (next != ranges_.end() && next->first - address < bytes);
}

std::vector<RangeRef> Memory::of(const Context* context) const {
    std::vector<RangeRef> found;
    for (const auto& [base, range] : ranges_) {
        if (range->context == context) found.push_back(range);
    }
    return found;
}

CUresult Memory::reach(const Context& context, const char* what, CUdeviceptr address, size_t bytes, Access access,
                       By by, View& view) const {
    const RangeRef range = find(address);
    const bool ours = range && range->context == &context;
    const bool host_pointer = range && range->on_host() && !is_device_space(address);
    const std::vector<RangeRef> parts = range ? parts_of(range, address, bytes) : std::vector<RangeRef>{};
    const auto is_out_of_reach = [&](const RangeRef& part) {
        return part->kind == Kind::Mapped && !(part->accessible >> context.ordinal & 1);
    };
    const char* why = nullptr;
    if (!range) {
        why = is_device_space(address) ? "is no memory (it may have been freed)"
                                       : "is host memory that is not registered";
    } else if (!has_all(range, address, bytes)) {
        why = "goes beyond the end of its allocation";
    } else if (std::any_of(parts.begin(), parts.end(), is_out_of_reach)) {
        why = "is mapped without access of this GPU (cuMemSetAccess)";
    } else if (!range->begun) {
        why = "is allocated by a stream that has not reached the allocation yet";
    } else if (range->kind == Kind::Imported && range->control->freed && !settings().free_while_open) {
        why = "was freed by the process that exported it";
    } else if (by != By::Copy && range->on_device() && range->kind != Kind::Mapped && !ours &&
               (range->kind == Kind::Pool || !context.peers.count(range->context))) {
        why = "is memory of a GPU that this one has no access to";
    } else if (by != By::Copy && !range->mapped_to_device()) {
        why = "is host memory that was registered without CU_MEMHOSTREGISTER_DEVICEMAP";
    } else if (by != By::Copy && host_pointer && !settings().host_pointers) {
        why = "is a host pointer, where kernels use the address from cuMemHostGetDevicePointer";
    } else if (range->kind == Kind::HostRegistered && !ours && !(range->flags & CU_MEMHOSTREGISTER_PORTABLE)) {
        why = "is host memory that another context registered without CU_MEMHOSTREGISTER_PORTABLE";
    } else if (access == Access::Write && range->kind == Kind::HostRegistered &&
               (range->flags & CU_MEMHOSTREGISTER_READ_ONLY)) {
        why = "is written to and was registered with CU_MEMHOSTREGISTER_READ_ONLY";
    }
    if (why) {
        say(std::string(what) + ": " + hexadecimal(address) + ", " + std::to_string(bytes) + " bytes, " + why);
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    view = {range->alias + range->offset(address), range, parts};
    return CUDA_SUCCESS;
}

Mapped mapping_of(CUdeviceptr address, size_t bytes) {
    std::ifstream maps("/proc/self/maps");
    CUdeviceptr reached = address;
    bool writable = true;
    for (std::string line; reached < address + bytes && std::getline(maps, line);) {
        unsigned long long from = 0, to = 0;
        char rights[8] = {};
        if (std::sscanf(line.c_str(), "%llx-%llx %7s", &from, &to, rights) != 3 || to <= reached) continue;
        if (from > reached || rights[0] != 'r') return Mapped::No;
        writable = writable && rights[1] == 'w';
        reached = to;
    }
    if (reached < address + bytes) return Mapped::No;
    return writable ? Mapped::Writable : Mapped::ReadOnly;
}

}  // namespace sim
