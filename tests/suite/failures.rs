//! Failures: every rank soon gets an error that names the rank and the cause, and the communicator can still
//! be dropped.

use crate::harness::{
    Rank, Setup, World, join, kill_self_soon, only_failed, reduce_until_failure, spawn, spawn_processes,
    test_name, with_watchdog,
};
use flexring::internal::bootstrap::Coordinator;
use flexring::{Communicator, Error, ErrorKind, Identity, ReduceOp};
use flexring_core::config::{Lowering, Size};
use flexring_plan::lowering::Plan;
use flexring_plan::planner::tree;
use flexring_plan::topology::Topology;
use flexring_plan::verifier::VerifiedPlan;
use std::sync::{Barrier, OnceLock};
use std::time::{Duration, Instant};

/// Makes a call that must fail, and returns its error.
fn failed_call(comm: &Rank, count: usize, op: ReduceOp) -> Error {
    comm.all_reduce(&mut vec![1f32; count], op).expect_err("the call must fail")
}

#[test]
fn different_calls_are_disagreements_that_name_the_rank() {
    // Small and small, large and large, small and large, empty and not empty.
    for &world in World::enabled() {
        for (usual, other) in [(3, 4), (5000, 5001), (3, 50_000), (0, 7000), (0, 1)] {
            let setup = Setup::new(world, 4);
            // A disagreement ends the communicator, so all ranks must have left the first call by then.
            let all = Barrier::new(setup.ranks);
            let errors = spawn(&setup, |comm| {
                comm.all_reduce(&mut [1f32; 8], ReduceOp::Sum).expect("the first call is equal on all ranks");
                all.wait();
                let begun = Instant::now();
                let error = failed_call(&comm, if comm.rank() == 2 { other } else { usual }, ReduceOp::Sum);
                assert!(
                    begun.elapsed() < Duration::from_secs(10),
                    "{world:?}: it took {:?}",
                    begun.elapsed()
                );
                error
            });
            for error in &errors {
                assert_eq!(error.kind(), ErrorKind::Disagreement, "{world:?} {usual} {other}: {error}");
                assert!(error.message().contains("rank 2"), "{world:?}: {error}");
                assert!(error.message().contains(&format!("{other} x float")), "{world:?}: {error}");
            }
        }
    }
}

#[test]
fn different_operations_or_types_are_disagreements() {
    for &world in World::enabled() {
        let mut setup = Setup::new(world, 3);
        setup.config.threads = 2;
        let errors = spawn(&setup, |comm| {
            if comm.rank() == 1 {
                failed_call(&comm, 1000, ReduceOp::Max)
            } else {
                failed_call(&comm, 1000, ReduceOp::Sum)
            }
        });
        for error in &errors {
            assert!(error.message().contains("max") && error.message().contains("sum"), "{error}");
        }
        let errors = spawn(&Setup::new(world, 3), |comm| {
            if comm.rank() == 1 {
                comm.all_reduce(&mut vec![1i32; 1000], ReduceOp::Sum).expect_err("the call must fail")
            } else {
                failed_call(&comm, 1000, ReduceOp::Sum)
            }
        });
        for error in &errors {
            assert!(error.message().contains("int32") && error.message().contains("float"), "{error}");
        }
    }
}

#[test]
fn different_plans_are_disagreements() {
    for &world in World::enabled() {
        for count in [3, 5000] {
            let all = Barrier::new(4);
            let errors = spawn(&Setup::new(world, 4), |comm| {
                let topology = Topology::from_names(&["one"; 4]);
                let schedule = if comm.rank() == 2 { tree::star(&topology) } else { tree::binary(&topology) };
                let plan = Plan::on(schedule, &topology, Lowering::Direct);
                comm.use_plan(&VerifiedPlan::new(plan).expect("a good plan")).expect("for four ranks");
                all.wait();
                failed_call(&comm, count, ReduceOp::Sum)
            });
            for error in &errors {
                assert_eq!(error.kind(), ErrorKind::Disagreement, "{world:?}: {error}");
                assert!(error.message().contains("different programs"), "{world:?}: {error}");
            }
        }
    }
}

