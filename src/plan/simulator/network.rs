//! The network: which bandwidth each transfer gets.
//!
//! Owns the flows and their max-min fair rates. Must not know messages. When a flow begins or ends, only the rates of flows
//! that share links with it, directly or through others, are computed again.

use super::event_queue::{EventQueue, FlowId, SimulatedEvent, VirtualTime};
use super::parameters::PICOSECONDS;
use crate::plan::topology::{Topology, VertexId};

/// Rates are whole numbers of this part of a bit per second, so that many flows can share even a slow link.
const PER_BIT: u64 = 1_000;

/// One direction of an uplink.
pub type LinkId = u32;

/// The links and the flows on them.
#[derive(Debug)]
pub struct Network {
    links: Vec<DirectedLink>,
    flows: Vec<NetworkFlow>,
    unused: Vec<FlowId>,
    /// Links whose flows have changed since rates were computed.
    changed: Vec<LinkId>,
    /// Number of the last search, which marks what it has found.
    search: u32,
    found_links: Vec<LinkId>,
    found_flows: Vec<FlowId>,
}

#[derive(Debug)]
struct DirectedLink {
    /// A rate.
    capacity: u64,
    flows: Vec<FlowId>,
    /// Bits of finished transfers.
    carried: u128,
    found: u32,
    /// While rates are computed: what is not given away, and flows without a rate.
    left: u64,
    waiting: u32,
}

#[derive(Debug)]
struct NetworkFlow {
    path: Vec<LinkId>,
    /// By link of the path, the flow's place among the link's flows.
    places: Vec<u32>,
    /// Bits of the transfer.
    bits: u64,
    /// What was not sent at `since`, as a rate times picoseconds.
    left: u128,
    since: VirtualTime,
    /// 0 until it is computed.
    rate: u64,
    /// The rate that is being computed.
    next_rate: u64,
    /// Distinguishes events of this transfer at its present rate from older ones.
    changes: u32,
    active: bool,
    found: u32,
}

impl Network {
    pub fn new(topology: &Topology) -> Self {
        let rate = |bandwidth: u64| bandwidth.saturating_mul(PER_BIT);
        let directions = topology.vertices().iter().flat_map(|vertex| [rate(vertex.uplink.bandwidth); 2]);
        let link = |capacity| DirectedLink {
            capacity,
            flows: Vec::new(),
            carried: 0,
            found: 0,
            left: 0,
            waiting: 0,
        };
        Self {
            links: directions.map(link).collect(),
            flows: Vec::new(),
            unused: Vec::new(),
            changed: Vec::new(),
            search: 0,
            found_links: Vec::new(),
            found_flows: Vec::new(),
        }
    }

    /// The link from a vertex to its parent.
    pub fn up(vertex: VertexId) -> LinkId {
        2 * vertex as LinkId
    }

    /// The link to a vertex from its parent.
    pub fn down(vertex: VertexId) -> LinkId {
        2 * vertex as LinkId + 1
    }

    /// Bits that a link has carried.
    pub fn carried(&self, link: LinkId) -> u128 {
        self.links[link as usize].carried
    }

    /// Begins a transfer of `bytes` over the links of `path`, which has at least one. Its rate is computed by [`share`](Self::share).
    pub fn begin(&mut self, now: VirtualTime, path: &[LinkId], bytes: u64) -> FlowId {
        let id = self.unused.pop().unwrap_or_else(|| {
            self.flows.push(NetworkFlow {
                path: Vec::new(),
                places: Vec::new(),
                bits: 0,
                left: 0,
                since: 0,
                rate: 0,
                next_rate: 0,
                changes: 0,
                active: false,
                found: 0,
            });
            self.flows.len() as FlowId - 1
        });
        let flow = &mut self.flows[id as usize];
        flow.path.clear();
        flow.path.extend(path);
        flow.places.clear();
        (flow.bits, flow.left) = (8 * bytes, work(bytes));
        (flow.since, flow.rate, flow.active) = (now, 0, true);
        flow.changes = flow.changes.wrapping_add(1);
        for link in path {
            let flows = &mut self.links[*link as usize].flows;
            flow.places.push(flows.len() as u32);
            flows.push(id);
        }
        self.changed.extend(path);
        id
    }

    /// Whether an event concerns the transfer that the flow makes now, at its present rate.
    pub fn is_current(&self, id: FlowId, changes: u32) -> bool {
        let flow = &self.flows[id as usize];
        flow.active && flow.changes == changes
    }

