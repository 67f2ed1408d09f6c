/* Times MPI_Allreduce of f32 sums in the way of `flexring perf`, for comparison.
 *
 *     mpicc -O2 bench/peers/ompi_allreduce.c -o ompi_allreduce
 *     mpirun -np 4 ./ompi_allreduce BYTES ITERATIONS WARMUP [in|out] [each]
 *
 * Rank 0 prints one line of JSON; times are in microseconds:
 *   each     single iterations on rank 0, each after a barrier that is not part of the time
 *   slowest  single iterations on the slowest rank of each
 *   back_to_back_us  mean of consecutive iterations without barriers, as nccl-tests measures; null with the argument
 *           "each", which omits them
 *   first_us  the first call, before any warm-up
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static float *send, *recv;
static int count, in_place;

static void all_reduce(void) {
    MPI_Allreduce(in_place ? MPI_IN_PLACE : send, recv, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

/* The time of one call after a barrier, in seconds. */
static double timed(void) {
    MPI_Barrier(MPI_COMM_WORLD);
    double begun = MPI_Wtime();
    all_reduce();
    return MPI_Wtime() - begun;
}

static int by_value(const void *left, const void *right) {
    double l = *(const double *)left, r = *(const double *)right;
    return (l > r) - (l < r);
}

/* Prints the statistics of `times`, and sorts them. */
static void summarize(const char *name, double *times, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += times[i];
    qsort(times, (size_t)n, sizeof *times, by_value);
    double median = (times[(n - 1) / 2] + times[n / 2]) / 2;
    printf("\"%s\": {\"min_us\": %.3f, \"median_us\": %.3f, \"mean_us\": %.3f, \"max_us\": %.3f}, ", name,
           times[0] * 1e6, median * 1e6, sum / n * 1e6, times[n - 1] * 1e6);
}

static int usage(const char *program) {
    fprintf(stderr, "usage: %s BYTES ITERATIONS WARMUP [in|out] [each]\n", program);
    MPI_Abort(MPI_COMM_WORLD, 2);
    return 2;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, world;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    if (argc < 4) return usage(argv[0]);
    long long bytes = atoll(argv[1]);
    int iterations = atoi(argv[2]), warmup = atoi(argv[3]);
    int back_to_back = argc < 6 || strcmp(argv[5], "each") != 0;
    in_place = argc < 5 || strcmp(argv[4], "in") == 0;
    if (bytes < 4 || bytes / 4 > 0x7fffffff || iterations < 1 || warmup < 0) return usage(argv[0]);
    count = (int)(bytes / 4);

    size_t size = (size_t)count * sizeof(float);
    recv = malloc(size);
    send = in_place ? recv : malloc(size);
    double *each = malloc((size_t)iterations * sizeof(double)), *slowest = malloc((size_t)iterations * sizeof(double));
    if (!recv || !send || !each || !slowest) MPI_Abort(MPI_COMM_WORLD, 3);
    for (int i = 0; i < count; i++) recv[i] = send[i] = (float)(rank + i % 7);

    double first = timed();
    int wrong = 0;
    for (int i = 0; i < count; i++) wrong += recv[i] != (float)(world * (world - 1) / 2 + world * (i % 7));

    /* Sum zeros, so that repeated in-place sums do not overflow. */
    memset(send, 0, size);
    memset(recv, 0, size);
    for (int i = 0; i < warmup; i++) all_reduce();
    for (int i = 0; i < iterations; i++) each[i] = timed();
    MPI_Barrier(MPI_COMM_WORLD);
    double begun = MPI_Wtime();
    if (back_to_back)
        for (int i = 0; i < iterations; i++) all_reduce();
    double mean = (MPI_Wtime() - begun) / iterations;
    MPI_Reduce(each, slowest, iterations, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);

    if (rank == 0) {
        char version[MPI_MAX_LIBRARY_VERSION_STRING];
        int length;
        MPI_Get_library_version(version, &length);
        version[strcspn(version, ",\n")] = 0;
        printf("{\"library\": \"%s\", \"ranks\": %d, \"bytes\": %zu, \"in_place\": %s, \"iterations\": %d, "
               "\"warmup\": %d, \"wrong\": %d, \"first_us\": %.3f, ",
               version, world, size, in_place ? "true" : "false", iterations, warmup, wrong, first * 1e6);
        summarize("each", each, iterations);
        summarize("slowest", slowest, iterations);
        if (back_to_back) printf("\"back_to_back_us\": %.3f}\n", mean * 1e6);
        else printf("\"back_to_back_us\": null}\n");
    }
    MPI_Finalize();
    return wrong != 0;
}
