/* Streams that are destroyed, full or blocked while calls are enqueued in them, in a world of one rank. The argument names the
 * case. */
#include "cuda.h"

#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#define COUNT 100000

static flexring_comm *comm;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void begin(void) {
    setenv("FLEXRING_RANK", "0", 1);
    setenv("FLEXRING_WORLD_SIZE", "1", 1);
    WORKS(flexring_comm_init_from_env(&comm));
}

/* Copies `send` to `recv`, in a kernel as for any number of ranks. */
static void reduce(const float *send, float *recv, void *stream) {
    WORKS(flexring_all_reduce(send, recv, COUNT, FLEXRING_FLOAT32, FLEXRING_SUM, comm, stream));
}

/* Streams that are destroyed before their calls are over. */
static void destroyed(void) {
    void *stream = new_stream();
    float *send = on_gpu(COUNT, 7, stream), *recv[5];
    CHECK(synchronize(stream) == 0);
    for (int i = 0; i < 5; i++) {
        void *other = new_stream();
        recv[i] = on_gpu(COUNT, 1, other);
        reduce(send, recv[i], other);
        CUDA(cuStreamDestroy_v2, (void *), other);
    }
    reduce(recv[4], recv[0], stream);
    WORKS(flexring_comm_synchronize(comm));
    CHECK(read_gpu(recv[4] + COUNT - 1, stream) == 7);
    CHECK(read_gpu(recv[0] + COUNT - 1, stream) == 7);
    for (int i = 0; i < 5; i++) free_gpu(recv[i]);
    free_gpu(send);
    WORKS(flexring_comm_free(comm));
}

/* More operations than the driver queues: the driver blocks until the stream has room. */
static void full(void) {
    void *stream = new_stream();
    float *send = on_gpu(COUNT, 7, stream), *recv = on_gpu(COUNT, 1, stream);
    for (int i = 0; i < 200; i++) {
        if (i % 50 == 0) reduce(send, recv, stream);
        for (int j = 0; j < 10; j++) {
            CUDA(cuMemsetD8Async, (address, unsigned char, size_t, void *), (address)(uintptr_t)recv, 0, 4096, stream);
        }
    }
    CHECK(read_gpu(recv, stream) == 0);
    CHECK(read_gpu(recv + COUNT - 1, stream) == 7);
    WORKS(flexring_comm_free(comm));
}

static atomic_int released;

static void wait_for_release(void *unused) {
    (void)unused;
    while (!atomic_load(&released)) usleep(1000);
}

/* The communicator of one rank is freed while the stream has not reached a call. Its kernel still runs it. */
static void blocked(void) {
    void *stream = new_stream();
    float *send = on_gpu(COUNT, 7, stream), *recv = on_gpu(COUNT, 1, stream);
    reduce(send, recv, stream);
    CHECK(synchronize(stream) == 0);
    CUDA(cuLaunchHostFunc, (void *, void (*)(void *), void *), stream, wait_for_release, NULL);
    CUDA(cuMemsetD8Async, (address, unsigned char, size_t, void *), (address)(uintptr_t)recv, 0, 4096, stream);
    reduce(send, recv, stream);
    double start = now();
    WORKS(flexring_comm_free(comm));
    double took = now() - start;
    printf("freed after %.1f s\n", took);
    CHECK(took > 4 && took < 12);
    atomic_store(&released, 1);
    CHECK(synchronize(stream) == 0);
    CHECK(read_gpu(recv, stream) == 7);
    CHECK(read_gpu(recv + COUNT - 1, stream) == 7);
}

/* Calls that are enqueued when the communicator is freed still take effect. */
static void freed(void) {
    void *stream = new_stream();
    float *send = on_gpu(COUNT, 7, stream), *recv = on_gpu(COUNT, 1, stream);
    for (int i = 0; i < 20; i++) reduce(send, recv, stream);
    WORKS(flexring_comm_free(comm));
    CHECK(read_gpu(recv + COUNT - 1, stream) == 7);
}

int main(int count, char **arguments) {
    alarm(100);
    CHECK(count == 2);
    use_gpu(0);
    begin();
    if (strcmp(arguments[1], "destroyed") == 0) destroyed();
    else if (strcmp(arguments[1], "full") == 0) full();
    else if (strcmp(arguments[1], "blocked") == 0) blocked();
    else if (strcmp(arguments[1], "freed") == 0) freed();
    else CHECK(0);
    puts("gpu_streams: ok");
    return 0;
}
