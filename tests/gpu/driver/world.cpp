// The checks of calls, the end of contexts and the exit of processes; see world.h.

#include "world.h"

#include <algorithm>
#include <atomic>

#include <pthread.h>

namespace sim {
namespace {

// Set in a forked child that has not called exec: it has no threads, and the lock may be held for ever.
std::atomic<bool> forked{false};

[[gnu::constructor]] void watch_forks() {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
}

// Running work must stop before the program's memory is destroyed.
[[gnu::destructor]] void leave() {
    if (forked) return;
    World& world = sim::world();
    Lock lock(world.mutex);
    world.exiting = true;
    std::vector<std::thread> threads;
    for (const auto& context : world.contexts) {
        if (settings().leaks) context->tell_leaks();
        for (const StreamRef& stream : context->all_streams()) {
            stream->cancel();
            threads.push_back(std::move(stream->thread));
        }
        context->host_thread.stop(lock, false);
    }
    world.destructors.stop(lock, false);
    lock.unlock();
    for (std::thread& thread : threads) thread.join();
}

std::string thread_name() {
    char name[16] = {};
    pthread_getname_np(pthread_self(), name, sizeof name);
    return name;
}

const char* name_of(Kind kind) {
    switch (kind) {
        case Kind::Imported: return "opened IPC handle";
        case Kind::Mapped: return "mapping";
        case Kind::HostAllocated: return "host allocation";
        case Kind::HostRegistered: return "registration";
        default: return "allocation";
    }
}

}  // namespace

World& world() {
    static World* never_destroyed = new World;
    return *never_destroyed;
}

std::vector<Context*>& current_contexts() {
    thread_local std::vector<Context*> stack;
    return stack;
}

CUresult World::asked_to_fail(const char* name) {
    const unsigned long call = ++calls[name];
    auto [from, to] = settings().failures.equal_range(name);
    for (auto failure = from; failure != to; ++failure) {
        if (failure->second.call == call) return failure->second.code;
    }
    return CUDA_SUCCESS;
}

Context* World::context(CUcontext handle) {
    for (const auto& context : contexts) {
        if (context->handle == handle) return context.get();
    }
    return nullptr;
}

StreamRef World::stream(Context& context, CUstream handle) {
    if (!handle || handle == CU_STREAM_LEGACY) return context.legacy;
    auto found = streams.find(handle);
    return found != streams.end() && found->second->context == &context ? found->second : nullptr;
}

EventRef World::event(CUevent handle) {
    auto found = events.find(handle);
    return found != events.end() ? found->second : nullptr;
}

CUresult admit(const char* name, Needs needs, Lock& lock, Context*& context, Holds& holds) {
    if (inside_host_function())
        die(name,
            "called from a host function or a destructor of a user object, which may make no CUDA call");
    if (forked) return CUDA_ERROR_NOT_INITIALIZED;
    if (running_kernels > 0 && thread_name() == "flexring-worker") {
        die(name, "called by a worker of flexring while a kernel runs, which may wait for that kernel");
    }
    World& world = sim::world();
    lock = Lock(world.mutex);
    if (world.exiting) return CUDA_ERROR_DEINITIALIZED;
    if (settings().without.count(name)) return CUDA_ERROR_NOT_SUPPORTED;
    if (CUresult code = world.asked_to_fail(name); code != CUDA_SUCCESS) return code;
    if (needs == Needs::Nothing) return CUDA_SUCCESS;
    if (!world.initialised) return CUDA_ERROR_NOT_INITIALIZED;
    if (needs == Needs::Initialised) return CUDA_SUCCESS;
    const std::vector<Context*>& stack = current_contexts();
    if (stack.empty() || !stack.back()) return CUDA_ERROR_INVALID_CONTEXT;
    context = stack.back();
    if (!context->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    holds.take(*context, lock, name);
    if (world.exiting) return CUDA_ERROR_DEINITIALIZED;
    if (!context->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (context->error != CUDA_SUCCESS) return context->error;
    return may_disturb_captures(name) ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

void trace(const char* name, CUresult code) {
    if (settings().trace) say("trace: " + std::string(name) + " = " + std::to_string(code));
}

void ContextLock::take(Lock& lock, const char* function, const Context& context) {
    const Caller caller{function, thread_name()};
    if (holder_ || !waiting_.empty()) {
        // In order of arrival, so that no thread starves.
        const auto entry = waiting_.insert(waiting_.end(), caller);
        auto free = [&] { return !holder_ && waiting_.begin() == entry; };
        if (settings().hang_s == 0) {
            freed_.wait(lock, free);
        } else if (!freed_.wait_for(lock, std::chrono::seconds(settings().hang_s), free)) {
            die(function, "waits for " + std::to_string(settings().hang_s) + " s already for the lock of a context" +
                              story_of(context));
        }
        waiting_.erase(entry);
    }
    holder_ = caller;
}

void ContextLock::release() {
    holder_.reset();
    freed_.notify_all();
}

std::string ContextLock::story() const {
    if (!holder_) return "";
    std::string story = "; " + holder_->text() + " holds the lock of the context";
    for (const Caller& caller : waiting_) story += "; " + caller.text() + " waits for that lock";
    return story;
}

std::vector<StreamRef> Context::all_streams() const {
    std::vector<StreamRef> all = streams;
    all.insert(all.end(), retired.begin(), retired.end());
    all.insert(all.end(), lanes.begin(), lanes.end());
    if (legacy) all.push_back(legacy);
    return all;
}

void Context::fail(CUresult code, const char* what) {
    if (error != CUDA_SUCCESS) return;
    error = code;
    say(std::string(what) + " ended in error " + std::to_string(code) +
        ", which every later call of this context returns");
}

void Context::drain(Lock& lock, const char* function) {
    for (const StreamRef& stream : all_streams()) await(lock, stream->last, function);
}

void Context::perhaps_drain(Lock& lock, const char* function) {
    const ImplicitSync sync = settings().implicit_sync;
    if (sync == ImplicitSync::Always || (sync == ImplicitSync::Random && random() % 2)) drain(lock, function);
}

void Function::load(Lock& lock, const char* caller) {
    if (loaded) return;
    loaded = true;
    if (settings().lazy_loading) context->perhaps_drain(lock, caller);
}

void Context::reap(Lock& lock) {
    std::vector<std::thread> threads;
    auto done = [&](const StreamRef& stream) {
        if (stream->finished) threads.push_back(std::move(stream->thread));
        return stream->finished;
    };
    retired.erase(std::remove_if(retired.begin(), retired.end(), done), retired.end());
    // They only need to return, but may wait for the lock.
    lock.unlock();
    for (std::thread& thread : threads) thread.join();
    lock.lock();
}

void Context::destroy(Lock& lock) {
    World& world = sim::world();
    if (settings().leaks) tell_leaks();
    ending = true;
    std::vector<StreamRef> stopped = all_streams();
    for (const StreamRef& stream : stopped) {
        stream->cancel();
        abandon_capture(*stream);
        world.streams.erase(stream->handle);
    }
    streams.clear();
    retired.clear();
    lanes.clear();
    legacy = nullptr;
    lock.unlock();
    for (const StreamRef& stream : stopped) stream->thread.join();
    lock.lock();
    host_thread.stop(lock, true);
    forget_graphs_of(*this);
    for (const RangeRef& range : world.memory->of(this)) world.memory->forget(range);
    auto purge = [this](auto& table, auto context_of) {
        for (auto entry = table.begin(); entry != table.end();) {
            entry = context_of(entry->second) == this ? table.erase(entry) : std::next(entry);
        }
    };
    purge(world.events, [](const EventRef& event) { return event->context; });
    purge(world.modules, [](const Module& module) { return module.context; });
    purge(world.functions, [](const Function& function) { return function.context; });
    for (const auto& other : world.contexts) other->peers.erase(this);
    peers.clear();
    error = CUDA_SUCCESS;
    alive = false;
    ending = false;
    ended.notify_all();
}

void Context::tell_leaks() const {
    World& world = sim::world();
    const std::string mine = " of GPU " + std::to_string(ordinal);
    auto report = [&](size_t count, const char* what) {
        if (count) say("leaked " + std::to_string(count) + " " + what + (count > 1 ? "s" : "") + mine);
    };
    auto count = [&](const auto& table, auto context_of) {
        return std::count_if(table.begin(), table.end(), [&](auto& entry) { return context_of(entry.second) == this; });
    };
    report(retained, "retained context");
    report(streams.size(), "stream");
    report(count(world.events, [](const EventRef& event) { return event->context; }), "event");
    report(count(world.graphs, [](const GraphRef& graph) { return graph->context; }), "graph");
    report(count(world.executable_graphs, [](const ExecutableGraphRef& graph) { return graph->context; }),
           "executable graph");
    report(count(world.modules, [](const Module& module) { return module.context; }), "module");
    if (!world.memory) return;
    for (const RangeRef& range : world.memory->of(this)) {
        say(std::string("leaked ") + name_of(range->kind) + " " + hexadecimal(range->base) + " of " +
            std::to_string(range->bytes) + " bytes by " + range->origin + mine);
    }
}

}  // namespace sim
