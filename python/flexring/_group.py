"""Groups of sends and receives: ``with flexring.group():``.

Owns the vectors of a group until its end, because the library only notes what is to be done. Must not know communicators.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ._library import check, library


class _Open(threading.local):
    """The groups of a thread that have not ended."""

    depth = 0
    owners: list[Any]

    def __init__(self) -> None:
        self.owners = []


_open = _Open()


def keep(*owners: Any) -> None:
    """Keeps these objects until the end of this thread's group, if it has one."""
    if _open.depth:
        _open.owners.extend(owners)


@contextlib.contextmanager
def group() -> Iterator[None]:
    """A block in which this thread's :meth:`Communicator.send` and :meth:`Communicator.recv` only note what is to be done. At its
    end they are made together: none of them waits for another, so ranks may exchange vectors in any order. The vectors must not be
    used before the end. Blocks may be nested; the end of the outermost one counts. Collectives are no part of a group: they run
    at once. If the block raises an exception, nothing is sent or received."""
    check(library.flexring_group_start())
    _open.depth += 1
    try:
        try:
            yield
        except BaseException:
            # A group with an operation that was refused, as this one is, makes none.
            library.flexring_send(None, 0, 0, 0, None, None)
            library.flexring_group_end()
            raise
        check(library.flexring_group_end())
    finally:
        _open.depth -= 1
        if not _open.depth:
            _open.owners.clear()
