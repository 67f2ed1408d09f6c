// What programs that play ranks on CPU threads have alike: random choices, a machine that is sometimes slow, and a watchdog.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <random>
#include <string>
#include <thread>

#include "kernels.h"

namespace flexring {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// What the watchdog looks at: the steps of all ranks, and what is played.
inline std::atomic<u64> steps{0};
inline std::atomic<const char*> scene{""};

[[noreturn]] inline void fail(const std::string& what) {
    std::fprintf(stderr, "failed: %s\n", what.c_str());
    std::fflush(stderr);
    _exit(1);
}
inline void check(bool holds, const std::string& what) {
    if (!holds) fail(what);
}

class Random {
  public:
    explicit Random(u64 seed) : bits_(seed * 0x9e3779b97f4a7c15ull + 1) {}
    u64 bits() { return bits_(); }
    u64 below(u64 limit) { return bits_() % limit; }
    bool one_in(u64 n) { return below(n) == 0; }

  private:
    std::mt19937_64 bits_;
};

// A machine whose addresses are those of the host. Sometimes it is slow.
class SlowMachine final : public Machine {
  public:
    SlowMachine(u64 seed, bool hurries) : random_(seed), hurries_(hurries) {}
    void* reach(void* at, u64, u32 alignment, bool) override {
        check(reinterpret_cast<u64>(at) % alignment == 0, "an address is not aligned to its elements");
        lag(16, 200);
        return at;
    }
    void* reach_shared(void* at, u64, bool) override { return at; }
    void end_reach() override { lag(16, 200); }
    void pause() override {
        if (++pauses_ % 16 == 0) {
            std::this_thread::sleep_for(microseconds(random_.below(30)));
        } else {
            std::this_thread::yield();
        }
    }
    void published(const void*) override { lag(300, 100); }

  private:
    void lag(u64 one_in, u64 longest) {
        if (!hurries_ && random_.one_in(one_in)) std::this_thread::sleep_for(microseconds(random_.below(longest)));
    }

    Random random_;
    bool hurries_;
    u64 pauses_ = 0;
};

// Ends the program where no rank makes a step for this long.
class Watchdog {
  public:
    explicit Watchdog(milliseconds patience)
        : thread_([this, patience] {
              u64 last = 0;
              auto since = std::chrono::steady_clock::now();
              while (!over_) {
                  std::this_thread::sleep_for(milliseconds(20));
                  const auto now = std::chrono::steady_clock::now();
                  if (steps != last) last = steps, since = now;
                  if (now - since > patience) fail(std::string("a call hangs in ") + scene.load());
              }
          }) {}
    ~Watchdog() {
        over_ = true;
        thread_.join();
    }

  private:
    std::atomic<bool> over_{false};
    std::thread thread_;
};

}  // namespace flexring
