"""Step `sanitizer`: two ranks under compute-sanitizer's memcheck."""

import os
import re
import shutil
from pathlib import Path

from .session import Cell, Failed, Skipped

SECONDS = 120
QUESTION = "Does compute-sanitizer find an access out of bounds?"


def cells(_session):
    reason = "simulated: its driver checks all accesses"
    return [Cell(f"memcheck, {transport}", 60, measured(transport), reason) for transport in ("shm", "tcp")]


def sanitizer():
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [shutil.which("compute-sanitizer")]
    places += [Path(home, folder, "compute-sanitizer") for home in homes if home for folder in ("bin", "compute-sanitizer")]
    return next((place for place in places if place and Path(place).exists()), None)


def measured(transport):
    def measure(session):
        found = sanitizer()
        if not found:
            raise Skipped("there is no compute-sanitizer")
        flags = f"--ranks 2 -b 8 -e 512K -f 256 -n 2 -w 1 -d bfloat16 --transport {transport}".split()
        command = [found, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9"]
        out = session.run([*command, session.place.programs["flexring"], "perf", "--device", "cuda", *flags])
        summaries = re.findall(r"ERROR SUMMARY: (\d+)", out)
        if any(int(number) for number in summaries):
            raise Failed(out[-3000:])
        return {"processes": len(summaries)}

    return measure


def words(rows):
    for name, result in rows:
        yield f"{name}: no error in {result['processes']} processes"