    /// The transfer is complete, and one of `bytes` follows it on the same path: all rates stay as they are.
    pub fn follow(&mut self, now: VirtualTime, id: FlowId, bytes: u64, queue: &mut EventQueue) {
        self.count_carried(id);
        let flow = &mut self.flows[id as usize];
        (flow.bits, flow.left) = (8 * bytes, work(bytes));
        flow.since = now;
        flow.changes = flow.changes.wrapping_add(1);
        queue.add(flow.end(), SimulatedEvent::FlowEnds { flow: id, changes: flow.changes });
    }

    /// The transfer is complete, and none follows it.
    pub fn end(&mut self, id: FlowId) {
        self.count_carried(id);
        let flow = &mut self.flows[id as usize];
        flow.active = false;
        let (path, places) = (std::mem::take(&mut flow.path), std::mem::take(&mut flow.places));
        for (link, place) in path.iter().zip(&places) {
            let flows = &mut self.links[*link as usize].flows;
            flows.swap_remove(*place as usize);
            if let Some(moved) = flows.get(*place as usize) {
                let moved = &mut self.flows[*moved as usize];
                let at = moved.path.iter().position(|other| other == link).expect("the flow uses the link");
                moved.places[at] = *place;
            }
            self.changed.push(*link);
        }
        // Keeps the memory of both lists.
        let flow = &mut self.flows[id as usize];
        (flow.path, flow.places) = (path, places);
        self.unused.push(id);
    }

    fn count_carried(&mut self, id: FlowId) {
        let flow = &self.flows[id as usize];
        for link in &flow.path {
            self.links[*link as usize].carried += u128::from(flow.bits);
        }
    }

    /// Computes the rates that have changed, and queues the ends of these transfers.
    pub fn share(&mut self, now: VirtualTime, queue: &mut EventQueue) {
        self.search = self.search.wrapping_add(1);
        let mut changed = std::mem::take(&mut self.changed);
        for link in changed.drain(..) {
            if self.links[link as usize].found != self.search {
                self.find_sharing(link);
                self.divide();
                self.apply(now, queue);
            }
        }
        self.changed = changed;
    }

    /// Finds the links and flows that share bandwidth with this link.
    fn find_sharing(&mut self, link: LinkId) {
        self.found_links.clear();
        self.found_flows.clear();
        self.found_links.push(link);
        self.links[link as usize].found = self.search;
        let mut next = 0;
        while let Some(link) = self.found_links.get(next).copied() {
            next += 1;
            for place in 0..self.links[link as usize].flows.len() {
                let id = self.links[link as usize].flows[place];
                let flow = &mut self.flows[id as usize];
                if std::mem::replace(&mut flow.found, self.search) == self.search {
                    continue;
                }
                self.found_flows.push(id);
                for other in &flow.path {
                    let found = &mut self.links[*other as usize].found;
                    if std::mem::replace(found, self.search) != self.search {
                        self.found_links.push(*other);
                    }
                }
            }
        }
    }

    /// Water-filling: the link that can give its flows least determines their rate; the rest is divided among the others.
    fn divide(&mut self) {
        for link in &self.found_links {
            let link = &mut self.links[*link as usize];
            (link.left, link.waiting) = (link.capacity, link.flows.len() as u32);
        }
        for id in &self.found_flows {
            self.flows[*id as usize].next_rate = 0;
        }
        let fair = |link: &DirectedLink| (link.left / u64::from(link.waiting)).max(1);
        loop {
            let waiting = self.found_links.iter().map(|link| &self.links[*link as usize]);
            let Some(least) = waiting.filter(|link| link.waiting > 0).map(fair).min() else { break };
            for at in 0..self.found_links.len() {
                let link = &self.links[self.found_links[at] as usize];
                if link.waiting == 0 || fair(link) > least {
                    continue;
                }
                for place in 0..link.flows.len() {
                    let flow =
                        &mut self.flows[self.links[self.found_links[at] as usize].flows[place] as usize];
                    if flow.next_rate > 0 {
                        continue;
                    }
                    flow.next_rate = least;
                    for link in &flow.path {
                        let link = &mut self.links[*link as usize];
                        link.left = link.left.saturating_sub(least);
                        link.waiting -= 1;
                    }
                }
            }
        }
    }

    fn apply(&mut self, now: VirtualTime, queue: &mut EventQueue) {
        for id in &self.found_flows {
            let flow = &mut self.flows[*id as usize];
            if flow.rate == flow.next_rate {
                continue;
            }
            let sent = u128::from(now - flow.since) * u128::from(flow.rate);
            flow.left = flow.left.saturating_sub(sent);
            (flow.since, flow.rate) = (now, flow.next_rate);
            flow.changes = flow.changes.wrapping_add(1);
            queue.add(flow.end(), SimulatedEvent::FlowEnds { flow: *id, changes: flow.changes });
        }
    }
}

