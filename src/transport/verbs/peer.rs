//! One peer: the brain of its link, and the queue pairs that carry out what it says.
//!
//! Owns the way from a request to a device and from a completion back. Must not know other peers.

#[cfg(test)]
mod tests;

use super::board::Board;
use super::link::{Link, Payload, Request, SENDS};
use super::objects::{
    Completion, Connected, Endpoint, Fresh, PathAttributes, QueuePair, WcStatus, WriteRequest,
};
use super::regions::Region;
use super::wire::RAILS;
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;
use crate::transport::Events;
use memmap2::MmapMut;
use std::collections::VecDeque;
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
    /// Where it is among the rank's peers.
    place: usize,
    /// Before the link, which holds regions: a driver may wait in deregistering one until no queue pair is at work there.
    pairs: Vec<QueuePair<Connected>>,
    pub link: Link,
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
        fresh: Vec<(QueuePair<Fresh>, PathAttributes)>,
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
            .map(|(number, ((pair, path), end))| pair.connect(id(place, number, true, 0), *end, &path))
            .collect::<Result<_>>()?;
        Ok(Self {
            place,
            unsignalled: vec![0; pairs.len()],
            batches: pairs.iter().map(|_| Vec::with_capacity(SENDS)).collect(),
            mailing: Mailing { boards: Arc::clone(boards), address: theirs.address, keys: theirs.keys },
            link,
            pairs,
            board,
            enlisted: false,
        })
    }

    /// Puts this peer on the list of those that the next poll looks at, unless it is there.
    pub(super) fn enlist(&mut self, list: &mut VecDeque<usize>) {
        if !std::mem::replace(&mut self.enlisted, true) {
            list.push_back(self.place);
        }
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
                if self.link.received_one(pair)
                    && let Err(error) = self.pairs[pair].post_recv(id)
                {
                    self.break_off(pair, &error);
                    // Nor will there be a completion for it.
                    self.link.received_one(pair);
                }
                self.link.received(pair, word, len)?;
            }
            Ok(None) => self.link.sent(pair, serial),
            Err(status) => {
                let words = format!("a {} ended with: {status}", if receive { "receive" } else { "write" });
                let error = Error::new(ErrorKind::PeerLost, words);
                self.break_off(pair, &error);
                if !receive {
                    self.link.failed(pair, serial);
                } else {
                    self.link.received_one(pair);
                    if status != WcStatus::FLUSHED {
                        // Something came, nobody knows what, and the peer may think that it is known here.
                        self.give_out(&error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Breaks a queue pair off for a reason, unless that was done before.
    pub(super) fn break_off(&mut self, pair: usize, cause: &Error) {
        if !self.link.break_pair(pair, cause) {
            return;
        }
        if let Err(error) = self.end(pair) {
            log::warn!("verbs: {}", error.message());
            // What came and what did not will never be known.
            self.give_out(&error);
        }
    }

    /// Breaks a queue pair off, and has its device tell when it has let go of all requests.
    fn end(&mut self, pair: usize) -> Result<()> {
        self.pairs[pair].move_to_error()?;
        let mark = self.link.mark_end(pair)?;
        let posted = self
            .write_request(&mark, true)
            .and_then(|mark| self.pairs[pair].post_send(&[mark]).map_err(|(_, error)| error));
        posted.inspect_err(|_| self.link.withdraw(pair, mark.serial))
    }

    /// Breaks all queue pairs off, so that the peer notices too.
    fn give_out(&mut self, cause: &Error) {
        self.link.give_out(cause);
        for (number, pair) in self.pairs.iter_mut().enumerate() {
            if self.link.break_pair(number, cause)
                && let Err(error) = pair.move_to_error()
            {
                log::warn!("verbs: {}", error.message());
            }
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
    pub(super) fn step(&mut self, events: &mut Events) -> Result<bool> {
        let before = events.len();
        let moved = self.flush()?;
        self.link.report(events)?;
        self.link.check_needed()?;
        Ok(moved || events.len() > before)
    }

    /// Posts what is due. `true` if there was anything.
    fn flush(&mut self) -> Result<bool> {
        while let Some(pair) = self.link.to_break_off() {
            let words = "the peer has broken its end off";
            self.break_off(pair, &Error::new(ErrorKind::PeerLost, words));
        }
        for pair in self.link.let_go() {
            // Else a driver may wait in deregistering what the last write was for: rxe waits 50 s.
            if let Err(error) = self.pairs[pair].reset() {
                log::debug!("verbs: {}", error.message());
            }
        }
        self.link.settle();
        let mut any = false;
        while let Some(request) = self.link.next_request()? {
            any = true;
            self.enqueue(&request)?;
        }
        self.post();
        Ok(any)
    }

    /// Posts one request at once.
    pub(super) fn post_now(&mut self, request: &Request) -> Result<()> {
        self.enqueue(request)?;
        self.post();
        Ok(())
    }

    /// A request as the device is told it.
    fn write_request(&self, request: &Request, signalled: bool) -> Result<WriteRequest> {
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
        let id = id(self.place, pair, false, request.serial);
        Ok(WriteRequest { id, from, len, lkey, to, rkey, immediate: request.word, signalled })
    }

    /// Puts a request to those that are posted next.
    fn enqueue(&mut self, request: &Request) -> Result<()> {
        let pair = request.pair;
        self.unsignalled[pair] += 1;
        let signalled = request.awaited || self.unsignalled[pair] >= UNSIGNALLED;
        let write = self.write_request(request, signalled)?;
        let batch = &mut self.batches[pair];
        if signalled {
            self.unsignalled[pair] = 0;
            // Completions come in order: the last one in a chain tells of all.
            if let Some(before) = batch.last_mut() {
                before.signalled = false;
            }
        }
        batch.push(write);
        Ok(())
    }

    fn post(&mut self) {
        for pair in 0..self.batches.len() {
            if self.batches[pair].is_empty() {
                continue;
            }
            // A rail may break while its batch is made.
            let posted = self.pairs[pair].post_send(&self.batches[pair]);
            if let Err((taken, error)) = posted {
                self.link.withdraw(pair, self.batches[pair][taken].id as u32);
                self.break_off(pair, &error);
            }
            self.batches[pair].clear();
        }
    }

    /// The link is given up: all queue pairs are broken off, so that their devices carry out nothing more that peers
    /// ask for. One that cannot even be broken off is destroyed, which may take a while.
    pub(super) fn give_up(&mut self, reason: &Error) {
        self.link.give_up(reason.clone());
        for pair in 0..self.pairs.len() {
            if self.link.break_pair(pair, reason) && self.end(pair).is_err() {
                self.pairs.clear();
                return;
            }
        }
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
