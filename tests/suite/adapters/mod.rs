//! The command over adapters that are in memory, which do what real ones do and Soft-RoCE never does.

#[allow(dead_code, reason = "the library's tests use more of it")]
#[path = "../../../src/transport/verbs/inventory/fake.rs"]
mod fake;
mod lab;

use fake::{FakeMachine, FakePort, INFINIBAND};
use lab::{Node, job};

/// A node with this many InfiniBand adapters, each at a PCI switch of its own.
fn infiniband(adapters: usize) -> FakeMachine {
    let machine = FakeMachine::new();
    for number in 0..adapters {
        let slot = format!("pci0000:{number}0/0000:{number}0:00.0/0000:{number}1:00.0");
        machine.hca(&format!("mlx5_{number}"), &slot, 0, &[FakePort { ..INFINIBAND }]);
    }
    machine
}

#[test]
fn good_adapters_carry_the_right_sums() {
    for (adapters, ranks) in [(1, 1), (3, 2)] {
        let nodes = [0, 1].map(|_| Node::new(infiniband(adapters), ranks).set("FLEXRING_TRANSPORT", "verbs"));
        let Some(job) = job(&nodes, "perf -b 8 -e 4M -f 64 -w 1 -n 3") else { return };
        job.sums_are_right();
    }
}
