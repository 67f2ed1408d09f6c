"""flexring for PyTorch: tensors in shared memory, and the gradients of DistributedDataParallel, on CPUs and GPUs.

    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(model)
    flexring.torch.register(model)

Works with PyTorch 1.13 and 2.
"""

import queue
import threading
import weakref

import torch
import torch.distributed as dist

from ._vector import dtype_name
from .communicator import Communicator, unique_id

__all__ = ["alloc", "allreduce_hook", "from_process_group", "register"]


def from_process_group(group=None):
    """A communicator of the ranks of a process group (by default all), with the same numbers. The group's own
    backend only carries the id by which the ranks meet."""
    group = dist.group.WORLD if group is None else group
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    first = _global_rank(group, 0)
    message = [None]
    if rank == 0:
        try:
            message = [unique_id()]
        except Exception as error:  # the others wait for the id: they are told why there is none
            message = [error]
    dist.broadcast_object_list(message, src=first, group=group)
    if isinstance(message[0], Exception):
        raise message[0]
    return Communicator.from_unique_id(message[0], rank, size)


def _global_rank(group, rank):
    if group is dist.group.WORLD:
        return rank
    if hasattr(dist, "get_global_rank"):
        return dist.get_global_rank(group, rank)
    return dist.distributed_c10d._get_global_rank(group, rank)


def alloc(comm, shape, dtype=torch.float32):
    """A tensor of zeros in memory that the other ranks of this node read directly."""
    shape = torch.Size((shape,) if isinstance(shape, int) else shape)
    dtype_name(dtype)
    size = torch.empty(0, dtype=dtype).element_size()
    if shape.numel() == 0:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(comm.alloc_bytes(shape.numel() * size), dtype=dtype).view(shape)


class _Waiter:
    """A thread that completes futures in the order in which their calls were made, which is the order in which
    they end."""

    def __init__(self):
        self._queue = queue.SimpleQueue()
        threading.Thread(target=_wait_for_each, args=(self._queue,), name="flexring-waiter", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def future_of(self, request):
        future = torch.futures.Future()
        self._queue.put((request, future))
        return future


def _wait_for_each(requests):
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
        # The next item may be long in coming; what this one refers to is free now.
        del item, request, future


_waiters = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _waiter_of(comm):
    with _lock:
        waiter = _waiters.get(comm)
        if waiter is None:
            waiter = _waiters[comm] = _Waiter()
        return waiter


def allreduce_hook(comm, bucket):
    """Averages the gradients of a bucket over all ranks while the backward pass goes on: a communication hook for
    ``DistributedDataParallel.register_comm_hook``, whose state is the communicator. What goes wrong is raised by the
    backward pass; on a GPU by a later one, since this one does not wait for the end."""
    gradients = bucket.buffer()
    if gradients.is_cuda:
        return _average_on_gpu(comm, gradients)
    request = comm.all_reduce_async(gradients, op="avg")
    # DDP looks at the value of a future and not at its exception; of one that follows it sees both.
    return _waiter_of(comm).future_of(request).then(lambda future: future.value())


# By communicator and device: the stream in which buckets are averaged.
_side_streams = weakref.WeakKeyDictionary()


def _side_stream(comm, device):
    with _lock:
        streams = _side_streams.setdefault(comm, {})
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)
        return streams[device]


def _average_on_gpu(comm, gradients):
    """The same in a stream beside the backward pass's, which would wait for the other ranks otherwise."""
    device = gradients.device
    side = _side_stream(comm, device)
    side.wait_stream(torch.cuda.current_stream(device))
    comm.all_reduce(gradients, op="avg", stream=side)
    future = torch.futures.Future(devices=[device])
    # A future on a GPU remembers what is in the current stream when it is completed. Whoever asks for its value has
    # their own stream wait for that, not themselves.
    with torch.cuda.stream(side):
        future.set_result(gradients)
    return future


def register(model, comm=None):
    """Lets flexring average the gradients of a DistributedDataParallel model, and returns the communicator: the
    one given, or a new one of the ranks of the model's process group."""
    if comm is None:
        comm = from_process_group(model.process_group)
    size = dist.get_world_size(model.process_group)
    if comm.size != size:
        raise ValueError(f"the model is on {size} ranks and the communicator on {comm.size}")
    model.register_comm_hook(comm, allreduce_hook)
    return comm
