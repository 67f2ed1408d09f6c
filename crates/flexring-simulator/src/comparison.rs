//! All schedules for one topology by their predicted time, and the reason why the first is the fastest.
//!
//! Owns the order and the reason. Must not know how times are predicted, nor how the list is printed.

use super::cost_model::lower_bound::{LowerBound, lower_bound};
use super::simulator::{SimulationInput, SimulationParameters, messages, simulate};
use flexring_core::config::{Algorithm, Lowering};
use flexring_plan::calculation::Calculator;
use flexring_plan::candidates::{candidates, with_variant};
use flexring_plan::lowering::{Plan, ProgramSpec};
use flexring_plan::planner::{self, Details};
use flexring_plan::topology::{Topology, TopologyLink};
use flexring_plan::traffic::Traffic;

/// Most messages of all ranks together, for which a schedule is simulated. So many take up to a second.
const MOST_SIMULATED: u64 = 150_000;

/// Times that differ by less than this part count as equal.
const CLOSE: f64 = 0.01;

/// Plans for other trees of the same nodes that are compared: those with the shortest calculated times.
const MOST_VARIANTS: usize = 6;

/// A schedule with its predicted time.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The algorithms whose plan it is, in the order of [`Algorithm::ALL`]; at least one.
    pub algorithms: Vec<Algorithm>,
    /// The tree for which the algorithm plans instead of the topology, as words; empty if there is none.
    pub variant: String,
    /// Predicted time.
    pub seconds: f64,
    /// The time by which `auto` chooses ([`calculation`](flexring_plan::calculation)); `None` if the links
    /// form no tree.
    pub calculated: Option<f64>,
    /// The link that takes longest for its bytes; `None` if nothing is sent.
    pub busiest: Option<BusiestLink>,
    /// Most messages in a row.
    pub hops: u32,
}

/// The link that takes longest for its bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BusiestLink {
    /// The link.
    pub vertex: TopologyLink,
    /// Bytes in the direction that carries more.
    pub bytes: f64,
    /// Their time at the link's bandwidth.
    pub seconds: f64,
}

/// All schedules for a topology.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// By predicted time, the shortest first.
    pub candidates: Vec<Candidate>,
    /// Algorithms that do not support the topology, each with the reason.
    pub refused: Vec<(Algorithm, String)>,
    /// Algorithms whose plans were not simulated, each with the reason.
    pub not_simulated: Vec<(Algorithm, String)>,
    /// What limits every schedule; `None` with one rank.
    pub bound: Option<LowerBound>,
    /// Whether times were simulated. Else they are those of the busiest link and of the latencies of all
    /// messages in a row, because there are too many ranks.
    pub simulated: bool,
}

impl Candidate {
    /// The names of its algorithms, and the tree.
    #[must_use]
    pub fn name(&self) -> String {
        let names: Vec<&str> = self.algorithms.iter().map(|algorithm| algorithm.name()).collect();
        with_variant(&names.join(", "), &self.variant)
    }

    fn link_seconds(&self) -> f64 {
        self.busiest.map_or(0.0, |link| link.seconds)
    }
}

