//! Ranks that others leave out by name, and that shrink all the same.

use super::*;

#[test]
fn a_rank_that_is_excluded_and_shrinks_is_told_by_whom() {
    for excluded in 0..3 {
        // It calls before, with and after the others, which go on.
        for at in [1, 100, 1000] {
            let others: Vec<Rank> = (0..3).filter(|rank| *rank != excluded).collect();
            let mut simulation = Simulation::new(3, 7);
            simulation.call(excluded, &[], at);
            others.iter().for_each(|rank| simulation.call(*rank, &[excluded], 100));
            simulation.run();
            let error = simulation.error(excluded);
            assert_eq!(error.kind(), ErrorKind::Rendezvous, "{error}");
            let by = if excluded == 0 { "ranks 1 and 2".to_owned() } else { "rank 0".to_owned() };
            let sentence =
                format!("rank {excluded} was left out by {by}, whose list of ranks to leave out contains it");
            assert!(error.message().starts_with(&sentence), "called at {at}: {error}");
            assert!(simulation.now < 2000, "it took until {}", simulation.now);
            let worlds = simulation.worlds();
            assert!(others.iter().all(|rank| worlds[*rank].as_ref() == Some(&others)), "{worlds:?}");
        }
    }
}

#[test]
fn a_rank_that_was_excluded_may_shrink_again_after_a_call_of_all() {
    for finished in [0, 1] {
        let mut simulation = Simulation::new(3, 8);
        (0..2).for_each(|rank| simulation.call(rank, &[2], 1));
        simulation.run_until(500);
        assert_eq!(simulation.worlds()[..2], [Some(vec![0, 1]), Some(vec![0, 1])]);
        // Rank 2 comes first, and waits for the others.
        let begin = simulation.now;
        simulation.call_after(finished, 2, &[1], begin + 1);
        simulation.ranks[0].outcome = None;
        simulation.call_after(finished, 0, &[1], begin + 300);
        simulation.run();
        if finished == 1 {
            assert_eq!(
                [0, 2].map(|rank| simulation.worlds()[rank].clone()),
                [Some(vec![0, 2]), Some(vec![0, 2])]
            );
        } else {
            let error = simulation.error(2);
            assert!(error.message().starts_with("rank 2 was left out by rank 0"), "{error}");
        }
    }
}

#[test]
fn lists_that_exclude_the_leader_on_some_ranks_fail_on_all() {
    let mut simulation = Simulation::new(4, 9);
    for (rank, exclude) in [(0, [].as_slice()), (1, &[]), (2, &[0]), (3, &[0])] {
        simulation.call(rank, exclude, 1);
    }
    simulation.run();
    for rank in 0..4 {
        let error = simulation.error(rank);
        assert_eq!(error.kind(), ErrorKind::Disagreement, "rank {rank}: {error}");
    }
}
