//! The default output of `flexring plan`: tables of levels, as in the figures of the papers.
//!
//! Owns the layout.

use super::planned::Planned;
use crate::output::counted;
use flexring_plan::Rank;
use flexring_plan::fraction::Span;
use flexring_plan::schedule::{Group, Level, Shard};
use flexring_simulator::level_descriptions::describe_levels;

/// The output: a table for each level, and one of the owners.
pub fn text(planned: &Planned, count: Option<u64>) -> String {
    let (schedule, topology) = (planned.schedule(), &planned.topology);
    let mut text = format!("{} on {}\n{}\n", schedule.name(), planned.place(), planned.selection.reason);
    let mut calls = 0;
    for (number, (level, description)) in
        schedule.levels().iter().zip(describe_levels(schedule, topology)).enumerate()
    {
        text += &format!("\nlevel {number}: {description}\n{}", table(level, count));
        calls += level.groups().iter().filter(|group| group.moves()).count();
    }
    text += "\nowners at the end\n";
    let row = |shard: &Shard| {
        let owner = shard.owner.to_string();
        cells(count, &shard.span.to_string(), &elements(shard.span, count), &[&owner])
    };
    text += &rows(cells(count, "span", "elements", &["rank"]), schedule.shards(), "shard", row);
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
        let (participants, root) = (participants(group), group.root.to_string());
        cells(count, &group.span.to_string(), &elements(group.span, count), &[&participants, &root])
    };
    rows(cells(count, "span", "elements", &["participants", "root"]), level.groups(), "group", row)
}

/// Most lines of a table. Of longer ones, the first and the last are shown.
const MOST_ROWS: usize = 300;

/// Most participants of a group that are listed.
const MOST_PARTICIPANTS: usize = 1000;

/// The table of `items`, each of which is a `noun`: the line `head` and one for each item. Without the middle
/// if they are too many.
fn rows<T>(head: Vec<String>, items: &[T], noun: &str, row: impl Fn(&T) -> Vec<String>) -> String {
    let shown = if items.len() > MOST_ROWS { MOST_ROWS / 2 } else { items.len() };
    let last = &items[items.len().saturating_sub(shown).max(shown)..];
    let head = std::iter::once(head);
    let mut lines: Vec<Vec<String>> = head.chain(items[..shown].iter().chain(last).map(row)).collect();
    let left_out = items.len() - shown - last.len();
    if left_out > 0 {
        lines.insert(1 + shown, vec![format!("... {} ...", counted(left_out, noun))]);
    }
    aligned(&lines)
}

/// The participants of a group in the order of addition: all, or the first ones and the number of the others.
fn participants(group: &Group) -> String {
    let shown: Vec<Rank> = group.participants().take(MOST_PARTICIPANTS).collect();
    match group.len() - shown.len() {
        0 => runs(&shown),
        others => format!("{} and {others} more", runs(&shown)),
    }
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
