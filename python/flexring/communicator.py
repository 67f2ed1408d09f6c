"""Communicators: what a call is in Python. ``_handle`` has the lifetimes of communicators, requests and vectors."""

from __future__ import annotations

import contextlib
import ctypes
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, SupportsIndex

from . import _exit, _interrupt
from ._array import array_in, in_place
from ._gpu import stream_for
from ._handle import Exchange, Handle, Message, Prepared, Request, V, create
from ._library import NO_COLOR, UNIQUE_ID_BYTES, FlexringError, UniqueId, check, library
from ._statistics import RailStatistics, rail_statistics
from ._vector import SIZES, Op, Vector, dtype_name, operation, source_and_target, vector_of, whole_and_part, writable

_NO_RECV_FROM_ANY = "; a receive names the rank that sends, there is none from any rank"


class Communicator:
    """A group of ranks that reduce vectors together. Every rank must make the same calls in the same order.

    Calls may come from any thread. A communicator is a context manager. At the end of the block it is closed; if the block
    ends with an exception it is aborted first, so that no other rank waits for this one, and the errors of the others name the
    exception. So do those when an exception ends the process. An exception that leaves the block is taken as the end of the process:
    ranks on this machine wait for that, for at most 5 s, before they fail. ``sys.exit(0)`` is no failure.

    A vector is a tensor, a numpy or CuPy array, or another object with the buffer protocol, the CUDA array interface or DLPack.
    It must be contiguous. Arrays that must not be written, such as JAX's, are inputs: a call without ``out`` copies them to a
    new numpy array, which it uses in place and returns.

    Calls on host memory return when the result is complete. Calls on GPU memory return at once and take effect in
    ``stream``: after the work that is in the stream already, and before work that is added later. ``stream`` is a stream
    of torch or CuPy, or a handle. The default is torch's current stream for tensors, and the stream that the interface
    names for arrays. The work that produces the vectors must be complete or in that stream. Their memory must stay
    allocated until the stream has passed the call. The allocators of torch and CuPy ensure that in the stream in which a
    vector was created; for tensors flexring ensures it in other streams, too. A failure is raised by the next call, or by
    :meth:`synchronize` and :meth:`status`.

    Ctrl-C and other signals whose handler raises an exception end a waiting call of the main thread at once: the
    communicator is aborted on all ranks. A forked child, such as one of ``multiprocessing``, cannot use the communicator
    of its parent.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle: Handle | None = handle
        self._rank = handle.read_number(library.flexring_comm_rank)
        self._size = handle.read_number(library.flexring_comm_size)

    @classmethod
    def from_env(cls) -> Communicator:
        """Joins the world that the environment describes: FLEXRING_RANK, FLEXRING_WORLD_SIZE, FLEXRING_MASTER_ADDR and
        FLEXRING_MASTER_PORT, or the variables of torchrun, mpirun or srun. Returns when all ranks have joined."""
        _interrupt.install(library)
        return cls(_created(library.flexring_comm_init_from_env))

    @classmethod
    def from_unique_id(cls, id: bytes, rank: int, size: int, timeout: float | None = None) -> Communicator:
        """Joins the world of ``size`` ranks that share ``id`` (see :func:`unique_id`), as ``rank``. ``timeout`` is the time in
        seconds that the ranks wait for each other, here and in calls, the same on all ranks; without it FLEXRING_TIMEOUT_MS and
        FLEXRING_CONNECT_TIMEOUT_MS apply."""
        if rank not in range(size):
            raise ValueError(f"there is no rank {rank} among {size}")
        if len(id) != UNIQUE_ID_BYTES:
            raise ValueError(f"an id has {UNIQUE_ID_BYTES} bytes, but this one has {len(id)}")
        _interrupt.install(library)
        shared = UniqueId.from_buffer_copy(id)
        if timeout is None:
            return cls(_created(lambda pointer: library.flexring_comm_init_rank(pointer, size, shared, rank)))
        # The library takes at most 24 days.
        limit = min(max(math.ceil(timeout * 1000), 1), 2**31 - 1)
        return cls(
            _created(lambda pointer: library.flexring_comm_init_rank_timeout(pointer, size, shared, rank, limit))
        )

    def shrink(self, exclude: Iterable[int] = ()) -> Communicator:
        """Makes a communicator of the ranks that are left, in their order, usually after this one has failed because a rank
        died. Every rank that is alive must call it with the same ranks to leave out, ``exclude``, except those ranks, and
        ranks that have closed this communicator. Ranks that died, were stopped or cannot be reached are left out, too; for a
        rank that continues later this raises an error. Calls on this communicator end first. After a failure the vectors of
        the failed calls have undefined contents. Close this communicator afterwards."""
        handle = self._open_handle()
        left_out = sorted(set(exclude))
        for rank in left_out:
            self._check_root(rank)
        ranks = (ctypes.c_int * len(left_out))(*left_out)
        made = _created(lambda out: library.flexring_comm_shrink(handle.pointer, ranks, len(left_out), out))
        return type(self)(made)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Makes one communicator for each ``color``, a number from 0, of the ranks that pass that color, ordered by ``key`` and
        then by their rank here. Returns None if ``color`` is None. All ranks must call it, between the same two calls."""
        # ctypes would drop higher bits.
        if color is not None and not 0 <= color < 2**31:
            raise ValueError(f"a color is None or a number from 0 to 2**31 - 1, not {color}")
        if not -(2**31) <= key < 2**31:
            raise ValueError(f"a key is a number of 32 bits with a sign, not {key}")
        handle, number = self._open_handle(), NO_COLOR if color is None else color
        made = create(lambda out: library.flexring_comm_split(handle.pointer, number, key, out))
        return None if made is None else type(self)(made)

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def all_reduce(self, vector: V, op: Op = "sum", out: V | None = None, stream: object = None) -> V:
        """Reduces the vectors of all ranks, element by element, in place or into ``out``. Returns the vector with the
        result. ``op`` is "sum", "prod", "max", "min", "avg", "band", "bor", "bxor" or a :func:`premul_sum`; for complex numbers "sum",
        "avg" or a :func:`premul_sum`. Integers have no "avg", as their sum may wrap around. Sums of 16-bit floats are added as float32 and
        rounded once on a node, and once or more between nodes (docs/schedules.md, "How sums are rounded")."""
        handle = self._open_handle()
        vector = in_place(vector) if out is None else vector
        source, target = source_and_target(vector, out)
        number = operation(op, source)
        queue = stream_for(stream, source, target)
        check(
            library.flexring_all_reduce(
                source.address, target.address, source.count, source.code, number, handle.pointer, queue
            )
        )
        return vector if out is None else out

    def all_reduce_async(self, vector: V, op: Op = "sum", out: V | None = None) -> Request[V]:
        """Starts :meth:`all_reduce` and returns a :class:`Request`. The vectors must not be used until the request is
        done. Calls on a GPU are asynchronous anyway; there a request is useful only to wait for the end, and takes
        effect in the default stream only."""
        handle = self._open_handle()
        vector = in_place(vector) if out is None else vector
        source, target = source_and_target(vector, out)
        number = operation(op, source)
        if stream_for(None, source, target):
            raise ValueError(
                "requests on a GPU take effect in the default stream only: use all_reduce, which takes any stream and does "
                "not wait"
            )
        request = Request(vector if out is None else out, (handle, source.owner, target.owner))
        check(
            library.flexring_all_reduce_async(
                source.address, target.address, source.count, source.code, number, handle.pointer, request.place()
            )
        )
        return request

    def reduce_scatter(self, vector: V, op: Op = "sum", out: V | None = None, stream: object = None) -> V:
        """Reduces the vectors of all ranks, which consist of one part per rank. Rank r gets the r-th part of the result in
        ``out``, or without ``out`` in the r-th part of ``vector``. Returns the vector with the result."""
        call, result = self._reduce_scatter(vector, op, out)
        call(library.flexring_reduce_scatter, stream)
        return result

    def reduce_scatter_async(self, vector: V, op: Op = "sum", out: V | None = None) -> Request[V]:
        """Starts :meth:`reduce_scatter` and returns a :class:`Request`, as :meth:`all_reduce_async` does."""
        call, result = self._reduce_scatter(vector, op, out)
        return call.start(library.flexring_reduce_scatter_async, result)

    def _reduce_scatter(self, vector: V, op: Op, out: V | None) -> tuple[Prepared, V]:
        handle = self._open_handle()
        vector = in_place(vector) if out is None else vector
        whole, part = whole_and_part(vector, out, self._rank, self._size)
        writable(part)
        number = operation(op, whole)
        call = Prepared(handle, [whole, part], whole.address, part.address, part.count, whole.code, number)
        return call, vector if out is None else out

    def all_gather(self, vector: V, out: V | None = None, stream: object = None) -> V:
        """Concatenates the vectors of all ranks in ``out``, in the order of ranks. Without ``out`` the vector consists of
        one part per rank, and each rank contributes its own part. Returns the vector with the result."""
        call, result = self._all_gather(vector, out)
        call(library.flexring_all_gather, stream)
        return result

    def all_gather_async(self, vector: V, out: V | None = None) -> Request[V]:
        """Starts :meth:`all_gather` and returns a :class:`Request`, as :meth:`all_reduce_async` does."""
        call, result = self._all_gather(vector, out)
        return call.start(library.flexring_all_gather_async, result)

    def _all_gather(self, vector: V, out: V | None) -> tuple[Prepared, V]:
        handle = self._open_handle()
        vector = in_place(vector) if out is None else vector
        given, own = (vector, None) if out is None else (out, vector)
        whole, part = whole_and_part(given, own, self._rank, self._size)
        writable(whole)
        call = Prepared(handle, [whole, part], part.address, whole.address, part.count, part.code)
        return call, vector if out is None else out

    def broadcast(self, vector: V, root: int = 0, stream: object = None) -> V:
        """Copies the vector of rank ``root`` to the vectors of all other ranks. Returns the vector."""
        call, vector = self._broadcast(vector, root)
        call(library.flexring_broadcast, stream)
        return vector

    def broadcast_async(self, vector: V, root: int = 0) -> Request[V]:
        """Starts :meth:`broadcast` and returns a :class:`Request`, as :meth:`all_reduce_async` does."""
        call, vector = self._broadcast(vector, root)
        return call.start(library.flexring_broadcast_async, vector)

    def _broadcast(self, vector: V, root: int) -> tuple[Prepared, V]:
        handle, vector = self._open_handle(), in_place(vector)
        both = writable(vector_of(vector))
        self._check_root(root)
        return Prepared(handle, [both], both.address, both.address, both.count, both.code, root), vector

    def reduce(self, vector: V, op: Op = "sum", root: int = 0, stream: object = None) -> V:
        """Reduces the vectors of all ranks into the vector of rank ``root``. The other vectors do not change. Returns the
        vector."""
        call, vector = self._reduce(vector, op, root)
        call(library.flexring_reduce, stream)
        return vector

    def reduce_async(self, vector: V, op: Op = "sum", root: int = 0) -> Request[V]:
        """Starts :meth:`reduce` and returns a :class:`Request`, as :meth:`all_reduce_async` does."""
        call, vector = self._reduce(vector, op, root)
        return call.start(library.flexring_reduce_async, vector)

    def _reduce(self, vector: V, op: Op, root: int) -> tuple[Prepared, V]:
        handle, vector = self._open_handle(), in_place(vector)
        both = vector_of(vector)
        number = operation(op, both)
        if self._check_root(root) == self._rank:
            writable(both)
        return Prepared(handle, [both], both.address, both.address, both.count, both.code, number, root), vector

    def gather(self, vector: object, out: V | None = None, root: int = 0, stream: object = None) -> V | None:
        """Concatenates the vectors of all ranks in ``out`` of rank ``root``, in the order of ranks. Other ranks need no
        ``out``. Returns ``out``."""
        call = self._gather(vector, out, root)
        call(library.flexring_gather, stream)
        return out

    def gather_async(self, vector: object, out: V | None = None, root: int = 0) -> Request[V | None]:
        """Starts :meth:`gather` and returns a :class:`Request`, as :meth:`all_reduce_async` does."""
        return self._gather(vector, out, root).start(library.flexring_gather_async, out)

    def _gather(self, vector: object, out: object, root: int) -> Exchange:
        part = vector_of(vector)
        at_root = self._check_root(root) == self._rank
        whole = whole_and_part(out, vector, self._rank, self._size)[0] if at_root else None
        return self._exchange(part, whole, part.count, root)

    def scatter(self, vector: object, out: V, root: int = 0, stream: object = None) -> V:
        """Splits the vector of rank ``root`` into one part per rank; rank r gets the r-th part in ``out``. The vectors of
        other ranks are ignored and may be None. Returns ``out``."""
        self._scatter(vector, out, root)(library.flexring_scatter, stream)
        return out

    def scatter_async(self, vector: object, out: V, root: int = 0) -> Request[V]:
        """Starts :meth:`scatter` and returns a :class:`Request`, as :meth:`all_reduce_async` does."""
        return self._scatter(vector, out, root).start(library.flexring_scatter_async, out)

    def _scatter(self, vector: object, out: object, root: int) -> Exchange:
        part = vector_of(out)
        at_root = self._check_root(root) == self._rank
        whole = whole_and_part(vector, out, self._rank, self._size)[0] if at_root else None
        return self._exchange(whole, part, part.count, root)

    def all_to_all(
        self,
        vector: object,
        out: V,
        send_counts: Iterable[int] | None = None,
        receive_counts: Iterable[int] | None = None,
        stream: object = None,
    ) -> V:
        """Sends a block of ``vector`` to each rank, and receives one from each in ``out``. The blocks follow each other in
        the order of ranks. Without counts they are equal; otherwise ``send_counts[r]`` elements go to rank r, and
        ``receive_counts[r]`` come from it. All ranks give counts, or none does. Returns ``out``."""
        call, name = self._all_to_all(vector, out, send_counts, receive_counts)
        call(getattr(library, name), stream)
        return out

    def all_to_all_async(
        self,
        vector: object,
        out: V,
        send_counts: Iterable[int] | None = None,
        receive_counts: Iterable[int] | None = None,
    ) -> Request[V]:
        """Starts :meth:`all_to_all` and returns a :class:`Request`, as :meth:`all_reduce_async` does."""
        call, name = self._all_to_all(vector, out, send_counts, receive_counts)
        return call.start(getattr(library, name + "_async"), out)

    def _all_to_all(
        self,
        vector: object,
        out: object,
        send_counts: Iterable[int] | None,
        receive_counts: Iterable[int] | None,
    ) -> tuple[Exchange, str]:
        send, receive = vector_of(vector), vector_of(out)
        if send_counts is None and receive_counts is None:
            count = send.count // self._size
            if send.count % (self._size * send.width) or send.count != receive.count:
                raise ValueError(
                    f"{send.count} elements to send and {receive.count} to receive are not {self._size} equal blocks each"
                )
            return self._exchange(send, receive, count), "flexring_all_to_all"
        lengths = self._block_lengths(send, send_counts), self._block_lengths(receive, receive_counts)
        return self._exchange(send, receive, lengths), "flexring_all_to_all_v"

    def _block_lengths(self, side: Vector, given: Iterable[int] | None) -> ctypes.Array[ctypes.c_size_t]:
        whole = side.count // side.width
        counts = [whole // self._size] * self._size if given is None else list(map(operator.index, given))
        if len(counts) != self._size or min(counts) < 0 or sum(counts) != whole:
            raise ValueError(f"{counts} are not the lengths of {self._size} blocks of {whole} elements in all")
        return (ctypes.c_size_t * self._size)(*(side.width * count for count in counts))

    def _exchange(self, send: Vector | None, receive: Vector | None, counts: Any, *root: int) -> Exchange:
        return Exchange(self._open_handle(), send, receive, counts, *root)

    def send(self, vector: object, peer: int, stream: object = None) -> None:
        """Sends the vector to rank ``peer``, which calls :meth:`recv`. The n-th send from one rank to another matches the n-th
        receive there. It may return before the other rank's call, or wait for it; see :func:`flexring.group`."""
        self._message(vector_of(vector), peer)(library.flexring_send, stream)

    def recv(self, out: V, peer: int, stream: object = None) -> V:
        """Receives the vector that rank ``peer`` sends, with as many elements of the same type. Returns ``out``. There is no receive
        from any rank."""
        self._message(writable(vector_of(out)), peer, _NO_RECV_FROM_ANY)(library.flexring_recv, stream)
        return out

    def send_async(self, vector: object, peer: int) -> Request[None]:
        """Starts :meth:`send` and returns a :class:`Request`. The calls of a communicator run one after the other: to send and
        receive at the same time, use :func:`flexring.group`."""
        return self._message(vector_of(vector), peer).start(library.flexring_send_async, None)

    def recv_async(self, out: V, peer: int) -> Request[V]:
        """Starts :meth:`recv` and returns a :class:`Request`, as :meth:`send_async` does."""
        return self._message(writable(vector_of(out)), peer, _NO_RECV_FROM_ANY).start(library.flexring_recv_async, out)

    def _message(self, vector: Vector, peer: int, advice: str = "") -> Message:
        return Message(self._open_handle(), vector, self._check_root(peer, advice))

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        handle = self._open_handle()
        check(library.flexring_barrier(handle.pointer))

    def barrier_async(self) -> Request[None]:
        """Starts :meth:`barrier` and returns a :class:`Request`."""
        handle = self._open_handle()
        request = Request(None, (handle,))
        check(library.flexring_barrier_async(handle.pointer, request.place()))
        return request

    def alloc(self, shape: int | Iterable[int], dtype: Any = "float32") -> Any:
        """Allocates an array of zeros in memory that the other ranks of this node read directly, so that calls on it copy
        nothing. Returns a numpy array, or a ctypes array if numpy is not installed. ``flexring.torch.alloc`` allocates
        tensors."""
        extents = (operator.index(shape),) if isinstance(shape, SupportsIndex) else tuple(shape)
        if any(extent < 0 for extent in extents):
            raise ValueError(f"no array has the shape {extents}")
        name, count = dtype_name(dtype), math.prod(extents)
        block = self.alloc_bytes(count * SIZES[name])
        return array_in(block, extents, name)

    def alloc_bytes(self, size: int) -> ctypes.Array[ctypes.c_uint8]:
        """Allocates a ctypes array of ``size`` zero bytes in the memory of :meth:`alloc`. It is freed with its last
        reference."""
        return self._open_handle().alloc_bytes(size)

    @contextlib.contextmanager
    def registered(self, *vectors: object) -> Iterator[None]:
        """A context manager that registers the vectors with the RDMA devices that this communicator uses. Calls on them, or
        on parts of them, then copy and register nothing. With FLEXRING_REGISTER_SHARED=1 the other ranks of this node read
        them directly, too: see docs/c-api.md, Registered memory. The end of the block then waits for a running call on them."""
        handle = self._open_handle()
        # They keep their memory until the end of the block. Of a read-only buffer this would be a copy, which no call uses.
        kept = [writable(vector_of(vector)) for vector in vectors]
        with contextlib.ExitStack() as stack:
            for vector in kept:
                size = vector.count * SIZES[vector.dtype]
                if size:
                    check(library.flexring_register(handle.pointer, vector.address, size))
                    stack.callback(_deregister, handle, vector.address, size)
            yield

    def synchronize(self) -> None:
        """Waits until all earlier calls are over, including those that take effect in streams. Raises the error that ended
        the communicator, if it has failed."""
        handle = self._open_handle()
        check(library.flexring_comm_synchronize(handle.pointer))

    def status(self) -> None:
        """Raises the error that ended the communicator, if it has failed. Does not wait."""
        handle = self._open_handle()
        check(library.flexring_comm_status(handle.pointer))

    def rail_statistics(self) -> list[RailStatistics]:
        """What each rail of this rank has carried, in the order of the rails. Empty if this rank sends nothing over RDMA
        devices. May be called from any thread, also during a call."""
        handle = self._open_handle()
        return rail_statistics(handle.pointer)

    def abort(self) -> None:
        """Ends the communicator on all ranks. May be called from any thread, and takes effect at once: running calls raise
        an error on every rank."""
        handle = self._open_handle()
        check(library.flexring_comm_abort(handle.pointer))

    def close(self) -> None:
        """Leaves the world. Arrays of :meth:`alloc` and running requests stay valid. Closing twice is allowed."""
        self._handle = None

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            handle = self._handle
            cause = None if error is None else _exit.cause(error)
            if cause is not None and handle is not None:
                check(library.flexring_comm_abort_on_exit(handle.pointer, cause.encode(errors="replace")))
        finally:
            self.close()

    def __repr__(self) -> str:
        state = "" if self._handle is not None else ", closed"
        return f"<flexring.Communicator rank {self._rank} of {self._size}{state}>"

    def _check_root(self, root: int, advice: str = "") -> int:
        if root not in range(self._size):
            raise ValueError(f"there is no rank {root} among {self._size}{advice}")
        return root

    def _open_handle(self) -> Handle:
        """The handle. Callers keep it in a variable for as long as they are in the library: another thread may close this communicator."""
        handle = self._handle
        if handle is None:
            raise FlexringError(FlexringError.INVALID_ARGUMENT, "this communicator is closed")
        return handle


def _created(function: Callable[[Any], Any]) -> Handle:
    """What :func:`create` returns, where the library always makes a communicator or fails."""
    handle = create(function)
    if handle is None:
        raise FlexringError(FlexringError.INTERNAL_ERROR, "the library made no communicator")
    return handle


def _deregister(handle: Handle, address: int, size: int) -> None:
    """Ends a registration. Raises the error if the memory is still registered, because it would be reused while it is."""
    check(library.flexring_deregister(handle.pointer, address, size))
