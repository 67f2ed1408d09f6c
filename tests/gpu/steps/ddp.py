"""Step `ddp`: PyTorch's DistributedDataParallel on CUDA tensors over flexring, with `t.cpu()` after each call."""

import sys

from .session import HERE, Cell, free_port

SECONDS = 120
QUESTION = "Does training with blocking calls between the collectives end, and with the right sums?"


def cells(_session):
    return [
        Cell(f"module loading {mode}, connections {connections or 'unset'}", 45, measured(mode, connections))
        for connections in (None, "1")
        for mode in ("LAZY", "EAGER")
    ]


def measured(mode, connections):
    def measure(session):
        session.torch()
        port = str(free_port())
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        shared |= {"CUDA_MODULE_LOADING": mode, "CUDA_DEVICE_MAX_CONNECTIONS": connections}
        command = [sys.executable, HERE / "cells" / "training.py"]
        return session.ranks(command, lambda rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})[0]

    return measure


def words(rows):
    for name, result in rows:
        yield f"{name}: {result['calls']} calls with a copy to the host after each, {result['call_ms']:.3f} ms each"
        yield f"  {result['steps']} steps of training, {result['step_ms']:.2f} ms each; loss {result['loss'][0]:.4f} to {result['loss'][1]:.4f}"
