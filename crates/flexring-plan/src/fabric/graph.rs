//! The graph of a fabric.
//!
//! Owns vertices and links, and which of them some of the ranks have.

use crate::Rank;

/// The links from one vertex to another, each with whether it is crossed from its first to its second end.
pub type Route = Vec<(usize, bool)>;

/// A link between two vertices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FabricLink {
    /// The names of both ends, for output.
    pub name: String,
    /// The vertices that it joins.
    pub ends: [usize; 2],
    /// Bits per second from the first to the second end, and back; at least 1.
    pub bandwidths: [u64; 2],
    /// Nanoseconds in one direction.
    pub latency: u64,
    /// Bytes that pass at once after a pause, in each direction.
    pub burst: u64,
    /// Whether both ends are on one node.
    pub is_within_node: bool,
}

/// Vertices and links. The first vertices are the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FabricGraph {
    world: usize,
    /// By vertex, its name.
    names: Vec<String>,
    links: Vec<FabricLink>,
    /// By vertex, its links.
    links_of: Vec<Vec<usize>>,
}

impl FabricGraph {
    pub(super) fn new(world: usize, names: Vec<String>, links: Vec<FabricLink>) -> Self {
        let mut links_of = vec![Vec::new(); names.len()];
        for (number, link) in links.iter().enumerate() {
            link.ends.iter().for_each(|end| links_of[*end].push(number));
        }
        Self { world, names, links, links_of }
    }

    pub(super) fn world(&self) -> usize {
        self.world
    }

    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    pub(super) fn links(&self) -> &[FabricLink] {
        &self.links
    }

    /// The fewest links from one rank to another.
    pub(super) fn fewest_links(&self, from: Rank, to: Rank) -> Route {
        self.route_of(from, to, &self.search(from, |_, _, _| true))
    }

    /// By rank, the fewest links from a rank, past switches and the nodes of both only; empty where there are
    /// none.
    pub(super) fn past_switches(&self, from: Rank) -> Vec<Route> {
        let is_within = |link: usize| self.links[link].is_within_node;
        let before = self.search(from, |at, last, next| {
            let is_node = || self.links_of[at].iter().any(|link| is_within(*link));
            at == from || at >= self.world && (last.is_some_and(is_within) || is_within(next) || !is_node())
        });
        (0..self.world).map(|to| self.route_of(from, to, &before)).collect()
    }

    /// By vertex, the last link on the way from a rank. `leads_on` says of a vertex whether from one link to
    /// another one leads on.
    fn search(
        &self,
        from: Rank,
        leads_on: impl Fn(usize, Option<usize>, usize) -> bool,
    ) -> Vec<Option<(usize, bool)>> {
        let mut before: Vec<Option<(usize, bool)>> = vec![None; self.names.len()];
        let mut order = vec![from];
        let mut next = 0;
        while let Some(at) = order.get(next).copied() {
            next += 1;
            for number in &self.links_of[at] {
                let last = before[at].map(|(link, _)| link);
                let ends = self.links[*number].ends;
                let forward = ends[0] == at;
                let other = ends[usize::from(forward)];
                if other != from && before[other].is_none() && leads_on(at, last, *number) {
                    before[other] = Some((*number, forward));
                    order.push(other);
                }
            }
        }
        before
    }

    fn route_of(&self, from: usize, to: usize, before: &[Option<(usize, bool)>]) -> Route {
        let mut route = Vec::new();
        let mut at = to;
        while let Some((link, forward)) = before[at].filter(|_| at != from) {
            route.push((link, forward));
            at = self.links[link].ends[usize::from(!forward)];
        }
        route.reverse();
        route
    }

    /// The fabric of some of the ranks, in this order. Other ranks and their links are left out, unless these
    /// ranks are connected by them only.
    pub(super) fn restricted_to(&self, ranks: &[Rank]) -> Self {
        let mut number: Vec<Option<usize>> = vec![None; self.names.len()];
        ranks.iter().enumerate().for_each(|(place, rank)| number[*rank] = Some(place));
        let others = (self.world..self.names.len()).collect::<Vec<_>>();
        let excluded = (0..self.world).filter(|rank| !ranks.contains(rank)).collect::<Vec<_>>();
        let mut names: Vec<String> = (0..ranks.len()).map(|rank| format!("rank {rank}")).collect();
        let mut keep = |number: &mut Vec<Option<usize>>, vertices: &[usize]| {
            for vertex in vertices {
                number[*vertex] = Some(names.len());
                names.push(self.names[*vertex].clone());
            }
        };
        keep(&mut number, &others);
        if !self.connects(ranks, &number) {
            keep(&mut number, &excluded);
        }
        let links = self.links.iter().filter_map(|link| {
            let ends = [number[link.ends[0]]?, number[link.ends[1]]?];
            Some(FabricLink { ends, ..link.clone() })
        });
        let links = links.collect();
        Self::new(ranks.len(), names, links)
    }

    /// Whether these ranks are connected by vertices that have a number.
    fn connects(&self, ranks: &[Rank], number: &[Option<usize>]) -> bool {
        let ends = self.links.iter().map(|link| link.ends);
        let kept = ends.filter(|ends| ends.iter().all(|end| number[*end].is_some()));
        let component = components(self.names.len(), kept);
        ranks.iter().all(|rank| component[*rank] == component[ranks[0]])
    }
}

/// By vertex, a vertex that all those have in common which these pairs connect.
pub(crate) fn components(vertices: usize, ends: impl Iterator<Item = [usize; 2]>) -> Vec<usize> {
    // The vertex that each vertex is connected with, found by halving paths.
    let mut with: Vec<usize> = (0..vertices).collect();
    fn find(with: &mut [usize], mut vertex: usize) -> usize {
        while with[vertex] != vertex {
            with[vertex] = with[with[vertex]];
            vertex = with[vertex];
        }
        vertex
    }
    for [one, other] in ends {
        let (one, other) = (find(&mut with, one), find(&mut with, other));
        with[one] = other;
    }
    (0..vertices).map(|vertex| find(&mut with, vertex)).collect()
}
