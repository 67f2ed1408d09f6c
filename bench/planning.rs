//! Measures planning in processor time: FlexReduce for clusters of up to 100,000 ranks with the lowering of
//! one rank's program, what `auto` calculates for clusters of more than 64 ranks, and forests of graphs.
//!
//!     cargo bench --bench planning

use flexring_core::config::{Config, Lowering};
use flexring_plan::lowering::{Plan, ProgramSpec};
use flexring_plan::planner::{flexreduce, forest, weighted};
use flexring_plan::sized_plans::selected;
use flexring_plan::test_fabrics::{hypercube, torus};
use flexring_plan::test_util::cluster;
use flexring_plan::topology::{Topology, TopologyBuilder, Uplink};
use flexring_plan::topology_file::{parse, parse_short};
use rustix::time::{ClockId, clock_gettime};

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

/// The shortest of five runs, in milliseconds of processor time.
fn shortest<T>(mut work: impl FnMut() -> T) -> f64 {
    let now = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 * 1e-6
    };
    let mut time = || {
        let start = now();
        std::hint::black_box(work());
        now() - start
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
    println!("\n{:>22} {:>8} {:>12}", "topology", "ranks", "auto");
    let short = |text: &str| parse_short(text).expect("short form").expect("valid");
    for (name, topology) in [
        ("1x128", short("1x128")),
        ("1x1024", short("1x1024")),
        ("8x128", short("8x128")),
        ("8x16x8", short("8x16x8")),
        ("nodes at one switch", flat(1_024)),
        ("pods, racks, nodes", cluster(1_024)),
    ] {
        let config = Config::default();
        let no_times = |_: &Topology, trials: &[_]| Ok(vec![None; trials.len()]);
        let auto = shortest(|| selected(&config, &topology, &mut { no_times }).expect("plans"));
        println!("{name:>22} {:>8} {auto:>9.1} ms", topology.world());
    }
    println!("\n{:>22} {:>8} {:>12}", "graph", "ranks", "forest");
    for (name, text) in [
        ("torus 8x8", torus(8, 8, "100G")),
        ("torus 16x16", torus(16, 16, "100G")),
        ("hypercube", hypercube(8)),
    ] {
        let read = || parse("fabric.toml", &text, None).expect("a fabric");
        let plan = shortest(|| forest::plan(&read()).expect("a graph"));
        println!("{name:>22} {:>8} {plan:>9.1} ms", read().world());
    }
}
