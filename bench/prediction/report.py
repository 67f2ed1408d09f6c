#!/usr/bin/env python3
"""The report of `make bench-prediction`: prediction.md and prediction.svg beside the prediction.json of a folder.

    bench/prediction/report.py FOLDER

The picture needs matplotlib.
"""

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from accuracy import LONG, cases_of, choices_of, error, link_spread, percentile, repeats
from pictures import Pictures

GOALS = {"median": 5, "p90": 12, "auto": 95}
CLOSE = 0.05
COLOURS = ["#1b7bb8", "#d95f02", "#66a61e", "#7570b3", "#e6ab02", "#e7298a", "#555555", "#1b9e77"]


def human(size):
    size = int(size)
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def duration(seconds):
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def errors_line(name, cases, **which):
    errors = [100 * abs(error(case, **which)) for case in cases]
    if not errors:
        return f"| {name} | 0 | | | | |"
    signed = statistics.median(100 * error(case, **which) for case in cases)
    return f"| {name} | {len(errors)} | {statistics.median(errors):.1f} % | {percentile(errors, 0.9):.1f} % | {max(errors):.0f} % | {signed:+.1f} % |"


def summary(found):
    cases = [case for its in found for case in cases_of(its)]
    choices = [choice for its in found for choice in choices_of(its)]
    long = [case for case in cases if case["bytes"] >= LONG]
    lines = ["| prediction | cases | median error | 90th percentile | largest | median with its sign |", "|---|---|---|---|---|---|",
             errors_line("simulator, from 1 MiB on", long), errors_line("simulator, shorter vectors", [case for case in cases if case["bytes"] < LONG]),
             errors_line("simulator, from 1 MiB on, beside the shortest call", long, by="least"),
             errors_line("busiest link alone, from 1 MiB on", long, which="link")]
    lines += [errors_line(f"simulator, {its['cluster']}, from 1 MiB on", [case for case in long if case["cluster"] == its["cluster"]]) for its in found]
    lines += ["", f"Goals: a median of at most {GOALS['median']} % and a 90th percentile of at most {GOALS['p90']} % from 1 MiB on.", ""]
    for name, of in (("from 1 MiB on", [choice for choice in choices if choice["bytes"] >= LONG]), ("on all lengths", choices)):
        if of:
            shares = [100 * sum(choice[which] <= (1 + CLOSE) * choice["least"] for choice in of) / len(of) for which in ("auto", "untuned")]
            lines.append(f"`auto` with the profile is within 5 % of the fastest schedule in {shares[0]:.0f} % of {len(of)} cases {name} (goal: {GOALS['auto']} %), "
                         f"without one in {shares[1]:.0f} %.")
    spreads = [spread for its in found if (spread := link_spread(its))]
    differ = [100 * part for its in found for part in repeats(its)]
    if spreads:
        lines.append(f"Measured rates of equal links differ by at most {100 * (max(spreads) - 1):.1f} % within a cluster, {100 * (statistics.median(spreads) - 1):.1f} % in the "
                     "median cluster (`tune` counts 10 % as equal).")
    if differ:
        lines.append(f"Medians of two series of calls of one schedule differ by {statistics.median(differ):.1f} % in the median case, 90th percentile "
                     f"{percentile(differ, 0.9):.1f} % (`tune` takes 3 % in two measurements for a gain).")
    return "\n".join(lines) + "\n"


def choice_table(choices):
    lines = ["| cluster | length | `auto`, profile | `auto`, no profile | gain by the profile | fastest | its time | `auto` by it |", "|" + "---|" * 8]
    for choice in choices:
        far = choice["auto"] / choice["least"]
        lines.append(f"| {choice['cluster']} | {human(choice['bytes'])} | {duration(choice['auto'])} | {duration(choice['untuned'])} | "
                     f"{choice['untuned'] / choice['auto']:.2f} | {choice['fastest']} | {duration(choice['least'])} | "
                     f"{f'**{far:.2f}**' if far > 1 + CLOSE else f'{far:.2f}'} |")
    return "\n".join(lines) + "\n"


