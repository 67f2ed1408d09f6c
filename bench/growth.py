#!/usr/bin/env python3
"""Measures how flexring's costs grow on this machine: calls by length and ranks, creation of communicators and memory by ranks.

    bench/growth.py [--ranks 2,4,8,16,32,64] [--out FOLDER]

Writes growth.json, growth.md and growth.svg into FOLDER. The pictures have what `flexring simulate` computes beside the measured calls, for more ranks, too.
Its processors move what all of this machine's move together in copies. Takes at most 3 minutes; what the time did not suffice for is missing. Needs a
release build and a C compiler; the picture needs matplotlib.
"""

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE / "versus")]

import lab
from common import FLEXRING, ROOT, commit, exit_on_signals, need_flexring, python_with, run, words, write
from measures import duration, human
from peers import LIBRARY, Flexring, Place
from pictures import Pictures
from versus import memory_traffic

SIZES = [8, 512, 4 << 10, 64 << 10, 1 << 20, 16 << 20]
# The model moves vectors by the plan of long ones, while those of up to 64 KiB may go through mailboxes on one node.
MODEL_SIZES, MODEL_RANKS = [1 << 20, 16 << 20], [2, 4, 8, 16, 32, 64, 128]
# Seconds in all, of a process, and of the loop for each length, with the most calls.
LIMIT, PROCESS, LOOP, CALLS = 170, 30, 0.2, 1000
ROUNDS = 3


def model(ranks, traffic):
    """Microseconds by length that the simulator computes."""
    rate = int(traffic / max(ranks, os.cpu_count()))
    sizes = ",".join(map(str, MODEL_SIZES))
    printed = run([FLEXRING, "simulate", "--topology", ranks, "--size", sizes, "--memory-bandwidth", rate, "--in-place", "--no-path", "--csv"], timeout=PROCESS)
    return {row["bytes"]: 1e6 * float(row["seconds"]) for row in csv.DictReader(printed.splitlines())}


def measure(ranks, loop, growth):
    """The costs with a number of ranks, as medians of a few rounds."""
    place, started, called = Place(ranks, "shm"), [], {}
    for _ in range(ROUNDS):
        started.append(json.loads(lab.together(growth.commands(place, "", []), PROCESS).splitlines()[-1]))
        for line in lab.together(loop.commands(place, "f32", [LOOP, CALLS, *SIZES]), PROCESS).splitlines():
            result = json.loads(line)
            called.setdefault(str(result["bytes"]), []).append(statistics.median(result["times_us"]))
    costs = {name: statistics.median(each[name] for each in started) for name in started[0]}
    return {"ranks": ranks, **costs, "calls_us": {size: statistics.median(times) for size, times in called.items()}}


