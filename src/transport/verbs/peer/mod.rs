//! One peer: its link, and the queue pairs that carry out the link's requests.
//!
//! Owns the path of a request to a device and of a completion back.

mod reconnect;
mod slot;
#[cfg(test)]
mod tests;

use super::connect_info::{ConnectInfo, LinkConnectInfo};
use super::control_buffer::ControlBuffer;
use super::link::{Link, LinkRequest, Payload, SEND_DEPTH, WORK_REQUESTS};
use super::objects::{Completion, Endpoint, Fresh, PathAttributes, QueuePair, WriteRequest};
use super::rail_counters::RailCounters;
use super::registry::RegisteredMemory;
use super::wire::MAX_RAILS;
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::transport::Events;
use memmap2::MmapMut;
use slot::PeerQp;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The memory of the control buffers of links that were made together. Lives as long as any of them does.
pub(super) struct ControlMemory {
    /// The remote sides of all control buffers, which peers write to by RDMA.
    pub remote: Arc<RegisteredMemory>,
    /// The local sides of all control buffers: the sources of this rank's RDMA writes.
    pub local: Arc<RegisteredMemory>,
    /// Contains both sides, so it is dropped last.
    pub _memory: MmapMut,
}

/// Where requests for the control buffer read from and write to.
struct ControlTarget {
    controls: Arc<ControlMemory>,
    /// Address of the remote side of the peer's control buffer. 0 until the queue pairs are connected, as are
    /// the keys.
    address: u64,
    /// Remote keys of that side, by the peer's rail.
    keys: [u32; MAX_RAILS],
}

/// After this many requests without a completion, one is requested anyway, so that the device's send queue
/// empties.
const UNSIGNALLED: u32 = SEND_DEPTH as u32 / 4;

/// How long an aborted link waits for the devices to flush all requests and receives.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// One peer of a connected rank.
pub(super) struct Peer {
    /// Index among the rank's peers.
    index: usize,
    /// Whether the queue pairs of both ends are connected, so that this rank may write.
    is_ready: bool,
    /// Empty until they are connected. Dropped before the link, which holds memory regions:
    /// deregistering one may wait in the driver until no queue pair uses it.
    qps: Vec<PeerQp>,
    pub link: Link,
    /// By queue pair: requests posted since the last one with a completion.
    unsignalled: Vec<u32>,
    target: ControlTarget,
    control: ControlBuffer,
    /// By queue pair: requests to post next. The vectors are reused.
    batches: Vec<Vec<WriteRequest>>,
    /// By rail.
    counters: Arc<[RailCounters]>,
    /// How long this rank waits for a rail while no queue pair works, how long it has waited, and its last
    /// look.
    patience: Duration,
    waited: Duration,
    last_look: Option<Instant>,
    /// Whether the peer was sent a message that this end of the link has failed.
    is_failure_sent: bool,
    /// Whether the peer is in the run queue.
    pub scheduled: bool,
}

/// The work request identifier for a peer's queue pair: of its receives by generation, or of one of its
/// writes by serial.
fn wr_id(index: usize, qp: usize, receive: bool, serial: u32) -> u64 {
    (index as u64) << 40 | (qp as u64) << 33 | u64::from(receive) << 32 | u64::from(serial)
}

/// Index of the peer that a work request identifier belongs to.
pub(super) fn peer_index_of(id: u64) -> usize {
    (id >> 40) as usize
}

/// Why devices have failed, in one message.
pub(super) fn list_failures<'a>(causes: impl IntoIterator<Item = &'a Error>) -> String {
    let causes: Vec<&str> = causes.into_iter().map(Error::message).collect();
    causes.join("; ")
}

impl Peer {
    /// A peer whose queue pairs are not connected.
    pub(super) fn new(
        index: usize,
        link: Link,
        control: ControlBuffer,
        controls: &Arc<ControlMemory>,
        counters: &Arc<[RailCounters]>,
    ) -> Self {
        let qps = link.qps.len();
        Self {
            index,
            is_ready: false,
            unsignalled: vec![0; qps],
            batches: (0..qps).map(|_| Vec::with_capacity(WORK_REQUESTS)).collect(),
            target: ControlTarget { controls: Arc::clone(controls), address: 0, keys: [0; MAX_RAILS] },
            link,
            qps: Vec::new(),
            control,
            counters: Arc::clone(counters),
            patience: Duration::ZERO,
            waited: Duration::ZERO,
            last_look: None,
            is_failure_sent: false,
            scheduled: false,
        }
    }

