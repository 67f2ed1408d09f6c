"""Step `all_reduce`: all-reduces of f32 between ranks of one node that share a GPU under MPS.

Beside them, in the same run, the peers in tests/gpu/peers: PyTorch's symmetric memory, and a reference that shows
what one GPU allows.
"""

import contextlib
import shutil
import sys

from .session import HERE, Cell, Skipped, free_port, rank_variables

SECONDS = 300
QUESTION = "How near are all-reduces between ranks on one GPU to the peers, and to what memory allows?"

WORLDS = (2, 4, 8)
KIB, MIB = 1 << 10, 1 << 20
# Calls of a graph.
CAPTURED = 20
# Flags of the lengths.
SHORT, LONG = f"-b 8 -e {128 * KIB} -f 2", f"-b {256 * KIB} -e {256 * MIB} -f 4"
# What registered vectors differ in.
REGISTERED, LONG_ONLY = "--memory registered", (LONG,)
# Fewer of them, for what is only to be seen.
FEW = f"-b 8 -e {256 * MIB} -f 32"
# What the simulated driver runs of them in a second.
SIMULATED = "-b 8 -e 256K -f 181 -n 2 -w 1"
MODES = ("graph", "enqueued", "waited")


def cells(session):
    worlds = WORLDS[:1] if session.simulated else WORLDS
    real_only = "simulated: only flexring's kernels run there"
    found = []
    for world in worlds:
        found += [
            Cell(f"{world} ranks, eager", 45, flexring("eager", world)),
            Cell(
                f"{world} ranks, graphs",
                45,
                flexring("graph", world, flags=f"--graph {3 if session.simulated else CAPTURED}"),
            ),
            Cell(
                f"{world} ranks, registered, eager",
                45,
                flexring("registered", world, flags=REGISTERED, ranges=LONG_ONLY),
            ),
            Cell(
                f"{world} ranks, registered, graphs",
                45,
                flexring(
                    "registered graph",
                    world,
                    flags=f"{REGISTERED} --graph {3 if session.simulated else CAPTURED}",
                    ranges=LONG_ONLY,
                ),
            ),
            Cell(
                f"{world} ranks, the reference", 90 if world == worlds[0] else 45, reference(world), real_only
            ),
            Cell(f"{world} ranks, symmetric memory", 45, symmetric_memory(world), real_only),
        ]
    found.append(Cell("100,000 replays", 60, replays))
    tenth, pinned = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10"}, {"FLEXRING_GPU_IPC": "0"}
    for world in worlds:
        found += [
            Cell(f"{world} ranks, by CTAs", 40, by_ctas(world)),
            Cell(
                f"{world} ranks, pinned memory", 30, flexring("pinned", world, pinned, "", [f"{FEW} -n 5 -w 2"])
            ),
            Cell(
                f"{world} ranks, a tenth of the GPU each",
                30,
                flexring("tenth", world, tenth, "--graph 4", [f"{FEW} -n 10 -w 2"]),
            ),
        ]
    return found


def shared_gpu(session):
    """Without MPS the ranks' kernels take turns of milliseconds."""
    return contextlib.nullcontext({}) if session.simulated else session.mps()


def flexring(kind, world, env=None, flags="", ranges=(SHORT, LONG)):
    def measure(session):
        with shared_gpu(session) as mps:
            rows = []
            for sizes in [SIMULATED] if session.simulated else ranges:
                rows += perf(session, world, f"{sizes} {flags}", {**mps, **(env or {})})
        return {"kind": kind, "ranks": world, "rows": rows}

    return measure


def perf(session, world, flags, env):
    """The times of the slowest rank, in place or not, the better one."""
    report = session.perf(f"--ranks {world} --device cuda -d float -a 3 {flags}", env)
    rows = []
    for row in report["rows"]:
        places = [row[place] for place in ("in_place", "out_of_place")]
        if any(place["wrong"] for place in places):
            raise ValueError(f"wrong results for vectors of {row['size']} B: {row}")
        keys = {"mean_us": "us", "waited_us": "waited_us", "caller_us": "caller_us"}
        known = {mine: min(place[key] for place in places) for key, mine in keys.items() if key in places[0]}
        rows.append({"bytes": row["size"], **{key: round(us, 2) for key, us in known.items()}})
    return rows


