//! The link to one peer: what is written next, over which queue pair, and what a completion means.
//!
//! Owns the order of a link's messages and all that both ends know of it. Does no I/O: [`Link::next_request`] says
//! what to post, the `sent`, `received` and `failed` methods are told what became of it. Must not know devices, and
//! touches no memory but its boards.
//!
//! A message goes one of two ways. The first few of a call, if short, are **eager**: written to the peer's board at
//! once, the very first together with the call. All others wait for a **grant**, by which the receiver says where
//! the message shall land, and are written right there. Grants run ahead of the messages by a window, so a grant is
//! a credit too: no more can come than there is room and a posted receive for. Both ends know from number and
//! length which way a message goes.
//!
//! | file | owns |
//! |---|---|
//! | `mod` | what goes out |
//! | `incoming` | what comes in |
//! | `recovery` | what happens when a queue pair breaks, or when a rank leaves |

mod incoming;
mod recovery;
#[cfg(test)]
mod tests;

use super::control_buffer::ControlBuffer;
use super::registry::RegisteredMemory;
use super::wire::{ClearToSend, EAGER_MESSAGES, ImmKind, MAX_EAGER_BYTES, MAX_RAILS, WINDOW, parity};
use crate::call::Call;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Piece;
use crate::rank::Rank;
use crate::transport::{Event, Events};
use incoming::RecvState;
use recovery::QpState;
use std::collections::VecDeque;
use std::sync::Arc;

/// Requests that a queue pair takes. A call has at most a window of data and of grants, the short messages, the call
/// itself; the rest is for what must be said when another pair breaks.
pub(super) const SEND_DEPTH: usize = 2 * WINDOW + EAGER_MESSAGES as usize + 28;

/// Writes of the peer's that may come over one queue pair before this rank looks: all of a call, and of the next.
pub(super) const RECV_DEPTH: usize = 2 * SEND_DEPTH;

/// What a request was about, so that it can be made again over another queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestKind {
    Call { epoch: u64 },
    EagerCall { epoch: u64, len: usize },
    Eager { epoch: u64, message: u64, len: usize },
    Cts { epoch: u64, from: u64, to: u64 },
    Data { epoch: u64, message: u64 },
    Recovery { qp: usize },
    Hello,
    Bye,
    Probe,
}

impl RequestKind {
    /// Whether somebody waits for its completion.
    fn needs_completion(self) -> bool {
        !matches!(self, Self::Call { .. } | Self::EagerCall { .. } | Self::Eager { .. } | Self::Cts { .. })
    }

    /// Whether the peer must get it, over whichever queue pair.
    fn must_arrive(self) -> bool {
        !matches!(self, Self::Hello | Self::Probe)
    }
}

/// What a request writes.
#[derive(Clone, Debug)]
pub(super) enum Payload {
    Nothing,
    /// This stretch of the outbox, to the same place of the peer's inbox.
    ControlBuffer {
        offset: usize,
        len: usize,
    },
    /// A message, to where the peer granted it, under the key of its rail.
    Message {
        piece: Piece,
        region: Arc<RegisteredMemory>,
        address: u64,
        key: u32,
    },
}

/// An RDMA write that shall be posted.
#[derive(Clone, Debug)]
pub(super) struct LinkRequest {
    pub qp: usize,
    /// Its number on its queue pair.
    pub serial: u32,
    /// What the peer is told; nothing for a probe, which the peer does not notice.
    pub imm: Option<u32>,
    pub payload: Payload,
    /// Whether somebody waits for its completion.
    pub needs_completion: bool,
}

/// A message on its way out.
#[derive(Debug)]
struct OutgoingMessage {
    piece: Piece,
    /// None for an eager one.
    region: Option<Arc<RegisteredMemory>>,
    /// Whether its bytes may change.
    done: bool,
}

/// What this rank sends in one turn.
#[derive(Debug, Default)]
struct SendState {
    call: Option<Call>,
    call_posted: bool,
    /// Messages handed over, those of them that were put on a queue pair, and those reported as sent.
    posted: u64,
    next: u64,
    sent: u64,
    messages: [Option<OutgoingMessage>; WINDOW],
}

impl SendState {
    fn restart(&mut self, call: Call) {
        (self.call, self.call_posted) = (Some(call), false);
        (self.posted, self.next, self.sent) = (0, 0, 0);
    }

    fn is_on_gpu(&self) -> bool {
        self.call.is_some_and(|call| call.on_gpu)
    }

    fn message(&mut self, number: u64) -> &mut OutgoingMessage {
        self.messages[number as usize % WINDOW].as_mut().expect("the message is within the window")
    }
}

