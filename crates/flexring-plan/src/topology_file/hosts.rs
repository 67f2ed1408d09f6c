//! The placement of ranks on nodes, by the rank numbers of a description or by host names.
//!
//! Owns the comparison of names, and the check that each rank is on exactly one node.

use super::super::Rank;
use super::draft::{Draft, DraftId, DraftKind};
use super::limits::MAX_RANKS;
use crate::source_file::SourceFile;
use flexring_core::error::Result;
use std::collections::HashMap;

/// Assigns every rank of the world to a node. Rank numbers in the description take precedence over names;
/// nodes without rank numbers get the ranks of the host that their name matches.
pub(super) fn assign_ranks(file: SourceFile, draft: &mut Draft, hosts: Option<&[String]>) -> Result<()> {
    let nodes: Vec<DraftId> = (0..draft.vertices.len())
        .filter(|id| matches!(draft.vertices[*id].kind, DraftKind::Node { .. }))
        .collect();
    let placements = explicit_placements(file, draft, &nodes, hosts.map(<[String]>::len))?;
    match hosts {
        Some(hosts) => assign_by_host(file, draft, &nodes, &placements, hosts),
        None => assign_in_order(file, draft, &nodes, &placements),
    }
}

/// By rank, the node and line that list it in the description.
fn explicit_placements(
    file: SourceFile,
    draft: &Draft,
    nodes: &[DraftId],
    world: Option<usize>,
) -> Result<Vec<Option<(DraftId, usize)>>> {
    let mut placements: Vec<Option<(DraftId, usize)>> = vec![None; world.unwrap_or(0)];
    for id in nodes {
        for (rank, line) in ranks_of(draft, *id).unwrap_or_default() {
            let refuse = |message: String| Err(file.refuse(*line, message));
            match world {
                Some(world) if *rank >= world => {
                    let ranks = if world == 1 { "rank" } else { "ranks" };
                    return refuse(format!(
                        "there is no rank {rank}: the job has {world} {ranks}, counted from 0"
                    ));
                }
                None if *rank >= MAX_RANKS => {
                    return refuse(format!("there is no rank {rank}: expected at most {}", MAX_RANKS - 1));
                }
                _ => placements.resize(placements.len().max(rank + 1), None),
            }
            if let Some((other, before)) = placements[*rank].replace((*id, *line)) {
                let name = |id: DraftId| &draft.vertices[id].name;
                return refuse(format!(
                    "rank {rank} is on {} and, in line {before}, on {}: expected each rank once",
                    name(*id),
                    name(other)
                ));
            }
        }
    }
    Ok(placements)
}

fn ranks_of(draft: &Draft, id: DraftId) -> Option<&[(Rank, usize)]> {
    match &draft.vertices[id].kind {
        DraftKind::Node { ranks, .. } => ranks.as_deref(),
        DraftKind::Switch => None,
    }
}

fn put(draft: &mut Draft, id: DraftId, rank: Rank) {
    let line = draft.vertices[id].line;
    if let DraftKind::Node { ranks, .. } = &mut draft.vertices[id].kind {
        ranks.get_or_insert_default().push((rank, line));
    }
}

/// Without host names: the description lists all ranks, or none and each node gets one.
fn assign_in_order(
    file: SourceFile,
    draft: &mut Draft,
    nodes: &[DraftId],
    placements: &[Option<(DraftId, usize)>],
) -> Result<()> {
    let unlisted = nodes.iter().copied().find(|id| ranks_of(draft, *id).is_none());
    match (unlisted, placements.iter().position(Option::is_none)) {
        (Some(_), _) if nodes.iter().all(|id| ranks_of(draft, *id).is_none()) => {
            for (rank, id) in nodes.iter().enumerate() {
                put(draft, *id, rank);
            }
            Ok(())
        }
        (Some(unlisted), _) => {
            let item = &draft.vertices[unlisted];
            let message = format!(
                "{} has no ranks: expected ranks for every node or for none, or a job with host names",
                item.name
            );
            Err(file.refuse(item.line, message))
        }
        (None, Some(rank)) => Err(file.refuse_all(format!(
            "rank {rank} is on no node: expected all ranks from 0 to {}",
            placements.len() - 1
        ))),
        (None, None) => Ok(()),
    }
}

