// Graphs, the executable graphs made from them, and the references to user objects that both own.
//
// Owns what a launch of a graph is: its nodes run in streams of the executable graph, so that nodes without a
// path between them run in any order. A launch waits for the earlier launches of the same executable graph.
// The caller holds the world's lock in every function. Must not know what nodes do, nor how they are
// captured.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "abi.h"
#include "streams.h"

namespace sim {

// References to user objects. Not released by itself.
class UserObjects {
public:
    // Takes references that exist already.
    void add(CUuserObject object, unsigned count);
    // Releases references; false if there are less.
    bool remove(CUuserObject object, unsigned count);
    // As many references to the same objects.
    UserObjects copy() const;
    // Takes a copy of other references.
    void add(const UserObjects& others);
    void release();

private:
    std::map<CUuserObject, unsigned> counts_;
};

struct Graph {
    CUgraph handle;
    Context* context;
    // In an order in which they can run.
    std::vector<NodeRef> nodes;
    UserObjects objects;
    // Owned by a capture: the program must not destroy it.
    bool capturing = false;

    NodeRef add(const char* what, std::function<CUresult(Stream&)> run, CUfunction kernel,
                std::vector<NodeRef> after);
    // Adds copies of nodes, of which those without dependencies get these ones. Returns the copies on which
    // none depends.
    std::vector<NodeRef> add_copies(const std::vector<NodeRef>& originals, const std::vector<NodeRef>& after);
};
using GraphRef = std::shared_ptr<Graph>;

struct ExecutableGraph {
    CUgraphExec handle;
    Context* context;
    std::vector<NodeRef> nodes;
    UserObjects objects;
    // The streams that run its nodes, and by node the index of its stream.
    std::vector<StreamRef> lanes;
    std::vector<size_t> lane_of;
    // The end of its last launch.
    PointRef last;
    unsigned running = 0;
    bool destroyed = false;
};
using ExecutableGraphRef = std::shared_ptr<ExecutableGraph>;

GraphRef new_graph(Context& context);
void forget_graph(const GraphRef& graph);

// Releases all graphs of a context that is destroyed.
void forget_graphs_of(Context& context);

}  // namespace sim
