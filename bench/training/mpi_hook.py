"""Open MPI as a communication hook of DistributedDataParallel, in the way of torch's MPI backend, which torch's wheels lack: one thread makes
blocking calls, one after another.

Owns MPI's start and end in this process, which mpirun started.
"""

import concurrent.futures
import ctypes

import torch

from mpi_launch import LIBRARY

THREAD_SERIALIZED = 2
# MPI_IN_PLACE of Open MPI.
IN_PLACE = ctypes.c_void_p(1)


class MpiHook:
    def __init__(self):
        self._mpi = ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
        # One thread makes all calls of MPI, the first and the last, too.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "mpi")
        self._thread.submit(self._start).result()

    def _start(self):
        provided, size = ctypes.c_int(), ctypes.c_int()
        self._checked("MPI_Init_thread", None, None, THREAD_SERIALIZED, ctypes.byref(provided))
        if provided.value < THREAD_SERIALIZED:
            raise RuntimeError("this MPI cannot be used by a thread beside the main thread")
        self._world, self._float, self._sum = (
            ctypes.byref(ctypes.c_char.in_dll(self._mpi, f"ompi_mpi_{name}")) for name in ("comm_world", "float", "op_sum")
        )
        self._checked("MPI_Comm_size", self._world, ctypes.byref(size))
        self.size = size.value

    def _checked(self, name, *arguments):
        if code := getattr(self._mpi, name)(*arguments):
            raise RuntimeError(f"{name} failed with code {code}")

    def average(self, bucket):
        """Averages the gradients of a bucket. Returns a future of them."""
        future, gradients = torch.futures.Future(), bucket.buffer()
        self._thread.submit(self._average, gradients, future)
        return future

    def _average(self, gradients, future):
        try:
            vector = ctypes.c_void_p(gradients.data_ptr())
            self._checked("MPI_Allreduce", IN_PLACE, vector, gradients.numel(), self._float, self._sum, self._world)
            future.set_result(gradients.div_(self.size))
        except Exception as error:
            future.set_exception(error)

    def close(self):
        """After the last call of all ranks."""
        self._thread.submit(self._checked, "MPI_Finalize").result()
