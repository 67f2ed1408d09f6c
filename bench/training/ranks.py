"""Trains with each library by turns in the processes of one job, and measures the steps.

    ranks.py JSON

train.py starts it, on this machine or inside bench/lab.sh. It forks the ranks, unless mpirun started it as one of them. Rank 0 prints the record of a work as a line of JSON after each round, and a rank
that fails prints its error as one. The libraries' groups and models exist side by side in each process, so that a drifting machine affects all.
"""

import contextlib
import functools
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

BENCH = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(BENCH), str(BENCH.parent / "examples")]

import forked_ranks
import lab
import training  # adds the folder of the package flexring
import flexring.torch  # isort: skip
from common import in_order
from models import ImageTraining, TextTraining
from mpi_hook import MpiHook

# The same step without communication.
ALONE = "alone"
VECTORS = (4, 4096, 1 << 20)
# So many rounds are to fit into the time, with fewer calls in each if these are slow.
LEAST_ROUNDS = 4


class Libraries:
    """The groups of this process. Those of all libraries have all ranks."""

    def __init__(self):
        self.backends = {name: training.Backend(name) for name in ("flexring", "gloo")}
        # Gloo's group with hooks.
        self.communicator = flexring.torch.from_process_group()
        self.mpi = MpiHook() if "OMPI_COMM_WORLD_RANK" in os.environ else None

    def wrap(self, name, model, strategy="ddp"):
        """The model, parallel over all ranks."""
        if name == "flexring hook":
            model = self.backends["gloo"].wrap(model, strategy)
            flexring.torch.register(model, self.communicator)
            return model
        if name == "mpi":
            model = self.backends["gloo"].wrap(model, strategy)
            model.register_comm_hook(self.mpi, MpiHook.average)
            return model
        return self.backends["gloo" if name == ALONE else name].wrap(model, strategy)


class Run:
    """The training of one model over one library."""

    def __init__(self, libraries, name, work, strategy):
        torch.manual_seed(training.SEED)
        self.work = work
        self.model = libraries.wrap(name, work.model(), strategy)
        self.optimizer = work.optimizer(self.model.parameters())
        self.context = self.model.no_sync if name == ALONE else contextlib.nullcontext
        self.losses = []

    def step(self):
        self.optimizer.zero_grad()
        with self.context():
            loss = self.work.loss(self.model, len(self.losses))
            loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def mean_losses(self):
        """The loss of each step, the mean of all ranks."""
        losses = torch.tensor(self.losses, dtype=torch.float64)
        dist.all_reduce(losses)
        return (losses / dist.get_world_size()).tolist()


def timed(count, function):
    """Calls a function. Returns seconds per call: the largest of all ranks' times, and the sum of their processors' times."""
    dist.barrier()
    start, processor = time.monotonic(), time.process_time()
    for _ in range(count):
        function()
    values = torch.tensor([time.monotonic() - start, time.process_time() - processor], dtype=torch.float64) / count
    largest = values.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.all_reduce(values)
    return largest[0].item(), values[1].item()


def agreed(number):
    """The number of rank 0, on all ranks."""
    number = torch.tensor([number], dtype=torch.float64)
    dist.broadcast(number, 0)
    return number.item()


def time_left(seconds):
    """Whether rank 0 has this time, on all ranks."""
    return agreed(seconds) > 0


def by_turns(record, functions, most, rounds, end):
    """Times `functions`, by library, at most `most` calls of each in a round. Adds their times to the record, and yields after each round."""
    begun = time.monotonic()
    if not time_left(end - begun):
        return
    # The first call connects and allocates.
    first = sum(timed(1, function)[0] for function in functions.values())
    # All ranks have the same `first`, but not the same clock.
    record["calls"] = count = max(1, min(most, int(agreed(end - time.monotonic()) / (LEAST_ROUNDS * first))))
    longest = 0
    for number in range(rounds):
        begun = time.monotonic()
        # A round that cannot end in time would favour those that come first.
        if number and not time_left(end - begun - longest):
            return
        for name in in_order(list(functions), number):
            seconds, processor = timed(count, functions[name])
            record["seconds"].setdefault(name, []).append(seconds)
            record["processor"].setdefault(name, []).append(processor)
        longest = max(longest, time.monotonic() - begun)
        yield


