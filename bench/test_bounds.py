#!/usr/bin/env python3
"""Checks that `make versus`, `make bench-training` and `make bench-prediction` kill and name what hangs, and leave no process and no namespace
when they are interrupted; and the statistics of their reports.

    bench/test_bounds.py

Scripts stand in for MPICH, for Python with torch and for flexring, so that no library is needed, and no release build. Namespaces are checked as root where
iperf3 is installed.
"""

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "versus"), str(HERE / "training"), str(HERE / "prediction")]

import accuracy
import cases
import goals
import lab
import train
import versus
from agree import agree
from cluster import Cluster
from measures import between_rounds
from peers import Peer, Place
from turns import Turns, setting, sizes_within

LINE = json.dumps({"bytes": 8, "wrong": 0, "first_us": 3.0, "times_us": [1.0, 2.0, 4.0]})
# Prints its process number and the nodes of its lab into $STARTED, and does not react to SIGTERM.
HANGS = """#!/bin/sh
trap '' TERM
echo "$$ ${LAB_NODES-}" > "$STARTED.$$"
mv "$STARTED.$$" "$STARTED"
while :; do sleep 0.2; done
"""
# Has a torch, and hangs where it is to train. SIGTERM ends it, as it does Python.
PYTHON = """#!/bin/sh
[ "$1" = -c ] && { echo 2.15.0; exit 0; }
echo "$$ ${LAB_NODES-}" > "$STARTED.$$"
mv "$STARTED.$$" "$STARTED"
exec sleep 600
"""
# Creates the file after -o.
COMPILES = """#!/bin/sh
while [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done
"""


