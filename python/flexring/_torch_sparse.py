"""The all-reduce of sparse tensors, as Gloo has it: sums, whose elements are those that any rank has.

Must not know process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._torch_tensors import numbers
from .communicator import Communicator


def all_reduce_sparse(tensors: Sequence[torch.Tensor], op: Any) -> Callable[[Communicator, Any], None]:
    """A call that replaces each tensor by the sum over all ranks."""
    name = getattr(op, "op", op).name
    if name != "SUM":
        raise RuntimeError(f"sparse tensors have no reduction {name}: fix: use SUM, or a dense tensor, by .to_dense()")
    for tensor in tensors:
        if tensor.layout != torch.sparse_coo:
            raise TypeError(f"the tensor is {tensor.layout}, but sums are of sparse_coo: fix: use its .to_sparse_coo()")

    def call(comm: Communicator, stream: Any) -> None:
        for tensor in tensors:
            tensor.copy_(_sum(comm, stream, tensor))

    return call


def _sum(comm: Communicator, stream: Any, tensor: torch.Tensor) -> torch.Tensor:
    own = tensor.coalesce()
    indices, values = own.indices(), own.values()
    # The number of elements, and what must be equal. It is compared on the host.
    form = [indices.shape[1], tensor.sparse_dim(), *tensor.shape]
    forms = comm.all_gather(torch.tensor(form), out=torch.empty(comm.size * len(form), dtype=torch.int64))
    rows = forms.view(comm.size, -1).tolist()
    for rank, row in enumerate(rows):
        if row[1:] != form[1:]:
            raise ValueError(
                f"rank {rank} has a sparse tensor of shape {row[2:]} with {row[1]} sparse dimensions, rank {comm.rank} one of shape "
                f"{form[2:]} with {form[1]}"
            )
    counts = [row[0] for row in rows]
    longest = max(counts)
    all_indices = _gather(comm, stream, indices.t(), longest)
    all_values = _gather(comm, stream, values, longest)
    kept_indices = torch.cat([part[:count] for part, count in zip(all_indices, counts)])
    kept_values = torch.cat([part[:count] for part, count in zip(all_values, counts)])
    total = torch.sparse_coo_tensor(kept_indices.t(), kept_values, tensor.shape, check_invariants=False)
    return total.coalesce()


def _gather(comm: Communicator, stream: Any, rows: torch.Tensor, longest: int) -> torch.Tensor:
    """The rows of each rank, with rows of zeros up to the longest."""
    own = rows.new_zeros((longest, *rows.shape[1:]))
    own[: len(rows)] = rows
    whole = rows.new_empty((comm.size, *own.shape))
    if own.numel():
        comm.all_gather(numbers(own, "sum"), out=numbers(whole, "sum"), stream=stream)
    return whole
