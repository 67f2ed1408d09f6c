//! Vectors on GPUs that users register, which the ranks' kernels then access without stages: processes of one
//! node, with the simulated driver or, with WORLDS=gpu, the machine's driver.

use crate::harness::{Rank, Setup, World, spawn_processes_with, test_name};
use crate::programs::with_cuda;
use flexring::gpu::{GpuBuffer, RegisteredOnGpu};
use flexring::{Element, ErrorKind, ReduceOp};
use std::process::Output;

/// What a rank logs at most once: some call of it was direct.
pub const DIRECT: &str = "kernels access registered vectors directly";
/// Bytes of a vector that takes stages or more.
const LONG: usize = 200_000;

/// Lets a process free memory that another one has open, as after a failure or by a program's mistake. CUDA
/// does not define what happens.
const FREES_OPEN_MEMORY: &[(&str, &str)] = &[("SIMCUDA_FREE_WHILE_OPEN", "1")];

/// Runs `body` in `ranks` processes, and checks on each whether its kernels have accessed registered memory.
fn processes(name: &str, ranks: usize, is_direct: bool, body: impl Fn(Rank)) {
    check(&outputs(name, ranks, &[], body), is_direct);
}

fn check(outputs: &[Output], is_direct: bool) {
    for (rank, output) in outputs.iter().enumerate() {
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "rank {rank}: {text}");
        assert_eq!(text.contains(DIRECT), is_direct, "rank {rank}: {text}");
    }
}

fn outputs(name: &str, ranks: usize, variables: &[(&str, &str)], body: impl Fn(Rank)) -> Vec<Output> {
    outputs_of(&test_name(module_path!(), name), ranks, variables, body)
}

/// The output of each rank of the test with this full name.
pub fn outputs_of(name: &str, ranks: usize, variables: &[(&str, &str)], body: impl Fn(Rank)) -> Vec<Output> {
    let mut outputs = Vec::new();
    with_cuda(name, &[], || {
        let mut all = vec![("FLEXRING_TIMEOUT_MS", "20000"), ("FLEXRING_LOG", "debug")];
        all.extend(variables);
        outputs = spawn_processes_with(name, &Setup::new(World::Gpu, ranks), &all, &body);
    });
    outputs
}

type Registered<'a, T> = RegisteredOnGpu<'a, GpuBuffer<T>>;

fn registered<T: Element>(rank: &Rank, len: usize) -> Registered<'_, T> {
    rank.register_on_gpu(GpuBuffer::new(0, len).expect("memory")).expect("registered memory")
}

/// Ends registrations, and frees the vectors when no other rank has them open any more.
fn free<'a, T: Element>(rank: &Rank, vectors: impl IntoIterator<Item = Registered<'a, T>>) {
    let vectors: Vec<GpuBuffer<T>> =
        vectors.into_iter().map(|vector| vector.into_inner().expect("no call uses it")).collect();
    settle(rank);
    drop(vectors);
}

/// Has all ranks open what all have registered, and close what they do not register any more: each does so in
/// its next call.
pub fn settle(rank: &Rank) {
    rank.barrier().expect("all ranks");
    let mut one = GpuBuffer::<f32>::new(0, 1).expect("memory");
    rank.all_reduce_on_gpu(&mut one, ReduceOp::Sum).expect("a call");
    one.synchronize().expect("a GPU that works");
    rank.barrier().expect("all ranks");
}

fn read<T: Element>(vector: &GpuBuffer<T>) -> Vec<T> {
    let mut elements = vec![T::default(); vector.len()];
    vector.read(&mut elements).expect("a copy");
    elements
}

pub fn value(at: usize, rank: usize) -> f32 {
    (at % 89 + 100 * rank) as f32 / 8.0
}

fn fill(vector: &mut GpuBuffer<f32>, rank: usize) {
    let elements: Vec<f32> = (0..vector.len()).map(|at| value(at, rank)).collect();
    vector.write(&elements).expect("a copy");
}

