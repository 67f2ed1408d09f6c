"""The report of `make versus`: a Markdown table for each setting, and pictures."""

import statistics

from pictures import Pictures


def human(size):
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"


def duration(us):
    if us < 1e3:
        return f"{us:.3g} us"
    return f"{us / 1e3:.3g} ms" if us < 1e6 else f"{us / 1e6:.3g} s"


def quantile(times, part):
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def summary(rounds):
    """Statistics of one library at one length: medians of its rounds' medians and 95th percentiles."""
    medians = [statistics.median(times) for times in rounds]
    return {
        "median_us": statistics.median(medians),
        "least_us": min(medians),
        "most_us": max(medians),
        "p95_us": statistics.median(quantile(times, 0.95) for times in rounds),
        "calls": sum(len(times) for times in rounds),
    }


def ratios(ours, theirs):
    """Their time by ours, of the rounds that both have."""
    pairs = [(statistics.median(theirs[number]), statistics.median(ours[number])) for number in ours if number in theirs]
    return [their / our for their, our in pairs if our > 0]


def heading(setting):
    where = {"shm": "shared memory", "tcp": "TCP on loopback"}[setting["transport"]]
    return f"{setting['ranks']} ranks, {where}"


def table(setting, peers):
    """Rows by length; each cell has the median, 95th percentile by median, and the median ratio to the fastest flexring column."""
    names = [name for name in peers if name in setting["times"]]
    ours = [name for name in names if name.startswith("flexring")]
    lines = [f"## {heading(setting)}", "", "| length | " + " | ".join(names) + " | bound |", "|---|" + "---|" * (len(names) + 1)]
    for size in setting["sizes"]:
        measured = {name: setting["times"][name].get(size) for name in names}
        here = [name for name in ours if measured[name]]
        best = min(here, key=lambda name: summary(list(measured[name].values()))["median_us"], default=None)
        cells = []
        for name in names:
            if not measured[name]:
                cells.append("-")
                continue
            numbers = summary(list(measured[name].values()))
            cell = f"{duration(numbers['median_us'])} ({numbers['p95_us'] / numbers['median_us']:.2f})"
            if best and name not in ours and (compared := ratios(measured[best], measured[name])):
                cell += f" **{statistics.median(compared):.2f}x**"
                if len(compared) > 1:
                    cell += f" [{min(compared):.2f}, {max(compared):.2f}]"
            cells.append(cell)
        bound = setting["bound_us"].get(size)
        if bound and best:
            part = 100 * bound / summary(list(measured[best].values()))["median_us"]
            cells.append(f"{duration(bound)}, {part:.0f} %")
        else:
            cells.append("-")
        lines.append(f"| {human(size)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def clusters_table(rows):
    lines = ["## Clusters of network namespaces, links of 1 Gbit/s, 64 MiB", "",
             "| ranks of each node | bound | flexring | Gloo | Open MPI |", "|---|---|---|---|---|"]
    for row in rows:
        ours = row["flexring"] and row["flexring"]["median"]
        cells = [f"{row['bound_ms']:.0f} ms", f"{ours / 1e3:.0f} ms, {row['bound_ms'] * 1e5 / ours:.1f} %" if ours else "failed"]
        for name in ("gloo", "open_mpi"):
            theirs = row.get(name) and row[name]["each"]["median_us"]
            ratio = f" **{theirs / ours:.2f}x**" if theirs and ours else ""
            cells.append(f"{theirs / 1e3:.0f} ms{ratio}" if theirs else "-")
        lines.append(f"| {row['cluster']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def markdown(results, pictures):
    parts = ["# flexring beside other libraries\n"]
    parts.append(
        f"{results['cores']} cores of {results['cpu']}, {results['date']}, at {results['commit']}; the load was {results['load_before']:.1f} before and "
        f"{results['load_after']:.1f} at the end. All-reduces of f32 sums in place, each after a barrier; the time of a call is that of its slowest rank. The "
        "libraries take turns, round by round. Cells have the median of the rounds' medians, in parentheses the 95th percentile by the median, in bold "
        "how many times the better flexring column's time a peer takes (median of the ratios in each round), and in brackets the least and the largest of "
        "these ratios. The bound of the largest vectors follows from the memory traffic that all cores together reach in copies "
        f"({results['memory_traffic'] / 1e9:.1f} GB/s read and written): each element of p ranks is read p times and written once in the reduction, and "
        "then copied p - 1 times.\n")
    parts += [f"Skipped: {name}: {reason}.\n" for name, reason in results["skipped"].items()]
    parts += [f"Failed: {failure}\n" for failure in results["failures"]]
    parts += [f"![{name}]({name})\n" for name in pictures]
    peers = results["peers"]
    parts += [table(setting, peers) for setting in results["settings"] if setting["times"]]
    if results["clusters"]:
        parts.append(clusters_table(results["clusters"]))
    return "\n".join(parts)


def draw(results, colours, folder):
    """Draws the pictures into `folder`, and returns their names. None without matplotlib."""
    try:
        pictures = Pictures(folder)
    except ImportError:
        return None
    plt, save = pictures.plt, pictures.save
    settings = [setting for setting in results["settings"] if setting["times"]]
    if settings:
        columns = min(2, len(settings))
        rows = -(-len(settings) // columns)
        for name, draw_one in (("versus-times.svg", curves), ("versus-spread.svg", spread)):
            figure, axes = plt.subplots(rows, columns, figsize=(5.5 * columns, 3.8 * rows), squeeze=False)
            for at, setting in zip(axes.flat, settings):
                draw_one(at, setting, colours)
                at.set_title(heading(setting), fontsize=9)
            for at in list(axes.flat)[len(settings):]:
                at.set_visible(False)
            axes.flat[0].legend(fontsize=7, frameon=False)
            save(figure, name)
    if results["clusters"]:
        figure, axes = plt.subplots(figsize=(1.2 + 1.1 * len(results["clusters"]), 3.6))
        bars(axes, results["clusters"], colours)
        save(figure, "versus-clusters.svg")
    return pictures.names


def curves(axes, setting, colours):
    for name, by_size in setting["times"].items():
        sizes = [size for size in setting["sizes"] if by_size.get(size)]
        numbers = [summary(list(by_size[size].values())) for size in sizes]
        axes.plot(sizes, [number["median_us"] for number in numbers], marker="o", markersize=3, color=colours[name], label=name)
        axes.fill_between(sizes, [number["least_us"] for number in numbers], [number["most_us"] for number in numbers],
                          color=colours[name], alpha=0.2, linewidth=0)
    if setting["bound_us"]:
        sizes = sorted(setting["bound_us"])
        axes.plot(sizes, [setting["bound_us"][size] for size in sizes], color="black", linestyle=":", label="bound by memory traffic")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = setting["sizes"][:: max(1, len(setting["sizes"]) // 6)]
    axes.set_xticks(ticks, [human(size) for size in ticks], fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    axes.set_ylabel("microseconds", fontsize=8)
    axes.grid(alpha=0.3)


def spread(axes, setting, colours):
    """Every call of the largest length, in the order in which they ran."""
    size = setting["sizes"][-1]
    for name, by_size in setting["times"].items():
        times = [time / 1e3 for number in sorted(by_size.get(size, {})) for time in by_size[size][number]]
        axes.plot(times, ".", markersize=3, color=colours[name], label=name)
    axes.set_yscale("log")
    axes.set_xlabel(f"calls of {human(size)}", fontsize=8)
    axes.set_ylabel("milliseconds", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)


def bars(axes, clusters, colours):
    names = {"flexring": "flexring, ordinary memory", "gloo": "Gloo", "open_mpi": "Open MPI"}
    for offset, (key, name) in enumerate(names.items()):
        values = []
        for row in clusters:
            found = row.get(key)
            us = (found["median"] if key == "flexring" else found["each"]["median_us"]) if found else 0
            values.append(us / 1e3)
        axes.bar([index + 0.27 * offset for index in range(len(clusters))], values, 0.25, color=colours[name], label=key)
    for index, row in enumerate(clusters):
        axes.hlines(row["bound_ms"], index - 0.15, index + 0.7, color="black", linewidth=1, label="bound" if index == 0 else None)
    axes.set_xticks([index + 0.27 for index in range(len(clusters))], [row["cluster"] for row in clusters], fontsize=8)
    axes.set_ylabel("milliseconds for 64 MiB", fontsize=8)
    axes.legend(fontsize=7, frameon=False)
