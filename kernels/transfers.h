// A call by messages between pairs of ranks: sends and receives, uneven all-to-alls.
//
// A transfer is what one rank sends and another one receives. It moves in messages through the slots of their link, each with a header
// that says which transfer it belongs to. The ranks need not have the same transfers in a call: the n-th send to a rank matches its n-th
// receive, whatever calls they are in. So no order of transfers is right for all ranks, and a CTA takes a message of any transfer whose
// next message can move: what it sends has a free slot, or what it receives is there. As a message waits for no other transfer, one
// resident CTA of each rank suffices.
//
// | word      | writer            | order of the store | reader           | order of the load       |
// |-----------|-------------------|--------------------|------------------|-------------------------|
// | sent      | the sender        | release.sys        | the receiver     | relaxed, acquire.sys    |
// | used      | the receiver      | release.sys        | the sender       | relaxed, acquire.sys    |
// | slots     | the sender        | before sent        | the receiver     | after sent, before used |
// | taken     | this rank's CTAs  | swap, add          | the same         | relaxed; the add of CTAs|
// |           |                   |                    |                  | that have ended: acq_rel|
// | link.sent | the last CTA      | add                | this rank's CTAs | before they have ended  |
#pragma once

namespace flexring {

// Transfers that a CTA looks at together, which are all of most calls.
#ifdef FLEXRING_STRESSED
constexpr u32 kWindow = 8;
#else
constexpr u32 kWindow = 384;
#endif

// The copy of a transfer that a CTA has in shared memory. Of a copy within the rank, without a link.
struct TransferState {
    u32 kind;
    // The halves of addresses of this rank's vectors, at no multiple of 8 bytes: 64-bit words are addresses that peers may access, as in
    // CollectiveShared, and the compiler would read both halves as one.
    u32 from[2];
    u32 into[2];
    u32 slot_count;
    u64 bytes;
    u64 tag;
    // The first message's number, from 1, over all calls.
    u64 number;
    // By slot: the word that it waits for, and the one that it writes.
    const u64* awaited;
    u64* published;
    u8* slots;
    u32 messages;
    u32 rank;
};

template <class E>
class TransferRun {
    using Stored = typename E::Stored;

  public:
    __device__ __forceinline__ explicit TransferRun(const Exchange<E>& exchange)
        : exchange_(exchange), run_(exchange.run), call_(run_.call), shared_(run_.shared) {}

    // Moves messages until all are taken. Returns whether the call has failed.
    __device__ __forceinline__ bool run() const {
        // One CTA speaks for the rank.
        if (shared_.slice < call_.slices) exchange_.template begin_slice<false>();
        begin();
        if (call_.slices != 0 && __syncthreads_or(exchange_.template receive<kEntryPackets>(true, Part{}, 0, 0))) return true;
        while (take()) {
            move();
            __syncthreads();
            if (threadIdx.x == 0) publish();
            end_reach();
        }
        if (shared_.failed) return true;
        end();
        return false;
    }

  private:
    static constexpr u32 kOver = 0;
    static constexpr u32 kNotReady = 0xffffffff;
    static constexpr u32 kRoom = kSlot - kHeaderBytes;
    static_assert(kWindow * (sizeof(TransferState) + sizeof(u32)) <= kGathered * 16, "shared memory has room");

    __device__ __forceinline__ const Transfers& all() const { return reach_shared(call_.transfers); }
    __device__ __forceinline__ const Transfer& transfer(u32 nth) const {
        return reach_shared(reinterpret_cast<const Transfer*>(call_.transfers + 1) + nth);
    }
    __device__ __forceinline__ u64* taken(u32 nth) const { return &reach_shared(all().taken + nth); }
    // Messages of a transfer that CTAs have taken.
    __device__ __forceinline__ u64* taken_of(u32 nth) const { return taken(2 + nth); }

    // By place in the window: the transfer; and kOver, kNotReady, or its next message, from 1.
    __device__ __forceinline__ TransferState& state(u32 place) const { return reinterpret_cast<TransferState*>(shared_.gathered)[place]; }
    __device__ __forceinline__ u32& next_of(u32 place) const { return reinterpret_cast<u32*>(&state(kWindow))[place]; }
    __device__ __forceinline__ u32 window() const {
        const u32 left = static_cast<u32>(all().count) - shared_.search.base;
        return left < kWindow ? left : kWindow;
    }

