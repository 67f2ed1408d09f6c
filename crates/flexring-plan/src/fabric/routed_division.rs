//! The shares of trees whose edges have one route each.
//!
//! Owns the choice of routes where a pair of ranks has several, and the shares that make up for it. All ranks
//! must compute the same shares, so numbers are only added, multiplied, divided and compared: the results of
//! other functions differ between versions and machines.
//!
//! Splitting may give a pair of ranks several routes, of which a connection has one. Then, and where few
//! trees leave something out, some links carry more than they can in the least time. Shares then move, one
//! step after the other, from the tree that uses such links most to the one that uses them least.

use super::graph::{FabricGraph, Route};
use super::trees::{Forest, SpanningTree};
use crate::Rank;
use std::collections::BTreeMap;

/// Two ranks, the lesser one first.
type RankPair = [Rank; 2];

/// Most different trees. Each cuts the vector once more.
pub(super) const MOST_TREES: usize = 64;
/// Most pairs of ranks whose route is changed.
const MOST_ROUTES_CHANGED: usize = 1_000;
/// Most times that shares move.
const MOST_MOVES: usize = 400;
/// Trees with less than this part of the vector are left out.
const LEAST_SHARE: f64 = 1e-3;
/// The vector is divided into so many parts.
const PARTS: f64 = 1_000_000.0;
/// A link costs this power of its time, so that those that take longest count.
const POWER: u32 = 24;
/// Links that take longer than the least time by less than this part are left as they are.
const TOLERATED: f64 = 1e-3;

/// A tree without a root.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DividedTree {
    /// Its edges, sorted.
    pub(super) edges: Vec<RankPair>,
    /// Its part of the vector.
    pub(super) share: f64,
}

/// Trees with their shares, and the routes of their edges.
pub(super) struct RoutedDivision<'a> {
    fabric: &'a FabricGraph,
    trees: Vec<DividedTree>,
    /// By pair, the routes that it can have, from its lesser rank; at least one.
    routes: BTreeMap<RankPair, Vec<Route>>,
    /// By pair, the place of its route among these.
    chosen: BTreeMap<RankPair, usize>,
    /// By link, seconds for each byte of the vector.
    times: Vec<f64>,
}

impl<'a> RoutedDivision<'a> {
    pub(super) fn new(
        fabric: &'a FabricGraph,
        mut trees: Vec<DividedTree>,
        mut routes: BTreeMap<RankPair, Vec<Route>>,
    ) -> Self {
        trees.iter_mut().for_each(|tree| tree.edges.sort_unstable());
        routes.retain(|_, routes| !routes.is_empty());
        trees.retain(|tree| tree.edges.iter().all(|pair| routes.contains_key(pair)));
        let chosen = routes.keys().map(|pair| (*pair, 0)).collect();
        let mut division = Self { fabric, trees, routes, chosen, times: Vec::new() };
        if division.trees.is_empty() {
            let prices = vec![0.0; fabric.links().len()];
            let any = division.cheapest_tree(&prices).unwrap_or_else(|| division.add_line());
            division.trees.push(DividedTree { edges: any, share: 1.0 });
        }
        let whole: f64 = division.trees.iter().map(|tree| tree.share).sum();
        division.trees.iter_mut().for_each(|tree| tree.share /= whole);
        division.measure();
        division
    }

    /// Ranks of a derived communicator may be connected by nodes of others only. Then they form a line, over
    /// routes that may pass other nodes.
    fn add_line(&mut self) -> Vec<RankPair> {
        let line: Vec<RankPair> = (1..self.fabric.world()).map(|rank| [rank - 1, rank]).collect();
        for pair in &line {
            self.routes.insert(*pair, vec![self.fabric.fewest_links(pair[0], pair[1])]);
            self.chosen.insert(*pair, 0);
        }
        line
    }

    /// Seconds for each byte on a link with a share. Sums go up and results go down, so its slower direction
    /// counts.
    fn time(&self, link: usize, share: f64) -> f64 {
        let [there, back] = self.fabric.links()[link].bandwidths;
        8.0 * share / there.min(back) as f64
    }

