/*
 * flexring: an all-reduce engine for clusters that are not symmetric.
 *
 * Every function but flexring_last_error and flexring_version returns a flexring_result. Outputs are written
 * last and only on success. A handle may be used from any thread; its calls run one at a time. Every rank must
 * make the same calls in the same order. Vectors are memory of the host or of a GPU; flexring_all_reduce says what
 * its stream is for.
 *
 * This file is generated from src/c_api.
 */

#ifndef FLEXRING_H
#define FLEXRING_H

#include <stddef.h>
#include <stdint.h>

// The version of this header, numbered as flexring_version() numbers the library.
#define FLEXRING_VERSION_MAJOR 0
#define FLEXRING_VERSION_MINOR 1
#define FLEXRING_VERSION_PATCH 0
#define FLEXRING_VERSION 100

// Bytes of a unique id.
#define FLEXRING_UNIQUE_ID_BYTES 128

// The result of every call. 0 is success; flexring_last_error() says the rest in words.
typedef enum {
    // It worked.
    FLEXRING_SUCCESS = 0,
    // A pointer, count, enum or argument that no call can accept.
    FLEXRING_INVALID_ARGUMENT = 1,
    // An environment variable that cannot be used.
    FLEXRING_INVALID_SETTING = 2,
    // The operating system refused something.
    FLEXRING_SYSTEM_ERROR = 3,
    // The ranks could not find each other.
    FLEXRING_RENDEZVOUS_FAILED = 4,
    // Ranks differ in version, settings, program, collective, root, count, type or operation.
    FLEXRING_DISAGREEMENT = 5,
    // A rank died or its connection broke.
    FLEXRING_PEER_LOST = 6,
    // A deadline passed.
    FLEXRING_TIMEOUT = 7,
    // Somebody called flexring_comm_abort, or the communicator has failed before.
    FLEXRING_ABORTED = 8,
    // Not built into this library, or not possible here.
    FLEXRING_UNSUPPORTED = 9,
    // A bug in flexring.
    FLEXRING_INTERNAL_ERROR = 10,
} flexring_result;

// A group of ranks that reduce together. Made by flexring_comm_init_*, ended by flexring_comm_free.
typedef struct flexring_comm flexring_comm;

// A call under way. Made by flexring_all_reduce_async, ended by flexring_wait.
typedef struct flexring_request flexring_request;

// Names a world that is about to meet. Plain bytes: pass it to the other ranks by any means.
typedef struct {
    // Opaque.
    uint8_t internal[FLEXRING_UNIQUE_ID_BYTES];
} flexring_unique_id;

// How elements are combined: one of FLEXRING_SUM and so on, or what flexring_op_create_premul_sum returns.
typedef uint64_t flexring_op;

// The type of one element; one of FLEXRING_INT8 and so on. Numbered as NCCL numbers them.
typedef int flexring_dtype;

// Signed 8-bit integers.
#define FLEXRING_INT8 0

// Unsigned 8-bit integers.
#define FLEXRING_UINT8 1

// Signed 32-bit integers.
#define FLEXRING_INT32 2

// Unsigned 32-bit integers.
#define FLEXRING_UINT32 3

// Signed 64-bit integers.
#define FLEXRING_INT64 4

// Unsigned 64-bit integers.
#define FLEXRING_UINT64 5

// IEEE 754 binary16.
#define FLEXRING_FLOAT16 6

// IEEE 754 binary32.
#define FLEXRING_FLOAT32 7

// IEEE 754 binary64.
#define FLEXRING_FLOAT64 8

// bfloat16.
#define FLEXRING_BFLOAT16 9

// OCP 8-bit floats with four bits of exponent: no infinities, results beyond 448 are NaN.
#define FLEXRING_FLOAT8E4M3 10

// OCP 8-bit floats with five bits of exponent.
#define FLEXRING_FLOAT8E5M2 11

// The sum over all ranks.
#define FLEXRING_SUM 0

// The product over all ranks.
#define FLEXRING_PROD 1

// The largest element; NaN if any is NaN.
#define FLEXRING_MAX 2

// The smallest element; NaN if any is NaN.
#define FLEXRING_MIN 3

// The sum divided by the number of ranks; integers truncate toward zero.
#define FLEXRING_AVG 4

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The sentence that belongs to the last call of this thread that did not return FLEXRING_SUCCESS; empty if
// there was none. Valid until this thread's next failing call. Never NULL.
const char *flexring_last_error(void);

// The version of this library, as MAJOR * 10000 + MINOR * 100 + PATCH.
int32_t flexring_version(void);

