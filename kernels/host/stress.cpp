// Plays the host against the resident kernels on CPU threads, with random work, residency and ends.
//
//     g++ -O1 -g -std=c++17 -ffp-contract=off -pthread [-fsanitize=thread] kernels/host/{stress,launch}.cpp -I kernels
//     stress SEED COMMUNICATORS
//
// Each communicator makes calls one after another until one of them is aborted. In a call the host publishes random
// descriptors on all rings, checks every result when it is reported, and frees its memory at once, so that ThreadSanitizer
// sees any access that the protocol does not order. Nothing but the protocol orders the threads of a call.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "kernels.h"

using namespace flexring;

namespace {

std::mt19937_64 random_bits;

u64 below(u64 limit) { return random_bits() % limit; }
bool one_in(u64 n) { return below(n) == 0; }

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "failed: %s\n", what.c_str());
    std::abort();
}

void check(bool holds, const char* what) {
    if (!holds) fail(what);
}

// A machine whose addresses are those of the host.
class PlainMachine final : public Machine {
  public:
    explicit PlainMachine(u64 seed) : random_(seed) {}
    void* reach(void* at, u64, u32 alignment, bool) override {
        check(reinterpret_cast<u64>(at) % alignment == 0, "an address is not aligned to its elements");
        // Sometimes a CTA is slow.
        if (random_() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
        return at;
    }
    void* reach_shared(void* at, u64, bool) override { return at; }
    void end_reach() override {}
    void pause(bool fetcher) override {
        const auto longest = fetcher ? 30 : 100;
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % longest));
    }
    void published(const void*) override {}

  private:
    std::minstd_rand random_;
};

// The CTAs of a launch. Only `resident` run at a time; some arrive late.
class Launch {
  public:
    Launch(Kernel kernel, const LaunchParameters& parameters, unsigned grid, unsigned resident) {
        for (unsigned nth = 0; nth < resident; ++nth) {
            const u64 seed = random_bits();
            const auto late = std::chrono::microseconds(one_in(2) ? 0 : below(one_in(8) ? 5000 : 300));
            threads_.emplace_back([=] {
                std::this_thread::sleep_for(late);
                PlainMachine machine(seed);
                for (unsigned cta; (cta = next_.fetch_add(1, std::memory_order_relaxed)) < grid;) {
                    run_cta(kernel, parameters, grid, cta, machine);
                }
            });
        }
    }
    ~Launch() {
        for (std::thread& thread : threads_) thread.join();
    }

  private:
    std::atomic<unsigned> next_{0};
    std::vector<std::thread> threads_;
};

// Bytes at a random offset of an allocation of their own.
class Vector {
  public:
    Vector(u64 bytes, u32 element, u32 skew)
        : memory_(std::make_unique<char[]>(bytes + 48)),
          at_(memory_.get() + (16 - reinterpret_cast<u64>(memory_.get()) % 16) % 16 + skew * element) {}
    char* at() const { return at_; }

  private:
    std::unique_ptr<char[]> memory_;
    char* at_;
};

// A published descriptor, and how to check its result.
class Job {
  public:
    virtual ~Job() = default;
    virtual std::vector<u64> operands() const = 0;
    virtual Descriptor descriptor() const = 0;
    virtual void check() const = 0;
};

class CopyJob final : public Job {
  public:
    CopyJob() : bytes_(below(9000)), from_(bytes_, 1, below(16)), into_(bytes_, 1, below(16)) {
        for (u64 i = 0; i < bytes_; ++i) from_.at()[i] = static_cast<char>(seed_ + i * 7 + i / 256);
        std::memset(into_.at(), 0, bytes_);
    }
    std::vector<u64> operands() const override { return {reinterpret_cast<u64>(from_.at())}; }
    Descriptor descriptor() const override {
        Descriptor job{};
        job.into = reinterpret_cast<u64>(into_.at());
        job.count = bytes_;
        job.tile = 16 * (1 + below(200));
        job.flags = kCopies | (one_in(2) ? kOnHost : 0);
        return job;
    }
    void check() const override {
        for (u64 i = 0; i < bytes_; ++i) {
            ::check(into_.at()[i] == static_cast<char>(seed_ + i * 7 + i / 256), "a copy has other bytes");
        }
    }