    // Reads the transfers of the window. Called between barriers.
    __device__ __forceinline__ void read_window() const {
        const u32 count = window();
        for (u32 place = threadIdx.x; place < count; place += blockDim.x) {
            const Transfer& read = transfer(shared_.search.base + place);
            TransferState& moved = this->state(place);
            const u64 from = reinterpret_cast<u64>(read.from), into = reinterpret_cast<u64>(read.into);
            moved.from[0] = static_cast<u32>(from), moved.from[1] = static_cast<u32>(from >> 32);
            moved.into[0] = static_cast<u32>(into), moved.into[1] = static_cast<u32>(into >> 32);
            moved.bytes = read.bytes, moved.tag = read.tag;
            moved.messages = read.messages, moved.kind = read.kind, moved.rank = call_.rank;
            if (read.kind == kOwnCopy) continue;
            const ProgramLink& link = reach_shared(all().links + read.link);
            const bool sends = read.kind == kSend;
            moved.number = (sends ? link.sent : link.received) + read.first + 1;
            moved.awaited = sends ? link.out_used : link.in_sent;
            moved.published = sends ? link.out_sent : link.in_used;
            moved.slots = sends ? link.out : const_cast<u8*>(link.in);
            moved.slot_count = link.slots, moved.rank = link.rank;
        }
    }

    __device__ __forceinline__ void begin() const {
        __syncthreads();
        if (threadIdx.x == 0) {
            shared_.slice = 0;
            shared_.search = MessageSearch{};
            // CTAs begin with different transfers.
            if (keeps(kAnyTransfer)) shared_.search.place = blockIdx.x % window();
        }
        __syncthreads();
        read_window();
        __syncthreads();
    }

    // What both ends must have equal besides the tag: the collective that a send comes before, or with bit 63 the one that it is part of.
    __device__ __forceinline__ u64 collective_position() const { return run_.epoch() | static_cast<u64>(call_.slices != 0) << 63; }

    static __device__ __forceinline__ u32 slot_of(const TransferState& moved, u32 message) {
        return static_cast<u32>(moved.number + message) & (moved.slot_count - 1);
    }
    // What the next message of a transfer is.
    __device__ __forceinline__ u32 look(u32 place) const {
        const TransferState& moved = this->state(place);
        const u32 next = static_cast<u32>(load_relaxed(taken_of(shared_.search.base + place)));
        if (next >= moved.messages) return kOver;
        if (moved.kind == kOwnCopy) return next + 1;
        const u64 number = moved.number + next;
        const bool sends = moved.kind == kSend;
        const u64 enough = !sends ? number : number > moved.slot_count ? number - moved.slot_count : 0;
        const bool waits = keeps(sends ? kWaitForSlots : kWaitForMessages);
        return waits && load_relaxed_sys(&reach_shared(moved.awaited + slot_of(moved, next))) < enough ? kNotReady : next + 1;
    }

    // Takes a message that can move: `search` says which. False if there are no more, or the call has failed. All threads return the same.
    __device__ __forceinline__ bool take() const {
        Waiter waiter;
        MessageSearch& search = shared_.search;
        u32 found = kIdle;
        while (found == kIdle) {
            const u32 count = window();
            for (u32 place = threadIdx.x; place < count; place += blockDim.x) next_of(place) = look(place);
            __syncthreads();
            if (threadIdx.x == 0) search.found = claim(count, waiter);
            __syncthreads();
            found = search.found;
            if (found != kIdle || all().count <= kWindow) continue;
            if (threadIdx.x == 0) search.base = search.base + count < all().count ? search.base + count : 0;
            __syncthreads();
            read_window();
            __syncthreads();
        }
        if (threadIdx.x == 0) waiter.end(run_);
        return found == kPull;
    }

    // Takes one of the messages that threads have found, and compares its header; else looks whether all are taken, or the call has
    // failed. Called by one thread.
    __device__ __forceinline__ u32 claim(u32 count, Waiter& waiter) const {
        MessageSearch& search = shared_.search;
        for (u32 left = count, place = search.place < count ? search.place : 0; left > 0; --left, place = place + 1 < count ? place + 1 : 0) {
            const u32 next = next_of(place);
            if (next == kOver) continue;
            if (next == kNotReady) {
                if (search.next_missing == 0) note_missing(place);
                if (!keeps(kAnyTransfer)) break;
                continue;
            }
            if (compare_and_swap(taken_of(search.base + place), next - 1, next) != next - 1) continue;
            add_relaxed(taken(0), 1);
            search.place = place;
            search.message = next - 1;
            return accepts(state(place), next - 1) ? kPull : kFailure;
        }
        if (load_relaxed(taken(0)) == all().messages) return kEnd;
        if (search.base + count == all().count) {
            search.missing = search.next_missing, search.missing_part = search.next_part;
            search.next_missing = 0;
        }
        if (waiter.again(run_, [&] { return search.missing; })) return kIdle;
        shared_.failed = true;
        return kFailure;
    }
    __device__ __forceinline__ void note_missing(u32 place) const {
        const TransferState& moved = state(place);
        shared_.search.next_missing = (moved.kind == kSend ? kWaitReceiver : kWaitSender) << 16 | moved.rank;
        shared_.search.next_part = static_cast<u32>(moved.number + load_relaxed(taken_of(shared_.search.base + place)));
    }

