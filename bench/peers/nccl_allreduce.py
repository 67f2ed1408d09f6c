"""Times NCCL's all-reduce through torch.distributed in the way of nccl-tests, for comparison with flexring.

    RANK=R WORLD_SIZE=N MASTER_ADDR=127.0.0.1 MASTER_PORT=P nccl_allreduce.py TYPE ITERATIONS WARMUP BYTES...

All calls are enqueued before the completion is awaited. Rank 0 prints one line of JSON per size. Ranks can share a GPU if
each has a different NCCL_HOSTID: NCCL then treats them as ranks of different machines and uses sockets.
"""

import datetime
import json
import os
import sys
import time

import torch
import torch.distributed as dist

TYPES = {"float": torch.float32, "bfloat16": torch.bfloat16, "half": torch.float16}


def measure(tensor, iterations, warmup):
    """Microseconds of each call, averaged over the ranks."""
    for _ in range(warmup):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(iterations):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    mean = torch.tensor([1e6 * (time.perf_counter() - begun) / iterations], device="cuda")
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main():
    dtype, iterations, warmup = TYPES[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    for size in map(int, sys.argv[4:]):
        count = size // dtype.itemsize
        tensor = torch.full((count,), float(rank + 1), dtype=dtype, device="cuda")
        dist.all_reduce(tensor)
        wrong = int((tensor != world * (world + 1) / 2).sum())
        # Sum zeros, so that repeated in-place sums do not overflow.
        tensor.zero_()
        mean = measure(tensor, iterations, warmup)
        if rank == 0:
            version = ".".join(map(str, torch.cuda.nccl.version()))
            result = {"library": f"NCCL {version} of torch {torch.__version__}", "ranks": world, "type": sys.argv[1]}
            print(json.dumps(result | {"bytes": size, "mean_us": round(mean, 2), "wrong": wrong}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
