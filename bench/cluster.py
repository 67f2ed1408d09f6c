"""Clusters of network namespaces: their links, and the bound that the links set.

A cluster is written as flexring's short form: 2+3 are two nodes with 2 and 3 ranks, whose links have 1 Gbit/s; 1+1@500M has a slow node;
(2+1)@1G+3 has a switch with two nodes below the first switch.
"""

import itertools
import json
import re
import sys

import lab
from common import ROOT


def megabits(rate):
    """Mbit/s of a rate such as 1G or 500M; None is 1 Gbit/s."""
    return {"G": 1000, "M": 1}[rate[-1]] * int(rate[:-1]) if rate else 1000


NODE = r"\d+(@\d+[GM])?"
PART = rf"({NODE}|\({NODE}(\+{NODE})*\)(@\d+[GM])?)"


class Cluster:
    def __init__(self, name):
        if not re.fullmatch(rf"{PART}(\+{PART})*", name):
            raise ValueError(f"{name}: expected a cluster such as 2+3 or 1+1@500M")
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

    def run(self, script, options, limit):
        """Builds the lab of this cluster, runs a script there with `options` as JSON, and removes the lab in any case. Returns what the
        script printed last, which is JSON. Kills it after `limit` seconds: the script is to end by itself before."""
        command = [ROOT / "bench/lab.sh", *self.lab_words(), "--", sys.executable, script, json.dumps(options)]
        printed = lab.supervised(command, limit)
        if not printed.strip():
            raise lab.Failure("bench/lab.sh printed nothing")
        return json.loads(printed.strip().splitlines()[-1])

    def nodes(self):
        """The node of each rank."""
        return [node for node, ranks in enumerate(self.ranks) for _ in range(ranks)]

    def topology(self):
        """FLEXRING_TOPOLOGY, which flexring does not need if all nodes are equal and at one switch."""
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

        Each link separates the ranks into two sides, and each side must get the other's sums: all n bits cross it both ways. A region
        is one switch or several connected ones. Where k links lead out of it, each element of the vector is summed beyond one of them. That
        side receives it from the k - 1 others and sends the sum back to them, so the links together carry 2 (k - 1) n each way.
        """
        n = 8 * size
        racks = range(len(self.uplinks))

        def links(region):
            """The rates of the links that lead out of a set of racks and, if None is in it, the first switch."""
            nodes = [rate for rate, rack in zip(self.rates, self.racks) if rack in region]
            uplinks = [rate for rack, rate in enumerate(self.uplinks) if (rack in region) != (None in region)]
            return [wire[rate] for rate in nodes + uplinks]

        below_first = [{None, *chosen} for number in range(len(racks) + 1) for chosen in itertools.combinations(racks, number)]
        regions = [links(region) for region in [*below_first, *({rack} for rack in racks)]]
        return max(max(n / min(out), n * 2 * (len(out) - 1) / sum(out)) for out in regions)

    def measure_wire(self, wire, seconds):
        """Adds to `wire` what iperf3 moves over links of each rate that is not in it yet, in bits per second."""
        nodes = range(len(self.ranks))
        for rate in {*self.rates, *self.uplinks} - {int(known) for known in wire}:
            a, b = next((a, b) for a in nodes for b in nodes if a != b and min(self.path(a, b)) == rate)
            wire[rate] = lab.iperf3(a, b, seconds)
