/* Arguments that are not valid are refused with a code and a message. Nothing crashes, and outputs are not written. */
#include "check.h"

#include <limits.h>
#include <pthread.h>
#include <stdint.h>

static float send[64], recv[64];
static flexring_comm *comm;

#define INVALID FLEXRING_INVALID_ARGUMENT
#define SENTINEL ((void *)(uintptr_t)0x5e47)

static void communicators_are_checked(void) {
    flexring_comm *out = SENTINEL;
    flexring_unique_id none;
    memset(&none, 0, sizeof none);
    EXPECT(INVALID, "out is NULL", flexring_get_unique_id(NULL));
    EXPECT(INVALID, "out is NULL", flexring_comm_init_from_env(NULL));
    EXPECT(INVALID, "out is NULL", flexring_comm_init_rank(NULL, 1, none, 0));
    EXPECT(INVALID, "id", flexring_comm_init_rank(&out, 1, none, 0));
    flexring_unique_id id;
    WORKS(flexring_get_unique_id(&id));
    EXPECT(INVALID, "-1", flexring_comm_init_rank(&out, -1, id, 0));
    EXPECT(INVALID, "world", flexring_comm_init_rank(&out, 0, id, 0));
    EXPECT(INVALID, "-2", flexring_comm_init_rank(&out, 2, id, -2));
    EXPECT(INVALID, "2", flexring_comm_init_rank(&out, 2, id, 2));
    id.internal[60] ^= 1;
    EXPECT(INVALID, "damaged", flexring_comm_init_rank(&out, 1, id, 0));
    EXPECT(INVALID, "timeout_ms is 0", flexring_comm_init_rank_timeout(&out, 1, id, 0, 0));
    CHECK(out == SENTINEL);

    int number = 77;
    EXPECT(INVALID, "communicator is NULL", flexring_comm_rank(NULL, &number));
    EXPECT(INVALID, "communicator is NULL", flexring_comm_size(NULL, &number));
    EXPECT(INVALID, "communicator is NULL", flexring_comm_local_rank(NULL, &number));
    EXPECT(INVALID, "out is NULL", flexring_comm_rank(comm, NULL));
    EXPECT(INVALID, "out is NULL", flexring_comm_size(comm, NULL));
    size_t rails = 77;
    flexring_rail_statistics rail;
    EXPECT(INVALID, "communicator is NULL", flexring_comm_rail_statistics(NULL, sizeof rail, &rail, 1, &rails));
    EXPECT(INVALID, "count is NULL", flexring_comm_rail_statistics(comm, sizeof rail, &rail, 1, NULL));
    EXPECT(INVALID, "rails is NULL", flexring_comm_rail_statistics(comm, sizeof rail, NULL, 1, &rails));
    EXPECT(INVALID, "struct_size is 8", flexring_comm_rail_statistics(comm, 8, &rail, 1, &rails));
    EXPECT(INVALID, "struct_size is 8", flexring_comm_rail_statistics(comm, 8, NULL, 0, &rails));
    CHECK(rails == 77);
    WORKS(flexring_comm_rail_statistics(comm, sizeof rail, NULL, 0, &rails));
    CHECK(rails == 0);
    EXPECT(INVALID, "communicator is NULL", flexring_comm_abort(NULL));
    EXPECT(INVALID, "communicator is NULL", flexring_comm_abort_on_exit(NULL, "failed"));
    WORKS(flexring_comm_free(NULL));
    CHECK(number == 77);
}

static void settings_are_quoted(void) {
    flexring_comm *out = SENTINEL;
    setenv("FLEXRING_TIMEOUT_MS", "soon", 1);
    EXPECT(FLEXRING_INVALID_SETTING, "FLEXRING_TIMEOUT_MS=\"soon\"", flexring_comm_init_from_env(&out));
    unsetenv("FLEXRING_TIMEOUT_MS");
    setenv("FLEXRING_RANK", "1", 1);
    EXPECT(FLEXRING_INVALID_SETTING, "FLEXRING_RANK", flexring_comm_init_from_env(&out));
    setenv("FLEXRING_RANK", "0", 1);
    CHECK(out == SENTINEL);
}

