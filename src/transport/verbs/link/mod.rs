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

use super::board::Board;
use super::regions::Region;
use super::wire::{EAGER, EAGER_BYTES, Grant, RAILS, WINDOW, Word, parity};
use crate::call::Call;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Piece;
use crate::rank::Rank;
use crate::transport::{Event, Events};
use incoming::Incoming;
use recovery::Pair;
use std::collections::VecDeque;
use std::sync::Arc;

/// Requests that a queue pair takes. A call has at most a window of data and of grants, the short messages, the call
/// itself; the rest is for what must be said when another pair breaks.
pub(super) const SENDS: usize = 2 * WINDOW + EAGER as usize + 28;

/// Writes of the peer's that may come over one queue pair before this rank looks: all of a call, and of the next.
pub(super) const RECEIVES: usize = 2 * SENDS;

/// What a request was about, so that it can be made again over another queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Call { turn: u64 },
    EagerCall { turn: u64, len: usize },
    Eager { turn: u64, message: u64, len: usize },
    Grants { turn: u64, from: u64, to: u64 },
    Data { turn: u64, message: u64 },
    Known { pair: usize },
    Hello,
    Bye,
    Probe,
}

impl What {
    /// Whether somebody waits for its completion.
    fn is_awaited(self) -> bool {
        !matches!(self, Self::Call { .. } | Self::EagerCall { .. } | Self::Eager { .. } | Self::Grants { .. })
    }

    /// Whether the peer must get it, over whichever queue pair.
    fn matters(self) -> bool {
        !matches!(self, Self::Hello | Self::Probe)
    }
}

/// What a request writes.
#[derive(Clone, Debug)]
pub(super) enum Payload {
    Nothing,
    /// This stretch of the outbox, to the same place of the peer's inbox.
    Board {
        offset: usize,
        len: usize,
    },
    /// A message, to where the peer granted it, under the key of its rail.
    Message {
        piece: Piece,
        region: Arc<Region>,
        address: u64,
        key: u32,
    },
}

/// An RDMA write that shall be posted.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub pair: usize,
    /// Its number on its queue pair.
    pub serial: u32,
    /// What the peer is told; nothing for a probe, which the peer does not notice.
    pub word: Option<u32>,
    pub payload: Payload,
    /// Whether somebody waits for its completion.
    pub awaited: bool,
}

/// A message on its way out.
#[derive(Debug)]
struct Message {
    piece: Piece,
    /// None for an eager one.
    region: Option<Arc<Region>>,
    /// Whether its bytes may change.
    done: bool,
}

/// What this rank sends in one turn.
#[derive(Debug, Default)]
struct Outgoing {
    call: Option<Call>,
    call_told: bool,
    /// Messages handed over, those of them that were put on a queue pair, and those reported as sent.
    posted: u64,
    next: u64,
    sent: u64,
    messages: [Option<Message>; WINDOW],
}

impl Outgoing {
    fn restart(&mut self, call: Call) {
        (self.call, self.call_told) = (Some(call), false);
        (self.posted, self.next, self.sent) = (0, 0, 0);
    }

    fn is_on_gpu(&self) -> bool {
        self.call.is_some_and(|call| call.on_gpu)
    }

    fn message(&mut self, number: u64) -> &mut Message {
        self.messages[number as usize % WINDOW].as_mut().expect("the message is within the window")
    }
}

/// The link to one peer.
#[derive(Debug)]
pub(super) struct Link {
    pub peer: Rank,
    board: Board,
    pub pairs: Vec<Pair>,
    /// The call that this rank is in.
    sequence: u64,
    /// How many calls this rank has announced on this link. A peer is at most one ahead.
    turn: u64,
    /// Whether the call that this rank is in was announced here.
    active: bool,
    outgoing: [Outgoing; 2],
    incoming: [Incoming; 2],
    /// What must be written anew, oldest first.
    again: VecDeque<What>,
    /// Queue pairs over which the peer has said hello, by bit.
    greeted: u64,
    /// Whether this rank is to say that it makes no more calls.
    leaving: bool,
    /// How often this rank has looked since the peer said that it makes no more calls.
    left: Option<u32>,
    broken: Option<Error>,
}

