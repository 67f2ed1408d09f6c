#!/usr/bin/env python3
"""Measures flexring and a peer library, or the limit of the link, in one run.

    bench/compare.py node     4 ranks on this machine, compared with Open MPI: 8 B, 1 MiB and 128 MiB of f32
    bench/compare.py link     2 ranks over a link of 1 Gbit/s, compared with iperf3: 64 MiB of f32 (run by bench/lab.sh)

Prints a table and, with --out FILE, writes JSON. Needs a release build, and mpicc or iperf3.
"""

import argparse
import json
import statistics
import tempfile

import lab
from common import FLEXRING, build_ompi, need_flexring, run, write

ROUNDS = 3


def perf(arguments, before=(), **kwargs):
    """Runs `flexring perf` and returns its rows."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        run([*before, FLEXRING, "perf", *arguments, "--json", file.name], **kwargs)
        return json.load(open(file.name))["rows"]


def node(folder):
    program = build_ompi(folder)
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
    wire = lab.iperf3(0, 1, seconds=5)
    size = 64 << 20
    row = lab.flexring([0, 1], ["-b", size, "-e", size, "-n", 50, "-w", 0, "-c", 0, "--memory", "heap"], limit=180)
    ours = row["out_of_place"]
    # With two ranks, every byte of the vector crosses the link once in each direction.
    moved = size * 8 / (ours["median"] * 1e-6)
    print(f"64 MiB of f32, 2 ranks over 1 Gbit/s: median {ours['median'] / 1e3:.1f} ms = {moved / 1e6:.0f} Mbit/s each way; "
          f"iperf3 moves {wire / 1e6:.0f} Mbit/s: ratio {moved / wire:.3f}")
    print(f"first / median {ours['first'] / ours['median']:.3f}, max / median over 50 calls {ours['max'] / ours['median']:.3f}")
    return [{"bytes": size, "flexring": ours, "iperf3_bits_per_second": wire, "share_of_iperf3": moved / wire}]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=("node", "link"))
    parser.add_argument("--out")
    options = parser.parse_args()
    need_flexring()
    with tempfile.TemporaryDirectory() as folder:
        results = {"node": node, "link": link}[options.benchmark](folder)
    if options.out:
        write(options.out, options.benchmark, results)


main()
