//! One peer: the brain of its link, and the queue pairs that carry out what it says.
//!
//! Owns the way from a request to a device and from a completion back. Must not know other peers.

use super::board::Board;
use super::link::{Link, Payload, Request, SENDS};
use super::objects::{Completion, Connected, Endpoint, Fresh, QueuePair, Route, WriteRequest};
use super::regions::Region;
use super::wire::RAILS;
use crate::call::Rank;
use crate::error::{Error, ErrorKind, Result};
use crate::transport::Events;
use memmap2::MmapMut;
use std::sync::Arc;

/// What a peer must know to write to this rank: one queue pair's end per connection, and where its board is.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Invitation {
    pub endpoints: Vec<Endpoint>,
    pub address: u64,
    /// By rail of the rank that invites.
    pub keys: [u32; RAILS],
}

/// The boards of all links of a rank. They live as long as any link does.
pub(super) struct Boards {
    pub inboxes: Arc<Region>,
    pub outboxes: Arc<Region>,
    /// What both are in; goes last.
    pub _memory: MmapMut,
}

/// The boards of this rank, and the inbox of the peer as requests name it.
struct Mailing {
    boards: Arc<Boards>,
    address: u64,
    keys: [u32; RAILS],
}

/// Requests without a completion that somebody waits for, after which one is asked for all the same, so that the
/// device's queue is emptied.
const UNSIGNALLED: u32 = SENDS as u32 / 4;

/// One peer of a connected rank.
pub(super) struct Peer {
    pub link: Link,
    pairs: Vec<QueuePair<Connected>>,
    /// By pair: what was posted since the last completion was asked for.
    unsignalled: Vec<u32>,
    mailing: Mailing,
    board: Board,
    /// What is posted next, by pair: room that is used again and again.
    batches: Vec<Vec<WriteRequest>>,
    /// Whether the next poll looks here.
    pub enlisted: bool,
}

/// Numbers of work requests tell link, pair, whether it is a receive, and which of the pair's requests it is.
fn id(place: usize, pair: usize, receive: bool, serial: u32) -> u64 {
    (place as u64) << 40 | (pair as u64) << 33 | u64::from(receive) << 32 | u64::from(serial)
}

/// The link that a completion belongs to.
pub(super) fn place_of(id: u64) -> usize {
    (id >> 40) as usize
}

impl Peer {
    /// Connects the queue pairs to the peer's.
    ///
    /// # Errors
    /// `System` if a device refuses.
    pub(super) fn connect(
        place: usize,
        link: Link,
        board: Board,
        boards: &Arc<Boards>,
        fresh: Vec<(QueuePair<Fresh>, Route)>,
        theirs: &Invitation,
    ) -> Result<Self> {
        let peer = link.peer;
        if theirs.endpoints.len() != fresh.len() {
            let words = format!(
                "rank {peer} has {} queue pairs for this rank's {}",
                theirs.endpoints.len(),
                fresh.len()
            );
            return Err(Error::new(ErrorKind::Disagreement, words));
        }
        let pairs: Vec<_> = fresh
            .into_iter()
            .zip(&theirs.endpoints)
            .enumerate()
            .map(|(number, ((pair, route), end))| pair.connect(id(place, number, true, 0), *end, &route))
            .collect::<Result<_>>()?;
        Ok(Self {
            unsignalled: vec![0; pairs.len()],
            batches: pairs.iter().map(|_| Vec::with_capacity(SENDS)).collect(),
            mailing: Mailing { boards: Arc::clone(boards), address: theirs.address, keys: theirs.keys },
            link,
            pairs,
            board,
            enlisted: false,
        })
    }

    /// Takes a completion of this peer's.
    pub(super) fn completed(&mut self, completion: &Completion) -> Result<()> {
        let Completion { id, outcome } = *completion;
        let (pair, receive, serial) = ((id >> 33 & 0x7f) as usize, id >> 32 & 1 == 1, id as u32);
        if pair >= self.pairs.len() {
            // Its queue pair was given up.
            return Ok(());
        }
        match outcome {
            Ok(Some((word, len))) => {
                if self.link.pairs[pair].is_alive()
                    && let Err(error) = self.pairs[pair].receive(id)
                {
                    self.break_off(pair, &error);
                }
                if !self.link.pairs[pair].is_alive() {
                    self.link.receive_gone(pair);
                }
                self.link.received(pair, word, len)?;
            }
            Ok(None) => self.link.sent(pair, serial),
            Err(status) => {
                if receive {
                    self.link.receive_gone(pair);
                } else {
                    self.link.failed(pair, serial);
                }
                let words = format!("a {} ended with: {status}", if receive { "receive" } else { "write" });
                self.break_off(pair, &Error::new(ErrorKind::PeerLost, words));
            }
        }
        Ok(())
    }

