//! Memory that users register becomes memory that the ranks of a node share, and is theirs again afterwards.

use crate::harness::{Rank, Setup, World, spawn};
use flexring::{Operation, ReduceOp};
use flexring_core::config::Switch;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

const COUNT: usize = 50_000;

/// Whether the page of an element belongs to an arena.
fn is_shared<T>(at: &T) -> bool {
    is_shared_at(std::ptr::from_ref(at).addr())
}

/// Whether the page at an address belongs to an arena.
fn is_shared_at(address: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the kernel lists mappings");
    maps.lines().any(|line| {
        let (start, rest) = line.split_once('-').expect("a range");
        let (end, _) = rest.split_once(' ').expect("a range");
        let number = |text| usize::from_str_radix(text, 16).expect("an address");
        (number(start)..number(end)).contains(&address) && line.contains("memfd:flexring")
    })
}

/// Whether ranks share memory with others.
fn shares(comm: &Rank) -> bool {
    comm.summary().contains(" shm to ") || comm.summary().contains(" local to ")
}

/// An element of a rank's vector. Sums show which rank is missing.
fn value(at: usize, rank: usize) -> i64 {
    (1 + at as i64 % 100) << (8 * rank)
}

fn fill(vector: &mut [i64], rank: usize) {
    vector.iter_mut().enumerate().for_each(|(at, element)| *element = value(at, rank));
}

fn sum(at: usize, world: usize) -> i64 {
    (0..world).map(|rank| value(at, rank)).sum()
}

#[test]
fn any_part_of_a_registered_vector_is_reduced_and_no_byte_beside_it_changes() {
    for &world in World::enabled().iter().filter(|world| !world.is_gpu()) {
        spawn(&Setup::new(world, 3), |comm| {
            let rank = comm.rank();
            let mut vector = vec![0i64; COUNT];
            // Each rank has the same part at another place.
            let before = 1 + rank;
            let parts =
                [(0, 1), (0, 600), (3, 40_000), (511, 512), (600, 30_000), (49_000, 49_997), (0, 49_997)];
            for (from, to) in parts {
                fill(&mut vector, rank);
                // Ranks need not agree on what they register.
                if rank == 2 {
                    comm.all_reduce(&mut vector[before..][from..to], ReduceOp::Sum).expect("a sum");
                } else {
                    let mut registered = comm.register(vector).expect("lockable memory");
                    assert_eq!(is_shared(&registered[COUNT / 2]), shares(&comm), "{}", comm.summary());
                    comm.all_reduce(&mut registered[before..][from..to], ReduceOp::Sum).expect("a sum");
                    vector = registered.into_vec();
                }
                for (at, element) in vector.iter().enumerate() {
                    let part = at.wrapping_sub(before);
                    let reduced = || (0..3).map(|rank| value(part + 1 + rank, rank)).sum::<i64>();
                    let wanted = if (from..to).contains(&part) { reduced() } else { value(at, rank) };
                    assert_eq!(*element, wanted, "{world:?}: rank {rank}, {from}..{to}: {at}");
                }
                assert!(!is_shared(&vector[COUNT / 2]));
            }
        });
    }
}

#[test]
fn all_kinds_of_calls_use_registered_vectors() {
    for &world in World::enabled().iter().filter(|world| !world.is_gpu()) {
        spawn(&Setup::new(world, 2), |comm| {
            let (rank, other) = (comm.rank(), 1 - comm.rank());
            let mut send = comm.register(vec![0i64; COUNT]).expect("lockable memory");
            let mut receive = comm.register(vec![0i64; COUNT]).expect("lockable memory");
            let half = COUNT / 2;
            fill(&mut send, rank);
            comm.all_reduce_into(&send, &mut receive, ReduceOp::Sum).expect("a sum");
            assert!((0..COUNT).all(|at| receive[at] == sum(at, 2)));
            comm.reduce_scatter(&send, &mut receive[3..half + 3], ReduceOp::Sum).expect("a part");
            assert!((0..half).all(|at| receive[3 + at] == sum(rank * half + at, 2)));
            comm.all_gather(&send[..half], &mut receive).expect("all parts");
            assert!((0..COUNT).all(|at| receive[at] == value(at % half, at / half)));
            receive.fill(7);
            let messages =
                [Operation::send(&send[1..half], other), Operation::recv(&mut receive[2..=half], other)];
            comm.group(messages).expect("a message");
            assert!((1..half).all(|at| receive[at + 1] == value(at, other)));
            assert_eq!((receive[1], receive[half + 1]), (7, 7));
            comm.all_gather_in_place(&mut send).expect("all parts");
            assert!((0..COUNT).all(|at| send[at] == value(at, at / half)));
            comm.broadcast(&mut receive, 1).expect("a vector");
            // Rank 1 has received what rank 0 sent.
            assert!((1..half).all(|at| receive[at + 1] == value(at, 0)));
        });
    }
}

