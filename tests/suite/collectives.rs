//! Reduce-scatter, all-gather, broadcast and reduce give correct results for every transport, algorithm,
//! lowering, operation, root and world size.

use crate::harness::{Rank, Setup, TestElement, World, cases, spawn};
use flexring::{Error, ErrorKind, ReduceOp, Result};
use flexring_core::call::Collective;
use flexring_core::config::{Algorithm, Dimensions, Lowering, Switch};
use half::bf16;
use proptest::prelude::*;
use std::ops::DerefMut;
use std::sync::Barrier;
use std::time::{Duration, Instant};

pub const OPS: [ReduceOp; 6] =
    [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg, ReduceOp::PreMulSum(3.0)];
/// From no elements to many sub-chunks on every rank.
const COUNTS: [usize; 7] = [0, 1, 7, 64, 1000, 4099, 30_011];

/// The position of the digit of `rank` at element `at`. It changes from element to element with a prime
/// period, so that an element from a wrong index is detected.
fn digit_position(rank: usize, at: usize, places: usize) -> u32 {
    let position = at % 251;
    ((rank + position + position * position / 7) % places) as u32
}

/// The binary digit that shows whether a result contains the contribution of `rank` once, twice or not at
/// all. In averages every digit belongs to a rank; in other operations one digit belongs to no rank, so that
/// the results of different elements differ.
fn digit(op: ReduceOp, rank: usize, world: usize, at: usize) -> i64 {
    1 << digit_position(rank, at, if op == ReduceOp::Avg { world } else { world + 1 })
}

/// The factor of `rank` in `PreMulSum`.
fn factor(rank: usize) -> i64 {
    1 + 2 * (rank as i64 % 2)
}

/// The base whose powers are multiplied in products. Powers of 3 repeat late in wrapping integers; powers of
/// 2 are exact in floats.
fn base<T: TestElement>() -> i64 {
    if T::DTYPE.is_float() { 2 } else { 3 }
}

/// The contribution of `rank` to a reduction, at element `at`.
fn contribution<T: TestElement>(op: ReduceOp, rank: usize, world: usize, at: usize) -> T {
    let digit = digit(op, rank, world, at);
    match op {
        ReduceOp::Sum | ReduceOp::PreMulSum(_) => T::of(digit),
        // A multiple of the divisor, so that the average is exact.
        ReduceOp::Avg | ReduceOp::WrappingAvg => T::of(digit * world as i64),
        ReduceOp::Prod => T::power(base::<T>(), digit as u32),
        ReduceOp::Max | ReduceOp::Min => T::of(digit + at as i64 % 7),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => T::of(digit),
    }
}

/// The expected result of the reduction, at element `at`.
fn reduction<T: TestElement>(op: ReduceOp, world: usize, at: usize) -> T {
    let digits = (0..world).map(|rank| digit(op, rank, world, at));
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::WrappingAvg => T::of(digits.sum()),
        ReduceOp::PreMulSum(_) => T::of(digits.zip(0..).map(|(digit, rank)| digit * factor(rank)).sum()),
        ReduceOp::Prod => T::power(base::<T>(), digits.sum::<i64>() as u32),
        ReduceOp::Max => T::of(digits.max().unwrap_or(0) + at as i64 % 7),
        ReduceOp::Min => T::of(digits.min().unwrap_or(0) + at as i64 % 7),
        ReduceOp::BitAnd => T::of(digits.reduce(|left, right| left & right).unwrap_or(0)),
        ReduceOp::BitOr => T::of(digits.fold(0, |left, right| left | right)),
        ReduceOp::BitXor => T::of(digits.fold(0, |left, right| left ^ right)),
    }
}

/// The element `at` that `rank` contributes to a copy. It identifies rank and index.
pub fn token<T: TestElement>(rank: usize, at: usize) -> T {
    T::of(((rank * 41 + at + at / 251) % 251) as i64)
}

