"""Whether two runs of `make versus` agree: the ratio of their medians beside the spread that they state."""

import json
from collections import Counter
from pathlib import Path

from measures import between_rounds, duration, human, is_ours, measured, spread_of, summary


# Calls from which on the times of a library alone state a spread.
FEWEST_CALLS = 3


def spread_in(run, setting, name, size):
    """The spread that a run states for a library at a length: how far its times lie apart, or two rounds at this length do, whichever is wider. None if there are too
    few calls and rounds."""
    records = measured(setting, name, size)
    stated = [between_rounds(run, setting["transport"], size, is_ours(name))]
    if sum(record["calls"] for record in records.values()) >= FEWEST_CALLS:
        stated.append(spread_of(records))
    return max(filter(None, stated), default=None)


def agree(old, new):
    """Prints a line for each setting, library and length that both runs have, and how many differ by more than their spread: the wider one of both. Those of which
    neither run states a spread are counted apart."""
    files = [json.loads(Path(path).read_text()) for path in (old, new)]
    for path, about in zip((old, new), files):
        results = about["results"]
        print(f"{path}: {about['date']}, {results['commit']}, {about['cores']} cores of {about['cpu']}, load {results['load_before']:.1f} before")
    runs = [[*about["results"]["node"], *about["results"]["clusters"]] for about in files]
    before, after = ({each["title"]: each for each in run} for run in runs)
    found = {True: Counter(), False: Counter()}
    print(f"\n{'setting':34}{'library':28}{'length':>9}{'old':>10}{'new':>10}{'new/old':>9}{'spread':>8}")
    for title in filter(after.__contains__, before):
        for name in before[title]["times"]:
            for size in before[title]["sizes"]:
                both = [measured(part[title], name, size) for part in (before, after)]
                if not all(both):
                    continue
                times = [summary(records)["median_us"] for records in both]
                ratio = times[1] / times[0]
                line = f"{title:34}{name:28}{human(size):>9}{duration(times[0]):>10}{duration(times[1]):>10}{ratio:9.3f}"
                spread = max(filter(None, (spread_in(run, part[title], name, size) for run, part in zip(runs, (before, after)))), default=None)
                if spread is None:
                    found[is_ours(name)]["unknown"] += 1
                    print(f"{line}{'-':>8}")
                    continue
                is_outside = max(ratio, 1 / ratio) > spread
                found[is_ours(name)]["outside" if is_outside else "inside"] += 1
                print(f"{line}{spread:8.3f}" + (" outside" if is_outside else ""))
    for ours, counts in found.items():
        if counts:
            known = counts["outside"] + counts["inside"]
            print(f"\n{'flexring' if ours else 'other libraries'}: {counts['outside']} of {known} outside of the spread; {counts['unknown']} without one", end="")
    print()
