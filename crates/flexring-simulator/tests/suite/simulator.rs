//! The simulator beside the closed forms of the cost model, and beside the bytes that programs send.

use fastrand::Rng;
use flexring_core::config::Lowering;
use flexring_core::trace::SpanActivity;
use flexring_plan::lowering::{Plan, ProgramSpec};
use flexring_plan::planner::{flexreduce, hierarchical, ring};
use flexring_plan::test_util as trees;
use flexring_plan::topology::{Topology, TopologyBuilder, Uplink};
use flexring_plan::topology_file::parse_short;
use flexring_plan::traffic::Traffic;
use flexring_simulator::cost_model::hierarchy::ring as ring_time;
use flexring_simulator::cost_model::lower_bound::lower_bound;
use flexring_simulator::simulator::{
    LONGEST_VECTOR, SimulatedRun, SimulationInput, SimulationParameters, simulate,
};
use flexring_testkit::effort::cases;

/// Machines whose additions take no time, so that links alone determine it.
const FAST: SimulationParameters =
    SimulationParameters { memory_bandwidth: 1 << 60, job_nanoseconds: 0, ..SimulationParameters::DEFAULT };

fn run(plan: &Plan, topology: &Topology, bytes: u64, parameters: &SimulationParameters) -> SimulatedRun {
    let call = SimulationInput { records: true, ..SimulationInput::new(bytes) };
    simulate(plan, topology, call, parameters, &mut |_, _| {}).expect("it can be simulated")
}

/// Ranks on nodes of their own at one switch, with links of 1 GB/s. Latencies are in nanoseconds.
fn switch(ranks: usize, latency: u64) -> Topology {
    let mut builder = TopologyBuilder::new("switch");
    for rank in 0..ranks {
        let node = builder.node(0, "node", Uplink::new(8_000_000_000, latency));
        builder.rank(node, rank, Uplink::new(400_000_000_000, 0));
    }
    builder.finish().expect("a rank on each node")
}

fn chained_ring(topology: &Topology) -> Plan {
    Plan::on(ring::plan(topology), topology, Lowering::Chain)
}

fn short(topology: &str) -> Topology {
    parse_short(topology).expect("short form").expect("valid")
}

#[test]
fn a_ring_of_one_sub_chunk_per_rank_takes_what_the_formula_says() {
    for ranks in [2, 3, 8, 21] {
        let topology = switch(ranks, 5_000);
        let bytes = (ranks * FAST.subchunk) as u64;
        let time = run(&chained_ring(&topology), &topology, bytes, &FAST).seconds();
        let formula = ring_time(bytes as f64, ranks, 10e-6, 1e-9, 1.0);
        assert!((time / formula - 1.0).abs() < 1e-6, "{ranks} ranks: {time} s, the formula gives {formula}");
    }
}

#[test]
fn a_long_ring_takes_what_the_formula_says_and_at_most_the_filling_of_the_pipeline() {
    for (ranks, sub_chunks) in [(2, 64), (5, 32), (8, 16), (16, 100)] {
        let topology = switch(ranks, 2_000);
        let bytes = (ranks * sub_chunks * FAST.subchunk) as u64;
        let time = run(&chained_ring(&topology), &topology, bytes, &FAST).seconds();
        let least = ring_time(bytes as f64, ranks, 0.0, 1e-9, 1.0);
        let filling = 2.0 * (ranks as f64 - 1.0) * (4e-6 + FAST.subchunk as f64 * 1e-9);
        assert!(
            time >= least && time <= least + filling,
            "{ranks} ranks: {time} s, not {least} plus {filling}"
        );
    }
}

#[test]
fn transfers_over_a_shared_trunk_divide_its_bandwidth() {
    let times = [("(1+1)@1G+(1+1)@1G", 8.0), ("(1+1)@500M+(1+1)@500M", 16.0), ("(1+1)@2G+(1+1)@2G", 4.0)];
    for (topology, nanoseconds) in times {
        let topology = short(topology);
        let plan = Plan::on(hierarchical::plan(&topology, &[2, 2]).expect("4"), &topology, Lowering::Auto);
        let bytes = 64 << 20;
        let run = run(&plan, &topology, bytes, &FAST);
        // Both pairs exchange halves over the trunks at the same time, so each trunk carries the vector once
        // each way.
        let ratio = run.seconds() / (bytes as f64 * nanoseconds * 1e-9);
        assert!((1.0..1.05).contains(&ratio), "{ratio} times the time of the trunk");
        let busiest = run.busiest().expect("something is sent");
        assert!(busiest.busy > 0.95, "{busiest:?}");
        assert_eq!((busiest.up, busiest.down), (bytes, bytes));
    }
}

