// Plays the ranks of a node that run the kernels of collective.cu on CPU threads, with random calls, grids, residency and delays.
//
//     g++ -O1 -g -std=c++17 -ffp-contract=off -pthread -DFLEXRING_STRESSED -I kernels [-fsanitize=thread]
//         kernels/host/{collective_stress,launch}.cpp
//     collective_stress SEED WORLDS [RULE]
//
// RULE is the number of a rule of the protocol that the kernels break. Then the program must fail.
//
// Nothing but the protocol orders the threads of different ranks. Every rank's elements have bits of their own, where the type has
// enough, so that a wrong sum shows whose elements are missing.
#include <algorithm>
#include <cmath>
#include <memory>

#include "slow_ranks.h"

using namespace flexring;

namespace {

u64 mixed(u64 a, u64 b, u64 c) {
    u64 bits = a * 0x9e3779b97f4a7c15ull ^ b * 0xc2b2ae3d27d4eb4full ^ c * 0x165667b19e3779f9ull;
    bits = (bits ^ bits >> 31) * 0xd6e8feb86659fd93ull;
    return bits ^ bits >> 29;
}

enum class Kind { Signed, Unsigned, Float, Bool };

// Elements as whole numbers, which all types here represent exactly.
struct Type {
    const char* name;
    u32 size;
    Kind kind;
    // Of a float: bits of the fraction and of the exponent. Of all: bits of each rank's elements, which do not overlap.
    u32 fraction, exponent;
    u32 digit;

    u64 encoded(double number) const {
        if (kind == Kind::Bool) return number != 0;
        if (kind != Kind::Float) return static_cast<u64>(static_cast<long long>(number)) & mask();
        if (number == 0) return 0;
        int power;
        const double mantissa = std::frexp(std::abs(number), &power) * 2;
        const u64 scaled = static_cast<u64>(std::ldexp(mantissa - 1, static_cast<int>(fraction)));
        const u64 biased = static_cast<u64>(power - 1 + (1 << (exponent - 1)) - 1);
        return (number < 0 ? 1ull << (size * 8 - 1) : 0) | biased << fraction | scaled;
    }
    u64 mask() const { return size == 8 ? ~0ull : (1ull << size * 8) - 1; }
    // An integer's value; it may have wrapped around.
    double value(u64 bits) const {
        if (kind == Kind::Signed && (bits >> (size * 8 - 1) & 1)) return -static_cast<double>((~bits & mask()) + 1);
        return static_cast<double>(bits & mask());
    }
};

constexpr Type kTypes[] = {
    {"int8", 1, Kind::Signed, 0, 0, 1},     {"uint8", 1, Kind::Unsigned, 0, 0, 1},  {"int16", 2, Kind::Signed, 0, 0, 1},
    {"uint16", 2, Kind::Unsigned, 0, 0, 1}, {"int32", 4, Kind::Signed, 0, 0, 3},    {"uint32", 4, Kind::Unsigned, 0, 0, 3},
    {"int64", 8, Kind::Signed, 0, 0, 3},    {"uint64", 8, Kind::Unsigned, 0, 0, 3}, {"half", 2, Kind::Float, 10, 5, 1},
    {"bfloat16", 2, Kind::Float, 7, 8, 1},  {"float", 4, Kind::Float, 23, 8, 3},    {"double", 8, Kind::Float, 52, 11, 3},
    // Sums of up to 8 are exact in both.
    {"float8e4m3", 1, Kind::Float, 3, 4, 0}, {"float8e5m2", 1, Kind::Float, 2, 5, 0}, {"bool", 1, Kind::Bool, 0, 0, 1},
};
constexpr const Type& kBytes = kTypes[1];

enum Collective { kAllReduce, kReduce, kReduceScatter, kBroadcast, kAllGather, kGather, kScatter, kAllToAll, kCollectives };

// A call that all ranks make. Lengths are in elements.
struct Call {
    Collective collective;
    Type type;
    u32 ranks, root;
    Operation operation;
    u64 count;
    double factor;
    // Aligned: all vectors begin at multiples of 16 bytes.
    bool divides, in_place, aligned;
    u32 path, slices;
    // By rank, in bits: whose vectors are in memory that all ranks have open.
    u32 registered;
    // Makes its numbers different from those of other calls.
    u64 salt;