/// The content of vectors that a call must overwrite, or must not change.
pub fn noise<T: TestElement>(at: usize) -> T {
    T::of(at as i64 % 13 + 90)
}

pub fn elements<T>(count: usize, element: impl Fn(usize) -> T) -> Vec<T> {
    (0..count).map(element).collect()
}

/// A call to test.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub collective: Collective,
    pub op: ReduceOp,
    pub root: usize,
    /// Number of elements, of one part or block if the vector consists of them.
    pub count: usize,
    pub in_place: bool,
    /// Whether the vectors are allocated by the communicator.
    pub pool: bool,
}

impl Case {
    /// Makes the call on one rank, and checks its result and that its input has not changed.
    pub fn check<T: TestElement>(self, comm: &Rank) {
        let (rank, world) = (comm.rank(), comm.world_size());
        let Self { op, root, count, in_place, .. } = self;
        let is_root = rank == root;
        let given = |at| contribution::<T>(op, rank, world, at);
        let reduced = |at| reduction::<T>(op, world, at);
        let called = match op {
            ReduceOp::PreMulSum(_) => ReduceOp::PreMulSum(factor(rank) as f64),
            ReduceOp::Avg if !T::DTYPE.is_float() => ReduceOp::WrappingAvg,
            op => op,
        };
        match self.collective {
            Collective::AllReduce => {
                let mut vector = self.vector(comm, &elements(count, given));
                self.expect_ok(comm, comm.all_reduce(&mut vector, called));
                self.expect_equal(comm, "the result", &vector, &elements(count, reduced));
            }
            Collective::ReduceScatter => {
                let send = elements(world * count, given);
                let wanted = elements(count, |at| reduced(rank * count + at));
                let mut vector = self.vector(comm, &send);
                if in_place {
                    self.expect_ok(comm, comm.reduce_scatter_in_place(&mut vector, called));
                    self.expect_equal(comm, "the result", &vector[rank * count..][..count], &wanted);
                } else {
                    let mut receive = self.vector(comm, &elements(count, noise::<T>));
                    self.expect_ok(comm, comm.reduce_scatter(&vector, &mut receive, called));
                    self.expect_equal(comm, "the result", &receive, &wanted);
                    self.expect_equal(comm, "the input", &vector, &send);
                }
            }
            Collective::AllGather => {
                let send = elements(count, |at| token::<T>(rank, at));
                let wanted = elements(world * count, |at| token::<T>(at / count, at % count));
                let mut receive = self.vector(comm, &elements(world * count, noise::<T>));
                if in_place {
                    receive[rank * count..][..count].copy_from_slice(&send);
                    self.expect_ok(comm, comm.all_gather_in_place(&mut receive));
                } else {
                    let vector = self.vector(comm, &send);
                    self.expect_ok(comm, comm.all_gather(&vector, &mut receive));
                    self.expect_equal(comm, "the input", &vector, &send);
                }
                self.expect_equal(comm, "the result", &receive, &wanted);
            }
            Collective::Broadcast => {
                let wanted = elements(count, |at| token::<T>(root, at));
                let mut receive = self.vector(comm, &elements(count, noise::<T>));
                if in_place {
                    if is_root {
                        receive.copy_from_slice(&wanted);
                    }
                    self.expect_ok(comm, comm.broadcast(&mut receive, root));
                } else {
                    let send = self.vector(comm, if is_root { &wanted } else { &[] });
                    self.expect_ok(comm, comm.broadcast_into(&send, &mut receive, root));
                    self.expect_equal(comm, "the input", &send, if is_root { &wanted } else { &[] });
                }
                self.expect_equal(comm, "the result", &receive, &wanted);
            }
            Collective::Reduce => {
                let send = elements(count, given);
                let wanted = elements(count, reduced);
                let mut vector = self.vector(comm, &send);
                if in_place {
                    self.expect_ok(comm, comm.reduce(&mut vector, called, root));
                    self.expect_equal(comm, "the vector", &vector, if is_root { &wanted } else { &send });
                } else {
                    // Half of the other ranks pass an empty receive vector.
                    let untouched = elements(if is_root || rank % 2 == 0 { count } else { 0 }, noise::<T>);
                    let mut receive = self.vector(comm, &untouched);
                    self.expect_ok(comm, comm.reduce_into(&vector, &mut receive, called, root));
                    self.expect_equal(
                        comm,
                        "the result",
                        &receive,
                        if is_root { &wanted } else { &untouched },
                    );
                    self.expect_equal(comm, "the input", &vector, &send);
                }
            }
            Collective::Gather
            | Collective::Scatter
            | Collective::AllToAll
            | Collective::AllToAllV
            | Collective::Barrier => {
                self.check_straight::<T>(comm);
            }
            Collective::SendRecv => unreachable!("groups have tests of their own"),
        }
    }

