// The whole simulation: its global lock, the contexts, the handles, and the checks at the start of every driver function.
//
// Owns the lifetime of contexts, their locks, and the rules for all calls: the library must be initialised, a context must be
// current and not broken, host functions and flexring's workers must not call the driver. Must not know single functions of the driver.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "abi.h"
#include "graphs.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"

namespace sim {

// The lock of a context. A call holds it from beginning to end, also while it waits for the GPU, so every other call on this
// context waits too. (The world's mutex is released in every wait: it only protects the simulation's own state.)
class ContextLock {
public:
    void take(Lock& lock, const char* function, const Context& context);
    void release();
    // Who holds it and who waits for it, for messages; nothing if it is free.
    std::string story() const;

private:
    struct Caller {
        const char* function;
        std::string thread;
        std::string text() const { return std::string(function) + " in thread " + thread; }
    };
    std::optional<Caller> holder_;
    std::list<Caller> waiting_;
    std::condition_variable freed_;
};

// The primary context of a GPU. Its handle stays the same when it is released and retained again.
struct Context {
    int ordinal;
    // The GPU's index in the machine.
    int number;
    CUcontext handle;
    unsigned retained = 0;
    // From the first time that it is retained to its last release or a reset.
    bool alive = false;
    // Unique in the process, as cuCtxGetId returns it: another one each time the context is created again.
    unsigned long long id = 0;
    // Set between its last release and the end of its threads; it cannot be retained then.
    bool ending = false;
    std::condition_variable ended;
    ContextLock lock;
    unsigned flags = 0;
    // The error that broke it. Every later call returns it.
    CUresult error = CUDA_SUCCESS;
    // Used bytes of the GPU's memory.
    size_t used = 0;
    std::set<const Context*> peers;
    StreamRef legacy;
    std::vector<StreamRef> streams;
    // Destroyed by the program while they still have work.
    std::vector<StreamRef> retired;
    // Streams of executable graphs.
    std::vector<StreamRef> lanes;
    HostThread host_thread;
    // By index of a hardware queue, `dispatched` of the last work in it.
    std::array<PointRef, 32> queues;
    // The legacy stream has the first one.
    unsigned connections_used = 1;
    std::mt19937_64 random{settings().seed};

    std::vector<StreamRef> all_streams() const;
    void fail(CUresult code, const char* what);
    // Waits for all work enqueued so far.
    void drain(Lock& lock, const char* function);
    // Drains if SIMCUDA_IMPLICIT_SYNC says so. Called by functions that may wait for the whole context.
    void perhaps_drain(Lock& lock, const char* function);
    // Removes retired streams that have no work left.
    void reap(Lock& lock);
    // Destroys the context and all its objects.
    void destroy(Lock& lock);
    void tell_leaks() const;
};

struct Module {
    Context* context;
};

struct Function {
    Context* context;
    CUmodule module;
    std::string name;
    // Lazy loading: whether it has been launched before.
    bool loaded = false;

    // Called by every launch, with the context's lock held: the first one loads the kernel, which may wait for the context.
    void load(Lock& lock, const char* caller);
};

struct UserObject {
    CUhostFn destructor;
    void* data;
    // All references, and those that the program owns, not a graph.
    unsigned long references;
    unsigned long owned;
};

struct World {
    std::mutex mutex;
    bool initialised = false;
    bool exiting = false;
    uint64_t streams_made = 0;
    unsigned long long contexts_made = 0;
    std::vector<std::unique_ptr<Context>> contexts;
    std::unique_ptr<Memory> memory;
    std::map<CUstream, StreamRef> streams;
    std::map<CUevent, EventRef> events;
    std::map<CUmodule, Module> modules;
    std::map<CUfunction, Function> functions;
    std::map<CUgraph, GraphRef> graphs;
    std::map<CUgraphExec, ExecutableGraphRef> executable_graphs;
    std::map<CUuserObject, UserObject> user_objects;
    // By handle, memory of cuMemCreate that the program has a handle of; and handles that the next one gets.
    std::map<CUmemGenericAllocationHandle, PhysicalRef> physical;
    std::vector<CUmemGenericAllocationHandle> free_handles;
    // Runs the destructors of user objects.
    HostThread destructors;
    std::map<std::string, unsigned long> calls;