    static Call random(Random& random, u32 ranks, u32 short_bytes) {
        Call call{};
        call.collective = random.one_in(3) ? kAllReduce : static_cast<Collective>(random.below(kCollectives));
        call.ranks = ranks;
        call.root = random.below(ranks);
        call.salt = random.bits();
        const bool reduces = call.reduces();
        call.type = reduces ? kTypes[random.below(std::size(kTypes))] : kBytes;
        const bool whole = call.type.kind != Kind::Float && call.type.kind != Kind::Bool;
        call.operation = random.one_in(2) ? kSum : static_cast<Operation>(random.below(whole ? 7 : 4));
        call.factor = reduces && call.operation == kSum && call.type.kind != Kind::Bool && random.one_in(4) ? 2 : 1;
        call.divides = reduces && call.operation == kSum && random.one_in(4);
        // Floats are divided exactly, if at all.
        if (call.type.kind == Kind::Bool || (!whole && (ranks & (ranks - 1)) != 0)) call.divides = false;
        const u64 most = short_bytes / call.type.size;
        const u64 lengths[] = {random.below(9), random.below(most + 1), most, most + 1, random.below(12000), random.below(40)};
        call.count = lengths[random.below(std::size(lengths))];
        call.path = call.count * call.type.size <= short_bytes && !random.one_in(3) ? kShort : kStaged;
        call.slices = 1 + random.below(random.one_in(3) ? 8 : 3);
        call.in_place = random.one_in(3);
        call.registered = random.one_in(4) ? 0 : random.one_in(4) ? random.bits() : ~0u;
        if (random.one_in(4)) call.make_direct();
        return call;
    }
    // Has ranks access each other's vectors.
    void make_direct() {
        const u32 granule = 16 / type.size;
        count = (count + granule) / granule * granule;
        factor = 1;
        path = kStaged;
        registered = ~0u;
        aligned = true;
        in_place = in_place && collective != kAllToAll;
    }
    bool reduces() const { return collective <= kReduceScatter; }
    bool differs_by_receiver() const { return collective == kReduceScatter || collective == kScatter || collective == kAllToAll; }
    bool differs_by_sender() const { return collective == kAllGather || collective == kGather || collective == kAllToAll; }
    u32 all() const { return (1u << ranks) - 1; }
    u32 sends(u32 rank) const {
        if (collective == kBroadcast || collective == kScatter) return rank == root ? all() : 0;
        return collective == kReduce || collective == kGather ? 1u << root : all();
    }
    u32 receives(u32 rank) const {
        if (collective == kBroadcast || collective == kScatter) return 1u << root;
        return (collective != kReduce && collective != kGather) || rank == root ? all() : 0;
    }
    u64 hash() const { return mixed(mixed(collective * 256 + path, count, slices), salt, root); }

