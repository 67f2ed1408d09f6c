/* Times all-reduces of sums in place, in the same loop for each library. bench/versus compiles it once for each:
 *
 *     mpicc -O2 -DPEER_MPI bench/peers/allreduce.c                      MPI_Allreduce of Open MPI or MPICH
 *     mpicc -O2 -DPEER_BAIDU bench/peers/allreduce.c                    Baidu's ring, over MPI
 *     cc -O2 -DPEER_FLEXRING -Iinclude bench/peers/allreduce.c libflexring.a -lpthread -ldl -lm
 *
 *     allreduce pool|heap f32|bf16 SECONDS MOST BYTES...
 *
 * For each length, after a barrier the time of one call is taken; the time of a call is that of the slowest rank. Rank 0 prints a line of
 * JSON for each length: `first_us` is the first call, whose result is checked, and `times_us` are the calls after it, as many as fit into
 * SECONDS by the second call and its barrier, up to MOST; at least 3 if the second one takes up to 1 s, and 1 otherwise. A first call of more
 * than 2 s is the only one, and `times_us` has its time. `pool` is memory that the library allocates for its calls, where it has such a
 * function. Only flexring has bf16 here: MPI 4.0 has no such type.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int rank, world;
/* Elements are bf16 instead of f32. */
static int is_bf16;

static void fail(const char *what, const char *why) {
    fprintf(stderr, "rank %d: %s: %s\n", rank, what, why);
    exit(1);
}

#ifdef PEER_FLEXRING
#include <flexring.h>

static flexring_comm *comm;