  private:
    char seed_ = static_cast<char>(below(256));
    u64 bytes_;
    Vector from_, into_;
};

enum class Op { Sum, Prod, Max, Min };

// Numbers are so small that floats are exact in any order; integers may wrap.
template <class T>
class ReduceJob final : public Job {
  public:
    explicit ReduceJob(Op op) : op_(op), count_(below(one_in(4) ? 4000 : 300)) {
        const u64 operands = 1 + below(one_in(3) ? 60 : 12);
        if (operands > 12) count_ %= 500;
        constexpr u32 in_granule = 16 / sizeof(T);
        const u32 alike = below(in_granule);
        const bool odd = one_in(2);
        auto skew = [&] { return odd ? static_cast<u32>(below(in_granule)) : alike; };
        expected_.resize(count_);
        for (u64 nth = 0; nth < operands; ++nth) {
            inputs_.emplace_back(count_ * sizeof(T), sizeof(T), skew());
            scaled_.push_back(one_in(3));
            T* at = reinterpret_cast<T*>(inputs_.back().at());
            for (u64 i = 0; i < count_; ++i) {
                at[i] = static_cast<T>(op == Op::Prod ? 1 + below(2) * (nth < 8) : below(9));
                const T scaled = static_cast<T>(at[i] * (scaled_[nth] ? 3 : 1));
                expected_[i] = nth == 0 ? scaled : combined(expected_[i], scaled);
            }
        }
        if (op == Op::Prod) scaled_.assign(operands, false), redo();
        divide_ = one_in(2) ? 0 : 1 + below(5);
        if (divide_ > 1) {
            for (T& value : expected_) value = static_cast<T>(value / static_cast<T>(divide_));
        }
        in_place_ = one_in(3);
        into_ = in_place_ ? inputs_[below(operands)].at() : (outputs_.emplace_back(count_ * sizeof(T), sizeof(T), skew()), outputs_[0].at());
    }
    std::vector<u64> operands() const override {
        std::vector<u64> words;
        for (u64 nth = 0; nth < inputs_.size(); ++nth) {
            words.push_back(reinterpret_cast<u64>(inputs_[nth].at()) | (scaled_[nth] ? kScaled : 0));
        }
        return words;
    }
    Descriptor descriptor() const override {
        Descriptor job{};
        job.into = reinterpret_cast<u64>(into_);
        job.count = count_;
        job.factor = 3;
        job.divide = divide_;
        job.operation = static_cast<u32>(op_);
        job.flags = one_in(2) ? kOnHost : 0;
        job.tile = 16 / sizeof(T) * (1 + below(100));
        return job;
    }
    void check() const override {
        for (u64 i = 0; i < count_; ++i) {
            if (reinterpret_cast<const T*>(into_)[i] != expected_[i]) {
                fail("element " + std::to_string(i) + " of " + std::to_string(count_) + " is wrong: " +
                     std::to_string(reinterpret_cast<const T*>(into_)[i]) + " not " + std::to_string(expected_[i]) +
                     ", " + std::to_string(inputs_.size()) + " operands");
            }
        }
    }

  private:
    T combined(T a, T b) const {
        switch (op_) {
            case Op::Sum: return static_cast<T>(a + b);
            case Op::Prod: return static_cast<T>(a * b);
            case Op::Max: return std::max(a, b);
            default: return std::min(a, b);
        }
    }
    void redo() {
        for (u64 i = 0; i < count_; ++i) {
            expected_[i] = reinterpret_cast<const T*>(inputs_[0].at())[i];
            for (u64 nth = 1; nth < inputs_.size(); ++nth) {
                expected_[i] = combined(expected_[i], reinterpret_cast<const T*>(inputs_[nth].at())[i]);
            }
        }
    }

    Op op_;
    u64 count_;
    std::vector<Vector> inputs_, outputs_;
    std::vector<bool> scaled_;
    std::vector<T> expected_;
    u32 divide_ = 0;
    bool in_place_ = false;
    char* into_ = nullptr;
};

