/* A process for each rank, whose number is the argument. Each call as the wrappers of vLLM and SGLang make it: in a stream that is
 * being captured, out of place and in place, replayed, and made again without a graph between the replays. */
#include "check.h"

#include <sys/mman.h>
#include <sys/wait.h>

enum { MOST = 3, SHORT = 7, LONG = 50000, REPLAYS = 3, GLOBAL = 0 };

typedef void *graph;

static struct shared { volatile int ready; ncclUniqueId id; } *shared;
static int world, rank;
static ncclComm_t comm;
static ncclRedOp_t twice;
static void *stream;
/* Each has a block for every rank. */
static float *vector, *other;
static float *host;

static graph captured(void) {
    void *made;
    graph executable;
    CUDA(cuStreamEndCapture, (void *, void **), stream, &made);
    CUDA(cuGraphInstantiateWithFlags, (graph *, void *, unsigned long long), &executable, made, 0);
    CUDA(cuGraphDestroy, (void *), made);
    return executable;
}

static void capture(void) {
    CUDA(cuStreamBeginCapture_v2, (void *, int), stream, GLOBAL);
}

static void launch(graph executable) {
    CUDA(cuGraphLaunch, (graph, void *), executable, stream);
}

static void destroy(graph executable) {
    CUDA(cuGraphExecDestroy, (graph), executable);
}

/* What `from` sends in a round, and the sum of all ranks. */
static float sent(int from, size_t at, int round) {
    return (float)(at % 97 + 100 * (size_t)from + 1000 * (size_t)round);
}

static float sum(size_t at, int round) {
    float all = 0;
    for (int from = 0; from < world; from++) all += sent(from, at, round);
    return all;
}

/* A call of `count` elements, or blocks of as many. */
struct call {
    const char *name;
    /* Whether the send buffer, and the receive buffer, have a block for every rank. */
    int sends_all, receives_all;
    void (*make)(const float *send, float *recv, size_t count);
    /* What an element of the receive buffer is afterwards; -1 if it is what it was. */
    float (*expected)(size_t at, size_t count, int round);
};

static void all_reduce(const float *send, float *recv, size_t count) {
    NCCL(ncclAllReduce(send, recv, count, ncclFloat, ncclSum, comm, stream));
}
static float of_all_reduce(size_t at, size_t count, int round) {
    (void)count;
    return sum(at, round);
}
static void scaled(const float *send, float *recv, size_t count) {
    NCCL(ncclAllReduce(send, recv, count, ncclFloat, twice, comm, stream));
}
static float of_scaled(size_t at, size_t count, int round) {
    (void)count;
    return 2 * sum(at, round);
}
static void all_gather(const float *send, float *recv, size_t count) {
    NCCL(ncclAllGather(send, recv, count, ncclFloat, comm, stream));
}
static float of_all_gather(size_t at, size_t count, int round) {
    return sent((int)(at / count), at % count, round);
}
static void reduce_scatter(const float *send, float *recv, size_t count) {
    NCCL(ncclReduceScatter(send, recv, count, ncclFloat, ncclSum, comm, stream));
}
static float of_reduce_scatter(size_t at, size_t count, int round) {
    return sum((size_t)rank * count + at, round);
}
static void broadcast(const float *send, float *recv, size_t count) {
    NCCL(ncclBroadcast(send, recv, count, ncclFloat, world - 1, comm, stream));
}
static float of_broadcast(size_t at, size_t count, int round) {
    (void)count;
    return sent(world - 1, at, round);
}
static void reduce(const float *send, float *recv, size_t count) {
    NCCL(ncclReduce(send, recv, count, ncclFloat, ncclSum, world - 1, comm, stream));
}
static float of_reduce(size_t at, size_t count, int round) {
    (void)count;
    return rank == world - 1 ? sum(at, round) : -1;
}
static void all_to_all(const float *send, float *recv, size_t count) {
    NCCL(ncclAlltoAll(send, recv, count, ncclFloat, comm, stream));
}
static float of_all_to_all(size_t at, size_t count, int round) {
    return sent((int)(at / count), (size_t)rank * count + at % count, round);
}
static void gather(const float *send, float *recv, size_t count) {
    NCCL(ncclGather(send, recv, count, ncclFloat, world - 1, comm, stream));
}
static float of_gather(size_t at, size_t count, int round) {
    return rank == world - 1 ? of_all_gather(at, count, round) : -1;
}
static void scatter(const float *send, float *recv, size_t count) {
    NCCL(ncclScatter(send, recv, count, ncclFloat, world - 1, comm, stream));
}
static float of_scatter(size_t at, size_t count, int round) {
    return sent(world - 1, (size_t)rank * count + at, round);
}
/* The wrappers' all-gather and reduce-scatter of uneven blocks are groups of these. */
static void broadcasts(const float *send, float *recv, size_t count) {
    NCCL(ncclGroupStart());
    for (int root = 0; root < world; root++) {
        NCCL(ncclBroadcast(send, recv + (size_t)root * count, count, ncclFloat, root, comm, stream));
    }
    NCCL(ncclGroupEnd());
}
static void reduces(const float *send, float *recv, size_t count) {
    NCCL(ncclGroupStart());
    for (int root = 0; root < world; root++) {
        NCCL(ncclReduce(send + (size_t)root * count, recv, count, ncclFloat, ncclSum, root, comm, stream));
    }
    NCCL(ncclGroupEnd());
}

