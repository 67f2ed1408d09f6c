"""Tensors, and gradient averaging for DistributedDataParallel."""

import os
import tempfile
import unittest
from unittest import mock

import flexring

from .cuda import GpuTest
from .world import WorldTest

try:
    import torch
    import torch.distributed as dist

    import flexring.torch
except ImportError:
    torch = None


@unittest.skipIf(torch is None, "no torch")
class Tensors(WorldTest):
    def test_tensors_of_every_type_are_reduced(self):
        types = "int8 uint8 int32 int64 float16 float32 float64 bfloat16".split()
        # The torch of Debian 12 does not have these types.
        types += [name for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]

        def body(comm):
            for dtype in (getattr(torch, name) for name in types):
                tensor = torch.full((3, 50), comm.rank + 1.0).to(dtype)
                self.assertIs(comm.all_reduce(tensor), tensor)
                self.assertTrue(torch.equal(tensor.float(), torch.full((3, 50), 3.0)), dtype)

        self.world(2, body)

    def test_bad_tensors_are_refused_with_a_message(self):
        def body(comm):
            for error, message, tensor in [
                (ValueError, "not contiguous", torch.zeros(4, 4)[:, 0]),
                (TypeError, "complex32", torch.zeros(4, dtype=torch.complex32)),
                (ValueError, "resolve_conj", torch.zeros(4, dtype=torch.complex64).conj()),
                (ValueError, "resolve_neg", torch._neg_view(torch.zeros(4))),
                (TypeError, "dense", torch.zeros(4, 4).to_sparse()),
                (flexring.FlexringError, "on meta, but flexring reduces tensors on", torch.zeros(4, device="meta")),
            ]:
                with self.assertRaisesRegex(error, message):
                    comm.all_reduce(tensor)

        self.world(1, body)

    def test_tensors_can_be_in_shared_memory(self):
        def body(comm):
            tensor = flexring.torch.alloc(comm, (100, 30), torch.bfloat16)
            self.assertEqual(tensor.count_nonzero(), 0)
            tensor += comm.rank + 1
            comm.all_reduce_async(tensor, op="avg").wait()
            self.assertEqual(flexring.torch.alloc(comm, 0).shape, (0,))
            return tensor[99, 29].item()

        self.assertEqual(self.world(2, body), [1.5, 1.5])


NO_CUDA = "no torch" if torch is None else "" if torch.cuda.is_available() else "no GPU that torch can use"


