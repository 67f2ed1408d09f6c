//! All-reduce gives correct results for every transport, lowering, type, operation and world size.

use crate::harness::{Rank, Setup, TestElement, World, cases, spawn};
use flexring::{Boolean, DType, ErrorKind, ReduceOp};
use flexring_core::config::Lowering;
use flexring_core::float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};
use proptest::prelude::*;

const OPS: [ReduceOp; 10] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Max,
    ReduceOp::Min,
    ReduceOp::Avg,
    ReduceOp::PreMulSum(2.0),
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
    ReduceOp::WrappingAvg,
];

/// The contribution of `rank` at element `at`. Products stay small because most factors are 1. Floats of
/// eight bits represent whole numbers exactly up to 8, so their results are at most 8.
fn contribution(dtype: DType, op: ReduceOp, world: usize, rank: usize, at: usize) -> i64 {
    let narrow = dtype.is_float() && dtype.size() == 1;
    match op {
        _ if dtype == DType::Bool => ((at * 7 + rank * 3) % 11 % 2) as i64,
        ReduceOp::Avg if narrow => (at % 2) as i64,
        ReduceOp::Max | ReduceOp::Min if narrow => ((at * 7 + rank * 3) % 9) as i64,
        // One rank per element contributes.
        ReduceOp::Sum | ReduceOp::PreMulSum(_) if narrow && at % world != rank => 0,
        ReduceOp::Sum | ReduceOp::PreMulSum(_) if narrow => 1 + (at / world % 2) as i64,
        ReduceOp::Prod => 1 + i64::from((at + rank).is_multiple_of(5)),
        // Equal on all ranks, so that the division is exact in every type.
        ReduceOp::Avg | ReduceOp::WrappingAvg => (at % 11) as i64,
        _ => ((at * 7 + rank * 3) % 11) as i64,
    }
}

fn expected(dtype: DType, op: ReduceOp, world: usize, at: usize) -> i64 {
    let all = (0..world).map(|rank| contribution(dtype, op, world, rank, at));
    match op {
        ReduceOp::Sum => all.sum(),
        ReduceOp::Prod => all.product(),
        ReduceOp::Max => all.max().unwrap_or(0),
        ReduceOp::Min => all.min().unwrap_or(0),
        ReduceOp::Avg | ReduceOp::WrappingAvg => all.sum::<i64>() / world as i64,
        ReduceOp::BitAnd => all.reduce(|left, right| left & right).unwrap_or(0),
        ReduceOp::BitOr => all.fold(0, |left, right| left | right),
        ReduceOp::BitXor => all.fold(0, |left, right| left ^ right),
        ReduceOp::PreMulSum(_) => all.enumerate().map(|(rank, value)| value * (1 + rank as i64 % 3)).sum(),
    }
}

/// The memory of vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    /// Allocated by the communicator.
    Pool,
    /// Allocated on the heap.
    Heap,
    /// Allocated on the heap and registered. Only the longest vectors of these tests are long enough to be
    /// shared with neighbours.
    Registered,
}

impl Memory {
    /// One kind, picked by `number`.
    fn any(number: usize) -> Self {
        [Self::Pool, Self::Heap, Self::Registered][number % 3]
    }
}