    // The element that `from` sends to `to`, as a number.
    double element(u32 from, u32 to, u64 nth) const {
        const u64 bits = mixed(salt + nth, from, differs_by_receiver() ? to + 1 : 0);
        if (!reduces()) return static_cast<double>(bits & 0xff);
        if (operation == kProd) return static_cast<double>(1 + (bits & 1));
        if (operation != kSum && type.kind == Kind::Float) return static_cast<double>(bits % 8);
        if (operation != kSum) return static_cast<double>(bits % 128);
        return static_cast<double>((bits & ((1 << std::max(type.digit, 1u)) - 1)) << type.digit * from);
    }
    // What `to` has to get from all, in the element's bits.
    u64 reduced(u32 to, u64 nth) const {
        u64 whole = 0;
        double number = 0;
        for (u32 from = 0; from < ranks; ++from) {
            const double next = element(from, to, nth) * factor;
            const u64 bits = type.kind == Kind::Bool ? next != 0 : static_cast<u64>(next);
            if (from == 0) {
                whole = bits, number = next;
                continue;
            }
            switch (operation) {
                case kSum: whole += bits, number += next; break;
                case kProd: whole *= bits, number *= next; break;
                case kMax: whole = std::max(whole, bits), number = std::max(number, next); break;
                case kMin: whole = std::min(whole, bits), number = std::min(number, next); break;
                case kAnd: whole &= bits; break;
                case kOr: whole |= bits; break;
                case kXor: whole ^= bits; break;
            }
        }
        if (type.kind == Kind::Bool) return whole != 0;
        if (type.kind == Kind::Float) return type.encoded(divides ? number / ranks : number);
        if (!divides) return whole & type.mask();
        return static_cast<u64>(static_cast<long long>(type.value(whole & type.mask()) / ranks)) & type.mask();
    }
};

// Bytes at a random offset, with a margin of others around them.
class Vector {
  public:
    Vector(u64 bytes, u32 element, bool aligned, Random& random)
        : memory_(bytes + 64), at_(memory_.data() + 16 + random.below(16 / element) * element), bytes_(bytes) {
        at_ -= reinterpret_cast<u64>(at_) % (aligned ? 16 : element);
        std::fill(memory_.begin(), memory_.end(), kMargin);
    }
    u8* at() const { return at_; }
    bool is_intact_around() const {
        const auto is_margin = [](u8 byte) { return byte == kMargin; };
        return std::all_of(memory_.data(), static_cast<const u8*>(at_), is_margin) &&
               std::all_of(static_cast<const u8*>(at_) + bytes_, memory_.data() + memory_.size(), is_margin);
    }
    static constexpr u8 kMargin = 0xa5;

  private:
    std::vector<u8> memory_;
    u8* at_;
    u64 bytes_;
};

// The vectors of a rank in a call.
class Vectors {
  public:
    Vectors(const Call& call, u32 rank, Random& random)
        : call_(call), rank_(rank), block_(call.count * call.type.size),
          sends_(call.sends(rank) == 0 ? 0 : call.differs_by_receiver() ? call.ranks : 1),
          receives_(call.receives(rank) == 0 ? 0 : call.differs_by_sender() ? call.ranks : 1),
          input_(sends_ * block_, call.type.size, call.aligned || random.one_in(2), random),
          output_(receives_ * block_, call.type.size, call.aligned || random.one_in(2), random) {
        into_ = output_.at();
        from_ = input_.at();
        if (call.in_place && sends_ != 0 && receives_ != 0) {
            // The smaller one is in the larger one.
            if (sends_ >= receives_) {
                into_ = from_ + (sends_ > receives_ ? rank * block_ : 0);
            } else {
                from_ = into_ + rank * block_;
            }
        }
        for (u32 to = 0; to < sends_; ++to) {
            for (u64 nth = 0; nth < call.count; ++nth) {
                const u64 bits = call.type.encoded(call.element(rank, to, nth));
                std::memcpy(from_ + to * block_ + nth * call.type.size, &bits, call.type.size);
            }
        }
        before_.assign(into_, into_ + receives_ * block_);
    }
    const void* from() const { return from_; }
    void* into() const { return into_; }

    void check_unchanged() const {
        check(std::equal(before_.begin(), before_.end(), into_), "a call that failed has changed the output");
    }
    // Checks each element, which may also be as it was before if `some`.
    void check_result(bool some = false) const {
        check(input_.is_intact_around() && output_.is_intact_around(), "bytes around a vector have changed");
        const u32 size = call_.type.size;
        for (u32 block = 0; block < receives_; ++block) {
            for (u64 nth = 0; nth < call_.count; ++nth) {
                u64 is = 0, must = 0;
                const u64 at = block * block_ + nth * size;
                std::memcpy(&is, into_ + at, size);
                if (call_.reduces()) {
                    must = call_.reduced(rank_, nth);
                } else {
                    const u32 from = call_.differs_by_sender() ? block : call_.root;
                    must = call_.type.encoded(call_.element(from, rank_, nth));
                }
                if (is == must || (some && std::memcmp(before_.data() + at, into_ + at, size) == 0)) continue;
                std::string text = "rank " + std::to_string(rank_) + " of " + std::to_string(call_.ranks) + ", collective " +
                                   std::to_string(call_.collective) + " of " + call_.type.name + ", path " +
                                   std::to_string(call_.path) + ", operation " + std::to_string(call_.operation) + ", " +
                                   std::to_string(call_.count) + " elements in " + std::to_string(call_.slices) + " slices: block " +
                                   std::to_string(block) + ", element " + std::to_string(nth) + " is " + std::to_string(is) +
                                   ", not " + std::to_string(must) + ", of";
                for (u32 from = 0; from < call_.ranks; ++from) {
                    text += " " + std::to_string(call_.type.encoded(call_.element(from, rank_, nth)));
                }
                fail(text);
            }
        }
    }

