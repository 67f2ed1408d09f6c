// A libibverbs whose adapters are in memory: reliable queue pairs between processes of one machine, and what real adapters
// do that Soft-RoCE never does. Its devices are those of /sys/class/infiniband, which a test mounts.
//
// FAKE_VERBS names a folder that the processes of a network share. FAKE_VERBS_ADAPTERS says how the adapters of this
// process differ from good ones: `[DEVICE:]WHAT[=NUMBER]`, separated by white space.
//
//   lose=N          writes of N bytes or more get no acknowledgement: they fail with `status` after `delay` ms
//   mtu=N           the same for longer writes than N bytes over queue pairs whose path MTU is above N
//   spine_mtu=N     the same between adapters whose names end with different numbers
//   after=N         these losses begin when the adapter has carried N bytes
//   status=N        what lost writes end with (12: retries exceeded); `delay=N` the time until then, 100 ms
//   network=N       only devices of one number reach each other (0)
//   no_route        the kernel finds no way to those of others, as on Ethernet
//   cut_after=N     the cable is cut when the adapter has carried N bytes: its port goes down, and reads of its own end there, too
//   back_after=N    it is whole again N ms later, and the kernel lists the port's GIDs two places further on
//   no_flush        the error state flushes nothing
//   einval          posting in the error state is refused
//   no_length       received writes with immediate data have no byte_len
//   relaxed_only    memory is registered with relaxed ordering only
//   no_gpu          memory of GPUs is registered and cannot be accessed
//   no_dmabuf       the driver imports no DMA-BUFs
//   data_direct     the adapter has Data Direct, by which alone it reaches memory of GPUs; 2: registering for it is refused
//   posted=N        writes to memory of GPUs arrive up to N ms after their completions, or when this adapter reads there
//   min_inline=N    queue pairs with less inline data are refused, too, to see that it is used
//   max_inline=N  max_cqe=N  max_qp=N  max_qp_wr=N      limits; a queue pair with more inline data is refused
//   no_rc           there are no reliable queue pairs
//   fails_after=N   the device fails after N bytes
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#undef ibv_query_port
#undef ibv_reg_mr

// Bits of the keys of GPU memory, and of memory that cannot be accessed.
#define OF_GPU (1u << 31)
#define FORBIDDEN (1u << 30)

enum { QPS = 2048, CQS = 256, ENTRIES = 16384, DEPTH = 512, DEVICES = 16, GPU_REGIONS = 1024, POSTED = 256, LONGEST_POSTED = 128 << 10 };

struct completion { uint64_t id; uint32_t status, opcode, bytes, immediate, qp; };
struct queue { int process; atomic_int armed; uint32_t head, tail, size; struct completion entries[ENTRIES]; };
struct request { uint64_t id; uint32_t opcode; };
struct pair {
    int process, network, number, device, posted_ms;
    enum ibv_qp_state state;
    uint32_t cq, peer, mtu;
    uint32_t received, posted;
    uint64_t receives[DEPTH];
    // Requests behind one that was lost, which is the first of them.
    uint32_t done, sent;
    struct request sends[DEPTH];
    uint64_t fails_at;
    uint32_t status;
};
// Shared by all processes of a network. A file of zeros is a network without traffic.
struct gpu_region { uint64_t address, on_host; };
// A write by a device of this process that has not arrived. Those that have are of process 0.
struct posted_write { int process, device; uint64_t due, on_host, length; char bytes[LONGEST_POSTED]; };
struct network {
    atomic_int owner;
    uint32_t keys, first_posted, end_posted;
    struct gpu_region gpu_regions[GPU_REGIONS];
    struct queue queues[CQS];
    struct pair pairs[QPS];
    struct posted_write posted[POSTED];
};

struct adapter {
    uint64_t number, no_route, cut_after, cut_at, back_after, lose, mtu, spine_mtu, after, status, delay, network, no_flush, einval, no_length, relaxed_only, no_gpu, no_dmabuf, data_direct, posted, min_inline, max_inline, max_cqe, max_qp,
        max_qp_wr, no_rc, fails_after, carried, qps;
};
struct my_device { struct ibv_device device; struct adapter adapter; };
struct my_context { struct ibv_context context; struct adapter *adapter; int event; };
struct my_cq { struct ibv_cq cq; uint32_t number; };
struct my_qp { struct ibv_qp qp; struct adapter *adapter; uint32_t number; };

