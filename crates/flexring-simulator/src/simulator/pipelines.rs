//! The pipelines of all ranks.
//!
//! Owns which ranks share a program. Must not know events.
//!
//! Ranks whose programs differ in spans and peers only run one program, so memory grows with the number of
//! different programs, and with what is in flight. Each such rank has peers of its own, which the program
//! names as those of the rank that it was made for. Operands are listed by rank, because the order of
//! addition takes no time and differs between the ranks of a group.

use super::channels::RankPeers;
use super::estimate::{RankSize, SimulationEstimate};
use super::parameters::SimulationParameters;
use super::rank_state::RankState;
use flexring_core::error::Result;
use flexring_plan::Rank;
use flexring_plan::link_shares::sent_to_peers;
use flexring_plan::lowering::{Plan, ProgramClasses, ProgramSpec};
use flexring_plan::pipeline::{Binding, Pipeline, Staging};
use flexring_plan::program::SharedSteps;
use flexring_plan::topology::Topology;
use std::collections::HashMap;
use std::sync::Arc;

/// Ranks with their pipelines started, and their peers.
pub type StartedRanks = (Vec<RankState>, Vec<RankPeers>);

/// Which ranks share a program, and what all programs need. Nothing of a program is made yet.
#[derive(Debug)]
pub struct ProgramList {
    /// By rank, the first rank with the same program.
    first: Vec<Rank>,
    /// By rank, its peers, in one order for all ranks that share a program.
    peers: Vec<Vec<Rank>>,
    /// What the run needs.
    pub estimate: SimulationEstimate,
}

impl ProgramList {
    /// Compares the programs of all ranks. Ranks share programs if `shares`. `too_large` is called now and
    /// then with what the ranks so far need, and returns the error if that is too much.
    pub fn new(
        classes: &mut ProgramClasses<'_>,
        topology: &Topology,
        size: &RankSize,
        shares: bool,
        too_large: impl Fn(&SimulationEstimate) -> Result<()>,
    ) -> Result<Self> {
        // By class, and by which of the peers are on the rank's node: the first rank.
        let mut first_of: HashMap<(u128, Vec<bool>), Rank> = HashMap::new();
        let mut list = Self {
            first: Vec::new(),
            peers: Vec::new(),
            estimate: SimulationEstimate::of_topology(topology),
        };
        list.estimate.messages = classes.messages();
        too_large(&list.estimate)?;
        for rank in 0..topology.world() {
            let class = classes.class_of(rank);
            let is_neighbour = |peer: &Rank| topology.node_of(*peer) == topology.node_of(rank);
            let neighbours: Vec<bool> = class.peers.iter().map(is_neighbour).collect();
            let posted = neighbours.iter().filter(|is_neighbour| !**is_neighbour).count();
            let key = class.key.filter(|_| shares);
            let first = key.map_or(rank, |key| *first_of.entry((key, neighbours)).or_insert(rank));
            if first == rank {
                list.estimate.add_program(&class, size);
            }
            list.estimate.add_rank(&class, posted, size);
            too_large(&list.estimate)?;
            list.first.push(first);
            list.peers.push(class.peers);
        }
        Ok(list)
    }