fn check<T: TestElement>(comm: &Rank, count: usize, op: ReduceOp, in_place: bool, memory: Memory) {
    let (rank, world) = (comm.rank(), comm.world_size());
    let given: Vec<T> = (0..count).map(|at| T::of(contribution(T::DTYPE, op, world, rank, at))).collect();
    let wanted: Vec<T> = (0..count).map(|at| T::of(expected(T::DTYPE, op, world, at))).collect();
    let op =
        if matches!(op, ReduceOp::PreMulSum(_)) { ReduceOp::PreMulSum(1.0 + (rank % 3) as f64) } else { op };
    let context = || {
        format!(
            "rank {rank} of {world}: {count} x {} {op:?}, in place {in_place}, memory {memory:?}",
            T::DTYPE.name()
        )
    };
    if memory == Memory::Pool {
        let mut send = comm.alloc::<T>(count).expect("pool memory");
        send.copy_from_slice(&given);
        if in_place {
            comm.all_reduce(&mut send, op).unwrap_or_else(|error| panic!("{}: {error}", context()));
            assert!(send[..] == wanted[..], "{}", context());
        } else {
            let mut receive = comm.alloc::<T>(count).expect("pool memory");
            comm.all_reduce_into(&send, &mut receive, op)
                .unwrap_or_else(|error| panic!("{}: {error}", context()));
            assert!(receive[..] == wanted[..], "{}", context());
            assert!(send[..] == given[..], "{}: the input was written to", context());
        }
    } else if memory == Memory::Registered {
        let mut input = comm.register(given.clone()).expect("memory that can be locked");
        if in_place {
            comm.all_reduce(&mut input, op).unwrap_or_else(|error| panic!("{}: {error}", context()));
            assert!(input[..] == wanted[..], "{}", context());
            assert!(input.into_vec() == wanted, "{}: after the registration", context());
        } else {
            let mut output = comm.register(vec![T::of(99); count]).expect("memory that can be locked");
            comm.all_reduce_into(&input, &mut output, op)
                .unwrap_or_else(|error| panic!("{}: {error}", context()));
            assert!(output[..] == wanted[..], "{}", context());
            assert!(output.into_vec() == wanted, "{}: after the registration", context());
            assert!(input.into_vec() == given, "{}: the input was written to", context());
        }
    } else if in_place {
        let mut both = given;
        comm.all_reduce(&mut both, op).unwrap_or_else(|error| panic!("{}: {error}", context()));
        assert!(both == wanted, "{}", context());
    } else {
        let mut receive = vec![T::of(99); count];
        comm.all_reduce_into(&given, &mut receive, op)
            .unwrap_or_else(|error| panic!("{}: {error}", context()));
        assert!(receive == wanted, "{}", context());
    }
}

fn check_type(comm: &Rank, dtype: DType, count: usize, op: ReduceOp, in_place: bool, memory: Memory) {
    match dtype {
        DType::I8 => check::<i8>(comm, count, op, in_place, memory),
        DType::U8 => check::<u8>(comm, count, op, in_place, memory),
        DType::I32 => check::<i32>(comm, count, op, in_place, memory),
        DType::U32 => check::<u32>(comm, count, op, in_place, memory),
        DType::I64 => check::<i64>(comm, count, op, in_place, memory),
        DType::U64 => check::<u64>(comm, count, op, in_place, memory),
        DType::F16 => check::<f16>(comm, count, op, in_place, memory),
        DType::F32 => check::<f32>(comm, count, op, in_place, memory),
        DType::F64 => check::<f64>(comm, count, op, in_place, memory),
        DType::BF16 => check::<bf16>(comm, count, op, in_place, memory),
        DType::F8E4M3 => check::<F8E4M3>(comm, count, op, in_place, memory),
        DType::F8E5M2 => check::<F8E5M2>(comm, count, op, in_place, memory),
        DType::I16 => check::<i16>(comm, count, op, in_place, memory),
        DType::U16 => check::<u16>(comm, count, op, in_place, memory),
        DType::Bool => check::<Boolean>(comm, count, op, in_place, memory),
    }
}

