//! Many ranks on one node: they start, make calls and end, with little memory, address space and few
//! descriptors of each.

use crate::collectives::{Case, OPS};
use crate::harness::{Setup, World, share_a_core, spawn};
use crate::programs::{Ended, program, run, succeed};
use flexring::ReduceOp;
use flexring_core::call::Collective;
use flexring_core::config::Config;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// `flexring perf` under limits that `ulimit` sets.
fn perf(limits: &str, arguments: &str) -> Command {
    let mut shell = program("sh");
    let flexring = env!("CARGO_BIN_EXE_flexring");
    shell.args(["-c", &format!("{limits} exec {flexring} perf {arguments}")]);
    shell
}

#[test]
fn sixty_four_ranks_start_and_sum() {
    let text = succeed(&mut perf("", "--ranks 64 -b 8 -e 64K -f 8192 -n 2 -w 0"), LIMIT);
    assert!(text.contains("# Out of bounds values : 0 OK"), "{text}");
}

#[test]
fn ranks_start_where_address_space_is_limited() {
    let text = succeed(&mut perf("ulimit -v 2000000;", "--ranks 24 -b 8 -e 64K -f 8192 -n 2 -w 0"), LIMIT);
    assert!(text.contains("# Out of bounds values : 0 OK"), "{text}");
}

#[test]
fn the_soft_limit_of_descriptors_is_no_limit() {
    let text = succeed(&mut perf("ulimit -Sn 32;", "--ranks 20 -b 8 -e 8 -n 2 -w 0"), LIMIT);
    assert!(text.contains("# Out of bounds values : 0 OK"), "{text}");
}

#[test]
fn a_lack_of_descriptors_is_reported_with_its_fix() {
    let Ended { status, text } = run(&mut perf("ulimit -n 24;", "--ranks 20 -b 8 -e 8 -n 2 -w 0"), LIMIT);
    assert!(!status.success(), "24 descriptors are enough: {text}");
    assert!(text.contains("`ulimit -n`"), "{text}");
}

#[test]
fn results_are_correct_around_the_longest_vector_of_mailboxes() {
    share_a_core();
    for world in [World::Local, World::Shm].into_iter().filter(|world| world.is_enabled()) {
        for (ranks, longest) in [(2, 16 << 10), (3, 64 << 10), (9, 64 << 10)] {
            let mut setup = Setup::new(world, ranks);
            setup.config.mailbox = Config::default().mailbox;
            spawn(&setup, |comm| {
                let whole = longest / size_of::<i32>();
                let part = whole / ranks;
                for (collective, counts) in [
                    (Collective::AllReduce, [whole - 1, whole, whole + 1]),
                    (Collective::AllGather, [part - 1, part, part + 1]),
                    (Collective::AllToAll, [part - 1, part, part + 1]),
                ] {
                    for count in counts {
                        let case = Case {
                            collective,
                            op: ReduceOp::Sum,
                            root: 0,
                            count,
                            in_place: false,
                            pool: false,
                        };
                        // Both slots of the mailboxes.
                        (0..2).for_each(|_| case.check::<i32>(&comm));
                    }
                }
            });
        }
    }
}

/// On ranks that share a core, the leader makes the results of small calls for all.
#[test]
fn small_results_that_a_leader_makes_are_correct() {
    share_a_core();
    for world in [World::Local, World::Shm].into_iter().filter(|world| world.is_enabled()) {
        for ranks in [7, 9] {
            spawn(&Setup::new(world, ranks), |comm| {
                let mut turn = 0;
                for collective in Collective::ALL {
                    for (root, count) in [(0, 3), (ranks - 1, 1), (2, 6), (3, 0)] {
                        for op in OPS.into_iter().filter(|op| collective.reduces() || *op == ReduceOp::Sum) {
                            turn += 1;
                            Case { collective, op, root, count, in_place: turn % 2 == 0, pool: false }
                                .check::<i32>(&comm);
                        }
                    }
                }
            });
        }
    }
}
