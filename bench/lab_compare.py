#!/usr/bin/env python3
"""Measures flexring, Gloo, Open MPI and the limit of the links on clusters of network namespaces: 64 MiB of f32, in place.

    bench/lab_compare.py [--only 2+3,1+1+1] [--algo NAME] [--no-peers] [--out FILE]

The clusters are those of the FlexReduce paper (the number of ranks of each node, with links of 1 Gbit/s) and two whose
last node has a link of 500 Mbit/s. bench/lab.sh builds each cluster, and all libraries are measured in it in one run.
Needs root, a release build, iperf3, and for the peers mpicc and torch.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import lab
from common import ROOT, build_ompi, need_flexring, write

CLUSTERS = ["2+2", "2+3", "3+3", "3+4", "4+4", "3+3+3", "3+3+4", "3+4+4", "4+4+4", "1+1+1", "1+1+1+1"]
# Clusters whose last node has half the rate.
UNEVEN = {"1+1+1", "1+1+1+1"}
SIZE = 64 << 20
CALLS = {"flexring": 5, "gloo": 4, "open_mpi": 3}
# Time limits in seconds of one library and of a whole cluster.
LIMIT, CLUSTER_LIMIT = 90, 360


def ranks_of_nodes(cluster):
    return [int(ranks) for ranks in cluster.split("+")]


def rates(cluster):
    """The rate of each node's link, in Mbit/s."""
    nodes = len(ranks_of_nodes(cluster))
    return [1000] * (nodes - 1) + [500 if cluster in UNEVEN else 1000]


def bound(rates):
    """A lower bound in seconds for an all-reduce of SIZE bytes between nodes with links of `rates` (bit/s) at one switch.

    Let d be the number of nodes, n the size of the vector, and x the share of it that is reduced on a node. The node sends
    and receives (1-x)n for the shares of the others and (d-1)xn for its own: (1 + (d-2)x)n in all. In time T its share is
    at most x = (T·rate/n - 1) / (d-2). No share is negative and the shares sum to 1, so T is at least the larger of the
    two times below.
    """
    n, d = SIZE * 8, len(rates)
    return max(n / min(rates), n * (2 * d - 2) / sum(rates))


def measure(cluster, options):
    """Measures one cluster with all libraries. Runs inside the lab."""
    places = [node for node, ranks in enumerate(ranks_of_nodes(cluster)) for _ in range(ranks)]
    nominal = rates(cluster)
    wire = {}
    for node, rate in enumerate(nominal):
        if rate not in wire:
            # Measure with a node that is not slower.
            other = next(other for other in range(len(nominal)) if other != node and nominal[other] >= rate)
            wire[rate] = lab.iperf3(node, other, seconds=2)
    result = {
        "cluster": cluster,
        "mbit_per_second": nominal,
        "iperf3_bits_per_second": wire,
        "bound_ms": bound([wire[rate] for rate in nominal]) * 1e3,
    }

    def attempt(name, call):
        try:
            result[name] = call()
        except lab.Failure as failure:
            result[name] = None
            print(f"{cluster}: {name}: {failure}", file=sys.stderr)

    settings = {"FLEXRING_ALGO": options.algo or ("weighted" if cluster in UNEVEN else "flexreduce")}
    if cluster in UNEVEN:
        links = {1000: "1G", 500: "500M"}
        settings["FLEXRING_TOPOLOGY"] = "+".join(f"{ranks}@{links[rate]}" for ranks, rate in zip(ranks_of_nodes(cluster), nominal))
    result["settings"] = settings
    arguments = ["-b", SIZE, "-e", SIZE, "-n", CALLS["flexring"], "-w", 1, "-c", 0, "--memory", "heap"]
    attempt("flexring", lambda: lab.flexring(places, arguments, LIMIT, **settings)["in_place"])
    # The peers' first call is their warm-up. Its result is checked and its time is not counted.
    if options.gloo:
        attempt("gloo", lambda: lab.gloo(places, options.gloo, SIZE, CALLS["gloo"], LIMIT))
    if options.open_mpi:
        attempt("open_mpi", lambda: lab.open_mpi(places, options.open_mpi, SIZE, CALLS["open_mpi"], LIMIT))
    return result


