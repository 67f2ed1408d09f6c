#!/usr/bin/env python3
"""Counts the instructions of the hot paths under callgrind and compares them with baseline.json beside this file.

    bench/gate/gate.py             fails if a count differs from the committed one by more than 3 %
    bench/gate/gate.py --update    writes the counts of this run to baseline.json

Explain a difference in the message of the commit that has the new counts. Counts depend on the compiler and the C library,
too: after a change of these, run the commit before it with --update first. hot_paths.rs says what is counted. Needs valgrind;
installs gungraun-runner in target/gungraun.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BASELINE = HERE / "baseline.json"
# Largest difference that needs no explanation.
TOLERANCE = 0.03


def output_of(*command):
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def tools():
    """What the counts depend on apart from flexring."""
    return {
        "machine": platform.machine(),
        "rustc": output_of("rustc", "--version"),
        "libc": " ".join(platform.libc_ver()),
        "valgrind": output_of("valgrind", "--version"),
    }


def runner(cargo):
    """The program that runs callgrind, of the version that Cargo.lock has of the library. Installed if it is missing."""
    lock = (ROOT / "Cargo.lock").read_text()
    version = re.search(r'name = "gungraun"\nversion = "([^"]+)"', lock)[1]
    folder = ROOT / "target" / "gungraun"
    program = folder / "bin" / "gungraun-runner"
    installed = program.exists() and version in output_of(program, "--version")
    if not installed:
        print(f"installing gungraun-runner {version} in {folder.relative_to(ROOT)}", flush=True)
        command = [cargo, "install", "--quiet", "--locked", "--root", folder, "gungraun-runner", "--version", version]
        subprocess.run(command, cwd=ROOT, check=True)
    return program


def measure(cargo):
    """The instructions of each hot path, by name."""
    environment = {**os.environ, "GUNGRAUN_RUNNER": str(runner(cargo))}
    command = [cargo, "bench", "--quiet", "--locked", "-p", "flexring-gate", "--", "--output-format=json"]
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if run.returncode != 0:
        sys.exit(f"error: the hot paths could not be counted: {' '.join(command)} ended with {run.returncode}")
    counts = {}
    for line in filter(str.strip, run.stdout.splitlines()):
        summary = json.loads(line)
        events = summary["profiles"][0]["data"]["total"]["metrics"]
        counts[f"{summary['function_name']}.{summary['id']}"] = events["Ir"]["values"]["new"]
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the counts of this run to baseline.json")
    arguments = parser.parse_args()
    if shutil.which("valgrind") is None:
        sys.exit("error: there is no valgrind, which counts instructions (as root: apt-get install valgrind)")
    counts, here = measure(os.environ.get("CARGO", "cargo")), tools()
    if arguments.update:
        date = datetime.date.today().isoformat()
        BASELINE.write_text(json.dumps({"date": date, "tools": here, "instructions": counts}, indent=2) + "\n")
        print(f"wrote {len(counts)} counts to {BASELINE.relative_to(ROOT)}")
        return
    baseline = json.loads(BASELINE.read_text())
    expected = baseline["instructions"]
    failed = sorted(set(counts) ^ set(expected))
    print(f"{'instructions':<32} {baseline['date']:>12} {'now':>12} {'change':>9}")
    for name in [*expected, *(name for name in counts if name not in expected)]:
        before, now = expected.get(name), counts.get(name)
        change = f"{now / before - 1:+9.2%}" if before and now else "{:>9}".format("missing" if before else "new")
        print(f"{name:<32} {before or '-':>12} {now or '-':>12} {change}")
        if before and now and abs(now / before - 1) > TOLERANCE:
            failed.append(name)
    differ = [f"{tool} {there} -> {here[tool]}" for tool, there in baseline["tools"].items() if there != here[tool]]
    if differ:
        print(f"other tools than those of the committed counts: {', '.join(differ)}")
    if failed:
        sys.exit(
            f"error: more than {TOLERANCE:.0%} from the committed counts: {', '.join(failed)}\n"
            "commit the new counts (bench/gate/gate.py --update), and explain the change in the commit's message"
        )


if __name__ == "__main__":
    main()
