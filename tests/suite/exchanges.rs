//! Gather, scatter, all-to-all and barrier: every block arrives at the rank that it is for, and calls that do
//! not fit each other are errors on all ranks.

use crate::collectives::{Case, elements, noise, token};
use crate::harness::{Rank, Setup, TestElement, World, spawn};
use flexring::{Error, ErrorKind, ReduceOp, Result};
use flexring_core::call::Collective;
use flexring_core::config::{Algorithm, Lowering};
use half::bf16;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// From no elements to many sub-chunks in each block.
const COUNTS: [usize; 7] = [0, 1, 7, 64, 1000, 4099, 30_011];

const STRAIGHT: [Collective; 4] =
    [Collective::Gather, Collective::Scatter, Collective::AllToAll, Collective::AllToAllV];

impl Case {
    /// [`check`](Self::check) of a collective whose data goes straight from rank to rank, or a barrier.
    pub fn check_straight<T: TestElement>(self, comm: &Rank) {
        let (rank, world) = (comm.rank(), comm.world_size());
        let Self { root, count, in_place, .. } = self;
        let is_root = rank == root;
        let whole = world * count;
        match self.collective {
            Collective::Gather => {
                let send = elements(count, |at| token::<T>(rank, at));
                // Half of the other ranks pass an empty receive vector.
                let len = if is_root || in_place || rank % 2 == 0 { whole } else { 0 };
                let mut content = elements(len, noise::<T>);
                if in_place {
                    content[rank * count..][..count].copy_from_slice(&send);
                }
                let mut receive = self.vector(comm, &content);
                if in_place {
                    self.expect_ok(comm, comm.gather_in_place(&mut receive, root));
                } else {
                    let vector = self.vector(comm, &send);
                    self.expect_ok(comm, comm.gather(&vector, &mut receive, root));
                    self.expect_equal(comm, "the input", &vector, &send);
                }
                let gathered = elements(whole, |at| token::<T>(at / count, at % count));
                self.expect_equal(comm, "the result", &receive, if is_root { &gathered } else { &content });
            }
            Collective::Scatter => {
                let given = elements(if is_root || in_place { whole } else { 0 }, |at| {
                    if is_root { token::<T>(root, at) } else { noise(at) }
                });
                let mut vector = self.vector(comm, &given);
                let wanted = elements(count, |at| token::<T>(root, rank * count + at));
                if in_place {
                    self.expect_ok(comm, comm.scatter_in_place(&mut vector, root));
                    let mut content = given;
                    content[rank * count..][..count].copy_from_slice(&wanted);
                    self.expect_equal(comm, "the result", &vector, &content);
                } else {
                    let mut receive = self.vector(comm, &elements(count, noise::<T>));
                    self.expect_ok(comm, comm.scatter(&vector, &mut receive, root));
                    self.expect_equal(comm, "the result", &receive, &wanted);
                    self.expect_equal(comm, "the input", &vector, &given);
                }
            }
            Collective::AllToAll | Collective::AllToAllV => {
                let send = elements(whole, |at| token::<T>(rank, at));
                let vector = self.vector(comm, &send);
                let mut receive = self.vector(comm, &elements(whole, noise::<T>));
                let counts = vec![count; world];
                let outcome = match self.collective {
                    Collective::AllToAll => comm.all_to_all(&vector, &mut receive),
                    _ => comm.all_to_all_v(&vector, &counts, &mut receive, &counts),
                };
                self.expect_ok(comm, outcome);
                let wanted = elements(whole, |at| token::<T>(at / count, rank * count + at % count));
                self.expect_equal(comm, "the result", &receive, &wanted);
                self.expect_equal(comm, "the input", &vector, &send);
            }
            _ => self.expect_ok(comm, comm.barrier()),
        }
    }
}