static void *watch(void *);

static struct network *net;
static const char *folder;
static struct my_device devices[DEVICES];
static int device_count;

static uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000ull + now.tv_nsec / 1000000;
}

// A process that was killed does not keep the lock.
static void lock(void) {
    for (int tries = 0;; tries++) {
        int owner = 0;
        if (atomic_compare_exchange_weak(&net->owner, &owner, getpid())) return;
        if (tries % 1000 == 999 && owner && kill(owner, 0) && errno == ESRCH)
            atomic_compare_exchange_strong(&net->owner, &owner, 0);
        if (tries > 20) sched_yield();
    }
}

static void unlock(void) { atomic_store(&net->owner, 0); }

static int is_free(int process) { return !process || (kill(process, 0) && errno == ESRCH); }

static void read_text(char *text, size_t size, const char *format, const char *device, int port) {
    char path[256];
    snprintf(path, sizeof path, format, device, port);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? 0 : read(file, text, size - 1);
    if (file >= 0) close(file);
    text[length < 0 ? 0 : length] = 0;
}

static void describe(struct adapter *adapter) {
    *adapter = (struct adapter){.status = IBV_WC_RETRY_EXC_ERR, .delay = 100, .max_inline = 1024, .max_cqe = ENTRIES,
                                .max_qp = QPS, .max_qp_wr = DEPTH, .lose = UINT64_MAX, .mtu = UINT64_MAX, .spine_mtu = UINT64_MAX, .fails_after = UINT64_MAX, .cut_after = UINT64_MAX, .back_after = UINT64_MAX};
}

static void configure(struct adapter *adapter, const char *word) {
    const struct { const char *name; uint64_t *place; } fields[] = {
        {"lose", &adapter->lose}, {"mtu", &adapter->mtu}, {"spine_mtu", &adapter->spine_mtu}, {"after", &adapter->after}, {"status", &adapter->status}, {"delay", &adapter->delay},
        {"network", &adapter->network}, {"no_route", &adapter->no_route}, {"cut_after", &adapter->cut_after}, {"back_after", &adapter->back_after}, {"no_flush", &adapter->no_flush}, {"einval", &adapter->einval},
        {"no_length", &adapter->no_length}, {"relaxed_only", &adapter->relaxed_only}, {"no_gpu", &adapter->no_gpu},
        {"no_dmabuf", &adapter->no_dmabuf}, {"data_direct", &adapter->data_direct}, {"posted", &adapter->posted}, {"min_inline", &adapter->min_inline}, {"max_inline", &adapter->max_inline},
        {"max_cqe", &adapter->max_cqe}, {"max_qp", &adapter->max_qp}, {"max_qp_wr", &adapter->max_qp_wr},
        {"no_rc", &adapter->no_rc}, {"fails_after", &adapter->fails_after}};
    size_t length = strcspn(word, "=");
    for (size_t at = 0; at < sizeof fields / sizeof *fields; at++)
        if (strlen(fields[at].name) == length && !strncmp(fields[at].name, word, length)) {
            *fields[at].place = word[length] ? strtoull(word + length + 1, NULL, 10) : 1;
            return;
        }
    fprintf(stderr, "fake libibverbs: FAKE_VERBS_ADAPTERS has %s\n", word);
    abort();
}

