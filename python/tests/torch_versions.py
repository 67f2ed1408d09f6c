"""Runs torch_checks.py with versions of torch from PyPI, each in an environment of its own, and writes docs/pytorch.md's table.

    python3 torch_versions.py --wheel FILE [--discard] [VERSION...]

``--wheel`` is flexring's wheel, which is installed in each environment. Environments are kept in target/torch: 5 GB for each
version. With ``--discard`` each is removed after its checks. FLEXRING_BLESS=1 writes the table, of the versions that are named,
into docs/pytorch.md.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
PAGE = ROOT / "docs" / "pytorch.md"
BEGIN, END = "<!-- begin: FLEXRING_BLESS=1 make test-torch -->\n", "<!-- end -->\n"
# The oldest version that has the backend, one with FSDP2's own collectives, and the newest on PyPI.
VERSIONS = ["2.8.0", "2.11.0", "2.15.0"]


def environment(version, wheel):
    """The interpreter of an environment with this torch and the wheel."""
    folder = TARGET / "torch" / version
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet"]
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([*pip, "--no-cache-dir", f"torch=={version}", "numpy"], check=True)
        (folder / "complete").touch()
    subprocess.run([*pip, "--no-deps", "--force-reinstall", wheel], check=True)
    return python


def examples_pass(python, environment):
    """Runs the training examples over the backend: each one compares its losses with Gloo's."""
    passed = True
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4"]
    for strategy in ("ddp", "fsdp2"):
        for name, steps in (("train_digits", 100), ("train_gpt", 3)):
            command = [ROOT / f"examples/{name}.py", "--strategy", strategy, "--steps", str(steps)]
            passed &= subprocess.run([*torchrun, *command], cwd=TARGET, env=environment).returncode == 0
    # Two uneven nodes; skipped without root.
    command = [ROOT / "examples/two_nodes.sh", ROOT / "examples/train_gpt.py", "--steps", "3"]
    passed &= subprocess.run(command, cwd=TARGET, env={**environment, "PYTHON": str(python)}).returncode == 0
    return passed


def cell(results):
    """What a check showed with all numbers of ranks."""
    states = {state for state, _ in results.values()}
    if "failed" in states:
        return "**failed**"
    if "refused" in states:
        return "refused"
    # Times differ between runs.
    notes = {"flexring" if text.endswith(" ms") else text for _, text in results.values()}
    return ", ".join(sorted(notes))


def table(reports):
    yield f"| check | {' | '.join(report['torch'].split('+')[0] for report in reports)} |\n"
    yield f"|---|{'---|' * len(reports)}\n"
    for name in reports[-1]["rows"]:
        yield f"| {name.replace('_', ' ')} | {' | '.join(cell(report['rows'][name]) for report in reports)} |\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", required=True, type=Path)
    parser.add_argument("--discard", action="store_true", help="remove each environment after its checks")
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    options = parser.parse_args()
    reports, failed = [], False
    for version in options.versions:
        try:
            python = environment(version, options.wheel)
        except subprocess.CalledProcessError:
            print(f"skipped: torch {version}: pip cannot install it")
            continue
        report = TARGET / "torch" / f"{version}.json"
        # torch finds the backend by itself from 2.14 on.
        before = {} if tuple(map(int, version.split(".")[:2])) >= (2, 14) else {"CHECK_IMPORT": "1"}
        command = [python, Path(__file__).with_name("torch_checks.py"), "--json", report]
        failed |= subprocess.run(command, cwd=TARGET, env={**os.environ, **before}).returncode != 0
        failed |= not examples_pass(python, {**os.environ, "OMP_NUM_THREADS": "1"})
        reports.append(json.loads(report.read_text()))
        if options.discard:
            shutil.rmtree(TARGET / "torch" / version)
    if reports:
        lines = "".join(table(reports))
        print(lines)
        if os.environ.get("FLEXRING_BLESS") == "1":
            text = PAGE.read_text()
            start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
            PAGE.write_text(text[:start] + lines + text[end:])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
