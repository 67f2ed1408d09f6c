"""Communicators and requests over plain buffers."""

import array
import ctypes
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
from pathlib import Path

import flexring
from flexring import FlexringError, _handle, _library, _statistics

from .world import WorldTest


def floats(*elements):
    return array.array("f", elements)


class Communicators(WorldTest):
    def test_rank_and_size(self):
        self.assertEqual(self.world(3, lambda comm: (comm.rank, comm.size)), [(0, 3), (1, 3), (2, 3)])

    def test_ranks_without_rdma_devices_have_no_rails(self):
        self.assertEqual(self.world(2, lambda comm: comm.rail_statistics()), [[], []])

    def test_statistics_of_rails_have_the_values_of_the_c_api(self):
        values = {"port": 1, "bytes_sent": 2**63, "bytes_received": 3, "messages_sent": 4, "messages_received": 5}
        rails = [
            _library.CRailStatistics(device=b"mlx5_0", retransmissions=6, reconnections=7, **values),
            _library.CRailStatistics(device=b"mlx5_1", retransmissions=-1, reconnections=0, **values),
        ]

        def fill(communicator, size, out, capacity, count):
            self.assertEqual((communicator, size), (1234, ctypes.sizeof(_library.CRailStatistics)))
            for index in range(min(capacity, len(rails))):
                out[index] = rails[index]
            ctypes.cast(count, ctypes.POINTER(ctypes.c_size_t))[0] = len(rails)
            return 0

        with unittest.mock.patch.object(_statistics.library, "flexring_comm_rail_statistics", fill):
            first, second = _statistics.rail_statistics(1234)
        expected = flexring.RailStatistics(device="mlx5_0", retransmissions=6, reconnections=7, **values)
        self.assertEqual(first, expected)
        self.assertEqual((second.device, second.retransmissions), ("mlx5_1", None))

    def test_a_buffer_is_reduced_in_place(self):
        def body(comm):
            vector = floats(comm.rank, 1, 10 * comm.rank)
            self.assertIs(comm.all_reduce(vector), vector)
            return list(vector)

        self.assertEqual(self.world(3, body), [[3, 3, 30]] * 3)

    def test_out_of_place_leaves_the_input_unchanged(self):
        def body(comm):
            vector, out = floats(comm.rank + 1, 2), floats(0, 0)
            self.assertIs(comm.all_reduce(vector, op="prod", out=out), out)
            self.assertEqual(list(vector), [comm.rank + 1, 2])
            return list(out)

        self.assertEqual(self.world(3, body), [[6, 8]] * 3)

    def test_all_operations_and_types_of_the_buffer_protocol(self):
        expected = {"sum": 6, "prod": 6, "max": 3, "min": 1, "avg": 2}

        def body(comm):
            for code in "bBiIlLqQfd":
                for op, result in expected.items():
                    vector = array.array(code, [comm.rank + 1] * 5)
                    if op == "avg" and code not in "fd":
                        with self.assertRaisesRegex(FlexringError, "their sum may wrap around"):
                            comm.all_reduce(vector, op=op)
                        continue
                    comm.all_reduce(vector, op=op)
                    self.assertEqual(list(vector), [result] * 5, (code, op))
            for kind in (ctypes.c_int8, ctypes.c_int32, ctypes.c_float, ctypes.c_double):
                vector = (kind * 3)(comm.rank, comm.rank, 1)
                comm.all_reduce(vector)
                self.assertEqual(list(vector), [3, 3, 3])

        self.world(3, body)

    def test_factors_may_differ_between_ranks(self):
        def body(comm):
            vector = floats(2, 4)
            comm.all_reduce(vector, op=flexring.premul_sum(0.5 * (comm.rank + 1)))
            return list(vector)

        self.assertEqual(self.world(2, body), [[3, 6]] * 2)

    def test_factors_are_not_rounded(self):
        def body(comm):
            vector, narrow = array.array("d", [1]), floats(1)
            with self.assertRaisesRegex(ValueError, "0.1 would be rounded to 0.10000000149"):
                comm.all_reduce(vector, op=flexring.premul_sum(0.1))
            comm.all_reduce(vector, op=flexring.premul_sum(0.25))
            # What a float32 rounds is rounded anyway.
            comm.all_reduce(narrow, op=flexring.premul_sum(0.1))
            return vector[0]

        self.assertEqual(self.world(1, body), [0.25])

    def test_a_read_only_buffer_can_only_be_an_input(self):
        def body(comm):
            out = bytearray(3)
            comm.all_reduce(bytes([1, 2, 3]), out=out)
            with self.assertRaisesRegex(ValueError, "read-only"):
                comm.all_reduce(bytes(3))
            return list(out)

        self.assertEqual(self.world(2, body), [[2, 4, 6]] * 2)

    def test_an_empty_vector_can_be_reduced(self):
        self.world(2, lambda comm: comm.all_reduce(array.array("f")))

    def test_bad_arguments_are_refused_with_a_message(self):
        def body(comm):
            view = memoryview(bytearray(8))
            for error, message, vector, options in [
                (TypeError, "has no buffer", [1.0, 2.0], {}),
                (TypeError, "format", array.array("u", "abc"), {}),
                (ValueError, "not contiguous", view[::2], {}),
                (ValueError, "no such operation: 'median'", floats(1), {"op": "median"}),
                (ValueError, "no such operation: 3", floats(1), {"op": 3}),
                (ValueError, "2 x float32 cannot be reduced into 1 x", floats(1, 2), {"out": floats(0)}),
                (ValueError, "into 2 x int32", floats(1, 2), {"out": array.array("i", [0, 0])}),
            ]:
                with self.assertRaisesRegex(error, message):
                    comm.all_reduce(vector, **options)
            with self.assertRaises(FlexringError) as caught:
                comm.all_reduce(array.array("i", [1]), op=flexring.premul_sum(0.5))
            self.assertEqual(caught.exception.code, FlexringError.INVALID_ARGUMENT)

        self.world(1, body)

    def test_bad_ids_and_ranks_are_refused(self):
        with self.assertRaisesRegex(ValueError, "128 bytes"):
            flexring.Communicator.from_unique_id(b"short", 0, 1)
        with self.assertRaisesRegex(ValueError, "no rank 2 among 2"):
            flexring.Communicator.from_unique_id(bytes(128), 2, 2)
        with self.assertRaises(FlexringError) as caught:
            flexring.Communicator.from_unique_id(bytes(128), 0, 1)
        self.assertEqual(caught.exception.code, FlexringError.INVALID_ARGUMENT)

    def test_a_disagreement_is_reported_on_every_rank(self):
        def body(comm):
            with self.assertRaisesRegex(FlexringError, "no band of elements of type float32"):
                comm.all_reduce(floats(1), op="band")
            with self.assertRaises(FlexringError) as caught:
                comm.all_reduce(array.array("f", bytes(4 * (100 + comm.rank))))
            return caught.exception

        for error in self.world(2, body):
            self.assertEqual(error.code, FlexringError.DISAGREEMENT)
            # C calls this type float.
            self.assertIn("101 x float32, sum", str(error))

    def test_a_closed_communicator_refuses_calls(self):
        def body(comm):
            with comm:
                comm.all_reduce(floats(1))
            comm.close()
            with self.assertRaisesRegex(FlexringError, "closed"):
                comm.all_reduce(floats(1))
            self.assertIn("closed", repr(comm))

        self.world(2, body)

    def test_an_exception_in_a_with_block_aborts_the_other_ranks(self):
        def body(comm):
            try:
                with comm:
                    if comm.rank == 1:
                        raise KeyError("something else")
                    comm.all_reduce(floats(1, 2, 3))
            except (KeyError, FlexringError) as error:
                return error

        ours, theirs = self.world(2, body)
        self.assertEqual(ours.code, FlexringError.PEER_LOST)
        self.assertRegex(str(ours), r"^peer lost: rank 1 \(.*\) raised KeyError: 'something else' \(test_communicator.py:\d+\)$")
        self.assertIsInstance(theirs, KeyError)


