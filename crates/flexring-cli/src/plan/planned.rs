//! The plan that `flexring plan` prints, with its topology and settings.
//!
//! Owns the precedence of flags, settings and files.

use super::source::PlanSource;
use crate::error::CommandError;
use crate::output::counted;
use crate::settings::warn_about_unknown_settings;
use flexring::internal::description;
use flexring_core::config::{Algorithm, Config, environment};
use flexring_plan::lowering;
use flexring_plan::schedule::Schedule;
use flexring_plan::selection::AlgorithmSelection;
use flexring_plan::sized_plans::{self, SizedPlan};
use flexring_plan::topology::Topology;
use flexring_plan::tuning::{self, ClusterIdentity, TuningProfile};
use flexring_plan::verifier::VerifiedPlan;
use flexring_simulator::cost_model::lower_bound::{LowerBound, lower_bound};
use flexring_simulator::simulator::SimulationParameters;
use flexring_simulator::trials::simulate_all;
use std::path::Path;
use std::sync::Arc;

/// Most ranks of a plan file whose plan is proved unasked, which takes seconds with so many ranks.
const MOST_PROVED: usize = 512;

/// The plan and its origin: the input of all outputs.
pub struct Planned {
    /// The settings, with those of the tuning profile if there is one.
    pub config: Config,
    /// The cluster, with the links of the tuning profile if there is one.
    pub topology: Topology,
    /// The name of the topology, for output.
    pub called: String,
    pub selection: AlgorithmSelection,
    /// The file that the plan was read from, if any.
    pub file: Option<String>,
    /// The tuning profile, if there is one.
    pub profile: Option<TuningProfile>,
    /// The plans of vectors by their length, ascending. The last one has no limit.
    pub plans: Vec<SizedPlan>,
}

impl Planned {
    /// Makes or reads the plan that flags and settings specify.
    ///
    /// # Errors
    /// `Usage` if there is no topology or if it does not match the plan file or the tuning profile; `Failed`
    /// if a plan file of up to [`MOST_PROVED`] ranks has a plan that does not hold; any error of reading or
    /// planning.
    pub fn new(source: &PlanSource) -> Result<Self, CommandError> {
        warn_about_unknown_settings();
        let settings = source.settings();
        let mut config = Config::read(|name| {
            let flag = settings.iter().find(|(flag, _)| *flag == name).map(|(_, value)| value.clone());
            flag.or_else(|| environment(name))
        })?;
        if source.plans() {
            config.plan_file = None;
        }
        let read = config.plan_file.as_deref().map(description::plan).transpose()?;
        let tuning = match config.tuning.as_deref() {
            Some(path) => Some((path, tuning::parse(path, &description::tuning_profile(path)?)?)),
            None => None,
        };
        let (job, called) = match (&config.topology, &tuning, &read) {
            (Some(text), ..) => (description::topology(text, None)?, name(text)),
            (None, Some((path, profile)), _) => {
                (profile.cluster.topology().map_err(|error| error.context(path))?, name(path))
            }
            // A plan file has the number of ranks, but not their nodes.
            (None, None, Some(schedule)) => {
                let world = schedule.world();
                let nodes: Vec<String> = (0..world).map(|rank| format!("node {rank}")).collect();
                (Topology::from_names(&nodes), vec!["1"; world].join("+"))
            }
            (None, None, None) => {
                let message = "give --topology, such as --topology 2+3 for a node of two ranks and one of three, or the \
                             name of a file, or --tuning with a profile of flexring tune; or set FLEXRING_TOPOLOGY";
                return Err(CommandError::Usage(message.to_owned()));
            }
        };
        if let Some((path, profile)) = &tuning {
            check_cluster(path, profile, &job)?;
        }
        let profile = tuning.map(|(_, profile)| profile);
        let topology = profile.as_ref().map_or_else(|| job.clone(), |profile| profile.topology(&job));
        let choices = profile.as_ref().map_or(Ok(Vec::new()), |profile| profile.plans(&config, &topology))?;
        // As in a communicator: with choices, what has none is planned as without a profile.
        let planned_on = if choices.is_empty() { &topology } else { &job };
        let file = config.plan_file.clone();
        let (mut plans, mut selection) = match read {
            Some(schedule) => {
                let path = file.clone().unwrap_or_default();
                let (planned, world) = (schedule.world(), topology.world());
                if planned != world {
                    let message = format!(
                        "{path}: the plan is for {}, but the topology {called} has {world}",
                        counted(planned, "rank")
                    );
                    return Err(CommandError::Usage(message));
                }
                let main = lowering::Plan::on(schedule, planned_on, config.lowering);
                // A file may have a schedule that is no all-reduce. A communicator refuses it, too.
                if topology.world() <= MOST_PROVED {
                    VerifiedPlan::new(main.clone())
                        .map_err(|error| CommandError::Failed(format!("{path}: {}", error.message())))?;
                }
                let selection = AlgorithmSelection {
                    algorithm: Algorithm::Auto,
                    reason: format!("the plan {path} was given"),
                };
                (sized_plans::untuned(&config, planned_on, Arc::new(main)), selection)
            }
            None => {
                let (plans, mut selection) =
                    sized_plans::selected(&config, planned_on, &mut |topology, trials| {
                        Ok(simulate_all(&config, topology, trials))
                    })?;
                if let Some(flag) = source.algo.as_ref().filter(|_| config.algo != Algorithm::Auto) {
                    selection.reason = format!("--algo {flag} was given");
                }
                (plans, selection)
            }
        };
        // A plan that flags or files name is for vectors of all lengths.
        if file.is_some() || source.plans() {
            plans.drain(..plans.len() - 1);
        }
        if let Some(profile) = profile.as_ref().filter(|_| !choices.is_empty()) {
            selection.reason = format!("measured on {}: FLEXRING_TUNING", profile.date);
            plans = sized_plans::tuned(&plans, choices, &config);
        }
        Ok(Self { topology, called, selection, file, config, profile, plans })
    }

