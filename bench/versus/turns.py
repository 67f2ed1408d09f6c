"""Runs the libraries by turns in one setting, and keeps what they measured.

A setting is a dictionary, as it stands in versus.json: where the ranks are, the lengths, and for each library, length and round a record.
"""

import json
import statistics
import sys
import time

import lab

# Seconds that all libraries need at least to start and end.
LEAST_ROUND = 10
# Single calls are kept for vectors from this length on, and so many of each round: the picture of the spread shows them.
KEPT_FROM, KEPT = 1 << 20, 50


def setting(title, place, dtype, sizes, bounds):
    """`bounds` are microseconds by length that the hardware needs at least."""
    return {"title": title, "ranks": place.ranks, "transport": place.transport, "dtype": dtype, "sizes": sizes,
            "bound_us": {str(size): bound for size, bound in bounds.items()}, "times": {}, "failed": {}, "left_out": []}


def record(result):
    """What is kept of one line of the loop."""
    ordered = sorted(result["times_us"])
    kept = {"calls": len(ordered), "median_us": round(statistics.median(ordered), 2), "least_us": ordered[0], "most_us": ordered[-1],
            "p95_us": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], "first_us": result["first_us"]}
    if result["bytes"] >= KEPT_FROM:
        kept["times_us"] = result["times_us"][:KEPT]
    return kept


def seconds_of_calls(setting, size):
    """What the calls of a length took in the longest round, over all libraries."""
    def microseconds(record):
        # A slow first call is the only one.
        is_only = record["calls"] == 1 and record["median_us"] == record["first_us"]
        return record["first_us"] + (0 if is_only else record["calls"] * record["median_us"])

    rounds = [sizes.get(str(size), {}).values() for sizes in setting["times"].values()]
    return sum(max(map(microseconds, records), default=0) for records in rounds) / 1e6


def sizes_within(setting, round_seconds, left):
    """The lengths of a further round, if one of all lengths takes `round_seconds`: as many as fit into the seconds that are left, shortest first."""
    sizes = list(setting["sizes"])
    while sizes and max(round_seconds, LEAST_ROUND) > left:
        round_seconds -= seconds_of_calls(setting, sizes.pop())
    return sizes


def fitting(peers, place, dtype):
    """The libraries that have this transport and type."""
    return [peer for peer in peers if place.transport in peer.transports and dtype in peer.dtypes]


class Turns:
    """Measures until `end`, a time of time.monotonic()."""

    def __init__(self, loop, end):
        # Seconds of the loop for each length, the most calls, and seconds that a process may take in all.
        self.seconds, self.most_calls, self.limit = loop
        self.end = end
        # Lengths that a library could not measure, by the title of the setting and its name.
        self.given_up = {}

    def over(self):
        return time.monotonic() >= self.end

    def lengths(self, peer, setting, sizes):
        """Those of `sizes` that the library has not failed to measure in this setting."""
        return [size for size in sizes if size not in self.given_up.get((setting["title"], peer.name), ())]

    def take(self, peer, place, setting, number, sizes=None):
        """Runs one library for one round, with all lengths of the setting or with `sizes`. Lengths that it did not measure before it failed or was killed are left out
        of its further rounds."""
        sizes = self.lengths(peer, setting, sizes or setting["sizes"])
        if not sizes:
            return
        left = self.end - time.monotonic()
        if left <= 1:
            setting["left_out"].append(f"{peer.name} in round {number + 1}")
            return
        printed, failure = "", None
        try:
            commands = peer.commands(place, setting["dtype"], [self.seconds, self.most_calls, *sizes])
            printed = lab.together(commands, min(self.limit, left))
        except (lab.Failure, OSError) as caught:
            printed, failure = getattr(caught, "printed", ""), caught
        # A library that was killed has measured the lengths before.
        results = [json.loads(line) for line in printed.splitlines() if is_result(line)]
        last, wrong = "-", next((result["bytes"] for result in results if result["wrong"]), None)
        for result in results if wrong is None else []:
            times = setting["times"].setdefault(peer.name, {}).setdefault(str(result["bytes"]), {})
            times[str(number)] = record(result)
            last = f"{result['bytes']} B {times[str(number)]['median_us'] / 1e3:.3f} ms"
        print(f"  round {number + 1}, {setting['title']}, {peer.name}: {last}", file=sys.stderr, flush=True)
        is_over = left < self.limit and "not done after" in str(failure)
        if wrong is not None:
            self.give_up(peer, setting, sizes, f"sums of {wrong} bytes are wrong")
        elif failure and len(results) < len(sizes) and is_over:
            setting["left_out"].append(f"{peer.name} in round {number + 1}")
        elif failure and len(results) < len(sizes):
            self.give_up(peer, setting, sizes[len(results):], failure)
        elif failure and not is_over:
            record_failure(peer, setting, f"after its last length: {failure}")

    def give_up(self, peer, setting, sizes, failure):
        self.given_up.setdefault((setting["title"], peer.name), set()).update(sizes)
        record_failure(peer, setting, failure)


def is_result(line):
    """Libraries print warnings, too."""
    return line.startswith("{") and line.endswith("}")


def record_failure(peer, setting, failure):
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    setting["failed"][peer.name] = "; ".join(dict.fromkeys(lines[:1] + lines[-1:]))
    print(f"failed: {setting['title']}, {peer.name}: {setting['failed'][peer.name]}", file=sys.stderr, flush=True)
