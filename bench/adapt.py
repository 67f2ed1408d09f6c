#!/usr/bin/env python3
"""Slows one link from 1 Gbit/s to 400 Mbit/s during a job on 1+1+1+1 with FLEXRING_ADAPT=1.

    bench/lab.sh 1gbit 1gbit 1gbit 1gbit -- bench/adapt.py [--out FILE]

Prints the time of each all-reduce of 32 MiB, and the medians before and after the change, without adaptation, and with a topology that
has the slow link from the start, which is the new optimum. Takes about a minute, and four at most. Needs a release build.
"""

import argparse
import os
import statistics

import lab
from common import exit_on_signals, need_flexring, write

SIZE = 32 << 20
SLOW = 2
# The report has rows, of an out-of-place and an in-place call each.
ROWS_BEFORE, ROWS = 5, 20
KNOWN = "1@1G+1@1G+1@400M+1@1G"


def times(rows, on_row=lambda rows: None, **settings):
    """Milliseconds of each call, and the report."""
    step = 4096
    sizes = ["-b", SIZE, "-e", SIZE + (rows - 1) * step, "-i", step]
    report = lab.report(range(4), [*sizes, "-n", 1, "-w", 0, "-c", 0], 80, on_row, **settings)
    timings = (row[place] for row in report["rows"] for place in ("out_of_place", "in_place"))
    return [timing["mean_us"] / 1e3 for timing in timings], report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    options = parser.parse_args()
    need_flexring()
    exit_on_signals()
    load = os.getloadavg()[0]
    state = {"slowed": None}

    def slow_down(rows):
        if state["slowed"] is None and rows >= ROWS_BEFORE:
            lab.set_rate(SLOW, 400)
            # The calls of the next row may be running.
            state["slowed"] = 2 * rows

    adapted, report = times(ROWS, slow_down, FLEXRING_ADAPT="1")
    fixed, _ = times(3)
    optimum, _ = times(3, FLEXRING_TOPOLOGY=KNOWN)
    slowed, best = state["slowed"], statistics.median(optimum[2:])
    print("calls in ms:", " ".join(f"{time:.0f}" for time in adapted))
    within = next((call for call in range(slowed, len(adapted)) if statistics.median(adapted[call:]) <= 1.1 * best
                   and max(adapted[call:call + 3]) <= 1.1 * best), None)
    result = {
        "load": load,
        "calls_ms": adapted,
        "slowed_after_call": slowed,
        "before_ms": statistics.median(adapted[1:slowed]),
        "without_adaptation_ms": statistics.median(fixed[2:]),
        "optimum_ms": best,
        "adapted_ms": statistics.median(adapted[-8:]),
        "calls_until_within_10_percent": None if within is None else within - slowed,
        "adaptation": report.get("adaptation"),
    }
    print(f"before {result['before_ms']:.0f} ms, slow without adaptation {result['without_adaptation_ms']:.0f} ms, optimum {best:.0f} ms; "
          f"adapted {result['adapted_ms']:.0f} ms, within 10 % after {result['calls_until_within_10_percent']} calls, load {load:.1f}")
    if options.out:
        write(options.out, "adapt", [result])


main()
