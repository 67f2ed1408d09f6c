"""Yuan: star, trees, BytePS and ring by the number of machines P."""

NAME, PICTURE = "yuan", "yuan.svg"
METHODS = {"star": "star", "tree": "tree", "smart_tree": "smart tree", "byteps": "BytePS", "ring": "ring"}
COLOURS = dict(zip(METHODS, ("tab:red", "tab:green", "tab:olive", "tab:purple", "tab:blue")))


def markdown(found, stated):
    lines = [
        "## Star, trees, BytePS and ring (Yuan)\n",
        "A time is a number of vectors (times M B t_m) and a number of set-ups (times t_c). The paper's table has formulas, which are the cost model, and no measurements. In "
        "one piece: each vector or block is one message, as the paper assumes. In sub-chunks of 128 KiB of 32 MiB: as flexring runs it. Set-ups are "
        "latencies on the longest chain of messages.\n",
        "| P | method | paper: vectors | in one piece | in sub-chunks | paper: set-ups | simulation |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        for key, name in METHODS.items():
            model, simulation = row[key]["model"], row[key]["simulation"]
            exact = f" (exact: {row['ring_bytes']:.2f})" if key == "ring" else ""
            lines.append(f"| {row['machines']} | {name} | {model['vectors']:.2f}{exact} | {simulation['vectors_in_one_piece']:.2f} | {simulation['vectors']:.2f} "
                         f"| {model['set_ups']:.0f} | {simulation['set_ups']:.0f} |")
    lines += ["", "The formulas: " + "; ".join(f"{name} {stated[key]}" for key, name in METHODS.items() if key in stated) + ".\n"]
    lines.append("The star needs P - 1 transfers each way, not P. In a tree of whole vectors a parent receives from two children one after the other. The paper's smart tree avoids that and has the table's formula: in each round, half of the machines that have a sum send it to the other half. BytePS's servers contribute nothing (`helpers` in plan files), as its machines without GPUs. In sub-chunks, "
                 "sums travel back while vectors arrive, so star, tree and BytePS take half of that or less. The ring has 2 (P - 1) set-ups one after the other, where the table has P; set-ups of a star "
                 "and of BytePS overlap in the simulation, where the paper adds them up.\n")
    return "\n".join(lines)


def draw(found, stated, pictures):
    figure, panels = pictures.plt.subplots(1, 2, figsize=(11, 3.8))
    at = [row["machines"] for row in found["rows"]]
    columns = (("vectors", (("model", "vectors", "-", "paper"), ("simulation", "vectors_in_one_piece", "o", "simulation, one piece"), ("simulation", "vectors", "x", "simulation, sub-chunks"))),
               ("set-ups", (("model", "set_ups", "-", "paper"), ("simulation", "set_ups", "o", "simulation"))))
    for axes, (unit, series) in zip(panels, columns):
        for key, name in METHODS.items():
            for kind, field, style, words in series:
                axes.plot(at, [row[key][kind][field] for row in found["rows"]], style, color=COLOURS[key], markersize=5, label=f"{name}, {words}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(at, at)
        axes.set_xlabel("machines P", fontsize=8)
        axes.set_ylabel("times M B t_m" if unit == "vectors" else "times t_c", fontsize=8)
        pictures.style(axes, unit)
        axes.legend(fontsize=6, frameon=False)
    pictures.save(figure, PICTURE)
