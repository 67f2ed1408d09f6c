#!/usr/bin/env python3
"""The report of `make versus`: versus.md and pictures beside the versus.json of a folder.

    bench/versus/report.py FOLDER

Pictures need matplotlib.
"""

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import goals
from common import ROOT
from measures import between_rounds, duration, fastest_column, human, is_ours, measured, ratios, rounds_of, summary
from pictures import Pictures

# Settings of each part whose single calls are shown.
SPREADS = 4


def cell(setting, name, size, best):
    records = measured(setting, name, size)
    if not records:
        return "-"
    numbers = summary(records)
    text = f"{duration(numbers['median_us'])} ({numbers['p95_us'] / numbers['median_us']:.2f})"
    compared = ratios(records, measured(setting, best, size)) if best and not is_ours(name) else []
    if compared:
        text += f" **{statistics.median(compared):.2f}x**"
        if len(compared) > 1:
            text += f" [{min(compared):.2f}, {max(compared):.2f}]"
    return text


def bound_cell(setting, size, best):
    bound = setting["bound_us"].get(str(size))
    if not bound:
        return "-"
    part = f", {100 * bound / summary(measured(setting, best, size))['median_us']:.0f} %" if best else ""
    return duration(bound) + part


def heading(setting):
    """With the number of rounds: long lengths may have fewer."""
    rounds = rounds_of(setting)
    return f"### {setting['title']}: {rounds} round{'s' if rounds > 1 else ''}"


