"""Arrays that DLPack describes, such as JAX's."""

import array
import ctypes
import unittest
from unittest import mock

from flexring import _dlpack
from flexring._vector import vector_of

from .world import WorldTest

try:
    import numpy
except ImportError:
    numpy = None
try:
    import jax.numpy as jax
except ImportError:
    jax = None
try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

_new = ctypes.pythonapi.PyCapsule_New
_new.argtypes, _new.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object


class Exporter:
    """Numbers that only DLPack describes, as a version of it that the test chooses."""

    def __init__(self, numbers, shape=None, *, versioned=True, flags=0, major=1, strides=None, **fields):
        self.memory = numbers
        self.shape = shape or (len(numbers),)
        self.versioned = versioned
        self.managed = _dlpack._Versioned(major=major, flags=flags)
        tensor = self.managed.tensor
        address = numbers.buffer_info()[0]
        default = {"data": address, "device_type": 1, "code": 2, "bits": 8 * numbers.itemsize, "lanes": 1}
        for name, value in {**default, "ndim": len(self.shape), **fields}.items():
            setattr(tensor, name, value)
        extents = ctypes.c_int64 * len(self.shape)
        self.extents, self.strides = extents(*self.shape), None if strides is None else extents(*strides)
        tensor.shape = self.extents
        if strides is not None:
            tensor.strides = self.strides

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        if self.versioned:
            return _new(ctypes.addressof(self.managed), b"dltensor_versioned", None)
        if options:
            raise TypeError("an unexpected keyword argument")
        return _new(ctypes.addressof(self.managed.tensor), b"dltensor", None)


def floats(*numbers):
    return array.array("f", numbers)


class Exported(WorldTest):
    def test_memory_that_may_be_written_is_reduced_in_place(self):
        def body(comm):
            vector = Exporter(floats(1, 2, 3, 4), (2, 2), byte_offset=0, strides=(2, 1))
            self.assertIs(comm.all_reduce(vector), vector)
            self.assertIs(comm.broadcast(vector), vector)
            return list(vector.memory)

        self.assertEqual(self.world(2, body), [[2, 4, 6, 8]] * 2)

    def test_memory_that_must_not_be_written_is_an_input(self):
        def body(comm):
            vectors = [Exporter(floats(1, 2), flags=1), Exporter(floats(1, 2), versioned=False)]
            for vector in vectors:
                out = floats(0, 0)
                self.assertIs(comm.all_reduce(vector, out=out), out)
                self.assertEqual(list(out), [2, 4])
                for call in (comm.all_reduce, comm.reduce, comm.broadcast):
                    result = call(vector)
                    self.assertIsNot(result, vector)
                    self.assertEqual(list(result)[0], 1 if call == comm.broadcast or (call == comm.reduce and comm.rank) else 2)
                result = comm.all_reduce_async(vector).wait()
                self.assertEqual(list(result), [2, 4])
                self.assertEqual(list(vector.memory), [1, 2])
                with self.assertRaisesRegex(ValueError, "read-only"):
                    comm.all_reduce(floats(1, 2), out=vector)

        self.world(2, body)

    def test_a_part_of_the_memory_is_described_by_its_offset(self):
        memory = floats(1, 2, 3)
        vector = vector_of(Exporter(memory, (2,), byte_offset=4))
        self.assertEqual((vector.address, vector.count), (memory.buffer_info()[0] + 4, 2))

    def test_element_types_have_their_names(self):
        memory = array.array("H", [1, 2])
        for code, bits, name in [(0, 8, "int8"), (1, 16, "uint16"), (2, 16, "float16"), (4, 16, "bfloat16")]:
            exported = _dlpack.exported(Exporter(memory, code=code, bits=bits))
            self.assertEqual(exported.dtype, name)
        for code, name in [(10, "float8_e4m3fn"), (12, "float8_e5m2")]:
            self.assertEqual(vector_of(Exporter(memory, code=code, bits=8)).dtype, name)

    def test_what_cannot_be_reduced_is_refused(self):
        memory = floats(1, 2, 3, 4)
        for error, message, fields in [
            (ValueError, "not contiguous", {"shape": (2, 2), "strides": (1, 2)}),
            (TypeError, "complex32", {"code": 5, "bits": 32}),
            (TypeError, "number 99", {"code": 99}),
            (TypeError, "lanes", {"lanes": 4}),
            (TypeError, "device of type 10", {"device_type": 10}),
            (TypeError, "exports DLPack 2", {"major": 2}),
        ]:
            with self.assertRaisesRegex(error, message):
                vector_of(Exporter(memory, **fields))

    def test_arrays_on_a_gpu_need_another_array_for_the_result(self):
        from flexring._array import in_place

        vector = Exporter(floats(1, 2), flags=1, device_type=2)
        self.assertEqual(vector_of(vector).gpu.stream(), 0)
        with self.assertRaisesRegex(ValueError, "pass out="):
            in_place(vector)

    def test_values_are_complete_before_they_are_read(self):
        vector = Exporter(floats(1, 2))
        vector.block_until_ready = mock.Mock()
        vector_of(vector)
        vector.block_until_ready.assert_called_once_with()


@unittest.skipIf(jax is None, "no jax")
class Jax(WorldTest):
    def test_arrays_are_inputs_and_results_are_numpy_arrays(self):
        def body(comm):
            for name in "int8 uint8 int32 uint32 float16 float32 bfloat16".split():
                vector = jax.full((3, 50), comm.rank + 1).astype(name)
                total = comm.all_reduce(vector)
                self.assertIsInstance(total, numpy.ndarray)
                self.assertEqual((total.dtype.name, total.shape), (name, (3, 50)))
                self.assertEqual(jax.asarray(total).sum(), 450)
                self.assertEqual(vector[2, 49], comm.rank + 1)
                out = numpy.zeros((3, 50), vector.dtype)
                comm.all_reduce(vector, op="max", out=out)
                self.assertEqual(out[2, 49], 2)
            whole = comm.all_gather(jax.arange(4.0), out=numpy.zeros(8, "float32"))
            self.assertEqual(whole.tolist(), [0, 1, 2, 3] * 2)

        self.world(2, body)


@unittest.skipIf(ml_dtypes is None or numpy is None, "no ml_dtypes")
class Bfloat16(WorldTest):
    def test_arrays_of_ml_dtypes_are_reduced(self):
        def body(comm):
            for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
                vector = numpy.full(100, comm.rank + 1, getattr(ml_dtypes, name))
                comm.all_reduce(vector)
                self.assertEqual(vector.astype("float32").tolist(), [3.0] * 100)
                shared = comm.alloc(100, name)
                shared[:] = comm.rank + 1
                comm.all_reduce(shared, op="max")
                self.assertEqual(float(shared[99]), 2.0)

        self.world(2, body)


@unittest.skipIf(numpy is None, "no numpy")
class Numpy(WorldTest):
    def test_a_copy_of_an_input_is_an_array_of_numpy(self):
        def body(comm):
            result = comm.all_reduce(Exporter(floats(1, 2, 3, 4), (2, 2), flags=1))
            self.assertEqual((type(result), result.shape, result.tolist()), (numpy.ndarray, (2, 2), [[1, 2], [3, 4]]))

        self.world(1, body)
