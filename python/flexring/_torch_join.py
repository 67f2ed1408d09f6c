"""How the ranks of a process group meet: communicators whose ids pass through the group's store.

Owns the keys in the store. Must not know which calls the communicators are for.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable
from typing import Any

from ._handle import unique_id
from ._library import FlexringError
from .communicator import Communicator

# The beginning of the keys of communicators' ids in the store of the group.
_ID = "flexring_unique_id"

# Seconds between two looks at the store: at first, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1


def _never_ended() -> Exception | None:
    return None


class Meeting:
    """The place in a group's store where its ranks find each other. ``limit`` is the group's timeout."""

    def __init__(self, store: Any, rank: int, limit: datetime.timedelta) -> None:
        self._store, self.rank, self._limit = store, rank, limit
        # The store may have the ids of an earlier group: each rank counts its groups.
        self._life = 0 if store is None else store.add(f"{_ID}/rank{rank}", 1)

    def join(
        self,
        name: str,
        rank: int,
        size: int,
        first: int,
        ended: Callable[[], Exception | None] = _never_ended,
        limit: datetime.timedelta | None = None,
    ) -> Communicator:
        """Creates the communicator ``name`` as its rank ``rank`` of ``size``. Its rank 0, which is rank ``first`` of the group,
        creates the id and passes it through the store; the others wait for it. An error that ``ended`` returns ends that wait. The
        limit is the group's timeout if none is given."""
        limit = limit or self._limit
        key = f"{_ID}/{self._life}{name}"
        if rank == 0:
            try:
                id = unique_id()
            except Exception as error:
                self._store.set(key, b"-" + str(error).encode())
                raise
            self._store.set(key, b"+" + id)
        else:
            id = self._wait_for(key, first, ended, limit)
        return Communicator.from_unique_id(id, rank, size, timeout=limit.total_seconds())

    def leave(self) -> None:
        """Tells the other ranks that this one publishes no more ids."""
        if self._store is not None:
            # The store is gone if its rank has ended.
            with contextlib.suppress(RuntimeError):
                self._store.set(self._end_of(self.rank), b"")

    def _end_of(self, rank: int) -> str:
        """The key of a rank that has left the group."""
        return f"{_ID}/{self._life}/end{rank}"

    def _wait_for(
        self, key: str, first: int, ended: Callable[[], Exception | None], limit: datetime.timedelta
    ) -> bytes:
        try:
            self._poll(key, first, ended, limit.total_seconds())
        except RuntimeError as error:
            if error is ended() or isinstance(error, FlexringError):
                raise
            raise FlexringError(
                FlexringError.RENDEZVOUS_FAILED,
                f"rank {first} of the process group published no flexring id within {limit.total_seconds()} s: it did not make "
                f"the call in this group, or has ended ({error}): fix: look for the first error of rank {first}",
            ) from error
        message = bytes(self._store.get(key))
        if message[:1] != b"+":
            raise FlexringError(
                FlexringError.RENDEZVOUS_FAILED, f"rank {first} could not create a flexring id: {message[1:].decode()}"
            )
        return message[1:]

    def _poll(self, key: str, first: int, ended: Callable[[], Exception | None], seconds: float) -> None:
        """Returns when the store has the key. A TCPStore serves one request of a rank at a time, and the wait for a key is one: it
        would keep this rank's other threads from publishing ids, for which other ranks wait."""
        limit = time.monotonic() + seconds
        pause = _FIRST_PAUSE
        while not self._store.check([key]):
            error = ended()
            if error is not None:
                raise error
            # A rank publishes ids before its end.
            if self._store.check([self._end_of(first)]) and not self._store.check([key]):
                raise FlexringError(
                    FlexringError.PEER_LOST,
                    f"rank {first} has left the process group without the call that rank {self.rank} waits for: fix: make the same "
                    "calls on all ranks before destroy_process_group",
                )
            left = limit - time.monotonic()
            if left <= 0:
                raise RuntimeError(f"timeout after {seconds} s")
            time.sleep(min(pause, left))
            pause = min(1.25 * pause, _LONGEST_PAUSE)
