"""Arrays that flexring makes: of numpy where it is installed, else of ctypes.

Must not know communicators. bfloat16 and the float8 types are numpy's with the package ml_dtypes, which JAX brings along.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any

from ._dlpack import exported, is_exporter
from ._vector import SIZES, dtype_name

_CTYPES = {
    "int8": ctypes.c_int8,
    "uint8": ctypes.c_uint8,
    "int16": ctypes.c_int16,
    "uint16": ctypes.c_uint16,
    "bool": ctypes.c_bool,
    "int32": ctypes.c_int32,
    "uint32": ctypes.c_uint32,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
}


def array_in(block: Any, shape: tuple[int, ...], name: str) -> Any:
    """An array in a block of bytes."""
    try:
        import numpy
    except ImportError:
        return _ctypes_array(block, shape, name)
    return numpy.ndarray(shape, _numpy_type(name), block)


def _numpy_type(name: str) -> Any:
    import numpy

    try:
        return numpy.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(
            f"numpy has no {name}: fix: install ml_dtypes, or use flexring.torch.alloc, which makes tensors of this type"
        ) from None
    return numpy.dtype(getattr(ml_dtypes, name))


def _ctypes_array(block: Any, shape: tuple[int, ...], name: str) -> Any:
    kind: Any = _CTYPES.get(name)
    if kind is None:
        raise TypeError(f"without numpy there are no arrays of {name}")
    for extent in reversed(shape):
        kind = kind * extent
    return kind.from_buffer(block)


def in_place(vector: Any) -> Any:
    """What a call without ``out`` uses: the vector itself, or a new array of numpy with its elements if it must not be written,
    as JAX's arrays must not."""
    torch = sys.modules.get("torch")
    if (torch is not None and isinstance(vector, torch.Tensor)) or not is_exporter(vector):
        return vector
    source = exported(vector)
    if not source.read_only:
        return vector
    if source.on_gpu:
        raise ValueError("the array is on a GPU and must not be written: fix: pass out=, for example an array of CuPy")
    size = math.prod(source.shape) * SIZES[dtype_name(source.dtype)]
    block = (ctypes.c_uint8 * size)()
    if size:
        ctypes.memmove(block, source.address, size)
    return array_in(block, source.shape, source.dtype)
