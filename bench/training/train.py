#!/usr/bin/env python3
"""Trains over flexring and over the other libraries of torch.distributed, on the same data, in one run: steps per second, the time lost to
communication, and whether the losses agree.

    bench/training/train.py [--short] [--clusters 2,4,2+3,1+4] [--works resnet,gpt] [--rounds N] [--steps N] [--without-mpi]
                            [--out FOLDER]

A number is that many ranks on this machine, and 2+3 are two nodes, which are network namespaces with links of 1 Gbit/s (as root). Works are
resnet and gpt by DistributedDataParallel, gpt-fsdp2, and all_reduce, which is none of training. Rounds of steps over each library alternate in the
same processes, and so do rounds without communication (`no_sync`). Writes training.json, training.md and training.svg into FOLDER. Takes at
most 15 minutes, or 3 with --short: what the time did not suffice for is named. Needs torch 2.8 or later, in the interpreter that PYTHON names, in
python3 or in /usr/bin/python3, and a release build or FLEXRING_LIBRARY. Ends with status 1 if a job failed, or if losses or weights differ.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import lab
import mpi_launch
from cluster import Cluster
from common import ROOT, commit, exit_on_signals, python_with, words, write

HERE = Path(__file__).resolve().parent
OLDEST = (2, 8)
WORKS = ("resnet", "gpt", "gpt-fsdp2", "all_reduce")
# Seconds in all, with the report; rounds of each work, and at most so many steps of a library in a round.
LONG, SHORT = (900, 9, 4), (180, 3, 2)
REPORT = 15
# Seconds that a job may take longer than its share, and seconds in which none is started.
GRACE, LEAST = 15, 10


def find_torch():
    """A Python interpreter with a torch that has flexring as a backend, and that torch's version. Or why there is none."""
    found = []
    for python in [os.environ["PYTHON"]] if os.environ.get("PYTHON") else ["python3", "/usr/bin/python3"]:
        try:
            printed = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], text=True, capture_output=True,
                                     timeout=120, check=True).stdout.split()
        except (OSError, subprocess.SubprocessError):
            found.append(f"{python} cannot import torch")
            continue
        version = printed[-1]
        if tuple(map(int, re.findall(r"\d+", version)[:2])) >= OLDEST:
            return (python, version), None
        found.append(f"{python} has torch {version}")
    oldest = ".".join(map(str, OLDEST))
    return None, f"{', '.join(found)}, and flexring as a backend needs {oldest} or later: name an interpreter that has it in PYTHON"


def run_job(python, cluster, options, seconds):
    """Runs the ranks of one cluster. Returns the last record of each work, and the failure of the job or None."""
    its = {"cluster": cluster.name, "nodes": cluster.nodes(), "works": options.works, "seconds": seconds, "rounds": options.rounds,
           "steps": options.steps}
    ranks = [python, HERE / "ranks.py", json.dumps(its)]
    if options.mpi:
        ranks = [sys.executable, HERE / "mpi_launch.py", python, json.dumps(its)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if len(cluster.ranks) == 1:
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "FLEXRING_SOCKET_IFNAME": "lo"}
    else:
        ranks = [ROOT / "bench/lab.sh", *cluster.lab_words(), "--", *ranks]
        environment["GLOO_SOCKET_IFNAME"] = "up0"
    if topology := cluster.topology():
        environment["FLEXRING_TOPOLOGY"] = topology
    failure = None
    try:
        printed = lab.supervised(ranks, seconds + GRACE, **environment)
    except lab.Failure as error:
        printed, failure = error.printed, str(error)
    records, errors = {}, []
    for line in printed.splitlines():
        # Others may print, too, and a line may be cut when its process is killed.
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if "work" in found:
            records[found["work"]] = found
        elif "error" in found:
            errors.append(found["error"])
    return list(records.values()), "; ".join([failure, *errors[:1]]) if failure else None


def difference(losses, expected):
    """The largest difference of two loss curves, as a part of the loss."""
    # A loss that is no number is the largest difference.
    return max((abs(loss - other) / other for loss, other in zip(losses, expected)), key=lambda part: (math.isnan(part), part))


