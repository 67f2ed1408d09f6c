//! The messages between this rank and one peer in groups of sends and receives.
//!
//! Owns the state of both directions of one link, and the header of a message.

use super::bound_call::PeerMessage;
use super::resources::Resources;
use super::ticket::Ticket;
use crate::device::{Arithmetic, Finish, Job, Operand, Submitted};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::fault_point::{FaultPoint, reach};
use crate::memory::{Piece, read_bytes, write_bytes};
use crate::plan::pipeline::{Action, Binding, LinkProfile, Location, Pipeline, Staging, Violation};
use crate::plan::program::{BufferKind, Program, StepId};
use crate::rank::Rank;
use crate::trace::{JobKind, MessagePart};
use crate::transport::AnyTransport;
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes of a header: the number of elements, and their type and memory.
const HEADER: usize = 16;

/// The state of the first message of a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MessageState {
    /// It has not begun, or there is none.
    Waiting,
    /// Receives: its header is expected in posted memory.
    Header,
    /// Its sub-chunks move.
    Payload,
}

/// One direction of the link.
struct Direction {
    is_send: bool,
    messages: VecDeque<PeerMessage>,
    state: MessageState,
    pipeline: Pipeline,
    /// The first slot of the pool that belongs to it in this call.
    base: usize,
    /// The number of its slots.
    quota: usize,
    /// Views of the peer's memory, by message number modulo their number.
    views: Vec<Piece>,
}

/// Both directions of the link to one peer.
pub(super) struct PeerExchange {
    pub(super) peer: Rank,
    /// Whether this rank has announced the exchange since the last collective.
    pub(super) is_open: bool,
    /// Whether the peer has.
    pub(super) has_entered: bool,
    /// Views that no receive of this rank has taken yet, oldest first.
    pub(super) unread: VecDeque<Piece>,
    outgoing: Direction,
    incoming: Direction,
    /// Whether the header of the first outgoing message is in flight.
    header_in_flight: bool,
}

impl PeerExchange {
    pub(super) fn new(resources: &Resources, peer: Rank) -> Self {
        let window = resources.links.to(peer).common().window();
        Self {
            peer,
            is_open: false,
            has_entered: false,
            unread: VecDeque::with_capacity(window),
            outgoing: Direction::new(resources, peer, true),
            incoming: Direction::new(resources, peer, false),
            header_in_flight: false,
        }
    }

    /// Forgets the messages of the last group.
    pub(super) fn begin(&mut self) {
        for direction in [&mut self.outgoing, &mut self.incoming] {
            direction.messages.clear();
            direction.state = MessageState::Waiting;
        }
    }

    /// Adds a message of this group.
    pub(super) fn push(&mut self, message: PeerMessage) {
        let direction = if message.is_send { &mut self.outgoing } else { &mut self.incoming };
        direction.messages.push_back(message);
    }

    /// Whether the group has no more messages for this peer.
    pub(super) fn is_over(&self) -> bool {
        let is_done = self.outgoing.messages.is_empty() && self.incoming.messages.is_empty();
        is_done && (!self.is_open || self.has_entered)
    }

    pub(super) fn waits_to_send(&self) -> bool {
        !self.outgoing.messages.is_empty() || (self.incoming.messages.is_empty() && !self.has_entered)
    }

    pub(super) fn waits_to_receive(&self) -> bool {
        !self.incoming.messages.is_empty()
    }

    /// How many of the directions need slots.
    pub(super) fn staging(&self, resources: &Resources) -> usize {
        usize::from(self.outgoing.stages(resources)) + usize::from(self.incoming.stages(resources))
    }

    /// Gives each direction that needs slots `quota` of them, from slot `base` on. Returns the first slot
    /// after them.
    pub(super) fn assign_slots(&mut self, resources: &Resources, mut base: usize, quota: usize) -> usize {
        let peer = self.peer;
        for direction in [&mut self.outgoing, &mut self.incoming] {
            if direction.stages(resources) {
                direction.use_slots(resources, peer, base, quota);
                base += quota;
            }
        }
        base
    }

    /// Does all that is possible now. Whether anything was.
    pub(super) fn advance(&mut self, resources: &mut Resources) -> Result<bool> {
        let mut busy = self.start_send(resources)? | self.start_receive(resources)?;
        let peer = self.peer;
        for direction in [&mut self.outgoing, &mut self.incoming] {
            if direction.state != MessageState::Payload {
                continue;
            }
            while let Some(action) = direction.pipeline.next_action() {
                busy = true;
                direction.perform(resources, peer, action)?;
            }
            let waits = direction.is_send && self.header_in_flight;
            if direction.pipeline.is_done() && !waits {
                direction.messages.pop_front();
                direction.state = MessageState::Waiting;
                busy = true;
            }
        }
        Ok(busy)
    }