def table(setting, peers):
    """Rows by length, a column for each library."""
    names = [name for name in peers if name in setting["times"]]
    lines = [heading(setting), "", "| length | " + " | ".join(names) + " | bound |", "|---|" + "---|" * (len(names) + 1)]
    for size in setting["sizes"]:
        best = fastest_column(setting, size)
        cells = [human(size), *(cell(setting, name, size, best) for name in names), bound_cell(setting, size, best)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def markdown(about, pictures):
    results = about["results"]
    wire = ", ".join(f"{bits / 1e6:.0f} Mbit/s where {rate} are set" for rate, bits in results["wire"].items())
    parts = ["# flexring beside other libraries\n", goals.table(results)]
    parts.append(
        f"{about['cores']} cores of {about['cpu']}, Linux {about['kernel']}, {about['date']}, at {results['commit']}; {results['minutes']} minutes; the load "
        f"was {results['load_before']:.1f} before and {about['load_at_end']:.1f} at the end. All-reduces of sums in place, each after a barrier; the time "
        "of a call is that of its slowest rank. The libraries take turns, round by round. Cells have the median of the rounds' medians, in parentheses the "
        "95th percentile by the median, in bold how many times the better flexring column's time a peer takes (median of the ratios in each round), and in "
        "brackets the least and the largest of these ratios. The last column has the time that the hardware needs at least, and what percentage of the better flexring "
        "column's time that is.\n")
    parts.append(
        f"On one node the bound follows from the memory traffic that all cores together reach in copies ({results['memory_traffic'] / 1e9:.1f} GB/s read and written): "
        "each element of p ranks is read p times and written once in the reduction, and then copied p - 1 times. It is given from 16 MiB on, where caches do not keep "
        "the vectors. " + (f"On clusters it follows from what iperf3 moves over a link: {wire}. " if wire else "") + "\n")
    parts += [f"- skipped: {name}: {reason}" for name, reason in results["skipped"].items()]
    parts += [f"- failed: {failure}" for failure in results["failures"]]
    parts += [f"- left out, because the time was over: {what}" for what in results["left_out"]]
    parts.append("")
    parts += [f"![{words}]({name})\n" for name, words in pictures]
    if any(setting["times"] for setting in results["node"]):
        parts.append("## One node\n")
    parts += [table(setting, results["peers"]) for setting in results["node"] if setting["times"]]
    if results["clusters"]:
        parts.append("## Clusters of network namespaces\n")
        parts.append("`2+3` are two nodes with 2 and 3 ranks at one switch, with links of 1 Gbit/s; `1@500M` is a node whose link has 500 Mbit/s; nodes in "
                     "parentheses are at a switch of their own.\n")
    parts += [table(setting, results["peers"]) for setting in results["clusters"] if setting["times"]]
    parts += [differences(results), *ucx()]
    return "\n".join(parts)


def differences(results):
    """How far two rounds of one library lie apart, by transport and length."""
    settings = [*results["node"], *results["clusters"]]
    sizes = sorted({size for setting in settings for size in setting["sizes"]})
    lines = ["## Differences between rounds\n",
             "The ratio of the medians of two rounds of one library in one setting that 19 of 20 such pairs do not exceed. `versus.py --compare` expects that another run differs "
             "by at most this much, or by the library's own spread if that is wider.\n",
             "| | " + " | ".join(map(human, sizes)) + " |", "|---|" + "---|" * len(sizes)]
    for transport, where in (("shm", "shared memory"), ("tcp", "TCP on loopback"), ("lab", "clusters")):
        for ours, who in ((True, "flexring"), (False, "other libraries")):
            ratios_found = [between_rounds(settings, transport, size, ours) for size in sizes]
            if any(ratios_found):
                lines.append(f"| {where}, {who} | " + " | ".join(f"{ratio:.3g}" if ratio else "-" for ratio in ratios_found) + " |")
    return "\n".join(lines) + "\n" if len(lines) > 4 else ""


def ucx():
    """The newest table of Open MPI over UCX by `make bench-verbs`. Empty if there is none."""
    for path in sorted((ROOT / "bench/results").glob("*-verbs.json"), reverse=True):
        if found := json.loads(path.read_text()).get("ucx"):
            break
    else:
        return []
    lines = [f"## Open MPI over UCX, {path.name[:10]}\n",
             "Two virtual machines whose processors and RDMA devices (Soft-RoCE) are emulated, one rail, all-reduces of f32 in place: ratios "
             "only are meaningful (`make bench-verbs`).\n",
             "| length | flexring | Open MPI over UCX |", "|---|---|---|"]
    for size, times in found.items():
        ours, theirs = times["flexring us"], times["Open MPI us"]
        lines.append(f"| {human(size)} | {duration(ours)} | {duration(theirs)} **{theirs / ours:.2f}x** |")
    return ["\n".join(lines) + "\n"]


def draw(results, folder):
    """Draws the pictures into `folder`, and returns their names and descriptions. None without matplotlib."""
    try:
        pictures = Pictures(folder)
    except ImportError:
        return None
    plt = pictures.plt
    plt.rcParams.update({"font.size": 9, "axes.grid": True})
    colours, descriptions = results["peers"], []
    node = [setting for setting in results["node"] if setting["times"]]
    clusters = [setting for setting in results["clusters"] if setting["times"]]

    def grid(settings, draw_one, name, description):
        columns = min(2 if len(settings) <= 8 else 3, len(settings))
        rows = -(-len(settings) // columns)
        figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.4 * rows + 0.6), squeeze=False)
        for at in list(axes.flat)[len(settings):]:
            at.set_visible(False)
        for at, setting in zip(axes.flat, settings):
            draw_one(at, setting, colours)
            at.set_title(setting["title"], fontsize=10)
        save(figure, name, description, axes.flat)

    def save(figure, name, description, axes):
        # One legend for all, above them.
        entries = {label: handle for at in axes for handle, label in zip(*at.get_legend_handles_labels())}
        order = list(dict.fromkeys(label for label in [*colours, *entries] if label in entries))
        columns = 4 if figure.get_figwidth() > 8 else 3
        legend_inches = 0.1 + 0.2 * -(-len(order) // columns)
        figure.legend([entries[label] for label in order], order, loc="upper center", ncol=columns, frameon=False)
        pictures.save(figure, name, top=1 - legend_inches / figure.get_figheight())
        descriptions.append((name, description))

    if node:
        grid(node, curves, "times.svg", "Time of a call by length on one node")
    if clusters:
        # At most nine clusters beside each other.
        rows = [clusters[start:start + 9] for start in range(0, len(clusters), 9)]
        figure, axes = plt.subplots(len(rows), 1, figsize=(max(7, 2 + 1.2 * len(rows[0])), 3.8 * len(rows) + 0.6), squeeze=False)
        for at, row in zip(axes.flat, rows):
            bars(at, row, colours)
        save(figure, "clusters.svg", "Time of a call on clusters, by the bound of their links", axes.flat)
    largest = [setting for part in (node, clusters) for setting in [each for each in part if kept_calls(each)][:SPREADS]]
    if largest:
        grid(largest, spread, "spread.svg", "Spread of single calls")
    return descriptions


def curves(axes, setting, colours):
    """Medians by length, with the range of the rounds' medians."""
    for name, by_size in setting["times"].items():
        sizes = [size for size in setting["sizes"] if by_size.get(str(size))]
        numbers = [summary(by_size[str(size)]) for size in sizes]
        axes.plot(sizes, [number["median_us"] for number in numbers], marker="o", markersize=3, color=colours[name], label=name)
        axes.fill_between(sizes, [number["least_us"] for number in numbers], [number["most_us"] for number in numbers],
                          color=colours[name], alpha=0.2, linewidth=0)
    if bounds := setting["bound_us"]:
        axes.plot([int(size) for size in bounds], list(bounds.values()), color="black", linestyle=":", marker="_", markersize=9,
                  label="bound of the hardware")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(setting["sizes"], [human(size) for size in setting["sizes"]], fontsize=8, rotation=30)
    axes.minorticks_off()
    axes.set_xlabel("length of the vector")
    axes.set_ylabel("time of a call (us)")


def kept_calls(setting):
    """A length of which single calls were kept, and these by library: the first call, then the others. The length is that of the calls in a row, which
    then stand for flexring, or the longest with ten calls of a library, if there is one."""
    kept = {}
    for by_size in setting["times"].values():
        for size, rounds in by_size.items():
            calls = sum(len(record.get("times_us", ())) for record in rounds.values())
            kept[int(size)] = max(calls, kept.get(int(size), 0))
    row = setting.get("row_us")
    size = setting["row_bytes"] if row else max((size for size in kept if kept[size]), key=lambda size: (min(kept[size], 10), size), default=0)
    calls = {}
    for name in setting["times"]:
        rounds = measured(setting, name, size) or {}
        calls[name] = [(row[0], row[1:])] if row and is_ours(name) else [
            (record["first_us"], record["times_us"]) for record in rounds.values()]
    return {"size": size, **calls} if size else {}


def spread(axes, setting, colours):
    """A column for each library: single calls by the library's median, and each round's first call."""
    kept = kept_calls(setting)
    size, names = kept.pop("size"), [name for name in colours if kept.get(name)]
    for column, name in enumerate(names):
        calls = [time for _, times in kept[name] for time in times]
        middle = statistics.median(calls)
        shifts = [column + 0.5 * (index / max(1, len(calls) - 1) - 0.5) for index in range(len(calls))]
        axes.plot(shifts, [time / middle for time in calls], ".", markersize=4, color=colours[name], label=name)
        firsts = [first / middle for first, _ in kept[name]]
        axes.plot([column + 0.38] * len(firsts), firsts, "x", markersize=5, color="black", label="first call of a process")
    axes.axhspan(0.97, 1.03, color="black", alpha=0.1, linewidth=0, label="3 %")
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    low, high = min(low, 0.7), max(high, 1.5)
    axes.set_ylim(low, high)
    ticks = [tick for tick in (0.25, 0.5, 0.75, 1, 1.5, 2, 4, 8, 16, 32, 64) if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xticks([])
    axes.set_xlabel(f"calls of {human(size)}, in their order")
    axes.set_ylabel("time by the library's median")


def bars(axes, clusters, colours):
    """Times of the longest length that was measured with most libraries on all clusters, by the bound: 1 is what the links allow."""
    def libraries(size):
        return sum(bool(measured(setting, name, size)) for setting in clusters for name in setting["times"])

    size = max(clusters[0]["sizes"], key=lambda size: (libraries(size), size))
    names = [name for name in colours if any(measured(setting, name, size) for setting in clusters)]
    width = 0.8 / max(1, len(names))
    for offset, name in enumerate(names):
        for index, setting in enumerate(clusters):
            records = measured(setting, name, size)
            if not records:
                continue
            numbers, bound = summary(records), setting["bound_us"][str(size)]
            x, height = index + width * (offset - (len(names) - 1) / 2), numbers["median_us"] / bound
            axes.bar(x, height, width * 0.92, color=colours[name], label=name)
            axes.vlines(x, numbers["least_us"] / bound, numbers["most_us"] / bound, color="black", linewidth=0.8)
            axes.text(x, height, f" {height:.2f}", rotation=90, ha="center", va="bottom", fontsize=7)
    axes.axhline(1, color="black", linewidth=1, linestyle=":", label="bound of the links")
    axes.set_xticks(range(len(clusters)), [setting["title"].replace("+(", "\n+(").replace(")@500M+", ")@500M\n+") for setting in clusters])
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.18)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"time of {human(size)} by the bound")
    axes.set_xlabel("cluster: ranks of each node; 1 Gbit/s, or the rate given")


def main():
    folder = Path(sys.argv[1])
    about = json.loads((folder / "versus.json").read_text())
    pictures = draw(about["results"], folder)
    if pictures is None:
        print("no pictures: matplotlib is not installed (python3-matplotlib)")
    text = markdown(about, pictures or [])
    (folder / "versus.md").write_text(text)
    print(f"\n{text}\nwritten to {folder}")


if __name__ == "__main__":
    main()