/// All-reduces of `count` elements of random bits, `before` elements behind the start of the vectors, through
/// stages and directly: the results must have the same bits.
fn all_reduces<T: Element + PartialEq + std::fmt::Debug>(
    rank: &Rank,
    of: impl Fn(u64) -> T,
    ops: &[ReduceOp],
    before: usize,
    count: usize,
) {
    let mix = |at: usize| ((at * 16 + rank.rank() + 1) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7;
    let own: Vec<T> = (0..before + count + 1).map(|at| of(mix(at))).collect();
    let [mut plain, mut staged] = [0; 2].map(|_| GpuBuffer::<T>::new(0, own.len()).expect("memory"));
    let (mut send, mut receive) = (registered::<T>(rank, own.len()), registered::<T>(rank, own.len()));
    settle(rank);
    plain.write(&own).expect("a copy");
    let range = before..before + count;
    for &op in ops {
        for vector in [&mut staged, &mut *send, &mut *receive] {
            vector.write(&own).expect("a copy");
        }
        plain.synchronize().expect("a GPU that works");
        let mut into = staged.slice_mut(range.clone());
        rank.all_reduce_into_on_gpu(&plain.slice_mut(range.clone()), &mut into, op).expect("a call");
        let mut into = receive.slice_mut(range.clone());
        rank.all_reduce_into_on_gpu(&send.slice_mut(range.clone()), &mut into, op).expect("a call");
        receive.synchronize().expect("a GPU that works");
        rank.all_reduce_on_gpu(&mut send.slice_mut(range.clone()), op).expect("a call in place");
        let expected = read(&staged);
        for (vector, place) in [(&receive, "out of place"), (&send, "in place")] {
            let found = read(vector);
            let wrong = (0..own.len()).find(|&at| found[at] != expected[at]);
            assert!(wrong.is_none(), "{op:?} {place}, {count} elements behind {before}: {wrong:?}");
        }
    }
    rank.synchronize().expect("all calls succeed");
    free(rank, [send, receive]);
}

#[test]
fn sums_of_registered_vectors_have_the_bits_of_stages() {
    processes("sums_of_registered_vectors_have_the_bits_of_stages", 3, true, |rank| {
        let floats = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::PreMulSum(1.5)];
        let f32_of = |bits: u64| (bits % 100_003) as f32 / 7.0;
        // Aligned to 16 bytes, and not.
        for (before, count) in [(0, LONG / 4), (4, LONG / 4 + 1), (8, LONG), (1, LONG / 4 + 2)] {
            all_reduces(&rank, f32_of, &floats, before, count);
        }
        all_reduces(&rank, |bits| bits as i8, &[ReduceOp::Sum, ReduceOp::Min], 16, LONG + 3);
        all_reduces(&rank, |bits| bits as u16, &[ReduceOp::Prod, ReduceOp::BitXor], 8, LONG / 2 + 7);
        all_reduces(&rank, |bits| (bits % 1013) as f64 / 3.0, &[ReduceOp::Sum], 2, LONG / 8 + 1);
        all_reduces(
            &rank,
            |bits| half::bf16::from_f32((bits % 61) as f32 / 4.0),
            &[ReduceOp::Sum],
            0,
            LONG / 2 + 5,
        );
    });
}

/// All collectives but all-reduces, of `count` elements for each rank.
fn exchanges(rank: &Rank, count: usize) {
    let (me, world) = (rank.rank(), rank.world_size());
    let [mut send, mut receive] = [0; 2].map(|_| registered::<f32>(rank, world * count));
    settle(rank);
    let sum = |at: usize| (0..world).map(|from| value(at, from)).sum::<f32>();
    let part = |block: usize| block * count..(block + 1) * count;
    let check = |receive: &GpuBuffer<f32>, what: &str, expected: &dyn Fn(usize) -> f32| {
        let found = read(receive);
        let wrong = (0..found.len()).find(|&at| found[at] != expected(at));
        assert!(wrong.is_none(), "{what}: element {wrong:?}");
    };
    for _ in 0..2 {
        fill(&mut send, me);
        fill(&mut receive, 7);
        let own = part(me);
        rank.reduce_scatter_on_gpu(&*send, &mut receive.slice_mut(own.clone()), ReduceOp::Sum)
            .expect("a call");
        let mine = |at: usize| own.contains(&at);
        check(&receive, "reduce-scatter", &|at| if mine(at) { sum(at) } else { value(at, 7) });

        rank.all_gather_on_gpu(&send.slice_mut(own.clone()), &mut *receive).expect("a call");
        check(&receive, "all-gather", &|at| value(at, at / count));

        rank.all_to_all_on_gpu(&*send, &mut *receive).expect("a call");
        check(&receive, "all-to-all", &|at| value(me * count + at % count, at / count));

        rank.broadcast_into_on_gpu(&*send, &mut *receive, 1).expect("a call");
        check(&receive, "broadcast", &|at| value(at, 1));

        fill(&mut receive, 7);
        rank.reduce_into_on_gpu(&*send, &mut *receive, ReduceOp::Max, 2).expect("a call");
        let expected = |at: usize| if me == 2 { value(at, world - 1) } else { value(at, 7) };
        check(&receive, "reduce", &expected);

        fill(&mut receive, 7);
        rank.gather_on_gpu(&send.slice_mut(own.clone()), &mut *receive, 0).expect("a call");
        check(&receive, "gather", &|at| value(at, if me == 0 { at / count } else { 7 }));

        fill(&mut receive, 7);
        rank.scatter_on_gpu(&*send, &mut receive.slice_mut(0..count), 1).expect("a call");
        check(&receive, "scatter", &|at| if at < count { value(me * count + at, 1) } else { value(at, 7) });

        // In place.
        fill(&mut receive, me);
        rank.reduce_scatter_in_place_on_gpu(&mut *receive, ReduceOp::Sum).expect("a call");
        check(&receive, "reduce-scatter in place", &|at| if mine(at) { sum(at) } else { value(at, me) });
        rank.all_gather_in_place_on_gpu(&mut *receive).expect("a call");
        check(&receive, "all-gather in place", &sum);
        fill(&mut receive, me);
        rank.broadcast_on_gpu(&mut *receive, 2).expect("a call");
        check(&receive, "broadcast in place", &|at| value(at, 2));
    }
    rank.synchronize().expect("all calls succeed");
    free(rank, [send, receive]);
}

