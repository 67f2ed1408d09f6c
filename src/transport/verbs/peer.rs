//! One peer: the brain of its link, and the queue pairs that carry out what it says.
//!
//! Owns the way from a request to a device and from a completion back. Must not know other peers.

#[cfg(test)]
mod tests;

use super::control_buffer::ControlBuffer;
use super::link::{Link, LinkRequest, Payload, SEND_DEPTH};
use super::objects::{
    Completion, Connected, Endpoint, Fresh, PathAttributes, QueuePair, WcStatus, WriteRequest,
};
use super::registry::RegisteredMemory;
use super::wire::MAX_RAILS;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::transport::Events;
use memmap2::MmapMut;
use std::collections::VecDeque;
use std::sync::Arc;

/// What a peer must know to write to this rank: one queue pair's end per connection, and where its board is.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct LinkConnectInfo {
    pub endpoints: Vec<Endpoint>,
    pub address: u64,
    /// By rail of the rank that invites.
    pub keys: [u32; MAX_RAILS],
}

/// The boards of all links of a rank. They live as long as any link does.
pub(super) struct ControlMemory {
    pub remote: Arc<RegisteredMemory>,
    pub local: Arc<RegisteredMemory>,
    /// What both are in; goes last.
    pub _memory: MmapMut,
}

/// The boards of this rank, and the inbox of the peer as requests name it.
struct ControlTarget {
    controls: Arc<ControlMemory>,
    address: u64,
    keys: [u32; MAX_RAILS],
}

/// Requests without a completion that somebody waits for, after which one is asked for all the same, so that the
/// device's queue is emptied.
const UNSIGNALLED: u32 = SEND_DEPTH as u32 / 4;

/// One peer of a connected rank.
pub(super) struct Peer {
    /// Where it is among the rank's peers.
    index: usize,
    /// Before the link, which holds regions: a driver may wait in deregistering one until no queue pair is at work there.
    qps: Vec<QueuePair<Connected>>,
    pub link: Link,
    /// By pair: what was posted since the last completion was asked for.
    unsignalled: Vec<u32>,
    target: ControlTarget,
    control: ControlBuffer,
    /// What is posted next, by pair: room that is used again and again.
    batches: Vec<Vec<WriteRequest>>,
    /// Whether the next poll looks here.
    pub scheduled: bool,
}

/// Numbers of work requests tell link, pair, whether it is a receive, and which of the pair's requests it is.
fn id(index: usize, qp: usize, receive: bool, serial: u32) -> u64 {
    (index as u64) << 40 | (qp as u64) << 33 | u64::from(receive) << 32 | u64::from(serial)
}

/// The link that a completion belongs to.
pub(super) fn peer_index_of(id: u64) -> usize {
    (id >> 40) as usize
}

impl Peer {
    /// Connects the queue pairs to the peer's.
    ///
    /// # Errors
    /// `System` if a device refuses.
    pub(super) fn connect(
        index: usize,
        link: Link,
        control: ControlBuffer,
        controls: &Arc<ControlMemory>,
        fresh: Vec<(QueuePair<Fresh>, PathAttributes)>,
        theirs: &LinkConnectInfo,
    ) -> Result<Self> {
        let peer = link.peer;
        if theirs.endpoints.len() != fresh.len() {
            let words = format!(
                "rank {peer} has {} queue pairs for this rank's {}",
                theirs.endpoints.len(),
                fresh.len()
            );
            return Err(Error::disagreement(words));
        }
        let qps: Vec<_> = fresh
            .into_iter()
            .zip(&theirs.endpoints)
            .enumerate()
            .map(|(number, ((qp, path), end))| qp.connect(id(index, number, true, 0), *end, &path))
            .collect::<Result<_>>()?;
        Ok(Self {
            index,
            unsignalled: vec![0; qps.len()],
            batches: qps.iter().map(|_| Vec::with_capacity(SEND_DEPTH)).collect(),
            target: ControlTarget {
                controls: Arc::clone(controls),
                address: theirs.address,
                keys: theirs.keys,
            },
            link,
            qps,
            control,
            scheduled: false,
        })
    }

    /// Puts this peer on the list of those that the next poll looks at, unless it is there.
    pub(super) fn schedule(&mut self, list: &mut VecDeque<usize>) {
        if !std::mem::replace(&mut self.scheduled, true) {
            list.push_back(self.index);
        }
    }

