//! The path of calls that kernels run with ranks whose GPU memory they do not reach: the kernel writes and
//! uses messages in slots, and this rank's thread carries them. Between nodes a transport moves the bytes.
//! Within a node the peer's kernel reads them where they are, and only the news of them is carried.
//!
//! Owns which message is sent and received next. Must not know what a message means, nor any driver.

use super::bound_call::AnnouncedCall;
use super::group_path::GroupPath;
use super::links::Links;
use super::resources::Resources;
use crate::call::Call;
use crate::device::relay_link::{RelayLink, RelayedMessages};
use crate::error::{Error, Result};
use crate::memory::Piece;
use crate::rank::{Rank, RankList};
use crate::trace::MessagePart;
use crate::transport::{AnyTransport, Event, Events};
use std::collections::VecDeque;

/// Carries messages of kernels.
pub(super) struct RelayPath {
    /// By rank, the messages to it and from it of all calls so far.
    totals: Vec<Totals>,
    /// The links of the current call, in the order of its messages.
    links: Vec<RelayedCounts>,
    /// By rank, the index of its link in the current call.
    indices: Vec<Option<usize>>,
    events: Events,
}

#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    sent: u64,
    received: u64,
}

/// Messages of the current call on a link, counted.
#[derive(Debug, Default)]
struct RelayedCounts {
    entered: bool,
    /// Handed to the transport, and no longer needed by it.
    sending: usize,
    sent: usize,
    /// Handed to the transport as memory, or given back as views; and there.
    posted: usize,
    received: usize,
    /// What a neighbour has written in its memory, and not got back yet.
    views: VecDeque<Piece>,
}

impl RelayedCounts {
    fn is_over(&self, messages: &RelayedMessages) -> bool {
        let has_all = self.posted.min(self.received) == messages.receives.len();
        self.entered && self.sent == messages.sends.len() && has_all
    }

    /// Whether messages are expected besides those that are there.
    fn wants_more(&self, messages: &RelayedMessages) -> bool {
        self.posted + self.views.len() < messages.receives.len()
    }

    /// Gives a neighbour the oldest message back, once it is used where it is, or else copied to the kernel's
    /// slot. Whether it was.
    fn give_back(&mut self, resources: &mut Resources, link: &RelayLink, totals: Totals) -> Result<bool> {
        let number = totals.received + self.posted as u64 + 1;
        let Some(view) = self.views.front().copied() else { return Ok(false) };
        if link.reads_in_place() {
            if !link.has_used(number) {
                return Ok(false);
            }
        } else {
            let Some(into) = link.incoming(number, view.len()) else { return Ok(false) };
            resources.copy_on_host(view, into)?;
            self.received += 1;
            link.set_received(number);
        }
        self.views.pop_front();
        self.posted += 1;
        resources.release(link.peer)?;
        Ok(true)
    }
}

/// A call that is carried.
struct RelayTask<'a> {
    groups: &'a mut GroupPath,
    announced: AnnouncedCall<'a>,
    messages: &'a [RelayedMessages],
}

impl RelayPath {
    pub(super) fn new(links: &Links, world: usize) -> Self {
        Self {
            totals: vec![Totals::default(); world],
            links: Vec::new(),
            indices: vec![None; world],
            events: VecDeque::with_capacity(links.most_events()),
        }
    }

    /// Carries the messages of a call, whose kernel runs, on each of its links. `groups` has the state of the
    /// links between two collectives.
    pub(super) fn run(
        &mut self,
        resources: &mut Resources,
        groups: &mut GroupPath,
        announced: AnnouncedCall<'_>,
        messages: &[RelayedMessages],
    ) -> Result<()> {
        let task = &mut RelayTask { groups, announced, messages };
        self.begin(resources, task)?;
        resources.wait.begin();
        loop {
            let mut busy = self.advance(resources, messages)?;
            // Before the poll, which then reports all that the rank had sent.
            let leaver = self.leaver(resources, messages);
            if self.links.iter().zip(messages).all(|(state, messages)| state.is_over(messages)) {
                self.end(messages);
                return Ok(());
            }
            busy |= self.poll(resources, task)?;
            if busy {
                resources.progressed();
            } else if let Some(peer) = leaver {
                let message = format!("{}: rank {peer} left, and this rank waits for it", announced.call);
                return Err(Error::peer_lost(message).with_suspect(peer));
            } else if !resources.pause_beside_kernel()? {
                return Err(self.timed_out(resources, announced.call, messages));
            }
        }
    }

