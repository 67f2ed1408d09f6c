"""Step `relays`: ranks that do not reach each other's GPU memory, beside each stage of their messages."""

from .session import Cell

SECONDS = 60
QUESTION = "How near is the way through pinned memory to its slowest stage?"

MIB = 1 << 20
# Bytes of the vectors.
HOST_PATH = 128 * MIB


def cells(_session):
    return [Cell("pinned memory", 60, stages, "simulated: it measures a bus")]


def stages(session):
    """Two ranks on one GPU through pinned memory, with MPS, beside each stage alone. All bytes of both ranks cross the bus once each way."""
    with session.mps() as env:
        return compared(session, env)


def compared(session, mps):
    flags = f"--ranks 2 -b {HOST_PATH} -e {HOST_PATH} -n 10 -w 3 -c 0 -d float --transport shm"
    pinned = {"FLEXRING_GPU_IPC": "0"}

    def mean(on="--device cuda", env=None):
        return session.perf(f"{flags} {on}", {**mps, **(env or {})})["rows"][0]["in_place"]["mean_us"]

    whole, by_ipc, host = mean(env=pinned), mean(), mean(on="")
    copies = session.cell("copies.py", str(2 * HOST_PATH))
    alone = {"copy-out": copies["out_us"], "copy-in": copies["in_us"], "transport": host}
    slowest = max(alone, key=alone.get)
    return {
        "bytes": HOST_PATH,
        "whole_us": whole,
        "by_ipc_us": by_ipc,
        "alone_us": alone,
        "both_copies_us": copies["both_us"],
        "slowest": slowest,
        "ratio": round(whole / alone[slowest], 3),
    }


def words(rows):
    for _, result in rows:
        alone = ", ".join(f"{stage} {us / 1e3:.2f} ms" for stage, us in result["alone_us"].items())
        yield f"{result['bytes'] // MIB} MiB of f32, 2 ranks on one GPU through pinned memory: {result['whole_us'] / 1e3:.2f} ms"
        yield f"  by CUDA IPC: {result['by_ipc_us'] / 1e3:.2f} ms"
        yield f"  alone: {alone}; both copies at once {result['both_copies_us'] / 1e3:.2f} ms"
        yield f"  {result['ratio']} times the slowest of them, {result['slowest']}"
