"""The report of a test run: which tests are selected, their outcomes, and the output of Rust test binaries.

tests/gpu/run and tests/vm/run.py use it. Must not know how tests are run.
"""

import re
import threading

# Outcomes of a test.
OK, FAILED, SKIPPED = "ok", "FAILED", "skipped"
# Lines at the end of a failed test's message that are printed; the first one is printed too.
MESSAGE_LINES = 60


class Report:
    """The outcomes of all tests, printed as they arrive. Threads may share it."""

    def __init__(self, names=()):
        """Selects the tests whose names contain one of `names`; without names, all tests."""
        self.names = names
        self.lock = threading.Lock()
        self.results = []

    def wanted(self, name):
        """Whether the test of this name is selected."""
        return not self.names or any(part in name for part in self.names)

    def add(self, name, outcome, message="", seconds=None):
        """Adds and prints an outcome. `message` is the reason for skipping, or the output of a failed test."""
        message = message.strip()
        with self.lock:
            self.results.append({"name": name, "outcome": outcome, "message": message, "seconds": seconds})
            reason = f": {message.splitlines()[0]}" if outcome == SKIPPED and message else ""
            print(f"test {name} ... {outcome}{reason}", flush=True)
            if outcome == FAILED:
                lines = message.splitlines()
                if len(lines) > MESSAGE_LINES:
                    lines = [lines[0], "...", *lines[-MESSAGE_LINES:]]
                print("".join(f"    {line}\n" for line in lines), end="", flush=True)

    def named(self, outcome):
        """The names of the tests with this outcome, in the order in which they ended."""
        return [result["name"] for result in self.results if result["outcome"] == outcome]

    def count(self, outcome):
        return len(self.named(outcome))

    def slowest(self, most=10):
        """The slowest tests of known duration, as (seconds, name)."""
        timed = [(result["seconds"], result["name"]) for result in self.results if result["seconds"] is not None]
        return sorted(timed, reverse=True)[:most]

    def exit_status(self):
        """1 if a test failed, or if there was none."""
        return 1 if self.count(FAILED) or not self.results else 0

    def add_binary(self, prefix, names, printed, ending, details="", seconds=None):
        """Adds the outcomes of the tests `names` of a Rust test binary that printed this and ended as described by `ending`.

        `prefix` is put before the names. Tests that are missing in the output have failed; `details` is added to messages
        of failed tests.
        """
        seen = set()
        for name, outcome, message in outcomes(printed):
            seen.add(name)
            if outcome == FAILED:
                message = "\n".join(filter(None, (message.strip(), details, ending)))
            self.add(prefix + name, outcome, message, (seconds or {}).get(name))
        for name in names:
            if name not in seen:
                self.add(prefix + name, FAILED, "\n".join(filter(None, (details, f"did not run: {ending}"))))


def listed(printed):
    """The names of tests in the output of a Rust test binary with `--list --format terse`."""
    return re.findall(r"^(\S+): test$", printed, re.M)


def outcomes(printed):
    """The tests in the output of a Rust test binary with `--show-output`, as (name, outcome, message)."""
    sections = dict(re.findall(r"^---- (\S+) stdout ----\n(.*?)(?=\n---- |\n\n\w|\Z)", printed, re.M | re.S))
    for name, rest in re.findall(r"^test (\S+)(?: - should panic)? \.\.\. (.*?)(?=^test |\Z)", printed, re.M | re.S):
        skipped = re.search(r"^skipped: (.*)", sections.get(name, ""), re.M)
        if skipped or rest.startswith("ignored"):
            yield name, SKIPPED, skipped[1] if skipped else rest.splitlines()[0]
        elif re.search(r"^ok$", rest, re.M):  # log lines of the test's threads may come before it
            yield name, OK, ""
        else:
            # A test that ended the process has no section of its own.
            yield name, FAILED, sections.get(name, rest)