#[test]
fn the_links_of_nodes_with_a_single_rank_are_in_use_all_the_time() {
    // A shard of such a rank is gathered from all ranks of another node. While it was summed from its start
    // to its end, one link after the other was in use: 1.13 and 1.17 of the bound.
    for (nodes, most) in [("1@1G+4@1G", 1.06), ("5@1G+2@1G+1@1G", 1.12), ("3@1G+3@1G+4@1G", 1.03)] {
        let topology = short(nodes);
        let plan = Plan::on(flexreduce::plan(&topology).expect("a small tree"), &topology, Lowering::Auto);
        let call = SimulationInput::new(64 << 20);
        let time =
            simulate(&plan, &topology, call, &FAST, &mut |_, _| {}).expect("it can be simulated").seconds();
        let bound = lower_bound(&topology).expect("several ranks").seconds_per_byte * f64::from(64 << 20);
        assert!(time / bound < most, "{nodes}: {:.3} of the bound", time / bound);
    }
}

#[test]
fn additions_take_the_time_of_the_memory() {
    let topology = short("4");
    let plan = Plan::on(ring::plan(&topology), &topology, Lowering::Auto);
    let parameters = SimulationParameters { memory_bandwidth: 1_000_000_000, job_nanoseconds: 0, ..FAST };
    let time = run(&plan, &topology, 64 << 20, &parameters).seconds();
    // Each rank adds 4 quarters onto 1 and copies 3, 11 quarters that are read or written.
    let memory = 11.0 / 4.0 * f64::from(64 << 20) / 1e9;
    assert!((1.0..1.02).contains(&(time / memory)), "{time} s, not {memory}");
}

#[test]
fn equal_inputs_give_equal_results() {
    let topology = short("2@1G+3@10G+4@2G");
    let plan = Plan::on(flexreduce::plan(&topology).expect("small"), &topology, Lowering::Auto);
    let first = run(&plan, &topology, 10_000_000, &SimulationParameters::DEFAULT);
    assert_eq!(first, run(&plan, &topology, 10_000_000, &SimulationParameters::DEFAULT));
}

#[test]
fn times_beyond_what_picoseconds_can_express_are_refused() {
    for (topology, memory_bandwidth) in [("1@10+1@10", 1 << 40), ("1+1", 1)] {
        let topology = short(topology);
        let parameters = SimulationParameters { memory_bandwidth, ..SimulationParameters::DEFAULT };
        let call = SimulationInput::new(64 << 20);
        let plan = chained_ring(&topology);
        let error = simulate(&plan, &topology, call, &parameters, &mut |_, _| {}).expect_err("too long");
        assert!(error.message().contains("check the bandwidths of the links and of memory"), "{error}");
    }
}

#[test]
fn random_plans_end_after_the_lower_bound_and_send_what_their_programs_say() {
    for seed in 0..cases(40) {
        let mut random = Rng::with_seed(seed);
        let topology = trees::tree(&mut random, 10, 4);
        // Some links send one bit per second, and no more than 100 days can be simulated.
        let count = 1 + random.usize(..5_000);
        let bytes = 4 * count as u64;
        let parameters = SimulationParameters {
            // At most 30 sub-chunks, so that many worlds can be simulated.
            subchunk: 4 * (1 + count / 30 + random.usize(..200)),
            slots: 1 + random.usize(..20),
            window: 1 + random.usize(..20),
            in_place: random.bool(),
            memory_bandwidth: 1_000_000 + random.usize(..1_000_000_000) as u64,
            ..SimulationParameters::DEFAULT
        };
        for algorithm in trees::algorithms() {
            let Some(schedule) = trees::plan(&mut random, algorithm, &topology) else { continue };
            let lowering = [Lowering::Auto, Lowering::Chain, Lowering::Direct][random.usize(..3)];
            let plan = Plan::on(schedule, &topology, lowering);
            let run = run(&plan, &topology, bytes, &parameters);
            let context = format!("seed {seed}, {}: {parameters:?}", algorithm.name());
            let bound = lower_bound(&topology).map_or(0.0, |bound| bound.seconds_per_byte);
            let rounding = 1.0 - 100.0 * topology.world() as f64 / bytes as f64;
            assert!(run.seconds() >= bound * bytes as f64 * rounding, "{context}: {} s", run.seconds());
            let traffic = Traffic::of(&plan, &topology, ProgramSpec::ALL_REDUCE);
            for link in &run.links {
                let load = traffic.load(link.vertex);
                for (sent, load) in [(link.up, load.up), (link.down, load.down)] {
                    let expected = load * bytes as f64;
                    let tolerance = 128.0 * (topology.world() * topology.world()) as f64;
                    assert!(
                        (sent as f64 - expected).abs() <= tolerance,
                        "{context}: {sent} bytes, not {expected}"
                    );
                }
            }
            assert!(run.links.iter().all(|link| (0.0..=1.0 + 1e-6).contains(&link.busy)), "{context}");
        }
    }
}

