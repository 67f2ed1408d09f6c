// The resident kernels: one for each type, and one that only copies.
//
// A call is one launch. It runs from the moment at which the caller's stream reaches it until the host has finished the call.
// Meanwhile the host publishes descriptors. The first CTA to arrive, the fetcher, brings them to the GPU and divides each among
// the CTAs that have arrived by then, the workers. `engine.h` has the layout. The words of the protocol, in the order of a
// descriptor's life; indices and numbers of calls only grow:
//
// | word                 | writer             | order of the store      | reader       | order of the load  |
// |----------------------|--------------------|-------------------------|--------------|--------------------|
// | host.ring[r][e]      | host               | before head             | fetcher      | relaxed.sys        |
// | host.head[r]         | host               | release                 | fetcher      | acquire.sys        |
// | host.finished        | host               | release                 | fetcher      | acquire.sys        |
// | host.aborted         | host               | release                 | fetcher      | acquire.sys        |
// | arrived              | all CTAs           | add, acq_rel.gpu        | fetcher      | acquire.gpu        |
// | finished_tiles[r][e] | fetcher, zero      | relaxed, before head    |              |                    |
// | gpu.ring[r][e]       | fetcher            | relaxed, before head    | workers      | weak, after head   |
// | shares[r][e]         | fetcher            | relaxed, before head    | workers      | relaxed            |
// | line.head[r]         | fetcher            | release.gpu             | workers      | relaxed, then      |
// |                      |                    |                         |              | acquire.gpu if new |
// | destination          | CTA with the share | before the barrier      | host, peers  | after done         |
// | finished_tiles[r][e] | CTAs with a share  | add, acq_rel.gpu        | the same add |                    |
// | done[r][e]           | last to add        | release.sys             | host         | acquire            |
// | line.over            | fetcher            | relaxed                 | workers      | relaxed            |
// | kernel.started       | fetcher            | release.sys             | host         | acquire            |
// | left                 | all CTAs           | add, acq_rel.gpu        | the same add |                    |
// | kernel.ended         | last to leave      | release.sys             | host         | acquire            |
//
// - The fetcher is the first CTA to arrive, because any other one may never be resident. It alone reads host memory, so that a
//   waiting kernel costs one read of PCIe at a time. If no other CTA has arrived, it works itself.
// - Shares are not claimed. An earlier version, in which CTAs claimed tiles by compare-and-swap, began one tile in 0.7 to 0.9 us on an
//   H200, however many CTAs there were.
// - A worker loads each `head` and then adds to `arrived`. A fetcher that sees the add stores `head` later, so the worker begins at
//   or before the first descriptor in which it has a share. It looks at every entry from there on, and skips those without a share.
// - The host overwrites an entry after `done`, which follows the adds of all CTAs with a share. So an entry in which a worker has a
//   share stays until that worker has added to `finished_tiles`. Where it has none, it may find the share word of a later entry in
//   the same place: that has another index.
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
// Tiles on which a CTA works alone between two looks at the host's words: 1 MiB with the host's tiles of 4 KiB.
constexpr u32 kTilesAlone = 256;
constexpr int kEntryWords = sizeof(Descriptor) / sizeof(u64);
// The words of a descriptor that hold the number of operands, in the lower half, and of tiles, in the upper half.
constexpr int kWordOfOperands = 3;
constexpr int kWordOfTiles = 4;
constexpr int kWordOfFlags = 5;

// What a CTA does next. Only the fetcher does what is not a share of a descriptor.
struct Share {
    enum Kind : u32 { kNothing, kTiles, kInput, kOutput, kOver } kind;
    u32 ring;
    // The running index of the descriptor, the first tile and the number of tiles, and the number of all tiles of the descriptor.
    u64 index;
    u32 first;
    u32 count;
    u32 all;
};

