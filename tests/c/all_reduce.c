/* Four processes all-reduce: every type and operation, in place and out of place, blocking and asynchronous. */
#include "ranks.h"

#include <stdint.h>

enum { WORLD = 4, OPS = 6 };

static int is_narrow(int dtype) { return dtype == FLEXRING_FLOAT8E4M3 || dtype == FLEXRING_FLOAT8E5M2; }

/* 1, 2 or 3; in floats of eight bits 1, and 2 on one rank. All values and results are exact in their type. */
static double value(int dtype, int rank, size_t i) {
    if (is_narrow(dtype)) return ((size_t)rank + i) % WORLD == 0 ? 2.0 : 1.0;
    return 1.0 + (double)(((size_t)rank * 2 + i) % 3);
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Converts whole numbers and halves. All that occur here are exact in binary16. */
static uint16_t to_half(float value) {
    uint32_t bits = bits_of(value);
    return value == 0 ? 0 : (uint16_t)((((bits >> 23 & 0xff) - 112) << 10) | (bits >> 13 & 0x3ff));
}

/* Converts to a float of eight bits. All numbers that occur here need at most three bits of mantissa. */
static uint8_t to_eight(float value, unsigned mantissa, unsigned bias) {
    uint32_t bits = bits_of(value);
    uint32_t exponent = (bits >> 23 & 0xff) - (127 - bias);
    return value == 0 ? 0 : (uint8_t)(exponent << mantissa | (bits >> (23 - mantissa) & ((1u << mantissa) - 1)));
}

static void store(int dtype, void *vector, size_t i, double value) {
    switch (dtype) {
    case FLEXRING_INT8: ((int8_t *)vector)[i] = (int8_t)value; break;
    case FLEXRING_UINT8: ((uint8_t *)vector)[i] = (uint8_t)value; break;
    case FLEXRING_INT32: ((int32_t *)vector)[i] = (int32_t)value; break;
    case FLEXRING_UINT32: ((uint32_t *)vector)[i] = (uint32_t)value; break;
    case FLEXRING_INT64: ((int64_t *)vector)[i] = (int64_t)value; break;
    case FLEXRING_UINT64: ((uint64_t *)vector)[i] = (uint64_t)value; break;
    case FLEXRING_FLOAT16: ((uint16_t *)vector)[i] = to_half((float)value); break;
    case FLEXRING_FLOAT32: ((float *)vector)[i] = (float)value; break;
    case FLEXRING_FLOAT64: ((double *)vector)[i] = value; break;
    case FLEXRING_BFLOAT16: ((uint16_t *)vector)[i] = (uint16_t)(bits_of((float)value) >> 16); break;
    case FLEXRING_FLOAT8E4M3: ((uint8_t *)vector)[i] = to_eight((float)value, 3, 7); break;
    case FLEXRING_FLOAT8E5M2: ((uint8_t *)vector)[i] = to_eight((float)value, 2, 15); break;
    default: CHECK(!"a known type");
    }
}

static size_t size_of(int dtype) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[dtype];
}

static int is_float(int dtype) { return dtype >= FLEXRING_FLOAT16; }

/* Each rank's own factor: whole numbers for integers, halves for floats. */
static double factor(int rank, int dtype) {
    return is_narrow(dtype) ? (rank % 2 + 1) * 0.5 : (rank + 1) * (is_float(dtype) ? 0.5 : 1.0);
}

static double expected(int dtype, int op, size_t i) {
    double sum = 0, product = 1, largest = value(dtype, 0, i), smallest = largest, weighted = 0;
    for (int rank = 0; rank < WORLD; rank++) {
        double v = value(dtype, rank, i);
        sum += v;
        product *= v;
        largest = v > largest ? v : largest;
        smallest = v < smallest ? v : smallest;
        weighted += v * factor(rank, dtype);
    }
    double average = is_float(dtype) ? sum / WORLD : (double)((int)sum / WORLD);
    double results[OPS] = {sum, product, largest, smallest, average, weighted};
    return results[op];
}

static flexring_op operation(int op, int rank, int dtype) {
    static const flexring_op plain[] = {FLEXRING_SUM, FLEXRING_PROD, FLEXRING_MAX, FLEXRING_MIN, FLEXRING_AVG};
    if (op == 4 && !is_float(dtype)) return FLEXRING_WRAPPING_AVG;
    if (op < 5) return plain[op];
    flexring_op weighted;
    WORKS(flexring_op_create_premul_sum((float)factor(rank, dtype), &weighted));
    return weighted;
}

