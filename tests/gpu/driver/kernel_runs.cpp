// Runs kernels on host threads; see kernel_runs.h.

#include "kernel_runs.h"

#include <algorithm>
#include <climits>
#include <csignal>
#include <cstring>
#include <list>

#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "world.h"

namespace sim {
namespace {

using flexring::u32;
using flexring::u64;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Thrown to end a CTA of a kernel that is broken or cancelled.
struct Left {};

// Threads that run one function after another, because a new thread for each CTA of each kernel takes too long. Never ended:
// a thread that has nothing to do waits for the next function.
class Pool {
public:
    void run(std::function<void()> function) {
        std::unique_lock<std::mutex> lock(mutex_);
        waiting_.push_back(std::move(function));
        if (idle_ >= waiting_.size()) return arrived_.notify_one();
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        std::thread([this] { work(); }).detach();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

private:
    [[noreturn]] void work() {
        prctl(PR_SET_NAME, "simulated CTA");
        prctl(PR_SET_TIMERSLACK, 1000);
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            ++idle_;
            arrived_.wait(lock, [this] { return !waiting_.empty(); });
            --idle_;
            std::function<void()> function = std::move(waiting_.front());
            waiting_.pop_front();
            lock.unlock();
            function();
            function = nullptr;
            lock.lock();
        }
    }

    std::mutex mutex_;
    std::condition_variable arrived_;
    std::deque<std::function<void()>> waiting_;
    size_t idle_ = 0;
};

Pool& pool() {
    static Pool* never_destroyed = new Pool;
    return *never_destroyed;
}

// What a CTA reads or writes at the moment, by alias.
struct Piece {
    const char* at;
    size_t bytes;
    bool written;
    bool races_with(const Piece& other) const {
        return (written || other.written) && at < other.at + other.bytes && other.at < at + bytes;
    }
};

class Cta;

// What all kernels of the process share.
struct Machines {
    std::mutex mutex;
    // What every CTA of every kernel accesses now.
    std::map<const Cta*, std::vector<Piece>> pieces;
    // By context: resident CTAs.
    std::map<const Context*, unsigned> resident;
    std::condition_variable left;
};

Machines& machines() {
    static Machines* never_destroyed = new Machines;
    return *never_destroyed;
}

// A launch whose stream has reached it.
class Run {
public:
    Run(Stream& stream, const KernelLaunch& launch) : launch(launch), stream_(stream), context_(*stream.context) {}

    CUresult run();

    // Breaks the kernel: its CTAs leave without writing any further word.
    void fail(CUresult code) {
        std::lock_guard<std::mutex> guard(mutex_);
        if (code_ == CUDA_SUCCESS) code_ = code;
        stop();
    }
    // Called at every step of a CTA. Throws if the CTA must leave.
    void step() {
        if (steps_left_ > 0 && --steps_left_ == 0) fail(injected_);
        if (stopped_) throw Left{};
    }
    Context& context() const { return context_; }
    // The memory must exist until the end of the kernel.
    void keep(const View& view) {
        std::lock_guard<std::mutex> guard(mutex_);
        for (const View& other : views_) {
            if (other.range == view.range) return;
        }
        views_.push_back(view);
    }

    const KernelLaunch& launch;

private:
    void stop() { stopped_ = true; }
    CUresult look_up();
    // The memory at an address that the parameters name.
    CUresult look_up(const void* at, size_t bytes, View& view);
    // Takes room for a CTA; false if the GPU has none.
    bool make_resident();
    void run_ctas(u64 seed);
    void await_room();
    void await_end();
    std::string story();

    Stream& stream_;
    Context& context_;
    // What it may access until its end, and where its control words are.
    std::vector<View> views_;
    char* state_ = nullptr;
    char* words_ = nullptr;