/// The link to one peer.
#[derive(Debug)]
pub(super) struct Link {
    pub peer: Rank,
    control: ControlBuffer,
    pub qps: Vec<QpState>,
    /// The call that this rank is in.
    sequence: u64,
    /// How many calls this rank has announced on this link. A peer is at most one ahead.
    epoch: u64,
    /// Whether the call that this rank is in was announced here.
    announced: bool,
    outgoing: [SendState; 2],
    incoming: [RecvState; 2],
    /// What must be written anew, oldest first.
    retransmits: VecDeque<RequestKind>,
    /// Queue pairs over which the peer has said hello, by bit.
    hellos: u64,
    /// Whether this rank is to say that it makes no more calls.
    bye_due: bool,
    /// How often this rank has looked since the peer said that it makes no more calls.
    polls_since_bye: Option<u32>,
    failure: Option<Error>,
}

/// Whether a message goes by the board, in a call that is `on_gpu` or not. The board is the host's: what is on a GPU goes
/// there without it.
fn is_eager(on_gpu: bool, message: u64, len: usize) -> bool {
    !on_gpu && message < EAGER_MESSAGES && len <= MAX_EAGER_BYTES
}

impl Link {
    /// A link to `peer` with a queue pair for each of these rails of this rank's and the peer's.
    pub(super) fn new(peer: Rank, control: ControlBuffer, rails: &[(usize, usize)]) -> Self {
        Self {
            peer,
            control,
            qps: rails.iter().map(|(mine, theirs)| QpState::new(*mine, *theirs)).collect(),
            sequence: 0,
            epoch: 0,
            announced: false,
            outgoing: Default::default(),
            incoming: Default::default(),
            retransmits: VecDeque::with_capacity(SEND_DEPTH),
            hellos: 0,
            bye_due: false,
            polls_since_bye: None,
            failure: None,
        }
    }