def runs(pid):
    """Whether a process exists that is not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


class Script(Peer):
    """A library that is a shell script."""

    def __init__(self, name, script):
        super().__init__(name, "#000000")
        self.script = script

    def commands(self, place, dtype, arguments):
        return [(["sh", "-c", self.script], {})] * place.ranks


class TurnsTest(unittest.TestCase):
    def take(self, script, limit=0.5, left=60.0, sizes=(8, 64)):
        place = Place(2, "shm")
        its = setting("2 ranks", place, "f32", list(sizes), {})
        with contextlib.redirect_stderr(io.StringIO()):
            Turns((0.1, 10, limit), time.monotonic() + left).take(Script("stub", script), place, its, 0)
        return its

    def test_a_library_that_hangs_is_killed_and_keeps_the_lengths_that_it_finished(self):
        its = self.take(f"echo '{LINE}'; exec sleep 60")
        self.assertIn("not done after", its["failed"]["stub"])
        self.assertEqual(its["times"]["stub"]["8"]["0"]["median_us"], 2.0)
        self.assertNotIn("64", its["times"]["stub"])

    def test_the_end_of_the_run_leaves_a_library_out_and_is_no_failure(self):
        its = self.take("exec sleep 60", limit=60, left=1.5)
        self.assertEqual(its["failed"], {})
        self.assertEqual(its["left_out"], ["stub in round 1"])

    def test_a_library_that_fails_is_named_with_its_last_message(self):
        its = self.take("echo 'no such interface' >&2; exit 3")
        self.assertIn("ended with status 3; no such interface", its["failed"]["stub"])

    def test_a_library_that_fails_after_its_last_length_is_named_and_measured_again(self):
        its, place = setting("1 rank", Place(1, "shm"), "f32", [8], {}), Place(1, "shm")
        turns = Turns((0.1, 10, 5), time.monotonic() + 60)
        with contextlib.redirect_stderr(io.StringIO()):
            for number in (0, 1):
                turns.take(Script("stub", f"echo '{LINE}'; sleep 0.2; echo 'cannot end' >&2; exit 3"), place, its, number)
        self.assertIn("after its last length: process 0 of 1 ended with status 3; cannot end", its["failed"]["stub"])
        self.assertEqual(list(its["times"]["stub"]["8"]), ["0", "1"])

    def test_a_library_that_finished_its_last_length_when_the_time_was_over_did_not_fail(self):
        its = self.take(f"echo '{LINE}'; exec sleep 60", limit=60, left=1.5, sizes=[8])
        self.assertEqual((its["failed"], its["left_out"]), ({}, []))
        self.assertIn("8", its["times"]["stub"])

    def test_settings_that_take_less_time_get_more_rounds(self):
        now, taken = [0.0], []

        class Clocked(Turns):
            def take(self, peer, place, its, number, sizes):
                now[0] += 1 if place.ranks == 2 else 8
                taken.append((place.ranks, sizes[0], number, peer.name))

        bounds = argparse.Namespace(node_loop=(0.1, 10, 5), rounds=3, short=8)
        pairs = [(place, setting(f"{place.ranks} ranks", place, "f32", [8, 64], {})) for place in (Place(2, "shm"), Place(3, "shm"))]
        peers = [Script(name, "") for name in ("A", "B")]
        with mock.patch("versus.Turns", Clocked), mock.patch("time.monotonic", lambda: now[0]), contextlib.redirect_stdout(io.StringIO()):
            versus.measure_node(bounds, peers, pairs, 45, left_out := [])
        self.assertEqual(left_out, [])
        self.assertEqual([each for each in taken if each[0] == 2],
                         [(2, size, number, name) for number in range(3) for size, order in ((8, "AB"), (64, "AB")) for name in (order if number % 2 == 0 else order[::-1])])
        self.assertEqual([each[1:] for each in taken if each[0] == 3], [(8, 0, "B"), (8, 0, "A"), (64, 0, "B"), (64, 0, "A")])

    def test_wrong_sums_are_a_failure(self):
        its = self.take(f"echo '{LINE.replace(chr(34) + 'wrong' + chr(34) + ': 0', chr(34) + 'wrong' + chr(34) + ': 1')}'")
        self.assertEqual(its["failed"]["stub"], "sums of 8 bytes are wrong")


class VersusTest(unittest.TestCase):
    """One length on 2 ranks: two rounds of flexring, whose medians are 10 and 12 us, and one of MPICH."""

    def run_of(self, mpich_us):
        def record(us):
            return {"calls": 3, "median_us": us, "p95_us": us, "first_us": us}

        its = setting("2 ranks", Place(2, "shm"), "f32", [64], {})
        its["times"] = {"flexring, pool memory": {"64": {"0": record(10.0), "1": record(12.0)}}, "MPICH": {"64": {"0": record(mpich_us)}}}
        return {"date": "", "cpu": "", "cores": 2, "results": {"commit": "", "load_before": 0, "peers": {}, "node": [its], "clusters": []}}

    def test_a_goal_that_is_missed_names_its_worst_case(self):
        cases_ = [goals.Case(2.0, "a"), goals.Case(0.5, "b"), goals.Case(0.9, "c")]
        self.assertEqual(goals.row("fast", cases_, least=1, shown="{:.2f}x"), "| fast | **0.50x**; b | **no**, in 2 of 3 cases |")
        self.assertEqual(goals.row("even", cases_, most=2), "| even | **2.00**; a | yes, in 3 cases |")
        self.assertEqual(goals.row("other", [], least=1), "| other | not measured | |")

    def test_goals_compare_within_a_round(self):
        table = goals.table(self.run_of(5.0)["results"])
        self.assertIn("not slower than any library | **0.50x**; 2 ranks, 64 B: 11 us, MPICH 5 us | **no**, in 1 of 1 cases |", table)
        self.assertIn("faster than Gloo, Open MPI and MPICH | not measured | |", table)

    def test_a_round_for_which_the_time_does_not_suffice_leaves_out_the_longest_lengths(self):
        its = setting("2 ranks", Place(2, "shm"), "f32", [8, 64], {})
        record = {"calls": 3, "median_us": 1e6, "first_us": 2e6}
        its["times"] = {"Gloo": {"8": {"0": record}, "64": {"0": record}}, "MPICH": {"64": {"0": record}}}
        self.assertEqual([sizes_within(its, 20, left) for left in (20, 11, 3)], [[8, 64], [8], []])

    def test_the_spread_between_rounds_is_that_of_nineteen_of_twenty_pairs(self):
        run = []
        for ratio in range(20):
            its = setting(f"{ratio}", Place(2, "shm"), "f32", [64], {})
            its["times"] = {"MPICH": {"64": {"0": {"median_us": 1.0}, "1": {"median_us": 1.0 / (1 + ratio)}}}}
            run.append(its)
        self.assertAlmostEqual(between_rounds(run, "shm", 64, ours=False), 19.0)
        # Six equal rounds are five differences, not fifteen: with the twenty others, the 24th of 25 differences counts.
        its = setting("six rounds", Place(2, "shm"), "f32", [64], {})
        its["times"] = {"MPICH": {"64": {str(number): {"median_us": 1.0} for number in range(6)}}}
        self.assertAlmostEqual(between_rounds([*run, its], "shm", 64, ours=False), 19.0)
        self.assertIsNone(between_rounds(run, "shm", 64, ours=True))
        self.assertIsNone(between_rounds(run, "tcp", 64, ours=False))

    def test_runs_agree_within_the_spread_of_their_rounds(self):
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / name for name in ("old.json", "new.json")]
            for path, mpich_us in zip(paths, (5.0, 5.5)):
                path.write_text(json.dumps(self.run_of(mpich_us)))
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                agree(*paths)
        self.assertIn("flexring: 0 of 1 outside", printed.getvalue())
        self.assertIn("other libraries: 1 of 1 outside", printed.getvalue())

    def test_one_call_agrees_within_the_differences_between_rounds_of_other_settings(self):
        def record(us):
            return {"calls": 1, "median_us": us, "p95_us": us, "first_us": us}

        def run(us):
            found = self.run_of(5.0)
            for number in range(20):
                its = setting(f"{number}", Place(2, "shm"), "f32", [64], {})
                its["times"] = {"Open MPI": {"64": {"0": record(10.0), "1": record(15.0)}}}
                found["results"]["node"].append(its)
            for transport in ("shm", "tcp"):
                its = setting(f"one call, {transport}", Place(2, transport), "f32", [64], {})
                its["times"] = {"Open MPI": {"64": {"0": record(us)}}}
                found["results"]["node"].append(its)
            return found

        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / name for name in ("old.json", "new.json")]
            for path, us in zip(paths, (10.0, 14.0)):
                path.write_text(json.dumps(run(us)))
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                agree(*paths)
        self.assertIn("other libraries: 0 of 22 outside of the spread; 1 without one", printed.getvalue())


class ClusterTest(unittest.TestCase):
    def test_the_bound_is_that_of_the_busiest_link_or_of_all_links_around_some_switches(self):
        for name, vectors in {"1+1": 1, "1+1+1": 4 / 3, "1+1+1@500M": 2, "(3+1)@500M+2": 2, "(2+1)@1G+(1+2)@1G": 3 / 2, "(2+1)@1G+3": 4 / 3}.items():
            # What `flexring plan --explain` says.
            seconds = Cluster(name).bound(1 << 20, {rate: 1e6 * rate for rate in (500, 1000, 4000)})
            self.assertAlmostEqual(seconds, vectors * (8 << 20) / 1e9, msg=name)


class TrainingTest(unittest.TestCase):
    def test_a_job_that_hangs_is_killed_and_keeps_what_it_printed(self):
        with self.assertRaises(lab.Failure) as caught:
            lab.supervised(["sh", "-c", "echo done; sleep 60 & wait"], 0.5)
        self.assertIn("not done after", str(caught.exception))
        self.assertEqual(caught.exception.printed, "done\n")

    def test_losses_that_differ_from_those_of_gloo_are_a_failure(self):
        record = {"losses": {"flexring": [2.0, 1.5], "gloo": [2.0, 1.0]}, "tolerance": 1e-2, "equal_weights": {"gloo": False}}
        differing, unequal = train.compare(record)
        self.assertIn("flexring: the losses differ from Gloo's by 5.0e-01", differing)
        self.assertEqual(unequal, "gloo: ranks have different weights")
        self.assertEqual(train.compare({**record, "tolerance": 0.6, "equal_weights": {}}), [])

    def test_a_loss_that_is_no_number_is_a_failure(self):
        record = {"losses": {"flexring": [2.0, float("nan")], "gloo": [2.0, 1.0]}, "tolerance": 1e-2}
        self.assertEqual(len(train.compare(record)), 1)

    def test_without_torch_training_is_skipped(self):
        command = [HERE / "training/train.py", "--short"]
        run = subprocess.run(command, env={**os.environ, "PYTHON": "/bin/false"}, stdout=subprocess.PIPE, text=True, check=True)
        self.assertIn("skipped: training: /bin/false cannot import torch", run.stdout)

    def test_wrong_clusters_are_refused(self):
        for name in ("", "1", "2+", "x+3", "2+3@5T", "0+2"):
            with self.assertRaises(argparse.ArgumentTypeError, msg=name):
                train.cluster_named(name)


class PredictionTest(unittest.TestCase):
    PROFILE = """