    pub fn vector<T: TestElement>(self, comm: &Rank, content: &[T]) -> Box<dyn DerefMut<Target = [T]>> {
        if !self.pool {
            return Box::new(content.to_vec());
        }
        let mut vector = comm.alloc(content.len()).expect("pool memory");
        vector.copy_from_slice(content);
        Box::new(vector)
    }

    pub fn expect_ok(self, comm: &Rank, outcome: Result<()>) {
        outcome.unwrap_or_else(|error| {
            panic!("rank {} of {}: {self:?}: {error}", comm.rank(), comm.world_size())
        });
    }

    pub fn expect_equal<T: TestElement>(self, comm: &Rank, name: &str, got: &[T], wanted: &[T]) {
        assert_eq!(got.len(), wanted.len());
        if let Some(at) = got.iter().zip(wanted).position(|(got, wanted)| got != wanted) {
            panic!(
                "rank {} of {}: {self:?} of {}: {name} is wrong, first at {at}: {:?} and not {:?}",
                comm.rank(),
                comm.world_size(),
                T::DTYPE.name(),
                got[at],
                wanted[at]
            );
        }
    }
}

/// A world that uses `algorithm`; `None` if the algorithm does not support the topology.
fn setup(world: World, ranks: usize, algorithm: Algorithm, turn: usize) -> Option<Setup> {
    let mut setup = Setup::new(world, ranks).lowering(Lowering::ALL[turn % Lowering::ALL.len()]);
    setup.config.algo = algorithm;
    setup.config.reproducible = Switch(turn % 4 == 3);
    // A third of the ranks, rounded, is on the first node. With more than 2 ranks both nodes are equal only
    // for 4 ranks.
    let asymmetric = world.is_mixed() && !matches!(ranks, 1 | 2 | 4);
    match algorithm {
        Algorithm::Hierarchical if asymmetric => setup.config.dimensions = Some(Dimensions(vec![ranks])),
        Algorithm::Blueconnect if asymmetric => return None,
        // Worlds here are trees.
        Algorithm::Forest => return None,
        _ => {}
    }
    Some(setup)
}

