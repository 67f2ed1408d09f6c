"""The library's communicators and requests as objects that free them.

Owns lifetimes: the library's communicator lives as long as any object that uses it, and a vector lives until its call is
over. Must not know what a call does.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from . import _exit
from ._gpu import stream_for
from ._group import keep
from ._library import FlexringError, UniqueId, check, library
from ._vector import Vector, writable

# The type of a vector: of the result, too, which is one of the vectors of the call.
V = TypeVar("V")

# Requests that were deleted before their calls were over, with what these use, and whether a thread frees them: in this order, so that
# one may keep its vectors until the calls of others are over.
_deleted: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
_frees_deleted = False


def _free_deleted() -> None:
    while True:
        pointer, owners = _deleted.get()
        library.flexring_wait(pointer)
        del owners


def _forget_deleted() -> None:
    """In a forked child there is no thread, and its parent's calls are never over."""
    global _deleted, _frees_deleted
    _deleted, _frees_deleted = queue.SimpleQueue(), False


os.register_at_fork(after_in_child=_forget_deleted)


def unique_id() -> bytes:
    """Creates the id of a new world, as bytes. One process creates it and passes it to the others by any means. That process
    must live until all ranks have joined. An id that no rank uses expires after ten times FLEXRING_CONNECT_TIMEOUT_MS."""
    id = UniqueId()
    check(library.flexring_get_unique_id(ctypes.byref(id)))
    return bytes(id.internal)


class Handle:
    """The library's communicator. It is freed when the last reference is gone.

    Arrays of ``Communicator.alloc`` refer to it, too, because their memory belongs to the communicator.
    """

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer
        # In a forked child it frees the child's copy of the handle only.
        weakref.finalize(self, library.flexring_comm_free, pointer)
        _exit.watch(self)

    def read_number(self, function: Callable[..., int]) -> int:
        """The number that ``function`` writes for this communicator."""
        number = ctypes.c_int()
        check(function(self.pointer, ctypes.byref(number)))
        return number.value

    def alloc_bytes(self, size: int) -> ctypes.Array[ctypes.c_uint8]:
        """A ctypes array of ``size`` zero bytes in the memory that other ranks read. It is freed with its last reference."""
        address = ctypes.c_void_p()
        check(library.flexring_alloc(self.pointer, size, ctypes.byref(address)))
        start = address.value or 0
        block = (ctypes.c_uint8 * size).from_address(start)
        # Runs before the handle's finalizer, at exit, too: finalizers run in reverse order of registration.
        weakref.finalize(block, _free, self, start)
        return block


def _free(handle: Handle, address: int) -> None:
    library.flexring_free(handle.pointer, address)


def create(function: Callable[[Any], Any]) -> Handle | None:
    """Calls ``function`` with the place for a pointer to a communicator. Returns its handle, or None if there is none."""
    pointer = ctypes.c_void_p()
    try:
        check(function(ctypes.byref(pointer)))
    except BaseException:
        # A signal handler may raise an exception although the call succeeded. The program gets no communicator then.
        if pointer.value is not None:
            library.flexring_comm_free(pointer)
        raise
    return None if pointer.value is None else Handle(pointer.value)


class Prepared:
    """A call with its arguments. ``used`` are its vectors."""

    def __init__(self, handle: Handle, used: list[Vector], *arguments: Any) -> None:
        self._handle, self._used, self._arguments = handle, used, arguments

    def __call__(self, function: Callable[..., int], stream: object) -> None:
        check(function(*self._arguments, self._handle.pointer, stream_for(stream, *self._used)))

    def start(self, function: Callable[..., int], result: V) -> Request[V]:
        if stream_for(None, *self._used):
            raise ValueError(
                "requests on a GPU take effect in the default stream only: use the call that is not asynchronous, which takes "
                "any stream and does not wait"
            )
        request = Request(result, (self._handle, *(vector.owner for vector in self._used)))
        check(function(*self._arguments, self._handle.pointer, request.place()))
        return request


class Exchange(Prepared):
    """A call that moves blocks from ``send`` to ``receive``. Either is None on a rank that does not use it."""

    def __init__(
        self, handle: Handle, send: Vector | None, receive: Vector | None, counts: Any, *root: int
    ) -> None:
        used = [vector for vector in (send, receive) if vector is not None]
        if used[0].type_name != used[-1].type_name:
            raise ValueError(f"{used[0].type_name} cannot be received as {used[-1].type_name}")
        if receive is not None:
            writable(receive)
        places = [None if vector is None else vector.address for vector in (send, receive)]
        code = used[0].code
        if isinstance(counts, tuple):
            super().__init__(handle, used, places[0], counts[0], places[1], counts[1], code)
        else:
            super().__init__(handle, used, *places, counts, code, *root)


class Message(Prepared):
    """A send of a vector, or a receive into it. In a group it takes effect at the group's end."""

    def __init__(self, handle: Handle, vector: Vector, peer: int) -> None:
        super().__init__(handle, [vector], vector.address, vector.count, vector.code, peer)

    def __call__(self, function: Callable[..., int], stream: object) -> None:
        super().__call__(function, stream)
        keep(self._handle, self._used[0].owner)


class Request(Generic[V]):
    """An asynchronous call. It keeps its vectors alive, also after it was deleted, at least until the call is over.

    It exists before the call begins: a signal handler may raise an exception although the call has begun, and the vectors must
    live until the call is over then, too."""

    def __init__(self, result: V, owners: Any) -> None:
        # The library's request: null before the call begins, and after the wait for it.
        self._pointer = ctypes.c_void_p()
        self._result = result
        self._owners = owners
        self._error: Exception | None = None
        # A signal handler may run in the thread that waits, and use the request, too.
        self._lock = threading.RLock()
        self._waiting = False

    def place(self) -> Any:
        """The place where the library writes its request."""
        return ctypes.byref(self._pointer)

    def wait(self) -> V:
        """Waits until the call is over, and returns the vector with the result. Raises the error of the call."""
        with self._lock:
            if self._waiting:
                raise RuntimeError("a signal handler cannot wait for the request that it interrupted: fix: use done()")
            pointer = self._pointer.value
            if pointer is not None:
                # flexring_wait frees the request even if it fails, so it must be called only once.
                self._pointer.value = None
                self._waiting = True
                try:
                    check(library.flexring_wait(pointer))
                except FlexringError as error:
                    self._error = error
                except BaseException:
                    self._error = FlexringError(FlexringError.ABORTED, "a signal ended the wait for this request")
                    raise
                finally:
                    self._waiting = False
                self._owners = None
            if self._error is not None:
                raise self._error
            return self._result

    def done(self) -> bool:
        """Whether the call is over, with success or not. Does not wait."""
        # Another thread holds the lock while it waits for the call, so the call is not over yet.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._pointer.value is None:
                return not self._waiting
            over = ctypes.c_int()
            check(library.flexring_test(self._pointer, ctypes.byref(over)))
            return over.value != 0
        finally:
            self._lock.release()

    def __del__(self) -> None:
        global _frees_deleted
        pointer, over = self._pointer.value, ctypes.c_int()
        if pointer is None:
            return
        if library.flexring_test(pointer, ctypes.byref(over)) != 0 or over.value:
            library.flexring_wait(pointer)
            return
        # The call writes to the vectors until it is over. This must not wait for that: an exception may be about to end the program,
        # without which other ranks never make their part of the call.
        _deleted.put((pointer, self._owners))
        if not _frees_deleted:
            # At the interpreter's exit no thread begins.
            with contextlib.suppress(RuntimeError):
                _thread.start_new_thread(_free_deleted, ())
                _frees_deleted = True
