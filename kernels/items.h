// A call by the items of a Program, for any plan: with links to ranks of other nodes, and with sums in the plan's order.
//
// CTAs take items in the order of the list. An item waits for items before it on this rank, for the messages among its sources, and
// for the slots among its destinations. crates/flexring-plan/src/device_program says why every list ends with one CTA, and its test is
// the reference.
//
// | word       | writer            | order of the store | reader          | order of the load      |
// |------------|-------------------|--------------------|-----------------|------------------------|
// | done       | the item's CTA    | release.gpu        | this rank's CTAs| relaxed, acquire.gpu   |
// | sent       | the sender        | release.sys        | the receiver    | relaxed, acquire.sys   |
// | used       | the receiver      | release.sys        | the sender      | relaxed, acquire.sys   |
// | slots      | the sender        | before sent        | the receiver    | after sent, before used|
// | taken      | this rank's CTAs  | add, relaxed       | the same        |                        |
//
// A rank writes to no slot, and to no output, before it has the entry packets of all ranks of its node. So slots may lie in the
// memory of stages: no rank is in an earlier call.
#pragma once

#include "collective.h"
#include "memory_order.h"
#include "number.h"
#include "reduce.h"

namespace flexring {

// Set in the word of a source or destination that is in shared memory: its first granule in `gathered`. No address is that large.
constexpr u64 kGatheredAt = 1ull << 62;
static_assert((kGatheredAt & kScaled) == 0, "both may be set");

// A granule of a source that is not marked kScaled, or of a destination.
__device__ __forceinline__ Granule load_source(const CollectiveShared& shared, u64 from, u32 granule) {
    if ((from & kGatheredAt) != 0) return shared.gathered[static_cast<u32>(from) + granule];
    Granule read;
    load_staged(reinterpret_cast<const u32*>(from) + granule * 4ull, read.words);
    return read;
}
__device__ __forceinline__ void store_sum(CollectiveShared& shared, u64 into, u32 granule, const Granule& sum) {
    if ((into & kGatheredAt) != 0) {
        shared.gathered[static_cast<u32>(into) + granule] = sum;
    } else {
        store_staged(reinterpret_cast<u32*>(into) + granule * 4ull, sum.words);
    }
}

// Ends a call, at its last CTA: the next one counts its messages from here, and takes items from the first one on.
__device__ __forceinline__ void end_program(Program& program) {
#pragma unroll 1
    for (u32 nth = 0; nth < program.link_count; ++nth) {
        const LinkCount& count = reach_shared(program.counts + nth);
        ProgramLink& link = reach_shared(program.links + count.link);
        link.sent += count.sends;
        link.received += count.receives;
    }
    program.taken = 0;
}

// The items of a call, as a CTA takes them. The first `whole` bytes of an item are added where they are, if all places are aligned; the
// others in parts, for which this rank's own places are copied to shared memory and from there, element by element.
template <class Stored>
class Items {
  public:
    __device__ __forceinline__ explicit Items(const Running& run) : run_(run), call_(run.call), shared_(run.shared) {}

    // All CTAs wait for the entries into the only slice.
    __device__ __forceinline__ void begin() const {
        __syncthreads();
        if (threadIdx.x == 0) shared_.slice = 0, shared_.item = ItemShared{};
        __syncthreads();
    }

    // The next part of the item, or of the next item, once it can be run. `first`: where in the item the part begins.
    __device__ __forceinline__ Turn next(u32& first) const {
        const ItemShared& item = shared_.item;
        Turn turn{};
        first += length(first);
        if (first == item.bytes) {
            __syncthreads();
            if (threadIdx.x == 0) take();
            __syncthreads();
            turn.work = kEnd;
            if (item.index >= program().item_count) return turn;
            u32 skew = 0;
            turn.work = kFailure;
            if (__syncthreads_or(await(skew))) return turn;
            reach_own();
            const bool apart = __syncthreads_or(skew != 0);
            if (threadIdx.x == 0) shared_.item.whole = apart ? 0 : item.bytes / 16 * 16;
            __syncthreads();
            first = 0;
        }
        if (first >= item.whole) collect(first);
        turn.work = kReduce;
        turn.sources = item.sources;
        turn.divide = (item.flags & kLast) != 0 ? call_.divide : 0;
        turn.end = (length(first) + 15) / 16;
        turn.first = item.sources, turn.last = item.sources + item.destinations;
        return turn;
    }

    // Ends a part. Called after a barrier.
    __device__ __forceinline__ void end(u32 first) const {
        const ItemShared& item = shared_.item;
        if (first >= item.whole) {
            distribute(first);
            __syncthreads();
        }
        if (first + length(first) == item.bytes) {
            end_reach();
            publish();
        }
    }