    std::mutex mutex_;
    std::condition_variable changed_;
    unsigned next_ = 0, resident_ = 0, ended_ = 0;
    CUresult code_ = CUDA_SUCCESS;
    std::atomic<bool> stopped_{false};
    // For an injected failure: the steps until it happens.
    std::atomic<long> steps_left_{0};
    CUresult injected_ = CUDA_SUCCESS;
};

// A CTA on its thread.
class Cta final : public flexring::Machine {
public:
    Cta(Run& run, u64 seed) : run_(run), random_(seed) {
        if (settings().delay_us) late_stores_ = static_cast<unsigned>(random_() % 4);
    }
    ~Cta() { forget_pieces(); }

    void* reach(void* at, u64 bytes, u32 alignment, bool write) override {
        run_.step();
        idle_ = 0;
        // Sometimes a CTA is slow.
        if (settings().delay_us && random_() % 32 == 0) {
            std::this_thread::sleep_for(microseconds(random_() % settings().delay_us));
        }
        const auto address = reinterpret_cast<CUdeviceptr>(at);
        const char* name = run_.launch.name.c_str();
        if (address % alignment != 0) {
            say(std::string(name) + ": " + hexadecimal(address) + " is not aligned to its elements");
            leave(CUDA_ERROR_MISALIGNED_ADDRESS);
        }
        const View view = look_up(address, bytes, write);
        views_.push_back(view);
        check_for_races({view.at, bytes, write});
        return view.at;
    }

    void* reach_shared(void* at, u64 bytes, bool write) override {
        run_.step();
        const View view = look_up(reinterpret_cast<CUdeviceptr>(at), bytes, write);
        run_.keep(view);
        return view.at;
    }

    void end_reach() override {
        forget_pieces();
        Lock lock(world().mutex);
        for (const View& view : views_) {
            if (view.gone()) die(run_.launch.name.c_str(), "memory was freed or unregistered while the kernel used it");
        }
        views_.clear();
    }

    void pause() override {
        run_.step();
        // The longer nothing has happened, the longer it sleeps.
        idle_ = std::min(idle_ + 5, 150u);
        std::this_thread::sleep_for(microseconds(idle_));
        run_.step();
    }

    void published(const void*) override {
        // Another rank sees some stores of a collective late.
        if (late_stores_ > 0 && random_() % 16 == 0) {
            --late_stores_;
            std::this_thread::sleep_for(microseconds(random_() % settings().delay_us));
        }
    }

private:
    [[noreturn]] void leave(CUresult code) {
        run_.fail(code);
        throw Left{};
    }

    View look_up(CUdeviceptr address, u64 bytes, bool write) {
        Lock lock(world().mutex);
        View view;
        const CUresult code =
            world().memory->reach(run_.context(), run_.launch.name.c_str(), address, bytes,
                                  write ? Access::Write : Access::Read, By::Kernel, view);
        if (code != CUDA_SUCCESS) {
            lock.unlock();
            leave(code);
        }
        return view;
    }

    // CTAs run in any order, so one must not write what another one reads or writes, nor what it reads itself, except for
    // exactly the same elements.
    void check_for_races(const Piece& piece) {
        std::lock_guard<std::mutex> guard(machines().mutex);
        for (const auto& [cta, pieces] : machines().pieces) {
            for (const Piece& other : pieces) {
                const bool in_place = cta == this && other.at == piece.at && other.bytes == piece.bytes;
                if (!in_place && piece.races_with(other)) die(run_.launch.name.c_str(), race_with(*cta, piece));
            }
        }
        machines().pieces[this].push_back(piece);
    }

    std::string race_with(const Cta& other, const Piece& piece) const {
        const std::string what = piece.written ? "writes to" : "reads";
        const std::string who = &other == this ? "itself accesses elsewhere"
                                : &other.run_ == &run_ ? "another tile of the same launch accesses"
                                                       : "a tile of another kernel accesses";
        return "a tile " + what + " memory that " + who + " at the same time";
    }

