"""Arrays of other libraries by DLPack: JAX's, TensorFlow's and others that have neither numpy's nor CUDA's array interface.

Must not know communicators. Reads the structures of DLPack 1, and of the versions before it, which have no flag for read-only
memory: such arrays count as read-only, as in numpy.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

# Places of memory, and kinds of elements, by their numbers in dlpack.h. CUDA's pinned memory is memory of the host.
_CPU, _CUDA, _CUDA_HOST = 1, 2, 3
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_FLOAT8 = {10: "float8_e4m3fn", 12: "float8_e5m2"}
_READ_ONLY = 1
_VERSION = (1, 0)


class _Tensor(ctypes.Structure):
    """``DLTensor``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned``."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_int
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


class Exported(NamedTuple):
    """An array that was exported. ``owner`` keeps its memory alive."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    owner: Any
    read_only: bool
    on_gpu: bool


def is_exporter(thing: object) -> bool:
    """Whether only DLPack describes the object. ``torch.Tensor`` is the caller's to check first."""
    kind = type(thing)
    return (
        hasattr(kind, "__dlpack__")
        and not hasattr(kind, "__array_interface__")
        and not hasattr(thing, "__cuda_array_interface__")
    )


def exported(thing: Any) -> Exported:
    """The memory of an array that has DLPack's methods, when the array's values are complete."""
    if hasattr(thing, "block_until_ready"):
        # JAX computes arrays in other threads.
        thing.block_until_ready()
    try:
        capsule = thing.__dlpack__(max_version=_VERSION)
    except TypeError:
        capsule = thing.__dlpack__()
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != _VERSION[0]:
            raise TypeError(f"a {type(thing).__name__} exports DLPack {versioned.major}, but flexring reads {_VERSION[0]}")
        tensor, read_only = versioned.tensor, bool(versioned.flags & _READ_ONLY)
    elif _is_valid(capsule, b"dltensor"):
        tensor, read_only = _Tensor.from_address(_pointer(capsule, b"dltensor")), True
    else:
        raise TypeError(f"a {type(thing).__name__} exports no DLPack tensor")
    if tensor.device_type not in (_CPU, _CUDA, _CUDA_HOST):
        raise TypeError(f"the array is on a device of type {tensor.device_type}, but flexring reduces arrays on CPUs and CUDA only")
    shape = tuple(tensor.shape[: tensor.ndim])
    if not _is_contiguous(shape, tensor.strides):
        raise ValueError("the array is not contiguous: fix: pass a copy in row-major order")
    address = (tensor.data or 0) + tensor.byte_offset
    # The capsule frees what it exports when it is collected, because it keeps its name.
    return Exported(address, shape, _name(tensor), capsule, read_only, tensor.device_type == _CUDA)


def _name(tensor: _Tensor) -> str:
    if tensor.lanes != 1:
        raise TypeError(f"elements of {tensor.lanes} lanes cannot be reduced")
    kind = _KINDS.get(tensor.code)
    name = "bool" if kind == "bool" else f"{kind}{tensor.bits}" if kind else _FLOAT8.get(tensor.code)
    return name or f"DLPack's number {tensor.code} with {tensor.bits} bits"


def _is_contiguous(shape: tuple[int, ...], strides: Any) -> bool:
    # Without strides the order is row-major.
    if not strides or 0 in shape:
        return True
    expected = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return all(extent == 1 or stride == wanted for extent, stride, wanted in zip(shape, strides[: len(shape)], expected))
