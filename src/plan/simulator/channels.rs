//! The messages from one rank to another, in order.
//!
//! Owns how far each message of a channel has come. Must not know pipelines, or how fast a transfer is.

use super::activity::ActivityId;
use super::event_queue::{ChannelId, FlowId, VirtualTime};
use super::network::{LinkId, Network};
use crate::plan::Rank;
use crate::plan::program::Program;
use crate::plan::topology::Topology;
use std::collections::VecDeque;

/// A message that waits for its transfer.
#[derive(Clone, Copy, Debug)]
pub struct WaitingMessage {
    pub bytes: u64,
    /// What the sender did before it sent this.
    pub cause: ActivityId,
}

/// The messages from one rank to another.
#[derive(Debug)]
pub struct Channel {
    pub from: Rank,
    pub to: Rank,
    /// Whether the receiver reads messages where the sender has them.
    pub in_place: bool,
    pub path: Box<[LinkId]>,
    /// Picoseconds from the last bit's departure to its arrival.
    pub latency: VirtualTime,
    /// Messages that wait for the one that is being transferred.
    pub waiting: VecDeque<WaitingMessage>,
    /// The transfer in progress.
    pub flow: Option<FlowId>,
    /// Of the transfer in progress, or the last one.
    pub transfer: ActivityId,
    /// What caused the messages on their way, oldest first.
    pub on_the_way: VecDeque<ActivityId>,
    /// What caused the notifications back to the sender, oldest first.
    pub releases: VecDeque<ActivityId>,
    /// Messages that arrived before their receive was posted, by their transfers.
    pub early: VecDeque<ActivityId>,
    /// Posted receives without a message.
    pub posted: u32,
}

/// All channels of a world.
#[derive(Debug)]
pub struct Channels {
    channels: Vec<Channel>,
    /// By rank, the number of its first channel; and one past the last.
    first: Vec<ChannelId>,
}

impl Channels {
    /// The channels between the peers of these programs, which are listed by rank.
    pub fn new<'a>(programs: impl Iterator<Item = &'a Program>, topology: &Topology) -> Self {
        let (mut channels, mut first) = (Vec::new(), vec![0]);
        for program in programs {
            let from = program.rank;
            channels.extend(program.peers().map(|to| channel(topology, from, to)));
            first.push(channels.len() as ChannelId);
        }
        Self { channels, first }
    }

    /// The channel between two peers. Those of one rank are in the order of the peers.
    pub fn between(&self, from: Rank, to: Rank) -> ChannelId {
        let of_rank = &self.channels[self.first[from] as usize..self.first[from + 1] as usize];
        let at = of_rank.binary_search_by_key(&to, |channel| channel.to).expect("both ranks are peers");
        self.first[from] + at as ChannelId
    }

    pub fn len(&self) -> usize {
        self.channels.len()
    }

    pub fn get(&mut self, id: ChannelId) -> &mut Channel {
        &mut self.channels[id as usize]
    }
}

fn channel(topology: &Topology, from: Rank, to: Rank) -> Channel {
    let [up, down] = topology.uplinks_between(topology.leaf(from), topology.leaf(to));
    let nanoseconds: u64 =
        up.iter().chain(&down).map(|vertex| topology.vertices()[*vertex].uplink.latency).sum();
    let up = up.into_iter().map(Network::up);
    Channel {
        from,
        to,
        in_place: topology.node_of(from) == topology.node_of(to),
        path: up.chain(down.into_iter().rev().map(Network::down)).collect(),
        latency: nanoseconds.saturating_mul(1_000),
        waiting: VecDeque::new(),
        flow: None,
        transfer: ActivityId::NONE,
        on_the_way: VecDeque::new(),
        releases: VecDeque::new(),
        early: VecDeque::new(),
        posted: 0,
    }
}
