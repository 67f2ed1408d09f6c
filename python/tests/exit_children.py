"""Ranks that are children of multiprocessing, of which one fails. Prints in which order they end."""

import array
import multiprocessing
import sys
from multiprocessing.connection import wait


def run(id, rank):
    import flexring

    comm = flexring.Communicator.from_unique_id(id, rank, 2)
    vector = array.array("f", [1])
    comm.all_reduce(vector)
    if rank == 1:
        raise ValueError("no data")
    try:
        comm.all_reduce(vector)
    except flexring.FlexringError as error:
        print(error, flush=True)
        raise


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[2])
    children = [context.Process(target=run, args=(bytes.fromhex(sys.argv[1]), rank)) for rank in range(2)]
    for child in children:
        child.start()
    first = wait([child.sentinel for child in children])
    print("first:", [rank for rank in range(2) if children[rank].sentinel in first])
    for child in children:
        child.join()
