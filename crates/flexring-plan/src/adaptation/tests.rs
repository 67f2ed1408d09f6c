use super::*;
use crate::lowering::{Plan, ProgramSpec};
use crate::planner::{self, Details};
use crate::selection::select_algorithm;
use crate::traffic::Traffic;
use flexring_core::config::{Algorithm, Lowering};
use proptest::prelude::*;

const MIB: usize = 1 << 20;

/// Links of nodes, in Mbit/s, and calls and probes over them. Times depend on the plans of the factors.
struct Cluster {
    topology: Topology,
    rates: Vec<f64>,
    adaptation: Adaptation,
    /// Multiplies the next measured time.
    noise: Box<dyn FnMut() -> f64>,
    /// Calls so far, and those before which the factors changed.
    calls: usize,
    changes: Vec<(usize, Vec<f64>)>,
}

impl Cluster {
    fn new(rates: &[f64]) -> Self {
        let names: Vec<String> = (0..rates.len()).map(|node| node.to_string()).collect();
        let topology = Topology::from_names(&names);
        let adaptation = Adaptation::new(&topology).expect("enough nodes");
        let noise = Box::new(|| 1.0);
        Self { topology, rates: rates.to_vec(), adaptation, noise, calls: 0, changes: Vec::new() }
    }

    /// Nanoseconds of an all-reduce with plans for these factors.
    fn time(&self, factors: &[f64], bytes: usize) -> f64 {
        let nominal = self.topology.with_scaled_nodes(factors);
        let details = Details::default();
        let algorithm = select_algorithm(Algorithm::Auto, &nominal, &details).algorithm;
        let schedule = planner::plan(algorithm, &nominal, &details).expect("a plan");
        let plan = Plan::on(schedule, &nominal, Lowering::Auto);
        let real: Vec<f64> = self.rates.iter().map(|rate| rate / 10_000.0).collect();
        let real = self.topology.with_scaled_nodes(&real);
        let traffic = Traffic::of(&plan, &real, ProgramSpec::ALL_REDUCE);
        traffic.busiest(&real).expect("something is sent").seconds_per_byte * bytes as f64 * 1e9
    }

    /// Makes a call, after adapting if it is due.
    fn call(&mut self, bytes: usize) {
        if self.adaptation.is_window_complete() {
            let window = self.adaptation.window().to_vec();
            let times: Vec<u64> = window.into_iter().map(|(_, time)| time).collect();
            if self.adaptation.end_window(&times) {
                let bits = (8 * self.adaptation.message()) as f64;
                let pairs: Vec<NodePair> = self.adaptation.rounds().iter().flatten().copied().collect();
                let time = |(one, other): NodePair| bits * 1e3 / self.rates[one].min(self.rates[other]);
                let noise = &mut self.noise;
                let times: Vec<u64> = pairs.into_iter().map(|pair| (time(pair) * noise()) as u64).collect();
                if self.adaptation.end_probe(&times).is_some() {
                    self.changes.push((self.calls, self.adaptation.factors().to_vec()));
                }
            }
        }
        let time = self.time(self.adaptation.factors(), bytes) * (self.noise)();
        self.adaptation.record(bytes, time as u64);
        self.calls += 1;
    }

    fn calls(&mut self, number: usize) {
        (0..number).for_each(|_| self.call(64 * MIB));
    }
}

#[test]
fn a_link_that_slows_down_has_new_plans_within_twenty_calls_and_old_ones_when_it_recovers() {
    for slow in 0..4 {
        for before in 5..30 {
            let mut cluster = Cluster::new(&[1000.0; 4]);
            cluster.calls(before);
            assert_eq!(cluster.changes, []);
            cluster.rates[slow] = 400.0;
            let slowed = cluster.time(cluster.adaptation.factors(), 64 * MIB);
            cluster.calls(20);
            let (call, factors) = cluster.changes[0].clone();
            assert!(call <= before + 16, "{call} after {before}");
            let expected: Vec<f64> = (0..4).map(|node| if node == slow { 0.4 } else { 1.0 }).collect();
            assert!(alike(&factors, &expected), "{factors:?}");
            // 2.5 n instead of 3.75 n, at 1 Gbit/s.
            let ratio = cluster.time(&factors, 64 * MIB) / slowed;
            assert!((ratio - 2.5 / 3.75).abs() < 0.01, "{ratio}");
            cluster.rates[slow] = 1000.0;
            cluster.calls(40);
            assert_eq!(cluster.changes.len(), 2, "{:?}", cluster.changes);
            assert_eq!(cluster.changes[1].1, [1.0; 4]);
        }
    }
}

