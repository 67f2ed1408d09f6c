//! The path of groups of sends and receives: the messages of each pair of ranks move in order, those of
//! different pairs and directions independently of each other.
//!
//! Owns the protocol between two ranks.
//!
//! # What two ranks agree on
//!
//! Collectives are numbered, one sequence for the whole world. Sends and receives concern two ranks, and the
//! other ranks make no such call, so they are not counted: they lie between two collectives, and carry the
//! number of the next one.
//!
//! The first time after a collective that a rank sends to, or receives from, another one, it begins a call on
//! that link alone and announces it: the link is **open** until the next collective. Each direction of an
//! open link is a stream of messages of its own. The n-th send of one rank matches the n-th receive of the
//! other, whatever groups the two ranks divide them into. A message is a header (count, type, kind of memory)
//! and its sub-chunks, which move by a program of one step. The receiver compares the header with its receive
//! before anything is written, so different counts or types are an error that names both ranks. Nothing in a
//! stream waits for another stream, so a group ends as soon as each of its messages has its counterpart: two
//! ranks that both send first do not block each other.
//!
//! A sender needs no permission. Where messages are read in place, a send ends when the receiver has copied
//! it, with RDMA when the receiver's memory has it, with TCP when the kernel has taken it. A rank whose
//! counterpart is in a collective that uses the link gets an error at once, because the two announce
//! different calls; a peer that has left is noticed, too. All other missing counterparts end the call at its
//! deadline, with the ranks that it waits for. Messages of a peer that this group does not receive stay on
//! the link for a later group; if a collective comes first, they are an error.
//!
//! The coordinator compares the calls of collectives only. A rank in a group counts as between two
//! collectives: ranks that leave meanwhile do not concern it unless they are its peers.

use super::bound_call::{BoundGroup, PeerMessage};
use super::links::Links;
use super::peer_exchange::{PeerExchange, copy};
use super::resources::Resources;
use super::ticket::Ticket;
use crate::call::{Call, Collective};
use crate::device::{Operand, Submitted};
use crate::error::{Error, Result};
use crate::memory::Piece;
use crate::plan::program::StepId;
use crate::rank::{Rank, RankList};
use crate::trace::{JobKind, MessagePart};
use crate::transport::{Event, Events};
use std::collections::VecDeque;

/// The step in the tickets of copies from this rank to itself.
const OWN_COPY: StepId = StepId::MAX;

/// Executes groups.
pub(super) struct GroupPath {
    /// By rank; `None` for ranks that no message was exchanged with yet.
    exchanges: Vec<Option<Box<PeerExchange>>>,
    /// The peers whose part of the running group is not over.
    active: Vec<Rank>,
    /// Whether a link may be open.
    any_open: bool,
    own: OwnMessages,
    /// Events of links that were not handled yet.
    events: Events,
    /// Tickets of finished jobs that were not handled yet.
    finished: Vec<u64>,
}

/// The messages from this rank to itself.
#[derive(Default)]
struct OwnMessages {
    sends: VecDeque<PeerMessage>,
    receives: VecDeque<PeerMessage>,
    /// Bytes of the first message that are copied or being copied.
    copied: usize,
    is_copying: bool,
}

impl GroupPath {
    /// A path without open links.
    pub(super) fn new(links: &Links, world: usize) -> Self {
        Self {
            exchanges: (0..world).map(|_| None).collect(),
            active: Vec::with_capacity(world),
            any_open: false,
            own: OwnMessages::default(),
            events: Events::with_capacity(links.most_events()),
            finished: Vec::new(),
        }
    }

    /// Closes all links, because a collective begins.
    ///
    /// # Errors
    /// `Disagreement` if a peer has sent a message that this rank has not received.
    #[inline]
    pub(super) fn close(&mut self, rank: Rank, call: &Call) -> Result<()> {
        if !std::mem::take(&mut self.any_open) {
            return Ok(());
        }
        for exchange in self.exchanges.iter_mut().flatten() {
            exchange.is_open = false;
            exchange.has_entered = false;
            if !exchange.unread.is_empty() {
                let peer = exchange.peer;
                return Err(Error::disagreement(format!(
                    "rank {peer} sends a message to rank {rank}, which has called {call} without receiving it"
                )));
            }
        }
        Ok(())
    }

