//! The plans of a communicator by the length of vectors.
//!
//! Owns which plan a length uses, without and with the choices of a tuning profile. Must not know how programs are run or simulated.

use super::lowering::Plan;
use super::selection::{ShortPlan, short_plans};
use super::thresholds::longest_one_shot;
use super::topology::Topology;
use super::tuning::TunedPlan;
use flexring_core::config::{Config, Lowering};
use std::sync::Arc;

/// The plan of vectors up to a length.
#[derive(Clone, Debug)]
pub struct SizedPlan {
    /// For short vectors, whose time depends on the number of messages; `None` if it depends on bandwidth, or for a choice of a
    /// tuning profile.
    pub short: Option<ShortPlan>,
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
}

/// The plans without the choices of a profile, in ascending order of the longest vectors: those for short vectors, then `main`, which has no
/// limit.
#[must_use]
pub fn untuned(config: &Config, topology: &Topology, main: Arc<Plan>) -> Vec<SizedPlan> {
    let subchunk = config.subchunk.0;
    let short = |(kind, longest): (ShortPlan, usize)| SizedPlan {
        short: Some(kind),
        longest,
        subchunk,
        plan: Arc::new(Plan::on(kind.schedule(topology), topology, Lowering::Direct)),
    };
    let mut plans: Vec<SizedPlan> = short_plans(config, topology).into_iter().map(short).collect();
    plans.dedup_by_key(|sized| sized.longest);
    plans.push(SizedPlan { short: None, longest: usize::MAX, subchunk, plan: main });
    plans
}

/// The plans with these choices for vectors longer than `FLEXRING_SMALL`, or than those that are exchanged in one hop. Shorter ones, and those
/// whose choice is so, keep their `untuned` plans.
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
                plans.push(SizedPlan { short: None, longest, subchunk, plan: Arc::new(plan) });
            }
            None => untuned_up_to(&mut plans, longest, Some(choice.subchunk.0)),
        }
    }
    plans
}
