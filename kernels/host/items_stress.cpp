// Runs lists of items on CPU threads, with random residency, delays and grids: those of all ranks of some worlds, as a test writes them.
//
//     g++ -O1 -g -std=c++17 -ffp-contract=off -pthread -DFLEXRING_STRESSED -I kernels [-fsanitize=thread]
//         kernels/host/{items_stress,launch}.cpp
//     items_stress SEED CALLS FILE [RULE]
//
// FILE has numbers: of ranks, and for each rank its vectors and its list, as `read_rank` reads them. Elements are 32-bit integers. Each world
// makes CALLS equal calls, in which numbers of messages go on. RULE is the number of a rule that the kernels break; then the program
// must fail.
#include <algorithm>
#include <fstream>

#include "slow_ranks.h"

using namespace flexring;

namespace {

// As src/device/cuda/collective/layout.rs has them.
static_assert(sizeof(ProgramLink) == 72 && sizeof(ProgramItem) == 24 && sizeof(ProgramPlace) == 16, "sizes");
static_assert(sizeof(LinkCount) == 12 && sizeof(Program) == 80 && sizeof(CollectiveParameters) == 200, "sizes");

template <class T>
std::vector<T> numbers(std::istream& file) {
    u64 count = 0;
    file >> count;
    std::vector<T> read(count);
    for (T& number : read) {
        u64 bits = 0;
        file >> bits;
        number = static_cast<T>(bits);
    }
    return read;
}

class Rank {
  public:
    // Its input, its expected output; elements of the vector that both are in, or 0, and where in it they begin; elements of scratch
    // memory and of the copy of the input; by link the peer and the messages to and from it; items, places and waits.
    Rank(std::istream& file, u32 rank, u32 ranks) : rank_(rank), ranks_(ranks), links_(ranks) {
        input_ = numbers<u32>(file);
        expected_ = numbers<u64>(file);
        u64 scratch = 0, copied = 0, links = 0, items = 0, places = 0;
        file >> whole_ >> input_at_ >> output_at_ >> scratch >> copied >> links;
        std::vector<u32> peers;
        for (u64 nth = 0; nth < links; ++nth) {
            LinkCount count{};
            file >> count.link >> count.sends >> count.receives;
            counts_.push_back(count);
            peers.push_back(count.link);
        }
        file >> items;
        for (u64 nth = 0; nth < items; ++nth) {
            ProgramItem item{};
            file >> item.elements >> item.flags >> item.first_place >> item.first_wait >> item.sources >> item.destinations >> item.waits;
            items_.push_back(item);
        }
        file >> places;
        for (u64 nth = 0; nth < places; ++nth) {
            ProgramPlace place{};
            file >> place.kind >> place.link >> place.at;
            if (place.kind == kMessagePlace) place.link = peers.at(place.link);
            places_.push_back(place);
        }
        waits_ = numbers<u32>(file);
        check(!file.fail(), "the file is not complete");
        done_.resize(items_.size());
        scratch_.resize(scratch + 4), copy_.resize(copied + 4);
        program_.items = items_.data(), program_.places = places_.data(), program_.waits = waits_.data();
        program_.links = links_.data(), program_.counts = counts_.data(), program_.done = done_.data();
        program_.scratch = reinterpret_cast<u8*>(scratch_.data()), program_.copy = reinterpret_cast<u8*>(copy_.data());
        program_.item_count = static_cast<u32>(items_.size()), program_.link_count = static_cast<u32>(counts_.size());
    }
    CollectiveState& state() { return *memory_; }
    void connect(u32 peer, Direction& out, Direction& in) {
        links_[peer] = link_to(peer, out, in);
    }

    void run(u64 launch, Random& random) {
        std::vector<u32> input(input_), output(whole_ != 0 ? whole_ : expected_.size(), 0xdeadbeef);
        if (whole_ != 0) std::copy(input.begin(), input.end(), output.begin() + input_at_);
        u32* const result = output.data() + output_at_;
        CollectiveParameters call{};
        call.state = memory_.get();
        call.status = &status_;
        call.launch = launch;
        call.hash = launch * 7919;
        call.input = whole_ != 0 ? output.data() + input_at_ : input.data();
        call.output = result;
        call.factor = rank_ % 3 + 1;
        call.rank = rank_;
        call.ranks = ranks_;
        call.path = kListed;
        call.slices = 1;
        call.program = &program_;
        launch_slowly(kernel_named("flexring_collective_uint32"), call, random);
        ++steps;
        check(status_.failure == kNoFailure, "a call has failed");
        for (u64 nth = 0; nth < expected_.size(); ++nth) {
            if (result[nth] == expected_[nth] || expected_[nth] >> 32 != 0) continue;
            fail("rank " + std::to_string(rank_) + " of " + std::to_string(ranks_) + ", call " + std::to_string(launch) + ": element " +
                 std::to_string(nth) + " is " + std::to_string(result[nth]) + ", not " + std::to_string(expected_[nth]));
        }
    }

  private:
    u32 rank_, ranks_;
    std::vector<u32> input_, waits_, scratch_, copy_;
    // More than 32 bits for elements that are not the rank's.
    std::vector<u64> expected_;
    u64 whole_ = 0, input_at_ = 0, output_at_ = 0;
    std::vector<ProgramLink> links_;
    std::vector<LinkCount> counts_;
    std::vector<ProgramItem> items_;
    std::vector<ProgramPlace> places_;
    std::vector<u64> done_;
    Program program_{};
    CollectiveStatus status_{};
    std::unique_ptr<CollectiveState, Free> memory_ = new_state(0, kAllStages);
};

}  // namespace

int main(int count, char** arguments) {
    check(count >= 4, "SEED CALLS FILE");
    const u64 seed = std::strtoull(arguments[1], nullptr, 10), calls = std::strtoull(arguments[2], nullptr, 10);
    const u64 rule = count > 4 ? std::strtoull(arguments[4], nullptr, 10) : u64{kNoRule};
    check(rule < kRules, "there is no such rule");
    break_rule(static_cast<u32>(rule));
    scene = "a list";
    Watchdog watchdog(milliseconds(rule == kNoRule ? 20'000 : 1'000));
    std::ifstream file(arguments[3]);
    Random random(seed);
    u64 worlds = 0;
    for (u32 ranks; file >> ranks; ++worlds) {
        std::vector<std::unique_ptr<Rank>> all;
        for (u32 rank = 0; rank < ranks; ++rank) all.push_back(std::make_unique<Rank>(file, rank, ranks));
        const auto directions = connect_all(all, random);
        std::vector<std::thread> threads;
        for (u32 rank = 0; rank < ranks; ++rank) {
            threads.emplace_back([&, rank] {
                Random own(seed * 16 + rank + worlds * 1009);
                for (u64 call = 1; call <= calls; ++call) all[rank]->run(call, own);
            });
        }
        for (std::thread& thread : threads) thread.join();
    }
    check(worlds > 0, "the file has no world");
    std::printf("%llu worlds: every result is right\n", worlds);
}
