"""send and recv of c10d: messages between two ranks, which need not be made in one order with other calls.

A rank may start a send, then other calls, and the receive of the answer last, and the other rank does the same. So each direction
between two ranks, and each tag, has a communicator of its own: a channel. Owns the channels of a group.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from ._library import FlexringError
from ._torch_join import Meeting
from ._torch_work import CallLine
from .communicator import Communicator

# The ranks of a channel.
_SENDER, _RECEIVER = 0, 1


class Channel:
    """Messages of one direction and tag. The first one creates its communicator, in the thread that waits for it."""

    def __init__(self, meeting: Meeting, sender: int, receiver: int, tag: int, rank: int) -> None:
        self._meeting = meeting
        self._name = f"/{sender}>{receiver}/{tag}"
        self._sender, self._receiver = sender, receiver
        self._rank = _SENDER if rank == sender else _RECEIVER
        self.line = CallLine()
        self._comm: Communicator | None = None
        self._error: Exception | None = None

    def send(self, vector: Any, stream: Any) -> None:
        self._named(lambda comm: comm.send(vector, _RECEIVER, stream=stream))

    def recv(self, vector: Any, stream: Any) -> None:
        self._named(lambda comm: comm.recv(vector, _SENDER, stream=stream))

    def _named(self, function: Callable[[Communicator], object]) -> None:
        """Makes a call. Its error names the ranks of the group, because those of the channel are others."""
        if self._error is not None:
            raise self._error
        try:
            comm = self._comm
            if comm is None:
                comm = self._meeting.join(self._name, self._rank, 2, self._sender, lambda: self._error)
                # The channel may have ended meanwhile.
                if self._error is not None:
                    comm.close()
                    raise self._error
                self._comm = comm
            function(comm)
        except FlexringError as error:
            if error is self._error:
                raise
            self._error = FlexringError(
                error.code,
                f"a message from rank {self._sender} to rank {self._receiver} failed: {error} (rank 0 of the message's communicator is "
                f"rank {self._sender} of the process group, rank 1 is rank {self._receiver})",
            )
            raise self._error from error

    def abort(self) -> None:
        """Ends a running call on both ranks. A call that waits for the other rank's first one ends on this rank."""
        comm = self._comm
        if comm is not None:
            with contextlib.suppress(FlexringError):
                comm.abort()
        elif self._error is None:
            self._error = FlexringError(
                FlexringError.ABORTED,
                f"rank {self._meeting.rank} aborted a message from rank {self._sender} to rank {self._receiver} before both had begun it",
            )

    def close(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()


class Channels:
    """The channels of one rank of a group."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank
        self._lock = threading.Lock()
        self._channels: dict[tuple[int, int, int], Channel] = {}

    def to(self, peer: int, tag: int) -> Channel:
        return self._channel(self._rank, peer, tag)

    def of(self, peer: int, tag: int) -> Channel:
        return self._channel(peer, self._rank, tag)

    def _channel(self, sender: int, receiver: int, tag: int) -> Channel:
        with self._lock:
            key = sender, receiver, tag
            if key not in self._channels:
                if sender == receiver:
                    raise ValueError(f"rank {sender} cannot send to itself: fix: copy the tensor")
                self._channels[key] = Channel(self._meeting, *key, self._rank)
            return self._channels[key]

    def lines(self) -> tuple[list[CallLine], list[CallLine]]:
        """The calls of sends and those of receives."""
        with self._lock:
            channels = list(self._channels.items())
        sends = [channel.line for (sender, _, _), channel in channels if sender == self._rank]
        return sends, [channel.line for (_, receiver, _), channel in channels if receiver == self._rank]

    def end_sends(self, error: Exception) -> None:
        """Ends the channels to other ranks, in which no call runs: their receives that wait end, and later sends raise ``error``."""
        with self._lock:
            for (sender, _, _), channel in self._channels.items():
                if sender == self._rank:
                    channel._error = channel._error or error
                    channel.close()

    def end(self, error: Exception, abort: bool) -> None:
        """Ends all channels: later messages raise ``error``."""
        with self._lock:
            for channel in self._channels.values():
                channel._error = channel._error or error
                if abort:
                    channel.abort()
                channel.close()
