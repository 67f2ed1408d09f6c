"""Statistics of a versus.json: what the report, the goals and the comparison of two runs take from it."""

import itertools
import math
import statistics


def human(size):
    size = int(size)
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"


def duration(us):
    for unit, factor in (("us", 1), ("ms", 1e3)):
        if us < 999.5 * factor:
            return f"{us / factor:.3g} {unit}"
    return f"{us / 1e6:.3g} s"


def summary(rounds):
    """Statistics of one library at one length from the records of its rounds: medians of the rounds' medians and 95th percentiles."""
    records = list(rounds.values())
    return {
        "median_us": statistics.median(record["median_us"] for record in records),
        "least_us": min(record["median_us"] for record in records),
        "most_us": max(record["median_us"] for record in records),
        "p95_us": statistics.median(record["p95_us"] for record in records),
    }


def ratios(theirs, ours):
    """Their median by ours, for the rounds that both have."""
    return [theirs[number]["median_us"] / ours[number]["median_us"] for number in ours if number in theirs]


def measured(setting, name, size):
    """The records of a library at a length by round, or None."""
    return setting["times"].get(name, {}).get(str(size))


def is_ours(name):
    return name.startswith("flexring")


def fastest_column(setting, size):
    """The flexring column with the least median at a length, or None."""
    ours = [name for name in setting["times"] if is_ours(name) and measured(setting, name, size)]
    return min(ours, key=lambda name: summary(measured(setting, name, size))["median_us"], default=None)


def median_us(setting, name, size):
    """The median of a library at a length, or None."""
    records = measured(setting, name, size)
    return summary(records)["median_us"] if records else None


def spread_of(records):
    """How far a library's times at a length lie apart: the range of the rounds' medians, or the 95th percentile by the median if that is wider."""
    numbers = summary(records)
    return max(numbers["most_us"] / numbers["least_us"], numbers["p95_us"] / numbers["median_us"])


def between_rounds(settings, transport, size, ours):
    """The ratio that 19 of 20 pairs of rounds do not exceed, each pair from one library in one setting: of flexring's columns or of the other libraries, for a
    transport and length. None without a pair. A library has few rounds in a setting, so their range alone is too narrow: by chance alone, a further round
    lies outside of the range of two in two of three cases."""
    found = []
    for setting in settings:
        if setting["transport"] != transport:
            continue
        for name in setting["times"]:
            if is_ours(name) == ours and (records := measured(setting, name, size)):
                medians = [record["median_us"] for record in records.values()]
                found += [max(a, b) / min(a, b) for a, b in itertools.combinations(medians, 2)]
    return sorted(found)[math.ceil(0.95 * len(found)) - 1] if found else None
