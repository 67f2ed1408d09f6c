/* Bad arguments are refused with a code and a sentence, and the communicator still works. With the argument `none` there is no
 * CUDA driver, and vectors are the host's. */
#include "check.h"

#define ARGUMENT ncclInvalidArgument
#define USAGE ncclInvalidUsage
#define COUNT 100

static int has_gpu;
static ncclComm_t comm;
static cudaStream_t stream;
static float *vector;

static ncclResult_t reduce(const void *send, void *recv, size_t count, int type, int op, ncclComm_t on) {
    return ncclAllReduce(send, recv, count, (ncclDataType_t)type, (ncclRedOp_t)op, on, stream);
}

static void works(void) {
    NCCL(reduce(vector, vector, COUNT, ncclFloat, ncclSum, comm));
    CHECK((has_gpu ? read_gpu(vector + COUNT - 1, stream) : vector[COUNT - 1]) == 5);
}

static void making(void) {
    ncclUniqueId id, garbage;
    ncclComm_t other = comm;
    int devices[] = {0, 99};
    memset(&garbage, 7, sizeof garbage);
    RETURNS(ARGUMENT, "uniqueId is NULL", ncclGetUniqueId(NULL));
    RETURNS(ARGUMENT, "version is NULL", ncclGetVersion(NULL));
    NCCL(ncclGetUniqueId(&id));
    RETURNS(ARGUMENT, "comm is NULL", ncclCommInitRank(NULL, 1, id, 0));
    RETURNS(ARGUMENT, "not aligned", ncclCommInitRank((ncclComm_t *)((char *)&other + 1), 1, id, 0));
    RETURNS(ARGUMENT, "nranks is 0", ncclCommInitRank(&other, 0, id, 0));
    RETURNS(ARGUMENT, "rank is 2, but must be from 0 to 1", ncclCommInitRank(&other, 2, id, 2));
    RETURNS(ARGUMENT, "rank is -1", ncclCommInitRank(&other, 2, id, -1));
    CHECK(other == comm);
    RETURNS(ARGUMENT, "unique id", ncclCommInitRank(&other, 1, garbage, 0));
    CHECK(other == NULL);
    RETURNS(ARGUMENT, "ndev is -1", ncclCommInitAll(&other, -1, NULL));
    RETURNS(has_gpu ? ARGUMENT : ncclUnhandledCudaError, has_gpu ? "no GPU 99" : "no CUDA driver",
            ncclCommInitAll(&other, 2, devices));

    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 2;
    RETURNS(ARGUMENT, "blocking is 2", ncclCommInitRankConfig(&other, 1, id, 0, &config));
    config.blocking = 1, config.netName = "IB";
    RETURNS(USAGE, "netName is \"IB\"", ncclCommInitRankConfig(&other, 1, id, 0, &config));
    config.magic = 1;
    RETURNS(ARGUMENT, "NCCL_CONFIG_INITIALIZER", ncclCommInitRankConfig(&other, 1, id, 0, &config));

    /* What goes wrong in the background is the communicator's state. */
    config = (ncclConfig_t)NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    RETURNS(ncclInProgress, "", ncclCommInitRankConfig(&other, 1, garbage, 0, &config));
    CHECK(settled(other) == ARGUMENT && strstr(ncclGetLastError(other), "unique id"));
    RETURNS(ARGUMENT, "unique id", reduce(vector, vector, COUNT, ncclFloat, ncclSum, other));
    NCCL(ncclCommDestroy(other));

    /* One rank of a group that cannot be made ends the others at once, which would wait for it. */
    ncclComm_t group[2] = {comm, comm};
    NCCL(ncclGroupStart());
    NCCL(ncclCommInitRank(&group[0], 2, id, 0));
    NCCL(ncclCommInitRank(&group[1], 2, garbage, 1));
    CHECK(group[0] != NULL && group[1] != NULL);
    RETURNS(ARGUMENT, "unique id", ncclGroupEnd());
    CHECK(group[0] == NULL && group[1] == NULL);

    /* The program gives up what the group was to make. */
    NCCL(ncclGroupStart());
    NCCL(ncclCommInitRank(&group[0], 2, id, 0));
    RETURNS(ARGUMENT, "rank is 2", ncclCommInitRank(&group[1], 2, id, 2));
    NCCL(ncclCommAbort(group[0]));
    RETURNS(ARGUMENT, "rank is 2", ncclGroupEnd());
    NCCL(ncclGroupStart());
    NCCL(ncclCommInitRank(&group[0], 2, id, 0));
    NCCL(ncclCommDestroy(group[0]));
    NCCL(ncclGroupEnd());
}

