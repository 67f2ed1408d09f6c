#!/usr/bin/env python3
"""Compares flexring with the other libraries of this machine, on the same work, in one run.

    bench/versus/versus.py [--short] [--minutes N] [--only node,clusters] [--ranks 2,4] [--clusters 2+3,1+4] [--peers NAME;...] [--out FOLDER]
    bench/versus/versus.py --compare OLD.json NEW.json

Runs the loop of bench/peers/allreduce.c with each library by turns, round by round: over shared memory, over TCP on loopback, and on
clusters of network namespaces (as root). Writes versus.json, versus.md and pictures into FOLDER. Takes at most 60 minutes, or 5 with
--short, or as long as --minutes says: what the time did not suffice for is named. A library that is not here is named as skipped, and
one that fails or exceeds its time is killed and named. Settings of flexring in the environment (FLEXRING_ALGO) hold. Needs a release
build; pictures need matplotlib. Ends with status 1 if flexring failed. --compare prints how far two runs agree.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import clusters
import lab
from agree import agree
from common import ROOT, commit, exit_on_signals, in_order, python_with, run, words, write
from measures import human, is_ours, rounds_of
from peers import Place, all_peers, present
from turns import Turns, fitting, setting

PARTS = ("node", "clusters")


class Long:
    """The bounds of a run of an hour, in seconds and bytes."""

    # A round takes about 25 minutes on all clusters, and 12 on one node.
    limit, node_part = 3600, 0.35
    # Seconds of the loop for each length, the most calls, and seconds of a library's process. Processes of one library differ more than the calls of one, so on
    # one node many short processes tell more than few long ones.
    node_loop, cluster_loop = (0.3, 2000, 90), (0.5, 500, 120)
    # Lengths up to this one and longer ones, which take three quarters of the time, have rounds of their own on one node.
    short = 16 << 20
    sizes = [8, 64, 512, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 128 << 20, 1 << 30]
    cluster_sizes = [64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20]
    ranks, bf16_ranks = [2, 3, 4, 8, 16, 64], [2, 4, 8]
    clusters = clusters.CLUSTERS
    rounds = 6
    iperf3_seconds = 2
    # With --short, the first clusters may take more than their share, and the last ones may be left out.
    cluster_seconds = 0

    def __init__(self, minutes):
        """The same in another number of minutes: all times change in proportion."""
        if minutes:
            scale = 60 * minutes / self.limit
            self.limit, self.cluster_seconds = 60 * minutes, scale * self.cluster_seconds
            self.node_loop, self.cluster_loop = ((scale * seconds, calls, max(20, scale * limit))
                                                 for seconds, calls, limit in (self.node_loop, self.cluster_loop))


class Short(Long):
    """The same for 5 minutes."""

    limit, node_part = 300, 0.45
    node_loop, cluster_loop = (0.1, 1000, 15), (0.5, 100, 12)
    sizes = [8, 4 << 10, 64 << 10, 1 << 20, 16 << 20]
    cluster_sizes = [64 << 10, 1 << 20, 16 << 20]
    ranks, bf16_ranks = [2, 4], [4]
    clusters = clusters.SHORT
    rounds = 3
    iperf3_seconds = 1
    cluster_seconds = 30


# Seconds that the report takes, with the pictures.
REPORT = 20


def memory_bytes():
    lines = dict(line.split(":") for line in open("/proc/meminfo"))
    return int(lines["MemTotal"].split()[0]) * 1024


def memory_bound_us(ranks, size, traffic):
    """Microseconds in which the processors can move what an all-reduce must, by length, if no cache keeps it.

    Each element of all ranks is read once and its sum written once, then the sum is copied to the others: read and written ranks - 1 times.
    """
    return 1e6 * size * ((ranks + 1) + 2 * (ranks - 1)) / traffic


def memory_traffic(folder):
    """Bytes that all processors together read and write in a second."""
    program = Path(folder) / "memory_traffic"
    run(["cc", "-O2", ROOT / "bench/peers/memory_traffic.c", "-lpthread", "-o", program])
    return float(run([program, os.cpu_count()]))


def node_settings(options, bounds, traffic):
    """Pairs of a place and a setting on this machine."""
    pairs = []
    for dtype, transport, ranks in [
        *(("f32", transport, ranks) for ranks in options.ranks for transport in ("shm", "tcp")),
        *(("bf16", "shm", ranks) for ranks in options.ranks if ranks in bounds.bf16_ranks),
    ]:
        # All vectors together take less than a quarter of the memory.
        sizes = [size for size in bounds.sizes if size * ranks <= memory_bytes() // 4]
        where = {"shm": "shared memory", "tcp": "TCP on loopback"}[transport]
        limits = {size: memory_bound_us(ranks, size, traffic) for size in sizes if size >= 16 << 20} if transport == "shm" else {}
        place = Place(ranks, transport)
        pairs.append((place, setting(f"{ranks} ranks, {where}, {dtype}", place, dtype, sizes, limits)))
    return pairs


class Work:
    """The short or the long lengths of a setting on this machine, which have rounds of their own."""

    def __init__(self, place, its, sizes):
        self.place, self.its, self.sizes = place, its, sizes
        self.rounds = 0
        # What each library took in its longest round.
        self.seconds = {}

    def seconds_of_round(self):
        return sum(self.seconds.values())

    def measure(self, turns, peers, first):
        """A round, in which the library with the number `first` comes first."""
        for peer in in_order(fitting(peers, self.place, self.its["dtype"]), first):
            begun = time.monotonic()
            turns.take(peer, self.place, self.its, self.rounds, self.sizes)
            seconds = time.monotonic() - begun
            # One that was killed makes no further rounds with these lengths.
            self.seconds[peer.name] = max(self.seconds.get(peer.name, 0), seconds) if turns.lengths(peer, self.its, self.sizes) else 0
        self.rounds += 1


def next_work(all_work, rounds, left):
    """What has no round yet, or else what can have a further one: as much as fits into the seconds that are left, quickest first."""
    if new := [work for work in all_work if not work.rounds]:
        return new
    waiting = sorted((work for work in all_work if work.rounds < rounds), key=Work.seconds_of_round)
    return [work for work, so_far in zip(waiting, itertools.accumulate(map(Work.seconds_of_round, waiting))) if so_far <= left]


def measure_node(bounds, peers, pairs, end, left_out):
    """Measures the settings of this machine in rounds. After the first one, a round has as many settings as fit into the time that is left, quickest first: few ranks
    are quick to measure, and get more rounds than many."""
    turns = Turns(bounds.node_loop, end)
    all_work = [Work(place, its, sizes) for is_long in (False, True) for place, its in pairs
                if (sizes := [size for size in its["sizes"] if (size > bounds.short) == is_long])]
    while not turns.over() and (fits := next_work(all_work, bounds.rounds, end - time.monotonic())):
        work = min(fits, key=lambda work: work.rounds)
        work.measure(turns, peers, all_work.index(work) + work.rounds)
    if unmeasured := [work for work in all_work if not work.rounds]:
        left_out += [f"{work.its['title']}, {human(work.sizes[0])} to {human(work.sizes[-1])}" for work in unmeasured]
    for _, its in pairs:
        print(f"{its['title']}: up to {rounds_of(its)} of {bounds.rounds} rounds are done", flush=True)


def measure_clusters(options, bounds, peers, folder, end, found, wire, failures, left_out):
    """Measures one cluster after another, each in a share of the time that is left, and appends to `found`."""
    needed = [clusters.seconds_of_round(name, bounds.cluster_sizes) for name in options.clusters]
    for number, name in enumerate(options.clusters):
        left = end - time.monotonic()
        share = left * needed[number] / sum(needed[number:])
        # One round of the fastest libraries takes so long.
        if left < 10:
            left_out.append(f"clusters: {', '.join(options.clusters[number:])}")
            return
        # Another library comes first in each cluster, after flexring: if the time is short, not the same ones are left out.
        arguments = {"cluster": name, "first": number, "folder": str(folder), "peers": [peer.name for peer in peers], "sizes": bounds.cluster_sizes,
                     "rounds": bounds.rounds, "loop": bounds.cluster_loop, "iperf3_seconds": bounds.iperf3_seconds,
                     "wire": wire, "seconds": min(left, max(share, bounds.cluster_seconds))}
        try:
            its, rates = clusters.run(arguments)
            wire.update(rates)
            found.append(its)
            print(f"cluster {name}: {rounds_of(its)} of {bounds.rounds} rounds are done", flush=True)
        except lab.Failure as failure:
            failures.append(f"cluster {name}: {failure}")
            print(f"failed: {failures[-1]}", flush=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer lengths, ranks, rounds and clusters, in at most 5 minutes")
    parser.add_argument("--minutes", type=float, help="how long it may take in all [default: 60, or 5 with --short]")
    parser.add_argument("--compare", nargs=2, metavar=("OLD", "NEW"), help="compare the versus.json of two runs, and measure nothing")
    parser.add_argument("--only", type=words, default=list(PARTS), help="parts, separated by commas: node, clusters")
    parser.add_argument("--ranks", help="numbers of ranks on this machine, separated by commas")
    parser.add_argument("--clusters", type=words, help="clusters, separated by commas; default: " + ",".join(clusters.CLUSTERS))
    parser.add_argument("--peers", help="libraries, separated by semicolons; default: " + ";".join(peer.name for peer in all_peers()))
    parser.add_argument("--out", default=str(ROOT / "bench/out/versus"), help="folder of the report [default: bench/out/versus]")
    options = parser.parse_args()
    if options.minutes is not None and options.minutes < 1:
        parser.error("--minutes: at least 1")
    bounds = (Short if options.short else Long)(options.minutes)
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    try:
        options.ranks = [int(ranks) for ranks in words(options.ranks)] if options.ranks else bounds.ranks
    except ValueError:
        parser.error(f"--ranks {options.ranks}: expected numbers separated by commas")
    if min(options.ranks) < 2:
        parser.error("--ranks: at least 2 ranks reduce a vector")
    options.clusters = options.clusters or bounds.clusters
    if unknown := set(options.clusters) - set(clusters.CLUSTERS):
        parser.error(f"no such cluster: {', '.join(sorted(unknown))}")
    names = [peer.name for peer in all_peers()]
    options.peers = [name.strip() for name in options.peers.split(";")] if options.peers else names
    if unknown := set(options.peers) - set(names):
        parser.error(f"no such library: {'; '.join(sorted(unknown))}")
    return options, bounds


def main():
    options, bounds = parse()
    if options.compare:
        agree(*options.compare)
        return
    exit_on_signals()
    if not shutil.which("cc"):
        sys.exit("no C compiler: install gcc")

    begun = time.monotonic()
    end = begun + bounds.limit - REPORT
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    results = {
        "commit": commit(),
        "load_before": os.getloadavg()[0],
        "peers": {peer.name: peer.colour for peer in all_peers()},
        "wire": {},
        "clusters": [],
        "labs_failed": [],
        "failures": [],
        "left_out": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        peers, results["skipped"] = present(folder, options.peers)
        if not peers:
            sys.exit("there is no library to measure: run cargo build --release")
        none = None if any("lab" in peer.transports for peer in peers) else "none of the libraries is measured there"
        if "clusters" in options.only and (reason := lab.missing("iperf3") or none):
            results["skipped"]["clusters"] = reason
            options.only.remove("clusters")
        for name, reason in results["skipped"].items():
            print(f"skipped: {name}: {reason}", flush=True)
        results["memory_traffic"] = memory_traffic(folder)
        pairs = node_settings(options, bounds, results["memory_traffic"]) if "node" in options.only else []
        results["node"] = [its for _, its in pairs]
        node_end = begun + (end - begun) * (bounds.node_part if "clusters" in options.only else 1)
        if pairs:
            measure_node(bounds, peers, pairs, node_end, results["left_out"])
        if "clusters" in options.only:
            measure_clusters(options, bounds, peers, folder, end, results["clusters"], results["wire"], results["labs_failed"],
                             results["left_out"])
    results["failures"] += results["labs_failed"]
    for its in [*results["node"], *results["clusters"]]:
        results["failures"] += [f"{its['title']}, {name}: {failure}" for name, failure in its["failed"].items()]
        results["left_out"] += [f"{its['title']}: {what}" for what in its["left_out"]]
    results["minutes"] = round((time.monotonic() - begun) / 60, 1)
    write(out / "versus.json", "versus", results)
    # Another interpreter may be the one that has matplotlib.
    drawing = python_with("matplotlib") or sys.executable
    subprocess.run([drawing, Path(__file__).with_name("report.py"), out], check=True)
    ours = [name for its in [*results["node"], *results["clusters"]] for name in its["failed"] if is_ours(name)]
    if ours or results["labs_failed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