#[test]
fn a_failed_communicator_rejects_calls_and_can_be_dropped() {
    for &world in World::enabled() {
        spawn(&Setup::new(world, 3), |comm| {
            let first = failed_call(&comm, if comm.rank() == 0 { 10 } else { 11 }, ReduceOp::Sum);
            for _ in 0..3 {
                let again = failed_call(&comm, 10, ReduceOp::Sum);
                assert_eq!(again.kind(), ErrorKind::Aborted);
                assert!(again.message().contains(first.message()), "{again} does not give the cause");
            }
            let request = comm.all_reduce_async(vec![1f32; 10], ReduceOp::Sum).expect("a request");
            assert!(request.wait().is_err());
        });
    }
}

#[test]
fn abort_from_another_thread_ends_every_call_at_once() {
    for &world in World::enabled() {
        for count in [2, 100_000] {
            spawn(&Setup::new(world, 3), |comm| {
                std::thread::scope(|scope| {
                    if comm.rank() == 2 {
                        // This rank makes no call; it aborts the world.
                        std::thread::sleep(Duration::from_millis(50));
                        let begun = Instant::now();
                        comm.abort();
                        assert!(begun.elapsed() < Duration::from_secs(5));
                        // The other ranks must receive the abort before this rank leaves.
                        std::thread::sleep(Duration::from_millis(300));
                    } else {
                        let caller = scope.spawn(|| failed_call(&comm, count, ReduceOp::Sum));
                        let error = caller.join().expect("no panic");
                        assert_eq!(error.kind(), ErrorKind::Aborted, "{world:?}: {error}");
                        assert!(error.message().contains("rank 2"), "{error}");
                    }
                });
            });
        }
    }
}

#[test]
fn a_rank_that_never_calls_is_named_at_the_deadline() {
    for &world in World::enabled() {
        for count in [2, 100_000] {
            let mut setup = Setup::new(world, 3);
            setup.config.timeout = Duration::from_secs(3);
            let barrier = Barrier::new(3);
            let errors = spawn(&setup, |comm| {
                comm.all_reduce(&mut [1f32; 8], ReduceOp::Sum).expect("all ranks make the first call");
                let error = (comm.rank() != 1).then(|| failed_call(&comm, count, ReduceOp::Sum));
                // Rank 1 does not leave before.
                barrier.wait();
                error
            });
            for error in errors.iter().flatten() {
                assert_eq!(error.kind(), ErrorKind::Timeout, "{world:?}: {error}");
                assert!(error.message().contains("rank 1"), "{world:?}: {error}");
                if world.is_gpu() {
                    // Here ranks are threads that wait to launch together, and have not entered the call.
                    continue;
                }
                // The table of all ranks.
                let rows: Vec<&str> = error.message().lines().skip(1).collect();
                assert_eq!(rows.len(), 1 + 3, "{world:?}: {error}");
                assert!(
                    rows[1].contains("all_reduce #2") && rows[1].ends_with("rank 1"),
                    "{world:?}: {error}"
                );
                assert!(rows[2].contains("#1") && rows[2].contains("idle"), "{world:?}: {error}");
            }
        }
    }
}

#[test]
fn times_without_limit_are_accepted() {
    for &world in World::enabled() {
        let mut setup = Setup::new(world, 2);
        let config = &mut setup.config;
        for time in [&mut config.timeout, &mut config.connect_timeout, &mut config.heartbeat] {
            *time = Duration::MAX;
        }
        spawn(&setup, |comm| {
            let mut vector = vec![1i32; 50_000];
            comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
            assert!(vector.iter().all(|sum| *sum == 2));
            comm.split(0, 0).expect("a communicator").expect("a member").barrier().expect("a barrier");
        });
    }
}