    /// Breaks a queue pair off for a reason, unless that was done before.
    pub(super) fn break_off(&mut self, pair: usize, cause: &Error) {
        if self.link.break_pair(pair, cause)
            && let Err(error) = self.pairs[pair].break_off()
        {
            log::warn!("verbs: {}", error.message());
        }
    }

    /// Breaks off all queue pairs of a rail.
    pub(super) fn break_off_rail(&mut self, rail: usize, cause: &Error) {
        for pair in 0..self.pairs.len() {
            if self.link.pairs[pair].rail == rail {
                self.break_off(pair, cause);
            }
        }
    }

    /// Posts what is due, and reports what is through.
    pub(super) fn step(&mut self, place: usize, events: &mut Events) -> Result<bool> {
        let before = events.len();
        let moved = self.flush(place)?;
        self.link.report(events)?;
        self.link.check()?;
        Ok(moved || events.len() > before)
    }

    /// Posts what is due. `true` if there was anything.
    pub(super) fn flush(&mut self, place: usize) -> Result<bool> {
        while let Some(pair) = self.link.to_break_off() {
            let words = "the peer has broken its end off";
            self.break_off(pair, &Error::new(ErrorKind::PeerLost, words));
        }
        self.link.settle();
        let mut any = false;
        while let Some(request) = self.link.next_request()? {
            any = true;
            self.enqueue(place, &request)?;
        }
        self.post();
        Ok(any)
    }

    /// Posts one request at once.
    pub(super) fn post_now(&mut self, place: usize, request: &Request) -> Result<()> {
        self.enqueue(place, request)?;
        self.post();
        Ok(())
    }

    /// Puts a request to those that are posted next.
    fn enqueue(&mut self, place: usize, request: &Request) -> Result<()> {
        let (pair, peer_rail) = (request.pair, self.link.pairs[request.pair].peer_rail);
        let rail = self.link.pairs[pair].rail;
        let (from, len, lkey, to, rkey) = match &request.payload {
            Payload::Nothing => (0, 0, 0, self.mailing.address, self.mailing.keys[peer_rail]),
            Payload::Board { offset, len } => {
                let from = self.board.outgoing(*offset, *len).as_ptr() as u64;
                let to = self.mailing.address + *offset as u64;
                (
                    from,
                    *len as u32,
                    self.mailing.boards.outboxes.lkey(rail)?,
                    to,
                    self.mailing.keys[peer_rail],
                )
            }
            Payload::Message { piece, region, address, key } => {
                (piece.as_ptr() as u64, piece.len() as u32, region.lkey(rail)?, *address, *key)
            }
        };
        self.unsignalled[pair] += 1;
        let signalled = request.awaited || self.unsignalled[pair] >= UNSIGNALLED;
        let batch = &mut self.batches[pair];
        if signalled {
            self.unsignalled[pair] = 0;
            // Completions come in order: the last one in a chain tells of all.
            if let Some(before) = batch.last_mut() {
                before.signalled = false;
            }
        }
        let id = id(place, pair, false, request.serial);
        batch.push(WriteRequest { id, from, len, lkey, to, rkey, immediate: request.word, signalled });
        Ok(())
    }

    fn post(&mut self) {
        for pair in 0..self.batches.len() {
            if self.batches[pair].is_empty() {
                continue;
            }
            // A rail may break while its batch is made.
            let posted = self.pairs[pair].post(&self.batches[pair]);
            if let Err((taken, error)) = posted {
                self.link.withdraw(pair, self.batches[pair][taken].id as u32);
                self.break_off(pair, &error);
            }
            self.batches[pair].clear();
        }
    }

    /// Breaks all queue pairs off: their devices carry out nothing more that peers ask for.
    ///
    /// # Errors
    /// `System` if a device refuses even that; such a queue pair must be destroyed.
    pub(super) fn break_off_all(&mut self, error: &Error) -> Result<()> {
        for (number, pair) in self.pairs.iter_mut().enumerate() {
            if self.link.pairs[number].is_alive() {
                self.link.break_pair(number, error);
                pair.break_off()?;
            }
        }
        Ok(())
    }

    /// Destroys all queue pairs.
    pub(super) fn destroy(&mut self) {
        self.pairs.clear();
    }

    /// Whether devices have let go of everything.
    pub(super) fn is_quiet(&self) -> bool {
        self.pairs.is_empty() || self.link.pairs.iter().all(|pair| pair.is_let_go())
    }

    /// Which rank this is.
    pub(super) fn rank(&self) -> Rank {
        self.link.peer
    }

    /// How many connections there are.
    pub(super) fn connections(&self) -> usize {
        self.pairs.len()
    }
}
