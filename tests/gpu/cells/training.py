"""Trains with DistributedDataParallel over flexring on a GPU, and makes calls followed by a blocking copy to the host.

Ranks are processes with the variables of torchrun. Rank 0 prints a line of JSON; a wrong result ends with an error.
"""

import datetime
import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flexring.torch

CALLS, STEPS = 200, 30


def calls(comm):
    """Sums of random tensors, each copied to the host at once. Returns milliseconds per call."""
    generator = torch.Generator().manual_seed(7)
    seconds = 0.0
    for call in range(CALLS):
        count = (5, 1000, 70_000, 1 << 20)[call % 4]
        both = torch.randint(-1000, 1000, (comm.size, count), generator=generator).float()
        wanted = both.sum(0)
        tensor = both[comm.rank].cuda()
        begun = time.perf_counter()
        comm.all_reduce(tensor)
        got = tensor.cpu()
        seconds += time.perf_counter() - begun
        if not torch.equal(got, wanted):
            raise SystemExit(f"call {call}: a wrong sum of {count} elements")
        # New memory and its release between calls.
        del tensor
        if call % 20 == 0:
            torch.cuda.empty_cache()
    comm.synchronize()
    return 1e3 * seconds / CALLS


def train(comm):
    torch.manual_seed(11)
    network = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)).cuda()
    model = DistributedDataParallel(network, bucket_cap_mb=1)
    flexring.torch.register(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(100 + comm.rank)
    inputs = torch.randn(64, 256).cuda()
    wanted = inputs.sum(1, keepdim=True) / 16
    losses, begun = [], time.perf_counter()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        optimizer.step()
        # Both block the host until the stream is done.
        losses.append(loss.item())
        next(model.parameters()).grad.cpu()
    seconds = time.perf_counter() - begun
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()]).cpu()
    others = [torch.empty_like(weights) for _ in range(comm.size)]
    dist.all_gather(others, weights)
    if not all(torch.equal(weights, other) for other in others):
        raise SystemExit("the ranks have different weights")
    if not losses[-1] < losses[0]:
        raise SystemExit(f"the loss did not fall: {losses}")
    return {"steps": STEPS, "step_ms": 1e3 * seconds / STEPS, "loss": [losses[0], losses[-1]]}


def main():
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    # A context, so that flexring prepares this GPU when the ranks join.
    torch.zeros(1, device="cuda")
    comm = flexring.torch.from_process_group()
    result = {"torch": torch.__version__, "calls": CALLS, "call_ms": calls(comm)}
    result |= train(comm)
    if comm.rank == 0:
        print(json.dumps(result), flush=True)
    comm.synchronize()
    dist.barrier()
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
