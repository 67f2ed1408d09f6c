"""Times torch.distributed's all_reduce over Gloo in the way of `flexring perf`, for comparison.

    torchrun --nproc_per_node 4 bench/peers/gloo_allreduce.py BYTES ITERATIONS WARMUP [--each]

Prints a line of JSON with the fields of ompi_allreduce.c. Calls are in place, because torch offers no other form.
`--each` omits the back-to-back calls.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist


def timed(tensor):
    """Seconds of one call after a barrier."""
    dist.barrier()
    begun = time.perf_counter()
    dist.all_reduce(tensor)
    return time.perf_counter() - begun


def summary(seconds):
    us = [1e6 * second for second in seconds]
    return {
        "min_us": round(min(us), 3),
        "median_us": round(statistics.median(us), 3),
        "mean_us": round(statistics.fmean(us), 3),
        "max_us": round(max(us), 3),
    }


def main():
    parser = argparse.ArgumentParser()
    for name in ("bytes", "iterations", "warmup"):
        parser.add_argument(name, type=int)
    parser.add_argument("--each", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(options.bytes // 4, dtype=torch.int32) % 7
    tensor = (pattern + rank).float()
    first = timed(tensor)
    wrong = int((tensor != pattern * world + world * (world - 1) // 2).sum())

    # Sum zeros, so that repeated in-place sums do not overflow.
    tensor.zero_()
    for _ in range(options.warmup):
        dist.all_reduce(tensor)
    each = [timed(tensor) for _ in range(options.iterations)]
    mean = None
    if not options.each:
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(options.iterations):
            dist.all_reduce(tensor)
        mean = round(1e6 * (time.perf_counter() - begun) / options.iterations, 3)
    slowest = torch.tensor(each, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)

    if rank == 0:
        print(
            json.dumps(
                {
                    "library": f"gloo of torch {torch.__version__}",
                    "ranks": world,
                    "bytes": 4 * len(pattern),
                    "in_place": True,
                    "iterations": options.iterations,
                    "warmup": options.warmup,
                    "wrong": wrong,
                    "first_us": round(1e6 * first, 3),
                    "each": summary(each),
                    "slowest": summary(slowest.tolist()),
                    "back_to_back_us": mean,
                }
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