    /// Announces the call to the ranks at the other ends.
    fn begin(&mut self, resources: &mut Resources, task: &mut RelayTask<'_>) -> Result<()> {
        let RelayTask { groups, announced, messages } = task;
        let call = announced.call;
        self.events.clear();
        self.indices.fill(None);
        self.links.clear();
        self.links.resize_with(messages.len(), RelayedCounts::default);
        if call.is_collective() {
            groups.close(resources.rank, call)?;
            resources.links.begin(call);
        }
        for (index, messages) in messages.iter().enumerate() {
            let peer = messages.link.peer;
            self.indices[peer] = Some(index);
            if !call.is_collective() {
                groups.open(resources, call, peer)?;
                self.links[index].entered = groups.has_entered(peer);
                while self.links[index].wants_more(messages)
                    && let Some(view) = groups.take_kept(peer)
                {
                    self.accept(resources, call, messages, index, view)?;
                }
            } else if messages.sends.is_empty() {
                resources.links.announce(peer, &announced.to(peer))?;
            } else {
                resources.links.announce_with_message(peer, &announced.to(peer))?;
            }
        }
        Ok(())
    }

    /// Hands to the transport what the kernel has written, and slots whose messages it has used. Whether
    /// there were any.
    fn advance(&mut self, resources: &mut Resources, messages: &[RelayedMessages]) -> Result<bool> {
        let mut busy = false;
        for (state, RelayedMessages { link, sends, receives }) in self.links.iter_mut().zip(messages) {
            let peer = link.peer;
            let (totals, window) = (self.totals[peer], resources.links.to(peer).common().window());
            while state.give_back(resources, link, totals)? {
                busy = true;
            }
            let is_posted = matches!(resources.links.to(peer), AnyTransport::Posted(_));
            while is_posted && state.posted < receives.len() && state.posted - state.received < window {
                let number = totals.received + state.posted as u64 + 1;
                let Some(into) = link.incoming(number, receives[state.posted] as usize) else { break };
                resources.post_recv(peer, into, MessagePart::outside(into.len()))?;
                state.posted += 1;
                busy = true;
            }
            while state.sending < sends.len() && state.sending - state.sent < window {
                let number = totals.sent + state.sending as u64 + 1;
                let Some(piece) = link.outgoing(number, sends[state.sending] as usize) else { break };
                resources.send(peer, piece, MessagePart::outside(piece.len()))?;
                state.sending += 1;
                busy = true;
            }
        }
        Ok(busy)
    }

    fn poll(&mut self, resources: &mut Resources, task: &mut RelayTask<'_>) -> Result<bool> {
        let polled = resources.links.poll(&mut self.events);
        let mut busy = false;
        // First the events, because a call that differs explains why a link fails.
        while let Some(event) = self.events.pop_front() {
            self.handle(resources, task, event)?;
            busy = true;
        }
        Ok(polled? || busy)
    }

    fn handle(&mut self, resources: &mut Resources, task: &mut RelayTask<'_>, event: Event) -> Result<()> {
        let RelayTask { groups, announced, messages } = task;
        let (Event::PeerEntered { peer, .. }
        | Event::SendComplete { peer }
        | Event::RecvComplete { peer }
        | Event::RecvReady { peer, .. }) = event;
        // Also of a rank to which this call has no link.
        if let Event::PeerEntered { call: theirs, .. } = &event {
            if !announced.call.is_collective() {
                groups.enter(resources, announced.call, peer, theirs)?;
                self.indices[peer].into_iter().for_each(|index| self.links[index].entered = true);
                return Ok(());
            }
            if !announced.agrees_with(theirs, peer) {
                let message = announced.expected(peer).difference(resources.rank, theirs, peer);
                return Err(Error::disagreement(message));
            }
        }
        if let Event::RecvReady { view, .. } = event {
            resources.trace.receive_begins(peer, MessagePart::outside(view.len()));
            let index = self.indices[peer].filter(|index| self.links[*index].wants_more(&messages[*index]));
            return match index {
                Some(index) => self.accept(resources, announced.call, &messages[index], index, view),
                // Ranks may divide their messages into different groups.
                None if !announced.call.is_collective() => groups.keep(peer, view),
                None => Err(unreceived(resources, announced.call, peer)),
            };
        }
        let Some(index) = self.indices[peer] else {
            return Err(unreceived(resources, announced.call, peer));
        };
        let (state, link) = (&mut self.links[index], &messages[index].link);
        match event {
            Event::PeerEntered { .. } => state.entered = true,
            Event::SendComplete { .. } => {
                resources.trace.send_ends(peer);
                state.sent += 1;
                link.set_carried(self.totals[peer].sent + state.sent as u64);
            }
            Event::RecvComplete { .. } => {
                resources.trace.receive_ends(peer);
                state.received += 1;
                link.set_received(self.totals[peer].received + state.received as u64);
            }
            // Accepted above.
            Event::RecvReady { .. } => {}
        }
        Ok(())
    }

