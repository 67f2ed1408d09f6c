#!/usr/bin/env python3
"""Measures flexring beside Gloo, Open MPI and what the links allow, on clusters of namespaces: 64 MiB of f32, in place.

    bench/lab_compare.py [--only 2+3,1+1+1] [--algo NAME] [--no-peers] [--out FILE]

The clusters are those of the FlexReduce paper, nodes with so many ranks each behind links of 1 Gbit/s, and two that
have a node behind 500 Mbit/s. Each is built by bench/lab.sh, where all are measured in one run. Needs root, a
release build, iperf3, and for the peers mpicc and torch.
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
# Their last node has half the rate.
UNEVEN = {"1+1+1", "1+1+1+1"}
SIZE = 64 << 20
CALLS = {"flexring": 5, "gloo": 4, "open_mpi": 3}
# Seconds that one of the three may take, and a whole cluster.
LIMIT, CLUSTER_LIMIT = 90, 360


def learners(cluster):
    return [int(ranks) for ranks in cluster.split("+")]


def rates(cluster):
    """Of each node, in Mbit/s."""
    nodes = len(learners(cluster))
    return [1000] * (nodes - 1) + [500 if cluster in UNEVEN else 1000]


def bound(rates):
    """Seconds below which no all-reduce of SIZE bytes comes between nodes of such `rates` (bit/s) at one switch.

    Of d nodes, one on which the share x of the vector is summed sends, and receives, (1-x)n bytes for the shares of
    the others and (d-1)xn for its own: (1 + (d-2)x)n. In time T it can take x = (T·rate/n - 1) / (d-2), which must not
    be negative on any node, and all shares make 1: that is so from the larger of these times on.
    """
    n, d = SIZE * 8, len(rates)
    return max(n / min(rates), n * (2 * d - 2) / sum(rates))


def measure(cluster, options):
    """Everything about one cluster; runs inside the lab."""
    places = [node for node, ranks in enumerate(learners(cluster)) for _ in range(ranks)]
    nominal = rates(cluster)
    wire = {}
    for node, rate in enumerate(nominal):
        if rate not in wire:
            # The other node must not be slower.
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
        settings["FLEXRING_TOPOLOGY"] = "+".join(f"{ranks}@{links[rate]}" for ranks, rate in zip(learners(cluster), nominal))
    result["settings"] = settings
    arguments = ["-b", SIZE, "-e", SIZE, "-n", CALLS["flexring"], "-w", 1, "-c", 0, "--memory", "heap"]
    attempt("flexring", lambda: lab.flexring(places, arguments, LIMIT, **settings)["in_place"])
    # The peers' first call, which is checked and not counted, warms them up.
    if options.gloo:
        attempt("gloo", lambda: lab.gloo(places, options.gloo, SIZE, CALLS["gloo"], LIMIT))
    if options.open_mpi:
        attempt("open_mpi", lambda: lab.open_mpi(places, options.open_mpi, SIZE, CALLS["open_mpi"], LIMIT))
    return result


def in_lab(cluster, arguments):
    """Has this script measure a cluster in a lab, which is taken down again whatever happens."""
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
    """An interpreter with torch; Debian's own has its packages."""
    find = "import importlib.util as util; exit(not util.find_spec('torch'))"
    for python in ("python3", "/usr/bin/python3"):
        if shutil.which(python) and subprocess.run([python, "-c", find]).returncode == 0:
            return python
    return None


def line(result):
    """A row of the table."""
    ours = result["flexring"] and result["flexring"]["median"] / 1e3
    words = f"{result['cluster']:<10}{result['bound_ms']:>10.0f}"
    words += f"{ours:>10.0f}{100 * result['bound_ms'] / ours:>9.1f}%" if ours else f"{'-':>10}{'-':>10}"
    for peer in ("gloo", "open_mpi"):
        theirs = result.get(peer) and result[peer]["each"]["median_us"] / 1e3
        words += f"{theirs:>10.0f}" if theirs else f"{'-':>10}"
        words += f"{theirs / ours:>7.2f}" if theirs and ours else f"{'-':>7}"
    return words


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="clusters, separated by commas: " + ",".join(CLUSTERS))
    parser.add_argument("--algo", help="what FLEXRING_ALGO is; else flexreduce, and weighted where rates are uneven")
    parser.add_argument("--no-peers", action="store_true", help="leave out Gloo and Open MPI")
    parser.add_argument("--out")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--gloo", help=argparse.SUPPRESS)
    parser.add_argument("--open-mpi", help=argparse.SUPPRESS)
    options = parser.parse_args()
    # Whoever ends this ends what it started.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    if options.inside:
        print(json.dumps(measure(options.inside, options)))
        return

    clusters = options.only.split(",") if options.only else CLUSTERS
    if strange := set(clusters) - set(CLUSTERS):
        parser.error(f"no such cluster: {', '.join(sorted(strange))}")
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
                print("without Gloo: no python3 has torch")
            if shutil.which("mpicc"):
                arguments += ["--open-mpi", str(build_ompi(folder))]
            else:
                print("without Open MPI: mpicc is not installed")
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
