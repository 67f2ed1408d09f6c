//! Many communicators of one process: each further one among the same processes takes little memory, and no
//! thread or descriptor.

use crate::harness::test_name;
use crate::rank_processes::check_ranks;
use flexring::{Communicator, ReduceOp, UniqueId, create_unique_id};
use flexring_core::config::Config;
use rustix::process::{Resource, Rlimit, setrlimit};
use std::time::{Duration, Instant};

const RANKS: usize = 4;
/// Communicators that are measured.
const MANY: usize = 100;

/// Resources of this process.
#[derive(Clone, Copy, Debug)]
struct Resources {
    descriptors: usize,
    threads: usize,
    /// Kilobytes of memory, of which shared pages count in parts.
    memory: usize,
}

impl Resources {
    fn now() -> Self {
        let entries = |folder: &str| std::fs::read_dir(folder).expect("the kernel lists them").count();
        let smaps = std::fs::read_to_string("/proc/self/smaps_rollup").expect("the kernel sums it up");
        let pss = smaps.lines().find_map(|line| line.strip_prefix("Pss:")).expect("a sum");
        Self {
            descriptors: entries("/proc/self/fd"),
            threads: entries("/proc/self/task"),
            memory: pss.trim().trim_end_matches(" kB").parse().expect("a number"),
        }
    }
}