impl Comparison {
    /// Predicts the time of all algorithms for an all-reduce of `bytes`, and if the lowering is left to
    /// flexring, of those on other trees of the same nodes.
    #[must_use]
    pub fn new(
        topology: &Topology,
        details: &Details,
        lowering: Lowering,
        bytes: u64,
        parameters: &SimulationParameters,
    ) -> Self {
        let (mut plans, mut refused) = (Vec::<(Plan, Vec<Algorithm>, String)>::new(), Vec::new());
        let mut not_simulated = Vec::new();
        for algorithm in Algorithm::ALL.iter().copied().filter(|algorithm| *algorithm != Algorithm::Auto) {
            match planner::plan(algorithm, topology, details) {
                Err(reason) => refused.push((algorithm, reason.message().to_owned())),
                Ok(schedule) => {
                    let plan = Plan::on(schedule, topology, lowering);
                    match plans.iter_mut().find(|(other, ..)| other.digest() == plan.digest()) {
                        Some((_, algorithms, _)) => algorithms.push(algorithm),
                        None => plans.push((plan, vec![algorithm], String::new())),
                    }
                }
            }
        }
        let calculator = topology.fabric().is_none().then(|| Calculator::new(topology));
        let calculation =
            |calculator: &Calculator, plan: &Plan| calculator.time(plan).seconds(bytes, parameters.subchunk);
        if let Some(calculator) = &calculator
            && lowering == Lowering::Auto
            && topology.nodes() > 1
        {
            let known: Vec<u64> = plans.iter().map(|(plan, ..)| plan.digest()).collect();
            let variants = candidates(topology).into_iter();
            let variants = variants.filter(|candidate| !known.contains(&candidate.plan.digest()));
            let mut variants: Vec<_> =
                variants.map(|candidate| (calculation(calculator, &candidate.plan), candidate)).collect();
            variants.sort_by(|one, other| one.0.total_cmp(&other.0));
            let variants = variants.into_iter().take(MOST_VARIANTS).map(|(_, candidate)| candidate);
            plans.extend(variants.map(|variant| (variant.plan, vec![variant.algorithm], variant.variant)));
        }
        // A plan that cannot be simulated is refused with the reason below.
        let is_short = |plan: &Plan| {
            messages(plan, bytes, parameters).map_or(true, |messages| messages <= MOST_SIMULATED)
        };
        let simulated = plans.iter().all(|(plan, ..)| is_short(plan));
        let mut candidates: Vec<Candidate> = plans
            .into_iter()
            .filter_map(|(plan, algorithms, variant)| {
                let traffic = Traffic::of(&plan, topology, ProgramSpec::ALL_REDUCE);
                let busiest = traffic.busiest(topology).map(|link| BusiestLink {
                    vertex: link.vertex,
                    bytes: traffic.load(link.vertex).larger() * bytes as f64,
                    seconds: link.seconds_per_byte * bytes as f64,
                });
                let hops = traffic.hops();
                let seconds = if simulated {
                    let call = SimulationInput::new(bytes);
                    match simulate(&plan, topology, call, parameters, &mut |_, _| {}) {
                        Ok(run) => run.seconds(),
                        Err(reason) => {
                            let reason = reason.message().to_owned();
                            not_simulated
                                .extend(algorithms.iter().map(|algorithm| (*algorithm, reason.clone())));
                            return None;
                        }
                    }
                } else {
                    busiest.map_or(0.0, |link| link.seconds) + f64::from(hops) * longest_latency(topology)
                };
                let calculated = calculator.as_ref().map(|calculator| calculation(calculator, &plan));
                Some(Candidate { algorithms, variant, seconds, calculated, busiest, hops })
            })
            .collect();
        candidates.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
        Self { candidates, refused, not_simulated, bound: lower_bound(topology), simulated }
    }

    /// Why the first candidate is the fastest, as a sentence without a full stop; `None` if there are not
    /// two.
    #[must_use]
    pub fn reason(&self, topology: &Topology) -> Option<String> {
        let [first, second, ..] = &self.candidates[..] else { return None };
        let (one, other) = (first.name(), second.name());
        let percent = |part: f64| format!("{:.0} %", 100.0 * part);
        let gain = 1.0 - first.seconds / second.seconds;
        let link = first.busiest.map_or("", |link| topology.link_name(link.vertex));
        let saved = 1.0 - first.link_seconds() / second.link_seconds();
        Some(if gain < CLOSE {
            format!("{one} and {other} take equally long, to within 1 %")
        } else if saved >= CLOSE {
            format!(
                "{one} is {} faster than {other}, because its busiest link, that of {link}, needs {} less time",
                percent(gain),
                percent(saved)
            )
        } else if first.hops < second.hops && saved <= -CLOSE {
            format!(
                "{one} is {} faster than {other}, although its busiest link, that of {link}, needs {} more time, because it sends {} \
                 messages in a row instead of {}",
                percent(gain),
                percent(-saved),
                first.hops,
                second.hops
            )
        } else if first.hops < second.hops {
            format!(
                "{one} is {} faster than {other}: their busiest links need as much time, but it sends {} messages in a row \
                 instead of {}",
                percent(gain),
                first.hops,
                second.hops
            )
        } else {
            format!(
                "{one} is {} faster than {other}, although its links are not loaded less: its transfers and additions \
                 overlap better",
                percent(gain)
            )
        })
    }
}

