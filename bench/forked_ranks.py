"""Starts the ranks of a job of torch.distributed as forks of one process that has loaded torch.

Loading torch takes longer than many measurements, and a fork needs none of that time. MASTER_ADDR and MASTER_PORT are those of torch.distributed.
"""

import ctypes
import os
import signal
import sys
import traceback

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1


def start(places, function):
    """Runs `function()` in as many forks as there are `places`: network namespaces, or None for this one. Sets RANK and WORLD_SIZE.

    A fork ends with this process. If one fails, the others are killed and this process exits with status 1.
    """
    os.environ["WORLD_SIZE"] = str(len(places))
    sys.stdout.flush()
    running = set()
    for rank, namespace in enumerate(places):
        if (pid := os.fork()) == 0:
            os.environ["RANK"] = str(rank)
            run_and_exit(lambda: (_enter(namespace), function()))
        running.add(pid)
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status:
            for other in running:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


def run_and_exit(function):
    """Runs the function of a rank and ends the process, without unloading torch. The exit status is 1 if it fails."""
    status = 0
    try:
        function()
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _enter(namespace):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if namespace and libc.setns(os.open(f"/run/netns/{namespace}", os.O_RDONLY), CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