static void calls(void) {
    float host[COUNT] = {0};
    void *far = (char *)vector + 1;
    RETURNS(ARGUMENT, "the communicator is NULL", reduce(vector, vector, COUNT, ncclFloat, ncclSum, NULL));
    RETURNS(ARGUMENT, "is no communicator", reduce(vector, vector, COUNT, ncclFloat, ncclSum, (ncclComm_t)&comm));
    RETURNS(ARGUMENT, "12 is no ncclDataType_t", reduce(vector, vector, COUNT, ncclNumTypes, ncclSum, comm));
    RETURNS(ARGUMENT, "-1 is no ncclDataType_t", reduce(vector, vector, COUNT, -1, ncclSum, comm));
    RETURNS(ARGUMENT, "5 is no ncclRedOp_t", reduce(vector, vector, COUNT, ncclFloat, ncclNumOps, comm));
    RETURNS(ARGUMENT, "the send buffer is NULL", reduce(NULL, vector, COUNT, ncclFloat, ncclSum, comm));
    RETURNS(ARGUMENT, "ncclAllReduce: invalid argument: the receive buffer is NULL",
            reduce(vector, NULL, COUNT, ncclFloat, ncclSum, comm));
    RETURNS(ARGUMENT, "more than any memory", reduce(vector, vector, (size_t)-1, ncclFloat, ncclSum, comm));
    RETURNS(ARGUMENT, "not aligned", reduce(far, vector, 1, ncclFloat, ncclSum, comm));
    RETURNS(ARGUMENT, "root is 1", ncclBroadcast(vector, vector, COUNT, ncclFloat, 1, comm, stream));
    if (has_gpu) {
        RETURNS(ARGUMENT, "the host's memory", reduce(host, host, COUNT, ncclFloat, ncclSum, comm));
        RETURNS(ARGUMENT, "reach beyond", reduce(vector, vector, 1 << 28, ncclFloat, ncclSum, comm));
    }
    NCCL(reduce(NULL, NULL, 0, ncclFloat, ncclSum, comm));
    works();
}

static void groups(void) {
    RETURNS(USAGE, "no ncclGroupStart", ncclGroupEnd());
    NCCL(ncclCommFinalize(comm));
    RETURNS(ARGUMENT, "was finalized", reduce(vector, vector, COUNT, ncclFloat, ncclSum, comm));
    NCCL(ncclCommDestroy(comm));

    ncclUniqueId id;
    NCCL(ncclGetUniqueId(&id));
    NCCL(ncclCommInitRank(&comm, 1, id, 0));
    /* The refused call is the group's result, and the good one is not made. */
    NCCL(ncclGroupStart());
    NCCL(reduce(vector, vector, COUNT, ncclFloat, ncclSum, comm));
    RETURNS(ARGUMENT, "12 is no ncclDataType_t", reduce(vector, vector, COUNT, ncclNumTypes, ncclSum, comm));
    RETURNS(ARGUMENT, "none was run: ncclAllReduce: 12 is no", ncclGroupEnd());
    /* What is no part of a group does not fail it. */
    NCCL(ncclGroupStart());
    NCCL(reduce(vector, vector, COUNT, ncclFloat, ncclSum, comm));
    RETURNS(USAGE, "windows", ncclCommWindowRegister(comm, vector, 4, NULL, 0));
    RETURNS(ARGUMENT, "handle is NULL", ncclCommRegister(comm, vector, 4, NULL));
    RETURNS(ARGUMENT, "count is NULL", ncclCommCount(comm, NULL));
    NCCL(ncclGroupEnd());
    /* What only flexring can check is found at the end. */
    NCCL(ncclGroupStart());
    NCCL(reduce(NULL, vector, COUNT, ncclFloat, ncclSum, comm));
    RETURNS(ARGUMENT, "ncclGroupEnd: ncclAllReduce: invalid argument: the send buffer is NULL", ncclGroupEnd());
    NCCL(ncclGroupStart());
    RETURNS(USAGE, "not supported by flexring", ncclGroupSimulateEnd(NULL));
    RETURNS(USAGE, "no ncclGroupStart", ncclGroupEnd());
    NCCL(ncclGroupStart());
    NCCL(ncclGroupStart());
    RETURNS(USAGE, "not supported by flexring", ncclGroupSimulateEnd(NULL));
    RETURNS(USAGE, "none was run: ncclGroupSimulateEnd", ncclGroupEnd());
    RETURNS(USAGE, "no ncclGroupStart", ncclGroupEnd());
    works();
}

