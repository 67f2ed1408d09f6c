"""flexring as a backend of torch.distributed: ``torch.distributed.init_process_group("flexring")``.

From torch 2.14 on this needs no import, because torch finds :func:`register` by the entry point ``torch.distributed.backends``.
For torch 2.8 to 2.13, ``import flexring.torch`` first. Older versions refuse the backend and say what to use.

Owns the mapping from c10d's calls to those of a communicator. ``_torch_work`` has the handles of calls and their order.
On GPUs this is not tested with torch yet.
"""

import contextlib
import datetime
import functools
import threading

import torch
import torch.distributed as dist

from ._library import FlexringError
from ._torch_tensors import bytes_of, bytes_of_rows, numbers, reduction, split
from ._torch_work import CallLine, Work, WorkOnGpu
from .communicator import Communicator, unique_id

NAME = "flexring"
# The beginning of the keys of communicators' ids in the store of the group.
_ID = "flexring_unique_id"
_OLDEST = (2, 8)
_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


def _unsupported(call):
    def refuse(self, *_arguments, **_options):
        raise RuntimeError(
            f"flexring's process groups have no {call} yet: fix: make this call in a group of another backend: "
            'torch.distributed.new_group(backend="gloo")'
        )

    return refuse


class Collectives:
    """The calls of c10d's Backend and ProcessGroup, on a communicator that the first call creates.

    Mixed into a class of torch, whose constructor gets rank and size.
    """

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._store = store
        self._number = rank
        self._count = size
        self._limit = timeout
        self._comm = None
        # The error that ended the attempt to create the communicator, or the use of it.
        self._ended = None
        self._creating = threading.Lock()
        self._line = CallLine()
        self._side_streams = {}
        # The handles of a group of calls, between start_coalescing and end_coalescing.
        self._group = None

    def getBackendName(self):  # noqa: N802
        return NAME

    def _communicator(self):
        comm = self._comm
        if comm is None:
            with self._creating:
                if self._ended is not None:
                    raise self._ended
                if self._comm is None:
                    try:
                        comm = self._join()
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

    def _join(self):
        """Creates the communicator. Rank 0 creates its id and passes it through the store; the others wait for it."""
        # The store may have the id of an earlier group: each rank counts its groups.
        key = f"{_ID}/{self._store.add(f'{_ID}/rank{self._number}', 1)}"
        if self._number == 0:
            try:
                id = unique_id()
            except Exception as error:
                self._store.set(key, b"-" + str(error).encode())
                raise
            self._store.set(key, b"+" + id)
        else:
            try:
                self._store.wait([key], self._limit)
            except RuntimeError as error:
                raise FlexringError(
                    FlexringError.RENDEZVOUS_FAILED,
                    f"rank 0 of the process group published no flexring id within {self._limit.total_seconds()} s: it made no "
                    f"call in this group, or has ended ({error}): fix: look for the first error of rank 0",
                ) from error
            message = bytes(self._store.get(key))
            if message[:1] != b"+":
                raise FlexringError(
                    FlexringError.RENDEZVOUS_FAILED, f"rank 0 could not create a flexring id: {message[1:].decode()}"
                )
            id = message[1:]
        return Communicator.from_unique_id(id, self._number, self._count, timeout=self._limit.total_seconds())

    def _call(self, opts, results, function):
        """Makes a call, ``function(comm, stream)``, after all earlier ones. Returns its handle."""
        if any(tensor.device != results[0].device for tensor in results):
            raise ValueError("the tensors are on different devices: fix: make a call for each device")
        comm = self._communicator()
        in_background = getattr(opts, "asyncOp", True)
        first = results[0]
        if first.is_cuda:
            work = self._call_on_gpu(comm, in_background, results, function)
        elif in_background:
            work = Work(results, self._line.submit(lambda: _without_autograd(function, comm, None)), comm.abort)
        else:
            self._line.run(lambda: _without_autograd(function, comm, None))
            # There is nothing to wait for, and torch from 2.14 on does without a handle.
            if _VERSION >= (2, 14) and self._group is None:
                return None
            work = Work(results)
        if self._group is not None:
            self._group.append(work)
        return work

    def _call_on_gpu(self, comm, in_background, results, function):
        """Calls take effect in a stream: the current one, or one beside it, for which the current one does not wait."""
        device = results[0].device
        stream = torch.cuda.current_stream(device)
        if in_background:
            side = self._side_streams.get(device)
            if side is None:
                side = self._side_streams[device] = torch.cuda.Stream(device)
            side.wait_stream(stream)
            stream = side

        def call():
            # In whichever thread this runs, temporary vectors belong to the stream, too.
            with torch.cuda.stream(stream):
                _without_autograd(function, comm, stream)

        self._line.run(call)
        return WorkOnGpu(results, stream)

    def allreduce(self, tensors, opts=None):
        pairs = [self._reduced(tensor, opts) for tensor in tensors]

        def call(comm, stream):
            for vector, op in pairs:
                comm.all_reduce(vector, op, stream=stream)

        return self._call(opts, tensors, call)

    allreduce_coalesced = allreduce

    def _reduced(self, tensor, opts):
        op = reduction(dist.ReduceOp.SUM if opts is None else opts.reduceOp, tensor.dtype)
        return numbers(tensor, op), op

    def broadcast(self, tensors, opts):
        vectors = [bytes_of(tensor) for tensor in tensors]

        def call(comm, stream):
            for vector in vectors:
                comm.broadcast(vector, opts.rootRank, stream=stream)

        return self._call(opts, tensors, call)

    def reduce(self, tensors, opts):
        pairs = [self._reduced(tensor, opts) for tensor in tensors]

        def call(comm, stream):
            for vector, op in pairs:
                comm.reduce(vector, op, opts.rootRank, stream=stream)

        return self._call(opts, tensors, call)

    def all_gather_single(self, output, input, opts=None):
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        for output, input in zip(outputs, inputs):
            _check_types([output, input])
        pairs = [(bytes_of(input), bytes_of(output)) for output, input in zip(outputs, inputs)]

        def call(comm, stream):
            for part, whole in pairs:
                comm.all_gather(part, out=whole, stream=stream)

        return self._call(opts, outputs, call)

    def allgather(self, output_lists, inputs, opts=None):
        for outputs, input in zip(output_lists, inputs):
            _check_types([*outputs, input])
        jobs = [(bytes_of(input), list(map(bytes_of, outputs))) for outputs, input in zip(output_lists, inputs)]

        def call(comm, stream):
            for part, parts in jobs:
                self._gather_parts(comm, stream, part, parts)

        return self._call(opts, [tensor for outputs in output_lists for tensor in outputs], call)

    def allgather_coalesced(self, output_lists, inputs, opts=None):
        # These lists are by rank, those of allgather by input.
        return self.allgather([list(outputs) for outputs in zip(*output_lists)], inputs, opts)

    def _gather_parts(self, comm, stream, part, parts):
        if any(other.numel() != part.numel() for other in parts):
            # Parts of different lengths, the same list on all ranks.
            parts[self._number].copy_(part)
            for root, other in enumerate(parts):
                comm.broadcast(other, root, stream=stream)
            return
        whole = part.new_empty(len(parts) * part.numel())
        comm.all_gather(part, out=whole, stream=stream)
        split(whole, parts)

    def reduce_scatter_single(self, output, input, opts=None):
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        jobs = [(*self._reduced(input, opts), self._reduced(output, opts)[0]) for output, input in zip(outputs, inputs)]

        def call(comm, stream):
            for whole, op, part in jobs:
                comm.reduce_scatter(whole, op, out=part, stream=stream)

        return self._call(opts, outputs, call)

    def reduce_scatter(self, outputs, input_lists, opts=None):
        jobs = [
            (self._reduced(output, opts), [self._reduced(input, opts)[0] for input in inputs])
            for output, inputs in zip(outputs, input_lists)
        ]

        def call(comm, stream):
            for (part, op), parts in jobs:
                self._scatter_parts(comm, stream, part, parts, op)

        return self._call(opts, outputs, call)

    def _scatter_parts(self, comm, stream, part, parts, op):
        if any(other.numel() != part.numel() for other in parts):
            part.copy_(parts[self._number])
            for root, other in enumerate(parts):
                # The reduction replaces the root's vector.
                comm.reduce(part if root == self._number else other, op, root, stream=stream)
            return
        comm.reduce_scatter(torch.cat([other.reshape(-1) for other in parts]), op, out=part, stream=stream)

    def barrier(self, opts=None):
        return self._call(opts, [torch.empty(0)], lambda comm, stream: comm.barrier())

    def gather(self, output_lists, inputs, opts):
        parts_of = output_lists or [[]] * len(inputs)
        jobs = [(bytes_of(input), list(map(bytes_of, outputs))) for input, outputs in zip(inputs, parts_of)]
        at_root = opts.rootRank == self._number
        if at_root:
            for part, parts in jobs:
                self._check_parts(parts, part)

        def call(comm, stream):
            for part, parts in jobs:
                whole = part.new_empty(self._count * part.numel()) if at_root else None
                comm.gather(part, whole, opts.rootRank, stream=stream)
                if at_root:
                    split(whole, parts)

        return self._call(opts, inputs, call)

    def scatter(self, outputs, input_lists, opts):
        parts_of = input_lists or [[]] * len(outputs)
        jobs = [(bytes_of(output), list(map(bytes_of, inputs))) for output, inputs in zip(outputs, parts_of)]
        at_root = opts.rootRank == self._number
        if at_root:
            for part, parts in jobs:
                self._check_parts(parts, part)

        def call(comm, stream):
            for part, parts in jobs:
                comm.scatter(torch.cat(parts) if at_root else None, part, opts.rootRank, stream=stream)

        return self._call(opts, outputs, call)

    def _check_parts(self, parts, part):
        lengths = [other.numel() for other in parts]
        if lengths != [part.numel()] * self._count:
            raise ValueError(f"the root's tensors have {lengths} bytes, but must be {self._count} of {part.numel()} bytes")

    def all_to_all_single(self, output, input, output_rows=(), input_rows=(), opts=None):
        _check_types([output, input])
        for tensor, rows in [(input, input_rows), (output, output_rows)]:
            if not rows and tensor.shape[0] % self._count:
                raise ValueError(
                    f"{tensor.shape[0]} rows are not {self._count} equal blocks: fix: pass the split sizes of input and output"
                )
        whole, out = bytes_of(input), bytes_of(output)
        send, receive = bytes_of_rows(input, input_rows), bytes_of_rows(output, output_rows)

        def call(comm, stream):
            comm.all_to_all(whole, out, send, receive, stream=stream)

        return self._call(opts, [output], call)

    def alltoall(self, outputs, inputs, opts=None):
        parts, blocks = list(map(bytes_of, outputs)), list(map(bytes_of, inputs))
        counts = [[block.numel() for block in side] for side in (blocks, parts)]

        def call(comm, stream):
            whole = parts[0].new_empty(sum(counts[1]))
            comm.all_to_all(torch.cat(blocks), whole, *counts, stream=stream)
            split(whole, parts)

        return self._call(opts, outputs, call)

    send = _unsupported("send")
    recv = _unsupported("recv")
    recv_anysource = _unsupported("recv from any rank")
    allreduce_sparse = _unsupported("all_reduce of sparse tensors")
    monitored_barrier = _unsupported("monitored_barrier")

    # The names of torch before 2.14.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    recvAnysource = recv_anysource  # noqa: N815

    def start_coalescing(self, *_device):
        self._group = []

    def end_coalescing(self, *_device):
        group, self._group = self._group or [], None
        return _CoalescedWork(group)

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    @property
    def supports_coalescing(self):
        """Asked by torch.distributed.batch_isend_irecv only, which needs send and recv."""
        return False

    @property
    def supports_splitting(self):
        return True

    def eager_connect_single_device(self, _device):
        """Has no effect: the first call connects."""

    def perform_nocolor_split(self, _device):
        """Has no effect: a rank that is in no new group does nothing for it."""

    def shutdown(self):
        """Leaves the group."""
        self._end("was destroyed")
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()

    def abort(self):
        """Ends running calls on all ranks with an error, and the group."""
        self._end("was aborted")
        # Calls that run keep the communicator until they have failed.
        comm, self._comm = self._comm, None
        if comm is not None:
            with contextlib.suppress(FlexringError):
                comm.abort()

    def _end(self, how):
        if self._ended is None:
            self._ended = RuntimeError(f"this process group {how}: fix: make no calls in it afterwards, or make a new one")


