"""How far predictions are from measurements, and `auto` from the fastest schedule, from the clusters of a prediction.json."""

import statistics
import tomllib

from cases import AUTO, UNTUNED
from cluster import Cluster

# The goals hold for vectors of at least this length.
LONG = 1 << 20


def percentile(numbers, part):
    """The smallest of the numbers that at least this part of them does not exceed."""
    ordered = sorted(numbers)
    return ordered[max(0, -(-int(part * 100) * len(ordered) // 100) - 1)]


def measured(rounds):
    """Seconds of a schedule on a length: the median of the rounds' medians, out of place and in place."""
    return statistics.median([time for its in rounds for time in its["median"]])


def cases_of(its):
    """The cases of a cluster: schedule, bytes, predicted seconds, those of the busiest link, measured seconds, those of the shortest call."""
    for schedule, predicted in its["predicted"].items():
        for size, (seconds, link) in predicted.items():
            rounds = its["times"][schedule][size]
            yield {"cluster": its["cluster"], "schedule": schedule, "bytes": int(size), "predicted": seconds, "link": link,
                   "measured": measured(rounds), "least": min(time for its in rounds for time in its["min"])}


def error(case, which="predicted", by="measured"):
    """By which part of the measured time the prediction is too long."""
    return case[which] / case[by] - 1


def choices_of(its):
    """By length: `auto` with the profile and without one, and the fastest schedule, in seconds."""
    sizes = sorted({int(size) for sizes in its["times"].values() for size in sizes})
    for size in sizes:
        times = {schedule: measured(found[str(size)]) for schedule, found in its["times"].items() if found.get(str(size))}
        if AUTO in times and UNTUNED in times and len(times) > 2:
            fastest = min(times, key=times.get)
            yield {"cluster": its["cluster"], "bytes": size, "auto": times[AUTO], "untuned": times[UNTUNED], "fastest": fastest,
                   "least": times[fastest]}


def link_spread(its):
    """Largest by least measured rate of the links of nodes that were set to one rate; None if no two were."""
    cluster, profile = Cluster(its["cluster"]), tomllib.loads(its["profile"])
    rates = {}
    for rate, node in zip(cluster.rates, profile["node"]):
        if "up_bytes_per_s" in node:
            rates.setdefault(rate, []).append((node["up_bytes_per_s"] + node["down_bytes_per_s"]) / 2)
    spreads = [max(group) / min(group) for group in rates.values() if len(group) > 1]
    return max(spreads, default=None)


def repeats(its):
    """How far two measurements of one case differ, as parts: the first and the second half of each pair."""
    for found in its["times"].values():
        for size, rounds in found.items():
            if int(size) >= LONG:
                yield from (abs(one / other - 1) for one, other in (its["median"] for its in rounds))