static void operations(void) {
    ncclRedOp_t op;
    double third = 1.0 / 3, half = 0.5;
    RETURNS(USAGE, "ncclScalarDevice", ncclRedOpCreatePreMulSum(&op, &half, ncclDouble, ncclScalarDevice, comm));
    RETURNS(ARGUMENT, "scalar is NULL", ncclRedOpCreatePreMulSum(&op, NULL, ncclDouble, ncclScalarHostImmediate, comm));
    RETURNS(USAGE, "rounded", ncclRedOpCreatePreMulSum(&op, &third, ncclDouble, ncclScalarHostImmediate, comm));
    NCCL(ncclRedOpCreatePreMulSum(&op, &half, ncclDouble, ncclScalarHostImmediate, comm));
    RETURNS(ARGUMENT, "was created for type 8", reduce(vector, vector, COUNT, ncclFloat, op, comm));
    NCCL(ncclRedOpDestroy(op, comm));
    RETURNS(ARGUMENT, "is no operation", ncclRedOpDestroy(op, comm));
    RETURNS(ARGUMENT, "is no ncclRedOp_t", reduce(vector, vector, COUNT, ncclDouble, op, comm));
    RETURNS(ARGUMENT, "is no operation", ncclRedOpDestroy(ncclSum, comm));
}

static void states(void) {
    ncclResult_t state;
    ncclComm_t part;
    int number, excluded = 0;
    RETURNS(ARGUMENT, "asyncError is NULL", ncclCommGetAsyncError(comm, NULL));
    RETURNS(ARGUMENT, "is NULL", ncclCommGetAsyncError(NULL, &state));
    RETURNS(ARGUMENT, "count is NULL", ncclCommCount(comm, NULL));
    RETURNS(ARGUMENT, "newcomm is NULL", ncclCommSplit(comm, 0, 0, NULL, NULL));
    RETURNS(ARGUMENT, "color is -2", ncclCommSplit(comm, -2, 0, &part, NULL));
    RETURNS(ARGUMENT, "excludeRanksList", ncclCommShrink(comm, NULL, 1, &part, NULL, NCCL_SHRINK_DEFAULT));
    RETURNS(ARGUMENT, "excludes itself", ncclCommShrink(comm, &excluded, 1, &part, NULL, NCCL_SHRINK_DEFAULT));
    RETURNS(ARGUMENT, "shrinkFlags is 8", ncclCommShrink(comm, &excluded, 0, &part, NULL, 8));
    RETURNS(USAGE, "not supported by flexring", ncclCommRevoke(comm, 0));
    RETURNS(USAGE, "windows", ncclCommWindowRegister(comm, vector, 4, (ncclWindow_t *)&part, 0));
    if (!has_gpu) {
        void *memory;
        RETURNS(USAGE, "has no GPU", ncclCommCuDevice(comm, &number));
        RETURNS(ncclUnhandledCudaError, "there is no CUDA driver", ncclMemAlloc(&memory, 8));
    }
    NCCL(ncclCommGetAsyncError(comm, &state));
    CHECK(state == ncclSuccess);
    NCCL(ncclGetVersion(&number));
    CHECK(number == NCCL_VERSION_CODE);
    works();

    NCCL(ncclCommDestroy(comm));
    RETURNS(ARGUMENT, "was destroyed", reduce(vector, vector, COUNT, ncclFloat, ncclSum, comm));
    RETURNS(ARGUMENT, "was destroyed", ncclCommDestroy(comm));
    RETURNS(ARGUMENT, "was destroyed", ncclCommAbort(comm));
    RETURNS(ARGUMENT, "was destroyed", ncclCommCount(comm, &number));
    NCCL(ncclCommDestroy(NULL));
}

int main(int count, char **arguments) {
    alarm(60);
    has_gpu = count < 2 || strcmp(arguments[1], "none") != 0;
    static float of_host[COUNT];
    for (int i = 0; i < COUNT; i++) of_host[i] = 5;
    vector = of_host;
    if (has_gpu) {
        use_gpu(0);
        stream = new_stream();
        vector = on_gpu(COUNT, 5, stream);
    }
    ncclUniqueId id;
    NCCL(ncclGetUniqueId(&id));
    NCCL(ncclCommInitRank(&comm, 1, id, 0));
    making();
    calls();
    groups();
    operations();
    states();
    puts("errors: ok");
    return 0;
}
