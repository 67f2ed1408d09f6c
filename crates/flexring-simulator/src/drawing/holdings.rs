//! The spans that each rank holds after each level, and the flows between ranks.
//!
//! Owns the data of a drawing. Must not know how it is drawn.

use flexring_plan::Rank;
use flexring_plan::fraction::Span;
use flexring_plan::lowering::{chain_len, chain_rank};
use flexring_plan::schedule::{Group, Level, Schedule};
use flexring_plan::span_map::SpanMap;
use std::collections::BTreeMap;

/// By rank, the spans that it holds a partial sum of, in order. Adjacent spans are joined.
pub(super) type Holdings = Vec<Vec<Span>>;

/// The holdings before the first level and after each level.
pub(super) fn holdings(schedule: &Schedule) -> Vec<Holdings> {
    let mut ranks = vec![SpanMap::uniform(true); schedule.world()];
    let look = |ranks: &mut Vec<SpanMap<bool>>| -> Holdings {
        ranks.iter_mut().map(|rank| rank.parts_where(Span::WHOLE, |held| *held)).collect()
    };
    let mut columns = vec![look(&mut ranks)];
    for level in schedule.levels() {
        let moving = || level.groups().iter().filter(|group| group.moves());
        for group in moving() {
            for rank in group.participants() {
                ranks[rank].over(group.span).for_each(|held| *held = false);
            }
        }
        for group in moving() {
            ranks[group.root].over(group.span).for_each(|held| *held = true);
        }
        columns.push(look(&mut ranks));
    }
    columns
}

/// The data that one rank sends to another at a level; `amount` is a part of the vector (0 to 1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Flow {
    pub(super) from: Rank,
    pub(super) to: Rank,
    pub(super) amount: f64,
    /// Whether it is a hop of a chain.
    pub(super) is_chained: bool,
}

/// The flows of a level, one for each pair of ranks: to the root of each group, or from rank to rank if the
/// group is a chain.
pub(super) fn flows(level: &Level, is_chain: impl Fn(&Group) -> bool) -> Vec<Flow> {
    let mut amounts: BTreeMap<(Rank, Rank, bool), f64> = BTreeMap::new();
    for group in level.groups().iter().filter(|group| group.moves()) {
        let length = group.span.extent();
        if is_chain(group) {
            for place in 1..chain_len(group) {
                let (from, to) = (chain_rank(group, place - 1), chain_rank(group, place));
                *amounts.entry((from, to, true)).or_default() += length;
            }
            continue;
        }
        for rank in group.participants().filter(|rank| *rank != group.root) {
            *amounts.entry((rank, group.root, false)).or_default() += length;
        }
    }
    let flow = |((from, to, is_chained), amount)| Flow { from, to, amount, is_chained };
    amounts.into_iter().map(flow).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexring_plan::planner::{flexreduce, local_master};
    use flexring_plan::topology::Topology;

    fn text(column: &Holdings) -> Vec<String> {
        let text = |spans: &Vec<Span>| spans.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        column.iter().map(text).collect()
    }

    #[test]
    fn a_rank_no_longer_holds_spans_that_it_sent() {
        let topology = Topology::from_names(&["a", "a", "b", "b", "b"]);
        let columns = holdings(&flexreduce::plan(&topology).expect("small"));
        let [start, first, last] = &columns[..] else { panic!("two levels") };
        assert_eq!(text(start), ["[0, 1)"; 5]);
        assert_eq!(text(first), ["[0, 1/2)", "[1/2, 1)", "[0, 1/3)", "[1/3, 2/3)", "[2/3, 1)"]);
        assert_eq!(text(last), ["[1/6, 5/12)", "[7/12, 5/6)", "[0, 1/6)", "[5/12, 7/12)", "[5/6, 1)"]);
        let masters = holdings(&local_master::plan(&topology));
        assert_eq!(text(&masters[1]), ["[0, 1)", "", "[0, 1)", "", ""]);
    }

    #[test]
    fn flows_have_the_amount_between_two_ranks() {
        let topology = Topology::from_names(&["a", "a", "b", "b", "b"]);
        let schedule = flexreduce::plan(&topology).expect("small");
        let flows = flows(&schedule.levels()[1], |_| false);
        let pairs: Vec<_> = flows.iter().map(|flow| (flow.from, flow.to)).collect();
        assert_eq!(pairs, [(0, 2), (0, 3), (1, 3), (1, 4), (2, 0), (3, 0), (3, 1), (4, 1)]);
        let sent: f64 = flows.iter().filter(|flow| flow.from < 2).map(|flow| flow.amount).sum();
        assert!((sent - 0.5).abs() < 1e-9, "a node sends half of the vector");
    }
}