/// Whether a message goes by the board, in a call that is `on_gpu` or not. The board is the host's: what is on a GPU goes
/// there without it.
fn is_eager(on_gpu: bool, message: u64, len: usize) -> bool {
    !on_gpu && message < EAGER && len <= EAGER_BYTES
}

impl Link {
    /// A link to `peer` with a queue pair for each of these rails of this rank's and the peer's.
    pub(super) fn new(peer: Rank, board: Board, rails: &[(usize, usize)]) -> Self {
        Self {
            peer,
            board,
            pairs: rails.iter().map(|(mine, theirs)| Pair::new(*mine, *theirs)).collect(),
            sequence: 0,
            turn: 0,
            active: false,
            outgoing: Default::default(),
            incoming: Default::default(),
            again: VecDeque::with_capacity(SENDS),
            greeted: 0,
            leaving: false,
            left: None,
            broken: None,
        }
    }

    /// An error if the link cannot be used any more.
    pub(super) fn check(&self) -> Result<()> {
        self.broken.clone().map_or(Ok(()), Err)
    }

    /// Begins a call of this rank, which may or may not go over this link.
    pub(super) fn begin(&mut self, sequence: u64) {
        self.sequence = sequence;
        self.active = false;
    }

    /// Whether messages are under way, so that pieces are held.
    pub(super) fn is_busy(&self) -> bool {
        self.under_way() != (0, 0)
    }

    /// Whether the call that this rank is in still waits for something of the peer's.
    pub(super) fn needs(&self) -> bool {
        self.active && (self.under_way().0 > 0 || self.incoming[parity(self.turn)].lacks())
    }

    /// How many messages are under way: to the peer, and from it.
    pub(super) fn under_way(&self) -> (u64, u64) {
        let outgoing = &self.outgoing[parity(self.turn)];
        (outgoing.posted - outgoing.sent, self.incoming[parity(self.turn)].open())
    }

    /// Tells the peer what this rank calls.
    pub(super) fn announce(&mut self, call: &Call) -> Result<()> {
        self.check()?;
        self.turn += 1;
        self.active = true;
        self.outgoing[parity(self.turn)].restart(*call);
        self.incoming[parity(self.turn)].begin(call.on_gpu);
        // What comes early from now on is of the turn after this.
        self.incoming[parity(self.turn + 1)].restart();
        Ok(())
    }

    /// Whether the next message goes by the board, so that its memory need not be registered.
    pub(super) fn sends_eagerly(&self, len: usize) -> bool {
        let outgoing = &self.outgoing[parity(self.turn)];
        is_eager(outgoing.is_on_gpu(), outgoing.posted, len)
    }

    /// Takes the next message; unless it is eager, with the region that it lies in.
    pub(super) fn send(&mut self, piece: Piece, region: Option<Arc<Region>>) -> Result<()> {
        self.check()?;
        let turn = self.turn;
        let outgoing = &mut self.outgoing[parity(turn)];
        let number = outgoing.posted;
        if is_eager(outgoing.is_on_gpu(), number, piece.len()) {
            self.board.put_eager(turn, number, piece);
        }
        outgoing.messages[number as usize % WINDOW] = Some(Message { piece, region, done: false });
        outgoing.posted += 1;
        Ok(())
    }

    /// The next write to be posted, if there is one now.
    pub(super) fn next_request(&mut self) -> Result<Option<Request>> {
        if let Some(what) = self.again.front().copied().or_else(|| self.goodbye()) {
            let Some(pair) = self.pair_for(what) else { return Ok(None) };
            if self.again.pop_front().is_none() {
                self.leaving = false;
            }
            return self.request(pair, what).map(Some);
        }
        if !self.active {
            return Ok(None);
        }
        let Some((what, pair)) = self.next_what()? else { return Ok(None) };
        self.request(pair, what).map(Some)
    }

