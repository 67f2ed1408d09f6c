//! The messages from one rank to another, in order.
//!
//! Owns how far each message of a channel has come. Must not know pipelines, or how fast a transfer is.

use super::activity::ActivityId;
use super::event_queue::{ChannelId, LinkId, VirtualTime};
use super::network::Network;
use flexring_plan::Rank;
use flexring_plan::physical_links::PhysicalLinks;
use flexring_plan::topology::Topology;
use std::collections::VecDeque;
use std::sync::Arc;

/// A message that waits for its transfer.
#[derive(Clone, Copy, Debug)]
pub struct WaitingMessage {
    pub bytes: u64,
    /// What the sender did before it sent this.
    pub cause: ActivityId,
}

/// The peers of a rank.
#[derive(Debug)]
pub struct RankPeers {
    /// The ranks that it sends to or receives from, in the order of `names`.
    pub ranks: Vec<Rank>,
    /// What it sends to each of them, in parts of the vector.
    pub sent: Arc<[f64]>,
    /// By peer, the number by which the rank's program names it, in rising order. Ranks with one program have
    /// peers of their own.
    pub names: Arc<[Rank]>,
}

/// The messages from one rank to another. It fits in a cache line: a simulation has a million channels.
#[derive(Debug)]
#[repr(align(64))]
pub struct Channel {
    from: u32,
    to: u32,
    from_name: u32,
    to_name: u32,
    /// Picoseconds from the last bit's departure to its arrival.
    pub latency: VirtualTime,
    /// Whether the receiver reads messages where the sender has them.
    pub in_place: bool,
    /// Whether a message is being transferred.
    pub is_busy: bool,
    /// Of the transfer in progress, or the last one.
    pub transfer: ActivityId,
    /// Posted receives without a message.
    pub posted: u32,
    /// Messages that arrived before their receive was posted.
    early: u32,
    /// Messages that wait for the one that is being transferred; `None` if none ever did.
    waiting: Option<Box<WaitingMessages>>,
    /// `None` if nothing is recorded.
    causes: Option<Box<ChannelCauses>>,
}

#[derive(Debug, Default)]
struct WaitingMessages(VecDeque<WaitingMessage>);

/// What caused what is on its way in a channel, oldest first.
#[derive(Debug, Default)]
struct ChannelCauses {
    /// By message that arrived early, its transfer.
    early: VecDeque<ActivityId>,
    on_the_way: VecDeque<ActivityId>,
    /// Notifications back to the sender.
    releases: VecDeque<ActivityId>,
}

impl Channel {
    pub fn sender(&self) -> Rank {
        self.from as Rank
    }

    pub fn receiver(&self) -> Rank {
        self.to as Rank
    }

    /// The sender, as the receiver's program names it.
    pub fn sender_name(&self) -> Rank {
        self.from_name as Rank
    }

    /// The receiver, as the sender's program names it.
    pub fn receiver_name(&self) -> Rank {
        self.to_name as Rank
    }

    /// Adds a message that waits for the one that is being transferred.
    pub fn wait(&mut self, message: WaitingMessage) {
        self.waiting.get_or_insert_default().0.push_back(message);
    }

    /// The oldest message that waits.
    pub fn next_waiting(&mut self) -> Option<WaitingMessage> {
        self.waiting.as_mut()?.0.pop_front()
    }

    /// A message arrived before its receive was posted.
    pub fn arrive_early(&mut self, transfer: ActivityId) {
        self.early += 1;
        if let Some(causes) = &mut self.causes {
            causes.early.push_back(transfer);
        }
    }

    /// The transfer of the oldest message that arrived before its receive was posted; `None` if there is
    /// none.
    pub fn next_early(&mut self) -> Option<ActivityId> {
        self.early = self.early.checked_sub(1)?;
        Some(oldest(self.causes.as_mut().map(|causes| &mut causes.early)))
    }

    /// A message is on its way.
    pub fn depart(&mut self, cause: ActivityId) {
        if let Some(causes) = &mut self.causes {
            causes.on_the_way.push_back(cause);
        }
    }

    /// The oldest message on its way is there. Returns what caused it.
    pub fn arrive(&mut self) -> ActivityId {
        oldest(self.causes.as_mut().map(|causes| &mut causes.on_the_way))
    }

    /// A notification is on its way back to the sender.
    pub fn release(&mut self, cause: ActivityId) {
        if let Some(causes) = &mut self.causes {
            causes.releases.push_back(cause);
        }
    }

    /// The oldest notification is there. Returns what caused it.
    pub fn released(&mut self) -> ActivityId {
        oldest(self.causes.as_mut().map(|causes| &mut causes.releases))
    }
}