    // Counts a call of `name`. Whether SIMCUDA_FAIL injects a failure.
    CUresult asked_to_fail(const char* name);
    Context* context(CUcontext handle);
    // Null for a handle that is invalid, destroyed, or of another context.
    StreamRef stream(Context& context, CUstream handle);
    EventRef event(CUevent handle);
};

World& world();

// Kernels of this process that run now. Written by launches.cpp. While there are any, a driver call by a thread named
// flexring-worker ends the process: flexring promises to make none.
inline std::atomic<int> running_kernels{0};

enum class Needs { Nothing, Initialised, Context };

// Holds the lock of a context.
class Holds {
public:
    Holds() = default;
    Holds(Context& context, Lock& lock, const char* function) { take(context, lock, function); }
    ~Holds() {
        if (context_) context_->lock.release();
    }
    Holds(const Holds&) = delete;
    Holds& operator=(const Holds&) = delete;

    void take(Context& context, Lock& lock, const char* function) {
        context.lock.take(lock, function, context);
        context_ = &context;
    }

private:
    Context* context_ = nullptr;
};

// The wait of a function that synchronises, in a call that holds the lock of `context`.
template <class Wait>
void synchronize(Context& context, Lock& lock, const char* function, Wait wait) {
    if (settings().synchronize_holds) return wait();
    context.lock.release();
    wait();
    context.lock.take(lock, function, context);
}

// Whether a call may proceed. Takes the world's lock; if a context is needed, finds the current one and takes its lock.
CUresult admit(const char* name, Needs needs, Lock& lock, Context*& context, Holds& holds);
void trace(const char* name, CUresult code);

// The stack of contexts of this thread, the current one last.
std::vector<Context*>& current_contexts();

// The frame of a driver function. `body` runs with the lock held.
template <class Body>
CUresult always(const char* name, Body body, Needs needs = Needs::Nothing) {
    Lock lock;
    Context* context = nullptr;
    Holds none;
    CUresult code = admit(name, needs, lock, context, none);
    if (code == CUDA_SUCCESS) code = body(lock);
    trace(name, code);
    return code;
}

template <class Body>
CUresult initialised(const char* name, Body body) {
    return always(name, std::move(body), Needs::Initialised);
}

template <class Body>
CUresult in_context(const char* name, Body body) {
    Lock lock;
    Context* context = nullptr;
    // Released before the world's lock.
    Holds holds;
    CUresult code = admit(name, Needs::Context, lock, context, holds);
    if (code == CUDA_SUCCESS) code = body(*context, lock);
    trace(name, code);
    return code;
}

// Whether a function that enqueues work can be captured.
enum class InCapture { Refused, Recorded };

// The frame of a function that enqueues work in a stream of the current context.
template <class Body>
CUresult in_stream(const char* name, CUstream handle, Body body, InCapture in_capture = InCapture::Refused) {
    return in_context(name, [&](Context& context, Lock& lock) -> CUresult {
        if (handle == CU_STREAM_PER_THREAD) return CUDA_ERROR_NOT_SUPPORTED;
        StreamRef stream = world().stream(context, handle);
        if (!stream) return CUDA_ERROR_INVALID_HANDLE;
        if (status_of(*stream) == Capture::Invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (stream->sequence && in_capture == InCapture::Refused) {
            stream->sequence->valid = false;
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
        if (stream->legacy && invalidate_captures_behind_legacy(context)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        make_room(lock, *stream, name);
        return body(*stream, lock);
    });
}

}  // namespace sim