/// The length of the block from one rank to another in round number `round`: some are empty, some have many
/// sub-chunks.
fn block_count(from: usize, to: usize, round: usize) -> usize {
    COUNTS[(from * 3 + to * 5 + round) % COUNTS.len()] * usize::from((from + 2 * to + round) % 4 != 3)
}

/// An all-to-all of uneven blocks, as seen by one rank.
struct Uneven<T> {
    send: Vec<T>,
    send_counts: Vec<usize>,
    receive: Vec<T>,
    receive_counts: Vec<usize>,
    wanted: Vec<T>,
}

impl<T: TestElement> Uneven<T> {
    fn new(rank: usize, world: usize, round: usize) -> Self {
        // The elements tell sender, receiver and index.
        let block = |from: usize, to: usize| {
            elements(block_count(from, to, round), move |at| token::<T>(from * 7 + to, at))
        };
        let send_counts = elements(world, |to| block_count(rank, to, round));
        let receive_counts = elements(world, |from| block_count(from, rank, round));
        let wanted: Vec<T> = (0..world).flat_map(|from| block(from, rank)).collect();
        Self {
            send: (0..world).flat_map(|to| block(rank, to)).collect(),
            send_counts,
            receive: elements(wanted.len(), noise::<T>),
            receive_counts,
            wanted,
        }
    }

    fn check(mut self, comm: &Rank, pool: bool) {
        let case = Case {
            collective: Collective::AllToAllV,
            op: ReduceOp::Sum,
            root: 0,
            count: self.send.len(),
            in_place: false,
            pool,
        };
        let (send, mut receive) = (case.vector(comm, &self.send), case.vector(comm, &self.receive));
        let outcome = comm.all_to_all_v(&send, &self.send_counts, &mut receive, &self.receive_counts);
        case.expect_ok(comm, outcome);
        self.receive.copy_from_slice(&receive);
        case.expect_equal(comm, "the result", &self.receive, &self.wanted);
        case.expect_equal(comm, "the input", &send, &self.send);
    }
}

/// Tests every collective with every count, in turn with all roots, types and ways to hold the vectors.
fn check_all(world: World) {
    if !world.is_enabled() {
        return;
    }
    // Simulated hardware is slow, so test one world size only.
    for ranks in if world.is_simulated() { 3..=3 } else { 1..=5 } {
        spawn(&Setup::new(world, ranks), |comm| {
            let mut turn = ranks;
            for (collective, count) in STRAIGHT.iter().flat_map(|one| COUNTS.map(|count| (*one, count))) {
                for in_place in [false, true] {
                    turn += 1;
                    let (root, pool) = (turn % ranks, turn / 2 % 2 == 0);
                    let case = Case { collective, op: ReduceOp::Sum, root, count, in_place, pool };
                    match turn % 4 {
                        0 => case.check::<f32>(&comm),
                        1 => case.check::<u8>(&comm),
                        2 => case.check::<bf16>(&comm),
                        _ => case.check::<i64>(&comm),
                    }
                }
                comm.barrier().expect("all ranks call it");
            }
            for round in 0..9 {
                Uneven::<i32>::new(comm.rank(), ranks, round).check(&comm, round % 2 == 0);
                Uneven::<u8>::new(comm.rank(), ranks, round).check(&comm, round % 2 == 1);
            }
        });
    }
}

#[test]
fn every_block_arrives_between_threads() {
    check_all(World::Local);
}

#[test]
fn every_block_arrives_over_shm() {
    check_all(World::Shm);
}

#[test]
fn every_block_arrives_over_tcp() {
    check_all(World::Tcp);
}

#[test]
fn every_block_arrives_on_two_nodes() {
    check_all(World::Mixed);
}

#[test]
fn every_block_arrives_over_rdma() {
    check_all(World::Verbs);
}

#[test]
fn every_block_arrives_over_rdma_with_staging() {
    check_all(World::VerbsStaged);
}

#[test]
fn every_block_arrives_on_two_nodes_over_rdma() {
    check_all(World::VerbsMixed);
}

