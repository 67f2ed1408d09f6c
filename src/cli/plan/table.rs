//! The default output of `flexring plan`: tables of levels, as in the figures of the papers.
//!
//! Owns the layout. Must not know where the plan comes from.

use super::planned::Planned;
use crate::output::counted;
use flexring::plan::Rank;
use flexring::plan::captions::captions;
use flexring::plan::fraction::Span;
use flexring::plan::schedule::{Group, Level};

/// The output: a table for each level, and one of the owners.
pub fn text(planned: &Planned) -> String {
    let Planned { schedule, topology, count, .. } = planned;
    let mut text = format!("{} on {}\n{}\n", schedule.name(), planned.place(), planned.selection.reason);
    let mut calls = 0;
    for (number, (level, caption)) in schedule.levels().iter().zip(captions(schedule, topology)).enumerate() {
        text += &format!("\nlevel {number}: {caption}\n{}", table(level, *count));
        calls += level.groups().iter().filter(|group| group.moves()).count();
    }
    text += "\nowners at the end\n";
    let mut lines = vec![cells(*count, "span", "elements", &["rank"])];
    for shard in schedule.shards() {
        lines.push(cells(
            *count,
            &shard.span.to_string(),
            &elements(shard.span, *count),
            &[&shard.owner.to_string()],
        ));
    }
    text += &aligned(&lines);
    let levels = schedule.levels().len();
    let average = calls as f64 / (levels * schedule.world()).max(1) as f64;
    text + &format!(
        "\n{} by {} at {}: {} for each rank and level on average\n",
        counted(calls, "call"),
        counted(schedule.world(), "rank"),
        counted(levels, "level"),
        decimal(average)
    )
}

fn table(level: &Level, count: Option<u64>) -> String {
    if level.groups().is_empty() {
        return String::new();
    }
    let row = |group: &Group| {
        let participants: Vec<Rank> = group.participants().collect();
        let (participants, root) = (runs(&participants), group.root.to_string());
        cells(count, &group.span.to_string(), &elements(group.span, count), &[&participants, &root])
    };
    let head = cells(count, "span", "elements", &["participants", "root"]);
    aligned(&std::iter::once(head).chain(level.groups().iter().map(row)).collect::<Vec<_>>())
}

/// The cells of a line. There is a column of elements only if the vector has a count.
fn cells(count: Option<u64>, span: &str, elements: &str, rest: &[&str]) -> Vec<String> {
    let elements = count.map(|_| elements);
    std::iter::once(span).chain(elements).chain(rest.iter().copied()).map(str::to_owned).collect()
}

fn elements(span: Span, count: Option<u64>) -> String {
    let range = span.elements(count.unwrap_or_default(), 1);
    if range.is_empty() { "none".to_owned() } else { format!("{}..{}", range.start, range.end) }
}

/// Ranks in the given order, with three or more consecutive ones as a range: `0-3 5`.
fn runs(ranks: &[Rank]) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut rest = ranks;
    while let Some(first) = rest.first() {
        let run = rest.iter().zip(*first..).take_while(|(rank, next)| *rank == next).count();
        let length = if run > 2 { run } else { 1 };
        parts.push(if length > 1 { format!("{first}-{}", rest[length - 1]) } else { first.to_string() });
        rest = &rest[length..];
    }
    parts.join(" ")
}

/// The lines with their columns aligned.
fn aligned(lines: &[Vec<String>]) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let cells: Vec<String> =
            line.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text += &format!("  {}\n", cells.join("  ").trim_end());
    }
    text
}

/// A number with at most two decimal places.
fn decimal(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_ranks_keep_the_order_of_addition() {
        assert_eq!(runs(&[1, 2, 3, 0]), "1-3 0");
        assert_eq!(runs(&[1, 0]), "1 0");
        assert_eq!(runs(&[0, 1, 3, 4, 5, 9]), "0 1 3-5 9");
        assert_eq!(runs(&[]), "");
    }

    #[test]
    fn numbers_have_no_trailing_zeros() {
        assert_eq!([1.0, 1.3, 0.666].map(decimal), ["1", "1.3", "0.67"]);
    }
}
