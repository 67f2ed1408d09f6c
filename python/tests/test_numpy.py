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


class Described:
    """An image of PIL describes its pixels like this."""

    __array_interface__ = {"data": (0, True), "shape": (0,), "typestr": "|u1", "version": 3}


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
                (ValueError, "read-only", numpy.float32(3)),
                (TypeError, "numpy.asarray", Described()),
                (TypeError, "complex256", numpy.zeros(4, "complex256")),
                (TypeError, "datetime64", numpy.zeros(4, "datetime64[s]")),
                (TypeError, "byte order", numpy.zeros(4, ">f4")),
            ]:
                with self.assertRaisesRegex(error, message):
                    comm.all_reduce(vector)

        self.world(1, body)

    def test_complex_numbers_are_summed_and_copied(self):
        def body(comm):
            rank, size = comm.rank, comm.size
            for name in "complex64 complex128".split():
                given = numpy.array([rank + 1j, 2 - rank * 1j, 5, 7], name)
                total = numpy.array([sum(range(size)) + size * 1j, 2 * size - sum(range(size)) * 1j, 5 * size, 7 * size], name)
                numpy.testing.assert_array_equal(comm.all_reduce(given.copy()), total)
                numpy.testing.assert_array_equal(comm.all_reduce_async(given.copy(), "avg").wait(), total / size)
                own = comm.reduce_scatter(given, out=numpy.zeros(4 // size, name))
                numpy.testing.assert_array_equal(own, total.reshape(size, -1)[rank])
                numpy.testing.assert_array_equal(comm.all_gather(own, numpy.zeros(4, name)), total)
                # Each rank keeps one element, or three, and sends the others.
                sent, received = ([1, 3], [1, 3]) if rank == 0 else ([3, 1], [3, 1])
                blocks = comm.all_to_all(given, numpy.zeros(4, name), sent, received)
                from_zero, from_one = [1j, 2, 5, 7], [1 + 1j, 2 - 1j, 5, 7]
                wanted = from_zero[:1] + from_one[:3] if rank == 0 else from_zero[1:] + from_one[3:]
                numpy.testing.assert_array_equal(blocks, numpy.array(wanted, name))
                with self.assertRaisesRegex(TypeError, "max is not defined for complex numbers"):
                    comm.all_reduce(given, "max")
                pairs = numpy.zeros(8, own.real.dtype)
                for call in (
                    lambda: comm.all_reduce(given, out=pairs),
                    lambda: comm.reduce_scatter(pairs, out=own),
                    lambda: comm.all_to_all(given, pairs),
                ):
                    with self.assertRaisesRegex(ValueError, name):
                        call()
                for call in (comm.reduce_scatter, comm.all_gather, lambda odd: comm.all_to_all(odd, odd.copy())):
                    with self.assertRaises(ValueError):
                        call(numpy.zeros(3, name))
            return comm.alloc(3, "complex64").dtype.name

        self.assertEqual(self.world(2, body), ["complex64"] * 2)

    def test_a_scalar_is_an_input_with_a_value_of_its_own(self):
        def body(comm):
            return comm.all_reduce(numpy.float32(comm.rank + 3), out=numpy.zeros((), "float32"))[()]

        self.assertEqual(self.world(2, body), [7.0, 7.0])

    def test_registered_arrays_are_reduced(self):
        def body(comm):
            vector = numpy.full(5000, comm.rank + 1.0, numpy.float32)
            with comm.registered(vector, vector, numpy.zeros(0)):
                comm.all_reduce(vector)
            comm.all_reduce(vector)
            return vector[4999]

        self.assertEqual(self.world(2, body), [6.0, 6.0])

    def test_read_only_memory_is_not_registered(self):
        def body(comm):
            with self.assertRaisesRegex(ValueError, "read-only"), comm.registered(bytes(1 << 16)):
                pass

        self.world(1, body)

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
