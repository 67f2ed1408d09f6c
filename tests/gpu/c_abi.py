"""Pointers through the C ABI on a GPU: valid ones, freed ones, too short ones, and host memory with a stream."""

import ctypes
import os
import sys
import unittest
from ctypes import byref, c_size_t, c_uint64, c_void_p
from pathlib import Path

from libcuda import Driver

LIBRARY = os.environ.get("FLEXRING_LIBRARY") or Path(__file__).parent.parent.parent / "target/release/libflexring.so"
FLOAT32, SUM, INVALID_ARGUMENT = 7, 0, 1


class Pointers(unittest.TestCase):
    """One rank: its sums are its own vectors, and every check of arguments is made."""

    @classmethod
    def setUpClass(cls):
        try:
            cls.driver = Driver()
        except (OSError, RuntimeError) as error:
            raise unittest.SkipTest(f"no CUDA driver: {error}") from error
        cls.library = ctypes.CDLL(str(LIBRARY))
        cls.library.flexring_last_error.restype = ctypes.c_char_p
        os.environ.update(FLEXRING_RANK="0", FLEXRING_WORLD_SIZE="1")

    def setUp(self):
        self.comm = c_void_p()
        self.assertEqual(self.library.flexring_comm_init_from_env(byref(self.comm)), 0, self.last_error())
        self.stream = self.driver.stream()

    def tearDown(self):
        self.library.flexring_comm_free(self.comm)

    def last_error(self):
        message = self.library.flexring_last_error()
        return message.decode() if message else ""

    def all_reduce(self, send, receive, count, stream):
        return self.library.flexring_all_reduce(
            c_void_p(send), c_void_p(receive), c_size_t(count), FLOAT32, c_uint64(SUM), self.comm, stream
        )

    def test_memory_of_the_gpu_is_reduced_in_the_stream(self):
        given = (ctypes.c_float * 5000)(*range(5000))
        send, receive = self.driver.allocate(20000), self.driver.allocate(20000)
        self.driver.write(send, given)
        self.assertEqual(self.all_reduce(send, receive, 5000, self.stream), 0, self.last_error())
        got = (ctypes.c_float * 5000)()
        self.driver.read(receive, got, self.stream)
        self.assertTrue(list(got) == list(given), list(got)[:4])
        # In place, at an address within the allocation.
        self.assertEqual(self.all_reduce(receive + 400, receive + 400, 100, self.stream), 0, self.last_error())
        self.driver.read(receive, got, self.stream)
        self.assertTrue(list(got) == list(given), list(got)[:4])
        self.driver.free(send)
        self.driver.free(receive)

    def refused(self, send, receive, count, stream, message):
        self.assertEqual(self.all_reduce(send, receive, count, stream), INVALID_ARGUMENT, self.last_error())
        self.assertRegex(self.last_error(), message)
        # The communicator still works afterwards.
        self.test_memory_of_the_gpu_is_reduced_in_the_stream()

    def test_freed_memory_is_refused(self):
        gone = self.driver.allocate(1 << 21)
        self.driver.free(gone)
        for stream in (self.stream, None):
            self.refused(gone, gone, 1000, stream, "was it freed, or is it a GPU's")

    def test_a_vector_that_reaches_beyond_its_memory_is_refused(self):
        short = self.driver.allocate(4000)
        self.refused(short, short, 1 << 28, self.stream, "reach beyond their allocation")
        self.driver.free(short)

    def test_memory_of_the_host_has_no_stream(self):
        host = (ctypes.c_float * 10)()
        address = ctypes.addressof(host)
        self.refused(address, address, 10, self.stream, "the vectors are the host's memory")


if __name__ == "__main__":
    sys.exit(unittest.main())
