"""CPU tensors, and the gradients of DistributedDataParallel."""

import os
import tempfile
import unittest

import flexring

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
        # The torch of Debian 12 is older than these.
        types += [name for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]

        def body(comm):
            for dtype in (getattr(torch, name) for name in types):
                tensor = torch.full((3, 50), comm.rank + 1.0).to(dtype)
                self.assertIs(comm.all_reduce(tensor), tensor)
                self.assertTrue(torch.equal(tensor.float(), torch.full((3, 50), 3.0)), dtype)

        self.world(2, body)

    def test_tensors_that_cannot_be_reduced_are_refused_in_words(self):
        def body(comm):
            for error, words, tensor in [
                (ValueError, "not contiguous", torch.zeros(4, 4)[:, 0]),
                (TypeError, "complex64", torch.zeros(4, dtype=torch.complex64)),
                (TypeError, "bool", torch.zeros(4, dtype=torch.bool)),
                (TypeError, "dense", torch.zeros(4, 4).to_sparse()),
                (flexring.FlexringError, "CPU tensors only", torch.zeros(4, device="meta")),
            ]:
                with self.assertRaisesRegex(error, words):
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


@unittest.skipIf(torch is None or not dist.is_available(), "no torch.distributed")
class Gradients(unittest.TestCase):
    """A world of one: what DDP and the hook have to say to each other. Worlds of several processes are what
    examples/train_digits.py is for."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        # The group's own connections stay on loopback too.
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

    def test_the_hook_averages_what_it_is_given(self):
        with self.model.no_sync():
            expected = self.backward()
        comm = flexring.torch.register(self.model)
        for _ in range(3):
            for mean, gradient in zip(self.backward(), expected):
                self.assertTrue(torch.equal(mean, gradient))
        comm.close()

    def test_what_goes_wrong_is_raised_by_the_backward_pass(self):
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