def by_ctas(world):
    def measure(session):
        flags = SIMULATED if session.simulated else f"-b {1 * MIB} -e {256 * MIB} -f 16 -n 10 -w 3 -c 0"
        with shared_gpu(session) as mps:
            rows = [
                {"ctas": ctas, "registered": bool(memory), **row}
                for ctas in ((8,) if session.simulated else (16, 32, 64))
                for memory in ("", REGISTERED)
                for row in perf(session, world, f"{flags} {memory}", {**mps, "FLEXRING_GPU_CTAS": str(ctas)})
            ]
        return {"kind": "ctas", "ranks": world, "rows": rows}

    return measure


def reference(world):
    def measure(session):
        program = session.folder / "shared_gpu_allreduce"
        if not program.exists():
            compiler = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
            if not compiler:
                raise Skipped("there is no nvcc to compile it")
            made = program.with_suffix(".part")
            session.run([compiler, "-O3", "-arch=native", HERE / "peers/shared_gpu_allreduce.cu", "-o", made])
            made.rename(program)
        with session.mps() as env:
            about, *rows = session.lines([program, world], env)
        return {"kind": "reference", "ranks": world, "copy_gb_s": about["copy_gb_s"], "rows": right(rows)}

    return measure


def symmetric_memory(world):
    def measure(session):
        session.torch()
        shared = {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, HERE / "peers/symmetric_memory.py"]
        with session.mps() as env:
            rows = session.ranks(command, lambda rank: {**shared, **env, "RANK": str(rank)}, world)
        return {"kind": "symmetric", "ranks": world, "torch": rows[0]["torch"], "rows": right(rows)}

    return measure


def right(rows):
    wrong = [(row["kernel"], row["bytes"]) for row in rows if row.get("wrong")]
    if wrong or not rows:
        raise ValueError(f"wrong results, or none: {wrong}")
    keys = ("kernel", "ctas", "bytes", "graph_us", "enqueued_us", "waited_us")
    return [{key: row[key] for key in keys if key in row} for row in rows]


def replays(session):
    variables = rank_variables(free_port(), 2)
    program = [session.place.programs["gpu_replays"], 200 if session.simulated else 100_000]
    with shared_gpu(session) as env:
        rows = session.ranks(program, lambda rank: {**variables(rank), **env})
    return {"kind": "replays", "ranks": 2, "rows": rows}


# What the tables and the goals need of the results: by number of ranks, mode and length, in microseconds.


def ours(results, world, eager="eager", graph="graph"):
    """Times of flexring, {(mode, bytes): us}."""
    times = {}
    for row in rows_of(results, eager, world):
        times["enqueued", row["bytes"]] = row["us"]
        times["waited", row["bytes"]] = row["waited_us"]
    for row in rows_of(results, graph, world):
        times["graph", row["bytes"]] = row["us"]
    return times


def registered(results, world):
    return ours(results, world, "registered", "registered graph")


def theirs(results, kind, world, kernels):
    """The best times of a peer's kernels."""
    times = {}
    for row in rows_of(results, kind, world):
        for mode in MODES:
            if row["kernel"] in kernels and f"{mode}_us" in row:
                key = (mode, row["bytes"])
                times[key] = min(row[f"{mode}_us"], times.get(key, float("inf")))
    return times


def rows_of(results, kind, world):
    return [
        row
        for result in results
        if (result["kind"], result["ranks"]) == (kind, world)
        for row in result["rows"]
    ]


