//! The plans of a communicator by the length of vectors.
//!
//! Owns which plan a length uses, without and with the choices of a tuning profile. Must not know how
//! programs are run or simulated.

use super::calculation::{CalculatedTime, Calculator};
use super::candidates::{candidates, with_variant};
use super::lowering::Plan;
use super::planner::{self, Details};
use super::selection::{AlgorithmSelection, ShortPlan, is_automatic, select_algorithm, short_plans};
use super::thresholds::{MOST_CALCULATED, longest_one_shot};
use super::topology::Topology;
use super::tuning::TunedPlan;
use flexring_core::config::{Algorithm, Config, Lowering};
use flexring_core::error::Result;
use std::sync::Arc;

/// The plan of vectors up to a length.
#[derive(Clone, Debug)]
pub struct SizedPlan {
    /// For short vectors, whose time depends on the number of messages; `None` if it depends on bandwidth, or
    /// for a choice of a tuning profile.
    pub short: Option<ShortPlan>,
    /// What the plan has instead of the tree of the topology, as words; empty if it was not chosen by
    /// calculation.
    pub variant: String,
    /// Longest vector in bytes.
    pub longest: usize,
    /// Longest sub-chunk in bytes.
    pub subchunk: usize,
    /// The plan.
    pub plan: Arc<Plan>,
}

impl SizedPlan {
    /// Whether every rank can reduce a vector itself by this plan.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.short == Some(ShortPlan::Direct)
    }

    /// The schedule and the variant.
    #[must_use]
    pub fn name(&self) -> String {
        with_variant(self.plan.schedule().name(), &self.variant)
    }
}

/// The plans without the choices of a profile, in ascending order of the longest vectors: those for short
/// vectors, then `main`, which has no limit.
#[must_use]
pub fn untuned(config: &Config, topology: &Topology, main: Arc<Plan>) -> Vec<SizedPlan> {
    let subchunk = config.subchunk.0;
    let short = |(kind, longest): (ShortPlan, usize)| SizedPlan {
        short: Some(kind),
        variant: String::new(),
        longest,
        subchunk,
        plan: Arc::new(Plan::on(kind.schedule(topology), topology, Lowering::Direct)),
    };
    let mut plans: Vec<SizedPlan> = short_plans(config, topology).into_iter().map(short).collect();
    plans.dedup_by_key(|sized| sized.longest);
    plans.push(SizedPlan { short: None, variant: String::new(), longest: usize::MAX, subchunk, plan: main });
    plans
}

/// The plans that the settings select without a plan file and without the choices of a profile, in ascending
/// order of the longest vectors, and the reason for the last one.
///
/// # Errors
/// `InvalidSetting` if the algorithm that was set does not support the topology.
pub fn selected(config: &Config, topology: &Topology) -> Result<(Vec<SizedPlan>, AlgorithmSelection)> {
    let details = Details::of(config);
    let selection = select_algorithm(config.algo, topology, &details);
    let schedule = planner::plan(selection.algorithm, topology, &details)?;
    let main = Arc::new(Plan::on(schedule, topology, config.lowering));
    let untuned = untuned(config, topology, main);
    // Ranks of one node read each other's memory, which takes as long as they share caches and cores. Where
    // links form no tree, the plan is the best for them.
    let calculates = is_automatic(config)
        && topology.fabric().is_none()
        && topology.nodes() > 1
        && (3..=MOST_CALCULATED).contains(&topology.world())
        && !config.reproducible.0;
    Ok(if calculates { calculated(config, topology, untuned, selection) } else { (untuned, selection) })
}

/// A plan replaces the one for the shape of the topology if its calculated time is less than this part of the
/// least time of the other at some length. It is then used for all lengths at which it is faster.
const CLEARLY_FASTER: f64 = 0.85;

/// As [`CLEARLY_FASTER`], for a plan whose calculated time [is exact](CalculatedTime::is_exact).
const FASTER: f64 = 0.95;

/// Bytes of the longest vectors for which times are calculated. The fastest plan is the same for longer ones.
const LONGEST_CALCULATED: u64 = 1 << 30;

/// A plan with its calculated time.
struct TimedPlan {
    plan: SizedPlan,
    time: CalculatedTime,
    /// Candidates are for vectors of any length.
    is_candidate: bool,
}

