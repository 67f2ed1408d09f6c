"""Sends and receives, alone and in groups."""

import array
import threading
import unittest

import flexring
from flexring import FlexringError

from .world import WorldTest


def numbers(*elements):
    return array.array("i", elements)


class Messages(WorldTest):
    def test_a_vector_goes_from_one_rank_to_another(self):
        def body(comm):
            if comm.rank == 0:
                comm.send(bytes(b"hello"), 2)
                comm.send_async(numbers(1, 2), peer=2).wait()
            elif comm.rank == 2:
                text, pair = bytearray(5), numbers(0, 0)
                self.assertIs(comm.recv(text, 0), text)
                self.assertIs(comm.recv_async(pair, peer=0).wait(), pair)
                return bytes(text), list(pair)

        self.assertEqual(self.world(3, body), [None, None, (b"hello", [1, 2])])

    def test_in_a_group_ranks_exchange_long_vectors_in_any_order(self):
        count = 1 << 20

        def body(comm):
            other, received = 1 - comm.rank, array.array("i", bytes(4 * count))
            with flexring.group():
                # The group keeps what it sends.
                comm.send(array.array("i", [comm.rank + 1] * count), other)
                with flexring.group():
                    comm.recv(received, other)
            return received[0], received[-1]

        self.assertEqual(self.world(2, body), [(2, 2), (1, 1)])

    def test_a_group_whose_block_raises_an_exception_sends_nothing(self):
        def body(comm):
            if comm.rank == 0:
                with self.assertRaisesRegex(KeyError, "stop"):
                    with flexring.group():
                        comm.send(numbers(7), 1)
                        raise KeyError("stop")
                with self.assertRaisesRegex(ValueError, "no rank 5 among 2"):
                    with flexring.group():
                        comm.send(numbers(7), 1)
                        comm.send(numbers(7), 5)
                comm.send(numbers(8), 1)
            else:
                received = numbers(0)
                return comm.recv(received, 0)[0]

        self.assertEqual(self.world(2, body), [None, 8])

    def test_groups_of_threads_are_apart(self):
        def body(comm):
            with flexring.group():
                thread = threading.Thread(target=comm.barrier)
                thread.start()
                thread.join()

        self.world(2, body)

    def test_lengths_that_differ_are_an_error_on_both_ranks(self):
        def body(comm):
            try:
                comm.send(numbers(1, 2), 1) if comm.rank == 0 else comm.recv(numbers(1, 2, 3), 0)
                comm.barrier()
            except FlexringError as error:
                return error.code

        self.assertEqual(self.world(2, body), [FlexringError.DISAGREEMENT] * 2)

    def test_bad_vectors_and_ranks_are_refused(self):
        def body(comm):
            with self.assertRaisesRegex(ValueError, "no rank 1 among 1"):
                comm.send(numbers(1), 1)
            with self.assertRaisesRegex(ValueError, "no rank -1 among 1; a receive names the rank that sends"):
                comm.recv(numbers(1), -1)
            with self.assertRaisesRegex(ValueError, "read-only"):
                comm.recv(b"x", 0)

        self.world(1, body)