def case_table(cases):
    lines = ["| cluster | schedule | length | predicted | measured | error | busiest link alone |", "|" + "---|" * 7]
    for case in sorted(cases, key=lambda case: (case["cluster"], case["schedule"], case["bytes"])):
        part = 100 * error(case)
        shown = f"**{part:+.1f} %**" if abs(part) > GOALS["p90"] else f"{part:+.1f} %"
        lines.append(f"| {case['cluster']} | {case['schedule']} | {human(case['bytes'])} | {duration(case['predicted'])} | {duration(case['measured'])} | {shown} | "
                     f"{duration(case['link'])} |")
    return "\n".join(lines) + "\n"


def markdown(about, picture):
    results = about["results"]
    found = results["clusters"]
    parts = ["# Predicted and measured times\n"]
    parts.append(
        f"{about['cores']} cores of {about['cpu']}, Linux {about['kernel']}, {about['date']}, at {results['commit']}; {results['minutes']} minutes; the load was "
        f"{results['load_before']:.1f} before and {about['load_at_end']:.1f} at the end. Clusters are network namespaces: `1+1@500M` are two nodes with one rank each, whose links "
        "have 1 Gbit/s and 500 Mbit/s; nodes in parentheses are at a switch of their own. In each cluster `flexring tune` measured a profile, with vectors of 128 KiB, "
        "2 MiB and 32 MiB; then `flexring perf` measured all-reduces of other lengths, as medians of calls in and out of place. Predictions are those of "
        "`flexring simulate --tuning` with this profile; the error is positive if they are too long.\n")
    parts += [f"- failed: {failure}" for failure in results["failures"]]
    parts += [f"- left out, because the time was over: {what}" for what in results["left_out"]]
    parts += ["", summary(found)]
    if picture:
        parts.append(f"![Predicted by measured times, and errors by length]({picture})\n")
    parts += ["## `auto`\n", choice_table([choice for its in found for choice in choices_of(its)])]
    parts += ["## All cases\n", case_table([case for its in found for case in cases_of(its)])]
    return "\n".join(parts)


def draw(found, folder):
    """Draws predicted by measured times, and errors by length. Returns the name of the file; None without matplotlib or cases."""
    cases = [case for its in found for case in cases_of(its)]
    try:
        pictures = Pictures(folder)
    except ImportError:
        print("no picture: matplotlib is not installed (python3-matplotlib)")
        return None
    if not cases:
        return None
    figure, (left, right) = pictures.plt.subplots(1, 2, figsize=(11, 4.8))
    ends = [min(case["measured"] for case in cases) / 1.5, max(case["measured"] for case in cases) * 1.5]
    left.plot(ends, ends, color="black", linewidth=0.8)
    left.fill_between(ends, [end * 0.88 for end in ends], [end * 1.12 for end in ends], color="black", alpha=0.1, linewidth=0, label="12 %")
    sizes = sorted({case["bytes"] for case in cases})
    for number, its in enumerate(found):
        own = list(cases_of(its))
        colour = COLOURS[number % len(COLOURS)]
        left.plot([case["measured"] for case in own], [case["predicted"] for case in own], ".", color=colour, markersize=5, label=its["cluster"])
        shift = 0.6 * (number / max(1, len(found) - 1) - 0.5)
        right.plot([sizes.index(case["bytes"]) + shift for case in own], [100 * error(case) for case in own], ".", color=colour, markersize=5)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlabel("measured time (s)")
    left.set_ylabel("predicted time (s)")
    right.axhspan(-GOALS["p90"], GOALS["p90"], color="black", alpha=0.1, linewidth=0)
    right.axhline(0, color="black", linewidth=0.8)
    right.set_ylim(-60, 60)
    right.set_xticks(range(len(sizes)), [human(size) for size in sizes])
    right.set_xlabel("length of the vector")
    right.set_ylabel("error of the prediction (%)")
    pictures.style(left, "each schedule and length")
    pictures.style(right, "errors by length; positive if predicted too long")
    figure.legend(*left.get_legend_handles_labels(), loc="upper center", ncol=5, frameon=False, fontsize=8)
    pictures.save(figure, "prediction.svg", top=0.88)
    return "prediction.svg"


def main():
    folder = Path(sys.argv[1])
    about = json.loads((folder / "prediction.json").read_text())
    text = markdown(about, draw(about["results"]["clusters"], folder))
    (folder / "prediction.md").write_text(text)
    print(f"\n{text}\nwritten to {folder}")


if __name__ == "__main__":
    main()
