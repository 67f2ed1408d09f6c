// Kernels that run a whole collective without the host: one for each type. `collective.h` has the memory that they share.
//
// A call is divided into slices. Each is run by one CTA of every rank, from beginning to end, and waits for nothing but the same
// slice of the other ranks. CTAs take slices in order, so the first slice that is not complete has a CTA on each rank or gets one:
// one resident CTA of each rank completes the call, and the ranks' grids may differ.
//
// A slice begins with an entry packet from every rank to every other one: the hash of its call. A rank writes no output before it
// has seen those of all ranks, and so no two ranks' calls are mixed up. As all ranks send them in every collective, a rank that
// has seen those of call e may write to the memory of call e + 1, but not of call e + 2: the ranks it waits for may be in e.
//
// - Short: each rank writes its blocks into the inboxes of those that receive them, as packets, which need no fence. There are two
//   sets of inboxes and of entry packets, for even and odd calls.
// - Staged: rounds through three stages of each rank in turn. `ready` says that a stage is filled, `done` that it was read. An
//   all-reduce has an owner for each part of a stage: it reduces the input stages of all ranks, and writes the output stages of all.
//   A rank fills a stage, copies out the round before the last one, and reduces the last one: so other work is between what a rank
//   says and what it waits for next.
// - Direct: as staged, in one round, with the inputs and outputs themselves in place of the stages, if those that peers access are in
//   allocations that the peers have open. Each rank sends the places of its own with its entry into a slice, and all do the same with
//   those of all, so one slice may be direct and another one staged. Blocks are whole granules, also in memory. The entry says that the
//   input is there, `done` that a rank accesses the other's memory no more.
// - Listed: the items of a Program. items.h explains them.
// - Transfers: messages between pairs of ranks. transfers.h explains them. Calls that not all ranks make have no slice, so they begin without
//   entry packets, and leave the number of calls as it is.
//
// | word         | writer               | order of the store   | reader              | order of the load      |
// |--------------|----------------------|----------------------|---------------------|------------------------|
// | owner        | all CTAs             | compare-and-swap,    | the same            | relaxed: see below     |
// |              |                      | relaxed store        |                     |                        |
// | epoch        | all CTAs             | add, swap            | the same            | relaxed; the add that  |
// |              |                      |                      |                     | leaves: acquire.gpu, or|
// |              |                      |                      |                     | acq_rel.gpu: see leave |
// | closed       | host                 | a copy               | CTAs                | relaxed                |
// | stopped      | a CTA                | add, acq_rel.gpu     | CTAs                | relaxed                |
// | memories     | host                 | a copy               | CTAs                | relaxed                |
// | entry, words | each rank            | packets, relaxed.sys | the slice's CTA     | relaxed.sys            |
// | entry, places| each rank            | packets, release.sys | the slice's CTA     | acquire.sys            |
// | inboxes      | each rank            | packets, relaxed.sys | the slice's CTA     | relaxed.sys            |
// | input stages | the slice's CTA      | before ready         | the peers' CTAs     | after ready            |
// | ready        | each rank            | release.sys          | the slice's CTA     | acquire.sys            |
// | output stages| the peers' CTAs      | before done          | the slice's CTA     | after done             |
// | done         | each rank            | release.sys          | the slice's CTA     | acquire.sys            |
// | inputs       | earlier kernels      | before entry         | the peers' CTAs     | after entry            |
// | outputs      | the peers' CTAs      | before done          | later kernels       | after done             |
// | status       | CTAs                 | release.sys          | host                | acquire                |
//
// - The word `epoch` holds the number of the last call, whether a call has failed, and for the kernel that runs the number of CTAs
//   that have left and of tickets that were taken. So one addition gives a CTA the number of its call and its first slice.
// - A kernel runs only if it got `owner`. Both atomic operations are under way at the same time: the addition may have been early,
//   while another kernel ran, and `owner` got later. Then the other kernel has found a ticket too many when it ended, and has kept
//   the word as it is, with kFailed; so no kernel runs with the number of an earlier call. Nothing else of an earlier kernel
//   needs an order, because streams order kernels.
// - Flags repeat after 2^31 calls. Where they begin again, each call clears what calls of the other parity have left.
#include "collective.h"
#include "memory_order.h"
#include "number.h"
#include "reduce.h"

namespace flexring {

#ifdef FLEXRING_ON_HOST
inline u32 broken_rule = kNoRule;
inline bool keeps(Rule rule) { return broken_rule != rule; }
#else
__device__ constexpr bool keeps(Rule) { return true; }
#endif

// The parts of the word `epoch`. Tickets are at the top, where they may overflow.
constexpr u64 kEpochMask = (1ull << kEpochBits) - 1;
constexpr u64 kFailed = 1ull << kEpochBits;
constexpr int kCountBits = 10;
constexpr int kLeftShift = 44;
constexpr int kTicketShift = kLeftShift + kCountBits;
constexpr u64 kOneLeft = 1ull << kLeftShift;
constexpr u64 kOneTicket = 1ull << kTicketShift;
static_assert(kEpochBits < kLeftShift && kTicketShift + kCountBits == 64 && kEpochBits + kRoundBits <= 64, "words have room");

// A thread that waits looks at `stopped` and the clock once in so many polls, and at the host's memory once in so many looks.
#ifdef FLEXRING_ON_HOST
constexpr u32 kPolls = 4;
#else
constexpr u32 kPolls = 1024;
#endif
constexpr u32 kLooks = 8;
// What is waited for is reported after so many nanoseconds.
constexpr u64 kPatience = 1'000'000;

// The round of a direct call has all bytes of a slice, which are less than these.
constexpr u32 kDirect = 0xfffffff0;
// Bytes of a stage, granules that a CTA has of the blocks of all ranks, and bytes of a slot. A test makes them small.
#ifdef FLEXRING_STRESSED
constexpr u32 kStage = 1024;
constexpr u32 kGathered = 48;
constexpr u32 kSlot = 512;
#else
constexpr u32 kSlot = kSlotBytes;
constexpr u32 kStage = kStageBytes;
constexpr u32 kGathered = 2048;
#endif
// Granules that a thread waits for at a time.
constexpr int kPolled = 3;

// The part of each block that a slice has: whole granules, but for the last one of a block.
struct Part {
    u64 first;
    u64 bytes;
};
__device__ __forceinline__ Part part_of(u64 block, u32 slice, u32 slices) {
    if (slices == 1) return Part{0, block};
    const u64 granules = (block + 15) / 16;
    const u64 first = granules * slice / slices * 16, end = granules * (slice + 1) / slices * 16;
    return Part{first, (end < block ? end : block) - first};
}

// What all rounds of a slice have in common.
struct Rounds {
    Part part;
    // Bytes of a block in a stage, and from one block to the next.
    u32 room;
    u32 stride;
    u32 count;
    // Whether ranks access each other's vectors, and no stages.
    bool direct;
    __device__ __forceinline__ u64 first(u32 round) const { return static_cast<u64>(round) * room; }
    __device__ __forceinline__ u32 bytes(u32 round) const {
        const u64 left = part.bytes - first(round);
        return left < room ? static_cast<u32>(left) : room;
    }
};

// The item that a CTA runs. items.h explains it.
struct ItemShared {
    u32 index;
    u32 bytes;
    u32 flags;
    u32 first_place;
    u32 first_wait;
    u32 sources;
    u32 destinations;
    u32 waits;
    u32 whole;
};

// A CTA's search for a message that it can move. transfers.h explains it.
struct MessageSearch {
    // The first transfer of the window; in it, that of the message, or the one to look at first.
    u32 base;
    u32 place;
    u32 message;
    // kPull: a message was taken; kIdle: none can move now; kEnd: all are taken; kFailure.
    u32 found;
    bool is_last;
    // What the last pass over all windows found missing first, and this one so far: kind of wait << 16 | rank; and which message.
    u32 missing;
    u32 missing_part;
    u32 next_missing;
    u32 next_part;
};

// What the threads of a CTA share. Also what would take registers.
struct CollectiveShared {
    CollectiveState* peers[kMostRanks];
    // The addresses that are next. Of a round, in the order of the ranks received: the block for this rank in their input stages; and
    // from kMostRanks on, by rank: the output stages. In a direct call the parts of their inputs that this rank reads, and those of
    // outputs. Of an item: its sources, and behind them its destinations, marked as items.h says.
    u64 sources[kMostPlaces];
    // The ranks whose blocks are received, in order.
    u32 received[kMostRanks];
    // By rank, the halves of its places in this slice. The 64-bit words of arrays here are addresses.
    u32 places[kMostRanks][kPlaces][2];
    u64 epoch;
    // The slice to run; as many as the call has or more if the CTA leaves.
    u32 slice;
    // Whether the kernel runs the call, and whether it is to leave at once.
    bool runs;
    bool failed;
    // Whether this rank's vectors are where the call says.
    bool placed;
    u32 reported;
    Rounds rounds;
    ItemShared item;
    MessageSearch search;
    Granule gathered[kGathered];

