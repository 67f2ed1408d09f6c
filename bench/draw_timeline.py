#!/usr/bin/env python3
"""Draws one call of a merged timeline (docs/tracing.md) as SVG: a row for each rank and kind of span.

Usage: draw_timeline.py TRACE.json OUTPUT.svg [--call NUMBER] [--name all_reduce]
Needs matplotlib.
"""

import argparse
import json
import sys
from pathlib import Path

from matplotlib.patches import Patch
from pictures import GREY, Pictures

KINDS = ["wait", "reduce", "copy", "send", "receive", "register"]
# Those of simulated timelines (crates/flexring-simulator/src/drawing/timeline.rs), and others of the same palette.
COLOURS = {"wait": "#E4E7EB", "reduce": "#1FA87C", "copy": "#CC79A7", "send": "#5B8FD0", "receive": "#E69F00",
           "register": "#A0A0A0"}
# Rows of a rank, from above, and the height of one.
ROWS = [("calls", ["wait", "register"]), ("copy, reduce", ["copy", "reduce"]), ("send", ["send"]),
        ("receive", ["receive"])]


def call_to_draw(events, name, number):
    """The spans of the call on all ranks: the one of this number, or the last one."""
    calls = [event for event in events if event["ph"] == "X" and event["name"] == name]
    if not calls:
        sys.exit(f"the trace has no {name}")
    number = number or max(event["args"]["call"] for event in calls)
    drawn = [event for event in calls if event["args"]["call"] == number]
    if not drawn:
        sys.exit(f"the trace has no {name} with the number {number}")
    begin = min(event["ts"] for event in drawn)
    end = max(event["ts"] + event["dur"] for event in drawn)
    spans = [event for event in events if event["ph"] == "X" and event["name"] in KINDS
             and event["args"].get("call") == number and begin <= event["ts"] <= end]
    return drawn[0], spans, begin, end


def draw(trace, output, name, number):
    with open(trace) as file:
        content = json.load(file)
    ranks = content["otherData"]["ranks"]
    call, spans, begin, end = call_to_draw(content["traceEvents"], name, number)
    height = len(ROWS) + 0.6
    pictures = Pictures(Path(output).parent)
    inches = 1.1 + 0.27 * height * len(ranks)
    figure, axes = pictures.plt.subplots(figsize=(11, inches))
    labels = []
    for pid, rank in enumerate(ranks):
        top = pid * height
        for row, (label, kinds) in enumerate(ROWS):
            y = top + row
            labels.append((y + 0.45, f"rank {rank['rank']}  {label}" if row == 0 else label))
            for kind in kinds:
                mine = [span for span in spans if span["pid"] == pid and span["name"] == kind]
                bars = [(span["ts"] - begin, max(span["dur"], (end - begin) / 2000)) for span in mine]
                # Messages in flight at once overlap, so that darker parts show more of them.
                alpha = 0.45 if kind in ("send", "receive") else 1.0
                axes.broken_barh(bars, (y, 0.9), facecolors=COLOURS[kind], alpha=alpha, linewidth=0)
    axes.set_ylim(len(ranks) * height - 0.3, -0.3)
    axes.set_xlim(0, end - begin)
    axes.set_yticks([y for y, _ in labels], [label for _, label in labels], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("microseconds since the first rank began the call")
    size = call["args"]["bytes"]
    axes.spines["left"].set_visible(False)
    figure.text(16 / 792, 1 - 24 / 72 / inches, f"{name} of {size / 2**20:g} MiB, {len(ranks)} ranks", fontsize=13, fontweight="bold")
    used = [kind for kind in KINDS if any(span["name"] == kind for span in spans)]
    figure.legend(handles=[Patch(color=COLOURS[kind], label=kind) for kind in used], loc="upper right", ncol=len(used),
                  fontsize=8, frameon=False, labelcolor=GREY, borderaxespad=1.2)
    pictures.save(figure, Path(output).name, top=1 - 30 / 72 / inches)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", help="a file of flexring perf --trace or flexring trace")
    parser.add_argument("output", help="the picture: SVG, PNG or PDF by its extension")
    parser.add_argument("--name", default="all_reduce", help="the collective")
    parser.add_argument("--call", type=int, help="number of the call; default: the last one")
    arguments = parser.parse_args()
    draw(arguments.trace, arguments.output, arguments.name, arguments.call)


if __name__ == "__main__":
    main()
