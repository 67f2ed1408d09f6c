// Runs the kernels of engine.cu on a CPU; see kernels.h.
#include "kernels.h"

#include <algorithm>

#include "../engine.cu"

namespace flexring {
namespace {

struct NamedKernel {
    const char* name;
    Kernel kernel;
    // The work on a tile that is no copy.
    void (*work)(const Tile&);
};

#define FLEXRING_NAMED(name, Type) {"flexring_" #name, flexring_##name, Reducing<Type>::work},
constexpr NamedKernel kKernels[] = {FLEXRING_TYPES(FLEXRING_NAMED){"flexring_copy", flexring_copy, Copying::work}};

const NamedKernel* find(const char* name) {
    for (const NamedKernel& named : kKernels) {
        if (std::strcmp(named.name, name) == 0) return &named;
    }
    return nullptr;
}

}  // namespace

Kernel kernel_named(const char* name) {
    const NamedKernel* named = find(name);
    return named ? named->kernel : nullptr;
}

bool shares_cover(unsigned workers, unsigned tiles, unsigned ring, bool on_host, unsigned long long index) {
    const u64 word = share_word(index, on_host, workers, tiles);
    std::vector<u32> taken(tiles);
    for (u32 worker = 0; worker < workers; ++worker) {
        Share share{};
        if (!share_of(word, index, worker, ring, share)) continue;
        if (share.all != tiles || share.count == 0) return false;
        for (u32 nth = 0; nth < share.count; ++nth) ++taken.at(share.first + nth);
    }
    Share share{};
    const bool others = share_of(word, index, workers, ring, share) || share_of(word, index + kEntries, 0, ring, share);
    return !others && std::all_of(taken.begin(), taken.end(), [](u32 times) { return times == 1; });
}

void run_cta(Kernel kernel, const LaunchParameters& parameters, unsigned grid, unsigned cta, Machine& machine) {
    run_alone(kernel, parameters, grid, cta, machine);
}

}  // namespace flexring

// Does the work of the descriptors in `entries`, without the protocol: every tile of each, by each of `block` threads in turn.
// Returns 0, or -1 if there is no kernel of that name or the entries are not sound.
extern "C" int flexring_host_work(const char* kernel, const void* entries, unsigned count, unsigned block) {
    using namespace flexring;
    const NamedKernel* named = find(kernel);
    if (!named || count > kEntries || block == 0 || block > kMaxThreads) return -1;
    static thread_local Descriptor ring[kEntries];
    std::memcpy(ring, entries, count * sizeof(Descriptor));
    gridDim = {1, 1, 1};
    blockDim = {block, 1, 1};
    blockIdx = {0, 0, 0};
    for (u32 entry = 0; entry < count; entry += entries_of(ring[entry].operands)) {
        const Descriptor& job = ring[entry];
        if (job.operands == 0 || job.tiles == 0 || entry + entries_of(job.operands) > count) return -1;
        for (u32 nth = 0; nth < job.tiles; ++nth) {
            const Tile tile = tiles_of(ring, entry, nth, 1);
            for (threadIdx = {0, 0, 0}; threadIdx.x < block; ++threadIdx.x) {
                if (job.flags & kCopies) {
                    copy(reinterpret_cast<u8*>(job.into) + tile.first, reinterpret_cast<const u8*>(job.at[0]) + tile.first,
                         tile.count);
                } else {
                    named->work(tile);
                }
            }
        }
    }
    return 0;
}
