// Graphs: what captures record, the order of replays, and the life of user objects.

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "programs.h"

namespace selftest {
namespace {

using std::chrono::milliseconds;

CUgraph end_capture(CUstream stream) {
    CUgraph graph = nullptr;
    WORKS(cu("cuStreamEndCapture", stream, &graph));
    CHECK(graph);
    return graph;
}

CUgraphExec instantiate(CUgraph graph) {
    CUgraphExec made = nullptr;
    WORKS(cu("cuGraphInstantiateWithFlags", &made, graph, 0ull));
    return made;
}

void launch(CUgraphExec graph, CUstream stream) { WORKS(cu("cuGraphLaunch", graph, stream)); }

void set(Pointer at, unsigned char value, CUstream stream) {
    WORKS(cu("cuMemsetD8Async", at, value, kBytes, stream));
}

void copy(Pointer to, Pointer from, CUstream stream) { WORKS(cu("cuMemcpyAsync", to, from, kBytes, stream)); }

void call(CUhostFn function, void* data, CUstream stream) {
    WORKS(cu("cuLaunchHostFunc", stream, function, data));
}

size_t nodes_of(CUgraph graph) {
    size_t count = 0;
    WORKS(cu("cuGraphGetNodes", graph, static_cast<CUgraphNode*>(nullptr), &count));
    return count;
}

// A host function that notes its name.
struct Note {
    static std::mutex mutex;
    static std::string all;
    char name;
    static void write(void* note) {
        std::lock_guard<std::mutex> guard(mutex);
        all += static_cast<Note*>(note)->name;
    }
    static std::string take() {
        std::lock_guard<std::mutex> guard(mutex);
        return std::move(all);
    }
};
std::mutex Note::mutex;
std::string Note::all;
Note notes[] = {{'a'}, {'b'}, {'c'}, {'d'}};

void note(int which, CUstream stream) { call(Note::write, &notes[which], stream); }

// A host function that runs until it is allowed to end.
std::atomic<bool> may_end{false};
void wait_to_end(void*) {
    while (!may_end) std::this_thread::sleep_for(milliseconds(1));
}

std::atomic<int> destroyed{0};
CUuserObject object(unsigned references = 1) {
    CUuserObject made = nullptr;
    CUhostFn destructor = [](void* count) { ++*static_cast<std::atomic<int>*>(count); };
    WORKS(cu("cuUserObjectCreate", &made, static_cast<void*>(&destroyed), destructor, references, 1u));
    return made;
}
bool becomes_destroyed(int count) {
    for (int tries = 0; destroyed < count && tries < 5000; ++tries)
        std::this_thread::sleep_for(milliseconds(1));
    return destroyed == count;
}
bool stays_destroyed(int count) {
    std::this_thread::sleep_for(milliseconds(20));
    return destroyed == count;
}

}  // namespace

void graphs_replay() {
    begin();
    CUstream one = stream();
    Pointer first = allocate(), second = allocate();
    unsigned char *input = pinned(), *output = pinned();
    set(first, 9, one);
    WORKS(synchronize(one));
    begin_capture(one);
    copy(first, address(input), one);
    copy(second, first, one);
    set(first, 0, one);
    copy(address(output), second, one);
    CUgraph graph = end_capture(one);
    CHECK(nodes_of(graph) == 4);
    CUgraphExec replay = instantiate(graph);
    WORKS(cu("cuGraphDestroy", graph));
    // Nothing has run until now.
    unsigned char found = 0;
    WORKS(to_host(&found, first, 1, one));
    WORKS(synchronize(one));
    CHECK(found == 9);
    for (int round = 1; round <= 100; ++round) {
        std::memset(input, round, kBytes);
        launch(replay, one);
        WORKS(synchronize(one));
        for (size_t i = 0; i < kBytes; ++i) CHECK(output[i] == round);
    }
    // Work behind the launches waits for them.
    for (int round = 0; round < 50; ++round) launch(replay, one);
    set(second, 77, one);
    WORKS(to_host(&found, second, 1, one));
    WORKS(synchronize(one));
    CHECK(found == 77);
    WORKS(cu("cuGraphExecDestroy", replay));
    // A capture without work gives a graph without nodes.
    begin_capture(one);
    graph = end_capture(one);
    CHECK(nodes_of(graph) == 0);
    launch(instantiate(graph), one);
    WORKS(synchronize(one));
}

void graphs_copy_parameters() {
    begin();
    constexpr size_t count = 100;
    CUfunction sum = kernel("flexring_collective_float");
    CUstream one = stream();
    auto* values = reinterpret_cast<float*>(pinned());
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i);
    Pointer result = allocate();
    begin_capture(one);
    // Its parameters are gone when it returns.
    WORKS(launch(sum, sum_of(result, mapped(values), mapped(values), count), 3, one));
    CUgraph graph = end_capture(one);
    CUgraphNode node = nullptr;
    CUgraphNodeType type = CU_GRAPH_NODE_TYPE_HOST;
    size_t room = 1;
    WORKS(cu("cuGraphGetNodes", graph, &node, &room));
    CHECK(room == 1);
    WORKS(cu("cuGraphNodeGetType", node, &type));
    CHECK(type == CU_GRAPH_NODE_TYPE_KERNEL);
    launch(instantiate(graph), one);
    std::vector<float> found(count);
    WORKS(to_host(found.data(), result, count * 4, one));
    WORKS(synchronize(one));
    for (size_t i = 0; i < count; ++i) CHECK(found[i] == 2 * values[i]);
}

