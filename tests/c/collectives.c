/* Four processes reduce-scatter, all-gather, broadcast, reduce, gather, scatter and exchange blocks: out of place, in place as
 * in NCCL, and with NULL for buffers that a rank does not use. Over shared memory and over TCP. */
#include "ranks.h"

#include <stdint.h>

enum { WORLD = 4 };

#define INVALID FLEXRING_INVALID_ARGUMENT
#define SENTINEL (-77)

/* Each rank has its own seven bits, so a sum shows which rank is missing or was added twice. */
static int32_t value(int rank, size_t i) { return (int32_t)(i % 61 + 1) << 7 * rank; }

static int32_t sum(size_t i) {
    int32_t all = 0;
    for (int rank = 0; rank < WORLD; rank++) all += value(rank, i);
    return all;
}

/* Memory for one vector, on the heap or shared between ranks. */
static int32_t *vector(flexring_comm *comm, int shared, size_t count) {
    void *memory = malloc(count * sizeof(int32_t));
    if (shared) {
        free(memory);
        WORKS(flexring_alloc(comm, count * sizeof(int32_t), &memory));
    }
    CHECK(memory != NULL);
    for (size_t i = 0; i < count; i++) ((int32_t *)memory)[i] = SENTINEL;
    return memory;
}

static void release(flexring_comm *comm, int shared, int32_t *vector) {
    if (shared) WORKS(flexring_free(comm, vector));
    else free(vector);
}