/// Replaces plans of `untuned` where others are clearly faster by calculation. Those for messages that are so
/// short that only their number counts stay.
fn calculated(
    config: &Config,
    topology: &Topology,
    untuned: Vec<SizedPlan>,
    mut selection: AlgorithmSelection,
) -> (Vec<SizedPlan>, AlgorithmSelection) {
    let calculator = Calculator::new(topology);
    let is_kept = |sized: &SizedPlan| sized.short.is_some_and(|short| short != ShortPlan::Halving);
    let (mut plans, rest): (Vec<SizedPlan>, Vec<SizedPlan>) = untuned.into_iter().partition(is_kept);
    let shortest = plans.last().map_or(0, |sized| sized.longest as u64);
    let mut timed: Vec<TimedPlan> = rest
        .into_iter()
        .map(|plan| TimedPlan { time: calculator.time(&plan.plan), plan, is_candidate: false })
        .collect();
    let (subchunk, main) = (config.subchunk.0, timed.len() - 1);
    let mut algorithms = vec![selection.algorithm; timed.len()];
    for candidate in candidates(topology) {
        if timed.iter().all(|other| other.plan.plan.digest() != candidate.plan.digest()) {
            algorithms.push(candidate.algorithm);
            timed.push(TimedPlan {
                time: calculator.time(&candidate.plan),
                plan: SizedPlan {
                    short: None,
                    variant: candidate.variant,
                    longest: usize::MAX,
                    subchunk,
                    plan: Arc::new(candidate.plan),
                },
                is_candidate: true,
            });
        }
    }
    let seconds = |at: usize, bytes: u64| timed[at].time.seconds(bytes, subchunk);
    let least = |at: usize, bytes: u64| timed[at].time.least_seconds(bytes, subchunk);
    // A rank that sends whole vectors needs a core that keeps up with the link.
    let is_uneven = |at: usize| matches!(algorithms[at], Algorithm::LocalMaster | Algorithm::Tree);
    let cost = |at: usize, bytes: u64| seconds(at, bytes) / if is_uneven(at) { CLEARLY_FASTER } else { 1.0 };
    // From long vectors to short ones: the longest vector of each choice, in descending order.
    let mut choices: Vec<(usize, u64)> = vec![(main, u64::MAX)];
    let mut bytes = LONGEST_CALCULATED;
    while bytes > shortest {
        let usable = |at: &usize| timed[*at].is_candidate || bytes <= timed[*at].plan.longest as u64;
        let all = (0..timed.len()).filter(usable);
        let best = all.min_by(|one, other| cost(*one, bytes).total_cmp(&cost(*other, bytes)));
        let Some(best) = best else { break };
        let part = if timed[best].time.is_exact(bytes, subchunk) { FASTER } else { CLEARLY_FASTER };
        let is_close = |at: usize| cost(best, bytes) >= part * least(at, bytes);
        let current = choices[choices.len() - 1].0;
        if !is_close(current) {
            // The plan for the shape of the topology and this length, if it is as good.
            let usual = (0..=main).find(usable).filter(|at| is_close(*at));
            let next = usual.unwrap_or(best);
            let is_faster = |bytes| cost(next, bytes) < least(current, bytes);
            let most = choices[choices.len() - 1].1;
            let mut length = bytes;
            while length < most.min(LONGEST_CALCULATED) && is_faster(2 * length) {
                length *= 2;
            }
            let longest = if length >= most.min(LONGEST_CALCULATED) {
                choices.pop();
                most
            } else {
                crossing(length, 2 * length, is_faster).min(most)
            };
            choices.push((next, longest));
        }
        bytes /= 2;
    }
    for (at, longest) in choices.into_iter().rev() {
        let longest = usize::try_from(longest).unwrap_or(usize::MAX);
        if at > main && longest == usize::MAX {
            selection = AlgorithmSelection {
                algorithm: algorithms[at],
                reason: format!(
                    "{} is calculated to be faster than {} for long vectors",
                    with_variant(algorithms[at].name(), &timed[at].plan.variant),
                    selection.algorithm.name()
                ),
            };
        }
        let plan = timed[at].plan.clone();
        plans.push(SizedPlan { longest: longest.min(plan.longest), ..plan });
    }
    (plans, selection)
}

/// About the longest length from `low` on, a power of two, for which `holds`, less than `high`, for which it
/// need not.
fn crossing(mut low: u64, mut high: u64, holds: impl Fn(u64) -> bool) -> u64 {
    // A number that is easy to read, at most 2 % less.
    let grain = (low / 64).max(1);
    while high - low > grain {
        let middle = low + (high - low) / 2;
        if holds(middle) { low = middle } else { high = middle }
    }
    low / grain * grain
}

/// The plans with these choices for vectors longer than `FLEXRING_SMALL`, or than those that are exchanged in
/// one hop. Shorter ones, and those whose choice is so, keep their `untuned` plans.
#[must_use]
pub fn tuned(untuned: &[SizedPlan], choices: Vec<TunedPlan>, config: &Config) -> Vec<SizedPlan> {
    let direct = untuned.first().filter(|sized| sized.is_direct());
    let one_shot = direct.map_or(0, |sized| longest_one_shot(config, sized.plan.schedule().world()));
    let small = config.small.0.max(one_shot);
    let mut plans = Vec::<SizedPlan>::new();
    let untuned_up_to = |plans: &mut Vec<SizedPlan>, most: usize, subchunk: Option<usize>| {
        let before = plans.last().map_or(0, |sized| sized.longest);
        for sized in untuned {
            let is_needed = sized.longest > before && plans.last().is_none_or(|last| last.longest < most);
            if is_needed {
                let subchunk = subchunk.unwrap_or(sized.subchunk);
                plans.push(SizedPlan { longest: sized.longest.min(most), subchunk, ..sized.clone() });
            }
        }
    };
    if small > 0 {
        untuned_up_to(&mut plans, small, None);
    }
    for TunedPlan { choice, plan } in choices {
        let longest = choice.up_to.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
        if plans.last().is_some_and(|last| longest <= last.longest) {
            continue;
        }
        match plan {
            Some(plan) => {
                let subchunk = choice.subchunk.0;
                let plan = Arc::new(plan);
                plans.push(SizedPlan { short: None, variant: String::new(), longest, subchunk, plan });
            }
            None => untuned_up_to(&mut plans, longest, Some(choice.subchunk.0)),
        }
    }
    plans
}