/// Tests every combination of algorithm, world size, collective, type and operation. Counts, roots, lowerings
/// and the four ways to hold the vectors alternate. On simulated hardware, which is slow, types alternate
/// too: over all algorithms, every collective and operation meets every type.
fn check_all(world: World) {
    if !world.is_enabled() {
        return;
    }
    let mut turn = 0;
    for algorithm in Algorithm::ALL {
        // Simulated hardware is slow, so test one world size only.
        for ranks in if world.is_simulated() { 3..=3 } else { 1..=5 } {
            turn += 1;
            let (first_type, types_at_once) = (turn, if world.is_simulated() { 1 } else { 5 });
            let Some(setup) = setup(world, ranks, *algorithm, turn) else { continue };
            spawn(&setup, |comm| {
                let mut turn = turn * 5;
                let mut next = |collective, op| {
                    turn += 1;
                    let (root, count) = (turn / 4 % ranks, COUNTS[turn % COUNTS.len()]);
                    Case { collective, op, root, count, in_place: turn % 2 == 0, pool: turn / 2 % 2 == 0 }
                };
                let checks: [fn(Case, &Rank); 5] = [
                    Case::check::<i32>,
                    Case::check::<f32>,
                    Case::check::<u8>,
                    Case::check::<bf16>,
                    Case::check::<f64>,
                ];
                let mut types = (0..checks.len()).cycle().skip(first_type);
                let mut check = |collective: Collective, op| {
                    for nth in types.by_ref().take(types_at_once) {
                        checks[nth](next(collective, op), &comm);
                    }
                };
                for op in OPS {
                    check(Collective::ReduceScatter, op);
                    check(Collective::Reduce, op);
                    check(Collective::Broadcast, ReduceOp::Sum);
                    check(Collective::AllGather, ReduceOp::Sum);
                }
            });
        }
    }
}

/// Small calls keep the places of the ranks' messages for later calls of the same length, whose ranks use
/// other parts of them.
#[test]
fn small_calls_of_one_length_mix_collectives() {
    const PART: usize = 3;
    // With 9 ranks on few cores, a leader adds for all.
    for ranks in [2, 3, 9] {
        for &world in World::enabled().iter().filter(|world| [World::Local, World::Shm].contains(world)) {
            spawn(&Setup::new(world, ranks), |comm| {
                let (rank, whole) = (comm.rank(), PART * ranks);
                let of = |rank: usize, at: usize| (100 * rank + at) as i32;
                let own: Vec<i32> = (0..whole).map(|at| of(rank, at)).collect();
                let total: Vec<i32> =
                    (0..whole).map(|at| (0..ranks).map(|rank| of(rank, at)).sum()).collect();
                let mine = rank * PART..(rank + 1) * PART;
                let all_reduce = || {
                    let mut vector = own.clone();
                    comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
                    assert_eq!(vector, total);
                };
                let reduce_scatter = || {
                    let mut part = [0; PART];
                    comm.reduce_scatter(&own, &mut part, ReduceOp::Sum).expect("a part");
                    assert_eq!(part, total[mine.clone()]);
                };
                let reduce = |root: usize| {
                    let mut vector = own.clone();
                    comm.reduce(&mut vector, ReduceOp::Sum, root).expect("a sum");
                    assert_eq!(vector, if rank == root { total.clone() } else { own.clone() });
                };
                let all_gather = || {
                    let mut vector = vec![0; whole];
                    comm.all_gather(&own[..PART], &mut vector).expect("all parts");
                    assert!((0..whole).all(|at| vector[at] == of(at / PART, at % PART)), "{vector:?}");
                };
                let all_to_all = || {
                    let mut vector = vec![0; whole];
                    comm.all_to_all(&own, &mut vector).expect("all blocks");
                    assert!(
                        (0..whole).all(|at| vector[at] == of(at / PART, mine.start + at % PART)),
                        "{vector:?}"
                    );
                };
                let calls: [&dyn Fn(); 6] =
                    [&all_reduce, &reduce_scatter, &|| reduce(0), &|| reduce(1), &all_gather, &all_to_all];
                // Every pair of calls, in a row and in the same slot: two slots alternate.
                for first in calls {
                    for second in calls {
                        first();
                        second();
                        second();
                        first();
                    }
                }
            });
        }
    }
}

#[test]
fn results_are_correct_between_threads() {
    check_all(World::Local);
}

#[test]
fn results_are_correct_over_shm() {
    check_all(World::Shm);
}

#[test]
fn results_are_correct_over_tcp() {
    check_all(World::Tcp);
}

#[test]
fn results_are_correct_on_two_nodes() {
    check_all(World::Mixed);
}

#[test]
fn results_are_correct_over_rdma() {
    check_all(World::Verbs);
}

