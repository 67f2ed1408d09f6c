//! The network: how far each transfer has come.
//!
//! Owns the flows of transfers, and when they end. Must not know messages, nor how rates are computed.

use super::event_queue::{ChannelId, EventQueue, LinkId, SimulatedEvent, VirtualTime};
use super::fair_rates::{FairRates, FlowPath};
use super::parameters::PICOSECONDS;
use super::token_buckets::TokenBuckets;
use flexring_plan::physical_links::{PhysicalLink, PhysicalLinks};

/// Rates are whole numbers of this part of a bit per second, so that many flows can share even a slow link.
const PER_BIT: u64 = 1_000;

/// The flow of each channel: a channel makes one transfer at a time.
#[derive(Debug)]
pub struct Network {
    rates: FairRates,
    flows: Vec<NetworkFlow>,
    buckets: TokenBuckets,
}

#[derive(Clone, Debug, Default)]
struct NetworkFlow {
    /// What was not sent at `since`, as a rate times picoseconds.
    left: u128,
    since: VirtualTime,
    /// 0 until it is computed.
    rate: u64,
    /// Bits of the transfer.
    bits: u64,
    /// Bits of finished transfers.
    carried: u64,
    /// Distinguishes events of this transfer at its present rate from older ones.
    changes: u32,
    active: bool,
}

impl Network {
    /// A network with a flow for each of these paths.
    pub fn new(links: &PhysicalLinks<'_>, paths: impl Iterator<Item = FlowPath>) -> Self {
        let rate = |bandwidth: u64| bandwidth.saturating_mul(PER_BIT);
        let directions = || {
            let both = links.bandwidths().zip(links.bursts());
            both.flat_map(|(bandwidths, burst)| bandwidths.map(|bandwidth| (rate(bandwidth), burst)))
        };
        let capacity = |(bandwidth, burst): (u64, u64)| match burst > 0 {
            true => (TokenBuckets::with_tokens(bandwidth), true),
            false => (bandwidth, false),
        };
        let buckets = (0..).zip(directions()).filter(|(_, (_, burst))| *burst > 0);
        let buckets = buckets.map(|(link, (bandwidth, burst))| (link, bandwidth, work(burst)));
        let rates = FairRates::new(directions().map(capacity), paths);
        Self {
            flows: vec![NetworkFlow::default(); rates.flows()],
            buckets: TokenBuckets::new(buckets),
            rates,
        }
    }

    /// The direction of a link from a vertex to its parent, or from its first end.
    pub fn up(link: PhysicalLink) -> LinkId {
        2 * link as LinkId
    }

    /// The other direction.
    pub fn down(link: PhysicalLink) -> LinkId {
        2 * link as LinkId + 1
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
        self.rates.begin(id);
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
        self.rates.end(id);
    }

    /// The tokens of a link are spent, if its use still has this number of changes. [`share`](Self::share)
    /// computes the rates.
    pub fn tokens_spent(&mut self, now: VirtualTime, link: LinkId, changes: u32) {
        self.buckets.spent(now, link, changes, &mut self.rates);
    }

    /// Computes the rates that have changed, and queues the ends of these transfers.
    pub fn share(&mut self, now: VirtualTime, queue: &mut EventQueue) {
        self.share_once(now, queue);
        while self.buckets.follow(now, &mut self.rates, queue) {
            self.share_once(now, queue);
        }
    }

