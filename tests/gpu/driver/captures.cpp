// The rules of stream capture, and the functions that begin and end it; see captures.h.

#include "captures.h"

#include <algorithm>
#include <set>
#include <string>

#include "graphs.h"
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
        "cuGraphInstantiateWithFlags",
        "cuGraphInstantiateWithParams",
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

Capture status_of(const Stream& stream) {
    if (!stream.sequence) return Capture::None;
    return stream.sequence->valid ? Capture::Active : Capture::Invalidated;
}

bool may_disturb_captures(const char* function) {
    if (capture_mode() == CaptureMode::Relaxed || !unsafe_functions().count(function)) return true;
    bool may = true;
    for (const auto& [handle, stream] : world().streams) {
        if (!stream->sequence || stream->sequence->mode == CaptureMode::Relaxed) continue;
        Sequence& sequence = *stream->sequence;
        const bool own = sequence.capturer == std::this_thread::get_id();
        const bool global = capture_mode() == CaptureMode::Global && sequence.mode == CaptureMode::Global;
        if (!own && !global) continue;
        sequence.valid = false;
        may = false;
    }
    return may;
}

bool captures_behind_legacy(const Context& context) {
    return std::any_of(context.streams.begin(), context.streams.end(), [](const StreamRef& stream) {
        return stream->sequence && stream->orders_with_legacy();
    });
}

bool invalidate_captures_behind_legacy(Context& context) {
    if (!captures_behind_legacy(context)) return false;
    for (const StreamRef& stream : context.streams) {
        if (stream->sequence && stream->orders_with_legacy()) stream->sequence->valid = false;
    }
    return true;
}

bool invalidate_own_captures(Context& context) {
    bool found = false;
    for (const StreamRef& stream : context.streams) {
        if (!stream->sequence || stream->sequence->capturer != std::this_thread::get_id()) continue;
        stream->sequence->valid = false;
        found = true;
    }
    return found;
}

void record(Stream& stream, const char* what, std::function<CUresult(Stream&)> run, CUfunction kernel) {
    stream.frontier = {stream.sequence->graph->add(what, std::move(run), kernel, stream.frontier)};
}

