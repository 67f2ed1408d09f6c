#!/usr/bin/env python3
"""The report of `make bench-training`: training.md and training.svg beside the training.json of a folder.

    bench/training/report.py FOLDER

The picture needs matplotlib.
"""

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from cluster import Cluster
from pictures import Pictures

TITLES = {"flexring": "flexring", "flexring hook": "flexring as a hook of Gloo's group", "gloo": "Gloo", "mpi": "Open MPI as a hook",
          "alone": "no communication"}
COLOURS = {"flexring": "#1b7bb8", "flexring hook": "#7fb8de", "gloo": "#7570b3", "mpi": "#d95f02"}
COMPUTATION = "#bbbbbb"


def duration(seconds):
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def lost(record, name):
    """Seconds of a step that each round lost to communication, or None."""
    alone = record["seconds"].get("alone")
    return [step - other for step, other in zip(record["seconds"][name], alone)] if alone and name != "alone" else None


def range_of(numbers, shown):
    return f"{shown(statistics.median(numbers))} [{shown(min(numbers))}, {shown(max(numbers))}]"


def links_need(record):
    """Seconds in which the links can carry what an all-reduce of the gradients must, at their full rate. None on one node."""
    cluster = Cluster(record["cluster"])
    if len(cluster.ranks) == 1 or "parameters" not in record:
        return None
    return cluster.bound(4 * record["parameters"], {rate: 1e6 * rate for rate in {*cluster.rates, *cluster.uplinks}})


def row(record, name):
    seconds = record["seconds"][name]
    cells = [TITLES[name], f"{1 / statistics.median(seconds):.3g}", range_of(seconds, duration)]
    ratios = [theirs / ours for theirs, ours in zip(record["seconds"]["gloo"], seconds)]
    cells.append(f"{range_of(ratios, '{:.2f}'.format)}" if name not in ("gloo", "alone") else "")
    ours, theirs = lost(record, name), lost(record, "gloo")
    cells.append(range_of(ours, duration_signed) if ours else "")
    compared = ours and name != "gloo" and statistics.median(theirs) > 0
    cells.append(f"**{statistics.median(ours) / statistics.median(theirs):.2f}**" if compared else "")
    cells.append(duration(statistics.median(record["processor"][name])))
    apart = record["differences"].get(name)
    cells.append(f"{apart:.1e}" if apart is not None else "")
    return cells


def duration_signed(seconds):
    return f"-{duration(-seconds)}" if seconds < 0 else duration(seconds)


def place(record):
    return f"{record['cluster']} ranks" if record["cluster"].isdigit() else record["cluster"]


def heading(records):
    first = records[0]
    if "parameters" not in first:
        return f"## {first['work']}\n"
    text = (f"## {first['work']}: {first['parameters'] / 1e6:.1f} million parameters, {4 * first['parameters'] / 1e6:.0f} MB of gradients, "
            f"{first['batch']} on each rank in a step\n")
    curve = first["losses"]["gloo"]
    text += f"\nThe loss over Gloo goes from {curve[0]:.3f} to {curve[-1]:.3f} in {len(curve)} steps with {first['ranks']} ranks."
    if first["tolerance"] is not None:
        text += f" Other curves may differ by {first['tolerance']:.0e} of it."
    return text + "\n"


def table(records):
    """The rows of one work."""
    lines = ["| cluster | library | steps/s | a step | Gloo's step by this | lost to communication | by what Gloo loses | processors | loss differs by |",
             "|" + "---|" * 9]
    for record in records:
        needed = links_need(record)
        title = place(record) + (f" (links need {duration(needed)})" if needed else "")
        for name in record["seconds"]:
            lines.append("| " + " | ".join([title, *row(record, name)]) + " |")
            title = ""
    return "\n".join(lines) + "\n"


def grouped(records):
    """The records of each work."""
    works = {}
    for record in records:
        works.setdefault(record["work"], []).append(record)
    return works.values()


