//! A simulated fabric: it executes the verbs that inert queue pairs record, in every order and with every
//! loss that a reliable connection allows.
//!
//! Over one queue pair, writes are delivered and acknowledged in order; queue pairs are independent of each
//! other. The bytes of a write are read from the sender's memory when it is posted or when it is delivered,
//! and go where the receiver allows it at that moment. A broken end executes nothing more, but what it has
//! put on the wire may still arrive at the other end. An unsignalled write completes only if it fails.

use super::super::wr_id;
use crate::transport::verbs::link::{RECV_DEPTH, WORK_REQUESTS};
use crate::transport::verbs::objects::{Completion, RecordedCalls, WcStatus, WriteRequest};
use crate::transport::verbs::wire::TRIAL_BYTES;
use fastrand::Rng;
use std::collections::VecDeque;
use std::ops::Range;

const FLUSHED: WcStatus = WcStatus::FLUSHED;

/// `IBV_WC_RETRY_EXC_ERR`: the peer did not acknowledge a request.
pub(super) const RETRY_EXCEEDED: WcStatus = WcStatus { code: 12, vendor_err: 0 };

/// A write that is posted and not acknowledged.
struct InFlightWrite {
    request: WriteRequest,
    /// The bytes, once the device has read them.
    bytes: Option<Vec<u8>>,
}

impl InFlightWrite {
    /// Reads the bytes from memory, unless the device did that before.
    fn read(&mut self) {
        let WriteRequest { from, len, .. } = self.request;
        self.bytes.get_or_insert_with(|| {
            if len == 0 {
                return Vec::new();
            }
            // SAFETY: control buffers and sources of messages live as long as the simulation, which owns this
            // fabric.
            unsafe { std::slice::from_raw_parts(from as *const u8, len as usize) }.to_vec()
        });
    }
}

/// One end of a connection, as its device sees it.
#[derive(Default)]
struct SimulatedQp {
    /// Writes that are not acknowledged, oldest first.
    in_flight: VecDeque<InFlightWrite>,
    /// How many of these were delivered.
    delivered: usize,
    /// Writes that were on the wire when this end broke.
    on_the_wire: VecDeque<InFlightWrite>,
    /// The writes that occupy the send queue, because no completion of them or of a later one was polled:
    /// identifiers, and whether they are signalled.
    occupied: VecDeque<(u64, bool)>,
    /// Receives posted and not completed.
    receives: usize,
    broken: bool,
    /// How often it was connected again.
    generation: u32,
    destroyed: bool,
    rail: usize,
}

/// All connections between two ranks.
pub(super) struct Fabric {
    /// By queue pair, then by rank.
    qps: Vec<[SimulatedQp; 2]>,
    /// Completion queues, by rank, then by rail.
    queues: [Vec<VecDeque<Completion>>; 2],
    /// The rank whose devices do not flush broken queue pairs, if there is one.
    pub stuck: Option<usize>,
    /// The most writes that ever waited on one queue pair to be polled.
    pub max_queued: usize,
    /// Messages that were written apart from their immediate data.
    pub split: u64,
}

impl Fabric {
    /// Connections between these rails (of rank 0, of rank 1).
    pub(super) fn new(rails: &[(usize, usize)]) -> Self {
        let queues = |of: fn(&(usize, usize)) -> usize| {
            vec![VecDeque::new(); 1 + rails.iter().map(of).max().unwrap_or(0)]
        };
        let end = |rail| SimulatedQp { rail, ..SimulatedQp::default() };
        Self {
            qps: rails.iter().map(|(one, other)| [end(*one), end(*other)]).collect(),
            queues: [queues(|(one, _)| *one), queues(|(_, other)| *other)],
            stuck: None,
            max_queued: 0,
            split: 0,
        }
    }

    pub(super) fn rails(&self, rank: usize) -> usize {
        self.queues[rank].len()
    }

    /// Whether some connection is intact at both ends.
    pub(super) fn connects(&self) -> bool {
        let connects = |ends: &[SimulatedQp; 2]| {
            ends.iter().all(|end| !end.broken) && ends[0].generation == ends[1].generation
        };
        self.qps.iter().any(connects)
    }