#[test]
fn results_are_correct_over_rdma_with_staging() {
    check_all(World::VerbsStaged);
}

#[test]
fn results_are_correct_on_two_nodes_over_rdma() {
    check_all(World::VerbsMixed);
}

#[test]
fn results_are_correct_on_gpus() {
    check_all(World::Gpu);
}

#[test]
fn results_are_correct_on_gpus_through_pinned_memory() {
    check_all(World::GpuPinned);
}

#[test]
fn results_are_correct_on_gpus_over_tcp() {
    check_all(World::GpuTcp);
}

#[test]
fn results_are_correct_on_gpus_of_two_nodes() {
    check_all(World::GpuMixed);
}

#[test]
fn results_are_correct_for_every_root_count_and_placement() {
    for &world in World::enabled() {
        spawn(&Setup::new(world, 3), |comm| {
            for collective in [Collective::Broadcast, Collective::Reduce] {
                for (root, count) in (0..3).flat_map(|root| COUNTS.map(|count| (root, count))) {
                    for (in_place, pool) in [(false, false), (false, true), (true, false), (true, true)] {
                        Case { collective, op: ReduceOp::Sum, root, count, in_place, pool }
                            .check::<i32>(&comm);
                    }
                }
            }
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(60), ..ProptestConfig::default() })]
    #[test]
    fn any_sequence_of_calls_with_any_settings(
        kind in 0usize..4, ranks in 1usize..7, algorithm in 0usize..11, turn in 0usize..12,
        calls in proptest::collection::vec((0usize..10, 0usize..12_000, 0usize..7, 0usize..6, 0usize..4), 1..12),
        slots in 2usize..20, pages in 1usize..5, sockets in 1usize..4,
    ) {
        let Some(mut setup) = setup(World::any(kind), ranks, Algorithm::ALL[algorithm], turn) else {
            return Ok(());
        };
        setup.config.slots = slots;
        setup.config.subchunk.0 = pages * 4096;
        setup.config.sockets_per_link = sockets;
        spawn(&setup, |comm| {
            for (collective, count, root, op, held) in &calls {
                // Every second vector is small.
                let count = if count % 2 == 0 { count % 40 } else { *count };
                let (in_place, pool) = (held % 2 == 0, held / 2 == 0);
                let (collective, op) = (Collective::ALL[*collective], OPS[*op]);
                Case { collective, op, root: root % ranks, count, in_place, pool }.check::<i32>(&comm);
            }
        });
    }
}

/// Makes a call that may differ from those of the other ranks. The whole vector has `count` elements.
fn make_call(comm: &Rank, collective: Collective, root: usize, count: usize, op: ReduceOp) -> Result<()> {
    let part = count / comm.world_size();
    let mut vector = vec![1f32; count];
    match collective {
        Collective::AllReduce => comm.all_reduce(&mut vector, op),
        Collective::ReduceScatter => comm.reduce_scatter(&vector, &mut vec![0f32; part], op),
        Collective::AllGather => comm.all_gather(&vec![0f32; part], &mut vector),
        Collective::Broadcast => comm.broadcast(&mut vector, root),
        Collective::Reduce => comm.reduce(&mut vector, op, root),
        Collective::Gather => comm.gather_in_place(&mut vector, root),
        Collective::Scatter => comm.scatter_in_place(&mut vector, root),
        Collective::AllToAll => comm.all_to_all(&vector, &mut vec![0f32; count]),
        Collective::AllToAllV => {
            let counts = vec![part; comm.world_size()];
            comm.all_to_all_v(&vector, &counts, &mut vec![0f32; count], &counts)
        }
        Collective::Barrier => comm.barrier(),
        Collective::SendRecv => comm.group([]),
    }
}