template <class T>
std::unique_ptr<Job> reduction(Op op) { return std::make_unique<ReduceJob<T>>(op); }

struct Type {
    const char* name;
    std::unique_ptr<Job> (*reduction)(Op);
};
constexpr Type kTypes[] = {
    {"int8", reduction<signed char>}, {"uint8", reduction<u8>},         {"int32", reduction<int>},
    {"uint32", reduction<u32>},       {"int64", reduction<long long>},  {"uint64", reduction<u64>},
    {"float", reduction<float>},      {"double", reduction<double>},
};

// The host's side of a communicator.
class Communicator {
  public:
    Communicator() : gpu_(std::make_unique<GpuState>()), host_(std::make_unique<HostControl>()) {
        // Sometimes the indices are about to exceed those that fit into a word of `shares`.
        const u64 first = one_in(2) ? 0 : (1ull << 32) - below(300);
        for (int ring = 0; ring < kRings; ++ring) {
            host_->host.head[ring] = gpu_->line.head[ring] = head_[ring] = freed_[ring] = first;
        }
    }

    // A call. False if it was aborted.
    bool call() {
        ++call_;
        const Type& type = kTypes[below(std::size(kTypes))];
        const Op op = static_cast<Op>(below(4));
        const bool copies = one_in(6);
        const std::string name = std::string("flexring_") + (copies ? "copy" : type.name);
        const Kernel kernel = kernel_named(name.c_str());
        check(kernel != nullptr, "there is no such kernel");

        LaunchParameters parameters{};
        parameters.gpu = gpu_.get();
        parameters.host = host_.get();
        parameters.call = call_;
        const bool small = one_in(4);
        const u64 bytes = small ? 1 + below(5000) : 0;
        const Vector input(bytes, 1, below(16)), staged_input(bytes, 1, below(16));
        const Vector output(bytes, 1, below(16)), staged_output(bytes, 1, below(16));
        for (u64 i = 0; i < bytes; ++i) input.at()[i] = static_cast<char>(i * 3 + call_);
        if (small) {
            parameters.input = input.at(), parameters.staged_input = staged_input.at();
            parameters.output = output.at(), parameters.staged_output = staged_output.at();
            parameters.input_bytes = parameters.output_bytes = bytes;
        }
        const unsigned grid = 1 + below(one_in(50) ? 140 : 16), resident = one_in(3) ? 1 : 1 + below(grid);
        const u64 jobs = small ? 0 : one_in(3) ? below(4) : below(120);
        // After this number of reports.
        const u64 abort_after = one_in(12) ? below(jobs + 1) : std::numeric_limits<u64>::max();
        // Without waiting for the kernel's start.
        bool aborted = one_in(40);
        // Right after the call has finished, whose output is complete nevertheless.
        const bool aborted_later = one_in(12);
        {
            const Launch launch(kernel, parameters, grid, resident);
            while (!aborted && load(host_->kernel.started) < call_) nap();
            check(load(host_->kernel.started) <= call_, "a kernel that has not been launched has started");
            if (small && !aborted) {
                for (u64 i = 0; i < bytes; ++i) {
                    check(staged_input.at()[i] == input.at()[i], "the staged input has other bytes");
                    staged_output.at()[i] = static_cast<char>(staged_input.at()[i] + 1);
                }
            }
            u64 published = 0, reported = 0;
            while (reported < jobs && reported < abort_after && !aborted) {
                const u64 burst = one_in(4) ? jobs : 1 + below(3);
                for (u64 nth = 0; nth < burst && published < jobs; ++nth) {
                    const int ring = below(kRings);
                    auto job = copies || one_in(3) ? std::make_unique<CopyJob>() : type.reduction(op);
                    if (!publish(ring, std::move(job))) break;
                    ++published;
                }
                const u64 now = poll();
                reported += now;
                if (now == 0) nap();
            }
            aborted = aborted || reported >= abort_after;
            if (aborted) {
                store(host_->host.aborted, std::numeric_limits<u64>::max());
            } else {
                store(host_->host.finished, call_);
                if (aborted_later) store(host_->host.aborted, std::numeric_limits<u64>::max());
            }
            while (load(host_->kernel.ended) < call_) nap();
            // Nothing accesses memory any more, even before the threads are joined.
            for (auto& ring : pending_) {
                if (aborted) ring.clear();
            }
            if (small && !aborted) {
                for (u64 i = 0; i < bytes; ++i) {
                    check(output.at()[i] == static_cast<char>(input.at()[i] + 1), "the output has other bytes");
                }
            }
        }
        check(gpu_->arrived == 0 && gpu_->left == 0, "the counts of CTAs have not been reset");
        return !aborted && !aborted_later;
    }