    /// Whether a device of this rank may still read from this memory.
    pub(super) fn reads(&self, rank: usize, memory: &Range<u64>) -> bool {
        let ends = self.qps.iter().map(|ends| &ends[rank]);
        ends.flat_map(|end| &end.in_flight).any(|write| memory.contains(&write.request.from))
    }

    /// Executes the calls that a queue pair of this rank recorded.
    pub(super) fn execute(&mut self, rank: usize, qp: usize, recorded: RecordedCalls, random: &mut Rng) {
        if recorded.in_error {
            self.break_end(rank, qp, FLUSHED, random);
        }
        let is_trial = |write: &WriteRequest| write.len as usize == TRIAL_BYTES && write.signalled;
        let is_apart = |write: &WriteRequest| write.immediate.is_none() && write.len > 0 && !is_trial(write);
        for (at, write) in recorded.posted.iter().enumerate().filter(|(_, write)| is_apart(write)) {
            let next = recorded.posted.get(at + 1);
            let is_followed = next.is_some_and(|next| {
                (next.id, next.to, next.len) == (write.id, write.to, 0) && next.immediate.is_some()
            });
            assert!(is_followed && !write.signalled, "{write:?} has no immediate data: {next:?}");
            self.split += 1;
        }
        let end = &mut self.qps[qp][rank];
        if end.broken {
            let flushed = Completion { id: wr_id(0, qp, true, end.generation), outcome: Err(FLUSHED) };
            if self.stuck != Some(rank) {
                self.queues[rank][end.rail].extend(std::iter::repeat_n(flushed, recorded.receives));
            }
        } else {
            end.receives += recorded.receives;
        }
        for request in recorded.posted {
            let end = &mut self.qps[qp][rank];
            end.occupied.push_back((request.id, request.signalled));
            assert!(end.occupied.len() <= WORK_REQUESTS, "the send queue of queue pair {qp} is full");
            if end.broken && self.stuck == Some(rank) {
                continue;
            }
            if end.broken {
                let outcome = Err(FLUSHED);
                self.queues[rank][end.rail].push_back(Completion { id: request.id, outcome });
                continue;
            }
            let mut write = InFlightWrite { request, bytes: None };
            if random.usize(..2) == 0 {
                write.read();
            }
            end.in_flight.push_back(write);
        }
    }

    /// Delivers the oldest undelivered write of this rank over a queue pair, if there is one. `allows` panics
    /// if the receiver does not allow it now.
    pub(super) fn deliver(&mut self, from: usize, qp: usize, allows: impl FnOnce(&WriteRequest)) {
        let [low, high] = &mut self.qps[qp];
        let (sender, receiver) = if from == 0 { (low, high) } else { (high, low) };
        if receiver.broken || receiver.generation != sender.generation {
            // A queue pair drops what was sent to another.
            sender.on_the_wire.clear();
            return;
        }
        let (mut late, mut write) = (sender.on_the_wire.pop_front(), None);
        if late.is_none() && !sender.broken {
            write = sender.in_flight.get_mut(sender.delivered);
            sender.delivered += usize::from(write.is_some());
        }
        let Some(write) = late.as_mut().or(write) else { return };
        write.read();
        let (request, bytes) = (write.request, write.bytes.as_ref().expect("read in the line above"));
        allows(&request);
        // SAFETY: `allows` checked that this memory belongs to the receiver and may be written.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), request.to as *mut u8, bytes.len()) };
        let Some(immediate) = request.immediate else { return };
        assert!(receiver.receives > 0, "more than {RECV_DEPTH} writes wait to be polled on queue pair {qp}");
        receiver.receives -= 1;
        self.max_queued = self.max_queued.max(RECV_DEPTH - receiver.receives);
        let outcome = Ok(Some((immediate, request.len)));
        let id = wr_id(0, qp, true, receiver.generation);
        self.queues[1 - from][receiver.rail].push_back(Completion { id, outcome });
    }