    /// What is due next, and the queue pair for it; counts it as told.
    fn next_what(&mut self) -> Result<Option<(What, usize)>> {
        let turn = self.turn;
        let (outgoing, incoming) = (&self.outgoing[parity(turn)], &mut self.incoming[parity(turn)]);
        let what = if !outgoing.call_told {
            match (outgoing.posted, &outgoing.messages[0]) {
                (1.., Some(first)) if is_eager(outgoing.is_on_gpu(), 0, first.piece.len()) => {
                    What::EagerCall { turn, len: first.piece.len() }
                }
                _ => What::Call { turn },
            }
        } else if let Some((from, to)) = incoming.untold() {
            What::Grants { turn, from, to }
        } else if outgoing.next < outgoing.posted {
            let message = outgoing.next;
            let outgoing = &mut self.outgoing[parity(turn)];
            let len = outgoing.message(message).piece.len();
            if is_eager(outgoing.is_on_gpu(), message, len) {
                What::Eager { turn, message, len }
            } else if incoming.is_granted() {
                What::Data { turn, message }
            } else {
                return Ok(None);
            }
        } else {
            return Ok(None);
        };
        let Some(pair) = self.pair_for(what) else { return Ok(None) };
        let (outgoing, incoming) = (&mut self.outgoing[parity(turn)], &mut self.incoming[parity(turn)]);
        outgoing.call_told |= matches!(what, What::Call { .. } | What::EagerCall { .. });
        if let What::EagerCall { .. } | What::Eager { .. } | What::Data { .. } = what {
            let message = outgoing.next;
            outgoing.next += 1;
            incoming.use_grant();
            if let What::Data { .. } = what {
                self.check_grant(turn, message)?;
            } else {
                // The board has it.
                outgoing.message(message).done = true;
            }
        } else if let What::Grants { to, .. } = what {
            incoming.tell(to);
        }
        Ok(Some((what, pair)))
    }

    fn check_grant(&mut self, turn: u64, message: u64) -> Result<()> {
        let granted = self.board.grant(turn, message).len as usize;
        let len = self.outgoing[parity(turn)].message(message).piece.len();
        if granted == len {
            return Ok(());
        }
        Err(self.disagree(&format!(
            "expects {granted} bytes where this rank sends {len}; do all ranks run the same version with the same settings?"
        )))
    }

    /// The queue pair that something goes over, if one has room. Messages go where the fewest bytes are waiting, so
    /// each rail carries what it can, and in turn where that is equal; all else goes over the first pair that lives,
    /// so that it stays in order.
    fn pair_for(&self, what: What) -> Option<usize> {
        let mut alive = self.pairs.iter().enumerate().filter(|(_, pair)| pair.is_alive());
        let chosen = match what {
            What::Data { .. } => alive.min_by_key(|(_, pair)| (pair.bytes, pair.carried)),
            _ => alive.next(),
        };
        chosen.filter(|(_, pair)| pair.has_room()).map(|(number, _)| number)
    }

    /// Makes a request of what shall be told, and notes that it is under way.
    fn request(&mut self, pair: usize, what: What) -> Result<Request> {
        let board = |(offset, len)| Payload::Board { offset, len };
        let (word, turn, payload) = match what {
            What::Call { turn } => {
                let call = self.outgoing[parity(turn)].call.expect("a turn has a call");
                (Some(Word::Call), turn, board(self.board.put_call(turn, &call)))
            }
            What::EagerCall { turn, len } => {
                let call = self.outgoing[parity(turn)].call.expect("a turn has a call");
                (Some(Word::EagerCall), turn, board(self.board.put_eager_call(turn, &call, len)))
            }
            What::Eager { turn, message, len } => {
                let at = self.board.layout.eager_bytes(turn, message);
                (Some(Word::Eager(message)), turn, board((at, len)))
            }
            What::Grants { turn, from, to } => {
                (Some(Word::Grants(to)), turn, board(self.board.grants(turn, from..to)))
            }
            What::Data { turn, message } => {
                let Grant { address, keys, .. } = self.board.grant(turn, message);
                let key = keys[self.pairs[pair].peer_rail];
                let Message { piece, region, .. } = self.outgoing[parity(turn)].message(message);
                let region = region.clone().expect("a message that waits for a grant has a region");
                (Some(Word::Data(message)), turn, Payload::Message { piece: *piece, region, address, key })
            }
            What::Known { pair } => {
                let known = self.pairs[pair].told.expect("a pair is told of when it is quiet");
                (Some(Word::Known(pair)), 0, board(self.board.put_known(pair, known)))
            }
            What::Hello => (Some(Word::Hello), 0, Payload::Nothing),
            What::Bye => (Some(Word::Bye), 0, Payload::Nothing),
            What::Probe => (None, 0, Payload::Nothing),
        };
        let bytes = match &payload {
            Payload::Message { piece, .. } => piece.len(),
            _ => 0,
        };
        let serial = self.pairs[pair].post(what, bytes as u64);
        let word = word.map(|word| word.pack(turn));
        Ok(Request { pair, serial, word, payload, awaited: what.is_awaited() })
    }

