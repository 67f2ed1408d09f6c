//! Forests on fabrics that are no trees: proved, and simulated beside the least time of any schedule.

use flexring_core::config::Lowering;
use flexring_plan::lowering::{Plan, ProgramSpec};
use flexring_plan::planner::forest;
use flexring_plan::test_fabrics;
use flexring_plan::topology::Topology;
use flexring_plan::topology_file::parse;
use flexring_plan::traffic::Traffic;
use flexring_plan::verifier::VerifiedPlan;
use flexring_simulator::cost_model::lower_bound::lower_bound;
use flexring_simulator::simulator::{SimulationInput, SimulationParameters, simulate};

fn planned(text: &str) -> (Topology, Plan) {
    let topology = parse("fabric.toml", text, None).expect("a fabric");
    let plan = Plan::on(forest::plan(&topology).expect("a graph"), &topology, Lowering::Auto);
    (topology, plan)
}

/// Memory is fast, so that links determine the time.
const PARAMETERS: SimulationParameters =
    SimulationParameters { memory_bandwidth: 1_000_000_000_000, ..SimulationParameters::DEFAULT };

#[test]
fn forests_are_proved_and_take_the_least_time_within_five_percent() {
    let bytes = 256 << 20;
    for (name, text) in test_fabrics::all() {
        let (topology, plan) = planned(&text);
        VerifiedPlan::for_all(plan.clone()).expect(name);
        let bound = lower_bound(&topology).expect("several ranks").seconds_per_byte * bytes as f64;
        let run = simulate(&plan, &topology, SimulationInput::new(bytes), &PARAMETERS, &mut |_, _| {});
        let ratio = run.expect("it can be simulated").seconds() / bound;
        assert!((1.0 - 1e-6..1.05).contains(&ratio), "{name}: {ratio} times the least time");
        // What the forest says of its busiest link is what its programs send.
        let traffic = Traffic::of(&plan, &topology, ProgramSpec::ALL_REDUCE);
        let busiest = traffic.busiest(&topology).expect("something is sent").seconds_per_byte;
        let forest = topology.fabric().expect("a graph").forest();
        println!("| {name} | {} | {} | {ratio:.3} |", topology.world(), forest.trees.len());
        assert!((busiest / forest.seconds_per_byte - 1.0).abs() < 1e-6, "{name}: {busiest}");
    }
}

#[test]
fn ranks_are_joined_by_links_or_switches_only() {
    for (name, text) in test_fabrics::all() {
        let (topology, plan) = planned(&text);
        let fabric = topology.fabric().expect("a graph");
        for rank in 0..topology.world() {
            for peer in plan.program(rank, ProgramSpec::ALL_REDUCE).peers() {
                let route = fabric.route(rank, peer);
                let passed =
                    route.iter().map(|(link, forward)| fabric.links()[*link].ends[usize::from(*forward)]);
                let others = passed.filter(|vertex| *vertex < topology.world() && *vertex != peer);
                assert_eq!(others.count(), 0, "{name}: from {rank} to {peer}");
            }
        }
    }
}

#[test]
fn a_slower_direction_limits_a_link() {
    let text = test_fabrics::broken_ring(3, "8G").replacen(
        "bandwidth = \"8G\"",
        "bandwidth = \"8G\"\nback = \"4G\"",
        1,
    );
    let (topology, plan) = planned(&text);
    let bound = lower_bound(&topology).expect("three ranks");
    assert!((bound.seconds_per_byte - 2e-9).abs() < 1e-15, "{bound:?}");
    let run = simulate(&plan, &topology, SimulationInput::new(64 << 20), &PARAMETERS, &mut |_, _| {});
    let run = run.expect("it can be simulated");
    assert!(
        (1.0..1.05).contains(&(run.seconds() / bound.seconds_per_byte / f64::from(64 << 20))),
        "{}",
        run.seconds()
    );
    // The link, from its second to its first end, is busy all the time.
    assert!(run.links[0].busy > 0.95 && run.links[1].busy < 0.55, "{:?}", run.links);
}

#[test]
fn short_vectors_take_one_tree_of_the_same_links() {
    for (name, text) in test_fabrics::all() {
        let (topology, forest) = planned(&text);
        let short = Plan::on(forest::one_tree(&topology), &topology, Lowering::Direct);
        VerifiedPlan::for_all(short.clone()).expect(name);
        let time = |plan| {
            let run = simulate(plan, &topology, SimulationInput::new(64), &PARAMETERS, &mut |_, _| {});
            run.expect("it can be simulated").picoseconds
        };
        assert!(time(&short) <= time(&forest), "{name}");
        for rank in 0..topology.world() {
            let peers = |plan: &Plan| plan.program(rank, ProgramSpec::ALL_REDUCE).peers().collect::<Vec<_>>();
            let joined = peers(&forest);
            assert!(peers(&short).iter().all(|peer| joined.contains(peer)), "{name}: rank {rank}");
        }
    }
}
