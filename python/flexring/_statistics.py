"""What a communicator's rails have carried.

Must not know how a communicator is made or freed.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ._library import CRailStatistics, check, library


@dataclass(frozen=True)
class RailStatistics:
    """What a rail has carried since the communicator was made. A rail is a port of an RDMA device.

    A message is an RDMA write of the library, so the short ones count that announce calls and grant permission to write. What
    is written again because a connection broke counts again.
    """

    device: str
    """The name of the device, such as ``mlx5_0``."""
    port: int
    """The number of the port, from 1."""
    bytes_sent: int
    """Bytes that this rank has given to the device to send, without headers."""
    bytes_received: int
    """Bytes that peers have written to this rank's memory."""
    messages_sent: int
    """Messages that this rank has given to the device to send."""
    messages_received: int
    """Messages that have arrived."""
    retransmissions: int | None
    """How often the port has sent something again, for any program. None if its driver does not count that."""
    reconnections: int
    """How often a connection over this rail was made again after it had broken."""


def of_c(rail: CRailStatistics) -> RailStatistics:
    """The statistics that the C API gave."""
    return RailStatistics(
        device=rail.device.decode("utf-8", "replace"),
        port=rail.port,
        bytes_sent=rail.bytes_sent,
        bytes_received=rail.bytes_received,
        messages_sent=rail.messages_sent,
        messages_received=rail.messages_received,
        retransmissions=None if rail.retransmissions < 0 else rail.retransmissions,
        reconnections=rail.reconnections,
    )


def rail_statistics(communicator: int) -> list[RailStatistics]:
    """The statistics of the communicator at this address."""
    count, size = ctypes.c_size_t(), ctypes.sizeof(CRailStatistics)
    # The number of rails is fixed when a communicator is made.
    check(library.flexring_comm_rail_statistics(communicator, size, None, 0, ctypes.byref(count)))
    rails = (CRailStatistics * count.value)()
    check(library.flexring_comm_rail_statistics(communicator, size, rails, len(rails), ctypes.byref(count)))
    return [of_c(rail) for rail in rails]
