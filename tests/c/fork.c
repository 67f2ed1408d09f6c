/* A forked child cannot use the communicator of its parent, does not disturb it, and does not hide that its parent has died. */
#include "check.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

enum { COUNT = 50000 };

static flexring_comm *comm;
static float *pool, vector[COUNT];
static flexring_request *request;

#define INVALID FLEXRING_INVALID_ARGUMENT

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* All ranks contribute ones. */
static void sums_are_exact(float *elements) {
    for (int i = 0; i < COUNT; i++) elements[i] = 1;
    WORKS(flexring_all_reduce(elements, elements, COUNT, FLEXRING_FLOAT32, FLEXRING_SUM, comm, NULL));
    for (int i = 0; i < COUNT; i++) CHECK(elements[i] == 2);
}

/* What a child may do and not do. Its vectors hold 99 where they are its own. */
static void in_child(pid_t parent) {
    char cause[200];
    void *memory = NULL;
    flexring_request *other = NULL;
    int number = 0;
    snprintf(cause, sizeof cause, "this communicator was created by process %d, and this is its forked child %d",
             (int)parent, (int)getpid());
    for (int i = 0; i < COUNT; i++) vector[i] = 99;
    EXPECT(INVALID, cause, flexring_all_reduce(vector, vector, COUNT, FLEXRING_FLOAT32, FLEXRING_SUM, comm, NULL));
    EXPECT(INVALID, cause, flexring_all_reduce(vector, vector, 1, FLEXRING_FLOAT32, FLEXRING_SUM, comm, NULL));
    EXPECT(INVALID, cause, flexring_broadcast(vector, vector, 1, FLEXRING_FLOAT32, 0, comm, NULL));
    EXPECT(INVALID, cause, flexring_all_reduce_async(vector, vector, 1, FLEXRING_FLOAT32, FLEXRING_SUM, comm, &other));
    EXPECT(INVALID, "forked child", flexring_test(request, &number));
    EXPECT(INVALID, "forked child", flexring_wait(request));
    EXPECT(INVALID, cause, flexring_comm_synchronize(comm));
    EXPECT(INVALID, cause, flexring_comm_status(comm));
    EXPECT(INVALID, cause, flexring_comm_abort(comm));
    EXPECT(INVALID, cause, flexring_comm_size(comm, &number));
    EXPECT(INVALID, cause, flexring_alloc(comm, 100, &memory));
    EXPECT(INVALID, cause, flexring_register(comm, vector, sizeof vector));
    WORKS(flexring_free(comm, pool));
    WORKS(flexring_comm_free(comm));

    /* A communicator of its own, alone in its world. */
    flexring_unique_id id;
    WORKS(flexring_get_unique_id(&id));
    WORKS(flexring_comm_init_rank(&comm, 1, id, 0));
    WORKS(flexring_all_reduce(vector, vector, COUNT, FLEXRING_FLOAT32, FLEXRING_SUM, comm, NULL));
    CHECK(vector[0] == 99);
    WORKS(flexring_comm_free(comm));
}

/* A child does not have the shared memory: it could change sums of its parent. */
static void children_do_not_have(float *memory) {
    int status;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        *(volatile float *)memory = 99;
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

static void children_do_not_disturb(void) {
    void *memory;
    WORKS(flexring_alloc(comm, sizeof vector, &memory));
    pool = memory;
    sums_are_exact(vector);
    WORKS(flexring_all_reduce_async(pool, pool, COUNT, FLEXRING_FLOAT32, FLEXRING_SUM, comm, &request));
    pid_t parent = getpid(), child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        in_child(parent);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    WORKS(flexring_wait(request));
    children_do_not_have(pool);
    sums_are_exact(vector);
    sums_are_exact(pool);
    WORKS(flexring_free(comm, pool));
}

/* Nor does it have what its parent has registered, as long as that is shared with the other rank. */
static void children_have_no_registered_memory(int is_shared) {
    float *registered = malloc(COUNT * sizeof *registered);
    CHECK(registered);
    WORKS(flexring_register(comm, registered, COUNT * sizeof *registered));
    sums_are_exact(registered);
    if (is_shared) children_do_not_have(registered + COUNT / 2);
    sums_are_exact(registered);
    WORKS(flexring_deregister(comm, registered, COUNT * sizeof *registered));
    int status;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(registered[COUNT / 2] == 2);
        registered[COUNT / 2] = 99;
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(registered[COUNT / 2] == 2);
    free(registered);
}

/* A thread of the parent uses the table of its ids right after it has created one. A child that is forked meanwhile has a table of its
   own, and does not wait for that thread. */
static void children_create_ids_while_a_thread_of_the_parent_does(void) {
    for (int round = 0; round < 20; round++) {
        flexring_unique_id id;
        int status;
        WORKS(flexring_get_unique_id(&id));
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(20);
            WORKS(flexring_get_unique_id(&id));
            _exit(0);
        }
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
}

/* Rank 1 dies and leaves a child behind. Rank 0 learns it at once, and not after the heartbeats' ten seconds. */
static void children_hide_no_death(int rank) {
    if (rank == 1) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            sleep(30);
            _exit(0);
        }
        kill(getpid(), SIGKILL);
    }
    double start = now();
    EXPECT(FLEXRING_PEER_LOST, "rank 1 (pid",
           flexring_all_reduce(vector, vector, COUNT, FLEXRING_FLOAT32, FLEXRING_SUM, comm, NULL));
    CHECK(now() - start < 6);
}

static void rank(flexring_unique_id id, int number, int shares_memory) {
    alarm(60);
    WORKS(flexring_comm_init_rank(&comm, 2, id, number));
    children_do_not_disturb();
    children_have_no_registered_memory(shares_memory);
    children_hide_no_death(number);
    WORKS(flexring_comm_free(comm));
    exit(0);
}

int main(void) {
    static const char *const transports[] = {"auto", "tcp"};
    alarm(120);
    children_create_ids_while_a_thread_of_the_parent_does();
    for (int transport = 0; transport < 2; transport++) {
        flexring_unique_id id;
        pid_t ranks[2];
        setenv("FLEXRING_TRANSPORT", transports[transport], 1);
        WORKS(flexring_get_unique_id(&id));
        for (int number = 0; number < 2; number++) {
            ranks[number] = fork();
            CHECK(ranks[number] >= 0);
            if (ranks[number] == 0) rank(id, number, transport == 0);
        }
        for (int number = 0; number < 2; number++) {
            int status;
            CHECK(waitpid(ranks[number], &status, 0) == ranks[number]);
            CHECK(number == 1 ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : status == 0);
        }
    }
    puts("fork: ok");
    return 0;
}
