/* Averages a gradient over all ranks.
 *
 *     cargo build --release
 *     cc examples/all_reduce.c -Iinclude target/release/libflexring.a -lpthread -ldl -lm -o all_reduce
 *     mpirun -np 4 ./all_reduce
 *
 * torchrun and srun can start it, too. Without a launcher, start each rank by hand:
 *
 *     export FLEXRING_WORLD_SIZE=2 FLEXRING_MASTER_ADDR=127.0.0.1 FLEXRING_MASTER_PORT=29600
 *     FLEXRING_RANK=0 ./all_reduce & FLEXRING_RANK=1 ./all_reduce
 */
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

int main(void) {
    const size_t count = 1 << 20;
    flexring_comm *comm;
    void *memory;
    int rank, size;

    MUST(flexring_comm_init_from_env(&comm));
    MUST(flexring_comm_rank(comm, &rank));
    MUST(flexring_comm_size(comm, &size));

    /* Any memory can be used. Other ranks of this node read this memory without a copy. */
    MUST(flexring_alloc(comm, count * sizeof(float), &memory));
    float *gradient = memory;
    for (size_t i = 0; i < count; i++) gradient[i] = (float)rank;

    MUST(flexring_all_reduce(gradient, gradient, count, FLEXRING_FLOAT32, FLEXRING_AVG, comm, NULL));

    float expected = (float)(size - 1) / 2;
    for (size_t i = 0; i < count; i++) {
        if (gradient[i] != expected) {
            fprintf(stderr, "rank %d: element %zu is %g and not %g\n", rank, i, gradient[i], expected);
            return 1;
        }
    }
    printf("rank %d of %d: the average is %g\n", rank, size, gradient[0]);
    MUST(flexring_free(comm, memory));
    MUST(flexring_comm_free(comm));
    return 0;
}
