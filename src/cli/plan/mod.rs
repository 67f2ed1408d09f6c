//! `flexring plan`: makes or reads a plan, and prints it as a table or JSON, draws, explains or verifies it.
//!
//! Owns the reading and writing of files, and the choice of outputs. Must not know how plans are made.

mod explain;
mod options;
mod proof;
mod table;

pub use options::PlanOptions;

use crate::error::CommandError;
use crate::output::{self, counted};
use crate::settings::warn_about_unknown_settings;
use flexring::Error;
use flexring::config::{Algorithm, Config, environment};
use flexring::description;
use flexring::plan::drawing::{self, Labels};
use flexring::plan::planner::{self, Details};
use flexring::plan::schedule::Schedule;
use flexring::plan::selection::{self, AlgorithmSelection};
use flexring::plan::topology::Topology;
use flexring::plan::{lowering, plan_file};
use std::path::Path;

/// The plan and its origin: the input of all outputs.
struct Planned {
    config: Config,
    topology: Topology,
    /// The name of the topology, for output.
    called: String,
    schedule: Schedule,
    selection: AlgorithmSelection,
    /// The file that the plan was read from, if any.
    file: Option<String>,
    count: Option<u64>,
}

impl Planned {
    fn lowered(&self) -> lowering::Plan {
        lowering::Plan::on(self.schedule.clone(), &self.topology, self.config.lowering)
    }

    /// `2+3: 5 ranks on 2 nodes`.
    fn place(&self) -> String {
        let (ranks, nodes) = (self.topology.world(), self.topology.nodes());
        format!("{}: {} on {}", self.called, counted(ranks, "rank"), counted(nodes, "node"))
    }
}

/// Runs the command.
pub fn run(options: &PlanOptions) -> Result<(), CommandError> {
    let planned = planned(options)?;
    if let Some(path) = &options.write {
        write(path, &(plan_file::write(&planned.schedule, None) + "\n"))?;
    }
    if let Some(path) = &options.svg {
        write(path, &draw(&planned)?)?;
    }
    let mut text = String::new();
    if options.json {
        text = plan_file::write(&planned.schedule, planned.count) + "\n";
    } else if !options.explain && !options.verify && options.write.is_none() && options.svg.is_none() {
        text = table::text(&planned);
    }
    if options.explain {
        text += &explain::text(&planned);
    }
    if options.verify {
        let separator = if text.is_empty() { "" } else { "\n" };
        text = text + separator + &proof::text(&planned)?;
    }
    output::print(&text)
}

/// Makes or reads the plan that flags and settings specify.
fn planned(options: &PlanOptions) -> Result<Planned, CommandError> {
    warn_about_unknown_settings();
    let settings = options.settings();
    let mut config = Config::read(|name| {
        let flag = settings.iter().find(|(flag, _)| *flag == name).map(|(_, value)| value.clone());
        flag.or_else(|| environment(name))
    })?;
    if options.plans() {
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
            if let Some(flag) = options.algo.as_ref().filter(|_| config.algo != Algorithm::Auto) {
                selection.reason = format!("--algo {flag} was given");
            }
            (planner::plan(selection.algorithm, &topology, &details)?, selection)
        }
    };
    let file = config.plan_file.clone();
    Ok(Planned { topology, called, schedule, selection, file, count: options.count, config })
}

/// The name of a topology: the short form, or the file name without its directory.
fn name(text: &str) -> String {
    let file = Path::new(text).file_name().filter(|_| text.contains('/'));
    file.map_or_else(|| text.to_owned(), |name| name.to_string_lossy().into_owned())
}

fn draw(planned: &Planned) -> Result<String, CommandError> {
    let world = planned.schedule.world();
    if world > drawing::MOST_RANKS {
        let most = drawing::MOST_RANKS;
        return Err(CommandError::Usage(format!(
            "{world} ranks are too many for a drawing: expected at most {most}"
        )));
    }
    let labels = Labels { topology: &planned.called, count: planned.count };
    Ok(drawing::draw(&planned.schedule, &planned.topology, labels))
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    let failed = |cause| Error::system(format!("cannot write {}: {cause}", path.display()));
    std::fs::write(path, text).map_err(failed)
}
