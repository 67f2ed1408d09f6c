"""Ueno and Yokota: the best hierarchy of rings by the number of processes."""

NAME, PICTURE = "ueno_yokota", "ueno-yokota.svg"


GAINS = """The model is 25 % below the measured gain at 128 processes and 19 % below at 256, and within 8 % from 512 on. Below 512 the flat ring is at fault: Eq. 2 gives it both
adapters of a node, but NCCL did not detect them (sections V-B 2 a and 3 a), and reached 11.5 GB/s (Table II) instead of 18.6. With 23.1 ms for the flat ring, as
Table II has it, and the model's 16.0 ms for 4x8x4 the gain is 1.44. The simulation of the paper's steps gives the model's gains, although racks and adapters are shared by
rings instead of being divided among them beforehand.

flexring's pipeline hides latency: a link carries other parts while a message is on its way. The flat ring gains most: 14.3 ms instead of 16.8 at 128 processes, 15.2 instead of 24.2 at
512. So up to 512 processes it takes hardly longer than its bytes (14.3 ms), and the hierarchies take 1.8 to 2.6 ms longer than it; their first layer within the nodes takes 1.8 ms by the model. From 1,024
processes on latency cannot be hidden, because the 2 (p - 1) steps of one part alone have latencies of 19.6 and 39.3 ms, and the hierarchies are faster.
"""

BEST = """The paper's best hierarchies are at most 3.0 % slower than the model's best ones by node. The differences between hierarchies are smaller than what the model leaves out: with the same
bandwidth for all layers of one kind, deeper hierarchies are always faster by some latencies, while NCCL's bandwidth falls with the length of a message (4,648 MB/s in the
second layer of 4x8x4, 3,767 in the third: Table II, Fig. 5). 64x2 is best at 128 because rings across nodes have both adapters in the
model (8x16 reached 11.3 GB/s, Table II). In the model, layers that cross racks cost little if they do not begin at the border of a rack.
"""

RULES = """By node, the model obeys the paper's rules in all four steps, and like the paper's it extends a third best hierarchy to get to 1,024 processes. It makes the layer across racks longer first,
because it begins within a rack.
"""

TABLES = """The model's hierarchies that begin with 4 are 3 to 15 % faster than the paper's: it has no falling bandwidth for short messages. Those that begin with 8 are 29 to 31 % faster, because
the paper's first layer had one adapter. The simulation of the paper's steps is within 0.1 % of the model for the flat ring and the hierarchies that begin with 4, and up to 2 % faster for those that begin
with 8, where a rank begins a layer as soon as it has the data, and the model adds up the layers. 2x2x2x2x2x2x2 is 18 % faster, because two GPUs have the bandwidth of a ring of four in the simulation. In flexring's
pipeline layers overlap, so hierarchies of few long layers are faster than in the model (4x32: 5 %), and those of many short layers that begin with 4 slower (4x2x2x2x2x2: 22 %), for a reason that is not examined.
"""


RESNET_50 = 25_557_032 * 4

PLACES = """Up to 512 processes the first model ranks the paper's best hierarchies badly, because in it deeper hierarchies only save latency, and rings that cross a rack's border within a layer cost nothing. With what the
paper measured of both they are third, and within 0.6 % of the best. Beyond 512 processes the mean of Table III, which is of 256, makes 8 processes across racks cost too much; there the first model, with a third of the nodes' bandwidth between racks,
ranks the paper's choices second.
"""

ITERATIONS = """In the training all-reduces take 5 to 21 % longer than the bandwidths of Tables II and III give; the paper does not say why. The model and the pipeline are faster, most of all for the ring, because NCCL
used one adapter of two.
"""


def label(dimensions):
    return "x".join(map(str, dimensions))


def gain(size, dimensions, kind):
    """Time of the flat ring by that of the hierarchy; None if they were not simulated."""
    row = next(row for row in size["hierarchies"] if row["dimensions"] == dimensions)
    return row[kind] and size["ring"]["model" if kind.startswith("model") else kind] / row[kind]


def place(ranked, number):
    """The place of an entry of `ranked`, from 1; entries of equal time have the same."""
    return 1 + sum(each["model"] < ranked[number]["model"] * (1 - 1e-9) for each in ranked)