/// The rate that sends these bytes in a picosecond.
fn work(bytes: u64) -> u128 {
    u128::from(8 * bytes) * u128::from(PER_BIT) * u128::from(PICOSECONDS)
}

impl NetworkFlow {
    /// When the last bit is sent at the present rate.
    fn end(&self) -> VirtualTime {
        self.since + self.left.div_ceil(u128::from(self.rate)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::topology::{Topology, TopologyBuilder, Uplink};
    use proptest::prelude::*;

    fn topology(bandwidths: &[u64]) -> Topology {
        let mut builder = TopologyBuilder::new("switch");
        for (rank, bandwidth) in bandwidths.iter().enumerate() {
            let node = builder.node(0, "node", Uplink { bandwidth: *bandwidth, latency: 0 });
            builder.rank(node, rank, Uplink::RANK_DEFAULT);
        }
        builder.finish().expect("a rank on each node")
    }

    /// The rates of flows over these paths, as links of the network.
    fn rates(network: &mut Network, paths: &[Vec<LinkId>]) -> Vec<u64> {
        let flows: Vec<FlowId> = paths.iter().map(|path| network.begin(0, path, 1)).collect();
        network.share(0, &mut EventQueue::default());
        flows.iter().map(|flow| network.flows[*flow as usize].rate).collect()
    }

    #[test]
    fn flows_share_the_narrowest_link_and_divide_what_others_leave() {
        let mut network = Network::new(&topology(&[300, 1_000, 100]));
        // Vertices 1, 3 and 5 are the nodes.
        let (a, b, c) = (Network::up(1), Network::up(3), Network::up(5));
        assert_eq!(
            rates(&mut network, &[vec![a, c], vec![a, b], vec![b]]),
            [100, 200, 800].map(|rate| rate * PER_BIT)
        );
        assert_eq!(network.flows.len(), 3);
    }

    #[test]
    fn a_flow_that_ends_leaves_its_share_to_others() {
        let mut network = Network::new(&topology(&[300]));
        let path = [Network::up(1)];
        let mut queue = EventQueue::default();
        let flows: Vec<FlowId> = (0..3).map(|_| network.begin(0, &path, 300)).collect();
        network.share(0, &mut queue);
        assert_eq!(network.flows[flows[2] as usize].rate, 100 * PER_BIT);
        network.end(flows[0]);
        network.share(8 * PICOSECONDS, &mut queue);
        let flow = &network.flows[flows[2] as usize];
        // 2400 bits: 800 in 8 s at 100 bit/s, the rest in 10 2/3 s at 150 bit/s.
        assert_eq!(
            (flow.rate, flow.end()),
            (150 * PER_BIT, (8 * PICOSECONDS + 10 * PICOSECONDS + 2 * PICOSECONDS / 3) + 1)
        );
        assert_eq!(network.carried(path[0]), 2400);
    }

    proptest! {
        #[test]
        fn rates_are_max_min_fair(
            capacities in proptest::collection::vec(1u64..1_000_000_000, 4),
            paths in proptest::collection::vec(proptest::collection::btree_set(0usize..4, 1..4), 1..12)
        ) {
            let mut network = Network::new(&topology(&capacities));
            let paths: Vec<Vec<LinkId>> = paths
                .iter()
                .map(|path| path.iter().map(|node| Network::up(1 + 2 * node)).collect())
                .collect();
            let rates = rates(&mut network, &paths);
            let used = |link: LinkId| -> u64 {
                paths.iter().zip(&rates).filter(|(path, _)| path.contains(&link)).map(|(_, rate)| *rate).sum()
            };
            for (path, rate) in paths.iter().zip(&rates) {
                // Each flow has a link that is full but for rounding, on which no other flow is faster.
                let limits = |link: &LinkId| {
                    let capacity = network.links[*link as usize].capacity;
                    let fastest = paths.iter().zip(&rates).filter(|(path, _)| path.contains(link)).map(|(_, rate)| *rate);
                    used(*link) + 12 >= capacity && fastest.max().is_some_and(|fastest| fastest <= *rate)
                };
                prop_assert!(path.iter().any(limits), "{paths:?} at {rates:?}");
            }
            for (node, capacity) in capacities.iter().enumerate() {
                let used = used(Network::up(1 + 2 * node));
                prop_assert!(used <= capacity * PER_BIT, "{used} of {capacity}");
            }
        }
    }
}
