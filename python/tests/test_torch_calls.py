"""The order and handles of the calls of a process group, without other ranks."""

import contextlib
import ctypes
import datetime
import os
import signal
import threading
import time
import unittest
import weakref
from unittest import mock

try:
    import torch

    from flexring import FlexringError
    from flexring._torch_collectives import Collectives
    from flexring._torch_join import Meeting
    from flexring._torch_memory import Blocks
    from flexring._torch_messages import Channels
    from flexring._torch_tensors import Staging
    from flexring._torch_work import CallLine, Work
except ImportError:
    torch = None


def nothing():
    """Aborts nothing."""


@contextlib.contextmanager
def raised_soon(exception):
    """A signal comes, whose handler raises this exception."""

    def handler(*_):
        raise exception

    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


@unittest.skipIf(torch is None, "no torch")
class Calls(unittest.TestCase):
    def test_calls_run_in_the_order_in_which_they_were_made(self):
        line, made = CallLine(), []
        futures = [line.submit(nothing, made.append, number) for number in range(50)]
        line.run(nothing, made.append, 50)
        for future in futures:
            future.result(30)
        self.assertEqual(made, list(range(51)))

    def test_any_number_of_callbacks_may_wait_for_other_calls(self):
        line, count = CallLine(), 40
        begin, over = threading.Event(), threading.Barrier(count + 1)
        first = line.submit(nothing, begin.wait, 30)

        def callback(_future):
            line.run(nothing, time.sleep, 0)
            over.wait(30)

        for future in [line.submit(nothing, time.sleep, 0) for _ in range(count)]:
            future.add_done_callback(callback)
        begin.set()
        self.assertTrue(first.result(30))
        over.wait(30)

    def test_threads_are_used_again(self):
        line = CallLine()
        line.submit(nothing, time.sleep, 0).result(30)
        names = set()
        for _ in range(20):
            # A thread is idle a moment after its call is over.
            time.sleep(0.005)
            names.add(line.submit(nothing, threading.get_ident).result(30))
        self.assertLess(len(names), 10)

    def test_a_signal_handler_is_refused_a_call_within_a_call(self):
        line, errors = CallLine(), []

        def handler(*_):
            for make in line.run, line.submit:
                try:
                    make(nothing, time.sleep, 0)
                except RuntimeError as error:
                    errors.append(str(error))

        def call():
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.1)
            return "over"

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            self.assertEqual(line.run(nothing, call), "over")
            self.assertEqual(line.run(nothing, call), "over")
        finally:
            signal.signal(signal.SIGUSR1, before)
        self.assertEqual(len(errors), 4)
        for error in errors:
            self.assertIn("set a flag in the handler", error)

    def test_an_exception_of_a_signal_handler_aborts_the_call_that_is_waited_for(self):
        # The second one is what a wait raises whose time is over.
        for exception in InterruptedError, TimeoutError:
            line, aborted = CallLine(), threading.Event()
            work = Work([], line.submit(aborted.set, aborted.wait, 30), aborted.set)
            with raised_soon(exception), self.assertRaises(exception):
                work.wait()
            self.assertTrue(aborted.is_set())
            self.assertTrue(work.wait(datetime.timedelta(seconds=30)))

    def test_an_exception_of_a_signal_handler_aborts_the_calls_before_a_blocking_one(self):
        line, aborted = CallLine(), threading.Event()
        future = line.submit(aborted.set, aborted.wait, 30)
        with raised_soon(InterruptedError), self.assertRaises(InterruptedError):
            line.run(aborted.set, time.sleep, 0)
        self.assertTrue(aborted.is_set())
        self.assertTrue(future.result(30))
        self.assertIsNone(line.run(nothing, time.sleep, 0))

    def test_a_blocking_call_behind_a_call_without_a_turn_is_aborted_too(self):
        line, aborted = CallLine(), threading.Event()
        # The turn is this thread's, so that neither call begins.
        with line._turn:
            future = line.submit(aborted.set, aborted.wait, 30)
            with raised_soon(InterruptedError), self.assertRaises(InterruptedError):
                line.run(aborted.set, time.sleep, 0)
            self.assertTrue(aborted.is_set())
        self.assertTrue(future.result(30))

    def test_the_end_of_a_group_waits_for_its_calls(self):
        line, over = CallLine(), threading.Event()
        self.assertTrue(line.drain(0))
        futures = [line.submit(nothing, over.wait, 30), line.submit(nothing, time.sleep, 0)]
        self.assertFalse(line.drain(0.05))
        threading.Timer(0.1, over.set).start()
        self.assertTrue(line.drain(30))
        self.assertEqual([future.result(30) for future in futures], [True, None])

    def test_a_wait_whose_time_is_over_aborts_nothing(self):
        line, over, abort = CallLine(), threading.Event(), mock.Mock()
        work = Work([], line.submit(abort, over.wait, 30), abort)
        with self.assertRaisesRegex(RuntimeError, "did not end within 0.05 s"):
            work.wait(datetime.timedelta(seconds=0.05))
        abort.assert_not_called()
        over.set()
        self.assertTrue(work.wait())

    def test_the_handle_of_a_pending_call_is_in_no_cycle(self):
        line, over = CallLine(), threading.Event()
        work = Work([torch.ones(1)], line.submit(nothing, over.wait, 30))
        future, handle = work.get_future(), weakref.ref(work)
        del work
        self.assertIsNone(handle())
        over.set()
        self.assertEqual(future.wait(), [1])

    def test_the_error_of_a_call_aborts_nothing(self):
        line, abort = CallLine(), mock.Mock()
        work = Work([], line.submit(nothing, int, "x"), abort)
        with self.assertRaises(ValueError):
            work.wait()
        self.assertIsInstance(work.exception(), ValueError)
        abort.assert_not_called()


