//! The check for data races within one rank: reads of unfinished writes, and writes over unfinished reads.
//! Data to pass on is written once, so only its reads can race. With waves, a place of scratch memory is used
//! again by later sub-chunks.
//!
//! Owns the memory of one rank.

use super::segments::{cuts, range};
use crate::fraction::Fraction;
use crate::program::{Body, BufferKind, DependencyKind, OperandSource, Program, StepId};
use std::collections::HashMap;

/// The last accesses to a segment of a rank's memory.
#[derive(Clone, Default)]
struct Accesses {
    writer: Option<StepId>,
    /// Steps that read after the writer, and whether they read the input. Reads of the input matter in place
    /// only.
    readers: Vec<(StepId, bool)>,
    /// The last step that wrote it to the memory for data to pass on.
    passed_on: Option<StepId>,
}

/// Checks that each step of `program` waits for all earlier steps that it conflicts with.
pub(super) fn memory(program: &Program) -> std::result::Result<(), String> {
    let cuts = cuts(std::iter::once(program));
    let mut accesses = vec![Accesses::default(); cuts.len()];
    for (number, step) in (0..).zip(&program.steps) {
        let on: HashMap<StepId, bool> = program
            .dependencies(number)
            .iter()
            .filter(|dependency| dependency.kind != DependencyKind::Reuse)
            .map(|dependency| (dependency.on, dependency.kind == DependencyKind::ElementsInPlace))
            .collect();
        let race = |other: StepId| {
            Err(format!(
                "rank {}: step {number} does not wait for step {other}, which uses {} too",
                program.rank,
                step.span()
            ))
        };
        let reads = |wanted| match &*step.body {
            Body::Send { buffer, .. } => *buffer == wanted,
            Body::Combine { operands, .. } => operands
                .iter()
                .any(|operand| matches!(operand, OperandSource::Own { buffer, .. } if *buffer == wanted)),
        };
        let (reads_output, reads_input) = (reads(BufferKind::Output), reads(BufferKind::Input));
        let combines = matches!(*step.body, Body::Combine { .. });
        let passes_on = combines && step.destination() == BufferKind::Transit;
        let writes = combines && !passes_on;
        for segment in &mut accesses[range(&cuts, step.span())] {
            if reads(BufferKind::Transit)
                && segment.passed_on.is_none_or(|writer| on.get(&writer) != Some(&false))
            {
                return Err(format!(
                    "rank {}: step {number} does not wait for {} that it passes on",
                    program.rank,
                    step.span()
                ));
            }
            if passes_on && segment.passed_on.replace(number).is_some() {
                return Err(format!("rank {}: {} is kept twice to pass it on", program.rank, step.span()));
            }
            if !(reads_output || reads_input || writes) {
                continue;
            }
            if let Some(writer) = segment.writer {
                if reads_input && !writes {
                    return Err(format!(
                        "rank {}: {} is sent from the input after it was added to",
                        program.rank,
                        step.span()
                    ));
                }
                if on.get(&writer) != Some(&false) {
                    return race(writer);
                }
            }
            if reads_output && segment.writer.is_none() {
                return Err(format!("rank {}: {} is read before it is written", program.rank, step.span()));
            }
            if writes {
                for (reader, input) in &segment.readers {
                    if *input && program.held_spans.disjoint {
                        continue;
                    }
                    if on.get(reader).is_none_or(|in_place_only| *in_place_only && !input) {
                        return race(*reader);
                    }
                }
                segment.writer = Some(number);
                segment.readers.clear();
            } else {
                segment.readers.push((number, reads_input));
            }
        }
    }
    if program.waves.is_some() { reuse(program, &cuts) } else { Ok(()) }
}

/// Checks that the first step that uses a segment outside of the caller's output waits until earlier
/// sub-chunks that were at the same places are used up: for each step that uses the segment or one before it
/// in the same grid, unless a later step waits for that one.
fn reuse(program: &Program, cuts: &[Fraction]) -> std::result::Result<(), String> {
    let waits = |step: StepId, kind: DependencyKind, on: StepId| {
        program.dependencies(step).iter().any(|dependency| dependency.on == on && dependency.kind == kind)
    };
    let mut users: Vec<Vec<StepId>> = vec![Vec::new(); cuts.len()];
    let held = range(cuts, program.held_spans.output);
    for (number, step) in (0..).zip(&program.steps) {
        if matches!(*step.body, Body::Send { buffer: BufferKind::Input, .. }) {
            continue;
        }
        let outside = range(cuts, step.span()).filter(|segment| !held.contains(segment));
        outside.for_each(|segment| users[segment].push(number));
    }
    for segment in (0..cuts.len()).filter(|segment| !users[*segment].is_empty()) {
        let first = users[segment][0];
        let grid = range(cuts, program.steps[first as usize].place.grid);
        for before in &users[grid.start..=segment] {
            for user in before {
                let is_followed = before.iter().any(|later| waits(*later, DependencyKind::Elements, *user));
                if !is_followed && !waits(first, DependencyKind::Reuse, *user) {
                    return Err(format!(
                        "rank {}: step {first} does not wait until step {user} is done with the place of {} in scratch memory",
                        program.rank,
                        program.steps[first as usize].span()
                    ));
                }
            }
        }
    }
    Ok(())
}