static void start(void) {
    if (net) return;
    folder = getenv("FAKE_VERBS");
    char path[256];
    snprintf(path, sizeof path, "%s/network", folder ? folder : "");
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (!folder || file < 0 || ftruncate(file, sizeof(struct network))) {
        fprintf(stderr, "fake libibverbs: FAKE_VERBS names no folder\n");
        abort();
    }
    net = mmap(NULL, sizeof(struct network), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    DIR *list = opendir("/sys/class/infiniband");
    for (struct dirent *entry; list && (entry = readdir(list)) && device_count < DEVICES;) {
        if (entry->d_name[0] == '.') continue;
        struct my_device *device = &devices[device_count++];
        strncpy(device->device.name, entry->d_name, sizeof device->device.name - 1);
        device->device.node_type = IBV_NODE_CA;
        describe(&device->adapter);
        device->adapter.number = entry->d_name[strlen(entry->d_name) - 1] - '0';
        char *words = strdup(getenv("FAKE_VERBS_ADAPTERS") ? getenv("FAKE_VERBS_ADAPTERS") : ""), *rest = words;
        for (char *word; (word = strtok_r(rest, " \n", &rest));) {
            char *colon = strchr(word, ':');
            size_t length = colon ? (size_t)(colon - word) : 0;
            if (colon && (strlen(device->device.name) != length || strncmp(device->device.name, word, length))) continue;
            configure(&device->adapter, colon ? colon + 1 : word);
        }
        free(words);
    }
    if (list) closedir(list);
    // Where processes may only access their children, others of the network may access this one.
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    pthread_t thread;
    if (pthread_create(&thread, NULL, watch, NULL)) abort();
}

// Wakes who waits for a completion queue. A FIFO for each, as they belong to different processes.
static int fifo(uint32_t number) {
    char path[256];
    snprintf(path, sizeof path, "%s/queue.%u", folder, number);
    mkfifo(path, 0666);
    return open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
}

static void complete(uint32_t number, struct completion completion) {
    struct queue *queue = &net->queues[number];
    if (queue->tail - queue->head >= queue->size) {
        fprintf(stderr, "fake libibverbs: completion queue %u overran\n", number);
        abort();
    }
    queue->entries[queue->tail++ % ENTRIES] = completion;
    if (atomic_exchange(&queue->armed, 0)) {
        static int fifos[CQS];
        if (!fifos[number]) fifos[number] = fifo(number);
        if (write(fifos[number], "", 1) < 0) return;
    }
}

static void flush(uint32_t number, const struct adapter *adapter) {
    struct pair *pair = &net->pairs[number];
    pair->state = IBV_QPS_ERR;
    pair->fails_at = 0;
    if (adapter->no_flush) return;
    for (; pair->done != pair->sent; pair->done++) {
        struct request *request = &pair->sends[pair->done % DEPTH];
        complete(pair->cq, (struct completion){request->id, IBV_WC_WR_FLUSH_ERR, request->opcode, 0, 0, number});
    }
    for (; pair->received != pair->posted; pair->received++)
        complete(pair->cq, (struct completion){pair->receives[pair->received % DEPTH], IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV, 0, 0, number});
}

static struct my_qp *mine[QPS];

// Lets writes arrive that were posted by a device, or whose time is over.
static void settle(int process, int device, uint64_t now) {
    for (uint32_t at = net->first_posted; at != net->end_posted; at++) {
        struct posted_write *write = &net->posted[at % POSTED];
        if (write->process && ((write->process == process && write->device == device) || write->due <= now)) {
            struct iovec here = {write->bytes, write->length}, there = {(void *)write->on_host, write->length};
            process_vm_writev(write->process, &here, 1, &there, 1, 0);
            write->process = 0;
        }
        if (!write->process && at == net->first_posted) net->first_posted++;
    }
}

// Ends the writes that were lost and whose time is over.
static void give_up(void) {
    static uint64_t last;
    uint64_t now = now_ms();
    if (now == last) return;
    last = now;
    settle(0, 0, now);
    for (uint32_t number = 1; number < QPS; number++) {
        struct pair *pair = &net->pairs[number];
        if (!mine[number] || !pair->fails_at || pair->fails_at > now) continue;
        struct request *request = &pair->sends[pair->done++ % DEPTH];
        complete(pair->cq, (struct completion){request->id, pair->status, request->opcode, 0, 0, number});
        flush(number, mine[number]->adapter);
    }
}

static void move_gids(const char *device) {
    const char *folders[] = {"gids", "gid_attrs/types", "gid_attrs/ndevs"};
    for (int at = 0; at < 3; at++)
        for (int index = 13; index >= 0; index--) {
            char from[256], to[256];
            snprintf(from, sizeof from, "/sys/class/infiniband/%s/ports/1/%s/%d", device, folders[at], index);
            snprintf(to, sizeof to, "/sys/class/infiniband/%s/ports/1/%s/%d", device, folders[at], index + 2);
            rename(from, to);
        }
}

static void repair_cables(void) {
    for (int at = 0; at < device_count; at++) {
        struct adapter *adapter = &devices[at].adapter;
        if (!adapter->cut_at || now_ms() - adapter->cut_at < adapter->back_after) continue;
        move_gids(devices[at].device.name);
        adapter->cut_at = 0;
    }
}

// A process that sleeps is woken in time.
static void *watch(void *unused) {
    for (;;) {
        usleep(20000);
        lock();
        give_up();
        repair_cables();
        unlock();
    }
    return unused;
}

static int poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *completions) {
    lock();
    give_up();
    struct queue *queue = &net->queues[((struct my_cq *)cq)->number];
    int count = 0;
    for (; count < most && queue->head != queue->tail; count++) {
        struct completion *it = &queue->entries[queue->head++ % ENTRIES];
        // What is not valid after a failure is not zero on adapters.
        completions[count] = (struct ibv_wc){.wr_id = it->id, .status = it->status, .opcode = it->opcode, .byte_len = it->bytes,
                                             .imm_data = it->immediate, .qp_num = it->qp, .vendor_err = it->status ? 0x51 : 0};
    }
    unlock();
    return count;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited) {
    (void)solicited;
    atomic_store(&net->queues[((struct my_cq *)cq)->number].armed, 1);
    return 0;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *request, struct ibv_recv_wr **bad) {
    struct my_qp *my = (struct my_qp *)qp;
    struct pair *pair = &net->pairs[my->number];
    int result = 0;
    lock();
    for (; request && !result; request = request->next) {
        int broken = pair->state == IBV_QPS_ERR;
        if ((broken && my->adapter->einval) || pair->posted - pair->received >= DEPTH) {
            *bad = request;
            result = broken ? EINVAL : ENOMEM;
        } else if (!broken) {
            pair->receives[pair->posted++ % DEPTH] = request->wr_id;
        } else if (!my->adapter->no_flush) {
            complete(pair->cq, (struct completion){request->wr_id, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV, 0, 0, my->number});
        }
    }
    unlock();
    return result;
}