class DerivedCommunicators(WorldTest):
    def test_ranks_are_left_out_by_shrink(self):
        def body(comm):
            if comm.rank == 1:
                return None
            smaller = comm.shrink(exclude=[1])
            comm.close()
            vector = floats(comm.rank)
            smaller.all_reduce(vector)
            return smaller.rank, smaller.size, vector[0]

        self.assertEqual(self.world(3, body), [(0, 2, 2), None, (1, 2, 2)])

    def test_a_call_that_has_begun_is_waited_for_if_a_signal_handler_raises_an_exception(self):
        library, calls = _handle.library, []
        start, wait, waited = library.flexring_all_gather_async, library.flexring_wait, threading.Event()

        def interrupted(*arguments):
            calls.append(start(*arguments))
            raise KeyboardInterrupt

        def record(pointer):
            calls.append(wait(pointer))
            waited.set()
            return calls[-1]

        def body(comm):
            with unittest.mock.patch.multiple(library, flexring_all_gather_async=interrupted, flexring_wait=record):
                with self.assertRaises(KeyboardInterrupt):
                    comm.all_gather_async(floats(1))
                gc.collect()
                self.assertTrue(waited.wait(30))

        self.world(1, body)
        self.assertEqual(calls, [0, 0])

    def test_a_new_communicator_is_freed_if_a_signal_handler_raises_an_exception(self):
        def interrupted(pointer):
            # The call has succeeded, and the handler runs before it returns to the program.
            pointer._obj.value = 4096
            raise KeyboardInterrupt

        with unittest.mock.patch.object(_handle.library, "flexring_comm_free") as free:
            with self.assertRaises(KeyboardInterrupt):
                _handle.create(interrupted)
        free.assert_called_once()
        self.assertEqual(free.call_args.args[0].value, 4096)

    def test_bad_lists_of_ranks_are_refused(self):
        def body(comm):
            with self.assertRaisesRegex(ValueError, "no rank 7 among 2"):
                comm.shrink(exclude={7})
            with self.assertRaisesRegex(FlexringError, "excludes itself"):
                comm.shrink(exclude=(comm.rank,))

        self.world(2, body)

    def test_split_orders_each_color_by_key(self):
        def body(comm):
            part = comm.split(None if comm.rank == 3 else comm.rank % 2, key=-comm.rank)
            if part is None:
                return None
            vector = floats(comm.rank)
            part.all_reduce(vector)
            return part.rank, part.size, vector[0]

        self.assertEqual(self.world(4, body), [(1, 2, 2), (0, 1, 1), (0, 2, 2), None])
        for color, key in [(-1, 0), (2**31, 0), (0, 2**31), (0, -(2**31) - 1)]:
            with self.assertRaisesRegex(ValueError, "a color is|a key is"):
                self.world(1, lambda comm: comm.split(color, key))


