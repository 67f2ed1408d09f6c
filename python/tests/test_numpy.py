"""numpy arrays."""

import gc
import importlib.util
import unittest
import weakref

import flexring

from .world import WorldTest

try:
    import numpy
except ImportError:
    numpy = None


@unittest.skipIf(numpy is None, "no numpy")
class Arrays(WorldTest):
    def test_arrays_of_every_type_and_shape_are_reduced(self):
        def body(comm):
            for name in "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64".split():
                vector = numpy.full((3, 5, 7), comm.rank + 1, name)
                comm.all_reduce(vector)
                numpy.testing.assert_array_equal(vector, numpy.full((3, 5, 7), 3, name))

        self.world(2, body)

    def test_bad_arrays_are_refused_with_a_message(self):
        def body(comm):
            matrix = numpy.zeros((4, 4), "float32")
            frozen = numpy.zeros(4, "float32")
            frozen.flags.writeable = False
            for error, message, vector in [
                (ValueError, "not contiguous", matrix.T[1:]),
                (ValueError, "not contiguous", matrix[:, 0]),
                (ValueError, "read-only", frozen),
                (TypeError, "complex64", numpy.zeros(4, "complex64")),
                (TypeError, "datetime64", numpy.zeros(4, "datetime64[s]")),
                (TypeError, "byte order", numpy.zeros(4, ">f4")),
            ]:
                with self.assertRaisesRegex(error, message):
                    comm.all_reduce(vector)

        self.world(1, body)

    def test_registered_arrays_are_reduced(self):
        def body(comm):
            vector = numpy.full(5000, comm.rank + 1.0, numpy.float32)
            with comm.registered(vector, vector, numpy.zeros(0)):
                comm.all_reduce(vector)
            comm.all_reduce(vector)
            return vector[4999]

        self.assertEqual(self.world(2, body), [6.0, 6.0])

    def test_alloc_returns_an_array_of_zeros(self):
        def body(comm):
            vector = comm.alloc((100, 30), dtype=numpy.float64)
            self.assertEqual((vector.shape, vector.dtype.name, vector.any()), ((100, 30), "float64", False))
            vector += comm.rank + 1
            comm.all_reduce(vector, op="avg")
            self.assertEqual(comm.alloc(0).size, 0)
            self.assertEqual(comm.alloc(5, "float16").nbytes, 10)
            if importlib.util.find_spec("ml_dtypes") is None:
                with self.assertRaisesRegex(TypeError, "bfloat16: fix: install ml_dtypes"):
                    comm.alloc(5, "bfloat16")
            with self.assertRaisesRegex(ValueError, "shape"):
                comm.alloc((2, -1))
            return vector[99, 29]

        self.assertEqual(self.world(2, body), [1.5, 1.5])

    def test_shared_memory_is_freed_with_its_last_view(self):
        def body(comm):
            vector = comm.alloc(1 << 20, "uint8")
            address = vector.ctypes.data
            view = vector[5:].reshape(-1, 1)
            del vector
            gc.collect()
            self.assertNotEqual(comm.alloc(1 << 20, "uint8").ctypes.data, address)
            view[0] = 1
            del view
            gc.collect()
            self.assertEqual(comm.alloc(1 << 20, "uint8").ctypes.data, address)

        self.world(1, body)

    def test_the_communicator_is_freed_with_its_last_array(self):
        def body(comm):
            vector = comm.alloc(10)
            handle = weakref.ref(comm._handle)
            comm.close()
            gc.collect()
            vector[:] = 1
            self.assertIsNotNone(handle())
            del vector
            gc.collect()
            self.assertIsNone(handle())

        self.world(1, body)
