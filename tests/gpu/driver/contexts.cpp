// Functions for primary contexts and the current context. Contexts that a program creates itself are not supported.

#include "world.h"

using namespace sim;

namespace {

Context* gpu(CUdevice device) {
    World& world = sim::world();
    if (device < 0 || static_cast<size_t>(device) >= world.contexts.size()) return nullptr;
    return world.contexts[static_cast<size_t>(device)].get();
}

}  // namespace

SIMCUDA_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) {
    return initialised(__func__, [&](Lock& lock) {
        if (!out) return CUDA_ERROR_INVALID_VALUE;
        Context* context = gpu(device);
        if (!context) return CUDA_ERROR_INVALID_DEVICE;
        context->ended.wait(lock, [&] { return !context->ending; });
        if (!context->alive) {
            auto legacy = std::make_shared<Stream>(nullptr, context, 0u, 0, true);
            if (!legacy->start()) return CUDA_ERROR_OUT_OF_MEMORY;
            context->legacy = legacy;
            context->id = ++world().contexts_made;
            context->alive = true;
        }
        ++context->retained;
        *out = context->handle;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    return initialised(__func__, [&](Lock& lock) {
        Context* context = gpu(device);
        if (!context) return CUDA_ERROR_INVALID_DEVICE;
        Holds holds(*context, lock, "cuDevicePrimaryCtxRelease_v2");
        if (context->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
        if (--context->retained == 0 && context->alive) context->destroy(lock);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    return initialised(__func__, [&](Lock& lock) {
        Context* context = gpu(device);
        if (!context) return CUDA_ERROR_INVALID_DEVICE;
        Holds holds(*context, lock, "cuDevicePrimaryCtxReset_v2");
        // Its users still have to release it, and the next one to retain it brings it to life again.
        if (context->alive) context->destroy(lock);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    return initialised(__func__, [&](Lock&) {
        if (!flags || !active) return CUDA_ERROR_INVALID_VALUE;
        const Context* context = gpu(device);
        if (!context) return CUDA_ERROR_INVALID_DEVICE;
        *flags = context->flags;
        *active = context->alive;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
    return initialised(__func__, [&](Lock&) {
        Context* context = gpu(device);
        if (!context) return CUDA_ERROR_INVALID_DEVICE;
        context->flags = flags;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuCtxSetCurrent(CUcontext handle) {
    return initialised(__func__, [&](Lock&) {
        std::vector<Context*>& stack = current_contexts();
        Context* context = world().context(handle);
        if (handle && !context) return CUDA_ERROR_INVALID_CONTEXT;
        if (context && !context->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        if (!stack.empty()) stack.pop_back();
        if (context) stack.push_back(context);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuCtxGetCurrent(CUcontext* out) {
    return initialised(__func__, [&](Lock&) {
        if (!out) return CUDA_ERROR_INVALID_VALUE;
        const std::vector<Context*>& stack = current_contexts();
        *out = stack.empty() ? nullptr : stack.back()->handle;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuCtxPushCurrent_v2(CUcontext handle) {
    return initialised(__func__, [&](Lock&) {
        Context* context = world().context(handle);
        if (!context) return CUDA_ERROR_INVALID_CONTEXT;
        if (!context->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        current_contexts().push_back(context);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* out) {
    return initialised(__func__, [&](Lock&) {
        std::vector<Context*>& stack = current_contexts();
        if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
        if (out) *out = stack.back()->handle;
        stack.pop_back();
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
    return in_context(__func__, [&](Context& context, Lock&) {
        if (!device) return CUDA_ERROR_INVALID_VALUE;
        *device = context.ordinal;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuCtxGetId(CUcontext handle, unsigned long long* id) {
    return initialised(__func__, [&](Lock&) {
        if (!id) return CUDA_ERROR_INVALID_VALUE;
        const std::vector<Context*>& stack = current_contexts();
        const Context* context = handle ? world().context(handle) : stack.empty() ? nullptr : stack.back();
        if (!context) return CUDA_ERROR_INVALID_CONTEXT;
        if (!context->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        *id = context->id;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuCtxGetFlags(unsigned* flags) {
    return in_context(__func__, [&](Context& context, Lock&) {
        if (!flags) return CUDA_ERROR_INVALID_VALUE;
        *flags = context.flags;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuCtxSetFlags(unsigned flags) {
    return in_context(__func__, [&](Context& context, Lock&) {
        context.flags = flags;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuCtxSynchronize() {
    return in_context(__func__, [&](Context& context, Lock& lock) {
        if (invalidate_own_captures(context)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        synchronize(context, lock, "cuCtxSynchronize", [&] { context.drain(lock, "cuCtxSynchronize"); });
        return context.error;
    });
}

SIMCUDA_EXPORT CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    return in_context(__func__, [&](Context&, Lock&) {
        if (least) *least = 0;
        if (greatest) *greatest = -5;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    return in_context(__func__, [&](Context& context, Lock& lock) {
        Context* other = world().context(peer);
        if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
        if (!other || other == &context || !other->alive) return CUDA_ERROR_INVALID_CONTEXT;
        if (!settings().peer) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
        context.perhaps_drain(lock, "cuCtxEnablePeerAccess");
        return context.peers.insert(other).second ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    });
}

SIMCUDA_EXPORT CUresult cuCtxDisablePeerAccess(CUcontext peer) {
    return in_context(__func__, [&](Context& context, Lock& lock) {
        Context* other = world().context(peer);
        if (!other) return CUDA_ERROR_INVALID_CONTEXT;
        context.perhaps_drain(lock, "cuCtxDisablePeerAccess");
        return context.peers.erase(other) ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    });
}
