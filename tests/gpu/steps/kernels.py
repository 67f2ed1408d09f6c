"""Step `kernels`: bandwidth of the kernels beside a copy on the GPU, and of the host path beside each of its stages."""

from .session import Cell

SECONDS = 200
QUESTION = "How near to a copy are the kernels, by CTAs, type and size, and the host path to its slowest stage?"

MIB = 1 << 20
# Bytes of the vectors of the kernels and of the host path.
LARGE, HOST_PATH = 256 * MIB, 128 * MIB
# CTAs of a call; 0 for as many as the GPU holds.
CTAS = [16, 0, 4, 8, 32, 64]
# Lengths of sub-chunks on the GPU.
GRAINS = ["128K", "512K", "1M", "2M", "4M"]


def cells(session):
    wanted = CTAS[:1] if session.simulated else CTAS
    names = {ctas: f"{ctas} CTAs" if ctas else "full grid" for ctas in wanted}
    found = [Cell(names[ctas], 20, lambda session, ctas=ctas: reduce(session, ctas)) for ctas in wanted]
    return [*found, Cell("host path", 90, stages, "simulated: it measures a bus")]


def reduce(session, ctas):
    size = 1 if session.simulated else LARGE // MIB
    return {"ctas": ctas, "rows": session.lines([session.place.programs["gpu_reduce"], size, ctas])}


def stages(session):
    """Two ranks on one GPU over pinned slots, with MPS, beside each stage alone. All bytes of both ranks cross the bus once each way."""
    with session.mps() as env:
        return compared(session, env)


def compared(session, mps):
    flags = f"--ranks 2 -b {HOST_PATH} -e {HOST_PATH} -n 10 -w 3 -c 0 -d float --transport shm"
    pinned = {"FLEXRING_GPU_IPC": "0"}

    def mean(on="--device cuda", env=None):
        return session.perf(f"{flags} {on}", {**mps, **(env or {})})["rows"][0]["in_place"]["mean_us"]

    whole, by_ipc, host = mean(env=pinned), mean(), mean(on="")
    by_grain = {grain: mean(env={**pinned, "FLEXRING_GPU_SUBCHUNK": grain}) for grain in GRAINS}
    copies = session.cell("copies.py", str(2 * HOST_PATH))
    alone = {"copy-out": copies["out_us"], "copy-in": copies["in_us"], "transport": host}
    slowest = max(alone, key=alone.get)
    return {
        "bytes": HOST_PATH,
        "whole_us": whole,
        "by_subchunk_us": by_grain,
        "by_ipc_us": by_ipc,
        "alone_us": alone,
        "both_copies_us": copies["both_us"],
        "slowest": slowest,
        "ratio": round(whole / alone[slowest], 3),
    }


def words(rows):
    for name, result in rows:
        if "alone_us" in result:
            yield from stages_words(result)
            continue
        copies = {(row["type"], row["bytes"]): row["median_gb_s"] for row in result["rows"] if row["what"] == "copy"}
        yield f"{name}: GB/s read and written"
        for row in result["rows"]:
            part = 100 * row["median_gb_s"] / copies[row["type"], row["bytes"]]
            line = f"  {row['type']:8} {row['bytes'] / MIB:7.2f} MiB  {row['what']:16}"
            yield f"{line} {row['median_gb_s']:8.1f}, {part:5.1f} % of a copy"
        yield from descriptors_words(result["rows"])


def descriptors_words(rows):
    """What a descriptor costs: the same sum in one and in many."""
    for row in rows:
        grain = 4 << 10
        if row["what"] != "sum in 4 KiB":
            continue
        whole = f"sum in {row['bytes'] >> 10} KiB"
        one = next(other for other in rows if (other["type"], other["bytes"], other["what"]) == (row["type"], row["bytes"], whole))
        cost = (row["median_us"] - one["median_us"]) / (row["bytes"] / grain - 1)
        yield f"  {row['type']:8} a descriptor of 4 KiB costs {cost:.2f} us more than one for all"


def stages_words(result):
    alone = ", ".join(f"{stage} {us / 1e3:.2f} ms" for stage, us in result["alone_us"].items())
    grains = ", ".join(f"{grain} {us / 1e3:.2f} ms" for grain, us in result["by_subchunk_us"].items())
    yield f"{result['bytes'] // MIB} MiB of f32, 2 ranks on one GPU over pinned slots: {result['whole_us'] / 1e3:.2f} ms"
    yield f"  by FLEXRING_GPU_SUBCHUNK: {grains}"
    yield f"  by CUDA IPC, without slots: {result['by_ipc_us'] / 1e3:.2f} ms"
    yield f"  alone: {alone}; both copies at once {result['both_copies_us'] / 1e3:.2f} ms"
    yield f"  {result['ratio']} times the slowest of them, {result['slowest']}"
