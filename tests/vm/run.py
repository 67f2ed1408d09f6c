#!/usr/bin/env python3
"""Runs flexring's RDMA tests: test binaries in one virtual machine with Soft-RoCE devices, and scenarios between two.

    tests/vm/run.py [--short] [--features LIST] [--time SECONDS] [NAME]...

With names, only tests whose names contain one of them are run. With --short, only the tests that CI runs: two machines boot
once, the essential tests run in the first, and a few scenarios between both. Prints "skipped" where virtual machines are not
available.
"""

import argparse
import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import scenarios  # noqa: E402
import vm  # noqa: E402
from report import FAILED, OK, SKIPPED, Report, listed  # noqa: E402

# The tests in one machine: of a test binary ("lib" has the unit tests), those whose names contain the filter.
BINARIES = [
    ("lib", "transport::verbs::tests::contract::"),
    ("lib", "transport::verbs::tests::on_demand::"),
    ("lib", "transport::verbs::tests::paths::"),
    ("lib", "transport::verbs::tests::faults::"),
    ("lib", "transport::verbs::tests::forks::"),
    ("lib", "transport::verbs::tests::sharing::"),
    ("lib", "transport::verbs::gpu::"),
    ("suite", "all_reduce::"),
    ("suite", "collectives::"),
    ("suite", "reproducible::"),
    ("suite", "failures::"),
    ("suite", "fault_matrix::"),
    ("suite", "allocations::"),
    ("suite", "resource_leaks::"),
]
# Those of --short: the transport contract, links that calls make, a fault of every kind, forks, GPU memory, all-reduce, and what errors say.
SHORT_BINARIES = [
    ("lib", "transport::verbs::tests::contract::"),
    ("lib", "transport::verbs::tests::on_demand::"),
    ("lib", "transport::verbs::tests::faults::"),
    ("lib", "transport::verbs::tests::forks::a_few"),
    ("lib", "transport::verbs::tests::forks::forked_children"),
    ("lib", "transport::verbs::gpu::tests::"),
    ("suite", "all_reduce::results_are_correct_around_every_subchunk_length"),
    ("suite", "collectives::results_are_correct_over_rdma"),
    ("suite", "failures::different_calls_are_disagreements"),
    ("suite", "failures::a_rank_that_leaves_early"),
    ("suite", "failures::processes_that_use_rdma"),
]
# The worlds that tests/suite tests in the machine (tests/suite/harness).
WORLDS = "WORLDS=verbs"
# With --short, fewer cases of the tests that run many.
SHORT_EFFORT = "FLEXRING_TEST_EFFORT=0.2"
# Seconds that the tests of one filter may take together.
FILTER_LIMIT = 480


class Late(BaseException):
    """All tests together take too long. It is not an Exception, so that no scenario takes it for a failure of its own."""


class Lost(Exception):
    """A machine that cannot be used for the next scenario."""


class TestTimes:
    """Measures the tests of a Rust test binary from its output, which names a test when it starts."""

    def __init__(self):
        self.text = ""
        self.starts = []

    def sink(self, printed):
        self.text += printed.decode(errors="replace")
        names = re.findall(r"^test (\S+)(?: - should panic)? \.\.\. ", self.text, re.M)
        for name in names[len(self.starts):]:
            self.starts.append((name, time.monotonic()))

    def seconds(self):
        """Seconds by test, up to the start of the next one."""
        ends = [start for _, start in self.starts[1:]] + [time.monotonic()]
        return {name: round(end - start, 1) for (name, start), end in zip(self.starts, ends)}


def build(features):
    """Builds the test binaries and the command. Returns their paths by name."""
    # Packages with the features that `make test-rust` gives them, so that its build serves here too.
    packages = ["flexring", "flexring-cli", "flexring-ffi", "flexring-c"]
    command = ["cargo", "test", *(argument for package in packages for argument in ("-p", package))]
    command += ["--no-run", "--message-format=json", "--lib", "--test", "suite"]
    command += ["--features", features] if features else []
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if built.returncode:
        sys.exit(built.returncode)  # the compiler has printed its errors
    wanted = {("lib", "flexring"): "lib", ("test", "suite"): "suite", ("bin", "flexring"): "flexring"}
    programs = {}
    for message in map(json.loads, built.stdout.splitlines()):
        if message["reason"] == "compiler-artifact" and message["executable"]:
            # The C library has the name of the command, too.
            name = wanted.get((message["target"]["kind"][0], message["target"]["name"]))
            if name:
                programs[name] = message["executable"]
    return programs


