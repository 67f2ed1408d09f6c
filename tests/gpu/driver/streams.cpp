// The threads behind streams; see streams.h.

#include "streams.h"

#include <csignal>
#include <system_error>

#include <sys/prctl.h>

#include "settings.h"
#include "world.h"

namespace sim {
namespace {

thread_local bool in_host_function = false;

// A thread that handles no signals of the program and has a minimal timer slack.
template <class Body>
bool start_thread(std::thread& thread, Body body) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = true;
    try {
        thread = std::thread([body] {
            prctl(PR_SET_NAME, "simulated GPU");
            prctl(PR_SET_TIMERSLACK, 1000);
            body();
        });
    } catch (const std::system_error&) {
        started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
}

}  // namespace

std::string story_of(const Context& context) {
    std::string story;
    for (const StreamRef& stream : context.all_streams()) {
        if (stream->last->reached) continue;
        story += "; a stream of GPU " + std::to_string(context.ordinal) + " in hardware queue " +
                 std::to_string(stream->connection) + " is at ";
        story += stream->at ? stream->at : "rest";
        if (stream->held_by) story += " (held by another stream)";
        story += ", " + std::to_string(stream->queue.size()) + " behind it";
    }
    return story + context.lock.story();
}

bool inside_host_function() { return in_host_function; }

void reach_point(const PointRef& point) {
    point->when = std::chrono::steady_clock::now();
    point->reached = true;
    point->changed.notify_all();
}

Stream::Stream(CUstream handle, Context* context, unsigned flags, int priority, bool legacy)
    : handle(handle), context(context), flags(flags), priority(priority), legacy(legacy),
      id(++world().streams_made), last(std::make_shared<Point>()), random(settings().seed * 1000003 + id) {
    last->reached = true;
    // Some streams never sleep, some nearly always: a constant lead of one over another finds more errors than equal chances.
    sloth = static_cast<unsigned>(std::array{0, 2, 6}[random() % 3]);
}

bool Stream::start() {
    return start_thread(thread, [this] { work(); });
}

void Stream::dawdle() {
    if (settings().delay_us == 0 || random() % 8 >= sloth || cancelled) return;
    std::this_thread::sleep_for(std::chrono::microseconds(random() % (settings().delay_us + 1)));
}

void Stream::cancel() {
    cancelled = true;
    arrived.notify_all();
    if (held_by) held_by->changed.notify_all();
}

void Stream::work() {
    Lock lock(world().mutex);
    while (true) {
        arrived.wait(lock, [this] { return cancelled || closing || !queue.empty(); });
        if (cancelled || queue.empty()) break;
        Work next = std::move(queue.front());
        queue.pop_front();
        at = next.what;
        for (const PointRef& point : next.after) {
            held_by = point;
            point->changed.wait(lock, [&] { return point->reached || cancelled; });
        }
        held_by = nullptr;
        if (!cancelled && context->error == CUDA_SUCCESS) {
            CUresult code = world().asked_to_fail("work");
            if (!next.blocks) reach_point(next.dispatched);
            lock.unlock();
            dawdle();
            if (code == CUDA_SUCCESS && next.run) code = next.run(*this);
            next.run = nullptr;
            lock.lock();
            if (code != CUDA_SUCCESS) context->fail(code, next.what);
        }
        at = nullptr;
        reach_point(next.dispatched);
        reach_point(next.done);
        if (next.finally) next.finally();
    }
    for (const Work& left : queue) {
        reach_point(left.dispatched);
        reach_point(left.done);
        if (left.finally) left.finally();
    }
    queue.clear();
    finished = true;
}

namespace {

// Whether work waits in a hardware queue, and blocks it until it is done.
enum class Queue { None, Used, Blocked };

PointRef enqueue(Stream& stream, const char* what, std::function<CUresult(Stream&)> run,
                 std::vector<PointRef> after, Queue queue, std::function<void()> finally = nullptr) {
    if (stream.sequence) {
        record(stream, what, std::move(run));
        return stream.last;
    }
    Context& context = *stream.context;
    if (stream.legacy) {
        for (const StreamRef& other : context.all_streams()) {
            if (other->orders_with_legacy()) after.push_back(other->last);
        }
    } else if (stream.orders_with_legacy()) {
        after.push_back(context.legacy->last);
    }
    Work work{what,
              std::move(run),
              {},
              std::make_shared<Point>(),
              std::make_shared<Point>(),
              queue == Queue::Blocked,
              std::move(finally)};
    // A hardware queue starts its work in order. Its first item waits for the stream's earlier work and for events, and
    // all items behind it wait too, whatever their streams.
    if (queue != Queue::None) {
        PointRef& before = context.queues[stream.connection];
        if (before) after.push_back(before);
        before = work.dispatched;
    }
    for (PointRef& point : after) {
        if (!point->reached) work.after.push_back(std::move(point));
    }
    stream.last = work.done;
    stream.queue.push_back(std::move(work));
    stream.arrived.notify_all();
    return stream.last;
}

}  // namespace

PointRef submit(Stream& stream, const char* what, std::function<CUresult(Stream&)> run, std::vector<PointRef> after) {
    return enqueue(stream, what, std::move(run), std::move(after), Queue::Used);
}

void submit_wait(Stream& stream, const char* what, std::function<CUresult(Stream&)> run) {
    enqueue(stream, what, std::move(run), {}, Queue::Blocked);
}

PointRef submit_unqueued(Stream& stream, const char* what, std::function<CUresult(Stream&)> run,
                         std::vector<PointRef> after, std::function<void()> finally) {
    return enqueue(stream, what, std::move(run), std::move(after), Queue::None, std::move(finally));
}

void make_room(Lock& lock, const Stream& stream, const char* function) {
    constexpr size_t most = 1024;
    if (stream.sequence) return;
    while (stream.queue.size() >= most) await(lock, stream.queue[stream.queue.size() - most].done, function);
}

void await(Lock& lock, PointRef point, const char* function) {
    auto reached = [&] { return point->reached; };
    if (settings().hang_s == 0) return point->changed.wait(lock, reached);
    if (point->changed.wait_for(lock, std::chrono::seconds(settings().hang_s), reached)) return;
    std::string story;
    for (const auto& context : world().contexts) story += story_of(*context);
    die(function, "waits for " + std::to_string(settings().hang_s) + " s already" + story);
}

void HostThread::run(Stream& stream, CUhostFn function, void* data) {
    Lock lock(world().mutex);
    if (stream.cancelled || stopping_) return;
    const PointRef done = add(function, data);
    stream.held_by = done;
    done->changed.wait(lock, [&] { return done->reached || stream.cancelled; });
    stream.held_by = nullptr;
}

void HostThread::post(CUhostFn function, void* data) {
    if (!stopping_ && !world().exiting) add(function, data);
}

PointRef HostThread::add(CUhostFn function, void* data) {
    if (!thread_.joinable() && !start_thread(thread_, [this] { work(); })) {
        die("cuLaunchHostFunc", "the system has no thread for host functions");
    }
    auto done = std::make_shared<Point>();
    jobs_.push_back({function, data, done});
    arrived_.notify_one();
    return done;
}

void HostThread::work() {
    in_host_function = true;
    Lock lock(world().mutex);
    while (true) {
        arrived_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
        if (stopping_) break;
        Job job = jobs_.front();
        jobs_.pop_front();
        busy_ = true;
        lock.unlock();
        job.function(job.data);
        lock.lock();
        busy_ = false;
        reach_point(job.done);
    }
}

void HostThread::stop(Lock& lock, bool patiently) {
    stopping_ = true;
    arrived_.notify_all();
    if (thread_.joinable()) {
        if (busy_ && !patiently) {
            thread_.detach();
            return;
        }
        std::thread thread = std::move(thread_);
        lock.unlock();
        thread.join();
        lock.lock();
    }
    jobs_.clear();
    stopping_ = false;
}

}  // namespace sim