    __device__ __forceinline__ u64& destination(u32 rank) { return sources[kMostRanks + rank]; }
};
constexpr u32 kNoSlice = 0xffffffff;

// A call, as the threads of a CTA see it.
struct Running {
    const CollectiveParameters& call;
    CollectiveState& state;
    CollectiveStatus& status;
    CollectiveShared& shared;

    __device__ __forceinline__ u64 epoch() const { return shared.epoch; }
    __device__ __forceinline__ u32 slice() const { return shared.slice; }
    // What this CTA runs or waits for: a slice, an item, or a message.
    __device__ __forceinline__ u32 part() const {
        return call.path == kListed ? shared.item.index : call.path == kTransfers ? shared.search.missing_part : shared.slice;
    }
    __device__ __forceinline__ u32 flag() const { return 1u << 31 | static_cast<u32>(shared.epoch & 0x7fffffff); }
    __device__ __forceinline__ u32 parity() const { return keeps(kTwoParities) ? static_cast<u32>(shared.epoch & 1) : 0; }
};

__device__ __forceinline__ bool has(u32 ranks, u32 rank) { return (ranks >> rank & 1) != 0; }

// The packets that `source` writes for a rank whose memory begins at `state`.
__device__ __forceinline__ Packet* inbox_of(CollectiveState* state, const CollectiveParameters& call, u32 parity, u32 source) {
    return reinterpret_cast<Packet*>(state + 1) + static_cast<u64>(parity * call.ranks + source) * (call.short_bytes / 8);
}

// Whether a type's kernel moves blocks without reducing them, which that of bytes does for all types.
template <class E>
constexpr bool kMoves = false;
template <>
constexpr bool kMoves<Uint8> = true;

constexpr u32 kInput = 0;
constexpr u32 kOutput = 1;

__device__ __forceinline__ u64 bytes_before_stages(const CollectiveParameters& call) {
    return sizeof(CollectiveState) + 2ull * call.ranks * (call.short_bytes / 8) * sizeof(Packet);
}

// Where the stage of a slice for this round begins in a rank's memory.
__device__ __forceinline__ u32 stage_at(const CollectiveParameters& call, u32 kind, u32 slice, u32 round) {
    const u32 turn = keeps(kSeveralStages) ? round % kStages : 0;
    return static_cast<u32>(bytes_before_stages(call)) + ((kind * kMostSlices + slice) * kStages + turn) * kStageBytes;
}

__device__ __forceinline__ void put_packet(Packet* packet, u32 low, u32 high, u32 flag) {
    store_packet(packet->half, static_cast<u64>(low) << 32 | flag, static_cast<u64>(high) << 32 | flag);
}
// As above, behind what this thread has released.
__device__ __forceinline__ void release_packet(Packet* packet, u32 low, u32 high, u32 flag) {
    store_packet_release(packet->half, static_cast<u64>(low) << 32 | flag, static_cast<u64>(high) << 32 | flag);
}
__device__ __forceinline__ bool is_there(const u64 (&half)[2], u32 flag) {
    return static_cast<u32>(half[0]) == flag && static_cast<u32>(half[1]) == flag;
}
__device__ __forceinline__ u64 data_of(const u64 (&half)[2]) { return half[0] >> 32 | (half[1] >> 32) << 32; }

// Has the other CTAs leave, once they wait. True for the first failure, which is reported to the host.
__device__ __forceinline__ bool stops(CollectiveState& state) { return add_acq_rel(&state.stopped, 1) == 0; }
__device__ __forceinline__ void report_failure(CollectiveStatus& status, u32 failure, u32 rank, u64 epoch) {
    store_relaxed_sys(&status.failed_rank, rank);
    store_relaxed_sys(&status.failed_epoch, epoch);
    store_release_sys(&status.failure, failure);
}
__device__ __forceinline__ void fail(CollectiveState& state, CollectiveStatus& status, u32 failure, u32 rank, u64 epoch) {
    if (stops(state)) report_failure(status, failure, rank, epoch);
}

// A thread that waits for another rank.
class Waiter {
  public:
    // Called after a poll in vain; `what` returns the first missing one as kind << 16 | rank, or 0 if another CTA of this rank reports
    // it. False if the call has failed.
    template <class What>
    __device__ __forceinline__ bool again(const Running& run, What what) {
        pause_waiter();
        if (++polls_ % kPolls != 0) return true;
        if (load_relaxed(&run.state.stopped)) return false;
        const u64 now = nanoseconds();
        if (since_ == 0) since_ = now;
        const u32 now_for = what();
        if (now_for != 0) report(run, now, now_for);
        if (polls_ % (kPolls * kLooks) != 0 || !load_relaxed_sys(&run.status.aborted)) return true;
        fail(run.state, run.status, kAbandoned, now_for & 0xffff, run.epoch());
        return false;
    }
    // Called when the wait is over.
    __device__ __forceinline__ void end(const Running& run) {
        if (reported_ == 0) return;
        store_relaxed_sys(&run.status.waiting_epoch, 0);
        store_release_gpu(&run.state.reporter, 0);
        reported_ = 0;
    }

  private:
    __device__ __forceinline__ void report(const Running& run, u64 now, u32 now_for) {
        if (reported_ != 0 || (now - since_ > kPatience && compare_and_swap(&run.state.reporter, 0, 1) == 0)) {
            if (reported_ != now_for) store_relaxed_sys(&run.status.waiting_for, static_cast<u64>(run.part()) << 32 | now_for);
            if (reported_ == 0) store_release_sys(&run.status.waiting_epoch, run.epoch());
            reported_ = now_for;
        }
    }

