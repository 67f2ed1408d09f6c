/* What a communicator of the ranks of one node reserves on its GPU and of pinned memory, on the simulated driver. */
#include "cuda.h"
#include "ranks.h"

enum { RANKS = 8, COUNT = 100000, KIB = 1 << 10, MIB = 1 << 20 };

static size_t gpu_memory(void) {
    size_t left, all;
    CUDA(cuMemGetInfo_v2, (size_t *, size_t *), &left, &all);
    return all - left;
}

static size_t pinned(void) {
    size_t bytes;
    CUDA(cuSimulatedPinned, (size_t *), &bytes);
    return bytes;
}

static void run(int rank) {
    flexring_comm *comm;
    char number[12];
    snprintf(number, sizeof number, "%d", rank);
    setenv("FLEXRING_RANK", number, 1);
    use_gpu(0);
    void *stream = new_stream();
    float *vector = on_gpu(COUNT, (float)rank, stream);
    size_t before[] = {gpu_memory(), pinned()};
    WORKS(flexring_comm_init_from_env(&comm));
    WORKS(flexring_all_reduce(vector, vector, COUNT, FLEXRING_FLOAT32, FLEXRING_SUM, comm, stream));
    CHECK(read_gpu(vector + COUNT - 1, stream) == RANKS * (RANKS - 1) / 2);
    size_t gpu = gpu_memory() - before[0], host = pinned() - before[1];
    fprintf(stderr, "rank %d: %zu KiB on the GPU, %zu KiB pinned\n", rank, gpu / KIB, host / KIB);
    /* Less than 1 MiB was not measured. */
    CHECK(gpu > MIB && gpu <= 48 * MIB);
    CHECK(host > 0 && host <= MIB);
    WORKS(flexring_comm_free(comm));
}

/* The port of the rendezvous is in the environment. */
int main(void) {
    alarm(90);
    setenv("FLEXRING_WORLD_SIZE", "8", 1);
    CHECK(ranks_work(RANKS, "gpu_memory", run));
    puts("gpu_memory: ok");
    return 0;
}