static void buffers_are_checked(void) {
    const int f32 = FLEXRING_FLOAT32;
    char *bytes = (char *)send;
    EXPECT(INVALID, "communicator is NULL", flexring_all_reduce(send, recv, 64, f32, FLEXRING_SUM, NULL, NULL));
    EXPECT(INVALID, "send buffer is NULL", flexring_all_reduce(NULL, recv, 64, f32, FLEXRING_SUM, comm, NULL));
    EXPECT(INVALID, "receive buffer is NULL", flexring_all_reduce(send, NULL, 64, f32, FLEXRING_SUM, comm, NULL));
    EXPECT(INVALID, "not aligned", flexring_all_reduce(bytes + 1, recv, 8, f32, FLEXRING_SUM, comm, NULL));
    EXPECT(INVALID, "not aligned", flexring_all_reduce(send, (char *)recv + 2, 8, f32, FLEXRING_SUM, comm, NULL));
    EXPECT(INVALID, "overlap", flexring_all_reduce(send, send + 1, 8, f32, FLEXRING_SUM, comm, NULL));
    EXPECT(INVALID, "overlap", flexring_all_reduce(send + 7, send, 8, f32, FLEXRING_SUM, comm, NULL));
    EXPECT(INVALID, "more than any memory", flexring_all_reduce(send, recv, SIZE_MAX, f32, FLEXRING_SUM, comm, NULL));
    EXPECT(INVALID, "more than any memory",
           flexring_all_reduce(send, recv, SIZE_MAX, FLEXRING_INT8, FLEXRING_SUM, comm, NULL));
    EXPECT(INVALID, "beyond the address space",
           flexring_all_reduce((void *)(UINTPTR_MAX - 15), recv, 64, f32, FLEXRING_SUM, comm, NULL));
    EXPECT(INVALID, "host's memory", flexring_all_reduce(send, recv, 64, f32, FLEXRING_SUM, comm, SENTINEL));
}

static void pointers_are_checked_for_alignment(void) {
    static struct { _Alignas(8) char bytes[24]; } place;
    void *odd = place.bytes + 1;
    const int f32 = FLEXRING_FLOAT32;
    EXPECT(INVALID, "out at", flexring_comm_rank(comm, odd));
    EXPECT(INVALID, "not aligned", flexring_comm_size(comm, odd));
    EXPECT(INVALID, "not aligned", flexring_comm_init_from_env(odd));
    EXPECT(INVALID, "not aligned", flexring_alloc(comm, 64, odd));
    EXPECT(INVALID, "not aligned", flexring_op_create_premul_sum(1, odd));
    EXPECT(INVALID, "not aligned", flexring_all_reduce_async(send, recv, 1, f32, FLEXRING_SUM, comm, odd));
    EXPECT(INVALID, "is no request", flexring_wait(odd));
    EXPECT(INVALID, "is no communicator", flexring_comm_status(odd));
    size_t rails = 77;
    EXPECT(INVALID, "rails at", flexring_comm_rail_statistics(comm, sizeof(flexring_rail_statistics), odd, 1, &rails));
    EXPECT(INVALID, "count at", flexring_comm_rail_statistics(comm, sizeof(flexring_rail_statistics), NULL, 0, odd));
    EXPECT(INVALID, "is no communicator", flexring_comm_free(odd));
    flexring_comm *out = SENTINEL;
    EXPECT(INVALID, "exclude at", flexring_comm_shrink(comm, odd, 1, &out));
    CHECK(out == SENTINEL);
    for (unsigned i = 0; i < sizeof place.bytes; i++) CHECK(place.bytes[i] == 0);
}

static void numbers_are_checked(void) {
    static const int types[] = {-1, 15, INT_MAX, INT_MIN};
    static const flexring_op ops[] = {5, 4096, UINT64_MAX};
    for (int i = 0; i < 4; i++)
        EXPECT(INVALID, "flexring_dtype", flexring_all_reduce(send, recv, 1, types[i], FLEXRING_SUM, comm, NULL));
    for (int i = 0; i < 3; i++)
        EXPECT(INVALID, "flexring_op", flexring_all_reduce(send, recv, 1, FLEXRING_FLOAT32, ops[i], comm, NULL));
    EXPECT(INVALID, "out is NULL", flexring_op_create_premul_sum(1, NULL));
    flexring_op half, many, negative;
    WORKS(flexring_op_create_premul_sum(0.5f, &half));
    WORKS(flexring_op_create_premul_sum(300, &many));
    WORKS(flexring_op_create_premul_sum(-1, &negative));
    EXPECT(INVALID, "0.5", flexring_all_reduce(send, recv, 1, FLEXRING_INT32, half, comm, NULL));
    EXPECT(INVALID, "300", flexring_all_reduce(send, recv, 1, FLEXRING_INT8, many, comm, NULL));
    EXPECT(INVALID, "-1", flexring_all_reduce(send, recv, 1, FLEXRING_UINT8, negative, comm, NULL));
}

