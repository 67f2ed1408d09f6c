//! The settings, the topology and the plans of a communicator with a profile.
//!
//! Owns the precedence: settings that the user has given win over measured ones.

use super::links;
use super::profile::{MeasuredChoice, TuningProfile};
use crate::lowering::Plan;
use crate::planner::{self, Details};
use crate::selection::is_automatic;
use crate::topology::Topology;
use flexring_core::config::{Algorithm, Config, Size};
use flexring_core::error::Result;

/// A plan that a profile chooses.
#[derive(Clone, Debug)]
pub struct TunedPlan {
    /// The choice that it is for.
    pub choice: MeasuredChoice,
    /// The plan; `None` if the choice is the plans without a profile.
    pub plan: Option<Plan>,
}

impl TuningProfile {
    /// The settings of a communicator on this cluster: those of the profile, unless the user has given them
    /// or `config` has other values than the defaults. Sub-chunks have room for the longest of all choices
    /// and for those of vectors without a choice.
    #[must_use]
    pub fn configure(&self, config: &Config) -> Config {
        let defaults = Config::default();
        let mut tuned = config.clone();
        if config.slots == defaults.slots && !config.given.contains("FLEXRING_SLOTS") {
            tuned.slots = self.slots;
        }
        if config.sockets_per_link == defaults.sockets_per_link
            && !config.given.contains("FLEXRING_SOCKETS_PER_LINK")
        {
            tuned.sockets_per_link = self.sockets_per_link;
        }
        if fixed_subchunk(config).is_none() && is_automatic(config) {
            let longest = self.choices.iter().map(|choice| choice.subchunk).max();
            tuned.subchunk = longest.map_or(config.subchunk, |longest| longest.max(config.subchunk));
        }
        tuned
    }

    /// The topology with the measured uplinks of nodes. The nodes of both are in the same order.
    #[must_use]
    pub fn topology(&self, topology: &Topology) -> Topology {
        links::measured(topology, self)
    }

    /// The plans of the choices on `topology`, which has the measured links, in ascending order of the length
    /// of vectors. Empty if the settings name a plan, or if there are no choices. `config` is what the user
    /// has set.
    ///
    /// # Errors
    /// `InvalidSetting` if a planner does not support the topology.
    pub fn plans(&self, config: &Config, topology: &Topology) -> Result<Vec<TunedPlan>> {
        if !is_automatic(config) {
            return Ok(Vec::new());
        }
        let fixed = fixed_subchunk(config);
        let details = Details::of(config);
        let plan = |choice: &MeasuredChoice| {
            let choice = MeasuredChoice { subchunk: fixed.unwrap_or(choice.subchunk), ..*choice };
            if choice.algorithm == Algorithm::Auto {
                return Ok(TunedPlan { choice, plan: None });
            }
            let schedule = planner::plan(choice.algorithm, topology, &details);
            let schedule = schedule.map_err(|error| {
                error.context(format_args!("the tuning profile chooses {}", choice.algorithm.name()))
            })?;
            Ok(TunedPlan { choice, plan: Some(Plan::on(schedule, topology, choice.lowering)) })
        };
        self.choices.iter().map(plan).collect()
    }
}

/// The length of sub-chunks, if the user has set it.
fn fixed_subchunk(config: &Config) -> Option<Size> {
    let is_set = config.given.contains("FLEXRING_SUBCHUNK") || config.subchunk != Config::default().subchunk;
    is_set.then_some(config.subchunk)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tuning::parse;

    fn profile() -> TuningProfile {
        parse("f", include_str!("../../../../tests/data/tuning.toml")).expect("a profile")
    }

    #[test]
    fn settings_of_the_user_win_over_the_profile() {
        let (profile, defaults) = (profile(), Config::default());
        let tuned = profile.configure(&defaults);
        assert_eq!((tuned.subchunk, tuned.slots, tuned.sockets_per_link), (Size(256 << 10), 128, 2));
        let set = Config { subchunk: Size(64 << 10), slots: 32, sockets_per_link: 4, ..defaults.clone() };
        assert_eq!(profile.configure(&set), set);
        let ring = Config { algo: Algorithm::Ring, ..defaults.clone() };
        assert_eq!(profile.configure(&ring).subchunk, ring.subchunk);
        let given = ["FLEXRING_SUBCHUNK", "FLEXRING_SLOTS", "FLEXRING_SOCKETS_PER_LINK"];
        let given = Config { given: given.into(), ..defaults };
        assert_eq!(profile.configure(&given), given);
        let plans = profile.plans(&given, &Topology::from_names(&["a", "a", "b", "c"])).expect("plans");
        assert!(plans.iter().all(|tuned| tuned.choice.subchunk == given.subchunk));
    }

    #[test]
    fn sub_chunks_of_vectors_without_a_choice_have_room() {
        let mut profile = profile();
        profile.choices.iter_mut().for_each(|choice| choice.subchunk = Size(64 << 10));
        assert_eq!(profile.configure(&Config::default()).subchunk, Config::default().subchunk);
    }

    #[test]
    fn a_choice_of_auto_is_the_plan_without_a_profile() {
        let mut profile = profile();
        profile.choices[1].algorithm = Algorithm::Auto;
        let topology = Topology::from_names(&["a", "a", "b", "c"]);
        let plans = profile.plans(&Config::default(), &topology).expect("plans");
        assert!(plans[0].plan.is_some() && plans[1].plan.is_none());
    }

    #[test]
    fn choices_become_plans_unless_the_settings_name_one() {
        let (profile, config) = (profile(), Config::default());
        let topology = profile.topology(&Topology::from_names(&["a", "a", "b", "c"]));
        let plans = profile.plans(&config, &topology).expect("plans");
        let names: Vec<&str> =
            plans.iter().flat_map(|tuned| &tuned.plan).map(|plan| plan.schedule().name()).collect();
        assert_eq!(names, ["ring", "weighted"]);
        assert_eq!(plans[0].choice.up_to, Some(64 << 10));
        let set = Config { subchunk: Size(64 << 10), ..config.clone() };
        let plans = profile.plans(&set, &topology).expect("plans");
        assert!(plans.iter().all(|tuned| tuned.choice.subchunk == Size(64 << 10)));
        let ring = Config { algo: Algorithm::Ring, ..config };
        assert!(profile.plans(&ring, &topology).expect("no plans").is_empty());
    }
}