void graphs_follow_their_edges() {
    begin();
    CUstream one = stream(), two = stream(), three = stream();
    CUevent forked = event(), of_two = event(), of_three = event();
    begin_capture(one);
    note(0, one);
    WORKS(cu("cuEventRecord", forked, one));
    WORKS(cu("cuStreamWaitEvent", two, forked, 0u));
    WORKS(cu("cuStreamWaitEvent", three, forked, 0u));
    note(1, two);
    note(2, three);
    WORKS(cu("cuEventRecord", of_two, two));
    WORKS(cu("cuEventRecord", of_three, three));
    WORKS(cu("cuStreamWaitEvent", one, of_two, 0u));
    WORKS(cu("cuStreamWaitEvent", one, of_three, 0u));
    note(3, one);
    CUgraph graph = end_capture(one);
    int orders[2] = {0, 0};
    // Streams of some executable graphs are always faster than others.
    for (int made = 0; made < 20; ++made) {
        CUgraphExec replay = instantiate(graph);
        for (int round = 0; round < 10; ++round) {
            launch(replay, three);
            WORKS(synchronize(three));
            const std::string order = Note::take();
            CHECK(order == "abcd" || order == "acbd");
            ++orders[order == "abcd"];
        }
        WORKS(cu("cuGraphExecDestroy", replay));
    }
    CHECK(orders[0] > 0 && orders[1] > 0);
}

void launches_of_a_graph_are_serialised() {
    begin();
    CUstream one = stream(), two = stream();
    auto record = [&](int first, int second) {
        begin_capture(one);
        note(first, one);
        note(second, one);
        return instantiate(end_capture(one));
    };
    CUgraphExec replay = record(0, 1), other = record(2, 3);
    for (int round = 0; round < 20; ++round) {
        launch(replay, one);
        launch(replay, two);
    }
    WORKS(cu("cuCtxSynchronize"));
    std::string expected;
    for (int round = 0; round < 40; ++round) expected += "ab";
    CHECK(Note::take() == expected);
    // Two executable graphs are not, also if they were made from one graph.
    bool mixed = false;
    for (int round = 0; round < 500 && !mixed; ++round) {
        launch(replay, one);
        launch(other, two);
        WORKS(cu("cuCtxSynchronize"));
        const std::string order = Note::take();
        mixed = order != "abcd" && order != "cdab";
    }
    CHECK(mixed);
}

