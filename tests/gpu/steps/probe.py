"""Step `probe`: the driver's behaviour that the design relies on or avoids, without flexring."""

from cells.blocking import ACTIONS

from .session import SIMULATED, Cell

SECONDS = 300
QUESTION = "Which calls wait for a kernel that waits for the host, and does that kernel see the host's word meanwhile?"

# CUDA_DEVICE_MAX_CONNECTIONS, and the kind of the kernel's stream; what matters most comes first.
PLACES = [(connections, stream) for connections in (None, "1", "32") for stream in ("non_blocking", "legacy")]
# On the simulated driver, where the cells only show that they work.
SIMULATED_PLACES = [(None, "non_blocking"), ("1", "legacy")]


def cells(session):
    places = SIMULATED_PLACES if session.simulated else PLACES
    first, *others = [blocking(*place) for place in places]
    return [*first, *costs(), *(cell for group in others for cell in group)]


def gate(session):
    """What waits for the host: the simulated driver has no kernel of ours."""
    return "wait_value" if session.simulated else "kernel"


def blocking(connections, stream):
    """The cells of one kind of stream."""

    def measured(action):
        def measure(session):
            result = session.cell("blocking.py", action, stream, gate(session), env={"CUDA_DEVICE_MAX_CONNECTIONS": connections})
            return {"connections": connections, "stream": stream, "action": action, **result}

        return measure

    name = f"{stream}, connections {connections or 'unset'}"
    only = {"lazy_load": SIMULATED}
    return [Cell(f"{action}, {name}", 20, measured(action), only.get(action, "")) for action in ACTIONS]


def costs():
    """What the design costs: the cells that measure words and lines of mapped memory, and neighbours."""
    return [
        Cell("round trip of a mapped word", 20, lambda session: session.cell("mapped.py", "round_trip"), SIMULATED),
        Cell("fetch of a line", 20, lambda session: session.cell("mapped.py", "fetch"), SIMULATED),
        Cell("pages shared by processes", 20, lambda session: session.cell("shared_pages.py", gate(session))),
        Cell("exporter killed", 20, lambda session: session.cell("peer_killed.py"), SIMULATED),
        Cell("bandwidth of mapped memory", 40, lambda session: session.cell("mapped.py", "bandwidth"), SIMULATED),
    ]


def milliseconds(value):
    return "       -" if value is None else f"{value:8.2f}"


def late(result):
    """What was blocked until the kernel ended, or still is."""
    return [*result["blocked_until_the_end"], *(f"{name} never returned" for name in result["never_returned"])]


def verdicts(rows):
    """Whether the driver does what the design relies on."""
    probed = [(name, result) for name, result in rows if "action" in result]
    for sentence, holds in (
        ("the kernel started without a further call of the driver", lambda result: result["started_ms"] is not None),
        ("the kernel saw the host's word within 1 s", lambda result: result["kernel_saw_word_ms"] is not None),
        ("all calls returned once the kernel had ended", lambda result: not result["never_returned"]),
        ("no call failed", lambda result: not result.get("errors")),
    ):
        against = [name for name, result in probed if not holds(result)]
        yield f"{sentence}: " + (f"NOT in {'; '.join(against)}" if against else f"in all {len(probed)} cells")


def differences(rows, others):
    """Where other results, such as those of the simulated driver, have other calls blocked."""
    others = dict(others)
    for name, result in rows:
        other = others.get(name)
        if other and "action" in result and late(result) != late(other):
            yield f"{name}: blocked {', '.join(late(result)) or 'nothing'}, there {', '.join(late(other)) or 'nothing'}"


def words(rows):
    if any("action" in result for _, result in rows):
        yield from verdicts(rows)
    header = "{:28} {:13} {:6} {:>8} {:>8} {:>8} {:>8}  {}".format(
        "while a kernel waits", "its stream", "conns", "started", "returned", "others", "seen", "blocked until the kernel's end"
    )
    yield header + " (times in ms)"
    if any(result.get("gate") == "wait_value" for _, result in rows):
        yield "a wait in the stream (cuStreamWaitValue64) stands in for the kernel"
    for _, result in rows:
        if "action" not in result:
            continue
        notes = [", ".join(late(result))]
        if result["ended_early"]:
            notes.append("THE KERNEL ENDED BEFORE THE WORD")
        if result["action"].startswith("global_capture"):
            notes.append(", ".join(result["steps_ms"]))
        notes += result.get("errors", [])
        times = (result["started_ms"], result["returned_while_spinning_ms"], result["bystander_ms"])
        shown = " ".join(milliseconds(value) for value in (*times, result["kernel_saw_word_ms"]))
        place = f"{result['stream']:13} {result['connections'] or 'unset':6}"
        yield f"{result['action']:28} {place} {shown}  {'; '.join(filter(None, notes))}"
    yield from costs_words(dict(rows))


def costs_words(results):
    trip = results.get("round trip of a mapped word")
    if trip:
        for name in ("idle", "with_copies", "launch_call", "launch_to_started"):
            yield f"{name.replace('_', ' ')}: median {trip[name]['median_us']} us, p99 {trip[name]['p99_us']} us"
        yield f"of which one poll of the host in Python: {trip['poll_us']} us"
    fetch = results.get("fetch of a line")
    if fetch:
        yield f"load of a line by a warp: GPU memory {fetch['gpu_memory_ns']} ns"
        for name in ("host_memory_ns", "host_memory_with_copies_ns"):
            yield f"  {name[:-3].replace('_', ' ')}: " + ", ".join(f"{size} {time} ns" for size, time in fetch[name].items())
    shared = results.get("pages shared by processes")
    if shared:
        yield f"pages that another process has pinned: code {shared['code']}, read-only: {shared['read_only']}"
        yield f"  a kernel saw the other process's word after {shared.get('kernel_saw_neighbours_word_ms')} ms"
    killed = results.get("exporter killed")
    if killed:
        going = "still reads" if killed["still_reading"] else "no longer reads"
        seen = killed["kernel_saw_word_ms"]
        yield f"exporter killed: the kernel {going}, {killed['wrong_values']} wrong values, word seen after {seen} ms"
        yield f"  synchronize code {killed['synchronize_code']}, context {killed['context']}"
    bandwidth = results.get("bandwidth of mapped memory")
    if bandwidth:
        copy = bandwidth["copy_gb_s"]
        yield f"GB/s of copies: out {copy['out']}, in {copy['in']}, within {copy['within']}; results right: {bandwidth['right']}"
        for row in bandwidth["rows"]:
            rates = ", ".join(f"{name} {row[f'{name}_gb_s']:7.2f}" for name in ("out", "in", "within"))
            yield f"  {row['ctas']:4} CTAs, tiles of {row['tile'] >> 10:4} KiB: {rates}"
