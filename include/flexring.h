/*
 * flexring: an all-reduce engine for clusters that are not symmetric.
 *
 * Every function except flexring_last_error and flexring_version returns a flexring_result. Outputs are written last
 * and only on success. A handle may be used from any thread; its calls run one at a time. Every rank must make the
 * same calls in the same order, apart from sends and receives. Vectors are memory of the host or of a GPU; see flexring_all_reduce for streams.
 *
 * This file is generated from crates/flexring-ffi.
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

// Passed to flexring_comm_split by a rank that is in no new communicator.
#define FLEXRING_NO_COLOR -1

// Bytes of a device's name in flexring_rail_statistics.
#define FLEXRING_DEVICE_NAME_BYTES 64

// The result of every call. 0 is success; otherwise flexring_last_error() returns a message.
typedef enum {
    // The call succeeded.
    FLEXRING_SUCCESS = 0,
    // An argument is not valid.
    FLEXRING_INVALID_ARGUMENT = 1,
    // The value of an environment variable is not valid.
    FLEXRING_INVALID_SETTING = 2,
    // The operating system, a driver or a device reported an error.
    FLEXRING_SYSTEM_ERROR = 3,
    // The ranks did not find each other.
    FLEXRING_RENDEZVOUS_FAILED = 4,
    // Ranks differ in version, settings, program, collective, root, count, type or operation.
    FLEXRING_DISAGREEMENT = 5,
    // A rank died or its connection broke.
    FLEXRING_PEER_LOST = 6,
    // A timeout expired.
    FLEXRING_TIMEOUT = 7,
    // A rank called flexring_comm_abort, or the communicator has failed before.
    FLEXRING_ABORTED = 8,
    // Not built into this library, or not supported by this machine.
    FLEXRING_UNSUPPORTED = 9,
    // A bug in flexring.
    FLEXRING_INTERNAL_ERROR = 10,
} flexring_result;

// A group of ranks that reduce vectors together. Made by flexring_comm_init_*, freed by flexring_comm_free.
//
// A forked child of the process that made it cannot use it, because threads and connections do not survive a
// fork: its calls return FLEXRING_INVALID_ARGUMENT. The child may free it, which has no effect on the
// parent, and may make communicators of its own.
typedef struct flexring_comm flexring_comm;

// An asynchronous call. Made by flexring_all_reduce_async and the other functions of that kind, freed by
// flexring_wait. In a forked child of the process that made it, flexring_wait and flexring_test return
// FLEXRING_INVALID_ARGUMENT at once.
typedef struct flexring_request flexring_request;

// Identifies a world that is about to be created. Plain bytes: pass it to the other ranks by any means that
// keeps it secret, because every process that has it can join.
typedef struct {
    // Opaque bytes.
    uint8_t internal[FLEXRING_UNIQUE_ID_BYTES];
} flexring_unique_id;

// What a rail has carried since the communicator was made. A rail is a port of an RDMA device. A message is
// an RDMA write of the library, so the short ones count that announce calls and grant permission to write;
// what is written again because a connection broke counts again. Later versions may add members at the end.
typedef struct {
    // The name of the device, such as mlx5_0, with a NUL at the end.
    char device[FLEXRING_DEVICE_NAME_BYTES];
    // The number of the port, from 1.
    uint32_t port;
    // 0.
    uint32_t reserved;
    // Bytes that this rank has given to the device to send, without headers.
    uint64_t bytes_sent;
    // Bytes that peers have written to this rank's memory.
    uint64_t bytes_received;
    // Messages that this rank has given to the device to send.
    uint64_t messages_sent;
    // Messages that have arrived.
    uint64_t messages_received;
    // How often the port has sent something again, for any program; -1 if its driver does not count that.
    int64_t retransmissions;
    // How often a connection over this rail was made again after it had broken.
    uint64_t reconnections;
} flexring_rail_statistics;

// How elements are combined: FLEXRING_SUM and so on, or an operation of flexring_op_create_premul_sum.
// Floats of 16 and 8 bits are added as 32-bit floats, and each partial sum that travels is rounded:
// docs/schedules.md, "How sums are rounded".
typedef uint64_t flexring_op;

// The type of one element: FLEXRING_INT8 and so on. The numbers below 12 are those of ncclDataType_t.
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

// Signed 16-bit integers.
#define FLEXRING_INT16 12

// Unsigned 16-bit integers.
#define FLEXRING_UINT16 13

// Bytes that are true if they are not 0. A sum, a maximum and FLEXRING_BOR are true if any element is, a
// product, a minimum and FLEXRING_BAND if all are; results are 0 or 1.
#define FLEXRING_BOOL 14

// The sum over all ranks.
#define FLEXRING_SUM 0

// The product over all ranks.
#define FLEXRING_PROD 1

// The largest element; NaN if any is NaN.
#define FLEXRING_MAX 2

// The smallest element; NaN if any is NaN.
#define FLEXRING_MIN 3

// The sum divided by the number of ranks. For floats only: the sum of integers may wrap around, and the
// quotient would be wrong. Sum them in a type with room for it, and divide.
#define FLEXRING_AVG 4

// The bits that all elements have; for integers and FLEXRING_BOOL, as the following two.
#define FLEXRING_BAND 6

// The bits that any element has.
#define FLEXRING_BOR 7

// The bits that an odd number of elements have.
#define FLEXRING_BXOR 8

// The sum, which wraps around, divided by the number of ranks, toward zero: what ncclAvg is for integers.
// For integers only.
#define FLEXRING_WRAPPING_AVG 9

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The message of this thread's last call that did not return FLEXRING_SUCCESS; empty if there was none.
// Valid until this thread's next failing call. Never NULL.
const char *flexring_last_error(void);

// The version of this library, as MAJOR * 10000 + MINOR * 100 + PATCH.
int32_t flexring_version(void);

// Creates an id for a new world. The process that calls this must live until all ranks have joined; usually
// it is rank 0. An id can be used for one world only, and expires if no rank uses it for ten times
// FLEXRING_CONNECT_TIMEOUT_MS.
//
// The caller promises:
// `out` is NULL or points to a flexring_unique_id that may be written.
flexring_result flexring_get_unique_id(flexring_unique_id *out);

// Joins the world that the environment describes: FLEXRING_RANK, FLEXRING_WORLD_SIZE, FLEXRING_MASTER_ADDR
// and FLEXRING_MASTER_PORT, or the variables of torchrun, Open MPI, MPICH or Slurm. Returns when all ranks
// have joined and all links are ready.
//
// A communicator works with one GPU: the one that FLEXRING_GPU names, or whose context is current on this
// thread. That GPU is initialized here. Without either it is the GPU of the first vector on a GPU, and the
// call on that vector is slower than later ones.
//
// The caller promises:
// `out` is NULL or points to a pointer that may be written.
flexring_result flexring_comm_init_from_env(flexring_comm **out);

// Joins the world of `world` ranks that share `id`, as `rank`.
//
// The caller promises:
// `out` is NULL or points to a pointer that may be written.
flexring_result flexring_comm_init_rank(flexring_comm **out, int world, flexring_unique_id id, int rank);

// flexring_comm_init_rank, with a limit of its own in milliseconds, from 1, instead of FLEXRING_TIMEOUT_MS
// and FLEXRING_CONNECT_TIMEOUT_MS. All ranks must pass the same limit.
//
// The caller promises:
// `out` is NULL or points to a pointer that may be written.
flexring_result flexring_comm_init_rank_timeout(flexring_comm **out,
                                                int world,
                                                flexring_unique_id id,
                                                int rank,
                                                int timeout_ms);

// Makes a communicator of the ranks that are left, in their order, usually after `comm` has failed because a
// rank died. Every rank that is alive must call it with the same list of ranks to leave out, except those
// ranks, and ranks that have freed `comm`. Ranks that died, were stopped or cannot be reached are left out,
// too; a rank that continues later gets FLEXRING_RENDEZVOUS_FAILED here. Calls on `comm` end first. After a
// failure the vectors of the failed calls have undefined contents. `comm` must still be freed.
//
// The caller promises:
// `comm` is NULL or a live handle; `exclude` points to `exclude_count` ranks, and may be NULL if there are
// none; `out` is NULL or points to a pointer that may be written.
flexring_result flexring_comm_shrink(const flexring_comm *comm,
                                     const int *exclude,
                                     size_t exclude_count,
                                     flexring_comm **out);

// Makes one communicator for each color, of the ranks that pass that color, ordered by `key` and then by
// their rank in `comm`. `out` is set to NULL if `color` is FLEXRING_NO_COLOR. All ranks must call it,
// between the same two calls on `comm`.
//
// The caller promises:
// `comm` is NULL or a live handle; `out` is NULL or points to a pointer that may be written.
flexring_result flexring_comm_split(const flexring_comm *comm, int color, int key, flexring_comm **out);

// Writes this process's rank to `out`.
//
// The caller promises:
// `comm` is NULL or a live handle; `out` is NULL or points to an int that may be written.
flexring_result flexring_comm_rank(const flexring_comm *comm, int *out);

// Writes the number of ranks to `out`.
//
// The caller promises:
// `comm` is NULL or a live handle; `out` is NULL or points to an int that may be written.
flexring_result flexring_comm_size(const flexring_comm *comm, int *out);

// Writes this rank's place among those of its node, from 0, to `out`: the usual number of its GPU, modulo
// the GPUs that there are.
//
// The caller promises:
// As for [`flexring_comm_rank`].
flexring_result flexring_comm_local_rank(const flexring_comm *comm, int *out);

// Waits until all earlier calls of this rank are over, including those that take effect in streams. Returns
// the error that ended the communicator, if it has failed.
//
// The caller promises:
// `comm` is NULL or a live handle.
flexring_result flexring_comm_synchronize(const flexring_comm *comm);

// Returns the error that ended the communicator, if it has failed. Does not wait. Calls that take effect in
// streams return before they are over; use this function to find out whether one has failed.
//
// The caller promises:
// `comm` is NULL or a live handle.
flexring_result flexring_comm_status(const flexring_comm *comm);

// Ends the communicator on all ranks. May be called from any thread, and takes effect at once: running calls
// return FLEXRING_ABORTED on every rank. The communicator must still be freed.
//
// The caller promises:
// `comm` is NULL or a live handle.
flexring_result flexring_comm_abort(flexring_comm *comm);

// Ends the communicator on all ranks because this process is about to exit. `cause` completes a sentence
// that begins with the rank, such as "raised ValueError: no data (train.py:20)"; the errors of the other
// ranks contain it. Ranks on this machine get them when this process has exited, or 5 seconds later, so that
// a launcher sees which process failed first. Otherwise as flexring_comm_abort.
//
// The caller promises:
// `comm` is NULL or a live handle. `cause` is NULL or a string that ends with a NUL.
flexring_result flexring_comm_abort_on_exit(flexring_comm *comm, const char *cause);

// Frees a communicator, also after errors; NULL is allowed. Waits for asynchronous calls. Memory of
// flexring_alloc must have been freed by flexring_free. In a forked child it only frees the handle.
//
// The caller promises:
// No other thread uses `comm`.
flexring_result flexring_comm_free(flexring_comm *comm);

// Aborts, on all ranks, the communicators of this process that have calls which are not over within
// `patience_ms` milliseconds; freeing them waits for nothing afterwards. For the exit of a program, which
// must not wait for other ranks. exit() calls it, with 0, before it runs the destructors of objects that
// were made before the first communicator.
flexring_result flexring_abort_unfinished(int patience_ms);

// Writes what the rails of this rank have carried to `rails`, in the order of the rails, and their number to
// `count`. The number is 0 if this rank sends nothing over RDMA devices. If it is greater than `capacity`,
// only the first `capacity` rails are written; `rails` may be NULL if that is 0. `struct_size` is
// sizeof(flexring_rail_statistics) in the program; members that the library does not have are set to 0. May
// be called from any thread, also during a call.
//
// The caller promises:
// `comm` is NULL or a live handle; `rails` points to `capacity` structs of `struct_size` bytes, and may be
// NULL if there are none; `count` is NULL or points to a size_t that may be written.
flexring_result flexring_comm_rail_statistics(const flexring_comm *comm,
                                              size_t struct_size,
                                              flexring_rail_statistics *rails,
                                              size_t capacity,
                                              size_t *count);

// Allocates `bytes` bytes, zeroed and aligned to a page, in memory that the other ranks of this node read
// directly, so that calls on it copy nothing. Free it with flexring_free. Forked children do not have this
// memory: access ends them by SIGSEGV.
//
// The caller promises:
// `comm` is NULL or a live handle; `out` is NULL or points to a pointer that may be written.
flexring_result flexring_alloc(flexring_comm *comm, size_t bytes, void **out);

// Frees memory that flexring_alloc returned. NULL is allowed. Has no effect in a forked child.
//
// The caller promises:
// `comm` is NULL or a live handle; no call uses the memory any more.
flexring_result flexring_free(flexring_comm *comm, void *memory);

// Registers `bytes` bytes of the program's own memory with the RDMA devices that the communicator uses, and
// memory of a GPU with the kernels of the other ranks of its node. Calls on it,
// or on parts of it, then copy and register nothing. The memory must stay allocated until
// flexring_deregister was called with the same address and length as often as flexring_register, or until
// the communicator is freed. Memory of flexring_alloc is registered already.
//
// With FLEXRING_REGISTER_SHARED=1, the other ranks of this node read it directly, too: its whole pages, if
// they are private memory without a file and 64 KiB or more, are replaced by others with the same contents,
// which forked children do not have: access ends them by SIGSEGV. While this function, flexring_deregister
// and the freeing of the communicator run, nothing may write the memory and no call may use it, except that
// flexring_deregister allows calls of its communicator. Nothing else may rely on its pages while it is
// registered, such as another library that registers them with a device.
//
// The caller promises:
// `comm` is NULL or a live handle; `memory` points to as many bytes, which may be read and written.
flexring_result flexring_register(flexring_comm *comm, void *memory, size_t bytes);

// Undoes one flexring_register of exactly this memory, whose contents stay. If it is shared
// (FLEXRING_REGISTER_SHARED), waits for the running call of this communicator that uses it, for
// FLEXRING_TIMEOUT_MS at most; if it returns FLEXRING_TIMEOUT, the memory is still registered. Calls that
// are in the queue use it later as memory that is not registered. For memory of a GPU, waits for kernels
// that may access it. Otherwise running calls are not affected.
//
// The caller promises:
// `comm` is NULL or a live handle.
flexring_result flexring_deregister(flexring_comm *comm, void *memory, size_t bytes);

// Makes an operation that sums each rank's elements times that rank's own `factor`. Ranks may give different
// factors. For integer types the factor must be a whole number that the type can represent. The operation
// need not be freed.
//
// The caller promises:
// `out` is NULL or points to a flexring_op that may be written.
flexring_result flexring_op_create_premul_sum(float factor, flexring_op *out);

// Reduces the `count` elements at `send` of all ranks into `recv` on every rank. The two buffers are the
// same (in place), or they do not overlap. Both are memory of the host, or both are memory of one GPU.
//
// On the host, with stream NULL, the call returns when the result is complete. On a GPU it returns at once
// and takes effect in `stream`, a cudaStream_t or CUstream (NULL is the default stream): after the work that
// is in the stream already, and before work that is added later, as cudaMemcpyAsync does. CUDA's driver
// determines where memory is. Managed memory is refused, and so is a stream of a context other than the
// GPU's primary one. If the stream is being captured, the call becomes part of the graph. If a call fails
// after it has returned, the stream continues without a result, and flexring_comm_status,
// flexring_comm_synchronize and all later calls return the error. If ranks are threads of one process and
// share a GPU, give each rank its own stream, not NULL; in a common stream they would wait for each other
// forever.
//
// All this applies to the other collectives, too.
//
// The caller promises:
// `send` is valid for reading and `recv` for writing `count` elements; `comm` is NULL or a live handle;
// `stream` is live. Memory of a GPU, and the stream, stay valid until the stream has passed the call.
flexring_result flexring_all_reduce(const void *send,
                                    void *recv,
                                    size_t count,
                                    flexring_dtype dtype,
                                    flexring_op op,
                                    flexring_comm *comm,
                                    void *stream);

// Reduces the vectors at `send` of all ranks, which consist of `recv_count` elements per rank. Rank r gets
// the r-th `recv_count` elements of the result at `recv`. In place: `recv` is `send` plus this rank times
// `recv_count` elements.
//
// The caller promises:
// `send` is valid for reading `recv_count` elements for each rank, `recv` for writing `recv_count`; `comm`
// is NULL or a live handle.
flexring_result flexring_reduce_scatter(const void *send,
                                        void *recv,
                                        size_t recv_count,
                                        flexring_dtype dtype,
                                        flexring_op op,
                                        flexring_comm *comm,
                                        void *stream);

// Concatenates the `send_count` elements at `send` of all ranks, in the order of ranks, at `recv` on every
// rank. In place: `send` is `recv` plus this rank times `send_count` elements.
//
// The caller promises:
// `send` is valid for reading `send_count` elements, `recv` for writing `send_count` for each rank; `comm`
// is NULL or a live handle.
flexring_result flexring_all_gather(const void *send,
                                    void *recv,
                                    size_t send_count,
                                    flexring_dtype dtype,
                                    flexring_comm *comm,
                                    void *stream);

// Copies the `count` elements at `send` of the rank `root` to `recv` on every rank. In place: `recv` is
// `send`. `send` of other ranks is ignored.
//
// The caller promises:
// On the root `send` is valid for reading, everywhere `recv` for writing `count` elements; `comm` is NULL or
// a live handle.
flexring_result flexring_broadcast(const void *send,
                                   void *recv,
                                   size_t count,
                                   flexring_dtype dtype,
                                   int root,
                                   flexring_comm *comm,
                                   void *stream);

// Reduces the `count` elements at `send` of all ranks into `recv` on the rank `root`. In place: `recv` is
// `send`. `recv` of other ranks is ignored.
//
// The caller promises:
// `send` is valid for reading, on the root `recv` for writing `count` elements; `comm` is NULL or a live
// handle.
flexring_result flexring_reduce(const void *send,
                                void *recv,
                                size_t count,
                                flexring_dtype dtype,
                                flexring_op op,
                                int root,
                                flexring_comm *comm,
                                void *stream);

// Waits until the call is over, frees the request, and returns the call's result. If a signal handler or a
// callback calls it during a call of the same communicator, and the request is not over, it returns
// FLEXRING_INVALID_ARGUMENT and does not free the request.
//
// The caller promises:
// No other thread uses `request`.
flexring_result flexring_wait(flexring_request *request);

// Writes 1 to `done` if the call is over, with success or not, and 0 if it is not. flexring_wait must be
// called in either case.
//
// The caller promises:
// No other thread waits for `request`; `done` is NULL or points to an int that may be written.
flexring_result flexring_test(const flexring_request *request, int *done);

// Starts flexring_all_reduce and returns at once. The call runs after all earlier calls of this
// communicator. The buffers must not be used until flexring_wait has returned for the request. On a GPU the
// call takes effect in the default stream.
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

// Starts flexring_reduce_scatter and returns at once, as flexring_all_reduce_async does for
// flexring_all_reduce.
//
// The caller promises:
// As for flexring_reduce_scatter, but the buffers must stay valid until flexring_wait has returned; `out` is
// NULL or points to a pointer that may be written.
flexring_result flexring_reduce_scatter_async(const void *send,
                                              void *recv,
                                              size_t recv_count,
                                              flexring_dtype dtype,
                                              flexring_op op,
                                              flexring_comm *comm,
                                              flexring_request **out);

// Starts flexring_all_gather and returns at once, as flexring_all_reduce_async does for flexring_all_reduce.
//
// The caller promises:
// As for flexring_all_gather, but the buffers must stay valid until flexring_wait has returned; `out` is
// NULL or points to a pointer that may be written.
flexring_result flexring_all_gather_async(const void *send,
                                          void *recv,
                                          size_t send_count,
                                          flexring_dtype dtype,
                                          flexring_comm *comm,
                                          flexring_request **out);

// Starts flexring_broadcast and returns at once, as flexring_all_reduce_async does for flexring_all_reduce.
//
// The caller promises:
// As for flexring_broadcast, but the buffers must stay valid until flexring_wait has returned; `out` is NULL
// or points to a pointer that may be written.
flexring_result flexring_broadcast_async(const void *send,
                                         void *recv,
                                         size_t count,
                                         flexring_dtype dtype,
                                         int root,
                                         flexring_comm *comm,
                                         flexring_request **out);

// Starts flexring_reduce and returns at once, as flexring_all_reduce_async does for flexring_all_reduce.
//
// The caller promises:
// As for flexring_reduce, but the buffers must stay valid until flexring_wait has returned; `out` is NULL or
// points to a pointer that may be written.
flexring_result flexring_reduce_async(const void *send,
                                      void *recv,
                                      size_t count,
                                      flexring_dtype dtype,
                                      flexring_op op,
                                      int root,
                                      flexring_comm *comm,
                                      flexring_request **out);

// Concatenates the `send_count` elements at `send` of all ranks, in the order of ranks, at `recv` on the
// rank `root`. In place: `send` is `recv` plus this rank times `send_count` elements. `recv` of other ranks
// is ignored.
//
// The caller promises:
// `send` is valid for reading `send_count` elements, on the root `recv` for writing `send_count` for each
// rank; `comm` is NULL or a live handle. Memory of a GPU, and the stream, stay valid until the stream has
// passed the call.
flexring_result flexring_gather(const void *send,
                                void *recv,
                                size_t send_count,
                                flexring_dtype dtype,
                                int root,
                                flexring_comm *comm,
                                void *stream);

// Splits the vector at `send` of the rank `root` into `recv_count` elements per rank. Rank r gets the r-th
// `recv_count` elements at `recv`. In place: `recv` is `send` plus this rank times `recv_count` elements.
// `send` of other ranks is ignored.
//
// The caller promises:
// on the root `send` is valid for reading `recv_count` elements for each rank, `recv` for writing
// `recv_count`; `comm` is NULL or a live handle. Memory of a GPU, and the stream, stay valid until the
// stream has passed the call.
flexring_result flexring_scatter(const void *send,
                                 void *recv,
                                 size_t recv_count,
                                 flexring_dtype dtype,
                                 int root,
                                 flexring_comm *comm,
                                 void *stream);

// Sends the r-th `count` elements at `send` to rank r, and receives the r-th `count` elements at `recv` from
// it, for every rank r. The two buffers do not overlap; on a GPU they may also be the same (in place).
//
// The caller promises:
// `send` is valid for reading and `recv` for writing `count` elements for each rank; `comm` is NULL
// or a live handle. Memory of a GPU, and the stream, stay valid until the stream has passed the call.
flexring_result flexring_all_to_all(const void *send,
                                    void *recv,
                                    size_t count,
                                    flexring_dtype dtype,
                                    flexring_comm *comm,
                                    void *stream);

// flexring_all_to_all with blocks of different lengths: `send_counts[r]` elements go to rank r, and
// `recv_counts[r]` elements come from it. In both buffers the blocks follow each other without gaps, in the
// order of ranks. A block that is not as long as the receiver expects is an error on the receiver, and on
// all ranks in their next call at the latest. All ranks must call this function, or all of them
// flexring_all_to_all.
//
// The caller promises:
// `send_counts` and `recv_counts` are arrays of one count for each rank; `send` is valid for reading and
// `recv` for writing as many elements as their counts add up to; `comm` is NULL or a live handle. Memory of
// a GPU, and the stream, stay valid until the stream has passed the call.
flexring_result flexring_all_to_all_v(const void *send,
                                      const size_t *send_counts,
                                      void *recv,
                                      const size_t *recv_counts,
                                      flexring_dtype dtype,
                                      flexring_comm *comm,
                                      void *stream);

// Starts flexring_gather and returns at once, as flexring_all_reduce_async does for flexring_all_reduce.
//
// The caller promises:
// As for flexring_gather, but the buffers must stay valid until flexring_wait has returned; `out` is NULL or
// points to a pointer that may be written.
flexring_result flexring_gather_async(const void *send,
                                      void *recv,
                                      size_t send_count,
                                      flexring_dtype dtype,
                                      int root,
                                      flexring_comm *comm,
                                      flexring_request **out);

// Starts flexring_scatter and returns at once, as flexring_all_reduce_async does for flexring_all_reduce.
//
// The caller promises:
// As for flexring_scatter, but the buffers must stay valid until flexring_wait has returned; `out` is NULL
// or points to a pointer that may be written.
flexring_result flexring_scatter_async(const void *send,
                                       void *recv,
                                       size_t recv_count,
                                       flexring_dtype dtype,
                                       int root,
                                       flexring_comm *comm,
                                       flexring_request **out);

// Starts flexring_all_to_all and returns at once, as flexring_all_reduce_async does for flexring_all_reduce.
//
// The caller promises:
// As for flexring_all_to_all, but the buffers must stay valid until flexring_wait has returned; `out` is
// NULL or points to a pointer that may be written.
flexring_result flexring_all_to_all_async(const void *send,
                                          void *recv,
                                          size_t count,
                                          flexring_dtype dtype,
                                          flexring_comm *comm,
                                          flexring_request **out);

// Starts flexring_all_to_all_v and returns at once, as flexring_all_reduce_async does for
// flexring_all_reduce. The arrays of counts are copied.
//
// The caller promises:
// As for flexring_all_to_all_v, but the buffers must stay valid until flexring_wait has returned; `out` is
// NULL or points to a pointer that may be written.
flexring_result flexring_all_to_all_v_async(const void *send,
                                            const size_t *send_counts,
                                            void *recv,
                                            const size_t *recv_counts,
                                            flexring_dtype dtype,
                                            flexring_comm *comm,
                                            flexring_request **out);

// Returns when all ranks have called it. It concerns the calling thread and no stream: calls that this rank
// has queued in streams before are over, too.
//
// The caller promises:
// `comm` is NULL or a live handle.
flexring_result flexring_barrier(flexring_comm *comm);

// Starts flexring_barrier and returns at once. flexring_wait returns when all ranks have called one of the
// two.
//
// The caller promises:
// `comm` is NULL or a live handle; `out` is NULL or points to a pointer that may be written.
flexring_result flexring_barrier_async(flexring_comm *comm, flexring_request **out);

// Begins a group of sends and receives of this thread: flexring_send and flexring_recv only note what is to
// be done until flexring_group_end. Groups may be nested; the last flexring_group_end counts. A group may
// have operations of several communicators. Collectives are no part of a group: they run at once.
flexring_result flexring_group_start(void);

// Makes all operations of this thread's group together: none of them waits for another. On the host, with
// stream NULL, it returns when they are complete; on a GPU they take effect in their stream, of which each
// communicator has only one in a group. If an operation of the group was refused, none is made, and this
// returns the same error.
//
// The caller promises:
// The communicators of the group are live. Buffers and streams of the group are valid as for
// flexring_all_reduce.
flexring_result flexring_group_end(void);

// Starts what flexring_group_end does and returns at once, as flexring_all_reduce_async does for
// flexring_all_reduce. flexring_wait returns when all operations are complete. Only for the outermost group.
//
// The caller promises:
// As for flexring_group_end, but the buffers must stay valid until flexring_wait has returned; `out` is NULL
// or points to a pointer that may be written.
flexring_result flexring_group_end_async(flexring_request **out);

// Sends the `count` elements at `send` to the rank `peer`, which calls flexring_recv with the same count and
// type. The n-th send from one rank to another matches the n-th receive there. Only these two ranks take
// part. It may return before the peer's call, or wait for it; in a group see flexring_group_start. A rank
// may send to itself in a group that also receives from itself.
//
// The caller promises:
// `send` is valid for reading `count` elements, in a group until its end; `comm` is NULL or a live handle.
// Memory of a GPU, and the stream, stay valid until the stream has passed the call.
flexring_result flexring_send(const void *send,
                              size_t count,
                              flexring_dtype dtype,
                              int peer,
                              flexring_comm *comm,
                              void *stream);

// Receives `count` elements at `recv` from the rank `peer`, which calls flexring_send with the same count
// and type. There is no receive from any rank.
//
// The caller promises:
// `recv` is valid for writing `count` elements, in a group until its end; otherwise as for flexring_send.
flexring_result flexring_recv(void *recv,
                              size_t count,
                              flexring_dtype dtype,
                              int peer,
                              flexring_comm *comm,
                              void *stream);

// Starts flexring_send and returns at once, as flexring_all_reduce_async does for flexring_all_reduce. The
// calls of a communicator run one after the other: to send and receive at the same time, use a group and
// flexring_group_end_async.
//
// The caller promises:
// As for flexring_send, but the buffer must stay valid until flexring_wait has returned; `out` is NULL or
// points to a pointer that may be written.
flexring_result flexring_send_async(const void *send,
                                    size_t count,
                                    flexring_dtype dtype,
                                    int peer,
                                    flexring_comm *comm,
                                    flexring_request **out);

// Starts flexring_recv and returns at once, as flexring_send_async does for flexring_send.
//
// The caller promises:
// As for flexring_recv, but the buffer must stay valid until flexring_wait has returned; `out` is NULL or
// points to a pointer that may be written.
flexring_result flexring_recv_async(void *recv,
                                    size_t count,
                                    flexring_dtype dtype,
                                    int peer,
                                    flexring_comm *comm,
                                    flexring_request **out);

// Sets a function that calls of this thread call about every 50 milliseconds while they wait; NULL removes
// it. If it returns another number than 0, the call ends: the communicator is aborted on all ranks, and the
// call returns FLEXRING_ABORTED.
//
// It is for languages that run signal handlers when the interrupted thread returns to them, as Python does.
// There, `check` runs these handlers.
//
// The caller promises:
// `check` is NULL or a function that returns normally: it neither throws nor jumps. It may be called until
// it is removed or this thread ends.
flexring_result flexring_set_interrupt_check(int (*check)(void));

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FLEXRING_H */
