#!/usr/bin/env python3
"""Checks that `make versus` kills and names a library that hangs, and leaves no process and no namespace when it is interrupted.

    bench/versus/test_bounds.py

Scripts stand in for MPICH, so that no library is needed, and no release build. Namespaces are checked as root where iperf3 is installed.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from peers import Peer, Place
from turns import Turns, setting

LINE = json.dumps({"bytes": 8, "wrong": 0, "first_us": 3.0, "times_us": [1.0, 2.0, 4.0]})
# Prints its process number and the nodes of its lab into $STARTED, and does not react to SIGTERM.
HANGS = """#!/bin/sh
trap '' TERM
echo "$$ ${LAB_NODES-}" > "$STARTED.new"
mv "$STARTED.new" "$STARTED"
while :; do sleep 0.2; done
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
    def take(self, script, limit=0.5, left=60.0):
        place = Place(2, "shm")
        its = setting("2 ranks", place, "f32", [8, 64], {})
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

    def test_wrong_sums_are_a_failure(self):
        its = self.take(f"echo '{LINE.replace(chr(34) + 'wrong' + chr(34) + ': 0', chr(34) + 'wrong' + chr(34) + ': 1')}'")
        self.assertEqual(its["failed"]["stub"], "sums of 8 bytes are wrong")


class InterruptTest(unittest.TestCase):
    def interrupt(self, part, number):
        """Interrupts a run while its library hangs, and returns the nodes of its lab."""
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            for name, script in (("mpicc.mpich", COMPILES), ("mpiexec.mpich", HANGS)):
                (folder / name).write_text(script)
                (folder / name).chmod(0o755)
            started = folder / "started"
            environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "STARTED": str(started)}
            command = [HERE / "versus.py", "--short", "--peers", "MPICH", "--only", part, "--clusters", "2+3", "--out", folder / "out"]
            run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            try:
                self.assertTrue(until(started.exists, 60), "the library was not started")
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
            return nodes

    def test_an_interrupt_ends_the_libraries(self):
        self.interrupt("node", signal.SIGINT)

    @unittest.skipUnless(os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "iperf3"))), "needs root, iproute2 and iperf3")
    def test_a_termination_removes_the_namespaces(self):
        nodes = self.interrupt("clusters", signal.SIGTERM)
        self.assertEqual(len(nodes), 2)
        there = [node for node in nodes if os.path.exists(f"/run/netns/{node}")]
        self.assertEqual(there, [])


if __name__ == "__main__":
    unittest.main()