// What the threads of a CTA share.
struct Shared {
    u64 line[kLineWords];
    // By ring: the index of the next entry to look at, and the head up to which entries are visible. The fetcher only uses the
    // latter, for what it has published.
    u64 position[kRings];
    u64 head[kRings];
    // Of the entries that the fetcher copies.
    u32 operands[kEntries];
    u32 tiles[kEntries];
    u32 flags[kEntries];
    Share share;
    // Of the fetcher: what is left of a descriptor on which it works alone.
    Share rest;
    // The ring in which to look first, so that all have their turn.
    u32 first_ring;
    // The other CTAs that have arrived, for the fetcher.
    u32 workers;
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

// The word of `shares` of an entry.
__device__ __forceinline__ u64 share_word(u64 index, bool on_host, u32 workers, u32 tiles) {
    return index << 32 | static_cast<u64>(on_host ? kShareOnHost : 0) | static_cast<u64>(workers) << kTileBits | tiles;
}

// This worker's share of the descriptor at an index, given the word of `shares` there. False if it has none.
__device__ __forceinline__ bool share_of(u64 word, u64 index, u32 worker, u32 ring, Share& share) {
    const u32 low = static_cast<u32>(word), tiles = low & ((1u << kTileBits) - 1);
    u32 workers = (low & ~kShareOnHost) >> kTileBits, number = worker;
    if (static_cast<u32>(word >> 32) != static_cast<u32>(index) || worker >= workers) return false;
    // Each ring has a third of the workers for what crosses PCIe, so that both directions are in use at the same time.
    if ((low & kShareOnHost) && workers >= kRings) {
        if (worker % kRings != ring) return false;
        workers = (workers + kRings - 1 - ring) / kRings;
        number = worker / kRings;
    }
    // Short descriptors go to different workers.
    const u32 most = (tiles + kLeastTiles - 1) / kLeastTiles, parts = most < workers ? most : workers;
    const u32 part = (number + static_cast<u32>(index) % workers) % workers;
    if (part >= parts) return false;
    const u32 first = tiles * part / parts, end = tiles * (part + 1) / parts;
    share = Share{Share::kTiles, ring, index, first, end - first, tiles};
    return true;
}

// The next share of this worker in a ring. False if there is none in what is published. Called by one thread.
__device__ __forceinline__ bool next_share(const GpuState& gpu, u32 ring, u32 worker, Shared& shared) {
    u64 position = shared.position[ring];
    bool found = false;
    while (!found && position != shared.head[ring]) {
        found = share_of(load_relaxed(&gpu.shares[ring][position % kEntries]), position, worker, ring, shared.share);
        ++position;
    }
    shared.position[ring] = position;
    return found;
}

// Reports a share, and the descriptor if this was its last one. Called by one thread after a barrier.
__device__ __forceinline__ void report_share(GpuState& gpu, HostControl& host, const Share& share) {
    const u32 entry = static_cast<u32>(share.index % kEntries);
    if (add_acq_rel(&gpu.finished_tiles[share.ring][entry], share.count) + share.count == share.all) {
        store_release_sys(&host.done[share.ring][entry], share.index + 1);
    }
}

// Copies entries from host memory, and notes the numbers of their operands and tiles, and their flags. Called by all threads, after
// an acquire of `head`.
__device__ __forceinline__ void copy_entries(GpuState& gpu, const HostControl& host, u32 ring, u64 from, u64 head,
                                             Shared& shared) {
    const u32 words = static_cast<u32>(head - from) * kEntryWords;
    for (u32 nth = threadIdx.x; nth < words; nth += blockDim.x) {
        const u32 entry = static_cast<u32>((from + nth / kEntryWords) % kEntries), word = nth % kEntryWords;
        const u64 value = load_relaxed_sys(words_of(host.ring[ring][entry]) + word);
        store_relaxed(const_cast<u64*>(words_of(gpu.ring[ring][entry])) + word, value);
        if (word == 0) store_relaxed(&gpu.finished_tiles[ring][entry], 0);
        if (word == kWordOfOperands) shared.operands[entry] = static_cast<u32>(value);
        if (word == kWordOfTiles) shared.tiles[entry] = static_cast<u32>(value >> 32);
        if (word == kWordOfFlags) shared.flags[entry] = static_cast<u32>(value);
    }
}

// Divides the descriptors of copied entries among the workers, and publishes them to these. Called by one thread after a barrier.
__device__ __forceinline__ void publish(GpuState& gpu, u32 ring, u64 from, u64 head, u32 workers, Shared& shared) {
    for (u64 index = from; index < head;) {
        const u32 entry = static_cast<u32>(index % kEntries);
        const u64 next = index + entries_of(shared.operands[entry]);
        const bool on_host = (shared.flags[entry] & kOnHost) != 0;
        store_relaxed(&gpu.shares[ring][entry], share_word(index, on_host, workers, shared.tiles[entry]));
        // The entries of further operands have no share.
        while (++index < next) store_relaxed(&gpu.shares[ring][index % kEntries], share_word(index, false, 0, 0));
    }
    store_release_gpu(&gpu.line.head[ring], head);
    shared.head[ring] = head;
}

// Takes the next tiles of `rest` as this CTA's share. Called by one thread.
__device__ __forceinline__ void take_rest(Shared& shared) {
    Share& rest = shared.rest;
    const u32 count = rest.count < kTilesAlone ? rest.count : kTilesAlone;
    shared.share = Share{Share::kTiles, rest.ring, rest.index, rest.first, count, rest.all};
    rest.first += count;
    rest.count -= count;
}

// Takes the next descriptor of a ring as this CTA's own. Called by all threads.
__device__ __forceinline__ void take_descriptor(GpuState& gpu, const HostControl& host, u32 ring, Shared& shared) {
    const u64 from = shared.head[ring];
    copy_entries(gpu, host, ring, from, from + 1, shared);
    __syncthreads();
    const u64 end = from + entries_of(shared.operands[from % kEntries]);
    copy_entries(gpu, host, ring, from + 1, end, shared);
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 tiles = shared.tiles[from % kEntries];
        shared.rest = Share{Share::kTiles, ring, from, 0, tiles, tiles};
        take_rest(shared);
        publish(gpu, ring, from, end, 0, shared);
    }
}

