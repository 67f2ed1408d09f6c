"""Vectors that callers pass: the address, number and type of their elements.

Must not know communicators. Does not import numpy and torch, because their objects exist only if the caller has imported
them. ``_gpu`` has what is specific to GPUs.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any, Literal, Union

from ._dlpack import exported, is_exporter
from ._gpu import ArrayOnGpu, OnGpu, TensorOnGpu, array_on_gpu
from ._library import FlexringError, check, library

_CODES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float8_e4m3fn": 10,
    "float8_e5m2": 11,
    "int16": 12,
    "uint16": 13,
    "bool": 14,
}

SIZES = {
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "uint16": 2,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}

# Complex numbers are pairs of these: their sums are the sums of the pairs.
_PAIRS = {"complex64": "float32", "complex128": "float64"}

# The formats of the buffer protocol, by kind. The buffer has the width of each.
_KINDS = {**dict.fromkeys("bhilq", "int"), **dict.fromkeys("BHILQ", "uint"), **dict.fromkeys("efd", "float"), "?": "bool"}

# ctypes names the native byte order in its formats; other modules omit it.
_NATIVE = "<" if sys.byteorder == "little" else ">"

_OPERATIONS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4, "band": 6, "bor": 7, "bxor": 8}


# The types that hold numbers that a float of 32 bits does not.
_WIDE = {"int32", "uint32", "int64", "uint64", "float64", "complex128"}


class _Operation(int):
    """The number of an operation with a factor, as the C API encodes it."""

    factor: float

    def check(self, dtype: str) -> None:
        """Raises unless vectors of this type can be multiplied by the factor without rounding it."""
        rounded = ctypes.c_float(self.factor).value
        # The second comparison is of NaN.
        if dtype in _WIDE and rounded != self.factor and self.factor == self.factor:
            raise ValueError(
                f"flexring's factors have 32 bits, and {self.factor} would be rounded to {rounded}: fix: pass a factor that a float32 "
                f"represents, or multiply the {dtype} elements before the call"
            )


# The operations that callers pass.
Op = Union[Literal["sum", "prod", "max", "min", "avg", "band", "bor", "bxor"], _Operation]


def premul_sum(factor: float) -> _Operation:
    """An operation that multiplies each rank's elements by that rank's own factor, and sums the products. Factors have 32 bits:
    vectors of integers of 32 bits and more, float64 and complex128 are refused if the factor would be rounded."""
    number = ctypes.c_uint64()
    check(library.flexring_op_create_premul_sum(factor, ctypes.byref(number)))
    made = _Operation(number.value)
    made.factor = factor
    return made


def operation(op: Op, vector: Vector) -> int:
    """The number of an operation on the elements of a vector in the C API."""
    if isinstance(op, _Operation):
        op.check(vector.type_name)
        return int(op)
    try:
        number = _OPERATIONS[op]
    except (KeyError, TypeError):
        names = ", ".join(_OPERATIONS)
        raise ValueError(f"no such operation: {op!r} (expected {names} or flexring.premul_sum)") from None
    if vector.width == 2 and op not in ("sum", "avg"):
        raise TypeError(f"{op} is not defined for complex numbers: fix: use sum, avg or flexring.premul_sum")
    return number


# The names of the types that callers have passed.
_known: dict[object, str] = {}


def dtype_name(dtype: Any) -> str:
    """The name of an element type, which is given as a name or as a type of numpy, torch or Python."""
    name = _known.get(dtype)
    if name is None:
        name = _known[dtype] = _dtype_name(dtype)
    return name


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, str):
        name = dtype
    elif str(dtype).startswith("torch."):
        name = str(dtype)[len("torch.") :]
    else:
        # numpy's types have a name; its scalar types and Python's types have a __name__.
        given = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", dtype))
        name = {"float": "float64", "int": "int64"}.get(given, given)
    if name not in SIZES:
        raise TypeError(f"elements of type {name} cannot be reduced (expected {', '.join(SIZES)})")
    return name


class Vector:
    """Elements in memory. ``owner`` keeps the memory alive; ``gpu`` has the streams of memory on a GPU, else it is None. Complex
    numbers are two elements each: ``width`` is 2 for them, else 1."""

    __slots__ = ("address", "count", "dtype", "owner", "read_only", "gpu", "width")

    def __init__(
        self,
        address: int,
        count: int,
        dtype: Any,
        owner: Any,
        read_only: bool = False,
        gpu: OnGpu | None = None,
    ) -> None:
        name = dtype_name(dtype)
        self.address = address
        self.width = 2 if name in _PAIRS else 1
        self.count = self.width * count
        self.dtype = _PAIRS.get(name, name)
        self.owner = owner
        self.read_only = read_only
        self.gpu = gpu

    @property
    def code(self) -> int:
        return _CODES[self.dtype]

    @property
    def type_name(self) -> str:
        """The name of the caller's type."""
        return self.dtype if self.width == 1 else f"complex{2 * 8 * SIZES[self.dtype]}"

    def __str__(self) -> str:
        return f"{self.count // self.width} x {self.type_name}"


