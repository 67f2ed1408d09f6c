#!/usr/bin/env python3
"""The clusters and schedules of `make bench-prediction`, and what is measured in one cluster: a profile by `flexring tune`, then schedules by
`flexring perf`.

predict.py runs this script inside bench/lab.sh.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import lab
from cluster import Cluster
from common import exit_on_signals, in_order, run

# At most six ranks, so that two processors are not the limit.
CLUSTERS = ["2+3", "1+4", "1+1+1@500M", "1+1+1+1", "(2+1)@1G+(1+2)@1G", "2@200M+1@200M+1@100M", "3@500M+2", "1@100M+1@100M+2@100M"]
# Those of the short form: a node with one rank, a slow link and a switch.
SHORT = ["1+4", "1@200M+1@200M+1@100M", "(1+1)@200M+1@200M"]
# Bytes of the vectors that are measured, and of those for which tune compares schedules, which are others.
SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
CALIBRATION = [128 << 10, 2 << 20, 32 << 20]
# From this length on a job makes few calls for each length.
LONG = 16 << 20
# Ranks start each call together, and its time ends with the last one: calls of a series would overlap where a schedule leaves ranks idle.
TOGETHER = ["-z", 1, "-a", 3]
# `auto` with the profile, and without one. The other schedules are planned for the measured links.
AUTO, UNTUNED = "auto", "auto without a profile"
ALGORITHMS = ["ring", "rabenseifner", "flexreduce", "weighted", "local-master", "tree", "star", "parameter-server"]


def fitting(cluster, sizes, most_seconds):
    """The lengths of which a vector takes at most so many seconds by the nominal rates of the links, at least one."""
    wire = {rate: 1e6 * rate for rate in {*cluster.rates, *cluster.uplinks}}
    return [size for size in sizes if size == sizes[0] or cluster.bound(size, wire) <= most_seconds]


def tree(cluster):
    """FLEXRING_TOPOLOGY with the switches, but without rates: those are measured. None for one switch, which flexring assumes."""
    return re.sub(r"@\d+[GM]", "", cluster.name) if cluster.uplinks else None


def distinct(program, profile):
    """The algorithms that apply to the cluster of a profile, one of those that make the same plan."""
    seen, found = set(), []
    for algorithm in ALGORITHMS:
        try:
            text = run([program, "plan", "--tuning", profile, "--algo", algorithm, "--json"], stderr=subprocess.DEVNULL)
        except subprocess.CalledProcessError:
            # It does not support this topology.
            continue
        plan = json.dumps(json.loads(text)["levels"])
        if plan not in seen:
            seen.add(plan)
            found.append(algorithm)
    return found


class ClusterRun:
    """What is measured in the lab of a cluster."""

    def __init__(self, options):
        self.options = options
        self.end = time.monotonic() + options["seconds"]
        self.cluster = Cluster(options["cluster"])
        self.places = self.cluster.nodes()
        self.settings = {"FLEXRING_TOPOLOGY": its} if (its := tree(self.cluster)) else {}
        self.found = {"cluster": self.cluster.name, "times": {}, "left_out": [], "failed": {}}

    def left(self):
        return self.end - time.monotonic()

    def say(self, message):
        print(f"  {self.cluster.name}: {message}", file=sys.stderr, flush=True)

    def tune(self, profile):
        """Measures the profile, on lengths that are not among the cases."""
        sizes = ",".join(str(size) for size in fitting(self.cluster, CALIBRATION, self.options["longest_call"]))
        begun = time.monotonic()
        arguments = ["tune", "-o", profile, "--sizes", sizes, "--time-ms", self.options["tune_ms"]]
        self.found["tune_printed"] = lab.job(self.places, arguments, self.left(), program=self.options["program"], **self.settings)
        self.found["profile"] = Path(profile).read_text()
        self.found["tune_seconds"] = round(time.monotonic() - begun, 1)
        self.say(f"a profile after {self.found['tune_seconds']} s")

    def perf(self, schedule, sizes, calls, profile, number):
        """Measures a schedule on some lengths, each four times the one before. Keeps the median and the shortest call, out of place and in place."""
        settings = dict(self.settings)
        if schedule != UNTUNED:
            settings["FLEXRING_TUNING"] = profile
        if schedule not in (AUTO, UNTUNED):
            settings["FLEXRING_ALGO"] = schedule
        arguments = ["-b", sizes[0], "-e", sizes[-1], "-f", 4, "-n", calls, "-w", 1, "-c", 0, *TOGETHER]
        report = lab.report(self.places, arguments, max(1, self.left()), program=self.options["program"], **settings)
        for row in report["rows"]:
            its = self.found["times"].setdefault(schedule, {}).setdefault(str(row["size"]), [])
            its.append({name: [row["out_of_place"][name] * 1e-6, row["in_place"][name] * 1e-6] for name in ("median", "min")})
        last = report["rows"][-1]
        self.say(f"round {number + 1}, {schedule}: {last['size'] >> 20} MiB in {last['in_place']['median'] / 1e3:.1f} ms")

    def measure(self):
        sizes = fitting(self.cluster, SIZES, self.options["longest_call"])
        parts = [([size for size in sizes if size < LONG], self.options["calls"]),
                 ([size for size in sizes if size >= LONG], self.options["long_calls"])]
        with tempfile.TemporaryDirectory() as folder:
            profile = f"{folder}/profile.toml"
            self.tune(profile)
            schedules = [AUTO, UNTUNED, *distinct(self.options["program"], profile)]
            longest_round = 0
            for number in range(self.options["rounds"]):
                begun = time.monotonic()
                if number and longest_round > self.left():
                    break
                for schedule in in_order(schedules, number):
                    for its, calls in parts:
                        if its and schedule not in self.found["failed"]:
                            self.attempt(schedule, its, calls, profile, number)
                longest_round = max(longest_round, time.monotonic() - begun)
        return self.found

    def attempt(self, schedule, sizes, calls, profile, number):
        what = f"{schedule} from {sizes[0] >> 10} KiB on in round {number + 1}"
        if self.left() <= 1:
            self.found["left_out"].append(what)
            return
        try:
            self.perf(schedule, sizes, calls, profile, number)
        except lab.Failure as failure:
            if self.left() <= 1 and "not done after" in str(failure):
                self.found["left_out"].append(what)
            else:
                self.found["failed"][schedule] = "; ".join(str(failure).splitlines()[-3:])
                self.say(f"failed: {schedule}: {self.found['failed'][schedule]}")


if __name__ == "__main__":
    exit_on_signals()
    print(json.dumps(ClusterRun(json.loads(sys.argv[1])).measure()))
