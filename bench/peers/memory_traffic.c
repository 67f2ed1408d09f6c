/* Measures how fast all processors together copy memory: the limit of all-reduces on one node.
 *
 *     cc -O2 bench/peers/memory_traffic.c -lpthread -o memory_traffic && ./memory_traffic THREADS
 *
 * Prints the bytes that are read and written in a second, the best of several rounds, with vectors that no cache holds.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BYTES = 64 << 20, ROUNDS = 8, MOST_THREADS = 1024 };

static pthread_barrier_t barrier;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void *copy(void *best) {
    char *from = malloc(BYTES), *to = malloc(BYTES);
    if (!from || !to) exit(1);
    memset(from, 1, BYTES);
    memset(to, 2, BYTES);
    for (int round = 0; round < ROUNDS; round++) {
        pthread_barrier_wait(&barrier);
        double begun = seconds();
        memcpy(to, from, BYTES);
        pthread_barrier_wait(&barrier);
        double took = seconds() - begun;
        if (best && (*(double *)best == 0 || took < *(double *)best)) *(double *)best = took;
    }
    free(from);
    free(to);
    return NULL;
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    static pthread_t others[MOST_THREADS];
    double best = 0;
    if (threads < 1 || threads > MOST_THREADS) return 2;
    pthread_barrier_init(&barrier, NULL, (unsigned)threads);
    for (int i = 1; i < threads; i++)
        if (pthread_create(&others[i], NULL, copy, NULL)) return 1;
    copy(&best);
    for (int i = 1; i < threads; i++) pthread_join(others[i], NULL);
    printf("%.0f\n", 2.0 * BYTES * threads / best);
    return 0;
}
