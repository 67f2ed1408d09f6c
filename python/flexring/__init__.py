"""flexring: an all-reduce engine for clusters that are not symmetric.

    import flexring

    comm = flexring.Communicator.from_env()        # under torchrun, mpirun or srun
    comm.all_reduce(gradients, op="avg")           # a numpy array, a CPU tensor, an array.array, ...

``flexring.torch`` averages the gradients of DistributedDataParallel.
"""

from ._group import group
from ._handle import Request, unique_id
from ._library import FlexringError, library_path, version
from ._statistics import RailStatistics
from ._vector import premul_sum
from .communicator import Communicator

__all__ = [
    "Communicator",
    "FlexringError",
    "RailStatistics",
    "Request",
    "group",
    "library_path",
    "premul_sum",
    "unique_id",
    "version",
]
__version__ = "0.1.0"
