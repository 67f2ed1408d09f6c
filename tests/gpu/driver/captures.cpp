// The rules of stream capture; see captures.h.

#include "captures.h"

#include <set>
#include <string>
#include <thread>

#include "world.h"

namespace sim {
namespace {

// Functions that wait for the GPU, or may. NVIDIA calls them potentially unsafe, without a complete list.
const std::set<std::string>& unsafe_functions() {
    static const auto& names = *new std::set<std::string>{
        "cuCtxDisablePeerAccess",
        "cuCtxEnablePeerAccess",
        "cuCtxSynchronize",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuIpcCloseMemHandle",
        "cuIpcOpenMemHandle_v2",
        "cuMemAllocHost_v2",
        "cuMemAllocManaged",
        "cuMemAlloc_v2",
        "cuMemFreeHost",
        "cuMemFree_v2",
        "cuMemHostAlloc",
        "cuMemHostRegister_v2",
        "cuMemHostUnregister",
        "cuMemcpy",
        "cuMemcpyDtoD_v2",
        "cuMemcpyDtoH_v2",
        "cuMemcpyHtoD_v2",
        "cuMemsetD8_v2",
        "cuModuleLoadData",
        "cuModuleLoadDataEx",
        "cuModuleUnload",
        "cuStreamQuery",
        "cuStreamSynchronize",
    };
    return names;
}

}  // namespace

CaptureMode& capture_mode() {
    thread_local CaptureMode mode = CaptureMode::Global;
    return mode;
}

bool may_disturb_captures(const char* function) {
    if (capture_mode() == CaptureMode::Relaxed || !unsafe_functions().count(function)) return true;
    bool may = true;
    for (const auto& [handle, stream] : world().streams) {
        if (stream->capture == Capture::None || stream->capture_mode == CaptureMode::Relaxed) continue;
        const bool own = stream->capturer == std::this_thread::get_id();
        const bool global = capture_mode() == CaptureMode::Global && stream->capture_mode == CaptureMode::Global;
        if (!own && !global) continue;
        stream->capture = Capture::Invalidated;
        may = false;
    }
    return may;
}

bool invalidate_captures_behind_legacy(Context& context) {
    bool found = false;
    for (const StreamRef& stream : context.streams) {
        if (stream->capture == Capture::None || !stream->orders_with_legacy()) continue;
        stream->capture = Capture::Invalidated;
        found = true;
    }
    return found;
}

}  // namespace sim

using namespace sim;

SIMCUDA_EXPORT CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
    return always(__func__, [&](Lock&) {
        if (!mode || *mode < 0 || *mode > 2) return CUDA_ERROR_INVALID_VALUE;
        const CaptureMode before = capture_mode();
        capture_mode() = static_cast<CaptureMode>(*mode);
        *mode = static_cast<int>(before);
        return CUDA_SUCCESS;
    });
}