    u32 polls_ = 0;
    u64 since_ = 0;
    // What is reported to be waited for; never 0.
    u32 reported_ = 0;
};

// Reports that another rank makes another call, with its words, which it sends with its first slice.
__device__ __forceinline__ void report_mismatch(const Running& run, u32 rank) {
    if (!stops(run.state)) return;
    for (u32 nth = 0; nth < kCallWords; ++nth) store_relaxed_sys(&run.status.own_words[nth], run.call.words[nth]);
#pragma unroll 1
    for (u32 nth = 0; nth < kCallWords;) {
        u64 half[2];
        load_packet(run.state.words[run.parity()][rank][nth].half, half[0], half[1]);
        if (is_there(half, run.flag())) {
            store_relaxed_sys(&run.status.their_words[nth++], data_of(half));
        } else {
            pause_waiter();
            if (load_relaxed_sys(&run.status.aborted)) break;
        }
    }
    report_failure(run.status, kMismatch, rank, run.epoch());
}

// These bytes of the blocks for several ranks, or from them.
template <class Stored, class Byte>
class Blocks {
  public:
    __device__ __forceinline__ Blocks(Byte* base, u64 stride, u32 ranks, u64 first, u64 bytes)
        : base_(base + first), stride_(stride) {
#ifdef FLEXRING_ON_HOST
        u32 reached = kMostRanks;
        for (u32 rank = 0; rank < kMostRanks && bytes != 0; ++rank) {
            if (!has(ranks, rank)) continue;
            const bool again = reached < kMostRanks && stride == 0;
            reached_[rank] = again ? reached_[reached] : reach(base + first + rank * stride, bytes);
            reached = rank;
        }
#else
        (void)ranks, (void)bytes;
#endif
    }
    __device__ __forceinline__ Byte* operator[](u32 rank) const {
#ifdef FLEXRING_ON_HOST
        return reached_[rank];
#else
        return base_ + rank * stride_;
#endif
    }
    // Whether all blocks begin at multiples of 16 bytes.
    __device__ __forceinline__ bool are_aligned() const {
        return (skew_of(base_) | static_cast<u32>(stride_ % 16)) == 0;
    }

  private:
    Byte* base_;
    u64 stride_;
#ifdef FLEXRING_ON_HOST
    static const u8* reach(const u8* at, u64 bytes) {
        return reinterpret_cast<const u8*>(reach_to_read(reinterpret_cast<const Stored*>(at), bytes));
    }
    static u8* reach(u8* at, u64 bytes) {
        return reinterpret_cast<u8*>(reach_to_write(reinterpret_cast<Stored*>(at), bytes));
    }
    static inline thread_local Byte* reached_[kMostRanks];
#endif
};
template <class Stored>
using InputBlocks = Blocks<Stored, const u8>;
template <class Stored>
using OutputBlocks = Blocks<Stored, u8>;

// The first bytes of a granule, of which there may be less than 16, by accesses as wide as the alignment allows.
template <class Stored>
__device__ __forceinline__ Granule get(const u8* at, u64 bytes) {
    if (bytes >= 16) {
        if (skew_of(at) == 0) return *reinterpret_cast<const Granule*>(at);
        if constexpr (sizeof(Stored) < 4) {
            if (skew_of(at) % 4 == 0) return gather(reinterpret_cast<const u32*>(at), 0, 4);
        }
    }
    return gather(reinterpret_cast<const Stored*>(at), 0, static_cast<int>((bytes < 16 ? bytes : 16) / sizeof(Stored)));
}
template <class Stored>
__device__ __forceinline__ void put(u8* at, const Granule& granule, u64 bytes) {
    if (bytes >= 16) {
        if (skew_of(at) == 0) {
            *reinterpret_cast<Granule*>(at) = granule;
            return;
        }
        if constexpr (sizeof(Stored) < 4) {
            if (skew_of(at) % 4 == 0) return scatter(reinterpret_cast<u32*>(at), granule, 0, 4);
        }
    }
    scatter(reinterpret_cast<Stored*>(at), granule, 0, static_cast<int>((bytes < 16 ? bytes : 16) / sizeof(Stored)));
}

// Granules of vectors that pass through stages, which stay in L2 in their place.
__device__ __forceinline__ Granule load_once(const Granule* at) {
    Granule granule;
    load_streamed(at->words, granule.words);
    return granule;
}
__device__ __forceinline__ void store_once(Granule* at, const Granule& granule) { store_streamed(at->words, granule.words); }

// A granule of this rank's elements as other ranks get it.
template <class E>
__device__ __forceinline__ Granule scaled(const CollectiveParameters& call, const Granule& granule) {
    if (!call.scales) return granule;
    typename E::Acc values[1][kElements<E>];
    const Granule read[1] = {granule};
    take<E, 1>(true, E::factor(call.factor), read, values);
    return narrow<E>(values[0]);
}

// What a CTA does in a turn of a long call, between what it waits for and what it says to others.
enum Work : u32 { kIdle, kWaits, kFill, kReduce, kPull, kEnd, kFailure };
struct Turn {
    u32 work;
    // Of a sum: the number of sources, and of ranks to divide by; granules; and which addresses are the destinations.
    u32 sources;
    u32 divide;
    u32 begin;
    u32 end;
    u32 first;
    u32 last;
};

}  // namespace flexring

#include "items.h"

namespace flexring {

// The place among those received of a rank's block.
__device__ __forceinline__ u32 place_of(const CollectiveParameters& call, u32 rank) {
    return static_cast<u32>(__popc(call.receives & ((1u << rank) - 1)));
}

// Granules of each operand that a thread reads at a time from stages: less than `kAtOnce`, because the state of a slice takes
// registers too.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
// Here the compiler finds registers for two granules of types of 32 bits only.
template <class E>
constexpr int kStagedAtOnce = sizeof(typename E::Stored) != 4 || kAtOnce<E> == 1 ? 1 : 2;
#else
template <class E>
constexpr int kStagedAtOnce = sizeof(typename E::Stored) == 1 || kAtOnce<E> == 1 ? 1 : 2;
#endif

// Granules that a thread copies at a time.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
template <class E>
constexpr int kCopiedAtOnce = 2;
#else
template <class E>
constexpr int kCopiedAtOnce = sizeof(typename E::Stored) == 1 ? 2 : 4;
#endif

template <class E>
struct Exchange {
    using Stored = typename E::Stored;

    const Running& run;
    const CollectiveParameters& call;
    const u32 me;

    __device__ __forceinline__ explicit Exchange(const Running& running)
        : run(running), call(running.call), me(running.call.rank) {}

    __device__ __forceinline__ u64 block() const { return call.count * sizeof(Stored); }
    __device__ __forceinline__ CollectiveState* peer(u32 rank) const { return run.shared.peers[rank]; }
    // Whether this rank's own block goes into its output, and isn't there already.
    __device__ __forceinline__ bool receives_own() const {
        if (!has(call.receives, me)) return false;
        const u8* const from = static_cast<const u8*>(call.input) + me * call.send_stride;
        return call.reduces || from != static_cast<const u8*>(call.output) + me * call.receive_stride;
    }
    // The ranks whose blocks this one writes to its output.
    __device__ __forceinline__ u32 written() const { return receives_own() ? call.receives : call.receives & ~(1u << me); }

    // Clears this slice's share of what the next call uses, before any rank can begin that one.
    __device__ __forceinline__ void clear() const {
        const u32 other = run.parity() ^ 1, packets = call.short_bytes / 8;
        const u32 first = static_cast<u32>(static_cast<u64>(packets) * run.slice() / call.slices);
        const u32 end = static_cast<u32>(static_cast<u64>(packets) * (run.slice() + 1) / call.slices);
        for (u32 source = 0; source < call.ranks; ++source) {
            Packet* const inbox = inbox_of(&run.state, call, other, source);
            for (u32 nth = first + threadIdx.x; nth < end; nth += blockDim.x) put_packet(inbox + nth, 0, 0, 0);
        }
        for (u32 slice = run.slice(); slice < kMostSlices; slice += call.slices) {
            for (u32 nth = threadIdx.x; nth < call.ranks * kEntryPackets; nth += blockDim.x) {
                put_packet(&run.state.entry[other][slice][nth / kEntryPackets][nth % kEntryPackets], 0, 0, 0);
            }
        }
        if (run.slice() == 0) {
            for (u32 nth = threadIdx.x; nth < call.ranks * kCallWords; nth += blockDim.x) {
                put_packet(&run.state.words[other][nth / kCallWords][nth % kCallWords], 0, 0, 0);
            }
        }
        __syncthreads();
        release_sys();
    }

