//! `flexring plan`: makes or reads a plan, and prints it as a table or JSON, draws, explains or verifies it.
//!
//! Owns the choice of outputs and the files they are written to.

mod explain;
mod options;
mod planned;
mod proof;
mod source;
mod table;

pub use options::PlanOptions;
pub use planned::{Planned, without_bound};
pub use source::PlanSource;

use crate::error::CommandError;
use crate::output;
use crate::output_file::expect_two_files;
use flexring::Error;
use flexring_plan::plan_file;
use flexring_simulator::drawing::{self, Labels};
use std::path::Path;

/// Runs the command.
pub fn run(options: &PlanOptions) -> Result<(), CommandError> {
    expect_two_files([("--write", options.write.as_deref()), ("--svg", options.svg.as_deref())])?;
    let planned = Planned::new(&options.source)?;
    if let Some(path) = &options.write {
        write(path, &json(&planned, None)?)?;
    }
    if let Some(path) = &options.svg {
        write(path, &draw(&planned, options.count)?)?;
    }
    let mut text = String::new();
    if options.json {
        text = json(&planned, options.count)?;
    } else if !options.explain && !options.verify && options.write.is_none() && options.svg.is_none() {
        text = table::text(&planned, options.count);
    }
    if options.explain {
        text += &explain::text(&planned, options.count);
    }
    if options.verify {
        let separator = if text.is_empty() { "" } else { "\n" };
        text = text + separator + &proof::text(&planned)?;
    }
    output::print(&text)
}

/// Most participants of all groups of a plan file: about 400 MB of text.
const MOST_PARTICIPANTS: usize = 16 << 20;

/// The plan as JSON. Spans are fractions, or with a `count` elements of a vector of that length.
fn json(planned: &Planned, count: Option<u64>) -> Result<String, CommandError> {
    let groups = planned.schedule().levels().iter().flat_map(|level| level.groups());
    let participants = groups.map(|group| group.len()).sum::<usize>();
    if participants > MOST_PARTICIPANTS {
        return Err(CommandError::Usage(format!(
            "the groups of this plan have {participants} participants, too many for JSON: expected at most \
             {MOST_PARTICIPANTS}"
        )));
    }
    Ok(plan_file::write(planned.schedule(), count) + "\n")
}

fn draw(planned: &Planned, count: Option<u64>) -> Result<String, CommandError> {
    let world = planned.schedule().world();
    if world > drawing::MOST_RANKS {
        let most = drawing::MOST_RANKS;
        return Err(CommandError::Usage(format!(
            "{world} ranks are too many for a drawing: expected at most {most}"
        )));
    }
    let labels = Labels { topology: &planned.called, count, lowering: planned.config.lowering };
    Ok(drawing::draw(planned.schedule(), &planned.topology, labels))
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    std::fs::write(path, text)
        .map_err(|cause| Error::io(format_args!("cannot write {}", path.display()), cause))
}