// A step of the first CTA to arrive: brings new descriptors to the GPU. Called by all threads; `started` is the same in each.
__device__ __forceinline__ void fetch(const LaunchParameters& call, GpuState& gpu, const HostControl& host, Shared& shared,
                                      bool started) {
    const u64* const line = reinterpret_cast<const u64*>(&host.host);
    const bool alone = shared.rest.count != 0;
    // The last thread, which loads no word of the line.
    if (threadIdx.x == blockDim.x - 1) {
        const u32 others = load_acquire_gpu(&gpu.arrived) - 1;
        shared.workers = others < kMaxWorkers ? others : kMaxWorkers;
    }
    for (u32 nth = threadIdx.x; nth < kLineWords; nth += blockDim.x) shared.line[nth] = load_acquire_sys(line + nth);
    __syncthreads();
    if (threadIdx.x == 0) shared.share.kind = Share::kNothing;
    const bool aborted = shared.line[kAborted] >= call.call, finished = shared.line[kFinished] >= call.call;
    if (aborted || finished) {
        if (threadIdx.x == 0) {
            store_relaxed(&gpu.line.over, call.call);
            // A later call may have been aborted after this one had finished. `finished` was stored before, so a
            // load behind the acquire of `aborted` reads it; the load above may have been too early.
            const bool complete = finished || load_acquire_sys(line + kFinished) >= call.call;
            shared.share.kind = complete && started ? Share::kOutput : Share::kOver;
        }
        return;
    }
    if (!started) {
        if (threadIdx.x == 0) shared.share.kind = Share::kInput;
        return;
    }
    if (alone) {
        if (threadIdx.x == 0) take_rest(shared);
        return;
    }
    const u32 workers = shared.workers, first_ring = shared.first_ring;
    bool news = false;
#pragma unroll 1
    for (u32 nth = 0; nth < kRings; ++nth) {
        const u32 ring = (first_ring + nth) % kRings;
        const u64 from = shared.head[ring], head = shared.line[ring];
        if (from == head) continue;
        news = true;
        // One at a time, because other CTAs may arrive.
        if (workers == 0) return take_descriptor(gpu, host, ring, shared);
        copy_entries(gpu, host, ring, from, head, shared);
        __syncthreads();
        if (threadIdx.x == 0) publish(gpu, ring, from, head, workers, shared);
        // The next ring's entries are noted in the same place.
        __syncthreads();
    }
    if (threadIdx.x == 0 && !news) pause_fetcher();
}

