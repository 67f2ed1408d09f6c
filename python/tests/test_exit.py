"""Which rank ends first, and what the others learn, when one fails."""

import os
import subprocess
import sys
import unittest

import flexring

# How long a rank takes to end, in seconds, after all that flexring does then. Well below the time for which others wait.
SLOW = 0.4

RANK = f"""
import atexit, sys, time

@atexit.register
def end():
    time.sleep({SLOW})
    print("ended", time.time(), flush=True)

import array, flexring
id, rank, failing, way = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
comm = flexring.Communicator.from_unique_id(id, rank, 3)
vector = array.array("f", [1])
comm.all_reduce(vector)
if rank == failing:
    if way == "block":
        with comm:
            raise ValueError("no\\ndata")
    if way == "exit":
        sys.exit(3)
    if way == "success in a block":
        with comm:
            sys.exit(0)
    error = ValueError("no\\ndata")
    error.__notes__ = ["a note"]
    raise error
try:
    comm.all_reduce(vector)
except flexring.FlexringError as error:
    print("failed", time.time(), error, flush=True)
    sys.exit(1)
"""

def started(*arguments):
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class Exit(unittest.TestCase):
    def run_ranks(self, failing, way):
        id = flexring.unique_id().hex()
        ranks = [started("-c", RANK, id, str(rank), str(failing), way) for rank in range(3)]
        printed = [rank.communicate(timeout=60) for rank in ranks]
        ended = float(printed[failing][0].split()[1])
        for rank, (out, err) in enumerate(printed):
            if rank != failing:
                kind, at, message = out.split("\nended")[0].split(" ", 2)
                self.assertEqual(kind, "failed", err)
                self.assertGreater(float(at), ended, f"rank {rank} fails before rank {failing} has ended")
                yield message

    def test_others_name_the_exception_that_ends_a_rank_after_it_has_ended(self):
        for failing, way in (1, "exception"), (0, "exception"), (2, "block"):
            for message in self.run_ranks(failing, way):
                self.assertRegex(message, rf"^peer lost: rank {failing} \(pid .*\) raised ValueError: no data \(<string>:\d+\)$")

    def test_others_fail_after_a_rank_has_exited(self):
        for failing, way in (1, "exit"), (0, "exit"), (1, "success in a block"):
            for message in self.run_ranks(failing, way):
                self.assertIn(f"rank {failing} (pid", message)
                self.assertIn("left after call #1", message)

    def test_children_of_multiprocessing_name_their_exception(self):
        for method in "spawn", "fork":
            script = os.path.join(os.path.dirname(__file__), "exit_children.py")
            ended = started(script, flexring.unique_id().hex(), method).communicate(timeout=60)
            self.assertIn("rank 1 (pid", ended[0])
            self.assertIn("raised ValueError: no data (exit_children.py:", ended[0])
            self.assertIn("first: [1]", ended[0], ended[1])
