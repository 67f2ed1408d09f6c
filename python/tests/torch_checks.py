"""Checks of torch.distributed over flexring, for the version of torch that this Python has.

    python3 torch_checks.py [--ranks 2,4] [--only NAME,...] [--json FILE]

Starts the ranks, runs every check in a process group of its own, and prints a table: for each check and number of ranks what
moved the bytes, or what failed. Fails if a check fails. ``--json`` also writes the table's rows, from which
``torch_versions.py`` makes docs/pytorch.md.
"""

import argparse
import collections
import contextlib
import copy
import datetime
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

# Seconds after which a call fails, and after which the ranks of one check are killed.
TIMEOUT = 20
LIMIT = 600
REFUSED = "refused"

CHECKS = {}
# Checks that need other numbers of ranks than all.
RANKS = {}
# The calls that move bytes between pairs of ranks.
EXCHANGES = ("all_to_all", "all_to_all_v", "send", "recv")
# Calls that flexring must have made in a check, so that no other backend does its work. Checks that are not listed must have
# made any call.
MOVED_BY = {
    "all_to_all": ("all_to_all", "all_to_all_v"),
    "barrier": ("barrier",),
    "broadcast": ("broadcast",),
    "checkpoint": ("all_gather",),
    "ddp": ("all_reduce",),
    "ddp_options": ("all_reduce",),
    "dtensor": ("all_gather", "all_reduce"),
    "fsdp1": ("all_gather", "reduce_scatter"),
    "fsdp2": ("all_gather", "reduce_scatter"),
    "fsdp2_registered": ("all_gather", "reduce_scatter"),
    "functional": ("all_reduce", "all_gather", "reduce_scatter"),
    "gather_and_scatter": ("gather", "scatter"),
    "hsdp": ("all_gather", "reduce_scatter", "all_reduce"),
    "pipeline": ("send", "recv"),
    "receives_first": ("send", "recv"),
    "reduce": ("reduce",),
    "send_and_recv": ("send", "recv"),
    "tensor_parallel": ("all_reduce",),
    "zero_optimizer": ("broadcast", "all_reduce"),
}


def check(function):
    CHECKS[function.__name__] = function
    return function


def only_with(ranks):
    def decorate(function):
        RANKS[function.__name__] = ranks
        return check(function)

    return decorate


class Rank:
    """What checks get: torch, its modules, and this process's place."""

    def __init__(self, number, size):
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.number, self.size = torch, dist, number, size

    def data(self, rank, count=1000, dtype="float32"):
        """The vector of a rank, which every rank can compute. Small numbers, so that sums and products are exact."""
        torch = self.torch
        dtype = getattr(torch, dtype)
        generator = torch.Generator().manual_seed(rank)
        return torch.randint(1, 4, (count,), generator=generator).to(dtype)

    def all_data(self, **options):
        return [self.data(rank, **options) for rank in range(self.size)]

    def equal(self, found, expected, what=""):
        if not self.torch.equal(found, expected):
            raise AssertionError(f"{what}: {found.flatten()[:8]} instead of {expected.flatten()[:8]}")

    def model(self):
        torch = self.torch
        torch.manual_seed(7)
        return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))

    def batch(self, step, rank=None):
        torch = self.torch
        generator = torch.Generator().manual_seed(100 * step + (self.number if rank is None else rank))
        return torch.randn(4, 32, generator=generator), torch.randn(4, 8, generator=generator)

    def train(self, model, parameters=None, steps=3, optimizer=None):
        """Trains for some steps. Returns the losses of this rank."""
        torch = self.torch
        optimizer = optimizer or torch.optim.SGD(parameters or model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for step in range(steps):
            inputs, targets = self.batch(step)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def reference(self, steps=3):
        """The model after training on the batches of all ranks in one process, and the losses of this rank."""
        torch = self.torch
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for step in range(steps):
            optimizer.zero_grad()
            for rank in range(self.size):
                inputs, targets = self.batch(step, rank)
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                (loss / self.size).backward()
                if rank == self.number:
                    losses.append(loss.item())
            optimizer.step()
        return model, losses

    def same_training(self, model, losses):
        """Compares a trained model and its losses with the reference."""
        reference, expected = self.reference(len(losses))
        for found, wanted in zip(losses, expected):
            assert abs(found - wanted) <= 1e-5 * abs(wanted), f"losses {losses} instead of {expected}"
        for found, wanted in zip(model, reference.parameters()):
            self.torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-6)


@check
def all_reduce(rank):
    torch, dist = rank.torch, rank.dist
    ops = {
        "SUM": torch.Tensor.sum,
        "PRODUCT": torch.Tensor.prod,
        "MIN": torch.Tensor.amin,
        "MAX": torch.Tensor.amax,
    }
    for dtype in ("float32", "float64", "int32", "int64", "uint8", "int8", "float16", "bfloat16"):
        for name, local in ops.items():
            vector = rank.data(rank.number, dtype=dtype)
            dist.all_reduce(vector, getattr(dist.ReduceOp, name))
            rank.equal(vector, local(torch.stack(rank.all_data(dtype="float64")), dim=0).to(vector.dtype), f"{name} {dtype}")
    vector = rank.data(rank.number)
    dist.all_reduce(vector, dist.ReduceOp.AVG)
    rank.equal(vector, torch.stack(rank.all_data()).sum(0) / rank.size, "AVG")
    try:
        dist.all_reduce(torch.full((3,), 200, dtype=torch.uint8), dist.ReduceOp.AVG)
    except RuntimeError as error:
        assert "their sum may wrap around" in str(error), error
    else:
        raise AssertionError("no error for AVG of integers")
    flags = torch.tensor([rank.number == 0, True, False])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    rank.equal(flags, torch.tensor([True, True, False]), "MAX of bool")
    numbers = torch.full((3,), complex(1, rank.number))
    dist.all_reduce(numbers)
    rank.equal(numbers, torch.full((3,), complex(rank.size, rank.size * (rank.size - 1) / 2)), "SUM of complex numbers")
    premul_sum = dist._make_nccl_premul_sum
    for dtype, factor in (("float32", 0.1), ("float64", 0.5), ("int64", 3.0)):
        vector = torch.ones(3, dtype=getattr(torch, dtype))
        dist.all_reduce(vector, premul_sum(factor))
        torch.testing.assert_close(vector, torch.full_like(vector, rank.size * factor), msg=f"PREMUL_SUM of {dtype}")
    for dtype, factor in (("float64", 0.1), ("complex128", 0.1), ("int64", float(2**24 + 1)), ("bool", 1.0)):
        try:
            dist.all_reduce(torch.ones(3, dtype=getattr(torch, dtype)), premul_sum(factor))
        except (RuntimeError, ValueError) as error:
            assert "would be rounded" in str(error) or "no reduction PREMUL_SUM of torch.bool" in str(error), error
        else:
            raise AssertionError(f"no error for PREMUL_SUM of {dtype}")
    scalar, empty = torch.tensor(1.0), torch.zeros(0)
    dist.all_reduce(scalar)
    dist.all_reduce(empty)
    assert scalar.item() == rank.size