static void reduce(flexring_comm *comm, int rank, int dtype, int op, size_t count) {
    size_t bytes = count * size_of(dtype);
    unsigned char *send = malloc(bytes), *sent = malloc(bytes), *recv = malloc(bytes), *want = malloc(bytes);
    void *shared;
    WORKS(flexring_alloc(comm, bytes, &shared));
    for (size_t i = 0; i < count; i++) {
        store(dtype, send, i, value(dtype, rank, i));
        store(dtype, want, i, expected(dtype, op, i));
    }
    memcpy(sent, send, bytes);
    memcpy(shared, send, bytes);
    flexring_op code = operation(op, rank, dtype);

    /* Out of place: the input does not change. */
    WORKS(flexring_all_reduce(send, recv, count, dtype, code, comm, NULL));
    CHECK(memcmp(recv, want, bytes) == 0);
    CHECK(memcmp(send, sent, bytes) == 0);

    /* In place, on the heap and in shared memory, both at the same time. */
    if (bytes > 0) WORKS(flexring_register(comm, send, bytes));
    flexring_request *first, *second;
    int done = -1;
    WORKS(flexring_all_reduce_async(send, send, count, dtype, code, comm, &first));
    WORKS(flexring_all_reduce_async(shared, shared, count, dtype, code, comm, &second));
    WORKS(flexring_test(first, &done));
    CHECK(done == 0 || done == 1);
    WORKS(flexring_wait(second));
    WORKS(flexring_test(first, &done));
    CHECK(done == 1); /* calls run in the order in which they were made */
    WORKS(flexring_wait(first));
    CHECK(memcmp(send, want, bytes) == 0);
    CHECK(memcmp(shared, want, bytes) == 0);

    if (bytes > 0) WORKS(flexring_deregister(comm, send, bytes));
    WORKS(flexring_free(comm, shared));
    free(send), free(sent), free(recv), free(want);
}

/* What the program has not deregistered stays as it is when the communicator is freed. */
static void registered_memory_survives(flexring_comm *comm, int rank) {
    enum { COUNT = 100000 };
    float *vector = malloc(COUNT * sizeof *vector);
    CHECK(vector);
    for (int i = 0; i < COUNT; i++) vector[i] = (float)rank;
    WORKS(flexring_register(comm, vector, COUNT * sizeof *vector));
    WORKS(flexring_all_reduce(vector + 1, vector + 1, COUNT - 2, FLEXRING_FLOAT32, FLEXRING_SUM, comm, NULL));
    WORKS(flexring_comm_free(comm));
    for (int i = 0; i < COUNT; i++)
        CHECK(vector[i] == (float)(i == 0 || i == COUNT - 1 ? rank : WORLD * (WORLD - 1) / 2));
    free(vector);
}

static int pipe_ends[2];

static void run(int rank) {
    alarm(120);
    flexring_unique_id id;
    if (rank == 0) {
        WORKS(flexring_get_unique_id(&id));
        for (int other = 1; other < WORLD; other++) CHECK(write(pipe_ends[1], &id, sizeof id) == sizeof id);
    } else {
        CHECK(read(pipe_ends[0], &id, sizeof id) == sizeof id);
    }
    flexring_comm *comm;
    int number = -1;
    WORKS(flexring_comm_init_rank(&comm, WORLD, id, rank));
    WORKS(flexring_comm_rank(comm, &number));
    CHECK(number == rank);
    WORKS(flexring_comm_size(comm, &number));
    CHECK(number == WORLD);

    static const size_t counts[] = {1, 700, 70001};
    for (int dtype = FLEXRING_INT8; dtype <= FLEXRING_FLOAT8E5M2; dtype++)
        for (int op = 0; op < OPS; op++)
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) reduce(comm, rank, dtype, op, counts[c]);
    WORKS(flexring_all_reduce(NULL, NULL, 0, FLEXRING_FLOAT32, FLEXRING_SUM, comm, NULL));

    void *zeros;
    WORKS(flexring_alloc(comm, 100000, &zeros));
    for (size_t i = 0; i < 100000; i++) CHECK(((char *)zeros)[i] == 0);
    CHECK((uintptr_t)zeros % 4096 == 0);
    WORKS(flexring_free(comm, zeros));
    registered_memory_survives(comm, rank);
}

int main(void) {
    CHECK(flexring_version() == FLEXRING_VERSION);
    CHECK(pipe(pipe_ends) == 0);
    if (!ranks_work(WORLD, "all_reduce", run)) return 1;
    puts("all_reduce: ok");
    return 0;
}
