/* Handles that are not live, calls during another call of the same thread, and an exit with a call that is not over. */
#include "ranks.h"

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/time.h>
#include <time.h>

enum { COUNT = 50000 };
#define INVALID FLEXRING_INVALID_ARGUMENT

static flexring_comm *comm, *other;
static flexring_request *request;
static float vector[COUNT];
static flexring_unique_id id;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static flexring_comm *alone(void) {
    flexring_comm *made;
    WORKS(flexring_get_unique_id(&id));
    WORKS(flexring_comm_init_rank(&made, 1, id, 0));
    return made;
}

static flexring_result reduce(float *elements, int count, flexring_comm *of) {
    return flexring_all_reduce(elements, elements, count, FLEXRING_FLOAT32, FLEXRING_SUM, of, NULL);
}

static void handles_that_are_not_live_are_refused(void) {
    int number = 7;
    void *memory = NULL;
    flexring_comm *freed = alone();
    WORKS(flexring_all_reduce_async(vector, vector, COUNT, FLEXRING_FLOAT32, FLEXRING_SUM, freed, &request));
    flexring_request *waited = request;
    WORKS(flexring_wait(request));
    WORKS(flexring_comm_free(freed));
    /* Its memory is used again, and the old handle does not mean the new communicator. */
    comm = alone();
    WORKS(flexring_all_reduce_async(vector, vector, COUNT, FLEXRING_FLOAT32, FLEXRING_SUM, comm, &request));

    flexring_comm *const no_comm[] = {freed, (flexring_comm *)vector, (flexring_comm *)(uintptr_t)0x40, (flexring_comm *)UINTPTR_MAX};
    for (size_t i = 0; i < sizeof no_comm / sizeof *no_comm; i++) {
        flexring_comm *bad = no_comm[i];
        EXPECT(INVALID, "is no communicator: it was freed", reduce(vector, 1, bad));
        EXPECT(INVALID, "flexring_comm_size: 0x", flexring_comm_size(bad, &number));
        EXPECT(INVALID, "is no communicator", flexring_comm_synchronize(bad));
        EXPECT(INVALID, "is no communicator", flexring_comm_abort(bad));
        EXPECT(INVALID, "is no communicator", flexring_alloc(bad, 64, &memory));
        EXPECT(INVALID, "is no communicator", flexring_free(bad, vector));
        EXPECT(INVALID, "is no communicator", flexring_comm_split(bad, 0, 0, &other));
        EXPECT(INVALID, "is no communicator", flexring_comm_free(bad));
        WORKS(flexring_group_start());
        EXPECT(INVALID, "is no communicator", flexring_send(vector, 1, FLEXRING_FLOAT32, 0, bad, NULL));
        EXPECT(INVALID, "is no communicator", flexring_group_end());
    }
    flexring_request *const no_request[] = {waited, (flexring_request *)vector, (flexring_request *)comm};
    for (size_t i = 0; i < sizeof no_request / sizeof *no_request; i++) {
        if (no_request[i] == request) continue;
        EXPECT(INVALID, "is no request: it was waited for", flexring_test(no_request[i], &number));
        EXPECT(INVALID, "is no request", flexring_wait(no_request[i]));
    }
    CHECK(number == 7 && memory == NULL);
    WORKS(flexring_wait(request));
    WORKS(flexring_comm_free(comm));
}

/* Rank 0 of the world is this thread, rank 1 is another one. */
static volatile sig_atomic_t handled;

static void handler(int signal) {
    (void)signal;
    static float one[1];
    flexring_comm *part;
    flexring_request *started;
    const char *const nested = "this thread is in a call of the same communicator";
    /* A second signal may have been pending, and the call may be over. */
    if (handled) return;
    if (flexring_register(comm, vector, sizeof vector) == FLEXRING_SUCCESS) {
        /* Too early: the call has not begun. */
        WORKS(flexring_deregister(comm, vector, sizeof vector));
        return;
    }
    EXPECT(INVALID, nested, reduce(one, 1, comm));
    EXPECT(INVALID, nested, flexring_barrier(comm));
    EXPECT(INVALID, nested, flexring_all_reduce_async(one, one, 1, FLEXRING_FLOAT32, FLEXRING_SUM, comm, &started));
    EXPECT(INVALID, nested, flexring_comm_synchronize(comm));
    EXPECT(INVALID, nested, flexring_comm_split(comm, 0, 0, &part));
    EXPECT(INVALID, nested, flexring_comm_shrink(comm, NULL, 0, &part));
    EXPECT(INVALID, nested, flexring_register(comm, vector, sizeof vector));
    EXPECT(INVALID, nested, flexring_wait(request));
    EXPECT(INVALID, nested, flexring_comm_free(comm));
    WORKS(flexring_comm_status(comm));
    /* Another communicator does not wait for the call. */
    WORKS(reduce(one, 1, other));
    handled = 1;
}

