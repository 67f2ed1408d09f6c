/* A program that runs without standard descriptors, and one that closes the library's. */
#define _GNU_SOURCE
#include "ranks.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

enum { COUNT = 50000 };

static flexring_unique_id id;
static float vector[COUNT];
/* How many ranks have finished their calls: memory of all of them. */
static volatile int *finished;

/* The library has taken none of the descriptors that the program has closed. */
static void none_are_open(const char *when) {
    for (int number = 0; number <= 2; number++) {
        if (fcntl(number, F_GETFD) != -1 || errno != EBADF) {
            char path[64], target[256] = "";
            snprintf(path, sizeof path, "/proc/self/fd/%d", number);
            if (readlink(path, target, sizeof target - 1) < 0) target[0] = 0;
            dprintf(9, "descriptor %d is %s %s\n", number, target, when);
            _exit(1);
        }
    }
}

static void sums_are_exact(flexring_comm *comm, int count) {
    int world;
    WORKS(flexring_comm_size(comm, &world));
    for (int i = 0; i < count; i++) vector[i] = 1;
    WORKS(flexring_all_reduce(vector, vector, count, FLEXRING_FLOAT32, FLEXRING_SUM, comm, NULL));
    for (int i = 0; i < count; i++) CHECK(vector[i] == world);
}

static void without_standard_descriptors(int rank) {
    flexring_comm *comm, *part;
    alarm(60);
    /* For messages. */
    CHECK(dup2(2, 9) == 9);
    for (int number = 0; number <= 2; number++) CHECK(close(number) == 0);
    WORKS(flexring_comm_init_rank(&comm, 2, id, rank));
    none_are_open("after the rendezvous");
    /* Goes nowhere, and not to the other rank. */
    printf("rank %d\n", rank);
    fflush(stdout);
    sums_are_exact(comm, 1);
    sums_are_exact(comm, COUNT);
    WORKS(flexring_comm_split(comm, 0, rank, &part));
    none_are_open("after a split");
    sums_are_exact(part, COUNT);
    WORKS(flexring_comm_free(part));
    WORKS(flexring_comm_free(comm));
    none_are_open("at the end");
    _exit(0);
}

/* A program that becomes a daemon after it has made a communicator. Freeing it must not wait for what its descriptors would report. They
   are replaced here, because Rust's debug builds end a process that closes a descriptor twice. */
static void closes_all_descriptors(int rank) {
    flexring_comm *comm;
    alarm(60);
    WORKS(flexring_comm_init_rank(&comm, 2, id, rank));
    sums_are_exact(comm, COUNT);
    /* A rank whose connections end during a call of another one fails it. */
    __sync_add_and_fetch(finished, 1);
    while (*finished < 2) usleep(1000);
    int null = open("/dev/null", O_RDWR);
    CHECK(null > 2);
    for (int number = 3; number < 1024; number++) {
        if (number != null && fcntl(number, F_GETFD) != -1) CHECK(dup2(null, number) == number);
    }
    alarm(15);
    WORKS(flexring_comm_free(comm));
    _exit(0);
}

int main(void) {
    static const char *const transports[] = {"auto", "tcp"};
    alarm(150);
    /* Warnings about descriptors that are not what they were. */
    setenv("FLEXRING_LOG", "error", 1);
    finished = mmap(NULL, sizeof *finished, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(finished != MAP_FAILED);
    for (int transport = 0; transport < 2; transport++) {
        *finished = 0;
        setenv("FLEXRING_TRANSPORT", transports[transport], 1);
        WORKS(flexring_get_unique_id(&id));
        CHECK(ranks_work(2, "without standard descriptors", without_standard_descriptors));
        WORKS(flexring_get_unique_id(&id));
        CHECK(ranks_work(2, "all descriptors closed", closes_all_descriptors));
    }
    puts("closed_descriptors: ok");
    return 0;
}
