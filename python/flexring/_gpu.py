"""Vectors on a GPU: what torch and the CUDA array interface tell of them, and the streams in which calls take effect.

Must not know communicators, nor what is done with the vectors. Whose memory an address is, and whether it is all there,
only CUDA's driver knows, so that is for the library to ask.
"""

import math

# What the CUDA array interface calls element types that have no name of their own is the array's to tell.
_NAMES = {"f": "float", "i": "int", "u": "uint"}

# The driver's other handle of the default stream.
_LEGACY = 1


class TensorOnGpu:
    """A tensor of torch: calls take effect in torch's current stream of its device, like torch's own."""

    def __init__(self, tensor, torch):
        self._tensor = tensor
        self._cuda = torch.cuda

    def stream(self):
        return self._cuda.current_stream(self._tensor.device).cuda_stream

    def lend(self, handle):
        """Tells torch's allocator that a stream uses the tensor, if that is not the current one. Memory of a tensor
        that is let go of is handed out again at once, to whoever uses the same stream later; in any other stream the
        call may still be on its way."""
        device = self._tensor.device
        if handle == self.stream():
            return
        stream = self._cuda.ExternalStream(handle, device) if handle else self._cuda.default_stream(device)
        self._tensor.record_stream(stream)


class ArrayOnGpu:
    """Anything with the CUDA array interface, which tells in which stream the array is ready; that of CuPy is its
    current one. Without one calls take effect in the default stream."""

    def __init__(self, stream):
        self._stream = stream

    def stream(self):
        return self._stream

    def lend(self, handle):
        """CuPy and Numba give memory back in the order of the stream that the array was made in."""


def array_on_gpu(array):
    """Address, count, type, owner, whether it is read-only, and what is particular to it."""
    interface = array.__cuda_array_interface__
    address, read_only = interface["data"]
    shape, typestr = interface["shape"], interface["typestr"]
    if interface.get("mask") is not None:
        raise TypeError("the array has a mask, and flexring reduces dense arrays only")
    order, kind, size = typestr[:1], typestr[1:2], int(typestr[2:])
    if order == ">" and size > 1:
        raise TypeError(f"the array's byte order is not the GPU's: {typestr}")
    name = f"{_NAMES[kind]}{size * 8}" if kind in _NAMES else getattr(array, "dtype", typestr)
    if not _is_contiguous(shape, interface.get("strides"), size):
        raise ValueError("the array is not contiguous: reduce a copy and copy that back")
    gpu = ArrayOnGpu(_normal(interface.get("stream")))
    return address or 0, math.prod(shape), name, array, read_only, gpu


def _is_contiguous(shape, strides, size):
    if strides is None or 0 in shape:
        return True
    for extent, stride in zip(reversed(shape), reversed(strides)):
        if extent != 1 and stride != size:
            return False
        size *= extent
    return True


def _normal(handle):
    return 0 if handle in (None, _LEGACY) else handle


def stream_handle(stream):
    """The handle of a stream: a number already, torch's, CuPy's, or what follows the CUDA stream protocol."""
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        handle = (protocol() if callable(protocol) else protocol)[1]
    else:
        handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
    if isinstance(handle, bool) or not isinstance(handle, int) or handle < 0:
        raise TypeError(f"a {type(stream).__name__} is no CUDA stream: there are those of torch and CuPy, and handles")
    return _normal(handle)


def stream_for(stream, *vectors):
    """The handle of the stream in which a call on these vectors takes effect: the one given, or else that of the
    vectors; None if they are the host's memory. From now on that stream uses the vectors."""
    on_gpu = [vector for vector in vectors if vector.gpu is not None]
    if not on_gpu:
        if stream is not None:
            raise ValueError("a stream was given, but the vectors are the host's memory")
        return None
    handles = {stream_handle(stream)} if stream is not None else {vector.gpu.stream() for vector in on_gpu}
    if len(handles) > 1:
        raise ValueError("the vectors are in different streams: say by stream=... in which the call takes effect")
    (handle,) = handles
    for vector in on_gpu:
        if vector.count:
            vector.gpu.lend(handle)
    return handle