/// Tests every combination of type, operation and count. The counts are around every boundary.
fn check_all(world: World, lowering: Lowering) {
    if !world.is_enabled() {
        return;
    }
    // Simulated hardware is slow, so the worlds are smaller, and types and operations take turns in them.
    let worlds: &[usize] = if world.is_simulated() { &[2, 3, 5] } else { &[1, 2, 3, 4, 5, 8] };
    for (number, &ranks) in worlds.iter().enumerate() {
        spawn(&Setup::new(world, ranks).lowering(lowering), |comm| {
            let mut turn = 0;
            for dtype in DType::ALL {
                for (at, op) in OPS.into_iter().filter(|op| op.check(dtype).is_ok()).enumerate() {
                    let turn_of_pair = dtype as usize + at + world as usize + number;
                    if world.is_simulated() && !turn_of_pair.is_multiple_of(worlds.len()) {
                        continue;
                    }
                    // Lengths matter to no operation, so bits need few.
                    let bits = matches!(op, ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor);
                    let counts = [1, 65, 4099, 0, ranks - 1, ranks + 1, 63, 64, 1000, 20_011];
                    for count in counts.into_iter().take(if bits { 3 } else { 10 }) {
                        // Alternate between the ways to hold the vectors.
                        turn += 1;
                        check_type(&comm, dtype, count, op, turn % 2 == 0, Memory::any(turn / 2));
                    }
                }
            }
        });
    }
}

#[test]
fn operations_that_a_type_does_not_have_are_refused() {
    for &world in World::enabled() {
        spawn(&Setup::new(world, 2), |comm| {
            for op in [ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor] {
                let error = comm.all_reduce(&mut [1f32; 3], op).expect_err("floats have no such operation");
                assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
                assert!(error.message().contains("of elements of type float"), "{error}");
            }
            for op in [ReduceOp::Avg, ReduceOp::PreMulSum(1.0)] {
                let error = comm.all_reduce(&mut [Boolean::from(true); 3], op).expect_err("not for booleans");
                assert!(error.message().contains("of elements of type bool"), "{error}");
            }
            check::<Boolean>(&comm, 70, ReduceOp::BitXor, true, Memory::Heap);
        });
    }
}

#[test]
fn averages_of_integers_are_refused_as_their_sums_may_wrap() {
    for &world in World::enabled() {
        spawn(&Setup::new(world, 4), |comm| {
            let mut vector = [200u8; 3];
            let error = comm.all_reduce(&mut vector, ReduceOp::Avg).expect_err("the sum is 800");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert!(error.message().contains("sum them in a type with room for the sum"), "{error}");
            assert_eq!(vector, [200; 3]);
            comm.all_reduce(&mut [1i64 << 62; 3], ReduceOp::Avg).expect_err("the sum is 2^64");
            // As NCCL's average: (800 mod 256) / 4.
            comm.all_reduce(&mut vector, ReduceOp::WrappingAvg).expect("a wrapping average");
            assert_eq!(vector, [8; 3]);
            let mut vector = [200.0f32; 3];
            comm.all_reduce(&mut vector, ReduceOp::Avg).expect("an average of floats");
            assert_eq!(vector, [200.0; 3]);
        });
    }
}

macro_rules! for_each_world {
    ($($name:ident: $world:ident, $lowering:ident;)*) => {$(
        #[test]
        fn $name() {
            check_all(World::$world, Lowering::$lowering);
        }
    )*};
}

for_each_world! {
    results_are_correct_between_threads: Local, Auto;
    results_are_correct_between_threads_in_a_chain: Local, Chain;
    results_are_correct_over_shm: Shm, Auto;
    results_are_correct_over_shm_in_a_chain: Shm, Chain;
    results_are_correct_over_tcp: Tcp, Auto;
    results_are_correct_over_tcp_in_a_chain: Tcp, Chain;
    results_are_correct_on_two_nodes: Mixed, Auto;
    results_are_correct_on_two_nodes_with_direct_exchange: Mixed, Direct;
    results_are_correct_over_rdma: Verbs, Auto;
    results_are_correct_over_rdma_in_a_chain_with_staging: VerbsStaged, Chain;
    results_are_correct_on_two_nodes_over_rdma: VerbsMixed, Auto;
    results_are_correct_on_gpus: Gpu, Auto;
    results_are_correct_on_gpus_in_a_chain: Gpu, Chain;
    results_are_correct_on_gpus_through_pinned_memory: GpuPinned, Auto;
    results_are_correct_on_gpus_over_tcp: GpuTcp, Auto;
    results_are_correct_on_gpus_of_two_nodes: GpuMixed, Direct;
}