    // The number of this thread among those that send entries. The first warp, which takes a ticket meanwhile, comes last.
    static __device__ __forceinline__ u32 sender() {
#ifdef FLEXRING_ON_HOST
        constexpr u32 kWarp = 2;
#else
        constexpr u32 kWarp = 32;
#endif
        if (blockDim.x <= kWarp) return threadIdx.x;
        return threadIdx.x < kWarp ? threadIdx.x + blockDim.x - kWarp : threadIdx.x - kWarp;
    }
    // Called once for all slices of a long call: other ranks see what earlier kernels wrote to the input when they see this thread's
    // packets.
    __device__ __forceinline__ void release_inputs() const {
        if (may_be_direct() && sender() < call.ranks * kEntryPackets) release_sys();
    }
    // Sends the entry packets of this slice: the hash; and if `kPackets` is more than 1, the places of this rank's vectors, or that it has
    // none: to this rank, too, so that it does as the others see it, whatever the host changes meanwhile.
    template <u32 kPackets>
    __device__ __forceinline__ void enter() const {
        const bool placed = kPackets != 1 && run.shared.placed;
        for (u32 nth = sender(); nth < call.ranks * kPackets; nth += blockDim.x) {
            const u32 rank = nth / kPackets, kind = nth % kPackets;
            if (kind == 0 && (rank == me || (!keeps(kEntriesOfAll) && !has(call.sends, rank)))) continue;
            const u64 word = kind == 0 ? call.hash : placed ? call.places[kind - 1] : 0;
            Packet* const packet = &peer(rank)->entry[run.parity()][run.slice()][me][kind];
            if (placed && keeps(kOrderedWords)) {
                release_packet(packet, static_cast<u32>(word), static_cast<u32>(word >> 32), run.flag());
            } else {
                put_packet(packet, static_cast<u32>(word), static_cast<u32>(word >> 32), run.flag());
            }
        }
    }
    // Sends the words of the call, with its first slice.
    __device__ __forceinline__ void send_words() const {
        if (run.slice() != 0) return;
        for (u32 nth = threadIdx.x; nth < call.ranks * kCallWords; nth += blockDim.x) {
            const u32 rank = nth / kCallWords, word = nth % kCallWords;
            if (rank == me) continue;
            put_packet(&peer(rank)->words[run.parity()][me][word], static_cast<u32>(call.words[word]),
                       static_cast<u32>(call.words[word] >> 32), run.flag());
        }
    }

    // What comes before the data of a slice. A short one sends the words after its data.
    template <bool kIsShort>
    __device__ __forceinline__ void begin_slice() const {
        if ((run.shared.epoch & 0x7fffffff) < 2 && keeps(kClearAtWrap)) clear();
        enter<kIsShort ? 1 : kEntryPackets>();
        if constexpr (!kIsShort) send_words();
    }

    // This rank's input or output.
    __device__ __forceinline__ u64 vector(u32 kind) const { return reinterpret_cast<u64>(kind == 0 ? call.input : call.output); }
    // Where this GPU maps the allocation of a place.
    __device__ __forceinline__ u64 memory(u32 rank, u64 place) const {
        const u32 number = static_cast<u32>(place >> kOffsetBits) % kMostMemories;
        return load_relaxed(reinterpret_cast<u64*>(&run.state.memories[rank][number]));
    }
    // Whether the call may be direct, as far as this rank knows.
    __device__ __forceinline__ bool may_be_direct() const { return (call.places[0] & call.places[1] & kPlaced) != 0; }
    // Whether this rank's vectors still are where the call says.
    __device__ __forceinline__ bool has_places() const {
        bool has = true;
#pragma unroll
        for (u32 nth = 0; nth < kPlaces; ++nth) {
            const u64 place = call.places[nth], offset = place & ((1ull << kOffsetBits) - 1);
            has = has && ((place & kInMemory) == 0 || memory(me, place) + offset == vector(nth));
        }
        return has;
    }
    // The first rank that is found.
    __device__ __forceinline__ void report_unplaced(u32 rank) const {
        if ((run.shared.reported & ~kReportedDirect) != 0) return;
        store_relaxed(&run.state.reported, run.shared.reported | (rank + 1));
        store_relaxed_sys(&run.status.unplaced, rank + 1);
    }
    __device__ __forceinline__ void report_direct() const {
        if ((run.shared.reported & kReportedDirect) != 0) return;
        store_relaxed(&run.state.reported, run.shared.reported | kReportedDirect);
        store_relaxed_sys(&run.status.direct, 1);
    }
    // Sets the addresses of the parts that this rank accesses, of the places that were received. Returns whether all ranks have theirs,
    // in all threads.
    __device__ __forceinline__ bool find_places(const Part& part) const {
        bool missing = false;
        for (u32 nth = threadIdx.x; nth < call.ranks * kPlaces; nth += blockDim.x) {
            const u32 rank = nth / kPlaces, kind = nth % kPlaces;
            const u32* const halves = run.shared.places[rank][kind];
            const u64 place = halves[0] | static_cast<u64>(halves[1]) << 32;
            if ((place & kPlaced) == 0) {
                missing = true;
                if (run.slice() == 0) report_unplaced(rank);
            }
            // Also this rank's output, if peers need no place of it.
            const bool is_own = kind == 1 && rank == me && call.receives != 0;
            if (!is_own && ((place & kInMemory) == 0 || (kind == 0 && !has(call.receives, rank)))) continue;
            u64 at = memory(rank, place) + (place & ((1ull << kOffsetBits) - 1));
            if (!keeps(kPlacesSentOnce) && rank == me) missing = missing || at != vector(kind);
            // The host may have ended the use of its own allocations since.
            if (rank == me) at = vector(kind);
            at += part.first + (kind == 0 ? me * call.send_stride : 0);
            if (kind == 0) {
                run.shared.sources[place_of(call, rank)] =
                    reinterpret_cast<u64>(reach_to_read(reinterpret_cast<const Stored*>(at), part.bytes));
            } else {
                run.shared.destination(rank) = reinterpret_cast<u64>(reach_to_write(reinterpret_cast<Stored*>(at), part.bytes));
            }
        }
        return !__syncthreads_or(missing);
    }

