#!/usr/bin/env python3
"""Measures how start, memory and the time of a call grow with the number of ranks on this machine, compared with Open MPI.

    bench/many_ranks.py [--ranks 2,4,8,16,32,64,128] [--flexring FILE] [--no-peers] [--out FILE]

For each number of ranks and each library:
  start     seconds from starting the launcher until all ranks have started, done one all-reduce of 8 bytes, and ended
  memory    bytes per rank, page tables included, while calls of 8 bytes run, and while calls of 1 MiB run with their vectors
  calls     mean time in microseconds of consecutive all-reduces of f32, in place

Prints a table and, with --out FILE, writes JSON. Needs a release build, and mpicc unless --no-peers is given.
"""

import argparse
import json
import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from common import FLEXRING, build_ompi, need_flexring, write

# Bytes of a vector, and how many calls are measured with 2 ranks; fewer with more.
SIZES = {8: 20000, 4096: 10000, 65536: 2000, 1 << 20: 200}
STARTS = 3
LIMIT = 60


def memory_of(program):
    """Bytes that the processes of a program take, shared pages divided among them, with their page tables."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "exe") != str(program):
                continue
            rollup, status = (process / "smaps_rollup").read_text(), (process / "status").read_text()
        except OSError:
            continue
        for text, name in ((rollup, "Pss:"), (status, "VmPTE:")):
            total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(name))
    return total


class MemoryWatch:
    """The most memory that the processes of a program take while the block runs."""

    def __init__(self, program):
        self.program, self.most = Path(program).resolve(), 0

    def __enter__(self):
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.over.wait(0.2):
            self.most = max(self.most, memory_of(self.program))

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()


def run(command):
    """Runs a command and returns what it prints and its time in seconds."""
    begun = time.monotonic()
    done = subprocess.run([str(part) for part in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=LIMIT)
    taken = time.monotonic() - begun
    if done.returncode:
        raise subprocess.SubprocessError((done.stderr or done.stdout).strip()[-300:])
    return done.stdout, taken


def iterations(size, ranks):
    return max(5, SIZES[size] * 2 // ranks // max(1, ranks // 8))


class Flexring:
    name = "flexring"

    def __init__(self, program):
        self.program = program

    def call(self, ranks, size, count, warmup):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            sizes = ["-b", size, "-e", size, "-n", count, "-w", warmup, "-c", 0]
            _, taken = run([self.program, "perf", "--ranks", ranks, *sizes, "--json", file.name])
            return json.load(open(file.name))["rows"][0]["in_place"]["mean_us"], taken


class OpenMpi:
    name = "open_mpi"

    def __init__(self, folder):
        self.program = build_ompi(folder)

    def call(self, ranks, size, count, warmup):
        printed, taken = run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", ranks, self.program, size, count, warmup])
        return json.loads(printed.strip().splitlines()[-1])["back_to_back_us"], taken


def measure(library, ranks):
    result = {}
    try:
        result["start_s"] = min(library.call(ranks, 8, 1, 0)[1] for _ in range(STARTS if ranks < 64 else 2))
        calls = {}
        # A run of its own, because reading the memory takes time.
        with MemoryWatch(library.program) as small:
            library.call(ranks, 8, 4 * iterations(8, ranks), 10)
        with MemoryWatch(library.program) as large:
            library.call(ranks, max(SIZES), iterations(max(SIZES), ranks), 3)
        for size in SIZES:
            calls[size] = library.call(ranks, size, iterations(size, ranks), 3)[0]
        result |= {"calls_us": calls, "bytes_per_rank_small_calls": small.most // ranks, "bytes_per_rank_large_calls": large.most // ranks}
    except (subprocess.SubprocessError, OSError, json.JSONDecodeError) as failure:
        result["failure"] = str(failure)[-300:]
    return result


def line(ranks, name, result):
    if "calls_us" not in result:
        return f"{ranks:>5} {name:<9} {result.get('start_s', float('nan')):>7.2f} s   failed: {result['failure'].splitlines()[0]}"
    calls = "".join(f"{time_us:>11.1f}" for time_us in result["calls_us"].values())
    memory = [result[key] / (1 << 20) for key in ("bytes_per_rank_small_calls", "bytes_per_rank_large_calls")]
    return f"{ranks:>5} {name:<9} {result['start_s']:>7.2f} s {memory[0]:>7.1f} {memory[1]:>7.1f} MiB{calls}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8,16,32,64,128")
    parser.add_argument("--flexring", type=Path, default=FLEXRING)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.flexring == FLEXRING:
        need_flexring()
    results = []
    sizes = "".join(f"{size:>9} B" for size in SIZES)
    print(f"ranks library     start     memory per rank{sizes}  (us)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        libraries = [Flexring(options.flexring)] + ([] if options.no_peers else [OpenMpi(folder)])
        for ranks in map(int, options.ranks.split(",")):
            entry = {"ranks": ranks}
            for library in libraries:
                entry[library.name] = measure(library, ranks)
                print(line(ranks, library.name, entry[library.name]), flush=True)
            results.append(entry)
    if options.out:
        write(options.out, "many ranks", results)


main()