  private:
    const Call call_;
    u32 rank_;
    u64 block_;
    u32 sends_, receives_;
    Vector input_, output_;
    u8 *from_, *into_;
    std::vector<u8> before_;
};

// The memory of a rank, and its side of a call.
class Rank {
  public:
    Rank(u32 rank, u32 ranks, u32 short_bytes)
        : rank_(rank),
          ranks_(ranks),
          short_bytes_(short_bytes),
          memory_(new_state(4ull * ranks * short_bytes, kAllStages)),
          status_(std::make_unique<CollectiveStatus>()) {}
    CollectiveState& state() const { return *memory_; }
    CollectiveStatus& status() const { return *status_; }
    Packet* inboxes() const { return reinterpret_cast<Packet*>(memory_.get() + 1); }
    u64 packets() const { return 2ull * ranks_ * (short_bytes_ / 8); }

    u64 failure() const { return __atomic_load_n(&status_->failure, __ATOMIC_ACQUIRE); }
    void abort() { __atomic_store_n(&status_->aborted, 1, __ATOMIC_RELEASE); }

    // Has the vectors of the next call in allocations that all ranks have open, or not. Each one is an allocation here.
    void register_memory(const Vectors& vectors, const std::vector<std::unique_ptr<Rank>>& all, bool is_registered) {
        is_registered_ = is_registered;
        if (!is_registered) return;
        number_ = (number_ + 1) % (kMostMemories / 2);
        for (const auto& rank : all) {
            for (u32 kind = 0; kind < kPlaces; ++kind) {
                const void* const vector = kind == 0 ? vectors.from() : vectors.into();
                const u64 base = reinterpret_cast<u64>(vector) - kBefore;
                __atomic_store_n(&rank->state().memories[rank_][number_ * kPlaces + kind], base, __ATOMIC_RELAXED);
            }
        }
    }
    void withdraw() {
        for (u32 kind = 0; kind < kPlaces; ++kind) {
            __atomic_store_n(&state().memories[rank_][number_ * kPlaces + kind], 0, __ATOMIC_RELAXED);
        }
    }

    // From now on another kernel may run and end at any time.
    void expect_overlap() { overlaps_ = true; }

    // Runs a kernel to its end, with CTAs of which a random number is resident.
    void run(const Call& call, const Vectors& vectors, u64 hash, u64 launch, Random& random, bool hurries) {
        CollectiveParameters parameters{};
        parameters.state = memory_.get();
        parameters.status = status_.get();
        parameters.launch = launch;
        parameters.hash = hash;
        for (u32 nth = 0; nth < kCallWords; ++nth) parameters.words[nth] = mixed(hash, nth, 1);
        parameters.input = vectors.from();
        parameters.output = vectors.into();
        for (u32 kind = 0; kind < kPlaces; ++kind) parameters.places[kind] = place(call, vectors, kind);
        parameters.factor = call.factor;
        parameters.count = call.count;
        parameters.sends = call.sends(rank_);
        parameters.receives = call.receives(rank_);
        const u64 block = call.count * call.type.size;
        parameters.send_stride = call.differs_by_receiver() ? block : 0;
        parameters.receive_stride = call.differs_by_sender() ? block : 0;
        parameters.reduces = call.reduces();
        parameters.operation = call.operation;
        parameters.divide = call.divides ? call.ranks : 0;
        parameters.scales = call.factor != 1;
        parameters.rank = rank_;
        parameters.ranks = ranks_;
        parameters.path = call.path;
        parameters.slices = call.slices;
        parameters.short_bytes = short_bytes_;
        parameters.reports = random.one_in(2);
        const Kernel kernel = kernel_named((std::string("flexring_collective_") + call.type.name).c_str());
        check(kernel != nullptr, "there is no such kernel");

        launch_slowly(kernel, parameters, random, hurries, [&](std::vector<std::thread>& others) {
            // The host may end the use of the memory at any time. What the call has begun with stays there.
            if (random.one_in(8)) others.emplace_back([this, delay = random.below(300)] {
                std::this_thread::sleep_for(microseconds(delay));
                withdraw();
            });
        });
        if (parameters.reports && failure() == kNoFailure) {
            const u64 completed = status_->completed;
            check(completed == launch || (overlaps_ && completed != 0), "the end was not reported");
        }
        ++steps;
    }