    /// An error if the link cannot be used any more.
    pub(super) fn check(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Begins a call of this rank, which may or may not go over this link.
    pub(super) fn begin(&mut self, sequence: u64) {
        self.sequence = sequence;
        self.announced = false;
    }

    /// Whether messages are under way, so that pieces are held.
    pub(super) fn is_busy(&self) -> bool {
        self.in_flight() != (0, 0)
    }

    /// Whether the call that this rank is in still waits for something of the peer's.
    pub(super) fn needs_peer(&self) -> bool {
        self.announced && (self.in_flight().0 > 0 || self.incoming[parity(self.epoch)].is_incomplete())
    }

    /// How many messages are under way: to the peer, and from it.
    pub(super) fn in_flight(&self) -> (u64, u64) {
        let outgoing = &self.outgoing[parity(self.epoch)];
        (outgoing.posted - outgoing.sent, self.incoming[parity(self.epoch)].outstanding())
    }

    /// Tells the peer what this rank calls.
    pub(super) fn announce(&mut self, call: &Call) -> Result<()> {
        self.check()?;
        self.epoch += 1;
        self.announced = true;
        self.outgoing[parity(self.epoch)].restart(*call);
        self.incoming[parity(self.epoch)].begin(call.on_gpu);
        // What comes early from now on is of the turn after this.
        self.incoming[parity(self.epoch + 1)].restart();
        Ok(())
    }

    /// Whether the next message goes by the board, so that its memory need not be registered.
    pub(super) fn sends_eagerly(&self, len: usize) -> bool {
        let outgoing = &self.outgoing[parity(self.epoch)];
        is_eager(outgoing.is_on_gpu(), outgoing.posted, len)
    }

    /// Takes the next message; unless it is eager, with the region that it lies in.
    pub(super) fn send(&mut self, piece: Piece, region: Option<Arc<RegisteredMemory>>) -> Result<()> {
        self.check()?;
        let epoch = self.epoch;
        let outgoing = &mut self.outgoing[parity(epoch)];
        let number = outgoing.posted;
        if is_eager(outgoing.is_on_gpu(), number, piece.len()) {
            self.control.write_eager(epoch, number, piece);
        }
        outgoing.messages[number as usize % WINDOW] = Some(OutgoingMessage { piece, region, done: false });
        outgoing.posted += 1;
        Ok(())
    }

    /// The next write to be posted, if there is one now.
    pub(super) fn next_request(&mut self) -> Result<Option<LinkRequest>> {
        if let Some(kind) = self.retransmits.front().copied().or_else(|| self.due_bye()) {
            let Some(qp) = self.qp_for(kind) else { return Ok(None) };
            if self.retransmits.pop_front().is_none() {
                self.bye_due = false;
            }
            return self.request(qp, kind).map(Some);
        }
        if !self.announced {
            return Ok(None);
        }
        let Some((kind, qp)) = self.next_new_request()? else { return Ok(None) };
        self.request(qp, kind).map(Some)
    }

    /// What is due next, and the queue pair for it; counts it as told.
    fn next_new_request(&mut self) -> Result<Option<(RequestKind, usize)>> {
        let epoch = self.epoch;
        let (outgoing, incoming) = (&self.outgoing[parity(epoch)], &mut self.incoming[parity(epoch)]);
        let kind = if !outgoing.call_posted {
            match (outgoing.posted, &outgoing.messages[0]) {
                (1.., Some(first)) if is_eager(outgoing.is_on_gpu(), 0, first.piece.len()) => {
                    RequestKind::EagerCall { epoch, len: first.piece.len() }
                }
                _ => RequestKind::Call { epoch },
            }
        } else if let Some((from, to)) = incoming.pending_cts() {
            RequestKind::Cts { epoch, from, to }
        } else if outgoing.next < outgoing.posted {
            let message = outgoing.next;
            let outgoing = &mut self.outgoing[parity(epoch)];
            let len = outgoing.message(message).piece.len();
            if is_eager(outgoing.is_on_gpu(), message, len) {
                RequestKind::Eager { epoch, message, len }
            } else if incoming.is_clear_to_send() {
                RequestKind::Data { epoch, message }
            } else {
                return Ok(None);
            }
        } else {
            return Ok(None);
        };
        let Some(qp) = self.qp_for(kind) else { return Ok(None) };
        let (outgoing, incoming) = (&mut self.outgoing[parity(epoch)], &mut self.incoming[parity(epoch)]);
        outgoing.call_posted |= matches!(kind, RequestKind::Call { .. } | RequestKind::EagerCall { .. });
        if let RequestKind::EagerCall { .. } | RequestKind::Eager { .. } | RequestKind::Data { .. } = kind {
            let message = outgoing.next;
            outgoing.next += 1;
            incoming.consume_credit();
            if let RequestKind::Data { .. } = kind {
                self.check_cts_len(epoch, message)?;
            } else {
                // The board has it.
                outgoing.message(message).done = true;
            }
        } else if let RequestKind::Cts { to, .. } = kind {
            incoming.mark_cts_sent(to);
        }
        Ok(Some((kind, qp)))
    }

    fn check_cts_len(&mut self, epoch: u64, message: u64) -> Result<()> {
        let expected = self.control.read_cts(epoch, message).len as usize;
        let len = self.outgoing[parity(epoch)].message(message).piece.len();
        if expected == len {
            return Ok(());
        }
        Err(self.disagree(&format!(
            "expects {expected} bytes where this rank sends {len}; do all ranks run the same version with the same settings?"
        )))
    }

    /// The queue pair that something goes over, if one has room. Messages go where the fewest bytes are waiting, so
    /// each rail carries what it can, and in turn where that is equal; all else goes over the first pair that lives,
    /// so that it stays in order.
    fn qp_for(&self, kind: RequestKind) -> Option<usize> {
        let mut alive = self.qps.iter().enumerate().filter(|(_, qp)| qp.is_alive());
        let chosen = match kind {
            RequestKind::Data { .. } => alive.min_by_key(|(_, qp)| (qp.bytes, qp.carried)),
            _ => alive.next(),
        };
        chosen.filter(|(_, qp)| qp.has_room()).map(|(number, _)| number)
    }

    /// Makes a request of what shall be told, and notes that it is under way.
    fn request(&mut self, qp: usize, kind: RequestKind) -> Result<LinkRequest> {
        let control = |(offset, len)| Payload::ControlBuffer { offset, len };
        let (imm, epoch, payload) = match kind {
            RequestKind::Call { epoch } => {
                let call = self.outgoing[parity(epoch)].call.expect("a turn has a call");
                (Some(ImmKind::Call), epoch, control(self.control.write_call(epoch, &call)))
            }
            RequestKind::EagerCall { epoch, len } => {
                let call = self.outgoing[parity(epoch)].call.expect("a turn has a call");
                (Some(ImmKind::EagerCall), epoch, control(self.control.write_eager_call(epoch, &call, len)))
            }
            RequestKind::Eager { epoch, message, len } => {
                let at = self.control.layout.eager_bytes(epoch, message);
                (Some(ImmKind::Eager(message)), epoch, control((at, len)))
            }
            RequestKind::Cts { epoch, from, to } => {
                (Some(ImmKind::Cts(to)), epoch, control(self.control.cts_range(epoch, from..to)))
            }
            RequestKind::Data { epoch, message } => {
                let ClearToSend { address, keys, .. } = self.control.read_cts(epoch, message);
                let key = keys[self.qps[qp].peer_rail];
                let OutgoingMessage { piece, region, .. } = self.outgoing[parity(epoch)].message(message);
                let region = region.clone().expect("a message that waits for a grant has a region");
                (
                    Some(ImmKind::Data(message)),
                    epoch,
                    Payload::Message { piece: *piece, region, address, key },
                )
            }
            RequestKind::Recovery { qp } => {
                let known = self.qps[qp].local_state.expect("a pair is told of when it is quiet");
                (Some(ImmKind::Recovery(qp)), 0, control(self.control.write_recovery(qp, known)))
            }
            RequestKind::Hello => (Some(ImmKind::Hello), 0, Payload::Nothing),
            RequestKind::Bye => (Some(ImmKind::Bye), 0, Payload::Nothing),
            RequestKind::Probe => (None, 0, Payload::Nothing),
        };
        let bytes = match &payload {
            Payload::Message { piece, .. } => piece.len(),
            _ => 0,
        };
        let serial = self.qps[qp].record(kind, bytes as u64);
        let imm = imm.map(|imm| imm.pack(epoch));
        Ok(LinkRequest { qp, serial, imm, payload, needs_completion: kind.needs_completion() })
    }

    /// Says hello over one queue pair.
    pub(super) fn hello(&mut self, qp: usize) -> Result<LinkRequest> {
        self.request(qp, RequestKind::Hello)
    }

    /// A request was carried out, and with it all before it on its queue pair.
    pub(super) fn write_completed(&mut self, qp: usize, serial: u32) {
        while let Some(kind) = self.qps[qp].pop_acknowledged(serial) {
            self.complete(kind);
        }
    }

    /// What was to be told has been told.
    fn complete(&mut self, kind: RequestKind) {
        if let RequestKind::Data { epoch, message } = kind
            && epoch == self.epoch
        {
            let message = self.outgoing[parity(epoch)].message(message);
            message.done = true;
            message.region = None;
        }
    }

    /// Where the next message of the peer shall land; unless it comes by the board, with the region that it is in
    /// and the region's keys by rail.
    pub(super) fn post_recv(
        &mut self,
        piece: Piece,
        region: Option<Arc<RegisteredMemory>>,
        keys: [u32; MAX_RAILS],
    ) -> Result<()> {
        self.check()?;
        let epoch = self.epoch;
        let incoming = &mut self.incoming[parity(epoch)];
        let (message, by_board) = incoming.post_recv(piece, region);
        if !by_board {
            let add_credits = ClearToSend { address: piece.as_ptr() as u64, len: piece.len() as u32, keys };
            self.control.write_cts(epoch, message, add_credits);
        }
        self.deliver_eager(epoch, message)
    }

    /// Whether the next landing is for a message that comes by the board.
    pub(super) fn receives_eagerly(&self, len: usize) -> bool {
        self.incoming[parity(self.epoch)].receives_eagerly(len)
    }

    /// Reports the peer's call and the messages that are through, in their order.
    pub(super) fn report(&mut self, events: &mut Events) -> Result<()> {
        let peer = self.peer;
        // Without this link in the call that this rank is in, what comes is of the next turn; if the peer is not in
        // a later call, it means another program.
        let epoch = if self.announced { self.epoch } else { self.epoch + 1 };
        if let Some(with_message) = self.incoming[parity(epoch)].unreported_call() {
            let Some(call) = self.control.read_call(epoch, with_message) else {
                return Err(self.disagree("made a call that this version does not know"));
            };
            if self.announced || call.sequence <= self.sequence {
                self.incoming[parity(epoch)].mark_call_reported();
                events.push_back(Event::PeerEntered { peer, call });
            }
        }
        if !self.announced {
            return Ok(());
        }
        let outgoing = &mut self.outgoing[parity(self.epoch)];
        while outgoing.sent < outgoing.next && outgoing.message(outgoing.sent).done {
            outgoing.sent += 1;
            events.push_back(Event::SendComplete { peer });
        }
        // What came over a queue pair that breaks belongs to its device too, until that has let go of everything.
        while !self.is_draining() && self.incoming[parity(self.epoch)].pop_completed() {
            events.push_back(Event::RecvComplete { peer });
        }
        self.check_left()
    }

    /// Whether the peer said hello over a queue pair.
    pub(super) fn hello_received(&self, qp: usize) -> bool {
        self.hellos >> qp & 1 == 1
    }

    fn disagree(&mut self, kind: &str) -> Error {
        self.fail(ErrorKind::Disagreement, kind)
    }

    fn lose(&mut self, kind: String) -> Error {
        self.fail(ErrorKind::PeerLost, &kind)
    }

    /// The link cannot be used any more; the first reason stays.
    fn fail(&mut self, kind: ErrorKind, problem: &str) -> Error {
        let error = Error::new(kind, format!("rank {} {problem}", self.peer)).with_suspect(self.peer);
        self.failure.get_or_insert(error).clone()
    }

    /// The link cannot be used any more, for a reason of this rank's own.
    pub(super) fn abort(&mut self, error: Error) {
        self.failure.get_or_insert(error);
    }
}
