#!/usr/bin/env python3
"""Measures flexring beside a peer or a physical limit, in one run, and writes what was seen.

    bench/compare.py node     4 ranks on this machine beside Open MPI: 8 B, 1 MiB and 128 MiB of f32
    bench/compare.py link     2 ranks over a link of 1 Gbit/s beside iperf3: 64 MiB of f32 (run by bench/lab.sh)

Prints a table and, with --out FILE, writes JSON. Needs a release build, and mpicc or iperf3.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLEXRING = ROOT / "target/release/flexring"
ROUNDS = 3


def run(command, **kwargs):
    return subprocess.run([str(word) for word in command], check=True, text=True, stdout=subprocess.PIPE, **kwargs).stdout


def perf(arguments, before=(), **kwargs):
    """The rows that `flexring perf` measures."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        run([*before, FLEXRING, "perf", *arguments, "--json", file.name], **kwargs)
        return json.load(open(file.name))["rows"]


def node(folder):
    program = Path(folder) / "ompi_allreduce"
    run(["mpicc", "-O2", ROOT / "bench/peers/ompi_allreduce.c", "-o", program])
    results = []
    for size, iterations in ((8, 20000), (1 << 20, 300), (128 << 20, 10)):
        ours, theirs = [], []
        for _ in range(ROUNDS):
            row = perf(["--ranks", 4, "-b", size, "-e", size, "-n", iterations, "-w", max(2, iterations // 100)])[0]
            ours.append(row)
            mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", 4]
            peer = run([*mpirun, program, size, iterations, max(2, iterations // 100)])
            theirs.append(json.loads(peer.strip().splitlines()[-1]))
        entry = {"bytes": size, "iterations": iterations}
        for place in ("out_of_place", "in_place"):
            entry[place] = {key: statistics.median(row[place][key] for row in ours) for key in ("median", "mean_us", "first", "max")}
        entry["open_mpi_in_place"] = {
            "median": statistics.median(row["each"]["median_us"] for row in theirs),
            "mean_us": statistics.median(row["back_to_back_us"] for row in theirs),
        }
        results.append(entry)
        mine, peer = entry["in_place"], entry["open_mpi_in_place"]
        print(f"{size:>10} B, 4 ranks, in place, mean of {iterations}: flexring {mine['mean_us']:.1f} us, "
              f"Open MPI {peer['mean_us']:.1f} us: {peer['mean_us'] / mine['mean_us']:.2f}x "
              f"(medians {mine['median']:.1f} and {peer['median']:.1f})", flush=True)
    return results


def link(_folder):
    nodes, addresses = os.environ["LAB_NODES"].split(), os.environ["LAB_ADDRESSES"].split()
    inside = lambda number: ["ip", "netns", "exec", nodes[number]]
    server = subprocess.Popen([*inside(1), "iperf3", "-s", "-1"], stdout=subprocess.DEVNULL)
    try:
        for attempt in range(50):
            client = subprocess.run([*inside(0), "iperf3", "-c", addresses[1], "-t", "5", "-J"], text=True, stdout=subprocess.PIPE)
            if client.returncode == 0:
                break
        wire = json.loads(client.stdout)["end"]["sum_received"]["bits_per_second"]
    finally:
        server.kill()
        server.wait()
    size = 64 << 20
    meeting = {"FLEXRING_WORLD_SIZE": "2", "FLEXRING_MASTER_ADDR": addresses[0], "FLEXRING_MASTER_PORT": "29400"}
    arguments = ["-b", size, "-e", size, "-n", 50, "-w", 0, "-c", 0, "--memory", "heap"]
    environment = lambda rank: {**os.environ, **meeting, "FLEXRING_RANK": str(rank)}
    other = subprocess.Popen([str(word) for word in [*inside(1), FLEXRING, "perf", *arguments]], env=environment(1), stdout=subprocess.DEVNULL)
    try:
        row = perf(arguments, before=inside(0), env=environment(0))[0]
    finally:
        other.wait(timeout=60)
    ours = row["out_of_place"]
    # With two ranks every byte of the vector crosses the link once in each direction.
    moved = size * 8 / (ours["median"] * 1e-6)
    print(f"64 MiB of f32, 2 ranks over 1 Gbit/s: median {ours['median'] / 1e3:.1f} ms = {moved / 1e6:.0f} Mbit/s each way; "
          f"iperf3 moves {wire / 1e6:.0f} Mbit/s: {moved / wire:.3f} of it")
    print(f"first / median {ours['first'] / ours['median']:.3f}, max / median over 50 calls {ours['max'] / ours['median']:.3f}")
    return [{"bytes": size, "flexring": ours, "iperf3_bits_per_second": wire, "share_of_iperf3": moved / wire}]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("node", "link"))
    parser.add_argument("--out")
    options = parser.parse_args()
    if not FLEXRING.exists():
        sys.exit(f"{FLEXRING} is not there: cargo build --release")
    with tempfile.TemporaryDirectory() as folder:
        results = {"node": node, "link": link}[options.what](folder)
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    report = {
        "date": datetime.date.today().isoformat(),
        "what": options.what,
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release().split("-")[0],
        "load_at_end": os.getloadavg()[0],
        "results": results,
    }
    if options.out:
        Path(options.out).write_text(json.dumps(report, indent=1) + "\n")


main()
