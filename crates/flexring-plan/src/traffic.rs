//! The bytes that a plan sends over each link of the topology, and its messages in a row.
//!
//! Owns the count, which uses the programs of all ranks and not a planner's model. Must not know latencies:
//! it is for vectors whose time depends on bandwidth.

use super::lowering::{Plan, ProgramSpec};
use super::physical_links::PhysicalLinks;
use super::program::Body;
use super::topology::{Topology, TopologyLink};

/// The load of a link, in bytes per byte of the vector.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// From the vertex to its parent, or from the first end of a link of a fabric.
    pub up: f64,
    /// The other way.
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
    /// The link.
    pub vertex: TopologyLink,
    /// Seconds for each byte of the vector.
    pub seconds_per_byte: f64,
}

/// The loads of all links of a topology.
#[derive(Clone, Debug, PartialEq)]
pub struct Traffic {
    /// By link, its parts.
    loads: Vec<Vec<Load>>,
    hops: u32,
}

impl Traffic {
    /// The sum of what the programs of all ranks send. The plan must have as many ranks as the topology.
    #[must_use]
    pub fn of(plan: &Plan, topology: &Topology, spec: ProgramSpec) -> Self {
        let links = PhysicalLinks::new(topology);
        let mut carried = vec![Load::default(); links.len()];
        let mut hops = 0;
        for rank in 0..topology.world() {
            for step in plan.program(rank, spec).steps {
                let Body::Send { peers, .. } = &*step.body else { continue };
                let length = step.span().extent();
                hops = hops.max(step.depth + 1);
                for peer in peers.iter().copied() {
                    for (link, up) in links.path(rank, peer) {
                        let Load { up: sent_up, down: sent_down } = &mut carried[link];
                        *(if up { sent_up } else { sent_down }) += length;
                    }
                }
            }
        }
        let of_link = |link| carried[links.of(link)].to_vec();
        Self { loads: links.in_output().map(of_link).collect(), hops }
    }

    /// Most messages in a row, each of which needs the one before it.
    #[must_use]
    pub fn hops(&self) -> u32 {
        self.hops
    }

    /// Seconds that a link takes for each byte of the vector, with the bandwidths of a topology. With several
    /// NICs, the slowest of them counts.
    #[must_use]
    pub fn seconds_per_byte(&self, topology: &Topology, vertex: TopologyLink) -> f64 {
        let parts = self.loads[vertex].iter().enumerate();
        let time = |(part, load): (usize, &Load)| {
            let [up, down] = topology.part_bandwidths(vertex, part).map(|bandwidth| bandwidth as f64);
            8.0 * f64::max(load.up / up, load.down / down)
        };
        parts.map(time).fold(0.0, f64::max)
    }

    /// The load of a link, of all its NICs together.
    #[must_use]
    pub fn load(&self, vertex: TopologyLink) -> Load {
        let parts = &self.loads[vertex];
        Load { up: parts.iter().map(|part| part.up).sum(), down: parts.iter().map(|part| part.down).sum() }
    }

    /// The link whose load takes longest at its bandwidth; `None` if nothing is sent.
    #[must_use]
    pub fn busiest(&self, topology: &Topology) -> Option<Busiest> {
        let times = (1..self.loads.len())
            .map(|vertex| Busiest { vertex, seconds_per_byte: self.seconds_per_byte(topology, vertex) });
        times.filter(|link| link.seconds_per_byte > 0.0).reduce(|first, next| {
            // The first of links that take equally long. The tolerance covers rounding in sums of fractions.
            let longer = next.seconds_per_byte > first.seconds_per_byte * (1.0 + 1e-9);
            if longer { next } else { first }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lowering::Movement;
    use crate::planner::{self, Details};
    use crate::topology_file::parse_short;
    use flexring_core::config::{Algorithm, Lowering};

    /// The loads of the nodes' links; the busiest link and its nanoseconds per byte.
    fn loads(topology: &str, algorithm: Algorithm) -> (Vec<(f64, f64)>, String, f64) {
        let topology = parse_short(topology).expect("short form").expect("valid");
        let schedule = planner::plan(algorithm, &topology, &Details::default()).expect("possible");
        let plan = Plan::on(schedule, &topology, Lowering::Auto);
        let traffic = Traffic::of(&plan, &topology, ProgramSpec::ALL_REDUCE);
        let waves = Traffic::of(
            &plan,
            &topology,
            ProgramSpec { movement: Movement::Waves, ..ProgramSpec::ALL_REDUCE },
        );
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

    /// Eq. 6 of the FlexReduce paper, for any depth: besides what a vertex and its siblings exchange, its
    /// link carries its share of what that of its parent carries.
    #[test]
    fn a_link_carries_its_share_of_the_links_above_it() {
        for seed in 0..100 {
            let (_, topology) = crate::test_util::tree_of_seed(seed);
            let schedule = planner::flexreduce::plan(&topology).expect("small");
            let plan = Plan::on(schedule, &topology, Lowering::Auto);
            let traffic = Traffic::of(&plan, &topology, ProgramSpec::ALL_REDUCE);
            let vertices = topology.vertices();
            let mut expected = vec![0.0; vertices.len()];
            for (id, vertex) in vertices.iter().enumerate().skip(1) {
                let parent = vertex.parent.unwrap_or(0);
                expected[id] = match vertices[parent].children.len() {
                    1 => expected[parent],
                    degree => 1.0 + (degree as f64 - 2.0 + expected[parent]) / degree as f64,
                };
                let Load { up, down } = traffic.load(id);
                let differs = |load: f64| (load - expected[id]).abs() > 1e-9;
                assert!(
                    !differs(up) && !differs(down),
                    "seed {seed}, {}: {up} {down}, not {}",
                    vertex.name,
                    expected[id]
                );
            }
        }
    }

    #[test]
    fn node_links_on_three_levels_carry_what_equation_6_says() {
        let topology = parse_short("(2+3)+(3+2)+(1)").expect("short form").expect("valid");
        let schedule = planner::flexreduce::plan(&topology).expect("small");
        let traffic =
            Traffic::of(&Plan::on(schedule, &topology, Lowering::Auto), &topology, ProgramSpec::ALL_REDUCE);
        let busiest = topology.node_vertices().into_iter().map(|node| traffic.load(node).larger());
        assert!((busiest.fold(0.0, f64::max) - 5.0 / 3.0).abs() < 1e-9);
    }

    #[test]
    fn the_ranks_of_a_node_load_its_nics_equally_or_one_alone() {
        // Each of four ranks exchanges a quarter over a NIC of its own.
        let (nodes, _, nanoseconds) = loads("4@4*10G+4@4*10G", Algorithm::Hierarchical);
        assert_eq!((nodes, nanoseconds), (vec![(1.0, 1.0); 2], 0.2));
        // One rank of each node sends the whole vector over its NIC.
        let (nodes, _, nanoseconds) = loads("4@4*10G+4@4*10G", Algorithm::LocalMaster);
        assert_eq!((nodes, nanoseconds), (vec![(1.0, 1.0); 2], 0.8));
    }
}