// As drivers count what gets no acknowledgement, where a test has given the device this counter.
static void count_loss(const char *device) {
    char path[256], text[32];
    snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/1/hw_counters/local_ack_timeout_err", device);
    int file = open(path, O_RDWR | O_CLOEXEC);
    ssize_t length = file < 0 ? 0 : pread(file, text, sizeof text - 1, 0);
    text[length < 0 ? 0 : length] = 0;
    if (file >= 0 && dprintf(file, "%llu\n", strtoull(text, NULL, 10) + 1) < 0) abort();
    if (file >= 0) close(file);
}

static void lose(struct pair *pair, struct request request, uint64_t delay, uint32_t status) {
    pair->sends[pair->sent++ % DEPTH] = request;
    if (!pair->fails_at) {
        pair->fails_at = now_ms() + delay + 1;
        pair->status = status;
    }
}

// Where the host finds what a request names by this address and key: the simulated driver keeps GPU memory elsewhere.
static void *host_address(uint64_t address, uint32_t key) {
    if (key & OF_GPU) {
        const struct gpu_region *region = &net->gpu_regions[key % GPU_REGIONS];
        address = address - region->address + region->on_host;
    }
    return (void *)address;
}

// Completes a write before it arrives.
static ssize_t post_write(const struct pair *to, struct iovec here, struct iovec there) {
    while (net->end_posted - net->first_posted == POSTED) {
        const struct posted_write *oldest = &net->posted[net->first_posted % POSTED];
        settle(oldest->process, oldest->device, 0);
    }
    struct posted_write *write = &net->posted[net->end_posted++ % POSTED];
    if (here.iov_len > LONGEST_POSTED) abort();
    write->process = to->process;
    write->device = to->device;
    write->due = now_ms() + to->posted_ms;
    write->on_host = (uint64_t)there.iov_base;
    write->length = here.iov_len;
    struct iovec copy = {write->bytes, here.iov_len};
    return process_vm_readv(getpid(), &copy, 1, &here, 1, 0);
}