    fn share_once(&mut self, now: VirtualTime, queue: &mut EventQueue) {
        for (id, rate) in self.rates.update() {
            let flow = &mut self.flows[id as usize];
            if flow.rate == rate {
                continue;
            }
            let sent = u128::from(now - flow.since) * u128::from(flow.rate);
            flow.left = flow.left.saturating_sub(sent);
            (flow.since, flow.rate) = (now, rate);
            flow.changes = flow.changes.wrapping_add(1);
            queue.add(flow.end(), SimulatedEvent::FlowEnds { channel: id, changes: flow.changes });
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
    use crate::simulator::channels::path;
    use flexring_plan::topology::{Topology, TopologyBuilder, Uplink};

    fn topology(bandwidths: &[u64]) -> Topology {
        let mut builder = TopologyBuilder::new("switch");
        for (rank, bandwidth) in bandwidths.iter().enumerate() {
            let node = builder.node(0, "node", Uplink::new(*bandwidth, 0));
            builder.rank(node, rank, Uplink::RANK_DEFAULT);
        }
        builder.finish().expect("a rank on each node")
    }

    /// A network with these paths, all of which carry a flow of this many bytes.
    fn network(bandwidths: &[u64], paths: &[Vec<LinkId>], bytes: u64) -> Network {
        let topology = topology(bandwidths);
        let paths = paths.iter().map(|links| FlowPath { links: links.clone(), weight: 1 });
        let flows = paths.len();
        let mut network = Network::new(&PhysicalLinks::new(&topology), paths);
        (0..flows).for_each(|flow| network.begin(0, flow as ChannelId, bytes));
        network.share(0, &mut EventQueue::default());
        network
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

    /// The times at which the last of a link's `flows` ends, if they send these bytes together, each time at
    /// once. The link has 1000 bytes a second, and lets 500 pass at once.
    fn ends_with_a_burst(flows: ChannelId, transfers: &[(VirtualTime, u64)]) -> Vec<VirtualTime> {
        let mut builder = TopologyBuilder::new("switch");
        for rank in 0..2 {
            let node = builder.node(0, "node", Uplink { burst: 500, ..Uplink::new(8_000, 0) });
            builder.rank(node, rank, Uplink::RANK_DEFAULT);
        }
        let topology = builder.finish().expect("a rank on each node");
        let paths = (0..flows).map(|_| FlowPath { links: vec![Network::up(1)], weight: 1 });
        let mut network = Network::new(&PhysicalLinks::new(&topology), paths);
        let mut queue = EventQueue::default();
        let mut ends = Vec::new();
        for (begin, bytes) in transfers {
            (0..flows).for_each(|flow| network.begin(*begin, flow, *bytes / u64::from(flows)));
            network.share(*begin, &mut queue);
            let mut left = flows;
            while left > 0 {
                let now = queue.next_time().expect("the flows end");
                while let Some(event) = queue.pop() {
                    match event {
                        SimulatedEvent::TokensSpent { link, changes } => {
                            network.tokens_spent(now, link, changes);
                        }
                        SimulatedEvent::FlowEnds { channel, changes } => {
                            if network.is_current(channel, changes) {
                                network.end(channel);
                                left -= 1;
                            }
                        }
                        other => unreachable!("{other:?}"),
                    }
                }
                network.share(now, &mut queue);
                if left == 0 {
                    ends.push(now);
                }
            }
        }
        ends
    }

    #[test]
    fn a_link_lets_what_it_has_saved_in_a_pause_pass_at_once() {
        let ms = PICOSECONDS / 1_000;
        for flows in [1, 2, 5] {
            // A link has saved nothing when a call begins.
            assert_eq!(ends_with_a_burst(flows, &[(0, 1_000)]), [1_000 * ms]);
            // 200 bytes in a pause of 0.2 s: the link is 16 times as fast until these and what it collects
            // meanwhile are spent.
            let fast = 200 * ms / 15;
            let ends = ends_with_a_burst(flows, &[(0, 1_000), (1_200 * ms, 1_000)]);
            let expected = 1_200 * ms + fast + (1_000 * ms - 16 * fast);
            assert!(ends[1].abs_diff(expected) < 100, "{flows} flows: {} instead of {expected}", ends[1]);
            // Never more than 500.
            let fast = 500 * ms / 15;
            let ends = ends_with_a_burst(flows, &[(0, 1_000), (9_000 * ms, 1_000)]);
            let expected = 9_000 * ms + fast + (1_000 * ms - 16 * fast);
            assert!(ends[1].abs_diff(expected) < 100, "{flows} flows: {} instead of {expected}", ends[1]);
            // What fits in the burst passes at that rate.
            assert_eq!(ends_with_a_burst(flows, &[(0, 1_000), (9_000 * ms, 160)])[1], 9_010 * ms);
        }
    }

    /// The rates of these flows by water-filling of all links, without rounding.
    fn from_scratch(capacities: &[f64], paths: &[&FlowPath]) -> Vec<f64> {
        let mut rates = vec![None; paths.len()];
        loop {
            let share = |link: LinkId| {
                let users = || paths.iter().zip(&rates).filter(|(path, _)| path.links.contains(&link));
                let given: f64 = users().filter_map(|(_, rate)| *rate).sum();
                let waiting = users().filter(|(_, rate)| rate.is_none());
                let waiting: f64 = waiting.map(|(path, _)| f64::from(path.weight)).sum();
                (waiting > 0.0).then(|| ((capacities[link as usize] - given) / waiting, link))
            };
            let shares = (0..capacities.len() as LinkId).filter_map(share);
            let Some((least, link)) = shares.min_by(|one, next| one.0.total_cmp(&next.0)) else { break };
            for (path, rate) in paths.iter().zip(&mut rates) {
                if rate.is_none() && path.links.contains(&link) {
                    *rate = Some(least * f64::from(path.weight));
                }
            }
        }
        rates.into_iter().flatten().collect()
    }

    /// Racks of nodes with ranks, and links of very different bandwidths.
    fn random_tree(random: &mut fastrand::Rng) -> Topology {
        // Some equal bandwidths, so that several links limit a flow.
        let bandwidths = [1_000_000, 3_000_000, 10_000_000, 1_000_000 + random.u64(..100_000_000)];
        let uplink = |random: &mut fastrand::Rng| Uplink::new(bandwidths[random.usize(..4)], 0);
        let mut builder = TopologyBuilder::new("switch");
        let mut rank = 0;
        let racks = random.usize(..4);
        for _ in 0..racks.max(1) {
            let rack = if racks > 0 { builder.switch(0, "rack", uplink(random)) } else { 0 };
            for _ in 0..1 + random.usize(..4) {
                let node = builder.node(rack, "node", uplink(random));
                for _ in 0..1 + random.usize(..4) {
                    builder.rank(node, rank, uplink(random));
                    rank += 1;
                }
            }
        }
        builder.finish().expect("ranks on each node")
    }

    #[test]
    fn rates_after_changes_are_those_computed_from_scratch() {
        for seed in 0..60 {
            let mut random = fastrand::Rng::with_seed(seed);
            let topology = random_tree(&mut random);
            let world = topology.world();
            let pairs = (0..world).flat_map(|from| (0..world).map(move |to| (from, to)));
            let mut pairs: Vec<_> = pairs.filter(|(from, to)| from != to).collect();
            random.shuffle(&mut pairs);
            pairs.truncate(60);
            let links = PhysicalLinks::new(&topology);
            let are_equal = seed % 2 == 0;
            let mut flow_path = |(from, to): &(usize, usize)| FlowPath {
                links: path(&links, *from, *to),
                weight: if are_equal { 1 } else { 1 + random.u32(..10) },
            };
            let paths: Vec<FlowPath> = pairs.iter().map(&mut flow_path).collect();
            let capacities = topology.vertices().iter().flat_map(|vertex| [vertex.uplink.bandwidth; 2]);
            let capacities: Vec<f64> = capacities.map(|bandwidth| (bandwidth * PER_BIT) as f64).collect();
            let mut network = Network::new(&links, paths.iter().cloned());
            let mut queue = EventQueue::default();
            for now in 0..100 {
                for _ in 0..random.usize(..6) {
                    let flow = random.usize(..paths.len().max(1));
                    let Some(state) = network.flows.get(flow) else { continue };
                    match (state.active, state.rate, random.u8(..4)) {
                        (false, ..) => network.begin(now, flow as ChannelId, 1 << 30),
                        (true, 0, _) => {}
                        (true, _, 0) => network.follow(now, flow as ChannelId, 1 << 30, &mut queue),
                        (true, ..) => network.end(flow as ChannelId),
                    }
                }
                network.share(now, &mut queue);
                let active = || (0..paths.len()).filter(|flow| network.flows[*flow].active);
                let used: Vec<&FlowPath> = active().map(|flow| &paths[flow]).collect();
                for (flow, expected) in active().zip(from_scratch(&capacities, &used)) {
                    let rate = network.flows[flow].rate as f64;
                    // Links leave at most a unit for each unit of weight, and others divide what flows do not
                    // use.
                    assert!(
                        (rate - expected).abs() < if are_equal { 5_000.0 } else { 50_000.0 },
                        "seed {seed}: {rate}, not {expected}"
                    );
                }
            }
        }
    }
}
