"""The calls of c10d's backends and process groups, on a communicator of flexring.

Owns the mapping from c10d's calls to those of a communicator, which the first call of a group creates. ``_torch_work`` has the
handles of calls and their order, ``_torch_tensors`` what a tensor is to flexring.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function

from ._library import FlexringError
from ._torch_join import Meeting
from ._torch_memory import Blocks
from ._torch_messages import Channel, Channels
from ._torch_sparse import all_reduce_sparse
from ._torch_tensors import Staging, bytes_of, bytes_of_rows, numbers, reduction, split
from ._torch_work import CallLine, CoalescedWork, Work, WorkOnGpu
from ._vector import Op
from .communicator import Communicator

if TYPE_CHECKING:
    Tensors = Sequence[torch.Tensor]
    # A call of a communicator, in a stream.
    Run = Callable[[Communicator, Any], None]
    # The vector of a tensor.
    Stage = Callable[[torch.Tensor], torch.Tensor]

NAME = "flexring"
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
# torch's settings that have its flight recorder written to a file after a time-out.
_DUMP = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")


def _unsupported(call: str, instead: str = "") -> Callable[..., Any]:
    def refuse(self: Any, *_arguments: Any, **_options: Any) -> Any:
        raise RuntimeError(
            f"flexring's process groups have no {call} yet: fix: {instead}make this call in a group of another backend: "
            'torch.distributed.new_group(backend="gloo")'
        )

    return refuse


class Collectives:
    """The calls of c10d's Backend and ProcessGroup, on a communicator that the first call creates.

    Mixed into a class of torch, whose constructor gets rank and size.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        # The class of torch that this one is mixed into.
        parent: Any = super()
        parent.__init__(rank, size)
        self._number = rank
        self._count = size
        self._limit = timeout
        self._meeting = Meeting(store, rank, timeout)
        self._channels = Channels(self._meeting, rank)
        self._comm: Communicator | None = None
        # The error that ended the attempt to create the communicator, or the use of it.
        self._ended: Exception | None = None
        self._creating = threading.Lock()
        self._line = CallLine()
        self._side_streams: dict[Any, Any] = {}
        self._blocks = Blocks()
        # Whether torch's flight recorder is written to a file if a call times out.
        self._dumps = VERSION >= (2, 15) and any(os.environ.get(name) in ("1", "true", "TRUE") for name in _DUMP)
        # How many collectives and monitored barriers were called.
        self._calls = self._barriers = 0
        # The handles of a group of calls, between start_coalescing and end_coalescing.
        self._group: list[Any] | None = None

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _communicator(self) -> Communicator:
        comm = self._comm
        if comm is None:
            with self._creating:
                if self._ended is not None:
                    raise self._ended
                if self._comm is None:
                    try:
                        comm = self._meeting.join("", self._number, self._count, 0, lambda: self._ended)
                    except Exception as error:
                        # The ranks that have read the id cannot use it a second time.
                        self._ended = error
                        raise
                    # The group may have been destroyed or aborted meanwhile.
                    if self._ended is not None:
                        comm.close()
                        raise self._ended
                    self._comm = comm
                comm = self._comm
        return comm

    def _call(
        self, name: str, opts: Any, results: Tensors, staging: Staging, function: Run, inputs: Tensors = ()
    ) -> Any:
        """Makes a call, ``function(comm, stream)``, after all earlier ones. Returns its handle. ``results`` and ``inputs`` are the
        tensors that it uses, ``staging`` has their vectors."""
        # TORCH_DISTRIBUTED_DEBUG=DETAIL compares these numbers between ranks.
        self._calls += 1
        with _profiled(name) as record:
            work = self._make(opts, results, staging, function, inputs)
            if record is not None and work is not None and not work.is_completed():
                record._call_end_callbacks_on_future(work.get_future())
        return work

    def _make(self, opts: Any, results: Tensors, staging: Staging, function: Run, inputs: Tensors) -> Any:
        first = results[0]
        if len(results) + len(inputs) > 1 and any(tensor.device != first.device for tensor in (*results, *inputs)):
            raise ValueError("the tensors are on different devices: fix: make a call for each device")
        comm = self._comm
        if comm is None:
            # It works with the GPU that is current when it is created.
            with torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext():
                comm = self._communicator()
        stand_ins = staging.stand_ins()
        if stand_ins:
            function, inputs = _staged(function, staging), (*inputs, *stand_ins)
        if self._dumps:
            function = _dumping(function)
        in_background = getattr(opts, "asyncOp", True)
        if first.is_cuda:
            work = self._call_on_gpu(comm, in_background, results, function, inputs)
        elif in_background:
            work = Work(results, self._line.submit(comm.abort, function, comm, None), comm.abort)
        else:
            self._line.run(comm.abort, function, comm, None)
            # There is nothing to wait for, and torch from 2.14 on does without a handle.
            if VERSION >= (2, 14) and self._group is None:
                return None
            work = Work(results)
        if self._group is not None:
            self._group.append(work)
        return work

    def _call_on_gpu(
        self, comm: Communicator, in_background: bool, results: Tensors, function: Run, inputs: Tensors
    ) -> WorkOnGpu:
        """Calls take effect in a stream: the current one, or one beside it, for which the current one does not wait."""
        device = results[0].device
        stream = torch.cuda.current_stream(device)
        if in_background:
            side = self._side_streams.get(device)
            if side is None:
                side = self._side_streams[device] = torch.cuda.Stream(device)
            side.wait_stream(stream)
            stream = side
            # When the program drops a tensor, torch's allocator may use its memory for later work of the current stream, while
            # the call still runs.
            for tensor in (*results, *inputs):
                tensor.record_stream(side)

        def call() -> None:
            # In whichever thread this runs, temporary vectors belong to the stream, too.
            with torch.cuda.stream(stream):
                function(comm, stream)

        self._line.run(comm.abort, call)
        event = torch.cuda.Event()
        event.record(stream)
        return WorkOnGpu(results, stream, event)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        staging = Staging()
        if any(tensor.is_sparse for tensor in tensors):
            whole = all_reduce_sparse(tensors, dist.ReduceOp.SUM if opts is None else opts.reduceOp)
            return self._call("all_reduce", opts, tensors, staging, _copies(whole))
        pairs = [self._reduced(staging.both(tensor), opts) for tensor in tensors]

        def call(comm: Communicator, stream: Any) -> None:
            for vector, op in pairs:
                comm.all_reduce(vector, op, stream=stream)

        return self._call("all_reduce", opts, tensors, staging, call)

    allreduce_coalesced = allreduce_sparse = allreduce

    def _reduced(self, tensor: torch.Tensor, opts: Any) -> tuple[torch.Tensor, Op]:
        op = reduction(dist.ReduceOp.SUM if opts is None else opts.reduceOp, tensor.dtype)
        return numbers(tensor, op), op

    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        staging = Staging()
        vectors = [bytes_of(staging.both(tensor)) for tensor in tensors]

        def call(comm: Communicator, stream: Any) -> None:
            for vector in vectors:
                comm.broadcast(vector, opts.rootRank, stream=stream)

        return self._call("broadcast", opts, tensors, staging, call)

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        staging = Staging()
        use = staging.both if opts.rootRank == self._number else staging.source
        pairs = [self._reduced(use(tensor), opts) for tensor in tensors]

        def call(comm: Communicator, stream: Any) -> None:
            for vector, op in pairs:
                comm.reduce(vector, op, opts.rootRank, stream=stream)

        return self._call("reduce", opts, tensors, staging, call)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        for output, input in zip(outputs, inputs):
            _check_types([output, input])
        staging = Staging()
        pairs = [
            (bytes_of(staging.source(input)), bytes_of(staging.target(output))) for output, input in zip(outputs, inputs)
        ]

        def call(comm: Communicator, stream: Any) -> None:
            for part, whole in pairs:
                comm.all_gather(part, out=whole, stream=stream)

        return self._call("all_gather", opts, outputs, staging, call, inputs)

    def allgather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        for outputs, input in zip(output_lists, inputs):
            _check_types([*outputs, input])
            self._check_own_part(outputs, input)
        staging = Staging()
        jobs = [
            (bytes_of(staging.source(input)), [bytes_of(staging.target(output)) for output in outputs])
            for outputs, input in zip(output_lists, inputs)
        ]

        @_copies
        def call(comm: Communicator, stream: Any) -> None:
            for part, parts in jobs:
                self._gather_parts(comm, stream, part, parts)

        return self._call("all_gather", opts, _flat(output_lists), staging, call, inputs)

    def allgather_coalesced(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        # These lists are by rank, those of allgather by input.
        return self.allgather([list(outputs) for outputs in zip(*output_lists)], inputs, opts)

    def _check_own_part(self, parts: Tensors, part: torch.Tensor) -> None:
        own = parts[self._number].numel() if len(parts) == self._count else None
        if own != part.numel():
            raise ValueError(
                f"the list has tensors of {[other.numel() for other in parts]} elements, but this rank's own has {part.numel()}: fix: "
                f"pass one tensor for each of {self._count} ranks, as long as that rank's own"
            )

    def _gather_parts(self, comm: Communicator, stream: Any, part: torch.Tensor, parts: Tensors) -> None:
        if any(other.numel() != part.numel() for other in parts):
            # Parts of different lengths, the same list on all ranks.
            parts[self._number].copy_(part)
            for root, other in enumerate(parts):
                comm.broadcast(other, root, stream=stream)
            return
        whole = part.new_empty(len(parts) * part.numel())
        comm.all_gather(part, out=whole, stream=stream)
        split(whole, parts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        staging = Staging()
        jobs = [
            (*self._reduced(staging.source(input), opts), self._reduced(staging.target(output), opts)[0])
            for output, input in zip(outputs, inputs)
        ]

        def call(comm: Communicator, stream: Any) -> None:
            for whole, op, part in jobs:
                comm.reduce_scatter(whole, op, out=part, stream=stream)

        return self._call("reduce_scatter", opts, outputs, staging, call, inputs)

    def reduce_scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any = None) -> Any:
        for output, inputs in zip(outputs, input_lists):
            self._check_own_part(inputs, output)
        staging = Staging()
        jobs = [
            (
                self._reduced(staging.target(output), opts),
                [self._reduced(staging.source(input), opts)[0] for input in inputs],
            )
            for output, inputs in zip(outputs, input_lists)
        ]

        @_copies
        def call(comm: Communicator, stream: Any) -> None:
            for (part, op), parts in jobs:
                self._scatter_parts(comm, stream, part, parts, op)

        return self._call("reduce_scatter", opts, outputs, staging, call, _flat(input_lists))

    def _scatter_parts(self, comm: Communicator, stream: Any, part: torch.Tensor, parts: Tensors, op: Op) -> None:
        if any(other.numel() != part.numel() for other in parts):
            part.copy_(parts[self._number])
            for root, other in enumerate(parts):
                # The reduction replaces the root's vector.
                comm.reduce(part if root == self._number else other, op, root, stream=stream)
            return
        comm.reduce_scatter(torch.cat([other.reshape(-1) for other in parts]), op, out=part, stream=stream)

    def barrier(self, opts: Any = None) -> Any:
        return self._call("barrier", opts, [torch.empty(0)], Staging(), lambda comm, stream: comm.barrier())

    def monitored_barrier(self, opts: Any, _wait_all_ranks: bool = False) -> None:
        """A barrier that leaves the group as it was if ranks are missing, and names all of them. It is the join of a
        communicator of its own."""
        self._barriers += 1
        limit = opts.timeout if opts.timeout > datetime.timedelta(0) else self._limit
        name = f"/barrier{self._barriers}"
        self._meeting.join(name, self._number, self._count, 0, lambda: self._ended, limit).close()

    def gather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
        staging = Staging()
        jobs = self._rooted_jobs(inputs, staging.source, output_lists, staging.target, opts.rootRank)

        @_copies
        def call(comm: Communicator, stream: Any) -> None:
            for part, parts in jobs:
                whole = part.new_empty(self._count * part.numel()) if parts else None
                comm.gather(part, whole, opts.rootRank, stream=stream)
                if parts:
                    split(whole, parts)

        outputs = _flat(output_lists)
        # Ranks other than the root have no result.
        return self._call("gather", opts, outputs or inputs, staging, call, inputs if outputs else ())

    def scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any) -> Any:
        staging = Staging()
        jobs = self._rooted_jobs(outputs, staging.target, input_lists, staging.source, opts.rootRank)

        @_copies
        def call(comm: Communicator, stream: Any) -> None:
            for part, parts in jobs:
                comm.scatter(torch.cat(parts) if parts else None, part, opts.rootRank, stream=stream)

        return self._call("scatter", opts, outputs, staging, call, _flat(input_lists))

    def _rooted_jobs(
        self, tensors: Tensors, use: Stage, lists: Sequence[Tensors], use_of_root: Stage, root: int
    ) -> list[tuple[torch.Tensor, list[torch.Tensor] | None]]:
        """The bytes of each tensor, and at the root those of the list of one tensor for each rank that belongs to it. Other
        ranks have no lists."""
        if root != self._number:
            return [(bytes_of(use(tensor)), None) for tensor in tensors]
        jobs: list[tuple[torch.Tensor, list[torch.Tensor] | None]] = []
        for tensor, list_of_root in zip(tensors, lists):
            _check_types([tensor, *list_of_root])
            part, parts = bytes_of(use(tensor)), [bytes_of(use_of_root(other)) for other in list_of_root]
            lengths = [other.numel() for other in parts]
            if lengths != [part.numel()] * self._count:
                raise ValueError(
                    f"the root's tensors have {lengths} bytes, but must be {self._count} of {part.numel()} bytes"
                )
            jobs.append((part, parts))
        return jobs

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_rows: Sequence[int] = (),
        input_rows: Sequence[int] = (),
        opts: Any = None,
    ) -> Any:
        _check_types([output, input])
        for tensor, rows in [(input, input_rows), (output, output_rows)]:
            if not rows and tensor.shape[0] % self._count:
                raise ValueError(
                    f"{tensor.shape[0]} rows are not {self._count} equal blocks: fix: pass the split sizes of input and output"
                )
        staging = Staging()
        whole, out = bytes_of(staging.source(input)), bytes_of(staging.target(output))
        send, receive = bytes_of_rows(input, input_rows), bytes_of_rows(output, output_rows)

        def call(comm: Communicator, stream: Any) -> None:
            comm.all_to_all(whole, out, send, receive, stream=stream)

        return self._call("all_to_all", opts, [output], staging, call, [input])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        staging = Staging()
        parts = [bytes_of(staging.target(output)) for output in outputs]
        blocks = [bytes_of(staging.source(input)) for input in inputs]
        sent, received = ([block.numel() for block in side] for side in (blocks, parts))

        @_copies
        def call(comm: Communicator, stream: Any) -> None:
            whole = parts[0].new_empty(sum(received))
            comm.all_to_all(torch.cat(blocks), whole, sent, received, stream=stream)
            split(whole, parts)

        return self._call("all_to_all", opts, outputs, staging, call, inputs)

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Work | WorkOnGpu:
        channel = self._channels.to(peer, tag)
        staging = Staging()
        return self._message("send", tensors, staging.source, staging, channel, channel.send)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> Work | WorkOnGpu:
        channel = self._channels.of(peer, tag)
        staging = Staging()
        return self._message("recv", tensors, staging.target, staging, channel, channel.recv)

    def _message(
        self,
        name: str,
        tensors: Tensors,
        use: Stage,
        staging: Staging,
        channel: Channel,
        function: Callable[[Any, Any], None],
    ) -> Work | WorkOnGpu:
        """Starts a message, beside other calls and messages in other channels."""
        if self._ended is not None:
            raise self._ended
        (tensor,) = tensors
        vector = bytes_of(use(tensor))
        if staging.stand_ins():
            function = _staged(function, staging)
        work: Work | WorkOnGpu
        with _profiled(name) as record:
            if tensor.is_cuda:
                work = self._message_on_gpu(tensors, vector, channel, function)
            else:
                work = Work(tensors, channel.line.submit(channel.abort, function, vector, None), channel.abort)
            # The future of a message on a GPU waits for the other rank, so its range ends at the launch.
            if record is not None and not tensor.is_cuda:
                record._call_end_callbacks_on_future(work.get_future())
        if self._group is not None:
            self._group.append(work)
        return work

    def _message_on_gpu(
        self, tensors: Tensors, vector: torch.Tensor, channel: Channel, function: Callable[[Any, Any], None]
    ) -> WorkOnGpu:
        """Starts a message in a stream of its own."""
        (tensor,) = tensors
        stream = torch.cuda.Stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        # The vector may be a stand-in for the tensor.
        tensor.record_stream(stream)
        vector.record_stream(stream)
        event = torch.cuda.Event()

        def call() -> None:
            with torch.cuda.stream(stream):
                function(vector, stream)
            event.record(stream)

        return WorkOnGpu(tensors, stream, event, channel.line.submit(channel.abort, call), channel.abort)

    recv_anysource = _unsupported("recv from any rank", "name the rank that sends, or ")

    # The names of torch before 2.14.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    recvAnysource = recv_anysource  # noqa: N815

    def start_coalescing(self, *_device: Any) -> None:
        self._group = []

    def end_coalescing(self, *_device: Any) -> CoalescedWork:
        group, self._group = self._group or [], None
        return CoalescedWork(group)

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    @property
    def supports_coalescing(self) -> bool:
        """Asked by torch.distributed.batch_isend_irecv only, whose messages wait for no others anyway."""
        return False

    @property
    def supports_splitting(self) -> bool:
        return True

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Whether :meth:`allocate_tensor` has faster memory than torch. C++ passes the number of a device, and could not call it
        then, because its arguments have no form in Python."""
        return isinstance(device, torch.device) and device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor for calls in this group, from the first call on in memory that the other ranks of the node read. FSDP2 asks for
        its buffers here after ``set_allocate_memory_from_process_group_for_comm(True)``."""
        comm = self._comm
        if comm is None or device.type != "cpu":
            return torch.empty(size, dtype=dtype, device=device)
        return self._blocks.tensor(comm, size, dtype)

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def _set_sequence_number_for_group(self) -> None:
        """Has no effect: all ranks count from 0."""

    def eager_connect_single_device(self, _device: Any) -> None:
        """Has no effect: the first call connects."""

    def perform_nocolor_split(self, _device: Any) -> None:
        """Has no effect: a rank that is in no new group does nothing for it."""

    def shutdown(self) -> None:
        """Leaves the group when the calls that were made are over. If that takes longer than the group's timeout, a signal handler
        raises an exception, or the group has failed, they are aborted."""
        try:
            if self._has_failed() or not self._drain():
                self.abort()
        except BaseException:
            self.abort()
            raise
        self._end("was destroyed", abort=False)
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()

    def _has_failed(self) -> bool:
        """Whether the group was ended, or its communicator has failed: calls may wait for ranks that are gone."""
        comm = self._comm
        try:
            if comm is not None:
                comm.status()
        except FlexringError:
            return True
        return self._ended is not None

    def _drain(self) -> bool:
        """Waits for the calls that were made. Returns whether they are over."""
        limit = time.monotonic() + self._limit.total_seconds()
        sends, receives = self._channels.lines()

        def over(lines: Sequence[CallLine]) -> bool:
            return all(line.drain(limit - time.monotonic()) for line in lines)

        if not over([self._line, *sends]):
            return False
        # Receives of other ranks whose senders are here end now if no send was made, and so do those of this rank.
        self._meeting.leave()
        self._channels.end_sends(self._error_of("was destroyed"))
        return over(receives)

    def abort(self) -> None:
        """Ends running calls on all ranks with an error, and the group."""
        self._meeting.leave()
        self._end("was aborted", abort=True)
        # Calls that run keep the communicator until they have failed.
        comm, self._comm = self._comm, None
        if comm is not None:
            with contextlib.suppress(FlexringError):
                comm.abort()

    @staticmethod
    def _error_of(how: str) -> Exception:
        return RuntimeError(f"this process group {how}: fix: make no calls in it afterwards, or make a new one")

    def _end(self, how: str, abort: bool) -> None:
        if self._ended is None:
            self._ended = self._error_of(how)
        self._blocks.close()
        self._channels.end(self._ended, abort)


