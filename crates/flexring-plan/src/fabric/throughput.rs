//! The least time of an all-reduce on a network of links, exactly, and the groups of ranks that prove it.
//!
//! Owns the bound, and the number of trees that enter each vertex.
//!
//! Take k disjoint sets of vertices, each with a rank, which hold all ranks. An element needs 2 (k - 1)
//! messages between them: before the first set has all contributions the other k - 1 have sent something, and
//! afterwards each of these receives something. Each message leaves one set and enters another, so the links
//! out of the sets, of widths W together, need at least 2 (k - 1) / W for each unit of the vector. This is
//! the least time: with it, x trees of equal shares can span the ranks such that no link is in more of them
//! than it carries (Tutte 1961 and Nash-Williams 1961 without switches).
//!
//! That there are such trees is decided as follows. Point each tree away from one rank, the root. A set of
//! vertices with ranks and without the root is entered by each of the x trees. Let `inflow(v)` be what enters
//! v less what leaves it, 0 for switches. If each link carries u in both directions together, u(S) +
//! inflow(S) >= 2 x for each such set S, with u(S) of the links out of it; with 2 x more at the root this
//! holds for all sets with ranks. The right-hand side less u(S) is supermodular, so the least inflows are
//! found rank by rank, each by one maximum flow; and x trees exist if their sum is 2 x (that they then exist
//! with switches, too, see [`splitting`](super::splitting)). Otherwise the sets that were tight are a better
//! bound, from which the search continues (Dinkelbach 1967).

use super::max_flow::{FlowNetwork, UNLIMITED};

/// Times that the inflows of all ranks are compared in pairs.
const ROUNDS: usize = 24;

/// Links, each between two vertices, some of which are ranks.
#[derive(Clone, Debug)]
pub(super) struct LinkNetwork {
    pub(super) vertices: usize,
    /// The vertices of the ranks.
    pub(super) ranks: Vec<usize>,
    /// By link, its ends.
    pub(super) ends: Vec<[usize; 2]>,
    /// By link, whether both ends are on one node.
    pub(super) is_within_node: Vec<bool>,
}

/// Sets of vertices that limit every all-reduce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct VertexSets(pub(super) Vec<Vec<usize>>);

/// The least time, as a fraction of integers: units of time for each unit of the vector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LeastTime {
    pub(super) numerator: i64,
    /// The width of the links out of the sets together.
    pub(super) denominator: i64,
    pub(super) sets: VertexSets,
}

impl LinkNetwork {
    /// Whether one link follows another past a node that is not the end of either of them: nodes do not
    /// forward.
    pub(super) fn is_transit(&self, first: usize, second: usize) -> bool {
        let common = self.ends[first].iter().find(|end| self.ends[second].contains(end));
        let is_node = |vertex: &usize| {
            self.ends.iter().zip(&self.is_within_node).any(|(ends, within)| *within && ends.contains(vertex))
        };
        !self.is_within_node[first] && !self.is_within_node[second] && common.is_some_and(is_node)
    }

    /// By vertex, the sum over its links.
    pub(super) fn degrees(&self, widths: &[i64]) -> Vec<i64> {
        let mut degrees = vec![0; self.vertices];
        for (ends, width) in self.ends.iter().zip(widths) {
            ends.iter().for_each(|end| degrees[*end] += width);
        }
        degrees
    }

    /// By set, the widths of the links out of it.
    pub(super) fn cuts(&self, sets: &VertexSets, widths: &[i64]) -> Vec<i64> {
        let mut set_of = vec![usize::MAX; self.vertices];
        for (number, set) in sets.0.iter().enumerate() {
            set.iter().for_each(|vertex| set_of[*vertex] = number);
        }
        let mut cuts = vec![0; sets.0.len()];
        for (ends, width) in self.ends.iter().zip(widths) {
            let [one, other] = ends.map(|end| set_of[end]);
            for set in [one, other] {
                if one != other && set != usize::MAX {
                    cuts[set] += width;
                }
            }
        }
        cuts
    }

    /// The least time with links of these widths. Needs two ranks, and a connected network.
    pub(super) fn least_time(&self, widths: &[i64]) -> LeastTime {
        let mut sets = VertexSets(self.ranks.iter().map(|rank| vec![*rank]).collect());
        loop {
            let numerator = 2 * (sets.0.len() as i64 - 1);
            let denominator = self.cuts(&sets, widths).iter().sum();
            let carried: Vec<i64> = widths.iter().map(|width| width * numerator).collect();
            match self.inflows(&carried, denominator) {
                Ok(_) => return LeastTime { numerator, denominator, sets },
                Err(longer) => sets = longer,
            }
        }
    }

