"""The loop of allreduce.c over Gloo through torch.distributed, with the same lines of JSON.

    gloo_loop.py RANKS|NAMESPACE... -- f32|bf16 SECONDS MOST BYTES...

Starts that many ranks, or one in each of the network namespaces. They are forked from one process that has loaded torch, because
loading it takes longer than a few all-reduces, and exit without unloading it. MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME are
those of torch.distributed.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback

import torch
import torch.distributed as dist

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1


def timed(tensor):
    """Seconds of one call after a barrier."""
    dist.barrier()
    begun = time.perf_counter()
    dist.all_reduce(tensor)
    return time.perf_counter() - begun


def slowest(times):
    """The times of the slowest rank of each call."""
    times = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def measure(dtype, size, limit, most):
    rank, world = dist.get_rank(), dist.get_world_size()
    element = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    pattern = torch.arange(size // torch.tensor([], dtype=element).element_size(), dtype=torch.int32) % 7
    tensor = (pattern + rank).to(element)
    first = timed(tensor)
    wrong = bool((tensor != pattern * world + world * (world - 1) // 2).any())
    [first, wrong] = slowest([first, float(wrong)])
    # Sum zeros, so that repeated sums do not overflow.
    tensor.zero_()
    [second] = slowest([timed(tensor)])
    iterations = max(3, min(most, int(limit / max(second, 1e-7))))
    times = slowest([timed(tensor) for _ in range(iterations)])
    if rank == 0:
        result = {"library": f"Gloo of torch {torch.__version__}", "ranks": world, "bytes": size, "dtype": dtype, "memory": "heap",
                  "wrong": int(wrong), "first_us": round(1e6 * first, 2),
                  "times_us": [round(1e6 * seconds, 2) for seconds in times]}
        print(json.dumps(result), flush=True)


def run_rank(rank, namespace, arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if namespace and libc.setns(os.open(f"/run/netns/{namespace}", os.O_RDONLY), CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.environ["RANK"] = str(rank)
    dtype, limit, most, sizes = arguments[0], float(arguments[1]), int(arguments[2]), [int(size) for size in arguments[3:]]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for size in sizes:
        measure(dtype, size, limit, most)
    sys.stdout.flush()
    # Rank 0 serves the others' barrier.
    dist.barrier()


def main():
    split = sys.argv.index("--")
    where, arguments = sys.argv[1:split], sys.argv[split + 1:]
    namespaces = [None] * int(where[0]) if where[0].isdigit() else where
    os.environ["WORLD_SIZE"] = str(len(namespaces))
    running = set()
    for rank, namespace in enumerate(namespaces):
        if (pid := os.fork()) == 0:
            try:
                run_rank(rank, namespace, arguments)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        running.add(pid)
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status:
            for other in running:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


main()