#[test]
fn every_block_arrives_on_gpus() {
    check_all(World::Gpu);
}

#[test]
fn every_block_arrives_on_gpus_through_pinned_memory() {
    check_all(World::GpuPinned);
}

#[test]
fn every_block_arrives_on_gpus_over_tcp() {
    check_all(World::GpuTcp);
}

#[test]
fn every_block_arrives_on_gpus_of_two_nodes() {
    check_all(World::GpuMixed);
}

#[test]
fn blocks_between_uneven_nodes_whose_ranks_alternate_arrive() {
    let world = World::Mixed;
    if !world.is_enabled() {
        return;
    }
    let nodes = &["a", "b", "a", "c", "b", "a", "c", "d"];
    spawn(&Setup { nodes, ..Setup::new(world, nodes.len()) }, |comm| {
        // The longest of them go straight; the others by node, and some of these in several sub-chunks.
        for (turn, count) in [1, 700, 0, 16384, 33, 2049, 1].into_iter().enumerate() {
            let (collective, pool) = (Collective::AllToAll, turn % 2 == 0);
            let case = Case { collective, op: ReduceOp::Sum, root: 0, count, in_place: false, pool };
            case.check::<u8>(&comm);
            case.check::<i64>(&comm);
        }
    });
}

/// In these collectives some ranks do not wait for others: those that only send, and those that are not in
/// the rest of a chain.
#[test]
fn ranks_may_run_ahead_and_leave_early() {
    for &world in World::enabled() {
        for algorithm in [Algorithm::Auto, Algorithm::Star, Algorithm::Tree] {
            for lowering in [Lowering::Chain, Lowering::Direct] {
                let mut setup = Setup::new(world, 4).lowering(lowering);
                setup.config.algo = algorithm;
                spawn(&setup, |comm| {
                    for call in 0..150 {
                        if call % 50 == comm.rank() * 10 {
                            std::thread::sleep(Duration::from_millis(20));
                        }
                        let collective = [
                            Collective::Broadcast,
                            Collective::Reduce,
                            Collective::Gather,
                            Collective::Scatter,
                        ][call * 4 / 150];
                        let (root, op) = (call / 40 % 4, ReduceOp::Sum);
                        let (in_place, pool) = (call % 2 == 0, call % 4 < 2);
                        Case { collective, op, root, count: 1 + call * 7, in_place, pool }
                            .check::<f32>(&comm);
                    }
                    // Without elements, not all ranks wait for all.
                    for collective in [Collective::ReduceScatter, Collective::AllGather] {
                        let op = ReduceOp::Sum;
                        Case { collective, op, root: 0, count: 0, in_place: false, pool: false }
                            .check::<f32>(&comm);
                    }
                });
            }
        }
    }
}

#[test]
fn no_rank_leaves_a_barrier_before_all_have_entered_it() {
    for &world in World::enabled() {
        for ranks in [1, 2, 5] {
            let entered = AtomicUsize::new(0);
            spawn(&Setup::new(world, ranks), |comm| {
                for round in 0..20 {
                    if (round + comm.rank()) % 7 == 0 {
                        std::thread::sleep(Duration::from_millis(3));
                    }
                    entered.fetch_add(1, Ordering::SeqCst);
                    comm.barrier().expect("all ranks call it");
                    let now = entered.load(Ordering::SeqCst);
                    assert!(now >= ranks * (round + 1), "{world:?}: {now} entries in round {round}");
                }
            });
        }
    }
}

