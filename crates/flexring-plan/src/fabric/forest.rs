//! Trees that span the ranks of a fabric and use all of its links at the same time, so that an all-reduce
//! takes the least time.
//!
//! Owns how many trees there are, and where each has its root.
//!
//! The steps are those of ForestColl (Zhao, Wang et al., arXiv 2402.06787): the least time, switches split
//! into routes, trees packed. Its trees have a fixed share for each root. Here the roots' shares follow from
//! the bound: an all-reduce goes up and down each tree, so it uses a tree's links equally in both directions
//! wherever the root is, and in the end the root is put where the tree is least deep.

use super::graph::{FabricGraph, Route};
use super::packing::pack;
use super::routed_division::{DividedTree, MOST_TREES, RoutedDivision};
use super::splitting::{RouteArc, Splitting, reversed};
use super::throughput::{LeastTime, LinkNetwork, VertexSets, gcd, roots};
use super::trees::Forest;
use crate::Rank;
use std::collections::BTreeMap;

/// Most trees of equal shares, if few of them differ.
const MOST_SHARES: i64 = 1 << 30;
/// What a link carries can be divided evenly among up to six routes.
const DIVISIBLE: i64 = 60;
/// The time that all numbers of trees are compared by, in parts of the least time.
const STEPS: i64 = 1 << 10;
/// A longer time than the least one, in [`STEPS`], for which more trees are tried.
const TOLERATED: i64 = 5;
/// Times that differ by less than this part count as equal.
const ALIKE: f64 = 0.001;

/// How many trees there are, and what each link carries in both directions together.
struct ForestDivision {
    trees: i64,
    carried: Vec<i64>,
    inflows: Vec<i64>,
}

/// The search for a number of trees with which links that carry whole numbers of them lose little.
struct ForestSearch<'a> {
    network: &'a LinkNetwork,
    widths: &'a [i64],
    least: LeastTime,
    /// What each link carries is a multiple of this, so that as much can leave a switch as enters it.
    step: i64,
    /// Sets that limited numbers of trees that were tried.
    known: Vec<VertexSets>,
}

impl ForestSearch<'_> {
    /// What each link carries for this number of trees, if they take this many [`STEPS`] longer than
    /// possible.
    fn carried(&self, trees: i64, longer: i64) -> Vec<i64> {
        let most = 2 * i128::from(trees) * self.network.ranks.len() as i128;
        let scale = i128::from(self.least.numerator) * i128::from(trees) * i128::from(STEPS + longer);
        let whole = i128::from(self.least.denominator) * i128::from(STEPS) * i128::from(self.step);
        let carried =
            |width: &i64| (i128::from(*width) * scale / whole * i128::from(self.step)).min(most) as i64;
        self.widths.iter().map(carried).collect()
    }

    /// Whether the sets that are known allow it.
    fn is_allowed(&self, trees: i64, longer: i64) -> bool {
        let carried = self.carried(trees, longer);
        self.known.iter().all(|sets| {
            let needed: i64 = self.network.cuts(sets, &carried).iter().map(|cut| 2 * trees - cut).sum();
            needed <= 2 * trees
        })
    }

    /// The least of the [`STEPS`] that `fits`; `None` if the time would be more than twice the least.
    fn least_longer(mut fits: impl FnMut(i64) -> bool) -> Option<i64> {
        let (mut low, mut high) = (0, STEPS);
        if fits(0) {
            return Some(0);
        }
        if !fits(high) {
            return None;
        }
        while high - low > 1 {
            let middle = low.midpoint(high);
            if fits(middle) { high = middle } else { low = middle }
        }
        Some(high)
    }

    /// The time of this number of trees, in [`STEPS`] beyond the least, and how they are divided.
    fn divide(&mut self, trees: i64) -> Option<(i64, ForestDivision)> {
        let mut found = None;
        let longer = Self::least_longer(|longer| {
            if !self.is_allowed(trees, longer) {
                return false;
            }
            let carried = self.carried(trees, longer);
            match self.network.inflows(&carried, trees) {
                Ok(inflows) => {
                    found = Some(ForestDivision { trees, carried, inflows });
                    true
                }
                Err(sets) => {
                    self.known.push(sets);
                    false
                }
            }
        })?;
        Some((longer, found?))
    }

    /// A number of trees with which every link carries exactly what it can in the least time, and which can
    /// be divided among routes.
    fn exact(&self) -> Option<i64> {
        let mut trees: i64 = 1;
        for width in self.widths {
            let whole = self.least.denominator.checked_mul(self.step)?;
            let needed = whole / gcd(whole, width.checked_mul(self.least.numerator)?);
            trees = trees.checked_mul(needed / gcd(trees, needed))?;
            if trees > MOST_SHARES {
                return None;
            }
        }
        Some(trees * if self.step > 1 { DIVISIBLE } else { 1 })
    }

    /// The best of few trees.
    fn few(&mut self) -> Option<(i64, ForestDivision)> {
        let mut numbers: Vec<(i64, i64)> = (1..=MOST_TREES as i64)
            .filter_map(|trees| Some((Self::least_longer(|longer| self.is_allowed(trees, longer))?, trees)))
            .collect();
        numbers.sort_unstable();
        let mut best: Option<(i64, ForestDivision)> = None;
        for (at_least, trees) in numbers {
            if best.as_ref().is_some_and(|(longer, _)| *longer <= at_least) {
                break;
            }
            let found = self.divide(trees);
            if let Some(found) = found.filter(|(longer, _)| best.as_ref().is_none_or(|best| *longer < best.0))
            {
                best = Some(found);
            }
        }
        best
    }
}