/// Seconds that a message between the two ranks that are farthest apart is on its way, at most.
#[must_use]
pub fn longest_latency(topology: &Topology) -> f64 {
    if topology.fabric().is_some() {
        return topology.longest_link_latency() as f64 * 1e-9;
    }
    let vertices = topology.vertices();
    let mut below = vec![0; vertices.len()];
    let mut longest = 0;
    // Children come after their parents, so their own paths are complete.
    for id in (0..vertices.len()).rev() {
        let mut paths: Vec<u64> = vertices[id]
            .children
            .iter()
            .map(|child| below[*child] + vertices[*child].uplink.latency)
            .collect();
        paths.sort_unstable_by(|one, other| other.cmp(one));
        below[id] = paths.first().copied().unwrap_or(0);
        longest = longest.max(paths.iter().take(2).sum());
    }
    longest as f64 * 1e-9
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexring_plan::topology_file::parse_short;

    fn compare(topology: &str, bytes: u64) -> (Topology, Comparison) {
        let topology = parse_short(topology).expect("short form").expect("valid");
        let comparison = Comparison::new(
            &topology,
            &Details::default(),
            Lowering::Auto,
            bytes,
            &SimulationParameters::DEFAULT,
        );
        (topology, comparison)
    }

    #[test]
    fn the_schedule_that_loads_the_slow_link_least_comes_first() {
        let (topology, comparison) = compare("1@2G+1@2G+1@2G+1@1500M", 4 << 20);
        assert!(comparison.simulated);
        assert_eq!(comparison.candidates[0].algorithms, [Algorithm::Weighted]);
        let reason = comparison.reason(&topology).expect("several schedules");
        assert!(
            reason.starts_with("weighted is ") && reason.contains("because its busiest link, that of"),
            "{reason}"
        );
        assert!(comparison.candidates.is_sorted_by_key(|candidate| (candidate.seconds * 1e12) as u64));
        let bound = comparison.bound.expect("several ranks").seconds_per_byte * f64::from(4 << 20);
        assert!(comparison.candidates.iter().all(|candidate| candidate.seconds >= bound));
    }

    #[test]
    fn equal_plans_are_one_candidate_and_impossible_ones_are_refused() {
        let (_, comparison) = compare("2+2", 1 << 20);
        let same = [Algorithm::Hierarchical, Algorithm::Blueconnect];
        assert!(
            comparison
                .candidates
                .iter()
                .any(|candidate| same.iter().all(|algorithm| candidate.algorithms.contains(algorithm)))
        );
        let (_, comparison) = compare("2+3", 1 << 20);
        let refused: Vec<Algorithm> = comparison.refused.iter().map(|(algorithm, _)| *algorithm).collect();
        assert_eq!(refused, [same[0], same[1], Algorithm::Forest]);
        assert!(comparison.refused[1].1.contains("not symmetric"));
    }

    #[test]
    fn large_jobs_are_estimated_from_loads_and_messages_in_a_row() {
        let (_, comparison) = compare("1x17", 1 << 30);
        assert!(!comparison.simulated);
        let ring =
            comparison.candidates.iter().find(|candidate| candidate.algorithms.contains(&Algorithm::Ring));
        let ring = ring.expect("a ring");
        // 32 messages in a row over two links of nodes and two of ranks.
        assert_eq!(ring.hops, 32);
        let link = ring.busiest.expect("something is sent").seconds;
        assert!((ring.seconds - link - 32.0 * 62e-6).abs() < 1e-9);
    }
}