def goals(results, world):
    """Lines that say which goals are met. Each goal is a limit for every length and mode of a range."""
    staged_us, direct_us = ours(results, world), registered(results, world)
    flexring_us = {**staged_us, **direct_us}
    symmetric_us = theirs(results, "symmetric", world, ("one_shot", "two_shot"))
    one_shot, two_shot = (
        theirs(results, "reference", world, (kernel,)) for kernel in ("one-shot", "two-shot")
    )
    copies = [
        result["copy_gb_s"] for result in results if (result["kind"], result["ranks"]) == ("reference", world)
    ]
    above = 1.0 if world == 2 else 1.5

    def limits(least, most, limit):
        found = {key: limit(key) for key in flexring_us if least <= key[1] <= most}
        return {key: us for key, us in found.items() if us is not None}

    def faster_peer(key):
        known = [times[key] for times in (symmetric_us, two_shot) if key in times]
        return 1.05 * min(known) if known else None

    def memory(factor):
        return lambda key: (
            factor * 2 * world * key[1] / copies[0] / 1e3 if copies and key[0] == "graph" else None
        )

    short, long = (8, 128 * KIB), (256 * KIB, 256 * MIB)
    yield verdict(
        "at most 1.05 times the faster peer, 256 KiB to 256 MiB", flexring_us, limits(*long, faster_peer)
    )
    yield verdict("at most symmetric memory, 8 B to 128 KiB", flexring_us, limits(*short, symmetric_us.get))
    limit = limits(*short, lambda key: one_shot[key] + above if key in one_shot else None)
    yield verdict(f"at most {above} us more than the one-shot, 8 B to 128 KiB", flexring_us, limit)
    for size, factor in ((256 * MIB, 1.12), (16 * MIB, 1.5)):
        name = f"at most {factor} times what {length(size)} cost the memory"
        yield verdict(name, flexring_us, limits(size, size, memory(factor)))
    limit = {key: 2.2 * us for key, us in direct_us.items() if key[1] >= MIB and key in staged_us}
    yield verdict("through stages at most 2.2 times registered, 1 MiB and more", staged_us, limit)
    caller = {("eager", row["bytes"]): row["caller_us"] for row in rows_of(results, "eager", world)}
    yield verdict("at most 6 us of the caller's thread", caller, dict.fromkeys(caller, 6.0))


def verdict(goal, measured, limits):
    if not limits:
        return f"  not measured: {goal}"
    missed = [key for key, us in limits.items() if measured[key] > us]
    if not missed:
        return f"  met: {goal} ({len(limits)} times)"
    missed.sort(key=lambda key: limits[key] / measured[key])
    worst = [
        f"{mode} {length(size)} {measured[mode, size]:.1f} > {limits[mode, size]:.1f}"
        for mode, size in missed[:4]
    ]
    more = " ..." if missed[4:] else ""
    return f"  MISSED by {len(missed)} of {len(limits)} times: {goal}: {', '.join(worst)}{more}"


def length(size):
    return next(
        (f"{size // unit} {name}" for unit, name in ((MIB, "MiB"), (KIB, "KiB")) if size >= unit), f"{size} B"
    )


def words(rows):
    results = [result for _, result in rows]
    for world in sorted({result["ranks"] for result in results}):
        columns = [
            ours(results, world),
            registered(results, world),
            theirs(results, "symmetric", world, ("one_shot", "two_shot")),
            theirs(results, "reference", world, ("one-shot", "two-shot")),
        ]
        sizes = sorted({size for times in columns for _, size in times})
        if sizes:
            columns_are = "flexring, registered, symmetric memory, reference"
            yield f"{world} ranks; us a call of the slowest rank: {columns_are}"
            yield f"  {'':8}" + "".join(f"{mode:^43}" for mode in MODES)
        for size in sizes:
            cells = ["".join(cell(times, (mode, size)) for times in columns) for mode in MODES]
            yield f"  {length(size):>8}" + "   ".join(cells)
        yield from others(results, world)
        if sizes:
            yield f"  goals with {world} ranks"
            yield from goals(results, world)


def cell(times, key):
    return f"{times[key]:10.1f}" if key in times else f"{'':10}"


def others(results, world):
    for row in rows_of(results, "ctas", world):
        memory = ", registered" if row["registered"] else ""
        yield f"  {row['ctas']} CTAs, {length(row['bytes'])}{memory}: {row['us']:.1f}, waited {row['waited_us']:.1f}"
    names = {"pinned": "through pinned memory", "tenth": "in graphs, a tenth of the GPU each"}
    for kind, name in names.items():
        times = [f"{length(row['bytes'])} {row['us']:.1f}" for row in rows_of(results, kind, world)]
        if times:
            yield f"  {name}: {', '.join(times)}"
    for row in rows_of(results, "replays", world):
        begin, end = row["memory_kib"]
        line = f"  {row['replays']} replays of {row['calls']} calls of {length(row['bytes'])}"
        line += f"{', registered' if row['registered'] else ''}: right in {row['checks']} checks"
        yield f"{line}, {row['call_us']:.1f} us a call, memory {begin} KiB before, {end} KiB after"