static void collectives_are_checked(void) {
    const int f32 = FLEXRING_FLOAT32;
    const flexring_op sum = FLEXRING_SUM;
    EXPECT(INVALID, "communicator is NULL", flexring_reduce_scatter(send, recv, 8, f32, sum, NULL, NULL));
    EXPECT(INVALID, "communicator is NULL", flexring_all_gather(send, recv, 8, f32, NULL, NULL));
    EXPECT(INVALID, "communicator is NULL", flexring_broadcast(send, recv, 8, f32, 0, NULL, NULL));
    EXPECT(INVALID, "communicator is NULL", flexring_reduce(send, recv, 8, f32, sum, 0, NULL, NULL));
    EXPECT(INVALID, "send buffer is NULL", flexring_reduce_scatter(NULL, recv, 8, f32, sum, comm, NULL));
    EXPECT(INVALID, "receive buffer is NULL", flexring_all_gather(send, NULL, 8, f32, comm, NULL));
    /* This rank is the root, so both of its buffers are used. */
    EXPECT(INVALID, "send buffer is NULL", flexring_broadcast(NULL, recv, 8, f32, 0, comm, NULL));
    EXPECT(INVALID, "receive buffer is NULL", flexring_reduce(send, NULL, 8, f32, sum, 0, comm, NULL));
    EXPECT(INVALID, "root -1", flexring_broadcast(send, recv, 8, f32, -1, comm, NULL));
    EXPECT(INVALID, "-1 is not a rank; a receive names the rank that sends", flexring_recv(recv, 8, f32, -1, comm, NULL));
    EXPECT(INVALID, "root 1 is not a rank", flexring_broadcast(send, recv, 8, f32, 1, comm, NULL));
    EXPECT(INVALID, "root 2147483647", flexring_reduce(send, recv, 8, f32, sum, INT_MAX, comm, NULL));
    EXPECT(INVALID, "not aligned", flexring_reduce_scatter((char *)send + 1, recv, 8, f32, sum, comm, NULL));
    EXPECT(INVALID, "not aligned", flexring_all_gather(send, (char *)recv + 2, 8, f32, comm, NULL));
    EXPECT(INVALID, "overlap", flexring_reduce_scatter(send, send + 1, 8, f32, sum, comm, NULL));
    EXPECT(INVALID, "overlap", flexring_all_gather(send + 1, send, 8, f32, comm, NULL));
    EXPECT(INVALID, "overlap", flexring_broadcast(send, send + 7, 8, f32, 0, comm, NULL));
    EXPECT(INVALID, "overlap", flexring_reduce(send + 7, send, 8, f32, sum, 0, comm, NULL));
    EXPECT(INVALID, "more than any memory", flexring_all_gather(send, recv, SIZE_MAX, f32, comm, NULL));
    EXPECT(INVALID, "flexring_dtype", flexring_broadcast(send, recv, 8, 15, 0, comm, NULL));
    EXPECT(INVALID, "flexring_op", flexring_reduce(send, recv, 8, f32, 5, 0, comm, NULL));
    EXPECT(INVALID, "host's memory", flexring_broadcast(send, recv, 8, f32, 0, comm, SENTINEL));
}

static void requests_are_checked(void) {
    const int f32 = FLEXRING_FLOAT32;
    flexring_request *request = SENTINEL;
    int done = 77;
    EXPECT(INVALID, "out is NULL", flexring_all_reduce_async(send, recv, 1, f32, FLEXRING_SUM, comm, NULL));
    EXPECT(INVALID, "communicator is NULL",
           flexring_all_reduce_async(send, recv, 1, f32, FLEXRING_SUM, NULL, &request));
    EXPECT(INVALID, "NULL", flexring_all_reduce_async(send, NULL, 1, f32, FLEXRING_SUM, comm, &request));
    EXPECT(INVALID, "flexring_dtype", flexring_all_reduce_async(send, recv, 1, 99, FLEXRING_SUM, comm, &request));
    EXPECT(INVALID, "request is NULL", flexring_wait(NULL));
    EXPECT(INVALID, "request is NULL", flexring_test(NULL, &done));
    CHECK(request == SENTINEL && done == 77);
    WORKS(flexring_all_reduce_async(send, send, 1, f32, FLEXRING_SUM, comm, &request));
    EXPECT(INVALID, "done is NULL", flexring_test(request, NULL));
    WORKS(flexring_wait(request));
}