def torch_asks_the_backend(work):
    """Whether this is the backend's own handle. From 2.14 on it is torch's, which forwards wait and get_future only."""
    return "flexring" in type(work).__module__


def many_callbacks(rank):
    """Calls whose callbacks all wait for another call."""
    torch, dist = rank.torch, rank.dist
    group = dist.new_group()
    vectors, others = [[torch.ones(100) for _ in range(40)] for _ in range(2)]

    def callback(number):
        return lambda _future: dist.all_reduce(others[number], group=group)

    works = [dist.all_reduce(vector, async_op=True) for vector in vectors]
    futures = [work.get_future().then(callback(number)) for number, work in enumerate(works)]
    for future in futures:
        future.wait()
    for vector in [*vectors, *others]:
        rank.equal(vector, torch.full_like(vector, rank.size))


@check
def all_reduce_async(rank):
    dist = rank.dist
    vectors = [rank.data(rank.number, count) for count in (1, 1000, 300_000)]
    works = [dist.all_reduce(vector, async_op=True) for vector in vectors]
    last = rank.data(rank.number)
    dist.all_reduce(last)
    for work in reversed(works):
        work.wait()
    assert all(work.get_future().done() for work in works)
    if torch_asks_the_backend(works[0]):
        assert all(work.is_completed() and work.is_success() for work in works)
    for vector in [*vectors, last]:
        rank.equal(vector, sum(rank.all_data(count=len(vector))))
    many_callbacks(rank)
    # A callback may make calls and wait for them.
    vector, second = rank.data(rank.number), rank.data(rank.number)

    def again(_future):
        dist.all_reduce(second)
        return second

    future = dist.all_reduce(vector, async_op=True).get_future().then(again)
    rank.equal(future.wait(), sum(rank.all_data()))
    assert dist.all_reduce(vector, async_op=True).get_future().wait()[0] is not None


@check
def all_reduce_bf16(rank):
    torch, dist = rank.torch, rank.dist
    vector = torch.full((5000,), 1.0 + rank.number, dtype=torch.bfloat16)
    dist.all_reduce(vector)
    rank.equal(vector, torch.full_like(vector, rank.size * (rank.size + 1) / 2))


@check
def broadcast(rank):
    torch, dist = rank.torch, rank.dist
    for root in range(rank.size):
        for dtype in ("float32", "int16", "bool", "complex64", "bfloat16"):
            vector = rank.data(rank.number, dtype=dtype)
            dist.broadcast(vector, root)
            rank.equal(vector, rank.data(root, dtype=dtype), dtype)
    work = dist.broadcast(vector, 0, async_op=True)
    work.wait()
    if torch_asks_the_backend(work):
        assert torch.is_tensor(work.result()[0])


@check
def reduce(rank):
    for root in range(rank.size):
        vector = rank.data(rank.number)
        rank.dist.reduce(vector, root)
        rank.equal(vector, sum(rank.all_data()) if root == rank.number else rank.data(rank.number))


@check
def all_gather_list(rank):
    torch, dist = rank.torch, rank.dist
    for dtype in ("float32", "int64", "bool"):
        parts = [torch.zeros(10, 100, dtype=getattr(torch, dtype)) for _ in range(rank.size)]
        dist.all_gather(parts, rank.data(rank.number, dtype=dtype).view(10, 100))
        for part, expected in zip(parts, rank.all_data(dtype=dtype)):
            rank.equal(part.flatten(), expected)
    with torch.inference_mode():
        parts = [torch.zeros(1000) for _ in range(rank.size)]
        dist.all_gather(parts, rank.data(rank.number), async_op=True).wait()
        for part, expected in zip(parts, rank.all_data()):
            rank.equal(part, expected)
    # Parts of different lengths.
    parts = [torch.zeros(number + 1) for number in range(rank.size)]
    dist.all_gather(parts, torch.full((rank.number + 1,), float(rank.number)))
    for number, part in enumerate(parts):
        rank.equal(part, torch.full((number + 1,), float(number)))


@check
def all_gather_tensor(rank):
    torch, dist = rank.torch, rank.dist
    whole = torch.zeros(rank.size * 1000)
    dist.all_gather_into_tensor(whole, rank.data(rank.number))
    rank.equal(whole, torch.cat(rank.all_data()))
    whole = torch.zeros(rank.size, 1000)
    whole[rank.number] = rank.data(rank.number)
    dist.all_gather_into_tensor(whole, whole[rank.number], async_op=True).wait()
    rank.equal(whole, torch.stack(rank.all_data()))


@check
def reduce_scatter_list(rank):
    torch, dist = rank.torch, rank.dist
    out = torch.zeros(1000)
    dist.reduce_scatter(out, [rank.data(rank.number) + part for part in range(rank.size)])
    rank.equal(out, sum(rank.all_data()) + rank.size * rank.number)
    out, parts = torch.zeros(rank.number + 1), [torch.ones(part + 1) for part in range(rank.size)]
    dist.reduce_scatter(out, parts)
    rank.equal(out, torch.full_like(out, rank.size))
    for part in parts:
        rank.equal(part, torch.ones_like(part))


@check
def reduce_scatter_tensor(rank):
    torch, dist = rank.torch, rank.dist
    for op, factor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, rank.size)):
        out = torch.zeros(1000)
        dist.reduce_scatter_tensor(out, rank.data(rank.number).repeat(rank.size), op)
        rank.equal(out, sum(rank.all_data()) / factor)


@check
def all_to_all(rank):
    torch, dist = rank.torch, rank.dist
    out = torch.zeros(rank.size, dtype=torch.int64)
    dist.all_to_all_single(out, torch.arange(rank.size) + 10 * rank.number)
    rank.equal(out, 10 * torch.arange(rank.size) + rank.number)
    # Rank r sends r + 1 elements to each rank.
    out = torch.zeros(sum(range(1, rank.size + 1)))
    own = torch.full((rank.size * (rank.number + 1),), float(rank.number))
    dist.all_to_all_single(out, own, list(range(1, rank.size + 1)), [rank.number + 1] * rank.size)
    rank.equal(out, torch.cat([torch.full((other + 1,), float(other)) for other in range(rank.size)]))
    parts = [torch.zeros(3) for _ in range(rank.size)]
    dist.all_to_all(parts, [torch.full((3,), float(10 * rank.number + other)) for other in range(rank.size)])
    for other, part in enumerate(parts):
        rank.equal(part, torch.full((3,), float(10 * other + rank.number)))


