"""Helpers shared by the benchmark scripts."""

import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLEXRING = ROOT / "target/release/flexring"


def run(command, **kwargs):
    return subprocess.run([str(argument) for argument in command], check=True, text=True, stdout=subprocess.PIPE, **kwargs).stdout


def need_flexring():
    if not FLEXRING.exists():
        sys.exit(f"{FLEXRING} does not exist: run cargo build --release")


def exit_on_signals():
    """Makes the script end on these signals as on an error, so that what it started is removed. Further ones do not disturb that."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def leave(number, _):
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in numbers:
        signal.signal(number, leave)


def commit():
    """The commit of this checkout, with -dirty if files differ from it."""
    return run(["git", "-C", ROOT, "describe", "--always", "--dirty"]).strip()


def in_order(peers, number):
    """Another library comes first in each round."""
    first = number % max(1, len(peers))
    return peers[first:] + peers[:first]


def words(text):
    """The words of an option that are separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def build_ompi(folder):
    """Compiles the Open MPI benchmark into `folder` and returns its path."""
    program = Path(folder) / "ompi_allreduce"
    run(["mpicc", "-O2", ROOT / "bench/peers/ompi_allreduce.c", "-o", program])
    return program


def python_with(module):
    """A Python interpreter that has the module, or None. /usr/bin/python3 is tried too, because it has Debian's packages."""
    find = f"import importlib.util as util; exit(not util.find_spec('{module}'))"
    here = (python for python in ("python3", "/usr/bin/python3") if shutil.which(python))
    return next((python for python in here if subprocess.run([python, "-c", find]).returncode == 0), None)


def write(path, benchmark, results):
    """Writes `results` as JSON, with the date, the processor and the kernel."""
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    report = {
        "date": datetime.date.today().isoformat(),
        "what": benchmark,
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release().split("-")[0],
        "load_at_end": os.getloadavg()[0],
        "results": results,
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(report, indent=1) + "\n")
