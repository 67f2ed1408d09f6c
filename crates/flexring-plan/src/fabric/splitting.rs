//! Replaces switches by routes between ranks.
//!
//! Owns the choice of the pairs of links that become routes. Must not know trees, other than that each set of
//! vertices with ranks and without the root, a vertex above the ranks, is entered by enough arcs for all of
//! them.
//!
//! An arc into a switch and one out of it become one arc past it, for as many units as leaves this true
//! (Bang-Jensen, Frank and Jackson 1995: as much enters a switch as leaves it, so in the end there is nothing
//! left at it). A set is entered less often afterwards only if it has both ends and not the switch, or the
//! switch and neither end, so a maximum flow for each of the two cases says for how many units.

use super::max_flow::{FlowNetwork, UNLIMITED};
use super::throughput::LinkNetwork;
use std::collections::{BTreeMap, BTreeSet};

/// A directed arc between two vertices, through switches that were removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RouteArc {
    pub(super) from: usize,
    pub(super) to: usize,
    /// How many trees may use it.
    pub(super) width: i64,
    /// The links on the way, each with whether it is crossed from its first to its second end.
    pub(super) route: Vec<(usize, bool)>,
}

/// Arcs of which every set of vertices with ranks and without the root is entered by `trees`.
pub(super) struct Splitting<'a> {
    network: &'a LinkNetwork,
    root: usize,
    trees: i64,
    arcs: Vec<RouteArc>,
    /// By pair of ranks, the lesser one first, its route from the lesser one.
    routes: BTreeMap<[usize; 2], Vec<(usize, bool)>>,
}

/// Which pairs of arcs at a switch are considered.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum SplitChoice {
    /// Those that give a pair of ranks its only route, in equal parts for all. Where several switches join
    /// the pair, one of them by the pair's number.
    Even,
    /// Those that give a pair of ranks its only route.
    OneRoute,
    /// All that lead on.
    Any,
    /// All, also back to where they came from, which drops both arcs.
    Dropped,
}

impl<'a> Splitting<'a> {
    pub(super) fn new(network: &'a LinkNetwork, trees: i64, arcs: Vec<RouteArc>) -> Self {
        let mut splitting = Self { network, root: network.vertices, trees, arcs, routes: BTreeMap::new() };
        for arc in splitting.arcs.clone() {
            splitting.note_route(&arc);
        }
        splitting
    }

    /// Those of the network, and the root above it.
    fn vertices(&self) -> usize {
        self.network.vertices + 1
    }

    /// Removes all switches. What is left are arcs between ranks.
    pub(super) fn split_all(mut self) -> Vec<RouteArc> {
        let mut is_rank = vec![false; self.vertices()];
        self.network.ranks.iter().for_each(|rank| is_rank[*rank] = true);
        let switches: Vec<usize> =
            (0..self.vertices()).filter(|vertex| !is_rank[*vertex] && *vertex != self.root).collect();
        for choice in [SplitChoice::Even, SplitChoice::OneRoute, SplitChoice::Any, SplitChoice::Dropped] {
            switches.iter().for_each(|switch| self.split(*switch, choice, &is_rank));
        }
        self.arcs.retain(|arc| (is_rank[arc.from] || arc.from == self.root) && is_rank[arc.to]);
        self.arcs
    }

    /// Splits what this choice allows at a switch.
    fn split(&mut self, switch: usize, choice: SplitChoice, is_rank: &[bool]) {
        let into: Vec<usize> = (0..self.arcs.len()).filter(|arc| self.arcs[*arc].to == switch).collect();
        let out: Vec<usize> = (0..self.arcs.len()).filter(|arc| self.arcs[*arc].from == switch).collect();
        for (place, one) in into.iter().enumerate() {
            // Each arc into the switch begins with another arc out of it.
            let others = (0..out.len()).map(|step| out[(place + 1 + step) % out.len()]);
            let others: Vec<usize> =
                others.filter(|other| self.is_choice(choice, *one, *other, is_rank)).collect();
            let part = match choice {
                SplitChoice::Even => (self.arcs[*one].width / others.len().max(1) as i64).max(1),
                _ => i64::MAX,
            };
            for other in others {
                let (first, second) = (&self.arcs[*one], &self.arcs[other]);
                let most = first.width.min(second.width).min(part);
                let past = RouteArc { width: 0, ..past(first, second) };
                let joins_ranks = is_rank[past.from] && is_rank[past.to];
                let width = if most > 0 { self.splittable(past.from, switch, past.to, most) } else { 0 };
                if width == 0 {
                    continue;
                }
                self.arcs[*one].width -= width;
                self.arcs[other].width -= width;
                if past.from != past.to {
                    if joins_ranks {
                        self.note_route(&past);
                    }
                    match self
                        .arcs
                        .iter_mut()
                        .find(|arc| arc.from == past.from && arc.to == past.to && arc.route == past.route)
                    {
                        Some(arc) => arc.width += width,
                        None => self.arcs.push(RouteArc { width, ..past }),
                    }
                }
            }
        }
        // The numbers of arcs change only here.
        self.arcs.retain(|arc| arc.width > 0);
    }