// Makes an id for a new world. The process that calls this must live until all ranks have joined; it is
// usually rank 0. Each id serves one world.
//
// The caller promises:
// `out` is NULL or points to a flexring_unique_id that may be written.
flexring_result flexring_get_unique_id(flexring_unique_id *out);

// Joins the world that the environment describes: FLEXRING_RANK, FLEXRING_WORLD_SIZE, FLEXRING_MASTER_ADDR
// and FLEXRING_MASTER_PORT, or the variables of torchrun, Open MPI, MPICH or Slurm. Returns when all ranks
// are there and all links are ready.
//
// A communicator works with one GPU: the one that FLEXRING_GPU names, or whose context is current on this thread, which
// is made ready here; else the one of the first vector on a GPU, whose call is then slower than the others.
//
// The caller promises:
// `out` is NULL or points to a pointer that may be written.
flexring_result flexring_comm_init_from_env(flexring_comm **out);

// Joins the world of `world` ranks that share `id`, as `rank`.
//
// The caller promises:
// `out` is NULL or points to a pointer that may be written.
flexring_result flexring_comm_init_rank(flexring_comm **out, int world, flexring_unique_id id, int rank);

// Writes this rank's number to `out`.
//
// The caller promises:
// `comm` is NULL or a live handle; `out` is NULL or points to an int that may be written.
flexring_result flexring_comm_rank(const flexring_comm *comm, int *out);

// Writes the number of ranks to `out`.
//
// The caller promises:
// `comm` is NULL or a live handle; `out` is NULL or points to an int that may be written.
flexring_result flexring_comm_size(const flexring_comm *comm, int *out);

// Waits until all calls that were made so far on this rank are over, also those that take effect in streams; returns what
// ended the communicator, if anything has.
//
// The caller promises:
// `comm` is NULL or a live handle.
flexring_result flexring_comm_synchronize(const flexring_comm *comm);

// Returns what ended the communicator, if anything has, without waiting. Calls that take effect in streams return before
// they are over, so this is how to hear that one has failed.
//
// The caller promises:
// `comm` is NULL or a live handle.
flexring_result flexring_comm_status(const flexring_comm *comm);

// Ends what all ranks do with this communicator, from any thread, at once: calls under way return
// FLEXRING_ABORTED on every rank. The communicator must still be freed.
//
// The caller promises:
// `comm` is NULL or a live handle.
flexring_result flexring_comm_abort(flexring_comm *comm);

// Ends a communicator. Always works, after errors too; NULL is allowed. Waits for asynchronous calls that
// are under way. Memory of flexring_alloc is freed by flexring_free before.
//
// The caller promises:
// `comm` is NULL or a live handle that no other thread uses; it is dead afterwards.
flexring_result flexring_comm_free(flexring_comm *comm);

// Takes `bytes` bytes, zeroed and aligned to a page, from memory that the other ranks of this node read
// directly: reducing it copies nothing. Freed by flexring_free.
//
// The caller promises:
// `comm` is NULL or a live handle; `out` is NULL or points to a pointer that may be written.
flexring_result flexring_alloc(flexring_comm *comm, size_t bytes, void **out);

// Gives memory back that flexring_alloc returned. NULL is allowed.
//
// The caller promises:
// `comm` is NULL or a live handle; nobody uses the memory any more.
flexring_result flexring_free(flexring_comm *comm, void *memory);

// Registers `bytes` bytes of the program's own memory with the RDMA devices that the communicator uses: calls on
// it, or on parts of it, then copy and register nothing. It must stay allocated until flexring_deregister with the
// same address and length, as often as it was registered, or until the communicator is freed. Without RDMA devices
// nothing is done. Memory of flexring_alloc is registered already.
//
// The caller promises:
// `comm` is NULL or a live handle; `memory` points to as many bytes, which may be read and written.
flexring_result flexring_register(flexring_comm *comm,
                                  void *memory,
                                  size_t bytes);

// Takes one flexring_register of exactly this memory back. Calls that are under way end well.
//
// The caller promises:
// `comm` is NULL or a live handle.
flexring_result flexring_deregister(flexring_comm *comm, void *memory, size_t bytes);

// Makes an operation that sums each rank's elements times that rank's own `factor`; ranks may give different
// factors. For integer types the factor must be a whole number that the type can hold. The operation needs
// not be freed.
//
// The caller promises:
// `out` is NULL or points to a flexring_op that may be written.
flexring_result flexring_op_create_premul_sum(float factor, flexring_op *out);

