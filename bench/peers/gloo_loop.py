"""The loop of allreduce.c over Gloo through torch.distributed, with the same lines of JSON.

    gloo_loop.py RANKS|NAMESPACE... -- f32|bf16 SECONDS MOST BYTES...

Starts that many ranks, or one in each of the network namespaces. MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME are those of
torch.distributed.
"""

import json
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import forked_ranks


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
    times = [first]
    if first <= 2:
        begun = time.perf_counter()
        times = [timed(tensor)]
        [second] = slowest([time.perf_counter() - begun])
        iterations = min(most, max(3 if second <= 1 else 1, int(limit / second)))
        times = slowest(times + [timed(tensor) for _ in range(iterations - 1)])
    if rank == 0:
        result = {"library": f"Gloo of torch {torch.__version__}", "ranks": world, "bytes": size, "dtype": dtype, "memory": "heap",
                  "wrong": int(wrong), "first_us": round(1e6 * first, 2),
                  "times_us": [round(1e6 * seconds, 2) for seconds in times]}
        print(json.dumps(result), flush=True)


def run_rank():
    dtype, limit, most, *sizes = sys.argv[sys.argv.index("--") + 1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for size in sizes:
        measure(dtype, int(size), float(limit), int(most))
    signal.alarm(5 + dist.get_world_size() // 4)
    # Rank 0 serves the others' barrier.
    dist.barrier()


if __name__ == "__main__":
    where = sys.argv[1:sys.argv.index("--")]
    forked_ranks.start([None] * int(where[0]) if where[0].isdigit() else where, run_rank)
