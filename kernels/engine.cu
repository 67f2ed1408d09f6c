// The resident kernels: one for each type, and one that only copies.
//
// A call is one launch. It runs from the moment at which the caller's stream reaches it until the host has finished the call.
// Meanwhile the host publishes descriptors, and the CTAs work on tiles of them. `engine.h` has the layout. The words of the
// protocol, in the order of a descriptor's life; all indices only grow, except for `arrived` and `left`:
//
// | word                 | writer             | order of the store      | reader       | order of the load  |
// |----------------------|--------------------|-------------------------|--------------|--------------------|
// | host.ring[r][e]      | host               | before head             | fetcher      | relaxed.sys        |
// | host.head[r]         | host               | release                 | fetcher      | acquire.sys        |
// | host.finished        | host               | release                 | fetcher      | acquire.sys        |
// | host.aborted         | host               | release                 | fetcher      | acquire.sys        |
// | finished_tiles[r][e] | fetcher, zero      | relaxed, before head    |              |                    |
// | gpu.ring[r][e]       | fetcher            | relaxed, before head    | all CTAs     | relaxed, then weak |
// | line.head[r]         | fetcher            | release.gpu             | all CTAs     | relaxed, then      |
// |                      |                    |                         |              | acquire.gpu if new |
// | claim[r].next        | all CTAs           | CAS, relaxed            | all CTAs     | relaxed            |
// | destination          | CTA with the tile  | before the barrier      | host, peers  | after done         |
// | finished_tiles[r][e] | all CTAs           | add, acq_rel.gpu        | the same add |                    |
// | done[r][e]           | last to add        | release.sys             | host         | acquire            |
// | line.over            | fetcher            | relaxed                 | all CTAs     | relaxed            |
// | kernel.started       | fetcher            | release.sys             | host         | acquire            |
// | arrived              | all CTAs           | add, relaxed            | the same add |                    |
// | left                 | all CTAs           | add, acq_rel.gpu        | the same add |                    |
// | kernel.ended         | last to leave      | release.sys             | host         | acquire            |
//
// - The fetcher is the first CTA to arrive, because any other one may never be resident. It alone reads host memory, so that a
//   waiting kernel costs one read of PCIe at a time. It works on a tile only if no other CTA has claimed it between two fetches.
// - A claim reads `next`, then `head` with acquire. If the entry is below `head`, the fetcher's copy of it is visible, or that of
//   an entry 256 later. The host only writes the latter when the former is complete; then all its tiles have been claimed, `next`
//   has changed, and the compare-and-swap fails. So a claim that succeeds was made with the right number of tiles and operands.
// - A CTA reads an entry until its add to `finished_tiles`; the host overwrites the entry after `done`, which follows every add.
// - `done` is stored after an acquiring add that saw every other CTA's releasing add, so it covers the writes of all of them
//   (causality order is transitive across scopes), and a peer or a NIC may read the destination after the host has seen `done`.
// - Weak loads may use L1, which each acquire invalidates, also for the user's kernels on that SM; therefore polling is relaxed.
//   Barriers extend an acquire or a release to the whole CTA. Nothing is read with ld.nc.
// - Kernels of one communicator run one after another, so words in GPU memory need no reset between calls, except for `arrived`
//   and `left`. A CTA that becomes resident late finds `over`.
// - After an abort the CTAs leave without having completed what is published, and the communicator is never used again.
#include "engine.h"
#include "memory_order.h"
#include "number.h"
#include "reduce.h"

