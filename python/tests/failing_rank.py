"""Rank 1 raises an exception while the others make calls. torch_checks.py reads which rank the launcher blames.

    python3 -m torch.distributed.run --nproc_per_node 2 failing_rank.py STYLE
    python3 failing_rank.py STYLE RANKS   (starts ranks by torch.multiprocessing.spawn)
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist

import flexring.torch

STEPS = 4


def calls():
    """A function that makes a step's calls."""
    return lambda: dist.all_reduce(torch.ones(1000))


def of_a_communicator():
    comm = flexring.torch.from_process_group()
    return lambda: comm.all_reduce(torch.ones(1000))


def training(model):
    def step():
        model(torch.ones(4, 8)).sum().backward()

    return step


def ddp():
    return training(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8)))


def fsdp2():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return training(fully_shard(torch.nn.Linear(8, 8), mesh=init_device_mesh("cpu", (dist.get_world_size(),))))


STYLES = {"calls": calls, "communicator": of_a_communicator, "ddp": ddp, "fsdp2": fsdp2}


def train(style, **rendezvous):
    dist.init_process_group("flexring", **rendezvous)
    rank, step = dist.get_rank(), STYLES[style]()
    for number in range(STEPS):
        if rank == 1 and number == STEPS - 1:
            raise ValueError("no data")
        step()


def spawned(rank, size, folder, style):
    train(style, store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            size = int(sys.argv[2])
            torch.multiprocessing.spawn(spawned, (size, folder, sys.argv[1]), nprocs=size)
