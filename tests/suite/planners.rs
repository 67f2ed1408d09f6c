//! Every planner on random trees: ranks run each plan that the verifier has proved.

use crate::harness::with_watchdog;
use fastrand::Rng;
use flexring::{Communicator, ReduceOp};
use flexring_core::config::{Algorithm, Config};
use flexring_plan::test_util::{proven_in_parallel, tree_of_seed};
use flexring_plan::verifier::VerifiedPlan;
use flexring_testkit::effort::cases;
use std::time::Duration;

/// The contribution of `rank` to element `at`. A wrong sum shows which rank is missing or counted twice (up
/// to ambiguity between 64 ranks), and what was misplaced.
fn contribution(rank: usize, at: usize) -> i64 {
    (1 << (rank % 60)) + (rank as i64 + 1) * (at as i64 % 1009)
}

#[test]
fn every_plan_for_random_trees_is_proved_and_sums_on_the_local_transport() {
    let mut by_world: Vec<Vec<u64>> = vec![Vec::new(); 65];
    for seed in 0..cases(400) {
        by_world[tree_of_seed(seed).1.world()].push(seed);
    }
    let mut config = Config::default();
    (config.small.0, config.mailbox.0, config.subchunk.0, config.slots) = (0, 0, 4096, 8);
    // Each rank maps and prefaults the arenas of all others, slots for GPUs included.
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
