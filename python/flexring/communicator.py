"""Communicators and requests.

Owns the lifetimes: the library's communicator lives until the last of those who use it is gone, and a vector
lives until its call is over.
"""

import contextlib
import ctypes
import math
import os
import threading
import weakref

from ._gpu import stream_for
from ._library import UNIQUE_ID_BYTES, FlexringError, UniqueId, check, library
from ._vector import SIZES, divided, dtype_name, operation, pair, vector_of, written


_CTYPES = {
    "int8": ctypes.c_int8,
    "uint8": ctypes.c_uint8,
    "int32": ctypes.c_int32,
    "uint32": ctypes.c_uint32,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
}


def unique_id():
    """The id of a new world, as bytes. One process makes it, lives until all ranks have joined, and passes it
    to the others by any means."""
    made = UniqueId()
    check(library.flexring_get_unique_id(ctypes.byref(made)))
    return bytes(made.internal)


class _Handle:
    """The library's communicator, freed when nobody uses it any more.

    Arrays of ``Communicator.alloc`` hold it too: their memory is the communicator's.
    """

    def __init__(self, pointer):
        self.pointer = pointer
        self._process = os.getpid()
        weakref.finalize(self, _end, library.flexring_comm_free, (pointer,), self._process)

    def here(self):
        """Whether this is the process that joined; threads and connections do not survive a fork."""
        return os.getpid() == self._process

    def number(self, function):
        number = ctypes.c_int()
        check(function(self.pointer, ctypes.byref(number)))
        return number.value


def _end(function, arguments, process):
    if os.getpid() == process:
        function(*arguments)


def _ctypes_array(block, shape, name):
    kind = _CTYPES.get(name)
    if kind is None:
        raise TypeError(f"without numpy there are no arrays of {name}")
    for extent in reversed(shape):
        kind = kind * extent
    return kind.from_buffer(block)


def _give_back(handle, address):
    if handle.here():
        library.flexring_free(handle.pointer, address)


