#!/usr/bin/env python3
"""Starts the ranks of a job as processes of mpirun, on this machine or, inside bench/lab.sh, on its nodes.

    mpi_launch.py PYTHON JSON

The arguments are the interpreter for ranks.py and what it takes. Becomes mpirun.
"""

import ctypes
import json
import os
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(BENCH), str(BENCH / "versus")]

import lab
from peers import LEASH, OpenMpi, Place

LIBRARY = "libmpi.so.40"


def open_mpi():
    return OpenMpi("Open MPI", "#d95f02", "PEER_MPI")


def missing():
    """Why ranks cannot be started, or None."""
    if not open_mpi().launcher:
        return "not installed: openmpi-bin"
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return f"cannot load Open MPI: {error}"
    return None


def main():
    python, options = sys.argv[1:]
    # Without a lab all ranks are on this machine.
    nodes = json.loads(options)["nodes"]
    place = Place(len(nodes), "lab", nodes) if lab.NODES else Place(len(nodes), "shm")
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = lab.master(place.nodes)
    [(command, _)] = open_mpi().launch(place, [*LEASH, python, Path(__file__).with_name("ranks.py"), options])
    command = [str(word) for word in command]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
