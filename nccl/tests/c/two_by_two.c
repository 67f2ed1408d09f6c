/* Two processes with two GPUs each, as nccl-tests under mpirun: one thread of a process makes the calls of both of its ranks, in
 * groups. */
#include "check.h"

#include <sys/mman.h>
#include <sys/wait.h>

enum { PROCESSES = 2, OWN = 2, WORLD = PROCESSES * OWN, COUNT = 3000, ROUNDS = 10 };

static struct shared { volatile int ready; ncclUniqueId id; } *shared;

static void run(int process) {
    ncclComm_t comms[OWN];
    cudaStream_t streams[OWN];
    float *sends[OWN], *recvs[OWN];
    if (process == 0) {
        NCCL(ncclGetUniqueId(&shared->id));
        shared->ready = 1;
    }
    while (!shared->ready) usleep(1000);

    NCCL(ncclGroupStart());
    for (int i = 0; i < OWN; i++) {
        use_gpu(process * OWN + i);
        NCCL(ncclCommInitRank(&comms[i], WORLD, shared->id, process * OWN + i));
    }
    NCCL(ncclGroupEnd());
    for (int i = 0; i < OWN; i++) {
        use_gpu(process * OWN + i);
        streams[i] = new_stream();
        sends[i] = on_gpu(WORLD * COUNT, (float)(process * OWN + i + 1), streams[i]);
        recvs[i] = on_gpu(WORLD * COUNT, 0, streams[i]);
    }
    /* Block p comes from rank p, if that is this one or of the other process; then the first block of the other process, or a few
     * elements of it, is summed. */
    int other = (1 - process) * OWN;
    for (int round = 0; round < ROUNDS; round++) {
        NCCL(ncclGroupStart());
        for (int i = 0; i < OWN; i++) {
            for (int peer = 0; peer < WORLD; peer++) {
                if (peer / OWN == process && peer != process * OWN + i) continue;
                NCCL(ncclSend(sends[i] + peer * COUNT, COUNT, ncclFloat, peer, comms[i], streams[i]));
                NCCL(ncclRecv(recvs[i] + peer * COUNT, COUNT, ncclFloat, peer, comms[i], streams[i]));
            }
        }
        NCCL(ncclGroupEnd());
        size_t summed = round % 2 == 0 ? COUNT : 10;
        NCCL(ncclGroupStart());
        for (int i = 0; i < OWN; i++) {
            float *block = recvs[i] + other * COUNT;
            NCCL(ncclAllReduce(block, block, summed, ncclFloat, ncclSum, comms[i], streams[i]));
        }
        NCCL(ncclGroupEnd());
        for (int i = 0; i < OWN; i++) {
            int rank = process * OWN + i;
            float *block = recvs[i] + other * COUNT, sum = OWN * (1 + (OWN + 1));
            use_gpu(rank);
            CHECK(read_gpu(block, streams[i]) == sum);
            CHECK(read_gpu(block + COUNT - 1, streams[i]) == (summed == COUNT ? sum : (float)(other + 1)));
            CHECK(read_gpu(block + COUNT, streams[i]) == (float)(other + 2));
            CHECK(read_gpu(block + OWN * COUNT - 1, streams[i]) == (float)(other + 2));
            CHECK(read_gpu(recvs[i] + rank * COUNT, streams[i]) == (float)(rank + 1));
        }
    }
    for (int i = 0; i < OWN; i++) NCCL(ncclCommDestroy(comms[i]));
}

int main(void) {
    alarm(60);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    pid_t children[PROCESSES];
    for (int process = 0; process < PROCESSES; process++) {
        children[process] = fork();
        CHECK(children[process] >= 0);
        if (children[process] == 0) {
            alarm(60);
            run(process);
            exit(0);
        }
    }
    for (int process = 0; process < PROCESSES; process++) {
        int status;
        CHECK(waitpid(children[process], &status, 0) == children[process]);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    puts("two_by_two: ok");
    return 0;
}