    /// Connects the queue pairs to their ends at the peer over these paths. The peer has published `info` and
    /// `link_info`. Queue pairs of rails that have failed, by the reasons in `failures` by rail, are
    /// destroyed instead.
    ///
    /// # Errors
    /// The index of the first queue pair that its device refuses to connect, and why. One whose rail may have
    /// failed is broken instead, and connected later.
    pub(super) fn connect(
        &mut self,
        fresh: Vec<QueuePair<Fresh>>,
        paths: &[(Endpoint, PathAttributes)],
        (info, link_info): (&ConnectInfo, &LinkConnectInfo),
        failures: &[Option<Error>],
    ) -> std::result::Result<(), (usize, Error)> {
        let mut qps = Vec::with_capacity(fresh.len());
        for (number, (qp, (end, path))) in fresh.into_iter().zip(paths).enumerate() {
            let failure = failures.get(self.link.qps[number].rail).and_then(Option::as_ref);
            if let Some(cause) = failure {
                // The peer hears that it is broken here, over another queue pair.
                self.link.break_qp(number, cause);
                self.link.destroyed(number);
                qps.push(PeerQp::unconnected(qp, *path));
                continue;
            }
            let spec = qp.spec();
            match qp.connect(wr_id(self.index, number, true, 0), *end, path) {
                Ok(connected) => qps.push(PeerQp::new(connected, *path)),
                // Its rail may have failed, and begins with a hello: over RoCE, the address of a peer that
                // cannot be reached is not resolved. It is connected later.
                Err(cause) if !self.link.qps[number].is_proven() => {
                    self.link.break_qp(number, &cause);
                    self.link.destroyed(number);
                    qps.push(PeerQp::lost(spec, *path));
                }
                Err(error) => return Err((number, error)),
            }
        }
        self.qps = qps;
        // A wrong address is refused by the peer's device, as the keys are those of its control buffers only.
        self.target.address = info.address.wrapping_add(link_info.offset);
        self.target.keys = info.keys;
        Ok(())
    }

    /// The queue pairs are connected at the peer's end, too. Queue pairs of rails that may have failed begin
    /// with a hello.
    ///
    /// # Errors
    /// Those of posting.
    pub(super) fn set_ready(&mut self) -> Result<()> {
        self.is_ready = true;
        for qp in 0..self.link.qps.len() {
            let generation = self.link.qps[qp].generation;
            if self.link.needs_hello(qp, generation) {
                self.greet(qp)?;
            }
        }
        Ok(())
    }

    /// Posts a hello over a queue pair, and a trial.
    ///
    /// # Errors
    /// Those of posting.
    pub(super) fn greet(&mut self, qp: usize) -> Result<()> {
        let hello = self.link.hello(qp)?;
        self.post_now(&hello)?;
        let trial = self.link.trial(qp)?;
        self.post_now(&trial)
    }

    /// Where a queue pair is, for messages.
    fn ends(&self, qp: usize) -> String {
        self.qps[qp].connected.as_ref().map(QueuePair::ends).unwrap_or_default()
    }

    /// What a queue pair whose trial is lost says.
    fn trial_loss(&self, qp: usize) -> String {
        let path = &self.qps[qp].reconnection.path;
        format!(
            "packets of {} bytes get lost where short ones arrive: is the MTU of a switch smaller than that of the ports?",
            128u32 << path.mtu
        )
    }

    /// The trial of a queue pair is lost, so the next one has packets of half the length. When planned links
    /// are made, rank 0 decides that for all.
    fn note_lost_trial(&mut self, qp: usize, error: &Error) {
        let is_planned = self.link.qps[qp].is_proven();
        if !is_planned {
            let mtu = &mut self.qps[qp].reconnection.path.mtu;
            *mtu = mtu.saturating_sub(1).max(1);
        }
        if self.qps[qp].lost_trial.replace(error.clone()).is_none() && !is_planned {
            log::warn!(
                "verbs: a queue pair to rank {} cannot be used yet: {}; packets of half the length are tried (fix: set the switches' MTU to at least that of the ports, or exclude \
                 the port by FLEXRING_IB_HCA)",
                self.rank(),
                error.message()
            );
        }
    }

    /// Breaks the queue pairs that have carried no trial in time: all of them, or those on their first.
    pub(super) fn break_late_trials(&mut self, first: bool) {
        for qp in 0..self.qps.len() {
            let state = &self.link.qps[qp];
            if state.is_alive() && (!first || state.generation == 0) && self.link.awaits_trial(qp) {
                let error = Error::peer_lost(format!("{}; {}", self.trial_loss(qp), self.ends(qp)));
                self.note_lost_trial(qp, &error);
                self.break_qp(qp, &error);
            }
        }
    }

