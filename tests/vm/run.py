#!/usr/bin/env python3
"""Runs flexring's tests where there is RDMA: test binaries in one virtual machine, and scenarios between two.

    tests/vm/run.py [--features LIST] [--time SECONDS] [NAME]...

With names, only tests are run whose names contain one of them. Says that it is skipped where there can be no such machine.
"""

import argparse
import contextlib
import json
import re
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import scenarios
import vm

ROOT = Path(__file__).resolve().parent.parent.parent

# The tests for one machine: of a test binary ("lib" has the library's units) those whose names contain a filter.
BINARIES = [
    ("lib", "transport::verbs::tests"),
    ("lib", "transport::verbs::gpu"),
    ("all_reduce", ""),
    ("collectives", ""),
    ("reproducible", ""),
    ("failures", ""),
    ("allocations", ""),
    ("lives", ""),
]
# What those binaries are told: which worlds to test.
WORLDS = "WORLDS=verbs"
# Seconds that all tests of one binary may take together.
BINARY_LIMIT = 480


class Late(BaseException):
    """All tests together take too long; no scenario may take it for a failure of its own."""


class Lost(Exception):
    """A machine that cannot serve the next scenario."""


class Report:
    """What became of the tests, told as they end."""

    def __init__(self, names):
        self.names = names
        self.counts = {"ok": 0, "FAILED": 0, "skipped": 0}

    def wanted(self, name):
        return not self.names or any(part in name for part in self.names)

    def add(self, name, outcome, words=""):
        self.counts[outcome] += 1
        print(f"test {name} ... {outcome}" + (f": {words}" if outcome == "skipped" else ""), flush=True)
        if outcome == "FAILED":
            print("".join(f"    {line}\n" for line in words.strip().splitlines()), end="", flush=True)

    def close(self):
        counts = self.counts
        skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
        print(f"{counts['ok']} passed, {counts['FAILED']} failed{skipped}")
        return 1 if counts["FAILED"] or not counts["ok"] + counts["skipped"] else 0


def build(features):
    """Builds the test binaries and the command, and returns where each is."""
    command = ["cargo", "test", "--no-run", "--message-format=json", "--lib"]
    command += [word for name, _ in BINARIES if name != "lib" for word in ("--test", name)]
    command += ["--features", features] if features else []
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if built.returncode:
        sys.exit(built.returncode)  # the compiler has said why
    programs = {}
    for message in map(json.loads, built.stdout.splitlines()):
        if message["reason"] == "compiler-artifact" and message["executable"]:
            kinds = message["target"]["kind"]
            programs["lib" if "lib" in kinds else message["target"]["name"]] = message["executable"]
    return programs


def tests_of(printed):
    """The tests that a test binary tells of, with outcome and words."""
    sections = dict(re.findall(r"^---- (\S+) stdout ----\n(.*?)(?=\n---- |\n\n\w|\Z)", printed, re.M | re.S))
    for name, rest in re.findall(r"^test (\S+)(?: - should panic)? \.\.\. (.*?)(?=^test |\Z)", printed, re.M | re.S):
        skipped = re.search(r"^skipped: (.*)", sections.get(name, ""), re.M)
        if skipped or rest.startswith("ignored"):
            yield name, "skipped", skipped[1] if skipped else rest.splitlines()[0]
        elif re.search(r"^ok$", rest, re.M):  # after whatever threads of the test have logged
            yield name, "ok", ""
        else:
            # One that took the process down has no section of its own.
            yield name, "FAILED", sections.get(name, rest)


def in_one(programs, report):
    """The test binaries, in one machine."""
    add = [f"{programs[name]}=/usr/bin/{name}" for name, _ in BINARIES] + [programs["flexring"]]
    with vm.boot(1, scenarios.RAILS, add) as (machine,):
        for binary, wanted in BINARIES:
            listed = machine.run(f"{binary} {wanted} --list --format terse", 30)
            tests = re.findall(r"^(\S+): test$", listed.output, re.M)
            names = [name for name in tests if report.wanted(f"{binary}::{name}")]
            if not tests:
                report.add(f"{binary}::{wanted}", "FAILED", f"no test is called so\n{listed.output}")
            if not names:
                continue
            command = f"{binary} {' '.join(names)} --exact --test-threads=1 --show-output"
            code, printed = machine.run(f"RUST_BACKTRACE=1 {WORLDS} {command}", BINARY_LIMIT)
            seen = set()
            for name, outcome, words in tests_of(printed):
                seen.add(name)
                report.add(f"{binary}::{name}", outcome, words.strip() or f"{binary} ended with status {code}")
            for name in set(names) - seen:
                report.add(f"{binary}::{name}", "FAILED", f"did not run: {binary} ended with status {code}")


def in_two(programs, report):
    """The scenarios, between two machines, which are booted anew once one of them is lost."""
    todo = [scenario for scenario in scenarios.ALL if report.wanted(f"scenarios::{scenario.__name__}")]
    while todo:
        with contextlib.suppress(Lost), vm.boot(2, scenarios.CARDS, [programs["flexring"]]) as machines:
            while todo:
                perform(todo.pop(0), machines, report)


def perform(scenario, machines, report):
    name = f"scenarios::{scenario.__name__}"
    try:
        scenario(machines)
        report.add(name, "ok")
    except scenarios.Skipped as why:
        report.add(name, "skipped", str(why))
    except (scenarios.Failed, vm.Failure) as why:
        report.add(name, "FAILED", str(why))
    except Exception:
        report.add(name, "FAILED", traceback.format_exc())
    try:
        for machine in machines:
            scenarios.tidy(machine)
    except (scenarios.Failed, vm.Failure) as why:
        raise Lost from why


def main():
    parser = argparse.ArgumentParser(description="Runs flexring's tests where there is RDMA.")
    parser.add_argument("--features", default="", help="cargo features to build with")
    parser.add_argument("--time", type=int, default=1500, help="seconds that all tests may take (1500)")
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

    signal.signal(signal.SIGALRM, late)
    signal.alarm(options.time)
    try:
        for part in (in_one, in_two):
            try:
                part(programs, report)
            except vm.Failure as why:
                report.add(part.__name__, "FAILED", str(why))
    except Late as why:
        report.add("all", "FAILED", str(why))
    signal.alarm(0)
    sys.exit(report.close())


if __name__ == "__main__":
    main()