#[test]
fn asynchronous_calls_return_their_vectors() {
    for &world in World::enabled() {
        spawn(&Setup::new(world, 3), |comm| {
            let rank = comm.rank() as i32;
            let gathered = comm.gather_async(vec![rank; 700], vec![-1; 2100], 2).expect("a request");
            let scattered = comm.scatter_async(vec![rank; 2100], vec![-1; 700], 1).expect("a request");
            let barrier = comm.barrier_async().expect("a request");
            let blocks = comm.all_to_all_async(vec![rank; 9], vec![-1; 9]).expect("a request");
            let counts = elements(3, |peer| usize::from(peer != comm.rank()));
            let uneven = comm.all_to_all_v_async(vec![rank; 2], &counts, vec![-1; 2], &counts);
            let uneven = uneven.expect("a request");
            let scattered_sums = comm.reduce_scatter_async(vec![rank; 2100], vec![-1; 700], ReduceOp::Sum);
            let gathered_by_all = comm.all_gather_async(vec![rank; 700], vec![-1; 2100]).expect("a request");
            let broadcast = comm.broadcast_async(vec![rank; 700], 1).expect("a request");
            let reduced = comm.reduce_async(vec![rank; 700], ReduceOp::Sum, 2).expect("a request");
            let all: Vec<i32> = (0..3).flat_map(|from| [from; 700]).collect();
            let sums = scattered_sums.expect("a request").wait().expect("a reduce-scatter");
            assert_eq!(sums, (vec![rank; 2100], vec![3; 700]));
            assert_eq!(gathered_by_all.wait().expect("an all-gather"), (vec![rank; 700], all.clone()));
            assert_eq!(broadcast.wait().expect("a broadcast"), [1; 700]);
            assert_eq!(reduced.wait().expect("a reduce"), [if rank == 2 { 3 } else { rank }; 700]);
            let wanted = if rank == 2 { all } else { vec![-1; 2100] };
            assert_eq!(gathered.wait().expect("a gather"), (vec![rank; 700], wanted));
            assert_eq!(scattered.wait().expect("a scatter").1, [1; 700]);
            barrier.wait().expect("a barrier");
            assert_eq!(blocks.wait().expect("an all-to-all").1, [0, 0, 0, 1, 1, 1, 2, 2, 2]);
            let others: Vec<i32> = (0..3).filter(|other| *other != rank).collect();
            assert_eq!(uneven.wait().expect("an all-to-all").1, others);
        });
    }
}

/// Makes an all-to-all of 3 ranks in which rank 2 sends `sent` elements to rank 0, which expects `expected`.
/// The other blocks have 5 elements. Returns the errors.
fn mismatched(setup: &Setup, sent: usize, expected: usize) -> Vec<Error> {
    let first_is_over = Barrier::new(setup.ranks);
    spawn(setup, |comm| {
        let (mut sends, mut receives) = ([5; 3], [5; 3]);
        match comm.rank() {
            0 => receives[2] = expected,
            2 => sends[0] = sent,
            _ => {}
        }
        let send = vec![1f32; sends.iter().sum()];
        let mut receive = vec![0f32; receives.iter().sum()];
        comm.barrier().expect("the first calls agree");
        first_is_over.wait();
        let begun = Instant::now();
        // Rank 1 does not see the mismatch, and may learn of it in its next call.
        let outcome = comm
            .all_to_all_v(&send, &sends, &mut receive, &receives)
            .and_then(|()| comm.all_reduce(&mut [1f32; 5000], ReduceOp::Sum));
        assert!(begun.elapsed() < Duration::from_secs(10), "it took {:?}", begun.elapsed());
        outcome.expect_err("the counts differ")
    })
}

#[test]
fn blocks_of_another_length_than_expected_are_an_error_that_names_both_ranks() {
    for &world in World::enabled() {
        for (sent, expected) in [(5, 7), (0, 5), (5, 0), (30_000, 5), (5, 30_000), (30_000, 30_001)] {
            let mut setup = Setup::new(world, 3);
            for sockets in [1, 3] {
                setup.config.sockets_per_link = sockets;
                for error in mismatched(&setup, sent, expected) {
                    assert_eq!(error.kind(), ErrorKind::Disagreement, "{world:?}: {error}");
                    let phrase = format!("rank 2 sends {sent} x float to rank 0, which expects {expected}");
                    // Over several sockets or RDMA, a message may arrive before the call that explains its
                    // length.
                    let names_both = error.message().contains("rank 0") && error.message().contains("rank 2");
                    let early = names_both && (sockets > 1 || world.is_verbs());
                    assert!(error.message().contains(&phrase) || early, "{world:?} {phrase}: {error}");
                }
            }
        }
    }
}

