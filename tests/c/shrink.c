/* Communicators that are made from others: flexring_comm_split, and flexring_comm_shrink with and without a failure. */
#include "check.h"

#include <signal.h>
#include <sys/wait.h>

#define RANKS 4

static flexring_unique_id id;

/* The sum of 2 to the power of each rank's number. */
static void sums_to(flexring_comm *comm, int number, float expected) {
    float value = (float)(1 << number);
    WORKS(flexring_all_reduce(&value, &value, 1, FLEXRING_FLOAT32, FLEXRING_SUM, comm, NULL));
    CHECK(value == expected);
}

static void has(flexring_comm *comm, int rank, int size) {
    int number;
    WORKS(flexring_comm_rank(comm, &number));
    CHECK(number == rank);
    WORKS(flexring_comm_size(comm, &number));
    CHECK(number == size);
}

/* Two colors with reversed keys, and a rank without a color. */
static void split(flexring_comm *comm, int rank) {
    flexring_comm *part = (flexring_comm *)&id;
    WORKS(flexring_comm_split(comm, rank == 3 ? FLEXRING_NO_COLOR : rank % 2, -rank, &part));
    if (rank == 3) {
        CHECK(part == NULL);
        return;
    }
    has(part, rank == 0 ? 1 : 0, rank == 1 ? 1 : 2);
    sums_to(part, rank, rank == 1 ? 2 : 5);
    WORKS(flexring_comm_free(part));
}

/* Rank 1 is left out, and does not take part. */
static void exclude(flexring_comm *comm, int rank) {
    int ranks[] = {1};
    flexring_comm *rest;
    if (rank == 1) return;
    WORKS(flexring_comm_shrink(comm, ranks, 1, &rest));
    has(rest, rank == 0 ? 0 : rank - 1, 3);
    sums_to(rest, rank, 13);
    WORKS(flexring_comm_free(rest));
}

static void bad_arguments(flexring_comm *comm, int rank) {
    flexring_comm *out = NULL;
    int unknown[] = {RANKS}, negative[] = {-1}, me[] = {rank};
    EXPECT(FLEXRING_INVALID_ARGUMENT, "communicator is NULL", flexring_comm_shrink(NULL, NULL, 0, &out));
    EXPECT(FLEXRING_INVALID_ARGUMENT, "out is NULL", flexring_comm_shrink(comm, NULL, 0, NULL));
    EXPECT(FLEXRING_INVALID_ARGUMENT, "exclude is NULL", flexring_comm_shrink(comm, NULL, 1, &out));
    EXPECT(FLEXRING_INVALID_ARGUMENT, "more than there are ranks", flexring_comm_shrink(comm, me, 100, &out));
    EXPECT(FLEXRING_INVALID_ARGUMENT, "rank 4 cannot be excluded", flexring_comm_shrink(comm, unknown, 1, &out));
    EXPECT(FLEXRING_INVALID_ARGUMENT, "contains -1", flexring_comm_shrink(comm, negative, 1, &out));
    EXPECT(FLEXRING_INVALID_ARGUMENT, "excludes itself", flexring_comm_shrink(comm, me, 1, &out));
    EXPECT(FLEXRING_INVALID_ARGUMENT, "out is NULL", flexring_comm_split(comm, 0, 0, NULL));
    EXPECT(FLEXRING_INVALID_ARGUMENT, "the color is -2", flexring_comm_split(comm, -2, 0, &out));
    CHECK(out == NULL);
}

static int run_rank(int rank) {
    flexring_comm *comm, *rest;
    float vector[1000];
    WORKS(flexring_comm_init_rank(&comm, RANKS, id, rank));
    bad_arguments(comm, rank);
    split(comm, rank);
    exclude(comm, rank);
    /* Rank 2 dies; the others notice it in a call, and go on without it. */
    sums_to(comm, rank, 15);
    memset(vector, 0, sizeof vector);
    if (rank == 2) {
        /* When this call ends here, the others have finished the one before. */
        WORKS(flexring_all_reduce(vector, vector, 1, FLEXRING_FLOAT32, FLEXRING_SUM, comm, NULL));
        raise(SIGKILL);
    }
    while (flexring_all_reduce(vector, vector, 1, FLEXRING_FLOAT32, FLEXRING_SUM, comm, NULL) == FLEXRING_SUCCESS) {
    }
    EXPECT(FLEXRING_ABORTED, "rank 2", flexring_all_reduce(vector, vector, 1000, FLEXRING_FLOAT32, FLEXRING_SUM, comm, NULL));
    WORKS(flexring_comm_shrink(comm, NULL, 0, &rest));
    WORKS(flexring_comm_free(comm));
    has(rest, rank == 3 ? 2 : rank, 3);
    sums_to(rest, rank, 11);
    WORKS(flexring_comm_free(rest));
    return 0;
}

int main(void) {
    pid_t children[RANKS];
    int ids[RANKS][2];
    alarm(60);
    /* Rank 0 makes the id, and hands it to the others. */
    for (int rank = 1; rank < RANKS; rank++) CHECK(pipe(ids[rank]) == 0);
    for (int rank = 0; rank < RANKS; rank++) {
        children[rank] = fork();
        CHECK(children[rank] >= 0);
        if (children[rank] > 0) continue;
        if (rank == 0) {
            WORKS(flexring_get_unique_id(&id));
            for (int other = 1; other < RANKS; other++) CHECK(write(ids[other][1], &id, sizeof id) == sizeof id);
        } else {
            CHECK(read(ids[rank][0], &id, sizeof id) == sizeof id);
        }
        exit(run_rank(rank));
    }
    for (int rank = 0; rank < RANKS; rank++) {
        int status;
        CHECK(waitpid(children[rank], &status, 0) == children[rank]);
        if (rank == 2) CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        else CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    puts("shrink: ok");
    return 0;
}
