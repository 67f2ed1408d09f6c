"""flexring as a backend of torch.distributed: ``torch.distributed.init_process_group("flexring")``.

From torch 2.14 on this needs no import, because torch finds :func:`register` by the entry point ``torch.distributed.backends``.
For torch 2.8 to 2.13, ``import flexring.torch`` first. Older versions refuse the backend and say what to use.

Owns the class of process groups or backends that each version of torch takes. ``_torch_collectives`` has their calls.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ._torch_collectives import NAME, VERSION, Collectives

if TYPE_CHECKING:
    from .communicator import Communicator

_OLDEST = (2, 8)


def _define_class() -> type[Collectives]:
    """The class of process groups for this version of torch."""
    from torch._C import _distributed_c10d as c10d

    if VERSION < (2, 14):

        class FlexringProcessGroup(Collectives, dist.ProcessGroup):
            """A group without backends of torch, so that it also answers what c10d asks the backend of a device."""

            _name = _description = ""

            def _get_backend(self, _device: Any) -> Any:
                return self

            # C++ asks these for the name, which the class of torch has from its backends only.
            def setGroupName(self, name: str) -> None:  # noqa: N802
                self._name = name

            def getGroupName(self) -> str:  # noqa: N802
                return self._name

            def setGroupDesc(self, description: str) -> None:  # noqa: N802
                self._description = description

            def getGroupDesc(self) -> str:  # noqa: N802
                return self._description

            group_name = property(getGroupName)
            group_desc = property(getGroupDesc)

        return FlexringProcessGroup

    class FlexringBackend(Collectives, c10d.Backend):
        def __init__(
            self, store: Any, rank: int, size: int, timeout: datetime.timedelta, options: Any = None
        ) -> None:
            super().__init__(store, rank, size, timeout)
            self._options = c10d.Backend.Options(NAME, timeout) if options is None else options

        @property
        def options(self) -> Any:
            return self._options

        def split(self, store: Any, ranks: Sequence[int], options: Any = None) -> FlexringBackend | None:
            """The backend of a group of some of these ranks; None for other ranks. Its communicator is created by the first
            call in it."""
            if self._number not in ranks:
                return None
            timeout = self._limit if options is None else options._timeout
            return type(self)(store, list(ranks).index(self._number), len(ranks), timeout, options)

    return FlexringBackend


@functools.lru_cache(maxsize=None)
def _class() -> type[Collectives]:
    return _define_class()


# With TORCH_DISTRIBUTED_DEBUG=DETAIL torch keeps the part of a backend that is in C++ only.
_kept: list[Collectives] = []


def _create(opts: Any, _options: Any = None) -> Collectives:
    """The process group for options of torch."""
    group = _class()(opts.store, opts.group_rank, opts.group_size, opts.timeout)
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        _kept.append(group)
    return group


def standalone(comm: Communicator) -> Collectives:
    """The calls of c10d on a communicator, for use without a process group."""
    calls = _class()(None, comm.rank, comm.size, datetime.timedelta(0))
    calls._comm = comm
    return calls


def _refuse(*_arguments: Any) -> None:
    raise RuntimeError(
        f"flexring as a backend needs torch {'.'.join(map(str, _OLDEST))} or later, but this is {torch.__version__}: fix: install a "
        'later one, or use init_process_group("gloo") and flexring.torch.register(model), which averages the gradients of '
        "DistributedDataParallel by flexring"
    )


def register() -> None:
    """Makes ``init_process_group("flexring")`` known to torch. Has no effect the second time."""
    if NAME.upper() in dist.Backend._plugins:
        return
    if VERSION < (2, 0):
        dist.Backend.register_backend(NAME, _refuse)
    elif VERSION < _OLDEST:
        dist.Backend.register_backend(NAME, _refuse, devices=["cpu", "cuda"])
    else:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