class Requests(WorldTest):
    def test_several_requests_can_run_at_once(self):
        def body(comm):
            vectors = [floats(*[index + comm.rank] * 3000) for index in range(5)]
            requests = [comm.all_reduce_async(vector) for vector in vectors]
            results = [request.wait() for request in requests]
            self.assertTrue(all(request.done() for request in requests))
            self.assertTrue(all(result is vector for result, vector in zip(results, vectors)))
            self.assertIs(requests[0].wait(), vectors[0])
            return [vector[2999] for vector in vectors]

        self.assertEqual(self.world(2, body), [[1, 3, 5, 7, 9]] * 2)

    def test_a_request_keeps_its_vectors_alive(self):
        def body(comm):
            out = floats(*[0] * 50_000)
            request = comm.all_reduce_async(floats(*[1] * 50_000), out=out)
            gc.collect()
            with self.assertRaises(BufferError):
                out.append(1)
            request.wait()
            out.append(1)
            return set(out[:-1])

        self.assertEqual(self.world(2, body), [{2.0}] * 2)

    def test_deleting_a_request_does_not_wait_and_keeps_its_vectors(self):
        deleted = threading.Event()

        def body(comm):
            vector, out = floats(*[1] * 50_000), floats(*[0] * 50_000)
            if comm.rank == 1:
                self.assertTrue(deleted.wait(30))
                comm.all_reduce(vector, out=out)
                return out[49_999]
            comm.all_reduce_async(vector, out=out)
            gc.collect()
            with self.assertRaises(BufferError):
                out.append(1)
            deleted.set()
            comm.synchronize()
            until = time.monotonic() + 30
            while True:
                try:
                    out.append(1)
                    return out[49_999]
                except BufferError:
                    # A thread frees the request.
                    self.assertLess(time.monotonic(), until)
                    time.sleep(0.01)

        self.assertEqual(self.world(2, body), [2, 2])

    def test_an_abort_ends_a_blocked_call(self):
        def body(comm):
            if comm.rank == 1:
                time.sleep(0.1)
                comm.abort()
                return None
            request = comm.all_reduce_async(floats(*[1] * 5000))
            for _ in range(2):
                with self.assertRaises(FlexringError) as caught:
                    request.wait()
            self.assertTrue(request.done())
            return caught.exception.code

        begun = time.monotonic()
        self.assertEqual(self.world(2, body), [FlexringError.ABORTED, None])
        self.assertLess(time.monotonic() - begun, 15)

    def test_a_request_is_not_done_while_a_thread_waits_for_it(self):
        asked = threading.Event()

        def body(comm):
            if comm.rank == 1:
                asked.wait(30)
                comm.all_reduce(floats(1))
                return
            request = comm.all_reduce_async(floats(1))
            waiter = threading.Thread(target=request.wait)
            waiter.start()
            time.sleep(0.1)
            self.assertFalse(request.done())
            asked.set()
            waiter.join()
            self.assertTrue(request.done())

        self.world(2, body)


