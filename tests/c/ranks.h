/* Ranks as children of a test program. */
#ifndef RANKS_H
#define RANKS_H

#include "check.h"

#include <sys/wait.h>

enum { MOST_RANKS = 8 };

/* Runs `run` as each rank in a child of its own. Whether all of them end with status 0; the others are named, after `what`. */
static inline int ranks_work(int world, const char *what, void (*run)(int rank)) {
    pid_t children[MOST_RANKS];
    CHECK(world <= MOST_RANKS);
    for (int rank = 0; rank < world; rank++) {
        children[rank] = fork();
        CHECK(children[rank] >= 0);
        if (children[rank] == 0) {
            run(rank);
            exit(0);
        }
    }
    int works = 1;
    for (int rank = 0; rank < world; rank++) {
        int status;
        CHECK(waitpid(children[rank], &status, 0) == children[rank]);
        if (status != 0) fprintf(stderr, "%s: rank %d ended with status %#x\n", what, rank, status), works = 0;
    }
    return works;
}

#endif
