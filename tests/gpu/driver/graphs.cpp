// Graphs and their functions; see graphs.h.

#include "graphs.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "world.h"

namespace sim {
namespace {

CUgraphNodeType type_of(const char* what) {
    const std::string name = what;
    if (name.find("cuMemcpy") == 0) return CU_GRAPH_NODE_TYPE_MEMCPY;
    if (name.find("cuMemset") == 0) return CU_GRAPH_NODE_TYPE_MEMSET;
    return name == "cuLaunchHostFunc" ? CU_GRAPH_NODE_TYPE_HOST : CU_GRAPH_NODE_TYPE_KERNEL;
}

// Divides nodes among the fewest streams found by going through them once: a node follows one in the same
// stream only if it depends on it, directly or not. Returns the number of streams.
size_t plan(const std::vector<NodeRef>& nodes, std::vector<size_t>& lane_of) {
    std::map<const Node*, std::set<const Node*>> before;
    std::vector<const Node*> ends;
    for (const NodeRef& node : nodes) {
        std::set<const Node*>& all = before[node.get()];
        for (const NodeRef& one : node->after) {
            all.insert(one.get());
            all.insert(before[one.get()].begin(), before[one.get()].end());
        }
        const auto end =
            std::find_if(ends.begin(), ends.end(), [&](const Node* last) { return all.count(last) > 0; });
        lane_of.push_back(static_cast<size_t>(end - ends.begin()));
        if (end == ends.end()) ends.push_back(node.get());
        else *end = node.get();
    }
    return ends.size();
}

void retire_lanes(ExecutableGraph& graph) {
    Context& context = *graph.context;
    for (const StreamRef& lane : graph.lanes) {
        lane->closing = true;
        lane->arrived.notify_all();
        auto& lanes = context.lanes;
        lanes.erase(std::find(lanes.begin(), lanes.end(), lane));
        context.retired.push_back(lane);
    }
    graph.lanes.clear();
}

CUresult instantiate(const char* name, CUgraphExec* out, CUgraph handle, unsigned long long flags,
                     unsigned long long allowed) {
    return in_context(name, [&](Context& context, Lock& lock) -> CUresult {
        auto found = world().graphs.find(handle);
        if (!out || found == world().graphs.end() || flags & ~allowed) return CUDA_ERROR_INVALID_VALUE;
        if (flags & CU_GRAPH_INSTANTIATE_DEVICE_LAUNCH) return CUDA_ERROR_NOT_SUPPORTED;
        const GraphRef graph = found->second;
        if (graph->capturing || graph->context != &context) return CUDA_ERROR_INVALID_VALUE;
        context.reap(lock);
        auto made = std::make_shared<ExecutableGraph>();
        made->handle = static_cast<CUgraphExec>(world().memory->handle());
        made->context = &context;
        made->nodes = graph->nodes;
        const size_t lanes = plan(made->nodes, made->lane_of);
        while (made->lanes.size() < lanes) {
            auto lane =
                std::make_shared<Stream>(nullptr, &context, unsigned{CU_STREAM_NON_BLOCKING}, 0, false);
            if (!lane->start()) {
                retire_lanes(*made);
                return CUDA_ERROR_OUT_OF_MEMORY;
            }
            context.lanes.push_back(lane);
            made->lanes.push_back(lane);
        }
        made->objects = graph->objects.copy();
        world().executable_graphs[made->handle] = made;
        *out = made->handle;
        return CUDA_SUCCESS;
    });
}

void launch(const ExecutableGraphRef& graph, Stream& stream) {
    std::vector<PointRef> earlier;
    if (graph->last) earlier.push_back(graph->last);
    const PointRef begin = submit(stream, "cuGraphLaunch", nullptr, earlier);
    std::map<const Node*, PointRef> done;
    std::vector<PointRef> all{begin};
    for (size_t nth = 0; nth < graph->nodes.size(); ++nth) {
        const NodeRef& node = graph->nodes[nth];
        std::vector<PointRef> after{begin};
        for (const NodeRef& before : node->after) after.push_back(done[before.get()]);
        done[node.get()] = submit_unqueued(
            *graph->lanes[graph->lane_of[nth]], node->what,
            [node](Stream& stream) { return node->run(stream); }, after);
        all.push_back(done[node.get()]);
    }
    ++graph->running;
    graph->last = submit_unqueued(stream, "the end of a graph", nullptr, all, [graph] {
        if (--graph->running == 0 && graph->destroyed) graph->objects.release();
    });
}

void check_loaded(const ExecutableGraph& graph) {
    for (const NodeRef& node : graph.nodes) {
        if (node->kernel && !world().functions.count(node->kernel)) {
            die("cuGraphLaunch", "the module of a kernel of the graph was unloaded");
        }
    }
}

template <class Body>
CUresult about(const char* name, CUgraph handle, Body body) {
    return initialised(name, [&](Lock& lock) -> CUresult {
        const auto found = world().graphs.find(handle);
        if (found == world().graphs.end()) return CUDA_ERROR_INVALID_VALUE;
        const GraphRef graph = found->second;
        Holds holds(*graph->context, lock, name);
        return world().graphs.count(handle) ? body(graph) : CUDA_ERROR_INVALID_VALUE;
    });
}

}  // namespace

NodeRef Graph::add(const char* what, std::function<CUresult(Stream&)> run, CUfunction kernel,
                   std::vector<NodeRef> after) {
    const auto handle = static_cast<CUgraphNode>(world().memory->handle());
    nodes.push_back(
        std::make_shared<Node>(Node{handle, type_of(what), what, std::move(run), kernel, std::move(after)}));
    return nodes.back();
}

std::vector<NodeRef> Graph::add_copies(const std::vector<NodeRef>& originals,
                                       const std::vector<NodeRef>& after) {
    std::map<NodeRef, NodeRef> copies;
    std::set<NodeRef> ends;
    for (const NodeRef& original : originals) {
        Node copy = *original;
        copy.handle = static_cast<CUgraphNode>(world().memory->handle());
        for (NodeRef& before : copy.after) {
            before = copies[before];
            ends.erase(before);
        }
        if (copy.after.empty()) copy.after = after;
        nodes.push_back(std::make_shared<Node>(std::move(copy)));
        copies[original] = nodes.back();
        ends.insert(nodes.back());
    }
    return {ends.begin(), ends.end()};
}

GraphRef new_graph(Context& context) {
    auto graph = std::make_shared<Graph>();
    graph->handle = static_cast<CUgraph>(world().memory->handle());
    graph->context = &context;
    world().graphs[graph->handle] = graph;
    return graph;
}

void forget_graph(const GraphRef& graph) {
    world().graphs.erase(graph->handle);
    graph->objects.release();
}

void forget_graphs_of(Context& context) {
    auto forget = [&](auto& table) {
        for (auto entry = table.begin(); entry != table.end();) {
            if (entry->second->context != &context) {
                ++entry;
                continue;
            }
            entry->second->objects.release();
            entry->second->lanes.clear();
            entry = table.erase(entry);
        }
    };
    forget(world().executable_graphs);
    for (auto entry = world().graphs.begin(); entry != world().graphs.end();) {
        const GraphRef graph = (entry++)->second;
        if (graph->context == &context) forget_graph(graph);
    }
}

}  // namespace sim

