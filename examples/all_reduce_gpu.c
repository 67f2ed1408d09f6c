/* Averages a gradient on a GPU over all ranks, in a stream. The host does not wait for the call.
 *
 *     cargo build --release
 *     cc examples/all_reduce_gpu.c -Iinclude target/release/libflexring.a -lpthread -ldl -lm -o all_reduce_gpu
 *     mpirun -np 4 ./all_reduce_gpu
 *
 * It is built without CUDA. It loads the functions of the driver that it needs from libcuda.so.1 at run time. Programs that
 * use CUDA's runtime pass memory of cudaMalloc and a cudaStream_t instead.
 */
#include <dlfcn.h>
#include <flexring.h>
#include <stdio.h>
#include <stdlib.h>

#define MUST(call)                                                          \
    do {                                                                    \
        if ((call) != FLEXRING_SUCCESS) {                                   \
            fprintf(stderr, "%s: %s\n", #call, flexring_last_error());      \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

#define CUDA(call)                                                          \
    do {                                                                    \
        int code = (call);                                                  \
        if (code != 0) {                                                    \
            fprintf(stderr, "%s: CUDA error %d\n", #call, code);            \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

/* Declared as in cuda.h, but with void pointers for handles. */
typedef unsigned long long address;
static int (*cuInit)(unsigned);
static int (*cuDeviceGetCount)(int *);
static int (*cuDevicePrimaryCtxRetain)(void **, int);
static int (*cuDevicePrimaryCtxRelease)(int);
static int (*cuCtxSetCurrent)(void *);
static int (*cuStreamCreate)(void **, unsigned);
static int (*cuStreamSynchronize)(void *);
static int (*cuStreamDestroy)(void *);
static int (*cuMemAlloc)(address *, size_t);
static int (*cuMemFree)(address);
static int (*cuMemcpyHtoDAsync)(address, const void *, size_t, void *);
static int (*cuMemcpyDtoHAsync)(void *, address, size_t, void *);

static void find(void *library, const char *name, void *function) {
    void *found = dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "libcuda.so.1 has no %s\n", name);
        exit(1);
    }
    *(void **)function = found;
}

static void open_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "no CUDA driver: %s\n", dlerror());
        exit(1);
    }
    find(library, "cuInit", &cuInit);
    find(library, "cuDeviceGetCount", &cuDeviceGetCount);
    find(library, "cuDevicePrimaryCtxRetain", &cuDevicePrimaryCtxRetain);
    find(library, "cuDevicePrimaryCtxRelease_v2", &cuDevicePrimaryCtxRelease);
    find(library, "cuCtxSetCurrent", &cuCtxSetCurrent);
    find(library, "cuStreamCreate", &cuStreamCreate);
    find(library, "cuStreamSynchronize", &cuStreamSynchronize);
    find(library, "cuStreamDestroy_v2", &cuStreamDestroy);
    find(library, "cuMemAlloc_v2", &cuMemAlloc);
    find(library, "cuMemFree_v2", &cuMemFree);
    find(library, "cuMemcpyHtoDAsync_v2", &cuMemcpyHtoDAsync);
    find(library, "cuMemcpyDtoHAsync_v2", &cuMemcpyDtoHAsync);
}

int main(void) {
    const size_t count = 1 << 20, bytes = count * sizeof(float);
    flexring_comm *comm;
    void *context, *stream;
    address gradient;
    int rank, size, local_rank, gpus;

    MUST(flexring_comm_init_from_env(&comm));
    MUST(flexring_comm_rank(comm, &rank));
    MUST(flexring_comm_size(comm, &size));
    MUST(flexring_comm_local_rank(comm, &local_rank));

    open_driver();
    CUDA(cuInit(0));
    CUDA(cuDeviceGetCount(&gpus));
    if (gpus == 0) {
        fprintf(stderr, "there is no GPU\n");
        return 1;
    }
    int gpu = local_rank % gpus;
    /* The primary context is the one that flexring and CUDA's runtime use. */
    CUDA(cuDevicePrimaryCtxRetain(&context, gpu));
    CUDA(cuCtxSetCurrent(context));
    CUDA(cuStreamCreate(&stream, 1 /* CU_STREAM_NON_BLOCKING */));
    CUDA(cuMemAlloc(&gradient, bytes));

    float *host = malloc(bytes);
    if (host == NULL) return 1;
    for (size_t i = 0; i < count; i++) host[i] = (float)rank;

    /* The stream runs these in order. The host does not wait for any of them. */
    CUDA(cuMemcpyHtoDAsync(gradient, host, bytes, stream));
    MUST(flexring_all_reduce((void *)gradient, (void *)gradient, count, FLEXRING_FLOAT32, FLEXRING_AVG, comm, stream));
    CUDA(cuMemcpyDtoHAsync(host, gradient, bytes, stream));
    CUDA(cuStreamSynchronize(stream));
    /* If the call failed, the stream continued without a result, and this returns the error. */
    MUST(flexring_comm_status(comm));

    float expected = (float)(size - 1) / 2;
    for (size_t i = 0; i < count; i++) {
        if (host[i] != expected) {
            fprintf(stderr, "rank %d: element %zu is %g and not %g\n", rank, i, host[i], expected);
            return 1;
        }
    }
    printf("rank %d of %d: the average is %g\n", rank, size, host[0]);
    free(host);
    MUST(flexring_comm_free(comm));
    CUDA(cuMemFree(gradient));
    CUDA(cuStreamDestroy(stream));
    CUDA(cuDevicePrimaryCtxRelease(gpu));
    return 0;
}