#[test]
fn vectors_are_registered_again_and_short_ones_stay_private() {
    if !World::Shm.is_enabled() {
        return;
    }
    spawn(&Setup::new(World::Shm, 2), |comm| {
        let mut vector = vec![1i64; COUNT];
        let address = vector.as_ptr();
        for round in 1..4 {
            let mut registered = comm.register(vector).expect("memory");
            assert!(is_shared(&registered[20_000]));
            comm.all_reduce(&mut registered[100..40_000], ReduceOp::Sum).expect("a sum");
            vector = registered.into_vec();
            assert_eq!(vector.as_ptr(), address);
            assert!(!is_shared(&vector[20_000]));
            let sum = |at| if (100..40_000).contains(&at) { 1 << round } else { 1 };
            assert!((0..COUNT).all(|at| vector[at] == sum(at)));
        }
        // Too short to be worth it.
        let short = comm.register(vec![1i64; 4000]).expect("memory");
        assert!(!is_shared(&short[2000]));
        let empty = comm.register(Vec::<i64>::new()).expect("memory");
        assert!(empty.into_vec().is_empty());
    });
}

#[test]
fn the_setting_and_ranks_alone_on_their_node_leave_memory_private() {
    if !World::Shm.is_enabled() {
        return;
    }
    let mut setup = Setup::new(World::Shm, 2);
    setup.config.register_shared = Switch(false);
    for (setup, ranks) in [(setup, 2), (Setup::new(World::Shm, 1), 1)] {
        spawn(&setup, |comm| {
            let mut registered = comm.register(vec![1i64; COUNT]).expect("memory");
            assert!(!is_shared(&registered[COUNT / 2]));
            comm.all_reduce(&mut registered, ReduceOp::Sum).expect("a sum");
            assert!(registered.iter().all(|element| *element == ranks));
        });
    }
}

#[test]
fn contents_survive_a_communicator_that_has_failed() {
    if !World::Shm.is_enabled() {
        return;
    }
    spawn(&Setup::new(World::Shm, 2), |comm| {
        let mut registered = comm.register(vec![5i64; COUNT]).expect("memory");
        if comm.rank() == 0 {
            comm.abort();
        }
        comm.all_reduce(&mut registered[..100], ReduceOp::Sum).expect_err("rank 0 has aborted");
        let vector = registered.into_vec();
        assert!(!is_shared(&vector[COUNT / 2]));
        assert!(vector[100..].iter().all(|element| *element == 5));
    });
}

#[test]
fn a_forgotten_guard_leaks_the_vector_and_disturbs_no_other_memory() {
    if !World::Shm.is_enabled() {
        return;
    }
    let sums = |comm: &Rank, vector: &mut [i64]| {
        fill(vector, comm.rank());
        comm.all_reduce(vector, ReduceOp::Sum).expect("a sum");
        assert!((0..vector.len()).all(|at| vector[at] == sum(at, 2)));
    };
    spawn(&Setup::new(World::Shm, 2), |comm| {
        let mut registered = comm.register(vec![0i64; COUNT]).expect("memory");
        sums(&comm, &mut registered);
        let leaked = std::ptr::from_ref(&registered[COUNT / 2]).addr();
        assert!(is_shared_at(leaked));
        std::mem::forget(registered);
        // If the memory had been freed, the allocator would use it again here.
        let mut others: Vec<Vec<i64>> = (0..4).map(|_| vec![0; COUNT]).collect();
        assert!(!others.iter().any(|other| is_shared(&other[COUNT / 2])));
        others.iter_mut().for_each(|other| sums(&comm, other));
        drop(comm);
        assert!(!is_shared_at(leaked));
        assert!(others.iter().all(|other| (0..COUNT).all(|at| other[at] == sum(at, 2))));
    });
}

#[test]
fn a_panic_ends_the_registration() {
    if !World::Shm.is_enabled() {
        return;
    }
    spawn(&Setup::new(World::Shm, 2), |comm| {
        let address = AtomicUsize::new(0);
        let panics = || {
            let registered = comm.register(vec![0i64; COUNT]).expect("memory");
            address.store(std::ptr::from_ref(&registered[COUNT / 2]).addr(), Ordering::Relaxed);
            panic!("a test wants a panic");
        };
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
        assert!(!is_shared_at(address.into_inner()));
        comm.barrier().expect("all ranks");
    });
}