    /// The rails, this rank's and the peer's, of queue pairs that have lost a trial, and why.
    pub(super) fn lost_trials(&self) -> impl Iterator<Item = (usize, usize, Error)> {
        let qps = self.qps.iter().zip(&self.link.qps);
        qps.filter_map(|(slot, qp)| Some((qp.rail, qp.peer_rail, slot.lost_trial.clone()?)))
    }

    /// Whether this rank may write.
    pub(super) fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Appends this peer to the run queue, unless it is in it.
    pub(super) fn schedule(&mut self, run_queue: &mut VecDeque<usize>) {
        if !std::mem::replace(&mut self.scheduled, true) {
            run_queue.push_back(self.index);
        }
    }

    /// Handles a completion of one of this peer's queue pairs.
    ///
    /// # Errors
    /// `Disagreement` if the peer violates the protocol.
    pub(super) fn handle_completion(&mut self, completion: &Completion) -> Result<()> {
        let Completion { id, outcome } = *completion;
        let (qp, receive, serial) = ((id >> 33 & 0x7f) as usize, id >> 32 & 1 == 1, id as u32);
        if qp >= self.qps.len() {
            // The queue pairs are not connected.
            return Ok(());
        }
        let state = &self.link.qps[qp];
        let is_current = if receive { serial == state.generation } else { state.is_current(serial) };
        if state.is_settled() || !is_current {
            // It was destroyed, and the peer has heard what was polled before.
            return Ok(());
        }
        match outcome {
            Ok(Some((imm, len))) => {
                if self.link.recv_completed(qp)
                    && let Some(connected) = &mut self.qps[qp].connected
                    && let Err(error) = connected.post_recv(id)
                {
                    self.break_qp(qp, &error);
                    // The receive was not posted, so it will not complete.
                    self.link.recv_completed(qp);
                }
                let bytes = self.link.received(qp, imm, len)?;
                self.link.qps[qp].count_arrived(bytes);
                self.counters[self.link.qps[qp].rail].received(bytes);
            }
            Ok(None) => {
                let was_proven = self.link.qps[qp].is_proven();
                self.link.write_completed(qp, serial);
                let state = &self.link.qps[qp];
                if !was_proven && state.is_proven() {
                    self.qps[qp].lost_trial = None;
                    if state.generation > 0 {
                        self.counters[state.rail].reconnected();
                    }
                }
            }
            Err(status) => {
                let request = if receive { "receive" } else { "write" };
                let is_trial = !receive && status.is_unanswered() && self.link.awaits_trial(qp);
                let trial = if is_trial { format!("{}; ", self.trial_loss(qp)) } else { String::new() };
                let message = format!("{trial}a {request} ended with: {status}; {}", self.ends(qp));
                let error = Error::peer_lost(message);
                if is_trial {
                    self.note_lost_trial(qp, &error);
                }
                self.break_qp(qp, &error);
                if !receive {
                    let is_of_gpu = self.link.write_failed(qp, serial);
                    if status.is_wrong_request() || (is_of_gpu && status.is_refused_access()) {
                        // It would fail again over every queue pair, for ever.
                        self.break_all(&error);
                    }
                } else {
                    self.link.recv_completed(qp);
                    if !status.is_flushed() {
                        // A write arrived whose immediate data is lost, and the peer may count it as
                        // delivered. No recovery state can report it, so the link is lost.
                        self.break_all(&error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Moves a queue pair to the error state for this reason, unless it is there. If the device refuses, the
    /// queue pair is destroyed.
    pub(super) fn break_qp(&mut self, qp: usize, cause: &Error) {
        if !self.link.break_qp(qp, cause) {
            return;
        }
        if self.link.qps[qp].is_reliable() {
            self.qps[qp].reconnection.attempts = 0;
        }
        if let Err(error) = self.begin_drain(qp) {
            log::warn!("verbs: {}; the queue pair is destroyed", error.message());
            self.qps[qp].destroy();
        }
    }

    /// Moves a queue pair to the error state, and posts the drain marker whose completion says that the
    /// device has flushed all requests.
    fn begin_drain(&mut self, qp: usize) -> Result<()> {
        if let Some(connected) = &mut self.qps[qp].connected {
            connected.move_to_error()?;
        }
        let marker = self.link.drain_marker(qp)?;
        let posted = self
            .write_request(&marker, true)
            .and_then(|request| self.post_send(qp, &[request]).map_err(|(_, error)| error));
        posted.inspect_err(|_| self.link.unpost(qp, marker.serial))
    }

    /// Posts requests to a queue pair, as [`QueuePair::post_send`].
    fn post_send(&mut self, qp: usize, requests: &[WriteRequest]) -> std::result::Result<(), (usize, Error)> {
        match &mut self.qps[qp].connected {
            Some(connected) => connected.post_send(requests),
            None => Err((0, Error::peer_lost("the queue pair was destroyed"))),
        }
    }

    /// Fails the link and breaks all queue pairs, so that the peer notices too.
    fn break_all(&mut self, cause: &Error) {
        self.link.mark_unreachable(cause);
        (0..self.qps.len()).for_each(|qp| self.break_qp(qp, cause));
    }

    /// Continues the recovery of broken queue pairs. If the link has failed, for example because something
    /// was lost for good, breaks those that work: otherwise the peer would wait for a message that is never
    /// sent.
    fn recover(&mut self) {
        self.link.recover();
        if let Err(error) = self.link.check() {
            self.break_all(&error);
        }
    }

    /// The device of a rail has failed: breaks the queue pairs of the rail. `failures` has the reason, by
    /// rail. If the devices of all rails of the link have failed, no rail can come back, and the link fails
    /// at once.
    pub(super) fn fail_rail(&mut self, rail: usize, failures: &[Option<Error>]) {
        let mut rails: Vec<usize> = self.link.qps.iter().map(|qp| qp.rail).collect();
        rails.sort_unstable();
        rails.dedup();
        let causes: Option<Vec<&Error>> = rails.iter().map(|rail| failures[*rail].as_ref()).collect();
        if let Some(causes) = causes {
            self.link.fail_at_this_end(&list_failures(causes));
        }
        let Some(cause) = &failures[rail] else { return };
        // Queue pairs that are not connected yet never are.
        for qp in 0..self.qps.len() {
            if self.link.qps[qp].rail == rail {
                self.break_qp(qp, cause);
            }
        }
    }

    /// Posts what is due, and reports what has completed. `true` if there was anything.
    ///
    /// # Errors
    /// Why the link is unusable, if the current call needs it.
    pub(super) fn progress(&mut self, events: &mut Events) -> Result<bool> {
        if !self.is_ready {
            // The peer may write already. What has come is reported once this rank may write, too: otherwise
            // a call in which it only receives would end before it is announced.
            self.link.check_if_needed()?;
            return Ok(false);
        }
        let before = events.len();
        let moved = self.post_due()?;
        // While no queue pair works, the call may have to wait, and what arrived before waits, too.
        if self.link.is_announced() {
            self.link.report(events)?;
        }
        self.link.check_if_needed()?;
        Ok(moved || events.len() > before)
    }

    /// Posts what is due. `true` if there was anything that was not posted before.
    fn post_due(&mut self) -> Result<bool> {
        while let Some(qp) = self.link.next_qp_to_break() {
            let message = "the peer's end is broken";
            self.break_qp(qp, &Error::peer_lost(message));
        }
        for qp in self.link.newly_flushed() {
            // Otherwise deregistering the destination of the last write may wait in the driver: rxe waits 50
            // s.
            if let Some(connected) = &mut self.qps[qp].connected
                && let Err(error) = connected.reset()
            {
                log::debug!("verbs: {}", error.message());
            }
        }
        self.recover();
        let mut any = false;
        loop {
            let repeats = self.link.repeats();
            let Some(request) = self.link.next_request()? else { break };
            any |= !repeats;
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

    /// The work request for a link's request.
    fn write_request(&self, request: &LinkRequest, signalled: bool) -> Result<WriteRequest> {
        let (qp, peer_rail) = (request.qp, self.link.qps[request.qp].peer_rail);
        let rail = self.link.qps[qp].rail;
        let (from, len, lkey, to, rkey) = match &request.payload {
            Payload::Empty => (0, 0, 0, self.target.address, self.target.keys[peer_rail]),
            Payload::Control(range) => {
                let (offset, len) = *range;
                let from = self.control.local_range(*range).as_ptr() as u64;
                let to = self.target.address + offset as u64;
                (from, len as u32, self.target.controls.local.lkey(rail)?, to, self.target.keys[peer_rail])
            }
            Payload::Message { piece, region, address, key } => {
                (piece.as_ptr() as u64, piece.len() as u32, region.lkey(rail)?, *address, *key)
            }
        };
        let id = wr_id(self.index, qp, false, request.serial);
        Ok(WriteRequest { id, from, len, lkey, to, rkey, immediate: request.imm, signalled })
    }

    /// Appends a request to its queue pair's batch. A long message becomes two RDMA writes where switches may
    /// route packets adaptively: its data, which they route so, and its immediate data, with which they would
    /// not (NCCL's issue 850). Both have the request's identifier, and only the second one completes if both
    /// succeed.
    fn enqueue(&mut self, request: &LinkRequest) -> Result<()> {
        let qp = request.qp;
        self.unsignalled[qp] += 1;
        let signalled = request.needs_completion || self.unsignalled[qp] >= UNSIGNALLED;
        let write = self.write_request(request, signalled)?;
        let batch = &mut self.batches[qp];
        if signalled {
            self.unsignalled[qp] = 0;
            // Completions come in order: one for the last request of a chain covers all of it.
            if let Some(before) = batch.last_mut() {
                before.signalled = false;
            }
        }
        let split_above = self.qps[qp].reconnection.path.split_above;
        let is_message = matches!(request.payload, Payload::Message { .. });
        if is_message && split_above.is_some_and(|most| write.len as usize > most) {
            // The peer's receive completes only after the data is there: see `Link::received`. The
            // notification has the address of the message, although a device checks no address for a write
            // without bytes.
            batch.push(WriteRequest { immediate: None, signalled: false, ..write });
            batch.push(WriteRequest { from: 0, len: 0, lkey: 0, ..write });
        } else {
            batch.push(write);
        }
        Ok(())
    }

    fn post_batches(&mut self) {
        for qp in 0..self.batches.len() {
            if self.batches[qp].is_empty() {
                continue;
            }
            // The queue pair may have broken after requests were appended.
            let mut batch = std::mem::take(&mut self.batches[qp]);
            let posted = self.post_send(qp, &batch);
            let taken = posted.as_ref().map_or_else(|(taken, _)| *taken, |()| batch.len());
            let bytes = batch[..taken].iter().map(|write| u64::from(write.len)).sum();
            // Of a message in two writes, the second counts.
            let is_first = |write: &&WriteRequest| write.immediate.is_none() && write.len > 0;
            let firsts = batch[..taken].iter().filter(is_first).count();
            self.counters[self.link.qps[qp].rail].sent((taken - firsts) as u64, bytes);
            if let Err((taken, error)) = posted {
                self.link.unpost(qp, batch[taken].id as u32);
                self.break_qp(qp, &error);
            }
            batch.clear();
            self.batches[qp] = batch;
        }
    }

    /// Aborts the link: moves all queue pairs to the error state, so that their devices execute no more
    /// writes of the peer. One that cannot be moved is destroyed, which may take long. Over once
    /// [`is_aborted`](Self::is_aborted).
    pub(super) fn abort(&mut self, reason: &Error) {
        self.link.abort(reason.clone());
        (0..self.qps.len()).for_each(|qp| self.break_qp(qp, reason));
    }

    /// Whether devices write no more to memory of this rank, this long after [`abort`](Self::abort). They
    /// have some time to flush what they may still read. Destroying a queue pair has no limit: until that is
    /// over, its device may execute writes of the peer.
    pub(super) fn is_aborted(&self, waited: Duration) -> bool {
        let is_flushed = |(number, slot): (usize, &PeerQp)| {
            slot.destruction.is_some() || self.link.qps[number].is_flushed()
        };
        self.qps.iter().all(PeerQp::is_stopped)
            && (waited > FLUSH_TIMEOUT || self.qps.iter().enumerate().all(is_flushed))
    }

    /// The rails of the queue pairs that are being destroyed.
    pub(super) fn rails_being_destroyed(&self) -> impl Iterator<Item = usize> {
        let qps = self.qps.iter().zip(&self.link.qps).filter(|(slot, _)| !slot.is_stopped());
        qps.map(|(_, state)| state.rail)
    }

    /// Makes a queue pair seem to be being destroyed until the returned value is dropped.
    #[cfg(test)]
    pub(super) fn destroy_slowly(&mut self, qp: usize) -> Arc<()> {
        let (destruction, unfinished) = super::objects::Destruction::unfinished();
        self.qps[qp].destruction = Some(destruction);
        unfinished
    }

    /// The rank of the peer.
    pub(super) fn rank(&self) -> Rank {
        self.link.peer
    }

    /// Number of queue pairs over which this rank may write.
    pub(super) fn qp_count(&self) -> usize {
        if self.is_ready { self.qps.len() } else { 0 }
    }
}
