"""Step `ddp`: PyTorch on CUDA tensors over flexring: the backend, and DistributedDataParallel with `t.cpu()` after each call."""

import sys

from .session import HERE, Cell, free_port

SECONDS = 265
QUESTION = "Do the backend and training, with blocking calls between the collectives, end with the right sums?"


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "FLEXRING_LOG": "debug"}


def cells(_session):
    return [
        Cell("backend", 60, measured("backend.py", "LAZY", None)),
        Cell("expandable segments", 45, measured("expandable.py", "LAZY", None, EXPANDABLE)),
        *training(),
    ]


def training():
    return [
        Cell(f"module loading {mode}, connections {connections or 'unset'}", 45, measured("training.py", mode, connections))
        for connections in (None, "1")
        for mode in ("LAZY", "EAGER")
    ]


def measured(program, mode, connections, settings=None):
    def measure(session):
        session.torch()
        port = str(free_port())
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        shared |= {"CUDA_MODULE_LOADING": mode, "CUDA_DEVICE_MAX_CONNECTIONS": connections}
        shared |= settings or {}
        command = [sys.executable, HERE / "cells" / program]
        return session.ranks(command, lambda rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})[0]

    return measure


def words(rows):
    for name, result in rows:
        if "expandable_calls" in result:
            times = ", ".join(f"{key.removesuffix('_ms')} {value:.3f} ms" for key, value in result.items() if key.endswith("_ms"))
            yield f"{name}: all-reduces by their number of elements: {times}"
            continue
        if "collectives" in result:
            yield (
                f"{name}: {result['collectives']} collectives on CUDA tensors, {result['replays']} launches of graphs, "
                f"torch {result['torch']}"
            )
            yield f"  training, {result['steps']} steps: DDP {result['ddp_step_ms']:.2f} ms each, FSDP2 {result['fsdp2_step_ms']:.2f} ms"
            continue
        yield f"{name}: {result['calls']} calls with a copy to the host after each, {result['call_ms']:.3f} ms each"
        yield f"  {result['steps']} steps of training, {result['step_ms']:.2f} ms each; loss {result['loss'][0]:.4f} to {result['loss'][1]:.4f}"
