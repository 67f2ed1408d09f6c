"""Element types and operations that PyTorch has and NCCL has not."""

import array
import unittest

from flexring import FlexringError

from .world import WorldTest

try:
    import numpy
except ImportError:
    numpy = None


class Types(WorldTest):
    def test_16_bit_integers_and_bits(self):
        def body(comm):
            vector = array.array("h", [-300, 5 + comm.rank])
            self.assertEqual(list(comm.all_reduce(vector)), [-600, 11])
            bits = array.array("H", [1 << comm.rank, 0xFF00, 0x10])
            self.assertEqual(list(comm.all_reduce(bits[:], "bor")), [3, 0xFF00, 0x10])
            self.assertEqual(list(comm.all_reduce(bits[:], "band")), [0, 0xFF00, 0x10])
            self.assertEqual(list(comm.all_reduce(bits[:], "bxor")), [3, 0, 0])
            with self.assertRaisesRegex(FlexringError, "no band of elements of type float"):
                comm.all_reduce(array.array("f", [1]), "band")

        self.world(2, body)

    @unittest.skipUnless(numpy, "needs numpy")
    def test_booleans(self):
        def body(comm):
            given = numpy.array([True, False, comm.rank == 0])
            for op, wanted in (("sum", [1, 0, 1]), ("prod", [1, 0, 0]), ("bxor", [0, 0, 1]), ("band", [1, 0, 0])):
                vector = given.copy()
                comm.all_reduce(vector, op)
                self.assertEqual(vector.tolist(), [bool(element) for element in wanted], op)
            with self.assertRaisesRegex(FlexringError, "no avg of elements of type bool"):
                comm.all_reduce(given.copy(), "avg")

        self.world(2, body)
