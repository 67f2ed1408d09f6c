"""Step `tests`: the GPU tests, with CUDA_DEVICE_MAX_CONNECTIONS unset and 1."""

import contextlib
import io

from test_runs import MODULES, Report, python_modules, run_module, run_python

from .session import Cell, Failed

SECONDS = 400
QUESTION = "Do the tests pass?"

LIMIT = 100
# Those that tell most come first.
ORDER = ["cuda", "graphs", "registered_on_gpu", "all_reduce", "collectives", "failures"]
ORDER += ["cudarc", "groups", "cuda_perf", "reproducible", "allocations"]
# Enough for the simulated driver, on which `make test-gpu` runs them all.
SIMULATED = ["c_abi", "cudarc"]


def cells(session):
    assert sorted(ORDER) == sorted(MODULES)
    names = [*ORDER[:2], *python_modules(session.simulated), *ORDER[2:]]
    names = [name for name in names if not session.simulated or name in SIMULATED]
    return [
        Cell(f"{name}, connections {connections or 'unset'}", LIMIT, measured(name, connections))
        for connections in (None, "1")
        for name in names
    ]


def measured(name, connections):
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}

    def measure(session):
        report, limit = Report(), session.left()
        with contextlib.redirect_stdout(io.StringIO()):
            if name in MODULES:
                run_module(session.place, session.processes, report, name, limit, env)
            else:
                run_python(session.place, session.processes, report, name, limit, env)
        failed = [result for result in report.results if result["outcome"] == "FAILED"]
        counts = {"passed": report.count("ok"), "failed": len(failed), "skipped": report.count("skipped")}
        reasons = sorted({result["message"] for result in report.results if result["outcome"] == "skipped"})
        result = {**counts, "skipped_because": reasons, "connections": connections}
        if failed or not report.results:
            tests = "; ".join(f"{test['name']}: {shortened(test['message'])}" for test in failed[:12])
            raise Failed(f"{counts['passed']} passed, {len(failed)} failed: {tests}")
        return result

    return measure


def shortened(message):
    """The beginning and the end of a failed test's message."""
    return message if len(message) < 1000 else f"{message[:600]} ... {message[-400:]}"


def words(rows):
    for name, result in rows:
        skipped = f": {'; '.join(result['skipped_because'])}" if result["skipped"] else ""
        yield f"{name:36} {result['passed']:4} passed, {result['skipped']:4} skipped{skipped}"