  private:
    static constexpr u64 kBefore = 48;
    // As the host chooses it: shape.rs.
    u64 place(const Call& call, const Vectors& vectors, u32 kind) const {
        const u64 vector = reinterpret_cast<u64>(kind == 0 ? vectors.from() : vectors.into());
        const bool is_needed = kind == 0 ? call.sends(rank_) != 0 : call.collective == kAllReduce;
        const u64 aligned = (call.reduces() && call.receives(rank_) != 0 ? reinterpret_cast<u64>(vectors.into()) : 0) |
                            call.count * call.type.size;
        if (aligned % 16 != 0) return 0;
        if (!is_needed) return kPlaced;
        if (!is_registered_ || vector % 16 != 0 || call.path != kStaged || call.factor != 1) return 0;
        if (call.collective == kAllToAll && call.in_place) return 0;
        return kPlaced | kInMemory | static_cast<u64>(number_ * kPlaces + kind) << kOffsetBits | kBefore;
    }
    u32 rank_, ranks_, short_bytes_;
    u32 number_ = 0;
    bool overlaps_ = false;
    bool is_registered_ = false;
    std::unique_ptr<CollectiveState, Free> memory_;
    std::unique_ptr<CollectiveStatus> status_;
};

class World {
  public:
    World(u32 ranks, u32 short_bytes, u64 epoch) : short_bytes_(short_bytes) {
        for (u32 rank = 0; rank < ranks; ++rank) ranks_.push_back(std::make_unique<Rank>(rank, ranks, short_bytes));
        for (auto& rank : ranks_) {
            rank->state().epoch = epoch;
            for (u32 peer = 0; peer < ranks; ++peer) rank->state().peers[peer] = &ranks_[peer]->state();
        }
    }
    u32 ranks() const { return static_cast<u32>(ranks_.size()); }
    u32 short_bytes() const { return short_bytes_; }
    Rank& rank(u32 rank) { return *ranks_[rank]; }

    // Runs a kernel of a rank, whose vectors may be in memory that all ranks have open.
    void run(u32 rank, const Call& call, const Vectors& vectors, u64 launch, Random& random, bool hurries) {
        ranks_[rank]->register_memory(vectors, ranks_, (call.registered >> rank & 1) != 0);
        ranks_[rank]->run(call, vectors, call.hash(), launch, random, hurries);
    }
    // Runs `host` for each rank, on a thread each.
    template <class Host>
    void run(Host host) {
        std::vector<std::thread> threads;
        for (u32 rank = 0; rank < ranks(); ++rank) threads.emplace_back([=] { host(rank); });
        for (std::thread& thread : threads) thread.join();
    }
    // What calls with other numbers have left in inboxes and entries 2^31 calls ago.
    void litter(Random& random, u64 epoch) {
        const auto stale = [&](Packet& packet, u32 parity) {
            const u64 flag = 1ull << 31 | ((epoch + 2 - parity + random.below(8) * 2) & 0x7fffffff);
            packet.half[0] = packet.half[1] = random.bits() << 32 | flag;
        };
        for (auto& rank : ranks_) {
            for (u64 nth = 0; nth < rank->packets(); ++nth) stale(rank->inboxes()[nth], nth >= rank->packets() / 2);
            for (u32 nth = 0; nth < 2 * kMostSlices * kMostRanks; ++nth) {
                const u32 parity = nth / kMostRanks / kMostSlices;
                for (Packet& packet : rank->state().entry[parity][nth / kMostRanks % kMostSlices][nth % kMostRanks]) stale(packet, parity);
            }
        }
    }