    fn start_send(&mut self, resources: &mut Resources) -> Result<bool> {
        let Some(message) = self.outgoing.messages.front() else { return Ok(false) };
        if self.outgoing.state != MessageState::Waiting {
            return Ok(false);
        }
        let header = self.header_place(resources, true)?;
        if !write_bytes(header, encode(message)) {
            return Err(Error::internal("the place of a header is no host memory"));
        }
        resources.send(self.peer, header, MessagePart::outside(HEADER))?;
        self.header_in_flight = true;
        self.outgoing.start(resources, self.peer);
        Ok(true)
    }

    fn start_receive(&mut self, resources: &mut Resources) -> Result<bool> {
        if self.incoming.messages.is_empty() || self.incoming.state != MessageState::Waiting {
            return Ok(false);
        }
        if let AnyTransport::Posted(_) = resources.links.to(self.peer) {
            let header = self.header_place(resources, false)?;
            resources.post_recv(self.peer, header, MessagePart::outside(HEADER))?;
            self.incoming.state = MessageState::Header;
            return Ok(true);
        }
        let Some(header) = self.unread.pop_front() else { return Ok(false) };
        reach(FaultPoint::ReadsBegin);
        let bytes = (header.len() == HEADER).then(|| read_bytes(header)).flatten();
        resources.links.check_reads()?;
        resources.release(self.peer)?;
        self.check_header(resources, bytes)?;
        self.incoming.start(resources, self.peer);
        self.take_unread(resources)?;
        Ok(true)
    }

    /// The place of this peer's headers in the spare slot.
    fn header_place(&self, resources: &Resources, is_send: bool) -> Result<Piece> {
        let number = 2 * self.peer + usize::from(is_send);
        let needed = (number + 1) * HEADER;
        if resources.slots.slot_bytes() < needed {
            let message = format!(
                "a group with rank {} needs sub-chunks of {needed} bytes: raise FLEXRING_SUBCHUNK",
                self.peer
            );
            return Err(Error::invalid_setting(message));
        }
        Ok(resources.slots.spare(needed).narrow(number * HEADER, HEADER))
    }

    /// Compares a received header with the first receive.
    fn check_header(&self, resources: &Resources, header: Option<[u8; HEADER]>) -> Result<()> {
        let (peer, me) = (self.peer, resources.rank);
        let message = self.incoming.messages.front();
        let message =
            message.ok_or_else(|| Error::from(Violation("a header without a receive".to_owned())))?;
        let Some((count, dtype, on_gpu)) = header.and_then(decode) else {
            return Err(Error::disagreement(format!(
                "rank {peer} sent something else than a message's header to rank {me}: do all ranks run the same build of flexring?"
            )));
        };
        let expected = (elements(message), message.dtype, !message.piece.is_host());
        // A message without elements has no memory.
        let same_memory = count == 0 || on_gpu == expected.2;
        if (count, dtype) == (expected.0, expected.1) && same_memory {
            return Ok(());
        }
        let place = |on_gpu| match on_gpu {
            _ if same_memory => "",
            true => " on a GPU",
            false => " on the host",
        };
        Err(Error::disagreement(format!(
            "rank {peer} sends {count} x {}{} to rank {me}, which expects {} x {}{}",
            dtype.name(),
            place(on_gpu),
            expected.0,
            expected.1.name(),
            place(expected.2)
        )))
    }

    /// The oldest message in flight to the peer was sent.
    pub(super) fn send_complete(&mut self) -> Result<()> {
        if std::mem::take(&mut self.header_in_flight) {
            return Ok(());
        }
        self.outgoing.pipeline.send_complete(self.peer).map_err(Error::from)
    }

    /// The oldest posted receive is complete.
    pub(super) fn recv_complete(&mut self, resources: &mut Resources) -> Result<()> {
        if self.incoming.state != MessageState::Header {
            return self.incoming.pipeline.recv_complete(self.peer).map_err(Error::from);
        }
        let header = self.header_place(resources, false)?;
        self.check_header(resources, read_bytes(header))?;
        self.incoming.start(resources, self.peer);
        Ok(())
    }

