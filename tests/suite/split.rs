//! Split: one communicator for each color, ordered by key.

use crate::harness::{Setup, World, spawn};
use flexring::{Communicator, ErrorKind, ReduceOp};
use std::sync::Barrier;

/// The sum of the ranks' numbers plus one.
fn sum(comm: &Communicator, number: usize) -> u32 {
    let mut vector = vec![number as u32 + 1; 3000];
    comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
    assert!(vector.iter().all(|element| *element == vector[0]));
    vector[0]
}

#[test]
fn two_colors_with_reversed_keys() {
    for &world in World::enabled() {
        spawn(&Setup::new(world, 5), |comm| {
            let number = comm.rank();
            let color = if number == 4 { Communicator::NO_COLOR } else { number as i32 % 2 };
            let part = comm.split(color, -(number as i32)).expect("all ranks split");
            let Some(part) = part else {
                assert_eq!(number, 4);
                return assert_eq!(sum(&comm, number), 15);
            };
            // Ranks 2 and 0, and ranks 3 and 1.
            assert_eq!((part.rank(), part.world_size()), (usize::from(number < 2), 2), "rank {number}");
            assert_eq!(sum(&part, number), if color == 0 { 4 } else { 6 });
            // The first communicator still works, and the parts outlive it.
            assert_eq!(sum(&comm, number), 15);
            drop(comm);
            assert_eq!(sum(&part, number), if color == 0 { 4 } else { 6 });
            let alone = part.split(number as i32, 0).expect("both ranks split").expect("a color");
            assert_eq!((alone.world_size(), sum(&alone, number)), (1, number as u32 + 1));
        });
    }
}

#[test]
fn equal_keys_keep_the_order_and_one_color_keeps_all_ranks() {
    for &world in World::enabled() {
        spawn(&Setup::new(world, 3), |comm| {
            let all = comm.split(i32::MAX, 7).expect("all ranks split").expect("a color");
            assert_eq!((all.rank(), all.world_size()), (comm.rank(), 3));
            assert_eq!(sum(&all, comm.rank()), 6);
            assert!(comm.split(Communicator::NO_COLOR, 0).expect("all ranks split").is_none());
        });
    }
}

#[test]
fn a_shrunk_communicator_is_split_and_a_part_is_shrunk() {
    for &world in World::enabled() {
        spawn(&Setup::new(world, 4), |comm| {
            let number = comm.rank();
            if number == 0 {
                return;
            }
            let rest = comm.shrink(&[0]).expect("three ranks agree");
            let part = rest.split(i32::from(number == 3), 0).expect("all ranks split").expect("a color");
            assert_eq!(sum(&part, number), if number == 3 { 4 } else { 5 });
            if number == 2 {
                let alone = part.shrink(&[0]).expect("a rank alone");
                assert_eq!((alone.world_size(), sum(&alone, number)), (1, 3));
            }
        });
    }
}

#[test]
fn a_failed_communicator_and_a_bad_color_are_refused() {
    for &world in World::enabled() {
        let summed = Barrier::new(2);
        spawn(&Setup::new(world, 2), |comm| {
            assert_eq!(comm.split(-2, 0).expect_err("no color").kind(), ErrorKind::InvalidArgument);
            assert_eq!(sum(&comm, comm.rank()), 3);
            summed.wait();
            comm.abort();
            assert_eq!(comm.split(0, 0).expect_err("it was aborted").kind(), ErrorKind::Aborted);
        });
    }
}

#[test]
fn threads_do_not_wait_for_a_rank_that_has_left_to_split() {
    if !World::Local.is_enabled() {
        return;
    }
    spawn(&Setup::new(World::Local, 3), |comm| {
        if comm.rank() == 2 {
            return;
        }
        let error = comm.split(0, 0).expect_err("rank 2 has left");
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        assert!(error.message().contains("has left without this split"), "{error}");
    });
}
