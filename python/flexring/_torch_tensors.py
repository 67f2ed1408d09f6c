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


def numbers(tensor: torch.Tensor, op: Op) -> torch.Tensor:
    """The tensor's elements as numbers that flexring reduces: bool as bytes."""
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8)
    if tensor.is_complex() and op in _NOT_COMPLEX:
        raise RuntimeError(f"complex numbers have no reduction {op!r}: fix: use SUM or AVG")
    return tensor


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor that is only copied, so that every type can be."""
    if tensor.layout != torch.strided:
        raise TypeError(f"the tensor is {tensor.layout}, but flexring copies dense tensors only: fix: use its .to_dense()")
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous: fix: use its .contiguous() and copy the result back")
    return tensor.reshape(-1).view(torch.uint8)


def split(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copies a vector to the parts that it consists of."""
    for part, block in zip(parts, whole.split([part.numel() for part in parts])):
        part.copy_(block)


def bytes_of_rows(tensor: torch.Tensor, rows: Sequence[int]) -> list[int] | None:
    """The lengths in bytes of blocks of rows; None if they are equal, which c10d describes by an empty list."""
    row = tensor.element_size() * math.prod(tensor.shape[1:])
    return [count * row for count in rows] or None