# The backend needs torch 2.8; the other tests run with older ones, too.
HAS_CHECK = torch is not None and hasattr(torch.distributed.HashStore, "check")


@unittest.skipUnless(HAS_CHECK, "no torch whose stores have check()")
class Joins(unittest.TestCase):
    def test_a_rank_that_publishes_no_id_is_named(self):
        meeting = Meeting(torch.distributed.HashStore(), 1, datetime.timedelta(seconds=0.1))
        with self.assertRaisesRegex(FlexringError, "rank 0 of the process group published no flexring id within 0.1 s") as caught:
            meeting.join("", 1, 2, 0)
        self.assertEqual(caught.exception.code, FlexringError.RENDEZVOUS_FAILED)

    def test_the_wait_for_an_id_ends_when_the_message_is_aborted(self):
        meeting = Meeting(torch.distributed.HashStore(), 1, datetime.timedelta(seconds=30))
        channel = Channels(meeting, 1).of(0, tag=3)
        threading.Timer(0.1, channel.abort).start()
        with self.assertRaisesRegex(FlexringError, "rank 1 aborted a message from rank 0 to rank 1") as caught:
            channel.recv(torch.zeros(1), None)
        self.assertEqual(caught.exception.code, FlexringError.ABORTED)


class MemoryOfTheTest:
    """A communicator whose memory is the test's."""

    def __init__(self):
        self.sizes = []

    def alloc_bytes(self, size):
        self.sizes.append(size)
        return (ctypes.c_uint8 * size)()


@unittest.skipIf(torch is None, "no torch")
class Memory(unittest.TestCase):
    def setUp(self):
        self.blocks, self.comm = Blocks(), MemoryOfTheTest()

    def test_the_memory_of_a_tensor_is_used_again_when_its_last_view_is_gone(self):
        first = self.blocks.tensor(self.comm, 8, torch.float32)
        address, view = first.data_ptr(), first[2:].view(2, 3)
        del first
        other = self.blocks.tensor(self.comm, 8, torch.float32)
        self.assertNotEqual(other.data_ptr(), address)
        del view
        again = self.blocks.tensor(self.comm, 16, torch.bfloat16)
        self.assertEqual((again.data_ptr(), again.shape, again.dtype), (address, (16,), torch.bfloat16))
        self.assertEqual(self.comm.sizes, [32, 32])

    def test_sizes_that_are_not_asked_for_again_are_freed(self):
        for size in range(1, 100):
            self.blocks.tensor(self.comm, size, torch.uint8)
        self.assertLess(len(self.blocks._idle), 99)
        self.blocks.tensor(self.comm, 99, torch.uint8)
        self.assertEqual(len(self.comm.sizes), 99)

    def test_tensors_outlive_the_group(self):
        tensor = self.blocks.tensor(self.comm, 3, torch.float64).fill_(7)
        self.blocks.tensor(self.comm, 5, torch.float64)
        self.blocks.close()
        self.assertEqual(len(self.blocks._idle), 0)
        self.assertEqual(tensor.tolist(), [7, 7, 7])
        del tensor
        self.assertEqual(len(self.blocks._idle), 0)

    def test_a_tensor_without_elements_has_no_block(self):
        self.assertEqual(self.blocks.tensor(self.comm, 0, torch.float32).numel(), 0)
        self.assertEqual(self.comm.sizes, [])


class Base:
    """In place of torch's class, which has other constructors in other versions."""

    def __init__(self, rank, size):
        pass


def nothing():
    """Aborts nothing."""


@unittest.skipIf(torch is None, "no torch")
class CallsOnGpu(unittest.TestCase):
    """What is asked of torch about streams, recorded by mocks of a tensor and of the module."""

    def call(self, in_background):
        class Group(Collectives, Base):
            pass

        group, comm = Group(None, 0, 1, None), mock.Mock()
        group._comm = comm
        tensor, other = mock.Mock(is_cuda=True), mock.Mock(is_cuda=True)
        other.device = tensor.device
        with mock.patch("flexring._torch_collectives.torch", mock.MagicMock()) as module:
            module.autograd._profiler_enabled.return_value = False
            with mock.patch("flexring._torch_work.torch", module):
                options = mock.Mock(asyncOp=in_background)
                group._call(
                    "all_reduce", options, [tensor], Staging(), lambda comm, stream: comm.all_reduce(stream), [other]
                )
        return module, comm, tensor, other

    def test_a_blocking_call_takes_effect_in_the_current_stream(self):
        module, comm, tensor, other = self.call(False)
        comm.all_reduce.assert_called_once_with(module.cuda.current_stream.return_value)
        tensor.record_stream.assert_not_called()

    def test_an_asynchronous_call_keeps_memory_until_its_stream_has_passed_it(self):
        module, comm, tensor, other = self.call(True)
        side = module.cuda.Stream.return_value
        side.wait_stream.assert_called_once_with(module.cuda.current_stream.return_value)
        comm.all_reduce.assert_called_once_with(side)
        for vector in (tensor, other):
            vector.record_stream.assert_called_once_with(side)
