"""Step `latency`: short calls between two ranks on one GPU, and how long a call keeps the caller's thread."""

from .session import Cell, free_port, rank_variables

SECONDS = 100
QUESTION = "What does a call cost, the caller's thread and until its result is there?"


def cells(_session):
    return [
        Cell("threads of one process", 30, threads),
        Cell("processes, time-sliced", 30, processes),
        Cell("processes, MPS", 40, with_mps),
    ]


def program(session):
    return [session.place.programs["gpu_latency"], 5 if session.simulated else 200]


def threads(session):
    return {"rows": measured(session.lines(program(session), {"FLEXRING_GPU": "0"}))}


def processes(session, more=()):
    variables = rank_variables(free_port(), 2)
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


def words(rows):
    for name, result in rows:
        yield f"{name}; us a call"
        for row in result["rows"]:
            caller, waited = row["caller_us"], row["waited_us"]
            line = f"  {row['bytes']:>10} B  caller {caller['median']:8.1f} (p99 {caller['p99']:8.1f})"
            line += f"  until the result {waited['median']:8.1f} (p99 {waited['p99']:8.1f})"
            yield line + f"  enqueued {row['enqueued_us']:8.1f}"