    fn route(&self, pair: &RankPair) -> &Route {
        &self.routes[pair][self.chosen[pair]]
    }

    fn measure(&mut self) {
        let mut times = vec![0.0; self.fabric.links().len()];
        for tree in &self.trees {
            for (link, _) in tree.edges.iter().flat_map(|pair| self.route(pair)) {
                times[*link] += self.time(*link, tree.share);
            }
        }
        self.times = times;
    }

    fn longest(&self) -> f64 {
        self.times.iter().copied().fold(0.0, f64::max)
    }

    /// Chooses one route for each pair, such that busy links are spared.
    pub(super) fn choose_routes(&mut self) {
        let mut shares: BTreeMap<RankPair, f64> = BTreeMap::new();
        for tree in &self.trees {
            tree.edges.iter().for_each(|pair| *shares.entry(*pair).or_default() += tree.share);
        }
        for _ in 0..MOST_ROUTES_CHANGED {
            let longest = self.longest();
            let cost = |time: f64| power(time / longest, POWER);
            let mut best: Option<(f64, RankPair, usize)> = None;
            for (pair, share) in &shares {
                let now = self.route(pair);
                for (place, route) in self.routes[pair].iter().enumerate().filter(|(_, route)| *route != now)
                {
                    let leaves =
                        now.iter().filter(|step| !route.contains(step)).map(|(link, _)| (*link, -share));
                    let enters =
                        route.iter().filter(|step| !now.contains(step)).map(|(link, _)| (*link, *share));
                    let change = |(link, share): (usize, f64)| {
                        cost(self.times[link] + self.time(link, share)) - cost(self.times[link])
                    };
                    let change: f64 = leaves.chain(enters).map(change).sum();
                    if change < best.map_or(-1e-9, |(least, ..)| least) {
                        best = Some((change, *pair, place));
                    }
                }
            }
            let Some((_, pair, place)) = best else { break };
            self.chosen.insert(pair, place);
            self.measure();
        }
    }

    /// Moves shares between trees, also to new ones, until no link takes longer than `least`, or no move
    /// helps.
    pub(super) fn even_out(&mut self, least: f64) {
        for _ in 0..MOST_MOVES {
            let longest = self.longest();
            if longest <= least * (1.0 + TOLERATED) {
                break;
            }
            let prices: Vec<f64> = (0..self.times.len())
                .map(|link| power(self.times[link] / longest, POWER - 1) * self.time(link, 1.0) / longest)
                .collect();
            let cost = |edges: &[RankPair]| -> f64 {
                edges.iter().flat_map(|pair| self.route(pair)).map(|(link, _)| prices[*link]).sum()
            };
            let dearest = (0..self.trees.len()).max_by(|one, other| {
                cost(&self.trees[*one].edges).total_cmp(&cost(&self.trees[*other].edges))
            });
            let (Some(from), Some(cheapest)) = (dearest, self.cheapest_tree(&prices)) else { break };
            let known = self.trees.iter().position(|tree| tree.edges == cheapest);
            if known == Some(from) || (known.is_none() && self.trees.len() == MOST_TREES) {
                break;
            }
            let moved = self.best_move(from, &cheapest);
            if moved <= 0.0 {
                break;
            }
            match known {
                Some(to) => self.trees[to].share += moved,
                None => self.trees.push(DividedTree { edges: cheapest, share: moved }),
            }
            self.trees[from].share -= moved;
            self.trees.retain(|tree| tree.share > 0.0);
            self.measure();
        }
    }