node = [{up_bytes_per_s = 100, down_bytes_per_s = 110}, {up_bytes_per_s = 90, down_bytes_per_s = 110}, {up_bytes_per_s = 50, down_bytes_per_s = 50}]
"""

    def found(self):
        """A cluster with vectors of 1 MiB: ring takes 1.1 s and was predicted to take 1 s, tree 2 s as predicted."""
        size = str(1 << 20)
        times = {cases.AUTO: [1.1, 1.1], cases.UNTUNED: [1.6, 2.0], "ring": [1.0, 1.2], "tree": [2.0, 2.0]}
        predicted = {cases.AUTO: [1.0, 0.9], "ring": [1.0, 0.9], "tree": [2.0, 1.8]}
        return {"cluster": "1+1+1@500M", "profile": self.PROFILE, "times": {name: {size: [{"median": both, "min": both}]} for name, both in times.items()},
                "predicted": {name: {size: seconds} for name, seconds in predicted.items()}}

    def test_errors_are_parts_of_the_measured_time(self):
        errors = {case["schedule"]: accuracy.error(case) for case in accuracy.cases_of(self.found())}
        self.assertAlmostEqual(errors["ring"], 1 / 1.1 - 1)
        self.assertEqual(errors["tree"], 0)
        self.assertNotIn(cases.UNTUNED, errors)
        self.assertEqual([accuracy.percentile([4, 1, 3, 2, 5, 6, 7, 8, 9, 10], part) for part in (0.5, 0.9, 1)], [5, 9, 10])

    def test_auto_is_compared_with_the_fastest_schedule(self):
        choice, = accuracy.choices_of(self.found())
        self.assertEqual((choice["auto"], choice["untuned"], choice["least"]), (1.1, 1.8, 1.1))

    def test_the_spread_is_that_of_links_of_one_rate(self):
        self.assertAlmostEqual(accuracy.link_spread(self.found()), 1.05)

    def test_vectors_for_which_links_need_too_long_are_not_measured(self):
        self.assertEqual(cases.fitting(Cluster("1+1@100M"), cases.SIZES, 0.9)[-1], 4 << 20)
        self.assertEqual(cases.fitting(Cluster("1+1@1M"), cases.SIZES, 0.1), cases.SIZES[:1])
        self.assertFalse({*cases.SIZES} & {*cases.CALIBRATION})

    def test_wrong_clusters_are_refused(self):
        for name in ("5", "2+x"):
            command = [sys.executable, HERE / "prediction/predict.py", "--clusters", name]
            self.assertEqual(subprocess.run(command, stderr=subprocess.PIPE).returncode, 2, name)


class InterruptTest(unittest.TestCase):
    def interrupt(self, command, scripts, number):
        """Interrupts a benchmark while one of the scripts hangs, and returns the nodes of its lab."""
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            for name, script in scripts.items():
                (folder / name).write_text(script)
                (folder / name).chmod(0o755)
            started = folder / "started"
            environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "STARTED": str(started), "PYTHON": str(folder / "python")}
            # By its interpreter, because a script may be another one.
            command = [sys.executable, *command, "--short", "--out", folder / "out"]
            run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            try:
                self.assertTrue(until(started.exists, 60), "no script was started")
                pid, *nodes = started.read_text().split()
                run.send_signal(number)
                # A second signal must not disturb the removal.
                time.sleep(0.2)
                run.send_signal(number)
                printed, _ = run.communicate(timeout=60)
            finally:
                if run.poll() is None:
                    run.kill()
            self.assertEqual(run.returncode, 128 + number, printed)
            self.assertTrue(until(lambda: not runs(int(pid)), 5), f"process {pid} still runs")
            self.assertEqual([node for node in nodes if os.path.exists(f"/run/netns/{node}")], [])
            return nodes

    def versus(self, part, number):
        command = [HERE / "versus/versus.py", "--peers", "MPICH", "--only", part, "--clusters", "2+3"]
        return self.interrupt(command, {"mpicc.mpich": COMPILES, "mpiexec.mpich": HANGS}, number)

    def training(self, cluster, number):
        return self.interrupt([HERE / "training/train.py", "--clusters", cluster], {"python": PYTHON}, number)

    @unittest.skipUnless(lab.missing() is None, "needs root and iproute2")
    def test_a_termination_of_the_prediction_removes_the_namespaces(self):
        command = [HERE / "prediction/predict.py", "--flexring", "hangs", "--clusters", "1+1"]
        self.assertEqual(len(self.interrupt(command, {"hangs": HANGS}, signal.SIGTERM)), 2)

    def test_an_interrupt_ends_the_libraries(self):
        self.versus("node", signal.SIGINT)

    def test_an_interrupt_ends_the_training(self):
        self.training("2", signal.SIGINT)

    @unittest.skipUnless(lab.missing("iperf3") is None, "needs root, iproute2 and iperf3")
    def test_a_termination_removes_the_namespaces(self):
        self.assertEqual(len(self.versus("clusters", signal.SIGTERM)), 2)

    @unittest.skipUnless(lab.missing() is None, "needs root and iproute2")
    def test_a_termination_of_the_training_removes_the_namespaces(self):
        self.assertEqual(len(self.training("2+3", signal.SIGTERM)), 2)


if __name__ == "__main__":
    unittest.main()
