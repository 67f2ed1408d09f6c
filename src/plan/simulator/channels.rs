//! The messages from one rank to another, in order.
//!
//! Owns how far each message of a channel has come. Must not know pipelines, or how fast a transfer is.

use super::activity::ActivityId;
use super::event_queue::{ChannelId, VirtualTime};
use super::fair_rates::LinkId;
use super::network::Network;
use crate::plan::Rank;
use crate::plan::topology::Topology;
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
    /// The ranks that it sends to or receives from, in rising order.
    pub ranks: Vec<Rank>,
    /// By peer, the number by which the rank's program names it. Ranks with one program have peers of their own.
    pub names: Arc<[Rank]>,
}

/// The messages from one rank to another.
#[derive(Debug)]
pub struct Channel {
    pub from: Rank,
    pub to: Rank,
    /// The sender, as the receiver's program names it.
    pub from_name: Rank,
    /// The receiver, as the sender's program names it.
    pub to_name: Rank,
    /// Whether the receiver reads messages where the sender has them.
    pub in_place: bool,
    /// Whether a message is being transferred.
    pub is_busy: bool,
    /// Picoseconds from the last bit's departure to its arrival.
    pub latency: VirtualTime,
    /// Messages that wait for the one that is being transferred.
    pub waiting: VecDeque<WaitingMessage>,
    /// Of the transfer in progress, or the last one.
    pub transfer: ActivityId,
    /// Posted receives without a message.
    pub posted: u32,
    /// Messages that arrived before their receive was posted, by their transfers.
    pub early: VecDeque<ActivityId>,
    /// What caused the messages on their way, oldest first; empty if nothing is recorded.
    pub on_the_way: VecDeque<ActivityId>,
    /// What caused the notifications back to the sender, oldest first; empty if nothing is recorded.
    pub releases: VecDeque<ActivityId>,
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
    /// The channels between these peers, which are listed by rank.
    pub fn new(peers: &[RankPeers], topology: &Topology) -> Self {
        let (mut channels, mut opposite, mut ranks) = (Vec::new(), Vec::new(), Vec::new());
        let mut next = 0;
        for peers in peers {
            ranks.push(RankChannels { first: next, names: Arc::clone(&peers.names) });
            next += peers.ranks.len() as ChannelId;
        }
        for (from, own) in peers.iter().enumerate() {
            for (to, to_name) in own.ranks.iter().zip(&*own.names) {
                let at = peers[*to].ranks.binary_search(&from).expect("both ranks are peers");
                opposite.push(ranks[*to].first + at as ChannelId);
                channels.push(channel(topology, (from, peers[*to].names[at]), (*to, *to_name)));
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
    pub fn paths<'a>(&'a self, topology: &'a Topology) -> impl Iterator<Item = Vec<LinkId>> + 'a {
        self.channels.iter().map(|channel| path(topology, channel.from, channel.to))
    }
}

/// The links on the way from one rank to another.
pub fn path(topology: &Topology, from: Rank, to: Rank) -> Vec<LinkId> {
    let [up, down] = topology.uplinks_between(topology.leaf(from), topology.leaf(to));
    let up = up.into_iter().map(Network::up);
    up.chain(down.into_iter().rev().map(Network::down)).collect()
}

fn channel(topology: &Topology, (from, from_name): (Rank, Rank), (to, to_name): (Rank, Rank)) -> Channel {
    let [up, down] = topology.uplinks_between(topology.leaf(from), topology.leaf(to));
    let nanoseconds: u64 =
        up.iter().chain(&down).map(|vertex| topology.vertices()[*vertex].uplink.latency).sum();
    Channel {
        from,
        to,
        from_name,
        to_name,
        in_place: topology.node_of(from) == topology.node_of(to),
        is_busy: false,
        latency: nanoseconds.saturating_mul(1_000),
        waiting: VecDeque::new(),
        transfer: ActivityId::NONE,
        posted: 0,
        early: VecDeque::new(),
        on_the_way: VecDeque::new(),
        releases: VecDeque::new(),
    }
}
