#!/usr/bin/env python3
"""Compares flexring with the other libraries of this machine, on the same work, in one run.

    bench/versus/versus.py [--short] [--only node,clusters] [--ranks 2,4] [--out FOLDER]

Runs the loop of bench/peers/allreduce.c with each library in turn, round by round, over shared memory and over TCP on loopback, and
bench/lab_compare.py for clusters of network namespaces. Writes versus.json, versus.md and pictures into FOLDER. Takes at most 60
minutes, or 5 with --short: what the time did not suffice for is named. A library that is not here is named as skipped, and one that fails
or exceeds its time is killed and named. Needs a release build; pictures need matplotlib.
"""

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lab
import report
from common import ROOT, run, write
from peers import all_peers, elsewhere

SIZES = [8, 64, 512, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 128 << 20, 1 << 30]
SHORT_SIZES = [8, 4 << 10, 64 << 10, 1 << 20, 16 << 20]
RANKS, SHORT_RANKS = [2, 3, 4, 8, 16, 64], [2, 4]
ROUNDS, SHORT_ROUNDS = 5, 3
# Seconds of the loop for each length, and the most calls.
SECONDS, SHORT_SECONDS, MOST_CALLS = 0.5, 0.1, 2000
# Seconds for everything, and the part of them after which no more libraries are started on one node, if clusters follow.
LIMIT, SHORT_LIMIT, NODE_PART = 3600, 300, 0.6
# A process of a library: seconds for its start, and for each length besides the loop.
START_LIMIT, LENGTH_LIMIT, SHORT_LENGTH_LIMIT = 20, 10, 2
SHORT_CLUSTERS = "2+3"


def memory_bytes():
    lines = dict(line.split(":") for line in open("/proc/meminfo"))
    return int(lines["MemTotal"].split()[0]) * 1024


def bound_us(ranks, size, traffic):
    """Microseconds in which the processors can move what an all-reduce must, if no cache keeps it. None for lengths that caches keep."""
    if size < 16 << 20:
        return None
    return 1e6 * size * ((ranks + 1) + 2 * (ranks - 1)) / traffic