    /// Notes a message that a neighbour has in its memory.
    fn accept(
        &mut self,
        resources: &Resources,
        call: &Call,
        messages: &RelayedMessages,
        index: usize,
        view: Piece,
    ) -> Result<()> {
        let RelayedMessages { link, receives, .. } = messages;
        let (peer, state) = (link.peer, &mut self.links[index]);
        // What comes before the peer has announced the call belongs to an earlier group.
        if !state.entered {
            return Err(unreceived(resources, call, peer));
        }
        let nth = state.posted + state.views.len();
        let (expected, number) = (receives[nth] as usize, self.totals[peer].received + nth as u64 + 1);
        if view.len() != expected || link.reads_in_place() && !link.reads(number, view) {
            return Err(Error::disagreement(format!(
                "rank {peer} sends another message to rank {} in {call} than this rank expects, {} bytes instead of {expected}: do \
                 both give the same count and type, and memory of a GPU?",
                resources.rank,
                view.len()
            )));
        }
        state.views.push_back(view);
        if link.reads_in_place() {
            state.received += 1;
            link.set_received(number);
        }
        Ok(())
    }

    /// A rank that the call still waits for, and that has left.
    fn leaver(&self, resources: &Resources, messages: &[RelayedMessages]) -> Option<Rank> {
        let mut pending =
            self.links.iter().zip(messages).filter(|(state, messages)| !state.is_over(messages));
        pending.find_map(|(_, messages)| {
            let peer = messages.link.peer;
            resources.links.has_left(peer).then_some(peer)
        })
    }

    /// Counts the messages of a call that is over.
    fn end(&mut self, messages: &[RelayedMessages]) {
        for RelayedMessages { link, sends, receives } in messages {
            let totals = &mut self.totals[link.peer];
            totals.sent += sends.len() as u64;
            totals.received += receives.len() as u64;
        }
    }

    fn timed_out(&self, resources: &Resources, call: &Call, messages: &[RelayedMessages]) -> Error {
        let pending = self.links.iter().zip(messages).filter(|(state, messages)| !state.is_over(messages));
        let pending: Vec<_> = pending.map(|(state, messages)| (messages.link.peer, state.entered)).collect();
        let peers: Vec<Rank> = pending.iter().map(|(peer, _)| *peer).collect();
        let mut missing: Vec<Rank> =
            pending.iter().filter(|(_, entered)| !entered).map(|(peer, _)| *peer).collect();
        let waiting = if let Some((peer, why)) = resources.links.stalled(&peers) {
            missing = vec![peer];
            format!("for rank {peer}: {why}")
        } else if missing.is_empty() {
            format!(
                "to exchange messages with {}, which has made the call, or for this rank's kernel",
                RankList::new(&peers)
            )
        } else {
            format!("for {} to make the same call and their streams to reach it", RankList::new(&missing))
        };
        let timeout = resources.wait.timeout();
        let error = Error::timeout(format!("{call}: no progress for {timeout:?}: waited {waiting}"));
        match missing.first() {
            Some(rank) => error.with_suspect(*rank),
            None => error,
        }
    }
}

/// The error of this rank, to which `peer` has sent a message that is part of no receive before `call`.
fn unreceived(resources: &Resources, call: &Call, peer: Rank) -> Error {
    Error::disagreement(format!(
        "rank {peer} sends a message to rank {}, which has called {call} without receiving it",
        resources.rank
    ))
}
