"""CUDA's driver over ctypes, and arrays on a GPU that have only the CUDA array interface.

The driver is the machine's, or the simulated one if LD_LIBRARY_PATH names its folder.
"""

import ctypes
import multiprocessing
import traceback
import unittest
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

# Sets the tests' settings before flexring loads the library.
from . import world  # noqa: F401

import flexring

# The ctypes types for reading and writing elements. Types without a ctypes type are read and written as bits.
TYPES = {
    "<f4": ctypes.c_float,
    "<f8": ctypes.c_double,
    "|i1": ctypes.c_int8,
    "|u1": ctypes.c_uint8,
    "<i4": ctypes.c_int32,
    "<u4": ctypes.c_uint32,
    "<i8": ctypes.c_int64,
    "<u8": ctypes.c_uint64,
    "<f2": ctypes.c_uint16,
    "<V2": ctypes.c_uint16,
}


def why_not():
    """Why GPUs cannot be tested on this machine; None if they can."""
    try:
        cuda = Cuda(context=False)
    except OSError:
        return "no CUDA driver"
    except RuntimeError as error:
        return str(error)
    return None if cuda.count() else "no GPU"


class Cuda:
    """The driver, with the context of a GPU current on this thread."""

    def __init__(self, gpu=0, context=True):
        self._library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", c_uint(0))
        if context:
            made = c_void_p()
            self.call("cuDevicePrimaryCtxRetain", byref(made), c_int(gpu))
            self.call("cuCtxSetCurrent", made)

    def call(self, name, *arguments):
        code = getattr(self._library, name)(*arguments)
        if code:
            message = c_char_p(b"an unknown error")
            self._library.cuGetErrorString(c_int(code), byref(message))
            raise RuntimeError(f"{name} failed: {message.value.decode()} ({code})")

    def count(self):
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        return count.value

    def stream(self):
        """Creates a stream that does not synchronize with the default stream. Returns its handle."""
        made = c_void_p()
        self.call("cuStreamCreate", byref(made), c_uint(1))
        return made.value

    def synchronize(self, stream):
        self.call("cuStreamSynchronize", c_void_p(stream))

    def array(self, elements, typestr="<f4", stream=0, **other):
        return Array(self, elements, typestr, stream, other)


class Array:
    """Elements on a GPU, which are written in a stream. ``free`` waits for all work on the GPU."""

    def __init__(self, cuda, elements, typestr, stream, other):
        self._cuda = cuda
        self._block = (TYPES[typestr] * len(elements))(*elements)
        self._bytes = ctypes.sizeof(self._block)
        self.address = c_uint64()
        cuda.call("cuMemAlloc_v2", byref(self.address), c_size_t(max(self._bytes, 1)))
        # Asynchronous, so that a reader that does not wait for the stream reads other values.
        cuda.call(
            "cuMemcpyHtoDAsync_v2", self.address, self._block, c_size_t(self._bytes), c_void_p(stream)
        )  # fmt: skip
        self.__cuda_array_interface__ = {
            "shape": (len(elements),),
            "typestr": typestr,
            "data": (self.address.value, False),
            "version": 3,
            "strides": None,
            "stream": stream or None,
            **other,
        }

    def elements(self, stream=0):
        """The elements after all work that is in the stream."""
        read = type(self._block)()
        self._cuda.call(
            "cuMemcpyDtoHAsync_v2", read, self.address, c_size_t(self._bytes), c_void_p(stream)
        )  # fmt: skip
        self._cuda.synchronize(stream)
        return list(read)

    def free(self):
        self._cuda.call("cuMemFree_v2", self.address)


def _rank(made, number, size, body, results):
    try:
        comm = flexring.Communicator.from_unique_id(made, number, size)
        answer = (number, body(comm, Cuda()), None)
    except BaseException:
        answer = (number, None, traceback.format_exc())
    results.put(answer)


class GpuTest(unittest.TestCase):
    def processes(self, size, body):
        """Runs ``body(comm, cuda)`` on every rank, each in its own process. ``body`` is a function of a module. Returns the
        results, by rank."""
        spawn = multiprocessing.get_context("spawn")
        made, results = flexring.unique_id(), spawn.Queue()
        ranks = [spawn.Process(target=_rank, args=(made, number, size, body, results)) for number in range(size)]
        for rank in ranks:
            rank.start()
        answers = [None] * size
        try:
            for _ in ranks:
                number, answers[number], trouble = results.get(timeout=60)
                if trouble:
                    self.fail(f"rank {number}: {trouble}")
        finally:
            for rank in ranks:
                rank.join(20)
                rank.kill()
        return answers