#[test]
fn results_are_correct_around_every_subchunk_length() {
    for world in World::enabled() {
        for ranks in [2, 3] {
            let setup = Setup::new(*world, ranks);
            spawn(&setup, |comm| {
                // In calls on GPUs sub-chunks get twice as long when a rank's share has more than 16 of them.
                let share = 16 * setup.config.subchunk.0 / size_of::<f32>();
                for (turn, lengths) in
                    [4, 2, 3, 8].into_iter().take(flexring_testkit::effort::cases(4) as usize).enumerate()
                {
                    for count in [ranks * lengths * share - 1, ranks * lengths * share + 1] {
                        check::<f32>(&comm, count, ReduceOp::Sum, turn % 2 == 0, Memory::any(turn / 2));
                    }
                }
            });
        }
    }
}

/// A number of any magnitude, which depends on rank and element.
fn arbitrary(rank: usize, at: usize) -> f32 {
    let mut bits = (rank as u64 * 1_000_003 + at as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    bits ^= bits >> 29;
    let exponent = (bits % 40) as i32 - 20;
    ((bits >> 20) as f32 / 2f32.powi(43) - 1.0) * 2f32.powi(exponent)
}

#[test]
fn additions_happen_in_the_documented_order() {
    const COUNT: usize = 10_007;
    let one_level = World::enabled().iter().filter(|world| !world.is_mixed());
    for (world, lowering) in one_level.zip([Lowering::Direct, Lowering::Chain, Lowering::Chain]) {
        let ranks = 5;
        let results = spawn(&Setup::new(*world, ranks).lowering(lowering), |comm| {
            let mut vector: Vec<f32> = (0..COUNT).map(|at| arbitrary(comm.rank(), at)).collect();
            comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
            vector
        });
        // The owner of a span adds last, so the ring begins at the rank after it. Spans begin on cache lines.
        let start = |part: usize| {
            if part == ranks { COUNT } else { part * COUNT / ranks / 16 * 16 }
        };
        for owner in 0..ranks {
            for at in start(owner)..start(owner + 1) {
                let parts = (0..ranks).map(|step| arbitrary((owner + 1 + step) % ranks, at));
                let replayed = parts.reduce(|sum, part| sum + part).expect("there are ranks");
                for result in &results {
                    assert_eq!(result[at].to_bits(), replayed.to_bits(), "{world:?}, element {at}");
                }
                // Higham's bound: |error| <= gamma(p - 1) * sum |x|.
                let exact: f64 = (0..ranks).map(|rank| f64::from(arbitrary(rank, at))).sum();
                let magnitude: f64 = (0..ranks).map(|rank| f64::from(arbitrary(rank, at)).abs()).sum();
                let unit = (ranks - 1) as f64 * f64::from(f32::EPSILON) / 2.0;
                assert!((f64::from(replayed) - exact).abs() <= unit / (1.0 - unit) * magnitude);
            }
        }
    }
}

#[test]
fn special_values_follow_ieee_754() {
    for &world in World::enabled() {
        spawn(&Setup::new(world, 3), |comm| {
            let rank = comm.rank();
            let pick = |values: [f32; 3]| values[rank];
            let tiny = f32::from_bits(1);
            let given = [
                pick([1.0, f32::NAN, 2.0]),
                pick([f32::INFINITY, 1.0, 1.0]),
                pick([f32::INFINITY, f32::NEG_INFINITY, 1.0]),
                pick([-0.0, -0.0, -0.0]),
                pick([-0.0, 0.0, -0.0]),
                pick([tiny, tiny, tiny]),
            ];
            // First on the path for small messages, then on the regular one.
            for repeat in [1, 500] {
                let vector = || given.repeat(repeat);
                let mut sum = vector();
                comm.all_reduce(&mut sum, ReduceOp::Sum).expect("a sum");
                let mut max = vector();
                comm.all_reduce(&mut max, ReduceOp::Max).expect("a maximum");
                let mut min = vector();
                comm.all_reduce(&mut min, ReduceOp::Min).expect("a minimum");
                for at in (0..sum.len()).step_by(given.len()) {
                    assert!(sum[at].is_nan() && max[at].is_nan() && min[at].is_nan());
                    assert_eq!((sum[at + 1], max[at + 1], min[at + 1]), (f32::INFINITY, f32::INFINITY, 1.0));
                    assert!(sum[at + 2].is_nan());
                    assert_eq!(sum[at + 3].to_bits(), (-0f32).to_bits());
                    assert_eq!(max[at + 4].to_bits(), 0f32.to_bits());
                    assert_eq!(min[at + 4].to_bits(), (-0f32).to_bits());
                    assert_eq!(sum[at + 5].to_bits(), 3);
                }
            }
        });
    }
}

/// Messages of up to 16 bytes lie in the header's cache line of a mailbox, and longer ones behind it.
#[test]
fn short_results_are_correct_around_every_length_of_a_mailbox() {
    for &world in World::enabled().iter().filter(|world| [World::Local, World::Shm].contains(world)) {
        for small in [0, 8, 16, 64] {
            let mut setup = Setup::new(world, 3);
            setup.config.mailbox.0 = small;
            spawn(&setup, |comm| {
                for count in [17, 16, 15, 0, 8, 9, 16, 64, 1, 65, 7, 17, 4] {
                    check::<u8>(&comm, count, ReduceOp::Sum, count % 2 == 0, Memory::any(count));
                }
            });
        }
    }
}

#[test]
fn asynchronous_calls_run_in_order() {
    for &world in World::enabled() {
        spawn(&Setup::new(world, 3), |comm| {
            let requests: Vec<_> = (0..20)
                .map(|call| {
                    comm.all_reduce_async(vec![call as f32; 5000 + call], ReduceOp::Sum).expect("a request")
                })
                .collect();
            let mut between = vec![1i32; 10];
            comm.all_reduce(&mut between, ReduceOp::Sum).expect("a sum");
            assert_eq!(between, [3; 10]);
            for (call, request) in requests.into_iter().enumerate() {
                assert!(request.is_over(), "a blocking call runs after all earlier calls");
                assert_eq!(request.wait().expect("a sum"), vec![3.0 * call as f32; 5000 + call]);
            }
            drop(comm.all_reduce_async(vec![1u8; 100_000], ReduceOp::Max).expect("a request"));
        });
    }
}

#[test]
fn pool_memory_is_zeroed_and_reused() {
    for &world in World::enabled() {
        spawn(&Setup::new(world, 2), |comm| {
            for round in 1..20 {
                let mut vector = comm.alloc::<u64>(round * 3001).expect("pool memory");
                assert!(vector.iter().all(|element| *element == 0));
                vector.fill(round as u64);
                comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
                assert!(vector.iter().all(|element| *element == 2 * round as u64));
            }
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(40), ..ProptestConfig::default() })]
    #[test]
    fn results_are_correct_for_any_world_count_and_settings(
        kind in 0usize..4, ranks in 1usize..7, counts in proptest::collection::vec(0usize..30_000, 1..6),
        lowering in 0usize..3, slots in 2usize..20, pages in 1usize..5, sockets in 1usize..4,
    ) {
        let lowering = [Lowering::Auto, Lowering::Chain, Lowering::Direct][lowering];
        let mut setup = Setup::new(World::any(kind), ranks).lowering(lowering);
        setup.config.slots = slots;
        setup.config.subchunk.0 = pages * 4096;
        setup.config.sockets_per_link = sockets;
        spawn(&setup, |comm| {
            for (index, count) in counts.iter().enumerate() {
                check::<i32>(&comm, *count, ReduceOp::Sum, index % 2 == 0, Memory::any(index));
                check::<f32>(&comm, *count, ReduceOp::PreMulSum(1.0), index % 2 == 1, Memory::any(index + 2));
            }
        });
    }
}
