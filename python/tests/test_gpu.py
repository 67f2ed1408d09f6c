"""Arrays with the CUDA array interface, and the streams in which calls take effect."""

import array
import unittest
from unittest import mock

import flexring
from flexring._gpu import stream_handle
from flexring._vector import vector_of

from .cuda import Cuda, GpuTest, why_not
from .world import WorldTest

WHY_NOT = why_not()

COUNT = 20000


def _bits(value, kind):
    """The bits of 1 or 3 as a bfloat16 or a float16."""
    return {1: {"bfloat16": 0x3F80, "float16": 0x3C00}, 3: {"bfloat16": 0x4040, "float16": 0x4200}}[value][kind]


def reduces_in_streams(comm, cuda):
    """Every collective, in a stream and in the default stream, without waiting in between."""
    for stream in (cuda.stream(), 0):
        own = cuda.array([comm.rank + 1.0] * COUNT, stream=stream)
        out = cuda.array([0.0] * COUNT, stream=stream)
        assert comm.all_reduce(own, out=out) is out
        comm.all_reduce(own, op="avg", stream=stream)
        assert own.elements(stream) == [1.5] * COUNT, own.elements(stream)[:5]
        assert out.elements(stream) == [3.0] * COUNT, out.elements(stream)[:5]

        whole = cuda.array([comm.rank + 1.0, 10.0], stream=stream)
        comm.reduce_scatter(whole)
        assert whole.elements(stream)[comm.rank] == [3.0, 20.0][comm.rank]
        comm.all_gather(whole)
        assert whole.elements(stream) == [3.0, 20.0]
        comm.reduce(whole, op="max", root=1)
        comm.broadcast(whole, root=1)
        assert whole.elements(stream) == [3.0, 20.0]
        comm.synchronize()
        comm.status()
        for vector in (own, out, whole):
            vector.free()


def reduces_every_type(comm, cuda):
    for typestr in "|i1 |u1 <i4 <u4 <i8 <u8 <f4 <f8".split():
        vector = cuda.array([comm.rank + 1] * 100, typestr)
        comm.all_reduce(vector)
        assert vector.elements() == [3] * 100, typestr
    for typestr, name in [("<f2", "float16"), ("<V2", "bfloat16")]:
        vector = cuda.array([_bits(1, name)] * 100, typestr)
        # The interface has no name for bfloat16. Arrays of ml_dtypes have a dtype with a name.
        vector.dtype = name
        comm.all_reduce(vector, op=flexring.premul_sum(1.5))
        assert vector.elements() == [_bits(3, name)] * 100, name


def requests_end(comm, cuda):
    vector = cuda.array([comm.rank + 1.0] * COUNT)
    request = comm.all_reduce_async(vector)
    assert request.wait() is vector
    assert request.done()
    assert vector.elements() == [3.0] * COUNT
    with comm.registered(vector):
        comm.all_reduce(vector)
    assert vector.elements() == [6.0] * COUNT


def failures_of_later_calls(comm, cuda):
    stream = cuda.stream()
    vector = cuda.array([1.0] * COUNT, stream=stream)
    calls = [lambda: comm.all_reduce(vector), comm.synchronize, comm.status, lambda: comm.all_reduce(vector)]
    if comm.rank == 0:
        # On rank 1 the next call after the abort raises it, and so do all that follow.
        comm.abort()
    raised = []
    for call in calls:
        try:
            call()
        except flexring.FlexringError as error:
            raised.append((error.code, str(error)))
    # The stream continues in any case.
    cuda.synchronize(stream)
    return raised


@unittest.skipIf(WHY_NOT, WHY_NOT)
class Streams(GpuTest):
    def test_two_processes_reduce_in_streams(self):
        self.processes(2, reduces_in_streams)

    def test_arrays_of_every_type_are_reduced(self):
        self.processes(2, reduces_every_type)

    def test_requests_and_registered_arrays(self):
        self.processes(2, requests_end)

    def test_a_failure_is_raised_by_later_calls(self):
        for raised in self.processes(2, failures_of_later_calls):
            self.assertGreaterEqual(len(raised), 3, raised)
            for code, message in raised:
                self.assertEqual(code, flexring.FlexringError.ABORTED, message)
                self.assertIn("aborted", message)


