"""The backend `flexring` of torch.distributed on CUDA tensors: each collective, also in CUDA graphs,
then DDP and FSDP2 beside training in one process.

Ranks are processes with the variables of torchrun. Rank 0 prints a line of JSON; a wrong result ends with an error.
"""

import copy
import datetime
import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flexring.torch  # noqa: F401 (registers the backend)

STEPS = 10
COUNTS = (1, 1000, 300_001)
TYPES = (torch.float32, torch.bfloat16, torch.int64)


def equal(found, wanted, what):
    if not torch.equal(found.cpu(), wanted.cpu()):
        raise SystemExit(f"{what}: {found.flatten()[:8]} instead of {wanted.flatten()[:8]}")


def vector(rank, count, dtype):
    """The vector of a rank: small numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-3, 4, (count,), generator=generator).to(dtype).cuda()


def collectives(rank, size, count, dtype):
    """Every collective once, checked. Returns their number."""
    own = vector(rank, count, dtype)
    every = [vector(other, count, dtype) for other in range(size)]
    wanted = torch.stack(every).sum(0).to(dtype)

    tensor = own.clone()
    dist.all_reduce(tensor)
    equal(tensor, wanted, "all_reduce")

    tensor = own.clone()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    equal(tensor, wanted, "asynchronous all_reduce")

    tensor = own.clone()
    dist.broadcast(tensor, src=1)
    equal(tensor, every[1], "broadcast")

    gathered = torch.empty(size * count, dtype=dtype, device="cuda")
    dist.all_gather_into_tensor(gathered, own)
    equal(gathered, torch.cat(every), "all_gather_into_tensor")

    whole = [torch.cat([vector(other + 10 * part, count, dtype) for part in range(size)]) for other in range(size)]
    part = torch.empty(count, dtype=dtype, device="cuda")
    dist.reduce_scatter_tensor(part, whole[rank])
    equal(part, torch.stack(whole).sum(0).to(dtype)[rank * count : (rank + 1) * count], "reduce_scatter_tensor")

    exchanged = torch.empty(size * count, dtype=dtype, device="cuda")
    dist.all_to_all_single(exchanged, whole[rank])
    equal(exchanged, torch.cat([block[rank * count : (rank + 1) * count] for block in whole]), "all_to_all_single")

    peer = torch.empty(count, dtype=dtype, device="cuda")
    if rank == 0:
        dist.send(own, 1)
        dist.recv(peer, 1)
    elif rank == 1:
        dist.recv(peer, 0)
        dist.send(own, 0)
    if rank < 2:
        equal(peer, every[1 - rank], "send and recv")
    dist.barrier()
    return 8


def graphs(rank, size):
    """Collectives in CUDA graphs, replayed with other vectors, and called between the replays. Returns the number of replays."""
    replays = 0
    for count in COUNTS:
        summed, gathered = torch.zeros(count, device="cuda"), torch.zeros(size * count, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(summed)
            work = dist.all_gather_into_tensor(gathered, summed, async_op=True)
            work.wait()
            dist.broadcast(summed, src=1)
        for step in range(3):
            every = [vector(other + 100 * step, count, torch.float32) for other in range(size)]
            wanted = torch.stack(every).sum(0)
            summed.copy_(every[rank])
            graph.replay()
            equal(summed, wanted, "all_reduce in a graph")
            equal(gathered, wanted.repeat(size), "all_gather_into_tensor in a graph")
            dist.all_reduce(every[rank], op=dist.ReduceOp.MAX)
            replays += 1
    return replays


def network():
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)).cuda()


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(32, 256, generator=generator)
    return inputs.cuda(), inputs.sum(1, keepdim=True).cuda() / 16


def train(model, rank):
    """Losses of this rank, and milliseconds per step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, begun = [], time.perf_counter()
    for step in range(STEPS):
        inputs, wanted = batch(step, rank)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, 1e3 * (time.perf_counter() - begun) / STEPS


def reference(rank, size):
    """The losses of a rank if one process trains on the batches of all."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for other in range(size):
            inputs, wanted = batch(step, other)
            loss = nn.functional.mse_loss(model(inputs), wanted)
            (loss / size).backward()
            if other == rank:
                losses.append(loss.item())
        optimizer.step()
    return losses


def main():
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("flexring", timeout=datetime.timedelta(seconds=30))
    rank, size = dist.get_rank(), dist.get_world_size()
    calls = sum(collectives(rank, size, count, dtype) for count in COUNTS for dtype in TYPES)

    replays = graphs(rank, size)

    wanted = reference(rank, size)
    made = network()
    result = {"torch": torch.__version__, "ranks": size, "collectives": calls, "replays": replays, "steps": STEPS}
    losses, result["ddp_step_ms"] = train(DistributedDataParallel(copy.deepcopy(made), bucket_cap_mb=1), rank)
    if not torch.allclose(torch.tensor(losses), torch.tensor(wanted), rtol=1e-4):
        raise SystemExit(f"DDP: losses {losses} instead of {wanted}")

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (size,))
    for layer in made:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    losses, result["fsdp2_step_ms"] = train(made, rank)
    if not torch.allclose(torch.tensor(losses), torch.tensor(wanted), rtol=1e-4):
        raise SystemExit(f"FSDP2: losses {losses} instead of {wanted}")
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
