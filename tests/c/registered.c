/* Two processes register memory: parts of vectors, overlapping and nested, while calls run, and in two communicators. */
#include "ranks.h"

#include <stdint.h>
#include <sys/mman.h>
#include <time.h>

enum { COUNT = 50000 };

static flexring_unique_id ids[2];
static flexring_comm *comm, *other_comm;
static int rank;

/* Whether the page at an address belongs to memory that ranks share. */
static int is_shared(const void *address) {
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps);
    char line[512];
    unsigned long start, end;
    int shared = 0;
    while (fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx", &start, &end) == 2 && start <= (uintptr_t)address && (uintptr_t)address < end)
            shared = strstr(line, "memfd:flexring") != NULL;
    fclose(maps);
    return shared;
}

static int64_t *new_vector(void) {
    int64_t *vector = malloc(COUNT * sizeof *vector);
    CHECK(vector);
    return vector;
}

static int64_t value(int at, int rank) { return (int64_t)(1 + at % 100) << (8 * rank); }

static void fill(int64_t *vector) {
    for (int at = 0; at < COUNT; at++) vector[at] = value(at, rank);
}

/* Elements `from` to `to` hold sums, and the others what this rank has filled in. */
static void has_sums(const int64_t *vector, int from, int to) {
    for (int at = 0; at < COUNT; at++)
        CHECK(vector[at] == (from <= at && at < to ? value(at, 0) + value(at, 1) : value(at, rank)));
}

static void sum(flexring_comm *in, int64_t *vector, int from, int to) {
    WORKS(flexring_all_reduce(vector + from, vector + from, (size_t)(to - from), FLEXRING_INT64, FLEXRING_SUM, in, NULL));
}

static flexring_request *start(int64_t *vector, int from, int to) {
    flexring_request *request;
    WORKS(flexring_all_reduce_async(vector + from, vector + from, (size_t)(to - from), FLEXRING_INT64, FLEXRING_SUM, comm, &request));
    return request;
}

static void enroll(flexring_comm *in, int64_t *vector, int from, int to) {
    WORKS(flexring_register(in, vector + from, (size_t)(to - from) * sizeof *vector));
}

static void release(flexring_comm *in, int64_t *vector, int from, int to) {
    WORKS(flexring_deregister(in, vector + from, (size_t)(to - from) * sizeof *vector));
}

/* The registered part begins and ends within a page, and calls use parts of it, or more than it. */
static void bytes_beside_a_part_stay(void) {
    static const int parts[][2] = {{4, 5}, {4, 600}, {7, 40000}, {511, 513}, {600, 30000}, {49000, 49995}, {4, 49995}, {0, COUNT}};
    int64_t *vector = new_vector();
    for (size_t part = 0; part < sizeof parts / sizeof *parts; part++) {
        int begin = 1 + rank, end = COUNT - 5;
        fill(vector);
        enroll(comm, vector, begin, end);
        CHECK(is_shared(vector + COUNT / 2));
        sum(comm, vector, parts[part][0], parts[part][1]);
        has_sums(vector, parts[part][0], parts[part][1]);
        release(comm, vector, begin, end);
        CHECK(!is_shared(vector + COUNT / 2));
        has_sums(vector, parts[part][0], parts[part][1]);
    }
    free(vector);
}

static void registrations_are_nested_and_overlap(void) {
    int64_t *vector = new_vector();
    static const int ranges[][2] = {{0, COUNT}, {100, 40000}, {100, 40000}, {30000, COUNT}};
    enum { RANGES = sizeof ranges / sizeof *ranges };
    /* They end in the order in which they began, or in the reverse order. */
    for (int reverse = 0; reverse < 2; reverse++) {
        for (int range = 0; range < RANGES; range++) enroll(comm, vector, ranges[range][0], ranges[range][1]);
        for (int range = 0; range < RANGES; range++) {
            CHECK(is_shared(vector + 20000));
            fill(vector);
            sum(comm, vector, 200, 45000);
            has_sums(vector, 200, 45000);
            int ended = reverse ? RANGES - 1 - range : range;
            release(comm, vector, ranges[ended][0], ranges[ended][1]);
        }
        CHECK(!is_shared(vector + 20000));
        has_sums(vector, 200, 45000);
    }
    free(vector);
}

static void memory_of_the_pool_may_be_registered(void) {
    void *memory;
    WORKS(flexring_alloc(comm, COUNT * sizeof(int64_t), &memory));
    int64_t *vector = memory;
    enroll(comm, vector, 0, COUNT);
    fill(vector);
    sum(comm, vector, 0, COUNT);
    release(comm, vector, 0, COUNT);
    has_sums(vector, 0, COUNT);
    WORKS(flexring_free(comm, memory));
}

