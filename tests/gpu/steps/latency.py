"""Step `latency`: calls from 8 B up between two ranks on one GPU, and how long a call keeps the caller's thread."""

import contextlib

from .session import Cell, free_port, two_ranks

SECONDS = 150
QUESTION = "What does a call cost, the caller's thread and until its result is there?"

MIB = 1 << 20


def cells(session):
    small = "8 -e 64K -f 16 -n 5 -w 2" if session.simulated else f"8 -e {256 * MIB} -f 4 -n 20 -w 5"
    flags = f"--ranks 2 -b {small} -d float --device cuda"
    return [
        Cell("threads of one process", 30, threads),
        Cell("processes, time-sliced", 30, processes),
        Cell("processes, MPS", 40, with_mps),
        Cell("by size" if session.simulated else "by size, MPS", 45, lambda session: sizes(session, flags)),
    ]


def program(session):
    return [session.place.programs["gpu_latency"], 5 if session.simulated else 200]


def threads(session):
    return {"rows": measured(session.lines(program(session), {"FLEXRING_GPU": "0"}))}


def processes(session, more=()):
    variables = two_ranks(free_port())
    return {"rows": measured(session.ranks(program(session), lambda rank: {**variables(rank), **dict(more)}))}


def with_mps(session):
    with session.mps() as env:
        return processes(session, env)


def measured(rows):
    if not rows:
        raise ValueError("no measurement")
    wrong = [row["bytes"] for row in rows if row["wrong"]]
    if wrong:
        raise ValueError(f"wrong sums for vectors of {wrong} B")
    return rows


def sizes(session, flags):
    """Without MPS the ranks' kernels take turns, and a call takes as many turns as it has steps, whatever its length."""
    with contextlib.nullcontext({}) if session.simulated else session.mps() as env:
        rows = session.perf(flags, env)["rows"]
    places = ("in_place", "out_of_place")
    kept = [{"bytes": row["size"], **{f"{key}_us": row[key]["mean_us"] for key in places}} for row in rows]
    wrong = [row["size"] for row in rows if any(row[key]["wrong"] for key in places)]
    if wrong:
        raise ValueError(f"wrong results for vectors of {wrong} B")
    return {"rows": kept}


def words(rows):
    for name, result in rows:
        yield f"{name}; us a call"
        for row in result["rows"]:
            if "caller_us" not in row:
                yield f"  {row['bytes']:>10} B  in place {row['in_place_us']:10.1f}  out of place {row['out_of_place_us']:10.1f}"
                continue
            caller, waited = row["caller_us"], row["waited_us"]
            line = f"  {row['bytes']:>10} B  caller {caller['median']:8.1f} (p99 {caller['p99']:8.1f})"
            line += f"  until the result {waited['median']:8.1f} (p99 {waited['p99']:8.1f})"
            yield line + f"  enqueued {row['enqueued_us']:8.1f}"
