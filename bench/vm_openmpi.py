"""Open MPI over UCX between two test machines: what they need for it, and how a program is started in both."""

import json
import shlex
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "peers" / "ompi_allreduce.c"
# The port at which the second machine runs what it is sent, as nothing like ssh is there.
PORT = 7000
# Components of Open MPI that use libraries of other networks and launchers, and are not needed.
UNUSED = ("ofi", "psm", "psm2", "slurm", "tm", "sge", "gridengine", "lsf", "portals", "hcoll", "fca", "ompio", "romio")
SETTINGS = {
    "pml": "ucx", "pml_ucx_tls": "any", "pml_ucx_devices": "any", "btl": "self", "plm": "rsh", "plm_rsh_agent": "/usr/bin/vm_rsh",
    "plm_rsh_no_tree_spawn": "1", "orte_leave_session_attached": "1", "oob_tcp_if_include": "eth2",
}
# One rail. UCX finds the address of a datagram in its header as Mellanox's adapters report it, and drops those from IPv4 on others,
# so the address is that at index 0, an IPv6 one.
ENVIRONMENT = {"UCX_TLS": "rc_v,self", "UCX_NET_DEVICES": "rxe0:1", "UCX_IB_GID_INDEX": "0"}


def missing():
    """Why Open MPI over UCX cannot be used here, or None."""
    for program in ("mpicc.openmpi", "mpirun.openmpi", "orted"):
        if not shutil.which(program):
            return f"{program} is not installed (openmpi-bin libopenmpi-dev)"
    if not list(components("mca_pml_ucx.so")):
        return "this Open MPI has no UCX"
    return None


def components(pattern):
    return Path("/usr/lib").glob(f"*/openmpi/lib/openmpi*/{pattern}")


def files(folder):
    """The files that the machines need, as `FILE=PLACE`. Builds the program in this folder."""
    program, agent = Path(folder) / "ompi_allreduce", Path(folder) / "vm_rsh"
    subprocess.run(["mpicc.openmpi", "-O2", SOURCE, "-o", program], check=True)
    # Called as ssh is: a host, and the words of a command.
    agent.write_text(f'#!/bin/sh\nhost=$1\nshift\necho "$*" | nc "$host" {PORT}\n')
    agent.chmod(0o755)
    commands = [f"{shutil.which(name)}=/usr/bin/{place}" for name, place in (("mpirun.openmpi", "mpirun"), ("orted", "orted"))]
    plugins = [file for file in components("mca_*.so") if not any(f"_{name}." in file.name for name in UNUSED)]
    plugins += Path("/usr/lib").glob("*/pmix2/lib/pmix/*.so")
    plugins += Path("/usr/lib").glob("*/ucx/libuct_ib.so.0")
    plugins += Path("/usr/lib").glob("*/pmix2/lib/libpmix.so*")
    return [str(program), str(agent), *commands, *(f"{file}={file}" for file in plugins)]


def listen(machine):
    """Has the second machine run what the first one sends."""
    return machine.start(f"nc -ll -p {PORT} -e sh")


def all_reduce(machine, hosts, size, iterations, timeout):
    """Times all-reduces between these hosts, started in the first one's machine. Returns the mean time in microseconds."""
    words = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-np", len(hosts), "--host", ",".join(hosts)]
    for name, value in SETTINGS.items():
        words += ["--mca", name, value]
    for name, value in ENVIRONMENT.items():
        words += ["-x", f"{name}={value}"]
    words += ["ompi_allreduce", size, iterations, max(1, iterations // 10), "in"]
    code, printed = machine.run(shlex.join(map(str, words)), timeout)
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if code or not lines:
        raise SystemExit(f"Open MPI, {size} bytes: exit status {code}\n{printed}")
    result = json.loads(lines[-1])
    if result["wrong"]:
        raise SystemExit(f"Open MPI, {size} bytes: {result['wrong']} wrong sums")
    return result["back_to_back_us"]
