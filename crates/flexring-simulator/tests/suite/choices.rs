//! What flexring chooses by calculation, beside what the simulator says.

use flexring_core::config::{Algorithm, Config, Lowering, Switch};
use flexring_plan::calculation::Calculator;
use flexring_plan::candidates::candidates;
use flexring_plan::lowering::Plan;
use flexring_plan::planner::{self, Details};
use flexring_plan::selection::{AlgorithmSelection, select_algorithm};
use flexring_plan::sized_plans::{SizedPlan, selected};
use flexring_plan::topology::Topology;
use flexring_plan::topology_file::parse_short;
use flexring_simulator::cost_model::lower_bound::lower_bound;
use flexring_simulator::simulator::{SimulationInput, SimulationParameters, simulate};
use flexring_simulator::trials::simulate_all;
use flexring_testkit::effort::cases;

const KIB: u64 = 1 << 10;

/// The longest vector of the sweep in bytes.
const LONGEST: u64 = 256 << 20;

fn short(cluster: &str) -> Topology {
    parse_short(cluster).expect("short form").expect("valid")
}

/// Microseconds of an all-reduce.
fn simulated(plan: &Plan, topology: &Topology, bytes: u64) -> f64 {
    let (call, parameters) = (SimulationInput::new(bytes), SimulationParameters::DEFAULT);
    let run = simulate(plan, topology, call, &parameters, &mut |_, _| {});
    run.expect("few messages").seconds() * 1e6
}

fn chosen(config: &Config, topology: &Topology) -> (Vec<SizedPlan>, AlgorithmSelection) {
    selected(config, topology, &mut |topology, trials| Ok(simulate_all(config, topology, trials)))
        .expect("plans")
}

fn plan_of(plans: &[SizedPlan], bytes: u64) -> &Plan {
    &plans.iter().find(|sized| bytes <= sized.longest as u64).expect("the last has no limit").plan
}

/// Clusters with branches of more than 16 children, whose groups would be long chains.
const WIDE: [&str; 5] =
    ["1x64", "4x32", "1x20", "2x17", "2+3+1+4+5+1+2+3+1+1+4+2+2+3+1+4+5+1+2+3+1+1+4+2+1+1+1+2+3+4+4+4"];

/// Hierarchies on symmetric clusters; times of others may be too long, but hardly too short.
#[test]
fn calculated_times_are_those_of_the_simulator_where_links_are_alike() {
    let mut different = Vec::new();
    for cluster in WIDE.into_iter().chain(["2+3", "3+3+4", "8x4x2", "8x4", "6@4*100G+6@4*100G"]) {
        let topology = short(cluster);
        let calculator = Calculator::new(&topology);
        // Where some pairs of ranks share a node and others do not, ranks pass a level at different times.
        let pairs = [Algorithm::Tree, Algorithm::Rabenseifner];
        let candidates = candidates(&topology).into_iter();
        for candidate in candidates.filter(|candidate| !pairs.contains(&candidate.algorithm)) {
            let time = calculator.time(&candidate.plan);
            for bytes in [4, 64 * KIB, 256 * KIB] {
                let calculated = time.seconds(bytes, SimulationParameters::DEFAULT.subchunk) * 1e6;
                let ratio = calculated / simulated(&candidate.plan, &topology, bytes);
                let expected =
                    if candidate.algorithm == Algorithm::Hierarchical { 0.95..1.05 } else { 0.8..2.0 };
                if !expected.contains(&ratio) {
                    different.push(format!("{cluster}, {}, {bytes} bytes: {ratio}", candidate.name()));
                }
            }
        }
    }
    assert!(different.is_empty(), "{different:#?}");
}

#[test]
fn vectors_of_a_few_hundred_kilobytes_take_no_long_chains() {
    for cluster in WIDE {
        let topology = short(cluster);
        let (plans, _) = chosen(&Config::default(), &topology);
        let shape = select_algorithm(Algorithm::Auto, &topology, &Details::default()).algorithm;
        let chains = planner::plan(shape, &topology, &Details::default()).expect("possible");
        let chains = Plan::on(chains, &topology, Lowering::Auto);
        for bytes in [64 * KIB + 4, 128 * KIB, 512 * KIB] {
            let [ours, theirs] =
                [plan_of(&plans, bytes), &chains].map(|plan| simulated(plan, &topology, bytes));
            assert!(ours < 0.6 * theirs, "{cluster}, {bytes} bytes: {ours} us, {theirs} by chains");
        }
    }
    let topology = short("1x64");
    let (plans, _) = chosen(&Config::default(), &topology);
    let time = simulated(plan_of(&plans, 64 * KIB + 4), &topology, 64 * KIB + 4);
    assert!(time < 400.0, "{time} us");
}