CUresult wait_in_capture(Stream& stream, const Event& event) {
    auto invalid = [&](CUresult code) {
        if (stream.sequence) stream.sequence->valid = false;
        if (event.sequence && !event.sequence->over) event.sequence->valid = false;
        return code;
    };
    if (stream.sequence && !stream.sequence->valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!event.sequence) return invalid(CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    if (event.sequence->over) return invalid(CUDA_ERROR_CAPTURED_EVENT);
    if (!event.sequence->valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream.sequence && stream.sequence != event.sequence) return invalid(CUDA_ERROR_STREAM_CAPTURE_MERGE);
    // The legacy stream cannot be captured, and a graph of several GPUs is not simulated.
    if (stream.legacy || stream.context != event.context)
        return invalid(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    stream.sequence = event.sequence;
    for (const NodeRef& node : event.captured) {
        auto& frontier = stream.frontier;
        if (std::find(frontier.begin(), frontier.end(), node) == frontier.end()) frontier.push_back(node);
    }
    return CUDA_SUCCESS;
}

CUresult refuse_captured(const Event& event) {
    if (!event.sequence->over) event.sequence->valid = false;
    return CUDA_ERROR_CAPTURED_EVENT;
}

namespace {

// Takes all streams out of a capture.
void end(const SequenceRef& sequence) {
    sequence->over = true;
    for (const auto& [handle, stream] : world().streams) {
        if (stream->sequence != sequence) continue;
        stream->sequence = nullptr;
        stream->frontier.clear();
    }
}

// Whether another stream has work in the capture that does not come before the last work of the stream where
// it began.
bool has_unjoined_work(const Stream& origin) {
    std::set<const Node*> joined;
    std::vector<const Node*> next;
    for (const NodeRef& node : origin.frontier) next.push_back(node.get());
    while (!next.empty()) {
        const Node* node = next.back();
        next.pop_back();
        if (!joined.insert(node).second) continue;
        for (const NodeRef& before : node->after) next.push_back(before.get());
    }
    for (const auto& [handle, stream] : world().streams) {
        if (stream->sequence != origin.sequence) continue;
        for (const NodeRef& node : stream->frontier) {
            if (!joined.count(node.get())) return true;
        }
    }
    return false;
}

void discard(const SequenceRef& sequence) {
    end(sequence);
    forget_graph(sequence->graph);
}

// A function about the capture of any stream. The legacy stream has none.
template <class Body>
CUresult about(const char* name, CUstream handle, Body body) {
    return in_context(name, [&](Context& context, Lock&) -> CUresult {
        if (handle == CU_STREAM_PER_THREAD) return CUDA_ERROR_NOT_SUPPORTED;
        const bool legacy = !handle || handle == CU_STREAM_LEGACY;
        auto found = world().streams.find(handle);
        if (!legacy && found == world().streams.end()) return CUDA_ERROR_INVALID_HANDLE;
        return body(legacy ? context.legacy : found->second);
    });
}

// What cuStreamGetCaptureInfo returns.
CUresult info(Stream& stream, int* status, unsigned long long* id, CUgraph* graph,
              const CUgraphNode** dependencies, const CUgraphEdgeData** edges, size_t* count) {
    if (!status) return CUDA_ERROR_INVALID_VALUE;
    if (stream.legacy && captures_behind_legacy(*stream.context)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *status = static_cast<int>(status_of(stream));
    if (status_of(stream) != Capture::Active) return CUDA_SUCCESS;
    stream.reported.clear();
    for (const NodeRef& node : stream.frontier) stream.reported.push_back(node->handle);
    if (id) *id = stream.sequence->id;
    if (graph) *graph = stream.sequence->graph->handle;
    if (dependencies) *dependencies = stream.reported.data();
    // All edges are plain ones.
    if (edges) *edges = nullptr;
    if (count) *count = stream.reported.size();
    return CUDA_SUCCESS;
}

}  // namespace

void abandon_capture(Stream& stream) {
    if (!stream.sequence) return;
    stream.sequence->valid = false;
    if (stream.sequence->origin == &stream) discard(SequenceRef(stream.sequence));
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

SIMCUDA_EXPORT CUresult cuStreamBeginCapture_v2(CUstream handle, int mode) {
    return about(__func__, handle, [&](const StreamRef& stream) {
        static unsigned long long sequences = 0;
        if (mode < 0 || mode > 2) return CUDA_ERROR_INVALID_VALUE;
        if (stream->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        if (stream->sequence) return CUDA_ERROR_ILLEGAL_STATE;
        stream->sequence =
            std::make_shared<Sequence>(Sequence{++sequences, static_cast<CaptureMode>(mode), stream.get(),
                                                std::this_thread::get_id(), new_graph(*stream->context)});
        stream->sequence->graph->capturing = true;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
    return about(__func__, handle, [&](const StreamRef& stream) {
        const SequenceRef sequence = stream->sequence;
        if (!sequence) return CUDA_ERROR_ILLEGAL_STATE;
        if (!graph) return CUDA_ERROR_INVALID_VALUE;
        if (sequence->origin != stream.get()) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
        const bool here = sequence->capturer == std::this_thread::get_id();
        if (!here && sequence->mode != CaptureMode::Relaxed) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
        *graph = nullptr;
        const CUresult code = !sequence->valid             ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                              : has_unjoined_work(*stream) ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                                                           : CUDA_SUCCESS;
        if (code != CUDA_SUCCESS) {
            discard(sequence);
            return code;
        }
        end(sequence);
        sequence->graph->capturing = false;
        *graph = sequence->graph->handle;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuStreamIsCapturing(CUstream handle, int* status) {
    return about(__func__, handle, [&](const StreamRef& stream) {
        return info(*stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
    });
}

SIMCUDA_EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream handle, int* status, unsigned long long* id,
                                                  CUgraph* graph, const CUgraphNode** dependencies,
                                                  size_t* count) {
    return about(__func__, handle, [&](const StreamRef& stream) {
        return info(*stream, status, id, graph, dependencies, nullptr, count);
    });
}

SIMCUDA_EXPORT CUresult cuStreamGetCaptureInfo_v3(CUstream handle, int* status, unsigned long long* id,
                                                  CUgraph* graph, const CUgraphNode** dependencies,
                                                  const CUgraphEdgeData** edges, size_t* count) {
    return about(__func__, handle, [&](const StreamRef& stream) {
        return info(*stream, status, id, graph, dependencies, edges, count);
    });
}
