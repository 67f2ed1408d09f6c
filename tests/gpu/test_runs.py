"""Runs modules of the GPU tests, those of the Rust test binary `suite` and those in Python, and reports their outcomes."""

import re
import sys
import time

from programs import ROOT

HERE = ROOT / "tests/gpu"
sys.path.insert(0, str(ROOT / "tests"))

from report import Report, listed  # noqa: E402

# Modules of `suite`, the longest first, and the time limit of each in seconds.
MODULES = {
    "collectives": 300,
    "all_reduce": 300,
    "failures": 300,
    "cuda_perf": 300,
    "reproducible": 300,
    "cuda": 300,
    "cudarc": 300,
    "graphs": 300,
    "registered_on_gpu": 300,
    "mapped_on_gpu": 120,
    "groups": 120,
    "allocations": 120,
}


def run_module(place, processes, report, module, limit, env=None):
    """Runs the tests of one module of `suite`, one after the other: the tests of a process share its GPU context."""
    program, env = place.programs["suite"], {**place.test_env(), **(env or {})}
    _, out, err = processes.run([program, f"{module}::", "--list", "--format", "terse"], 60, env)
    tests = listed(out)
    if not tests:
        return report.add(module, "FAILED", f"it lists no tests\n{err}")
    names = [name for name in tests if report.wanted(name)]
    if not names:
        return None
    started = time.monotonic()
    command = [program, *names, "--exact", "--test-threads=1", "--show-output"]
    status, out, err = processes.run(command, limit, env)
    seconds = round(time.monotonic() - started, 1)
    ending = f"{module}: " + (f"stopped after {limit} s" if status is None else f"ended with status {status}")
    report.add_binary("", names, out, ending, err[-3000:])
    if status != 0 and not any(name.startswith(f"{module}::") for name in report.named("FAILED")):
        report.add(f"{module}::", "FAILED", f"{err[-3000:]}\n{ending}")
    print(f"{module}: {seconds} s", flush=True)
    return None


def python_modules(simulated):
    """The modules of tests in Python. PyTorch does not work on the simulated driver."""
    return ["c_abi", "test_gpu"] if simulated else ["c_abi", "test_gpu", "test_torch"]


def run_python(place, processes, report, name, limit=240, env=None):
    """Runs a module of tests in Python."""
    if not report.wanted(name):
        return
    module, folder = (name, HERE) if name == "c_abi" else (f"tests.{name}", ROOT / "python")
    command = [sys.executable, "-m", "unittest", "-v", module]
    status, out, err = processes.run(command, limit, {**place.env, **(env or {})}, folder)
    tests = re.findall(r"^(\w+) \(([\w.]+)\)[^\n]*?\.\.\. (ok|FAIL|ERROR|skipped [^\n]*)$", err, re.M)
    for test, _, outcome in tests:
        if outcome.startswith("skipped"):
            report.add(f"{name}::{test}", "skipped", outcome[len("skipped ") :].strip("'\""))
        else:
            report.add(f"{name}::{test}", "ok" if outcome == "ok" else "FAILED", "" if outcome == "ok" else err)
    if status != 0 and all(outcome not in ("FAIL", "ERROR") for _, _, outcome in tests):
        ended = f"ended after {limit} s" if status is None else f"status {status}"
        report.add(name, "FAILED", f"{out}\n{err}\n{ended}")