static void memory_that_is_locked_stays_private(void) {
    int64_t *vector = mmap(NULL, COUNT * sizeof *vector, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(vector != MAP_FAILED);
    int is_locked = mlock(vector, COUNT * sizeof *vector) == 0;
    if (!is_locked) fprintf(stderr, "skipped: memory cannot be locked\n");
    enroll(comm, vector, 0, COUNT);
    CHECK(is_shared(vector + COUNT / 2) == !is_locked);
    fill(vector);
    sum(comm, vector, 3, COUNT);
    has_sums(vector, 3, COUNT);
    release(comm, vector, 0, COUNT);
    CHECK(munmap(vector, COUNT * sizeof *vector) == 0);
}

/* Rank 1 makes its calls later, so that rank 0 deregisters while its own calls run or are in the queue. */
static void calls_run_while_memory_is_deregistered(void) {
    static const int parts[][2] = {{0, COUNT}, {5, 40000}, {20000, 20001}};
    int64_t *vector = new_vector();
    for (size_t part = 0; part < sizeof parts / sizeof *parts; part++) {
        int from = parts[part][0], to = parts[part][1];
        fill(vector);
        enroll(comm, vector, 0, COUNT);
        if (rank == 1) usleep(100000);
        flexring_request *first = start(vector, from, to), *second = start(vector, from, to);
        if (rank == 0) usleep(50000);
        release(comm, vector, 0, COUNT);
        CHECK(!is_shared(vector + COUNT / 2));
        EXPECT(FLEXRING_INVALID_ARGUMENT, "are not registered", flexring_deregister(comm, vector, COUNT * sizeof *vector));
        /* What no call uses may be written at once. */
        if (part > 0) vector[0] = vector[COUNT - 1] = -1;
        WORKS(flexring_wait(first));
        WORKS(flexring_wait(second));
        /* The memory is registered again, and its contents are those that the calls and the program have written. */
        enroll(comm, vector, 0, COUNT);
        CHECK(is_shared(vector + COUNT / 2));
        if (part > 0) {
            CHECK(vector[0] == -1 && vector[COUNT - 1] == -1);
            vector[0] = value(0, rank), vector[COUNT - 1] = value(COUNT - 1, rank);
        }
        for (int at = 0; at < COUNT; at++) {
            int is_sum = from <= at && at < to;
            CHECK(vector[at] == (is_sum ? 2 * (value(at, 0) + value(at, 1)) : value(at, rank)));
        }
        fill(vector);
        sum(comm, vector, from, to);
        has_sums(vector, from, to);
        release(comm, vector, 0, COUNT);
    }
    free(vector);
}

/* Both communicators use the same pool. */
static void two_communicators_share_registered_memory(void) {
    int64_t *vector = new_vector();
    flexring_comm *comms[] = {comm, other_comm};
    for (int first = 0; first < 2; first++) {
        flexring_comm *one = comms[first], *other = comms[1 - first];
        enroll(one, vector, 0, COUNT);
        enroll(other, vector, 10, COUNT - 10);
        for (int ended = 0; ended < 2; ended++) {
            CHECK(is_shared(vector + COUNT / 2));
            for (int in = 0; in < 2; in++) {
                fill(vector);
                sum(comms[in], vector, 20, COUNT - 20);
                has_sums(vector, 20, COUNT - 20);
            }
            if (ended == 0) release(one, vector, 0, COUNT);
        }
        release(other, vector, 10, COUNT - 10);
        CHECK(!is_shared(vector + COUNT / 2));
        has_sums(vector, 20, COUNT - 20);
    }
    /* It stays shared for the second when the first is freed. */
    enroll(comm, vector, 0, COUNT);
    enroll(other_comm, vector, 0, COUNT);
    WORKS(flexring_comm_free(comm));
    CHECK(is_shared(vector + COUNT / 2));
    fill(vector);
    sum(other_comm, vector, 0, COUNT);
    has_sums(vector, 0, COUNT);
    WORKS(flexring_comm_free(other_comm));
    CHECK(!is_shared(vector + COUNT / 2));
    has_sums(vector, 0, COUNT);
    free(vector);
}

static void run(int number) {
    rank = number;
    alarm(60);
    WORKS(flexring_comm_init_rank(&comm, 2, ids[0], rank));
    WORKS(flexring_comm_init_rank(&other_comm, 2, ids[1], rank));
    bytes_beside_a_part_stay();
    registrations_are_nested_and_overlap();
    memory_of_the_pool_may_be_registered();
    memory_that_is_locked_stays_private();
    calls_run_while_memory_is_deregistered();
    two_communicators_share_registered_memory();
}

int main(void) {
    alarm(120);
    for (int id = 0; id < 2; id++) WORKS(flexring_get_unique_id(&ids[id]));
    if (!ranks_work(2, "registered", run)) return 1;
    puts("registered: ok");
    return 0;
}