    /// Whether these arcs into and out of a switch may become one.
    fn is_choice(&self, choice: SplitChoice, one: usize, other: usize, is_rank: &[bool]) -> bool {
        let arc = past(&self.arcs[one], &self.arcs[other]);
        let joins_ranks = is_rank[arc.from] && is_rank[arc.to];
        match choice {
            SplitChoice::Dropped => true,
            _ if arc.from == arc.to => false,
            SplitChoice::Even | SplitChoice::OneRoute if self.is_transit(one, other) => false,
            SplitChoice::Even if joins_ranks => {
                self.has_no_other_route(&arc) && self.is_in_turn(self.arcs[one].to, &arc)
            }
            SplitChoice::OneRoute if joins_ranks => self.has_no_other_route(&arc),
            _ => true,
        }
    }

    fn is_transit(&self, one: usize, other: usize) -> bool {
        let (first, second) = (self.arcs[one].route.last(), self.arcs[other].route.first());
        first.zip(second).is_some_and(|(first, second)| self.network.is_transit(first.0, second.0))
    }

    fn note_route(&mut self, arc: &RouteArc) {
        let (pair, route) = from_lesser(arc);
        self.routes.entry(pair).or_insert(route);
    }

    /// Whether of the switches that join the ends of an arc it is this one's turn.
    fn is_in_turn(&self, switch: usize, arc: &RouteArc) -> bool {
        let joined = |end: usize| -> BTreeSet<usize> {
            let out = self.arcs.iter().filter(|arc| arc.from == end).map(|arc| arc.to);
            out.chain(self.arcs.iter().filter(|arc| arc.to == end).map(|arc| arc.from)).collect()
        };
        let (one, other) = (joined(arc.from), joined(arc.to));
        let both: Vec<&usize> = one
            .intersection(&other)
            .filter(|vertex| **vertex != self.root && !self.network.ranks.contains(vertex))
            .collect();
        both.get((arc.from + arc.to) % both.len().max(1)).is_none_or(|turn| **turn == switch)
    }

    fn has_no_other_route(&self, arc: &RouteArc) -> bool {
        let (pair, route) = from_lesser(arc);
        self.routes.get(&pair).is_none_or(|known| *known == route)
    }

    /// For how many units, at most `most`, an arc from `one` to the switch and one from there to `other` can
    /// become one.
    fn splittable(&self, one: usize, switch: usize, other: usize, most: i64) -> i64 {
        let mut most = most;
        if one != self.root && other != self.root {
            most = most.min(self.slack(&[one, other], &[switch], most));
        }
        if most > 0 {
            most = most.min(self.slack(&[switch], &[one, other], most));
        }
        most.max(0)
    }

    /// How much more than needed enters each set with ranks that has all vertices of `inside`, none of
    /// `outside`, and not the root; or `most` if that is less.
    fn slack(&self, inside: &[usize], outside: &[usize], most: i64) -> i64 {
        let (source, sink) = (self.vertices(), self.vertices() + 1);
        let mut empty = FlowNetwork::new(self.vertices() + 2);
        for arc in &self.arcs {
            empty.add(arc.from, arc.to, [arc.width, 0]);
        }
        let mut is_outside = vec![false; self.vertices()];
        for vertex in outside.iter().chain([&self.root]) {
            is_outside[*vertex] = true;
            empty.add(source, *vertex, [UNLIMITED, 0]);
        }
        for vertex in inside {
            empty.add(*vertex, sink, [UNLIMITED, 0]);
        }
        let mut least = most;
        let mut measure = |network: &mut FlowNetwork| {
            least = least.min(network.send(source, sink, self.trees + least) - self.trees);
            least > 0
        };
        if inside.iter().any(|vertex| self.network.ranks.contains(vertex)) {
            measure(&mut empty);
            return least;
        }
        for rank in self.network.ranks.iter().filter(|rank| !is_outside[**rank]) {
            let mut network = empty.clone();
            network.add(*rank, sink, [UNLIMITED, 0]);
            if !measure(&mut network) {
                break;
            }
            // Sets with this rank are done.
            empty.add(source, *rank, [UNLIMITED, 0]);
        }
        least
    }
}

/// The arc past the switch between two arcs, as wide as the first.
fn past(first: &RouteArc, second: &RouteArc) -> RouteArc {
    let route = [&first.route[..], &second.route[..]].concat();
    RouteArc { from: first.from, to: second.to, width: first.width, route }
}

/// The ends of an arc, the lesser one first, and the route from there.
fn from_lesser(arc: &RouteArc) -> ([usize; 2], Vec<(usize, bool)>) {
    match arc.from < arc.to {
        true => ([arc.from, arc.to], arc.route.clone()),
        false => ([arc.to, arc.from], reversed(&arc.route)),
    }
}

/// The same links in the other direction.
pub(super) fn reversed(route: &[(usize, bool)]) -> Vec<(usize, bool)> {
    route.iter().rev().map(|(link, forward)| (*link, !forward)).collect()
}
