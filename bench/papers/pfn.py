"""PFN-Proto: the ring over InfiniBand, Fig. 6."""

NAME, PICTURE = "pfn", None


def markdown(found, stated):
    gigabytes = 2 * (found["nodes"] - 1) / found["nodes"] * found["bytes"] / 1e9
    ports = (("one port", "one_port"), ("both ports", "two_ports"))
    faster = ", ".join(f"{percent} % ({name})" for name, percent in stated["faster"].items())
    fraction = {name: found[key]["model"] / stated["fastest"] for name, key in ports}
    lines = [
        "## PFN-Proto, Fig. 6 (Ueno, Preferred Networks)\n",
        f"{found['nodes']} nodes with a process each and two ports of FDR InfiniBand, {found['bytes'] >> 20} MiB; {found['port'] / 1e9:.2f} GB/s for each port, a latency of "
        f"{found['alpha'] * 1e6:g} us is assumed. The text says by how much PFN-Proto is faster in the median: {faster}. The only time in it is that of the fastest single run, which "
        f"was baidu-allreduce's: {stated['fastest'] * 1e3:.0f} ms.\n",
        "| ring over | model | simulation (flexring's pipeline) | of the fastest run |",
        "|---|---|---|---|",
    ]
    for name, key in ports:
        row = found[key]
        lines.append(f"| {name} | {row['model'] * 1e3:.1f} ms | {row['simulation'] * 1e3:.1f} ms | {fraction[name]:.0%} |")
    lines += [
        "",
        f"The fastest run sends {gigabytes / stated['fastest']:.2f} GB/s, {fraction['one port']:.0%} of a port, so it used one, or both far below their rate; the paper says neither which, nor the adapters' slots. "
        f"The order of the libraries is one of implementations, which no model has: the same ring takes 1.28 times as long through MPI. What makes PFN-Proto fast by its text (verbs, stages in a pipeline, sub-chunks, "
        f"a memory pool) is what flexring's executor does; `make versus` compares it with baidu-allreduce's successors, Open MPI and others on one machine. Its runs differ by {stated['spread']['PFN-Proto']} % "
        f"of the median at most, NCCL's by {stated['spread']['NCCL']} %; the simulation's not at all.\n",
    ]
    return "\n".join(lines)
