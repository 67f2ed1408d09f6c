//! A clause for each level of a schedule that says what it does, for tables and drawings.
//!
//! Owns the texts. They are derived from the groups and the topology, so they also fit plans from files. Must
//! not know which planner made the schedule, or where the texts are shown.

use flexring_plan::Rank;
use flexring_plan::fraction::Span;
use flexring_plan::schedule::{Level, Schedule};
use flexring_plan::topology::{Topology, VertexId, VertexKind};
use std::collections::BTreeSet;

/// A clause for each level, from the first to the last.
#[must_use]
pub fn describe_levels(schedule: &Schedule, topology: &Topology) -> Vec<String> {
    let mut has_contributed = vec![false; schedule.world()];
    let ranks_below = ranks_below(topology);
    let mut clauses = Vec::new();
    for level in schedule.levels() {
        let summary = LevelSummary::of(level, topology);
        clauses.push(clause(&summary, &has_contributed, topology, &ranks_below));
        for rank in summary.blocks.iter().flat_map(|block| &block.members) {
            has_contributed[*rank] = true;
        }
    }
    clauses
}

/// Consecutive groups with one participant set.
struct ParticipantBlock {
    members: BTreeSet<Rank>,
    roots: BTreeSet<Rank>,
    /// Participants of each group.
    size: usize,
    /// The lowest common ancestor of all members and roots.
    ancestor: VertexId,
}

/// What the description of a level depends on.
struct LevelSummary {
    blocks: Vec<ParticipantBlock>,
    /// Whether every group's span is the whole vector.
    whole: bool,
}

impl LevelSummary {
    fn of(level: &Level, topology: &Topology) -> Self {
        let (mut blocks, mut whole) = (Vec::new(), true);
        for (set, range) in level.blocks() {
            let groups: Vec<_> = level.groups()[range].iter().filter(|group| group.moves()).collect();
            if groups.is_empty() {
                continue;
            }
            whole &= groups.iter().all(|group| group.span == Span::WHOLE);
            let members: BTreeSet<Rank> = set.members().map(|(rank, _)| rank).collect();
            let roots: BTreeSet<Rank> = groups.iter().map(|group| group.root).collect();
            let leaves = members.iter().chain(&roots).map(|rank| topology.leaf(*rank));
            let ancestor =
                leaves.reduce(|one, other| topology.lowest_common_ancestor(one, other)).unwrap_or(0);
            blocks.push(ParticipantBlock { members, roots, size: set.len(), ancestor });
        }
        // Plans from files have a set for each group: join those with equal members.
        let mut joined: Vec<ParticipantBlock> = Vec::new();
        for block in blocks {
            match joined.last_mut() {
                Some(last) if last.members == block.members => last.roots.extend(block.roots),
                _ => joined.push(block),
            }
        }
        Self { blocks: joined, whole }
    }
}

/// The description of a level. `ranks_below` is that of the function of this name.
fn clause(
    summary: &LevelSummary,
    has_contributed: &[bool],
    topology: &Topology,
    ranks_below: &[usize],
) -> String {
    let blocks = &summary.blocks;
    let Some(first) = blocks.first() else { return "nothing moves".to_owned() };
    let Subject { subject, plural, ranks } = Subject::of(blocks, topology, ranks_below);
    let verb = |verb: &str| if plural { verb.to_owned() } else { format!("{verb}s") };
    let fresh = !blocks.iter().flat_map(|block| &block.members).any(|rank| has_contributed[*rank]);
    let roots = blocks.iter().map(|block| block.roots.len()).max().unwrap_or(0);
    if summary.whole {
        let onto = match (&blocks[..], roots) {
            ([_], 1) => format!("rank {}", first.roots.first().copied().unwrap_or_default()),
            (_, 1) => format!("one of {ranks}"),
            _ => format!("{roots} of {ranks}"),
        };
        let what = if fresh { "whole vectors" } else { "their sums" };
        return format!("{subject} {} {what} onto {onto}", verb("reduce"));
    }
    let all = blocks.iter().all(|block| block.members.is_subset(&block.roots));
    let holders = if plural { "they" } else { ranks };
    let (divide, some) = (verb("divide"), if all { String::new() } else { format!("{roots} of ") });
    match (fresh, all) {
        (true, _) => format!("{subject} {divide} the vector among {some}{ranks}"),
        // If all members are roots, naming them again adds nothing.
        (false, true) => format!("{subject} {divide} what {holders} hold"),
        (false, false) => format!("{subject} {divide} what {holders} hold among {some}{ranks}"),
    }
}

/// The grammatical subject of a description.
struct Subject {
    subject: String,
    plural: bool,
    /// How a clause with this subject refers to its ranks.
    ranks: &'static str,
}