    u64 calls() const { return call_; }

  private:
    static u64 load(const u64& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }
    static void store(u64& word, u64 value) { __atomic_store_n(&word, value, __ATOMIC_RELEASE); }
    static void nap() { std::this_thread::sleep_for(std::chrono::microseconds(below(40))); }

    struct Pending {
        u64 index;
        u64 entries;
        std::unique_ptr<Job> job;
    };

    // False if the ring is full.
    bool publish(int ring, std::unique_ptr<Job> job) {
        const std::vector<u64> operands = job->operands();
        Descriptor first = job->descriptor();
        first.operands = operands.size();
        first.tiles = first.count == 0 ? 1 : (first.count + first.tile - 1) / first.tile;
        std::vector<Descriptor> entries{first};
        for (u64 nth = 0; nth < operands.size(); ++nth) {
            if (nth < kFirstOperands) {
                entries[0].at[nth] = operands[nth];
                continue;
            }
            const u64 further = nth - kFirstOperands;
            if (further % kMoreOperands == 0) entries.emplace_back();
            reinterpret_cast<u64*>(&entries.back())[further % kMoreOperands] = operands[nth];
        }
        if (head_[ring] + entries.size() - freed_[ring] > kEntries) return false;
        for (u64 nth = 0; nth < entries.size(); ++nth) host_->ring[ring][(head_[ring] + nth) % kEntries] = entries[nth];
        pending_[ring].push_back({head_[ring], entries.size(), std::move(job)});
        head_[ring] += entries.size();
        store(host_->host.head[ring], head_[ring]);
        return true;
    }

    // The number of descriptors that were reported.
    u64 poll() {
        u64 reported = 0;
        for (int ring = 0; ring < kRings; ++ring) {
            while (!pending_[ring].empty()) {
                const Pending& oldest = pending_[ring].front();
                if (load(host_->done[ring][oldest.index % kEntries]) != oldest.index + 1) break;
                oldest.job->check();
                freed_[ring] += oldest.entries;
                pending_[ring].pop_front();
                ++reported;
            }
        }
        return reported;
    }

    std::unique_ptr<GpuState> gpu_;
    std::unique_ptr<HostControl> host_;
    u64 call_ = 0;
    std::array<u64, kRings> head_{}, freed_{};
    std::array<std::deque<Pending>, kRings> pending_;
};

}  // namespace

void check_shares() {
    for (u32 workers = 1; workers <= kMaxWorkers; ++workers) {
        for (u32 tiles : {1u, 2u, 7u, 8u, 9u, 16u, 17u, 100u, 256u, 1023u, 5000u}) {
            for (u64 index : {0ull, 1ull, 5ull, 255ull, (1ull << 32) - 1, (1ull << 32) + 77}) {
                for (u32 ring = 0; ring < kRings; ++ring) {
                    for (bool on_host : {false, true}) {
                        check(shares_cover(workers, tiles, ring, on_host, index), "a tile has no worker, or several");
                    }
                }
            }
        }
    }
}

int main(int count, char** arguments) {
    check_shares();
    const u64 seed = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 1;
    const u64 communicators = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 20;
    random_bits.seed(seed);
    u64 calls = 0;
    for (u64 nth = 0; nth < communicators; ++nth) {
        Communicator communicator;
        while (communicator.call()) {}
        calls += communicator.calls();
    }
    std::printf("%llu communicators, %llu calls: every result is right\n", communicators, calls);
}
