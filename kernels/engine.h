// The memory that the host and a resident kernel share: work descriptors, and the words that order them.
//
// A collective call on GPU memory is one kernel launch. While the kernel runs, the host publishes descriptors on three rings;
// the kernel's CTAs divide the tiles of each, copy and reduce, and store a completion word for each descriptor. docs/gpu.md
// explains the protocol: who writes each word, in which order, and why it cannot deadlock.
//
// src/device/cuda/engine/layout.rs has the same layout in Rust. Includes nothing, because NVRTC has no headers.
#pragma once

namespace flexring {

// The largest number of threads in a CTA.
constexpr int kMaxThreads = 512;

// Rings: out of GPU memory into host memory, from host memory into GPU memory, and everything else.
constexpr int kRings = 3;
constexpr int kRingOut = 0;
constexpr int kRingIn = 1;
constexpr int kRingReduce = 2;
// Entries of a ring; a power of two. The entry with the running index i is at i % kEntries.
constexpr int kEntries = 256;
// Operands in the first entry of a descriptor, and in each further entry.
constexpr int kFirstOperands = 10;
constexpr int kMoreOperands = 16;
// Set in the address of an operand whose elements are multiplied by the descriptor's factor. No address is that large.
constexpr unsigned long long kScaled = 1ull << 63;
// Bits of a word of `shares` that count tiles. The next ones count workers.
constexpr int kTileBits = 24;
// The largest number of CTAs that share a descriptor: what fits into a word of `shares`.
constexpr unsigned int kMaxWorkers = 127;
// Set in a word of `shares` whose descriptor has kOnHost.
constexpr unsigned int kShareOnHost = 1u << 31;
// The least number of tiles in a share, if the descriptor has as many. With the host's tiles of 4 KiB: four accesses of 16 bytes by
// each thread.
constexpr unsigned int kLeastTiles = 8;
// Bits of Descriptor::flags: it copies bytes; some of its memory is the host's.
constexpr unsigned int kCopies = 1;
constexpr unsigned int kOnHost = 2;

// How two elements are combined. The numbers of Arithmetic in src/device/mod.rs.
enum Operation : unsigned int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAnd = 4, kOr = 5, kXor = 6 };

// One job: the reduction of `operands` vectors into `into`, or the copy of one.
struct alignas(128) Descriptor {
    // Address of the destination.
    unsigned long long into;
    // Number of elements; of bytes for a copy.
    unsigned long long count;
    // Multiplies the elements of operands that are marked with kScaled.
    double factor;
    // Number of operands, at least 1.
    unsigned int operands;
    // The number of ranks to divide the result by; 0 and 1 mean no division.
    unsigned int divide;
    // Elements of a tile (bytes for a copy), a multiple of 16 bytes, except that the last tile may be shorter.
    unsigned int tile;
    // Number of tiles, at least 1 and less than 2^kTileBits. A CTA works on several of them, one after the other in memory.
    unsigned int tiles;
    // kCopies and kOnHost.
    unsigned int flags;
    // How two elements are combined: an Operation.
    unsigned int operation;
    // Addresses of the first operands, in order of reduction. Further entries of the ring follow where there are more.
    unsigned long long at[kFirstOperands];
};

// A further entry of a descriptor.
struct alignas(128) MoreOperands {
    unsigned long long at[kMoreOperands];
};

static_assert(sizeof(Descriptor) == 128 && sizeof(MoreOperands) == 128, "an entry is one line of memory");

// Written by the host alone, read by the fetcher alone, all in one load.
struct alignas(128) HostLine {
    // By ring, the running index one past the last published entry.
    unsigned long long head[kRings];
    // The number of the last call that has finished: its kernel, and all before it, end.
    unsigned long long finished;
    // Kernels of calls up to this number end at once, whatever is published.
    unsigned long long aborted;
};

// Written by kernels alone, read by the host.
struct alignas(128) KernelLine {
    // The number of the last call whose kernel has started.
    unsigned long long started;
    // The number of the last call whose kernel has ended: no CTA accesses memory any more.
    unsigned long long ended;
};

// In pinned host memory.
struct HostControl {
    HostLine host;
    KernelLine kernel;
    // By ring and entry, the running index of the last descriptor that is complete there, plus 1. Each word is written by the
    // CTA that completes the descriptor.
    alignas(128) unsigned long long done[kRings][kEntries];
    // Written by the host.
    Descriptor ring[kRings][kEntries];
};

// Written by the fetcher, read by the workers, which are the other CTAs.
struct alignas(128) GpuLine {
    // By ring, the running index one past the last entry that was copied to `GpuState::ring`.
    unsigned long long head[kRings];
    // The number of the last call that has finished or was aborted.
    unsigned long long over;
};

// In GPU memory, zero before the first launch. Kernels of one communicator run one after another.
struct GpuState {
    GpuLine line;
    // CTAs of the running kernel that have arrived, and that have left. The last one to leave resets both.
    alignas(128) unsigned int arrived;
    unsigned int left;
    // By ring and entry, the number of finished tiles.
    alignas(128) unsigned int finished_tiles[kRings][kEntries];
    // By ring and entry, who works on the descriptor: the lower 32 bits of its running index, then kShareOnHost, then 7
    // bits for the number of CTAs among which it is divided, 0 if only the fetcher works on it, and 24 for its tiles, 0 for further
    // operands.
    alignas(128) unsigned long long shares[kRings][kEntries];
    // Copies of HostControl::ring.
    Descriptor ring[kRings][kEntries];
};

// The parameter of every kernel.
struct LaunchParameters {
    GpuState* gpu;
    HostControl* host;
    // The number of the call, from 1; 0 for the launch that only loads the kernel.
    unsigned long long call;
    // Small messages: the kernel copies `bytes` bytes from `input` to `staged_input` (pinned host memory) before it reports
    // that it has started, and from `staged_output` to `output` after the call has finished. 0 bytes otherwise.
    const void* input;
    void* staged_input;
    void* output;
    const void* staged_output;
    unsigned long long input_bytes;
    unsigned long long output_bytes;
};

}  // namespace flexring
