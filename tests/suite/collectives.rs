//! What the siblings of the all-reduce promise (reduce-scatter, all-gather, broadcast and reduce), over every
//! transport, algorithm, lowering, operation, root and world size.

use crate::harness::{Rank, Setup, TestElement, World, cases, spawn};
use flexring::call::Collective;
use flexring::config::{Algorithm, Dimensions, Lowering, Switch};
use flexring::{Error, ErrorKind, ReduceOp, Result};
use half::bf16;
use proptest::prelude::*;
use std::ops::DerefMut;
use std::sync::Barrier;
use std::time::{Duration, Instant};

const OPS: [ReduceOp; 6] =
    [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg, ReduceOp::PreMulSum(3.0)];
/// From nothing to many sub-chunks on every rank.
const COUNTS: [usize; 7] = [0, 1, 7, 64, 1000, 4099, 30_011];

/// Which place the digit of `rank` has at `at`. From one position to the next the ranks change places, with a prime
/// period, so that what comes from another position is noticed.
fn place(rank: usize, at: usize, places: usize) -> u32 {
    let position = at % 251;
    ((rank + position + position * position / 7) % places) as u32
}

/// The binary digit by which a result tells whether `rank` is in it once, twice or not at all. In averages every
/// digit is somebody's; elsewhere one is nobody's, so that not all results are alike.
fn digit(op: ReduceOp, rank: usize, world: usize, at: usize) -> i64 {
    1 << place(rank, at, if op == ReduceOp::Avg { world } else { world + 1 })
}

/// What each rank's digit is multiplied with where each has a factor of its own.
fn factor(rank: usize) -> i64 {
    1 + 2 * (rank as i64 % 2)
}

/// What powers a product is of. Powers of 3 repeat late among the wrapping integers; for floats, 2 is exact.
fn base<T: TestElement>() -> i64 {
    if T::DTYPE.is_float() { 2 } else { 3 }
}

/// What `rank` gives to a reduction.
fn contribution<T: TestElement>(op: ReduceOp, rank: usize, world: usize, at: usize) -> T {
    let digit = digit(op, rank, world, at);
    match op {
        ReduceOp::Sum | ReduceOp::PreMulSum(_) => T::of(digit),
        // Multiples of what is divided by.
        ReduceOp::Avg => T::of(digit * world as i64),
        ReduceOp::Prod => T::power(base::<T>(), digit as u32),
        ReduceOp::Max | ReduceOp::Min => T::of(digit + at as i64 % 7),
    }
}

/// What the reduction gives.
fn reduction<T: TestElement>(op: ReduceOp, world: usize, at: usize) -> T {
    let digits = (0..world).map(|rank| digit(op, rank, world, at));
    match op {
        ReduceOp::Sum | ReduceOp::Avg => T::of(digits.sum()),
        ReduceOp::PreMulSum(_) => T::of(digits.zip(0..).map(|(digit, rank)| digit * factor(rank)).sum()),
        ReduceOp::Prod => T::power(base::<T>(), digits.sum::<i64>() as u32),
        ReduceOp::Max => T::of(digits.max().unwrap_or(0) + at as i64 % 7),
        ReduceOp::Min => T::of(digits.min().unwrap_or(0) + at as i64 % 7),
    }
}

/// What `rank` gives to be copied: tells whose it is and where from.
fn token<T: TestElement>(rank: usize, at: usize) -> T {
    T::of(((rank * 41 + at + at / 251) % 251) as i64)
}

/// What is in vectors that nobody should touch.
fn noise<T: TestElement>(at: usize) -> T {
    T::of(at as i64 % 13 + 90)
}

fn elements<T>(count: usize, element: impl Fn(usize) -> T) -> Vec<T> {
    (0..count).map(element).collect()
}

/// One call of the tests.
#[derive(Clone, Copy, Debug)]
struct Case {
    collective: Collective,
    op: ReduceOp,
    root: usize,
    /// Elements of one part where there are parts.
    count: usize,
    in_place: bool,
    pool: bool,
}

