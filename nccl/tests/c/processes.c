/* A process for each rank. Two communicators use one stream in groups. Communicators are made without waiting; one is aborted on the other rank, and one before it is made. */
#include "check.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

enum { WORLD = 2, COUNT = 5000 };

/* Ids that rank 0 has created, and how many. */
static struct shared { volatile int ready, refused; ncclUniqueId ids[2]; } *shared;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void sums(ncclComm_t comm, int rank, void *stream) {
    float *vector = on_gpu(COUNT, (float)(rank + 1), stream);
    NCCL(ncclAllReduce(vector, vector, COUNT, ncclFloat, ncclSum, comm, stream));
    CHECK(read_gpu(vector + COUNT - 1, stream) == 3);
    NCCL(ncclCommGetAsyncError(comm, &(ncclResult_t){0}));
    free_gpu(vector);
}

/* Calls of two communicators in one group and one stream run in the order of the group: the second reads what the first wrote,
 * and kernels of one process do not wait for others in another order than those of the other. */
static void use_two_in_order(ncclComm_t first, ncclComm_t second, int rank, void *stream) {
    enum { PART = 500, ROUNDS = 25 };
    float *from = on_gpu(WORLD * PART, 0, stream), *middle = on_gpu(PART, 0, stream), *to = on_gpu(WORLD * PART, 0, stream);
    float host[WORLD * PART];
    for (int round = 1; round <= ROUNDS; round++) {
        for (int i = 0; i < WORLD * PART; i++) host[i] = (float)((rank + 1) * round);
        upload(from, host, WORLD * PART, stream);
        NCCL(ncclGroupStart());
        NCCL(ncclReduceScatter(from, middle, PART, ncclFloat, ncclSum, first, stream));
        NCCL(ncclAllGather(middle, to, PART, ncclFloat, second, stream));
        NCCL(ncclGroupEnd());
        download(host, to, WORLD * PART, stream);
        for (int i = 0; i < WORLD * PART; i++) CHECK(host[i] == (float)(3 * round));
    }
    free_gpu(from), free_gpu(middle), free_gpu(to);
}

static int run(int rank) {
    use_gpu(0);
    void *stream = new_stream();
    if (rank == 0) {
        for (int i = 0; i < 2; i++) NCCL(ncclGetUniqueId(&shared->ids[i]));
        shared->ready = 1;
    }
    while (!shared->ready) usleep(1000);

    /* Blocking, and for one rank in a group. */
    ncclComm_t comm, part, unmade;
    if (rank == 0) NCCL(ncclGroupStart());
    NCCL(ncclCommInitRank(&comm, WORLD, shared->ids[0], rank));
    if (rank == 0) NCCL(ncclGroupEnd());
    sums(comm, rank, stream);
    NCCL(ncclCommSplit(comm, 0, rank, &part, NULL));
    use_two_in_order(comm, part, rank, stream);
    NCCL(ncclCommDestroy(part));
    /* Not in a group: one sends, the other receives. */
    float *vector = on_gpu(COUNT, (float)(rank + 1), stream);
    if (rank == 0) NCCL(ncclSend(vector, COUNT, ncclFloat, 1, comm, stream));
    else NCCL(ncclRecv(vector, COUNT, ncclFloat, 0, comm, stream));
    CHECK(read_gpu(vector + COUNT - 1, stream) == 1);
    free_gpu(vector);
    NCCL(ncclCommFinalize(comm));
    RETURNS(ncclInvalidArgument, "was finalized", ncclAllReduce(NULL, NULL, 0, ncclFloat, ncclSum, comm, stream));
    NCCL(ncclCommDestroy(comm));

    /* Without waiting. */
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.commName = "without waiting";
    RETURNS(ncclInProgress, "", ncclCommInitRankConfig(&comm, WORLD, shared->ids[1], rank, &config));
    CHECK(comm != NULL);
    CHECK(settled(comm) == ncclSuccess);
    sums(comm, rank, stream);
    /* The part of a communicator that does not wait does not wait either. */
    while (rank == 1 && !shared->refused) usleep(1000);
    RETURNS(ncclInProgress, "", ncclCommSplit(comm, 0, -rank, &part, NULL));
    /* Splits do not overtake each other. */
    if (rank == 0) RETURNS(ncclInvalidArgument, "still being split", ncclCommSplit(comm, 0, 0, &unmade, NULL));
    shared->refused = 1;
    CHECK(settled(comm) == ncclSuccess && settled(part) == ncclSuccess);
    int its_rank;
    NCCL(ncclCommUserRank(part, &its_rank));
    CHECK(its_rank == WORLD - 1 - rank);
    sums(part, rank, stream);
    RETURNS(ncclInProgress, "", ncclCommFinalize(part));
    CHECK(settled(part) == ncclSuccess);
    NCCL(ncclCommDestroy(part));

    /* Rank 1 aborts; rank 0 learns of it. */
    if (rank == 1) {
        NCCL(ncclCommAbort(comm));
    } else {
        ncclResult_t state = ncclSuccess;
        for (double start = now(); state == ncclSuccess && now() < start + 10; usleep(1000)) {
            NCCL(ncclCommGetAsyncError(comm, &state));
        }
        CHECK(state == ncclRemoteError);
        CHECK(strstr(ncclGetLastError(comm), "abort"));
        vector = on_gpu(1, 1, stream);
        RETURNS(ncclRemoteError, "abort", ncclAllReduce(vector, vector, 1, ncclFloat, ncclSum, comm, stream));
        NCCL(ncclCommAbort(comm));
    }

    /* The others never come. */
    ncclUniqueId id;
    NCCL(ncclGetUniqueId(&id));
    RETURNS(ncclInProgress, "", ncclCommInitRankConfig(&unmade, WORLD, id, 0, &config));
    RETURNS(ncclInvalidArgument, "still being made", ncclAllReduce(NULL, NULL, 0, ncclFloat, ncclSum, unmade, stream));
    usleep(50 * 1000);
    double start = now();
    NCCL(ncclCommAbort(unmade));
    CHECK(now() < start + 5);
    return 0;
}

int main(void) {
    alarm(60);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    pid_t children[WORLD];
    for (int rank = 0; rank < WORLD; rank++) {
        children[rank] = fork();
        CHECK(children[rank] >= 0);
        if (children[rank] == 0) {
            alarm(60);
            exit(run(rank));
        }
    }
    for (int rank = 0; rank < WORLD; rank++) {
        int status;
        CHECK(waitpid(children[rank], &status, 0) == children[rank]);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    puts("processes: ok");
    return 0;
}