#[test]
fn a_rank_that_leaves_early_fails_the_others_at_once() {
    for &world in World::enabled() {
        // The others are in the next call before the rank leaves, or make it afterwards; by mailboxes or by a
        // program.
        for (wait_to_leave, wait_to_call, count) in
            [(300, 0, 100_000), (0, 300, 100_000), (300, 0, 2), (0, 300, 2)]
        {
            let mut setup = Setup::new(world, 3);
            setup.config.timeout = Duration::from_secs(50);
            // The first call may compile kernels for GPUs.
            let started = OnceLock::new();
            let errors = spawn(&setup, |comm| {
                comm.all_reduce(&mut [1f32; 8], ReduceOp::Sum).expect("all ranks make the first call");
                started.get_or_init(Instant::now);
                if comm.rank() == 1 {
                    std::thread::sleep(Duration::from_millis(wait_to_leave));
                    return None;
                }
                std::thread::sleep(Duration::from_millis(wait_to_call));
                let begun = Instant::now();
                Some((failed_call(&comm, count, ReduceOp::Sum), begun.elapsed()))
            });
            for (error, time) in errors.iter().flatten() {
                assert!(*time < Duration::from_secs(10), "{world:?}: it took {time:?}: {error}");
                assert_eq!(error.kind(), ErrorKind::PeerLost, "{world:?}: {error}");
                for text in ["rank 1", "left after call #1", "is in all_reduce #2"] {
                    assert!(error.message().contains(text), "{world:?}: {error}");
                }
            }
            let elapsed = started.get().expect("a first call").elapsed();
            assert!(elapsed < Duration::from_secs(40), "{world:?}: {elapsed:?}");
        }
    }
}

/// Three processes reduce until rank 1 is killed; the others must end with an error that names it.
fn survivors_name_the_killed_rank(test: &str, world: World) {
    if !world.is_enabled() {
        return;
    }
    let name = test_name(module_path!(), test);
    let outputs = spawn_processes(&name, &Setup::new(world, 3), |comm| {
        comm.all_reduce(&mut [1f32; 8], ReduceOp::Sum).expect("all ranks make the first call");
        if comm.rank() == 1 {
            kill_self_soon();
        }
        let error = reduce_until_failure(&comm);
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        assert!(error.message().contains("rank 1 (pid"), "{error}");
    });
    only_failed(1, world, &outputs);
}

#[test]
fn processes_that_share_memory_name_a_killed_rank() {
    survivors_name_the_killed_rank("processes_that_share_memory_name_a_killed_rank", World::Shm);
}

#[test]
fn processes_that_use_tcp_name_a_killed_rank() {
    survivors_name_the_killed_rank("processes_that_use_tcp_name_a_killed_rank", World::Tcp);
}

#[test]
fn processes_that_use_rdma_name_a_killed_rank() {
    survivors_name_the_killed_rank("processes_that_use_rdma_name_a_killed_rank", World::Verbs);
}

#[test]
fn processes_on_gpus_name_a_killed_rank() {
    survivors_name_the_killed_rank("processes_on_gpus_name_a_killed_rank", World::Gpu);
}

#[test]
fn processes_on_gpus_that_use_tcp_name_a_killed_rank() {
    survivors_name_the_killed_rank("processes_on_gpus_that_use_tcp_name_a_killed_rank", World::GpuTcp);
}

#[test]
fn different_settings_fail_the_rendezvous() {
    with_watchdog(Duration::from_secs(30), || {
        let setup = Setup::new(World::Shm, 3);
        let (_coordinator, id) = Coordinator::create(&setup.config).expect("a coordinator");
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..3)
                .map(|rank| {
                    let mut config = setup.config_of(rank);
                    let identity = Identity::from_unique_id(3, &id, rank).expect("an identity");
                    if rank == 2 {
                        config.subchunk = Size(8192);
                    }
                    scope.spawn(move || join(&config, &identity).expect_err("the rendezvous must fail"))
                })
                .collect();
            for rank in ranks {
                let error = rank.join().expect("no panic");
                assert_eq!(error.kind(), ErrorKind::Disagreement, "{error}");
                assert!(
                    error.message().contains("rank 2") && error.message().contains("FLEXRING_SUBCHUNK"),
                    "{error}"
                );
            }
        });
    });
}

#[test]
fn invalid_requests_are_rejected_with_a_reason() {
    spawn(&Setup::new(World::Local, 1), |comm| {
        let error = comm.alloc::<f64>(usize::MAX / 4).expect_err("no machine has that much memory");
        assert!(error.message().contains("elements") || error.message().contains("bytes"), "{error}");
        let error =
            comm.all_reduce_into(&[1f32; 3], &mut [1f32; 4], ReduceOp::Sum).expect_err("lengths differ");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let error = comm.all_reduce(&mut [1i8], ReduceOp::PreMulSum(0.5)).expect_err("not an integer factor");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        comm.all_reduce(&mut [1i8], ReduceOp::Sum).expect("the communicator works after a rejected call");
    });
    assert_eq!(Communicator::local(0).expect_err("no ranks").kind(), ErrorKind::InvalidArgument);
}
