"""CUDA's driver over ctypes, for the probes and tests of this folder. Needs nothing but libcuda.so.1, real or simulated."""

import ctypes
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

PTX = Path(__file__).resolve().parent / "cells" / "probe.ptx"

# Numbers of cuda.h.
NOT_READY = 600
CAPTURE_INVALIDATED = 901
STREAM_NON_BLOCKING = 1
HOST_PORTABLE_MAPPED = 1 | 2
CAPTURE_GLOBAL, CAPTURE_RELAXED = 0, 2


class CudaError(RuntimeError):
    """A function of the driver failed with `code`."""

    def __init__(self, name, code):
        super().__init__(f"{name} failed with CUDA error {code}")
        self.code = code


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class Driver:
    """The driver with the primary context of a GPU, which is current on the thread that creates this object."""

    def __init__(self, gpu=0):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", c_uint(0))
        self.gpu, self.context = c_int(), c_void_p()
        self.call("cuDeviceGet", byref(self.gpu), c_int(gpu))
        self.call("cuDevicePrimaryCtxRetain", byref(self.context), self.gpu)
        self.enter()

    def enter(self):
        """Makes the context current on this thread."""
        self.call("cuCtxSetCurrent", self.context)

    def code(self, name, *arguments):
        """Calls a function of the driver and returns its code. Arguments are ctypes objects."""
        return getattr(self.cuda, name)(*arguments)

    def call(self, name, *arguments):
        code = self.code(name, *arguments)
        if code:
            raise CudaError(name, code)

    def has(self, name):
        return hasattr(self.cuda, name)

    def attribute(self, number):
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), c_int(number), self.gpu)
        return value.value

    def name(self):
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, c_int(256), self.gpu)
        return name.value.decode()

    def version(self):
        """The newest CUDA that the driver supports, such as 13000."""
        version = c_int()
        self.call("cuDriverGetVersion", byref(version))
        return version.value

    def allocate(self, size):
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(size))
        return address.value

    def free(self, address):
        self.call("cuMemFree_v2", c_uint64(address))

    def pinned(self, size):
        """Pinned and mapped memory of zeros: its address on the host, and that on the GPU."""
        host, device = c_void_p(), c_uint64()
        self.call("cuMemHostAlloc", byref(host), c_size_t(size), c_uint(HOST_PORTABLE_MAPPED))
        ctypes.memset(host, 0, size)
        self.call("cuMemHostGetDevicePointer_v2", byref(device), host, c_uint(0))
        return host.value, device.value

    def stream(self):
        """A stream that does not synchronize with the legacy default stream."""
        stream = c_void_p()
        self.call("cuStreamCreate", byref(stream), c_uint(STREAM_NON_BLOCKING))
        return stream

    def synchronize(self, stream):
        self.call("cuStreamSynchronize", stream)

    def event(self):
        event = c_void_p()
        self.call("cuEventCreate", byref(event), c_uint(0))
        return event

    def milliseconds(self, begin, end):
        """The time between two events that have completed."""
        elapsed = c_float()
        # The driver of CUDA 13 has this function under both names.
        self.call("cuEventElapsedTime", byref(elapsed), begin, end)
        return elapsed.value

    def write(self, address, data):
        self.call("cuMemcpyHtoD_v2", c_uint64(address), data, c_size_t(ctypes.sizeof(data)))
        # A copy from pageable memory may still be in flight.
        self.call("cuCtxSynchronize")

    def read(self, address, data, stream):
        self.call("cuMemcpyDtoHAsync_v2", data, c_uint64(address), c_size_t(ctypes.sizeof(data)), stream)
        self.synchronize(stream)

    def module(self):
        """A module with the kernels of probe.ptx."""
        module = c_void_p()
        self.call("cuModuleLoadData", byref(module), PTX.read_bytes() + b"\0")
        return module

    def function(self, module, name):
        function = c_void_p()
        self.call("cuModuleGetFunction", byref(function), module, name.encode())
        return function

    def launch(self, function, stream, *words, grid=1, block=1):
        """Launches a kernel whose parameters are 64-bit words."""
        held = [c_uint64(word) for word in words]
        pointers = (c_void_p * max(len(held), 1))(*[ctypes.addressof(word) for word in held])
        shape = [c_uint(number) for number in (grid, 1, 1, block, 1, 1, 0)]
        self.call("cuLaunchKernel", function, *shape, stream, pointers, c_void_p())