@check
def gather_and_scatter(rank):
    torch, dist = rank.torch, rank.dist
    for root in range(rank.size):
        at_root = rank.number == root
        parts = [torch.zeros(1000) for _ in range(rank.size)] if at_root else None
        dist.gather(rank.data(rank.number), parts, root)
        for part, expected in zip(parts or [], rank.all_data()):
            rank.equal(part, expected)
        parts = [torch.zeros(1000) for _ in range(rank.size)] if at_root else None
        result = dist.gather(rank.data(rank.number), parts, root, async_op=True).get_future().wait()
        for part, expected in zip(result if at_root else [], rank.all_data()):
            rank.equal(part, expected)
        assert not at_root or len(result) == rank.size, result
        part = torch.zeros(1000)
        dist.scatter(part, rank.all_data() if at_root else None, root)
        rank.equal(part, rank.data(rank.number))


@check
def send_and_recv(rank):
    torch, dist = rank.torch, rank.dist
    after, before = (rank.number + 1) % rank.size, (rank.number - 1) % rank.size
    received = torch.zeros(1000)
    if rank.number == 0:
        dist.send(rank.data(0), after)
        dist.recv(received, before)
    else:
        dist.recv(received, before)
        dist.send(rank.data(rank.number), after)
    rank.equal(received, rank.data(before))
    received = torch.zeros(1000)
    ops = [dist.P2POp(dist.isend, rank.data(rank.number), after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    rank.equal(received, rank.data(before))
    # Long vectors in both directions, one after the other, with other calls in between.
    out, back = torch.full((1 << 20,), float(rank.number)), torch.zeros(1 << 20)
    sent = dist.isend(out, after)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.irecv(back, before).wait()
    sent.wait()
    assert total.item() == rank.size
    rank.equal(back, torch.full_like(back, before))
    # Tags match messages in any order.
    works = [dist.isend(torch.full((3,), float(tag)), after, tag=tag) for tag in (5, 6)]
    for tag in (6, 5):
        received = torch.zeros(3)
        dist.recv(received, before, tag=tag)
        rank.equal(received, torch.full((3,), float(tag)), f"tag {tag}")
    for work in works:
        work.wait()
    objects = [{"rank": rank.number}]
    if rank.number == 0:
        dist.send_object_list(objects, dst=1)
    elif rank.number == 1:
        dist.recv_object_list(objects, src=0)
        assert objects == [{"rank": 0}], objects
    # Lengths that differ are an error on both ranks, which names them.
    if rank.number < 2:
        vector = torch.zeros(10 + rank.number)
        try:
            dist.send(vector, 1) if rank.number == 0 else dist.recv(vector, 0)
        except RuntimeError as error:
            assert "rank 0 to rank 1" in str(error), error
        else:
            raise AssertionError("no error for different lengths")


@check
def receives_first(rank):
    """Every rank posts a receive before the send that the next one receives, in a group whose store serves one request at a time."""
    torch, dist = rank.torch, rank.dist
    limit = datetime.timedelta(seconds=TIMEOUT)
    store = dist.TCPStore("127.0.0.1", 0, rank.size, True, limit, wait_for_workers=False) if rank.number == 0 else None
    port = [store and store.port]
    dist.broadcast_object_list(port, src=0)
    store = store or dist.TCPStore("127.0.0.1", port[0], rank.size, False, limit, wait_for_workers=False)
    dist.destroy_process_group()
    dist.init_process_group("flexring", store=store, rank=rank.number, world_size=rank.size, timeout=limit)
    received = torch.zeros(1000)
    before = (rank.number - 1) % rank.size
    receive = dist.irecv(received, before)
    # The receive waits for the sender's id now.
    time.sleep(0.2)
    sent = dist.isend(rank.data(rank.number), (rank.number + 1) % rank.size)
    receive.wait()
    sent.wait()
    rank.equal(received, rank.data(before))
    # Rank 0 has the store.
    dist.barrier()


@check
def pipeline(rank):
    """The stages of torch.distributed.pipelining, by a schedule of one forward and one backward pass in turn."""
    torch = rank.torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(5)
    layers = [torch.nn.Linear(16, 16) for _ in range(rank.size)]
    inputs, targets = torch.randn(8, 16), torch.randn(8, 16)
    stage = PipelineStage(copy.deepcopy(layers[rank.number]), rank.number, rank.size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    if rank.number == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets) if rank.number == rank.size - 1 else schedule.step()
    states = inputs
    for layer in layers:
        states = layer(states)
    torch.nn.functional.mse_loss(states, targets).backward()
    found = stage.submod.weight.grad
    torch.testing.assert_close(found, layers[rank.number].weight.grad, rtol=1e-3, atol=1e-6)


@check
def barrier(rank):
    for _ in range(3):
        rank.dist.barrier()
    rank.dist.barrier(async_op=True).wait()


@check
def object_collectives(rank):
    dist = rank.dist
    objects = [{"rank": rank.number}, "x" * (1 + rank.number)]
    dist.broadcast_object_list(objects, src=1)
    assert objects == [{"rank": 1}, "xx"], objects
    everything = [None] * rank.size
    dist.all_gather_object(everything, ("from", rank.number, "y" * rank.number))
    assert everything == [("from", other, "y" * other) for other in range(rank.size)], everything


@check
def new_group(rank):
    torch, dist = rank.torch, rank.dist
    pairs = [dist.new_group([first, first + 1]) for first in range(0, rank.size, 2)]
    first = rank.number // 2 * 2
    vector = rank.data(rank.number)
    dist.all_reduce(vector, group=pairs[rank.number // 2])
    rank.equal(vector, rank.data(first) + rank.data(first + 1))
    dist.broadcast(vector, src=first + 1, group=pairs[rank.number // 2])
    assert dist.get_backend(pairs[rank.number // 2]) == "flexring"
    everyone = dist.new_group()
    dist.all_reduce(torch.ones(1), group=everyone)
    dist.destroy_process_group(everyone)
    dist.all_reduce(vector)


@check
def split_group(rank):
    torch, dist = rank.torch, rank.dist
    if not hasattr(dist, "split_group"):
        return "not in this torch"
    if torch.__version__ < "2.14":
        return "not in this torch for groups in Python"
    half = rank.size // 2
    part = dist.split_group(split_ranks=[list(range(half)), list(range(half, rank.size))])
    vector = rank.data(rank.number)
    dist.all_reduce(vector, group=part)
    rank.equal(vector, sum(rank.all_data()[:half] if rank.number < half else rank.all_data()[half:]))


def _ddp(rank, **options):
    model = rank.torch.nn.parallel.DistributedDataParallel(rank.model(), bucket_cap_mb=0.005, **options)
    losses = rank.train(model)
    rank.same_training([weight.detach() for weight in model.parameters()], losses)
    return model


@check
def ddp(rank):
    _ddp(rank)


@check
def ddp_options(rank):
    _ddp(rank, gradient_as_bucket_view=True)
    _ddp(rank, static_graph=True)
    _ddp(rank, find_unused_parameters=True)


@check
def ddp_no_sync(rank):
    torch = rank.torch
    model = torch.nn.parallel.DistributedDataParallel(rank.model())
    with model.no_sync():
        model(rank.batch(0)[0]).sum().backward()
    model(rank.batch(1)[0]).sum().backward()
    gradient = next(model.parameters()).grad
    alone = rank.model()
    for step in range(2):
        for other in range(rank.size):
            (alone(rank.batch(step, other)[0]).sum() / rank.size).backward()
    torch.testing.assert_close(gradient, next(alone.parameters()).grad, rtol=1e-4, atol=1e-5)


@check
def ddp_join(rank):
    torch = rank.torch
    from torch.distributed.algorithms.join import Join

    model = torch.nn.parallel.DistributedDataParallel(rank.model())
    with Join([model]):
        for step in range(2 + rank.number):
            model(rank.batch(step)[0]).sum().backward()


def _cpu_mesh(rank, *shape, **options):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape or (rank.size,), **options)


def _fully_shard(rank, mesh, memory_of_group=False):
    from torch.distributed.fsdp import fully_shard

    model = rank.model()
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if memory_of_group:
        for part in model.modules():
            if hasattr(part, "set_allocate_memory_from_process_group_for_comm"):
                part.set_allocate_memory_from_process_group_for_comm(True)
    losses = rank.train(model)
    rank.same_training([weight.full_tensor() for weight in model.parameters()], losses)


@check
def fsdp2(rank):
    _fully_shard(rank, _cpu_mesh(rank))
    _fully_shard(rank, _cpu_mesh(rank), memory_of_group=True)


@only_with([4])
def hsdp(rank):
    _fully_shard(rank, _cpu_mesh(rank, 2, 2, mesh_dim_names=("replicate", "shard")))


@check
def fsdp2_registered(rank):
    """FSDP2 in a group of Gloo, with flexring for all-gathers and reduce-scatters."""
    torch = rank.torch
    from torch.distributed.fsdp import FSDPModule, fully_shard

    import flexring.torch

    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        return "not in this torch"
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh.from_group(rank.dist.new_group(backend="gloo"), "cpu")
    model = fully_shard(rank.model(), mesh=mesh)
    assert flexring.torch.register(model) is None
    losses = rank.train(model)
    rank.same_training([weight.full_tensor() for weight in model.parameters()], losses)


@check
def fsdp1(rank):
    torch = rank.torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(rank.model(), device_id=torch.device("cpu"), use_orig_params=True)
    losses = rank.train(model)
    with FullyShardedDataParallel.summon_full_params(model):
        rank.same_training([weight.detach() for weight in model.parameters()], losses)


@check
def dtensor(rank):
    torch = rank.torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = torch.arange(8.0 * rank.size).view(2 * rank.size, 4)
    shards = distribute_tensor(whole, _cpu_mesh(rank), [Shard(0)])
    rank.equal(shards.full_tensor(), whole)
    rank.equal((shards * 2).sum().full_tensor(), (whole * 2).sum())
    rank.equal(shards.redistribute(placements=[Replicate()]).to_local(), whole)
    rank.equal(shards.redistribute(placements=[Shard(1)]).full_tensor(), whole)


@check
def tensor_parallel(rank):
    torch = rank.torch
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(3)
    block = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    alone = copy.deepcopy(block)
    parallel = parallelize_module(block, _cpu_mesh(rank), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs = torch.randn(5, 16)
    rank.dist.broadcast(inputs, 0)
    found, expected = parallel(inputs), alone(inputs)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(parallel[0].weight.grad.full_tensor(), alone[0].weight.grad)


@check
def zero_optimizer(rank):
    torch = rank.torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.parallel.DistributedDataParallel(rank.model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    losses = rank.train(model, optimizer=optimizer)
    rank.same_training([weight.detach() for weight in model.parameters()], losses)


@check
def checkpoint(rank):
    torch = rank.torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    folder = [tempfile.mkdtemp() if rank.number == 0 else None]
    rank.dist.broadcast_object_list(folder, src=0)
    mesh = _cpu_mesh(rank)
    whole = torch.arange(4.0 * rank.size)
    dcp.save({"weight": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=folder[0])
    state = {"weight": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)])}
    dcp.load(state, checkpoint_id=folder[0])
    rank.equal(state["weight"].full_tensor(), whole)


@check
def functional(rank):
    torch, dist = rank.torch, rank.dist
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD

    def step(vector):
        total = functional.all_reduce(vector * 2, "sum", group)
        everything = functional.all_gather_tensor(total, 0, group)
        return functional.reduce_scatter_tensor(everything, "avg", 0, group) + 1

    expected = sum(rank.all_data()) * 2 + 1
    rank.equal(step(rank.data(rank.number)), expected)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    rank.equal(compiled(rank.data(rank.number)), expected)


@check
def coalesced(rank):
    torch, dist = rank.torch, rank.dist
    from torch.distributed.distributed_c10d import _coalescing_manager

    one, other = rank.data(rank.number), rank.data(rank.number, 10)
    with _coalescing_manager():
        dist.all_reduce(one)
        dist.all_reduce(other)
    rank.equal(one, sum(rank.all_data()))
    rank.equal(other, sum(rank.all_data(count=10)))
    whole = [torch.zeros(rank.size * 1000), torch.zeros(rank.size * 10)]
    with _coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(whole[0], rank.data(rank.number))
        dist.all_gather_into_tensor(whole[1], rank.data(rank.number, 10))
    manager.wait()
    rank.equal(whole[1], torch.cat(rank.all_data(count=10)))
    # Messages in both directions. The wait for the group waits for them, also if the other rank is late.
    after, before, received = (rank.number + 1) % rank.size, (rank.number - 1) % rank.size, torch.zeros(1000)
    with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.irecv(received, before)
        if rank.number == 0:
            time.sleep(0.2)
        dist.isend(rank.data(rank.number), after)
    manager.wait()
    rank.equal(received, rank.data(before))
    # By rank, the three inputs of that rank.
    parts = [[torch.zeros(10) for _ in range(3)] for _ in range(rank.size)]
    dist.all_gather_coalesced(parts, [rank.data(rank.number, 10) + number for number in range(3)])
    for row, expected in zip(parts, rank.all_data(count=10)):
        for number, part in enumerate(row):
            rank.equal(part, expected + number)


def _other_forms(torch, values):
    """Tensors of 2 rows that have the shape and type of `values` and are no plain vectors."""
    columns = values.shape[1]
    wide = torch.zeros(2, columns, 3, dtype=values.dtype)
    yield "strided", wide[:, :, 1]
    yield "transposed", torch.zeros(columns, 2, dtype=values.dtype).t()
    yield "reversed by stride", torch.zeros(columns, 2, 2, dtype=values.dtype)[:, :, 1].t()
    if values.element_size() > 1:
        size = values.numel() * values.element_size()
        at_odd_address = torch.zeros(size + 1, dtype=torch.uint8)[1:]
        unaligned = torch.frombuffer(at_odd_address.numpy(), dtype=values.dtype).view(2, columns)
        assert unaligned.data_ptr() % values.element_size()
        yield "unaligned", unaligned


@check
def memory_formats(rank):
    """Ranks use different forms, so that what counts is the place of an element in the tensor and not in memory."""
    torch, dist = rank.torch, rank.dist
    for dtype in ("float32", "int64", "complex64", "uint8"):
        all_values = [values.view(2, 50) for values in rank.all_data(count=100, dtype=dtype)]
        mine, total = all_values[rank.number], sum(all_values)
        plain = ("plain", torch.zeros_like(mine))
        forms = [plain, *_other_forms(torch, mine)]
        for number in range(len(forms)):
            name, tensor = forms[(number + rank.number) % len(forms)]
            name = f"{name} {dtype}"
            tensor.copy_(mine)
            dist.all_reduce(tensor)
            rank.equal(tensor, total, f"all_reduce {name}")
            tensor.copy_(mine)
            dist.all_reduce(tensor, async_op=True).wait()
            rank.equal(tensor, total, f"asynchronous all_reduce {name}")
            tensor.copy_(mine)
            dist.reduce(tensor, 1)
            rank.equal(tensor, total if rank.number == 1 else mine, f"reduce {name}")
            tensor.copy_(mine)
            dist.broadcast(tensor, 1)
            rank.equal(tensor, all_values[1], f"broadcast {name}")
            tensor.copy_(mine)
            parts = [forms[(number + other) % len(forms)][1].clone() for other in range(rank.size)]
            dist.all_gather(parts, tensor)
            for part, expected in zip(parts, all_values):
                rank.equal(part, expected, f"all_gather {name}")
            whole = torch.zeros(4 * rank.size, 50, dtype=mine.dtype)[::2]
            dist.all_gather_into_tensor(whole, tensor)
            rank.equal(whole, torch.cat(all_values), f"all_gather_into_tensor {name}")
            dist.reduce_scatter_tensor(tensor, whole)
            rank.equal(tensor, rank.size * mine, f"reduce_scatter_tensor {name}")
            out = [torch.zeros(50, 2, dtype=mine.dtype).t() for _ in range(rank.size)]
            tensor.copy_(mine)
            dist.all_to_all(out, [tensor] * rank.size)
            for part, expected in zip(out, all_values):
                rank.equal(part, expected, f"all_to_all {name}")
            dist.gather(tensor, out if rank.number == 0 else None, 0)
            dist.scatter(tensor, out if rank.number == 0 else None, 0)
            rank.equal(tensor, mine, f"gather and scatter {name}")
            received = torch.zeros(50, 2, dtype=mine.dtype).t()
            sent = dist.isend(tensor, (rank.number + 1) % rank.size)
            dist.recv(received, (rank.number - 1) % rank.size)
            sent.wait()
            rank.equal(received, all_values[(rank.number - 1) % rank.size], f"send and recv {name}")
    image = torch.arange(24.0).view(1, 2, 3, 4)
    if rank.number == 0:
        image = image.to(memory_format=torch.channels_last)
    dist.all_reduce(image)
    rank.equal(image, rank.size * torch.arange(24.0).view(1, 2, 3, 4), "channels_last")
    assert image.is_contiguous(memory_format=torch.channels_last) == (rank.number == 0)


def _sparse(torch, length, elements, *dense):
    """A sparse tensor of these elements, in rows of the shape ``dense``."""
    indices = torch.tensor([list(elements)], dtype=torch.int64).view(1, -1)
    values = torch.tensor(list(elements.values())).view(-1, *[1] * len(dense)).expand(-1, *dense)
    return torch.sparse_coo_tensor(indices, values, (length, *dense), check_invariants=True)


@check
def sparse_all_reduce(rank):
    torch, dist = rank.torch, rank.dist
    for dense in ((), (3,)):
        # One that all have, one of its own, and more on later ranks. Each is there twice.
        mine = _sparse(torch, 100, {0: 1.0, 10 + rank.number: 2.0, **{50 + at: 0.5 for at in range(rank.number)}}, *dense)
        indices, values = mine.coalesce().indices(), mine.coalesce().values()
        mine = torch.sparse_coo_tensor(indices.repeat(1, 2), torch.cat([values, values]), mine.shape, check_invariants=True)
        expected = mine.to_dense()
        dist.all_reduce(expected)
        for asynchronous in (False, True):
            vector = mine.clone()
            work = dist.all_reduce(vector, async_op=asynchronous)
            if work is not None:
                work.wait()
            rank.equal(vector.to_dense(), expected, f"dense part {dense}")
    nothing = _sparse(torch, 10, {})
    dist.all_reduce(nothing)
    assert nothing._nnz() == 0
    embedding = torch.nn.Embedding(50, 4, sparse=True)
    model = torch.nn.parallel.DistributedDataParallel(embedding)
    model(torch.tensor([1, 5 + rank.number])).sum().backward()
    gradient = embedding.weight.grad
    assert gradient.is_sparse and gradient.to_dense()[1, 0] == 1, gradient
    assert gradient.to_dense()[5 + rank.number, 0] == 1 / rank.size, gradient
    # A shape that differs is an error on all ranks, which may go on.
    try:
        dist.all_reduce(_sparse(torch, 10 + rank.number, {0: 1.0}))
    except ValueError as raised:
        assert "has a sparse tensor of shape" in str(raised), raised
    else:
        raise AssertionError("no error for different shapes")
    dist.barrier()


@check
def recv_from_any_rank(rank):
    rank.dist.barrier()
    if rank.number == 0:
        rank.dist.recv(rank.torch.zeros(1), None)
    rank.dist.group.WORLD.recv_anysource([rank.torch.zeros(1)], 0)


@contextlib.contextmanager
def _debug_detail(dist):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


@check
def debug_detail(rank):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: torch compares each call of the ranks before it makes it."""
    torch, dist = rank.torch, rank.dist
    with _debug_detail(dist):
        group = dist.new_group()
        for _ in range(3):
            gc.collect()
            vector = rank.data(rank.number)
            dist.all_reduce(vector, group=group)
            rank.equal(vector, sum(rank.all_data()))
        dist.all_reduce(vector, group=group, async_op=True).wait()
        dist.broadcast(vector, 0, group=group)
        dist.all_gather_into_tensor(torch.zeros(rank.size * 1000), vector, group=group)
        dist.reduce_scatter_tensor(torch.zeros(1000), torch.zeros(rank.size * 1000), group=group)
        dist.barrier(group)
        dist.all_gather_object([None] * rank.size, rank.number, group=group)
        dist.all_to_all_single(torch.zeros(rank.size), torch.zeros(rank.size), group=group)
        if rank.number == 0:
            dist.send(vector, 1, group=group)
        elif rank.number == 1:
            dist.recv(vector, 0, group=group)
        assert group._get_sequence_number_for_group() > 5
        model = torch.nn.parallel.DistributedDataParallel(rank.model(), process_group=group)
        model(rank.batch(0)[0]).sum().backward()
        # Calls that differ.
        try:
            dist.all_reduce(torch.zeros(10 + rank.number), group=group)
        except RuntimeError as error:
            message = str(error)
        else:
            raise AssertionError("no error for different lengths")
        wrapped = rank.torch.__version__ >= "2.14"
        assert ("Detected mismatch between collectives" in message) == wrapped, message
        dist.destroy_process_group(group)


@check
def monitored_barrier(rank):
    torch, dist = rank.torch, rank.dist
    if torch.__version__ < "2.14":
        # flexring's barrier names the ranks that are missing, too.
        dist.barrier()
        return "torch: Gloo only"
    for _ in range(2):
        dist.monitored_barrier()
    # A rank that is late.
    begun = time.monotonic()
    if rank.number == 1:
        time.sleep(1)
    dist.monitored_barrier(wait_all_ranks=True)
    assert time.monotonic() - begun > 0.4
    if rank.number != rank.size - 1:
        try:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=2))
        except RuntimeError as error:
            assert f"rank {rank.size - 1}" in str(error), error
        else:
            raise AssertionError("no error for a rank that is missing")
    # The group works as before.
    dist.all_reduce(torch.ones(1))


@check
def flight_recorder(rank):
    """torch's record of calls, for analysis after a hang."""
    dist = rank.dist
    c10d = rank.torch._C._distributed_c10d
    dist.barrier()
    if not hasattr(c10d, "FlightRecorderHook"):
        return "not in this torch"
    dist.all_reduce(rank.data(rank.number))
    entries = json.loads(c10d._dump_fr_trace_json(backend="flexring"))["entries"]
    names = [entry["profiling_name"] for entry in entries]
    assert names[-2:] == ["flexring:barrier", "flexring:all_reduce"], names
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(TORCH_FR_DUMP_ON_TIMEOUT="1", TORCH_FR_DUMP_TEMP_FILE=f"{folder}/trace")
        group = dist.new_group(timeout=datetime.timedelta(seconds=1))
        del os.environ["TORCH_FR_DUMP_ON_TIMEOUT"]
        dist.barrier(group)
        if rank.number == 0:
            try:
                dist.all_reduce(rank.torch.ones(1), group=group)
            except RuntimeError as error:
                assert error.code == error.TIMEOUT, error
            assert Path(folder, "trace0").exists(), list(Path(folder).iterdir())
        dist.barrier()


@check
def nan_check(rank):
    torch, dist = rank.torch, rank.dist
    if not hasattr(torch._C._distributed_c10d, "NanCheckHook"):
        dist.barrier()
        return "not in this torch"
    os.environ["TORCH_DIST_NAN_CHECK"] = "1"
    try:
        group = dist.new_group()
    finally:
        del os.environ["TORCH_DIST_NAN_CHECK"]
    dist.all_reduce(torch.ones(3), group=group)
    try:
        dist.all_reduce(torch.tensor([1.0, float("nan")]), group=group)
    except RuntimeError as error:
        assert "nan" in str(error).lower(), error
    else:
        raise AssertionError("no error for a NaN")
    dist.destroy_process_group(group)


@check
def anomaly_mode(rank):
    torch = rank.torch
    model = torch.nn.parallel.DistributedDataParallel(rank.model())
    with warnings.catch_warnings(), torch.autograd.detect_anomaly():
        warnings.simplefilter("ignore")
        losses = rank.train(model)
        try:
            (model(rank.batch(0)[0]).sum() * torch.tensor(float("nan"))).backward()
        except RuntimeError as error:
            assert "returned nan values" in str(error), error
        else:
            raise AssertionError("no error for a NaN")
    assert losses


@check
def profiler(rank):
    """torch's profiler shows calls by name, asynchronous ones to their end."""
    torch, dist = rank.torch, rank.dist
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(1000))
        late = dist.broadcast(torch.ones(1000), 0, async_op=True) if rank.number == 0 else None
        time.sleep(0.5)
        late = late or dist.broadcast(torch.ones(1000), 0, async_op=True)
        late.wait()
        late.get_future().wait()
        if rank.number == 0:
            dist.send(torch.ones(1), 1)
        elif rank.number == 1:
            dist.recv(torch.ones(1), 0)
        # The thread of an asynchronous call records its end, after the wait for it has ended.
        time.sleep(0.5)
    times = {event.key: event.cpu_time_total for event in profile.key_averages()}
    message = {0: ["flexring:send"], 1: ["flexring:recv"]}.get(rank.number, [])
    for name in ("flexring:all_reduce", "flexring:broadcast", *message):
        assert name in times, (name, list(times))
    if rank.number == 0:
        assert times["flexring:broadcast"] > 100_000, times["flexring:broadcast"]


@check
def bad_input(rank):
    torch, dist = rank.torch, rank.dist
    for error, message, tensor in [
        (ValueError, "share memory", torch.zeros(1).expand(4)),
        (TypeError, "float8_e4m3fnuz", torch.zeros(4, dtype=torch.float8_e4m3fnuz)),
    ]:
        try:
            dist.all_reduce(tensor)
        except error as raised:
            assert message in str(raised), raised
        else:
            raise AssertionError(f"no error for {tensor}")
    try:
        dist.all_reduce(_sparse(torch, 4, {0: 1.0}), dist.ReduceOp.MAX)
    except RuntimeError as raised:
        assert "no reduction MAX" in str(raised), raised
    else:
        raise AssertionError("no error for the maximum of sparse tensors")
    uneven, half = torch.zeros(rank.size + 1), torch.zeros(8, dtype=torch.bfloat16)
    for error, message, call in [
        (ValueError, "equal blocks", lambda: dist.all_to_all_single(uneven, uneven.clone())),
        (ValueError, "this rank's own has 3", lambda: dist.all_gather([torch.zeros(2)] * rank.size, torch.zeros(3))),
        (ValueError, "this rank's own has 3", lambda: dist.reduce_scatter(torch.zeros(3), [torch.zeros(2)] * rank.size)),
        (TypeError, "different types", lambda: dist.all_gather_into_tensor(torch.zeros(4 * rank.size), half)),
    ]:
        try:
            call()
        except error as raised:
            assert message in str(raised), raised
        else:
            raise AssertionError(f"no error with {message}")
    dist.barrier()
    # Lengths differ between ranks: an error on all of them.
    try:
        dist.all_reduce(torch.zeros(10 + rank.number))
    except RuntimeError as raised:
        assert type(raised).__name__ == "FlexringError" and raised.code == raised.DISAGREEMENT, repr(raised)
    else:
        raise AssertionError("no error for different lengths")


@check
def after_destroy(rank):
    torch, dist = rank.torch, rank.dist
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)
    try:
        group.allreduce([torch.ones(1)])
    except (RuntimeError, ValueError) as raised:
        assert "destroyed" in str(raised), raised
    else:
        raise AssertionError("no error after destroy_process_group")


@check
def destroy_with_pending_calls(rank):
    torch, dist = rank.torch, rank.dist
    group, other = dist.new_group(), dist.new_group()
    dist.barrier(group)
    dist.barrier(other)
    if rank.number == 1:
        time.sleep(0.3)
    vectors, received = [rank.data(rank.number, 100_000) for _ in range(5)], torch.zeros(1000)
    works = [dist.all_reduce(vector, group=group, async_op=True) for vector in vectors]
    before = (rank.number - 1) % rank.size
    works.append(dist.isend(rank.data(rank.number), (rank.number + 1) % rank.size, group=group))
    works.append(dist.irecv(received, before, group=group))
    # The receive of a message that no rank sends ends with the group of its sender.
    useless = [dist.irecv(torch.zeros(1), before, group=group, tag=tag) for tag in (0, 5)]
    dist.destroy_process_group(group)
    for work in works:
        work.wait()
    for vector in vectors:
        rank.equal(vector, sum(rank.all_data(count=len(vector))))
    rank.equal(received, rank.data(before))
    works = useless
    # A call that the other ranks do not make.
    begun = time.monotonic()
    if rank.number == 0:
        works.append(dist.all_reduce(torch.ones(1), group=other, async_op=True))
    dist.destroy_process_group(other)
    for work in works:
        try:
            work.wait()
        except RuntimeError:
            pass
        else:
            raise AssertionError("no error of a call that the other ranks did not make")
    assert time.monotonic() - begun < 5


# Rank 0 raises an exception while messages to it and calls of a group are pending, and the others wait for rank 0.
EXIT = """
import datetime, sys, time, torch, torch.distributed as dist, flexring.torch
rank, size = map(int, sys.argv[1:3])
store = dist.FileStore(sys.argv[3], size)
dist.init_process_group("flexring", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=40))
vector, group = torch.zeros(1), dist.new_group()
dist.barrier()
dist.all_reduce(vector, group=group)
print(time.time())
if rank == 0:
    dist.recv(vector, 1)
    works = [dist.irecv(torch.zeros(1), 1), dist.irecv(torch.zeros(1), 1), dist.irecv(torch.zeros(1), 1, tag=7)]
    works += [dist.all_reduce(torch.zeros(1), group=group, async_op=True) for _ in range(2)]
    raise SystemExit("rank 0 ends early")
if rank == 1:
    dist.send(vector, 0)
dist.barrier()
"""


@check
def exit_with_pending_calls(rank):
    store = [f"{tempfile.mkdtemp()}/store" if rank.number == 0 else None]
    rank.dist.broadcast_object_list(store, src=0)
    command = [sys.executable, "-c", EXIT, str(rank.number), str(rank.size), store[0]]
    # The imports of all ranks at the same time take long.
    ended = subprocess.run(command, capture_output=True, text=True, timeout=3 * TIMEOUT)
    took = time.time() - float(ended.stdout)
    message = "rank 0 ends early" if rank.number == 0 else "FlexringError"
    assert ended.returncode == 1 and message in ended.stderr, ended
    assert took < TIMEOUT / 2, f"{took} s after all ranks had met"


def _blamed(out):
    """The rank that torchrun blames."""
    return int(re.search(r"Root Cause.*?rank +: (\d+)", out, re.DOTALL)[1])


@only_with([2])
def failing_rank(rank):
    """Rank 1 of another job raises an exception: torchrun blames that rank, and torch.multiprocessing.spawn shows its exception. Each
    rank here starts half of the jobs, one after the other."""
    rank.dist.barrier()
    program = Path(__file__).with_name("failing_rank.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3", program]
    for style in ("calls", "communicator", "ddp", "fsdp2"):
        command = [*torchrun, style] if rank.number == 0 else [sys.executable, program, style, "3"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=6 * TIMEOUT)
        assert ended.returncode == 1 and "ValueError: no data" in ended.stderr, ended.stderr
        if rank.number == 0:
            assert _blamed(ended.stderr) == 1, f"{style}: {ended.stderr}"
        else:
            assert "Process 1 terminated" in ended.stderr, f"{style}: {ended.stderr}"


def _survivors(rank, work):
    """The last rank kills itself during ``work``. Every other one raises an error that names it, at once."""
    dist = rank.dist
    dist.barrier()
    try:
        # When it ends on the last rank, the others have finished the one before.
        dist.barrier()
        if rank.number == rank.size - 1:
            Path(os.environ["CHECK_DEATH"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(1000):
            work()
            time.sleep(0.001)
    except RuntimeError as error:
        took = time.time() - os.stat(os.environ["CHECK_DEATH"]).st_mtime
        assert f"rank {rank.size - 1}" in str(error), error
        assert took < 2, f"{took} s after the death"
        return f"{took * 1000:.0f} ms"
    raise AssertionError("no error")


@check
def killed_rank(rank):
    torch, dist = rank.torch, rank.dist
    return _survivors(rank, lambda: dist.all_reduce(torch.ones(1000)))


@check
def killed_rank_ddp(rank):
    model = rank.torch.nn.parallel.DistributedDataParallel(rank.model())
    return _survivors(rank, lambda: model(rank.batch(0)[0]).sum().backward())


@check
def killed_rank_fsdp2(rank):
    from torch.distributed.fsdp import fully_shard

    model = rank.model()
    fully_shard(model, mesh=_cpu_mesh(rank))
    return _survivors(rank, lambda: model(rank.batch(0)[0]).sum().backward())


def count_calls():
    """Counts the calls of communicators from now on, by name, where Python hands them to the library."""
    from flexring import _library

    calls = collections.Counter()

    def counting(name, function):
        def count(*arguments):
            calls[name] += 1
            return function(*arguments)

        return count

    for name in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "barrier", "gather", "scatter", *EXCHANGES):
        symbol = f"flexring_{name}"
        if hasattr(_library.library, symbol):
            setattr(_library.library, symbol, counting(name, getattr(_library.library, symbol)))
    return calls


def run_rank(number, size, names, folder):
    """Runs the checks as one rank. Writes a line for each check: its name, and what moved the bytes or what failed."""
    rank = Rank(number, size)
    torch, dist = rank.torch, rank.dist
    torch.set_num_threads(1)
    if os.environ.get("CHECK_IMPORT"):
        import flexring.torch  # noqa: F401
    calls = count_calls()
    with open(folder / f"{number}", "a", buffering=1) as report:
        for name in names:
            calls.clear()
            try:
                # A file for each check: ranks that are late must not read the keys of an earlier one.
                store = dist.FileStore(str(folder / f"store-{name}"), size)
                limit = datetime.timedelta(seconds=TIMEOUT)
                dist.init_process_group("flexring", store=store, rank=number, world_size=size, timeout=limit)
                try:
                    note = CHECKS[name](rank)
                finally:
                    with contextlib.suppress(Exception):
                        dist.destroy_process_group()
                missing = [call for call in MOVED_BY.get(name, ()) if not calls[call]]
                if (missing or not calls) and not (note or "").startswith("not in this torch"):
                    raise AssertionError(f"flexring did not make these calls: {missing or 'any'}; it made {dict(calls)}")
                result = ["ok", note or "flexring"]
            except Exception as error:
                refused = "process groups have no" in str(error)
                text = "".join(traceback.format_exception(type(error), error, error.__traceback__)[-4:])
                result = [REFUSED if refused else "failed", str(error).splitlines()[0] if refused else text]
            print(json.dumps([name, *result]), file=report)


def run_world(size, names):
    """Runs checks on this many ranks. Returns their results by name."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, CHECK_DEATH=f"{folder}/death", OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
        environment.setdefault("FLEXRING_SOCKET_IFNAME", "lo")
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        command = [sys.executable, __file__, "--folder", folder, "--only", ",".join(names), "--ranks", str(size)]
        ranks = [subprocess.Popen([*command, "--rank", str(number)], env=environment) for number in range(size)]
        deadline = time.monotonic() + LIMIT
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.1))
        codes = [process.poll() for process in ranks]
        for process in ranks:
            process.kill()
            process.wait()
        reports = []
        for number in range(size):
            file = Path(folder, str(number))
            lines = file.read_text().splitlines() if file.exists() else []
            reports.append({name: result for name, *result in map(json.loads, lines)})
    for name in names:
        # The rank that dies in a check reports nothing.
        dies = name.startswith("killed_rank")
        expected = reports[:-1] if dies else reports
        found = [report.get(name, ["failed", "no result: the rank hung or died"]) for report in expected]
        if name == names[-1]:
            # A rank that fails after its last check fails that one.
            wanted = [0] * (size - 1) + [-signal.SIGKILL if dies else 0]
            wrong = [f"rank {rank}: {codes[rank]}" for rank in range(size) if codes[rank] != wanted[rank]]
            if wrong:
                found.append(["failed", f"ranks did not end as they should (None: hung): {', '.join(wrong)}"])
        worst = next((result for result in found if result[0] == "failed"), None)
        results[name] = worst or next((result for result in found if result[0] == REFUSED), found[0])
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--only")
    parser.add_argument("--json")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(text) for text in options.ranks.split(",")]
    names = options.only.split(",") if options.only else list(CHECKS)
    if options.rank is not None:
        run_rank(options.rank, sizes[0], names, options.folder)
        return 0

    from importlib.metadata import version

    torch_version = version("torch")
    rows = {name: {} for name in names}
    for size in sizes:
        here = [name for name in names if size in RANKS.get(name, [size])]
        # A check that kills a rank needs processes of its own, and so does one whose groups have other names: torch caches the
        # names of a mesh's groups.
        alone = [name for name in here if name.startswith("killed_rank") or name == "fsdp2_registered"]
        for group in [[name for name in here if name not in alone], *([name] for name in alone)]:
            if group:
                for name, result in run_world(size, group).items():
                    rows[name][size] = result
    width = max(map(len, names)) + 2
    print(f"torch {torch_version}, Python {sys.version.split()[0]}")
    print(f"{'check':{width}}" + "".join(f"{f'{size} ranks':24}" for size in sizes))
    failures = []
    for name, row in rows.items():
        cells = []
        for size in sizes:
            state, text = row.get(size, ["ok", ""])
            cells.append({"ok": text, REFUSED: REFUSED, "failed": "FAILED"}[state])
            if state == "failed":
                failures.append((name, size, text))
        print(f"{name:{width}}" + "".join(f"{cell:24}" for cell in cells))
    for name, size, text in failures:
        print(f"\n{name} with {size} ranks: {text}")
    if options.json:
        Path(options.json).write_text(json.dumps({"torch": torch_version, "rows": rows}))
    print(f"{len(failures)} checks failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
