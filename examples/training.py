"""What the training examples share: process groups, DDP or FSDP2, the loop, and the comparison of loss curves with Gloo's.

A program of your own needs two of these lines: ``init_process_group("flexring")``, and below torch 2.14 ``import flexring.torch``.
"""

import argparse
import hashlib
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# The package of this checkout, unless one is installed.
sys.path.append(str(Path(__file__).resolve().parent.parent / "python"))
import flexring.torch  # noqa: E402

SEED = 1998
# Older versions of torch take flexring as a communication hook in a group of Gloo.
IS_BACKEND = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)


class Backend:
    """How gradients and parameters travel: the name of a backend, and a process group of it."""

    def __init__(self, name):
        self.name = name
        self.group = dist.group.WORLD
        if dist.get_backend() != name and IS_BACKEND:
            self.group = dist.new_group(backend=name)

    def wrap(self, model, strategy):
        """The model, parallel over all ranks. ``model.layers`` are sharded one by one by FSDP2."""
        if strategy == "fsdp2":
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.fsdp import fully_shard

            mesh = DeviceMesh.from_group(self.group, "cpu")
            for layer in model.layers:
                if list(layer.parameters()):
                    fully_shard(layer, mesh=mesh)
            model = fully_shard(model, mesh=mesh)
            # Buffers in memory that the other ranks read, where backend and version of torch have it.
            for part in model.modules():
                if hasattr(part, "set_allocate_memory_from_process_group_for_comm"):
                    part.set_allocate_memory_from_process_group_for_comm(True)
            return model
        # Buckets small enough that several travel while the backward pass still computes, and without copies of gradients.
        model = DistributedDataParallel(model, process_group=self.group, bucket_cap_mb=4, gradient_as_bucket_view=True)
        if self.name == "flexring" and not IS_BACKEND:
            flexring.torch.register(model)
        return model


def arguments(description, steps):
    """The parser of the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["flexring", "gloo"], default="flexring")
    parser.add_argument("--strategy", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--alone", action="store_true", help="do not train a second time over Gloo to compare the losses")
    return parser


def full(weight):
    """All of a weight, which FSDP2 shards."""
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach()


def ranks_agree(model):
    """Whether all ranks have bitwise equal weights, none of them NaN. Ranks exchange digests of their weights."""
    digest, valid = hashlib.sha256(), True
    for weight in model.parameters():
        weight = full(weight).flatten()
        digest.update(weight.view(torch.uint8).numpy())
        valid = valid and not weight.isnan().any()
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest() if valid else None)
    return None not in digests and len(set(digests)) == 1


def averages(group):
    """Whether reduce-scatters average where they should. Gloo's sum in torch 2.8 (PyTorch's issue 162338), so that FSDP2's gradients
    are too large. DDP's are right, and the same as FSDP2's."""
    size = dist.get_world_size(group)
    part = torch.zeros(1)
    dist.reduce_scatter_tensor(part, torch.ones(size), dist.ReduceOp.AVG, group=group)
    return part.item() == 1


def train(backend, options, make_model, make_optimizer, loss_of, report=None):
    """Trains a new model. ``loss_of(model, step)`` is this rank's loss. Returns the loss of each step, the mean of all ranks, and
    whether all ranks have equal weights at the end."""
    torch.manual_seed(SEED)
    model = backend.wrap(make_model(), options.strategy)
    optimizer = make_optimizer(model.parameters())
    losses = torch.zeros(options.steps, dtype=torch.float64)
    start = time.monotonic()
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    seconds = time.monotonic() - start
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    same = ranks_agree(model)
    note = report(model) if report else ""
    if dist.get_rank() == 0:
        shown = losses[:: max(options.steps // 8, 1)].tolist()
        print(f"{backend.name}, {options.strategy}: {dist.get_world_size()} ranks, {options.steps / seconds:.2f} steps/s{note}")
        print(f"  loss      {' '.join(f'{loss:.4f}' for loss in shown)} {losses[-1].item():.4f}")
        print(f"  weights   {'the same on all ranks' if same else 'DIFFERENT between ranks'}", flush=True)
    return losses, same


def run(options, tolerance, *parts, **more):
    """Trains over the chosen backend, and over Gloo with the same initial weights and data. Returns the exit code: 1 if the loss
    curves differ by more than ``tolerance``, relative to the loss, or if ranks end with different weights."""
    torch.set_num_threads(1)
    if options.strategy == "fsdp2" and not IS_BACKEND:
        sys.exit(f"FSDP2 over flexring needs torch 2.8 or later, but this is {torch.__version__}: use --strategy ddp")
    # The process group, once for the whole program.
    dist.init_process_group(options.backend if IS_BACKEND else "gloo")
    losses, passed = train(Backend(options.backend), options, *parts, **more)
    if not options.alone:
        gloo = Backend("gloo")
        if options.strategy == "fsdp2" and not averages(gloo.group):
            options.strategy = "ddp"
        expected, same = train(gloo, options, *parts, **more)
        difference = ((losses - expected) / expected).abs().max().item()
        agree = difference <= tolerance
        passed = passed and same and agree
        if dist.get_rank() == 0:
            print(
                f"the loss curve {'agrees' if agree else 'DIFFERS'} with Gloo's: the largest relative difference is "
                f"{difference:.1e}, {tolerance:.0e} is allowed"
            )
    dist.barrier()
    dist.destroy_process_group()
    return 0 if passed else 1