#[test]
fn different_calls_are_reported_on_every_rank() {
    use Collective::{
        AllGather, AllReduce, AllToAll, AllToAllV, Broadcast, Gather, Reduce, ReduceScatter, Scatter,
    };
    let (sum, max) = (ReduceOp::Sum, ReduceOp::Max);
    let cases = [
        // The call of the other ranks, the call of rank 2, and a part of the message.
        ((Broadcast, 0, 4000, sum), (Broadcast, 1, 4000, sum), "from rank 1"),
        ((Broadcast, 3, 4, sum), (Broadcast, 2, 4, sum), "from rank 2"),
        ((Reduce, 0, 4000, sum), (Reduce, 1, 4000, sum), "to rank 1"),
        ((Reduce, 1, 4, sum), (Reduce, 2, 4, sum), "to rank 2"),
        ((Reduce, 0, 4000, sum), (Reduce, 0, 4000, max), "max"),
        ((Reduce, 0, 4000, sum), (Reduce, 0, 4004, sum), "4004 x float"),
        ((Broadcast, 0, 4000, sum), (Broadcast, 0, 8, sum), "8 x float"),
        ((Broadcast, 0, 4000, sum), (Broadcast, 0, 0, sum), "0 x float"),
        ((ReduceScatter, 0, 4000, sum), (ReduceScatter, 0, 8000, sum), "8000 x float"),
        ((ReduceScatter, 0, 4000, sum), (ReduceScatter, 0, 4000, max), "max"),
        ((AllGather, 0, 4000, sum), (AllGather, 0, 4, sum), "4 x float"),
        ((Broadcast, 0, 4000, sum), (Reduce, 0, 4000, sum), "reduce #2"),
        ((Reduce, 0, 4000, sum), (AllReduce, 0, 4000, sum), "all_reduce #2"),
        ((AllReduce, 0, 4000, sum), (Reduce, 0, 4000, sum), "reduce #2"),
        ((AllReduce, 0, 4, sum), (Broadcast, 0, 4, sum), "broadcast #2"),
        ((Broadcast, 0, 4, sum), (AllReduce, 0, 4, sum), "all_reduce #2"),
        ((ReduceScatter, 0, 4000, sum), (AllGather, 0, 4000, sum), "all_gather #2"),
        ((AllReduce, 0, 4000, sum), (ReduceScatter, 0, 4000, sum), "reduce_scatter #2"),
        ((Gather, 0, 4000, sum), (Gather, 1, 4000, sum), "to rank 1"),
        ((Scatter, 0, 4000, sum), (Scatter, 3, 4000, sum), "from rank 3"),
        ((Gather, 0, 4000, sum), (Gather, 0, 8, sum), "8 x float"),
        ((Scatter, 0, 4000, sum), (Scatter, 0, 0, sum), "0 x float"),
        ((Gather, 0, 4000, sum), (AllGather, 0, 4000, sum), "all_gather #2"),
        ((AllToAll, 0, 4000, sum), (AllGather, 0, 4000, sum), "all_gather #2"),
        ((AllToAll, 0, 8, sum), (AllGather, 0, 8, sum), "all_gather #2"),
        ((AllToAll, 0, 8, sum), (AllToAll, 0, 12, sum), "12 x float"),
        ((AllToAll, 0, 8, sum), (AllToAll, 0, 4000, sum), "4000 x float"),
        ((AllToAll, 0, 4000, sum), (AllToAll, 0, 8, sum), "8 x float"),
        ((AllToAll, 0, 4000, sum), (AllToAll, 0, 0, sum), "0 x float"),
        ((AllToAll, 0, 4000, sum), (AllToAllV, 0, 4000, sum), "all_to_all_v #2"),
        ((AllToAllV, 0, 8, sum), (AllToAll, 0, 8, sum), "all_to_all #2"),
        ((AllToAll, 0, 8, sum), (AllToAllV, 0, 8, sum), "all_to_all_v #2"),
        ((Collective::Barrier, 0, 0, sum), (AllReduce, 0, 0, sum), "all_reduce #2"),
        ((AllReduce, 0, 4, sum), (Collective::Barrier, 0, 0, sum), "barrier #2"),
    ];
    for &world in World::enabled() {
        for (number, (usual, other, phrase)) in cases.into_iter().enumerate() {
            let mut setup = Setup::new(world, 4);
            setup.config.algo = [Algorithm::Auto, Algorithm::Tree, Algorithm::Star][number % 3];
            let all = Barrier::new(setup.ranks);
            let errors: Vec<Error> = spawn(&setup, |comm| {
                comm.all_reduce(&mut [1f32; 8], ReduceOp::Sum).expect("the first calls agree");
                all.wait();
                let begun = Instant::now();
                let (collective, root, count, op) = if comm.rank() == 2 { other } else { usual };
                // A rank that takes no part in the transfers of this call gets the error in its next call.
                let outcome = make_call(&comm, collective, root, count, op)
                    .and_then(|()| comm.all_reduce(&mut [1f32; 5000], ReduceOp::Sum));
                assert!(
                    begun.elapsed() < Duration::from_secs(10),
                    "{world:?} {usual:?} {other:?}: it took {:?}",
                    begun.elapsed()
                );
                outcome.expect_err("the calls differ")
            });
            for error in &errors {
                let context = format!("{world:?} {usual:?} {other:?}: {error}");
                assert_eq!(error.kind(), ErrorKind::Disagreement, "{context}");
                assert!(
                    error.message().contains("rank 2 called") && error.message().contains(phrase),
                    "{context}"
                );
            }
        }
    }
}