fn oldest(causes: Option<&mut VecDeque<ActivityId>>) -> ActivityId {
    causes.and_then(VecDeque::pop_front).unwrap_or(ActivityId::NONE)
}

/// The places of the peers in the lists of all ranks.
struct PeerOrder {
    /// By rank, the end of its peers.
    ends: Vec<usize>,
    /// The peers of each rank in rising order, with their places.
    peers: Vec<(u32, u32)>,
}

impl PeerOrder {
    fn new(peers: &[RankPeers]) -> Self {
        let mut order = Self { ends: Vec::with_capacity(peers.len()), peers: Vec::new() };
        for own in peers {
            let start = order.peers.len();
            order.peers.extend((0..).zip(&own.ranks).map(|(place, peer)| (*peer as u32, place)));
            order.peers[start..].sort_unstable();
            order.ends.push(order.peers.len());
        }
        order
    }

    fn place(&self, rank: Rank, peer: Rank) -> Option<usize> {
        let start = rank.checked_sub(1).map_or(0, |before| self.ends[before]);
        let own = &self.peers[start..self.ends[rank]];
        let at = own.binary_search_by_key(&(peer as u32), |(peer, _)| *peer).ok()?;
        Some(own[at].1 as usize)
    }
}

/// All channels of a world.
#[derive(Debug)]
pub struct Channels {
    channels: Vec<Channel>,
    /// By channel, the one in the other direction.
    opposite: Vec<ChannelId>,
    ranks: Vec<RankChannels>,
}

#[derive(Debug)]
struct RankChannels {
    /// The channel to the first peer. Those to other peers follow.
    first: ChannelId,
    names: Arc<[Rank]>,
}

impl Channels {
    /// The channels between these peers, which are listed by rank. They keep causes if `records`.
    pub fn new(peers: &[RankPeers], links: &PhysicalLinks<'_>, topology: &Topology, records: bool) -> Self {
        let number = peers.iter().map(|peers| peers.ranks.len()).sum();
        let (mut channels, mut opposite) = (Vec::with_capacity(number), Vec::with_capacity(number));
        let (mut ranks, mut next) = (Vec::new(), 0);
        for peers in peers {
            ranks.push(RankChannels { first: next, names: Arc::clone(&peers.names) });
            next += peers.ranks.len() as ChannelId;
        }
        let order = PeerOrder::new(peers);
        for (from, own) in peers.iter().enumerate() {
            for (to, to_name) in own.ranks.iter().zip(&*own.names) {
                let at = order.place(*to, from).expect("both ranks are peers");
                opposite.push(ranks[*to].first + at as ChannelId);
                let mut channel = channel((from, peers[*to].names[at]), (*to, *to_name));
                channel.in_place = topology.node_of(from) == topology.node_of(*to);
                channel.latency = links.latency(from, *to).saturating_mul(1_000);
                channel.causes = records.then(Box::default);
                channels.push(channel);
            }
        }
        Self { channels, opposite, ranks }
    }

    /// The channel from a rank to the peer that its program names so.
    pub fn outgoing(&self, rank: Rank, name: Rank) -> ChannelId {
        let RankChannels { first, names } = &self.ranks[rank];
        *first + names.binary_search(&name).expect("a peer of the program") as ChannelId
    }

    /// The channel to a rank from the peer that its program names so.
    pub fn incoming(&self, rank: Rank, name: Rank) -> ChannelId {
        self.opposite[self.outgoing(rank, name) as usize]
    }

    pub fn len(&self) -> usize {
        self.channels.len()
    }

    pub fn get(&mut self, id: ChannelId) -> &mut Channel {
        &mut self.channels[id as usize]
    }

    /// The links on the way of each channel.
    pub fn paths<'a>(&'a self, links: &'a PhysicalLinks<'_>) -> impl Iterator<Item = Vec<LinkId>> + 'a {
        self.channels.iter().map(|channel| path(links, channel.sender(), channel.receiver()))
    }
}

/// The links on the way from one rank to another.
pub fn path(links: &PhysicalLinks<'_>, from: Rank, to: Rank) -> Vec<LinkId> {
    let directed = |(link, up)| if up { Network::up(link) } else { Network::down(link) };
    links.path(from, to).into_iter().map(directed).collect()
}

/// A channel between ranks of different nodes, without a latency.
fn channel((from, from_name): (Rank, Rank), (to, to_name): (Rank, Rank)) -> Channel {
    Channel {
        from: from as u32,
        to: to as u32,
        from_name: from_name as u32,
        to_name: to_name as u32,
        in_place: false,
        is_busy: false,
        latency: 0,
        transfer: ActivityId::NONE,
        posted: 0,
        early: 0,
        waiting: None,
        causes: None,
    }
}
