//! The checks that both ends of every link list the same messages, and that one order of all messages has no
//! cycle.
//!
//! Owns the order of messages.

use crate::fraction::Span;
use crate::program::{Dependency, DependencyKind, Program, Step, StepId};

/// What both ends of a link must agree on for a message: its span, its grid and its depth.
fn signature(step: &Step) -> (Span, Span, u32) {
    (step.span(), step.place.grid, step.depth)
}

/// Checks that both ends of every link list the same messages in the same order.
pub(super) fn links(programs: &[Program]) -> std::result::Result<(), String> {
    for program in programs {
        let rank = program.rank;
        for (peer, traffic) in &program.links {
            let there = programs.get(*peer).and_then(|peer| peer.links.get(&rank));
            let receives = there.map(|traffic| &traffic.receives[..]).unwrap_or_default();
            let sends = there.map(|traffic| &traffic.sends[..]).unwrap_or_default();
            if traffic.sends.len() != receives.len() || traffic.receives.len() != sends.len() {
                return Err(format!(
                    "rank {rank} sends {} spans to rank {peer}, which expects {}, and expects {} of its {}",
                    traffic.sends.len(),
                    receives.len(),
                    traffic.receives.len(),
                    sends.len()
                ));
            }
            let mut last = None;
            for (ours, theirs) in traffic.sends.iter().zip(receives) {
                let (step, other) =
                    (&program.steps[ours.step as usize], &programs[*peer].steps[theirs.step as usize]);
                if signature(step) != signature(other) {
                    return Err(format!(
                        "rank {rank} sends {} where rank {peer} expects {}",
                        step.span(),
                        other.span()
                    ));
                }
                if program.waves != programs[*peer].waves {
                    return Err(format!("ranks {rank} and {peer} number their messages differently"));
                }
                if last.is_some_and(|last| last > step.depth) {
                    return Err(format!(
                        "messages from rank {rank} to rank {peer} are not in the order of depth"
                    ));
                }
                last = Some(step.depth);
            }
        }
    }
    Ok(())
}

/// Checks that each step waits for earlier messages only. Messages are ordered by depth, and at equal depth
/// by the step's index in its program. With waves, sub-chunks of one grid keep that order, and steps of
/// different grids must not depend on each other. A step that uses memory again waits for messages of earlier
/// sub-chunks, which a ring keeps so far apart that they are due before: see
/// [`ScratchSpan`](crate::program::ScratchSpan).
pub(super) fn progress(program: &Program) -> std::result::Result<(), String> {
    for (number, step) in (0..).zip(&program.steps) {
        for dependency in program.dependencies(number) {
            let before = &program.steps[dependency.on as usize];
            if dependency.kind == DependencyKind::Reuse {
                reuse(program, step, before)?;
                continue;
            }
            let local = before.is_local() || step.is_local();
            // A local step that no step waits for may wait for any step.
            let waits = |later: &StepId| {
                let names = |on: &Dependency| on.on == number && on.kind != DependencyKind::Reuse;
                program.dependencies(*later).iter().any(names)
            };
            let last = step.is_local() && !program.dependents(number).iter().any(waits);
            let rises =
                before.depth < step.depth || (before.depth == step.depth && before.is_local()) || last;
            if dependency.on >= number || !rises {
                return Err(format!(
                    "rank {}: {} at depth {} waits for {} at depth {}, which does not come before it",
                    program.rank,
                    step.span(),
                    step.depth,
                    before.span(),
                    before.depth
                ));
            }
            if program.waves.is_some() && !local && before.place.grid != step.place.grid {
                return Err(format!(
                    "rank {}: {} and {} depend on each other but are cut by different grids",
                    program.rank,
                    step.span(),
                    before.span()
                ));
            }
        }
    }
    Ok(())
}

/// Checks that `step` may wait for `on`, which is done with earlier sub-chunks of its scratch memory: their
/// steps must cut them alike, and the hops between them must be no more than those that the ring was made
/// for.
fn reuse(program: &Program, step: &Step, on: &Step) -> std::result::Result<(), String> {
    let ring = program.scratch.iter().find(|scratch| scratch.span == step.place.grid);
    if program.waves.is_some()
        && step.place.grid == on.place.grid
        && ring.is_some_and(|ring| on.depth <= step.depth + ring.hops)
    {
        return Ok(());
    }
    Err(format!(
        "rank {}: {} at depth {} waits for the memory of {} at depth {}, which may be due later",
        program.rank,
        step.span(),
        step.depth,
        on.span(),
        on.depth
    ))
}