// Carries out one request. A later one waits for an earlier one that was lost.
static void carry(struct my_qp *my, struct pair *pair, struct ibv_send_wr *wr) {
    struct adapter *adapter = my->adapter;
    struct request request = {wr->wr_id, wr->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE};
    struct pair *peer = &net->pairs[pair->peer];
    uint64_t length = 0;
    for (int at = 0; at < wr->num_sge; at++) length += wr->sg_list[at].length;
    uint64_t mtu = peer->number == pair->number || adapter->mtu < adapter->spine_mtu ? adapter->mtu : adapter->spine_mtu;
    int is_lost = adapter->carried >= adapter->after && (length >= adapter->lose || (length > mtu && pair->mtu > mtu));
    is_lost |= adapter->cut_at;
    int is_there = !is_free(peer->process) && peer->network == pair->network &&
                   (peer->state == IBV_QPS_RTR || peer->state == IBV_QPS_RTS);
    if (is_lost) count_loss(my->qp.context->device->name);
    if (pair->fails_at || is_lost || !is_there)
        return lose(pair, request, adapter->delay, is_lost ? adapter->status : IBV_WC_RETRY_EXC_ERR);
    // Packets of another length than the other end expects are refused.
    if (pair->mtu != peer->mtu && length > 256) return lose(pair, request, 0, IBV_WC_REM_INV_REQ_ERR);
    if (wr->num_sge && wr->sg_list->length && wr->sg_list->lkey & FORBIDDEN) return lose(pair, request, 0, IBV_WC_LOC_PROT_ERR);
    if (wr->wr.rdma.rkey & FORBIDDEN) return lose(pair, request, 0, IBV_WC_REM_OP_ERR);
    uint64_t address = wr->wr.rdma.remote_addr;
    // What a device reads comes after what it has written, and not after what others have.
    if (wr->num_sge && wr->sg_list->lkey & OF_GPU) settle(pair->process, pair->device, now_ms());
    if (wr->wr.rdma.rkey & OF_GPU && request.opcode == IBV_WC_RDMA_READ) settle(peer->process, peer->device, now_ms());
    int is_posted = peer->posted_ms && wr->wr.rdma.rkey & OF_GPU && request.opcode == IBV_WC_RDMA_WRITE;
    for (int at = 0; at < wr->num_sge; at++) {
        size_t part = wr->sg_list[at].length;
        struct iovec here = {host_address(wr->sg_list[at].addr, wr->sg_list[at].lkey), part};
        struct iovec there = {host_address(address, wr->wr.rdma.rkey), part};
        ssize_t moved = part == 0                                ? 0
                        : is_posted                          ? post_write(peer, here, there)
                        : request.opcode == IBV_WC_RDMA_READ ? process_vm_readv(peer->process, &here, 1, &there, 1, 0)
                                                             : process_vm_writev(peer->process, &here, 1, &there, 1, 0);
        if (moved != (ssize_t)part) return lose(pair, request, 0, IBV_WC_REM_ACCESS_ERR);
        address += part;
    }
    if (wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
        if (peer->received == peer->posted) return lose(pair, request, adapter->delay, IBV_WC_RNR_RETRY_EXC_ERR);
        uint32_t bytes = adapter->no_length ? 0 : length;
        complete(peer->cq, (struct completion){peer->receives[peer->received++ % DEPTH], 0, IBV_WC_RECV_RDMA_WITH_IMM, bytes,
                                               wr->imm_data, pair->peer});
    }
    if (wr->send_flags & IBV_SEND_SIGNALED)
        complete(pair->cq, (struct completion){wr->wr_id, 0, request.opcode, length, 0, my->number});
    adapter->carried += length;
}

static void report(struct ibv_context *context, char event) {
    if (write(((struct my_context *)context)->event, &event, 1) < 0) abort();
}

