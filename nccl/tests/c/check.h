/* Checks for C programs that are written for NCCL. */
#ifndef NCCL_CHECK_H
#define NCCL_CHECK_H

#include "../../../tests/c/cuda.h"

#include <nccl.h>

/* The call succeeds. */
#define NCCL(call) RETURNS(ncclSuccess, "", call)

/* The call returns this code and, if it fails, leaves a sentence that contains `phrase`. */
#define RETURNS(code, phrase, call)                                                             \
    do {                                                                                        \
        ncclResult_t result_ = (call);                                                          \
        const char *sentence_ = ncclGetLastError(NULL);                                         \
        if (result_ != (code)) {                                                                \
            fprintf(stderr, "%s:%d: %s returned %d (%s) and not %s: %s\n", __FILE__, __LINE__,  \
                    #call, (int)result_, ncclGetErrorString(result_), #code, sentence_);        \
            exit(1);                                                                            \
        }                                                                                       \
        if (!strstr(sentence_, (phrase))) {                                                     \
            fprintf(stderr, "%s:%d: the sentence of %s lacks \"%s\": \"%s\"\n",                 \
                    __FILE__, __LINE__, #call, (phrase), sentence_);                            \
            exit(1);                                                                            \
        }                                                                                       \
    } while (0)

/* The state of a communicator once nothing is in progress. */
static inline ncclResult_t settled(ncclComm_t comm) {
    ncclResult_t state = ncclInProgress;
    for (int i = 0; i < 20000 && state == ncclInProgress; i++) {
        NCCL(ncclCommGetAsyncError(comm, &state));
        if (state == ncclInProgress) usleep(1000);
    }
    return state;
}

/* Writes floats to the current GPU, in a stream. */
static inline void upload(float *to, const float *from, size_t count, void *stream) {
    CUDA(cuMemcpyHtoDAsync_v2, (address, const void *, size_t, void *), (address)(uintptr_t)to, from,
         count * sizeof(float), stream);
}

/* Reads floats after all work that is in the stream. */
static inline void download(float *to, const float *from, size_t count, void *stream) {
    CUDA(cuMemcpyDtoHAsync_v2, (void *, address, size_t, void *), to, (address)(uintptr_t)from,
         count * sizeof(float), stream);
    CHECK(synchronize(stream) == 0);
}

#endif
