//! The bytes that a plan sends over each link of the topology, and its messages in a row.
//!
//! Owns the count, which uses the programs of all ranks and not a planner's model. Must not know latencies: it is for
//! vectors whose time depends on bandwidth.

use super::lowering::{Plan, ProgramSpec};
use super::program::Body;
use super::topology::{Topology, VertexId};

/// The load of the link between a vertex and its parent, in bytes per byte of the vector.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// From the vertex to its parent.
    pub up: f64,
    /// From the parent to the vertex.
    pub down: f64,
}

impl Load {
    /// The larger of both directions. A link carries them at the same time.
    #[must_use]
    pub fn larger(self) -> f64 {
        self.up.max(self.down)
    }
}

/// The link whose load takes longest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Busiest {
    /// The vertex whose uplink it is.
    pub vertex: VertexId,
    /// Seconds for each byte of the vector.
    pub seconds_per_byte: f64,
}

/// The loads of all links of a topology.
#[derive(Clone, Debug, PartialEq)]
pub struct Traffic {
    loads: Vec<Load>,
    hops: u32,
}

impl Traffic {
    /// The sum of what the programs of all ranks send. The plan must have as many ranks as the topology.
    #[must_use]
    pub fn of(plan: &Plan, topology: &Topology, spec: ProgramSpec) -> Self {
        let mut loads = vec![Load::default(); topology.vertices().len()];
        let mut hops = 0;
        for rank in 0..topology.world() {
            for step in plan.program(rank, spec).steps {
                let Body::Send { peers, .. } = &*step.body else { continue };
                let length = step.span().extent();
                hops = hops.max(step.depth + 1);
                for peer in peers.iter().copied() {
                    let (from, to) = (topology.leaf(rank), topology.leaf(peer));
                    let top = topology.lowest_common_ancestor(from, to);
                    climb(topology, from, top, |vertex| loads[vertex].up += length);
                    climb(topology, to, top, |vertex| loads[vertex].down += length);
                }
            }
        }
        Self { loads, hops }
    }

    /// Most messages in a row, each of which needs the one before it.
    #[must_use]
    pub fn hops(&self) -> u32 {
        self.hops
    }

    /// The load of the uplink of `vertex`.
    #[must_use]
    pub fn load(&self, vertex: VertexId) -> Load {
        self.loads[vertex]
    }

    /// The link whose load takes longest at its bandwidth; `None` if nothing is sent.
    #[must_use]
    pub fn busiest(&self, topology: &Topology) -> Option<Busiest> {
        let links = topology.vertices().iter().zip(&self.loads).enumerate().skip(1);
        let times = links.map(|(vertex, (of, load))| Busiest {
            vertex,
            seconds_per_byte: load.larger() / of.uplink.bytes_per_second(),
        });
        times.filter(|link| link.seconds_per_byte > 0.0).reduce(|first, next| {
            // The first of links that take equally long. The tolerance covers rounding in sums of fractions.
            let longer = next.seconds_per_byte > first.seconds_per_byte * (1.0 + 1e-9);
            if longer { next } else { first }
        })
    }
}

/// Calls `visit` with every vertex from `from` up to below `top`.
fn climb(topology: &Topology, from: VertexId, top: VertexId, visit: impl FnMut(VertexId)) {
    let up = |vertex: &VertexId| topology.vertices()[*vertex].parent;
    std::iter::successors(Some(from), up).take_while(|vertex| *vertex != top).for_each(visit);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Algorithm, Lowering};
    use crate::plan::planner::{self, Details};
    use crate::plan::topology_file::parse_short;

    /// The loads of the nodes' links; the busiest link and its nanoseconds per byte.
    fn loads(topology: &str, algorithm: Algorithm) -> (Vec<(f64, f64)>, String, f64) {
        let topology = parse_short(topology).expect("short form").expect("valid");
        let schedule = planner::plan(algorithm, &topology, &Details::default()).expect("possible");
        let plan = Plan::on(schedule, &topology, Lowering::Auto);
        let traffic = Traffic::of(&plan, &topology, ProgramSpec::ALL_REDUCE);
        let waves = Traffic::of(&plan, &topology, ProgramSpec { by_wave: true, ..ProgramSpec::ALL_REDUCE });
        let round = |value: f64| (value * 1e6).round() / 1e6;
        let of_nodes = |traffic: &Traffic| -> Vec<(f64, f64)> {
            let nodes = &topology.vertices()[0].children;
            let loads = nodes.iter().map(|node| traffic.load(*node));
            loads.map(|load| (round(load.up), round(load.down))).collect()
        };
        assert_eq!(of_nodes(&traffic), of_nodes(&waves), "loads do not depend on how spans are cut");
        let busiest = traffic.busiest(&topology).expect("something is sent");
        let name = topology.vertices()[busiest.vertex].name.clone();
        (of_nodes(&traffic), name, round(busiest.seconds_per_byte * 1e9))
    }

    #[test]
    fn flexreduce_loads_all_nodes_equally() {
        let (nodes, name, nanoseconds) = loads("2+3", Algorithm::Flexreduce);
        assert_eq!(nodes, [(1.0, 1.0); 2]);
        assert_eq!((&name[..], nanoseconds), ("node 0", 0.8));
        let (nodes, ..) = loads("3+3+4", Algorithm::Flexreduce);
        assert_eq!(nodes, [(1.333333, 1.333333); 3]);
    }

    #[test]
    fn a_ring_sends_all_parts_but_one_into_and_out_of_each_node() {
        let (nodes, _, nanoseconds) = loads("2+3", Algorithm::Ring);
        assert_eq!((nodes, nanoseconds), (vec![(1.6, 1.6); 2], 1.28));
    }

    #[test]
    fn weighted_flexreduce_loads_a_slow_link_less() {
        let (nodes, name, nanoseconds) = loads("1@1G+1@1G+1@500M", Algorithm::Weighted);
        assert_eq!(nodes, [(1.5, 1.5), (1.5, 1.5), (1.0, 1.0)]);
        // The slow link still takes longest: it must carry the vector once in each direction.
        assert_eq!((&name[..], nanoseconds), ("node 2", 16.0));
        let (nodes, name, nanoseconds) = loads("1@1G+1@1G+1@500M", Algorithm::Flexreduce);
        assert_eq!(nodes, [(1.333333, 1.333333); 3]);
        assert_eq!((&name[..], nanoseconds), ("node 2", 21.333333));
    }

    #[test]
    fn a_single_node_sends_nothing_up() {
        let (nodes, name, _) = loads("4", Algorithm::Ring);
        assert_eq!((nodes, &name[..]), (vec![(0.0, 0.0)], "rank 0"));
    }

    #[test]
    fn uplinks_of_two_switches_carry_the_vector_once() {
        let topology = parse_short("(2+3)+(4)").expect("short form").expect("valid");
        let schedule = planner::flexreduce::plan(&topology).expect("small");
        let traffic =
            Traffic::of(&Plan::on(schedule, &topology, Lowering::Auto), &topology, ProgramSpec::ALL_REDUCE);
        for switch in &topology.vertices()[0].children {
            let Load { up, down } = traffic.load(*switch);
            assert!((up - 1.0).abs() < 1e-9 && (down - 1.0).abs() < 1e-9, "{up} {down}");
        }
    }
}