// The device fails, or its cable is cut, when it has carried enough.
static void fail(struct ibv_context *context, struct adapter *adapter) {
    int fails = adapter->carried >= adapter->fails_after, is_cut = adapter->carried >= adapter->cut_after;
    for (uint32_t number = 1; (fails || is_cut) && number < QPS; number++) {
        if (!mine[number] || mine[number]->adapter != adapter) continue;
        if (fails) flush(number, adapter);
        // Nothing reaches what is in no network.
        if (is_cut) net->pairs[number].network = -1;
    }
    if (fails) {
        adapter->fails_after = UINT64_MAX;
        report(context, IBV_EVENT_DEVICE_FATAL);
    }
    if (is_cut) {
        adapter->cut_at = now_ms();
        adapter->cut_after = UINT64_MAX;
        report(context, IBV_EVENT_PORT_ERR);
    }
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *request, struct ibv_send_wr **bad) {
    struct my_qp *my = (struct my_qp *)qp;
    struct pair *pair = &net->pairs[my->number];
    int result = 0;
    lock();
    for (; request && !result; request = request->next) {
        int broken = pair->state == IBV_QPS_ERR;
        if (broken && !my->adapter->einval) {
            if (!my->adapter->no_flush)
                complete(pair->cq, (struct completion){request->wr_id, IBV_WC_WR_FLUSH_ERR, IBV_WC_RDMA_WRITE, 0, 0, my->number});
        } else if (pair->state != IBV_QPS_RTS || pair->sent - pair->done >= DEPTH) {
            *bad = request;
            result = pair->state != IBV_QPS_RTS ? EINVAL : ENOMEM;
        } else {
            carry(my, pair, request);
        }
    }
    fail(qp->context, my->adapter);
    unlock();
    return result;
}

struct ibv_device **ibv_get_device_list(int *count) {
    start();
    struct ibv_device **list = calloc(DEVICES + 1, sizeof *list);
    for (int at = 0; at < device_count; at++) list[at] = &devices[at].device;
    if (count) *count = device_count;
    return list;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }

const char *ibv_get_device_name(struct ibv_device *device) { return device->name; }

struct ibv_context *ibv_open_device(struct ibv_device *device) {
    struct my_context *my = calloc(1, sizeof *my);
    int ends[2];
    if (pipe2(ends, O_CLOEXEC)) return NULL;
    my->adapter = &((struct my_device *)device)->adapter;
    my->event = ends[1];
    my->context = (struct ibv_context){.device = device, .async_fd = ends[0], .cmd_fd = -1, .num_comp_vectors = 1,
                                       .ops = {.poll_cq = poll_cq, .req_notify_cq = req_notify_cq, .post_send = post_send,
                                               .post_recv = post_recv}};
    return &my->context;
}

int ibv_close_device(struct ibv_context *context) {
    close(context->async_fd);
    close(((struct my_context *)context)->event);
    free(context);
    return 0;
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event) {
    char byte;
    if (read(context->async_fd, &byte, 1) != 1) return -1;
    *event = (struct ibv_async_event){.element.port_num = 1, .event_type = byte};
    return 0;
}

void ibv_ack_async_event(struct ibv_async_event *event) { (void)event; }

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attributes) {
    struct adapter *adapter = ((struct my_context *)context)->adapter;
    *attributes = (struct ibv_device_attr){.max_mr_size = UINT64_MAX, .max_qp = adapter->max_qp, .max_qp_wr = adapter->max_qp_wr,
                                           .max_sge = 4, .max_cq = CQS, .max_cqe = adapter->max_cqe, .max_mr = 1 << 20,
                                           .max_pd = 1024, .max_qp_rd_atom = 16, .phys_port_cnt = 1};
    return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *compatible) {
    struct ibv_port_attr *attributes = (struct ibv_port_attr *)compatible;
    const char *device = context->device->name;
    char state[32], layer[32], lid[32];
    read_text(state, sizeof state, "/sys/class/infiniband/%s/ports/%d/state", device, port);
    read_text(layer, sizeof layer, "/sys/class/infiniband/%s/ports/%d/link_layer", device, port);
    read_text(lid, sizeof lid, "/sys/class/infiniband/%s/ports/%d/lid", device, port);
    attributes->state = ((struct my_context *)context)->adapter->cut_at ? IBV_PORT_DOWN : atoi(state);
    attributes->max_mtu = attributes->active_mtu = IBV_MTU_4096;
    attributes->gid_tbl_len = 16;
    attributes->max_msg_sz = 1 << 30;
    attributes->pkey_tbl_len = 2;
    attributes->lid = strtoul(lid, NULL, 16);
    attributes->link_layer = strncmp(layer, "Ethernet", 8) ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET;
    return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
    struct ibv_pd *pd = calloc(1, sizeof *pd);
    pd->context = context;
    return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd) {
    free(pd);
    return 0;
}

