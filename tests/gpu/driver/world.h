// The whole simulation: its global lock, the contexts, the handles, and the checks at the start of every driver function.
//
// Owns the lifetime of contexts and the rules for all calls: the library must be initialised, a context must be current
// and not broken, host functions must not call the driver. Must not know single functions of the driver.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "abi.h"
#include "memory.h"
#include "settings.h"
#include "streams.h"

namespace sim {

// The primary context of a GPU. Its handle stays the same when it is released and retained again.
struct Context {
    int ordinal;
    // The GPU's index in the machine.
    int number;
    CUcontext handle;
    unsigned retained = 0;
    // Set between its last release and the end of its threads; it cannot be retained then.
    bool ending = false;
    std::condition_variable ended;
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
    HostThread host_thread;
    // By priority and index of a queue: the waits for values and host functions in it.
    std::map<std::pair<int, unsigned>, std::vector<PointRef>> waits;

    // The unfinished waits in the queue of a stream.
    std::vector<PointRef>& waits_before(const Stream& stream);
    std::vector<StreamRef> all_streams() const;
    void fail(CUresult code, const char* what);
    // Waits for all work enqueued so far.
    void drain(Lock& lock, const char* function);
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
};

struct World {
    std::mutex mutex;
    bool initialised = false;
    bool exiting = false;
    uint64_t streams_made = 0;
    std::vector<std::unique_ptr<Context>> contexts;
    std::unique_ptr<Memory> memory;
    std::map<CUstream, StreamRef> streams;
    std::map<CUevent, EventRef> events;
    std::map<CUmodule, Module> modules;
    std::map<CUfunction, Function> functions;
    std::map<std::string, unsigned long> calls;

    // Counts a call of `name`. Whether SIMCUDA_FAIL injects a failure.
    CUresult asked_to_fail(const char* name);
    Context* context(CUcontext handle);
    // Null for a handle that is invalid, destroyed, or of another context.
    StreamRef stream(Context& context, CUstream handle);
    EventRef event(CUevent handle);
};

World& world();

enum class Needs { Nothing, Initialised, Context };

// Whether a call may proceed. Takes the lock, and finds the current context if one is needed.
CUresult admit(const char* name, Needs needs, Lock& lock, Context*& context);
void trace(const char* name, CUresult code);

// The stack of contexts of this thread, the current one last.
std::vector<Context*>& current_contexts();

// The frame of a driver function. `body` runs with the lock held.
template <class Body>
CUresult always(const char* name, Body body, Needs needs = Needs::Nothing) {
    Lock lock;
    Context* context = nullptr;
    CUresult code = admit(name, needs, lock, context);
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
    CUresult code = admit(name, Needs::Context, lock, context);
    if (code == CUDA_SUCCESS) code = body(*context, lock);
    trace(name, code);
    return code;
}

// The frame of a function that enqueues work in a stream of the current context.
template <class Body>
CUresult in_stream(const char* name, CUstream handle, Body body) {
    return in_context(name, [&](Context& context, Lock& lock) -> CUresult {
        if (handle == CU_STREAM_PER_THREAD) return CUDA_ERROR_NOT_SUPPORTED;
        StreamRef stream = world().stream(context, handle);
        if (!stream) return CUDA_ERROR_INVALID_HANDLE;
        if (stream->capture != Capture::None) {
            // Work is not recorded into graphs; it invalidates the capture.
            stream->capture = Capture::Invalidated;
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
        return body(*stream, lock);
    });
}

}  // namespace sim