def _profiled(name: str) -> Any:
    """A block that torch's profiler shows by this name; without a profiler one of None."""
    return record_function(f"{NAME}:{name}") if torch.autograd._profiler_enabled() else contextlib.nullcontext()


def _staged(function: Callable[..., None], staging: Staging) -> Callable[..., None]:
    """A call on stand-ins for tensors."""

    @_copies
    def call(*arguments: Any) -> None:
        staging.fill()
        function(*arguments)
        staging.write_back()

    return call


def _dumping(function: Run) -> Run:
    """A call after whose time-out the flight recorder's file says which calls each rank has made."""

    def call(comm: Communicator, stream: Any) -> None:
        try:
            function(comm, stream)
        except FlexringError as error:
            if error.code == FlexringError.TIMEOUT:
                torch._C._distributed_c10d._dump_fr_trace_file(dist.get_rank(), backend=NAME)
            raise

    return call


def _copies(function: Callable[..., None]) -> Callable[..., None]:
    """A call that copies to and from temporary vectors, which must work on tensors of torch.inference_mode() and on leaves."""

    def call(*arguments: Any) -> None:
        with torch.inference_mode():
            function(*arguments)

    return call


def _flat(lists: Sequence[Tensors] | None) -> list[torch.Tensor]:
    return [tensor for tensors in lists or () for tensor in tensors]


def _check_types(tensors: Tensors) -> None:
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1:
        raise TypeError(f"the tensors have elements of different types: {', '.join(sorted(map(str, types)))}")
