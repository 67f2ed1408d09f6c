// The whole simulation: its one lock, the contexts, the handles, and how every function of the driver begins.
//
// Owns the life of contexts and the rules that hold for all calls alike: the library must be initialised, a context
// must be current and sound, host functions call nothing. Knows no function of the driver by itself.
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

// The primary context of a GPU, which keeps its handle over all its lives.
struct Context {
    int ordinal;
    // The GPU's number in the machine.
    int number;
    CUcontext handle;
    unsigned retained = 0;
    // Between its last release and the end of its threads; nobody may retain it then.
    bool ending = false;
    std::condition_variable ended;
    unsigned flags = 0;
    // What broke it; every call returns it from then on.
    CUresult error = CUDA_SUCCESS;
    // Bytes of the GPU's memory.
    size_t used = 0;
    std::set<const Context*> peers;
    StreamRef legacy;
    std::vector<StreamRef> streams;
    // Destroyed by the program, but not yet done with their work.
    std::vector<StreamRef> retired;
    HostThread host_thread;
    // By priority and number: the waits for values and host functions that are in a queue of streams.
    std::map<std::pair<int, unsigned>, std::vector<PointRef>> waits;

    // Those that are not over in the queue that a stream puts its work in.
    std::vector<PointRef>& waits_before(const Stream& stream);
    std::vector<StreamRef> all_streams() const;
    void fail(CUresult code, const char* what);
    // Waits for all that was queued so far.
    void drain(Lock& lock, const char* function);
    // Forgets retired streams that are done.
    void reap(Lock& lock);
    // Ends it with all that it owns.
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

    // Counts a call of `name`, and says whether SIMCUDA_FAIL wants it to fail.
    CUresult asked_to_fail(const char* name);
    Context* context(CUcontext handle);
    // Null for a handle that is none, was destroyed, or is of another context.
    StreamRef stream(Context& context, CUstream handle);
    EventRef event(CUevent handle);
};

World& world();

enum class Needs { Nothing, Initialised, Context };

// Whether a call may go on; takes the lock, and finds the current context where one is needed.
CUresult admit(const char* name, Needs needs, Lock& lock, Context*& context);
void trace(const char* name, CUresult code);

// The contexts that are current on this thread, the innermost last.
std::vector<Context*>& current_contexts();

// The frame of an entry point: `body` does what it is for, with the lock held.
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

// Such a call that is about a stream of the current context and puts work into it.
template <class Body>
CUresult in_stream(const char* name, CUstream handle, Body body) {
    return in_context(name, [&](Context& context, Lock& lock) -> CUresult {
        if (handle == CU_STREAM_PER_THREAD) return CUDA_ERROR_NOT_SUPPORTED;
        StreamRef stream = world().stream(context, handle);
        if (!stream) return CUDA_ERROR_INVALID_HANDLE;
        if (stream->capture != Capture::None) {
            // Work is not recorded into graphs here; what comes spoils the capture.
            stream->capture = Capture::Invalidated;
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
        return body(*stream, lock);
    });
}

}  // namespace sim
