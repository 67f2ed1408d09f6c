//! With `FLEXRING_REPRODUCIBLE=1` the bits of a sum are those of adding the ranks' contributions in rank
//! order, for every transport, algorithm and sub-chunk size.

use crate::harness::{Setup, World, share_a_core, spawn};
use fastrand::Rng;
use flexring::{Element, ReduceOp};
use flexring_core::config::{Algorithm, Dimensions, Lowering, Switch};
use flexring_core::float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};

/// Contributions of all magnitudes, so that every other order of additions gives other bits.
fn contributions(rank: usize, count: usize) -> Vec<f64> {
    let mut random = Rng::with_seed(rank as u64 + 1);
    let mut number = || {
        let sign = if random.bool() { 1.0 } else { -1.0 };
        sign * (1.0 + random.usize(..1 << 20) as f64 / f64::from(1 << 20))
            * 2f64.powi(random.usize(..12) as i32 - 6)
    };
    (0..count).map(|_| number()).collect()
}

/// A float type with its documented sum: types of 16 and 8 bits are added in f32 and rounded once.
trait Float: Element {
    fn of(value: f64) -> Self;
    fn bits(self) -> u64;
    /// Adds in rank order, then divides.
    fn sum(column: &[Self], divide: bool) -> Self;
}

macro_rules! float {
    ($type:ty, $wide:ty, $from:expr, $into:expr, $of:expr) => {
        impl Float for $type {
            fn of(value: f64) -> Self {
                $of(value)
            }
            fn bits(self) -> u64 {
                self.to_bits().into()
            }
            fn sum(column: &[Self], divide: bool) -> Self {
                let first: $wide = $from(column[0]);
                let sum = column[1..].iter().fold(first, |sum, next| sum + $from(*next));
                $into(if divide { sum / column.len() as $wide } else { sum })
            }
        }
    };
}
float!(f32, f32, |x: f32| x, |x: f32| x, |x: f64| x as f32);
float!(f64, f64, |x: f64| x, |x: f64| x, |x: f64| x);
float!(f16, f32, f16::to_f32, f16::from_f32, f16::from_f64);
float!(bf16, f32, bf16::to_f32, bf16::from_f32, bf16::from_f64);
float!(F8E4M3, f32, F8E4M3::to_f32, F8E4M3::from_f32, |x: f64| F8E4M3::from_f32(x as f32));
float!(F8E5M2, f32, F8E5M2::to_f32, F8E5M2::from_f32, |x: f64| F8E5M2::from_f32(x as f32));

fn check<T: Product>(setup: &Setup, count: usize) {
    let ranks = setup.ranks;
    let columns: Vec<Vec<T>> =
        (0..ranks).map(|rank| contributions(rank, count).into_iter().map(T::of).collect()).collect();
    for (op, factor) in [(ReduceOp::Sum, 1.0), (ReduceOp::Avg, 1.0), (ReduceOp::PreMulSum(0.75), 0.75)] {
        // A factor is applied, and rounded, before anything is added.
        let scaled = |value: T| if factor == 1.0 { value } else { T::of_product(value, factor) };
        let expected: Vec<u64> = (0..count)
            .map(|at| {
                let column: Vec<T> = columns.iter().map(|column| scaled(column[at])).collect();
                T::sum(&column, op == ReduceOp::Avg).bits()
            })
            .collect();
        let found = spawn(setup, |comm| {
            let mut vector = columns[comm.rank()].clone();
            comm.all_reduce(&mut vector, op).expect("a sum");
            vector.iter().map(|value| value.bits()).collect::<Vec<_>>()
        });
        for (rank, found) in found.iter().enumerate() {
            assert_eq!(found, &expected, "{:?}, {op:?}, {} at rank {rank}: {setup:?}", T::DTYPE, count);
        }
    }
}

trait Product: Float {
    fn of_product(value: Self, factor: f64) -> Self;
}
macro_rules! product {
    ($($type:ty: $wide:ty, $from:expr, $into:expr;)*) => {$(
        impl Product for $type {
            fn of_product(value: Self, factor: f64) -> Self {
                $into($from(value) * factor as $wide)
            }
        }
    )*};
}
product! {
    f32: f32, |x: f32| x, |x: f32| x;
    f64: f64, |x: f64| x, |x: f64| x;
    f16: f32, f16::to_f32, f16::from_f32;
    bf16: f32, bf16::to_f32, bf16::from_f32;
    F8E4M3: f32, F8E4M3::to_f32, F8E4M3::from_f32;
    F8E5M2: f32, F8E5M2::to_f32, F8E5M2::from_f32;
}

