/* A call waits for a rank that makes no call. An abort from another thread ends it at once, on every rank. */
#include "check.h"

#include <pthread.h>
#include <time.h>

static flexring_unique_id id;
static flexring_comm *comms[2];
static float vector[100000];

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void *join_world(void *rank) {
    int number = *(int *)rank;
    WORKS(flexring_comm_init_rank(&comms[number], 2, id, number));
    return NULL;
}

static void *abort_soon(void *comm) {
    usleep(200000);
    WORKS(flexring_comm_abort(comm));
    return NULL;
}

/* Rank 0 waits for rank 1, which makes no call, until `aborter` aborts. */
static void abort_blocked_call(int aborter, int async) {
    pthread_t threads[2];
    int ranks[2] = {0, 1};
    WORKS(flexring_get_unique_id(&id));
    for (int rank = 0; rank < 2; rank++) CHECK(pthread_create(&threads[rank], NULL, join_world, &ranks[rank]) == 0);
    for (int rank = 0; rank < 2; rank++) CHECK(pthread_join(threads[rank], NULL) == 0);

    double start = now();
    CHECK(pthread_create(&threads[0], NULL, abort_soon, comms[aborter]) == 0);
    if (async) {
        flexring_request *request;
        int done = 0;
        WORKS(flexring_all_reduce_async(vector, vector, 100000, FLEXRING_FLOAT32, FLEXRING_SUM, comms[0], &request));
        while (!done) WORKS(flexring_test(request, &done));
        EXPECT(FLEXRING_ABORTED, "aborted", flexring_wait(request));
    } else {
        EXPECT(FLEXRING_ABORTED, "aborted",
               flexring_all_reduce(vector, vector, 100000, FLEXRING_FLOAT32, FLEXRING_SUM, comms[0], NULL));
    }
    /* The timeout of a call is 300 seconds, but an abort takes effect at once. */
    CHECK(now() - start < 10);
    CHECK(pthread_join(threads[0], NULL) == 0);
    for (int rank = 0; rank < 2; rank++) {
        EXPECT(FLEXRING_ABORTED, "aborted", flexring_all_reduce(vector, vector, 1, FLEXRING_FLOAT32, FLEXRING_SUM, comms[rank], NULL));
        WORKS(flexring_comm_free(comms[rank]));
    }
}

int main(void) {
    alarm(60);
    abort_blocked_call(0, 0);
    abort_blocked_call(1, 0);
    abort_blocked_call(0, 1);
    puts("abort: ok");
    return 0;
}