// A step of every other CTA: waits until it has a share or the call is over. Called by one thread.
__device__ __forceinline__ void await_share(u64 call, const GpuState& gpu, u32 worker, Shared& shared) {
    for (;;) {
        u64 heads[kRings];
#pragma unroll
        for (u32 ring = 0; ring < kRings; ++ring) heads[ring] = load_relaxed(&gpu.line.head[ring]);
        const bool over = load_relaxed(&gpu.line.over) >= call;
#pragma unroll
        for (u32 ring = 0; ring < kRings; ++ring) {
            if (heads[ring] != shared.head[ring]) shared.head[ring] = load_acquire_gpu(&gpu.line.head[ring]);
        }
        if (over) break;
#pragma unroll 1
        for (u32 nth = 0; nth < kRings; ++nth) {
            if (next_share(gpu, (shared.first_ring + nth) % kRings, worker, shared)) return;
        }
        pause_poller();
    }
    shared.share.kind = Share::kOver;
}

// The only place where memory of the user or of transports is accessed, so that the code is there once.
template <class Work>
__device__ __forceinline__ void work_on(const LaunchParameters& call, const GpuState& gpu, const Share& share) {
    u8* into = static_cast<u8*>(call.output);
    const u8* from = static_cast<const u8*>(call.staged_output);
    u64 bytes = call.output_bytes;
    if (share.kind == Share::kInput) {
        into = static_cast<u8*>(call.staged_input);
        from = static_cast<const u8*>(call.input);
        bytes = call.input_bytes;
    } else if (share.kind == Share::kTiles) {
        const u32 entry = static_cast<u32>(share.index % kEntries);
        const Tile tile = tiles_of(gpu.ring[share.ring], entry, share.first, share.count);
        const Descriptor& job = tile.descriptor();
        if (!(job.flags & kCopies)) return Work::work(tile);
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
    if (threadIdx.x == 0) {
        // Before the add: see above.
        for (u32 ring = 0; ring < kRings; ++ring) {
            shared.position[ring] = shared.head[ring] = load_relaxed(&gpu.line.head[ring]);
        }
        shared.rest.count = 0;
        shared.ticket = add_acq_rel(&gpu.arrived, 1);
        shared.first_ring = shared.ticket % kRings;
    }
    __syncthreads();
    const bool fetcher = shared.ticket == 0;
    const u32 worker = shared.ticket - 1;
    bool started = false;
    for (;;) {
        if (fetcher) {
            fetch(call, gpu, host, shared, started);
        } else if (threadIdx.x == 0) {
            await_share(call.call, gpu, worker, shared);
        }
        __syncthreads();
        // Thread 0 may have the next share before the others look at this one again.
        const Share::Kind kind = shared.share.kind;
        if (kind == Share::kNothing) continue;
        if (kind == Share::kOver) break;
        work_on<Work>(call, gpu, shared.share);
        end_reach();
        __syncthreads();
        if (kind == Share::kOutput) break;
        if (kind == Share::kInput) {
            if (threadIdx.x == 0) store_release_sys(&host.kernel.started, call.call);
            started = true;
        } else if (threadIdx.x == 0) {
            report_share(gpu, host, shared.share);
            shared.first_ring = (shared.share.ring + 1) % kRings;
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