def _without_autograd(function, comm, stream):
    """Copies to and from temporary vectors must work on tensors of torch.inference_mode() and on leaves."""
    with torch.inference_mode():
        function(comm, stream)


def _check_types(tensors):
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1:
        raise TypeError(f"the tensors have elements of different types: {', '.join(sorted(map(str, types)))}")


class _CoalescedWork(dist.Work):
    """The handle of a group of calls."""

    def __init__(self, works):
        super().__init__()
        self._works = works

    def wait(self, timeout=None):
        return all([work.wait(timeout) for work in self._works])

    synchronize = wait

    def is_completed(self):
        return all(work.is_completed() for work in self._works)

    def is_success(self):
        return all(work.is_success() for work in self._works)

    def exception(self):
        return next((error for error in (work.exception() for work in self._works) if error is not None), None)

    def result(self):
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self):
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda done: [tensor for future in done.value() for tensor in future.value()])


def _define_class():
    """The class of process groups for this version of torch."""
    from torch._C import _distributed_c10d as c10d

    if _VERSION < (2, 14):

        class FlexringProcessGroup(Collectives, dist.ProcessGroup):
            """A group without backends of torch, so that it also answers what c10d asks the backend of a device."""

            _name = _description = ""

            def _get_backend(self, _device):
                return self

            # C++ asks these for the name, which the class of torch has from its backends only.
            def setGroupName(self, name):  # noqa: N802
                self._name = name

            def getGroupName(self):  # noqa: N802
                return self._name

            def setGroupDesc(self, description):  # noqa: N802
                self._description = description

            def getGroupDesc(self):  # noqa: N802
                return self._description

            group_name = property(getGroupName)
            group_desc = property(getGroupDesc)

        return FlexringProcessGroup

    class FlexringBackend(Collectives, c10d.Backend):
        def __init__(self, store, rank, size, timeout, options=None):
            super().__init__(store, rank, size, timeout)
            self._options = c10d.Backend.Options(NAME, timeout) if options is None else options

        @property
        def options(self):
            return self._options

        def split(self, store, ranks, options=None):
            """The backend of a group of some of these ranks; None for other ranks. Its communicator is created by the first
            call in it."""
            if self._number not in ranks:
                return None
            timeout = self._limit if options is None else options._timeout
            return type(self)(store, list(ranks).index(self._number), len(ranks), timeout, options)

    return FlexringBackend


@functools.lru_cache(maxsize=None)
def _class():
    return _define_class()


def _create(opts, _options=None):
    """The process group for options of torch."""
    return _class()(opts.store, opts.group_rank, opts.group_size, opts.timeout)


def standalone(comm):
    """The calls of c10d on a communicator, for use without a process group."""
    calls = _class()(None, comm.rank, comm.size, datetime.timedelta(0))
    calls._comm = comm
    return calls


def _refuse(*_arguments):
    raise RuntimeError(
        f"flexring as a backend needs torch {'.'.join(map(str, _OLDEST))} or later, but this is {torch.__version__}: fix: install a "
        'later one, or use init_process_group("gloo") and flexring.torch.register(model), which averages the gradients of '
        "DistributedDataParallel by flexring"
    )


def register():
    """Makes ``init_process_group("flexring")`` known to torch. Has no effect the second time."""
    if NAME.upper() in dist.Backend._plugins:
        return
    if _VERSION < (2, 0):
        dist.Backend.register_backend(NAME, _refuse)
    elif _VERSION < _OLDEST:
        dist.Backend.register_backend(NAME, _refuse, devices=["cpu", "cuda"])
    else:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
