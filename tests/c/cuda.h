/* CUDA's driver, loaded at run time, because programs are built without it. */
#ifndef CUDA_H
#define CUDA_H

#include "check.h"

#include <dlfcn.h>
#include <stdint.h>

typedef unsigned long long address;

static inline void *cuda_function(const char *name) {
    static void *library;
    if (library == NULL) library = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(library != NULL);
    void *found = dlsym(library, name);
    if (found == NULL) fprintf(stderr, "libcuda.so.1 has no %s\n", name);
    CHECK(found != NULL);
    return found;
}

/* CUDA(cuFoo, (int, void *), 1, NULL) calls a function, which must succeed. */
#define CUDA(name, types, ...) CHECK(((int (*) types)cuda_function(#name))(__VA_ARGS__) == 0)

/* Makes a GPU's primary context current on this thread. */
static inline void use_gpu(int gpu) {
    void *context;
    CUDA(cuInit, (unsigned), 0);
    CUDA(cuDevicePrimaryCtxRetain, (void **, int), &context, gpu);
    CUDA(cuCtxSetCurrent, (void *), context);
}

static inline void *new_stream(void) {
    void *stream;
    CUDA(cuStreamCreate, (void **, unsigned), &stream, 1);
    return stream;
}

/* `count` floats on the current GPU, written in a stream. */
static inline float *on_gpu(size_t count, float value, void *stream) {
    address start;
    float *host = malloc(count * sizeof(float));
    CHECK(host != NULL);
    for (size_t i = 0; i < count; i++) host[i] = value;
    CUDA(cuMemAlloc_v2, (address *, size_t), &start, count * sizeof(float));
    /* The source is pageable memory, so the driver has read it when this returns. */
    CUDA(cuMemcpyHtoDAsync_v2, (address, const void *, size_t, void *), start, host, count * sizeof(float), stream);
    free(host);
    return (float *)(uintptr_t)start;
}

static inline void free_gpu(float *start) {
    CUDA(cuMemFree_v2, (address), (address)(uintptr_t)start);
}

static inline int synchronize(void *stream) {
    return ((int (*)(void *))cuda_function("cuStreamSynchronize"))(stream);
}

/* The element at `at` after all work that is in the stream. */
static inline float read_gpu(const float *at, void *stream) {
    float value;
    CUDA(cuMemcpyDtoHAsync_v2, (void *, address, size_t, void *), &value, (address)(uintptr_t)at, sizeof value, stream);
    CHECK(synchronize(stream) == 0);
    return value;
}

#endif
