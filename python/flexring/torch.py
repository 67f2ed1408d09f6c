"""flexring for PyTorch: tensors in shared memory, and gradient averaging for DistributedDataParallel, on CPUs and GPUs.

    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(model)
    flexring.torch.register(model)

Works with PyTorch 1.13 and 2. Importing it also makes ``init_process_group("flexring")`` known to torch (``torch_backend``).
"""

import queue
import threading
import weakref
from typing import Any, Optional

import torch
import torch.distributed as dist

from . import torch_backend
from ._handle import Request, unique_id
from ._vector import dtype_name
from .communicator import Communicator

__all__ = ["alloc", "allreduce_hook", "from_process_group", "register"]


def from_process_group(group: Any = None) -> Communicator:
    """Creates a communicator of the ranks of a process group (by default of all ranks), with the same rank numbers. The
    group's own backend is used only to distribute the id of the communicator, which is a secret of the job: where others can
    read the group's connections, set FLEXRING_SECRET as well."""
    group = dist.group.WORLD if group is None else group
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    first = _global_rank(group, 0)
    message: list[Any] = [None]
    if rank == 0:
        try:
            message = [unique_id()]
        except Exception as error:  # sent to the other ranks, which wait for the id
            message = [error]
    dist.broadcast_object_list(message, src=first, group=group)
    if isinstance(message[0], Exception):
        raise message[0]
    return Communicator.from_unique_id(message[0], rank, size)


def _global_rank(group: Any, rank: int) -> Any:
    if group is dist.group.WORLD:
        return rank
    if hasattr(dist, "get_global_rank"):
        return dist.get_global_rank(group, rank)
    return dist.distributed_c10d._get_global_rank(group, rank)


def alloc(comm: Communicator, shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Allocates a tensor of zeros in memory that the other ranks of this node read directly."""
    shape = torch.Size((shape,) if isinstance(shape, int) else shape)
    dtype_name(dtype)
    size = torch.empty(0, dtype=dtype).element_size()
    if shape.numel() == 0:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(comm.alloc_bytes(shape.numel() * size), dtype=dtype).view(shape)


class _Waiter:
    """A thread that completes futures in the order in which their calls were made. Calls also end in this order."""

    def __init__(self) -> None:
        self._queue: "queue.SimpleQueue[Any]" = queue.SimpleQueue()
        threading.Thread(target=_wait_for_each, args=(self._queue,), name="flexring-waiter", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def future_of(self, request: Request[Any]) -> Any:
        future = torch.futures.Future()
        self._queue.put((request, future))
        return future


def _wait_for_each(requests: "queue.SimpleQueue[Any]") -> None:
    while True:
        item = requests.get()
        if item is None:
            return
        request, future = item
        try:
            result = request.wait()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        # Drop the references now, because it may take long until the next item arrives.
        del item, request, future


_waiters: "weakref.WeakKeyDictionary[Communicator, _Waiter]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _waiter_of(comm: Communicator) -> _Waiter:
    with _lock:
        waiter = _waiters.get(comm)
        if waiter is None:
            waiter = _waiters[comm] = _Waiter()
        return waiter


def allreduce_hook(comm: Communicator, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages the gradients of a bucket over all ranks during the backward pass. A communication hook for
    ``DistributedDataParallel.register_comm_hook`` whose state is the communicator. The backward pass raises a failure; on
    a GPU a later backward pass does, because the current one does not wait for the call."""
    gradients = bucket.buffer()
    if gradients.is_cuda:
        return _average_on_gpu(comm, gradients)
    request = comm.all_reduce_async(gradients, op="avg")
    # DDP reads the value of a future, but not its exception. A future made by then() raises the exception when it is read.
    return _waiter_of(comm).future_of(request).then(lambda future: future.value())


# The stream in which buckets are averaged, by communicator and device.
_side_streams: "weakref.WeakKeyDictionary[Communicator, dict[Any, Any]]" = weakref.WeakKeyDictionary()


def _side_stream(comm: Communicator, device: torch.device) -> Any:
    with _lock:
        streams = _side_streams.setdefault(comm, {})
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)
        return streams[device]


def _average_on_gpu(comm: Communicator, gradients: torch.Tensor) -> Any:
    """Averages in a side stream, so that the stream of the backward pass does not wait for the other ranks."""
    device = gradients.device
    side = _side_stream(comm, device)
    side.wait_stream(torch.cuda.current_stream(device))
    comm.all_reduce(gradients, op="avg", stream=side)
    future = torch.futures.Future(devices=[device])
    # A future on a GPU records an event in the stream that is current when it is completed. Reading its value makes the
    # reader's stream wait for that event; the reader itself does not wait.
    with torch.cuda.stream(side):
        future.set_result(gradients)
    return future


def register(model: Any, comm: Optional[Communicator] = None) -> Optional[Communicator]:
    """Uses flexring to average the gradients of a DistributedDataParallel model. Returns the communicator: ``comm``, or a
    new one of the ranks of the model's process group.

    For a model of ``fully_shard`` (torch 2.11 and later), uses flexring to gather its parameters and to reduce its gradients,
    in the model's own groups, and returns None. All-reduces between replicas stay with the group's backend."""
    if not hasattr(model, "register_comm_hook"):
        if comm is not None:
            raise ValueError("a model of fully_shard has communicators of its own groups: fix: leave comm out")
        _torch_fsdp().register(model)
        return None
    if comm is None:
        comm = from_process_group(model.process_group)
    size = dist.get_world_size(model.process_group)
    if comm.size != size:
        raise ValueError(f"the model is on {size} ranks and the communicator on {comm.size}")
    model.register_comm_hook(comm, allreduce_hook)
    return comm


def _torch_fsdp() -> Any:
    try:
        from . import _torch_fsdp
    except ImportError as error:
        raise RuntimeError(
            f"models of fully_shard need torch 2.11 or later, but this is {torch.__version__}: fix: install a later one, or use "
            'init_process_group("flexring")'
        ) from error
    return _torch_fsdp


torch_backend.register()
