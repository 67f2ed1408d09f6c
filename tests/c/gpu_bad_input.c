/* GPU memory and streams that cannot be used are refused with a code and a message, and the communicator still works.
 * The argument names the machine: `none` has no driver, `two` has two GPUs. */
#define _GNU_SOURCE
#include "cuda.h"

#include <sys/mman.h>

#define INVALID FLEXRING_INVALID_ARGUMENT
#define COUNT 4096

static flexring_comm *comm;
static float host[COUNT];

static flexring_result reduce(const void *send, void *recv, size_t count, void *stream) {
    return flexring_all_reduce(send, recv, count, FLEXRING_FLOAT32, FLEXRING_SUM, comm, stream);
}

static void begin(void) {
    setenv("FLEXRING_RANK", "0", 1);
    setenv("FLEXRING_WORLD_SIZE", "1", 1);
    WORKS(flexring_comm_init_from_env(&comm));
}

/* An address range that the host cannot access, like those that a driver reserves for GPUs. */
static void *reserved(void) {
    void *start = mmap(NULL, COUNT * sizeof(float), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(start != MAP_FAILED);
    return start;
}

static void without_a_driver(void) {
    void *nowhere = reserved();
    begin();
    EXPECT(INVALID, "there is no CUDA driver", reduce(nowhere, nowhere, COUNT, NULL));
    EXPECT(INVALID, "there is no CUDA driver", reduce(host, nowhere, COUNT, NULL));
    CHECK(munmap(nowhere, COUNT * sizeof(float)) == 0);
    EXPECT(INVALID, "the send buffer: ", reduce(nowhere, nowhere, COUNT, NULL));
    EXPECT(INVALID, "the host's memory", reduce(host, host, COUNT, &host));
    WORKS(reduce(host, host, COUNT, NULL));
}

static void with_two_gpus(void) {
    use_gpu(1);
    void *stream_of_1 = new_stream();
    float *of_1 = on_gpu(COUNT, 1, stream_of_1);
    CHECK(synchronize(stream_of_1) == 0);
    /* The communicator works with the GPU that is current when it is created. */
    use_gpu(0);
    void *stream = new_stream();
    float *vector = on_gpu(COUNT, 1, stream), *other = on_gpu(COUNT, 1, stream);
    begin();

    EXPECT(INVALID, "memory of GPU 1, but this communicator works with GPU 0", reduce(of_1, of_1, COUNT, stream_of_1));
    EXPECT(INVALID, "both must be in the same place", reduce(of_1, vector, COUNT, stream));
    EXPECT(INVALID, "the stream is not of the primary context of GPU 0", reduce(vector, vector, COUNT, stream_of_1));
    EXPECT(INVALID, "the host's memory", reduce(host, host, COUNT, stream));
    EXPECT(INVALID, "both must be in the same place", reduce(host, vector, COUNT, stream));
    EXPECT(INVALID, "both must be in the same place", reduce(vector, host, COUNT, stream));
    EXPECT(INVALID, "reach beyond their allocation", reduce(vector, vector, COUNT * 100, stream));
    EXPECT(INVALID, "reach beyond their allocation", reduce(vector + 1, vector + 1, COUNT, stream));
    EXPECT(INVALID, "overlap", reduce(vector, vector + 1, COUNT - 1, stream));
    EXPECT(INVALID, "not aligned", reduce((char *)vector + 1, vector, COUNT / 2, stream));

    address managed;
    CUDA(cuMemAllocManaged, (address *, size_t, unsigned), &managed, COUNT * sizeof(float), 1);
    EXPECT(INVALID, "managed memory", reduce((void *)managed, (void *)managed, COUNT, stream));

    float *freed = on_gpu(COUNT, 1, stream);
    CHECK(synchronize(stream) == 0);
    free_gpu(freed);
    EXPECT(INVALID, "was it freed", reduce(freed, freed, COUNT, stream));
    EXPECT(INVALID, "was it freed", reduce(freed, freed, COUNT, NULL));

    void *graph;
    CUDA(cuStreamBeginCapture_v2, (void *, unsigned), stream, 2);
    WORKS(reduce(vector, vector, COUNT, stream));
    CUDA(cuStreamEndCapture, (void *, void **), stream, &graph);

    /* None of these calls has ended the communicator or written anything. */
    CHECK(read_gpu(other, stream) == 1);
    WORKS(reduce(vector, other, COUNT, stream));
    WORKS(reduce(vector, other, 0, stream));
    CHECK(read_gpu(other + COUNT - 1, stream) == 1);
    WORKS(flexring_comm_synchronize(comm));
}

int main(int count, char **arguments) {
    alarm(60);
    CHECK(count == 2);
    if (strcmp(arguments[1], "none") == 0) {
        without_a_driver();
    } else {
        with_two_gpus();
    }
    WORKS(flexring_comm_free(comm));
    puts("gpu_bad_input: ok");
    return 0;
}