    /// Takes a completion of this peer's.
    pub(super) fn handle_completion(&mut self, completion: &Completion) -> Result<()> {
        let Completion { id, outcome } = *completion;
        let (qp, receive, serial) = ((id >> 33 & 0x7f) as usize, id >> 32 & 1 == 1, id as u32);
        if qp >= self.qps.len() {
            // Its queue pair was given up.
            return Ok(());
        }
        match outcome {
            Ok(Some((word, len))) => {
                if self.link.recv_completed(qp)
                    && let Err(error) = self.qps[qp].post_recv(id)
                {
                    self.break_qp(qp, &error);
                    // Nor will there be a completion for it.
                    self.link.recv_completed(qp);
                }
                self.link.received(qp, word, len)?;
            }
            Ok(None) => self.link.write_completed(qp, serial),
            Err(status) => {
                let words = format!("a {} ended with: {status}", if receive { "receive" } else { "write" });
                let error = Error::peer_lost(words);
                self.break_qp(qp, &error);
                if !receive {
                    self.link.write_failed(qp, serial);
                } else {
                    self.link.recv_completed(qp);
                    if status != WcStatus::FLUSHED {
                        // Something came, nobody knows what, and the peer may think that it is known here.
                        self.break_all(&error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Breaks a queue pair off for a reason, unless that was done before.
    pub(super) fn break_qp(&mut self, qp: usize, cause: &Error) {
        if !self.link.break_qp(qp, cause) {
            return;
        }
        if let Err(error) = self.begin_drain(qp) {
            log::warn!("verbs: {}", error.message());
            // What came and what did not will never be known.
            self.break_all(&error);
        }
    }

    /// Breaks a queue pair off, and has its device tell when it has let go of all requests.
    fn begin_drain(&mut self, qp: usize) -> Result<()> {
        self.qps[qp].move_to_error()?;
        let mark = self.link.drain_marker(qp)?;
        let posted = self
            .write_request(&mark, true)
            .and_then(|mark| self.qps[qp].post_send(&[mark]).map_err(|(_, error)| error));
        posted.inspect_err(|_| self.link.unpost(qp, mark.serial))
    }

    /// Breaks all queue pairs off, so that the peer notices too.
    fn break_all(&mut self, cause: &Error) {
        self.link.mark_unreachable(cause);
        for (number, qp) in self.qps.iter_mut().enumerate() {
            if self.link.break_qp(number, cause)
                && let Err(error) = qp.move_to_error()
            {
                log::warn!("verbs: {}", error.message());
            }
        }
    }

    /// Breaks off all queue pairs of a rail.
    pub(super) fn break_rail(&mut self, rail: usize, cause: &Error) {
        for qp in 0..self.qps.len() {
            if self.link.qps[qp].rail == rail {
                self.break_qp(qp, cause);
            }
        }
    }

    /// Posts what is due, and reports what is through.
    pub(super) fn progress(&mut self, events: &mut Events) -> Result<bool> {
        let before = events.len();
        let moved = self.post_due()?;
        self.link.report(events)?;
        self.link.check_if_needed()?;
        Ok(moved || events.len() > before)
    }

    /// Posts what is due. `true` if there was anything.
    fn post_due(&mut self) -> Result<bool> {
        while let Some(qp) = self.link.next_qp_to_break() {
            let words = "the peer has broken its end off";
            self.break_qp(qp, &Error::peer_lost(words));
        }
        for qp in self.link.newly_flushed() {
            // Else a driver may wait in deregistering what the last write was for: rxe waits 50 s.
            if let Err(error) = self.qps[qp].reset() {
                log::debug!("verbs: {}", error.message());
            }
        }
        self.link.recover();
        let mut any = false;
        while let Some(request) = self.link.next_request()? {
            any = true;
            self.enqueue(&request)?;
        }
        self.post_batches();
        Ok(any)
    }

    /// Posts one request at once.
    pub(super) fn post_now(&mut self, request: &LinkRequest) -> Result<()> {
        self.enqueue(request)?;
        self.post_batches();
        Ok(())
    }

    /// A request as the device is told it.
    fn write_request(&self, request: &LinkRequest, signalled: bool) -> Result<WriteRequest> {
        let (qp, peer_rail) = (request.qp, self.link.qps[request.qp].peer_rail);
        let rail = self.link.qps[qp].rail;
        let (from, len, lkey, to, rkey) = match &request.payload {
            Payload::Nothing => (0, 0, 0, self.target.address, self.target.keys[peer_rail]),
            Payload::ControlBuffer { offset, len } => {
                let from = self.control.local_entry(*offset, *len).as_ptr() as u64;
                let to = self.target.address + *offset as u64;
                (from, *len as u32, self.target.controls.local.lkey(rail)?, to, self.target.keys[peer_rail])
            }
            Payload::Message { piece, region, address, key } => {
                (piece.as_ptr() as u64, piece.len() as u32, region.lkey(rail)?, *address, *key)
            }
        };
        let id = id(self.index, qp, false, request.serial);
        Ok(WriteRequest { id, from, len, lkey, to, rkey, immediate: request.imm, signalled })
    }

    /// Puts a request to those that are posted next.
    fn enqueue(&mut self, request: &LinkRequest) -> Result<()> {
        let qp = request.qp;
        self.unsignalled[qp] += 1;
        let signalled = request.needs_completion || self.unsignalled[qp] >= UNSIGNALLED;
        let write = self.write_request(request, signalled)?;
        let batch = &mut self.batches[qp];
        if signalled {
            self.unsignalled[qp] = 0;
            // Completions come in order: the last one in a chain tells of all.
            if let Some(before) = batch.last_mut() {
                before.signalled = false;
            }
        }
        batch.push(write);
        Ok(())
    }

    fn post_batches(&mut self) {
        for qp in 0..self.batches.len() {
            if self.batches[qp].is_empty() {
                continue;
            }
            // A rail may break while its batch is made.
            let posted = self.qps[qp].post_send(&self.batches[qp]);
            if let Err((taken, error)) = posted {
                self.link.unpost(qp, self.batches[qp][taken].id as u32);
                self.break_qp(qp, &error);
            }
            self.batches[qp].clear();
        }
    }

    /// The link is given up: all queue pairs are broken off, so that their devices carry out nothing more that peers
    /// ask for. One that cannot even be broken off is destroyed, which may take a while.
    pub(super) fn abort(&mut self, reason: &Error) {
        self.link.abort(reason.clone());
        for qp in 0..self.qps.len() {
            if self.link.break_qp(qp, reason) && self.begin_drain(qp).is_err() {
                self.qps.clear();
                return;
            }
        }
    }

    /// Whether devices have let go of everything.
    pub(super) fn is_flushed(&self) -> bool {
        self.qps.is_empty() || self.link.qps.iter().all(|qp| qp.is_flushed())
    }

    /// Which rank this is.
    pub(super) fn rank(&self) -> Rank {
        self.link.peer
    }

    /// How many connections there are.
    pub(super) fn qp_count(&self) -> usize {
        self.qps.len()
    }
}
