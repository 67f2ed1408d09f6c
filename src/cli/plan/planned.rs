//! The plan that `flexring plan` prints, with its topology and settings.
//!
//! Owns the precedence of flags, settings and files. Must not know how plans are printed.

use super::source::PlanSource;
use crate::error::CommandError;
use crate::output::counted;
use crate::settings::warn_about_unknown_settings;
use flexring::config::{Algorithm, Config, environment};
use flexring::description;
use flexring::plan::lowering;
use flexring::plan::planner::{self, Details};
use flexring::plan::schedule::Schedule;
use flexring::plan::selection::{self, AlgorithmSelection};
use flexring::plan::topology::Topology;
use std::path::Path;

/// The plan and its origin: the input of all outputs.
pub struct Planned {
    pub config: Config,
    pub topology: Topology,
    /// The name of the topology, for output.
    pub called: String,
    pub schedule: Schedule,
    pub selection: AlgorithmSelection,
    /// The file that the plan was read from, if any.
    pub file: Option<String>,
}

impl Planned {
    /// Makes or reads the plan that flags and settings specify.
    ///
    /// # Errors
    /// `Usage` if there is no topology or if it does not match the plan file; any error of reading or planning.
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
        let (topology, called) = match (&config.topology, &read) {
            (Some(text), _) => (description::topology(text, None)?, name(text)),
            // A plan file has the number of ranks, but not their nodes.
            (None, Some(schedule)) => {
                let world = schedule.world();
                let nodes: Vec<String> = (0..world).map(|rank| format!("node {rank}")).collect();
                (Topology::from_names(&nodes), vec!["1"; world].join("+"))
            }
            (None, None) => {
                let message = "give --topology, such as --topology 2+3 for a node of two ranks and one of three, or the \
                             name of a file; or set FLEXRING_TOPOLOGY";
                return Err(CommandError::Usage(message.to_owned()));
            }
        };
        let details = Details::of(&config);
        let (schedule, selection) = match read {
            Some(schedule) => {
                let path = config.plan_file.clone().unwrap_or_default();
                let (planned, world) = (schedule.world(), topology.world());
                if planned != world {
                    let message = format!(
                        "{path}: the plan is for {}, but the topology {called} has {world}",
                        counted(planned, "rank")
                    );
                    return Err(CommandError::Usage(message));
                }
                (
                    schedule,
                    AlgorithmSelection {
                        algorithm: Algorithm::Auto,
                        reason: format!("the plan {path} was given"),
                    },
                )
            }
            None => {
                let mut selection = selection::select_algorithm(config.algo, &topology, &details);
                if let Some(flag) = source.algo.as_ref().filter(|_| config.algo != Algorithm::Auto) {
                    selection.reason = format!("--algo {flag} was given");
                }
                (planner::plan(selection.algorithm, &topology, &details)?, selection)
            }
        };
        let file = config.plan_file.clone();
        Ok(Self { topology, called, schedule, selection, file, config })
    }

    /// The schedule with the lowering of the settings.
    pub fn lowered(&self) -> lowering::Plan {
        lowering::Plan::on(self.schedule.clone(), &self.topology, self.config.lowering)
    }

    /// `2+3: 5 ranks on 2 nodes`.
    pub fn place(&self) -> String {
        let (ranks, nodes) = (self.topology.world(), self.topology.nodes());
        format!("{}: {} on {}", self.called, counted(ranks, "rank"), counted(nodes, "node"))
    }
}

/// The name of a topology: the short form, or the file name without its directory.
fn name(text: &str) -> String {
    let file = Path::new(text).file_name().filter(|_| text.contains('/'));
    file.map_or_else(|| text.to_owned(), |name| name.to_string_lossy().into_owned())
}