#[test]
fn all_collectives_use_registered_vectors() {
    processes("all_collectives_use_registered_vectors", 3, true, |rank| {
        exchanges(&rank, LONG / 4);
        // Blocks that do not begin at multiples of 16 bytes.
        exchanges(&rank, LONG / 4 + 1);
    });
}

#[test]
fn ranks_that_have_not_all_registered_use_stages() {
    let name = "ranks_that_have_not_all_registered_use_stages";
    let outputs = outputs(name, 3, &[], |rank| {
        // By rank: whether the first vector and the second one are registered.
        for registers in [[true, true], [true, false], [false, false]] {
            let [first, second] = if rank.rank() == 1 { [false; 2] } else { registers };
            let new = || GpuBuffer::<f32>::new(0, LONG).expect("memory");
            let mut vectors = [new(), new()];
            let mut guards = [first, second].map(|is_registered| {
                is_registered.then(|| rank.register_on_gpu(new()).expect("registered memory"))
            });
            settle(&rank);
            for _ in 0..3 {
                let mut both = guards.iter_mut().zip(&mut vectors).map(|(guard, vector)| match guard {
                    Some(guard) => &mut **guard,
                    None => vector,
                });
                let (send, receive) = (both.next().expect("the first"), both.next().expect("the second"));
                fill(send, rank.rank());
                rank.all_reduce_into_on_gpu(&*send, &mut *receive, ReduceOp::Sum).expect("a call");
                let sum = |at: usize| (0..3).map(|rank| value(at, rank)).sum::<f32>();
                assert_eq!(read(receive), (0..LONG).map(sum).collect::<Vec<f32>>());
            }
            rank.synchronize().expect("all calls succeed");
            free(&rank, guards.into_iter().flatten());
        }
    });
    check(&outputs, false);
    // The log of a rank that has registered its vectors names one that has not.
    for (rank, output) in outputs.iter().enumerate().filter(|(rank, _)| *rank != 1) {
        let text = String::from_utf8_lossy(&output.stderr);
        let expected =
            format!("rank {rank}: a call goes through stages, because rank 1 has not registered its vectors");
        assert!(text.contains(&expected), "{text}");
    }
}

