"""The libraries that `make versus` compares: which are here, how each is built, and how its ranks are started.

All run the loop of bench/peers/allreduce.c, and print its lines of JSON.
"""

import os
import shlex
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import lab
from common import ROOT, python_with, run

LOOP = ROOT / "bench/peers/allreduce.c"
LIBRARY = ROOT / "target/release/libflexring.a"
# Starts a command on a node of the lab for MPI's launchers.
LAUNCH = ROOT / "bench/peers/netns_rsh.sh"
# Ends a process when the one that started it ends in any way.
LEASH = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


class Place:
    """Where ranks run: `ranks` on this machine over shared memory ("shm") or loopback ("tcp"), or on the nodes of the lab ("lab")."""

    def __init__(self, ranks, transport, nodes=(), topology=None):
        self.ranks, self.transport = ranks, transport
        # For the lab: the node of each rank, and flexring's short form if links differ.
        self.nodes, self.topology = nodes, topology

    def slots(self):
        """The nodes' names with the number of their ranks, as MPI's launchers want them."""
        return ",".join(f"{lab.NODES[node]}:{ranks}" for node, ranks in sorted(Counter(self.nodes).items()))

    def launched(self, command, environment):
        """An MPI launcher as one command. In the lab it runs on the node of rank 0."""
        if not self.nodes:
            return [([*LEASH, *command], environment)]
        return [([LAUNCH, lab.NODES[self.nodes[0]], "exec " + shlex.join(str(word) for word in command)], environment)]


class Peer:
    """A library with one kind of memory, which is one column of the tables."""

    def __init__(self, name, colour, memory="heap", transports=("shm", "tcp", "lab"), dtypes=("f32",)):
        self.name, self.colour, self.memory, self.transports, self.dtypes = name, colour, memory, transports, dtypes

    def missing(self):
        """Why it cannot run here, or None."""
        return None

    def build(self, folder):
        """Compiles what it needs into `folder`, unless that was done before."""

    def commands(self, place, dtype, arguments):
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

    def commands(self, place, dtype, arguments):
        address, port = lab.master(place.nodes)
        environment = {"FLEXRING_WORLD_SIZE": str(place.ranks), "FLEXRING_MASTER_ADDR": address, "FLEXRING_MASTER_PORT": port}
        if place.transport != "lab":
            environment |= {"FLEXRING_TRANSPORT": place.transport, "FLEXRING_SOCKET_IFNAME": "lo"}
        if place.topology:
            environment["FLEXRING_TOPOLOGY"] = place.topology
        commands = []
        for rank in range(place.ranks):
            inside = lab.inside(place.nodes[rank]) if place.nodes else []
            command = [*inside, *LEASH, self.program, self.memory, dtype, *arguments]
            commands.append((command, {**environment, "FLEXRING_RANK": str(rank)}))
        return commands


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
        if not self.program.exists():
            run([self.compiler, "-O2", f"-D{self.define}", LOOP, "-o", self.program])

    def loop(self, dtype, arguments):
        return [*LEASH, self.program, self.memory, dtype, *arguments]


class OpenMpi(Mpi):
    def __init__(self, name, colour, define):
        super().__init__(name, colour, define, ["mpicc.openmpi", "mpicc"], ["mpirun.openmpi", "mpirun"], "libopenmpi-dev openmpi-bin")

    def commands(self, place, dtype, arguments):
        return self.launch(place, self.loop(dtype, arguments))

    def launch(self, place, program):
        """The command that starts the ranks of any program."""
        btl = {"shm": "self,vader", "tcp": "self,tcp", "lab": "self,vader,tcp"}[place.transport]
        settings = {"pml": "ob1", "btl": btl}
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", place.ranks]
        if place.transport == "tcp":
            settings["btl_tcp_if_include"] = "lo"
        if place.nodes:
            settings |= {"plm_rsh_agent": LAUNCH, "plm_rsh_no_tree_spawn": 1, "orte_leave_session_attached": 1,
                         "oob_tcp_if_include": lab.SUBNET, "btl_tcp_if_include": lab.SUBNET}
            options += ["--host", place.slots()]
        for name, value in settings.items():
            options += ["--mca", name, value]
        return place.launched([self.launcher, *options, *program], {})


class Mpich(Mpi):
    """MPICH with UCX, as Debian builds it. Within a node it has a shared memory of its own, so UCX is for TCP alone."""

    def __init__(self, name, colour):
        super().__init__(name, colour, "PEER_MPI", ["mpicc.mpich"], ["mpiexec.mpich", "mpiexec.hydra"], "libmpich-dev mpich")

    def commands(self, place, dtype, arguments):
        environment, options = {}, ["-n", place.ranks]
        if place.transport != "shm":
            environment = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "up0" if place.nodes else "lo"}
        if place.transport == "tcp":
            environment["MPIR_CVAR_NOLOCAL"] = "1"
        if place.nodes:
            options += ["-launcher", "ssh", "-launcher-exec", LAUNCH, "-iface", "up0", "-hosts", place.slots()]
        return place.launched([self.launcher, *options, *self.loop(dtype, arguments)], environment)


class Gloo(Peer):
    def missing(self):
        self.python = python_with("torch")
        return None if self.python else "not installed: python3-torch"

    def commands(self, place, dtype, arguments):
        address, port = lab.master(place.nodes)
        environment = {"MASTER_ADDR": address, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "up0" if place.nodes else "lo",
                       "OMP_NUM_THREADS": "1"}
        ranks = [lab.NODES[node] for node in place.nodes] or [place.ranks]
        command = [*LEASH, self.python, ROOT / "bench/peers/gloo_loop.py", *ranks, "--", dtype, *arguments]
        return [(command, environment)]


def all_peers():
    """flexring first, with which the others are compared."""
    return [
        Flexring("flexring, pool memory", "#1b7bb8", memory="pool", transports=("shm", "tcp"), dtypes=("f32", "bf16")),
        Flexring("flexring, ordinary memory", "#7fb8de", dtypes=("f32", "bf16")),
        OpenMpi("Open MPI", "#d95f02", "PEER_MPI"),
        Mpich("MPICH", "#e6ab02"),
        OpenMpi("Baidu's ring", "#66a61e", "PEER_BAIDU"),
        # Gloo has no other transport than TCP here; torch 1.13's has no bf16.
        Gloo("Gloo", "#7570b3", transports=("tcp", "lab")),
    ]


def present(folder, names):
    """Those of the named libraries that are here, built, and why each of the others is not."""
    here, skipped = [], elsewhere()
    for peer in all_peers():
        if peer.name not in names:
            continue
        if reason := peer.missing():
            skipped[peer.name] = reason
        else:
            peer.build(folder)
            here.append(peer)
    return here, skipped


def elsewhere():
    """Libraries that this command does not run, with the reason."""
    gpu = "run bench/peers/nccl_allreduce.py on this machine" if os.path.exists("/dev/nvidia0") else "no GPU"
    return {"NCCL": gpu, "UCX": "needs RDMA devices: make bench-verbs measures it in virtual machines"}