static void reduce_scatter(flexring_comm *comm, int rank, int shared, size_t count) {
    int32_t *send = vector(comm, shared, WORLD * count), *recv = vector(comm, shared, count);
    size_t own = (size_t)rank * count, next = (size_t)(rank + 1) % WORLD * count;
    for (size_t i = 0; i < WORLD * count; i++) send[i] = value(rank, i);

    WORKS(flexring_reduce_scatter(send, recv, count, FLEXRING_INT32, FLEXRING_SUM, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(recv[i] == sum(own + i));
    for (size_t i = 0; i < WORLD * count; i++) CHECK(send[i] == value(rank, i));

    EXPECT(INVALID, "overlap", flexring_reduce_scatter(send, send + next, count, FLEXRING_INT32, FLEXRING_SUM, comm, NULL));
    WORKS(flexring_reduce_scatter(send, send + own, count, FLEXRING_INT32, FLEXRING_SUM, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(send[own + i] == sum(own + i));

    flexring_request *request;
    for (size_t i = 0; i < WORLD * count; i++) send[i] = value(rank, i);
    for (size_t i = 0; i < count; i++) recv[i] = SENTINEL;
    WORKS(flexring_reduce_scatter_async(send, recv, count, FLEXRING_INT32, FLEXRING_SUM, comm, &request));
    WORKS(flexring_wait(request));
    for (size_t i = 0; i < count; i++) CHECK(recv[i] == sum(own + i));
    release(comm, shared, send), release(comm, shared, recv);
}

static void all_gather(flexring_comm *comm, int rank, int shared, size_t count) {
    int32_t *send = vector(comm, shared, count), *recv = vector(comm, shared, WORLD * count);
    size_t own = (size_t)rank * count, next = (size_t)(rank + 1) % WORLD * count;
    for (size_t i = 0; i < count; i++) send[i] = value(rank, i);

    WORKS(flexring_all_gather(send, recv, count, FLEXRING_INT32, comm, NULL));
    for (size_t i = 0; i < WORLD * count; i++) CHECK(recv[i] == value((int)(i / count), i % count));
    for (size_t i = 0; i < count; i++) CHECK(send[i] == value(rank, i));

    for (size_t i = 0; i < WORLD * count; i++) recv[i] = i / count == (size_t)rank ? send[i % count] : SENTINEL;
    EXPECT(INVALID, "overlap", flexring_all_gather(recv + next, recv, count, FLEXRING_INT32, comm, NULL));
    WORKS(flexring_all_gather(recv + own, recv, count, FLEXRING_INT32, comm, NULL));
    for (size_t i = 0; i < WORLD * count; i++) CHECK(recv[i] == value((int)(i / count), i % count));

    flexring_request *request;
    for (size_t i = 0; i < WORLD * count; i++) recv[i] = SENTINEL;
    WORKS(flexring_all_gather_async(send, recv, count, FLEXRING_INT32, comm, &request));
    WORKS(flexring_wait(request));
    for (size_t i = 0; i < WORLD * count; i++) CHECK(recv[i] == value((int)(i / count), i % count));
    release(comm, shared, send), release(comm, shared, recv);
}

static void broadcast(flexring_comm *comm, int rank, int root, int shared, size_t count) {
    int32_t *send = vector(comm, shared, count), *recv = vector(comm, shared, count);
    for (size_t i = 0; rank == root && i < count; i++) send[i] = value(root, i);

    WORKS(flexring_broadcast(rank == root ? send : NULL, recv, count, FLEXRING_INT32, root, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(recv[i] == value(root, i));
    for (size_t i = 0; i < count; i++) CHECK(send[i] == (rank == root ? value(root, i) : SENTINEL));

    WORKS(flexring_broadcast(send, send, count, FLEXRING_INT32, root, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(send[i] == value(root, i));

    flexring_request *request;
    for (size_t i = 0; i < count; i++) recv[i] = SENTINEL;
    WORKS(flexring_broadcast_async(rank == root ? send : NULL, recv, count, FLEXRING_INT32, root, comm, &request));
    WORKS(flexring_wait(request));
    for (size_t i = 0; i < count; i++) CHECK(recv[i] == value(root, i));
    release(comm, shared, send), release(comm, shared, recv);
}

static void reduce(flexring_comm *comm, int rank, int root, int shared, size_t count) {
    int32_t *send = vector(comm, shared, count), *recv = vector(comm, shared, count);
    for (size_t i = 0; i < count; i++) send[i] = value(rank, i);

    WORKS(flexring_reduce(send, rank == root ? recv : NULL, count, FLEXRING_INT32, FLEXRING_SUM, root, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(recv[i] == (rank == root ? sum(i) : SENTINEL));
    for (size_t i = 0; i < count; i++) CHECK(send[i] == value(rank, i));
    WORKS(flexring_reduce(send, recv, count, FLEXRING_INT32, FLEXRING_MAX, root, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(recv[i] == (rank == root ? value(WORLD - 1, i) : SENTINEL));

    flexring_request *request;
    WORKS(flexring_reduce_async(send, recv, count, FLEXRING_INT32, FLEXRING_SUM, root, comm, &request));
    WORKS(flexring_wait(request));
    for (size_t i = 0; i < count; i++) CHECK(recv[i] == (rank == root ? sum(i) : SENTINEL));

    WORKS(flexring_reduce(send, send, count, FLEXRING_INT32, FLEXRING_SUM, root, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(send[i] == (rank == root ? sum(i) : value(rank, i)));
    release(comm, shared, send), release(comm, shared, recv);
}

static void gather(flexring_comm *comm, int rank, int root, int shared, size_t count) {
    int32_t *send = vector(comm, shared, count), *recv = vector(comm, shared, WORLD * count);
    size_t own = (size_t)rank * count;
    for (size_t i = 0; i < count; i++) send[i] = value(rank, i);

    WORKS(flexring_gather(send, rank == root ? recv : NULL, count, FLEXRING_INT32, root, comm, NULL));
    for (size_t i = 0; i < WORLD * count; i++)
        CHECK(recv[i] == (rank == root ? value((int)(i / count), i % count) : SENTINEL));
    for (size_t i = 0; i < count; i++) CHECK(send[i] == value(rank, i));
    for (size_t i = 0; i < count; i++) recv[own + i] = send[i];

    flexring_request *request;
    WORKS(flexring_gather_async(recv + own, recv, count, FLEXRING_INT32, root, comm, &request));
    WORKS(flexring_wait(request));
    for (size_t i = 0; rank == root && i < WORLD * count; i++) CHECK(recv[i] == value((int)(i / count), i % count));
    release(comm, shared, send), release(comm, shared, recv);
}

static void scatter(flexring_comm *comm, int rank, int root, int shared, size_t count) {
    int32_t *send = vector(comm, shared, WORLD * count), *recv = vector(comm, shared, count);
    size_t own = (size_t)rank * count;
    for (size_t i = 0; rank == root && i < WORLD * count; i++) send[i] = value(root, i);

    WORKS(flexring_scatter(rank == root ? send : NULL, recv, count, FLEXRING_INT32, root, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(recv[i] == value(root, own + i));
    for (size_t i = 0; i < count; i++) recv[i] = SENTINEL;
    for (size_t i = 0; i < WORLD * count; i++) CHECK(send[i] == (rank == root ? value(root, i) : SENTINEL));

    flexring_request *request;
    WORKS(flexring_scatter_async(send, recv, count, FLEXRING_INT32, root, comm, &request));
    WORKS(flexring_wait(request));
    for (size_t i = 0; i < count; i++) CHECK(recv[i] == value(root, own + i));
    WORKS(flexring_scatter(send, send + own, count, FLEXRING_INT32, root, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(send[own + i] == value(root, own + i));
    release(comm, shared, send), release(comm, shared, recv);
}

static void all_to_all(flexring_comm *comm, int rank, int shared, size_t count) {
    int32_t *send = vector(comm, shared, WORLD * count), *recv = vector(comm, shared, WORLD * count);
    for (size_t i = 0; i < WORLD * count; i++) send[i] = value(rank, i);

    WORKS(flexring_all_to_all(send, recv, count, FLEXRING_INT32, comm, NULL));
    for (size_t i = 0; i < WORLD * count; i++)
        CHECK(recv[i] == value((int)(i / count), (size_t)rank * count + i % count));
    for (size_t i = 0; i < WORLD * count; i++) recv[i] = SENTINEL;
    for (size_t i = 0; i < WORLD * count; i++) CHECK(send[i] == value(rank, i));
    EXPECT(INVALID, "in place", flexring_all_to_all(send, send, count, FLEXRING_INT32, comm, NULL));

    flexring_request *request;
    WORKS(flexring_all_to_all_async(send, recv, count, FLEXRING_INT32, comm, &request));
    WORKS(flexring_wait(request));
    for (size_t i = 0; i < WORLD * count; i++)
        CHECK(recv[i] == value((int)(i / count), (size_t)rank * count + i % count));
    release(comm, shared, send), release(comm, shared, recv);
}

/* Rank r sends a block of `count` elements to each rank before it, and none to the others. */
static void all_to_all_v(flexring_comm *comm, int rank, int shared, size_t count) {
    size_t before = (size_t)rank * count, after = (size_t)(WORLD - 1 - rank) * count;
    int32_t *send = vector(comm, shared, before + 1), *recv = vector(comm, shared, after + 1);
    size_t sends[WORLD], recvs[WORLD];
    for (int peer = 0; peer < WORLD; peer++) sends[peer] = peer < rank ? count : 0, recvs[peer] = peer > rank ? count : 0;
    for (size_t i = 0; i < before; i++) send[i] = value(rank, i);

    WORKS(flexring_all_to_all_v(send, sends, recv, recvs, FLEXRING_INT32, comm, NULL));
    for (size_t i = 0; i < after; i++) CHECK(recv[i] == value(rank + 1 + (int)(i / count), before + i % count));
    for (size_t i = 0; i < after; i++) recv[i] = SENTINEL;
    CHECK(recv[after] == SENTINEL);
    EXPECT(INVALID, "recv_counts", flexring_all_to_all_v(send, sends, recv, NULL, FLEXRING_INT32, comm, NULL));

    flexring_request *request, *barrier;
    WORKS(flexring_all_to_all_v_async(send, sends, recv, recvs, FLEXRING_INT32, comm, &request));
    for (int peer = 0; peer < WORLD; peer++) sends[peer] = recvs[peer] = 77; /* The counts were copied. */
    WORKS(flexring_barrier_async(comm, &barrier));
    WORKS(flexring_wait(request));
    WORKS(flexring_wait(barrier));
    for (size_t i = 0; i < after; i++) CHECK(recv[i] == value(rank + 1 + (int)(i / count), before + i % count));
    WORKS(flexring_barrier(comm));
    release(comm, shared, send), release(comm, shared, recv);
}

static int pipe_ends[2];

static void run(int rank) {
    alarm(120);
    flexring_unique_id id;
    if (rank == 0) {
        WORKS(flexring_get_unique_id(&id));
        for (int other = 1; other < WORLD; other++) CHECK(write(pipe_ends[1], &id, sizeof id) == sizeof id);
    } else {
        CHECK(read(pipe_ends[0], &id, sizeof id) == sizeof id);
    }
    flexring_comm *comm;
    WORKS(flexring_comm_init_rank(&comm, WORLD, id, rank));
    static const size_t counts[] = {1, 7, 700, 200011};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        for (int shared = 0; shared < 2; shared++) {
            reduce_scatter(comm, rank, shared, counts[c]);
            all_gather(comm, rank, shared, counts[c]);
            all_to_all(comm, rank, shared, counts[c]);
            all_to_all_v(comm, rank, shared, counts[c]);
            for (int root = 0; root < WORLD; root++) {
                broadcast(comm, rank, root, shared, counts[c]);
                reduce(comm, rank, root, shared, counts[c]);
                gather(comm, rank, root, shared, counts[c]);
                scatter(comm, rank, root, shared, counts[c]);
            }
        }
    WORKS(flexring_reduce_scatter(NULL, NULL, 0, FLEXRING_INT32, FLEXRING_SUM, comm, NULL));
    WORKS(flexring_all_gather(NULL, NULL, 0, FLEXRING_INT32, comm, NULL));
    WORKS(flexring_broadcast(NULL, NULL, 0, FLEXRING_INT32, 1, comm, NULL));
    WORKS(flexring_reduce(NULL, NULL, 0, FLEXRING_INT32, FLEXRING_SUM, 2, comm, NULL));
    WORKS(flexring_gather(NULL, NULL, 0, FLEXRING_INT32, 1, comm, NULL));
    WORKS(flexring_scatter(NULL, NULL, 0, FLEXRING_INT32, 2, comm, NULL));
    WORKS(flexring_all_to_all(NULL, NULL, 0, FLEXRING_INT32, comm, NULL));
    WORKS(flexring_comm_free(comm));
}

static int world_works(const char *transport) {
    setenv("FLEXRING_TRANSPORT", transport, 1);
    CHECK(pipe(pipe_ends) == 0);
    return ranks_work(WORLD, transport, run);
}

int main(void) {
    if (!world_works("shm") || !world_works("tcp")) return 1;
    puts("collectives: ok");
    return 0;
}