// Reduces the `count` elements at `send` of all ranks into `recv` on every rank. The two may be the same
// (in place) or apart, not overlap otherwise. Both are memory of the host or both of one GPU.
//
// On the host, with stream NULL, the call returns when the result is there. On a GPU it returns at once and takes
// effect in `stream`, a cudaStream_t or CUstream, NULL being the default stream: behind what is in it, and before
// what comes later, as cudaMemcpyAsync does. Whose memory it is CUDA's driver tells; managed memory is refused, and so
// is a stream that is being captured, and one of another context than the GPU's primary one. A call that fails later
// lets the stream go on without a result: flexring_comm_status, flexring_comm_synchronize and all later calls
// return why. Ranks that are threads of one process and share a GPU give a stream each, not NULL: in the same stream
// one would wait for the other, and the other for the one.
//
// All this is so for the other collectives, too.
//
// The caller promises:
// `send` is valid for reading and `recv` for writing `count` elements; `comm` is NULL or a live handle; `stream` is
// live. Memory of a GPU, and the stream, stay valid until the stream has passed the call.
flexring_result flexring_all_reduce(const void *send,
                                    void *recv,
                                    size_t count,
                                    flexring_dtype dtype,
                                    flexring_op op,
                                    flexring_comm *comm,
                                    void *stream);

// Reduces the vectors at `send` of all ranks, `recv_count` elements for each rank; rank r ends with the r-th
// `recv_count` of them at `recv`. In place: `recv` is `send` plus this rank times `recv_count` elements.
//
// The caller promises:
// `send` is valid for reading `recv_count` elements for each rank, `recv` for writing `recv_count`; `comm` is
// NULL or a live handle.
flexring_result flexring_reduce_scatter(const void *send,
                                        void *recv,
                                        size_t recv_count,
                                        flexring_dtype dtype,
                                        flexring_op op,
                                        flexring_comm *comm,
                                        void *stream);

// Gathers the `send_count` elements at `send` of all ranks, in the order of ranks, at `recv` on every rank. In
// place: `send` is `recv` plus this rank times `send_count` elements.
//
// The caller promises:
// `send` is valid for reading `send_count` elements, `recv` for writing `send_count` for each rank; `comm` is
// NULL or a live handle.
flexring_result flexring_all_gather(const void *send,
                                    void *recv,
                                    size_t send_count,
                                    flexring_dtype dtype,
                                    flexring_comm *comm,
                                    void *stream);

// Copies the `count` elements at `send` of the rank `root` to `recv` on every rank. In place: `recv` is `send`.
// The `send` of other ranks is not looked at.
//
// The caller promises:
// On the root `send` is valid for reading, everywhere `recv` for writing `count` elements; `comm` is NULL or a
// live handle.
flexring_result flexring_broadcast(const void *send,
                                   void *recv,
                                   size_t count,
                                   flexring_dtype dtype,
                                   int root,
                                   flexring_comm *comm,
                                   void *stream);

// Reduces the `count` elements at `send` of all ranks into `recv` on the rank `root`. In place: `recv` is `send`.
// The `recv` of other ranks is not looked at.
//
// The caller promises:
// `send` is valid for reading, on the root `recv` for writing `count` elements; `comm` is NULL or a live handle.
flexring_result flexring_reduce(const void *send,
                                void *recv,
                                size_t count,
                                flexring_dtype dtype,
                                flexring_op op,
                                int root,
                                flexring_comm *comm,
                                void *stream);

// flexring_all_reduce without waiting: the call runs while the caller goes on, after all earlier calls of this
// communicator. The buffers belong to flexring until flexring_wait has returned for the request. On a GPU the call
// takes effect in the default stream.
//
// The caller promises:
// As for flexring_all_reduce, but the buffers must stay valid until flexring_wait has returned; `out` is
// NULL or points to a pointer that may be written.
flexring_result flexring_all_reduce_async(const void *send,
                                          void *recv,
                                          size_t count,
                                          flexring_dtype dtype,
                                          flexring_op op,
                                          flexring_comm *comm,
                                          flexring_request **out);

// Waits until the call is over, frees the request, and returns the call's result.
//
// The caller promises:
// `request` is NULL or came from flexring_all_reduce_async and was not waited for yet; it is dead afterwards.
flexring_result flexring_wait(flexring_request *request);

// Writes 1 to `done` if the call is over, well or not, and 0 if not. flexring_wait must follow all the same.
//
// The caller promises:
// `request` is NULL or live; `done` is NULL or points to an int that may be written.
flexring_result flexring_test(const flexring_request *request, int *done);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FLEXRING_H */
