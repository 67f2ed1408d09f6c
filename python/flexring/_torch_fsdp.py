"""Parameters and gradients of ``fully_shard`` over flexring, in groups of any backend: ``flexring.torch.register(model)``.

Owns a backend for each group that FSDP uses, made by its first call there. Must not know how calls run.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from . import torch_backend
from ._torch_collectives import Collectives

# The backend of each group. Groups that torch has destroyed go with their backends.
_backends: weakref.WeakKeyDictionary[Any, Collectives] = weakref.WeakKeyDictionary()


def _backend_of(group: Any) -> Collectives:
    backend = _backends.get(group)
    if backend is None:
        # The id of the communicator passes through the group itself.
        from .torch import from_process_group

        comm = from_process_group(group)
        backend = _backends[group] = torch_backend.standalone(comm)
    return backend


class _Allocation:
    # The backend of the latest call. Memory of any of this process's backends will do.
    _backend: Collectives | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._backend is None:
            return torch.empty(*size, dtype=dtype, device=device)
        return self._backend.allocate_tensor(math.prod(size), dtype=dtype, device=device).view(*size)

    def _backend_in(self, group: Any) -> Collectives:
        self._backend = _backend_of(group)
        return self._backend


class _AllGather(_Allocation, AllGather):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        options = AllgatherOptions()
        options.asyncOp = async_op
        return self._backend_in(group).all_gather_single(output_tensor, input_tensor, options)


class _ReduceScatter(_Allocation, ReduceScatter):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        options = ReduceScatterOptions()
        options.reduceOp, options.asyncOp = op, async_op
        return self._backend_in(group).reduce_scatter_single(output_tensor, input_tensor, options)


def register(model: Any) -> None:
    """Uses flexring for the all-gathers and reduce-scatters of each part of the model that is sharded."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not parts:
        raise TypeError(
            f"a {type(model).__name__} is neither a DistributedDataParallel model nor one of fully_shard: fix: wrap it first"
        )
    gather, scatter = _AllGather(), _ReduceScatter()
    for part in parts:
        part.set_custom_all_gather(gather)
        part.set_custom_reduce_scatter(scatter)
