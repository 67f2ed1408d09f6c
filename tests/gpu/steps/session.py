"""What a cell of first contact may use: the programs, processes with a time limit, and the outcomes other than a result."""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from programs import ROOT

HERE = ROOT / "tests/gpu"

SIMULATED = "simulated: only flexring's kernels run there"


class Failed(Exception):
    """A program failed."""


class Hung(Exception):
    """A program was killed at its time limit."""


class Skipped(Exception):
    """Something is missing on this machine."""


@dataclasses.dataclass
class Cell:
    """One result of a step. `measure` gets a session and returns plain data within `limit` seconds."""

    name: str
    limit: float
    measure: Callable
    # Why it cannot run on the simulated driver, if so.
    real_only: str = ""


class Session:
    """Runs programs for one cell after the other."""

    def __init__(self, place, processes):
        self.place, self.processes = place, processes
        self.simulated = place.simulated
        self.deadline = 0.0
        # For what one cell makes and later ones use; removed at the end.
        self.kept = tempfile.TemporaryDirectory()
        self.folder = Path(self.kept.name)
        self.service = contextlib.ExitStack()
        self.service_env = None

    def begin(self, seconds):
        self.deadline = time.monotonic() + seconds

    def left(self):
        return max(self.deadline - time.monotonic(), 0.1)

    def run(self, command, env=None):
        """Runs a program until the cell's time is over. Returns its standard output."""
        name = " ".join(Path(str(word)).name for word in command[:3])
        begun = time.monotonic()
        status, out, err = self.processes.run(command, self.left(), {**self.place.env, **(env or {})})
        said = (err or out).strip()[-3000:]
        if status is None:
            raise Hung(f"{name} was killed after {time.monotonic() - begun:.0f} s; it printed: {out[-1000:]}\n{said}")
        if status != 0:
            raise Failed(f"{name} ended with status {status}: {said}")
        return out

    def lines(self, command, env=None):
        """The lines of JSON that a program prints."""
        return [json.loads(line) for line in self.run(command, env).splitlines() if line.startswith("{")]

    def cell(self, program, *arguments, env=None):
        """The result of a program of the folder `cells`."""
        return self.lines([sys.executable, HERE / "cells" / program, *arguments], env)[0]

    def perf(self, flags, env=None):
        """The JSON report of `flexring perf`."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "report.json"
            self.run([self.place.programs["flexring"], "perf", *flags.split(), "--json", path], env)
            return json.loads(path.read_text())

    def perf_of_nodes(self, flags, env=None):
        """The report of two ranks, each of which is a node of its own."""
        variables = rank_variables(free_port(), 2)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "report.json"
            command = [self.place.programs["flexring"], "perf", *flags.split(), "--json", path]
            self.ranks(command, lambda rank: {**variables(rank), "FLEXRING_NODE": f"node{rank}", **(env or {})})
            return json.loads(path.read_text())

    def ranks(self, command, env, world=2):
        """Runs a program as `world` ranks; `env` gives the variables of a rank. Returns what rank 0 printed as lines of JSON."""
        with concurrent.futures.ThreadPoolExecutor(world) as pool:
            runs = [pool.submit(self.lines, command, env(rank)) for rank in range(world)]
            failures = [failure for failure in (run.exception() for run in runs) if failure]
            if failures:
                # The rank that failed explains why the other one hung.
                raise next((failure for failure in failures if not isinstance(failure, Hung)), failures[0])
            return runs[0].result()

    def torch(self):
        """Skips the cell if there is no PyTorch that can use a GPU."""
        try:
            out = self.run([sys.executable, "-c", "import torch; print(torch.cuda.is_available())"])
        except Failed:
            out = ""
        if out.strip() != "True":
            raise Skipped("no PyTorch with CUDA")

    @contextlib.contextmanager
    def mps(self):
        """CUDA's multi-process service for the programs of a cell. Gives the environment of its clients. It runs until `end_mps`, or
        until a cell fails: its client may have broken it."""
        if self.service_env is None:
            self.service_env = self.service.enter_context(self.started_mps())
        try:
            yield self.service_env
        except BaseException:
            self.end_mps()
            raise

    def end_mps(self):
        self.service_env = None
        self.service.close()

    @contextlib.contextmanager
    def started_mps(self):
        program = shutil.which("nvidia-cuda-mps-control")
        if self.simulated or not program:
            raise Skipped("there is no nvidia-cuda-mps-control")
        with tempfile.TemporaryDirectory() as folder:
            env = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
            for path in env.values():
                os.mkdir(path)
            with self.processes.background([program, "-f"], env):
                control = Path(env["CUDA_MPS_PIPE_DIRECTORY"], "control")
                until = time.monotonic() + 5
                while not control.exists() and time.monotonic() < until:
                    time.sleep(0.05)
                if not control.exists():
                    log = Path(env["CUDA_MPS_LOG_DIRECTORY"], "control.log")
                    said = log.read_text()[-500:] if log.exists() else ""
                    raise Skipped(f"nvidia-cuda-mps-control did not start within 5 s: {said}")
                try:
                    yield env
                finally:
                    # Its server may be a process of another group, which only this ends.
                    self.processes.run(["sh", "-c", f"echo quit | {program}"], 5, env)


def rank_variables(port, world):
    """The variables of flexring's ranks in processes on the first GPU."""

    def env(rank):
        identity = {"FLEXRING_RANK": str(rank), "FLEXRING_WORLD_SIZE": str(world), "FLEXRING_GPU": "0"}
        return identity | {"FLEXRING_MASTER_ADDR": "127.0.0.1", "FLEXRING_MASTER_PORT": str(port)}

    return env


def free_port():
    """A TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
