//! The network: which bandwidth each transfer gets.
//!
//! Owns the flows and their max-min fair rates. Must not know messages. When a flow begins or ends, only the rates of flows
//! that share links with it, directly or through others, are computed again.

use super::event_queue::{ChannelId, EventQueue, SimulatedEvent, VirtualTime};
use super::parameters::PICOSECONDS;
use crate::plan::topology::{Topology, VertexId};
use std::ops::Range;

/// Rates are whole numbers of this part of a bit per second, so that many flows can share even a slow link.
const PER_BIT: u64 = 1_000;

/// One direction of an uplink.
pub type LinkId = u32;

/// The links, and the flow of each channel: a channel makes one transfer at a time.
#[derive(Debug)]
pub struct Network {
    links: Vec<DirectedLink>,
    flows: Vec<NetworkFlow>,
    /// The links of all flows that may limit them, by [`NetworkFlow::path`].
    paths: Vec<PathLink>,
    /// What has changed since rates were computed.
    changed: Vec<Change>,
    /// Number of the last search, which marks what it has found.
    search: u32,
    found_links: Vec<LinkId>,
    found_flows: Vec<ChannelId>,
}

/// Where to begin to compute rates.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// A link has another set of flows.
    Link(LinkId),
    /// A flow has begun, on a link that no other flow uses.
    Flow(ChannelId),
}

#[derive(Debug)]
struct DirectedLink {
    /// A rate.
    capacity: u64,
    flows: Vec<ChannelId>,
    found: u32,
    /// While rates are computed: what is not given away, and flows without a rate.
    left: u64,
    waiting: u32,
}

/// A link on the way of a flow.
#[derive(Clone, Copy, Debug)]
struct PathLink {
    link: LinkId,
    /// The flow's place among the link's flows, if it is active.
    place: u32,
}