  private:
    u32 short_bytes_;
    std::vector<std::unique_ptr<Rank>> ranks_;
};

void nap(Random& random) {
    if (random.one_in(8)) std::this_thread::sleep_for(microseconds(random.below(200)));
}

// Calls one after another, from this epoch on.
void play(u64 seed, u32 calls, bool wraps) {
    scene = "calls";
    Random random(seed);
    const u32 ranks = 2 + random.below(random.one_in(4) ? 7 : 3);
    const u64 epoch = wraps ? (1ull << 31) * (1 + random.below(3)) - 1 - random.below(8) : random.below(1000);
    World world(ranks, 256 * (1 + random.below(8)), epoch);
    // Those of the first calls behind the wrap, of both parities.
    if (wraps) world.litter(random, 1ull << 31);
    std::vector<Call> all;
    for (u32 nth = 0; nth < calls; ++nth) all.push_back(Call::random(random, ranks, world.short_bytes()));
    world.run([&](u32 rank) {
        Random own(seed * 16 + rank + 1);
        for (u32 nth = 0; nth < calls; ++nth) {
            const Vectors vectors(all[nth], rank, own);
            nap(own);
            world.run(rank, all[nth], vectors, nth + 1, own, own.one_in(2));
            check(world.rank(rank).failure() == kNoFailure, "a call has failed");
            vectors.check_result();
        }
        check(world.rank(rank).state().epoch == epoch + calls, "calls are not counted");
        check(world.rank(rank).state().owner == 0, "a kernel still runs");
    });
}

// One rank makes another call. All must see that, before any output changes.
void mismatch(u64 seed) {
    scene = "a mismatch";
    Random random(seed);
    const u32 ranks = 2 + random.below(3), other = random.below(ranks), before = random.below(3);
    World world(ranks, 1024, random.below(1000));
    std::vector<Call> all;
    for (u32 nth = 0; nth <= before; ++nth) all.push_back(Call::random(random, ranks, world.short_bytes()));
    Call divergent = Call::random(random, ranks, world.short_bytes());
    if (random.one_in(2)) all.back().make_direct(), divergent.make_direct();
    world.run([&](u32 rank) {
        Random own(seed * 16 + rank + 1);
        for (u32 nth = 0; nth < before; ++nth) {
            const Vectors vectors(all[nth], rank, own);
            world.run(rank, all[nth], vectors, nth + 1, own, own.one_in(2));
            vectors.check_result();
        }
        const Call& call = rank == other ? divergent : all[before];
        const Vectors vectors(call, rank, own);
        world.run(rank, call, vectors, before + 1, own, own.one_in(2));
        check(world.rank(rank).failure() == kMismatch, "a mismatch was not seen");
        vectors.check_unchanged();
        const CollectiveStatus& status = world.rank(rank).status();
        check(rank == other ? status.failed_rank != other : status.failed_rank == other, "a mismatch names another rank");
        const u64 theirs = rank == other ? all[before].hash() : divergent.hash();
        for (u32 nth = 0; nth < kCallWords; ++nth) {
            check(status.their_words[nth] == mixed(theirs, nth, 1), "a mismatch names other words");
        }
        // Later calls leave at once, and nothing is reported twice.
        world.run(rank, call, vectors, before + 2, own, true);
        check(world.rank(rank).failure() == kMismatch, "a failure is final");
        check(world.rank(rank).state().owner == 0, "a kernel still runs");
        vectors.check_unchanged();
    });
}

// Rank 0 runs two kernels at the same time, whose calls are equal, so that either may be the first one. Each gives a right result or
// none, and if they overlapped, that is reported.
void overlap(u64 seed) {
    scene = "an overlap";
    Random random(seed);
    const u32 ranks = 2 + random.below(2);
    // Whether they certainly overlap, because the other ranks wait for the report.
    const bool certain = random.one_in(2);
    World world(ranks, 1024, random.below(1000));
    const Call call = Call::random(random, ranks, world.short_bytes());
    std::atomic<bool> failed{false};
    world.rank(0).expect_overlap();
    world.run([&](u32 rank) {
        Random own(seed * 16 + rank + 1), another(seed * 32 + rank);
        const Vectors one(call, rank, own), two(call, rank, own);
        Rank& me = world.rank(rank);
        const auto run = [&](const Vectors& vectors, u64 launch, Random& random) {
            nap(random);
            me.run(call, vectors, call.hash(), launch, random, random.one_in(2));
            if (me.failure() == kNoFailure) return;
            check(rank != 0 || me.failure() == kOverlap || failed, "two kernels at the same time were reported as something else");
            std::this_thread::sleep_for(milliseconds(random.below(3)));
            failed = true;
            for (u32 peer = 0; peer < ranks; ++peer) world.rank(peer).abort();
        };
        if (rank == 0) {
            std::thread other([&] { run(two, 2, another); });
            run(one, 1, own);
            other.join();
            check(!certain || me.failure() == kOverlap, "two kernels at the same time were not seen");
        } else {
            while (certain && world.rank(0).failure() == kNoFailure) std::this_thread::sleep_for(microseconds(50));
            run(one, 1, own);
            run(two, 2, own);
        }
        one.check_result(failed);
        two.check_result(failed);
    });
}

// A kernel does nothing once the communicator is closed. One that waits reports the rank that it waits for, and leaves when the host wants it to.
void closed_and_abandoned(u64 seed) {
    scene = "the end";
    Random random(seed);
    const u32 ranks = 2 + random.below(3), missing = random.below(ranks);
    World world(ranks, 1024, random.below(1000));
    Call call = Call::random(random, ranks, world.short_bytes());
    // So that no rank waits for one that waits in another slice.
    call.slices = 1;
    world.rank(missing).state().closed = 1;
    world.run([&](u32 rank) {
        Random own(seed * 16 + rank + 1);
        const Vectors vectors(call, rank, own);
        Rank& me = world.rank(rank);
        if (rank == missing) {
            me.run(call, vectors, call.hash(), 1, own, true);
            check(me.failure() == kClosed, "a closed communicator was not seen");
        } else {
            std::thread host([&] {
                // Others may be late.
                u64 what = 0;
                while (__atomic_load_n(&me.status().waiting_epoch, __ATOMIC_ACQUIRE) == 0 || what != (kWaitEntry << 16 | missing)) {
                    std::this_thread::sleep_for(microseconds(300));
                    what = __atomic_load_n(&me.status().waiting_for, __ATOMIC_RELAXED);
                }
                me.abort();
            });
            me.run(call, vectors, call.hash(), 1, own, true);
            host.join();
            check(me.failure() == kAbandoned && me.status().failed_rank == missing, "a kernel has not left");
            check(me.status().waiting_epoch == 0, "a kernel waits after its end");
        }
        vectors.check_unchanged();
        check(me.state().owner == 0, "a kernel still runs");
    });
}

}  // namespace

int main(int count, char** arguments) {
    const auto argument = [&](int nth, u64 otherwise) { return count > nth ? std::strtoull(arguments[nth], nullptr, 10) : otherwise; };
    const u64 seed = argument(1, 1), worlds = argument(2, 10), rule = argument(3, kNoRule);
    check(rule < kRules, "there is no such rule");
    break_rule(static_cast<u32>(rule));
    Watchdog watchdog(milliseconds(rule == kNoRule ? 20'000 : 1'000));
    for (u64 nth = 0; nth < worlds; ++nth) {
        const u64 at = seed * 1'000'003 + nth * 17;
        play(at, 40, false);
        play(at + 1, 100, true);
        mismatch(at + 2);
        overlap(at + 3);
        closed_and_abandoned(at + 4);
    }
    std::printf("%llu worlds, %llu kernels: every result is right\n", worlds, steps.load());
}