#define MUST(call)                                                         \
    do {                                                                   \
        if ((call) != FLEXRING_SUCCESS) fail(#call, flexring_last_error()); \
    } while (0)

static void start(int *argc, char ***argv) {
    (void)argc, (void)argv;
    MUST(flexring_comm_init_from_env(&comm));
    MUST(flexring_comm_rank(comm, &rank));
    MUST(flexring_comm_size(comm, &world));
}
static void barrier(void) { MUST(flexring_barrier(comm)); }
static void all_reduce(void *data, size_t count) {
    MUST(flexring_all_reduce(data, data, count, is_bf16 ? FLEXRING_BFLOAT16 : FLEXRING_FLOAT32, FLEXRING_SUM, comm, NULL));
}
static void maximum(double *data, size_t count) {
    MUST(flexring_all_reduce(data, data, count, FLEXRING_FLOAT64, FLEXRING_MAX, comm, NULL));
}
static void *allocate(size_t bytes, int pool) {
    void *memory;
    if (!pool) return malloc(bytes);
    MUST(flexring_alloc(comm, bytes, &memory));
    return memory;
}
static void end(void) { MUST(flexring_comm_free(comm)); }
static void library(char *name, size_t size) { snprintf(name, size, "flexring"); }

#else
#include <mpi.h>

static void start(int *argc, char ***argv) {
    MPI_Init(argc, argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
}
static void barrier(void) { MPI_Barrier(MPI_COMM_WORLD); }
static void maximum(double *data, size_t count) {
    MPI_Allreduce(MPI_IN_PLACE, data, (int)count, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
}
static void *allocate(size_t bytes, int pool) {
    void *memory = NULL;
    if (!pool) return malloc(bytes);
    MPI_Alloc_mem((MPI_Aint)bytes, MPI_INFO_NULL, &memory);
    return memory;
}
static void end(void) { MPI_Finalize(); }

#ifdef PEER_BAIDU
/* The ring all-reduce as Baidu's article on it describes it ("Bringing HPC Techniques to Deep Learning", 2017): the vector is cut
 * into as many chunks as there are ranks. In world - 1 steps each rank sends a chunk to the next rank and adds the one that it
 * receives from the previous rank; then each rank has one complete chunk. In world - 1 further steps the complete chunks go round. */
static float *received;
static size_t received_count;

static size_t chunk_start(size_t count, int chunk) {
    size_t each = count / (size_t)world, longer = count % (size_t)world;
    size_t before = (size_t)chunk;
    return each * before + (before < longer ? before : longer);
}

static void all_reduce(void *memory, size_t count) {
    float *data = memory;
    int next = (rank + 1) % world, previous = (rank + world - 1) % world;
    size_t longest = count / (size_t)world + 1;
    if (received_count < longest) {
        free(received);
        received = malloc(longest * sizeof *received);
        received_count = longest;
        if (!received) fail("malloc", "no memory");
    }
    for (int step = 0; step < 2 * (world - 1); step++) {
        int gathers = step >= world - 1;
        int out = (rank - step + 2 * world + (gathers ? world : 0)) % world;
        int in = (out + world - 1) % world;
        size_t out_start = chunk_start(count, out), in_start = chunk_start(count, in);
        size_t out_count = chunk_start(count, out + 1) - out_start, in_count = chunk_start(count, in + 1) - in_start;
        float *target = gathers ? data + in_start : received;
        MPI_Request request;
        MPI_Irecv(target, (int)in_count, MPI_FLOAT, previous, 0, MPI_COMM_WORLD, &request);
        MPI_Send(data + out_start, (int)out_count, MPI_FLOAT, next, 0, MPI_COMM_WORLD);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
        if (!gathers)
            for (size_t i = 0; i < in_count; i++) data[in_start + i] += received[i];
    }
}
static void library(char *name, size_t size) { snprintf(name, size, "Baidu's ring over MPI"); }

#else
static void all_reduce(void *data, size_t count) {
    MPI_Allreduce(MPI_IN_PLACE, data, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}
static void library(char *name, size_t size) {
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length;
    MPI_Get_library_version(version, &length);
    version[strcspn(version, ",\n")] = 0;
    /* MPICH separates the words by tabs. */
    for (char *at = version; *at; at++)
        if (*at == '\t') *at = ' ';
    snprintf(name, size, "%s", version);
}
#endif
#endif

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* The value of an element. The upper half of an f32 is the same number in bf16 if the lower half is zero. */
static float element(const void *data, size_t i) {
    if (!is_bf16) return ((const float *)data)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)data)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static void set_element(void *data, size_t i, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (is_bf16) ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
    else ((float *)data)[i] = value;
}

/* Seconds of one call on this rank, after a barrier. */
static double timed(void *data, size_t count) {
    barrier();
    double begun = seconds();
    all_reduce(data, count);
    return seconds() - begun;
}

static void measure(const char *memory, size_t bytes, double limit, long most) {
    size_t count = bytes / (is_bf16 ? 2 : 4);
    void *data = allocate(bytes, strcmp(memory, "pool") == 0);
    double *times = malloc((size_t)most * sizeof *times);
    if (!data || !times) fail("memory", "not enough");
    for (size_t i = 0; i < count; i++) set_element(data, i, (float)(rank + (int)(i % 7)));
    double first = timed(data, count);
    size_t wrong = 0;
    for (size_t i = 0; i < count; i++) wrong += element(data, i) != (float)(world * (world - 1) / 2 + world * (int)(i % 7));
    double failed = wrong > 0;
    maximum(&failed, 1);

    /* Sum zeros, so that repeated sums do not overflow. */
    memset(data, 0, bytes);
    maximum(&first, 1);
    long iterations = 1;
    times[0] = first;
    if (first <= 2) {
        double begun = seconds();
        times[0] = timed(data, count);
        double second = seconds() - begun;
        maximum(&second, 1);
        double fits = limit / second;
        long least = second <= 1 && most > 2 ? 3 : 1;
        iterations = fits > (double)most ? most : fits < (double)least ? least : (long)fits;
        for (long i = 1; i < iterations; i++) times[i] = timed(data, count);
        maximum(times, (size_t)iterations);
    }
    if (rank == 0) {
        char name[256];
        library(name, sizeof name);
        printf("{\"library\": \"%s\", \"ranks\": %d, \"bytes\": %zu, \"dtype\": \"%s\", \"memory\": \"%s\", \"wrong\": %d, \"first_us\": %.2f, \"times_us\": [",
               name, world, bytes, is_bf16 ? "bf16" : "f32", memory, failed > 0, first * 1e6);
        for (long i = 0; i < iterations; i++) printf("%s%.2f", i ? ", " : "", times[i] * 1e6);
        printf("]}\n");
        fflush(stdout);
    }
    free(times);
    /* The memory is kept until the process ends: pool memory is freed with the communicator. */
    if (strcmp(memory, "heap") == 0) free(data);
}

int main(int argc, char **argv) {
    start(&argc, &argv);
    long most = argc > 5 ? atol(argv[4]) : 0;
    double limit = argc > 5 ? atof(argv[3]) : 0;
    is_bf16 = argc > 5 && strcmp(argv[2], "bf16") == 0;
    if (argc < 6 || most < 1 || limit <= 0 || (strcmp(argv[1], "pool") && strcmp(argv[1], "heap")) || (!is_bf16 && strcmp(argv[2], "f32"))) {
        fprintf(stderr, "usage: %s pool|heap f32|bf16 SECONDS MOST BYTES...\n", argv[0]);
        exit(2);
    }
#ifndef PEER_FLEXRING
    if (is_bf16) fail(argv[2], "MPI has no such type");
#endif
    /* Integers up to 256 are exact in bf16. */
    if (is_bf16 && world * (world - 1) / 2 + 6 * world > 256) fail(argv[2], "the sums of so many ranks are not exact");
    for (int i = 5; i < argc; i++) {
        long long bytes = atoll(argv[i]);
        if (bytes < 4 || bytes % 4 || bytes / 4 > 0x7fffffff) fail(argv[i], "is no length of f32 that MPI can count");
        measure(argv[1], (size_t)bytes, limit, most);
    }
    /* MPICH over UCX hangs here now and then, with all lengths measured. SIGALRM ends the process, and the launcher reports a failure. */
    alarm(5 + (unsigned)world / 4);
    end();
    return 0;
}