    /// By vertex, what enters it less what leaves it, if `trees` trees span the ranks and each link carries
    /// so much in both directions together; with 2 `trees` more at the root.
    ///
    /// # Errors
    /// Sets that are a reason why there are not so many trees.
    pub(super) fn inflows(&self, carried: &[i64], trees: i64) -> Result<Vec<i64>, VertexSets> {
        let (source, sink) = (self.vertices, self.vertices + 1);
        let mut empty = FlowNetwork::new(self.vertices + 2);
        let links: Vec<usize> = self.ends.iter().map(|ends| empty.add(ends[0], ends[1], [0, 0])).collect();
        let from: Vec<usize> = (0..self.vertices).map(|vertex| empty.add(source, vertex, [0, 0])).collect();
        let into: Vec<usize> = (0..self.vertices).map(|vertex| empty.add(vertex, sink, [0, 0])).collect();
        for (link, width) in links.into_iter().zip(carried) {
            empty.set(link, [*width; 2]);
        }
        // Ranks that have no inflow yet cannot be in the set of those before them.
        for rank in &self.ranks {
            empty.set(into[*rank], [UNLIMITED, 0]);
        }
        let mut inflows = vec![0; self.vertices];
        let mut tight: Vec<Vec<usize>> = Vec::new();
        let mut below_zero = 0;
        for rank in &self.ranks {
            let mut network = empty.clone();
            network.set(into[*rank], [0, 0]);
            network.set(from[*rank], [UNLIMITED, 0]);
            let least = network.send(source, sink, UNLIMITED) - below_zero;
            let inflow = 2 * trees - least;
            let mut set: Vec<usize> = Vec::new();
            let side = network.source_side(source);
            (0..self.vertices).filter(|vertex| side[*vertex]).for_each(|vertex| set.push(vertex));
            // Tight sets with a common rank are tight together.
            let has_common =
                |other: &Vec<usize>| other.iter().any(|vertex| side[*vertex] && self.ranks.contains(vertex));
            for other in tight.extract_if(.., |other| has_common(other)) {
                set.extend(other);
            }
            set.sort_unstable();
            set.dedup();
            tight.push(set);
            inflows[*rank] = inflow;
            empty.set(into[*rank], [inflow.max(0), 0]);
            empty.set(from[*rank], [(-inflow).max(0), 0]);
            below_zero += (-inflow).max(0);
        }
        match inflows.iter().sum::<i64>() == 2 * trees {
            true => Ok(inflows),
            false => Err(self.disjoint(tight)),
        }
    }

    /// The sets without the switches that are in several of them: that makes the links out of them no wider.
    fn disjoint(&self, sets: Vec<Vec<usize>>) -> VertexSets {
        let mut times = vec![0; self.vertices];
        sets.iter().flatten().for_each(|vertex| times[*vertex] += 1);
        VertexSets(
            sets.into_iter()
                .map(|set| set.into_iter().filter(|vertex| times[*vertex] == 1).collect())
                .collect(),
        )
    }

    /// Makes inflows more alike, so that links carry as much in one direction as in the other where that is
    /// possible.
    pub(super) fn balance(&self, carried: &[i64], trees: i64, inflows: &mut [i64]) {
        let mut order = self.ranks.clone();
        for round in 0..ROUNDS {
            order.sort_by_key(|rank| -inflows[*rank]);
            let mut is_changed = false;
            // The highest with the lowest, then with the second lowest, and so on.
            for place in 0..order.len() / 2 {
                let (high, low) =
                    (order[place], order[order.len() - 1 - (place + round) % order.len().div_ceil(2)]);
                // What enters one instead of the other changes by 2, as whole trees do.
                let half = (inflows[high] - inflows[low]) / 4 * 2;
                if half > 0 {
                    let moved = self.movable(carried, trees, inflows, [high, low]).min(half) / 2 * 2;
                    inflows[high] -= moved;
                    inflows[low] += moved;
                    is_changed |= moved > 0;
                }
            }
            if !is_changed && round > 0 {
                break;
            }
        }
    }

    /// How much of the inflow of the first rank may be that of the second one: the least excess of a set with
    /// the first and without the second.
    fn movable(&self, carried: &[i64], trees: i64, inflows: &[i64], [high, low]: [usize; 2]) -> i64 {
        let (source, sink) = (self.vertices, self.vertices + 1);
        let mut network = FlowNetwork::new(self.vertices + 2);
        for (ends, width) in self.ends.iter().zip(carried) {
            network.add(ends[0], ends[1], [*width; 2]);
        }
        let mut below_zero = 0;
        for rank in &self.ranks {
            match inflows[*rank] {
                inflow @ 0.. => network.add(*rank, sink, [inflow, 0]),
                inflow => {
                    below_zero -= inflow;
                    network.add(source, *rank, [-inflow, 0])
                }
            };
        }
        network.add(source, high, [UNLIMITED, 0]);
        network.add(low, sink, [UNLIMITED, 0]);
        network.send(source, sink, UNLIMITED) - below_zero - 2 * trees
    }

