"""Times the all-reduces of f32 of PyTorch's symmetric memory between processes that share a GPU, as a peer.

    RANK=R WORLD_SIZE=N MASTER_ADDR=127.0.0.1 MASTER_PORT=P symmetric_memory.py

Rank 0 prints a line of JSON for each operation and length, in microseconds of the slowest rank: of 20 calls in a
CUDA graph, per call; enqueued back to back, per call; one call and a synchronisation.
"""

import json
import os
import time

# Read when the module is imported.
os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

SIZES = [8, 64, 512, 4 << 10, 16 << 10, 64 << 10, *((256 << 10) << power for power in range(0, 11, 2))]
# Lengths from which and up to which an operation is measured.
RANGES = {"one_shot": (0, 1 << 20), "two_shot": (4 << 10, 256 << 20)}
CAPTURED = 20


def median(times):
    return sorted(times)[len(times) // 2]


def microseconds(calls):
    """Of the calls, until their results are there."""
    begun = time.perf_counter()
    calls()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begun)


def replayed(call):
    """Of each call in replays of a graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CAPTURED):
            call()
    times = []
    for _ in range(5):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / CAPTURED)
    return median(times)


def measure(call, vector, world):
    vector.fill_(1.0)
    torch.cuda.synchronize()
    dist.barrier()
    wrong = int((call() != world).sum())
    # Sum zeros, so that repeated sums in place do not overflow.
    vector.fill_(0)
    torch.cuda.synchronize()
    dist.barrier()
    is_long = vector.nbytes > 16 << 20
    calls = 10 if is_long else 100

    def enqueue():
        for _ in range(calls):
            call()

    enqueued = []
    for _ in range(3):
        dist.barrier()
        enqueued.append(microseconds(enqueue) / calls)
    waited = [microseconds(call) for _ in range(5 if is_long else 50)]
    return [replayed(call), median(enqueued), median(waited), wrong]


def main():
    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD.group_name
    try:
        symmetric.enable_symm_mem_for_group(group)
    except Exception:  # later versions enable it for every group
        pass
    memory = symmetric.empty(max(SIZES) // 4, dtype=torch.float32, device="cuda:0")
    symmetric.rendezvous(memory, group)
    for size in SIZES:
        vector = memory[: size // 4]
        calls = {
            "one_shot": lambda: torch.ops.symm_mem.one_shot_all_reduce(vector, "sum", group),
            "two_shot": lambda: torch.ops.symm_mem.two_shot_all_reduce_(vector, "sum", group),
        }
        for name, (least, most) in RANGES.items():
            if not least <= size <= most:
                continue
            of_ranks = [None] * world
            dist.all_gather_object(of_ranks, measure(calls[name], vector, world))
            graph, enqueued, waited, wrong = (round(max(values), 2) for values in zip(*of_ranks))
            times = {"graph_us": graph, "enqueued_us": enqueued, "waited_us": waited, "wrong": wrong}
            if rank == 0:
                print(
                    json.dumps(
                        {"kernel": name, "ranks": world, "torch": torch.__version__, "bytes": size, **times}
                    ),
                    flush=True,
                )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