impl Case {
    /// Makes the call as one rank of a world, and checks all that it touches and all that it must not.
    fn check<T: TestElement>(self, comm: &Rank) {
        let (rank, world) = (comm.rank(), comm.world_size());
        let Self { op, root, count, in_place, .. } = self;
        let is_root = rank == root;
        let given = |at| contribution::<T>(op, rank, world, at);
        let reduced = |at| reduction::<T>(op, world, at);
        let called = match op {
            ReduceOp::PreMulSum(_) => ReduceOp::PreMulSum(factor(rank) as f64),
            op => op,
        };
        match self.collective {
            Collective::AllReduce => {
                let mut vector = self.vector(comm, &elements(count, given));
                self.went(comm, comm.all_reduce(&mut vector, called));
                self.same(comm, "the result", &vector, &elements(count, reduced));
            }
            Collective::ReduceScatter => {
                let send = elements(world * count, given);
                let wanted = elements(count, |at| reduced(rank * count + at));
                let mut vector = self.vector(comm, &send);
                if in_place {
                    self.went(comm, comm.reduce_scatter_in_place(&mut vector, called));
                    self.same(comm, "the result", &vector[rank * count..][..count], &wanted);
                } else {
                    let mut receive = self.vector(comm, &elements(count, noise::<T>));
                    self.went(comm, comm.reduce_scatter(&vector, &mut receive, called));
                    self.same(comm, "the result", &receive, &wanted);
                    self.same(comm, "the input", &vector, &send);
                }
            }
            Collective::AllGather => {
                let send = elements(count, |at| token::<T>(rank, at));
                let wanted = elements(world * count, |at| token::<T>(at / count, at % count));
                let mut receive = self.vector(comm, &elements(world * count, noise::<T>));
                if in_place {
                    receive[rank * count..][..count].copy_from_slice(&send);
                    self.went(comm, comm.all_gather_in_place(&mut receive));
                } else {
                    let vector = self.vector(comm, &send);
                    self.went(comm, comm.all_gather(&vector, &mut receive));
                    self.same(comm, "the input", &vector, &send);
                }
                self.same(comm, "the result", &receive, &wanted);
            }
            Collective::Broadcast => {
                let wanted = elements(count, |at| token::<T>(root, at));
                let mut receive = self.vector(comm, &elements(count, noise::<T>));
                if in_place {
                    if is_root {
                        receive.copy_from_slice(&wanted);
                    }
                    self.went(comm, comm.broadcast(&mut receive, root));
                } else {
                    let send = self.vector(comm, if is_root { &wanted } else { &[] });
                    self.went(comm, comm.broadcast_into(&send, &mut receive, root));
                    self.same(comm, "the input", &send, if is_root { &wanted } else { &[] });
                }
                self.same(comm, "the result", &receive, &wanted);
            }
            Collective::Reduce => {
                let send = elements(count, given);
                let wanted = elements(count, reduced);
                let mut vector = self.vector(comm, &send);
                if in_place {
                    self.went(comm, comm.reduce(&mut vector, called, root));
                    self.same(comm, "the vector", &vector, if is_root { &wanted } else { &send });
                } else {
                    // Half of the others have nothing to be written to.
                    let untouched = elements(if is_root || rank % 2 == 0 { count } else { 0 }, noise::<T>);
                    let mut receive = self.vector(comm, &untouched);
                    self.went(comm, comm.reduce_into(&vector, &mut receive, called, root));
                    self.same(comm, "the result", &receive, if is_root { &wanted } else { &untouched });
                    self.same(comm, "the input", &vector, &send);
                }
            }
        }
    }

    fn vector<T: TestElement>(self, comm: &Rank, content: &[T]) -> Box<dyn DerefMut<Target = [T]>> {
        if !self.pool {
            return Box::new(content.to_vec());
        }
        let mut vector = comm.alloc(content.len()).expect("pool memory");
        vector.copy_from_slice(content);
        Box::new(vector)
    }

    fn went(self, comm: &Rank, outcome: Result<()>) {
        outcome.unwrap_or_else(|error| {
            panic!("rank {} of {}: {self:?}: {error}", comm.rank(), comm.world_size())
        });
    }

