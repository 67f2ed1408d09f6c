#!/usr/bin/env python3
"""The clusters of network namespaces of `make versus`, and the libraries by turns in one of them.

versus.py runs this script inside bench/lab.sh.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lab
from cluster import Cluster
from common import exit_on_signals, in_order
from measures import is_ours, measured
from peers import Place, present
from turns import Turns, fitting, setting, sizes_within

PAPER = ["2+2", "2+3", "3+3", "3+4", "4+4", "3+3+3", "3+3+4", "3+4+4", "4+4+4"]
OTHERS = ["1+4", "5+2+1", "1+1+1+1+1+1", "1+1+1@500M", "1+1+1+1@500M", "2+3@500M", "4@500M+2+1", "(2+1)@1G+(1+2)@1G", "(3+1)@500M+2"]
CLUSTERS = PAPER + OTHERS
# Those of the short form. The time may not suffice for the last ones.
SHORT = ["2+3", "1+4", "1+1+1@500M", "(2+1)@1G+(1+2)@1G", "3+3+4", "5+2+1"]
# So many calls of this length in a row show the spread on links, where they take at most this part of the time.
ROW, ROW_BYTES, ROW_PART = 50, 16 << 20, 0.3


def seconds_of_round(name, sizes):
    """About what a round of all libraries takes: their starts, which take 3 s for each rank, and their calls, which take 11 times as long as the links need."""
    cluster = Cluster(name)
    return 20 + 3 * len(cluster.nodes()) + 11 * cluster.bound(sum(sizes), {rate: 1e6 * rate for rate in {*cluster.rates, *cluster.uplinks}})


def calls_in_a_row(peer, place, bound, end):
    """Microseconds of ROW calls of flexring, the first one included. None if they take twice as long as the links need, or fail: the rounds name that."""
    its = setting("calls in a row", place, "f32", [ROW_BYTES], {})
    Turns((1e3, ROW - 1, 5 + 2 * ROW * bound / 1e6), end).take(peer, place, its, 0)
    records = measured(its, peer.name, ROW_BYTES)
    return [records["0"]["first_us"], *records["0"]["times_us"]] if records else None


def measure(options):
    """Measures the cluster of this lab. `options` are those that `run` was called with."""
    begun = time.monotonic()
    end = begun + options["seconds"]
    cluster = Cluster(options["cluster"])
    wire = {int(rate): bits for rate, bits in options["wire"].items()}
    cluster.measure_wire(wire, options["iperf3_seconds"])
    nodes = cluster.nodes()
    place = Place(len(nodes), "lab", nodes, cluster.topology())
    bounds = {size: 1e6 * cluster.bound(size, wire) for size in options["sizes"]}
    result = setting(cluster.name, place, "f32", options["sizes"], bounds)
    peers = fitting(present(options["folder"], options["peers"])[0], place, "f32")
    # A slow library may take a third of the time if few clusters are measured.
    loop_seconds, calls, limit = options["loop"]
    turns = Turns((loop_seconds, calls, max(limit, options["seconds"] / 3)), end)
    ours, bound = [peer for peer in peers if is_ours(peer.name)], bounds.get(ROW_BYTES)
    if ours and bound and ROW * bound / 1e6 < ROW_PART * options["seconds"]:
        result |= {"row_bytes": ROW_BYTES, "row_us": calls_in_a_row(ours[0], place, bound, end)}
    longest = 0
    for number in range(options["rounds"]):
        round_begun = time.monotonic()
        # A round that cannot end in time would favour those that come first: it leaves out the longest lengths.
        sizes = sizes_within(result, longest, end - round_begun) if number else result["sizes"]
        if not sizes:
            break
        # The time may not suffice for all in the first round: flexring must be there, and the others by turns.
        order = in_order(peers, number) if number else [*peers[:1], *in_order(peers[1:], options["first"])]
        for peer in order:
            turns.take(peer, place, result, number, sizes)
        longest = max(longest, time.monotonic() - round_begun)
    return result, wire


def run(options):
    """Measures in the lab of a cluster. Returns the setting and iperf3's rates."""
    found = Cluster(options["cluster"]).run(__file__, options, options["seconds"] + 15)
    return found["setting"], found["wire"]


if __name__ == "__main__":
    exit_on_signals()
    found_setting, found_wire = measure(json.loads(sys.argv[1]))
    print(json.dumps({"setting": found_setting, "wire": found_wire}))