#[test]
fn memory_that_another_rank_has_not_opened_yet_is_not_used() {
    let name = "memory_that_another_rank_has_not_opened_yet_is_not_used";
    let outputs = outputs(name, 2, &[], |rank| {
        let early = (rank.rank() == 1).then(|| registered::<f32>(&rank, LONG));
        settle(&rank);
        let mut vector = early.unwrap_or_else(|| {
            // The other rank has made its call meanwhile.
            std::thread::sleep(std::time::Duration::from_millis(300));
            registered(&rank, LONG)
        });
        fill(&mut vector, rank.rank());
        rank.all_reduce_on_gpu(&mut *vector, ReduceOp::Sum).expect("a call");
        let sum = |at: usize| value(at, 0) + value(at, 1);
        assert_eq!(read(&vector), (0..LONG).map(sum).collect::<Vec<f32>>());
        rank.synchronize().expect("all calls succeed");
        free(&rank, [vector]);
    });
    for output in outputs {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_graph_uses_registered_vectors_until_they_are_deregistered() {
    processes("a_graph_uses_registered_vectors_until_they_are_deregistered", 2, true, |rank| {
        let mut vector = registered::<f32>(&rank, LONG);
        // The ranks compare a capture, so each has opened the other's memory without a call before.
        let capture = vector.begin_capture().expect("a capture");
        rank.all_reduce_on_gpu(&mut *vector, ReduceOp::Avg).expect("a captured call");
        rank.all_reduce_on_gpu(&mut *vector, ReduceOp::Sum).expect("a captured call");
        let graph = capture.end().expect("a graph");
        let replay = |vector: &mut GpuBuffer<f32>| {
            for round in 0..3 {
                fill(vector, round + rank.rank());
                graph.launch().expect("a replay");
                let sum = |at: usize| value(at, round) + value(at, round + 1);
                assert_eq!(read(vector), (0..LONG).map(sum).collect::<Vec<f32>>());
            }
        };
        replay(&mut vector);
        // Deregistered on one rank, then on both, then registered again.
        let mut vector = if rank.rank() == 0 {
            let mut plain = vector.into_inner().expect("no call uses it");
            replay(&mut plain);
            plain
        } else {
            replay(&mut vector);
            vector.into_inner().expect("no call uses it")
        };
        replay(&mut vector);
        settle(&rank);
        let mut vector = rank.register_on_gpu(vector).expect("registered memory");
        // The other rank has closed it, and not opened it again.
        replay(&mut vector);
        settle(&rank);
        settle(&rank);
        replay(&mut vector);
        rank.synchronize().expect("all calls succeed");
        free(&rank, [vector]);
    });
}

#[test]
fn memory_that_was_freed_while_it_was_registered_is_not_used() {
    let name = "memory_that_was_freed_while_it_was_registered_is_not_used";
    for output in outputs(name, 2, FREES_OPEN_MEMORY, |rank| {
        let mut guard = registered::<f32>(&rank, LONG);
        settle(&rank);
        let call = |vector: &mut GpuBuffer<f32>| {
            fill(vector, rank.rank());
            rank.all_reduce_on_gpu(vector, ReduceOp::Sum).expect("a call");
            let sum = |at: usize| value(at, 0) + value(at, 1);
            assert_eq!(read(vector), (0..LONG).map(sum).collect::<Vec<f32>>());
        };
        call(&mut guard);
        *guard = GpuBuffer::new(0, 1).expect("memory");
        // One of them gets the address.
        for vector in [0; 8].map(|_| GpuBuffer::new(0, LONG).expect("memory")) {
            *guard = vector;
            call(&mut guard);
        }
        rank.synchronize().expect("all calls succeed");
    }) {
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains(DIRECT), "{text}");
        assert!(text.contains("were freed or unmapped while they were registered"), "{text}");
    }
}

#[test]
fn memory_is_registered_and_deregistered_between_calls() {
    processes("memory_is_registered_and_deregistered_between_calls", 2, true, |rank| {
        let mut vector = GpuBuffer::<f32>::new(0, LONG).expect("memory");
        let mut others = Vec::new();
        for round in 0..8 {
            fill(&mut vector, rank.rank());
            rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a call");
            let mut guard = rank.register_on_gpu(vector).expect("registered memory");
            // Twice, and not in the same order on all ranks.
            others.push(registered::<f32>(&rank, 1000 * (round + 1) + rank.rank()));
            let ended = ((round + rank.rank()) % 2 == 0)
                .then(|| others.remove(0).into_inner().expect("no call uses it"));
            settle(&rank);
            drop(ended);
            for _ in 0..3 {
                rank.all_reduce_on_gpu(&mut *guard, ReduceOp::Avg).expect("a call");
            }
            // Calls that have not begun when the memory is deregistered go through stages.
            if round % 2 == 0 {
                guard.synchronize().expect("a GPU that works");
            }
            vector = guard.into_inner().expect("no call uses it");
            rank.all_reduce_on_gpu(&mut vector, ReduceOp::Avg).expect("a call");
            let sum = |at: usize| value(at, 0) + value(at, 1);
            assert_eq!(read(&vector), (0..LONG).map(sum).collect::<Vec<f32>>(), "round {round}");
        }
        free(&rank, others);
    });
}

#[test]
fn more_allocations_than_ranks_can_name_use_stages() {
    processes("more_allocations_than_ranks_can_name_use_stages", 2, true, |rank| {
        let mut all: Vec<_> = (0..70).map(|_| registered::<f32>(&rank, LONG / 2)).collect();
        settle(&rank);
        for vector in [0, 63, 64, 69] {
            fill(&mut all[vector], rank.rank());
            rank.all_reduce_on_gpu(&mut *all[vector], ReduceOp::Sum).expect("a call");
            let sum = |at: usize| value(at, 0) + value(at, 1);
            assert_eq!(read(&all[vector]), (0..LONG / 2).map(sum).collect::<Vec<f32>>(), "vector {vector}");
        }
        free(&rank, all);
    });
}

#[test]
fn a_communicator_that_has_failed_gives_registered_vectors_back() {
    let name = "a_communicator_that_has_failed_gives_registered_vectors_back";
    let outputs = outputs(name, 2, FREES_OPEN_MEMORY, |rank| {
        let mut vector = registered::<f32>(&rank, LONG);
        settle(&rank);
        let capture = vector.begin_capture().expect("a capture");
        rank.all_reduce_on_gpu(&mut *vector, ReduceOp::Sum).expect("a captured call");
        let graph = capture.end().expect("a graph");
        fill(&mut vector, rank.rank());
        graph.launch().expect("a replay");
        vector.synchronize().expect("a GPU that works");
        rank.barrier().expect("all ranks");
        if rank.rank() == 0 {
            // It waits for a call that the other rank does not make.
            rank.all_reduce_on_gpu(&mut *vector, ReduceOp::Sum).expect("it is enqueued");
            std::thread::sleep(std::time::Duration::from_millis(20));
            rank.abort();
        }
        let begun = std::time::Instant::now();
        while rank.status().is_ok() {
            assert!(begun.elapsed().as_secs() < 10, "no failure");
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        let error = rank.all_reduce_on_gpu(&mut *vector, ReduceOp::Sum).expect_err("it has failed");
        assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
        let vector = vector.into_inner().expect("no call uses it");
        let sum = |at: usize| value(at, 0) + value(at, 1);
        assert_eq!(read(&vector), (0..LONG).map(sum).collect::<Vec<f32>>());
        drop(rank);
        graph.launch().expect("a launch that does nothing");
        vector.synchronize().expect("a GPU that works");
        assert_eq!(read(&vector), (0..LONG).map(sum).collect::<Vec<f32>>());
    });
    check(&outputs, true);
}

#[test]
fn a_shrunken_communicator_uses_vectors_that_are_registered_with_it() {
    let name = "a_shrunken_communicator_uses_vectors_that_are_registered_with_it";
    let outputs = outputs(name, 3, &[], |rank| {
        let mut vector = registered::<f32>(&rank, LONG);
        settle(&rank);
        fill(&mut vector, rank.rank());
        rank.all_reduce_on_gpu(&mut *vector, ReduceOp::Max).expect("a call");
        assert_eq!(read(&vector), (0..LONG).map(|at| value(at, 2)).collect::<Vec<f32>>());
        rank.synchronize().expect("all calls succeed");
        if rank.rank() < 2 {
            let smaller = rank.shrink(&[2]).expect("two ranks are left");
            let smaller = Rank::new(smaller, World::Gpu);
            fill(&mut vector, rank.rank());
            // It is registered with both.
            let mut part = smaller.register_on_gpu(vector.slice_mut(0..LONG / 2)).expect("registered memory");
            settle(&smaller);
            smaller.all_reduce_on_gpu(&mut *part, ReduceOp::Sum).expect("a call");
            smaller.synchronize().expect("all calls succeed");
            drop(part);
            settle(&smaller);
            let sum = |at: usize| value(at, 0) + value(at, 1);
            assert_eq!(read(&vector)[..LONG / 2], (0..LONG / 2).map(sum).collect::<Vec<f32>>());
        }
        rank.barrier().expect("all ranks");
        free(&rank, [vector]);
    });
    check(&outputs, true);
    for (rank, output) in outputs.iter().enumerate() {
        let communicators = String::from_utf8_lossy(&output.stderr).matches(DIRECT).count();
        assert_eq!(communicators, if rank < 2 { 2 } else { 1 }, "rank {rank}");
    }
}