    // Waits for the entry packets of all ranks, `kPackets` of each, if `heads`, and for `count` granules from `from` on of the blocks of
    // this slice that this rank receives, which go to `gathered`. Returns whether the call has failed.
    template <u32 kPackets>
    __device__ __forceinline__ bool receive(bool heads, const Part& part, u32 from, u32 count) const {
        const u32 entries = heads ? call.ranks * kPackets : 0, items = entries + count * call.ranks, step = blockDim.x;
        const u32 flag = run.flag(), parity = run.parity();
        for (u32 item = threadIdx.x; item < items; item += step * kPolled) {
            const Packet* first[kPolled];
            // A bit for each that has a second packet behind the first one: all but entries and some last granules.
            u32 pairs = 0;
            // The place in `gathered`; of an entry packet kGathered and its number.
            u32 place[kPolled];
            u32 missing = 0;
#pragma unroll
            for (int g = 0; g < kPolled; ++g) {
                const u32 nth = item + g * step;
                first[g] = nullptr;
                place[g] = 0;
                if (nth >= items) continue;
                if (nth < entries) {
                    const u32 rank = nth / kPackets, kind = nth % kPackets;
                    if (kind == 0 && (rank == me || (!keeps(kEntriesOfAll) && !has(call.receives, rank)))) continue;
                    first[g] = &run.state.entry[parity][run.slice()][rank][kind];
                    place[g] = kGathered + nth;
                } else {
                    const u32 rank = (nth - entries) / count, granule = (nth - entries) % count;
                    if (rank == me || !has(call.receives, rank)) continue;
                    const u64 at = part.first + (from + granule) * 16ull;
                    first[g] = inbox_of(&run.state, call, parity, rank) + at / 8;
                    if (part.bytes - (from + granule) * 16ull > 8) pairs |= 1u << g;
                    place[g] = place_of(call, rank) * count + granule;
                }
                missing |= 1u << g;
            }
            Waiter waiter;
            bool failed = false;
            while (missing != 0) {
                u64 low[kPolled][2], high[kPolled][2];
#pragma unroll
                for (int g = 0; g < kPolled; ++g) {
                    if ((missing >> g & 1) == 0) continue;
                    if (kPackets != 1 && keeps(kOrderedWords)) {
                        load_packet_acquire(first[g]->half, low[g][0], low[g][1]);
                    } else {
                        load_packet(first[g]->half, low[g][0], low[g][1]);
                    }
                    load_packet(first[g][pairs >> g & 1].half, high[g][0], high[g][1]);
                }
#pragma unroll
                for (int g = 0; g < kPolled; ++g) {
                    if ((missing >> g & 1) == 0 || !is_there(low[g], flag) || !is_there(high[g], flag)) continue;
                    missing &= ~(1u << g);
                    if (place[g] >= kGathered) {
                        const u32 rank = (place[g] - kGathered) / kPackets, kind = (place[g] - kGathered) % kPackets;
                        for (u32 half = 0; half < 2 && kind != 0; ++half) {
                            run.shared.places[rank][kind - 1][half] = static_cast<u32>(low[g][half] >> 32);
                        }
                        if (kind != 0 || data_of(low[g]) == call.hash) continue;
                        report_mismatch(run, rank);
                        failed = true;
                    } else {
                        run.shared.gathered[place[g]] =
                            Granule{{static_cast<u32>(low[g][0] >> 32), static_cast<u32>(low[g][1] >> 32),
                                     static_cast<u32>(high[g][0] >> 32), static_cast<u32>(high[g][1] >> 32)}};
                    }
                }
                if (failed || missing == 0) break;
                failed = !waiter.again(run, [&] {
                    const u32 nth = item + static_cast<u32>(__ffs(static_cast<int>(missing)) - 1) * step;
                    return nth < entries ? kWaitEntry << 16 | nth / kPackets : kWaitData << 16 | (nth - entries) / count;
                });
                if (failed) break;
            }
            waiter.end(run);
            if (failed) return true;
        }
        return false;
    }

    __device__ __forceinline__ Arithmetic<E> arithmetic() const {
        return Arithmetic<E>{static_cast<u32>(__popc(call.receives)), call.divide, call.operation, typename E::Acc{}};
    }
    __device__ __forceinline__ OutputBlocks<Stored> output_blocks(const Part& part) const {
        const u64 bytes = call.receives == 0 ? 0 : part.bytes;
        u8* const base = static_cast<u8*>(call.output);
        if (call.reduces) return OutputBlocks<Stored>(base, 0, 1, part.first, bytes);
        return OutputBlocks<Stored>(base, call.receive_stride, written(), part.first, bytes);
    }

    // Operands in `gathered`, for `combine`.
    struct Gathered {
        u32 count;
        __device__ __forceinline__ u64 operator[](u32 nth) const { return nth * count; }
        static __device__ __forceinline__ u32 address_of(u64 word) { return static_cast<u32>(word); }
    };

    // Writes the granules that `receive` has gathered to the output.
    __device__ __forceinline__ void deliver(const OutputBlocks<Stored>& output, const Part& part, u32 from, u32 count) const {
        const CollectiveShared& shared = run.shared;
        const u32 blocks = static_cast<u32>(__popc(call.receives));
        if constexpr (kMoves<E>) {
            if (!call.reduces) {
                for (u32 item = threadIdx.x; item < blocks * count; item += blockDim.x) {
                    const u32 rank = shared.received[item / count];
                    const u64 at = (from + item % count) * 16ull;
                    if (has(written(), rank)) put<Stored>(output[rank] + at, shared.gathered[item], part.bytes - at);
                }
                return;
            }
        }
        if (blocks != 0) {
            const Arithmetic<E> job = arithmetic();
            for (u32 nth = threadIdx.x; nth < count; nth += blockDim.x) {
                const u64 at = (from + nth) * 16ull;
                combine<E, 1>(
                    Gathered{count}, job, [&](u32 first, int) { return shared.gathered[first + nth]; },
                    [&](int, const Granule& granule) { put<Stored>(output[0] + at, granule, part.bytes - at); });
            }
        }
    }

    // The granule of an item of `run_short`, in order of rank behind this one, and of granules.
    __device__ __forceinline__ u32 rank_of(u32 item, u32 granules) const {
        const u32 rank = me + 1 + item / granules;
        return rank < call.ranks ? rank : rank - call.ranks;
    }
    __device__ __forceinline__ bool is_sent(u32 rank) const { return rank == me ? receives_own() : has(call.sends, rank); }
    __device__ __forceinline__ Granule own(const InputBlocks<Stored>& input, const Part& part, u32 rank, u32 granule) const {
        return get<Stored>(input[rank] + granule * 16ull, part.bytes - granule * 16ull);
    }

    // The granule that this thread sends first in a slice.
    __device__ __forceinline__ Granule first_granule(u32 slice) const {
        const Part part = part_of(block(), slice, call.slices);
        const u32 granules = static_cast<u32>((part.bytes + 15) / 16);
        if (threadIdx.x >= granules * call.ranks) return Granule{};
        const u32 rank = rank_of(threadIdx.x, granules);
        if (!is_sent(rank)) return Granule{};
        const u32 ranks = 1u << rank;
        const InputBlocks<Stored> input(static_cast<const u8*>(call.input), call.send_stride, ranks, part.first, part.bytes);
        return own(input, part, rank, threadIdx.x % granules);
    }

    // A slice by packets. `early` is this thread's first granule, if `has_early`. `after_sending` is called when all is sent. Returns
    // whether the call has failed.
    template <class After>
    __device__ __forceinline__ bool run_short(bool has_early, const Granule& early, After after_sending) const {
        const Part part = part_of(block(), run.slice(), call.slices);
        const u32 granules = static_cast<u32>((part.bytes + 15) / 16);
        // As in items.h.
        const int places = __popc(call.receives);
        const u32 room = kGathered >> (places < 2 ? 0 : 32 - __clz(places - 1));
        const u32 step = granules < room ? granules : room;
        const u32 sent = (call.sends & ~(1u << me)) | (receives_own() ? 1u << me : 0);
        const InputBlocks<Stored> input(static_cast<const u8*>(call.input), call.send_stride, sent, part.first, part.bytes);
        for (u32 item = threadIdx.x; item < granules * call.ranks; item += blockDim.x) {
            const u32 rank = rank_of(item, granules), granule = item % granules;
            if (!is_sent(rank)) continue;
            const bool is_early = has_early && item == threadIdx.x;
            const Granule value = scaled<E>(call, is_early ? early : own(input, part, rank, granule));
            if (rank == me) {
                if (granule < step) run.shared.gathered[place_of(call, me) * step + granule] = value;
                continue;
            }
            Packet* const packet = inbox_of(peer(rank), call, run.parity(), me) + (part.first / 8 + granule * 2ull);
            put_packet(packet, value.words[0], value.words[1], run.flag());
            if (part.bytes - granule * 16ull > 8) put_packet(packet + 1, value.words[2], value.words[3], run.flag());
        }
        send_words();
        after_sending();

        const OutputBlocks<Stored> output = output_blocks(part);
        u32 from = 0;
        do {
            const u32 left = granules - from, count = left < step ? left : step;
            if (from != 0) {
                __syncthreads();
                for (u32 nth = threadIdx.x; receives_own() && nth < count; nth += blockDim.x) {
                    run.shared.gathered[place_of(call, me) * count + nth] = scaled<E>(call, own(input, part, me, from + nth));
                }
            }
            const bool failed = __syncthreads_or(receive<1>(from == 0, part, from, count));
            if (!keeps(kOutputAfterEntries)) deliver(output, part, from, count);
            if (failed) return true;
            deliver(output, part, from, count);
            from += count;
        } while (from < granules);
        return false;
    }