def markdown(about, picture):
    results = about["results"]
    parts = ["# Training over flexring and other libraries\n"]
    parts.append(
        f"{about['cores']} cores of {about['cpu']}, Linux {about['kernel']}, torch {results['torch']}, {about['date']}, at {results['commit']}; {results['minutes']} "
        f"minutes; the load was {results['load_before']:.1f} before and {about['load_at_end']:.1f} at the end. One thread computes on each rank. Rounds "
        "of a few steps over each library alternate in the same processes; a step takes as long as on the slowest rank. Cells have the median of the rounds, and "
        "in brackets the least and the largest. What is lost to communication is the time of a step without that of a step under `no_sync` in the "
        "same round; the ratio to Gloo's is one of medians. The processors' time is that of all ranks. DistributedDataParallel has buckets of 4 MiB. All "
        "libraries start from the same weights and train with the same data; the last column is the largest difference from Gloo's loss in any step. `2+3` are two "
        "nodes with 2 and 3 ranks, whose links have 1 Gbit/s; the time that links need is that of the least traffic of any all-reduce, at their full rate.\n")
    parts += [f"- skipped: {name}: {reason}" for name, reason in results["skipped"].items()]
    parts += [f"- failed: {failure}" for failure in results["failures"]]
    parts += [f"- left out, because the time was over: {what}" for what in results["left_out"]]
    parts.append("")
    if picture:
        parts.append(f"![Time of a step, computation and communication]({picture})\n")
    for records in grouped(results["records"]):
        parts += [heading(records), table(records)]
    return "\n".join(parts)


def draw(results, folder):
    """Draws the steps of training. Returns the name of the file; None without matplotlib or without steps."""
    works = [records for records in grouped(results["records"]) if "parameters" in records[0]]
    try:
        pictures = Pictures(folder)
    except ImportError:
        print("no picture: matplotlib is not installed (python3-matplotlib)")
        return None
    if not works:
        return None
    figure, axes = pictures.plt.subplots(1, len(works), figsize=(max(8, 5.4 * len(works)), 3.8), squeeze=False)
    for at, records in zip(axes.flat, works):
        bars(at, records)
        pictures.style(at, f"{records[0]['work']}, {records[0]['parameters'] / 1e6:.1f} million parameters")
        at.grid(axis="x", visible=False)
    entries = {label: handle for at in axes.flat for handle, label in zip(*at.get_legend_handles_labels())}
    figure.legend(entries.values(), entries.keys(), loc="upper center", ncol=5, frameon=False, fontsize=8)
    pictures.save(figure, "training.svg", top=0.92)
    return "training.svg"


def bars(axes, records):
    """A bar for each library: what a step takes without communication, and above it what it loses."""
    names = [name for name in COLOURS if any(name in record["seconds"] for record in records)]
    width = 0.8 / len(names)
    for index, record in enumerate(records):
        for offset, name in enumerate(names):
            seconds = record["seconds"].get(name)
            if not seconds:
                continue
            x = index + width * (offset - (len(names) - 1) / 2)
            top = statistics.median(seconds)
            below = min(top, statistics.median(record["seconds"].get("alone", [0])))
            axes.bar(x, below, width * 0.92, color=COMPUTATION, label="computation")
            axes.bar(x, top - below, width * 0.92, bottom=below, color=COLOURS[name], label=TITLES[name])
            axes.vlines(x, min(seconds), max(seconds), color="black", linewidth=0.8)
            axes.text(x, max(seconds), duration(top), ha="center", va="bottom", fontsize=6)
    axes.set_xticks(range(len(records)), [place(record) for record in records])
    axes.set_ylim(bottom=0)
    axes.margins(y=0.1)
    axes.set_ylabel("time of a step (s)", fontsize=8)


def main():
    folder = Path(sys.argv[1])
    about = json.loads((folder / "training.json").read_text())
    text = markdown(about, draw(about["results"], folder))
    (folder / "training.md").write_text(text)
    print(f"\n{text}\nwritten to {folder}")


if __name__ == "__main__":
    main()
