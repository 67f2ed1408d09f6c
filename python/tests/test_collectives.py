"""Reduce-scatter, all-gather, broadcast and reduce."""

import array
import unittest

import flexring
from flexring import FlexringError

from .world import WorldTest

try:
    import numpy
except ImportError:
    numpy = None

try:
    import torch
except ImportError:
    torch = None


def numbers(*elements):
    return array.array("i", elements)


class OtherCollectives(WorldTest):
    def test_reduce_scatter_returns_each_ranks_part(self):
        def body(comm):
            vector, out = numbers(*[10**comm.rank * (at + 1) for at in range(6)]), numbers(0, 0)
            given = list(vector)
            self.assertIs(comm.reduce_scatter(vector, out=out), out)
            self.assertEqual(list(vector), given)
            self.assertIs(comm.reduce_scatter(vector), vector)
            own = slice(2 * comm.rank, 2 * comm.rank + 2)
            self.assertEqual(vector[own], out)
            return list(out)

        self.assertEqual(self.world(3, body), [[111, 222], [333, 444], [555, 666]])

    def test_all_gather_concatenates_all_vectors(self):
        def body(comm):
            vector, out = bytes([comm.rank, 10 + comm.rank]), bytearray(6)
            self.assertIs(comm.all_gather(vector, out), out)
            within = bytearray(6)
            within[2 * comm.rank : 2 * comm.rank + 2] = vector
            self.assertIs(comm.all_gather(within), within)
            self.assertEqual(within, out)
            return list(out)

        self.assertEqual(self.world(3, body), [[0, 10, 1, 11, 2, 12]] * 3)

    def test_broadcast_copies_the_roots_vector(self):
        def body(comm):
            vectors = [numbers(comm.rank, 7 * comm.rank) for _ in range(3)]
            for root, vector in enumerate(vectors):
                self.assertIs(comm.broadcast(vector, root=root), vector)
            return [list(vector) for vector in vectors]

        self.assertEqual(self.world(3, body), [[[0, 0], [1, 7], [2, 14]]] * 3)

    def test_reduce_changes_the_roots_vector_only(self):
        def body(comm):
            vector = numbers(10**comm.rank, 2)
            self.assertIs(comm.reduce(vector, op="sum", root=1), vector)
            # The vectors of other ranks than the root may be read-only.
            last = bytes([1, 2]) if comm.rank else bytearray([3, 4])
            comm.reduce(last, op="prod")
            return list(vector), list(last)

        others = [1, 2]
        self.assertEqual(self.world(3, body), [([1, 2], [3, 16]), ([111, 6], others), ([100, 2], others)])

    def test_asynchronous_calls_have_the_results_of_blocking_ones(self):
        def body(comm):
            vector = numbers(*[10**comm.rank * (at + 1) for at in range(6)])
            sums, copies = comm.reduce_scatter(numbers(*vector)), comm.all_gather(numbers(*vector))
            root, reduced = comm.broadcast(numbers(*vector), root=1), comm.reduce(numbers(*vector), "max", root=2)
            part, whole = numbers(0, 0), numbers(*[0] * 18)
            requests = [
                comm.reduce_scatter_async(numbers(*vector)),
                comm.reduce_scatter_async(numbers(*vector), out=part),
                comm.all_gather_async(numbers(*vector)),
                comm.all_gather_async(numbers(*vector), whole),
                comm.broadcast_async(numbers(*vector), root=1),
                comm.reduce_async(numbers(*vector), "max", root=2),
            ]
            results = [request.wait() for request in requests]
            self.assertEqual([results[0], results[2], *results[4:]], [sums, copies, root, reduced])
            self.assertIs(results[1], part)
            self.assertEqual(part, sums[2 * comm.rank : 2 * comm.rank + 2])
            self.assertIs(results[3], whole)
            self.assertEqual(whole[6 * comm.rank : 6 * comm.rank + 6], vector)
            with self.assertRaisesRegex(ValueError, "read-only"):
                comm.broadcast_async(bytes(vector))
            return len(requests)

        self.assertEqual(self.world(3, body), [6] * 3)

    def test_gather_and_scatter_move_parts_to_and_from_the_root(self):
        def body(comm):
            out = numbers(*[-1] * 6) if comm.rank == 1 else None
            self.assertIs(comm.gather(numbers(comm.rank, 7), out, root=1), out)
            part = numbers(0, 0)
            self.assertIs(comm.scatter(numbers(*range(6)) if comm.rank == 2 else None, part, root=2), part)
            again = numbers(0, 0)
            request = comm.scatter_async(numbers(*range(6)) if comm.rank == 2 else None, again, root=2)
            self.assertIs(request.wait(), again)
            self.assertEqual(again, part)
            return out and list(out), list(part)

        gathered = [0, 7, 1, 7, 2, 7]
        self.assertEqual(self.world(3, body), [(None, [0, 1]), (gathered, [2, 3]), (None, [4, 5])])

    def test_all_to_all_moves_a_block_from_every_rank_to_every_rank(self):
        def body(comm):
            rank = comm.rank
            even = numbers(*[0] * 3)
            comm.all_to_all(numbers(*[10 * rank + to for to in range(3)]), even)
            # Rank r sends r elements to each rank.
            uneven = numbers(*[0] * 3)
            counts = [rank] * 3, [0, 1, 2]
            sent = numbers(*[rank] * (3 * rank))
            self.assertIs(comm.all_to_all(sent, uneven, *counts), uneven)
            again = numbers(*[0] * 3)
            self.assertIs(comm.all_to_all_async(sent, again, *counts).wait(), again)
            self.assertEqual(again, uneven)
            with self.assertRaises(ValueError):
                comm.all_to_all(sent, uneven, [1, 1], [0, 1, 2])
            comm.barrier()
            comm.barrier_async().wait()
            return list(even), list(uneven)

        self.assertEqual(
            self.world(3, body), [([rank, 10 + rank, 20 + rank], [1, 2, 2]) for rank in range(3)]
        )

    def test_factors_may_differ_between_ranks(self):
        def body(comm):
            vector = array.array("d", [2, 4])
            comm.reduce_scatter(vector, op=flexring.premul_sum(0.5 + comm.rank))
            return vector[comm.rank]

        self.assertEqual(self.world(2, body), [4, 8])

    def test_empty_vectors_are_accepted(self):
        def body(comm):
            nothing = numbers()
            comm.reduce_scatter(nothing)
            comm.all_gather(nothing, numbers())
            comm.broadcast(nothing)
            comm.reduce(nothing)

        self.world(2, body)

    def test_bad_arguments_are_refused_with_a_message(self):
        def body(comm):
            for error, message, call in [
                (ValueError, "5 x int32 are not 2 parts of 2 x int32", lambda: comm.reduce_scatter(numbers(*range(5)))),
                (ValueError, "2 parts of 1 x int32", lambda: comm.reduce_scatter(numbers(1, 2, 3, 4), out=numbers(1))),
                (ValueError, "3 x int32 are not 2 parts", lambda: comm.all_gather(numbers(1), numbers(0, 0, 0))),
                (ValueError, "8 x uint8 are not", lambda: comm.all_gather(numbers(1), bytearray(8))),
                (ValueError, "read-only", lambda: comm.all_gather(bytes(2))),
                (ValueError, "read-only", lambda: comm.reduce_scatter(bytes(2))),
                (ValueError, "read-only", lambda: comm.broadcast(bytes(2))),
                (ValueError, "read-only", lambda: comm.reduce(bytes(2), root=comm.rank)),
                (ValueError, "no rank 2 among 2", lambda: comm.broadcast(numbers(1), root=2)),
                (ValueError, "no rank -1 among 2", lambda: comm.reduce(numbers(1), root=-1)),
                (ValueError, "no such operation", lambda: comm.reduce(numbers(1), op="median")),
                (TypeError, "has no buffer", lambda: comm.broadcast([1, 2])),
            ]:
                with self.assertRaisesRegex(error, message):
                    call()
            comm.close()
            with self.assertRaisesRegex(FlexringError, "closed"):
                comm.broadcast(numbers(1))

        self.world(2, body)

    def test_different_roots_are_reported_on_every_rank(self):
        def body(comm):
            try:
                comm.broadcast(numbers(*range(5000)), root=comm.rank)
            except FlexringError as error:
                return error

        for error in self.world(2, body):
            self.assertEqual(error.code, FlexringError.DISAGREEMENT)
            self.assertIn("from rank 1", str(error))

    @unittest.skipIf(numpy is None, "no numpy")
    def test_arrays_in_shared_memory(self):
        def body(comm):
            vector, out = comm.alloc((2, 3000)), comm.alloc(3000)
            vector[:] = comm.rank + 1
            comm.reduce_scatter(vector, op="avg", out=out)
            numpy.testing.assert_array_equal(out, numpy.full(3000, 1.5, "float32"))
            out[:] = comm.rank
            comm.all_gather(out, vector)
            numpy.testing.assert_array_equal(vector[:, 0], [0, 1])
            numpy.testing.assert_array_equal(vector[:, 2999], [0, 1])

        self.world(2, body)

    @unittest.skipIf(torch is None, "no torch")
    def test_tensors(self):
        def body(comm):
            tensor = torch.full((2, 700), comm.rank + 1, dtype=torch.bfloat16)
            comm.reduce_scatter(tensor)
            self.assertTrue(torch.equal(tensor[comm.rank], torch.full((700,), 3, dtype=torch.bfloat16)))
            comm.broadcast(comm.all_gather(tensor), root=1)
            self.assertTrue(torch.equal(tensor, torch.full((2, 700), 3, dtype=torch.bfloat16)))
            comm.reduce(tensor, op="prod", root=0)
            return tensor[1, 699].item()

        self.assertEqual(self.world(2, body), [9, 3])