    /// Executes a group.
    pub(super) fn run(&mut self, resources: &mut Resources, bound: &BoundGroup) -> Result<()> {
        self.prepare(resources, bound)?;
        resources.wait.begin();
        loop {
            let mut busy = self.own.advance(resources)?;
            let mut has_left = false;
            for index in (0..self.active.len()).rev() {
                let peer = self.active[index];
                let exchange = exchange_with(&mut self.exchanges, peer)?;
                busy |= exchange.advance(resources)?;
                if exchange.is_over() {
                    self.active.swap_remove(index);
                    busy = true;
                } else {
                    has_left |= resources.links.has_left(peer);
                }
            }
            if self.active.is_empty() && self.own.is_over() {
                return Ok(());
            }
            busy |= self.poll(resources, bound)?;
            if busy {
                resources.progressed();
            } else if has_left && !resources.devices.are_busy() {
                // The poll has reported all that the peer had sent.
                return Err(self.departed(resources, bound));
            } else if !resources.pause()? {
                return Err(self.timed_out(resources, bound));
            }
        }
    }

    /// Distributes the group's messages, and opens their links.
    fn prepare(&mut self, resources: &mut Resources, bound: &BoundGroup) -> Result<()> {
        let me = resources.rank;
        self.events.clear();
        self.active.clear();
        self.own.begin();
        for exchange in self.exchanges.iter_mut().flatten() {
            exchange.begin();
        }
        for message in bound.messages.iter().filter(|message| message.peer == me) {
            let queue = if message.is_send { &mut self.own.sends } else { &mut self.own.receives };
            queue.push_back(*message);
        }
        for message in bound.messages.iter().filter(|message| message.peer != me) {
            let peer = message.peer;
            if self.exchanges[peer].is_none() {
                self.exchanges[peer] = Some(Box::new(PeerExchange::new(resources, peer)));
            }
            let exchange = exchange_with(&mut self.exchanges, peer)?;
            if exchange.is_over() {
                self.active.push(peer);
            }
            exchange.push(*message);
        }
        let staging: usize = self
            .active
            .iter()
            .flat_map(|peer| &self.exchanges[*peer])
            .map(|peer| peer.staging(resources))
            .sum();
        if staging > 0 {
            resources.slots.populate();
        }
        let quota = resources.slots.count() / staging.max(1);
        if quota == 0 {
            let slots = resources.slots.count();
            return Err(Error::invalid_setting(format!(
                "{slots} slots are too few for messages with {staging} ranks at once: raise FLEXRING_SLOTS"
            )));
        }
        let mut base = 0;
        for index in 0..self.active.len() {
            let peer = self.active[index];
            let exchange = exchange_with(&mut self.exchanges, peer)?;
            base = exchange.assign_slots(resources, base, quota);
            self.open(resources, &bound.call, peer)?;
        }
        Ok(())
    }

    /// Opens the link to `peer` for `call`, a group, if it is not open yet.
    pub(super) fn open(&mut self, resources: &mut Resources, call: &Call, peer: Rank) -> Result<()> {
        let exchange =
            self.exchanges[peer].get_or_insert_with(|| Box::new(PeerExchange::new(resources, peer)));
        if exchange.is_open {
            return Ok(());
        }
        // Not the number of operations or the memory, which the two ends need not have in common. No
        // message is eager, because what kernels write is not.
        let call = Call {
            sequence: call.sequence,
            collective: Collective::SendRecv,
            count: 0,
            root: Call::SEVERAL_PEERS,
            program: resources.slots.slot_bytes() as u64,
            on_gpu: true,
            ..*call
        };
        resources.links.begin_link(peer, call.sequence)?;
        resources.links.announce(peer, &call)?;
        exchange.is_open = true;
        self.any_open = true;
        Ok(())
    }

