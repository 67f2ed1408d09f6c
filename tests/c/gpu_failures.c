/* Failures of a GPU are reported on every rank, without waiting for the timeout. The first argument is the failure of rank 0's
 * GPU, for which the simulated driver is configured: `unusable`, `short` of memory once, or `broken` during calls. The second
 * is a part of the expected message. With `reset`, the program destroys the GPU's context as cudaDeviceReset does. */
#include "cuda.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#define COUNT 300000

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static flexring_result reduce(flexring_comm *comm, float *vector, void *stream) {
    return flexring_all_reduce(vector, vector, COUNT, FLEXRING_FLOAT32, FLEXRING_SUM, comm, stream);
}

/* A world of one rank: calls on the GPU are refused, and calls on the host still work. */
static void unusable(const char *phrase, flexring_result again) {
    static float host[COUNT];
    flexring_comm *comm;
    setenv("FLEXRING_RANK", "0", 1);
    setenv("FLEXRING_WORLD_SIZE", "1", 1);
    WORKS(flexring_comm_init_from_env(&comm));
    use_gpu(0);
    void *stream = new_stream();
    float *vector = on_gpu(COUNT, 1, stream);
    flexring_result result = reduce(comm, vector, stream);
    CHECK(result != FLEXRING_SUCCESS);
    EXPECT(result, phrase, result);
    WORKS(reduce(comm, host, NULL));
    WORKS(flexring_comm_status(comm));
    EXPECT(again, phrase, reduce(comm, vector, stream));
    CHECK(read_gpu(vector + COUNT - 1, stream) == 1);
    free_gpu(vector);
    WORKS(flexring_comm_free(comm));
}

/* A communicator ends with the context of its GPU, and the next one uses the next context. */
static void reset(const char *phrase) {
    setenv("FLEXRING_RANK", "0", 1);
    setenv("FLEXRING_WORLD_SIZE", "1", 1);
    for (int round = 0; round < 3; round++) {
        flexring_comm *comm, *unused;
        use_gpu(0);
        WORKS(flexring_comm_init_from_env(&comm));
        WORKS(flexring_comm_init_from_env(&unused));
        void *stream = new_stream();
        float *vector = on_gpu(COUNT, 1, stream), *out = on_gpu(COUNT, 0, stream);
        WORKS(flexring_all_reduce(vector, out, COUNT, FLEXRING_FLOAT32, FLEXRING_SUM, comm, stream));
        WORKS(flexring_comm_synchronize(comm));
        CHECK(read_gpu(out + COUNT - 1, stream) == 1);
        /* Its control memory is kept for the next communicator. */
        WORKS(flexring_comm_free(unused));
        CUDA(cuDevicePrimaryCtxReset_v2, (int), 0);
        use_gpu(0);
        void *other = new_stream();
        float *again = on_gpu(COUNT, 1, other);
        flexring_result result = reduce(comm, again, other);
        CHECK(result != FLEXRING_SUCCESS);
        EXPECT(result, phrase, result);
        WORKS(flexring_comm_free(comm));
        CHECK(read_gpu(again + COUNT - 1, other) == 1);
    }
}

/* Rank 0's context breaks during its calls. */
static void broken(int rank, flexring_unique_id id, const char *phrase) {
    flexring_comm *comm;
    if (rank != 0) unsetenv("SIMCUDA_FAIL");
    WORKS(flexring_comm_init_rank(&comm, 2, id, rank));
    use_gpu(0);
    void *stream = new_stream();
    float *vector = on_gpu(COUNT, 1, stream);
    double start = now();
    flexring_result result = FLEXRING_SUCCESS;
    for (int calls = 0; result == FLEXRING_SUCCESS && calls < 1000; calls++) {
        result = reduce(comm, vector, stream);
        if (result == FLEXRING_SUCCESS) result = flexring_comm_synchronize(comm);
    }
    CHECK(result != FLEXRING_SUCCESS);
    /* The timeout of a call is 20 seconds here, but a failure is reported earlier. */
    CHECK(now() - start < 15);
    EXPECT(result, "rank 0", result);
    EXPECT(result, phrase, result);
    /* Later calls return the error, with another code. */
    result = flexring_comm_status(comm);
    CHECK(result != FLEXRING_SUCCESS);
    EXPECT(result, phrase, result);
    /* The stream continues or is broken, but it does not hang. */
    int code = synchronize(stream);
    CHECK(rank == 0 || code == 0);
    WORKS(flexring_comm_free(comm));
}

int main(int count, char **arguments) {
    alarm(60);
    setenv("FLEXRING_TIMEOUT_MS", "20000", 1);
    CHECK(count == 3);
    if (strcmp(arguments[1], "unusable") == 0) {
        unusable(arguments[2], FLEXRING_UNSUPPORTED);
    } else if (strcmp(arguments[1], "short") == 0) {
        unusable(arguments[2], FLEXRING_SUCCESS);
    } else if (strcmp(arguments[1], "reset") == 0) {
        reset(arguments[2]);
    } else {
        flexring_unique_id id;
        int status;
        /* The process that creates the id must live until all ranks have joined. Its threads do not survive a fork, so it is
         * neither this process nor a rank. */
        int made[2];
        CHECK(pipe(made) == 0);
        pid_t maker = fork();
        if (maker == 0) {
            WORKS(flexring_get_unique_id(&id));
            CHECK(write(made[1], &id, sizeof id) == sizeof id);
            pause();
            _exit(0);
        }
        CHECK(read(made[0], &id, sizeof id) == sizeof id);
        pid_t ranks[2];
        for (int rank = 0; rank < 2; rank++) {
            ranks[rank] = fork();
            if (ranks[rank] == 0) {
                broken(rank, id, arguments[2]);
                exit(0);
            }
        }
        int failed = 0;
        for (int rank = 0; rank < 2; rank++) {
            CHECK(waitpid(ranks[rank], &status, 0) == ranks[rank]);
            failed |= status;
        }
        CHECK(kill(maker, SIGKILL) == 0);
        CHECK(failed == 0);
    }
    puts("gpu_failures: ok");
    return 0;
}