def extends(small, large):
    """Which of the paper's rules leads from one hierarchy to the other: 1, 2 or None."""
    if large[:-1] == small:
        return 1
    same = len(small) == len(large) and large[:-1] == small[:-1]
    return 2 if same and large[-1] > small[-1] else None


def rule(smaller, larger):
    """How one of the best `larger` hierarchies extends a `smaller` one of the best possible place."""
    found = []
    for index, large in enumerate(larger):
        for number, small in enumerate(smaller):
            which = extends(small["dimensions"], large["dimensions"])
            if which and place(larger, index) == 1:
                found.append((place(smaller, number), which, label(small["dimensions"]), label(large["dimensions"])))
    if not found:
        return "neither"
    at, which, small, large = min(found)
    return f"rule {which}{', from number ' + str(at) if at > 1 else ''}: {small} to {large}"


def milliseconds(seconds):
    return f"{seconds * 1e3:.1f}" if seconds else "-"


def with_gain(ring, each):
    return f"{label(each['dimensions'])}, {ring / each['model']:.2f}"


def measured(bandwidths, n):
    """Milliseconds of the layers with these bus bandwidths in MB/s: the time of n bytes by the definition of bus bandwidth. Layers
    behind the last bandwidth have the last one."""
    times = {}
    for name, layers in bandwidths.items():
        if name == "source":
            continue
        held, time = n, 0.0
        counts = list(map(int, name.split("x")))
        for processes, bandwidth in zip(counts, [*layers, *[layers[-1]] * (len(counts) - len(layers))]):
            time += 2 * held * (processes - 1) / processes / (bandwidth * 1e6)
            held /= processes
        times[name] = time * 1e3
    return times


def is_extended(stated, name):
    """Whether Table II lacks the last layers of the hierarchy."""
    return len(stated["bandwidths"].get(name, name)) < len(name.split("x"))


def place_of(ranked, dimensions):
    """The place of a hierarchy, from 1, and how many there are."""
    return f"{1 + next(at for at, each in enumerate(ranked) if each['dimensions'] == dimensions)} of {len(ranked)}"


def ranking(found, stated):
    """The places of the paper's best hierarchies by the model, without and with a cost of each layer."""
    layer = found["layer"] * 1e3
    lines = [
        "### The place of the paper's best hierarchy\n",
        f"Among the hierarchies by node. The second model has two terms that the paper measured: {layer:.2f} ms for each layer between nodes, by which Table II's 13 layers behind the first one, of hierarchies that begin with 4, "
        "take longer than in the first model on average (NCCL's bandwidth falls with the length of a message, Fig. 5, and each layer is a call of it); and "
        f"{found['across_racks'] / 1e6:,.0f} MB/s for layers whose rings cross racks, the mean of Table III.\n",
        "| processes | paper's best | place by the model | with both terms | best with them | the paper's is slower by |",
        "|---|---|---|---|---|---|",
    ]
    for size, best in zip(found["sizes"], stated["best"]):
        ranked, first = size["ranked_as_measured"], size["ranked_as_measured"][0]
        own = next(each for each in ranked if each["dimensions"] == best["dimensions"])
        lines.append(f"| {size['processes']:,} | {label(best['dimensions'])} | {place_of(size['ranked_by_node'], best['dimensions'])} | {place_of(ranked, best['dimensions'])} "
                     f"| {label(first['dimensions'])} | {own['model'] / first['model'] - 1:.1%} |")
    return [*lines, "", PLACES]