using namespace sim;

SIMCUDA_EXPORT CUresult cuGraphDestroy(CUgraph handle) {
    return about(__func__, handle, [](const GraphRef& graph) {
        if (graph->capturing) return CUDA_ERROR_INVALID_VALUE;
        forget_graph(graph);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuGraphClone(CUgraph* out, CUgraph handle) {
    return about(__func__, handle, [&](const GraphRef& graph) {
        if (!out || graph->capturing) return CUDA_ERROR_INVALID_VALUE;
        const GraphRef clone = new_graph(*graph->context);
        clone->add_copies(graph->nodes, {});
        clone->objects = graph->objects.copy();
        *out = clone->handle;
        return CUDA_SUCCESS;
    });
}

// Without room for nodes, returns their number.
SIMCUDA_EXPORT CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode* nodes, size_t* count) {
    return about(__func__, handle, [&](const GraphRef& graph) {
        if (!count) return CUDA_ERROR_INVALID_VALUE;
        const size_t all = graph->nodes.size();
        for (size_t nth = 0; nodes && nth < *count; ++nth)
            nodes[nth] = nth < all ? graph->nodes[nth]->handle : nullptr;
        *count = nodes ? std::min(*count, all) : all;
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType* type) {
    return initialised(__func__, [&](Lock&) {
        for (const auto& [other, graph] : world().graphs) {
            for (const NodeRef& node : graph->nodes) {
                if (node->handle != handle || !type) continue;
                *type = node->type;
                return CUDA_SUCCESS;
            }
        }
        return CUDA_ERROR_INVALID_VALUE;
    });
}

SIMCUDA_EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph graph,
                                                    unsigned long long flags) {
    return instantiate(__func__, out, graph, flags,
                       CU_GRAPH_INSTANTIATE_AUTO_FREE_ON_LAUNCH | CU_GRAPH_INSTANTIATE_DEVICE_LAUNCH |
                           CU_GRAPH_INSTANTIATE_USE_NODE_PRIORITY);
}

SIMCUDA_EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec* out, CUgraph graph,
                                                     CUgraphInstantiateParams* parameters) {
    if (!parameters) return in_context(__func__, [](Context&, Lock&) { return CUDA_ERROR_INVALID_VALUE; });
    const CUresult code = instantiate(__func__, out, graph, parameters->flags, 15);
    parameters->failed = nullptr;
    parameters->result = code == CUDA_SUCCESS ? 0 : 1;
    return code;
}

SIMCUDA_EXPORT CUresult cuGraphUpload(CUgraphExec handle, CUstream stream) {
    return in_stream(__func__, stream, [&](Stream& stream, Lock&) {
        if (!world().executable_graphs.count(handle)) return CUDA_ERROR_INVALID_VALUE;
        submit(stream, "cuGraphUpload", nullptr);
        return CUDA_SUCCESS;
    });
}

SIMCUDA_EXPORT CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream) {
    return in_stream(
        __func__, stream,
        [&](Stream& stream, Lock&) {
            auto found = world().executable_graphs.find(handle);
            if (found == world().executable_graphs.end()) return CUDA_ERROR_INVALID_VALUE;
            const ExecutableGraphRef graph = found->second;
            if (graph->context != stream.context) return CUDA_ERROR_INVALID_VALUE;
            check_loaded(*graph);
            if (!stream.sequence) {
                launch(graph, stream);
                return CUDA_SUCCESS;
            }
            // A child graph: a copy, which the launches of the original do not wait for.
            Graph& parent = *stream.sequence->graph;
            if (!graph->nodes.empty()) stream.frontier = parent.add_copies(graph->nodes, stream.frontier);
            parent.objects.add(graph->objects);
            return CUDA_SUCCESS;
        },
        InCapture::Recorded);
}

// A running launch continues, and keeps the references to user objects.
SIMCUDA_EXPORT CUresult cuGraphExecDestroy(CUgraphExec handle) {
    const char* name = __func__;
    return initialised(name, [&](Lock& lock) {
        const auto found = world().executable_graphs.find(handle);
        if (found == world().executable_graphs.end()) return CUDA_ERROR_INVALID_VALUE;
        const ExecutableGraphRef graph = found->second;
        Holds holds(*graph->context, lock, name);
        if (world().executable_graphs.erase(handle) == 0) return CUDA_ERROR_INVALID_VALUE;
        graph->destroyed = true;
        if (graph->running == 0) graph->objects.release();
        retire_lanes(*graph);
        return CUDA_SUCCESS;
    });
}
