//! Measures planning: FlexReduce for clusters of up to 100,000 ranks, and the lowering of one rank's program.
//!
//!     cargo bench --bench planning

use flexring_core::config::Lowering;
use flexring_plan::lowering::{Plan, ProgramSpec};
use flexring_plan::planner::{flexreduce, weighted};
use flexring_plan::test_util::cluster;
use flexring_plan::topology::{Topology, TopologyBuilder, Uplink};
use std::time::Instant;

/// Nodes of 7 and 8 ranks at one switch.
fn flat(ranks: usize) -> Topology {
    let mut builder = TopologyBuilder::new("switch");
    let (mut rank, mut number) = (0, 0);
    while rank < ranks {
        let node = builder.node(0, &format!("node {number}"), Uplink::NODE_DEFAULT);
        for _ in 0..7 + number % 2 {
            builder.rank(node, rank, Uplink::RANK_DEFAULT);
            rank += 1;
        }
        number += 1;
    }
    builder.finish().expect("every rank is on one node")
}

/// The shortest of five runs, in milliseconds.
fn shortest<T>(mut work: impl FnMut() -> T) -> f64 {
    let mut time = || {
        let start = Instant::now();
        std::hint::black_box(work());
        start.elapsed().as_secs_f64() * 1e3
    };
    (0..5).map(|_| time()).fold(f64::INFINITY, f64::min)
}

fn main() {
    println!(
        "{:>22} {:>8} {:>12} {:>12} {:>12} {:>14}",
        "topology", "ranks", "flexreduce", "weighted", "patterns", "one program"
    );
    for (name, topology) in [
        ("nodes at one switch", flat(10_000)),
        ("pods, racks, nodes", cluster(10_000)),
        ("nodes at one switch", flat(100_000)),
        ("pods, racks, nodes", cluster(100_000)),
    ] {
        let plan = shortest(|| flexreduce::plan(&topology));
        let weighed = shortest(|| weighted::plan(&topology));
        let schedule = flexreduce::plan(&topology).expect("regular enough");
        let lowered = Plan::on(schedule.clone(), &topology, Lowering::Auto);
        let patterns = shortest(|| Plan::on(schedule.clone(), &topology, Lowering::Auto));
        let rank = topology.world() / 2;
        let program = shortest(|| lowered.program(rank, ProgramSpec::ALL_REDUCE));
        let steps = lowered.program(rank, ProgramSpec::ALL_REDUCE).steps.len();
        println!(
            "{name:>22} {:>8} {plan:>9.1} ms {weighed:>9.1} ms {patterns:>9.1} ms {program:>9.2} ms for {steps} steps",
            topology.world()
        );
    }
}
