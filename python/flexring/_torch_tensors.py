"""Tensors and reductions of c10d as flexring takes them: numbers that are reduced, bytes that are copied.

Must not know communicators.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from ._vector import Op, dtype_name, premul_sum

_OPERATIONS: dict[str, Op] = {
    "SUM": "sum",
    "PRODUCT": "prod",
    "MIN": "min",
    "MAX": "max",
    "AVG": "avg",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}
# Operations on bool, by those on the bytes 0 and 1.
_ON_BOOL: dict[str, Op] = {
    "SUM": "max",
    "MAX": "max",
    "BOR": "max",
    "PRODUCT": "min",
    "MIN": "min",
    "BAND": "min",
    "BXOR": "bxor",
}
_NOT_COMPLEX = ("prod", "min", "max", "band", "bor", "bxor")


@functools.lru_cache(maxsize=None)
def _named(kind: Any, dtype: torch.dtype) -> Op | None:
    """What flexring calls a kind of operation on elements of this type, if it has it."""
    return (_ON_BOOL if dtype == torch.bool else _OPERATIONS).get(kind.name)


def reduction(op: Any, dtype: torch.dtype) -> Op:
    """What flexring calls an operation of c10d on elements of this type."""
    # A ReduceOp, or the kind that it has.
    kind = getattr(op, "op", op)
    found = _named(kind, dtype)
    if found is not None:
        return found
    if kind.name == "PREMUL_SUM" and dtype != torch.bool:
        made = premul_sum(float(op.__getstate__()[1]))
        made.check(dtype_name(dtype))
        return made
    raise RuntimeError(
        f"flexring has no reduction {kind.name} of {dtype}: fix: use one of {', '.join(_OPERATIONS)}, or a group of another backend "
        'for this call: torch.distributed.new_group(backend="gloo")'
    )


class Staging:
    """Stand-ins for the tensors of a call that are not vectors: those with strides, also in another memory format, and those
    whose address is no multiple of their elements' size. Stand-ins have the elements in logical order, because ranks may use different
    strides."""

    def __init__(self) -> None:
        # Pairs of a stand-in and its tensor.
        self._sources: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._targets: list[tuple[torch.Tensor, torch.Tensor]] = []

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """The vector that a call reads."""
        return self._stand_in(tensor, reads=True, writes=False)

    def target(self, tensor: torch.Tensor) -> torch.Tensor:
        """The vector that a call writes."""
        return self._stand_in(tensor, reads=False, writes=True)

    def both(self, tensor: torch.Tensor) -> torch.Tensor:
        """The vector that a call reads and writes."""
        return self._stand_in(tensor, reads=True, writes=True)

    def _stand_in(self, tensor: torch.Tensor, reads: bool, writes: bool) -> torch.Tensor:
        if tensor.layout != torch.strided:
            raise TypeError(f"the tensor is {tensor.layout}, but this call takes dense tensors only: fix: use its .to_dense()")
        if tensor.is_contiguous() and tensor.data_ptr() % tensor.element_size() == 0:
            return tensor
        if writes and any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride())):
            raise ValueError("elements of the tensor share memory, as those of .expand() do: fix: use its .contiguous()")
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if reads:
            self._sources.append((made, tensor))
        if writes:
            self._targets.append((made, tensor))
        return made

    def stand_ins(self) -> list[torch.Tensor]:
        return [made for made, _ in (*self._sources, *self._targets)]

    def fill(self) -> None:
        """Before the call."""
        for made, tensor in self._sources:
            made.copy_(tensor)

    def write_back(self) -> None:
        """After the call."""
        for made, tensor in self._targets:
            tensor.copy_(made)


def numbers(tensor: torch.Tensor, op: Op) -> torch.Tensor:
    """The tensor's elements as numbers that flexring reduces: bool as bytes."""
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8)
    if tensor.is_complex() and op in _NOT_COMPLEX:
        raise RuntimeError(f"complex numbers have no reduction {op!r}: fix: use SUM or AVG")
    return tensor


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a vector that is only copied, so that every type can be."""
    return tensor.reshape(-1).view(torch.uint8)


def split(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copies a vector to the parts that it consists of."""
    for part, block in zip(parts, whole.split([part.numel() for part in parts])):
        part.copy_(block)


def bytes_of_rows(tensor: torch.Tensor, rows: Sequence[int]) -> list[int] | None:
    """The lengths in bytes of blocks of rows; None if they are equal, which c10d describes by an empty list."""
    row = tensor.element_size() * math.prod(tensor.shape[1:])
    return [count * row for count in rows] or None
