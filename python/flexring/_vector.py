"""What callers hand over: where its elements are, how many there are, and of which type.

Must not know communicators. Neither numpy nor torch is imported here: an object of theirs exists only if its
module does. What is particular to GPUs is in ``_gpu``.
"""

import ctypes
import sys

from ._gpu import TensorOnGpu, array_on_gpu
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
}

# The formats of the buffer protocol, by kind; how wide each is the buffer itself tells.
_KINDS = {**dict.fromkeys("bhilq", "int"), **dict.fromkeys("BHILQ", "uint"), **dict.fromkeys("efd", "float")}

# ctypes says which byte order is its own, others say it by saying nothing.
_NATIVE = "<" if sys.byteorder == "little" else ">"

_OPERATIONS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


class _Operation(int):
    """The number of an operation that carries a factor."""


def premul_sum(factor):
    """An operation that sums each rank's elements times that rank's own factor."""
    number = ctypes.c_uint64()
    check(library.flexring_op_create_premul_sum(factor, ctypes.byref(number)))
    return _Operation(number.value)


def operation(op):
    """The number of an operation."""
    if isinstance(op, _Operation):
        return int(op)
    try:
        return _OPERATIONS[op]
    except (KeyError, TypeError):
        names = ", ".join(_OPERATIONS)
        raise ValueError(f"no such operation: {op!r} (there are {names} and flexring.premul_sum)") from None


def dtype_name(dtype):
    """The name of an element type, be it a name already, numpy's, torch's or Python's."""
    if isinstance(dtype, str):
        name = dtype
    elif str(dtype).startswith("torch."):
        name = str(dtype)[len("torch.") :]
    else:
        # numpy's types have a name, its scalar types and Python's float a __name__.
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", str(dtype))
        name = {"float": "float64", "int": "int64"}.get(name, name)
    if name not in _CODES:
        raise TypeError(f"elements of type {name} cannot be reduced (there are {', '.join(_CODES)})")
    return name


class Vector:
    """Elements in memory, and what keeps them there; ``gpu`` has what is particular to memory of a GPU."""

    __slots__ = ("address", "count", "dtype", "owner", "read_only", "gpu")

    def __init__(self, address, count, dtype, owner, read_only=False, gpu=None):
        self.address = address
        self.count = count
        self.dtype = dtype_name(dtype)
        self.owner = owner
        self.read_only = read_only
        self.gpu = gpu

    @property
    def code(self):
        return _CODES[self.dtype]


def vector_of(thing):
    """The vector that a tensor, an array or anything else with the buffer protocol is."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.Tensor):
        return _of_tensor(thing, torch)
    if hasattr(thing, "__cuda_array_interface__"):
        return Vector(*array_on_gpu(thing))
    if hasattr(thing, "__array_interface__"):
        return _of_array(thing)
    return _of_buffer(thing)


def _of_tensor(tensor, torch):
    kind = tensor.device.type
    if kind not in ("cpu", "cuda"):
        raise FlexringError(
            FlexringError.UNSUPPORTED, f"the tensor is on {tensor.device}, and flexring reduces those on cpu and cuda"
        )
    if tensor.layout != torch.strided:
        raise TypeError(f"the tensor is {tensor.layout}, and flexring reduces dense tensors only")
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous: reduce its .contiguous() and copy that back")
    gpu = TensorOnGpu(tensor, torch) if kind == "cuda" else None
    return Vector(tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor, gpu=gpu)


def _of_array(array):
    address, read_only = array.__array_interface__["data"]
    if not array.dtype.isnative:
        raise TypeError(f"the array's byte order is not this machine's: {array.dtype}")
    if not array.flags.c_contiguous:
        raise ValueError("the array is not contiguous: reduce a copy and copy that back")
    return Vector(address, array.size, array.dtype, array, read_only)


def _of_buffer(thing):
    try:
        view = memoryview(thing)
    except TypeError:
        raise TypeError(f"a {type(thing).__name__} has no buffer that flexring could reduce") from None
    kind = _KINDS.get(view.format.lstrip("@=" + _NATIVE))
    if kind is None:
        raise TypeError(f"elements of format {view.format!r} cannot be reduced")
    if not view.c_contiguous:
        raise ValueError("the buffer is not contiguous: reduce a copy and copy that back")
    read_only = view.readonly
    # ctypes gives the address of a writable buffer only; a read-only one can be nothing but the input.
    exported = bytearray(view) if read_only else view
    address, owner = 0, view
    if view.nbytes:
        owner = ctypes.c_char.from_buffer(exported)
        address = ctypes.addressof(owner)
    return Vector(address, view.nbytes // view.itemsize, f"{kind}{view.itemsize * 8}", owner, read_only)


def pair(send, out):
    """The vectors of a call: what is read and what is written, which are the same without an ``out``."""
    source = vector_of(send)
    target = source if out is None else vector_of(out)
    written(target)
    if (source.count, source.dtype) != (target.count, target.dtype):
        raise ValueError(
            f"{source.count} x {source.dtype} cannot be reduced into {target.count} x {target.dtype}"
        )
    return source, target


def written(vector):
    """The vector, if it can be written."""
    if vector.read_only:
        raise ValueError("the result cannot be written to a read-only buffer")
    return vector


def divided(whole, part, rank, size):
    """A vector that has a part for each of ``size`` ranks, and the part of ``rank``, which is within the whole
    unless it is given."""
    whole = vector_of(whole)
    if part is None:
        count = whole.count // size
        at = whole.address + rank * count * SIZES[whole.dtype]
        own = Vector(at, count, whole.dtype, whole.owner, whole.read_only, whole.gpu)
    else:
        own = vector_of(part)
    if (own.count * size, own.dtype) != (whole.count, whole.dtype):
        raise ValueError(
            f"{whole.count} x {whole.dtype} are not {size} parts of {own.count} x {own.dtype}, one for each rank"
        )
    return whole, own
