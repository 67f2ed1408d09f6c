/* What a communicator costs: the time to create it, and memory. bench/growth.py starts it as each rank of a job on one node.
 *
 *     cc -O2 -Iinclude bench/peers/growth.c libflexring.a -lpthread -ldl -lm -o growth
 *
 * Rank 0 prints a line of JSON. `init_us` is the time to join the world, from the start of the last process, as ranks wait for it. `split_us` is the
 * median time to split a further communicator of all ranks. `small_bytes` and `large_bytes` are the memory of a rank, shared pages divided
 * among their users (PSS), after calls of 8 B and of 1 MiB: the mean of all ranks.
 */
#include <flexring.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { CALLS = 20, SPLITS = 9, LARGE = 1 << 20 };

static flexring_comm *comm;

#define MUST(call)                                                      \
    do {                                                                \
        if ((call) != FLEXRING_SUCCESS) {                               \
            fprintf(stderr, "%s: %s\n", #call, flexring_last_error());  \
            exit(1);                                                    \
        }                                                               \
    } while (0)

static double microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

/* The sum, or another combination, of a number of each rank. */
static double all(double value, flexring_op op) {
    MUST(flexring_all_reduce(&value, &value, 1, FLEXRING_FLOAT64, op, comm, NULL));
    return value;
}

static double pss_bytes(void) {
    char line[256];
    double kib = 0;
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    while (file && fgets(line, sizeof line, file) && sscanf(line, "Pss: %lf", &kib) != 1) continue;
    if (file) fclose(file);
    return 1024 * kib;
}

/* The mean memory of a rank after calls on a vector. No rank goes on while another reads. */
static double memory_after(float *vector, size_t bytes, int world) {
    for (int i = 0; i < CALLS; i++) MUST(flexring_all_reduce(vector, vector, bytes / sizeof *vector, FLEXRING_FLOAT32, FLEXRING_SUM, comm, NULL));
    return all(pss_bytes(), FLEXRING_SUM) / world;
}

static int by_value(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

int main(void) {
    double begun = microseconds(), splits[SPLITS];
    int rank, world;
    void *vector;
    MUST(flexring_comm_init_from_env(&comm));
    double init = microseconds() - begun;
    MUST(flexring_comm_rank(comm, &rank));
    MUST(flexring_comm_size(comm, &world));
    init = all(init, FLEXRING_MIN);
    float two[2] = {0, 0};
    double small = memory_after(two, sizeof two, world);
    MUST(flexring_alloc(comm, LARGE, &vector));
    memset(vector, 0, LARGE);
    double large = memory_after(vector, LARGE, world);
    for (int i = 0; i < SPLITS; i++) {
        flexring_comm *further;
        MUST(flexring_barrier(comm));
        double split_begun = microseconds();
        MUST(flexring_comm_split(comm, 0, rank, &further));
        splits[i] = all(microseconds() - split_begun, FLEXRING_MAX);
        MUST(flexring_comm_free(further));
    }
    qsort(splits, SPLITS, sizeof *splits, by_value);
    if (rank == 0)
        printf("{\"init_us\": %.1f, \"split_us\": %.1f, \"small_bytes\": %.0f, \"large_bytes\": %.0f}\n", init, splits[SPLITS / 2], small, large);
    MUST(flexring_free(comm, vector));
    MUST(flexring_comm_free(comm));
    return 0;
}
