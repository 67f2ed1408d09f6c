//! The output of `flexring plan --verify`.
//!
//! Owns the text.

use super::planned::Planned;
use crate::error::CommandError;
use crate::output::counted;
use flexring_plan::verifier::VerifiedPlan;

/// Most ranks of a plan that is verified. The work grows with more than the square of their number.
const MOST_RANKS: usize = 4096;

/// Verifies the plan and returns a description of what was proved. The error names the property that fails.
pub fn text(planned: &Planned) -> Result<String, CommandError> {
    let Planned { topology, called, file, .. } = planned;
    let world = topology.world();
    if world > MOST_RANKS {
        return Err(CommandError::Usage(format!(
            "{world} ranks are too many for a proof: expected at most {MOST_RANKS}"
        )));
    }
    if let Err(error) = VerifiedPlan::for_all(planned.lowered().clone()) {
        let file = file.as_ref().map_or_else(String::new, |file| format!("{file}: "));
        return Err(CommandError::Failed(format!("{file}{}", error.message())));
    }
    let helpers = planned.schedule().helpers().len();
    let contributions = world - helpers;
    let (collectives, note) = match helpers {
        0 => ("every collective", String::new()),
        _ => {
            ("all-reduces", format!("; {} contribute nothing and get no result", counted(helpers, "helper")))
        }
    };
    Ok(format!(
        "the {} plan on {called} holds, for vectors of any length, cut into sub-chunks of any size, in any number of \
         slots, in {collectives}:
  sums      every part of every result has each of the {contributions} contributions exactly once{note}
  bits      ranks that get the same part compute it by the same additions in the same order
  links     both ends of every link list the same messages in the same order
  progress  the earliest unfinished message can always move, so no rank waits forever
  memory    no memory is overwritten while it is read, or read while it is written
",
        planned.schedule().name()
    ))
}