    /// Acknowledges the oldest write that was delivered.
    pub(super) fn acknowledge(&mut self, rank: usize, qp: usize) {
        let end = &mut self.qps[qp][rank];
        if end.broken || end.delivered == 0 {
            return;
        }
        let write = end.in_flight.pop_front().expect("delivered writes are in flight");
        end.delivered -= 1;
        if write.request.signalled {
            let completion = Completion { id: write.request.id, outcome: Ok(None) };
            self.queues[rank][end.rail].push_back(completion);
        }
    }

    /// Breaks this end if the other end is broken and a write of this end waits for an acknowledgement.
    pub(super) fn time_out(&mut self, rank: usize, qp: usize, random: &mut Rng) {
        let ends = &self.qps[qp];
        let is_lost = ends[1 - rank].broken || ends[0].generation != ends[1].generation;
        if is_lost && !ends[rank].in_flight.is_empty() {
            self.break_end(rank, qp, RETRY_EXCEEDED, random);
        }
    }

    /// Breaks one end. Everything in flight there fails, the oldest with this status; some of it may be on
    /// the wire.
    pub(super) fn break_end(&mut self, rank: usize, qp: usize, first: WcStatus, random: &mut Rng) {
        let end = &mut self.qps[qp][rank];
        if std::mem::replace(&mut end.broken, true) {
            return;
        }
        let queue = &mut self.queues[rank][end.rail];
        let before = queue.len();
        let on_the_wire = random.usize(..end.in_flight.len() - end.delivered + 1);
        let receive = wr_id(0, qp, true, end.generation);
        let mut status = first;
        for (number, mut write) in end.in_flight.drain(..).enumerate() {
            while end.receives > 0 && random.usize(..4) == 0 {
                queue.push_back(Completion { id: receive, outcome: Err(FLUSHED) });
                end.receives -= 1;
            }
            queue.push_back(Completion { id: write.request.id, outcome: Err(status) });
            status = FLUSHED;
            if (end.delivered..end.delivered + on_the_wire).contains(&number) {
                write.read();
                end.on_the_wire.push_back(write);
            }
        }
        end.delivered = 0;
        for _ in 0..std::mem::take(&mut end.receives) {
            queue.push_back(Completion { id: receive, outcome: Err(FLUSHED) });
        }
        if self.stuck == Some(rank) {
            // The first failure is reported, and nothing else.
            queue.truncate(before + 1);
        }
    }

    /// Puts a new queue pair in the place of a broken one, unless that was done for this generation.
    pub(super) fn connect_end(&mut self, rank: usize, qp: usize, generation: u32) {
        let end = &mut self.qps[qp][rank];
        if end.generation != generation {
            assert!(end.broken, "a queue pair that works is not replaced");
            *end = SimulatedQp { rail: end.rail, generation, ..SimulatedQp::default() };
        }
    }

    /// Destroys a queue pair, with or without its completions that were not polled.
    pub(super) fn destroy_end(&mut self, rank: usize, qp: usize, random: &mut Rng) {
        self.break_end(rank, qp, FLUSHED, random);
        let end = &mut self.qps[qp][rank];
        if !std::mem::replace(&mut end.destroyed, true) && random.bool() {
            let (queue, first) = (&mut self.queues[rank][end.rail], wr_id(0, qp, false, 0));
            queue.retain(|completion| completion.id >> 33 != first >> 33);
        }
    }

    /// Destroys the queue pairs of a rank.
    pub(super) fn destroy(&mut self, rank: usize, random: &mut Rng) {
        for qp in 0..self.qps.len() {
            self.break_end(rank, qp, FLUSHED, random);
        }
        self.queues[rank].iter_mut().for_each(VecDeque::clear);
    }

    /// Takes the next completion of a rail.
    pub(super) fn completion(&mut self, rank: usize, rail: usize) -> Option<Completion> {
        let completion = self.queues[rank][rail].pop_front()?;
        let (id, is_failed) = (completion.id, completion.outcome.is_err());
        for ends in &mut self.qps {
            // Each write that fails has a completion, and those that succeed have one if they are signalled.
            let occupied = &mut ends[rank].occupied;
            if let Some(at) =
                occupied.iter().position(|(of, signalled)| *of == id && (*signalled || is_failed))
            {
                occupied.drain(..=at);
            }
        }
        Some(completion)
    }
}