#[test]
fn a_link_that_is_slow_from_the_start_is_found() {
    let mut cluster = Cluster::new(&[1000.0, 1000.0, 500.0]);
    cluster.calls(12);
    assert_eq!(cluster.changes.len(), 1);
    assert!(alike(&cluster.changes[0].1, &[1.0, 1.0, 0.5]), "{:?}", cluster.changes);
}

#[test]
fn what_slows_all_links_alike_changes_nothing() {
    let mut cluster = Cluster::new(&[1000.0; 5]);
    cluster.calls(10);
    cluster.rates = vec![300.0; 5];
    cluster.calls(200);
    assert_eq!(cluster.changes, []);
}

#[test]
fn one_slow_probe_changes_nothing() {
    let mut adaptation = Adaptation::new(&Topology::from_names(&["a", "b", "c", "d"])).expect("four nodes");
    let pairs: Vec<NodePair> = adaptation.rounds().iter().flatten().copied().collect();
    let probe = |slow: Option<usize>| -> Vec<u64> {
        let time = |(one, other): &NodePair| {
            if slow.is_some_and(|slow| slow == *one || slow == *other) { 30_000_000 } else { 10_000_000 }
        };
        pairs.iter().map(time).collect()
    };
    for slow in [Some(1), None, Some(2), None, Some(1), Some(2), None] {
        assert_eq!(adaptation.end_probe(&probe(slow)), None);
    }
    assert_eq!(adaptation.end_probe(&probe(Some(3))), None);
    let change = adaptation.end_probe(&probe(Some(3))).expect("confirmed");
    assert_eq!(change.nodes.iter().map(|changed| changed.node).collect::<Vec<_>>(), [3]);
    assert!((change.nodes[0].after / change.nodes[0].before - 1.0 / 3.0).abs() < 0.01, "{change:?}");
}

#[test]
fn probes_that_change_nothing_become_rare() {
    let mut adaptation = Adaptation::new(&Topology::from_names(&["a", "b", "c"])).expect("three nodes");
    let mut probes = Vec::new();
    for window in 0..4000u64 {
        // The time of calls changes all the time, but links do not.
        let time = if window % 2 == 0 { 1_000_000 } else { 3_000_000 };
        (0..WINDOW).for_each(|_| adaptation.record(MIB, time));
        if adaptation.end_window(&[time; WINDOW]) {
            probes.push(window);
            assert_eq!(adaptation.end_probe(&[20_000_000; 3]), None);
        }
    }
    // 32 seconds of calls, and probes of 60 ms.
    assert!((2..12).contains(&probes.len()), "{probes:?}");
}

#[test]
fn two_nodes_have_nothing_to_compare() {
    assert!(Adaptation::new(&Topology::from_names(&["a", "b"])).is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(flexring_testkit::effort::cases(64) as u32))]

    /// With noise of 4 % a factor changes once at most, whatever the rates are.
    #[test]
    fn factors_do_not_flap(
        rates in prop::collection::vec(250f64..1000.0, 3..6),
        seed in any::<u64>(),
    ) {
        let mut cluster = Cluster::new(&rates);
        let mut state = seed;
        cluster.noise = Box::new(move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            0.96 + 0.08 * (state >> 33) as f64 / (1u64 << 31) as f64
        });
        cluster.calls(120);
        prop_assert!(cluster.changes.len() <= rates.len(), "{:?}", cluster.changes);
    }

    /// Ranks whose own times differ decide alike, because they decide by what they agree on.
    #[test]
    fn ranks_decide_alike(
        times in prop::collection::vec((1u64..1 << 40, 1u64..1 << 40), 400),
        lengths in prop::collection::vec(MIB..1 << 30, 400),
    ) {
        let topology = Topology::from_names(&["a", "b", "b", "c", "d"]);
        let mut ranks: Vec<Adaptation> =
            (0..2).map(|_| Adaptation::new(&topology).expect("four nodes")).collect();
        for (calls, bytes) in times.chunks(WINDOW).zip(lengths.chunks(WINDOW)) {
            for ((first, second), bytes) in calls.iter().zip(bytes) {
                ranks[0].record(*bytes, *first);
                ranks[1].record(*bytes, *second);
            }
            let agreed: Vec<u64> = calls.iter().map(|(first, second)| *first.min(second)).collect();
            let probes: Vec<bool> = ranks.iter_mut().map(|rank| rank.end_window(&agreed)).collect();
            prop_assert_eq!(probes[0], probes[1]);
            if probes[0] {
                let pairs = ranks[0].rounds().iter().flatten().count();
                let agreed: Vec<u64> = calls.iter().map(|(first, _)| *first).cycle().take(pairs).collect();
                let changes: Vec<_> = ranks.iter_mut().map(|rank| rank.end_probe(&agreed)).collect();
                prop_assert_eq!(&changes[0], &changes[1]);
            }
            prop_assert_eq!(ranks[0].factors(), ranks[1].factors());
        }
    }
}
