// Streams, the points in them that others wait for, and the thread that runs host functions.
//
// Owns order and time: every stream is a thread that runs its work in order and sleeps for a random time before some of
// it, so that work not ordered by an event, a wait or a stream runs in any order. Must not know what work does.
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
#include "captures.h"

namespace sim {

struct Context;
using Lock = std::unique_lock<std::mutex>;

// A point in a stream. When it is reached, all work before it is complete.
struct Point {
    bool reached = false;
    std::chrono::steady_clock::time_point when;
    std::condition_variable changed;
};
using PointRef = std::shared_ptr<Point>;

struct Stream;

// Work of a graph, recorded by a capture. Complete when it is made, and shared by the graphs made from it.
struct Node {
    CUgraphNode handle;
    CUgraphNodeType type;
    // The driver function that recorded it.
    const char* what;
    std::function<CUresult(Stream&)> run;
    // The function of a kernel, which must not be unloaded.
    CUfunction kernel;
    std::vector<std::shared_ptr<const Node>> after;
};
using NodeRef = std::shared_ptr<const Node>;

struct Work {
    // The driver function that enqueued it.
    const char* what;
    // Runs without the lock. A result other than 0 breaks the context.
    std::function<CUresult(Stream&)> run;
    std::vector<PointRef> after;
    PointRef done;
    // Reached when later work in the same hardware queue may start: once this work has started, or, if it `blocks` its queue,
    // once it is done.
    PointRef dispatched;
    bool blocks = false;
    // Called with the lock held once it is done, or was dropped.
    std::function<void()> finally = nullptr;
};

struct Stream {
    CUstream handle;
    Context* context;
    unsigned flags;
    int priority;
    // The legacy default stream, which synchronizes with all streams that are not CU_STREAM_NON_BLOCKING.
    bool legacy;
    // While it captures: the capture, and the nodes that its next one depends on.
    SequenceRef sequence;
    std::vector<NodeRef> frontier;
    // Their handles, as cuStreamGetCaptureInfo returned them.
    std::vector<CUgraphNode> reported;
    // Unique in the process, as cuStreamGetId returns it.
    uint64_t id;

    std::deque<Work> queue;
    // The end of its last work.
    PointRef last;
    // What its current work waits for, and its name.
    PointRef held_by;
    const char* at = nullptr;
    // Ends after the queued work; and: drops the queued work.
    bool closing = false;
    std::atomic<bool> cancelled{false};
    bool finished = false;
    std::condition_variable arrived;
    std::mt19937_64 random;
    // Index of the hardware queue of its context that it uses.
    unsigned connection = 0;
    // In how many of 8 cases it sleeps before work.
    unsigned sloth;
    std::thread thread;

    Stream(CUstream handle, Context* context, unsigned flags, int priority, bool legacy);
    // Starts its thread; false if the system has no thread left.
    bool start();
    // Sleeps sometimes. Called by its own work only.
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
    // The point of its last record; null before the first, and if that was captured.
    PointRef point;
    // If its last record was captured: by what, and the nodes before it.
    SequenceRef sequence;
    std::vector<NodeRef> captured;
};
using EventRef = std::shared_ptr<Event>;

// Runs the host functions of all streams of a context, one after another.
class HostThread {
public:
    // Called by a stream's work: runs the function there, and waits for its end unless the stream is cancelled.
    void run(Stream& stream, CUhostFn function, void* data);
    // Runs the function there, later.
    void post(CUhostFn function, void* data);
    // Ends the thread. If it is inside a function and `patiently` is false, detaches it.
    void stop(Lock& lock, bool patiently);

private:
    struct Job {
        CUhostFn function;
        void* data;
        PointRef done;
    };
    PointRef add(CUhostFn function, void* data);
    void work();

    std::deque<Job> jobs_;
    std::condition_variable arrived_;
    std::thread thread_;
    bool stopping_ = false;
    bool busy_ = false;
};

// Enqueues work at the end of a stream, also ordered by the rules of the legacy default stream. In a stream
// that captures, all functions that enqueue record a node instead.
PointRef submit(Stream& stream, const char* what, std::function<CUresult(Stream&)> run,
                std::vector<PointRef> after = {});

// Enqueues work that waits for an external condition and so blocks later work in the stream's hardware queue.
void submit_wait(Stream& stream, const char* what, std::function<CUresult(Stream&)> run);

// Enqueues work that uses no hardware queue: work of a graph, or its end. `finally` is called with the lock
// held when it is over.
PointRef submit_unqueued(Stream& stream, const char* what, std::function<CUresult(Stream&)> run,
                         std::vector<PointRef> after, std::function<void()> finally = nullptr);

// Blocks the calling thread until this point is reached. Ends the process with a message if that takes SIMCUDA_HANG_S
// seconds.
void await(Lock& lock, PointRef point, const char* function);

// Waits until a stream has less than 1,024 queued operations, as CUDA's calls that enqueue work do.
void make_room(Lock& lock, const Stream& stream, const char* function);

// What the unfinished streams of a context do, for messages.
std::string story_of(const Context& context);

// Marks a point as reached.
void reach_point(const PointRef& point);

// Whether this thread is inside a host function.
bool inside_host_function();

}  // namespace sim
