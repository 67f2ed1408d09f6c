/* One thread drives four GPUs, as programs for NCCL do: it makes the communicators of all ranks at once, and the calls of all
 * ranks in groups. Every collective, sends and receives, operations with factors, split, shrink, registration and memory. */
#include "check.h"

enum { WORLD = 4, COUNT = 1000, LENGTH = WORLD * COUNT };

static ncclComm_t comms[WORLD];
static cudaStream_t streams[WORLD];
static float *sends[WORLD], *recvs[WORLD];
static float host[LENGTH];

/* Each rank has a bit of its own, so a sum shows which rank is missing. */
static float value(int rank, size_t i) { return (float)((i % 13 + 1) << rank); }

/* What a rank must find at `i`; -1 if nothing may have been written. */
typedef float expectation(int rank, size_t i);

static float sum(int rank, size_t i) { (void)rank; return (float)((i % 13 + 1) * 15); }
static float average(int rank, size_t i) { return sum(rank, i) / WORLD; }
static float largest(int rank, size_t i) { (void)rank; return value(3, i); }
static float smallest(int rank, size_t i) { (void)rank; return value(0, i); }
static float weighted(int rank, size_t i) { (void)rank; return (float)((i % 13 + 1) * (1 + 2 * 2 + 4 * 3 + 8 * 4)); }
static float of_two(int rank, size_t i) { (void)rank; return value(2, i); }
static float sum_at_one(int rank, size_t i) { return rank == 1 ? sum(rank, i) : -1; }
static float gathered(int rank, size_t i) { (void)rank; return value((int)(i / COUNT), i % COUNT); }
static float gathered_at_three(int rank, size_t i) { return rank == 3 ? gathered(rank, i) : -1; }
static float scattered_sum(int rank, size_t i) { return sum(rank, (size_t)rank * COUNT + i); }
static float scattered(int rank, size_t i) { return value(0, (size_t)rank * COUNT + i); }
static float exchanged(int rank, size_t i) { return value((int)(i / COUNT), (size_t)rank * COUNT + i % COUNT); }

static void fill(void) {
    for (int rank = 0; rank < WORLD; rank++) {
        use_gpu(rank);
        for (size_t i = 0; i < LENGTH; i++) host[i] = value(rank, i);
        upload(sends[rank], host, LENGTH, streams[rank]);
        for (size_t i = 0; i < LENGTH; i++) host[i] = -1;
        upload(recvs[rank], host, LENGTH, streams[rank]);
    }
}

static void verify(const char *name, size_t count, expectation *expected) {
    for (int rank = 0; rank < WORLD; rank++) {
        use_gpu(rank);
        download(host, recvs[rank], count, streams[rank]);
        for (size_t i = 0; i < count; i++) {
            if (host[i] == expected(rank, i)) continue;
            fprintf(stderr, "%s: rank %d has %g at %zu and not %g\n", name, rank, host[i], i, expected(rank, i));
            exit(1);
        }
    }
}