/// Assigns the ranks that the description does not list to the node of their host.
fn assign_by_host(
    file: SourceFile,
    draft: &mut Draft,
    nodes: &[DraftId],
    placements: &[Option<(DraftId, usize)>],
    hosts: &[String],
) -> Result<()> {
    let names = Names::of(draft, nodes);
    let mut node_of: HashMap<&str, DraftId> = HashMap::new();
    let mut host_of: HashMap<DraftId, &str> = HashMap::new();
    // Assigned after the loop: until then, ranks of a node are those that the description lists.
    let mut chosen: Vec<(DraftId, Rank)> = Vec::new();
    for (rank, host) in hosts.iter().enumerate().filter(|(rank, _)| placements[*rank].is_none()) {
        let host = host.as_str();
        let id = match node_of.get(host) {
            Some(id) => *id,
            None => {
                let refuse =
                    |message: String| file.refuse_all(format!("rank {rank} is on {host}, {message}"));
                nodes[names.find(host).map_err(refuse)?]
            }
        };
        node_of.insert(host, id);
        let item = &draft.vertices[id];
        if ranks_of(draft, id).is_some() {
            let message = format!(
                "the ranks of {} do not include rank {rank}, which is on {host}: expected each rank on a node",
                item.name
            );
            return Err(file.refuse(item.line, message));
        }
        let other = *host_of.entry(id).or_insert(host);
        if other != host {
            let message = format!(
                "{} matches {other} and {host}, and both have ranks: expected a node for each",
                item.name
            );
            return Err(file.refuse(item.line, message));
        }
        chosen.push((id, rank));
    }
    for (id, rank) in chosen {
        put(draft, id, rank);
    }
    Ok(())
}

/// The names of nodes, indexed by the whole name and by the part before the first dot.
struct Names<'a> {
    names: Vec<&'a str>,
    whole: HashMap<&'a str, usize>,
    /// By the part before the first dot.
    short: HashMap<&'a str, Vec<usize>>,
}

impl<'a> Names<'a> {
    fn of(draft: &'a Draft, nodes: &[DraftId]) -> Self {
        let names: Vec<&str> = nodes.iter().map(|id| draft.vertices[*id].name.as_str()).collect();
        let mut short: HashMap<&str, Vec<usize>> = HashMap::new();
        for (place, name) in names.iter().enumerate() {
            short.entry(label(name)).or_default().push(place);
        }
        Self { whole: names.iter().copied().zip(0..).collect(), names, short }
    }

    /// The node that matches `host`: the one with the same name, or else the only one whose name equals it up
    /// to a domain that one of the two lacks. IP addresses match only as a whole.
    fn find(&self, host: &str) -> std::result::Result<usize, String> {
        if let Some(place) = self.whole.get(host) {
            return Ok(*place);
        }
        let candidates = self.short.get(label(host)).into_iter().flatten().copied();
        let mut candidates = candidates
            .filter(|place| lacks_domain(self.names[*place], host) || lacks_domain(host, self.names[*place]));
        match (candidates.next(), candidates.next(), self.names.as_slice()) {
            (Some(place), None, _) => Ok(place),
            (Some(one), Some(other), _) => Err(format!(
                "which matches {} and {}: expected a node with exactly this name",
                self.names[one], self.names[other]
            )),
            (None, _, [only]) => Err(format!("but no node has that name: the only one is {only}")),
            (None, _, [first, .., last]) => {
                Err(format!("but no node has that name: the nodes are {first} to {last}"))
            }
            (None, _, []) => Err("and there are no nodes".to_owned()),
        }
    }
}

fn label(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}

