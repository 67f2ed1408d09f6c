"""Memory for the tensors that torch asks a backend for: other ranks of the node read it, so calls on it copy less.

Owns the blocks that wait for the next tensor of their size. A new block costs more than most calls on it, because the kernel
makes its pages and clears them, and FSDP2 asks for the same sizes in each step. Must not know what the tensors are for.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from typing import Any

import torch

from .communicator import Communicator

# How many blocks wait for a tensor. Others are freed, the one that has waited longest first.
_MOST_IDLE = 32


class Blocks:
    """Blocks of a communicator's memory, each of which belongs to one tensor or waits for one. Any thread may free a tensor, also
    within a method of this class, so there is no lock: each step on the queue is atomic."""

    def __init__(self) -> None:
        self._idle: collections.deque[Any] = collections.deque(maxlen=_MOST_IDLE)
        self._closed = False

    def tensor(self, comm: Communicator, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of ``count`` elements, whose values are undefined."""
        size = count * torch.empty(0, dtype=dtype).element_size()
        if size == 0:
            return torch.empty(count, dtype=dtype)
        block = self._take(size)
        if block is None:
            block = comm.alloc_bytes(size)
        # The tensor and its views keep this object, and nothing else does.
        view = memoryview(block)
        weakref.finalize(view, self._give, block).atexit = False
        return torch.frombuffer(view, dtype=dtype)

    def _take(self, size: int) -> Any:
        for block in list(self._idle):
            if len(block) == size:
                # Another thread may have taken it.
                with contextlib.suppress(ValueError):
                    self._idle.remove(block)
                    return block
        return None

    def _give(self, block: Any) -> None:
        if not self._closed:
            self._idle.append(block)

    def close(self) -> None:
        """Frees the blocks that wait, and later each other one with its tensor."""
        self._closed = True
        self._idle.clear()