/// Where switches carry as much as the nodes below them, their description makes no job slower; and ranks
/// that share a NIC send less.
#[test]
fn long_vectors_take_no_level_of_switches_and_no_nic_more_than_they_need() {
    for (cluster, part, bytes) in [
        ("(3@200M+5@200M)@400M+(1@200M+1@200M)@400M", 0.9, 8 << 20),
        ("6@4*10G+6@4*10G+6@4*10G", 0.85, 32 << 20),
    ] {
        let topology = short(cluster);
        let (plans, selection) = chosen(&Config::default(), &topology);
        assert!(selection.reason.contains("is faster than"), "{}", selection.reason);
        let shape = select_algorithm(Algorithm::Auto, &topology, &Details::default()).algorithm;
        let shape = planner::plan(shape, &topology, &Details::default()).expect("possible");
        let shape = Plan::on(shape, &topology, Lowering::Auto);
        let [ours, theirs] = [plan_of(&plans, bytes), &shape].map(|plan| simulated(plan, &topology, bytes));
        assert!(ours < part * theirs, "{cluster}: {ours} us, {theirs} by the shape");
    }
}

#[test]
fn slow_links_carry_the_vector_once_where_other_ranks_can_own_it() {
    // A chain of so many nodes would carry it twice over the slow links.
    let wide = format!("4@100G{}", "+1@1G".repeat(20));
    for cluster in ["1@250G+(1@35G)@1G+(1@35G)@1G+(1@35G)@1G", "1@102M+(1@177M)@1G+1@12G+1@12G", &wide] {
        let topology = short(cluster);
        let (plans, _) = chosen(&Config::default(), &topology);
        let bytes = 32 << 20;
        let time = simulated(plan_of(&plans, bytes), &topology, bytes);
        let bound = lower_bound(&topology).expect("several ranks").seconds_per_byte * bytes as f64 * 1e6;
        assert!(time < 1.05 * bound, "{cluster}: {time} us, at least {bound}");
    }
}

/// Lengths after which another plan begins, or, up to `most` bytes, another variant of its programs; and some
/// others.
fn last_lengths(plans: &[SizedPlan], most: u64) -> Vec<u64> {
    let mut lengths: Vec<u64> = (3..=most.ilog2()).step_by(4).map(|bit| 1 << bit).collect();
    let mut before = 0;
    for sized in plans {
        let longest = (sized.longest as u64).min(LONGEST);
        let moves_in_waves = |bytes| sized.plan.moves_in_waves(bytes, sized.subchunk);
        let (mut low, mut high) = (before, longest);
        while high - low > 4 && !moves_in_waves(low) && moves_in_waves(high) {
            let middle = u64::midpoint(low, high);
            if moves_in_waves(middle) { high = middle } else { low = middle }
        }
        lengths.extend([low].into_iter().filter(|bytes| *bytes <= most).chain([longest]));
        before = longest;
    }
    lengths.retain(|bytes| (8..LONGEST).contains(bytes));
    lengths.iter_mut().for_each(|bytes| *bytes = *bytes / 4 * 4);
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

/// Which of these clusters take more than 1.15 times as long for 4 bytes more.
fn cliffs(clusters: &[&str], most: u64) -> Vec<String> {
    let mut found = Vec::new();
    for cluster in clusters {
        let topology = short(cluster);
        let (plans, _) = chosen(&Config::default(), &topology);
        for bytes in last_lengths(&plans, most) {
            let [before, after] =
                [bytes, bytes + 4].map(|bytes| simulated(plan_of(&plans, bytes), &topology, bytes));
            if after > 1.15 * before {
                found.push(format!("{cluster}: {bytes} bytes take {before} us, 4 more {after}"));
            }
        }
    }
    found
}

#[test]
fn four_bytes_more_take_hardly_longer() {
    let small =
        ["1x2", "1x3", "2+1", "1@1G+1@10G+1@3G", "3+5", "1x8", "2x4", "2+3+4", "4x4", "1x17", "4@1G+4+4"];
    let cluster = "(3@200M+5@200M)@400M+(1@200M+1@200M)@400M";
    let found = [cliffs(&small, LONGEST), cliffs(&[cluster, "8x4x2"], 1 << 20), cliffs(&WIDE, 16 << 20)];
    assert!(found.iter().all(Vec::is_empty), "{found:#?}");
}

#[test]
fn four_bytes_more_take_hardly_longer_on_many_ranks() {
    if cases(1) < 10 {
        return;
    }
    let found = [
        cliffs(&["1x60", "1x64", "8x8", "16x4", "8x4x2"], LONGEST),
        cliffs(&["1x100", "1x128", "16x8", "32x8", "4x4x16", "50+50+7"], 16 << 20),
        cliffs(&["1x512", "16x16x4", "32x32", "1x1024"], 4 << 20),
    ];
    assert!(found.iter().all(Vec::is_empty), "{found:#?}");
}

#[test]
fn what_users_set_and_one_node_are_not_calculated() {
    let topology = short("4x32");
    let count = |config: &Config, topology: &Topology| chosen(config, topology).0.len();
    assert!(count(&Config::default(), &topology) > 1);
    for config in [
        Config { algo: Algorithm::Ring, ..Config::default() },
        Config { lowering: Lowering::Chain, ..Config::default() },
        Config { reproducible: Switch(true), ..Config::default() },
    ] {
        assert_eq!(count(&config, &topology), 1);
    }
    for cluster in ["64", "2+3", "3+3+4"] {
        assert_eq!(count(&Config::default(), &short(cluster)), 1, "{cluster}");
    }
}
