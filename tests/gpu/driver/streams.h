// Streams, the points in them that others wait for, and the thread that runs host functions.
//
// Owns order and time: every stream is a thread that takes its work in turn and sleeps a random while before some of
// it, so that what is not ordered by an event, a wait or a stream happens in any order. Knows nothing of what work
// does.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "abi.h"

namespace sim {

struct Context;
using Lock = std::unique_lock<std::mutex>;

// A place in a stream: all work before it is done once it is reached.
struct Point {
    bool reached = false;
    std::chrono::steady_clock::time_point when;
    std::condition_variable changed;
};
using PointRef = std::shared_ptr<Point>;

struct Stream;

struct Work {
    // The function that asked for it.
    const char* what;
    // Runs without the lock. What it returns besides 0 breaks the context.
    std::function<CUresult(Stream&)> run;
    std::vector<PointRef> after;
    PointRef done;
};

enum class Capture { None = 0, Active = 1, Invalidated = 2 };

struct Stream {
    CUstream handle;
    Context* context;
    unsigned flags;
    int priority;
    // The legacy default stream, to which those that are not CU_STREAM_NON_BLOCKING keep an order.
    bool legacy;
    Capture capture = Capture::None;

    std::deque<Work> queue;
    // Where its last work ends.
    PointRef last;
    // Where its current work waits, and what that is.
    PointRef held_by;
    const char* at = nullptr;
    // No more work will come; and: what is queued shall not be done either.
    bool closing = false;
    std::atomic<bool> cancelled{false};
    bool finished = false;
    std::condition_variable arrived;
    std::mt19937_64 random;
    // Which of its priority's queues it puts its work in, where streams share them.
    unsigned connection = 0;
    // How often of 8 times it sleeps before work.
    unsigned sloth;
    std::thread thread;

    Stream(CUstream handle, Context* context, unsigned flags, int priority, bool legacy);
    // Lets it begin; false where the system has no thread for it.
    bool start();
    // Sleeps now and then; called by its own work only.
    void dawdle();
    bool orders_with_legacy() const { return !legacy && !(flags & CU_STREAM_NON_BLOCKING); }
    void cancel();

private:
    void work();
};
using StreamRef = std::shared_ptr<Stream>;

struct Event {
    CUevent handle;
    Context* context;
    unsigned flags;
    // Of its last record; null before the first.
    PointRef point;
};
using EventRef = std::shared_ptr<Event>;

// Runs the host functions of a context, one after the other whatever stream they are of.
class HostThread {
public:
    // From a stream's work: runs it there, and waits for its end unless the stream is cancelled.
    void run(Stream& stream, CUhostFn function, void* data);
    // Ends the thread; where it is inside a function and `patiently` is not asked for, leaves it to itself.
    void stop(Lock& lock, bool patiently);

private:
    struct Job {
        CUhostFn function;
        void* data;
        PointRef done;
    };
    void work();

    std::deque<Job> jobs_;
    std::condition_variable arrived_;
    std::thread thread_;
    bool stopping_ = false;
    bool busy_ = false;
};

// Puts work at the end of a stream, behind what the legacy default stream's rules say too.
PointRef submit(Stream& stream, const char* what, std::function<CUresult(Stream&)> run,
                std::vector<PointRef> after = {});

// The same for work that waits for what no stream knows: it holds up whatever comes later in the stream's queue.
void submit_wait(Stream& stream, const char* what, std::function<CUresult(Stream&)> run);

// Lets the calling thread wait, for this point even if its stream goes on meanwhile. Ends the process with a sentence
// where nothing comes for SIMCUDA_HANG_S seconds.
void await(Lock& lock, PointRef point, const char* function);

// Marks what was waited for as reached.
void reach_point(const PointRef& point);

// Whether this thread is inside a host function.
bool inside_host_function();

}  // namespace sim