impl Subject {
    fn of(blocks: &[ParticipantBlock], topology: &Topology, ranks_below: &[usize]) -> Self {
        let many = |subject: &str, ranks| Self { subject: subject.to_owned(), plural: true, ranks };
        let each = |subject: &str| Self { subject: subject.to_owned(), plural: false, ranks: "its ranks" };
        let vertices: BTreeSet<VertexId> = blocks.iter().map(|block| block.ancestor).collect();
        let places: BTreeSet<Tier> = vertices.iter().map(|vertex| Tier::of(topology, *vertex)).collect();
        let place = places.first().filter(|_| places.len() == 1);
        let [first, ..] = blocks else { return many("all ranks", "them") };
        let covers_subtree = |block: &ParticipantBlock| ranks_below[block.ancestor] == block.members.len();
        let alone = vertices.len() == blocks.len() && blocks.iter().all(covers_subtree);
        let by_branch = first.size < first.members.len();
        match place {
            Some(Tier::Node) if alone && topology.nodes() > 1 => each("each node"),
            Some(Tier::Switch) if alone => each("each switch"),
            Some(Tier::Nodes) if alone && by_branch => many("the nodes", "their ranks"),
            Some(Tier::Switches) if alone && by_branch => many("the switches", "their ranks"),
            _ if blocks.len() == 1 && first.members.len() == topology.world() => many("all ranks", "them"),
            _ if blocks.len() == 1 && is_one_of_each_node(first, topology) => {
                many("the nodes, by one rank each,", "these")
            }
            _ => {
                let place = place.filter(|_| topology.nodes() > 1).map_or("", |place| place.suffix());
                Self { subject: format!("{}{place}", group_sizes(blocks)), plural: true, ranks: "them" }
            }
        }
    }
}

/// The kind of vertex at which the ranks of a block meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Tier {
    Node,
    Switch,
    /// The root, if it connects nodes.
    Nodes,
    /// The root, if it connects switches only.
    Switches,
}

impl Tier {
    fn of(topology: &Topology, vertex: VertexId) -> Self {
        let vertices = topology.vertices();
        let switch = |child: &VertexId| vertices[*child].kind == VertexKind::Switch;
        match vertices[vertex].kind {
            VertexKind::Switch if vertex != 0 => Self::Switch,
            VertexKind::Switch if vertices[vertex].children.iter().all(switch) => Self::Switches,
            VertexKind::Switch => Self::Nodes,
            VertexKind::Node | VertexKind::Rank(_) => Self::Node,
        }
    }

    fn suffix(self) -> &'static str {
        match self {
            Self::Node => " of a node",
            Self::Switch => " of a switch",
            Self::Nodes => " of different nodes",
            Self::Switches => " of different switches",
        }
    }
}

/// By vertex, the number of ranks in its subtree.
fn ranks_below(topology: &Topology) -> Vec<usize> {
    let vertices = topology.vertices();
    let mut counts = vec![0; vertices.len()];
    for rank in 0..topology.world() {
        let up = std::iter::successors(Some(topology.leaf(rank)), |vertex| vertices[*vertex].parent);
        up.for_each(|vertex| counts[vertex] += 1);
    }
    counts
}

fn is_one_of_each_node(block: &ParticipantBlock, topology: &Topology) -> bool {
    let nodes: BTreeSet<usize> = block.members.iter().map(|rank| topology.node_of(*rank)).collect();
    nodes.len() == topology.nodes() && block.members.len() == nodes.len()
}

/// `3 ranks`, `pairs`, `groups of 3`, `groups of 2 to 4`.
fn group_sizes(blocks: &[ParticipantBlock]) -> String {
    let sizes = || blocks.iter().map(|block| block.members.len());
    match (sizes().min().unwrap_or(0), sizes().max().unwrap_or(0)) {
        (_, size) if blocks.len() == 1 => format!("{size} ranks"),
        (2, 2) => "pairs".to_owned(),
        (one, other) if one == other => format!("groups of {one}"),
        (one, other) => format!("groups of {one} to {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexring_core::config::Algorithm;
    use flexring_plan::plan_file;
    use flexring_plan::planner::{self, Details};
    use flexring_plan::topology_file::parse_short;

    fn clauses_of(topology: &str, algorithm: Algorithm) -> Vec<String> {
        let topology = parse_short(topology).expect("short form").expect("valid");
        let schedule = planner::plan(algorithm, &topology, &Details::default()).expect("possible");
        let found = describe_levels(&schedule, &topology);
        let copy =
            plan_file::parse("a file", &plan_file::write(&schedule, None)).expect("it was just written");
        assert_eq!(describe_levels(&copy, &topology).len(), found.len());
        found
    }

    #[test]
    fn clauses_name_the_tier_at_which_ranks_meet() {
        assert_eq!(
            clauses_of("2+3", Algorithm::Flexreduce),
            ["each node divides the vector among its ranks", "the nodes divide what they hold"]
        );
        assert_eq!(
            clauses_of("(2+3)+(4+1)", Algorithm::Flexreduce),
            [
                "each node divides the vector among its ranks",
                "each switch divides what its ranks hold",
                "the switches divide what they hold"
            ]
        );
        assert_eq!(clauses_of("2+3", Algorithm::Ring), ["all ranks divide the vector among them"]);
        assert_eq!(
            clauses_of("2+3", Algorithm::ParameterServer),
            ["all ranks divide the vector among 2 of them"]
        );
        assert_eq!(clauses_of("4", Algorithm::Star), ["all ranks reduce whole vectors onto rank 0"]);
        assert!(clauses_of("1", Algorithm::Flexreduce).is_empty());
    }

    #[test]
    fn clauses_name_the_size_of_groups() {
        assert_eq!(
            clauses_of("4+4", Algorithm::Rabenseifner),
            [
                "pairs of a node divide the vector among them",
                "pairs of a node divide what they hold",
                "pairs of different nodes divide what they hold"
            ]
        );
        assert_eq!(
            clauses_of("2+3", Algorithm::LocalMaster),
            [
                "each node reduces whole vectors onto one of its ranks",
                "the nodes, by one rank each, divide what they hold"
            ]
        );
        assert_eq!(
            clauses_of("7", Algorithm::Tree),
            ["groups of 3 reduce whole vectors onto one of them", "3 ranks reduce their sums onto rank 0"]
        );
    }
}