// Where the host finds this memory, if it is a simulated GPU's.
static uint64_t of_gpu(void *address) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int (*find)(void **, uint64_t) = cuda ? (int (*)(void **, uint64_t))dlsym(cuda, "cuSimulatedHostAddress") : NULL;
    void *found = NULL;
    return find && !find(&found, (uint64_t)address) ? (uint64_t)found : 0;
}

static int device_of(const struct ibv_context *context) { return (struct my_device *)context->device - devices; }

// A region, of memory of a GPU if the host finds that elsewhere.
static struct ibv_mr *region(struct ibv_pd *pd, void *address, size_t length, uint64_t on_host, int is_forbidden) {
    struct ibv_mr *mr = calloc(1, sizeof *mr);
    uint32_t key = 1 + __atomic_fetch_add(&net->keys, 1, __ATOMIC_RELAXED);
    if (on_host) {
        net->gpu_regions[key % GPU_REGIONS] = (struct gpu_region){(uint64_t)address, on_host};
        key |= is_forbidden ? OF_GPU | FORBIDDEN : OF_GPU;
    }
    *mr = (struct ibv_mr){.context = pd->context, .pd = pd, .addr = address, .length = length, .lkey = key, .rkey = key};
    return mr;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access) {
    if (((struct my_context *)pd->context)->adapter->relaxed_only && !(access & IBV_ACCESS_RELAXED_ORDERING)) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    const struct adapter *adapter = ((struct my_context *)pd->context)->adapter;
    return region(pd, address, length, of_gpu(address), adapter->no_gpu || adapter->data_direct);
}

// A DMA-BUF of the simulated driver says where the host finds its memory. `is_direct` is a call of libmlx5's.
struct ibv_mr *fake_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t address, int fd, int access, int is_direct) {
    const struct adapter *adapter = ((struct my_context *)pd->context)->adapter;
    struct { uint64_t on_host, length, is_over_pci; } buffer;
    errno = EOPNOTSUPP;
    if (adapter->no_dmabuf || (adapter->relaxed_only && !(access & IBV_ACCESS_RELAXED_ORDERING))) return NULL;
    if (is_direct && adapter->data_direct != 1) return NULL;
    errno = EBADF;
    if (pread(fd, &buffer, sizeof buffer, 0) != sizeof buffer) return NULL;
    errno = EINVAL;
    if (offset + length > buffer.length) return NULL;
    int is_forbidden = adapter->no_gpu || (adapter->data_direct == 1 && !(is_direct && buffer.is_over_pci));
    return region(pd, (void *)address, length, buffer.on_host + offset, is_forbidden);
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t address, int fd, int access) {
    return fake_reg_dmabuf_mr(pd, offset, length, address, fd, access, 0);
}

int fake_has_data_direct(struct ibv_context *context) { return ((struct my_context *)context)->adapter->data_direct != 0; }

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned access) {
    (void)iova;
    return ibv_reg_mr(pd, address, length, access);
}

int ibv_dereg_mr(struct ibv_mr *mr) {
    free(mr);
    return 0;
}

// A channel has one completion queue, of the same number.
struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context) {
    struct ibv_comp_channel *channel = calloc(1, sizeof *channel);
    uint32_t number = 0;
    lock();
    while (number < CQS && !is_free(net->queues[number].process)) number++;
    if (number < CQS) net->queues[number].process = getpid();
    unlock();
    if (number == CQS) abort();
    *channel = (struct ibv_comp_channel){.context = context, .fd = fifo(number), .refcnt = number};
    return channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel) {
    net->queues[channel->refcnt].process = 0;
    close(channel->fd);
    free(channel);
    return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *cookie, struct ibv_comp_channel *channel, int vector) {
    (void)vector;
    if ((uint64_t)entries > ((struct my_context *)context)->adapter->max_cqe) {
        errno = EINVAL;
        return NULL;
    }
    struct my_cq *my = calloc(1, sizeof *my);
    my->cq = (struct ibv_cq){.context = context, .channel = channel, .cq_context = cookie, .cqe = entries};
    my->number = channel->refcnt;
    struct queue *queue = &net->queues[my->number];
    queue->head = queue->tail = 0;
    queue->size = entries;
    return &my->cq;
}