    // Moves the bytes of a round of each of `blocks` blocks that is in `ranks`. `load` and `store` access up to 16 bytes at an offset;
    // whole granules at aligned addresses, if `aligned`.
    template <class Load, class Store>
    static __device__ __forceinline__ void move(u32 blocks, u32 ranks, u32 bytes, bool aligned, Load load, Store store) {
        constexpr int kGranules = kCopiedAtOnce<E>;
        const u32 whole = aligned ? bytes / 16 : 0, rest = (bytes + 15) / 16 - whole, step = blockDim.x;
        for (u32 item = threadIdx.x; item < blocks * whole; item += step * kGranules) {
            Granule read[kGranules];
#pragma unroll
            for (int g = 0; g < kGranules; ++g) {
                const u32 nth = item + g * step, block = blocks == 1 ? 0 : nth / whole;
                if (nth < blocks * whole && has(ranks, block)) read[g] = load(block, (nth - block * whole) * 16, 16, true);
            }
#pragma unroll
            for (int g = 0; g < kGranules; ++g) {
                const u32 nth = item + g * step, block = blocks == 1 ? 0 : nth / whole;
                if (nth < blocks * whole && has(ranks, block)) store(block, (nth - block * whole) * 16, read[g], 16, true);
            }
        }
        for (u32 item = threadIdx.x; item < blocks * rest; item += step) {
            const u32 block = item / rest, at = (whole + item % rest) * 16;
            if (has(ranks, block)) store(block, at, load(block, at, bytes - at, false), bytes - at, false);
        }
    }

    __device__ __forceinline__ u64 counted(u32 round) const { return run.epoch() << kRoundBits | (round + 1); }
    // Says to these ranks that a round is staged, or complete. Called after a barrier.
    __device__ __forceinline__ void publish(u64 (CollectiveState::*words)[kMostSlices][kMostRanks], u32 ranks, u32 round) const {
        for (u32 rank = threadIdx.x; rank < call.ranks; rank += blockDim.x) {
            if (!has(ranks, rank)) continue;
            u64* const word = &(peer(rank)->*words)[run.slice()][me];
            if (keeps(kOrderedWords)) {
                store_release_sys(word, counted(round));
            } else {
                store_relaxed_sys(word, counted(round));
            }
        }
    }
    // Waits until these ranks have said so. Returns whether the call has failed, in all threads.
    __device__ __forceinline__ bool await(u64 (CollectiveState::*words)[kMostSlices][kMostRanks], u32 kind, u32 ranks,
                                          u32 round) const {
        bool failed = false;
        for (u32 rank = threadIdx.x; rank < call.ranks; rank += blockDim.x) {
            if (!has(ranks, rank)) continue;
            const u64* const word = &(run.state.*words)[run.slice()][rank];
            Waiter waiter;
            const auto read = [=] { return keeps(kOrderedWords) ? load_acquire_sys(word) : load_relaxed_sys(word); };
            while (!failed && read() < counted(round)) failed = !waiter.again(run, [=] { return kind << 16 | rank; });
            waiter.end(run);
        }
        return __syncthreads_or(failed);
    }

    __device__ __forceinline__ u8* memory_of(u32 rank) const { return reinterpret_cast<u8*>(peer(rank)); }

    // This slice's part of the blocks of some ranks in the input. Not kept while other work needs registers.
    __device__ __forceinline__ InputBlocks<Stored> input_blocks(u32 ranks) const {
        const Part& part = run.shared.rounds.part;
        return InputBlocks<Stored>(static_cast<const u8*>(call.input), call.send_stride, ranks, part.first, part.bytes);
    }

    // Copies the blocks that this rank sends in a round into its stage.
    __device__ __forceinline__ void fill(u32 round) const {
        const Rounds& rounds = run.shared.rounds;
        const InputBlocks<Stored> input = input_blocks(call.send_stride == 0 && call.sends != 0 ? 1 : call.sends);
        u8* const stage = memory_of(me) + stage_at(call, kInput, run.slice(), round);
        const u64 first = rounds.first(round);
        const bool differ = rounds.stride != 0;
        const u32 sent = call.reduces ? call.sends : call.sends & ~(1u << me);
        const u32 blocks = differ ? call.ranks : 1, ranks = differ ? sent : sent != 0 ? 1 : 0;
        move(
            blocks, ranks, rounds.bytes(round), input.are_aligned(),
            [&](u32 block, u32 at, u32 bytes, bool aligned) {
                const u8* const from = input[block] + first + at;
                return aligned ? load_once(reinterpret_cast<const Granule*>(from)) : get<Stored>(from, bytes);
            },
            [&](u32 block, u32 at, const Granule& granule, u32, bool) {
                store_staged(reinterpret_cast<u32*>(stage + block * rounds.stride + at), scaled<E>(call, granule).words);
            });
    }

    // Copies to the output what this rank receives in a round: its output stage, or blocks from the input stages of other ranks and its
    // own block; in a direct call, blocks from all inputs.
    __device__ __forceinline__ void pull(u32 round) const {
        const Rounds& rounds = run.shared.rounds;
        const u64 first = rounds.first(round);
        const bool reduced = !kMoves<E> || call.reduces;
        const InputBlocks<Stored> input = input_blocks(reduced ? 0 : written() & 1u << me);
        const OutputBlocks<Stored> output = output_blocks(rounds.part);
        const u32 blocks = reduced ? 1 : call.ranks, ranks = !reduced ? written() : call.receives != 0 ? 1 : 0;
        move(
            blocks, ranks, rounds.bytes(round), output.are_aligned(),
            [&](u32 block, u32 at, u32 bytes, bool) {
                if constexpr (kMoves<E>) {
                    if (!reduced && !rounds.direct && block == me) return get<Stored>(input[me] + first + at, bytes);
                }
                Granule granule;
                const u64 base = reduced ? run.shared.destination(me) : run.shared.sources[place_of(call, block)];
                load_staged(reinterpret_cast<const u32*>(base + at), granule.words);
                return granule;
            },
            [&](u32 block, u32 at, const Granule& granule, u32 bytes, bool aligned) {
                u8* const into = output[block] + first + at;
                if (aligned) {
                    store_once(reinterpret_cast<Granule*>(into), granule);
                } else {
                    put<Stored>(into, granule, bytes);
                }
            });
    }

    // The sources, for `combine`.
    struct Sources {
        const CollectiveShared& shared;
        __device__ __forceinline__ u64 operator[](u32 nth) const { return shared.sources[nth]; }
        static __device__ __forceinline__ u64 address_of(u64 word) { return word & ~kScaled; }
    };

    // Adds granules `begin` to `end` of all sources, and writes the sums to the destinations `first` to `last`.
    __device__ __forceinline__ void reduce(const Turn& turn) const {
        const Arithmetic<E> job{turn.sources, turn.divide, call.operation, E::factor(call.factor)};
        if (job.operands == 0) return;
        constexpr int kGranules = kStagedAtOnce<E>;
        const u32 end = turn.end, first = turn.first, last = turn.last, step = blockDim.x;
        CollectiveShared& shared = run.shared;
        for (u32 at = turn.begin + threadIdx.x; at < end; at += step * kGranules) {
            combine<E, kGranules>(
                Sources{shared}, job,
                [&](u64 from, int g) {
                    const u32 granule = at + g * step;
                    return from != 0 && granule < end ? load_source(shared, from, granule) : Granule{};
                },
                [&](int g, const Granule& sum) {
                    const u32 granule = at + g * step;
                    if (granule >= end) return;
#pragma unroll 1
                    for (u32 nth = first; nth < last; ++nth) store_sum(shared, shared.sources[nth], granule, sum);
                });
        }
    }

