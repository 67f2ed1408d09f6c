"""The goals of this comparison, and how far a versus.json reaches them."""

import json
import statistics
from collections import namedtuple

from clusters import CLUSTERS
from common import ROOT
from measures import duration, fastest_column, human, is_ours, measured, median_us, ratios, spread_of, summary

POOL, ORDINARY, OPEN_MPI = "flexring, pool memory", "flexring, ordinary memory", "Open MPI"
KIB, MIB = 1 << 10, 1 << 20
TRAINING = ROOT / "bench/results/training/training.json"

# What was measured at one setting and length: `value` is what the goal bounds, `text` says where and which times.
Case = namedtuple("Case", "value text")


def settings(results, transport, ranks, dtype="f32"):
    """Settings of one node."""
    return [each for each in results["node"] if (each["transport"], each["dtype"]) == (transport, dtype) and each["ranks"] in ranks]


def peers(setting):
    return [name for name in setting["times"] if not is_ours(name)]


def beside(setting, ours, theirs, size, value=None):
    """How many times `ours` the other library takes, if both were measured."""
    both = measured(setting, ours, size), measured(setting, theirs, size)
    if not all(both):
        return []
    value = value or statistics.median(ratios(both[1], both[0]) or [summary(both[1])["median_us"] / summary(both[0])["median_us"]])
    times = [duration(summary(records)["median_us"]) for records in both]
    return [Case(value, f"{setting['title']}, {human(size)}: {times[0]}, {theirs} {times[1]}")]


def beside_peers(found, sizes, names=None):
    """The better flexring column beside each peer."""
    cases = []
    for setting in found:
        for size in filter(sizes, setting["sizes"]):
            best = fastest_column(setting, size)
            cases += [case for name in peers(setting) if not names or name in names for case in beside(setting, best, name, size)]
    return cases


def within_spread(setting, size):
    """The same on a cluster, where a peer that is faster by less than the spread counts as equally fast."""
    best, cases = fastest_column(setting, size), []
    for name in peers(setting) if best else []:
        for case in beside(setting, best, name, size):
            slack = max(spread_of(measured(setting, column, size)) for column in (best, name))
            cases.append(Case(max(case.value, 1.0) if case.value * slack >= 1 else case.value, case.text))
    return cases


def of_bound(found, size, column=None):
    """The bound by the time."""
    cases = []
    for setting in found:
        name = column or fastest_column(setting, size)
        ours, bound = median_us(setting, name, size), setting["bound_us"].get(str(size))
        if ours and bound:
            cases.append(Case(bound / ours, f"{setting['title']}, {human(size)}: {duration(ours)}, bound {duration(bound)}"))
    return cases


def tails(found, sizes):
    """The 95th percentile by the median."""
    cases = []
    for setting in found:
        for size in filter(sizes, setting["sizes"]):
            if best := fastest_column(setting, size):
                numbers = summary(measured(setting, best, size))
                text = f"{setting['title']}, {human(size)}: median {duration(numbers['median_us'])}, 95th percentile {duration(numbers['p95_us'])}"
                cases.append(Case(numbers["p95_us"] / numbers["median_us"], text))
    return cases


def spreads(clusters):
    """The slowest of many calls in a row by their median."""
    cases = []
    for setting in clusters:
        if times := setting.get("row_us"):
            middle = statistics.median(times)
            text = f"{setting['title']}, {len(times)} calls of {human(setting['row_bytes'])}: median {duration(middle)}, slowest {duration(max(times))}"
            cases.append(Case(max(times) / middle, text))
    return cases


def training():
    """From the newest `make bench-training`: the date, time that is lost to communication by Gloo's, and each peer's step by ours."""
    if not TRAINING.exists():
        return "", [], []
    about, lost, steps = json.loads(TRAINING.read_text()), [], []
    for record in about["results"]["records"]:
        seconds = record["seconds"]
        if record["cluster"] != "2+3" or not {"alone", "flexring", "gloo"} <= seconds.keys():
            continue
        middle = {name: statistics.median(times) for name, times in seconds.items()}
        ours, theirs = (statistics.median(step - other for step, other in zip(seconds[name], seconds["alone"])) for name in ("flexring", "gloo"))
        lost.append(Case(ours / theirs, f"{record['work']}: {duration(1e6 * ours)} of a step, Gloo {duration(1e6 * theirs)}"))
        steps += [Case(middle[name] / middle["flexring"], f"{record['work']}: {duration(1e6 * middle['flexring'])}, {title} {duration(1e6 * middle[name])}")
                  for name, title in (("gloo", "Gloo"), ("mpi", "Open MPI")) if name in middle]
    return f" ([{about['date']}](../training/training.md))", lost, steps


