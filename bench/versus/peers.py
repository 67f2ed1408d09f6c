"""The libraries that `make versus` compares: which are here, how each is built, and how its ranks are started.

All run the loop of bench/peers/allreduce.c, and print its lines of JSON.
"""

import os
import shutil
import subprocess
from pathlib import Path

from common import ROOT, run

LOOP = ROOT / "bench/peers/allreduce.c"
LIBRARY = ROOT / "target/release/libflexring.a"
# Ends a process when the one that started it ends in any way.
LEASH = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


class Peer:
    """A library with one kind of memory, which is one column of the tables."""

    def __init__(self, name, colour, memory="heap", transports=("shm", "tcp")):
        self.name, self.colour, self.memory, self.transports = name, colour, memory, transports

    def missing(self):
        """Why it cannot run here, or None."""
        return None

    def build(self, folder):
        """Compiles what it needs into `folder`."""

    def commands(self, ranks, transport, arguments):
        """The commands to start, each with its environment. The first one prints the results."""
        raise NotImplementedError


class Flexring(Peer):
    def missing(self):
        if not shutil.which("cc"):
            return "no C compiler"
        return None if LIBRARY.exists() else f"{LIBRARY} does not exist: run cargo build --release"

    def build(self, folder):
        self.program = Path(folder) / "flexring"
        if not self.program.exists():
            run(["cc", "-O2", "-DPEER_FLEXRING", f"-I{ROOT}/include", LOOP, LIBRARY, "-lpthread", "-ldl", "-lm", "-o", self.program])

    def commands(self, ranks, transport, arguments):
        environment = {"FLEXRING_WORLD_SIZE": str(ranks), "FLEXRING_MASTER_ADDR": "127.0.0.1", "FLEXRING_MASTER_PORT": "29600",
                       "FLEXRING_TRANSPORT": transport, "FLEXRING_SOCKET_IFNAME": "lo"}
        command = [*LEASH, self.program, self.memory, *arguments]
        return [(command, {**environment, "FLEXRING_RANK": str(rank)}) for rank in range(ranks)]


class Mpi(Peer):
    """A program over an MPI library. `define` chooses its all-reduce."""

    def __init__(self, name, colour, define, compilers, launchers, package, **rest):
        super().__init__(name, colour, **rest)
        self.define, self.package = define, package
        self.compiler = next(filter(shutil.which, compilers), None)
        self.launcher = next(filter(shutil.which, launchers), None)

    def missing(self):
        if not self.compiler or not self.launcher:
            return f"not installed: {self.package}"
        try:
            run([self.compiler, "-E", "-x", "c", "-"], input="#include <mpi.h>\n", stderr=subprocess.DEVNULL)
        except subprocess.CalledProcessError:
            return f"no mpi.h: install {self.package}"
        return None

    def build(self, folder):
        self.program = Path(folder) / f"{self.define}-{self.compiler}"
        run([self.compiler, "-O2", f"-D{self.define}", LOOP, "-o", self.program])


class OpenMpi(Mpi):
    def __init__(self, name, colour, define):
        super().__init__(name, colour, define, ["mpicc.openmpi", "mpicc"], ["mpirun.openmpi", "mpirun"], "libopenmpi-dev openmpi-bin")

    def commands(self, ranks, transport, arguments):
        options = ["--mca", "pml", "ob1", "--mca", "btl", "self,vader" if transport == "shm" else "self,tcp"]
        if transport == "tcp":
            options += ["--mca", "btl_tcp_if_include", "lo"]
        launch = [self.launcher, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", ranks, *options]
        return [([*LEASH, *launch, *LEASH, self.program, self.memory, *arguments], {})]


class Mpich(Mpi):
    def __init__(self, name, colour):
        super().__init__(name, colour, "PEER_MPI", ["mpicc.mpich"], ["mpiexec.mpich", "mpiexec.hydra"], "libmpich-dev mpich")

    def commands(self, ranks, transport, arguments):
        environment = {} if transport == "shm" else {"MPIR_CVAR_NOLOCAL": "1", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"}
        return [([*LEASH, self.launcher, "-n", ranks, *LEASH, self.program, self.memory, *arguments], environment)]


class Gloo(Peer):
    """Gloo has no other transport than TCP here, and is shown beside the shared memory of the others, too."""

    def missing(self):
        find = "import importlib.util as util; exit(not util.find_spec('torch'))"
        here = (python for python in ("python3", "/usr/bin/python3") if shutil.which(python))
        self.python = next((python for python in here if subprocess.run([python, "-c", find]).returncode == 0), None)
        return None if self.python else "not installed: python3-torch"

    def commands(self, ranks, transport, arguments):
        environment = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29700", "GLOO_SOCKET_IFNAME": "lo",
                       "OMP_NUM_THREADS": "1"}
        command = [*LEASH, self.python, ROOT / "bench/peers/gloo_loop.py", self.memory, *arguments]
        return [(command, {**environment, "RANK": str(rank)}) for rank in range(ranks)]


def all_peers():
    """flexring first, with which the others are compared."""
    return [
        Flexring("flexring, pool memory", "#1b7bb8", memory="pool"),
        Flexring("flexring, ordinary memory", "#7fb8de"),
        OpenMpi("Open MPI", "#d95f02", "PEER_MPI"),
        Mpich("MPICH", "#e6ab02"),
        OpenMpi("Baidu's ring", "#66a61e", "PEER_BAIDU"),
        Gloo("Gloo", "#7570b3"),
    ]


def elsewhere():
    """Libraries that this command does not run, with the reason."""
    gpu = "run bench/peers/nccl_allreduce.py on this machine" if os.path.exists("/dev/nvidia0") else "no GPU"
    return {"NCCL": gpu, "UCX": "needs RDMA devices: bench/verbs.py compares with perftest in virtual machines"}
