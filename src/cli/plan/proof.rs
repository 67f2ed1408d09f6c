//! The output of `flexring plan --verify`.
//!
//! Owns the text. Must not know how plans are verified.

use super::planned::Planned;
use crate::error::CommandError;
use flexring::plan::verifier::VerifiedPlan;

/// Verifies the plan and returns a description of what was proved. The error names the property that fails.
pub fn text(planned: &Planned) -> Result<String, CommandError> {
    let Planned { schedule, topology, called, file, .. } = planned;
    let world = topology.world();
    if let Err(error) = VerifiedPlan::for_all(planned.lowered()) {
        let file = file.as_ref().map_or_else(String::new, |file| format!("{file}: "));
        return Err(CommandError::Failed(format!("{file}{}", error.message())));
    }
    Ok(format!(
        "the {} plan on {called} holds, for vectors of any length, cut into sub-chunks of any size, in any number of \
         slots, in every collective:
  sums      every part of every result has each of the {world} contributions exactly once
  bits      ranks that get the same part compute it by the same additions in the same order
  links     both ends of every link list the same messages in the same order
  progress  the earliest unfinished message can always move, so no rank waits forever
  memory    no memory is overwritten while it is read, or read while it is written
",
        schedule.name()
    ))
}
