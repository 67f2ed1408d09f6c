// Moves messages between pairs of ranks on CPU threads, with random residency, delays and grids.
//
//     g++ -O1 -g -std=c++17 -ffp-contract=off -pthread -DFLEXRING_STRESSED -I kernels [-fsanitize=thread]
//         kernels/host/{transfers_stress,launch}.cpp
//     transfers_stress SEED WORLDS [RULE]
//
// Each world has some messages between collectives, in one order, which each rank divides into calls of its own. RULE is the number of a
// rule that the kernels break; then the program must fail. `kHeadersCompared` is one of them: in some worlds, one rank receives another
// length or type than is sent, or across a collective, which must be found before the receiver's memory is written.
#include <algorithm>
#include <memory>

#include "slow_ranks.h"

using namespace flexring;

namespace {

// As src/device/cuda/collective/layout.rs has them.
static_assert(sizeof(Transfer) == 48 && sizeof(Transfers) == 32, "sizes");

constexpr u64 kRoom = kSlotLength - kHeaderBytes;
constexpr u8 kMargin = 0xee;

struct Message {
    u32 id, from, to;
    u64 bytes, tag;
};
u8 byte_of(u32 id, u64 at) { return static_cast<u8>(id * 37 + at * 11 + at / 251); }

// Part of what one rank moves in a call.
struct Own {
    Message message;
    u32 kind;
    std::vector<u8> memory;
    u64 skew;
    Own(const Message& message, u32 kind, Random& random) : message(message), kind(kind), skew(random.one_in(2) ? 0 : random.below(16)) {
        memory.assign(2 * message.bytes + 128, kMargin);
        for (u64 at = 0; kind != kReceive && at < message.bytes; ++at) from()[at] = byte_of(message.id, at);
    }
    u8* from() { return memory.data() + 16 + (16 - reinterpret_cast<u64>(memory.data()) % 16) % 16 + skew; }
    // A copy within a rank writes behind what it reads.
    u8* into() { return kind == kOwnCopy ? from() + (message.bytes + 47) / 16 * 16 : from(); }
    void check_result() {
        if (kind == kSend) return;
        for (u64 at = 0; at < message.bytes; ++at) {
            check(into()[at] == byte_of(message.id, at), "a byte of message " + std::to_string(message.id) + " is wrong");
        }
        check(into()[message.bytes] == kMargin && into()[-1] == kMargin, "memory beside a message was written");
    }
};

struct Table {
    Transfers all;
    Transfer transfers[256];
};

class Rank {
  public:
    Rank(u32 rank, u32 ranks) : rank_(rank), ranks_(ranks), links_(ranks), taken_(2 + 256) {}
    CollectiveState& state() { return *memory_; }
    void connect(u32 peer, Direction& out, Direction& in) { links_[peer] = link_to(peer, out, in); }

    // Moves these; together with all ranks, if `collective`. False if a message was not the one that this rank expects.
    bool run(std::vector<Own>& own, bool collective, Random& random) {
        auto table = std::make_unique<Table>();
        table->all = Transfers{links_.data(), taken_.data(), 0, own.size()};
        std::vector<u32> sends(ranks_), receives(ranks_);
        for (u64 nth = 0; nth < own.size(); ++nth) {
            Own& one = own[nth];
            const u32 peer = one.kind == kSend ? one.message.to : one.message.from;
            const u32 count = static_cast<u32>(std::max<u64>(1, (one.message.bytes + kRoom - 1) / kRoom));
            u32& first = (one.kind == kSend ? sends : receives)[peer];
            u8* const from = one.kind == kReceive ? nullptr : one.from();
            u8* const into = one.kind == kSend ? nullptr : one.into();
            table->transfers[nth] = Transfer{from, into, one.message.bytes, one.message.tag, first, count, peer, one.kind};
            if (one.kind != kOwnCopy) first += count;
            table->all.messages += count;
        }
        CollectiveParameters call{};
        call.state = memory_.get();
        call.status = &status_;
        call.launch = ++launches_;
        call.hash = 7919;
        call.rank = rank_;
        call.ranks = ranks_;
        call.path = kTransfers;
        call.slices = collective;
        call.transfers = &table->all;
        launch_slowly(kernel_named("flexring_collective_uint8"), call, random);
        ++steps;
        if (status_.failure == kUnexpected) return false;
        check(status_.failure == kNoFailure || abandoned(), "a call has failed");
        if (status_.failure == kNoFailure) std::for_each(own.begin(), own.end(), [](Own& one) { one.check_result(); });
        return status_.failure == kNoFailure;
    }
    bool abandoned() const { return status_.failure == kAbandoned; }
    void abort() { __atomic_store_n(&status_.aborted, 1ull, __ATOMIC_RELEASE); }
    bool found() const { return status_.failure == kUnexpected; }

