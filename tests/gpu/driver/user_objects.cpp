// User objects: what a program ties to the life of graphs, with a destructor.
//
// Owns their references. The destructor runs on a thread of the driver, where CUDA calls are forbidden.

#include <climits>

#include "graphs.h"
#include "world.h"

namespace sim {
namespace {

bool is_count(unsigned count) { return count > 0 && count <= INT_MAX; }

void release(CUuserObject handle, unsigned count) {
    auto found = world().user_objects.find(handle);
    UserObject& object = found->second;
    object.references -= count;
    if (object.references > 0) return;
    world().destructors.post(object.destructor, object.data);
    world().user_objects.erase(found);
}

template <class Body>
CUresult about(const char* name, CUuserObject handle, unsigned count, Body body) {
    return initialised(name, [&](Lock&) -> CUresult {
        auto found = world().user_objects.find(handle);
        if (found == world().user_objects.end() || !is_count(count)) return CUDA_ERROR_INVALID_VALUE;
        return body(found->second);
    });
}

// Takes references from the program.
void disown(const char* name, UserObject& object, unsigned count) {
    if (count > object.owned) die(name, "the program has no such references to the user object");
    object.owned -= count;
}

}  // namespace

void UserObjects::add(CUuserObject object, unsigned count) { counts_[object] += count; }

bool UserObjects::remove(CUuserObject object, unsigned count) {
    auto found = counts_.find(object);
    if (found == counts_.end() || found->second < count) return false;
    if ((found->second -= count) == 0) counts_.erase(found);
    sim::release(object, count);
    return true;
}

UserObjects UserObjects::copy() const {
    UserObjects copied;
    copied.add(*this);
    return copied;
}

void UserObjects::add(const UserObjects& others) {
    for (const auto& [object, count] : others.counts_) {
        world().user_objects[object].references += count;
        counts_[object] += count;
    }
}

void UserObjects::release() {
    for (const auto& [object, count] : counts_) sim::release(object, count);
    counts_.clear();
}

}  // namespace sim

using namespace sim;

SIMCUDA_EXPORT CUresult cuUserObjectCreate(CUuserObject* out, void* data, CUhostFn destructor, unsigned count,
                                           unsigned flags) {
    return initialised(__func__, [&](Lock&) {
        const bool valid = out && destructor && is_count(count) && flags == CU_USER_OBJECT_NO_DESTRUCTOR_SYNC;
        if (!valid) return CUDA_ERROR_INVALID_VALUE;
        *out = static_cast<CUuserObject>(world().memory->handle());
        world().user_objects[*out] = {destructor, data, count, count};
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuUserObjectRetain(CUuserObject handle, unsigned count) {
    return about(__func__, handle, count, [&](UserObject& object) {
        object.references += count;
        object.owned += count;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuUserObjectRelease(CUuserObject handle, unsigned count) {
    return about(__func__, handle, count, [&](UserObject& object) {
        disown("cuUserObjectRelease", object, count);
        sim::release(handle, count);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject handle, unsigned count,
                                                unsigned flags) {
    return about(__func__, handle, count, [&](UserObject& object) {
        auto found = world().graphs.find(graph);
        if (found == world().graphs.end() || flags & ~CU_GRAPH_USER_OBJECT_MOVE)
            return CUDA_ERROR_INVALID_VALUE;
        if (flags & CU_GRAPH_USER_OBJECT_MOVE) disown("cuGraphRetainUserObject", object, count);
        else object.references += count;
        found->second->objects.add(handle, count);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuGraphReleaseUserObject(CUgraph graph, CUuserObject handle, unsigned count) {
    return about(__func__, handle, count, [&](UserObject&) {
        auto found = world().graphs.find(graph);
        if (found == world().graphs.end()) return CUDA_ERROR_INVALID_VALUE;
        return found->second->objects.remove(handle, count) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    });
}
