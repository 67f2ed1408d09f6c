"""The benchmarks on a GPU, and their reports.

Each benchmark gets the place of the programs and an object that runs processes, and returns plain data. If it cannot run, the
data is a "skipped" with the reason.
"""

import concurrent.futures
import json
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

MIB = 1 << 20
LARGE = 256 * MIB
# Sub-chunk sizes to measure.
GRAINS = ["128K", "256K", "512K", "1M", "2M", "4M"]
# From 1 KiB to 256 MiB.
SIZES = [1 << power for power in range(10, 29, 2)]


class Failed(Exception):
    """A measured program failed."""


def lines_of(place, processes, command, limit, env=None):
    """Runs a program and returns its lines of JSON."""
    status, out, err = processes.run(command, limit, {**place.env, **(env or {})})
    if status != 0:
        why = f"was ended after {limit} s" if status is None else f"ended with status {status}"
        raise Failed(f"{Path(str(command[0])).name} {why}: {(err or out).strip()[-2000:]}")
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def perf(place, processes, flags, limit, env=None):
    """Runs `flexring perf` and returns its JSON report."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [place.programs["flexring"], "perf", *flags.split(), "--json", path]
        status, out, err = processes.run(command, limit, {**place.env, **(env or {})})
        if status != 0:
            why = f"was ended after {limit} s" if status is None else f"ended with status {status}"
            raise Failed(f"flexring perf {flags} {why}: {(err or out).strip()[-2000:]}")
        return json.loads(path.read_text())


def reduce(place, processes):
    """Bandwidth of the kernels beside that of a copy."""
    return {"rows": lines_of(place, processes, [place.programs["gpu_reduce"], LARGE // MIB], 180)}


def stages(place, processes):
    """Two ranks on one GPU over pinned slots, beside each stage alone. All bytes of both ranks cross the bus once each way."""
    flags = f"--ranks 2 -b {LARGE} -e {LARGE} -n 10 -w 3 -d float --transport shm"
    pinned = {"FLEXRING_GPU_IPC": "0"}
    whole = perf(place, processes, f"{flags} --device cuda", 180, pinned)
    by_grain = {
        grain: perf(place, processes, f"{flags} --device cuda", 180, {**pinned, "FLEXRING_GPU_SUBCHUNK": grain})
        for grain in GRAINS
    }
    by_ipc = perf(place, processes, f"{flags} --device cuda", 180)
    host = perf(place, processes, flags, 180)
    copies = lines_of(place, processes, [sys.executable, HERE / "copies.py", 2 * LARGE], 120)[0]
    whole, by_ipc, host, *grains = (
        report["rows"][0]["in_place"]["mean_us"] for report in (whole, by_ipc, host, *by_grain.values())
    )
    alone = {"copy-out": copies["out_us"], "copy-in": copies["in_us"], "transport": host}
    slowest = max(alone, key=alone.get)
    return {
        "bytes": LARGE,
        "whole_us": whole,
        "by_subchunk_us": dict(zip(by_grain, grains)),
        "by_ipc_us": by_ipc,
        "alone_us": alone,
        "both_copies_us": copies["both_us"],
        "slowest": slowest,
        "ratio": round(whole / alone[slowest], 3),
    }


def nccl(place, processes):
    """flexring over TCP beside NCCL over sockets: two ranks on one GPU, one library after the other."""
    status, out, _ = processes.run([sys.executable, "-c", "import torch; print(torch.cuda.is_available())"], 120)
    if status != 0 or out.strip() != "True":
        return {"skipped": "no PyTorch with CUDA"}
    rows, library = [], None
    for dtype in ("float", "bfloat16"):
        for sizes, iterations in ((SIZES[:6], 50), (SIZES[6:8], 20), (SIZES[8:], 5)):
            theirs = nccl_rows(place, processes, dtype, iterations, sizes)
            flags = f"--ranks 2 -b {sizes[0]} -e {sizes[-1]} -f 4 -n {iterations} -w 5 -d {dtype} --device cuda"
            ours = perf(place, processes, flags, 300, {"FLEXRING_TRANSPORT": "tcp"})
            for mine, theirs_row in zip(ours["rows"], theirs):
                library = theirs_row["library"]
                us = mine["in_place"]["mean_us"]
                rows.append(
                    {
                        "type": dtype,
                        "bytes": theirs_row["bytes"],
                        "flexring_us": round(us, 2),
                        "nccl_us": theirs_row["mean_us"],
                        "ratio": round(theirs_row["mean_us"] / us, 3),
                        "wrong": [mine["in_place"]["wrong"], theirs_row["wrong"]],
                    }
                )
    return {"library": library, "rows": rows}


def nccl_rows(place, processes, dtype, iterations, sizes):
    port = str(20000 + os.getpid() % 10000)
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
    command = [sys.executable, ROOT / "bench/peers/nccl_allreduce.py", dtype, iterations, 5, *sizes]

    def rank(number):
        return lines_of(place, processes, command, 300, {**env, "RANK": str(number), "NCCL_HOSTID": f"machine{number}"})

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))[0]


def words(name, result):
    """The lines of text that report a benchmark's result."""
    if "skipped" in result:
        return [f"skipped: {result['skipped']}"]
    if name == "reduce":
        copies = {row["type"]: row["median_gb_s"] for row in result["rows"] if row["what"] == "copy"}
        line = "{:8} {:16} {:8.1f} GB/s, {:5.1f} % of a copy"
        return [
            line.format(row["type"], row["what"], row["median_gb_s"], 100 * row["median_gb_s"] / copies[row["type"]])
            for row in result["rows"]
        ]
    if name == "stages":
        alone = ", ".join(f"{stage} {us / 1e3:.2f} ms" for stage, us in result["alone_us"].items())
        grains = ", ".join(f"{grain} {us / 1e3:.2f} ms" for grain, us in result["by_subchunk_us"].items())
        return [
            f"{result['bytes'] // MIB} MiB of f32, 2 ranks on one GPU over pinned slots: {result['whole_us'] / 1e3:.2f} ms",
            f"by FLEXRING_GPU_SUBCHUNK: {grains}",
            f"by CUDA IPC, without slots: {result['by_ipc_us'] / 1e3:.2f} ms",
            f"alone: {alone}; both copies at once {result['both_copies_us'] / 1e3:.2f} ms",
            f"{result['ratio']} times the slowest of them, {result['slowest']}",
        ]
    lines = [f"flexring over TCP and {result['library']} over sockets, 2 ranks on one GPU; in place, us a call"]
    for row in result["rows"]:
        line = "{type:8} {bytes:>10} B  flexring {flexring_us:>11.2f}  NCCL {nccl_us:>11.2f}  NCCL / flexring {ratio:.2f}"
        lines.append(line.format(**row) + ("" if row["wrong"] == [0, 0] else f"  WRONG {row['wrong']}"))
    return lines


ALL = {"reduce": reduce, "stages": stages, "nccl": nccl}