class Comparison:
    def __init__(self, options, deadline, folder):
        self.options, self.deadline, self.folder = options, deadline, folder
        self.failures, self.skipped = [], dict(elsewhere())
        self.peers = []
        for peer in all_peers():
            if reason := peer.missing():
                self.skipped[peer.name] = reason
            else:
                peer.build(folder)
                self.peers.append(peer)
        for name, reason in self.skipped.items():
            print(f"skipped: {name}: {reason}", flush=True)

    def traffic(self):
        program = Path(self.folder) / "memory_traffic"
        run(["cc", "-O2", ROOT / "bench/peers/memory_traffic.c", "-lpthread", "-o", program])
        return float(run([program, os.cpu_count()]))

    def node(self, traffic):
        """Measures all settings of one node, and returns them."""
        sizes, seconds = (SHORT_SIZES, SHORT_SECONDS) if self.options.short else (SIZES, SECONDS)
        settings = []
        for ranks in self.options.ranks:
            # All vectors together take less than a quarter of the memory.
            fitting = [size for size in sizes if size * ranks <= memory_bytes() // 4]
            for transport in ("shm", "tcp"):
                bounds = {size: bound_us(ranks, size, traffic) for size in fitting} if transport == "shm" else {}
                settings.append({"ranks": ranks, "transport": transport, "sizes": fitting, "times": {},
                                 "bound_us": {size: bound for size, bound in bounds.items() if bound}})
        rounds = SHORT_ROUNDS if self.options.short else ROUNDS
        end = time.monotonic() + (self.deadline - time.monotonic()) * (NODE_PART if "clusters" in self.options.only else 1)
        for number in range(rounds):
            for setting in settings:
                # Another one comes first in each round.
                turn = self.peers[number % len(self.peers):] + self.peers[:number % len(self.peers)]
                for peer in turn:
                    if time.monotonic() > end:
                        self.failures.append(f"the time was over in round {number + 1} of {rounds}, at {report.heading(setting)}.")
                        return settings
                    self.measure(peer, setting, seconds, number)
            print(f"round {number + 1} of {rounds} is done", flush=True)
        return settings

    def measure(self, peer, setting, seconds, number):
        """Runs one library in one setting, and adds its times. After a failure, it is not run in this setting any more."""
        times = setting["times"].setdefault(peer.name, {})
        if peer.name in setting.get("failed", {}):
            return
        for_length = SHORT_LENGTH_LIMIT if self.options.short else LENGTH_LIMIT
        limit = START_LIMIT + (for_length + seconds) * len(setting["sizes"])
        limit = min(limit, max(1, self.deadline - time.monotonic()))
        try:
            commands = peer.commands(setting["ranks"], setting["transport"], [seconds, MOST_CALLS, *setting["sizes"]])
            for line in lab.together(commands, limit).splitlines():
                # Libraries print warnings, too.
                if line.startswith("{"):
                    self.add(times, json.loads(line), number)
        except (lab.Failure, json.JSONDecodeError, OSError) as failure:
            setting.setdefault("failed", {})[peer.name] = str(failure)
            lines = [line for line in str(failure).splitlines() if line.strip()]
            self.failures.append(f"{peer.name}, {report.heading(setting)}: {'; '.join(dict.fromkeys(lines[:1] + lines[-1:]))}")
            print(f"failed: {self.failures[-1]}", flush=True)
        ours = times.get(setting["sizes"][-1], {}).get(number)
        last = f"{report.human(setting['sizes'][-1])} {report.duration(sorted(ours)[len(ours) // 2])}" if ours else "-"
        print(f"  round {number + 1}, {report.heading(setting)}, {peer.name}: {last}", flush=True)

    def add(self, times, result, number):
        if result["wrong"]:
            raise lab.Failure(f"{result['library']}: elements of {result['bytes']} bytes are wrong")
        times.setdefault(result["bytes"], {})[number] = result["times_us"]

    def clusters(self):
        """The rows of bench/lab_compare.py, which makes and removes the namespaces."""
        out = Path(self.folder) / "lab.json"
        command = [sys.executable, ROOT / "bench/lab_compare.py", "--out", out]
        if self.options.short:
            command += ["--only", SHORT_CLUSTERS]
        process = subprocess.Popen([str(argument) for argument in command])
        try:
            status = process.wait(timeout=max(10, self.deadline - time.monotonic()))
            if status:
                self.failures.append(f"clusters: bench/lab_compare.py ended with status {status}.")
        except subprocess.TimeoutExpired:
            self.failures.append("clusters: the time was over.")
        finally:
            if process.poll() is None:
                # It removes its namespaces on this signal.
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=90)
        if not out.exists():
            self.skipped["clusters"] = "bench/lab_compare.py measured none (it says why above)"
            return []
        return json.loads(out.read_text())["results"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer lengths, ranks, rounds and clusters, in at most 5 minutes")
    parser.add_argument("--only", default="node,clusters", help="parts, separated by commas: node, clusters")
    parser.add_argument("--ranks", help="numbers of ranks on this machine, separated by commas")
    parser.add_argument("--out", default=str(ROOT / "bench/out/versus"), help="folder of the report [default: bench/out/versus]")
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := set(options.only) - {"node", "clusters"}:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    default = SHORT_RANKS if options.short else RANKS
    try:
        options.ranks = [int(ranks) for ranks in options.ranks.split(",")] if options.ranks else default
    except ValueError:
        parser.error(f"--ranks {options.ranks}: expected numbers separated by commas")
    if min(options.ranks) < 2:
        parser.error("--ranks: at least 2 ranks reduce a vector")
    # End on these signals as on an error, so that nothing that was started remains.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if not shutil.which("cc"):
        sys.exit("no C compiler: install gcc")

    deadline = time.monotonic() + (SHORT_LIMIT if options.short else LIMIT)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(options, deadline, folder)
        results = {
            "peers": [peer.name for peer in all_peers()],
            "memory_traffic": comparison.traffic(),
            "settings": [],
            "clusters": [],
            "skipped": comparison.skipped,
            "failures": comparison.failures,
            "load_before": load_before,
            "commit": run(["git", "-C", ROOT, "describe", "--always", "--dirty"]).strip(),
        }
        if "node" in options.only:
            results["settings"] = comparison.node(results["memory_traffic"])
        if "clusters" in options.only:
            results["clusters"] = comparison.clusters()
    results["load_after"] = os.getloadavg()[0]
    write(out / "versus.json", "versus", results)
    about = json.loads((out / "versus.json").read_text())
    results |= {"cpu": about["cpu"], "cores": about["cores"], "date": datetime.date.today().isoformat()}
    pictures = report.draw(results, {peer.name: peer.colour for peer in all_peers()}, out)
    if pictures is None:
        print("no pictures: matplotlib is not installed (python3-matplotlib)")
    text = report.markdown(results, pictures or [])
    (out / "versus.md").write_text(text)
    print(f"\n{text}\nwritten to {out}")
    if comparison.failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