    /// The tree whose links have the lowest prices together (Prim).
    fn cheapest_tree(&self, prices: &[f64]) -> Option<Vec<RankPair>> {
        let world = self.fabric.world();
        // By rank, the cheapest edge to the tree.
        let mut nearest: Vec<Option<(f64, Rank)>> = vec![None; world];
        let mut neighbours = vec![Vec::new(); world];
        for pair in self.routes.keys() {
            let price: f64 = self.route(pair).iter().map(|(link, _)| prices[*link]).sum();
            neighbours[pair[0]].push((pair[1], price));
            neighbours[pair[1]].push((pair[0], price));
        }
        let mut is_inside = vec![false; world];
        let (mut edges, mut at) = (Vec::new(), 0);
        loop {
            is_inside[at] = true;
            for (other, price) in &neighbours[at] {
                if !is_inside[*other] && nearest[*other].is_none_or(|(least, _)| *price < least) {
                    nearest[*other] = Some((*price, at));
                }
            }
            let outside = (0..world).filter(|rank| !is_inside[*rank]);
            let next = outside.filter_map(|rank| Some((nearest[rank]?, rank)));
            let Some(((_, inside), rank)) = next.min_by(|one, other| one.0.0.total_cmp(&other.0.0)) else {
                break;
            };
            edges.push([inside.min(rank), inside.max(rank)]);
            at = rank;
        }
        edges.sort_unstable();
        (edges.len() + 1 == world).then_some(edges)
    }

    /// How much of a tree's share another one should have, so that links cost least.
    fn best_move(&self, from: usize, to: &[RankPair]) -> f64 {
        let mut change = vec![0.0; self.times.len()];
        for (edges, sign) in [(&self.trees[from].edges[..], -1.0), (to, 1.0)] {
            for (link, _) in edges.iter().flat_map(|pair| self.route(pair)) {
                change[*link] += sign * self.time(*link, 1.0);
            }
        }
        let longest = self.longest();
        let rises = |share: f64| {
            let slope =
                |(time, change): (&f64, &f64)| power((time + share * change) / longest, POWER - 1) * change;
            self.times.iter().zip(&change).map(slope).sum::<f64>() > 0.0
        };
        let (mut low, mut high) = (0.0, self.trees[from].share);
        if !rises(high) {
            return high;
        }
        for _ in 0..40 {
            let middle = f64::midpoint(low, high);
            if rises(middle) { high = middle } else { low = middle }
        }
        low
    }

    /// The forest, with trees of small shares left out.
    pub(super) fn into_forest(mut self, world: usize) -> Forest {
        self.trees.retain(|tree| tree.share >= LEAST_SHARE);
        let whole: f64 = self.trees.iter().map(|tree| tree.share).sum();
        self.trees.iter_mut().for_each(|tree| tree.share /= whole);
        let shares = whole_numbers(&self.trees);
        let sum: u64 = shares.iter().sum();
        for (tree, share) in self.trees.iter_mut().zip(&shares) {
            tree.share = *share as f64 / sum as f64;
        }
        self.measure();
        let mut owned: Vec<u64> = vec![0; world];
        let trees: Vec<SpanningTree> = self
            .trees
            .iter()
            .zip(shares)
            .map(|(tree, share)| {
                // Of several ranks with which it is least deep, the root is the one that owns least so far.
                let tree = SpanningTree::least_deep(world, &tree.edges, share, |rank| owned[rank]);
                owned[tree.root] += share;
                tree
            })
            .collect();
        let used = |pair: &RankPair| self.trees.iter().any(|tree| tree.edges.binary_search(pair).is_ok());
        let routes =
            self.routes.keys().filter(|pair| used(pair)).map(|pair| (*pair, self.route(pair).clone()));
        Forest { trees, shares: sum, seconds_per_byte: self.longest(), routes: routes.collect() }
    }
}

/// `base` to the power `exponent`, by multiplications.
fn power(base: f64, exponent: u32) -> f64 {
    (0..exponent).fold(1.0, |product, _| product * base)
}

/// The shares as small whole numbers if they are exact, else in [`PARTS`].
fn whole_numbers(trees: &[DividedTree]) -> Vec<u64> {
    let in_parts = |parts: f64| trees.iter().map(move |tree| tree.share * parts);
    let is_exact =
        |parts: &u32| in_parts(f64::from(*parts)).all(|share| (share - share.round()).abs() < 1e-6);
    let parts = (1..=1_000).find(is_exact).map_or(PARTS, f64::from);
    in_parts(parts).map(|share| (share.round() as u64).max(1)).collect()
}