static void memory_is_checked(void) {
    void *memory = SENTINEL;
    EXPECT(INVALID, "communicator is NULL", flexring_alloc(NULL, 64, &memory));
    EXPECT(INVALID, "out is NULL", flexring_alloc(comm, 64, NULL));
    EXPECT(FLEXRING_SYSTEM_ERROR, "cannot allocate", flexring_alloc(comm, SIZE_MAX, &memory));
    CHECK(memory == SENTINEL);
    EXPECT(INVALID, "communicator is NULL", flexring_free(NULL, send));
    WORKS(flexring_free(comm, NULL));
    EXPECT(INVALID, "was not returned by", flexring_free(comm, send));
    WORKS(flexring_alloc(comm, 8192, &memory));
    EXPECT(INVALID, "was not returned by", flexring_free(comm, (char *)memory + 4096));
    WORKS(flexring_free(comm, memory));
    EXPECT(INVALID, "freed before", flexring_free(comm, memory));
    WORKS(flexring_alloc(comm, 0, &memory));
    WORKS(flexring_free(comm, memory));
}

static void registration_is_checked(void) {
    static char mine[1000];
    EXPECT(INVALID, "communicator is NULL", flexring_register(NULL, mine, sizeof mine));
    EXPECT(INVALID, "memory is NULL", flexring_register(comm, NULL, 10));
    EXPECT(INVALID, "are not a memory range", flexring_register(comm, mine, 0));
    EXPECT(INVALID, "are not a memory range", flexring_register(comm, mine, SIZE_MAX));
    EXPECT(INVALID, "communicator is NULL", flexring_deregister(NULL, mine, sizeof mine));
    EXPECT(INVALID, "are not registered", flexring_deregister(comm, mine, sizeof mine));
    WORKS(flexring_register(comm, mine, sizeof mine));
    WORKS(flexring_register(comm, mine, sizeof mine));
    EXPECT(INVALID, "are not registered", flexring_deregister(comm, mine, sizeof mine - 1));
    WORKS(flexring_deregister(comm, mine, sizeof mine));
    WORKS(flexring_deregister(comm, mine, sizeof mine));
    EXPECT(INVALID, "are not registered", flexring_deregister(comm, mine, sizeof mine));
}

static void *another_thread(void *unused) {
    CHECK(strcmp(flexring_last_error(), "") == 0);
    EXPECT(INVALID, "request is NULL", flexring_wait(NULL));
    return unused;
}

static void messages_belong_to_their_thread(void) {
    EXPECT(INVALID, "flexring_dtype",
           flexring_all_reduce(send, recv, 1, 99, FLEXRING_SUM, comm, NULL));
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, another_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(strstr(flexring_last_error(), "flexring_dtype") != NULL);
}

static void a_refused_end_ends_its_group(void) {
    WORKS(flexring_group_start());
    WORKS(flexring_send(send, 64, FLEXRING_FLOAT32, 0, comm, NULL));
    WORKS(flexring_recv(recv, 64, FLEXRING_FLOAT32, 0, comm, NULL));
    EXPECT(INVALID, "out is NULL", flexring_group_end_async(NULL));
    /* Further calls are made at once, and not at the end of a group that never ends. */
    EXPECT(INVALID, "flexring_group_start", flexring_group_end());
}

int main(void) {
    alarm(60);
    CHECK(strcmp(flexring_last_error(), "") == 0);
    setenv("FLEXRING_RANK", "0", 1);
    setenv("FLEXRING_WORLD_SIZE", "1", 1);
    WORKS(flexring_comm_init_from_env(&comm));
    for (int i = 0; i < 64; i++) send[i] = (float)i, recv[i] = -1;

    communicators_are_checked();
    settings_are_quoted();
    buffers_are_checked();
    pointers_are_checked_for_alignment();
    numbers_are_checked();
    collectives_are_checked();
    requests_are_checked();
    memory_is_checked();
    registration_is_checked();
    a_refused_end_ends_its_group();
    messages_belong_to_their_thread();
    for (int i = 0; i < 64; i++) CHECK(send[i] == (float)i && recv[i] == -1);

    /* The communicator still works after all errors. */
    WORKS(flexring_all_reduce(send, recv, 64, FLEXRING_FLOAT32, FLEXRING_AVG, comm, NULL));
    for (int i = 0; i < 64; i++) CHECK(recv[i] == (float)i);
    WORKS(flexring_comm_free(comm));
    puts("bad_input: ok");
    return 0;
}