    // Sets where the stages of a round are, before the barrier that comes before it.
    __device__ __forceinline__ void set_stages(u32 round) const {
        const u32 stride = run.shared.rounds.stride;
        for (u32 rank = threadIdx.x; rank < call.ranks; rank += blockDim.x) {
            const u64 memory = reinterpret_cast<u64>(memory_of(rank));
            const u64 block = memory + stage_at(call, kInput, run.slice(), round) + me * stride;
            if (has(call.receives, rank)) run.shared.sources[place_of(call, rank)] = block;
            run.shared.destination(rank) = memory + stage_at(call, kOutput, run.slice(), round);
        }
    }

    // Begins a slice by rounds, or all items that this CTA gets. Returns whether the call has failed.
    template <class After>
    __device__ __forceinline__ bool begin(const Items<Stored>& items, bool is_listed, After after_sending) const {
        if (is_listed) {
            items.begin();
        } else {
            after_sending();
        }
        bool direct = !is_listed && may_be_direct();
        if ((is_listed || direct) && __syncthreads_or(receive<kEntryPackets>(true, Part{}, 0, 0))) return true;
        if (is_listed) return false;
        const Part part = part_of(block(), run.slice(), call.slices);
        direct = direct && find_places(part);
        if (threadIdx.x == 0) {
            Rounds& rounds = run.shared.rounds;
            rounds.direct = direct;
            rounds.part = part;
            rounds.room = direct ? kDirect : call.send_stride == 0 ? kStage : kStage / call.ranks / 16 * 16;
            rounds.stride = call.send_stride == 0 ? 0 : rounds.room;
            rounds.count = static_cast<u32>((rounds.part.bytes + rounds.room - 1) / rounds.room);
        }
        __syncthreads();
        return false;
    }

    // What a turn does: every third one fills a stage, the next copies out the round two before it, and the next reduces the round before.
    // A direct call has no stages to fill; it reduces or copies in place of reducing, and then waits for the others to have done so.
    static __device__ __forceinline__ bool fills(u32 nth) { return nth % 3 == 0; }
    static __device__ __forceinline__ bool reduces_now(u32 nth) { return nth % 3 == 2; }
    // Not a round of the slice before the first and behind the last one.
    static __device__ __forceinline__ u32 round_of(u32 nth) { return nth / 3 - (fills(nth) ? 0 : reduces_now(nth) ? 1 : 2); }

    // The last turn waits until no stage is read any more, so that the next call finds them free.
    __device__ __forceinline__ Turn next_round(u32 nth) const {
        const Rounds& rounds = run.shared.rounds;
        const u32 count = rounds.count, round = round_of(nth), last = 3 * (count + 2);
        Turn turn{};
        if (nth > last) turn.work = kEnd;
        const bool idle = (fills(nth) && rounds.direct) || (round >= count && nth != 0 && nth != last);
        if (turn.work == kEnd || idle) return turn;

        const u32 others = ~(1u << me), to = call.sends & others, from = call.receives & others;
        const u32 all = (1u << call.ranks) - 1;
        const bool reduces = !kMoves<E> || call.reduces;
        // An all-reduce. All ranks see that alike.
        const bool owned = reduces && call.send_stride == 0 && call.sends == all && call.receives == all;
        auto words = &CollectiveState::done;
        u32 kind = kWaitDone, awaited = 0, at = round;
        if (reduces_now(nth)) {
            words = &CollectiveState::ready, kind = kWaitReady, awaited = rounds.direct ? 0 : from;
        } else if (rounds.direct) {
            awaited = keeps(kWaitForReaders) ? to : 0;
        } else if (!keeps(kWaitForDone)) {
            awaited = 0;
        } else if (!fills(nth)) {
            awaited = owned ? to : 0;
        } else if (!owned && round >= kStages) {
            awaited = to, at = round - kStages;
        }
        turn.work = kWaits;
        if (!fills(nth) && !rounds.direct) set_stages(round);
        if (awaited == 0) {
            __syncthreads();
        } else if (await(words, kind, awaited, at)) {
            turn.work = kFailure;
            return turn;
        }

        if (fills(nth)) {
            if (round < count) turn.work = kFill;
        } else if (reduces && reduces_now(nth)) {
            const u32 granules = (rounds.bytes(round) + 15) / 16;
            turn.work = kReduce;
            turn.sources = static_cast<u32>(__popc(call.receives)), turn.divide = call.divide;
            turn.begin = owned ? granules * me / call.ranks : 0, turn.end = owned ? granules * (me + 1) / call.ranks : granules;
            turn.first = kMostRanks + (owned ? 0 : me), turn.last = kMostRanks + (owned ? call.ranks : me + 1);
        } else if (rounds.direct == reduces_now(nth)) {
            turn.work = kPull;
        }
        return turn;
    }

    // Says to the ranks that wait for it that a stage is filled, or read. Not kept in a Turn, for the sake of registers.
    __device__ __forceinline__ void end_round(u32 work, u32 nth) const {
        const u32 others = ~(1u << me), round = round_of(nth);
        if (work == kFill) publish(&CollectiveState::ready, call.sends & others, round);
        const bool has_read = work == kReduce || (work == kPull && kMoves<E> && !call.reduces);
        if (has_read) publish(&CollectiveState::done, call.receives & others, round);
    }

    // A slice by rounds, or all items that this CTA gets. Each turn waits, works and publishes in the same place, because this code is in
    // the kernel of every type, and the sum is most of it. Returns whether the call has failed.
    template <class After>
    __device__ __forceinline__ bool run_long(After after_sending) const {
        const bool is_listed = call.path == kListed;
        const Items<Stored> items(run);
        u32 part = 0;
        if (begin(items, is_listed, after_sending)) return true;
        for (u32 nth = 0;; ++nth) {
            const Turn turn = is_listed ? items.next(part) : next_round(nth);
            if (turn.work == kIdle) continue;
            if (turn.work == kEnd || turn.work == kFailure) {
                // Not before: the stores of peers' words wait for it.
                if (!is_listed && run.shared.rounds.direct && run.slice() == 0 && threadIdx.x == 0) report_direct();
                return turn.work == kFailure;
            }
            if (turn.work == kReduce) reduce(turn);
            if (turn.work == kFill) fill(round_of(nth));
            if (turn.work == kPull) pull(round_of(nth));
            __syncthreads();
            if (is_listed) {
                items.end(part);
            } else {
                end_round(turn.work, nth);
                const bool has_entered = nth != 0 || may_be_direct();
                if (!has_entered && __syncthreads_or(receive<kEntryPackets>(true, Part{}, 0, 0))) return true;
            }
        }
    }
};

}  // namespace flexring

#include "transfers.h"

