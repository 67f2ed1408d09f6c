#!/usr/bin/env python3
"""Steps per second over flexring beside Gloo: the GPT of examples/train_gpt.py, with DDP and FSDP2; and small all-reduces.

    torchrun --nproc_per_node 4 bench/torch_training.py [--out FILE]

Both backends have a process group in the same processes, and rounds of steps over one alternate with rounds over the other, so
that whatever else the machine does meets both. The ratio is the median of the rounds' ratios. The processor's time of all ranks
is reported, too: with more ranks than cores it limits the rate, and other programs change it less. Needs torch 2.8 or later.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import train_gpt  # noqa: E402
import training  # noqa: E402
from common import write  # noqa: E402

BACKENDS = ("flexring", "gloo")
SIZES = (4, 4096, 1 << 20)


def alternated(rounds, measure):
    """What ``measure(backend)`` returns in each round, by backend. Which backend is first alternates, too."""
    found = {name: [] for name in BACKENDS}
    for number in range(rounds):
        for name in BACKENDS if number % 2 else reversed(BACKENDS):
            found[name].append(measure(name))
    return found


def summary(what, found):
    """A row of the report: seconds by backend, with the ratio of each round, which is above 1 where flexring is faster."""

    def compared(place):
        seconds = {name: [values[place] for values in found[name]] for name in BACKENDS}
        ratios = [gloo / ours for ours, gloo in zip(seconds["flexring"], seconds["gloo"])]
        return {
            "seconds": {name: statistics.median(seconds[name]) for name in BACKENDS},
            "least": {name: min(seconds[name]) for name in BACKENDS},
            "ratio": statistics.median(ratios),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }

    return {**what, "ranks": dist.get_world_size(), **compared(0), "processor": compared(1)}


def timed(count, function):
    """Calls a function. Returns seconds per call: the largest of all ranks' times, and the sum of their processors' times."""
    dist.barrier()
    start, processor = time.monotonic(), time.process_time()
    for number in range(count):
        function(number)
    values = torch.tensor([time.monotonic() - start, time.process_time() - processor], dtype=torch.float64) / count
    largest = values.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.all_reduce(values)
    return largest[0].item(), values[1].item()


def steps(backends, strategy, options, text):
    """Seconds per training step."""
    trained = {}
    for name, backend in backends.items():
        torch.manual_seed(training.SEED)
        model = backend.wrap(train_gpt.Gpt(), strategy)
        trained[name] = model, torch.optim.AdamW(model.parameters(), lr=3e-4)

    def measure(name, count=options.steps):
        model, optimizer = trained[name]

        def train(step):
            inputs, targets = train_gpt.batch_of(text, step, options.sequences, options.length)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
            optimizer.step()

        return timed(count, train)

    alternated(1, lambda name: measure(name, 1))
    batch = {"sequences": options.sequences, "bytes in a sequence": options.length}
    return summary({"what": f"{strategy}, step", **batch}, alternated(options.rounds, measure))


def all_reduces(backends, size, calls, rounds):
    """Seconds per blocking all-reduce."""
    vector = torch.zeros(size // 4)

    def measure(name):
        group = backends[name].group
        return timed(calls, lambda _: dist.all_reduce(vector, group=group))

    alternated(1, measure)
    return summary({"what": f"all_reduce of {size} bytes"}, alternated(rounds, measure))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="all_reduce,ddp,fsdp2", help="what to measure")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="steps in a round")
    parser.add_argument("--sequences", type=int, default=2, help="pieces of text in a batch of one rank")
    parser.add_argument("--length", type=int, default=64, help="bytes in a piece")
    parser.add_argument("--out", help="a file for the results, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    backends = {name: training.Backend(name) for name in BACKENDS}
    results = []

    def report(row):
        results.append(row)
        if dist.get_rank() == 0:
            ours, gloo = (row["seconds"][name] * 1e6 for name in BACKENDS)
            times = f"flexring {ours:12,.0f} us  Gloo {gloo:12,.0f} us  {row['ratio']:.2f}x  (processor {row['processor']['ratio']:.2f}x)"
            print(f"{row['what']:28} {row['ranks']} ranks  {times}", flush=True)

    chosen = options.only.split(",")
    if "all_reduce" in chosen:
        for size in SIZES:
            report(all_reduces(backends, size, 30 if size >= 1 << 20 else 300, options.rounds))
    text = train_gpt.load(None)
    for strategy in ("ddp", "fsdp2"):
        if strategy in chosen:
            report(steps(backends, strategy, options, text))
    if options.out and dist.get_rank() == 0:
        write(options.out, f"torch {torch.__version__}: flexring beside Gloo, alternating", results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