    /// By link, what it carries towards its second end. What it carries towards its first end is the rest of
    /// `carried`. `roots` says by vertex how many trees point away from it.
    pub(super) fn orient(&self, carried: &[i64], roots: &[i64], inflows: &[i64]) -> Vec<i64> {
        let (source, sink) = (self.vertices, self.vertices + 1);
        let mut network = FlowNetwork::new(self.vertices + 2);
        let degrees = self.degrees(carried);
        let mut excess: Vec<i64> = (0..self.vertices)
            .map(|vertex| {
                let inflow = inflows[vertex] - 2 * roots[vertex];
                -(inflow + degrees[vertex]) / 2
            })
            .collect();
        let mut arcs = Vec::new();
        // At first each link carries half in each direction. What enters one end may enter the other instead.
        for ([one, other], width) in self.ends.iter().zip(carried) {
            let to_other = width / 2;
            excess[*other] += to_other;
            excess[*one] += width - to_other;
            arcs.push(network.add(*other, *one, [to_other, width - to_other]));
        }
        for (vertex, excess) in excess.iter().enumerate() {
            match excess {
                0 => {}
                1.. => drop(network.add(source, vertex, [*excess, 0])),
                _ => drop(network.add(vertex, sink, [-excess, 0])),
            }
        }
        let surplus: i64 = excess.iter().filter(|excess| **excess > 0).sum();
        let sent = network.send(source, sink, UNLIMITED);
        debug_assert_eq!(sent, surplus, "the inflows are possible");
        arcs.into_iter().map(|arc| network.left(arc)).collect()
    }
}

/// The greatest common divisor.
pub(super) fn gcd(mut a: i64, mut b: i64) -> i64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// By vertex, how many trees have their root there, so that links carry as much in one direction as in the
/// other where that is possible.
pub(super) fn roots(inflows: &[i64], trees: i64) -> Vec<i64> {
    let sum: i64 = inflows.iter().map(|inflow| (*inflow).max(0)).sum();
    let part = |inflow: &i64| (i128::from((*inflow).max(0)) * i128::from(trees) / i128::from(sum)) as i64;
    let mut roots: Vec<i64> = inflows.iter().map(part).collect();
    let mut left = trees - roots.iter().sum::<i64>();
    for (root, inflow) in roots.iter_mut().zip(inflows) {
        let more = ((((*inflow).max(0) + 1) / 2) - *root).clamp(0, left);
        *root += more;
        left -= more;
    }
    roots
}

#[cfg(test)]
pub(super) use tests::random_network;

#[cfg(test)]
mod tests {
    use super::*;
    use fastrand::Rng;

    /// A connected network, and the widths of its links.
    pub(in super::super) fn random_network(random: &mut Rng, most: usize) -> (LinkNetwork, Vec<i64>) {
        let vertices = random.usize(2..=most);
        let mut ranks: Vec<usize> = (0..vertices).collect();
        random.shuffle(&mut ranks);
        ranks.truncate(random.usize(2..=vertices));
        let mut ends: Vec<[usize; 2]> =
            (1..vertices).map(|vertex| [random.usize(..vertex), vertex]).collect();
        for _ in 0..random.usize(..2 * vertices) {
            let (one, other) = (random.usize(..vertices), random.usize(..vertices));
            if one < other && !ends.contains(&[one, other]) {
                ends.push([one, other]);
            }
        }
        let widths = ends.iter().map(|_| random.i64(1..8)).collect();
        let is_within_node = vec![false; ends.len()];
        (LinkNetwork { vertices, ranks, ends, is_within_node }, widths)
    }

    /// The longest bound, by trying all ways to put vertices into sets or into none.
    fn of_all_sets(network: &LinkNetwork, widths: &[i64]) -> f64 {
        fn extend(network: &LinkNetwork, widths: &[i64], sets: &mut Vec<Vec<usize>>, vertex: usize) -> f64 {
            if vertex == network.vertices {
                let has_rank = |set: &Vec<usize>| set.iter().any(|vertex| network.ranks.contains(vertex));
                if sets.len() < 2 || !sets.iter().all(has_rank) {
                    return 0.0;
                }
                let wide: i64 = network.cuts(&VertexSets(sets.clone()), widths).iter().sum();
                return 2.0 * (sets.len() as f64 - 1.0) / wide as f64;
            }
            let mut longest: f64 = 0.0;
            for set in 0..=sets.len() {
                if set == sets.len() {
                    sets.push(Vec::new());
                }
                sets[set].push(vertex);
                longest = longest.max(extend(network, widths, sets, vertex + 1));
                sets[set].pop();
                if sets[set].is_empty() {
                    sets.pop();
                }
            }
            if !network.ranks.contains(&vertex) {
                longest = longest.max(extend(network, widths, sets, vertex + 1));
            }
            longest
        }
        extend(network, widths, &mut Vec::new(), 0)
    }

    #[test]
    fn the_least_time_is_that_of_the_worst_sets() {
        for seed in 0..400 {
            let (network, widths) = random_network(&mut Rng::with_seed(seed), 8);
            let LeastTime { numerator, denominator, sets } = network.least_time(&widths);
            let found = numerator as f64 / denominator as f64;
            let longest = of_all_sets(&network, &widths);
            assert!((found - longest).abs() < 1e-9, "seed {seed}: {found}, not {longest}");
            // The sets prove it.
            assert_eq!(network.cuts(&sets, &widths).iter().sum::<i64>(), denominator, "seed {seed}");
            let of_sets = |vertex: &usize| sets.0.iter().filter(|set| set.contains(vertex)).count();
            assert!(network.ranks.iter().all(|rank| of_sets(rank) == 1), "seed {seed}: {sets:?}");
        }
    }
}