def files(programs):
    """The files that a machine needs to run the test binaries."""
    return [f"{programs[name]}=/usr/bin/{name}" for name in ("lib", "suite")] + [programs["flexring"]]


def run_binaries(machine, binaries, report, effort=""):
    """Runs the tests of each filter in one machine."""
    for binary, wanted in binaries:
        output = machine.run(f"{binary} {wanted} --list --format terse", 30).output
        tests = listed(output)
        names = [name for name in tests if report.wanted(f"{binary}::{name}")]
        if not tests:
            report.add(f"{binary}::{wanted}", FAILED, f"no test has a name with this\n{output}")
        if not names:
            continue
        times = TestTimes()
        command = f"{binary} {' '.join(names)} --exact --test-threads=1 --show-output"
        code, printed = machine.start(f"RUST_BACKTRACE=1 {WORLDS} {effort} {command}", times.sink).wait(FILTER_LIMIT)
        seconds = times.seconds()
        report.add_binary(f"{binary}::", names, printed, f"{binary} ended with status {code}", seconds=seconds)


def in_one(programs, report):
    """Runs the test binaries in one machine."""
    with vm.boot(1, scenarios.RAILS, files(programs)) as (machine,):
        run_binaries(machine, BINARIES, report)


def in_two(programs, report):
    """Runs the scenarios between two machines. When a machine is lost, both are booted again."""
    pending = [scenario for scenario in scenarios.ALL if report.wanted(f"scenarios::{scenario.__name__}")]
    while pending:
        with contextlib.suppress(Lost), vm.boot(2, scenarios.CARDS, [programs["flexring"]]) as machines:
            while pending:
                perform(pending.pop(0), machines, report)


def short(programs, report):
    """Boots two machines once. Runs the essential tests in the first, and the short scenarios between both."""
    pending = [scenario for scenario in scenarios.SHORT if report.wanted(f"scenarios::{scenario.__name__}")]
    with vm.boot(2, scenarios.CARDS, files(programs)) as machines:
        run_binaries(machines[0], SHORT_BINARIES, report, SHORT_EFFORT)
        with contextlib.suppress(Lost):
            while pending:
                perform(pending.pop(0), machines, report)
    for scenario in pending:
        report.add(f"scenarios::{scenario.__name__}", FAILED, "did not run: a machine was lost")


def perform(scenario, machines, report):
    """Runs a scenario and restores the machines."""
    name = f"scenarios::{scenario.__name__}"
    started = time.monotonic()
    outcome, message = OK, ""
    try:
        scenario(machines)
    except scenarios.Skipped as why:
        outcome, message = SKIPPED, str(why)
    except (scenarios.Failed, vm.Failure) as why:
        outcome, message = FAILED, str(why)
    except Exception:
        outcome, message = FAILED, traceback.format_exc()
    report.add(name, outcome, message, round(time.monotonic() - started, 1))
    try:
        for machine in machines:
            scenarios.restore(machine)
    except (scenarios.Failed, vm.Failure) as why:
        raise Lost from why


def main():
    parser = argparse.ArgumentParser(description="Runs flexring's RDMA tests in virtual machines.")
    parser.add_argument("--short", action="store_true", help="run the tests of CI only")
    parser.add_argument("--features", default="", help="cargo features to build with")
    parser.add_argument("--time", type=int, default=2400, help="seconds that all tests may take (2400)")
    parser.add_argument("names", nargs="*", metavar="NAME", help="run the tests whose names contain one of these")
    options = parser.parse_args()
    vm.end_on_signals()
    report = Report(options.names)
    try:
        vm.image()
    except vm.Impossible as why:
        print(f"skipped: {why}")
        return
    except vm.Failure as why:
        sys.exit(str(why))
    programs = build(options.features)

    def late(*_):
        raise Late(f"not done after {options.time} s")

    started = time.monotonic()
    signal.signal(signal.SIGALRM, late)
    signal.alarm(options.time)
    try:
        for part in (short,) if options.short else (in_one, in_two):
            try:
                part(programs, report)
            except vm.Failure as why:
                report.add(part.__name__, FAILED, str(why))
    except Late as why:
        report.add("all", FAILED, str(why))
    signal.alarm(0)
    print("slowest: " + ", ".join(f"{name} {seconds} s" for seconds, name in report.slowest()))
    counts = f"{report.count(OK)} passed, {report.count(FAILED)} failed, {report.count(SKIPPED)} skipped"
    print(f"{counts} in {time.monotonic() - started:.0f} s")
    sys.exit(report.exit_status())


if __name__ == "__main__":
    main()