int ibv_destroy_cq(struct ibv_cq *cq) {
    free(cq);
    return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cookie) {
    (void)cq, (void)cookie;
    char byte;
    return read(channel->fd, &byte, 1) == 1 ? 0 : -1;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned events) { (void)cq, (void)events; }

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attributes) {
    struct adapter *adapter = ((struct my_context *)pd->context)->adapter;
    struct ibv_qp_cap *cap = &attributes->cap;
    errno = adapter->no_rc ? EOPNOTSUPP : adapter->qps >= adapter->max_qp ? ENOMEM : EINVAL;
    if (adapter->no_rc || adapter->qps >= adapter->max_qp || cap->max_inline_data < adapter->min_inline || cap->max_inline_data > adapter->max_inline ||
        cap->max_send_wr > adapter->max_qp_wr || cap->max_recv_wr > adapter->max_qp_wr)
        return NULL;
    struct my_qp *my = calloc(1, sizeof *my);
    lock();
    for (my->number = 1; my->number < QPS && !is_free(net->pairs[my->number].process);) my->number++;
    if (my->number == QPS) abort();
    net->pairs[my->number] = (struct pair){.process = getpid(), .network = adapter->cut_at ? -1 : (int)adapter->network, .number = adapter->number, .state = IBV_QPS_RESET,
                                           .device = device_of(pd->context), .posted_ms = adapter->posted,
                                           .cq = ((struct my_cq *)attributes->send_cq)->number};
    mine[my->number] = my;
    adapter->qps++;
    unlock();
    my->adapter = adapter;
    my->qp = (struct ibv_qp){.context = pd->context, .pd = pd, .qp_num = my->number, .qp_type = attributes->qp_type};
    return &my->qp;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask) {
    struct my_qp *my = (struct my_qp *)qp;
    struct pair *pair = &net->pairs[my->number];
    if (my->adapter->no_route && mask & IBV_QP_DEST_QPN && net->pairs[attributes->dest_qp_num % QPS].network != pair->network)
        return ETIMEDOUT;
    // The kernel looks for the entry of the GID table.
    char layer[32], gid[64];
    read_text(layer, sizeof layer, "/sys/class/infiniband/%s/ports/%d/link_layer", qp->context->device->name, 1);
    if (mask & IBV_QP_AV && !strncmp(layer, "Ethernet", 8)) {
        char path[128];
        snprintf(path, sizeof path, "/sys/class/infiniband/%%s/ports/%%d/gids/%d", attributes->ah_attr.grh.sgid_index);
        read_text(gid, sizeof gid, path, qp->context->device->name, 1);
        if (!*gid) return EINVAL;
    }
    lock();
    if (mask & IBV_QP_DEST_QPN) pair->peer = attributes->dest_qp_num % QPS;
    if (mask & IBV_QP_PATH_MTU) pair->mtu = 128u << attributes->path_mtu;
    if (attributes->qp_state == IBV_QPS_ERR)
        flush(my->number, my->adapter);
    else
        pair->state = attributes->qp_state;
    if (attributes->qp_state == IBV_QPS_RESET) pair->received = pair->posted = pair->done = pair->sent = pair->fails_at = 0;
    qp->state = attributes->qp_state;
    unlock();
    return 0;
}

int ibv_destroy_qp(struct ibv_qp *qp) {
    struct my_qp *my = (struct my_qp *)qp;
    lock();
    net->pairs[my->number].process = 0;
    mine[my->number] = NULL;
    my->adapter->qps--;
    unlock();
    free(my);
    return 0;
}

int ibv_fork_init(void) { return 0; }

enum ibv_fork_status ibv_is_fork_initialized(void) { return IBV_FORK_UNNEEDED; }