  private:
    struct Message {
        u64 number;
        u32 slot;
    };
    __device__ __forceinline__ Program& program() const { return reach_shared(call_.program); }
    __device__ __forceinline__ const ProgramPlace& place(u32 nth) const {
        return reach_shared(program().places + shared_.item.first_place + nth);
    }
    __device__ __forceinline__ const ProgramLink& link(const ProgramPlace& place) const {
        return reach_shared(program().links + place.link);
    }
    // The number of a message, from 1, over all calls; and its slot.
    static __device__ __forceinline__ Message message(const ProgramLink& link, const ProgramPlace& place, bool sends) {
        const u64 number = (sends ? link.sent : link.received) + place.at + 1;
        return Message{number, static_cast<u32>(number) & (link.slots - 1)};
    }
    __device__ __forceinline__ u64& word(u32 nth) const { return shared_.sources[nth]; }

    // Granules in shared memory for each source, and for the sum. By a shift, because a division of such small numbers is a call that
    // uses local memory on sm_100.
    __device__ __forceinline__ u32 room() const { return kGathered >> (32 - __clz(static_cast<int>(shared_.item.sources))); }

    // Bytes of the part that begins there.
    __device__ __forceinline__ u32 length(u32 first) const {
        const ItemShared& item = shared_.item;
        const u32 left = item.bytes - first, most = first < item.whole ? item.whole : room() * 16;
        return left < most ? left : most;
    }

    // Takes an item. Called by one thread.
    __device__ __forceinline__ void take() const {
        Program& program = this->program();
        const u32 taken = static_cast<u32>(add_relaxed(&program.taken, 1));
        ItemShared& item = shared_.item;
        item.index = taken;
        if (taken >= program.item_count) return;
        if (!keeps(kItemsInOrder)) item.index = program.item_count - 1 - taken;
        const ProgramItem& read = reach_shared(program.items + item.index);
        item.bytes = read.elements * static_cast<u32>(sizeof(Stored));
        item.flags = read.flags;
        item.first_place = read.first_place;
        item.first_wait = read.first_wait;
        item.sources = read.sources;
        item.destinations = read.destinations;
        item.waits = read.waits;
    }

    // Waits for all that an item needs, says where its places are, and sets `skew` if one is not aligned. Returns whether the call has
    // failed.
    __device__ __forceinline__ bool await(u32& skew) const {
        const ItemShared& item = shared_.item;
        const u32 places = item.sources + item.destinations;
        bool failed = false;
#pragma unroll 1
        for (u32 nth = threadIdx.x; nth < places + item.waits && !failed; nth += blockDim.x) {
            const bool is_item = nth >= places, sends = nth >= item.sources;
            const u64* awaited;
            u64 enough = run_.epoch();
            u32 what = 0;
            bool waits = keeps(kWaitForItems);
            if (is_item) {
                awaited = &reach_shared(program().done + reach_shared(program().waits + item.first_wait + nth - places));
            } else {
                const ProgramPlace& there = place(nth);
                if (there.kind != kMessagePlace) {
                    word(nth) = own(there) | scaled(there, sends);
                    skew |= static_cast<u32>(word(nth)) % 16;
                    continue;
                }
                const ProgramLink& way = link(there);
                const Message message = this->message(way, there, sends);
                awaited = &reach_shared((sends ? way.out_used : way.in_sent) + message.slot);
                enough = !sends ? message.number : message.number > way.slots ? message.number - way.slots : 0;
                what = (sends ? kWaitSlot : kWaitData) << 16 | way.rank;
                waits = keeps(sends ? kWaitForSlots : kWaitForMessages);
                word(nth) = slot(way, message, sends);
            }
            Waiter waiter;
            while (waits && !failed && load_relaxed_sys(awaited) < enough) failed = !waiter.again(run_, [=] { return what; });
            waiter.end(run_);
            // Orders what follows behind the load.
            if (!waits) continue;
            if (is_item) {
                (void)load_acquire_gpu(awaited);
            } else {
                (void)load_acquire_sys(awaited);
            }
        }
        return failed;
    }