    /// Keeps a message of `peer` that is in its memory, for a receive of a later group.
    ///
    /// # Errors
    /// `Disagreement` if the link is not open.
    pub(super) fn keep(&mut self, peer: Rank, view: Piece) -> Result<()> {
        exchange_with(&mut self.exchanges, peer)?.unread.push_back(view);
        Ok(())
    }

    /// The oldest message of `peer` that was kept.
    pub(super) fn take_kept(&mut self, peer: Rank) -> Option<Piece> {
        self.exchanges[peer].as_mut()?.unread.pop_front()
    }

    /// Whether `peer` has opened its end of an open link.
    pub(super) fn has_entered(&self, peer: Rank) -> bool {
        self.exchanges[peer].as_ref().is_some_and(|exchange| exchange.has_entered)
    }

    /// Notes what `peer` has announced to this rank, which is in `call`, a group.
    ///
    /// # Errors
    /// `Disagreement` if that is no group between the same collectives.
    pub(super) fn enter(
        &mut self,
        resources: &Resources,
        call: &Call,
        peer: Rank,
        theirs: &Call,
    ) -> Result<()> {
        let expected = (Collective::SendRecv, call.sequence, resources.slots.slot_bytes() as u64);
        if (theirs.collective, theirs.sequence, theirs.program) != expected {
            return Err(Error::disagreement(difference(resources.rank, call, peer, theirs)));
        }
        exchange_with(&mut self.exchanges, peer)?.has_entered = true;
        Ok(())
    }

    /// Takes completions from links and devices. Whether there were any.
    fn poll(&mut self, resources: &mut Resources, bound: &BoundGroup) -> Result<bool> {
        let polled = resources.links.poll(&mut self.events);
        // First the events, because a call that differs explains why a link fails.
        while let Some(event) = self.events.pop_front() {
            self.handle(resources, bound, event)?;
        }
        let in_group =
            |error: Error| error.context(format_args!("rank {} in {}", resources.rank, bound.call));
        let mut busy = polled.map_err(in_group)?;
        if resources.devices.are_busy() {
            let finished = &mut self.finished;
            resources.devices.poll(&mut |ticket| finished.push(ticket))?;
            busy |= !self.finished.is_empty();
            for index in 0..self.finished.len() {
                let ticket = Ticket::unpack(self.finished[index]);
                resources.trace.job_ends(self.finished[index]);
                if ticket.step == OWN_COPY {
                    self.own.is_copying = false;
                } else {
                    let exchange = exchange_with(&mut self.exchanges, ticket.step as usize / 2)?;
                    exchange.finish(resources, ticket)?;
                }
            }
            self.finished.clear();
        }
        Ok(busy)
    }

    fn handle(&mut self, resources: &mut Resources, bound: &BoundGroup, event: Event) -> Result<()> {
        match event {
            Event::PeerEntered { peer, call } => self.enter(resources, &bound.call, peer, &call),
            Event::SendComplete { peer } => {
                resources.trace.send_ends(peer);
                exchange_with(&mut self.exchanges, peer)?.send_complete()
            }
            Event::RecvComplete { peer } => {
                resources.trace.receive_ends(peer);
                exchange_with(&mut self.exchanges, peer)?.recv_complete(resources)
            }
            Event::RecvReady { peer, view } => {
                resources.trace.receive_begins(peer, MessagePart::outside(view.len()));
                let exchange = exchange_with(&mut self.exchanges, peer)?;
                exchange.recv_ready(resources, view)
            }
        }
    }

    fn departed(&self, resources: &Resources, bound: &BoundGroup) -> Error {
        let left = self.active.iter().copied().find(|peer| resources.links.has_left(*peer));
        let peer = left.unwrap_or(resources.rank);
        let message = format!("{}: rank {peer} left, and {}", bound.call, self.waits(&[peer]));
        Error::peer_lost(message).with_suspect(peer)
    }

