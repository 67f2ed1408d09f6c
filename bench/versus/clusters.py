#!/usr/bin/env python3
"""The clusters of network namespaces of `make versus`: their links, the bound that the links set, and the libraries by turns in one of them.

A cluster is written as flexring's short form: 2+3 are two nodes with 2 and 3 ranks, whose links have 1 Gbit/s; 1+1@500M has a slow node;
(2+1)@1G+3 has a switch with two nodes below the first switch. versus.py runs this script inside bench/lab.sh.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lab
from common import ROOT, exit_on_signals
from peers import Place, present
from turns import Turns, fitting, in_order, setting

PAPER = ["2+2", "2+3", "3+3", "3+4", "4+4", "3+3+3", "3+3+4", "3+4+4", "4+4+4"]
OTHERS = ["1+4", "5+2+1", "1+1+1+1+1+1", "1+1+1@500M", "1+1+1+1@500M", "2+3@500M", "4@500M+2+1", "(2+1)@1G+(1+2)@1G", "(3+1)@500M+2"]
CLUSTERS = PAPER + OTHERS
# Those of the short form. The time may not suffice for the last ones.
SHORT = ["2+3", "1+4", "1+1+1@500M", "(2+1)@1G+(1+2)@1G", "3+3+4", "5+2+1"]


def megabits(rate):
    """Mbit/s of a rate such as 1G or 500M; None is 1 Gbit/s."""
    return {"G": 1000, "M": 1}[rate[-1]] * int(rate[:-1]) if rate else 1000


class Cluster:
    def __init__(self, name):
        self.name = name
        # Ranks and rate of each node, the rack of each node or None, and the rate of each rack's link.
        self.ranks, self.rates, self.racks, self.uplinks = [], [], [], []
        for rack, uplink, node in re.findall(r"\(([^)]*)\)(?:@(\w+))?|([^+()]+)", name):
            for part in (rack or node).split("+"):
                ranks, _, rate = part.partition("@")
                self.ranks.append(int(ranks))
                self.rates.append(megabits(rate))
                self.racks.append(len(self.uplinks) if rack else None)
            if rack:
                self.uplinks.append(megabits(uplink))

    def lab_words(self):
        """The arguments of bench/lab.sh."""
        words = []
        for number, (rate, rack) in enumerate(zip(self.rates, self.racks)):
            before = self.racks[number - 1] if number else None
            if rack is not None and rack != before:
                words.append("[")
            words.append(f"{rate}mbit")
            if rack is not None and self.racks[number + 1:number + 2] != [rack]:
                words += ["]", f"{self.uplinks[rack]}mbit"]
        return words

    def topology(self):
        """What flexring must be told: nothing if all nodes are equal and at one switch."""
        if not self.uplinks and len(set(self.rates)) == 1:
            return None
        return re.sub(r"(^|[+(])(\d+)(?![\d@])", r"\1\2@1G", self.name)

    def path(self, a, b):
        """The rates of the links between two nodes."""
        rates = [self.rates[a], self.rates[b]]
        if self.racks[a] != self.racks[b]:
            rates += [self.uplinks[rack] for rack in (self.racks[a], self.racks[b]) if rack is not None]
        return rates

    def bound(self, size, wire):
        """Seconds that the links need at least; `wire` has the bits per second that links of each rate carry.

        Each link separates the ranks into two sides, and each side must get the other's sums: all n bits cross it both ways. At
        a switch with k links, each element of the vector is summed beyond one of them. That side receives it from the k - 1 others and
        sends the sum back to them, so the links together carry 2 (k - 1) n each way.
        """
        n = 8 * size
        switches = [[wire[self.rates[number]] for number, rack in enumerate(self.racks) if rack is None] + [wire[rate] for rate in self.uplinks]]
        for rack, rate in enumerate(self.uplinks):
            switches.append([wire[self.rates[number]] for number, its in enumerate(self.racks) if its == rack] + [wire[rate]])
        return max(max(n / min(links), n * 2 * (len(links) - 1) / sum(links)) for links in switches)

    def measure_wire(self, wire, seconds):
        """Adds to `wire` what iperf3 moves over links of each rate that is not in it yet, in bits per second."""
        nodes = range(len(self.ranks))
        for rate in {*self.rates, *self.uplinks} - {int(known) for known in wire}:
            a, b = next((a, b) for a in nodes for b in nodes if a != b and min(self.path(a, b)) == rate)
            wire[rate] = lab.iperf3(a, b, seconds)


def measure(options):
    """Measures the cluster of this lab. `options` are those that `run` was called with."""
    begun = time.monotonic()
    end = begun + options["seconds"]
    cluster = Cluster(options["cluster"])
    wire = {int(rate): bits for rate, bits in options["wire"].items()}
    cluster.measure_wire(wire, options["iperf3_seconds"])
    nodes = [node for node, ranks in enumerate(cluster.ranks) for _ in range(ranks)]
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
    """Builds the lab of a cluster, measures there, and removes it in any case. Returns the setting and iperf3's rates."""
    words = Cluster(options["cluster"]).lab_words()
    command = [ROOT / "bench/lab.sh", *words, "--", sys.executable, __file__, json.dumps(options)]
    # In a process group of its own, so that a Ctrl-C comes here first and to the lab's processes only from here.
    group = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, start_new_session=True)
    try:
        # The script inside ends by itself in time: this is for one that hangs.
        printed, _ = group.communicate(timeout=options["seconds"] + 15)
    except subprocess.TimeoutExpired:
        raise lab.Failure(f"not done after {options['seconds'] + 15:.0f} s") from None
    finally:
        if group.poll() is None:
            os.killpg(group.pid, signal.SIGTERM)
            try:
                group.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(group.pid, signal.SIGKILL)
    if group.returncode or not printed.strip():
        raise lab.Failure(f"bench/lab.sh ended with status {group.returncode}")
    found = json.loads(printed.strip().splitlines()[-1])
    return found["setting"], found["wire"]


if __name__ == "__main__":
    exit_on_signals()
    found_setting, found_wire = measure(json.loads(sys.argv[1]))
    print(json.dumps({"setting": found_setting, "wire": found_wire}))