class Communicator:
    """A group of ranks that reduce vectors together. Every rank must make the same calls in the same order.

    Calls may come from any thread. As a context manager it closes itself, and aborts first if its block ended
    with an exception, so that no other rank waits for this one.

    A vector is a tensor, a numpy or CuPy array, or anything else with the buffer protocol or the CUDA array
    interface, and contiguous. Calls on the host's memory return when the result is there. Calls on a GPU's memory
    return at once and take effect in ``stream``, behind what is in it and before what comes later: a stream of torch
    or CuPy, or its handle; by default torch's current one for tensors, and for arrays the one that their interface
    tells. What made the vectors must be in that stream or be over, and their memory must stay theirs until the stream
    has passed, which torch's and CuPy's allocators see to in the stream that a vector was made in (for tensors flexring
    sees to it in other streams too). A failure is raised by the next call, or by :meth:`synchronize` and :meth:`status`.
    """

    def __init__(self, handle):
        self._handle = handle
        self._rank = handle.number(library.flexring_comm_rank)
        self._size = handle.number(library.flexring_comm_size)

    @classmethod
    def from_env(cls):
        """Joins the world that the environment describes: FLEXRING_RANK and its siblings, or the variables of
        torchrun, mpirun or srun. Returns when all ranks are there."""
        pointer = ctypes.c_void_p()
        check(library.flexring_comm_init_from_env(ctypes.byref(pointer)))
        return cls(_Handle(pointer.value))

    @classmethod
    def from_unique_id(cls, id, rank, size):
        """Joins the world of ``size`` ranks that share ``id``, which :func:`unique_id` made, as ``rank``."""
        if rank not in range(size):
            raise ValueError(f"there is no rank {rank} among {size}")
        if len(id) != UNIQUE_ID_BYTES:
            raise ValueError(f"an id has {UNIQUE_ID_BYTES} bytes, this one has {len(id)}")
        pointer = ctypes.c_void_p()
        made = UniqueId.from_buffer_copy(id)
        check(library.flexring_comm_init_rank(ctypes.byref(pointer), size, made, rank))
        return cls(_Handle(pointer.value))

    @property
    def rank(self):
        """This rank, from 0."""
        return self._rank

    @property
    def size(self):
        """How many ranks there are."""
        return self._size

    def all_reduce(self, vector, op="sum", out=None, stream=None):
        """Reduces the vectors of all ranks, element by element, in place or into ``out``, and returns where the
        result is. ``op`` is "sum", "prod", "max", "min", "avg" or a :func:`premul_sum`."""
        handle, number = self._live(), operation(op)
        source, target = pair(vector, out)
        queue = stream_for(stream, source, target)
        check(
            library.flexring_all_reduce(
                source.address, target.address, source.count, source.code, number, handle.pointer, queue
            )
        )
        return vector if out is None else out

    def all_reduce_async(self, vector, op="sum", out=None):
        """The same while this thread goes on; the result is there when the :class:`Request` says so. Until then
        the vectors belong to flexring. Calls on a GPU go on by themselves: a request is of use there only to whoever
        wants to wait for the end, and is made in the default stream alone."""
        handle, number = self._live(), operation(op)
        source, target = pair(vector, out)
        if stream_for(None, source, target):
            raise ValueError(
                "requests on a GPU take effect in the default stream alone: all_reduce takes any, and waits for none"
            )
        pointer = ctypes.c_void_p()
        check(
            library.flexring_all_reduce_async(
                source.address, target.address, source.count, source.code, number, handle.pointer,
                ctypes.byref(pointer),
            )
        )  # fmt: skip
        result = vector if out is None else out
        return Request(pointer.value, result, (handle, source.owner, target.owner))

    def reduce_scatter(self, vector, op="sum", out=None, stream=None):
        """Reduces the vectors of all ranks, which have a part for each rank; rank r gets the r-th part of the
        result in ``out``, or without one in that part of ``vector`` itself. Returns where the result is."""
        handle, number = self._live(), operation(op)
        whole, part = divided(vector, out, self._rank, self._size)
        written(part)
        queue = stream_for(stream, whole, part)
        check(
            library.flexring_reduce_scatter(
                whole.address, part.address, part.count, whole.code, number, handle.pointer, queue
            )
        )
        return vector if out is None else out

    def all_gather(self, vector, out=None, stream=None):
        """Gathers the vectors of all ranks in ``out``, one after the other in the order of the ranks. Without an
        ``out`` the vector has a part for each rank, and each rank gives its own part. Returns where the result
        is."""
        handle = self._live()
        whole, part = divided(*(vector, None) if out is None else (out, vector), self._rank, self._size)
        written(whole)
        queue = stream_for(stream, whole, part)
        check(
            library.flexring_all_gather(
                part.address, whole.address, part.count, part.code, handle.pointer, queue
            )
        )
        return vector if out is None else out

    def broadcast(self, vector, root=0, stream=None):
        """Makes the vector of every rank what it is on rank ``root``, and returns it."""
        handle, both = self._live(), written(vector_of(vector))
        self._root(root)
        queue = stream_for(stream, both)
        check(
            library.flexring_broadcast(
                both.address, both.address, both.count, both.code, root, handle.pointer, queue
            )
        )
        return vector

    def reduce(self, vector, op="sum", root=0, stream=None):
        """Reduces the vectors of all ranks into that of rank ``root``; the others stay as they are. Returns the
        vector."""
        handle, number, both = self._live(), operation(op), vector_of(vector)
        if self._root(root) == self._rank:
            written(both)
        queue = stream_for(stream, both)
        check(
            library.flexring_reduce(
                both.address, both.address, both.count, both.code, number, root, handle.pointer, queue
            )
        )
        return vector

    def alloc(self, shape, dtype="float32"):
        """An array of zeros in memory that the other ranks of this node read directly, so that reducing it
        copies nothing. A numpy array, or a ctypes array where there is no numpy; ``flexring.torch.alloc`` makes
        tensors."""
        shape = (shape,) if hasattr(shape, "__index__") else tuple(shape)
        if any(extent < 0 for extent in shape):
            raise ValueError(f"no array has the shape {shape}")
        name, count = dtype_name(dtype), math.prod(shape)
        block = self.alloc_bytes(count * SIZES[name])
        try:
            import numpy
        except ImportError:
            return _ctypes_array(block, shape, name)
        try:
            kind = numpy.dtype(name)
        except TypeError:
            raise TypeError(f"numpy has no {name}; flexring.torch.alloc makes tensors of it") from None
        return numpy.ndarray(shape, kind, block)

    def alloc_bytes(self, size):
        """A ctypes array of ``size`` zero bytes in that memory, given back when nothing refers to it."""
        handle = self._live()
        address = ctypes.c_void_p()
        check(library.flexring_alloc(handle.pointer, size, ctypes.byref(address)))
        block = (ctypes.c_uint8 * size).from_address(address.value)
        # Runs before the handle's own, at exit too: the later of two is called first.
        weakref.finalize(block, _give_back, handle, address.value)
        return block

    @contextlib.contextmanager
    def registered(self, *vectors):
        """A context in which these vectors are registered with the RDMA devices that this communicator uses, so that
        calls on them, or on parts of them, copy and register nothing. Without RDMA devices nothing is done."""
        handle = self._live()
        with contextlib.ExitStack() as stack:
            for vector in map(vector_of, vectors):
                size = vector.count * SIZES[vector.dtype]
                if size:
                    check(library.flexring_register(handle.pointer, vector.address, size))
                    stack.callback(library.flexring_deregister, handle.pointer, vector.address, size)
            yield

    def synchronize(self):
        """Waits until all calls that were made so far are over, also those that take effect in streams. Raises what
        ended the communicator, if anything has."""
        check(library.flexring_comm_synchronize(self._live().pointer))

    def status(self):
        """Raises what ended the communicator, if anything has, without waiting."""
        check(library.flexring_comm_status(self._live().pointer))

    def abort(self):
        """Ends what all ranks do with this communicator, from any thread, at once."""
        check(library.flexring_comm_abort(self._live().pointer))

    def close(self):
        """Leaves the world. Arrays of :meth:`alloc` and requests under way keep what they need until they are
        gone. Closing twice is allowed."""
        self._handle = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None and self._handle is not None:
            self.abort()
        self.close()

    def __repr__(self):
        state = "" if self._handle is not None else ", closed"
        return f"<flexring.Communicator rank {self._rank} of {self._size}{state}>"

    def _root(self, root):
        if root not in range(self._size):
            raise ValueError(f"there is no rank {root} among {self._size}")
        return root

    def _live(self):
        handle = self._handle
        if handle is None:
            raise FlexringError(FlexringError.INVALID_ARGUMENT, "this communicator is closed")
        if not handle.here():
            raise FlexringError(
                FlexringError.INVALID_ARGUMENT, "this communicator belongs to the process that forked this one"
            )
        return handle


class Request:
    """An all-reduce under way. It keeps its vectors alive; letting go of it waits for the call to end."""

    def __init__(self, pointer, result, owners):
        self._pointer = pointer
        self._result = result
        self._owners = owners
        self._error = None
        self._lock = threading.Lock()

    def wait(self):
        """Waits for the end and returns where the result is. Raises what the call failed with."""
        with self._lock:
            if self._pointer is not None:
                # The request is the library's again once this is called, however it ends.
                pointer, self._pointer = self._pointer, None
                try:
                    check(library.flexring_wait(pointer))
                except FlexringError as error:
                    self._error = error
                self._owners = None
            if self._error is not None:
                raise self._error
            return self._result

    def done(self):
        """Whether the call has ended, well or not."""
        # Somebody else waits for it right now: then it has not ended.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._pointer is None:
                return True
            over = ctypes.c_int()
            check(library.flexring_test(self._pointer, ctypes.byref(over)))
            return over.value != 0
        finally:
            self._lock.release()

    def __del__(self):
        # A call under way writes to the vectors, so they cannot be freed before its end.
        if self._pointer is not None and self._owners[0].here():
            library.flexring_wait(self._pointer)
