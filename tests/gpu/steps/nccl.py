"""Step `nccl`: NCCL beside flexring in one run.

Two processes share one GPU under MPS. Each has an NCCL_HOSTID and a FLEXRING_NODE of its own, so that NCCL takes them for two
machines and uses sockets, and flexring uses TCP. It compares the two libraries in this setup alone; neither is made for it.
"""

import sys

from programs import ROOT

from .session import Cell, free_port

SECONDS = 120
QUESTION = "How do NCCL and flexring compare where both can run: two processes on one GPU, over sockets?"
LABEL = "two processes on one GPU under MPS, each a node of its own: NCCL over sockets, flexring over TCP"

SIZES = [1 << power for power in range(10, 29, 3)]
# Sizes and calls of a run.
PARTS = [(SIZES[:4], 50), (SIZES[4:6], 20), (SIZES[6:], 5)]


def cells(_session):
    return [Cell(dtype, 60, measured(dtype)) for dtype in ("float", "bfloat16")]


def measured(dtype):
    def measure(session):
        session.torch()
        with session.mps() as env:
            return compare(session, dtype, env)

    return measure


def compare(session, dtype, env):
    rows, library = [], None
    for sizes, calls in PARTS:
        command = [sys.executable, ROOT / "bench/peers/nccl_allreduce.py", dtype, calls, 5, *sizes]
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **env}
        shared |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
        theirs = session.ranks(command, lambda rank: {**shared, "RANK": str(rank), "NCCL_HOSTID": f"machine{rank}"})
        flags = f"-b {sizes[0]} -e {sizes[-1]} -f 8 -n {calls} -w 5 -d {dtype} --device cuda"
        ours = session.perf_of_nodes(flags, env)["rows"]
        for mine, other in zip(ours, theirs, strict=True):
            library = other["library"]
            us = mine["in_place"]["mean_us"]
            row = {"bytes": other["bytes"], "flexring_us": round(us, 2), "nccl_us": other["mean_us"]}
            rows.append(row | {"ratio": round(other["mean_us"] / us, 3), "wrong": [mine["in_place"]["wrong"], other["wrong"]]})
    return {"setup": LABEL, "library": library, "type": dtype, "rows": rows}


def words(rows):
    for name, result in rows:
        yield f"{name}; {result['library']}; {result['setup']}; in place, us a call"
        for row in result["rows"]:
            wrong = "" if row["wrong"] == [0, 0] else f"  WRONG {row['wrong']}"
            line = f"  {row['bytes']:>10} B  flexring {row['flexring_us']:>11.2f}  NCCL {row['nccl_us']:>11.2f}"
            yield f"{line}  NCCL / flexring {row['ratio']:.2f}{wrong}"
