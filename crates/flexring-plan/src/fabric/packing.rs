//! Packs trees that span the ranks into arcs between them.
//!
//! Owns the choice of the arcs of each tree.
//!
//! Trees grow from a root above the ranks, with arcs to their roots, one after the other, each for as many
//! shares as it can have (Lovasz 1976; with shares, Berczi and Frank 2009). An arc can be added to a tree if
//! afterwards each set of ranks is still entered by the arcs that are left as often as the trees that follow
//! need, and once more for each share if it has no rank of this tree. One maximum flow decides that.

use super::max_flow::{FlowNetwork, UNLIMITED};
use super::splitting::RouteArc;

/// A tree in which every rank but the root has a parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PackedTree {
    /// By vertex, its parent; `None` for the rank that is the tree's root, and for switches.
    pub(super) parent: Vec<Option<usize>>,
    /// How many of the trees are this one.
    pub(super) shares: i64,
}

/// Trees from a `root` above the ranks that use no arc more often than it is wide, `trees` in all, if there
/// are at most `most` different ones. Every set of ranks must be entered by as many.
pub(super) fn pack(
    vertices: usize,
    ranks: &[usize],
    root: usize,
    trees: i64,
    arcs: &[RouteArc],
    most: usize,
) -> Vec<PackedTree> {
    let mut packing = TreePacking::new(vertices, root, arcs);
    let (mut packed, mut left) = (Vec::new(), trees);
    while left > 0 && packed.len() < most {
        let tree = packing.grow(ranks, left);
        left -= tree.shares;
        packed.push(tree);
    }
    packed
}

struct TreePacking {
    root: usize,
    /// Arcs with equal ends are one.
    arcs: Vec<(usize, usize)>,
    width: Vec<i64>,
    /// By vertex, the arcs out of it.
    out: Vec<Vec<usize>>,
    network: FlowNetwork,
    /// By arc and by vertex, the numbers in the flow network.
    flow_arc: Vec<usize>,
    flow_source: Vec<usize>,
}

impl TreePacking {
    fn new(vertices: usize, root: usize, arcs: &[RouteArc]) -> Self {
        let mut network = FlowNetwork::new(vertices + 1);
        let mut packing_arcs = Vec::new();
        let mut width = Vec::new();
        let mut out: Vec<Vec<usize>> = vec![Vec::new(); vertices];
        for arc in arcs {
            let ends = (arc.from, arc.to);
            match packing_arcs.iter().position(|other| *other == ends) {
                Some(known) => width[known] += arc.width,
                None => {
                    out[arc.from].push(width.len());
                    packing_arcs.push(ends);
                    width.push(arc.width);
                }
            }
        }
        let flow_arc = packing_arcs.iter().map(|(from, to)| network.add(*from, *to, [0, 0])).collect();
        let flow_source = (0..vertices).map(|vertex| network.add(vertices, vertex, [0, 0])).collect();
        Self { root, arcs: packing_arcs, width, out, network, flow_arc, flow_source }
    }

    /// The next tree, for at most `left` shares. Its arcs are used up.
    fn grow(&mut self, ranks: &[usize], left: i64) -> PackedTree {
        let vertices = self.out.len();
        let mut parent = vec![None; vertices];
        let mut depth: Vec<Option<u32>> = vec![None; vertices];
        depth[self.root] = Some(0);
        let (mut used, mut shares) = (Vec::new(), left);
        // Those nearest to the root come first.
        let mut reached = vec![self.root];
        while reached.len() <= ranks.len() {
            let mut best: Option<(i64, usize)> = None;
            'search: for from in &reached {
                for place in 0..self.out[*from].len() {
                    let arc = self.out[*from][place];
                    let most = best.map_or(0, |(most, _)| most);
                    if depth[self.arcs[arc].1].is_some() || self.width[arc] <= most {
                        continue;
                    }
                    let possible = self.possible(arc, shares, left);
                    if possible > most {
                        best = Some((possible, arc));
                    }
                    if possible == shares {
                        break 'search;
                    }
                }
            }
            let (possible, arc) = best.expect("some arc leads on");
            used.iter().for_each(|arc: &usize| self.width[*arc] += shares - possible);
            shares = possible;
            self.width[arc] -= shares;
            used.push(arc);
            let (from, to) = self.arcs[arc];
            parent[to] = Some(from).filter(|from| *from != self.root);
            depth[to] = depth[from].map(|depth| depth + 1);
            let place = reached.partition_point(|other| depth[*other] <= depth[to]);
            reached.insert(place, to);
        }
        PackedTree { parent, shares }
    }

    /// For how many of the `shares` of the tree that grows an arc can be added to it, if `left` are needed
    /// with those that follow.
    fn possible(&mut self, arc: usize, shares: i64, left: i64) -> i64 {
        let (from, to) = self.arcs[arc];
        for (flow, width) in self.flow_arc.iter().zip(&self.width) {
            self.network.set(*flow, [*width, 0]);
        }
        let source = self.out.len();
        for (vertex, flow) in self.flow_source.iter().enumerate() {
            let is_source = vertex == from || vertex == self.root;
            self.network.set(*flow, [if is_source { UNLIMITED } else { 0 }, 0]);
        }
        let flow = self.network.send(source, to, left);
        (flow - (left - shares)).min(shares).min(self.width[arc])
    }
}

