"""Runs one rank of gloo_allreduce.py in each of the given network namespaces.

    gloo_ranks.py NAMESPACE... -- BYTES ITERATIONS WARMUP [--each]

The ranks are forked from one process that has loaded torch, because loading it takes longer than a few all-reduces. They
exit without unloading it.
"""

import ctypes
import os
import signal
import sys
import traceback

import gloo_allreduce

CLONE_NEWNET = 0x40000000


def rank(number, namespace):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.open(f"/run/netns/{namespace}", os.O_RDONLY), CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.environ["RANK"] = str(number)
    gloo_allreduce.main()
    sys.stdout.flush()


def main():
    split = sys.argv.index("--")
    namespaces, sys.argv[1:] = sys.argv[1:split], sys.argv[split + 1 :]
    os.environ["WORLD_SIZE"] = str(len(namespaces))
    running = set()
    for number, namespace in enumerate(namespaces):
        if (pid := os.fork()) == 0:
            try:
                rank(number, namespace)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        running.add(pid)
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status:
            for other in running:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


main()
