// Stream capture: its modes, and what it forbids other calls.
//
// Owns the rules of cuThreadExchangeStreamCaptureMode. A capture records nothing: it exists to test that calls refuse it, and
// that they do not break the captures of others.
#pragma once

namespace sim {

struct Context;

enum class CaptureMode { Global = 0, ThreadLocal = 1, Relaxed = 2 };

// The calling thread's mode.
CaptureMode& capture_mode();

// Whether this function may be called now. If it is potentially unsafe during a capture and the thread's mode forbids it, every
// such capture is invalidated. The caller holds the world's lock.
bool may_disturb_captures(const char* function);

// Work in the legacy stream depends on streams that synchronize with it, which must not capture. Invalidates the captures of
// such streams, and returns whether there are any.
bool invalidate_captures_behind_legacy(Context& context);

}  // namespace sim