#[cfg(test)]
mod tests {
    use super::super::splitting::Splitting;
    use super::super::throughput::{random_network, roots};
    use super::*;
    use fastrand::Rng;

    #[test]
    fn trees_span_all_ranks_within_the_widths_of_links_and_routes() {
        for seed in 0..300 {
            let (network, widths) = random_network(&mut Rng::with_seed(seed), 9);
            let bound = network.least_time(&widths);
            // Links carry even numbers, so that as much can leave a switch as enters it.
            let trees = 2 * bound.denominator;
            let carried: Vec<i64> = widths.iter().map(|width| 2 * width * bound.numerator).collect();
            let inflows = network.inflows(&carried, trees).expect("the least time is possible");
            let mut inflows = inflows;
            network.balance(&carried, trees, &mut inflows);
            let roots = roots(&inflows, trees);
            let to_second = network.orient(&carried, &roots, &inflows);
            let arcs = network.ends.iter().enumerate().flat_map(|(link, [one, other])| {
                [
                    (*one, *other, to_second[link], true),
                    (*other, *one, carried[link] - to_second[link], false),
                ]
                .map(|(from, to, width, forward)| RouteArc {
                    from,
                    to,
                    width,
                    route: vec![(link, forward)],
                })
            });
            let root = network.vertices;
            let first = (0..).zip(&roots).map(|(to, width)| RouteArc {
                from: root,
                to,
                width: *width,
                route: Vec::new(),
            });
            let arcs: Vec<RouteArc> = arcs.chain(first).filter(|arc| arc.width > 0).collect();
            let arcs = Splitting::new(&network, trees, arcs).split_all();
            let packed = pack(root + 1, &network.ranks, root, trees, &arcs, usize::MAX);
            assert_eq!(packed.iter().map(|tree| tree.shares).sum::<i64>(), trees, "seed {seed}");
            let mut used = vec![0; network.ends.len()];
            for arc in arcs.iter().filter(|arc| arc.from != root) {
                arc.route.iter().for_each(|(link, _)| used[*link] += arc.width);
                let ends = arc.route.iter().map(|(link, forward)| {
                    let [one, other] = network.ends[*link];
                    if *forward { (one, other) } else { (other, one) }
                });
                let ends: Vec<(usize, usize)> = ends.collect();
                assert!(ends.windows(2).all(|pair| pair[0].1 == pair[1].0), "seed {seed}: {arc:?}");
                assert_eq!((ends[0].0, ends[ends.len() - 1].1), (arc.from, arc.to), "seed {seed}");
            }
            assert!(used.iter().zip(&carried).all(|(used, carried)| used <= carried), "seed {seed}");
            for (from, to) in arcs.iter().filter(|arc| arc.from != root).map(|arc| (arc.from, arc.to)) {
                let wide: i64 =
                    arcs.iter().filter(|arc| (arc.from, arc.to) == (from, to)).map(|arc| arc.width).sum();
                let uses = packed.iter().filter(|tree| tree.parent[to] == Some(from)).map(|tree| tree.shares);
                assert!(uses.sum::<i64>() <= wide, "seed {seed}");
            }
            for tree in &packed {
                let top = |rank: &usize| {
                    let up = std::iter::successors(Some(*rank), |vertex| tree.parent[*vertex]);
                    up.take(network.ranks.len()).last()
                };
                let first = top(&network.ranks[0]).filter(|root| tree.parent[*root].is_none());
                assert!(
                    first.is_some() && network.ranks.iter().all(|rank| top(rank) == first),
                    "seed {seed}"
                );
            }
        }
    }
}