    // Where a message is.
    static __device__ __forceinline__ u64 slot(const ProgramLink& way, const Message& message, bool sends) {
        const u64 at = static_cast<u64>(message.slot) * kSlot;
        if (!sends) return reinterpret_cast<u64>(reach_shared(way.in + at, kSlot));
        return reinterpret_cast<u64>(reach_shared(way.out + at, kSlot));
    }
    // Where a place in this rank's own memory is.
    __device__ __forceinline__ u64 own(const ProgramPlace& there) const {
        const void* const base = there.kind == kInputPlace    ? call_.input
                                 : there.kind == kOutputPlace ? call_.output
                                 : there.kind == kCopyPlace   ? program().copy
                                                              : program().scratch;
        return reinterpret_cast<u64>(base) + there.at * sizeof(Stored);
    }
    __device__ __forceinline__ u64 scaled(const ProgramPlace& there, bool sends) const {
        const bool is_input = there.kind == kInputPlace || there.kind == kCopyPlace;
        return is_input && !sends && (shared_.item.flags & kScales) != 0 ? kScaled : 0;
    }
    // Makes the item's places accessible on a simulated GPU: once no other CTA of this rank uses them any more.
    __device__ __forceinline__ void reach_own() const {
#ifdef FLEXRING_ON_HOST
        const ItemShared& item = shared_.item;
        for (u32 nth = threadIdx.x; nth < item.sources + item.destinations; nth += blockDim.x) {
            if (place(nth).kind != kMessagePlace) word(nth) = reached(nth) | (word(nth) & kScaled);
        }
#endif
    }
    __device__ __forceinline__ u64 reached(u32 nth) const {
        const ProgramPlace& there = place(nth);
        const u64 at = own(there);
        const u32 bytes = shared_.item.bytes;
        if (there.kind != kInputPlace && there.kind != kOutputPlace) return reinterpret_cast<u64>(reach_shared(reinterpret_cast<u8*>(at), bytes));
        if (nth < shared_.item.sources) return reinterpret_cast<u64>(reach_to_read(reinterpret_cast<const Stored*>(at), bytes));
        return reinterpret_cast<u64>(reach_to_write(reinterpret_cast<Stored*>(at), bytes));
    }

    // Where a part of one of this rank's own places is, which has whole elements and no granules; null for a message, whose slot has
    // whole granules.
    __device__ __forceinline__ Stored* own_part(u32 nth, u32 first) const {
        return place(nth).kind == kMessagePlace ? nullptr : reinterpret_cast<Stored*>(reached(nth) + first);
    }
    // Sets the words of all places to where a part is: own ones in shared memory, those of messages in their slots.
    __device__ __forceinline__ void collect(u32 first) const {
        const ItemShared& item = shared_.item;
        const u32 places = item.sources + item.destinations, room = this->room();
        const u32 elements = length(first) / static_cast<u32>(sizeof(Stored));
#pragma unroll 1
        for (u32 nth = threadIdx.x; nth < places; nth += blockDim.x) {
            const ProgramPlace& there = place(nth);
            const bool sends = nth >= item.sources;
            if (there.kind == kMessagePlace) {
                const ProgramLink& way = link(there);
                word(nth) = slot(way, message(way, there, sends), sends) + first;
            } else {
                word(nth) = kGatheredAt | scaled(there, sends) | (sends ? item.sources : nth) * room;
            }
        }
#pragma unroll 1
        for (u32 source = 0; source < item.sources; ++source) {
            const Stored* const from = own_part(source, first);
            Stored* const into = reinterpret_cast<Stored*>(shared_.gathered + source * room);
#pragma unroll 1
            for (u32 nth = threadIdx.x; from != nullptr && nth < elements; nth += blockDim.x) into[nth] = from[nth];
        }
        __syncthreads();
    }
    __device__ __forceinline__ void distribute(u32 first) const {
        const ItemShared& item = shared_.item;
        const u32 room = this->room(), elements = length(first) / static_cast<u32>(sizeof(Stored));
        const Stored* const from = reinterpret_cast<const Stored*>(shared_.gathered + item.sources * room);
#pragma unroll 1
        for (u32 nth = 0; nth < item.destinations; ++nth) {
            Stored* const into = own_part(item.sources + nth, first);
#pragma unroll 1
            for (u32 element = threadIdx.x; into != nullptr && element < elements; element += blockDim.x) into[element] = from[element];
        }
    }

    // Says that an item's messages were sent and used, and that it is done. Called after a barrier.
    __device__ __forceinline__ void publish() const {
        const ItemShared& item = shared_.item;
#pragma unroll 1
        for (u32 nth = threadIdx.x; nth < item.sources + item.destinations; nth += blockDim.x) {
            const ProgramPlace& there = place(nth);
            if (there.kind != kMessagePlace) continue;
            const bool sends = nth >= item.sources;
            const ProgramLink& way = link(there);
            const Message message = this->message(way, there, sends);
            store_release_sys(&reach_shared((sends ? way.out_sent : way.in_used) + message.slot), message.number);
        }
        if (threadIdx.x == 0) store_release_gpu(&reach_shared(program().done + item.index), run_.epoch());
    }

    const Running& run_;
    const CollectiveParameters& call_;
    CollectiveShared& shared_;
};

}  // namespace flexring
