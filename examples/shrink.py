"""A training loop that loses ranks and goes on with those that are left.

    cargo build --release
    python3 examples/shrink.py --ranks 4 --lose 2,0

Fits a line through points by gradient descent. The points are divided among the ranks; each step sums the gradients of all
ranks. The ranks in ``--lose`` kill themselves during the training, one after the other. The others notice it by an error in
``all_reduce``, shrink the communicator, agree on the parameters to continue with, divide the points again, and train on. No
process is started again. The exit code is 1 if the line is wrong or differs between the ranks that are left.
"""

import argparse
import array
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import flexring  # noqa: E402

SLOPE, OFFSET = 3.0, -2.0
POINTS, STEPS, RATE = 4000, 300, 0.5
# Steps between two losses.
INTERVAL = 60


def load():
    """The same points on every rank, without noise, so that the line is known exactly."""
    draw = random.Random(1998)
    inputs = [draw.uniform(-1, 1) for _ in range(POINTS)]
    return [(x, SLOPE * x + OFFSET) for x in inputs]


def gradient(points, slope, offset):
    """The sums of the squared errors' derivatives, and the number of points."""
    errors = [(slope * x + offset - y, x) for x, y in points]
    return array.array("d", [sum(e * x for e, x in errors), sum(e for e, _ in errors), len(points)])


def train(comm, doomed):
    """Trains on all ranks. ``doomed`` is the step at which this process kills itself, or None. Returns the communicator of
    the ranks that are left, and the line."""
    points = load()
    # Step, slope, offset: what a rank must know to take over.
    state = array.array("d", [0, 0, 0])
    while state[0] < STEPS:
        if state[0] == doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            total = gradient(points[comm.rank :: comm.size], state[1], state[2])
            comm.all_reduce(total)
        except flexring.FlexringError as error:
            start, before = time.monotonic(), comm.size
            comm = recover(comm, state)
            if comm.rank == 0:
                took = time.monotonic() - start
                print(f"{error}\n  step {state[0]:.0f}: {comm.size} of {before} ranks go on after {took:.2f} s", flush=True)
            continue
        assert total[2] == POINTS, "each point counts once, however many ranks there are"
        state[1] -= RATE * total[0] / POINTS
        state[2] -= RATE * total[1] / POINTS
        state[0] += 1
    return comm, (state[1], state[2])


def recover(comm, state):
    """Continues with the ranks that are left. Returns their communicator."""
    while True:
        smaller = comm.shrink()
        comm.close()
        comm = smaller
        try:
            # Some ranks may have finished the step in which the others failed, so all continue with the state of one.
            comm.broadcast(state)
            return comm
        except flexring.FlexringError:
            # Another rank died meanwhile.
            continue


def rank_main(options):
    number = int(os.environ["FLEXRING_RANK"])
    with flexring.Communicator.from_env() as first:
        doomed = INTERVAL * (options.lose.index(number) + 1) if number in options.lose else None
        comm, line = train(first, doomed)
        lines = comm.all_gather(array.array("d", line), out=array.array("d", [0, 0] * comm.size))
        same = all(tuple(lines[2 * rank : 2 * rank + 2]) == line for rank in range(comm.size))
        right = abs(line[0] - SLOPE) < 1e-6 and abs(line[1] - OFFSET) < 1e-6
        if comm.rank == 0:
            print(f"the line is {line[0]:.6f} x {line[1]:+.6f}")
            print(f"{comm.size} ranks ended with {'the same' if same else 'DIFFERENT'} parameters")
        comm.close()
        return 0 if same and right else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ranks = lambda text: [int(number) for number in text.split(",") if number]  # noqa: E731
    parser.add_argument("--ranks", type=int, default=4, help="number of processes")
    parser.add_argument("--lose", type=ranks, default=[2, 0], help="the ranks that kill themselves, in this order")
    options = parser.parse_args()
    if "FLEXRING_RANK" in os.environ:
        return rank_main(options)

    # This process only starts the ranks; any launcher does as well.
    environment = dict(os.environ, FLEXRING_WORLD_SIZE=str(options.ranks), FLEXRING_UNIQUE_ID=flexring.unique_id().hex())
    processes = [
        subprocess.Popen([sys.executable, *sys.argv], env=dict(environment, FLEXRING_RANK=str(rank)))
        for rank in range(options.ranks)
    ]
    codes = [process.wait() for process in processes]
    wrong = [
        rank for rank, code in enumerate(codes) if code != (-signal.SIGKILL if rank in options.lose else 0)
    ]
    if wrong:
        print(f"these ranks did not end as they should: {wrong}, exit codes {codes}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