    /// The plan of long vectors.
    pub fn lowered(&self) -> &lowering::Plan {
        &self.plans[self.plans.len() - 1].plan
    }

    /// The schedule of long vectors.
    pub fn schedule(&self) -> &Schedule {
        self.lowered().schedule()
    }

    /// The least time of any schedule, unless the plan has helpers: other schedules sum what helpers do not
    /// contribute.
    pub fn bound(&self) -> Option<LowerBound> {
        self.schedule().helpers().is_empty().then(|| lower_bound(&self.topology)).flatten()
    }

    /// The plan of vectors of this many bytes.
    pub fn plan_of(&self, bytes: u64) -> &SizedPlan {
        let fits = |sized: &&SizedPlan| bytes <= sized.longest as u64;
        self.plans.iter().find(fits).unwrap_or(&self.plans[self.plans.len() - 1])
    }

    /// What a simulation assumes: the settings, and the rates of the tuning profile if there is one.
    pub fn parameters(&self) -> SimulationParameters {
        if let Some(profile) = &self.profile {
            return SimulationParameters::measured(profile, &profile.configure(&self.config));
        }
        let Config { subchunk, slots, socket_buffer, .. } = &self.config;
        SimulationParameters {
            subchunk: subchunk.0,
            slots: *slots,
            tcp_in_flight: socket_buffer.0,
            ..SimulationParameters::DEFAULT
        }
    }

    /// `2+3: 5 ranks on 2 nodes`.
    pub fn place(&self) -> String {
        let (ranks, nodes) = (self.topology.world(), self.topology.nodes());
        format!("{}: {} on {}", self.called, counted(ranks, "rank"), counted(nodes, "node"))
    }
}

/// Why a plan with helpers is not compared.
pub fn without_bound(helpers: usize) -> String {
    format!(
        "other schedules sum the vectors of all ranks, so they are not compared with one of {}",
        counted(helpers, "helper")
    )
}

/// Refuses a profile of another cluster than `job`, which has no hosts.
fn check_cluster(path: &str, profile: &TuningProfile, job: &Topology) -> Result<(), CommandError> {
    let mut hosts = vec![""; job.world().max(profile.cluster.world())];
    for node in &profile.cluster.nodes {
        node.ranks.iter().for_each(|rank| hosts[*rank] = &node.host);
    }
    let found = ClusterIdentity::new(job, &hosts, &profile.cluster.transport);
    match profile.cluster.difference(&found) {
        Some(difference) => Err(CommandError::Usage(format!(
            "{path} is not the profile of this topology: {}",
            difference.replace("the job", "the topology")
        ))),
        None => Ok(()),
    }
}

/// The name of a topology: the short form, or the file name without its directory.
fn name(text: &str) -> String {
    let file = Path::new(text).file_name().filter(|_| text.contains('/'));
    file.map_or_else(|| text.to_owned(), |name| name.to_string_lossy().into_owned())
}