def markdown(about):
    results = about["results"]
    lines = ["# Growth with ranks and bytes on one node\n",
             f"{about['cores']} cores of {about['cpu']}, {about['date']}, at {results['commit']}; the load was {results['load_before']:.1f} before. "
             "Medians of three rounds; calls in pool memory, each after a barrier. The model is `flexring simulate`, whose processors move "
             f"{results['memory_traffic'] / 1e9:.1f} GB/s in all. A rank's memory is its share (PSS) after calls of 8 B, and after calls of 1 MiB with "
             "their vector.\n",
             "![Growth of calls, creation and memory](growth.svg)\n",
             "| ranks | " + " | ".join(map(human, SIZES)) + " | model: " + " | ".join(map(human, MODEL_SIZES)) + " | join | split | memory |",
             "|---|" + "---|" * (len(SIZES) + len(MODEL_SIZES) + 3)]
    measured = {each["ranks"]: each for each in results["ranks"]}
    for ranks in sorted({*measured, *map(int, results["model"])}):
        each, simulated = measured.get(ranks), results["model"].get(str(ranks), {})
        cells = [duration(each["calls_us"][str(size)]) if each else "-" for size in SIZES]
        cells += [duration(simulated[str(size)]) if simulated else "-" for size in MODEL_SIZES]
        cells += [duration(each["init_us"]), duration(each["split_us"]),
                  " / ".join(f"{each[key] / (1 << 20):.1f}" for key in ("small_bytes", "large_bytes")) + " MiB"] if each else ["-"] * 3
        lines.append(f"| {ranks} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(about, folder):
    """Draws growth.svg: points are measured, lines are the model's where there is one."""
    pictures, results = Pictures(folder), about["results"]
    figure, panels = pictures.plt.subplots(2, 2, figsize=(10.4, 8))
    measured, colours = results["ranks"], pictures.plt.get_cmap("viridis")
    by_size, by_ranks, creation, memory = panels.flat
    for index, each in enumerate(measured):
        colour = colours(index / max(1, len(measured)))
        by_size.plot(SIZES, list(each["calls_us"].values()), "o-", markersize=4, linewidth=0.6, color=colour, label=f"{each['ranks']} ranks")
        if simulated := results["model"].get(str(each["ranks"])):
            by_size.plot(MODEL_SIZES, list(simulated.values()), "--", linewidth=1.6, color=colour)
    for index, size in enumerate(SIZES):
        colour = colours(index / len(SIZES))
        by_ranks.plot([each["ranks"] for each in measured], [each["calls_us"][str(size)] for each in measured], "o-", markersize=4, linewidth=0.6,
                      color=colour, label=human(size))
        if size in MODEL_SIZES:
            by_ranks.plot(list(map(int, results["model"])), [simulated[str(size)] for simulated in results["model"].values()], "--", linewidth=1.6,
                          color=colour)
    ranks = [each["ranks"] for each in measured]
    for name, label in (("init_us", "join the world"), ("split_us", "split a further communicator")):
        creation.plot(ranks, [each[name] / 1e3 for each in measured], "o-", markersize=4, label=label)
    for name, label in (("small_bytes", "after calls of 8 B"), ("large_bytes", "after calls of 1 MiB, with the vector")):
        memory.plot(ranks, [each[name] / (1 << 20) for each in measured], "o-", markersize=4, label=label)
    for axes, title, unit in ((by_size, "calls by length; dashed: simulated", "time of a call (us)"),
                              (by_ranks, "calls by ranks; dashed: simulated", "time of a call (us)"),
                              (creation, "creation of communicators", "time (ms)"), (memory, "memory of a rank (PSS)", "MiB")):
        pictures.style(axes, title)
        axes.set_xscale("log", base=2)
        if axes is not memory:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_ylabel(unit, fontsize=8)
        axes.legend(fontsize=7)
        if axes is not by_size:
            axes.set_xlabel("ranks", fontsize=8)
            shown = sorted({*ranks, *(map(int, results["model"]) if axes is by_ranks else ())})
            axes.set_xticks(shown, shown)
    by_size.set_xticks(SIZES, map(human, SIZES))
    by_size.set_xlabel("length of the vector", fontsize=8)
    pictures.save(figure, "growth.svg")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8,16,32,64", help="numbers of ranks, separated by commas")
    parser.add_argument("--out", default=str(ROOT / "bench/out/growth"), help="folder of the report [default: bench/out/growth]")
    parser.add_argument("--draw", action="store_true", help="only draw the picture of the report in --out again")
    options = parser.parse_args()
    out = Path(options.out)
    if options.draw:
        draw(json.loads((out / "growth.json").read_text()), out)
        return
    exit_on_signals()
    need_flexring()
    if not shutil.which("cc") or not LIBRARY.exists():
        sys.exit("needs a C compiler and a release build: run cargo build --release")
    begun = time.monotonic()
    results = {"commit": commit(), "load_before": os.getloadavg()[0], "ranks": [], "model": {}}
    with tempfile.TemporaryDirectory() as folder:
        results["memory_traffic"] = memory_traffic(folder)
        loop, growth = Flexring("calls", "", memory="pool"), Flexring("growth", "")
        loop.build(folder)
        growth.program = Path(folder) / "growth"
        run(["cc", "-O2", f"-I{ROOT}/include", HERE / "peers/growth.c", LIBRARY, "-lpthread", "-ldl", "-lm", "-o", growth.program])
        for ranks in map(int, words(options.ranks)):
            if time.monotonic() - begun > LIMIT - 2 * PROCESS:
                break
            results["ranks"].append(measure(ranks, loop, growth))
            print(f"{ranks} ranks: {results['ranks'][-1]}", flush=True)
        for ranks in MODEL_RANKS:
            if time.monotonic() - begun > LIMIT - PROCESS:
                break
            results["model"][str(ranks)] = model(ranks, results["memory_traffic"])
    write(out / "growth.json", "growth", results)
    (out / "growth.md").write_text(markdown(json.loads((out / "growth.json").read_text())))
    if drawing := python_with("matplotlib"):
        subprocess.run([drawing, __file__, "--draw", "--out", out], check=True)
    else:
        print("no picture: matplotlib is not installed (python3-matplotlib)")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
