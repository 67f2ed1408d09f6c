//! The proof of a plan, in words.
//!
//! Owns the words. What is proved is the verifier's business.

use super::Planned;
use crate::error::CommandError;
use flexring::plan::verifier::VerifiedPlan;

/// What was proved, or as a failure what was refuted.
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
  bits      ranks that get the same part get it by the same additions in the same order
  links     both ends of every link list the same messages in the same order
  progress  the earliest message that is not through can always move, so nobody waits for ever
  memory    nothing is overwritten that is still read, and nothing is read that is still written
",
        schedule.name()
    ))
}