namespace flexring {

// HostLine, as the words that the fetcher loads at once.
constexpr int kLineWords = 5;
constexpr int kFinished = 3;
constexpr int kAborted = 4;
static_assert(sizeof(HostLine::head) == kFinished * sizeof(u64) && sizeof(HostLine) >= kLineWords * sizeof(u64),
              "HostLine begins with these words");
constexpr int kEntryWords = sizeof(Descriptor) / sizeof(u64);
// The words of a descriptor that hold the number of operands, in the lower half, and of tiles, in the upper half.
constexpr int kWordOfOperands = 3;
constexpr int kWordOfTiles = 4;
constexpr u64 kTileMask = (1ull << kTileBits) - 1;

// What a CTA does next. Only the fetcher does what is not a tile of a descriptor.
struct Claim {
    enum Kind : u32 { kNothing, kTile, kInput, kOutput, kOver } kind;
    u32 ring;
    // The running index of the descriptor, and the number of its tile.
    u64 index;
    u32 tile;
};

// What the threads of a CTA share.
struct Shared {
    u64 line[kLineWords];
    // By ring: the claim word at the fetcher's last poll, and the head that it has published.
    u64 seen[kRings];
    u64 head[kRings];
    Claim claim;
    u32 ticket;
};

// Work that a CTA does on tiles: a reduction, or nothing but copies.
template <class E>
struct Reducing {
    static __device__ __forceinline__ void work(const Tile& tile) { reduce_tile<E>(tile); }
};
struct Copying {
    // The host publishes only copies to this kernel. Anything else would be lost.
    static __device__ __forceinline__ void work(const Tile&) { __trap(); }
};

__device__ __forceinline__ const u64* words_of(const Descriptor& entry) { return reinterpret_cast<const u64*>(&entry); }

// The next tile of a ring to claim. False if every published one is claimed.
__device__ __forceinline__ bool next_tile(const GpuState& gpu, u32 ring, u64& next, Claim& claim) {
    next = load_relaxed(&gpu.claim[ring].next);
    // The claim word has the lower 40 bits of the index. It may be newer than the head that is read here, or much older.
    constexpr u64 kMask = ~0ull >> kTileBits;
    u64 head = load_relaxed(&gpu.line.head[ring]);
    if (((head - (next >> kTileBits)) & kMask) == 0) return false;
    head = load_acquire_gpu(&gpu.line.head[ring]);
    const u64 published = (head - (next >> kTileBits)) & kMask;
    if (published == 0 || published > kEntries) return false;
    claim = Claim{Claim::kTile, ring, head - published, static_cast<u32>(next & kTileMask)};
    return true;
}

// Claims a tile that `next_tile` found. False if another CTA was faster.
__device__ __forceinline__ bool take_tile(GpuState& gpu, u64 next, const Claim& claim) {
    const u64* words = words_of(gpu.ring[claim.ring][claim.index % kEntries]);
    const u32 tiles = static_cast<u32>(load_relaxed(words + kWordOfTiles) >> 32);
    u64 after = next + 1;
    if (claim.tile + 1 >= tiles) {
        const u32 operands = static_cast<u32>(load_relaxed(words + kWordOfOperands));
        after = (claim.index + entries_of(operands)) << kTileBits;
    }
    return compare_and_swap_relaxed(&gpu.claim[claim.ring].next, next, after) == next;
}

// Claims a tile, of the first ring if there is one. Called by one thread.
__device__ __forceinline__ bool claim_tile(GpuState& gpu, u32 first_ring, Claim& claim) {
#pragma unroll 1
    for (u32 nth = 0; nth < kRings; ++nth) {
        const u32 ring = (first_ring + nth) % kRings;
        u64 next;
        while (next_tile(gpu, ring, next, claim)) {
            if (take_tile(gpu, next, claim)) return true;
        }
    }
    return false;
}

// As `claim_tile`, for the fetcher: only a tile that no CTA has claimed since its last poll, unless it is the only CTA.
__device__ __forceinline__ bool claim_left_tile(GpuState& gpu, u32 first_ring, u64* seen, Claim& claim) {
    const bool alone = gridDim.x == 1;
#pragma unroll 1
    for (u32 nth = 0; nth < kRings; ++nth) {
        const u32 ring = (first_ring + nth) % kRings;
        u64 next;
        if (!next_tile(gpu, ring, next, claim)) continue;
        const bool left = alone || seen[ring] == next + 1;
        // Plus 1, so that 0 means that there was no poll yet.
        seen[ring] = next + 1;
        if (left && take_tile(gpu, next, claim)) {
            // If this CTA is the only resident one, it takes the next tile at its next poll.
            seen[ring] = load_relaxed(&gpu.claim[ring].next) + 1;
            return true;
        }
    }
    return false;
}

// Reports a tile, and the descriptor if this was its last one. Called by one thread after a barrier.
__device__ __forceinline__ void report_tile(GpuState& gpu, HostControl& host, const Claim& claim) {
    const u32 entry = static_cast<u32>(claim.index % kEntries);
    const u32 tiles = gpu.ring[claim.ring][entry].tiles;
    if (add_acq_rel(&gpu.finished_tiles[claim.ring][entry], 1) + 1 == tiles) {
        store_release_sys(&host.done[claim.ring][entry], claim.index + 1);
    }
}

// Copies new entries from host memory. Called by all threads, after an acquire of `head`.
__device__ __forceinline__ void copy_entries(GpuState& gpu, const HostControl& host, u32 ring, u64 from, u64 head) {
    const u32 words = static_cast<u32>(head - from) * kEntryWords;
    for (u32 nth = threadIdx.x; nth < words; nth += blockDim.x) {
        const u32 entry = static_cast<u32>((from + nth / kEntryWords) % kEntries), word = nth % kEntryWords;
        const u64 value = load_relaxed_sys(words_of(host.ring[ring][entry]) + word);
        store_relaxed(const_cast<u64*>(words_of(gpu.ring[ring][entry])) + word, value);
        if (word == 0) store_relaxed(&gpu.finished_tiles[ring][entry], 0);
    }
}

// A step of the first CTA to arrive: brings new descriptors to the GPU. Called by all threads; `started` is the same in each.
__device__ __forceinline__ void fetch(const LaunchParameters& call, GpuState& gpu, const HostControl& host, Shared& shared,
                                      bool started, u32 first_ring) {
    const u64* const line = reinterpret_cast<const u64*>(&host.host);
    for (u32 nth = threadIdx.x; nth < kLineWords; nth += blockDim.x) shared.line[nth] = load_acquire_sys(line + nth);
    __syncthreads();
    const bool aborted = shared.line[kAborted] >= call.call, finished = shared.line[kFinished] >= call.call;
    if (aborted || finished) {
        if (threadIdx.x == 0) {
            store_relaxed(&gpu.line.over, call.call);
            // A later call may have been aborted after this one had finished. `finished` was stored before, so a
            // load behind the acquire of `aborted` reads it; the load above may have been too early.
            const bool complete = finished || load_acquire_sys(line + kFinished) >= call.call;
            shared.claim.kind = complete && started ? Claim::kOutput : Claim::kOver;
        }
        return;
    }
    if (!started) {
        if (threadIdx.x == 0) shared.claim.kind = Claim::kInput;
        return;
    }
    bool news = false;
#pragma unroll 1
    for (u32 ring = 0; ring < kRings; ++ring) {
        const u64 from = shared.head[ring], head = shared.line[ring];
        if (from == head) continue;
        news = true;
        copy_entries(gpu, host, ring, from, head);
        __syncthreads();
        if (threadIdx.x == 0) {
            store_release_gpu(&gpu.line.head[ring], head);
            shared.head[ring] = head;
        }
    }
    if (threadIdx.x == 0 && !claim_left_tile(gpu, first_ring, shared.seen, shared.claim)) {
        shared.claim.kind = Claim::kNothing;
        if (!news) pause_fetcher();
    }
}

// A step of every other CTA: waits until there is a tile or the call is over. Called by one thread.
__device__ __forceinline__ void await_tile(u64 call, GpuState& gpu, u32 first_ring, Claim& claim) {
    while (load_relaxed(&gpu.line.over) < call) {
        if (claim_tile(gpu, first_ring, claim)) return;
        pause_poller();
    }
    claim.kind = Claim::kOver;
}

// The only place where memory of the user or of transports is accessed, so that the code is there once.
template <class Work>
__device__ __forceinline__ void work_on(const LaunchParameters& call, const GpuState& gpu, const Claim& claim) {
    u8* into = static_cast<u8*>(call.output);
    const u8* from = static_cast<const u8*>(call.staged_output);
    u64 bytes = call.output_bytes;
    if (claim.kind == Claim::kInput) {
        into = static_cast<u8*>(call.staged_input);
        from = static_cast<const u8*>(call.input);
        bytes = call.input_bytes;
    } else if (claim.kind == Claim::kTile) {
        const Tile tile = tile_of(gpu.ring[claim.ring], static_cast<u32>(claim.index % kEntries), claim.tile);
        const Descriptor& job = tile.descriptor();
        if (!job.copies) return Work::work(tile);
        into = reinterpret_cast<u8*>(job.into) + tile.first;
        from = reinterpret_cast<const u8*>(job.at[0]) + tile.first;
        bytes = tile.count;
    }
    copy(into, from, bytes);
}

template <class Work>
__device__ __forceinline__ void run(const LaunchParameters& call) {
    // The launch that loads the kernel; its addresses may be null.
    if (call.call == 0) return;
    __shared__ Shared shared;
    GpuState& gpu = reach_shared(call.gpu);
    HostControl& host = reach_shared(call.host);
    if (threadIdx.x == 0) shared.ticket = add_relaxed(&gpu.arrived, 1);
    for (u32 ring = threadIdx.x; ring < kRings; ring += blockDim.x) {
        shared.seen[ring] = 0;
        shared.head[ring] = load_relaxed(&gpu.line.head[ring]);
    }
    __syncthreads();
    const bool fetcher = shared.ticket == 0;
    bool started = false;
    u32 first_ring = shared.ticket % kRings;
    for (;;) {
        if (fetcher) {
            fetch(call, gpu, host, shared, started, first_ring);
        } else if (threadIdx.x == 0) {
            await_tile(call.call, gpu, first_ring, shared.claim);
        }
        __syncthreads();
        const Claim claim = shared.claim;
        if (claim.kind == Claim::kNothing) continue;
        if (claim.kind == Claim::kOver) break;
        work_on<Work>(call, gpu, claim);
        end_reach();
        __syncthreads();
        if (claim.kind == Claim::kOutput) break;
        if (claim.kind == Claim::kInput) {
            if (threadIdx.x == 0) store_release_sys(&host.kernel.started, call.call);
            started = true;
        } else {
            if (threadIdx.x == 0) report_tile(gpu, host, claim);
            if (fetcher) first_ring = (claim.ring + 1) % kRings;
        }
    }
    // The barrier behind the last work is also behind all accesses of this CTA.
    if (threadIdx.x == 0 && add_acq_rel(&gpu.left, 1) + 1 == gridDim.x) {
        store_relaxed(&gpu.arrived, 0);
        store_relaxed(&gpu.left, 0);
        store_release_sys(&host.kernel.ended, call.call);
    }
}

}  // namespace flexring

// The types, named as in src/dtype.rs.
#define FLEXRING_TYPES(with)                                                        \
    with(int8, Int8) with(uint8, Uint8) with(int32, Int32) with(uint32, Uint32)     \
    with(int64, Int64) with(uint64, Uint64) with(half, Half) with(float, Single)    \
    with(double, Double) with(bfloat16, Bfloat) with(float8e4m3, E4m3) with(float8e5m2, E5m2) \
    with(int16, Int16) with(uint16, Uint16) with(bool, Boolean)

#define FLEXRING_KERNEL(name, Type)                                                                  \
    extern "C" __global__ void __launch_bounds__(flexring::kMaxThreads, 1)                           \
        flexring_##name(const __grid_constant__ flexring::LaunchParameters call) {                   \
        flexring::run<flexring::Reducing<flexring::Type>>(call);                                     \
    }

FLEXRING_TYPES(FLEXRING_KERNEL)

extern "C" __global__ void __launch_bounds__(flexring::kMaxThreads, 1)
    flexring_copy(const __grid_constant__ flexring::LaunchParameters call) {
    flexring::run<flexring::Copying>(call);
}