    fn same<T: TestElement>(self, comm: &Rank, what: &str, got: &[T], wanted: &[T]) {
        assert_eq!(got.len(), wanted.len());
        if let Some(at) = got.iter().zip(wanted).position(|(got, wanted)| got != wanted) {
            panic!(
                "rank {} of {}: {self:?} of {}: {what} is wrong first at {at}: {:?} and not {:?}",
                comm.rank(),
                comm.world_size(),
                T::DTYPE.name(),
                got[at],
                wanted[at]
            );
        }
    }
}

/// A world that plans by `algorithm`, if it can.
fn setup(world: World, ranks: usize, algorithm: Algorithm, turn: usize) -> Option<Setup> {
    let mut setup = Setup::new(world, ranks).lowering(Lowering::ALL[turn % Lowering::ALL.len()]);
    setup.config.algo = algorithm;
    setup.config.reproducible = Switch(turn % 4 == 3);
    // A third on the first node: with more ranks than 2, only of 4 that is as many as on the second.
    let asymmetric = world.is_mixed() && !matches!(ranks, 1 | 2 | 4);
    match algorithm {
        Algorithm::Hierarchical if asymmetric => setup.config.dimensions = Some(Dimensions(vec![ranks])),
        Algorithm::Blueconnect if asymmetric => return None,
        _ => {}
    }
    Some(setup)
}

/// Every algorithm and world size, and in each every collective, type and operation. Counts, roots, lowerings and the
/// four ways to hold the vectors take turns.
fn everything(world: World) {
    if !world.is_enabled() {
        return;
    }
    let mut turn = 0;
    for algorithm in Algorithm::ALL {
        // Where RDMA is tested a processor is emulated: worlds are fewer.
        for ranks in if world.is_simulated() { 3..=3 } else { 1..=5 } {
            turn += 1;
            let Some(setup) = setup(world, ranks, *algorithm, turn) else { continue };
            spawn(&setup, |comm| {
                let mut turn = turn * 5;
                let mut next = |collective, op| {
                    turn += 1;
                    let (root, count) = (turn / 4 % ranks, COUNTS[turn % COUNTS.len()]);
                    Case { collective, op, root, count, in_place: turn % 2 == 0, pool: turn / 2 % 2 == 0 }
                };
                let mut cases = |collective: Collective, op| {
                    next(collective, op).check::<i32>(&comm);
                    next(collective, op).check::<f32>(&comm);
                    next(collective, op).check::<u8>(&comm);
                    next(collective, op).check::<bf16>(&comm);
                    next(collective, op).check::<f64>(&comm);
                };
                for op in OPS {
                    cases(Collective::ReduceScatter, op);
                    cases(Collective::Reduce, op);
                    cases(Collective::Broadcast, ReduceOp::Sum);
                    cases(Collective::AllGather, ReduceOp::Sum);
                }
            });
        }
    }
}

#[test]
fn threads_get_the_right_vectors() {
    everything(World::Local);
}

#[test]
fn ranks_of_a_node_get_the_right_vectors() {
    everything(World::Shm);
}

#[test]
fn ranks_over_tcp_get_the_right_vectors() {
    everything(World::Tcp);
}

#[test]
fn ranks_of_two_nodes_get_the_right_vectors() {
    everything(World::Mixed);
}

#[test]
fn ranks_over_rdma_get_the_right_vectors() {
    everything(World::Verbs);
}

#[test]
fn ranks_over_rdma_staging_get_the_right_vectors() {
    everything(World::VerbsStaged);
}

#[test]
fn ranks_of_two_nodes_over_rdma_get_the_right_vectors() {
    everything(World::VerbsMixed);
}

#[test]
fn ranks_get_the_right_vectors_on_gpus() {
    everything(World::Gpu);
}

#[test]
fn ranks_get_the_right_vectors_on_gpus_by_pinned_memory() {
    everything(World::GpuPinned);
}

#[test]
fn ranks_get_the_right_vectors_on_gpus_over_tcp() {
    everything(World::GpuTcp);
}

#[test]
fn ranks_of_two_nodes_get_the_right_vectors_on_gpus() {
    everything(World::GpuMixed);
}