#[test]
fn bad_arguments_are_refused_and_the_communicator_still_works() {
    for &world in World::enabled() {
        spawn(&Setup::new(world, 3), |comm| {
            let refused = |outcome: Result<()>, phrase: &str| {
                let error = outcome.expect_err(phrase);
                assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
                assert!(error.message().contains(phrase), "{error} does not contain {phrase:?}");
            };
            refused(comm.gather(&[1f32; 2], &mut [0f32; 6], 3), "root 3 is not a rank");
            // On all ranks, so that none waits for the root.
            refused(comm.gather_in_place(&mut [1f32; 7], 1), "28 bytes are not 3 parts of 8 bytes");
            refused(comm.scatter_in_place(&mut [1f32; 7], 1), "28 bytes are not 3 parts of 8 bytes");
            refused(comm.gather(&[1f32; 2], &mut [0f32; 7], comm.rank()), "3 parts of 8 bytes are not 28");
            refused(comm.scatter(&[1f32; 7], &mut [0f32; 2], comm.rank()), "28 bytes are not 3 parts of 8");
            refused(comm.scatter(&[1f32; 6], &mut [0f32; 2], usize::MAX), "is not a rank");
            refused(comm.all_to_all(&[1f32; 3], &mut [0f32; 6]), "not 3 equal blocks each");
            refused(comm.all_to_all(&[1f32; 4], &mut [0f32; 4]), "not 3 equal blocks each");
            let mut receive = [0f32; 3];
            refused(
                comm.all_to_all_v(&[1f32; 3], &[1; 2], &mut receive, &[1; 3]),
                "2 send counts for 3 ranks",
            );
            refused(
                comm.all_to_all_v(&[1f32; 3], &[1; 3], &mut receive, &[1, 1, 2]),
                "the receive buffer has 12",
            );
            refused(
                comm.all_to_all_v(&[1f32; 3], &[usize::MAX, 2, 2], &mut receive, &[1; 3]),
                "the send buffer has",
            );
            let (mut sends, mut receives) = ([1; 3], [1; 3]);
            sends[comm.rank()] = 0;
            sends[(comm.rank() + 1) % 3] = 2;
            receives[comm.rank()] = 1;
            refused(
                comm.all_to_all_v(&[1f32; 3], &sends, &mut receive, &receives),
                "sends 0 elements to itself and expects 1",
            );
            for collective in STRAIGHT {
                let case =
                    Case { collective, op: ReduceOp::Sum, root: 1, count: 100, in_place: false, pool: false };
                case.check::<f32>(&comm);
            }
        });
    }
}

#[test]
fn a_rank_that_leaves_instead_of_calling_is_named_on_all_others() {
    for &world in World::enabled() {
        for collective in [Collective::AllToAll, Collective::Barrier] {
            let first_is_over = Barrier::new(4);
            let errors = spawn(&Setup::new(world, 4), |comm| {
                comm.barrier().expect("all ranks call it");
                first_is_over.wait();
                if comm.rank() == 2 {
                    return None;
                }
                let begun = Instant::now();
                let (send, mut receive) = (vec![1f32; 40_000], vec![0f32; 40_000]);
                let outcome = match collective {
                    Collective::Barrier => comm.barrier(),
                    _ => comm.all_to_all(&send, &mut receive),
                };
                assert!(begun.elapsed() < Duration::from_secs(10), "it took {:?}", begun.elapsed());
                Some(outcome.expect_err("rank 2 has left"))
            });
            for error in errors.into_iter().flatten() {
                assert!(error.message().contains("rank 2"), "{world:?} {collective:?}: {error}");
            }
        }
    }
}
