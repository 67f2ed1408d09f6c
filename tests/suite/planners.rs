//! Every planner on random trees: the verifier proves each plan, and real ranks run it.

use crate::harness::with_watchdog;
use crate::trees;
use fastrand::Rng;
use flexring::config::{Algorithm, Config, Lowering};
use flexring::plan::lowering::Plan;
use flexring::plan::planner::flexreduce;
use flexring::plan::topology::Topology;
use flexring::plan::verifier::VerifiedPlan;
use flexring::{Communicator, ReduceOp};
use flexring_testkit::effort::cases;
use std::time::Duration;

/// The tree of a seed, with up to 4 levels. Most have up to 8 leaves, some 24, a few 64.
fn tree(seed: u64) -> (Rng, Topology) {
    let mut random = Rng::with_seed(seed);
    let most = match random.usize(..20) {
        0 => 64,
        1..4 => 24,
        _ => 8,
    };
    let topology = trees::tree(&mut random, most, 4);
    (random, topology)
}

/// A plan of each algorithm for the tree of a seed, with a random lowering.
fn plans(seed: u64) -> Vec<(Algorithm, Plan)> {
    let (mut random, topology) = tree(seed);
    let lowering = [Lowering::Auto, Lowering::Auto, Lowering::Chain, Lowering::Direct][random.usize(..4)];
    let plan = |algorithm| {
        let schedule = trees::plan(&mut random, algorithm, &topology)?;
        Some((algorithm, Plan::on(schedule, &topology, lowering)))
    };
    trees::algorithms().filter_map(plan).collect()
}

/// The verified plans for the tree of a seed. For every fiftieth tree, all collectives are verified.
fn proven(seed: u64) -> Vec<(u64, Algorithm, VerifiedPlan)> {
    let prove = |(algorithm, plan): (Algorithm, Plan)| {
        let proven =
            if seed.is_multiple_of(50) { VerifiedPlan::for_all(plan) } else { VerifiedPlan::new(plan) };
        let proven = proven.unwrap_or_else(|error| panic!("seed {seed}, {}: {error}", algorithm.name()));
        (seed, algorithm, proven)
    };
    plans(seed).into_iter().map(prove).collect()
}

/// The verified plans of all seeds, computed on all cores.
fn proven_in_parallel(seeds: &[u64]) -> Vec<(u64, Algorithm, VerifiedPlan)> {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        let share = |thread| {
            move || seeds.iter().skip(thread).step_by(threads).flat_map(|seed| proven(*seed)).collect()
        };
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(share(thread))).collect();
        threads
            .into_iter()
            .flat_map(|thread| -> Vec<_> { thread.join().expect("all plans are verified") })
            .collect()
    })
}

/// The contribution of `rank` to element `at`. A wrong sum shows which rank is missing or counted twice (up to ambiguity
/// between 64 ranks), and what was misplaced.
fn contribution(rank: usize, at: usize) -> i64 {
    (1 << (rank % 60)) + (rank as i64 + 1) * (at as i64 % 1009)
}

#[test]
fn every_plan_for_random_trees_is_proved_and_sums_on_the_local_transport() {
    let mut by_world: Vec<Vec<u64>> = vec![Vec::new(); 65];
    for seed in 0..cases(400) {
        by_world[tree(seed).1.world()].push(seed);
    }
    let mut config = Config::default();
    (config.small.0, config.mailbox.0, config.subchunk.0, config.slots) = (0, 0, 4096, 8);
    // Each rank maps and prefaults the arenas of all others, slots for GPUs included.
    config.gpu_subchunk.0 = 4096;
    for (world, seeds) in by_world.into_iter().enumerate().filter(|(_, seeds)| !seeds.is_empty()) {
        let plans = proven_in_parallel(&seeds);
        let ranks = Communicator::local_with(&config, world).expect("a local world");
        let plans = &plans;
        with_watchdog(Duration::from_secs(300), || {
            std::thread::scope(|scope| {
                for comm in ranks {
                    scope.spawn(move || sum_by_each(&comm, plans));
                }
            });
        });
    }
}

fn sum_by_each(comm: &Communicator, plans: &[(u64, Algorithm, VerifiedPlan)]) {
    let (rank, world) = (comm.rank(), comm.world_size());
    for (seed, algorithm, plan) in plans {
        let mut random = Rng::with_seed(seed ^ 77);
        // One in 16 is long enough for shards of several sub-chunks.
        let count =
            if random.usize(..16) == 0 { world * 600 + random.usize(..2000) } else { random.usize(..200) };
        comm.use_plan(plan).expect("a plan for this world");
        let mut vector: Vec<i64> = (0..count).map(|at| contribution(rank, at)).collect();
        comm.all_reduce(&mut vector, ReduceOp::Sum)
            .unwrap_or_else(|error| panic!("seed {seed}, {}: {error}", algorithm.name()));
        let bits: i64 = (0..world).map(|rank| contribution(rank, 0)).sum();
        let ranks = (world * (world + 1) / 2) as i64;
        for (at, sum) in vector.iter().enumerate() {
            let expected = bits + ranks * (at as i64 % 1009);
            assert_eq!(*sum, expected, "seed {seed}, {}: rank {rank}, element {at}", algorithm.name());
        }
    }
}

#[test]
fn a_hundred_thousand_ranks_can_be_planned() {
    let topology = trees::cluster(100_000);
    let schedule = flexreduce::plan(&topology).expect("regular enough");
    assert_eq!(schedule.shards().len(), topology.world());
    // groups_of returns a few groups from a level of hundreds of thousands.
    let top = schedule.levels().last().expect("levels");
    assert!(top.groups().len() >= topology.world());
    assert!(top.groups_of(4711).len() < top.groups().len() / 1000);
}