def report(record):
    if dist.get_rank() == 0:
        print(json.dumps(record), flush=True)
        times = ", ".join(f"{name} {seconds[-1]:.3g} s" for name, seconds in record["seconds"].items())
        print(f"  round {len(record['seconds']['gloo'])}, {record['cluster']}, {record['work']}: {times}", file=sys.stderr, flush=True)


def train(libraries, work, strategy, options, end):
    """Measures steps of one model."""
    if strategy == "ddp":
        names = ["flexring", "flexring hook", "gloo", *(["mpi"] if libraries.mpi else []), ALONE]
    else:
        # With sharded weights there is no step without communication, and the hooks are others.
        names = ["flexring", "gloo"]
    runs = {name: Run(libraries, name, work, strategy) for name in names}
    count = sum(weight.numel() for weight in runs["gloo"].model.parameters())
    record = new_record(options, work.name if strategy == "ddp" else f"{work.name}-{strategy}")
    # FSDP2's gradients are wrong over Gloo of torch 2.8, see `averages`.
    compared = strategy == "ddp" or training.averages(libraries.backends["gloo"].group)
    record |= {"batch": work.batch, "parameters": count, "tolerance": work.tolerance if compared else None, "losses": {}, "equal_weights": {}}
    for _ in by_turns(record, {name: run.step for name, run in runs.items()}, options["steps"], options["rounds"], end):
        record["losses"] = {name: run.mean_losses() for name, run in runs.items() if name != ALONE}
        report(record)
    if record["losses"]:
        record["equal_weights"] = {name: training.ranks_agree(run.model) for name, run in runs.items() if name != ALONE}
        if dist.get_rank() == 0:
            print(json.dumps(record), flush=True)


def all_reduces(libraries, size, options, end):
    """Measures blocking all-reduces of `size` bytes."""
    vector = torch.zeros(size // 4)
    calls = {name: functools.partial(dist.all_reduce, vector, group=backend.group) for name, backend in libraries.backends.items()}
    record = new_record(options, f"all_reduce of {size} B")
    for _ in by_turns(record, calls, 30 if size >= 1 << 20 else 300, options["rounds"], end):
        report(record)


def new_record(options, work):
    return {"cluster": options["cluster"], "work": work, "ranks": dist.get_world_size(), "seconds": {}, "processor": {}}


def run_rank(options, works):
    """Measures one work after another, each in an equal share of the time that is left."""
    end = time.monotonic() + options["seconds"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    libraries = Libraries()
    for number, work in enumerate(works):
        now = time.monotonic()
        work(libraries, options, now + (end - now) / (len(works) - number))
    if libraries.mpi:
        libraries.mpi.close()
    # Rank 0 serves the others' barrier.
    dist.barrier()


def work_named(name):
    if name == "all_reduce":
        def measure(libraries, options, end):
            for number, size in enumerate(VECTORS):
                now = time.monotonic()
                all_reduces(libraries, size, options, now + (end - now) / (len(VECTORS) - number))

        return measure
    model, _, strategy = name.partition("-")
    work = {"resnet": ImageTraining, "gpt": TextTraining}[model]()
    return lambda libraries, options, end: train(libraries, work, strategy or "ddp", options, end)


def main():
    options = json.loads(sys.argv[1])
    works = [work_named(name) for name in options["works"]]

    def run():
        try:
            run_rank(options, works)
        except Exception as error:
            message = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(json.dumps({"error": f"rank {os.environ['RANK']}: {message}"}), flush=True)
            raise

    if "OMPI_COMM_WORLD_RANK" in os.environ:
        # mpi_launch.py has set the address of rank 0.
        os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"]
        forked_ranks.run_and_exit(run)
    nodes = options["nodes"]
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = lab.master(nodes if lab.NODES else ())
    forked_ranks.start([lab.NODES[node] if lab.NODES else None for node in nodes], run)


if __name__ == "__main__":
    main()
