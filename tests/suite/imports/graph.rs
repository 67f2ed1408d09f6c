//! Cycles in a graph of modules.
//!
//! Owns the search.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Directed edges between named nodes.
#[derive(Default)]
pub struct Graph(BTreeMap<String, BTreeSet<String>>);

impl Graph {
    /// Adds an edge, once however often it is given.
    pub fn add(&mut self, from: &str, to: &str) {
        self.0.entry(from.to_owned()).or_default().insert(to.to_owned());
    }

    /// For every edge that lies on a cycle, a shortest cycle through it: each begins with its least node, and
    /// none is returned twice.
    pub fn cycles(&self) -> BTreeSet<Vec<String>> {
        let edges = self.0.iter().flat_map(|(from, to)| to.iter().map(move |to| (from, to)));
        edges.filter_map(|(from, to)| self.shortest(to, from)).map(rotated).collect()
    }

    /// The nodes of a shortest path between two nodes, both included.
    fn shortest(&self, from: &str, to: &str) -> Option<Vec<String>> {
        let mut previous = BTreeMap::from([(from, None)]);
        let mut queue = VecDeque::from([from]);
        while let Some(node) = queue.pop_front() {
            if node == to {
                let back = std::iter::successors(Some(node), |node| previous[node]);
                let mut path: Vec<String> = back.map(str::to_owned).collect();
                path.reverse();
                return Some(path);
            }
            for next in self.0.get(node).into_iter().flatten() {
                if !previous.contains_key(next.as_str()) {
                    previous.insert(next, Some(node));
                    queue.push_back(next);
                }
            }
        }
        None
    }
}

fn rotated(mut cycle: Vec<String>) -> Vec<String> {
    let least = cycle.iter().enumerate().min_by_key(|(_, node)| *node).map_or(0, |(at, _)| at);
    cycle.rotate_left(least);
    cycle
}

#[test]
fn the_shortest_cycle_through_each_edge_is_found() {
    let mut graph = Graph::default();
    for (from, to) in [("a", "b"), ("b", "c"), ("c", "a"), ("c", "b"), ("d", "a"), ("e", "e")] {
        graph.add(from, to);
    }
    let cycles = [vec!["a", "b", "c"], vec!["b", "c"], vec!["e"]];
    assert_eq!(graph.cycles(), cycles.map(|cycle| cycle.into_iter().map(str::to_owned).collect()).into());
}
