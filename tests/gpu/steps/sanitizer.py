"""Step `sanitizer`: two ranks under compute-sanitizer. Over shm kernels run the calls, and over tcp the host does."""

import os
import re
import shutil
from pathlib import Path

from .session import Cell, Failed, Skipped

SECONDS = 120
QUESTION = "Does compute-sanitizer find an access out of bounds, or a race in shared memory?"


def cells(_session):
    reason = "simulated: its driver checks all accesses"
    runs = [("memcheck", "shm", ""), ("racecheck", "shm", "--graph 2"), ("memcheck", "tcp", "")]
    return [Cell(f"{tool}, {transport}", 40, measured(tool, transport, flags), reason) for tool, transport, flags in runs]


def sanitizer():
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [shutil.which("compute-sanitizer")]
    places += [Path(home, folder, "compute-sanitizer") for home in homes if home for folder in ("bin", "compute-sanitizer")]
    return next((place for place in places if place and Path(place).exists()), None)


def measured(tool, transport, more):
    def measure(session):
        found = sanitizer()
        if not found:
            raise Skipped("there is no compute-sanitizer")
        flags = f"--ranks 2 -b 8 -e 512K -f 256 -n 2 -w 1 -d bfloat16 --transport {transport} {more}".split()
        command = [found, "--tool", tool, "--target-processes", "all", "--error-exitcode", "9"]
        out = session.run([*command, session.place.programs["flexring"], "perf", "--device", "cuda", *flags])
        summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", out)
        if any(int(number) for number in summaries):
            raise Failed(out[-3000:])
        return {"processes": len(summaries)}

    return measure


def words(rows):
    for name, result in rows:
        yield f"{name}: no error in {result['processes']} processes"