namespace flexring {

// Takes a ticket, and the right to run. Called by one thread.
struct Arrival {
    u64 owner;
    u64 word;
    u32 closed;
    u32 reported;
};
__device__ __forceinline__ Arrival arrive(const CollectiveParameters& call, CollectiveState& state) {
    Arrival arrival;
    arrival.owner = compare_and_swap(&state.owner, 0, call.launch);
    arrival.word = add_relaxed(&state.epoch, kOneTicket);
    arrival.closed = load_relaxed(&state.closed);
    arrival.reported = load_relaxed(&state.reported);
    return arrival;
}

// Has the host carry this call's messages, after those of earlier calls. False if the call has failed. Called by one thread.
__device__ __forceinline__ bool start_relay(const Running& run) {
    bool failed = false;
    Waiter waiter;
    while (!failed && load_relaxed_sys(&run.status.started) != 0) {
        failed = !waiter.again(run, [&] { return kWaitHost << 16 | run.call.rank; });
    }
    waiter.end(run);
    if (!failed) store_relaxed_sys(&run.status.started, run.call.launch);
    return !failed;
}

// Ends the part that this CTA has in the call. Called by one thread after a barrier behind all of its work.
__device__ __forceinline__ void leave(const Running& run, bool failed) {
    CollectiveState& state = run.state;
    u64 word = (run.epoch() - 1) | kOneTicket;
    // A call that not all ranks make is not counted.
    const u64 counted = run.call.slices != 0 ? run.epoch() : run.epoch() - 1;
    if (gridDim.x != 1) {
        // The last one sees whether another has failed, and where it speaks for all to the host or to later calls, what they wrote.
        const bool orders = failed || run.call.reports || run.call.path == kListed;
        const u64 before = orders ? add_acq_rel(&state.epoch, kOneLeft) : add_acquire(&state.epoch, kOneLeft);
        if (((before >> kLeftShift) & ((1u << kCountBits) - 1)) + 1 != gridDim.x) return;
        // Items and messages are taken by tickets of their own.
        const u32 slices = run.call.path == kListed || run.call.path == kTransfers ? 0 : run.call.slices;
        word = (run.epoch() - 1) | kOneLeft * gridDim.x | kOneTicket * (gridDim.x + slices);
        failed = load_relaxed(&state.stopped) != 0;
    }
    if (run.call.path == kListed) end_program(reach_shared(run.call.program));
    if (!keeps(kOneKernel)) {
        store_relaxed(&state.epoch, counted);
    } else if (!failed && compare_and_swap(&state.epoch, word, counted) != word) {
        fail(state, run.status, kOverlap, run.call.rank, run.epoch());
        failed = true;
    }
    if (failed) {
        add_relaxed(&state.epoch, kFailed);
    } else if (run.call.reports) {
        store_release_sys(&run.status.completed, run.call.launch);
    }
    if (failed) {
        store_release_gpu(&state.owner, 0);
    } else {
        // `epoch` has been swapped, because it was compared.
        store_relaxed(&state.owner, 0);
    }
}

// Runs slices until there are no more. `early` is this thread's first granule of the slice `guess`. Returns whether the call has failed.
template <bool kIsShort, class E>
__device__ __forceinline__ bool run_slices(const Exchange<E>& exchange, u32 guess, const Granule& early) {
    const CollectiveParameters& call = exchange.call;
    CollectiveShared& shared = exchange.run.shared;
    const bool is_listed = !kIsShort && call.path == kListed;
    for (u32 slice; (slice = shared.slice) < call.slices || is_listed;) {
        // A CTA that is alone takes no tickets. The others take the next one early, which is under way while they work.
        const bool takes_tickets = gridDim.x != 1 && keeps(kSlicesByTicket);
        u32 next = slice + (keeps(kSlicesByTicket) ? 1 : gridDim.x);
        // All CTAs run items, but only the first one speaks for the rank.
        if (slice < call.slices) exchange.template begin_slice<kIsShort>();
        const auto take_ticket = [&] {
            if (!takes_tickets || threadIdx.x != 0) return;
            next = static_cast<u32>(add_relaxed(&exchange.run.state.epoch, kOneTicket) >> kTicketShift);
        };
        bool failed;
        if constexpr (kIsShort) {
            failed = exchange.run_short(slice == guess, early, take_ticket);
        } else {
            failed = exchange.run_long(take_ticket);
        }
        end_reach();
        __syncthreads();
        if (failed || is_listed) return failed;
        if (!takes_tickets && next >= call.slices) return false;
        if (threadIdx.x == 0) shared.slice = next;
        __syncthreads();
    }
    return false;
}

template <class E>
__device__ __forceinline__ void run_collective(const CollectiveParameters& call) {
    // The launch that loads the kernel; its addresses may be null.
    if (call.launch == 0) return;
    __shared__ CollectiveShared shared;
    // A rank alone has no stages.
    const u64 bytes = bytes_before_stages(call) + (call.ranks == 1 ? 0 : 2ull * kMostSlices * kStages * kStageBytes);
    CollectiveState& state = *reach_shared(call.state, bytes);
    CollectiveStatus& status = reach_shared(call.status);
    const Running run{call, state, status, shared};
    const Exchange<E> exchange(run);

    // All of this is under way at the same time: the atomic operations, the first loads of the input, as if this CTA got the slice of
    // its number, and the addresses of the peers. If another CTA gets that slice, what was loaded is not used; and may have been
    // overwritten by the output, which ThreadSanitizer would report.
    Arrival arrival{};
    if (threadIdx.x == 0) arrival = arrive(call, state);
    Granule early{};
#if !defined(FLEXRING_ON_HOST) || defined(FLEXRING_READS_EARLY)
    const u32 guess = call.path == kShort && blockIdx.x < call.slices ? blockIdx.x : kNoSlice;
    if (guess != kNoSlice) early = exchange.first_granule(guess);
#else
    const u32 guess = kNoSlice;
#endif
    if (call.path != kShort) exchange.release_inputs();
    for (u32 rank = threadIdx.x; rank < call.ranks; rank += blockDim.x) {
        CollectiveState* const at = reinterpret_cast<CollectiveState*>(load_relaxed(reinterpret_cast<u64*>(&state.peers[rank])));
        shared.peers[rank] = at;
        if (has(call.receives, rank)) shared.received[place_of(call, rank)] = rank;
    }
    if (threadIdx.x == 0) {
        const bool mine = arrival.owner == 0 || arrival.owner == call.launch || !keeps(kOneKernel);
        const bool earlier = (arrival.word & kFailed) != 0;
        shared.epoch = (arrival.word & kEpochMask) + 1;
        shared.slice = keeps(kSlicesByTicket) ? static_cast<u32>(arrival.word >> kTicketShift) : blockIdx.x;
        shared.runs = mine && !earlier;
        shared.reported = arrival.reported;
        // Not before this kernel has `owner`: the host looks at that once it has withdrawn a place.
        shared.placed = shared.runs && call.path != kShort && exchange.may_be_direct() && exchange.has_places();
        shared.failed = !mine || earlier || arrival.closed;
        if (shared.failed) fail(state, status, mine ? kClosed : kOverlap, call.rank, shared.epoch);
        if (mine && earlier) compare_and_swap(&state.owner, call.launch, 0);
        if (call.relayed && !shared.failed && shared.slice == 0) shared.failed = !start_relay(run);
    }
    __syncthreads();
    bool failed = shared.failed;
#ifdef FLEXRING_ON_HOST
    // Not before: the peers' memory may be gone if the communicator has ended.
    for (u32 rank = 0; rank < call.ranks && !failed && threadIdx.x == 0; ++rank) {
        shared.peers[rank] = rank == call.rank ? &state : reach_shared(shared.peers[rank], bytes);
    }
    __syncthreads();
#endif
    if (!failed && call.path == kShort) {
        failed = run_slices<true>(exchange, guess, early);
    } else if (!failed && kMoves<E> && call.path == kTransfers) {
        if constexpr (kMoves<E>) failed = TransferRun<E>(exchange).run();
    } else if (!failed) {
        failed = run_slices<false>(exchange, guess, early);
    }
    if (threadIdx.x == 0 && shared.runs) leave(run, failed);
    end_reach();
}

}  // namespace flexring

#define FLEXRING_COLLECTIVE(name, Type)                                                                 \
    extern "C" __global__ void __launch_bounds__(flexring::kMaxThreads, 1)                              \
        flexring_collective_##name(const __grid_constant__ flexring::CollectiveParameters call) {       \
        flexring::run_collective<flexring::Type>(call);                                                 \
    }

FLEXRING_TYPES(FLEXRING_COLLECTIVE)