/// The forest of a fabric whose links have these widths, in units of so many bits per second. It has at least
/// two ranks.
pub(super) fn forest(
    fabric: &FabricGraph,
    network: &LinkNetwork,
    widths: &[i64],
    unit: u64,
    least: LeastTime,
) -> Forest {
    let least_seconds = 8.0 * least.numerator as f64 / least.denominator as f64 / unit as f64;
    let has_switches = network.ranks.len() < network.vertices;
    let known = vec![least.sets.clone(), VertexSets(network.ranks.iter().map(|rank| vec![*rank]).collect())];
    let mut search = ForestSearch { network, widths, least, step: if has_switches { 2 } else { 1 }, known };
    let few = search.few();
    let is_good = few.as_ref().is_some_and(|(longer, _)| *longer <= TOLERATED) && !has_switches;
    let many = if is_good { None } else { search.exact().and_then(|trees| search.divide(trees)) };
    // Where ranks share links, many trees leave less of a difference between those that are not busiest.
    let forests = [many, few]
        .into_iter()
        .flatten()
        .map(|(_, division)| grown(fabric, network, &division, least_seconds));
    let best = forests.reduce(|first, next| {
        if next.seconds_per_byte < first.seconds_per_byte * (1.0 - ALIKE) { next } else { first }
    });
    // Without a division there is one tree.
    best.unwrap_or_else(|| routed(fabric, Vec::new(), BTreeMap::new(), least_seconds))
}

/// The trees of a division, at most [`MOST_TREES`].
fn grown(fabric: &FabricGraph, network: &LinkNetwork, division: &ForestDivision, least: f64) -> Forest {
    let ForestDivision { trees, carried, inflows } = division;
    let mut inflows = inflows.clone();
    network.balance(carried, *trees, &mut inflows);
    let roots = roots(&inflows, *trees);
    let to_second = network.orient(carried, &roots, &inflows);
    let both = network.ends.iter().enumerate().flat_map(|(link, [one, other])| {
        [(*one, *other, to_second[link], true), (*other, *one, carried[link] - to_second[link], false)]
            .map(|(from, to, width, forward)| RouteArc { from, to, width, route: vec![(link, forward)] })
    });
    let top = network.vertices;
    let first = (0..).zip(roots).map(|(to, width)| RouteArc { from: top, to, width, route: Vec::new() });
    let arcs = both.chain(first).filter(|arc| arc.width > 0).collect();
    let arcs = Splitting::new(network, *trees, arcs).split_all();
    let packed = pack(top + 1, &network.ranks, top, *trees, &arcs, MOST_TREES);
    let whole: i64 = packed.iter().map(|tree| tree.shares).sum();
    let trees = packed.into_iter().map(|tree| DividedTree {
        edges: (0..fabric.world())
            .filter_map(|rank| Some([rank.min(tree.parent[rank]?), rank.max(tree.parent[rank]?)]))
            .collect(),
        share: tree.shares as f64 / whole as f64,
    });
    let trees: Vec<DividedTree> = trees.collect();
    let mut routes: BTreeMap<[Rank; 2], Vec<Route>> = BTreeMap::new();
    for arc in arcs.into_iter().filter(|arc| arc.from != top) {
        let route = without_loops(arc.from, &arc.route, network);
        let route = if arc.from < arc.to { route } else { reversed(&route) };
        let known = routes.entry([arc.from.min(arc.to), arc.from.max(arc.to)]).or_default();
        let is_transit = route.windows(2).any(|links| network.is_transit(links[0].0, links[1].0));
        if !is_transit && !known.contains(&route) {
            known.push(route);
        }
    }
    routed(fabric, trees, routes, least)
}

/// The forest of these trees. `routes`: those that each pair of ranks can have; a pair without one gets the
/// route with the fewest links, if it passes no rank or node.
fn routed(
    fabric: &FabricGraph,
    trees: Vec<DividedTree>,
    mut routes: BTreeMap<[Rank; 2], Vec<Route>>,
    least: f64,
) -> Forest {
    for from in 0..fabric.world() {
        for (to, route) in fabric.past_switches(from).into_iter().enumerate().skip(from + 1) {
            let known = routes.entry([from, to]).or_default();
            if known.is_empty() && !route.is_empty() {
                known.push(route);
            }
        }
    }
    let mut division = RoutedDivision::new(fabric, trees, routes);
    division.choose_routes();
    division.even_out(least);
    division.into_forest(fabric.world())
}

/// A route without the parts that return to where it was before.
fn without_loops(from: usize, route: &[(usize, bool)], network: &LinkNetwork) -> Route {
    let mut vertices = vec![from];
    let mut short: Route = Vec::new();
    for (link, forward) in route {
        let to = network.ends[*link][usize::from(*forward)];
        short.push((*link, *forward));
        vertices.push(to);
        let first = vertices.iter().position(|vertex| *vertex == to).unwrap_or(0);
        short.truncate(first);
        vertices.truncate(first + 1);
    }
    short
}