    /// A view of the peer's memory has arrived.
    pub(super) fn recv_ready(&mut self, resources: &Resources, view: Piece) -> Result<()> {
        if !self.is_open || !self.has_entered {
            let (peer, me) = (self.peer, resources.rank);
            return Err(Error::disagreement(format!(
                "rank {peer} sent a message of an earlier call to rank {me}: do all ranks make the same calls?"
            )));
        }
        self.unread.push_back(view);
        self.take_unread(resources)
    }

    /// Passes views to the message that they are part of, if it is being received.
    fn take_unread(&mut self, resources: &Resources) -> Result<()> {
        while self.incoming.state == MessageState::Payload
            && let Some(elements) = self.incoming.pipeline.next_recv(self.peer)
            && let (Some(view), Some(message)) = (self.unread.front(), self.incoming.messages.front())
        {
            let (bytes, expected) =
                (view.len(), (elements.end - elements.start) as usize * message.dtype.size());
            if bytes != expected {
                return Err(Error::disagreement(format!(
                    "rank {} sent {bytes} bytes where rank {} expects {expected}: do all ranks run the same settings?",
                    self.peer, resources.rank
                )));
            }
            let number = self.incoming.pipeline.recv_ready(self.peer)?;
            let at = number as usize % self.incoming.views.len();
            self.incoming.views[at] = *view;
            self.unread.pop_front();
        }
        Ok(())
    }

    /// Reports a finished job.
    pub(super) fn finish(&mut self, resources: &mut Resources, ticket: Ticket) -> Result<()> {
        let direction = if ticket.step % 2 == 1 { &mut self.outgoing } else { &mut self.incoming };
        direction.finish(resources, ticket)
    }
}

impl Direction {
    fn new(resources: &Resources, peer: Rank, is_send: bool) -> Self {
        let window = resources.links.to(peer).common().window();
        Self {
            is_send,
            messages: VecDeque::new(),
            state: MessageState::Waiting,
            pipeline: pipeline(resources, peer, is_send, 0),
            base: 0,
            quota: 0,
            views: vec![Piece::EMPTY; window],
        }
    }

    /// What of a message goes through slots.
    fn staging_of(&self, resources: &Resources, message: &PeerMessage) -> Staging {
        let transport = resources.links.to(message.peer);
        let input = self.is_send && !transport.common().can_send_from(message.piece);
        let recv = match transport {
            AnyTransport::Posted(posted) => !self.is_send && !posted.can_recv_into(message.piece),
            AnyTransport::InPlace(_) => false,
        };
        Staging { input, recv, output: false }
    }

    /// Whether a message needs slots.
    fn stages(&self, resources: &Resources) -> bool {
        let mut messages = self.messages.iter().filter(|message| !message.piece.is_empty());
        messages.any(|message| self.staging_of(resources, message) != Staging::default())
    }

    fn use_slots(&mut self, resources: &Resources, peer: Rank, base: usize, quota: usize) {
        if self.quota != quota {
            self.pipeline = pipeline(resources, peer, self.is_send, quota);
        }
        (self.base, self.quota) = (base, quota);
    }

    /// Starts the sub-chunks of the first message.
    fn start(&mut self, resources: &Resources, peer: Rank) {
        let Some(message) = self.messages.front() else { return };
        debug_assert_eq!(message.peer, peer);
        let subchunk = message.dtype.elements_in(resources.slots.slot_bytes()) as u64;
        let binding = Binding { count: elements(message), subchunk, align: 1, in_place: false };
        let staging = self.staging_of(resources, message);
        self.pipeline.start(binding, |_| staging);
        self.state = MessageState::Payload;
    }

    fn perform(&mut self, resources: &mut Resources, peer: Rank, action: Action) -> Result<()> {
        match action {
            Action::Release { .. } => resources.release(peer),
            Action::Send { location, sub, .. } => {
                let piece = self.piece(resources, location, sub)?;
                resources.send(peer, piece, MessagePart { step: 0, sub, bytes: piece.len() })
            }
            Action::PostRecv { location, sub, .. } => {
                let piece = self.piece(resources, location, sub)?;
                resources.post_recv(peer, piece, MessagePart { step: 0, sub, bytes: piece.len() })
            }
            Action::Stage { sub, buffer, slot, .. } => {
                let from = self.piece(resources, Location::Buffer(buffer), sub)?;
                let into = self.piece(resources, Location::Slot(slot), sub)?;
                self.copy(resources, peer, (from, into), (sub, true, false))
            }
            Action::Combine { sub, .. } => {
                let location = self.pipeline.operand_location(0, 0, sub);
                let from = self.piece(resources, location, sub)?;
                let output = Location::Buffer(BufferKind::Output);
                let into = self.piece(resources, output, sub)?;
                let reads_views = matches!(location, Location::Peer { .. });
                if reads_views {
                    reach(FaultPoint::ReadsBegin);
                }
                self.copy(resources, peer, (from, into), (sub, false, reads_views))
            }
        }
    }

