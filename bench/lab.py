"""Starts bench/lab.sh, and measurements inside it. Nodes are identified by index; `places` is the node of each rank."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time

from common import FLEXRING

NODES = os.environ.get("LAB_NODES", "").split()
ADDRESSES = os.environ.get("LAB_ADDRESSES", "").split()
SUBNET = "198.18.0.0/24"


class Failure(Exception):
    """A measurement failed or exceeded its time limit. `printed` is what its first process printed before."""

    def __init__(self, reason, printed=""):
        super().__init__(reason)
        self.printed = printed


def missing(*tools):
    """Why there can be no network namespaces, or no measurements with these tools in them. None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [tool for tool in ("ip", "tc", "unshare", *tools) if not shutil.which(tool)]
    return f"not installed: {', '.join(lacking)}" if lacking else None


def supervised(command, limit, **environment):
    """Runs a command, such as bench/lab.sh, and returns what it printed. After `limit` seconds, or when this script is interrupted, its
    processes get SIGTERM, so that it removes what it made.

    They are a process group of their own, so that a Ctrl-C comes to this script first and to them only from here.
    """
    command = [str(argument) for argument in command]
    group = subprocess.Popen(command, env={**os.environ, **environment}, text=True, stdout=subprocess.PIPE, start_new_session=True)
    reason = printed = None
    try:
        printed, _ = group.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        reason = f"not done after {limit:.0f} s"
    finally:
        if group.poll() is None:
            os.killpg(group.pid, signal.SIGTERM)
            try:
                group.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(group.pid, signal.SIGKILL)
    if reason:
        # What was printed before.
        with contextlib.suppress(subprocess.TimeoutExpired):
            printed, _ = group.communicate(timeout=5)
    elif group.returncode:
        reason = f"{os.path.basename(command[0])} ended with status {group.returncode}"
    if reason:
        raise Failure(reason, printed or "")
    return printed


def master(places=()):
    """An address of rank 0 and a port that is free there. Without places the ranks are on this machine."""
    if places:
        return ADDRESSES[places[0]], "29400"
    with socket.create_server(("127.0.0.1", 0)) as server:
        return "127.0.0.1", str(server.getsockname()[1])


def inside(node):
    """The prefix of a command that runs it on `node`."""
    return ["ip", "netns", "exec", NODES[node]]


def kill_all():
    """Kills all processes on the nodes. The namespaces belong to this lab, so all of them were started by it."""
    for node in NODES:
        pids = subprocess.run(["ip", "netns", "pids", node], text=True, stdout=subprocess.PIPE).stdout.split()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)


def together(commands, limit, meanwhile=lambda: None):
    """Runs `commands`, pairs of a command and its environment, in parallel. Returns the output of the first one.

    Kills all of them if one fails or `limit` seconds pass. Calls `meanwhile` 20 times a second.
    """
    processes = []
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+", errors="replace") as errors:
        def fail(reason):
            errors.seek(0)
            printed.seek(0)
            raise Failure("\n".join([reason, *errors.read().splitlines()[-10:]]), printed.read())

        try:
            for command, environment in commands:
                out = subprocess.DEVNULL if processes else printed
                arguments = [str(argument) for argument in command]
                processes.append(subprocess.Popen(arguments, env={**os.environ, **environment}, stdout=out, stderr=errors))
            deadline = time.monotonic() + limit
            while None in (states := [process.poll() for process in processes]):
                if any(states):
                    break
                if time.monotonic() > deadline:
                    fail(f"not done after {limit:.0f} s")
                meanwhile()
                time.sleep(0.05)
            if any(states):
                number = next(number for number, state in enumerate(states) if state)
                fail(f"process {number} of {len(states)} ended with status {states[number]}")
            printed.seek(0)
            return printed.read()
        finally:
            # mpirun ends its ranks on SIGTERM.
            for process in processes:
                process.terminate()
            grace_end = time.monotonic() + 5
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0, grace_end - time.monotonic()))
            kill_all()
            for process in processes:
                process.kill()
                process.wait()


def iperf3(sender, receiver, seconds):
    """The throughput of iperf3 from one node to another, in bits per second."""
    server = subprocess.Popen([*inside(receiver), "iperf3", "-s"], stdout=subprocess.DEVNULL)
    # Omit the first second, in which TCP adapts its rate.
    command = [*inside(sender), "iperf3", "-c", ADDRESSES[receiver], "-O", "1", "-t", str(seconds), "-J"]
    try:
        # Retry: the server may not listen yet, and a client may exit with status 0 without a result.
        deadline = time.monotonic() + 4 * seconds
        while time.monotonic() < deadline:
            output = subprocess.run(command, text=True, stdout=subprocess.PIPE, timeout=seconds + 20).stdout
            with contextlib.suppress(KeyError, ValueError):
                return json.loads(output)["end"]["sum_received"]["bits_per_second"]
            time.sleep(0.1)
        raise Failure(f"iperf3: {output[-400:]}")
    finally:
        server.kill()
        server.wait()


def set_rate(node, mbit):
    """Changes the rate of both ends of a node's link, in Mbit/s."""
    lab = NODES[node].rsplit("-", 1)[0]
    for namespace, device in ((NODES[node], "up0"), (f"{lab}-switch", f"port{node}")):
        shape = ["tc", "qdisc", "change", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", "burst", str(max(32768, 262 * mbit)), "latency", "100ms"]
        subprocess.run(["ip", "netns", "exec", namespace, *shape], check=True)


def flexring(places, arguments, limit, **settings):
    """Runs `flexring perf` and returns its first row. Ranks in different network namespaces count as different nodes."""
    return report(places, arguments, limit, **settings)["rows"][0]


def report(places, arguments, limit, on_row=lambda rows: None, program=FLEXRING, **settings):
    """Runs `flexring perf` and returns its report. `on_row` gets the number of rows that are done, 20 times a second."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        def look():
            # The report is replaced as a whole, but is empty at first.
            with contextlib.suppress(ValueError, OSError):
                on_row(len(json.load(open(file.name))["rows"]))

        job(places, ["perf", *arguments], limit, ["--json", file.name], look, program, **settings)
        return json.load(open(file.name))


def job(places, arguments, limit, of_rank_0=(), meanwhile=lambda: None, program=FLEXRING, **settings):
    """Runs the command flexring with `arguments` as a job, whose rank 0 has further ones, and returns what that printed."""
    address, port = master(places)
    world = {
        "FLEXRING_WORLD_SIZE": str(len(places)),
        "FLEXRING_MASTER_ADDR": address,
        "FLEXRING_MASTER_PORT": port,
        **settings,
    }
    commands = []
    for rank, place in enumerate(places):
        command = [*inside(place), program, *arguments, *([] if rank else of_rank_0)]
        commands.append((command, {**world, "FLEXRING_RANK": str(rank)}))
    return together(commands, limit, meanwhile)