static const struct call calls[] = {
    {"all-reduce", 0, 0, all_reduce, of_all_reduce},
    {"scaled all-reduce", 0, 0, scaled, of_scaled},
    {"all-gather", 0, 1, all_gather, of_all_gather},
    {"reduce-scatter", 1, 0, reduce_scatter, of_reduce_scatter},
    {"broadcast", 0, 0, broadcast, of_broadcast},
    {"reduce", 0, 0, reduce, of_reduce},
    {"all-to-all", 1, 1, all_to_all, of_all_to_all},
    {"gather", 0, 1, gather, of_gather},
    {"scatter", 1, 0, scatter, of_scatter},
    {"broadcasts", 0, 1, broadcasts, of_all_gather},
    {"reduces", 1, 0, reduces, of_reduce_scatter},
};

/* Writes what this rank sends in a round, and -1 elsewhere. */
static void fill(const float *send, size_t count, int round) {
    size_t whole = (size_t)world * LONG;
    for (float *base = vector; base != NULL; base = base == vector ? other : NULL) {
        for (size_t at = 0; at < whole; at++) {
            int is_sent = base + at >= send && base + at < send + count;
            host[at] = is_sent ? sent(rank, (size_t)(base + at - send), round) : -1;
        }
        upload(base, host, whole, stream);
        /* The source is used again. */
        CHECK(synchronize(stream) == 0);
    }
}

static void check(const struct call *call, const float *recv, size_t count, int in_place, int round) {
    size_t received = call->receives_all ? (size_t)world * count : count;
    download(host, recv, received, stream);
    for (size_t at = 0; at < received; at++) {
        float expected = call->expected(at, count, round);
        if (expected == -1 && in_place) break;
        if (host[at] == expected) continue;
        fprintf(stderr, "rank %d: %s of %zu, in place %d, round %d, element %zu: %f and not %f\n", rank, call->name, count,
                in_place, round, at, host[at], expected);
        exit(1);
    }
}

static void test(const struct call *call, size_t count, int in_place) {
    /* As nccl-tests have it: a block lies where it would be in the vector of all blocks. */
    float *recv = in_place ? vector : other;
    const float *send = vector;
    if (in_place && call->receives_all && !call->sends_all) send += (size_t)rank * count;
    if (in_place && call->sends_all && !call->receives_all) recv += (size_t)rank * count;
    size_t sends = call->sends_all ? (size_t)world * count : count;

    capture();
    call->make(send, recv, count);
    graph executable = captured();
    for (int round = 0; round < REPLAYS; round++) {
        fill(send, sends, 2 * round);
        launch(executable);
        check(call, recv, count, in_place, 2 * round);
        fill(send, sends, 2 * round + 1);
        call->make(send, recv, count);
        check(call, recv, count, in_place, 2 * round + 1);
    }
    destroy(executable);
}