def iterations(found, stated):
    """Table IV beside what the hierarchies' times give for as many bytes as ResNet-50's gradients have."""
    profiles = stated["resnet_50"]
    part = RESNET_50 / found["bytes"]
    lines = [
        "### An iteration of ResNet-50 (Table IV)\n",
        f"Milliseconds of the all-reduce, with the ring and with the paper's best hierarchy, and the efficiency: the part of an iteration that is neither all-reduce nor packing. The times of 128 MiB above are scaled to the {RESNET_50 / 1e6:.1f} "
        "MB of its gradients as 32-bit floats; the rest of an iteration is the paper's.\n",
        "| processes | | paper: all-reduce | efficiency | Tables II and III: all-reduce | efficiency | model | efficiency | flexring's pipeline | efficiency |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    tables = {128: measured(stated["bandwidths"], found["bytes"]), 256: measured(stated["bandwidths_256"], found["bytes"])}
    for size, best in zip(found["sizes"], stated["best"]):
        profile = profiles.get(str(size["processes"]))
        if not profile:
            continue
        row = next(row for row in size["hierarchies"] if row["dimensions"] == best["dimensions"])
        of_tables = tables.get(size["processes"], {})
        names = (str(size["processes"]), label(best["dimensions"]))
        for at, (kind, times, name) in enumerate((("ring", size["ring"], names[0]), (names[1], row, names[1]))):
            all_reduce, total = profile["all_reduce"][at], profile["total"][at]
            cells = []
            for time in (of_tables.get(name), times["model"] and times["model"] * 1e3, times["pipeline"] and times["pipeline"] * 1e3):
                scaled = time and time * part
                cells.append(f"{scaled:.1f} | {1 - (scaled + profiles['packing']) / (total - all_reduce + scaled):.3f}" if scaled else "- | -")
            lines.append(f"| {size['processes']} | {kind} | {all_reduce} | {profile['efficiency'][at]:.3f} | {' | '.join(cells)} |")
    return [*lines, "", ITERATIONS]


def markdown(found, stated):
    sizes = found["sizes"]
    lines = [
        "## Hierarchical rings on ABCI (Ueno and Yokota)\n",
        f"128 MiB; alpha = {found['alpha'] * 1e6:.2f} us, s = {found['s']:g}, two adapters of {found['adapter'] / 1e6:.2f} MB/s for the 4 GPUs of a node, NVLink 12 times "
        "an adapter (4 times between two GPUs), racks of 34 nodes of which 32 are used, a third of the nodes' bandwidth between racks. The paper's model has no "
        "racks; here a layer whose rings cross racks has the bandwidth of the narrower of its links.\n",
        "### Gain of the paper's best hierarchy over the flat ring\n",
        "Simulation: the paper's steps (section IV-C), in which a rank sends one message, with a latency of s alpha, and the next step of a link begins when that has "
        "arrived. flexring's pipeline: the same hierarchies as flexring runs them, in sub-chunks of 512 KiB, up to 32 of them in flight on a link.\n",
        "| processes | paper's best | paper (measured) | model | model without racks | simulation | flexring's pipeline | ResNet-50 (Table IV) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size, best in zip(sizes, stated["best"]):
        ring, hierarchical = stated["resnet_50"].get(str(size["processes"]), {}).get("all_reduce", (0, 0))
        profile = f"{ring / hierarchical:.2f}" if ring else "-"
        kinds = ("model", "model_without_racks", "simulation", "pipeline")
        model, flat, *simulations = (gain(size, best["dimensions"], kind) for kind in kinds)
        simulated = " | ".join(f"{each:.2f} ({each / best['gain'] - 1:+.0%})" if each else "-" for each in simulations)
        lines.append(f"| {size['processes']:,} | {label(best['dimensions'])} | {best['gain']:.2f} | {model:.2f} ({model / best['gain'] - 1:+.0%}) "
                     f"| {flat:.2f} | {simulated} | {profile} |")
    lines += [
        "",
        GAINS,
        "### The best hierarchy\n",
        f"With its gain. The model is applied to all factorizations, and to those of at most {found['few_layers']} layers that begin with the 4 GPUs of a node, as all of the paper's "
        "best ones do.\n",
        "| processes | paper, measured | model, all | model, by node | paper's best, by the model | it is slower than the best by node by |",
        "|---|---|---|---|---|---|",
    ]
    for size, best in zip(sizes, stated["best"]):
        ring, first = size["ring"]["model"], size["ranked_by_node"][0]
        of_paper = gain(size, best["dimensions"], "model")
        lines.append(f"| {size['processes']:,} | {label(best['dimensions'])}, {best['gain']:.2f} | {with_gain(ring, size['ranked'][0])} | {with_gain(ring, first)} "
                     f"| {of_paper:.2f} | {ring / of_paper / first['model'] - 1:.1%} |")
    lines += [
        "",
        BEST,
        "### Rules for extending a topology\n",
        "The paper: the best hierarchy for more processes is likely to extend one for fewer, by another layer (rule 1) or by more processes in the last one (rule 2).\n",
        "| step | paper | model, by node | model, all |",
        "|---|---|---|---|",
    ]
    for small, large, step in zip(sizes, sizes[1:], stated["step"]):
        lines.append(f"| {small['processes']:,} to {large['processes']:,} | {step['rule']} "
                     f"| {rule(small['ranked_by_node'], large['ranked_by_node'])} | {rule(small['ranked'], large['ranked'])} |")
    lines += ["", RULES]
    lines += ranking(found, stated)
    lines += ["### Hierarchies beside Tables II and III\n",
              "Milliseconds of the all-reduce. The paper's are the sums over the layers that its bus bandwidths give. Table II has the first four layers of the two hierarchies of pairs (Rabenseifner's algorithm, "
              "and behind a ring of four); the others count with the last bandwidth, which is too high for them, as they are shorter.\n",
              "| processes | hierarchy | paper | model | simulation | flexring's pipeline |", "|---|---|---|---|---|---|"]
    tables = {128: measured(stated["bandwidths"], found["bytes"]), 256: measured(stated["bandwidths_256"], found["bytes"])}
    for size in sizes:
        times = tables.get(size["processes"], {})
        ring = size["ring"]
        paper = times.get(str(size["processes"]))
        lines.append(f"| {size['processes']:,} | flat ring | {paper and f'{paper:.1f}' or '-'} | {milliseconds(ring['model'])} | {milliseconds(ring['simulation'])} | {milliseconds(ring['pipeline'])} |")
        for row in size["hierarchies"]:
            name = label(row["dimensions"])
            at_least = "at least " if is_extended(stated, name) else ""
            paper = f"{at_least}{times[name]:.1f}" if name in times else "-"
            lines.append(f"| {size['processes']:,} | {name} | {paper} | {milliseconds(row['model'])} | {milliseconds(row['simulation'])} | {milliseconds(row['pipeline'])} |")
    return "\n".join([*lines, "", TABLES, *iterations(found, stated)])


def draw(found, stated, pictures):
    figure, (gains, times) = pictures.plt.subplots(1, 2, figsize=(11, 3.8))
    sizes, best = found["sizes"], stated["best"]
    at = [size["processes"] for size in sizes]
    series = {"paper, measured": [each["gain"] for each in best]}
    for name, kind in (("model", "model"), ("simulation, the paper's steps", "simulation"), ("simulation, flexring's pipeline", "pipeline")):
        series[name] = [gain(size, each["dimensions"], kind) for size, each in zip(sizes, best)]
    for (name, values), marker in zip(series.items(), "os^D"):
        known = [(processes, value) for processes, value in zip(at, values) if value]
        gains.plot(*zip(*known), marker=marker, label=name)
    gains.set_xscale("log", base=2)
    gains.set_xticks(at, [f"{size:,}\n{label(each['dimensions'])}" for size, each in zip(at, best)], fontsize=7)
    gains.set_ylabel("time of the flat ring / time of the hierarchy", fontsize=8)
    gains.set_ylim(bottom=0)
    size = sizes[0]
    paper = measured(stated["bandwidths"], found["bytes"])
    rows = [("flat ring", paper["128"], size["ring"])]
    rows += [(label(row["dimensions"]), paper.get(label(row["dimensions"])), row) for row in size["hierarchies"]]
    rows = [row for row in rows if row[1]]
    for offset, (name, values) in enumerate({
        "paper, Table II": [row[1] for row in rows],
        "model": [row[2]["model"] * 1e3 for row in rows],
        "simulation, the paper's steps": [row[2]["simulation"] * 1e3 for row in rows],
        "simulation, flexring's pipeline": [row[2]["pipeline"] * 1e3 for row in rows],
    }.items()):
        times.bar([index + 0.21 * (offset - 1.5) for index in range(len(rows))], values, 0.2, label=name)
    times.set_xticks(range(len(rows)), [row[0] for row in rows], fontsize=7, rotation=45)
    times.set_ylabel("milliseconds for 128 MiB", fontsize=8)
    for axes, title in ((gains, "gain of the paper's best hierarchy"), (times, "128 processes")):
        pictures.style(axes, title)
        axes.legend(fontsize=7, frameon=False)
    pictures.save(figure, PICTURE)
