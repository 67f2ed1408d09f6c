// Stream capture: its modes, what it records, and what it forbids other calls.
//
// Owns the rules of cuThreadExchangeStreamCaptureMode, and those of dependencies into, out of and between
// captures. Must not know how graphs run.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "abi.h"

namespace sim {

struct Context;
struct Event;
struct Graph;
struct Stream;

enum class Capture { None = 0, Active = 1, Invalidated = 2 };
enum class CaptureMode { Global = 0, ThreadLocal = 1, Relaxed = 2 };

// A capture, from cuStreamBeginCapture to cuStreamEndCapture. Streams join it by waiting for an event that it
// has recorded.
struct Sequence {
    unsigned long long id;
    CaptureMode mode;
    // The stream and the thread that began it.
    const Stream* origin;
    std::thread::id capturer;
    std::shared_ptr<Graph> graph;
    bool valid = true;
    bool over = false;
};
using SequenceRef = std::shared_ptr<Sequence>;

// The calling thread's mode.
CaptureMode& capture_mode();

Capture status_of(const Stream& stream);

// Whether this function may be called now. If it is potentially unsafe during a capture and the thread's mode
// forbids it, every such capture is invalidated. The caller holds the world's lock.
bool may_disturb_captures(const char* function);

// Work in the legacy stream depends on streams that synchronize with it, which must not capture. Whether
// there are any.
bool captures_behind_legacy(const Context& context);
// As above, and invalidates their captures.
bool invalidate_captures_behind_legacy(Context& context);

// Invalidates the captures of this thread in a context, for functions that wait for all of it. Whether there are any.
bool invalidate_own_captures(Context& context);

// Adds a node to the graph of a stream that captures.
void record(Stream& stream, const char* what, std::function<CUresult(Stream&)> run,
            CUfunction kernel = nullptr);

// A stream that captures, or an event that is captured, is at one end of this wait.
CUresult wait_in_capture(Stream& stream, const Event& event);

// What a function returns that needs the state of an event whose last record was captured. Invalidates the
// capture.
CUresult refuse_captured(const Event& event);

// The stream is destroyed while it captures.
void abandon_capture(Stream& stream);

}  // namespace sim