#[test]
fn every_root_and_count_in_every_place() {
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

/// Some ranks have nothing to wait for: whoever sends to a rank that does not answer, and whoever has no part in a
/// chain's next link.
#[test]
fn ranks_may_run_ahead_of_each_other_and_leave_before_the_others() {
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
                        let collective =
                            if call / 75 == 0 { Collective::Broadcast } else { Collective::Reduce };
                        let (root, op) = (call / 40 % 4, ReduceOp::Sum);
                        let (in_place, pool) = (call % 2 == 0, call % 4 < 2);
                        Case { collective, op, root, count: 1 + call * 7, in_place, pool }
                            .check::<f32>(&comm);
                    }
                });
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(60), ..ProptestConfig::default() })]
    #[test]
    fn any_calls_one_after_the_other_with_any_settings(
        kind in 0usize..4, ranks in 1usize..7, algorithm in 0usize..11, turn in 0usize..12,
        calls in proptest::collection::vec((0usize..5, 0usize..12_000, 0usize..7, 0usize..6, 0usize..4), 1..12),
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
                // Half of the vectors are small.
                let count = if count % 2 == 0 { count % 40 } else { *count };
                let (in_place, pool) = (held % 2 == 0, held / 2 == 0);
                let (collective, op) = (Collective::ALL[*collective], OPS[*op]);
                Case { collective, op, root: root % ranks, count, in_place, pool }.check::<i32>(&comm);
            }
        });
    }
}

/// A call that may not be like everybody's, on a vector of `count` elements in all.
fn ask(comm: &Rank, collective: Collective, root: usize, count: usize, op: ReduceOp) -> Result<()> {
    let part = count / comm.world_size();
    let mut vector = vec![1f32; count];
    match collective {
        Collective::AllReduce => comm.all_reduce(&mut vector, op),
        Collective::ReduceScatter => comm.reduce_scatter(&vector, &mut vec![0f32; part], op),
        Collective::AllGather => comm.all_gather(&vec![0f32; part], &mut vector),
        Collective::Broadcast => comm.broadcast(&mut vector, root),
        Collective::Reduce => comm.reduce(&mut vector, op, root),
    }
}

#[test]
fn ranks_that_call_differently_are_all_told_who_and_what() {
    use Collective::{AllGather, AllReduce, Broadcast, Reduce, ReduceScatter};
    let (sum, max) = (ReduceOp::Sum, ReduceOp::Max);
    let cases = [
        // What all call, what rank 2 calls, and how the sentence names it.
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
    ];
    for &world in World::enabled() {
        for (number, (usual, other, words)) in cases.into_iter().enumerate() {
            let mut setup = Setup::new(world, 4);
            setup.config.algo = [Algorithm::Auto, Algorithm::Tree, Algorithm::Star][number % 3];
            let all = Barrier::new(setup.ranks);
            let errors: Vec<Error> = spawn(&setup, |comm| {
                comm.all_reduce(&mut [1f32; 8], ReduceOp::Sum).expect("the first call is like everybody's");
                all.wait();
                let begun = Instant::now();
                let (collective, root, count, op) = if comm.rank() == 2 { other } else { usual };
                // Whoever has no part in what the others disagree on is told in its next call.
                let outcome = ask(&comm, collective, root, count, op)
                    .and_then(|()| comm.all_reduce(&mut [1f32; 5000], ReduceOp::Sum));
                assert!(
                    begun.elapsed() < Duration::from_secs(10),
                    "{world:?} {usual:?} {other:?}: it took {:?}",
                    begun.elapsed()
                );
                outcome.expect_err("the calls differ")
            });
            for error in &errors {
                let what = format!("{world:?} {usual:?} {other:?}: {error}");
                assert_eq!(error.kind(), ErrorKind::Disagreement, "{what}");
                assert!(
                    error.message().contains("rank 2 called") && error.message().contains(words),
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn what_no_call_can_accept_is_refused_and_harms_nothing() {
    for &world in World::enabled() {
        spawn(&Setup::new(world, 3), |comm| {
            let sum = ReduceOp::Sum;
            let refused = |outcome: Result<()>, words: &str| {
                let error = outcome.expect_err(words);
                assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
                assert!(error.message().contains(words), "{error} does not say {words:?}");
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
            refused(comm.all_gather_in_place(&mut [1f64; 4]), "3 parts of 8 bytes are not 32 bytes");
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