    /// Makes the programs, and starts the pipelines of all ranks.
    pub fn start(
        self,
        plan: &Plan,
        topology: &Topology,
        (spec, binding): (ProgramSpec, Binding),
        parameters: &SimulationParameters,
    ) -> StartedRanks {
        let mut shared = SharedSteps::by_rank();
        let (mut ranks, mut peers): StartedRanks = (Vec::new(), Vec::new());
        // By rank with a program of its own, the places of its peers in the list of the class, in rising
        // order of the peers.
        let mut orders: HashMap<Rank, Vec<usize>> = HashMap::new();
        for (rank, (first, own)) in self.first.into_iter().zip(self.peers).enumerate() {
            let (mut pipeline, names, sent) = if first < rank {
                let twin = &peers[first];
                (ranks[first].pipeline.twin(), Arc::clone(&twin.names), Arc::clone(&twin.sent))
            } else {
                let mut order: Vec<usize> = (0..own.len()).collect();
                order.sort_unstable_by_key(|place| own[*place]);
                let names: Arc<[Rank]> = order.iter().map(|place| own[*place]).collect();
                orders.insert(rank, order);
                let program = plan.program_sharing(rank, spec, &mut shared);
                debug_assert!(program.peers().eq(names.iter().copied()));
                let is_neighbour = |peer| topology.node_of(peer) == topology.node_of(rank);
                let profile = |peer| parameters.link_profile(own.len(), is_neighbour(peer));
                let sent = sent_to_peers(&program);
                let sent = names.iter().map(|name| sent.get(name).copied().unwrap_or(0.0)).collect();
                (Pipeline::new(Arc::new(program), profile), names, sent)
            };
            pipeline.start(binding, |_| Staging::default());
            ranks.push(RankState::new(pipeline));
            let own = orders[&first].iter().map(|place| own[*place]).collect();
            peers.push(RankPeers { ranks: own, sent, names });
        }
        (ranks, peers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulator::world::SimulatedWorld;
    use crate::simulator::{SimulatedRun, SimulationInput};
    use flexring_core::config::Lowering;
    use flexring_plan::planner::{blueconnect, flexreduce, hierarchical, rabenseifner, ring};
    use flexring_plan::schedule::Schedule;
    use flexring_plan::topology_file::parse_short;

    fn started(
        plan: &Plan,
        topology: &Topology,
        bytes: u64,
        parameters: &SimulationParameters,
        shares: bool,
    ) -> StartedRanks {
        let spec = parameters.spec(plan, bytes);
        let binding = parameters.layout(topology.world(), bytes).expect("few sub-chunks");
        let mut classes = ProgramClasses::of_all_reduce(plan, spec.in_waves(), &binding);
        let size = RankSize::new(SimulationInput::new(bytes), parameters, spec.in_waves());
        let programs = ProgramList::new(&mut classes, topology, &size, shares, |_| Ok(()));
        programs.expect("not too large").start(plan, topology, (spec, binding), parameters)
    }

    /// A run with all that can be recorded, and the number of programs.
    fn run(
        plan: &Plan,
        topology: &Topology,
        bytes: u64,
        parameters: &SimulationParameters,
        shares: bool,
    ) -> (SimulatedRun, usize) {
        let (ranks, peers) = started(plan, topology, bytes, parameters, shares);
        let mut programs: Vec<*const _> =
            ranks.iter().map(|rank| Arc::as_ptr(rank.pipeline.program())).collect();
        programs.sort_unstable();
        programs.dedup();
        let call = SimulationInput { records: true, timelines: true, ..SimulationInput::new(bytes) };
        let world = SimulatedWorld::new(topology, ranks, &peers, parameters, call);
        (world.run(&mut |_, _| {}).expect("it ends"), programs.len())
    }

    #[test]
    fn shared_programs_change_no_result() {
        type Planner = fn(&Topology) -> Option<Schedule>;
        let planners: [(&str, Planner); 6] = [
            ("1x9", |topology| Some(ring::plan(topology))),
            ("4x4", |topology| hierarchical::plan(topology, &[4, 4]).ok()),
            ("4x4", |topology| blueconnect::plan(topology).ok()),
            ("2x2x3", |topology| hierarchical::plan(topology, &[2, 6]).ok()),
            ("2@1G+3@10G+4@2G", |topology| flexreduce::plan(topology).ok()),
            ("3x4", |topology| Some(rabenseifner::plan(topology))),
        ];
        for (topology, planner) in planners {
            let topology = parse_short(topology).expect("short form").expect("valid");
            for (number, lowering) in (0..).zip([Lowering::Auto, Lowering::Chain, Lowering::Direct]) {
                let plan = Plan::on(planner(&topology).expect("it applies"), &topology, lowering);
                // Shards of equal and unequal lengths, with and without waves.
                for (bytes, subchunk) in [(144 << 10, 4 << 10), (144 << 10, 64 << 10), (100_004, 8 << 10)] {
                    let completes_on_arrival = number == 1;
                    let parameters = SimulationParameters {
                        subchunk,
                        tcp_in_flight: if number == 2 { 0 } else { 64 << 10 },
                        completes_on_arrival,
                        ..SimulationParameters::DEFAULT
                    };
                    let (alone, most) = run(&plan, &topology, bytes, &parameters, false);
                    let (shared, programs) = run(&plan, &topology, bytes, &parameters, true);
                    assert_eq!(most, topology.world());
                    assert!(programs <= most);
                    assert!(alone == shared, "{}, {lowering:?}, {bytes} bytes", plan.schedule().name());
                }
            }
        }
    }

    #[test]
    fn ranks_with_equal_parts_share_programs() {
        let ring: fn(&Topology) -> Schedule = ring::plan;
        let hierarchical: fn(&Topology) -> Schedule =
            |topology| hierarchical::plan(topology, &[4, 4, 4]).expect("64 ranks");
        for (topology, planner, lowering, bytes, most) in [
            ("1x64", ring, Lowering::Chain, 64 << 20, 1),
            ("1x64", ring, Lowering::Chain, 64 << 10, 1),
            // The first and the last rank of a node have a peer on another one.
            ("4x16", ring, Lowering::Chain, 64 << 20, 3),
            // The ranks of a node add in different orders. From the second level on, programs differ in which
            // part of what was added before a rank adds to.
            ("4x4x4", hierarchical, Lowering::Auto, 1 << 20, 16),
            ("4x4x4", hierarchical, Lowering::Auto, 64 << 20, 16),
        ] {
            let topology = parse_short(topology).expect("short form").expect("valid");
            let plan = Plan::on(planner(&topology), &topology, lowering);
            let (ranks, _) = started(&plan, &topology, bytes, &SimulationParameters::DEFAULT, true);
            let mut seen: Vec<*const _> =
                ranks.iter().map(|rank| Arc::as_ptr(rank.pipeline.program())).collect();
            seen.sort_unstable();
            seen.dedup();
            assert!(seen.len() <= most, "{} programs of {} ranks", seen.len(), topology.world());
        }
    }
}