/// What docs/schedules.md says in "How sums are rounded".
#[test]
fn narrow_floats_are_rounded_once_on_a_node_and_once_more_between_two() {
    // The sum over all ranks, with the sums over each of these numbers of ranks rounded before.
    fn check_nodes<T: Float>(setup: &Setup, nodes: &[usize]) {
        const COUNT: usize = 5000;
        let columns: Vec<Vec<T>> = (0..setup.ranks)
            .map(|rank| contributions(rank, COUNT).into_iter().map(T::of).collect())
            .collect();
        let expected: Vec<u64> = (0..COUNT)
            .map(|at| {
                let column: Vec<T> = columns.iter().map(|column| column[at]).collect();
                let mut rest = column.as_slice();
                let sums = nodes.iter().map(|ranks| {
                    let node;
                    (node, rest) = rest.split_at(*ranks);
                    T::sum(node, false)
                });
                T::sum(&sums.collect::<Vec<_>>(), false).bits()
            })
            .collect();
        let found = spawn(setup, |comm| {
            let mut vector = columns[comm.rank()].clone();
            comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
            vector.iter().map(|value| value.bits()).collect::<Vec<_>>()
        });
        assert!(found.iter().all(|found| *found == expected), "{:?} on {nodes:?}", T::DTYPE);
    }
    for (world, nodes) in [(World::Shm, [4].as_slice()), (World::Mixed, [2, 4].as_slice())] {
        if world.is_enabled() {
            let setup = Setup::new(world, nodes.iter().sum());
            check_nodes::<bf16>(&setup, nodes);
            check_nodes::<f16>(&setup, nodes);
            check_nodes::<F8E5M2>(&setup, nodes);
        }
    }
}

#[test]
fn sums_that_a_leader_adds_for_ranks_that_share_a_core_have_the_bits_of_rank_order() {
    share_a_core();
    for world in [World::Local, World::Shm].into_iter().filter(|world| world.is_enabled()) {
        for ranks in [7, 8, 13] {
            let setup = Setup::new(world, ranks);
            check::<f32>(&setup, 1);
            check::<f32>(&setup, 64);
            check::<f16>(&setup, 100);
            check::<F8E4M3>(&setup, 253);
        }
    }
}

fn setup(world: World, ranks: usize) -> Setup {
    let mut setup = Setup::new(world, ranks);
    setup.config.reproducible = Switch(true);
    setup
}

#[test]
fn sums_have_the_bits_of_rank_order_for_every_transport_and_algorithm() {
    // These topologies are trees, for which there is no forest.
    let algorithms = flexring_plan::test_util::algorithms().filter(|one| *one != Algorithm::Forest);
    for algorithm in algorithms.chain([Algorithm::Auto]) {
        for (&world, ranks) in World::enabled().iter().zip([5, 3, 3, 5]) {
            let mut setup = setup(world, ranks);
            setup.config.algo = algorithm;
            if algorithm == Algorithm::Hierarchical {
                setup.config.dimensions = Some(Dimensions(vec![ranks]));
            }
            if algorithm == Algorithm::Blueconnect && world.is_mixed() {
                continue;
            }
            check::<f32>(&setup, 7001);
        }
    }
}

#[test]
fn sums_have_the_bits_of_rank_order_for_every_type_and_subchunk_size() {
    for (subchunk, small, direct) in [(4096, 0, 0), (8192, 4096, 64 << 10), (64 << 10, 0, 1 << 20)] {
        let worlds = World::enabled();
        for (world, ranks) in [(worlds[0], 1), (worlds[0], 4), (worlds[worlds.len() - 1], 4)] {
            for lowering in [Lowering::Auto, Lowering::Chain, Lowering::Direct] {
                let mut setup = setup(world, ranks).lowering(lowering);
                setup.config.subchunk.0 = subchunk;
                (setup.config.small.0, setup.config.mailbox.0) = (small, small);
                setup.config.direct.0 = direct;
                for count in [1, 50, 6000] {
                    check::<f32>(&setup, count);
                }
                check::<f64>(&setup, 3000);
                check::<f16>(&setup, 3000);
                check::<bf16>(&setup, 3000);
                check::<F8E4M3>(&setup, 3000);
                check::<F8E5M2>(&setup, 3000);
            }
        }
    }
}

#[test]
fn without_the_setting_bits_are_still_equal_on_all_ranks_and_in_all_runs() {
    for &world in World::enabled() {
        let run = || {
            spawn(&Setup::new(world, 4), |comm| {
                let mut vector: Vec<f32> =
                    contributions(comm.rank(), 9000).into_iter().map(|x| x as f32).collect();
                comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
                vector.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
            })
        };
        let first = run();
        assert!(first.iter().all(|bits| *bits == first[0]), "{world:?}: ranks have different bits");
        assert_eq!(run(), first, "{world:?}: another run has different bits");
    }
}