#[test]
fn the_critical_path_accounts_for_the_whole_time() {
    let topology = short("2@1G+3@10G+4@2G");
    let plan = Plan::on(flexreduce::plan(&topology).expect("small"), &topology, Lowering::Auto);
    let run = run(&plan, &topology, 10_000_000, &SimulationParameters::DEFAULT);
    let summary = run.path_summary();
    assert_eq!(summary.transfers + summary.jobs + summary.latency, run.picoseconds);
    // The slow link determines the time.
    assert!(summary.transfers > run.picoseconds / 2, "{summary:?} of {}", run.picoseconds);
    assert!(run.critical_path.is_sorted_by_key(|activity| activity.end));
    assert!(run.timeline.len() > run.critical_path.len());
}

#[test]
fn recording_changes_no_result_and_timelines_cover_each_rank() {
    let topology = short("2@1G+3@10G+4@2G");
    let plan = Plan::on(flexreduce::plan(&topology).expect("small"), &topology, Lowering::Auto);
    let recorded = |records, timelines| {
        let call = SimulationInput { records, timelines, ..SimulationInput::new(10_000_000) };
        simulate(&plan, &topology, call, &SimulationParameters::DEFAULT, &mut |_, _| {})
            .expect("it can be simulated")
    };
    let (bare, full) = (recorded(false, false), recorded(true, true));
    assert_eq!((bare.picoseconds, &bare.links, bare.events), (full.picoseconds, &full.links, full.events));
    assert!(bare.ranks.is_empty() && full.ranks.len() == topology.world());
    let count = |wanted: fn(SpanActivity) -> bool| {
        let spans = full.ranks.iter().flat_map(|rank| &rank.spans);
        spans.filter(|span| wanted(span.activity)).count() as u64
    };
    assert_eq!(count(|activity| matches!(activity, SpanActivity::Send { .. })), full.messages);
    assert_eq!(count(|activity| matches!(activity, SpanActivity::Receive { .. })), full.messages);
    for (rank, timeline) in full.ranks.iter().enumerate() {
        assert!(
            timeline.spans.iter().all(|span| span.start <= span.end && span.end <= timeline.end),
            "rank {rank}"
        );
        // The one thread of a rank adds, copies or waits.
        let own = [SpanActivity::Copy, SpanActivity::Reduce, SpanActivity::Wait];
        let own = timeline.spans.iter().filter(|span| own.contains(&span.activity));
        assert!(own.is_sorted_by(|one, next| one.end <= next.start), "rank {rank}");
    }
}

#[test]
fn what_cannot_be_simulated_is_refused_with_the_reason() {
    let topology = switch(4, 0);
    let refused = |bytes, parameters: &SimulationParameters| {
        let call = SimulationInput { records: true, ..SimulationInput::new(bytes) };
        let outcome = simulate(&chained_ring(&topology), &topology, call, parameters, &mut |_, _| {});
        outcome.expect_err("refused").message().to_owned()
    };
    for bytes in [0, LONGEST_VECTOR + 1, 1 << 60, u64::MAX] {
        let message = refused(bytes, &FAST);
        assert!(message.contains(&format!("a vector of {bytes} bytes cannot be simulated")), "{message}");
    }
    assert!(refused(1 << 40, &FAST).contains("too large"));
    let message = refused(1, &SimulationParameters { window: 0, ..FAST });
    assert_eq!(message, "the window is 0: use 1 to 1048576");
    let many = switch(100_000, 0);
    let call = SimulationInput::new(1 << 20);
    let outcome = simulate(&chained_ring(&many), &many, call, &FAST, &mut |_, _| {});
    assert!(outcome.expect_err("refused").message().contains("100000 ranks send 19999800000 messages"));
}
