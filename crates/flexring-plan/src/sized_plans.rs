//! The list of a communicator's plans, each with the longest vector that uses it.
//!
//! Owns who decides: the settings, the shape of the topology ([`selection`](super::selection)), calculated
//! and simulated times ([`choice`](super::choice)), or the choices of a tuning profile. Must not know how
//! programs are run or simulated.

use super::choice::{Choice, Simulate};
use super::lowering::Plan;
use super::planner::{self, Details};
use super::selection::{AlgorithmSelection, ShortPlan, is_automatic, select_algorithm, short_plans};
pub use super::sized_plan::SizedPlan;
use super::thresholds::{MOST_CALCULATED, longest_one_shot};
use super::topology::Topology;
use super::tuning::TunedPlan;
use flexring_core::config::{Config, Lowering};
use flexring_core::error::Result;
use std::sync::Arc;

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
/// order of the longest vectors, and the reason for the last one. Where times decide, `simulate` is called
/// several times; if it returns none, calculated times decide.
///
/// # Errors
/// `InvalidSetting` if the algorithm that was set does not support the topology; those of `simulate`.
pub fn selected(
    config: &Config,
    topology: &Topology,
    simulate: &mut Simulate<'_>,
) -> Result<(Vec<SizedPlan>, AlgorithmSelection)> {
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
    if !calculates {
        return Ok((untuned, selection));
    }
    let mut choice = Choice::new(config, topology, untuned, selection);
    choice.simulate(topology, simulate)?;
    Ok(choice.decide())
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