    fn copy(
        &mut self,
        resources: &mut Resources,
        peer: Rank,
        (from, into): (Piece, Piece),
        (sub, stages, reads_views): (u64, bool, bool),
    ) -> Result<()> {
        let message = self.message()?;
        let ticket =
            Ticket { step: (2 * peer + usize::from(self.is_send)) as StepId, sub, stages, reads_views };
        let operands = [Operand { piece: from, factor: None }];
        let part = MessagePart { step: 0, sub, bytes: into.len() };
        resources.trace.job_begins(JobKind::Copy, ticket.pack(), part);
        match resources.devices.submit(&copy(&message, into, &operands), ticket.pack())? {
            Submitted::Done => {
                resources.trace.job_ends(ticket.pack());
                self.finish(resources, ticket)
            }
            Submitted::InFlight => Ok(()),
        }
    }

    fn finish(&mut self, resources: &mut Resources, ticket: Ticket) -> Result<()> {
        if ticket.reads_views {
            resources.links.check_reads()?;
        }
        if ticket.stages {
            self.pipeline.stage_complete(0, ticket.sub);
            return Ok(());
        }
        self.pipeline.combine_complete(0).map_err(Error::from)
    }

    fn message(&self) -> Result<PeerMessage> {
        let message = self.messages.front().copied();
        message.ok_or_else(|| Error::from(Violation("an action without a message".to_owned())))
    }

    /// The bytes of a sub-chunk of the first message at a location.
    fn piece(&self, resources: &Resources, location: Location, sub: u64) -> Result<Piece> {
        let message = self.message()?;
        let elements = self.pipeline.elements(0, sub);
        let size = message.dtype.size();
        let (start, len) = (elements.start as usize * size, (elements.end - elements.start) as usize * size);
        Ok(match location {
            Location::Buffer(_) => message.piece.narrow(start, len),
            Location::Slot(slot) => resources.slots.piece(self.base + slot as usize).narrow(0, len),
            Location::Peer { message, .. } => self.views[message as usize % self.views.len()],
        })
    }
}

/// A pipeline for the messages of one direction, with `quota` slots.
fn pipeline(resources: &Resources, peer: Rank, is_send: bool, quota: usize) -> Pipeline {
    let transport = resources.links.to(peer);
    let reads_in_place = matches!(transport, AnyTransport::InPlace(_));
    let profile = LinkProfile {
        reads_in_place,
        // One less, for the header.
        window: transport.common().window().saturating_sub(1).max(1),
        send_slots: if is_send { quota } else { 0 },
        recv_slots: if is_send || reads_in_place { 0 } else { quota },
    };
    let program = Program::of_message(resources.rank, resources.world, peer, is_send);
    Pipeline::new(Arc::new(program), |_| profile)
}

/// A job that copies its one operand, of a message.
pub(super) fn copy<'a>(message: &PeerMessage, into: Piece, operands: &'a [Operand; 1]) -> Job<'a> {
    Job {
        dtype: message.dtype,
        arithmetic: Arithmetic::Sum,
        into,
        operands,
        finish: Finish::Keep,
        streaming: false,
    }
}

fn elements(message: &PeerMessage) -> u64 {
    message.dtype.elements_in(message.piece.len()) as u64
}

fn encode(message: &PeerMessage) -> [u8; HEADER] {
    let kind = message.dtype as u64 | u64::from(!message.piece.is_host()) << 8;
    let words = u128::from(elements(message)) | u128::from(kind) << 64;
    words.to_le_bytes()
}

/// Count, type, and whether the elements are on a GPU. `None` if the bytes are no header.
fn decode(header: [u8; HEADER]) -> Option<(u64, DType, bool)> {
    let words = u128::from_le_bytes(header);
    let (count, kind) = (words as u64, (words >> 64) as u64);
    (kind >> 9 == 0).then_some(())?;
    Some((count, DType::from_code(kind as u8)?, kind >> 8 & 1 == 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_encoding_and_other_bytes_are_none() {
        let message = PeerMessage { is_send: true, peer: 3, dtype: DType::BF16, piece: Piece::EMPTY };
        assert_eq!(decode(encode(&message)), Some((0, DType::BF16, false)));
        assert_eq!(decode([0xff; HEADER]), None);
        let mut header = encode(&message);
        header[8] = 200;
        assert_eq!(decode(header), None);
    }
}