/// The resources of this process, once they are not more than `before`, or after a while.
fn settled(before: Resources) -> Resources {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let now = Resources::now();
        let is_more = now.descriptors > before.descriptors || now.threads > before.threads;
        if !is_more || Instant::now() > deadline {
            return now;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs `body` in `RANKS` processes, and checks that all of them succeed. `test` is the name of the calling
/// test.
fn in_processes(test: &str, body: impl FnOnce(Communicator)) {
    check_ranks(test, RANKS, || body(Communicator::from_env().expect("a communicator")));
}

/// Sums vectors that go through mailboxes and through the pool, and one in the background.
fn check_sums(comm: &Communicator) {
    let world = comm.world_size() as u32;
    for len in [3, 30_000] {
        let mut vector = vec![comm.rank() as u32 + 1; len];
        comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
        assert!(vector.iter().all(|element| *element == world * (world + 1) / 2));
    }
    let request = comm.all_reduce_async(vec![1u32; 30_000], ReduceOp::Sum).expect("a request");
    assert!(request.wait().expect("a sum").iter().all(|element| *element == world));
}

#[test]
fn a_further_communicator_takes_little_memory_and_no_thread_or_descriptor() {
    let test =
        test_name(module_path!(), "a_further_communicator_takes_little_memory_and_no_thread_or_descriptor");
    in_processes(&test, |base| {
        check_sums(&base);
        let split = || base.split(0, 0).expect("all ranks split").expect("a color");
        let first = split();
        check_sums(&first);
        let before = Resources::now();
        let started = Instant::now();
        let many: Vec<Communicator> = (0..MANY).map(|_| split()).collect();
        let each = started.elapsed() / MANY as u32;
        let unused = Resources::now();
        many.iter().for_each(check_sums);
        let used = Resources::now();
        println!("# each of {MANY} took {each:?}; before {before:?}, made {unused:?}, used {used:?}");
        for after in [unused, used] {
            assert!(after.descriptors <= before.descriptors, "{before:?} {after:?}");
            // A worker that ends a call may not count as free yet when the next one starts, which then gets
            // another one.
            assert!(after.threads <= before.threads + MANY / 10, "{before:?} {after:?}");
        }
        assert!(unused.memory <= before.memory + MANY * 2048, "{before:?} {unused:?}");
        drop(many);
        check_sums(&first);
        check_sums(&base);
    });
}

#[test]
fn a_process_has_1024_communicators() {
    let test = test_name(module_path!(), "a_process_has_1024_communicators");
    check_ranks(&test, 2, || {
        let base = Communicator::from_env().expect("a communicator");
        let many: Vec<Communicator> = (1..1024)
            .map(|number| match base.split(0, 0) {
                Ok(part) => part.expect("a color"),
                Err(error) => panic!("communicator {number}: {error}"),
            })
            .collect();
        let error = base.split(0, 0).expect_err("that many share memory");
        assert!(error.message().contains("1024 communicators that share memory"), "{error}");
        many.iter().rev().step_by(64).for_each(check_sums);
    });
}

#[test]
fn a_process_with_4_gib_of_addresses_has_100_communicators() {
    let test = test_name(module_path!(), "a_process_with_4_gib_of_addresses_has_100_communicators");
    check_ranks(&test, 2, || {
        let limit = Some(4 << 30);
        setrlimit(Resource::As, Rlimit { current: limit, maximum: limit }).expect("a lower limit");
        let base = Communicator::from_env().expect("a communicator");
        let mut vector = base.alloc::<u32>(64 << 20).expect("a sixteenth of the addresses");
        let many: Vec<Communicator> =
            (0..100).map(|_| base.split(0, 0).expect("all ranks split").expect("a color")).collect();
        many.iter().for_each(check_sums);
        vector[0] = base.rank() as u32;
        base.all_reduce(&mut vector[..1000], ReduceOp::Sum).expect("a sum");
        assert_eq!(vector[0], 1);
        let error = base.alloc::<u8>(4 << 30).expect_err("more than there are addresses");
        assert!(error.message().contains("ulimit -v"), "{error}");
    });
}

#[test]
fn communicators_of_unique_ids_and_of_parts_share_what_their_ranks_have() {
    let test =
        test_name(module_path!(), "communicators_of_unique_ids_and_of_parts_share_what_their_ranks_have");
    in_processes(&test, |base| {
        // Ranks 2 and 3 have no coordinator among them until their first communicator.
        let half = base.split((base.rank() / 2) as i32, 0).expect("all ranks split").expect("a color");
        check_sums(&half);
        let by_id = || {
            let mut id = [0; UniqueId::SIZE];
            if half.rank() == 0 {
                id = *create_unique_id(&Config::default()).expect("an id").as_bytes();
            }
            half.broadcast(&mut id, 0).expect("the id");
            let id = UniqueId::from_bytes(&id).expect("an id");
            Communicator::from_unique_id(half.world_size(), &id, half.rank()).expect("both ranks join")
        };
        let first = by_id();
        check_sums(&first);
        let before = Resources::now();
        let many: Vec<Communicator> = (0..20).map(|_| by_id()).collect();
        many.iter().for_each(check_sums);
        let after = settled(before);
        assert!(after.descriptors <= before.descriptors, "{before:?} {after:?}");
        assert!(after.threads <= before.threads + 3, "{before:?} {after:?}");
        println!("# before {before:?}, after {after:?}");
    });
}

#[test]
fn parts_of_a_world_work_while_others_are_made_and_dropped() {
    let test = test_name(module_path!(), "parts_of_a_world_work_while_others_are_made_and_dropped");
    in_processes(&test, |base| {
        let half = (base.rank() / 2) as i32;
        let kept = base.split(half, 0).expect("all ranks split").expect("a color");
        for round in 0..12 {
            let color = if round % 3 == 0 { half } else { (base.rank() % 2) as i32 };
            let part = base.split(color, -round).expect("all ranks split").expect("a color");
            check_sums(&part);
            let again = part.split(0, 0).expect("all ranks split").expect("a color");
            drop(part);
            check_sums(&again);
            check_sums(&kept);
        }
        // The first communicator goes before those that use its memory.
        drop(base);
        check_sums(&kept);
        let last = kept.split(0, 0).expect("all ranks split").expect("a color");
        drop(kept);
        check_sums(&last);
    });
}

#[test]
fn threads_use_communicators_in_different_orders() {
    let test = test_name(module_path!(), "threads_use_communicators_in_different_orders");
    in_processes(&test, |base| {
        let parts: Vec<Communicator> =
            (0..6).map(|_| base.split(0, 0).expect("all ranks split").expect("a color")).collect();
        // More threads than a process has eventfds to sleep on.
        std::thread::scope(|scope| {
            for part in &parts {
                scope.spawn(|| (0..40).for_each(|_| check_sums(part)));
            }
        });
        // One thread: calls in the background, which each rank begins and waits for in another order.
        let order: Vec<usize> = (0..parts.len()).map(|at| (at * 5 + base.rank() * 2) % parts.len()).collect();
        let begin = |at: &usize| parts[*at].all_reduce_async(vec![*at as u32; 5000], ReduceOp::Sum);
        let requests: Vec<_> = order.iter().map(begin).collect();
        for (at, request) in order.iter().zip(requests).rev() {
            let sum = request.expect("a request").wait().expect("a sum");
            assert!(sum.iter().all(|element| *element == *at as u32 * RANKS as u32));
        }
    });
}