    void forget_pieces() {
        std::lock_guard<std::mutex> guard(machines().mutex);
        machines().pieces.erase(this);
    }

    Run& run_;
    std::minstd_rand random_;
    std::vector<View> views_;
    unsigned idle_ = 0;
    // How many stores it may delay.
    unsigned late_stores_ = 0;
};

// Runs a CTA to its end on this thread.
void run_one(const KernelLaunch& launch, unsigned cta, Cta& machine) {
    flexring::run_cta(launch.kernel, launch.parameters, launch.grid, cta, machine);
}

u64 value_of(const u64& word) { return __atomic_load_n(&word, __ATOMIC_RELAXED); }

std::string Run::story() {
    const auto& state = *reinterpret_cast<const flexring::CollectiveState*>(state_);
    const auto& status = *reinterpret_cast<const flexring::CollectiveStatus*>(words_);
    return "launch " + hexadecimal(launch.parameters.launch) + " of rank " + std::to_string(launch.parameters.rank) + ", owner " + hexadecimal(value_of(state.owner)) +
           ", epoch " + hexadecimal(value_of(state.epoch)) + ", waiting for " +
           hexadecimal(value_of(status.waiting_for)) + " in call " +
           std::to_string(value_of(status.waiting_epoch)) + ", failure " +
           std::to_string(value_of(status.failure)) + ", aborted " + std::to_string(value_of(status.aborted));
}

CUresult Run::look_up(const void* at, size_t bytes, View& view) {
    return world().memory->reach(context_, launch.name.c_str(), reinterpret_cast<CUdeviceptr>(at), bytes,
                                 Access::Read, By::Kernel, view);
}

// Only what belongs to the communicator: the kernel reaches parts of the vectors, and the states of peers.
CUresult Run::look_up() {
    const flexring::CollectiveParameters& parameters = launch.parameters;
    views_.resize(2);
    const CUresult code = look_up(parameters.state, sizeof *parameters.state, views_[0]);
    return code != CUDA_SUCCESS ? code : look_up(parameters.status, sizeof *parameters.status, views_[1]);
}

bool Run::make_resident() {
    std::lock_guard<std::mutex> guard(machines().mutex);
    unsigned& resident = machines().resident[&context_];
    if (resident >= settings().multiprocessors * ctas_per_multiprocessor(launch.block)) return false;
    ++resident;
    return true;
}

void Run::run_ctas(u64 seed) {
    while (true) {
        unsigned cta = 0;
        {
            std::lock_guard<std::mutex> guard(mutex_);
            if (next_ == launch.grid || stopped_) break;
            cta = next_++;
        }
        try {
            Cta machine(*this, seed + cta);
            run_one(launch, cta, machine);
        } catch (const Left&) {
        }
        std::lock_guard<std::mutex> guard(mutex_);
        ++ended_;
    }
    {
        std::lock_guard<std::mutex> guard(machines().mutex);
        --machines().resident[&context_];
        machines().left.notify_all();
    }
    std::lock_guard<std::mutex> guard(mutex_);
    --resident_;
    changed_.notify_all();
}

// Waits until the GPU has room for one CTA.
void Run::await_room() {
    const auto since = Clock::now();
    while (!make_resident()) {
        std::unique_lock<std::mutex> lock(machines().mutex);
        machines().left.wait_for(lock, milliseconds(5));
        lock.unlock();
        Lock all(world().mutex);
        if (stream_.cancelled || context_.error != CUDA_SUCCESS) return stop();
        if (settings().hang_s && Clock::now() - since > std::chrono::seconds(settings().hang_s)) {
            die(launch.name.c_str(), "waits for " + std::to_string(settings().hang_s) +
                                         " s already for a CTA to become resident: other kernels fill the GPU");
        }
    }
}

// Waits for the end of all CTAs; lets further ones become resident at random times.
void Run::await_end() {
    const auto since = Clock::now();
    // Half of the kernels keep as many CTAs as they began with.
    const bool grows = stream_.random() % 2;
    std::unique_lock<std::mutex> lock(mutex_);
    while (resident_ > 0) {
        changed_.wait_for(lock, milliseconds(1 + stream_.random() % 8));
        lock.unlock();
        bool over = stream_.cancelled;
        {
            Lock all(world().mutex);
            over = over || context_.error != CUDA_SUCCESS;
        }
        const bool more = grows && stream_.random() % 4 == 0 && !over;
        lock.lock();
        if (over) stop();
        if (more && resident_ > 0 && next_ < launch.grid && make_resident()) {
            ++resident_;
            pool().run([this, seed = stream_.random()] { run_ctas(seed); });
        }
        if (settings().hang_s && Clock::now() - since > std::chrono::seconds(settings().hang_s)) {
            const std::string ctas = "; " + std::to_string(resident_) + " CTAs resident, " +
                                     std::to_string(ended_) + " of " + std::to_string(launch.grid) + " ended";
            die(launch.name.c_str(),
                "runs for " + std::to_string(settings().hang_s) + " s already: " +
                    story() + ctas);
        }
    }
}

CUresult Run::run() {
    // The launch that loads the kernel.
    if (launch.parameters.launch == 0) {
        Cta machine(*this, 0);
        run_one(launch, 0, machine);
        return CUDA_SUCCESS;
    }
    {
        Lock lock(world().mutex);
        const CUresult code = look_up();
        if (code != CUDA_SUCCESS) return code;
        state_ = views_[0].at;
        words_ = views_[1].at;
        if (!views_[0].range->on_device())
            die(launch.name.c_str(), "the state of the communicator is not in GPU memory");
        if (!views_[1].range->on_host())
            die(launch.name.c_str(), "the control words are not in pinned host memory");
        injected_ = world().asked_to_fail("kernel");
        if (injected_ != CUDA_SUCCESS) steps_left_ = 1 + static_cast<long>(stream_.random() % 100);
    }
    unsigned long long calls = 20;
    __atomic_compare_exchange_n(&reinterpret_cast<flexring::CollectiveState*>(state_)->epoch, &calls,
                                calls + settings().calls_skipped, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    ++running_kernels;
    await_room();
    unsigned begin = 0;
    if (!stopped_) {
        const unsigned wanted = stream_.random() % 3 == 0 ? 1 : 1 + static_cast<unsigned>(stream_.random() % launch.grid);
        begin = 1;
        while (begin < wanted && make_resident()) ++begin;
    }
    resident_ = begin;
    for (unsigned nth = 0; nth < begin; ++nth) pool().run([this, seed = stream_.random()] { run_ctas(seed); });
    await_end();
    --running_kernels;
    Lock lock(world().mutex);
    for (const View& view : views_) {
        if (view.gone()) die(launch.name.c_str(), "memory was freed or unregistered while the kernel used it");
    }
    return code_;
}

}  // namespace

unsigned ctas_per_multiprocessor(unsigned block) {
    constexpr unsigned threads = 2048;
    return block == 0 || block > flexring::largest_block ? 0 : threads / block;
}

bool is_kernel(const std::string& name) { return flexring::kernel_named(name.c_str()); }

KernelLaunch read_launch(const char* function, const std::string& name, unsigned grid, unsigned block,
                         const void* parameters) {
    KernelLaunch launch{name, grid, block, flexring::kernel_named(name.c_str()), {}};
    std::memcpy(&launch.parameters, parameters, sizeof launch.parameters);
    const bool complete = launch.parameters.launch == 0 || (launch.parameters.state && launch.parameters.status);
    if (!complete) die(function, "the kernel of a call has no control words");
    return launch;
}

CUresult run_kernel(Stream& stream, const KernelLaunch& launch) { return Run(stream, launch).run(); }

}  // namespace sim