    /// Says hello over one queue pair.
    pub(super) fn hello(&mut self, pair: usize) -> Result<Request> {
        self.request(pair, What::Hello)
    }

    /// A request was carried out, and with it all before it on its queue pair.
    pub(super) fn sent(&mut self, pair: usize, serial: u32) {
        while let Some(what) = self.pairs[pair].acknowledged(serial) {
            self.over(what);
        }
    }

    /// What was to be told has been told.
    fn over(&mut self, what: What) {
        if let What::Data { turn, message } = what
            && turn == self.turn
        {
            let message = self.outgoing[parity(turn)].message(message);
            message.done = true;
            message.region = None;
        }
    }

    /// Where the next message of the peer shall land; unless it comes by the board, with the region that it is in
    /// and the region's keys by rail.
    pub(super) fn land(
        &mut self,
        piece: Piece,
        region: Option<Arc<Region>>,
        keys: [u32; RAILS],
    ) -> Result<()> {
        self.check()?;
        let turn = self.turn;
        let incoming = &mut self.incoming[parity(turn)];
        let (message, by_board) = incoming.land(piece, region);
        if !by_board {
            let grant = Grant { address: piece.as_ptr() as u64, len: piece.len() as u32, keys };
            self.board.put_grant(turn, message, grant);
        }
        self.take_eager(turn, message)
    }

    /// Whether the next landing is for a message that comes by the board.
    pub(super) fn lands_eagerly(&self, len: usize) -> bool {
        self.incoming[parity(self.turn)].lands_eagerly(len)
    }

    /// Reports the peer's call and the messages that are through, in their order.
    pub(super) fn report(&mut self, events: &mut Events) -> Result<()> {
        let peer = self.peer;
        // Without this link in the call that this rank is in, what comes is of the next turn; if the peer is not in
        // a later call, it means another program.
        let turn = if self.active { self.turn } else { self.turn + 1 };
        if let Some(with_message) = self.incoming[parity(turn)].unreported_call() {
            let Some(call) = self.board.call(turn, with_message) else {
                return Err(self.disagree("made a call that this version does not know"));
            };
            if self.active || call.sequence <= self.sequence {
                self.incoming[parity(turn)].reported();
                events.push_back(Event::PeerEntered { peer, call });
            }
        }
        if !self.active {
            return Ok(());
        }
        let outgoing = &mut self.outgoing[parity(self.turn)];
        while outgoing.sent < outgoing.next && outgoing.message(outgoing.sent).done {
            outgoing.sent += 1;
            events.push_back(Event::SendComplete { peer });
        }
        // What came over a queue pair that breaks belongs to its device too, until that has let go of everything.
        while !self.is_breaking() && self.incoming[parity(self.turn)].pop_landed() {
            events.push_back(Event::RecvComplete { peer });
        }
        self.check_left()
    }

    /// Whether the peer said hello over a queue pair.
    pub(super) fn is_greeted(&self, pair: usize) -> bool {
        self.greeted >> pair & 1 == 1
    }

    fn disagree(&mut self, what: &str) -> Error {
        self.fail(ErrorKind::Disagreement, what)
    }

    fn lose(&mut self, what: String) -> Error {
        self.fail(ErrorKind::PeerLost, &what)
    }

    /// The link cannot be used any more; the first reason stays.
    fn fail(&mut self, kind: ErrorKind, what: &str) -> Error {
        let error = Error::new(kind, format!("rank {} {what}", self.peer)).blaming(self.peer);
        self.broken.get_or_insert(error).clone()
    }

    /// The link cannot be used any more, for a reason of this rank's own.
    pub(super) fn give_up(&mut self, error: Error) {
        self.broken.get_or_insert(error);
    }
}