#[derive(Debug)]
struct NetworkFlow {
    /// The links that it shares with flows of other channels, and the narrowest of the others if it is narrower than those.
    path: Range<u32>,
    /// Whether the first link of its way is shared.
    shares_first: bool,
    /// The rate if no other flow is active.
    most: u64,
    /// Bits of the transfer.
    bits: u64,
    /// Bits of finished transfers.
    carried: u64,
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
    /// A network with a flow for each of these paths, which have at least one link each.
    pub fn new(topology: &Topology, paths: impl Iterator<Item = Vec<LinkId>>) -> Self {
        let rate = |bandwidth: u64| bandwidth.saturating_mul(PER_BIT);
        let directions = topology.vertices().iter().flat_map(|vertex| [rate(vertex.uplink.bandwidth); 2]);
        let link = |capacity| DirectedLink { capacity, flows: Vec::new(), found: 0, left: 0, waiting: 0 };
        let links: Vec<DirectedLink> = directions.map(link).collect();
        let paths: Vec<Vec<LinkId>> = paths.collect();
        let mut users = vec![0_u32; links.len()];
        paths.iter().flatten().for_each(|link| users[*link as usize] += 1);
        let is_shared = |link: &LinkId| users[*link as usize] > 1;
        let capacity = |link: &LinkId| links[*link as usize].capacity;
        let (mut flows, mut used) = (Vec::with_capacity(paths.len()), Vec::new());
        for path in paths {
            let own = path.iter().filter(|link| !is_shared(link)).min_by_key(|link| capacity(link));
            let narrowest_shared = path.iter().filter(|link| is_shared(link)).map(capacity).min();
            // A link of this flow alone cannot limit it if a shared link has no more bandwidth.
            let own = own.filter(|own| narrowest_shared.is_some_and(|shared| capacity(own) < shared));
            let start = used.len() as u32;
            let limits = path.iter().filter(|link| is_shared(link) || Some(*link) == own);
            used.extend(limits.map(|link| PathLink { link: *link, place: 0 }));
            flows.push(NetworkFlow {
                path: start..used.len() as u32,
                shares_first: path.first().is_some_and(is_shared),
                most: path.iter().map(capacity).min().expect("a path has links"),
                bits: 0,
                carried: 0,
                left: 0,
                since: 0,
                rate: 0,
                next_rate: 0,
                changes: 0,
                active: false,
                found: 0,
            });
        }
        used.shrink_to_fit();
        Self {
            links,
            flows,
            paths: used,
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

    /// By flow, the bits that it has carried.
    pub fn carried(&self) -> impl Iterator<Item = u64> + '_ {
        self.flows.iter().map(|flow| flow.carried)
    }

    /// Begins a transfer of `bytes`. Its rate is computed by [`share`](Self::share).
    pub fn begin(&mut self, now: VirtualTime, id: ChannelId, bytes: u64) {
        let flow = &mut self.flows[id as usize];
        debug_assert!(!flow.active, "one transfer at a time");
        (flow.bits, flow.left) = (8 * bytes, work(bytes));
        (flow.since, flow.rate, flow.active) = (now, 0, true);
        flow.changes = flow.changes.wrapping_add(1);
        let path = &mut self.paths[flow.path.start as usize..flow.path.end as usize];
        // The search for sharing flows begins at the first link of the way, and finds the others.
        self.changed.push(match path.first() {
            Some(first) if flow.shares_first => Change::Link(first.link),
            _ => Change::Flow(id),
        });
        for on_path in path {
            let flows = &mut self.links[on_path.link as usize].flows;
            on_path.place = flows.len() as u32;
            flows.push(id);
        }
    }

    /// Whether an event concerns the transfer that the flow makes now, at its present rate.
    pub fn is_current(&self, id: ChannelId, changes: u32) -> bool {
        let flow = &self.flows[id as usize];
        flow.active && flow.changes == changes
    }

    /// The transfer is complete, and one of `bytes` follows it: all rates stay as they are.
    pub fn follow(&mut self, now: VirtualTime, id: ChannelId, bytes: u64, queue: &mut EventQueue) {
        let flow = &mut self.flows[id as usize];
        flow.carried += flow.bits;
        (flow.bits, flow.left) = (8 * bytes, work(bytes));
        flow.since = now;
        flow.changes = flow.changes.wrapping_add(1);
        queue.add(flow.end(), SimulatedEvent::FlowEnds { channel: id, changes: flow.changes });
    }

    /// The transfer is complete, and none follows it.
    pub fn end(&mut self, id: ChannelId) {
        let flow = &mut self.flows[id as usize];
        flow.carried += flow.bits;
        flow.active = false;
        for at in flow.path.clone() {
            let PathLink { link, place } = self.paths[at as usize];
            let flows = &mut self.links[link as usize].flows;
            flows.swap_remove(place as usize);
            if let Some(moved) = flows.get(place as usize) {
                let path = self.flows[*moved as usize].path.clone();
                let path = &mut self.paths[path.start as usize..path.end as usize];
                let moved = path.iter_mut().find(|other| other.link == link);
                moved.expect("the flow uses the link").place = place;
            }
            self.changed.push(Change::Link(link));
        }
    }

    /// Computes the rates that have changed, and queues the ends of these transfers.
    pub fn share(&mut self, now: VirtualTime, queue: &mut EventQueue) {
        self.search = self.search.wrapping_add(1);
        let mut changed = std::mem::take(&mut self.changed);
        for change in changed.drain(..) {
            self.found_links.clear();
            self.found_flows.clear();
            match change {
                Change::Link(link) if self.links[link as usize].found == self.search => continue,
                Change::Flow(flow) if self.flows[flow as usize].found == self.search => continue,
                Change::Link(link) => self.find_link(link),
                Change::Flow(flow) => self.find_flow(flow),
            }
            self.find_sharing();
            self.divide();
            self.apply(now, queue);
        }
        self.changed = changed;
    }

    fn find_link(&mut self, link: LinkId) {
        let found = &mut self.links[link as usize].found;
        if std::mem::replace(found, self.search) != self.search {
            self.found_links.push(link);
        }
    }

    fn find_flow(&mut self, id: ChannelId) {
        let flow = &mut self.flows[id as usize];
        if std::mem::replace(&mut flow.found, self.search) != self.search {
            self.found_flows.push(id);
            for at in flow.path.clone() {
                self.find_link(self.paths[at as usize].link);
            }
        }
    }

    /// Finds all links and flows that share bandwidth with those that are found.
    fn find_sharing(&mut self) {
        let mut next = 0;
        while let Some(link) = self.found_links.get(next).copied() {
            next += 1;
            for place in 0..self.links[link as usize].flows.len() {
                self.find_flow(self.links[link as usize].flows[place]);
            }
        }
    }

    /// Water-filling: the link that can give its flows least determines their rate; the rest is divided among the others.
    fn divide(&mut self) {
        if let [only] = self.found_flows[..] {
            let flow = &mut self.flows[only as usize];
            flow.next_rate = flow.most;
            return;
        }
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
                    for on_path in &self.paths[flow.path.start as usize..flow.path.end as usize] {
                        let link = &mut self.links[on_path.link as usize];
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
            queue.add(flow.end(), SimulatedEvent::FlowEnds { channel: *id, changes: flow.changes });
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

    /// A network with these paths, all of which carry a flow of this many bytes.
    fn network(bandwidths: &[u64], paths: &[Vec<LinkId>], bytes: u64) -> Network {
        let mut network = Network::new(&topology(bandwidths), paths.iter().cloned());
        (0..paths.len()).for_each(|flow| network.begin(0, flow as ChannelId, bytes));
        network.share(0, &mut EventQueue::default());
        network
    }

    fn rates(network: &Network) -> Vec<u64> {
        network.flows.iter().map(|flow| flow.rate).collect()
    }

    #[test]
    fn flows_share_the_narrowest_link_and_divide_what_others_leave() {
        // Vertices 1, 3 and 5 are the nodes.
        let (a, b, c) = (Network::up(1), Network::up(3), Network::up(5));
        let network = network(&[300, 1_000, 100], &[vec![a, c], vec![a, b], vec![b]], 1);
        assert_eq!(rates(&network), [100, 200, 800].map(|rate| rate * PER_BIT));
    }

    #[test]
    fn a_flow_that_ends_leaves_its_share_to_others() {
        let mut network = network(&[300], &vec![vec![Network::up(1)]; 3], 300);
        let mut queue = EventQueue::default();
        assert_eq!(network.flows[2].rate, 100 * PER_BIT);
        network.end(0);
        network.share(8 * PICOSECONDS, &mut queue);
        let flow = &network.flows[2];
        // 2400 bits: 800 in 8 s at 100 bit/s, the rest in 10 2/3 s at 150 bit/s.
        assert_eq!(
            (flow.rate, flow.end()),
            (150 * PER_BIT, (8 * PICOSECONDS + 10 * PICOSECONDS + 2 * PICOSECONDS / 3) + 1)
        );
        assert_eq!(network.carried().collect::<Vec<_>>(), [2400, 0, 0]);
    }

    #[test]
    fn a_link_of_one_flow_alone_limits_it_only_if_it_is_the_narrowest() {
        let (a, b, c) = (Network::up(1), Network::up(3), Network::up(5));
        let network = network(&[300, 50, 1_000], &[vec![b, a], vec![c, a], vec![a]], 1);
        assert_eq!(rates(&network), [50, 125, 125].map(|rate| rate * PER_BIT));
        let lengths: Vec<usize> = network.flows.iter().map(|flow| flow.path.len()).collect();
        assert_eq!(lengths, [2, 1, 1]);
    }

    proptest! {
        #[test]
        fn rates_are_max_min_fair(
            capacities in proptest::collection::vec(1u64..1_000_000_000, 4),
            paths in proptest::collection::vec(proptest::collection::btree_set(0usize..4, 1..4), 1..12)
        ) {
            let paths: Vec<Vec<LinkId>> = paths
                .iter()
                .map(|path| path.iter().map(|node| Network::up(1 + 2 * node)).collect())
                .collect();
            let network = network(&capacities, &paths, 1);
            let rates = rates(&network);
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