def in_lab(cluster, arguments):
    """Runs this script for one cluster inside a lab, which is removed afterwards in any case."""
    command = [ROOT / "bench/lab.sh", *(f"{rate}mbit" for rate in rates(cluster)), "--", __file__, "--inside", cluster, *arguments]
    # In a process group of its own, so that a Ctrl-C comes here first and to the lab's processes only from here.
    group = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, start_new_session=True)
    try:
        printed, _ = group.communicate(timeout=CLUSTER_LIMIT)
    except subprocess.TimeoutExpired:
        sys.exit(f"{cluster}: not done after {CLUSTER_LIMIT} s")
    finally:
        if group.poll() is None:
            os.killpg(group.pid, signal.SIGTERM)
            try:
                group.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(group.pid, signal.SIGKILL)
    if group.returncode:
        sys.exit(f"{cluster}: the lab failed with status {group.returncode}")
    return json.loads(printed.strip().splitlines()[-1])


def torch_python():
    """A Python interpreter that has torch, or None. /usr/bin/python3 is tried too, because it has Debian's packages."""
    find = "import importlib.util as util; exit(not util.find_spec('torch'))"
    for python in ("python3", "/usr/bin/python3"):
        if shutil.which(python) and subprocess.run([python, "-c", find]).returncode == 0:
            return python
    return None


def line(result):
    """The table row of a result."""
    ours = result["flexring"] and result["flexring"]["median"] / 1e3
    text = f"{result['cluster']:<10}{result['bound_ms']:>10.0f}"
    text += f"{ours:>10.0f}{100 * result['bound_ms'] / ours:>9.1f}%" if ours else f"{'-':>10}{'-':>10}"
    for peer in ("gloo", "open_mpi"):
        theirs = result.get(peer) and result[peer]["each"]["median_us"] / 1e3
        text += f"{theirs:>10.0f}" if theirs else f"{'-':>10}"
        text += f"{theirs / ours:>7.2f}" if theirs and ours else f"{'-':>7}"
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="clusters, separated by commas: " + ",".join(CLUSTERS))
    parser.add_argument("--algo", help="value of FLEXRING_ALGO; default: flexreduce, or weighted where rates are uneven")
    parser.add_argument("--no-peers", action="store_true", help="leave out Gloo and Open MPI")
    parser.add_argument("--out")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--gloo", help=argparse.SUPPRESS)
    parser.add_argument("--open-mpi", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Exit on these signals as on an error, so that the lab is removed.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if options.inside:
        print(json.dumps(measure(options.inside, options)))
        return

    clusters = options.only.split(",") if options.only else CLUSTERS
    if unknown := set(clusters) - set(CLUSTERS):
        parser.error(f"no such cluster: {', '.join(sorted(unknown))}")
    if os.geteuid() != 0:
        print("skipped: network namespaces need root")
        return
    if missing := [tool for tool in ("ip", "tc", "iperf3") if not shutil.which(tool)]:
        print(f"skipped: not installed: {', '.join(missing)}")
        return
    need_flexring()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--algo", options.algo] if options.algo else []
        if not options.no_peers:
            if python := torch_python():
                arguments += ["--gloo", python]
            else:
                print("Gloo is not measured: no python3 has torch")
            if shutil.which("mpicc"):
                arguments += ["--open-mpi", str(build_ompi(folder))]
            else:
                print("Open MPI is not measured: mpicc is not installed")
        print(f"{'ranks':<10}{'bound ms':>10}{'flexring':>10}{'of bound':>10}{'Gloo':>10}{'x':>7}{'Open MPI':>10}{'x':>7}", flush=True)
        results = []
        for cluster in clusters:
            results.append(in_lab(cluster, arguments))
            print(line(results[-1]), flush=True)
            if options.out:
                write(options.out, "lab", results)
    if any(value is None for result in results for value in result.values()):
        sys.exit(1)


main()