#[test]
fn bad_arguments_are_refused_and_the_communicator_still_works() {
    for &world in World::enabled() {
        spawn(&Setup::new(world, 3), |comm| {
            let sum = ReduceOp::Sum;
            let refused = |outcome: Result<()>, phrase: &str| {
                let error = outcome.expect_err(phrase);
                assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
                assert!(error.message().contains(phrase), "{error} does not contain {phrase:?}");
            };
            refused(
                comm.reduce_scatter(&[1f32; 7], &mut [0f32; 2], sum),
                "28 bytes are not 3 parts of 8 bytes",
            );
            refused(
                comm.reduce_scatter(&[1f32; 2], &mut [0f32; 2], sum),
                "8 bytes are not 3 parts of 8 bytes",
            );
            refused(comm.reduce_scatter_in_place(&mut [1f32; 7], sum), "28 bytes are not 3 parts of 8 bytes");
            refused(comm.reduce_scatter_in_place(&mut [1u8; 2], sum), "2 bytes are not 3 parts of 0 bytes");
            refused(comm.all_gather(&[1f32; 2], &mut [0f32; 7]), "3 parts of 8 bytes are not 28 bytes");
            refused(comm.all_gather_in_place(&mut [1f64; 4]), "32 bytes are not 3 parts of 8 bytes");
            refused(comm.broadcast(&mut [1f32; 2], 3), "root 3 is not a rank: there are 3, from 0");
            refused(comm.reduce(&mut [1f32; 2], sum, usize::MAX), "is not a rank");
            refused(comm.reduce(&mut [1i32; 2], ReduceOp::PreMulSum(0.5), 0), "0.5");
            refused(comm.reduce_scatter_in_place(&mut [1u8; 3], ReduceOp::PreMulSum(-1.0)), "-1");
            if comm.rank() == 1 {
                refused(
                    comm.broadcast_into(&[1f32; 2], &mut [0f32; 3], 1),
                    "8 bytes cannot be broadcast into 12",
                );
                refused(comm.reduce_into(&[1f32; 2], &mut [], sum, 1), "8 bytes cannot be reduced into 0");
            }
            for collective in Collective::ALL {
                let case = Case { collective, op: sum, root: 1, count: 100, in_place: true, pool: false };
                case.check::<f32>(&comm);
            }
        });
    }
}
