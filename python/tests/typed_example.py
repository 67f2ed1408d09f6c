"""Calls of every public function, for ``mypy --strict``; not run. Strict mypy also reports a
``type: ignore`` on a line without an error, so these lines must be errors."""

from array import array

import flexring


def train(gradients: "array[float]") -> float:
    with flexring.Communicator.from_env() as comm:
        comm.all_reduce(gradients, op="avg")
        comm.all_reduce(gradients, op=flexring.premul_sum(0.5))
        comm.all_reduce(gradients, opp="sum")  # type: ignore[call-arg]
        comm.all_reduce(gradients, op="median")  # type: ignore[arg-type]
        comm.broadcast(gradients, root="0")  # type: ignore[arg-type]
        request = comm.all_reduce_async(gradients)
        comm.broadcast_async(comm.reduce_async(gradients, op="max").wait(), root=1).wait()
        comm.reduce_scatter_async(comm.all_gather_async(gradients).wait(), opp="sum")  # type: ignore[call-arg]
        shares = comm.reduce_scatter(comm.all_gather(request.wait()))
        everything = comm.all_to_all(comm.scatter(shares, gradients), shares, receive_counts=[1, 2])
        comm.gather(everything, root=0)
        comm.gather(everything, rot=0)  # type: ignore[call-arg]
        with flexring.group():
            comm.send(shares, 0)
            comm.recv(everything, peer=0)
        comm.send(shares, "0")  # type: ignore[arg-type]
        comm.barrier()
        group = comm.split(color=comm.rank % 2)
        if group is not None:
            group.reduce(shares)
        for rail in comm.rail_statistics():
            print(rail.device, rail.port + rail.bytes_sent, rail.retransmissions or 0)
            rail.port = 2  # type: ignore[misc]
        major, minor, patch = flexring.version()
        print(flexring.library_path(), major, minor, patch, request.done(), comm.size)
        return shares[0]


def go_on(comm: flexring.Communicator) -> flexring.Communicator:
    try:
        comm.status()
        return comm
    except flexring.FlexringError as error:
        print(error.code, error.message)
        return comm.shrink(exclude=[0])