/* Makes a call on every rank in one group, and verifies what the ranks received. */
#define EVERYWHERE(call, count, expected)                                          \
    do {                                                                           \
        fill();                                                                    \
        NCCL(ncclGroupStart());                                                    \
        for (int r = 0; r < WORLD; r++) NCCL(call);                                \
        NCCL(ncclGroupEnd());                                                      \
        verify(#call, count, expected);                                            \
    } while (0)

static void collectives(void) {
    static const struct { ncclRedOp_t op; expectation *expected; } ops[] = {
        {ncclSum, sum}, {ncclAvg, average}, {ncclMax, largest}, {ncclMin, smallest}};
    for (size_t at = 0; at < sizeof ops / sizeof *ops; at++) {
        EVERYWHERE(ncclAllReduce(sends[r], recvs[r], COUNT, ncclFloat, ops[at].op, comms[r], streams[r]), COUNT,
                   ops[at].expected);
    }
    EVERYWHERE(ncclBroadcast(sends[r], recvs[r], COUNT, ncclFloat, 2, comms[r], streams[r]), COUNT, of_two);
    EVERYWHERE(pncclReduce(sends[r], recvs[r], COUNT, ncclFloat, ncclSum, 1, comms[r], streams[r]), COUNT, sum_at_one);
    EVERYWHERE(ncclAllGather(sends[r], recvs[r], COUNT, ncclFloat, comms[r], streams[r]), LENGTH, gathered);
    EVERYWHERE(ncclReduceScatter(sends[r], recvs[r], COUNT, ncclFloat, ncclSum, comms[r], streams[r]), COUNT,
               scattered_sum);
    EVERYWHERE(ncclAlltoAll(sends[r], recvs[r], COUNT, ncclFloat, comms[r], streams[r]), LENGTH, exchanged);
    EVERYWHERE(ncclGather(sends[r], recvs[r], COUNT, ncclFloat, 3, comms[r], streams[r]), LENGTH, gathered_at_three);
    EVERYWHERE(ncclScatter(sends[r], recvs[r], COUNT, ncclFloat, 0, comms[r], streams[r]), COUNT, scattered);

    /* Two calls of each rank in one group, in their order; a group within a group. */
    fill();
    NCCL(ncclGroupStart());
    for (int r = 0; r < WORLD; r++) {
        NCCL(ncclGroupStart());
        NCCL(ncclAllReduce(sends[r], sends[r], COUNT, ncclFloat, ncclSum, comms[r], streams[r]));
        NCCL(ncclReduce(sends[r], recvs[r], COUNT, ncclFloat, ncclMax, 1, comms[r], streams[r]));
        NCCL(ncclGroupEnd());
    }
    NCCL(ncclGroupEnd());
    verify("two calls", COUNT, sum_at_one);

    /* In place, by the old name. */
    NCCL(ncclGroupStart());
    for (int r = 0; r < WORLD; r++) NCCL(ncclBcast(recvs[r], COUNT, ncclFloat, 1, comms[r], streams[r]));
    NCCL(ncclGroupEnd());
    verify("ncclBcast", COUNT, sum);
}

static float from_before(int rank, size_t i) { return value((rank + WORLD - 1) % WORLD, i); }
static float to_itself(int rank, size_t i) { return value(rank, i); }

/* Sends and receives progress together in a group, whatever their order. Vectors on GPUs are sent between processes only, so those
 * of ranks of this process are the host's. */
static void messages(void) {
    static float from[WORLD][LENGTH], to[WORLD][LENGTH];
    for (int r = 0; r < WORLD; r++) {
        for (size_t i = 0; i < LENGTH; i++) from[r][i] = value(r, i), to[r][i] = -1;
    }
    NCCL(ncclGroupStart());
    for (int r = 0; r < WORLD; r++) {
        int before = (r + WORLD - 1) % WORLD, after = (r + 1) % WORLD;
        if (r % 2) NCCL(ncclRecv(to[r], COUNT, ncclFloat, before, comms[r], NULL));
        NCCL(ncclSend(from[r], COUNT, ncclFloat, after, comms[r], NULL));
        if (r % 2 == 0) NCCL(ncclRecv(to[r], COUNT, ncclFloat, before, comms[r], NULL));
    }
    NCCL(ncclGroupEnd());
    for (int r = 0; r < WORLD; r++) {
        for (size_t i = 0; i < LENGTH; i++) CHECK(to[r][i] == (i < COUNT ? from_before(r, i) : -1));
    }

    /* Everyone to everyone, as an all-to-all. */
    NCCL(ncclGroupStart());
    for (int r = 0; r < WORLD; r++) {
        for (int peer = 0; peer < WORLD; peer++) {
            NCCL(ncclSend(from[r] + peer * COUNT, COUNT, ncclFloat, peer, comms[r], NULL));
            NCCL(ncclRecv(to[r] + peer * COUNT, COUNT, ncclFloat, peer, comms[r], NULL));
        }
    }
    NCCL(ncclGroupEnd());
    for (int r = 0; r < WORLD; r++) {
        for (size_t i = 0; i < LENGTH; i++) CHECK(to[r][i] == exchanged(r, i));
    }

    NCCL(ncclGroupStart());
    NCCL(ncclSend(sends[0], COUNT, ncclFloat, 1, comms[0], streams[0]));
    NCCL(ncclRecv(recvs[1], COUNT, ncclFloat, 0, comms[1], streams[1]));
    RETURNS(ncclInvalidUsage, "between processes only", ncclGroupEnd());

    /* To itself, and beside a collective, which ranks list in different orders. */
    fill();
    NCCL(ncclGroupStart());
    for (int r = 0; r < WORLD; r++) {
        float *spare = sends[r] + COUNT;
        if (r % 2) NCCL(ncclAllReduce(spare, spare, COUNT, ncclFloat, ncclSum, comms[r], streams[r]));
        NCCL(ncclSend(sends[r], COUNT, ncclFloat, r, comms[r], streams[r]));
        NCCL(ncclRecv(recvs[r], COUNT, ncclFloat, r, comms[r], streams[r]));
        if (r % 2 == 0) NCCL(ncclAllReduce(spare, spare, COUNT, ncclFloat, ncclSum, comms[r], streams[r]));
    }
    NCCL(ncclGroupEnd());
    verify("to itself", COUNT, to_itself);

    RETURNS(ncclInvalidArgument, "peer is 4", ncclSend(sends[0], COUNT, ncclFloat, WORLD, comms[0], streams[0]));
    NCCL(ncclGroupStart());
    NCCL(ncclSend(sends[0], COUNT, ncclFloat, 0, comms[0], streams[0]));
    NCCL(ncclRecv(recvs[0], COUNT, ncclFloat, 0, comms[0], NULL));
    RETURNS(ncclInvalidArgument, "must all be in the same stream", ncclGroupEnd());
}

/* A mistake in the call of one rank ends nothing if it is found before the others run. */
static void mistakes(void) {
    NCCL(ncclGroupStart());
    for (int r = 0; r < WORLD; r++) {
        NCCL(ncclAllReduce(sends[r], r == 2 ? NULL : recvs[r], COUNT, ncclFloat, ncclSum, comms[r], streams[r]));
    }
    RETURNS(ncclInvalidArgument, "ncclAllReduce: invalid argument: the receive buffer is NULL", ncclGroupEnd());
    NCCL(ncclGroupStart());
    for (int r = 0; r < WORLD; r++) {
        NCCL(ncclAllReduce(sends[r], recvs[r], COUNT, ncclFloat, ncclSum, comms[r], streams[r]));
    }
    NCCL(ncclSend(sends[1], COUNT, ncclFloat, 1, comms[1], streams[1]));
    RETURNS(ncclInvalidArgument, "to itself", ncclGroupEnd());
    for (int r = 0; r < WORLD; r++) CHECK(settled(comms[r]) == ncclSuccess);

    /* If it is found later, the others are aborted and do not wait for this rank. */
    ncclComm_t made[WORLD];
    NCCL(ncclGroupStart());
    for (int r = 0; r < WORLD; r++) NCCL(ncclCommSplit(comms[r], 0, r, &made[r], NULL));
    NCCL(ncclGroupEnd());
    void *graph;
    use_gpu(3);
    CUDA(cuStreamBeginCapture_v2, (void *, int), streams[3], 2);
    NCCL(ncclGroupStart());
    for (int r = 0; r < WORLD; r++) {
        NCCL(ncclAllReduce(sends[r], recvs[r], COUNT, ncclFloat, ncclSum, made[r], streams[r]));
    }
    RETURNS(ncclInvalidUsage, "captur", ncclGroupEnd());
    CUDA(cuStreamEndCapture, (void *, void **), streams[3], &graph);
    CHECK(settled(made[0]) == ncclRemoteError);
    for (int r = 0; r < WORLD; r++) NCCL(ncclCommAbort(made[r]));
}

static void factors(void) {
    ncclRedOp_t ops[WORLD];
    for (int r = 0; r < WORLD; r++) {
        float factor = (float)(r + 1);
        NCCL(ncclRedOpCreatePreMulSum(&ops[r], &factor, ncclFloat, ncclScalarHostImmediate, comms[r]));
        CHECK(ops[r] >= ncclNumOps);
    }
    EVERYWHERE(ncclAllReduce(sends[r], recvs[r], COUNT, ncclFloat, ops[r], comms[r], streams[r]), COUNT, weighted);
    for (int r = 0; r < WORLD; r++) NCCL(ncclRedOpDestroy(ops[r], comms[r]));
}

/* Sums 1 of every rank of `made`, whose ranks are the GPUs in `gpus`, and compares the sum with the number of ranks. */
static void sums_ones(ncclComm_t *made, const int *gpus, int count, int world) {
    NCCL(ncclGroupStart());
    for (int at = 0; at < count; at++) {
        int gpu = gpus[at];
        use_gpu(gpu);
        for (size_t i = 0; i < COUNT; i++) host[i] = 1;
        upload(recvs[gpu], host, COUNT, streams[gpu]);
        NCCL(ncclAllReduce(recvs[gpu], recvs[gpu], COUNT, ncclFloat, ncclSum, made[at], streams[gpu]));
    }
    NCCL(ncclGroupEnd());
    for (int at = 0; at < count; at++) {
        int gpu = gpus[at], device, ranks;
        use_gpu(gpu);
        CHECK(read_gpu(recvs[gpu] + COUNT - 1, streams[gpu]) == (float)world);
        NCCL(ncclCommCuDevice(made[at], &device));
        NCCL(ncclCommCount(made[at], &ranks));
        CHECK(device == gpu && ranks == world);
    }
}

static void split_and_shrink(void) {
    ncclComm_t made[WORLD];
    int gpus[WORLD] = {0, 1, 2, 3}, rank;

    /* Two halves, in reverse order. */
    NCCL(ncclGroupStart());
    for (int r = 0; r < WORLD; r++) NCCL(ncclCommSplit(comms[r], r % 2, -r, &made[r], NULL));
    NCCL(ncclGroupEnd());
    sums_ones(made, gpus, WORLD, 2);
    NCCL(ncclCommUserRank(made[0], &rank));
    CHECK(rank == 1);

    /* Two splits of each rank in one group are made in the order of the group. */
    ncclComm_t again[WORLD], others[WORLD];
    for (int round = 0; round < 3; round++) {
        NCCL(ncclGroupStart());
        for (int r = 0; r < WORLD; r++) {
            NCCL(ncclCommSplit(comms[r], r / 2, r, &again[r], NULL));
            NCCL(ncclCommSplit(comms[r], 0, -r, &others[r], NULL));
        }
        NCCL(ncclGroupEnd());
        for (int r = 0; r < WORLD; r++) {
            int halves, all;
            NCCL(ncclCommCount(again[r], &halves));
            NCCL(ncclCommCount(others[r], &all));
            CHECK(halves == 2 && all == WORLD);
            NCCL(ncclCommDestroy(again[r]));
            NCCL(ncclCommDestroy(others[r]));
        }
    }

    /* GPU 2 goes on without GPU 0, after its calls were ended. */
    ncclComm_t alone;
    NCCL(ncclCommShrink(made[2], &rank, 1, &alone, NULL, NCCL_SHRINK_ABORT));
    CHECK(settled(made[0]) == ncclRemoteError);
    sums_ones(&alone, &gpus[2], 1, 1);
    NCCL(ncclCommDestroy(alone));
    for (int r = 0; r < WORLD; r++) NCCL(ncclCommDestroy(made[r]));

    /* Ranks without a color get no communicator. */
    NCCL(ncclGroupStart());
    for (int r = 0; r < WORLD; r++) {
        made[r] = comms[r];
        NCCL(ncclCommSplit(comms[r], r == 0 ? NCCL_SPLIT_NOCOLOR : 7, 0, &made[r], NULL));
    }
    NCCL(ncclGroupEnd());
    CHECK(made[0] == NULL);
    sums_ones(made + 1, gpus + 1, 3, 3);
    for (int r = 1; r < WORLD; r++) NCCL(ncclCommDestroy(made[r]));

    int excluded = 3;
    NCCL(ncclGroupStart());
    for (int r = 0; r < 3; r++) NCCL(ncclCommShrink(comms[r], &excluded, 1, &made[r], NULL, NCCL_SHRINK_DEFAULT));
    NCCL(ncclGroupEnd());
    sums_ones(made, gpus, 3, 3);
    for (int r = 0; r < 3; r++) NCCL(ncclCommDestroy(made[r]));

    /* A split that was refused in a group does not count either. */
    NCCL(ncclGroupStart());
    NCCL(ncclCommSplit(comms[0], 0, 0, &made[0], NULL));
    RETURNS(ncclInvalidArgument, "color", ncclCommSplit(comms[1], -7, 0, &made[1], NULL));
    RETURNS(ncclInvalidArgument, "color", ncclGroupEnd());

    /* Rank 3 took no part in the shrink, and rank 0 alone in the refused group. Still the next split is one world for all of them, so
     * that all GPUs run the calls of two worlds in one order. */
    NCCL(ncclGroupStart());
    for (int r = 0; r < WORLD; r++) NCCL(ncclCommSplit(comms[r], 0, r, &made[r], NULL));
    NCCL(ncclGroupEnd());
    fill();
    NCCL(ncclGroupStart());
    for (int r = 0; r < WORLD; r++) {
        NCCL(ncclAllReduce(sends[r], sends[r], COUNT, ncclFloat, ncclMax, made[r], streams[r]));
        NCCL(ncclAllReduce(sends[r], recvs[r], COUNT, ncclFloat, ncclMin, comms[r], streams[r]));
    }
    NCCL(ncclGroupEnd());
    verify("two worlds", COUNT, largest);
    for (int r = 0; r < WORLD; r++) NCCL(ncclCommDestroy(made[r]));
}

/* Two ranks of a group are made in the background. */
static void without_waiting(void) {
    ncclUniqueId id;
    ncclComm_t made[2];
    int gpus[2] = {2, 3};
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    NCCL(ncclGetUniqueId(&id));
    NCCL(ncclGroupStart());
    for (int at = 0; at < 2; at++) {
        use_gpu(gpus[at]);
        NCCL(ncclCommInitRankConfig(&made[at], 2, id, at, &config));
    }
    RETURNS(ncclInProgress, "", ncclGroupEnd());
    for (int at = 0; at < 2; at++) CHECK(settled(made[at]) == ncclSuccess);
    sums_ones(made, gpus, 2, 2);
    for (int at = 0; at < 2; at++) NCCL(ncclCommDestroy(made[at]));
}

static void memory(void) {
    use_gpu(0);
    void *buffer, *handle;
    NCCL(ncclMemAlloc(&buffer, 1 << 16));
    CHECK(buffer != NULL);
    NCCL(ncclCommRegister(comms[0], buffer, 1 << 16, &handle));
    NCCL(ncclCommDeregister(comms[0], handle));
    void *other;
    NCCL(ncclCommRegister(comms[0], buffer, 1 << 16, &other));
    RETURNS(ncclInvalidArgument, "no handle of ncclCommRegister", ncclCommDeregister(comms[0], handle));
    NCCL(ncclCommDeregister(comms[0], other));
    NCCL(ncclMemFree(buffer));
    NCCL(ncclMemFree(NULL));
    NCCL(ncclMemAlloc(&buffer, 0));
    CHECK(buffer == NULL);
}

int main(void) {
    alarm(60);
    use_gpu(0);
    NCCL(ncclCommInitAll(comms, WORLD, NULL));
    for (int rank = 0; rank < WORLD; rank++) {
        use_gpu(rank);
        streams[rank] = new_stream();
        sends[rank] = on_gpu(LENGTH, 0, streams[rank]);
        recvs[rank] = on_gpu(LENGTH, 0, streams[rank]);
        int device, user_rank, count;
        NCCL(ncclCommCuDevice(comms[rank], &device));
        NCCL(ncclCommUserRank(comms[rank], &user_rank));
        NCCL(ncclCommCount(comms[rank], &count));
        CHECK(device == rank && user_rank == rank && count == WORLD);
    }
    collectives();
    messages();
    mistakes();
    factors();
    split_and_shrink();
    without_waiting();
    memory();
    for (int rank = 0; rank < WORLD; rank++) NCCL(ncclCommFinalize(comms[rank]));
    for (int rank = 0; rank < WORLD; rank++) CHECK(settled(comms[rank]) == ncclSuccess);
    for (int rank = 0; rank < WORLD; rank++) NCCL(ncclCommDestroy(comms[rank]));
    puts("one_process: ok");
    return 0;
}