def compare(record):
    """Adds the differences of the losses to the record. Returns what is wrong with them."""
    wrong = []
    curves = record.get("losses", {})
    record["differences"] = {name: difference(losses, curves["gloo"]) for name, losses in curves.items() if name != "gloo"}
    tolerance = record.get("tolerance")
    for name, value in record["differences"].items():
        if tolerance is not None and not value <= tolerance:
            wrong.append(f"{name}: the losses differ from Gloo's by {value:.1e} of the loss, where {tolerance:.0e} is allowed for "
                         "additions in another order: its averages of gradients are wrong")
    wrong += [f"{name}: ranks have different weights" for name, equal in record.get("equal_weights", {}).items() if not equal]
    return wrong


def measure(python, options, end):
    """Measures one cluster after another, each in an equal share of the time that is left."""
    results = {"records": [], "failures": [], "left_out": []}
    for number, cluster in enumerate(options.clusters):
        left = end - time.monotonic()
        if left < LEAST + GRACE:
            results["left_out"].append(", ".join(other.name for other in options.clusters[number:]))
            break
        # The last job must end in time, even if it is killed.
        share = (left - GRACE) / (len(options.clusters) - number)
        records, failure = run_job(python, cluster, options, share)
        if failure:
            results["failures"].append(f"{cluster.name}: {failure}")
        for work in options.works:
            if not failure and not any(record["work"].split()[0] == work for record in records):
                results["left_out"].append(f"{cluster.name}, {work}")
        for record in records:
            results["records"].append(record)
            results["failures"] += [f"{cluster.name}, {record['work']}, {what}" for what in compare(record)]
            rounds = len(record["seconds"]["gloo"])
            if rounds < options.rounds:
                results["left_out"].append(f"{cluster.name}, {record['work']}: rounds after {rounds} of {options.rounds}")
        print(f"{cluster.name}: {'failed' if failure else 'done'}", flush=True)
    for failure in results["failures"]:
        print(f"failed: {failure}", flush=True)
    return results


def cluster_named(name):
    try:
        cluster = Cluster(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if sum(cluster.ranks) < 2 or min(cluster.ranks) < 1:
        raise argparse.ArgumentTypeError(f"{name}: expected at least 2 ranks, and one on each node")
    return cluster


def positive(text):
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a number from 1")
    return int(text)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer rounds and steps, in at most 3 minutes")
    parser.add_argument("--clusters", type=lambda text: [cluster_named(name) for name in words(text)], default="2,4,2+3,1+4",
                        help="numbers of ranks, and clusters, separated by commas [default: 2,4,2+3,1+4]")
    parser.add_argument("--works", type=words, default=["resnet", "gpt"], help=f"of {', '.join(WORKS)} [default: resnet,gpt]")
    parser.add_argument("--rounds", type=positive, help=f"of each work [default: {LONG[1]}; {SHORT[1]} with --short]")
    parser.add_argument("--steps", type=positive, help=f"over a library in a round, at most [default: {LONG[2]}; {SHORT[2]} with --short]")
    parser.add_argument("--without-mpi", action="store_true", help="leave Open MPI out, whose mpirun otherwise starts all ranks")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/out/training", help="folder of the report [default: bench/out/training]")
    options = parser.parse_args()
    if unknown := set(options.works) - set(WORKS):
        parser.error(f"no such work: {', '.join(sorted(unknown))}")
    options.limit, rounds, steps = SHORT if options.short else LONG
    options.rounds, options.steps = options.rounds or rounds, options.steps or steps
    return options


def main():
    options = parse()
    exit_on_signals()
    begun = time.monotonic()
    found, reason = find_torch()
    if not found:
        print(f"skipped: training: {reason}")
        return
    python, version = found
    about = {"commit": commit(), "load_before": os.getloadavg()[0], "torch": version, "skipped": {}}
    reason = "by --without-mpi" if options.without_mpi else mpi_launch.missing()
    options.mpi = not reason
    if reason:
        about["skipped"]["Open MPI"] = reason
    if reason := lab.missing():
        there = [cluster for cluster in options.clusters if len(cluster.ranks) == 1]
        if len(there) < len(options.clusters):
            about["skipped"]["clusters"] = reason
        options.clusters = there
    for name, reason in about["skipped"].items():
        print(f"skipped: {name}: {reason}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    results = about | measure(python, options, begun + options.limit - REPORT)
    results["minutes"] = round((time.monotonic() - begun) / 60, 1)
    write(options.out / "training.json", "training", results)
    # Another interpreter may be the one that has matplotlib.
    drawing = python_with("matplotlib") or sys.executable
    subprocess.run([drawing, HERE / "report.py", options.out], check=True)
    if results["failures"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