/// Whether `long` is `short` followed by a domain.
fn lacks_domain(short: &str, long: &str) -> bool {
    let is_address = long.parse::<std::net::IpAddr>().is_ok();
    !is_address && long.strip_prefix(short).is_some_and(|domain| domain.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::super::draft::DraftVertex;
    use super::*;

    const SOURCE: SourceFile<'static> = SourceFile { name: "file" };

    /// The ranks of each node after assignment, or the error. Nodes are at lines 1, 2, ...
    fn assigned(
        nodes: &[(&str, Option<&[Rank]>)],
        hosts: Option<&[&str]>,
    ) -> std::result::Result<Vec<Vec<Rank>>, String> {
        let mut draft = Draft::default();
        for (line, (name, ranks)) in (1..).zip(nodes) {
            let ranks = ranks.map(|ranks| ranks.iter().map(|rank| (*rank, line)).collect());
            draft.add(DraftVertex::node(name, line, ranks));
        }
        let hosts: Option<Vec<String>> =
            hosts.map(|hosts| hosts.iter().map(|host| (*host).to_owned()).collect());
        assign_ranks(SOURCE, &mut draft, hosts.as_deref()).map_err(|error| error.message().to_owned())?;
        let ranks = |id| ranks_of(&draft, id).unwrap_or_default().iter().map(|(rank, _)| *rank).collect();
        Ok((0..nodes.len()).map(ranks).collect())
    }

    #[test]
    fn ranks_are_on_the_nodes_of_their_hosts() {
        let hosts = ["b", "a", "b", "d"];
        let nodes = assigned(&[("a", None), ("b", None), ("c", None), ("d", None)], Some(&hosts));
        assert_eq!(nodes, Ok(vec![vec![1], vec![0, 2], vec![], vec![3]]));
        // Rank numbers take precedence over host names.
        let nodes = assigned(&[("a", Some(&[3, 0])), ("b", None), ("d", Some(&[1]))], Some(&hosts));
        assert_eq!(nodes, Ok(vec![vec![3, 0], vec![2], vec![1]]));
    }

    #[test]
    fn without_hosts_each_node_has_one_rank_or_those_listed() {
        assert_eq!(assigned(&[("b", None), ("a", None)], None), Ok(vec![vec![0], vec![1]]));
        assert_eq!(assigned(&[("b", Some(&[2, 1])), ("a", Some(&[0]))], None), Ok(vec![vec![2, 1], vec![0]]));
        assert_eq!(assigned(&[("b", Some(&[])), ("a", Some(&[0]))], None), Ok(vec![vec![], vec![0]]));
    }

    #[test]
    fn a_domain_may_be_missing_in_either_name() {
        for (node, host) in [("a", "a.x.y"), ("a.x.y", "a"), ("a.x", "a.x.y")] {
            assert_eq!(
                assigned(&[("b", None), (node, None)], Some(&[host, "b"])),
                Ok(vec![vec![1], vec![0]])
            );
        }
        assert_eq!(assigned(&[("a", None), ("a.x", None)], Some(&["a.x", "a"])), Ok(vec![vec![1], vec![0]]));
    }

    #[test]
    fn each_rank_must_be_on_exactly_one_node() {
        type Nodes<'a> = &'a [(&'a str, Option<&'a [Rank]>)];
        let table: &[(Nodes, Option<&[&str]>, &str)] = &[
            (
                &[("a", None), ("b", None), ("c", None)],
                Some(&["a", "x"]),
                "file: rank 1 is on x, but no node has that name: the nodes are a to c",
            ),
            (
                &[("a", None)],
                Some(&["ab"]),
                "file: rank 0 is on ab, but no node has that name: the only one is a",
            ),
            (
                &[("a.x", None)],
                Some(&["a.y"]),
                "file: rank 0 is on a.y, but no node has that name: the only one is a.x",
            ),
            (
                &[("10", None), ("10.0", None)],
                Some(&["10.0.0.1"]),
                "file: rank 0 is on 10.0.0.1, but no node has that name: the nodes are 10 to 10.0",
            ),
            (
                &[("a.x", None), ("a.y", None)],
                Some(&["a"]),
                "file: rank 0 is on a, which matches a.x and a.y: expected a node with exactly this name",
            ),
            (
                &[("b", None), ("a", None)],
                Some(&["a.x", "b", "a.y"]),
                "file:2: a matches a.x and a.y, and both have ranks: expected a node for each",
            ),
            (&[], Some(&["a"]), "file: rank 0 is on a, and there are no nodes"),
            (
                &[("a", Some(&[0]))],
                Some(&["a", "a"]),
                "file:1: the ranks of a do not include rank 1, which is on a: expected each rank on a node",
            ),
            (
                &[("a", Some(&[0])), ("b", Some(&[1, 0]))],
                None,
                "file:2: rank 0 is on b and, in line 1, on a: expected each rank once",
            ),
            (
                &[("a", Some(&[0, 2]))],
                Some(&["a", "a"]),
                "file:1: there is no rank 2: the job has 2 ranks, counted from 0",
            ),
            (&[("a", Some(&[MAX_RANKS]))], None, "file:1: there is no rank 1000000: expected at most 999999"),
            (&[("a", Some(&[3, 0]))], None, "file: rank 1 is on no node: expected all ranks from 0 to 3"),
            (
                &[("a", Some(&[0])), ("b", None)],
                None,
                "file:2: b has no ranks: expected ranks for every node or for none, or a job with host names",
            ),
        ];
        for (nodes, hosts, message) in table {
            assert_eq!(assigned(nodes, *hosts), Err((*message).to_owned()));
        }
    }
}