@unittest.skipIf(WHY_NOT, WHY_NOT)
class Refusals(WorldTest):
    def test_bad_vectors_and_streams_are_refused_with_a_message(self):
        cuda = Cuda()

        def body(comm):
            Cuda()
            vector, other, host = cuda.array([1.0] * 64), cuda.array([1.0] * 64), array.array("f", [1.0] * 64)
            stream, second = cuda.stream(), cuda.stream()
            freed = cuda.array([1.0] * 4)
            freed.free()
            for error, message, call in [
                (ValueError, "memory of the host", lambda: comm.all_reduce(host, stream=stream)),
                (flexring.FlexringError, "both must be in the same place", lambda: comm.all_reduce(vector, out=host)),
                (flexring.FlexringError, "both must be in the same place", lambda: comm.all_reduce(host, out=vector)),
                (flexring.FlexringError, "was it freed", lambda: comm.all_reduce(freed)),
                (
                    flexring.FlexringError,
                    "reach beyond their allocation",
                    lambda: comm.all_reduce(_with(vector, shape=(1 << 20,))),
                ),
                (
                    flexring.FlexringError,
                    "not aligned",
                    lambda: comm.all_reduce(_with(vector, shape=(2,), data=(vector.address.value + 1, False))),
                ),
                (
                    ValueError,
                    "in different streams",
                    lambda: comm.all_reduce(_with(vector, stream=stream), out=_with(other, stream=second)),
                ),
                (
                    ValueError,
                    "in the default stream only",
                    lambda: comm.all_reduce_async(_with(vector, stream=stream)),
                ),
            ]:
                with self.assertRaisesRegex(error, message, msg=message):
                    call()
            # None of these has ended the communicator.
            comm.all_reduce(vector)
            comm.synchronize()
            return vector.elements()

        self.assertEqual(self.world(1, body), [[1.0] * 64])


class Fake:
    """An array that has only the interface."""

    def __init__(self, **interface):
        known = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}
        self.__cuda_array_interface__ = {**known, **interface}


def _with(vector, **interface):
    return Fake(**{**vector.__cuda_array_interface__, **interface})


class Interface(unittest.TestCase):
    """Tests that need no GPU: reading the interface, and stream handles."""

    def test_vectors_are_read_from_the_interface(self):
        vector = vector_of(Fake(shape=(3, 1, 5), strides=(20, 999, 4)))
        self.assertEqual((vector.address, vector.count, vector.dtype), (4096, 15, "float32"))
        self.assertEqual(vector.gpu.stream(), 0)
        self.assertEqual(vector_of(Fake(stream=1)).gpu.stream(), 0)
        self.assertEqual(vector_of(Fake(stream=0x1000)).gpu.stream(), 0x1000)
        self.assertEqual(vector_of(Fake(shape=(0, 3), data=(0, False), strides=(1, 1))).count, 0)
        self.assertEqual(vector_of(Fake(shape=())).count, 1)

    def test_bad_arrays_are_refused_with_a_message(self):
        for error, message, interface in [
            (ValueError, "not contiguous", {"shape": (4, 4), "strides": (4, 16)}),
            (ValueError, "not contiguous", {"strides": (8,)}),
            (TypeError, "byte order", {"typestr": ">f4"}),
            (TypeError, "<c8", {"typestr": "<c8"}),
            (TypeError, "b1", {"typestr": "|b1"}),
            (TypeError, "float128", {"typestr": "<f16"}),
            (TypeError, "mask", {"mask": Fake()}),
        ]:
            with self.assertRaisesRegex(error, message):
                vector_of(Fake(**interface))

    def test_a_read_only_array_is_refused_as_a_result(self):
        with self.assertRaisesRegex(ValueError, "read-only"):
            flexring._vector.source_and_target(Fake(data=(4096, True)), None)

    def test_streams_are_accepted_in_every_form(self):
        torch, cupy, protocol = mock.Mock(spec=["cuda_stream"]), mock.Mock(spec=["ptr"]), mock.MagicMock()
        torch.cuda_stream, cupy.ptr = 5, 1
        protocol.__cuda_stream__ = lambda: (0, 7)
        self.assertEqual([stream_handle(stream) for stream in (torch, cupy, protocol, 0, 9)], [5, 0, 7, 0, 9])
        for wrong in ("a stream", True, -1, 1.5):
            with self.assertRaisesRegex(TypeError, "no CUDA stream"):
                stream_handle(wrong)
