"""Vectors on a GPU: their description by torch and the CUDA array interface, and the streams in which calls take effect.

Must not know communicators, nor what is done with the vectors. Does not check addresses: the library asks CUDA's driver
where an address is and whether the whole vector is accessible.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ._vector import Vector

# Element types by their kind in the CUDA array interface. For other kinds the array's own dtype gives the name.
_NAMES = {"f": "float", "i": "int", "u": "uint"}

# The driver's second handle of the default stream: CU_STREAM_LEGACY.
_LEGACY = 1


class OnGpu(Protocol):
    """The streams of a vector on a GPU."""

    def stream(self) -> int:
        """The handle of the stream in which calls take effect by default."""

    def record_use(self, handle: int) -> None:
        """Notes that the stream with this handle uses the vector."""


class TensorOnGpu:
    """A torch tensor. By default calls take effect in torch's current stream of its device, like torch's own operations."""

    def __init__(self, tensor: Any, torch: Any) -> None:
        self._tensor = tensor
        self._cuda = torch.cuda

    def stream(self) -> int:
        handle: int = self._cuda.current_stream(self._tensor.device).cuda_stream
        return handle

    def record_use(self, handle: int) -> None:
        """Reports to torch's allocator that a stream uses the tensor, if it is not the current stream. When a tensor is
        freed, the allocator reuses its memory at once for later work in the current stream. A call in another stream may
        still be running then."""
        device = self._tensor.device
        if handle == self.stream():
            return
        stream = self._cuda.ExternalStream(handle, device) if handle else self._cuda.default_stream(device)
        self._tensor.record_stream(stream)


class ArrayOnGpu:
    """An array with the CUDA array interface. By default calls take effect in the stream that the interface names; for CuPy
    that is its current stream. If the interface names none, it is the default stream."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def stream(self) -> int:
        return self._stream

    def record_use(self, handle: int) -> None:
        """Has no effect: CuPy and Numba free memory in the order of the stream that the array was created in."""


def array_on_gpu(array: Any) -> tuple[int, int, Any, Any, bool, ArrayOnGpu]:
    """Returns the arguments of ``Vector``: address, count, type, owner, whether it is read-only, and an ``ArrayOnGpu``."""
    interface = array.__cuda_array_interface__
    address, read_only = interface["data"]
    shape, typestr = interface["shape"], interface["typestr"]
    if interface.get("mask") is not None:
        raise TypeError("the array has a mask, but flexring reduces dense arrays only")
    order, kind, size = typestr[:1], typestr[1:2], int(typestr[2:])
    if order == ">" and size > 1:
        raise TypeError(f"the array's byte order is not the GPU's: {typestr}")
    name = f"{_NAMES[kind]}{size * 8}" if kind in _NAMES else getattr(array, "dtype", typestr)
    if not _is_contiguous(shape, interface.get("strides"), size):
        raise ValueError("the array is not contiguous: fix: reduce a copy and copy the result back")
    gpu = ArrayOnGpu(_normalized(interface.get("stream")))
    return address or 0, math.prod(shape), name, array, read_only, gpu


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None, size: int) -> bool:
    if strides is None or 0 in shape:
        return True
    for extent, stride in zip(reversed(shape), reversed(strides)):
        if extent != 1 and stride != size:
            return False
        size *= extent
    return True


def _normalized(handle: int | None) -> int:
    return 0 if handle is None or handle == _LEGACY else handle


def stream_handle(stream: object) -> int:
    """The handle of a stream, which is a handle, a stream of torch or CuPy, or an object with the CUDA stream protocol."""
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        handle = (protocol() if callable(protocol) else protocol)[1]
    else:
        handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
    if isinstance(handle, bool) or not isinstance(handle, int) or handle < 0:
        raise TypeError(f"a {type(stream).__name__} is no CUDA stream: expected a stream of torch or CuPy, or a handle")
    return _normalized(handle)


def stream_for(stream: object, *vectors: Vector) -> int | None:
    """The handle of the stream in which a call on these vectors takes effect: ``stream`` if it is given, else the stream of
    the vectors. None if they are memory of the host. Records that the stream uses the vectors."""
    on_gpu = [(vector, vector.gpu) for vector in vectors if vector.gpu is not None]
    if not on_gpu:
        if stream is not None:
            raise ValueError("a stream was given, but the vectors are memory of the host")
        return None
    handles = {stream_handle(stream)} if stream is not None else {gpu.stream() for _, gpu in on_gpu}
    if len(handles) > 1:
        raise ValueError("the vectors are in different streams: choose one with stream=...")
    (handle,) = handles
    for vector, gpu in on_gpu:
        if vector.count:
            gpu.record_use(handle)
    return handle