def tensors_in_streams(comm, _cuda):
    types = "int8 uint8 int32 int64 float16 float32 float64 bfloat16".split()
    types += [name for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for dtype in (getattr(torch, name) for name in types):
                tensor = torch.full((3, 50), comm.rank + 1.0, device="cuda").to(dtype)
                assert comm.all_reduce(tensor) is tensor
                assert torch.equal(tensor.float().cpu(), torch.full((3, 50), 3.0)), dtype
    other = torch.cuda.Stream()
    for _ in range(20):
        tensor = torch.full((1 << 20,), comm.rank + 1.0, device="cuda")
        result = torch.empty_like(tensor)
        other.wait_stream(torch.cuda.current_stream())
        comm.all_reduce(tensor, op="avg", out=result, stream=other)
        # The next tensor must not get its memory before the other stream has passed the call.
        del tensor
        torch.full((1 << 20,), 99.0, device="cuda")
        torch.cuda.current_stream().wait_stream(other)
        assert (result != 1.5).sum().item() == 0
    comm.synchronize()


def gradients_on_gpu(comm, _cuda):
    class Bucket:
        def __init__(self, number):
            self.gradients = torch.full((100000,), float(number), device="cuda")

        def buffer(self):
            return self.gradients

    buckets = [Bucket(comm.rank + number) for number in range(10)]
    futures = [flexring.torch.allreduce_hook(comm, bucket) for bucket in buckets]
    for number, future in enumerate(futures):
        assert (future.wait() != number + 0.5).sum().item() == 0


@unittest.skipIf(NO_CUDA, NO_CUDA)
class TensorsOnGpu(GpuTest, WorldTest):
    def test_tensors_are_reduced_in_the_current_stream_or_another(self):
        self.processes(2, tensors_in_streams)

    def test_the_hook_averages_buckets(self):
        self.processes(2, gradients_on_gpu)

    def test_bad_tensors_are_refused_with_a_message(self):
        def body(comm):
            for error, message, tensor in [
                (ValueError, "not contiguous", torch.zeros(4, 4, device="cuda")[:, 0]),
                (TypeError, "complex32", torch.zeros(4, dtype=torch.complex32, device="cuda")),
            ]:
                with self.assertRaisesRegex(error, message):
                    comm.all_reduce(tensor)
            with self.assertRaisesRegex(flexring.FlexringError, "both must be in the same place"):
                comm.all_reduce(torch.zeros(4, device="cuda"), out=torch.zeros(4))

        self.world(1, body)


@unittest.skipIf(torch is None, "no torch")
class StreamsOfTorch(unittest.TestCase):
    """The calls that flexring makes to torch about streams, recorded by mocks of a tensor and of the module."""

    def tensor(self, current):
        cuda = mock.Mock()
        cuda.current_stream.return_value.cuda_stream = current
        cuda.ExternalStream.side_effect = lambda handle, device: (handle, device)
        tensor = mock.Mock()
        return tensor, flexring._gpu.TensorOnGpu(tensor, mock.Mock(cuda=cuda))

    def stream_for(self, stream, current):
        tensor, gpu = self.tensor(current)
        vector = flexring._vector.Vector(4096, 4, "float32", tensor, gpu=gpu)
        return flexring._gpu.stream_for(stream, vector), tensor

    def test_the_current_stream_is_the_default_and_is_not_recorded(self):
        for given in (None, 7):
            handle, tensor = self.stream_for(given, 7)
            self.assertEqual(handle, 7)
            tensor.record_stream.assert_not_called()

    def test_another_stream_is_recorded(self):
        handle, tensor = self.stream_for(9, 7)
        self.assertEqual(handle, 9)
        tensor.record_stream.assert_called_once_with((9, tensor.device))
        # torch does not accept the handle of the default stream, so it gets the stream object.
        self.assertEqual(self.stream_for(0, 7)[1].record_stream.call_count, 1)

    def test_buckets_are_averaged_in_a_side_stream(self):
        calls = mock.MagicMock()
        comm = mock.Mock(all_reduce=calls.all_reduce)
        bucket = mock.Mock()
        gradients = bucket.buffer.return_value
        gradients.is_cuda = True
        with mock.patch("flexring.torch.torch", calls.torch):
            future = flexring.torch.allreduce_hook(comm, bucket)
        side = calls.torch.cuda.Stream.return_value
        self.assertIs(future, calls.torch.futures.Future.return_value)
        calls.torch.futures.Future.assert_called_once_with(devices=[gradients.device])
        names = [name for name, *_ in calls.mock_calls]
        order = [
            "torch.cuda.Stream().wait_stream",
            "all_reduce",
            "torch.cuda.stream().__enter__",
            "torch.futures.Future().set_result",
            "torch.cuda.stream().__exit__",
        ]
        self.assertEqual([name for name in names if name in order], order)
        calls.all_reduce.assert_called_once_with(gradients, op="avg", stream=side)


@unittest.skipIf(torch is None or not dist.is_available(), "no torch.distributed")
class Gradients(unittest.TestCase):
    """The interface between DDP and the hook, in a world of one rank. examples/train_digits.py tests several processes."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        # Keep the group's own connections on loopback.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(os.path.join(self.folder.name, "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        self.model = torch.nn.parallel.DistributedDataParallel(network, bucket_cap_mb=1e-4)

    def tearDown(self):
        dist.destroy_process_group()
        self.folder.cleanup()

    def backward(self):
        self.model.zero_grad()
        self.model(torch.ones(2, 4)).sum().backward()
        return [weight.grad.clone() for weight in self.model.parameters()]

    def test_the_hook_averages_gradients(self):
        with self.model.no_sync():
            expected = self.backward()
        comm = flexring.torch.register(self.model)
        for _ in range(3):
            for mean, gradient in zip(self.backward(), expected):
                self.assertTrue(torch.equal(mean, gradient))
        comm.close()

    def test_the_backward_pass_raises_failures(self):
        comm = flexring.torch.register(self.model)
        self.backward()
        comm.abort()
        with self.assertRaisesRegex(Exception, "FlexringError: aborted"):
            self.backward()
        comm.close()

    def test_a_communicator_of_another_size_is_refused(self):
        class Other:
            size = 3

        with self.assertRaisesRegex(ValueError, "the model is on 1 ranks and the communicator on 3"):
            flexring.torch.register(self.model, Other())