/* Blocks in groups of sends and receives, which the wrappers use for experts and for pipelines. */
static void exchange(const float *send, float *recv, size_t count) {
    NCCL(ncclGroupStart());
    for (int peer = 0; peer < world; peer++) {
        NCCL(ncclSend(send + (size_t)peer * count, count, ncclFloat, peer, comm, stream));
        NCCL(ncclRecv(recv + (size_t)peer * count, count, ncclFloat, peer, comm, stream));
    }
    NCCL(ncclGroupEnd());
}
/* Each rank's vector goes to the next one, by single calls. */
static void pass_on(const float *send, float *recv, size_t count) {
    if (rank == 0 && world > 1) NCCL(ncclSend(send, count, ncclFloat, 1, comm, stream));
    if (rank > 0) NCCL(ncclRecv(recv, count, ncclFloat, rank - 1, comm, stream));
    if (rank > 0 && rank + 1 < world) NCCL(ncclSend(send, count, ncclFloat, rank + 1, comm, stream));
}
static float of_pass_on(size_t at, size_t count, int round) {
    (void)count;
    return rank > 0 ? sent(rank - 1, at, round) : -1;
}
static const struct call messages[] = {
    {"sends and receives in a group", 1, 1, exchange, of_all_to_all},
    {"single sends and receives", 0, 0, pass_on, of_pass_on},
};

static void run(void) {
    use_gpu(0);
    stream = new_stream();
    if (rank == 0) {
        NCCL(ncclGetUniqueId(&shared->id));
        shared->ready = 1;
    }
    while (!shared->ready) usleep(1000);
    NCCL(ncclCommInitRank(&comm, world, shared->id, rank));
    float two = 2;
    NCCL(ncclRedOpCreatePreMulSum(&twice, &two, ncclFloat, ncclScalarHostImmediate, comm));
    size_t whole = (size_t)world * LONG;
    host = malloc(whole * sizeof *host);
    CHECK(host != NULL);
    vector = on_gpu(whole, -1, stream), other = on_gpu(whole, -1, stream);
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        for (int in_place = 0; in_place < 2; in_place++) {
            test(&calls[i], SHORT, in_place);
            test(&calls[i], LONG, in_place);
        }
    }
    /* Ranks may access memory of each other that is registered. */
    void *handles[2];
    NCCL(ncclCommRegister(comm, vector, whole * sizeof *vector, &handles[0]));
    NCCL(ncclCommRegister(comm, other, whole * sizeof *other, &handles[1]));
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        for (int in_place = 0; in_place < 2; in_place++) test(&calls[i], LONG, in_place);
    }
    for (int i = 0; i < 2; i++) NCCL(ncclCommDeregister(comm, handles[i]));
    for (size_t i = 0; i < sizeof messages / sizeof *messages; i++) {
        test(&messages[i], SHORT, 0);
        test(&messages[i], LONG, 0);
    }
    NCCL(ncclCommDestroy(comm));
}

int main(int argc, char **argv) {
    alarm(90);
    CHECK(argc == 2);
    world = atoi(argv[1]);
    CHECK(world >= 1 && world <= MOST);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    pid_t children[MOST];
    for (rank = 0; rank < world; rank++) {
        children[rank] = fork();
        CHECK(children[rank] >= 0);
        if (children[rank] == 0) {
            alarm(90);
            run();
            exit(0);
        }
    }
    for (int child = 0; child < world; child++) {
        int status;
        CHECK(waitpid(children[child], &status, 0) == children[child]);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    puts("graphs: ok");
    return 0;
}