  private:
    u32 rank_, ranks_;
    u64 launches_ = 0;
    std::vector<ProgramLink> links_;
    std::vector<u64> taken_;
    CollectiveStatus status_{};
    std::unique_ptr<CollectiveState, Free> memory_ = new_state(0, 0);
};

struct Call {
    std::vector<Own> own;
    bool collective = false;
};

// Orders a call's messages in any way that leaves those of a link's direction in their order.
void shuffle(Call& call, Random& random) {
    const auto stays = [](const Own& one, const Own& other) {
        return one.kind == other.kind && one.message.from == other.message.from && one.message.to == other.message.to;
    };
    for (u64 swaps = 2 * call.own.size() * call.own.size(); call.own.size() > 1 && swaps > 0; --swaps) {
        Own& one = call.own[random.below(call.own.size() - 1)];
        if (!stays(one, *(&one + 1))) std::swap(one, *(&one + 1));
    }
}

// The messages of a world between collectives, and in collectives.
struct World {
    std::vector<std::vector<Call>> calls;
    // The receiver of a message that is not the one that it expects, if any.
    u32 wrong = ~0u;
};

World world_of(u32 ranks, bool differs, Random& random) {
    World world;
    world.calls.resize(ranks);
    u32 id = 0;
    const u32 sections = 2 + static_cast<u32>(random.below(3));
    const auto message = [&](u32 from, u32 to) {
        const u64 limit = random.one_in(4) ? 1 : random.one_in(3) ? 5000 : 700;
        Message made{++id, from, to, random.below(limit), 0};
        made.tag = made.bytes | 3ull << 56;
        return made;
    };
    const auto add = [&](Call& call, u32 rank, const Message& message) {
        if (message.from == message.to) {
            call.own.emplace_back(message, kOwnCopy, random);
        } else {
            call.own.emplace_back(message, rank == message.from ? kSend : kReceive, random);
        }
    };
    for (u32 section = 0; section < sections; ++section) {
        for (u32 rank = 0; rank < ranks; ++rank) world.calls[rank].emplace_back();
        // Of so many that a call has several windows of them, some.
        for (u64 nth = random.below(random.one_in(4) ? 120 : 24); nth > 0; --nth) {
            const Message made = message(static_cast<u32>(random.below(ranks)), static_cast<u32>(random.below(ranks)));
            for (u32 rank : {made.from, made.to}) {
                // The next call of this rank begins here, or after some more.
                if (random.one_in(3) && !world.calls[rank].back().own.empty()) world.calls[rank].emplace_back();
                Message expected = made;
                if (differs && world.wrong == ~0u && rank != made.from && random.one_in(3)) {
                    world.wrong = rank;
                    if (random.one_in(2)) {
                        expected.tag ^= 1ull << 57;
                    } else {
                        expected.bytes = made.bytes + 1, expected.tag = expected.bytes | 3ull << 56;
                    }
                }
                add(world.calls[rank].back(), rank, expected);
                if (made.from == made.to) break;
            }
        }
        if (section + 1 == sections) break;
        for (u32 rank = 0; rank < ranks; ++rank) {
            world.calls[rank].emplace_back();
            world.calls[rank].back().collective = true;
        }
        for (u32 from = 0; from < ranks; ++from) {
            for (u32 to = 0; to < ranks; ++to) {
                const Message made = message(from, to);
                add(world.calls[from].back(), from, made);
                if (from != to) add(world.calls[to].back(), to, made);
            }
        }
    }
    for (std::vector<Call>& calls : world.calls) {
        for (Call& call : calls) shuffle(call, random);
    }
    return world;
}

}  // namespace

int main(int count, char** arguments) {
    check(count >= 3, "SEED WORLDS");
    const u64 seed = std::strtoull(arguments[1], nullptr, 10), worlds = std::strtoull(arguments[2], nullptr, 10);
    const u64 rule = count > 3 ? std::strtoull(arguments[3], nullptr, 10) : u64{kNoRule};
    check(rule < kRules, "there is no such rule");
    break_rule(static_cast<u32>(rule));
    scene = "transfers";
    Watchdog watchdog(milliseconds(rule == kNoRule ? 20'000 : 1'000));
    Random random(seed);
    for (u64 nth = 0; nth < worlds; ++nth) {
        const u32 ranks = 1 + static_cast<u32>(random.below(5));
        World world = world_of(ranks, nth % 4 == 3, random);
        std::vector<std::unique_ptr<Rank>> all;
        for (u32 rank = 0; rank < ranks; ++rank) all.push_back(std::make_unique<Rank>(rank, ranks));
        const auto directions = connect_all(all, random);
        std::vector<std::thread> threads;
        for (u32 rank = 0; rank < ranks; ++rank) {
            threads.emplace_back([&, rank] {
                Random own(seed * 16 + rank + nth * 1009);
                for (Call& call : world.calls[rank]) {
                    if (call.own.empty() || all[rank]->run(call.own, call.collective, own)) continue;
                    for (auto& other : all) other->abort();
                    return;
                }
            });
        }
        for (std::thread& thread : threads) thread.join();
        for (u32 rank = 0; rank < ranks; ++rank) {
            check(all[rank]->found() == (world.wrong == rank), "a wrong message was not found, or a right one was taken for wrong");
        }
    }
    std::printf("%llu worlds: every message is right\n", worlds);
}