def vector_of(thing: Any) -> Vector:
    """The elements of a tensor, an array, or another object with the buffer protocol, the CUDA array interface or DLPack."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.Tensor):
        return _of_tensor(thing, torch)
    if hasattr(thing, "__cuda_array_interface__"):
        return Vector(*array_on_gpu(thing))
    if hasattr(thing, "__array_interface__"):
        return _of_array(thing)
    if is_exporter(thing):
        return _of_exported(thing)
    return _of_buffer(thing)


def _of_tensor(tensor: Any, torch: Any) -> Vector:
    if not (tensor.is_cpu or tensor.is_cuda):
        raise FlexringError(
            FlexringError.UNSUPPORTED, f"the tensor is on {tensor.device}, but flexring reduces tensors on cpu and cuda only"
        )
    if tensor.layout != torch.strided:
        raise TypeError(f"the tensor is {tensor.layout}, but flexring reduces dense tensors only: fix: use its .to_dense()")
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous: fix: reduce its .contiguous() and copy the result back")
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(
            "the tensor's memory holds its negative or its conjugate: fix: use its .resolve_neg().resolve_conj() and copy the "
            "result back"
        )
    gpu = TensorOnGpu(tensor, torch) if tensor.is_cuda else None
    return Vector(tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor, gpu=gpu)


def _of_array(array: Any) -> Vector:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(array, numpy.generic):
        # A scalar has no memory of its own: its interface describes a copy.
        array = array[...]
        array.flags.writeable = False
    if numpy is None or not isinstance(array, numpy.ndarray):
        raise TypeError(f"a {type(array).__name__} is not a numpy array: fix: pass numpy.asarray of it, and copy the result back")
    address, read_only = array.__array_interface__["data"]
    if not array.dtype.isnative:
        raise TypeError(f"the array's byte order is not this machine's: {array.dtype}")
    if not array.flags.c_contiguous:
        raise ValueError("the array is not contiguous: fix: reduce a copy and copy the result back")
    return Vector(address, array.size, array.dtype, array, read_only)


def _of_exported(thing: Any) -> Vector:
    source = exported(thing)
    # The values are complete, so any stream will do.
    gpu = ArrayOnGpu(0) if source.on_gpu else None
    return Vector(source.address, math.prod(source.shape), source.dtype, (thing, source.owner), source.read_only, gpu)


def _of_buffer(thing: Any) -> Vector:
    try:
        view = memoryview(thing)
    except TypeError:
        raise TypeError(f"a {type(thing).__name__} has no buffer that flexring can reduce") from None
    kind = _KINDS.get(view.format.lstrip("@=" + _NATIVE))
    if kind is None:
        raise TypeError(f"elements of format {view.format!r} cannot be reduced")
    if not view.c_contiguous:
        raise ValueError("the buffer is not contiguous: fix: reduce a copy and copy the result back")
    read_only = view.readonly
    # ctypes returns the address of writable buffers only. A read-only buffer can only be an input, so a copy is enough.
    exported: Any = bytearray(view) if read_only else view
    address = 0
    owner: Any = view
    if view.nbytes:
        owner = ctypes.c_char.from_buffer(exported)
        address = ctypes.addressof(owner)
    name = kind if kind == "bool" else f"{kind}{view.itemsize * 8}"
    return Vector(address, view.nbytes // view.itemsize, name, owner, read_only)


def source_and_target(send: Any, out: Any) -> tuple[Vector, Vector]:
    """The vectors that a call reads and writes. They are the same without ``out``."""
    source = vector_of(send)
    if out is None:
        return writable(source), source
    target = writable(vector_of(out))
    if (source.count, source.type_name) != (target.count, target.type_name):
        raise ValueError(f"{source} cannot be reduced into {target}")
    return source, target


def writable(vector: Vector) -> Vector:
    """Returns the vector. Raises if it is read-only."""
    if vector.read_only:
        raise ValueError("the result cannot be written to a read-only buffer: fix: pass an array that can be written, with out=")
    return vector


def whole_and_part(whole: Any, part: Any, rank: int, size: int) -> tuple[Vector, Vector]:
    """A vector that consists of one part per rank, and the part of ``rank``: ``part`` if it is given, else a part of the
    whole."""
    whole = vector_of(whole)
    if part is None:
        count = whole.count // (size * whole.width)
        at = whole.address + rank * count * whole.width * SIZES[whole.dtype]
        own = Vector(at, count, whole.type_name, whole.owner, whole.read_only, whole.gpu)
    else:
        own = vector_of(part)
    if (own.count * size, own.type_name) != (whole.count, whole.type_name):
        raise ValueError(f"{whole} are not {size} parts of {own}, one for each rank")
    return whole, own
