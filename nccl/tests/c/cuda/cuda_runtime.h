/* What nccl.h needs of CUDA's runtime, which the tests do without. */
#ifndef CUDA_RUNTIME_H
#define CUDA_RUNTIME_H
#include <stddef.h>
typedef struct CUstream_st *cudaStream_t;
#endif
