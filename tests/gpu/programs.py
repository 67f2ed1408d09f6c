"""The processes of the tests and measurements on GPUs, and where their programs are."""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# The programs of a bundle; a checkout has no such folder.
BUNDLED = ROOT / "bin"

# Seconds that a killed process has to end. One whose driver call hangs in the system's kernel never does.
LEAVE = 10


class Processes:
    """The processes that were started and may still run."""

    def __init__(self):
        self.lock = threading.Lock()
        self.running = set()
        self.ended = False
        atexit.register(self.end)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: sys.exit(128 + number))

    def end(self):
        with self.lock:
            self.ended = True
            for group in self.running:
                self.kill(group)

    @staticmethod
    def kill(group):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def run(self, command, limit, env=None, cwd=None):
        """Runs a command in a process group of its own, which is killed at the limit. Returns its exit status, or None if it
        was killed, standard output and standard error. A variable whose value is None is unset."""
        environment = {**os.environ, **(env or {})}
        environment = {name: value for name, value in environment.items() if value is not None}
        with self.lock:
            if self.ended:
                return None, "", "ended"
            child = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environment,
                cwd=cwd,
                start_new_session=True,
            )
            self.running.add(child.pid)
        late = False
        try:
            out, err = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            late = True
            self.kill(child.pid)
            try:
                out, err = child.communicate(timeout=LEAVE)
            except subprocess.TimeoutExpired as unfinished:
                pieces = (unfinished.stdout or b"", unfinished.stderr or b"")
                out, err = (piece.decode(errors="replace") for piece in pieces)
                err += f"\nprocess {child.pid} did not end within {LEAVE} s after it was killed"
        # Kill the processes that it started and left behind.
        self.kill(child.pid)
        with self.lock:
            self.running.discard(child.pid)
        return (None if late else child.returncode), out, err


    @contextlib.contextmanager
    def background(self, command, env=None):
        """A process that runs meanwhile, and is killed at the end."""
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        child = subprocess.Popen(command, env={**os.environ, **(env or {})}, start_new_session=True, **quiet)
        with self.lock:
            self.running.add(child.pid)
        try:
            yield child
        finally:
            self.kill(child.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(LEAVE)
            with self.lock:
                self.running.discard(child.pid)


class Place:
    """The paths of the programs, and the environment for them. `benches`: whether those of bench/ are needed."""

    def __init__(self, simulated, features="", benches=False):
        self.simulated = simulated
        if BUNDLED.is_dir():
            self.programs = {path.name: path for path in BUNDLED.iterdir()}
            self.library = ROOT / "lib" / "libflexring.so"
        else:
            self.programs, self.library = build(benches, features)
        self.env = {"FLEXRING_LIBRARY": str(self.library), "PYTHONPATH": str(ROOT / "python")}
        self.env["PYTHONDONTWRITEBYTECODE"] = "1"
        # The ranks of a test are on one machine; a machine of many interfaces has slow ones.
        self.env["FLEXRING_SOCKET_IFNAME"] = os.environ.get("FLEXRING_SOCKET_IFNAME", "lo")
        if simulated:
            folder = simulated_driver()
            paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
            self.env["LD_LIBRARY_PATH"] = ":".join(filter(None, paths))

    def test_env(self):
        env = {**self.env, "WORLDS": "gpu", "COMMAND": str(self.programs["flexring"]), "RUST_BACKTRACE": "1"}
        # Tests set their own settings, and the command warns about variables that it does not know.
        del env["FLEXRING_SOCKET_IFNAME"], env["FLEXRING_LIBRARY"]
        return env


def target():
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))


def simulated_driver():
    # Where tests/suite builds it.
    folder = target() / "tmp/simulated-cuda"
    built = subprocess.run([ROOT / "tests/gpu/driver/build.sh", folder], stdout=subprocess.PIPE, text=True)
    if built.returncode:
        sys.exit("cannot build the simulated driver")
    return folder


def build(benches, features):
    """Builds the test binaries, the command and the library, with `benches` also those of bench/ and a release build. Returns their paths."""
    cargo = os.environ.get("CARGO", "cargo")
    programs = {}
    # Packages with the features that `make test-rust` gives them, so that its build serves here too.
    packages = ["flexring", "flexring-cli", "flexring-ffi", "flexring-c"]
    chosen = [argument for package in packages for argument in ("-p", package)]
    tests = ["test", *chosen, "--no-run", "--lib", "--bins", "--test", "suite"]
    wanted = [[*tests, "--features", features] if features else tests]
    if benches:
        wanted = [["build", "--release"], *wanted, ["bench", "--no-run", "--bench", "gpu_latency", "--bench", "gpu_replays"]]
    for arguments in wanted:
        built = subprocess.run([cargo, *arguments, "--message-format=json"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if built.returncode:
            sys.exit(built.returncode)  # the compiler has printed its errors
        for message in map(json.loads, built.stdout.splitlines()):
            if message["reason"] != "compiler-artifact" or not message["executable"]:
                continue
            # Unit tests have the name of what they test.
            if message["profile"]["test"] and message["target"]["kind"] not in (["test"], ["bench"]):
                continue
            # The first of each name: the tests build the command again.
            programs.setdefault(message["target"]["name"], Path(message["executable"]))
    # The tests' library is beside them, as tests/suite/programs expects it.
    folder = target() / "release" if benches else programs["suite"].parent
    return programs, folder / "libflexring.so"
