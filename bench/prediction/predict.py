#!/usr/bin/env python3
"""Compares the times that `flexring simulate` predicts with those that `flexring perf` measures, in clusters of network namespaces.

    bench/prediction/predict.py [--short] [--clusters 2+3,1+4] [--flexring PROGRAM] [--out FOLDER]

In each cluster `flexring tune` measures a profile first, on other lengths than those that follow. Then each schedule, and `auto` with the profile
and without one, is measured on vectors of 64 KiB to 64 MiB, as long as the links need at most 0.9 s for them. The simulator predicts
the same from the profile alone. Writes prediction.json, prediction.md and prediction.svg into FOLDER. Takes at most 15 minutes, or 3 with --short:
what the time did not suffice for is named. Needs root, iproute2 and a release build. Ends with status 1 if a job failed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import cases
import lab
from cluster import Cluster
from common import FLEXRING, ROOT, commit, exit_on_signals, python_with, run, words, write

HERE = Path(__file__).resolve().parent


class Long:
    """The bounds of a run of 15 minutes, in seconds, and the calls of each length."""

    limit, rounds = 900, 2
    calls, long_calls, tune_ms = 15, 3, 100
    longest_call = 0.9
    clusters = cases.CLUSTERS


class Short(Long):
    """The same for 3 minutes."""

    limit, rounds = 180, 1
    calls, long_calls, tune_ms = 5, 3, 50
    longest_call = 0.25
    clusters = cases.SHORT


# Seconds that the simulations and the report take, that a lab may take longer than its share, and in which none is started.
REPORT, GRACE, LEAST = 30, 10, 15


def measure(options, bounds, end):
    """Measures one cluster after another, each in an equal share of the time that is left."""
    found, failures, left_out = [], [], []
    for number, name in enumerate(options.clusters):
        left = end - time.monotonic() - GRACE
        if left < LEAST:
            left_out.append(", ".join(options.clusters[number:]))
            break
        share = left / (len(options.clusters) - number)
        arguments = {"cluster": name, "program": str(options.flexring), "seconds": share, "rounds": bounds.rounds, "calls": bounds.calls, "long_calls": bounds.long_calls,
                     "tune_ms": bounds.tune_ms, "longest_call": bounds.longest_call}
        print(f"cluster {name}: {share:.0f} s", flush=True)
        try:
            found.append(Cluster(name).run(HERE / "cases.py", arguments, share + GRACE))
        except lab.Failure as failure:
            failures.append(f"{name}: {failure}")
            print(f"failed: {failures[-1]}", flush=True)
    for its in found:
        failures += [f"{its['cluster']}, {schedule}: {failure}" for schedule, failure in its["failed"].items()]
        left_out += [f"{its['cluster']}, {what}" for what in its["left_out"]]
    return found, failures, left_out


def predict(program, its, failures, end):
    """Adds to what was measured in a cluster what the simulator predicts for the same schedules and lengths: seconds, and those in which the
    busiest link carries its bytes. Schedules that cannot be predicted until `end` are added to `failures`."""
    predicted = its["predicted"] = {}
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.toml"
        profile.write_text(its["profile"])
        for schedule, times in its["times"].items():
            # Without the profile a job plans for links that it assumes.
            if schedule == cases.UNTUNED:
                continue
            command = [program, "simulate", "--tuning", profile, "--no-path", "--json", "--size", ",".join(times)]
            if schedule != cases.AUTO:
                command += ["--algo", schedule]
            try:
                results = json.loads(run(command, timeout=max(1.0, end - time.monotonic())))["results"]
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as cause:
                failures.append(f"{its['cluster']}, {schedule}: no prediction: {cause}")
                continue
            predicted[schedule] = {str(result["bytes"]): [result["picoseconds"] * 1e-12,
                                                          result["picoseconds"] * 1e-12 * max(link["busy"] for link in result["links"])]
                                   for result in results}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer clusters, calls and lengths, in at most 3 minutes")
    parser.add_argument("--clusters", type=words, help="clusters, separated by commas; default: " + ",".join(cases.CLUSTERS))
    parser.add_argument("--out", type=Path, default=ROOT / "bench/out/prediction", help="folder of the report [default: bench/out/prediction]")
    parser.add_argument("--flexring", default=FLEXRING, help="the command [default: target/release/flexring]")
    options = parser.parse_args()
    bounds = Short if options.short else Long
    options.clusters = options.clusters or bounds.clusters
    for name in options.clusters:
        try:
            if len(Cluster(name).ranks) < 2:
                parser.error(f"{name}: expected at least two nodes")
        except ValueError as error:
            parser.error(str(error))
    return options, bounds


def main():
    options, bounds = parse()
    exit_on_signals()
    begun = time.monotonic()
    if reason := lab.missing():
        print(f"skipped: prediction: {reason}")
        return
    if not (program := shutil.which(options.flexring)):
        sys.exit(f"{options.flexring} does not exist: run cargo build --release")
    options.flexring = program
    options.out.mkdir(parents=True, exist_ok=True)
    about = {"commit": commit(), "load_before": os.getloadavg()[0]}
    found, failures, left_out = measure(options, bounds, begun + bounds.limit - REPORT)
    for its in found:
        predict(options.flexring, its, failures, begun + bounds.limit + REPORT)
    results = {**about, "clusters": found, "failures": failures, "left_out": left_out, "minutes": round((time.monotonic() - begun) / 60, 1)}
    write(options.out / "prediction.json", "prediction", results)
    # Another interpreter may be the one that has matplotlib.
    drawing = python_with("matplotlib") or sys.executable
    subprocess.run([drawing, HERE / "report.py", options.out], check=True)
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