    fn timed_out(&self, resources: &Resources, bound: &BoundGroup) -> Error {
        let timeout = resources.wait.timeout();
        let mut peers = self.active.clone();
        peers.sort_unstable();
        let stalled = resources.links.stalled(&peers);
        let suspect = stalled.as_ref().map(|(peer, _)| *peer).or(peers.first().copied());
        let why = stalled.map_or_else(String::new, |(_, why)| format!("; {why}"));
        let message = format!("{}: no progress for {timeout:?}: {}{why}", bound.call, self.waits(&peers));
        let error = Error::timeout(message);
        match suspect {
            Some(peer) => error.with_suspect(peer),
            None => error,
        }
    }

    /// Says what this rank waits for at these peers.
    fn waits(&self, peers: &[Rank]) -> String {
        let who = |waits: fn(&PeerExchange) -> bool| {
            let exchanges = peers.iter().flat_map(|peer| &self.exchanges[*peer]);
            exchanges.filter(|exchange| waits(exchange)).map(|exchange| exchange.peer).collect::<Vec<Rank>>()
        };
        let (to, from) = (who(PeerExchange::waits_to_send), who(PeerExchange::waits_to_receive));
        let clause = |ranks: &[Rank], what: &str| {
            (!ranks.is_empty()).then(|| format!("this rank waits for {} to {what} it", RankList::new(ranks)))
        };
        let clauses = [clause(&to, "receive from"), clause(&from, "send to")];
        let clauses: Vec<String> = clauses.into_iter().flatten().collect();
        if clauses.is_empty() {
            "this rank waits for a copy of its own".to_owned()
        } else {
            clauses.join(", and ")
        }
    }
}

impl OwnMessages {
    fn begin(&mut self) {
        self.sends.clear();
        self.receives.clear();
        (self.copied, self.is_copying) = (0, false);
    }

    fn is_over(&self) -> bool {
        self.sends.is_empty() && !self.is_copying
    }

    /// Starts the copy of the next sub-chunk. Whether there was one: only one at a time, as links must not
    /// wait for long copies.
    fn advance(&mut self, resources: &mut Resources) -> Result<bool> {
        let (Some(send), Some(receive)) = (self.sends.front(), self.receives.front()) else {
            return Ok(false);
        };
        if self.is_copying {
            return Ok(false);
        }
        let len = (send.piece.len() - self.copied).min(resources.slots.slot_bytes());
        if len > 0 {
            let operands = [Operand { piece: send.piece.narrow(self.copied, len), factor: None }];
            let into = receive.piece.narrow(self.copied, len);
            let ticket = Ticket { step: OWN_COPY, sub: 0, stages: false, reads_views: false };
            let job = copy(send, into, &operands);
            resources.trace.job_begins(JobKind::Copy, ticket.pack(), MessagePart::outside(len));
            self.is_copying = resources.devices.submit(&job, ticket.pack())? == Submitted::InFlight;
            if !self.is_copying {
                resources.trace.job_ends(ticket.pack());
            }
            self.copied += len;
        }
        if self.copied == send.piece.len() {
            self.sends.pop_front();
            self.receives.pop_front();
            self.copied = 0;
        }
        Ok(true)
    }
}

fn exchange_with(exchanges: &mut [Option<Box<PeerExchange>>], peer: Rank) -> Result<&mut PeerExchange> {
    let exchange = exchanges.get_mut(peer).and_then(Option::as_deref_mut);
    exchange.ok_or_else(|| {
        Error::disagreement(format!(
            "rank {peer} sent a message that is part of no call of this rank: do all ranks make the same calls?"
        ))
    })
}

/// Describes how the call of `them` differs from that of `me`, a group.
fn difference(me: Rank, own: &Call, them: Rank, theirs: &Call) -> String {
    if theirs.is_collective() {
        return own.difference(me, theirs, them);
    }
    format!(
        "rank {me} called {own} after collective #{}, and rank {them} called send_recv after collective #{}: do all ranks run \
         the same version with the same settings?",
        own.last_collective(),
        theirs.last_collective()
    )
}
