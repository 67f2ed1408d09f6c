"""The loop of allreduce.c over Gloo through torch.distributed, with the same lines of JSON.

    RANK=R WORLD_SIZE=N MASTER_ADDR=A MASTER_PORT=P gloo_loop.py heap SECONDS MOST BYTES...
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist


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


def measure(size, limit, most):
    rank, world = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(size // 4, dtype=torch.int32) % 7
    tensor = (pattern + rank).float()
    first = timed(tensor)
    wrong = bool((tensor != pattern * world + world * (world - 1) // 2).any())
    [first, wrong] = slowest([first, float(wrong)])
    # Sum zeros, so that repeated sums do not overflow.
    tensor.zero_()
    timed(tensor)
    [third] = slowest([timed(tensor)])
    iterations = max(3, min(most, int(limit / max(third, 1e-7))))
    times = slowest([timed(tensor) for _ in range(iterations)])
    if rank == 0:
        result = {"library": f"Gloo of torch {torch.__version__}", "ranks": world, "bytes": size, "memory": "heap",
                  "wrong": int(wrong), "first_us": round(1e6 * first, 2),
                  "times_us": [round(1e6 * seconds, 2) for seconds in times]}
        print(json.dumps(result), flush=True)


def main():
    limit, most, sizes = float(sys.argv[2]), int(sys.argv[3]), [int(size) for size in sys.argv[4:]]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for size in sizes:
        measure(size, limit, most)
    sys.stdout.flush()
    # Unloading torch takes long, and may fail after the measurement is over.
    dist.barrier()
    os._exit(0)


main()
