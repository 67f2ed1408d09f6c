//! The check that blocks which go by node get their places: all ranks number them alike, and what a step
//! reads from or writes to one of the caller's vectors is one piece of it.
//!
//! Owns the order of blocks.

use crate::Rank;
use crate::block_order::BlockOrder;
use crate::fraction::Span;
use crate::program::{Body, BufferKind, OperandSource, Program};
use std::collections::BTreeSet;

/// Checks all programs.
pub(super) fn blocks(programs: &[Program]) -> std::result::Result<(), String> {
    let Some(first) = programs.first() else { return Ok(()) };
    if let Some(other) = programs.iter().find(|program| program.blocks != first.blocks) {
        return Err(format!("ranks {} and {} number the blocks differently", first.rank, other.rank));
    }
    let Some(order) = &first.blocks else { return Ok(()) };
    let world = programs.len();
    let pairs: BTreeSet<(Rank, Rank)> = (0..world * world).map(|position| order.ranks_at(position)).collect();
    if order.world() != world || pairs.len() != world * world {
        return Err(format!("{} blocks have a place, and {world} ranks have {}", pairs.len(), world * world));
    }
    programs.iter().try_for_each(|program| pieces(program, order))
}

/// Checks the steps of one rank.
fn pieces(program: &Program, order: &BlockOrder) -> std::result::Result<(), String> {
    for step in &program.steps {
        let reads_input = match &*step.body {
            Body::Send { buffer, .. } => *buffer == BufferKind::Input,
            Body::Combine { operands, .. } => operands
                .iter()
                .any(|operand| matches!(operand, OperandSource::Own { buffer: BufferKind::Input, .. })),
        };
        let writes_output =
            matches!(*step.body, Body::Combine { .. }) && step.destination() == BufferKind::Output;
        let whole_blocks = |span: Span| {
            let blocks = (order.world() * order.world()) as u64;
            let elements = span.elements(blocks, 1);
            let cut = |at: u64| Span::part(at as usize, blocks as usize).start;
            let end = if elements.end == blocks { Span::WHOLE.end } else { cut(elements.end) };
            !elements.is_empty() && cut(elements.start) == span.start && end == span.end
        };
        let apart = reads_input && !order.is_one_piece(step.span(), false)
            || writes_output && !order.is_one_piece(step.span(), true);
        if apart || !whole_blocks(step.span()) {
            return Err(format!("rank {}: {} is not one piece of a vector", program.rank, step.span()));
        }
    }
    Ok(())
}