class Processes(unittest.TestCase):
    """Tests that need their own interpreter."""

    def run_python(self, program, **variables):
        environment = {name: text for name, text in os.environ.items() if not name.startswith("FLEXRING_")}
        environment.update(
            PYTHONPATH=str(Path(flexring.__file__).parents[1]),
            FLEXRING_LIBRARY=flexring.library_path(),
            FLEXRING_SOCKET_IFNAME="lo",
        )
        environment.update(variables)
        return subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
        )

    def test_the_error_for_a_missing_library_names_it(self):
        ended = self.run_python("import flexring", FLEXRING_LIBRARY="/nowhere/libflexring.so")
        self.assertNotEqual(ended.returncode, 0)
        self.assertIn("/nowhere/libflexring.so", ended.stderr)
        self.assertIn("ImportError", ended.stderr)

    def test_a_library_that_is_a_pipe_or_a_folder_is_refused_at_once(self):
        with tempfile.TemporaryDirectory() as folder:
            pipe = os.path.join(folder, "libflexring.so")
            os.mkfifo(pipe)
            for path in (pipe, folder):
                ended = self.run_python("import flexring", FLEXRING_LIBRARY=path)
                self.assertIn(f"{path}: it is no regular file", ended.stderr)

    def test_errors_quote_bad_settings(self):
        program = "import flexring; flexring.Communicator.from_env()"
        ended = self.run_python(program, FLEXRING_RANK="first")
        self.assertIn('FLEXRING_RANK="first"', ended.stderr)

    def test_a_program_may_exit_without_closing(self):
        program = """
import array, flexring
comm = flexring.Communicator.from_env()
kept = comm.alloc_bytes(1000)
request = comm.all_reduce_async(array.array("f", [1, 2]))
"""
        ended = self.run_python(program, FLEXRING_RANK="0", FLEXRING_WORLD_SIZE="1")
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))

    def test_a_forked_child_does_not_affect_its_parent(self):
        program = """
import array, gc, os, flexring
comm = flexring.Communicator.from_env()
kept = comm.alloc_bytes(1000)
child = os.fork()
if child == 0:
    try:
        comm.all_reduce(array.array("f", [1]))
    except flexring.FlexringError as error:
        assert "was created by process" in str(error) and "after fork" in str(error), error
    else:
        os._exit(3)
    del comm, kept
    gc.collect()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
comm.all_reduce(array.array("f", [1]))
"""
        ended = self.run_python(program, FLEXRING_RANK="0", FLEXRING_WORLD_SIZE="1")
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))


    def test_a_child_of_multiprocessing_gets_an_error(self):
        program = """
import array, multiprocessing, flexring
comm = flexring.Communicator.from_env()
kept = comm.alloc(1000)
def child(results):
    try:
        comm.all_reduce(array.array("f", [1]))
    except flexring.FlexringError as error:
        results.put((error.code, str(error)))
fork = multiprocessing.get_context("fork")
results = fork.Queue()
process = fork.Process(target=child, args=(results,))
process.start()
code, message = results.get(timeout=30)
process.join()
assert process.exitcode == 0 and code == flexring.FlexringError.INVALID_ARGUMENT, (process.exitcode, message)
assert f"forked child {process.pid}" in message, message
comm.all_reduce(array.array("f", [1]))
"""
        ended = self.run_python(program, FLEXRING_RANK="0", FLEXRING_WORLD_SIZE="1")
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))

    # Two ranks: the main thread is rank 0, and a second thread is rank 1.
    TWO_RANKS = """
import array, os, signal, threading, time, flexring
from flexring import FlexringError

def floats(count):
    return array.array("f", [1] * count)

def two_ranks():
    made, other = flexring.unique_id(), []
    thread = threading.Thread(target=lambda: other.append(flexring.Communicator.from_unique_id(made, 1, 2)))
    thread.start()
    comm = flexring.Communicator.from_unique_id(made, 0, 2)
    thread.join()
    return comm, other[0]

def signal_soon(number):
    threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
"""

    def test_ctrl_c_ends_a_waiting_call_at_once(self):
        program = self.TWO_RANKS + """
def pending_call(comm):
    request = comm.all_reduce_async(floats(5000))
    comm.synchronize()

for wait in [
    lambda comm: comm.all_reduce(floats(1)),
    lambda comm: comm.all_reduce(floats(50_000)),
    lambda comm: comm.all_reduce_async(floats(5000)).wait(),
    pending_call,
]:
    ours, theirs = two_ranks()
    signal_soon(signal.SIGINT)
    begun = time.monotonic()
    try:
        wait(ours)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("the call ended")
    assert time.monotonic() - begun < 5
    for comm in ours, theirs:
        try:
            # The other rank may have got what this rank contributed before.
            for _ in range(2):
                comm.all_reduce(floats(1))
        except FlexringError as error:
            assert error.code == FlexringError.ABORTED and "interrupted" in str(error), error
        else:
            raise AssertionError("the communicator works")
"""
        ended = self.run_python(program)
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))

    def test_ctrl_c_comes_after_a_request_was_deleted(self):
        program = self.TWO_RANKS + """
ours, theirs = two_ranks()
begun = time.monotonic()
signal_soon(signal.SIGINT)
try:
    request = ours.all_reduce_async(floats(5000))
    del request
    time.sleep(30)
except KeyboardInterrupt:
    assert 0.2 < time.monotonic() - begun < 5
else:
    raise AssertionError("no KeyboardInterrupt")
"""
        ended = self.run_python(program)
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))

    def test_a_program_that_fails_exits_without_waiting_for_other_ranks(self):
        # The other rank makes no call, and the time-out is 300 s.
        begin = self.TWO_RANKS + """
ours, theirs = two_ranks()

def call():
    begun.set()
    ours.all_reduce(floats(50_000))

begun = threading.Event()
"""
        for end in [
            "ours.all_reduce_async(floats(50_000)); raise ValueError('failed')",
            "request = ours.all_reduce_async(floats(50_000)); raise ValueError('failed')",
            "threading.Thread(target=call, daemon=True).start(); begun.wait(); time.sleep(0.2); raise ValueError('failed')",
            "threading.Thread(target=call, daemon=True).start(); begun.wait(); time.sleep(0.2); sys.exit(1)",
            "threading.Thread(target=call).start(); begun.wait(); time.sleep(0.2); raise ValueError('failed')",
            "pool = ThreadPoolExecutor(1); pool.submit(call); begun.wait(); time.sleep(0.2); raise ValueError('failed')",
            "def wait_in_locals():\n    r = ours.all_reduce_async(floats(9)); 1 / 0\ntry: wait_in_locals()\nexcept ZeroDivisionError: sys.exit(1)",
        ]:
            started = time.monotonic()
            ended = self.run_python(begin + "import sys\nfrom concurrent.futures import ThreadPoolExecutor\n" + end)
            self.assertEqual(ended.returncode, 1, (end, ended.stderr))
            self.assertEqual("ValueError: failed" in ended.stderr, "failed" in end, ended.stderr)
            self.assertLess(time.monotonic() - started, 30)

    def test_closed_standard_descriptors_stay_closed(self):
        program = self.TWO_RANKS + """
for number in range(3):
    os.close(number)
ours, theirs = two_ranks()
peer = threading.Thread(target=theirs.all_reduce, args=(floats(50_000),))
peer.start()
ours.all_reduce(floats(50_000))
peer.join()
for number in range(3):
    try:
        os.fstat(number)
    except OSError:
        continue
    os._exit(3)
os._exit(0)
"""
        for transport in ["auto", "tcp"]:
            self.assertEqual(self.run_python(program, FLEXRING_TRANSPORT=transport).returncode, 0)

    def test_ctrl_c_ends_a_rendezvous_at_once(self):
        program = self.TWO_RANKS + """
signal_soon(signal.SIGINT)
begun = time.monotonic()
try:
    flexring.Communicator.from_unique_id(flexring.unique_id(), 0, 2)
except KeyboardInterrupt:
    assert time.monotonic() - begun < 5
else:
    raise AssertionError("the rendezvous ended")
"""
        ended = self.run_python(program)
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))

    def test_a_signal_handler_that_returns_runs_while_a_call_waits(self):
        program = self.TWO_RANKS + """
ours, theirs = two_ranks()
# The other rank makes its call after the handler has run.
handled = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: handled.set())

def call_later():
    handled.wait(30)
    theirs.all_reduce(floats(50_000))

signal_soon(signal.SIGUSR1)
peer = threading.Thread(target=call_later)
peer.start()
assert set(ours.all_reduce(floats(50_000))) == {2}
assert handled.is_set()
peer.join()
"""
        ended = self.run_python(program)
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))


    def test_a_signal_handler_may_make_calls_which_other_signals_end(self):
        program = self.TWO_RANKS + """
ours, theirs = two_ranks()
others = two_ranks()
request = ours.all_reduce_async(floats(1))

def handler(*_):
    # The other rank takes no part, so that the second signal must end this call.
    signal_soon(signal.SIGINT)
    assert not request.done()
    try:
        others[0].all_reduce(floats(50_000))
    except KeyboardInterrupt:
        raise InterruptedError from None

signal.signal(signal.SIGUSR1, handler)
for _ in range(2):
    signal_soon(signal.SIGUSR1)
    begun = time.monotonic()
    try:
        request.wait()
    except InterruptedError:
        assert time.monotonic() - begun < 5
    else:
        raise AssertionError("the wait ended")
    ours, theirs = two_ranks()
    others = two_ranks()
    request = ours.all_reduce_async(floats(1))

def wait_again(*_):
    try:
        request.wait()
    except RuntimeError as error:
        assert "use done()" in str(error), error
        handled.append(error)
        threading.Thread(target=theirs.all_reduce, args=(floats(1),)).start()

handled = []
signal.signal(signal.SIGUSR1, wait_again)
signal_soon(signal.SIGUSR1)
request.wait()
assert handled and request.done()
"""
        ended = self.run_python(program)
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))


class Memory(WorldTest):
    def test_memory_stays_valid_after_close(self):
        def body(comm):
            block = comm.alloc_bytes(4096)
            comm.close()
            gc.collect()
            block[4095] = 7
            return block[4095]

        self.assertEqual(self.world(1, body), [7])

    def test_too_much_memory_is_refused(self):
        def body(comm):
            with self.assertRaises(FlexringError) as caught:
                comm.alloc_bytes(1 << 60)
            return caught.exception.code

        self.assertEqual(self.world(1, body), [FlexringError.SYSTEM_ERROR])

    def test_without_numpy_alloc_returns_ctypes_arrays(self):
        def body(comm):
            hidden = sys.modules.get("numpy")
            sys.modules["numpy"] = None
            try:
                vector = comm.alloc((2, 3))
            finally:
                if hidden is None:
                    del sys.modules["numpy"]
                else:
                    sys.modules["numpy"] = hidden
            vector[1][2] = 5
            comm.all_reduce(vector, op=flexring.premul_sum(2))
            return vector[1][2], vector[0][0]

        self.assertEqual(self.world(1, body), [(10, 0)])