static pthread_t main_thread;

static void *second_rank(void *unused) {
    flexring_comm *mine;
    static float mine_of[COUNT];
    (void)unused;
    WORKS(flexring_comm_init_rank(&mine, 2, id, 1));
    WORKS(flexring_barrier(mine));
    /* The first rank waits in its call meanwhile. */
    while (!handled) {
        pthread_kill(main_thread, SIGUSR1);
        usleep(100000);
    }
    WORKS(reduce(mine_of, 1, mine));
    WORKS(reduce(mine_of, COUNT, mine));
    WORKS(flexring_comm_free(mine));
    return NULL;
}

static void calls_in_a_signal_handler_are_refused(void) {
    pthread_t thread;
    sigset_t blocked;
    other = alone();
    WORKS(flexring_get_unique_id(&id));
    main_thread = pthread_self();
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    CHECK(pthread_sigmask(SIG_BLOCK, &blocked, NULL) == 0);
    CHECK(pthread_create(&thread, NULL, second_rank, NULL) == 0);
    WORKS(flexring_comm_init_rank(&comm, 2, id, 0));
    WORKS(flexring_barrier(comm));
    /* It runs on another thread, which waits for the other rank. */
    WORKS(flexring_all_reduce_async(vector, vector, 1, FLEXRING_FLOAT32, FLEXRING_SUM, comm, &request));
    CHECK(signal(SIGUSR1, handler) != SIG_ERR);
    CHECK(pthread_sigmask(SIG_UNBLOCK, &blocked, NULL) == 0);
    flexring_result result = reduce(vector, COUNT, comm);
    CHECK(pthread_sigmask(SIG_BLOCK, &blocked, NULL) == 0);
    WORKS(result);
    CHECK(handled);
    WORKS(flexring_wait(request));
    CHECK(pthread_join(thread, NULL) == 0);
    WORKS(flexring_comm_free(comm));
    WORKS(flexring_comm_free(other));
}

static int ended[2];

static void free_at_exit(void) { WORKS(flexring_comm_free(comm)); }

/* Rank 0 exits with a call that is not over. Its destructors do not wait for it, and rank 1 learns the cause. */
static void exits_with_an_unfinished_call(int rank) {
    char byte;
    if (rank == 0) CHECK(atexit(free_at_exit) == 0);
    CHECK(close(ended[rank]) == 0);
    WORKS(flexring_comm_init_rank(&comm, 2, id, rank));
    if (rank == 0) {
        WORKS(flexring_all_reduce_async(vector, vector, COUNT, FLEXRING_FLOAT32, FLEXRING_SUM, comm, &request));
        exit(0);
    }
    /* The end of rank 0 closes the pipe. */
    double start = now();
    CHECK(read(ended[0], &byte, 1) == 0);
    CHECK(now() - start < 20);
    EXPECT(FLEXRING_ABORTED, "rank 0: its process exits during a call", reduce(vector, COUNT, comm));
    WORKS(flexring_comm_free(comm));
    exit(0);
}

int main(void) {
    static const char *const transports[] = {"auto", "tcp"};
    alarm(120);
    for (int transport = 0; transport < 2; transport++) {
        setenv("FLEXRING_TRANSPORT", transports[transport], 1);
        CHECK(pipe(ended) == 0);
        WORKS(flexring_get_unique_id(&id));
        /* The children of this process inherit both ends, and it keeps none. */
        pid_t children[2];
        for (int rank = 0; rank < 2; rank++) {
            children[rank] = fork();
            CHECK(children[rank] >= 0);
            if (children[rank] == 0) {
                alarm(60);
                exits_with_an_unfinished_call(rank);
            }
        }
        CHECK(close(ended[0]) == 0 && close(ended[1]) == 0);
        for (int rank = 0; rank < 2; rank++) {
            int status;
            CHECK(waitpid(children[rank], &status, 0) == children[rank] && status == 0);
        }
    }
    setenv("FLEXRING_TRANSPORT", "auto", 1);
    handles_that_are_not_live_are_refused();
    calls_in_a_signal_handler_are_refused();
    puts("misuse: ok");
    return 0;
}
