// Ranks on CPU threads that exchange messages through the slots of links.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "slow_machine.h"

namespace flexring {

// Runs a kernel to its end, with a random grid, of which a random number of CTAs are resident. `beside` may add threads.
template <class Beside>
inline void launch_slowly(Kernel kernel, const CollectiveParameters& call, Random& random, bool hurries, Beside beside) {
    const u32 grid = 1 + random.below(random.one_in(2) ? 1 : 5), resident = 1 + random.below(grid);
    std::atomic<u32> next{0};
    const auto place = [&](u64 seed) {
        SlowMachine machine(seed, hurries);
        for (u32 cta; (cta = next.fetch_add(1, std::memory_order_relaxed)) < grid;) run_cta(kernel, call, grid, cta, machine);
    };
    std::vector<std::thread> others;
    for (u32 nth = 1; nth < resident; ++nth) others.emplace_back(place, random.bits());
    beside(others);
    place(random.bits());
    for (std::thread& thread : others) thread.join();
}
inline void launch_slowly(Kernel kernel, const CollectiveParameters& call, Random& random) {
    launch_slowly(kernel, call, random, random.one_in(2), [](std::vector<std::thread>&) {});
}

// The slots of one direction of a link, and the words of both ends.
constexpr u32 kSlotLength = 512;
struct Direction {
    struct alignas(16) Bytes {
        u64 words[2];
    };
    explicit Direction(u32 count) : slots(count), bytes(count * kSlotLength / 16 + 1), sent(kMostSlots), used(kMostSlots) {}
    u8* at() { return reinterpret_cast<u8*>(bytes.data()); }
    u32 slots;
    std::vector<Bytes> bytes;
    std::vector<u64> sent, used;
};
// One end of a link. Both directions have as many slots.
inline ProgramLink link_to(u32 peer, Direction& out, Direction& in) {
    ProgramLink link{};
    link.out = out.at(), link.out_sent = out.sent.data(), link.out_used = out.used.data();
    link.in = in.at(), link.in_sent = in.sent.data(), link.in_used = in.used.data();
    link.slots = out.slots, link.rank = peer;
    return link;
}

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};
// The memory of a rank: its state and inboxes, which are zero, and its stages.
inline std::unique_ptr<CollectiveState, Free> new_state(u64 inboxes, u64 stages) {
    const u64 zeroed = sizeof(CollectiveState) + inboxes, bytes = zeroed + stages;
    std::unique_ptr<CollectiveState, Free> state(static_cast<CollectiveState*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256)));
    std::memset(static_cast<void*>(state.get()), 0, zeroed);
    return state;
}

constexpr u64 kAllStages = 2ull * kMostSlices * kStages * kStageBytes;

// Connects all ranks with each other. Returns what their links consist of, which must stay.
template <class Rank>
inline std::vector<std::unique_ptr<Direction>> connect_all(const std::vector<std::unique_ptr<Rank>>& all, Random& random) {
    std::vector<std::unique_ptr<Direction>> directions;
    const u32 ranks = static_cast<u32>(all.size());
    for (u32 one = 0; one < ranks; ++one) {
        for (u32 peer = 0; peer < ranks; ++peer) all[one]->state().peers[peer] = &all[peer]->state();
        for (u32 other = 0; other < one; ++other) {
            const u32 slots = 1u << random.below(3);
            directions.push_back(std::make_unique<Direction>(slots)), directions.push_back(std::make_unique<Direction>(slots));
            Direction &there = **(directions.end() - 2), &back = *directions.back();
            all[one]->connect(other, there, back);
            all[other]->connect(one, back, there);
        }
    }
    return directions;
}

}  // namespace flexring
