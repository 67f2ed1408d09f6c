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
from peers import Place, present
from turns import Turns, fitting, setting

PAPER = ["2+2", "2+3", "3+3", "3+4", "4+4", "3+3+3", "3+3+4", "3+4+4", "4+4+4"]
OTHERS = ["1+4", "5+2+1", "1+1+1+1+1+1", "1+1+1@500M", "1+1+1+1@500M", "2+3@500M", "4@500M+2+1", "(2+1)@1G+(1+2)@1G", "(3+1)@500M+2"]
CLUSTERS = PAPER + OTHERS
# Those of the short form. The time may not suffice for the last ones.
SHORT = ["2+3", "1+4", "1+1+1@500M", "(2+1)@1G+(1+2)@1G", "3+3+4", "5+2+1"]


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
    turns = Turns(options["loop"], end)
    longest = 0
    for number in range(options["rounds"]):
        round_begun = time.monotonic()
        # A round that cannot end in time would favour those that come first.
        if number and round_begun + longest > end:
            break
        # The time may not suffice for all in the first round: flexring must be there, and the others by turns.
        order = in_order(peers, number) if number else [*peers[:1], *in_order(peers[1:], options["first"])]
        for peer in order:
            turns.take(peer, place, result, number)
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
