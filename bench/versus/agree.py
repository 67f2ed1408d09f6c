"""Whether two runs of `make versus` agree: the ratio of their medians beside the spread that they state."""

import json
from collections import Counter
from pathlib import Path

from measures import duration, human, measured, spread_of, summary


# Calls from which on a run states a spread.
FEWEST_CALLS = 3


def agree(old, new):
    """Prints a line for each setting, library and length that both runs have, and how many differ by more than their spread: the wider one of both. Those that
    have fewer than three calls in a run are counted apart: their spread is not known."""
    runs = [json.loads(Path(path).read_text()) for path in (old, new)]
    for path, about in zip((old, new), runs):
        results = about["results"]
        print(f"{path}: {about['date']}, {results['commit']}, {about['cores']} cores of {about['cpu']}, load {results['load_before']:.1f} before")
    before, after = ({each["title"]: each for part in ("node", "clusters") for each in about["results"][part]} for about in runs)
    found = {True: Counter(), False: Counter()}
    print(f"\n{'setting':34}{'library':28}{'length':>9}{'old':>10}{'new':>10}{'new/old':>9}{'spread':>8}")
    for title in filter(after.__contains__, before):
        for name in before[title]["times"]:
            for size in before[title]["sizes"]:
                both = [measured(part[title], name, size) for part in (before, after)]
                if not all(both):
                    continue
                times = [summary(records)["median_us"] for records in both]
                ours, ratio = name.startswith("flexring"), times[1] / times[0]
                line = f"{title:34}{name:28}{human(size):>9}{duration(times[0]):>10}{duration(times[1]):>10}{ratio:9.3f}"
                if min(sum(record["calls"] for record in records.values()) for records in both) < FEWEST_CALLS:
                    found[ours]["unknown"] += 1
                    print(f"{line}{'-':>8}")
                    continue
                spread = max(map(spread_of, both))
                is_outside = max(ratio, 1 / ratio) > spread
                found[ours]["outside" if is_outside else "inside"] += 1
                print(f"{line}{spread:8.3f}" + (" outside" if is_outside else ""))
    for ours, counts in found.items():
        if counts:
            known = counts["outside"] + counts["inside"]
            print(f"\n{'flexring' if ours else 'other libraries'}: {counts['outside']} of {known} outside of the spread; {counts['unknown']} with too few calls", end="")
    print()