    // Whether a message that was taken is the one that this rank expects. Orders what follows behind the word that was waited for.
    __device__ __forceinline__ bool accepts(const TransferState& moved, u32 message) const {
        if (moved.kind == kOwnCopy) return true;
        (void)load_acquire_sys(&reach_shared(moved.awaited + slot_of(moved, message)));
        if (moved.kind == kSend || !keeps(kHeadersCompared)) return true;
        u64 tag, order;
        load_packet(reinterpret_cast<u64*>(slot(moved, message)), tag, order);
        if (tag == moved.tag && order == collective_position()) return true;
        shared_.failed = true;
        if (!stops(run_.state)) return false;
        store_relaxed_sys(&run_.status.own_words[0], moved.tag), store_relaxed_sys(&run_.status.own_words[1], collective_position());
        store_relaxed_sys(&run_.status.their_words[0], tag), store_relaxed_sys(&run_.status.their_words[1], order);
        report_failure(run_.status, kUnexpected, moved.rank, run_.epoch());
        return false;
    }

    static __device__ __forceinline__ u8* slot(const TransferState& moved, u32 message) {
        u8* const at = moved.slots + static_cast<u64>(slot_of(moved, message)) * kSlot;
        if (moved.kind == kReceive) return const_cast<u8*>(reach_shared(static_cast<const u8*>(at), kSlot));
        return reach_shared(at, kSlot);
    }

    static __device__ __forceinline__ u8* joined(const u32 (&halves)[2]) {
        return reinterpret_cast<u8*>(halves[0] | static_cast<u64>(halves[1]) << 32);
    }

    // Copies the data of the message that was taken.
    __device__ __forceinline__ void move() const {
        const TransferState& moved = this->state(shared_.search.place);
        const u32 message = shared_.search.message;
        const u64 first = static_cast<u64>(message) * kRoom, left = moved.bytes - first;
        const u32 bytes = static_cast<u32>(left < kRoom ? left : kRoom);
        u8* const slot = moved.kind == kOwnCopy ? nullptr : this->slot(moved, message);
        if (moved.kind == kSend && threadIdx.x == 0) store_packet(reinterpret_cast<u64*>(slot), moved.tag, collective_position());
        if (bytes == 0) return;
        // Apart from each other, so that accesses of peers' memory are those of slots.
        u8* const data = slot + kHeaderBytes;
        const bool reads = moved.kind != kReceive, writes = moved.kind != kSend;
        const u8* const from = reads ? reach_own(joined(moved.from) + first, bytes, false) : nullptr;
        u8* const into = writes ? reach_own(joined(moved.into) + first, bytes, true) : nullptr;
        const bool aligned = (skew_of(from) | skew_of(into)) == 0;
        exchange_.move(
            1, 1, bytes, aligned,
            [&](u32, u32 at, u32 rest, bool whole) {
                if (!reads) {
                    Granule granule;
                    load_staged(reinterpret_cast<const u32*>(data + at), granule.words);
                    return granule;
                }
                return whole ? load_once(reinterpret_cast<const Granule*>(from + at)) : get<Stored>(from + at, rest);
            },
            [&](u32, u32 at, const Granule& granule, u32 rest, bool whole) {
                if (!writes) {
                    store_staged(reinterpret_cast<u32*>(data + at), granule.words);
                } else if (whole) {
                    store_once(reinterpret_cast<Granule*>(into + at), granule);
                } else {
                    put<Stored>(into + at, granule, rest);
                }
            });
    }
    static __device__ __forceinline__ u8* reach_own(u8* at, u32 bytes, bool writes) {
        return writes ? reach_to_write(at, bytes) : const_cast<u8*>(reach_to_read(at, bytes));
    }

    // Called by one thread after a barrier.
    __device__ __forceinline__ void publish() const {
        const TransferState& moved = this->state(shared_.search.place);
        if (moved.kind == kOwnCopy) return;
        const u32 message = shared_.search.message;
        store_release_sys(&reach_shared(moved.published + slot_of(moved, message)), moved.number + message);
    }

    // The last CTA to find no more messages prepares the next call.
    __device__ __forceinline__ void end() const {
        if (threadIdx.x == 0) shared_.search.is_last = add_acq_rel(taken(1), 1) + 1 == gridDim.x;
        __syncthreads();
        if (!shared_.search.is_last) return;
        for (u32 nth = threadIdx.x; nth < static_cast<u32>(all().count); nth += blockDim.x) {
            const Transfer& ended = transfer(nth);
            store_relaxed(taken_of(nth), 0);
            if (ended.kind == kOwnCopy) continue;
            ProgramLink& link = reach_shared(all().links + ended.link);
            add_relaxed(ended.kind == kSend ? &link.sent : &link.received, ended.messages);
        }
        for (u32 nth = threadIdx.x; nth < 2; nth += blockDim.x) store_relaxed(taken(nth), 0);
        __syncthreads();
    }

    const Exchange<E>& exchange_;
    const Running& run_;
    const CollectiveParameters& call_;
    CollectiveShared& shared_;
};

}  // namespace flexring
