"""Statistics of a versus.json: what the report, the goals and the comparison of two runs take from it."""

import itertools
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


# Pairs of rounds from which on their differences are a spread: their largest, if there are fewer than 20.
FEWEST_PAIRS = 10


def between_rounds(settings, transport, size, ours):
    """The ratio of two rounds of one library in one setting that 19 of 20 such pairs do not exceed, for flexring's columns or for the other libraries, by
    transport and length. None if there are too few pairs. A library has few rounds in a setting, so their range alone is too narrow: by chance alone, a further
    round lies outside of the range of two in two of three cases. Pairs of n rounds count 1/n each, because n rounds are n - 1 independent differences."""
    pairs = []
    for setting in settings:
        if setting["transport"] != transport:
            continue
        for name in setting["times"]:
            if is_ours(name) == ours and (records := measured(setting, name, size)):
                medians = [record["median_us"] for record in records.values()]
                pairs += [(max(a, b) / min(a, b), 1 / len(medians)) for a, b in itertools.combinations(medians, 2)]
    if len(pairs) < FEWEST_PAIRS:
        return None
    pairs.sort()
    counted = itertools.accumulate(weight for _, weight in pairs)
    most = 0.95 * sum(weight for _, weight in pairs)
    return next(ratio for (ratio, _), so_far in zip(pairs, counted) if so_far >= most - 1e-9)


def rounds_of(setting):
    """The rounds of a setting, at the length that has most."""
    return max((len(records) for sizes in setting["times"].values() for records in sizes.values()), default=0)