void captures_report_their_graph() {
    begin();
    CUstream one = stream();
    CUgraph graph = nullptr, same = nullptr;
    const CUgraphNode* dependencies = nullptr;
    const CUgraphEdgeData* edges = nullptr;
    unsigned long long id = 0, next = 0;
    size_t count = 7;
    int capturing = 3;
    auto info = [&] {
        return cu("cuStreamGetCaptureInfo_v2", one, &capturing, &id, &graph, &dependencies, &count);
    };
    WORKS(info());
    CHECK(capturing == 0 && !graph && count == 7);
    begin_capture(one);
    WORKS(info());
    CHECK(capturing == 1 && id != 0 && graph && count == 0);
    note(0, one);
    WORKS(cu("cuStreamGetCaptureInfo_v3", one, &capturing, &next, &same, &dependencies, &edges, &count));
    CHECK(next == id && same == graph && count == 1);
    CUgraphNode node = nullptr;
    size_t room = 1;
    WORKS(cu("cuGraphGetNodes", graph, &node, &room));
    CHECK(node == dependencies[0]);
    CHECK(cu("cuGraphDestroy", graph) == CUDA_ERROR_INVALID_VALUE);
    CHECK(end_capture(one) == graph);
    begin_capture(one);
    WORKS(info());
    CHECK(id != next && graph != same);
    CHECK(cu("cuStreamSynchronize", one) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    WORKS(info());
    CHECK(capturing == 2);
}

void graphs_are_cloned_and_nested() {
    begin();
    CUstream one = stream();
    begin_capture(one);
    note(0, one);
    note(1, one);
    CUgraph graph = end_capture(one), clone = nullptr;
    WORKS(cu("cuGraphClone", &clone, graph));
    CUgraphNode original = nullptr, copied = nullptr;
    size_t room = 1;
    WORKS(cu("cuGraphGetNodes", graph, &original, &room));
    WORKS(cu("cuGraphGetNodes", clone, &copied, &room));
    CHECK(original != copied && nodes_of(clone) == 2);
    WORKS(cu("cuGraphDestroy", graph));
    CUgraphExec inner = instantiate(clone);
    launch(inner, one);
    WORKS(synchronize(one));
    CHECK(Note::take() == "ab");
    // A launch in a stream that captures is a child graph.
    begin_capture(one);
    note(2, one);
    launch(inner, one);
    launch(inner, one);
    note(3, one);
    CUgraphExec outer = instantiate(end_capture(one));
    WORKS(cu("cuGraphExecDestroy", inner));
    for (int round = 0; round < 10; ++round) {
        launch(outer, one);
        WORKS(synchronize(one));
        CHECK(Note::take() == "cababd");
    }
}

void user_objects_outlive_launches() {
    begin();
    CUstream one = stream();
    CUuserObject mine = object(2), moved = object();
    begin_capture(one);
    call(wait_to_end, nullptr, one);
    CUgraph graph = end_capture(one), clone = nullptr;
    WORKS(cu("cuGraphRetainUserObject", graph, mine, 1u, 0u));
    WORKS(cu("cuGraphRetainUserObject", graph, moved, 1u, 1u));
    WORKS(cu("cuUserObjectRetain", mine, 1u));
    WORKS(cu("cuUserObjectRelease", mine, 3u));
    WORKS(cu("cuGraphClone", &clone, graph));
    CUgraphExec replay = instantiate(graph), another = instantiate(clone);
    WORKS(cu("cuGraphDestroy", graph));
    WORKS(cu("cuGraphReleaseUserObject", clone, mine, 1u));
    CHECK(cu("cuGraphReleaseUserObject", clone, mine, 1u) == CUDA_ERROR_INVALID_VALUE);
    WORKS(cu("cuGraphDestroy", clone));
    launch(replay, one);
    launch(replay, one);
    WORKS(cu("cuGraphExecDestroy", another));
    WORKS(cu("cuGraphExecDestroy", replay));
    CHECK(cu("cuGraphLaunch", replay, one) == CUDA_ERROR_INVALID_VALUE);
    CHECK(stays_destroyed(0));
    may_end = true;
    WORKS(synchronize(one));
    CHECK(becomes_destroyed(2));
    CHECK(cu("cuUserObjectRelease", mine, 1u) == CUDA_ERROR_INVALID_VALUE);
}

void user_objects_die_with_captures() {
    begin();
    CUstream one = stream();
    auto capture = [&] {
        int capturing = 0;
        CUgraph graph = nullptr;
        begin_capture(one);
        WORKS(cu("cuStreamGetCaptureInfo_v2", one, &capturing, static_cast<unsigned long long*>(nullptr),
                 &graph, static_cast<const CUgraphNode**>(nullptr), static_cast<size_t*>(nullptr)));
        WORKS(cu("cuGraphRetainUserObject", graph, object(), 1u, 1u));
        return graph;
    };
    CUgraph graph = capture();
    CHECK(cu("cuStreamQuery", one) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(stays_destroyed(0));
    CHECK(cu("cuStreamEndCapture", one, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK(becomes_destroyed(1));
    capture();
    graph = end_capture(one);
    CHECK(stays_destroyed(1));
    // A graph of another graph's launch has the same user objects.
    CUgraphExec inner = instantiate(graph);
    begin_capture(one);
    launch(inner, one);
    CUgraph outer = end_capture(one);
    WORKS(cu("cuGraphDestroy", graph));
    WORKS(cu("cuGraphExecDestroy", inner));
    CHECK(stays_destroyed(1));
    WORKS(cu("cuGraphDestroy", outer));
    CHECK(becomes_destroyed(2));
}

void calls_in_destructors_die() {
    begin();
    CUuserObject made = nullptr;
    CUhostFn destructor = [](void*) {
        int count = 0;
        cu("cuDeviceGetCount", &count);
    };
    WORKS(cu("cuUserObjectCreate", &made, static_cast<void*>(nullptr), destructor, 1u, 1u));
    WORKS(cu("cuUserObjectRelease", made, 1u));
    for (int nth = 0; nth < 5000; ++nth) std::this_thread::sleep_for(milliseconds(1));
}

void kernels_unloaded_under_a_graph_die() {
    begin();
    CUmodule module = nullptr;
    CUfunction sum = nullptr;
    CUstream one = stream();
    prepare_launches();
    WORKS(cu("cuModuleLoadData", &module, static_cast<const void*>("anything")));
    WORKS(cu("cuModuleGetFunction", &sum, module, "flexring_collective_float"));
    Pointer memory = allocate();
    begin_capture(one);
    WORKS(launch(sum, sum_of(memory, memory, memory, 10), 1, one));
    CUgraphExec replay = instantiate(end_capture(one));
    WORKS(cu("cuModuleUnload", module));
    launch(replay, one);
}

void invalid_graph_calls_fail() {
    begin();
    constexpr CUresult invalid = CUDA_ERROR_INVALID_VALUE;
    CUstream one = stream();
    begin_capture(one);
    CUgraph graph = end_capture(one);
    CUgraphExec made = nullptr;
    auto* no_graph = static_cast<CUgraph>(nullptr);
    CHECK(cu("cuGraphDestroy", no_graph) == invalid);
    CHECK(cu("cuGraphInstantiateWithFlags", &made, no_graph, 0ull) == invalid);
    CHECK(cu("cuGraphInstantiateWithFlags", &made, graph, 16ull) == invalid);
    CHECK(cu("cuGraphInstantiateWithFlags", &made, graph, 4ull) == CUDA_ERROR_NOT_SUPPORTED);
    CHECK(cu("cuGraphLaunch", static_cast<CUgraphExec>(nullptr), one) == invalid);
    CHECK(cu("cuGraphExecDestroy", static_cast<CUgraphExec>(nullptr)) == invalid);
    CUgraphInstantiateParams parameters{CU_GRAPH_INSTANTIATE_UPLOAD, one, nullptr, 9};
    WORKS(cu("cuGraphInstantiateWithParams", &made, graph, &parameters));
    CHECK(parameters.result == 0);
    WORKS(cu("cuGraphUpload", made, one));
    WORKS(cu("cuGraphExecDestroy", made));
    CHECK(cu("cuGraphExecDestroy", made) == invalid);
    WORKS(cu("cuGraphDestroy", graph));
    CHECK(cu("cuGraphDestroy", graph) == invalid);
    CUuserObject thing = nullptr;
    CUhostFn nothing = [](void*) {};
    void* data = nullptr;
    CHECK(cu("cuUserObjectCreate", &thing, data, nothing, 0u, 1u) == invalid);
    CHECK(cu("cuUserObjectCreate", &thing, data, nothing, 1u, 0u) == invalid);
    CHECK(cu("cuUserObjectCreate", &thing, data, static_cast<CUhostFn>(nullptr), 1u, 1u) == invalid);
    WORKS(cu("cuUserObjectCreate", &thing, data, nothing, 1u, 1u));
    CHECK(cu("cuGraphRetainUserObject", graph, thing, 1u, 0u) == invalid);
    CHECK(cu("cuUserObjectRelease", thing, 0u) == invalid);
    // A graph is not made while a capture that is not relaxed goes on.
    begin_capture(one, Relaxed);
    graph = end_capture(one);
    begin_capture(one, ThreadLocal);
    CHECK(cu("cuGraphInstantiateWithFlags", &made, graph, 0ull) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK(status(one) == 2);
}

void destroyed_contexts_release_graphs() {
    begin();
    CUstream one = stream();
    begin_capture(one);
    call(wait_to_end, nullptr, one);
    CUgraph graph = end_capture(one);
    WORKS(cu("cuGraphRetainUserObject", graph, object(), 1u, 1u));
    CUgraphExec replay = instantiate(graph);
    launch(replay, one);
    CUstream two = stream();
    begin_capture(two);
    note(0, two);
    std::thread([] {
        std::this_thread::sleep_for(milliseconds(5));
        may_end = true;
    }).detach();
    WORKS(cu("cuStreamDestroy_v2", two));
    WORKS(cu("cuDevicePrimaryCtxReset_v2", 0));
    CHECK(becomes_destroyed(1));
}

}  // namespace selftest