def row(goal, cases, least=None, most=None, shown="{:.2f}", expected=0):
    """A line of the table: the case that is farthest from the goal, and in how many of them the goal is missed. Less than `expected` are incomplete."""
    if not cases:
        return f"| {goal} | not measured | |"
    misses = [case for case in cases if (least is not None and case.value < least) or (most is not None and case.value > most)]
    worst = min(cases, key=lambda case: case.value) if least is not None else max(cases, key=lambda case: case.value)
    reached = f"**no**, in {len(misses)} of {len(cases)} cases" if misses else f"yes, in {len(cases)} cases" if len(cases) > 1 else "yes"
    if len(cases) < expected:
        reached += f"; {expected - len(cases)} not measured"
    return f"| {goal} | **{shown.format(worst.value)}**; {worst.text} | {reached} |"


def table(results):
    """The goals, as Markdown."""
    shm, clusters = settings(results, "shm", (2, 4)), results["clusters"]
    large = 128 * MIB
    date, lost, steps = training()

    def short(size):
        return size <= 64 * KIB

    rows = [
        row("2 and 4 ranks of one node, pool memory, 128 MiB: 5 times as fast as Open MPI",
            [case for each in shm for case in beside(each, POOL, OPEN_MPI, large)], least=5, shown="{:.2f}x"),
        *(row(f"the same, {human(size)}: at least 85 % of the bound by memory traffic", of_bound(shm, size, POOL), least=0.85, shown="{:.0%}")
          for size in (large, 16 * MIB)),
        row("the same with ordinary memory, 128 MiB: 3.5 times as fast as Open MPI",
            [case for each in shm for case in beside(each, ORDINARY, OPEN_MPI, large)], least=3.5, shown="{:.2f}x"),
        row("ordinary memory, 16 MiB: at most 1.3 times the time of pool memory",
            [case for each in shm for case in beside(each, POOL, ORDINARY, 16 * MIB)], most=1.3, shown="{:.2f}x"),
        row("2 ranks of one node, up to 64 KiB: not slower than any library", beside_peers(settings(results, "shm", (2,)), short), least=1, shown="{:.2f}x"),
        row("4, 8 and 16 ranks of one node, up to 64 KiB: faster than every library",
            beside_peers(settings(results, "shm", (4, 8, 16)), short), least=1, shown="{:.2f}x"),
        row("the same: the 95th percentile is at most twice the median", tails(settings(results, "shm", (4, 8, 16)), short), most=2),
        row("2 and 4 ranks over TCP on loopback, all lengths: faster than Gloo, Open MPI and MPICH",
            beside_peers(settings(results, "tcp", (2, 4)), lambda _: True, ("Gloo", "Open MPI", "MPICH")), least=1, shown="{:.2f}x"),
        row(f"clusters ({len(clusters)} of {len(CLUSTERS)} here), 64 KiB to 256 MiB: not slower than any library, within the spread",
            [case for each in clusters for size in each["sizes"] for case in within_spread(each, size)], least=1, shown="{:.2f}x",
            expected=sum(len(each["sizes"]) for each in clusters) * sum(not is_ours(name) for name in results["peers"])),
        row(f"clusters ({len(clusters)} of {len(CLUSTERS)} here), 64 MiB: within 3 % of the bound of the links", of_bound(clusters, 64 * MIB), least=0.97, shown="{:.1%}",
            expected=len(clusters)),
        row("links with a set rate, 50 calls with the first: the slowest takes at most 1.03 times the median", spreads(clusters), most=1.03, shown="{:.3f}",
            expected=len(clusters)),
        row(f"training on 2+3: at most 0.65 of the time that Gloo loses to communication{date}", lost, most=0.65),
        row(f"training on 2+3: more steps per second than Gloo and Open MPI{date}", steps, least=1, shown="{:.2f}x"),
    ]
    return "\n".join(["| goal | measured, in the worst case | reached |", "|---|---|---|", *rows]) + "\n"
