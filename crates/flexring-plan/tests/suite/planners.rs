//! Every planner on random trees: the verifier proves each plan. Ranks run these plans in `tests/suite` of
//! the library.

use flexring_plan::candidates::candidates;
use flexring_plan::planner::flexreduce;
use flexring_plan::test_util::{cluster, proven_in_parallel, tree_of_seed};
use flexring_plan::verifier::VerifiedPlan;
use flexring_testkit::effort::cases;

#[test]
fn every_plan_for_random_trees_is_proved() {
    let seeds: Vec<u64> = (0..cases(400)).collect();
    assert!(proven_in_parallel(&seeds).len() > 9 * seeds.len(), "each algorithm supports most of the trees");
}

#[test]
fn every_candidate_for_random_trees_is_proved() {
    let mut different = 0;
    for seed in 0..cases(60) {
        let (_, topology) = tree_of_seed(seed);
        for candidate in candidates(&topology) {
            different += u64::from(!candidate.variant.is_empty());
            let name = candidate.name();
            VerifiedPlan::new(candidate.plan).unwrap_or_else(|error| panic!("seed {seed}, {name}: {error}"));
        }
    }
    assert!(different > cases(60), "most trees have candidates for other trees of their nodes");
}

#[test]
fn a_hundred_thousand_ranks_can_be_planned() {
    let topology = cluster(100_000);
    let schedule = flexreduce::plan(&topology).expect("regular enough");
    // Hardly any rank has two shards.
    let (shards, world) = (schedule.shards().len(), topology.world());
    assert!((world..world + world / 1000).contains(&shards), "{shards} shards of {world} ranks");
    // groups_of returns a few groups from a level of hundreds of thousands.
    let top = schedule.levels().last().expect("levels");
    assert!(top.groups().len() >= topology.world());
    assert!(top.groups_of(4711).len() < top.groups().len() / 1000);
}
