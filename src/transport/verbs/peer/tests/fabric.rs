//! A simulated fabric: it does what queue pairs of no device were told, in every order and with every loss that a
//! reliable connection allows.
//!
//! Over one queue pair writes are delivered and acknowledged in order; different ones know nothing of each other.
//! Bytes are read from where the sender has them when the write is posted or when it is delivered, and written
//! where the receiver granted it at that moment. A broken end carries out nothing more, but what it has put on the
//! wire may still arrive at the other. A write that nobody wanted a completion of has none, unless it failed.

use super::super::wr_id;
use crate::transport::fixtures::Random;
use crate::transport::verbs::link::RECV_DEPTH;
use crate::transport::verbs::objects::{Completion, RecordedCalls, WcStatus, WriteRequest};
use std::collections::VecDeque;
use std::ops::Range;

const FLUSHED: WcStatus = WcStatus::FLUSHED;

/// What verbs call it when nobody acknowledges a request.
pub(super) const RETRIED: WcStatus = WcStatus(12);

/// A write that is not acknowledged.
struct InFlightWrite {
    request: WriteRequest,
    /// Its bytes, if they were read already.
    bytes: Option<Vec<u8>>,
}

impl InFlightWrite {
    /// Reads the bytes now, unless that was done before.
    fn read(&mut self) {
        let WriteRequest { from, len, .. } = self.request;
        self.bytes.get_or_insert_with(|| {
            if len == 0 {
                return Vec::new();
            }
            // SAFETY: boards and sources of messages live as long as the world that this fabric belongs to.
            unsafe { std::slice::from_raw_parts(from as *const u8, len as usize) }.to_vec()
        });
    }
}

/// One end of a connection, as its device has it.
#[derive(Default)]
struct SimulatedQp {
    /// Not acknowledged, oldest first, and how many of them were delivered.
    in_flight: VecDeque<InFlightWrite>,
    delivered: usize,
    /// On the wire though this end has broken.
    on_the_wire: VecDeque<InFlightWrite>,
    receives: usize,
    broken: bool,
    rail: usize,
}

pub(super) struct Fabric {
    /// By pair, then by rank.
    qps: Vec<[SimulatedQp; 2]>,
    /// By rank, then by rail.
    queues: [Vec<VecDeque<Completion>>; 2],
    /// How many writes have waited on one queue pair at most, to be looked at.
    pub max_queued: usize,
}

impl Fabric {
    /// Connections between these rails of rank 0's and rank 1's.
    pub(super) fn new(rails: &[(usize, usize)]) -> Self {
        let queues = |of: fn(&(usize, usize)) -> usize| {
            vec![VecDeque::new(); 1 + rails.iter().map(of).max().unwrap_or(0)]
        };
        let end = |rail| SimulatedQp { rail, ..SimulatedQp::default() };
        Self {
            qps: rails.iter().map(|(one, other)| [end(*one), end(*other)]).collect(),
            queues: [queues(|(one, _)| *one), queues(|(_, other)| *other)],
            max_queued: 0,
        }
    }

    pub(super) fn rails(&self, rank: usize) -> usize {
        self.queues[rank].len()
    }

    /// Whether both ends of some connection still stand.
    pub(super) fn connects(&self) -> bool {
        self.qps.iter().any(|ends| ends.iter().all(|end| !end.broken))
    }

    /// Whether a device of this rank's may still read this memory.
    pub(super) fn reads(&self, rank: usize, memory: &Range<u64>) -> bool {
        let ends = self.qps.iter().map(|ends| &ends[rank]);
        ends.flat_map(|end| &end.in_flight).any(|write| memory.contains(&write.request.from))
    }

    /// Does what a queue pair of this rank's was told.
    pub(super) fn execute(&mut self, rank: usize, qp: usize, recorded: RecordedCalls, random: &mut Random) {
        if recorded.in_error {
            self.break_end(rank, qp, FLUSHED, random);
        }
        let end = &mut self.qps[qp][rank];
        if end.broken {
            let flushed = Completion { id: wr_id(0, qp, true, 0), outcome: Err(FLUSHED) };
            self.queues[rank][end.rail].extend(std::iter::repeat_n(flushed, recorded.receives));
        } else {
            end.receives += recorded.receives;
        }
        for request in recorded.posted {
            let end = &mut self.qps[qp][rank];
            if end.broken {
                let outcome = Err(FLUSHED);
                self.queues[rank][end.rail].push_back(Completion { id: request.id, outcome });
                continue;
            }
            let mut write = InFlightWrite { request, bytes: None };
            if random.once_in(2) {
                write.read();
            }
            end.in_flight.push_back(write);
        }
    }

    /// Delivers the oldest write that this rank has on its way over a queue pair, if there is one that can be.
    /// `allows` panics if it must not be written where it goes to.
    pub(super) fn deliver(&mut self, from: usize, qp: usize, allows: impl FnOnce(&WriteRequest)) {
        let [low, high] = &mut self.qps[qp];
        let (sender, receiver) = if from == 0 { (low, high) } else { (high, low) };
        if receiver.broken {
            sender.on_the_wire.clear();
            return;
        }
        let (mut stray, mut write) = (sender.on_the_wire.pop_front(), None);
        if stray.is_none() && !sender.broken {
            write = sender.in_flight.get_mut(sender.delivered);
            sender.delivered += usize::from(write.is_some());
        }
        let Some(write) = stray.as_mut().or(write) else { return };
        write.read();
        let (request, bytes) = (write.request, write.bytes.as_ref().expect("it was read just now"));
        allows(&request);
        // SAFETY: `allows` says that this memory is the receiver's and that it is to be written.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), request.to as *mut u8, bytes.len()) };
        let Some(immediate) = request.immediate else { return };
        assert!(receiver.receives > 0, "more than {RECV_DEPTH} writes wait on queue pair {qp}");
        receiver.receives -= 1;
        self.max_queued = self.max_queued.max(RECV_DEPTH - receiver.receives);
        let outcome = Ok(Some((immediate, request.len)));
        self.queues[1 - from][receiver.rail].push_back(Completion { id: wr_id(0, qp, true, 0), outcome });
    }

    /// Acknowledges the oldest write that was delivered.
    pub(super) fn acknowledge(&mut self, rank: usize, qp: usize) {
        let end = &mut self.qps[qp][rank];
        if end.broken || end.delivered == 0 {
            return;
        }
        let write = end.in_flight.pop_front().expect("as many as were delivered");
        end.delivered -= 1;
        if write.request.signalled {
            let completion = Completion { id: write.request.id, outcome: Ok(None) };
            self.queues[rank][end.rail].push_back(completion);
        }
    }

    /// Finds out that the other end does not answer, if that is so and something was asked of it.
    pub(super) fn time_out(&mut self, rank: usize, qp: usize, random: &mut Random) {
        let ends = &self.qps[qp];
        if ends[1 - rank].broken && !ends[rank].in_flight.is_empty() {
            self.break_end(rank, qp, RETRIED, random);
        }
    }

    /// Breaks one end. All that was under way there fails, the oldest for this reason; some of it may be on the wire.
    pub(super) fn break_end(&mut self, rank: usize, qp: usize, first: WcStatus, random: &mut Random) {
        let end = &mut self.qps[qp][rank];
        if std::mem::replace(&mut end.broken, true) {
            return;
        }
        let queue = &mut self.queues[rank][end.rail];
        let on_the_wire = random.below(end.in_flight.len() - end.delivered + 1);
        let mut status = first;
        for (number, mut write) in end.in_flight.drain(..).enumerate() {
            while end.receives > 0 && random.once_in(4) {
                queue.push_back(Completion { id: wr_id(0, qp, true, 0), outcome: Err(FLUSHED) });
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
            queue.push_back(Completion { id: wr_id(0, qp, true, 0), outcome: Err(FLUSHED) });
        }
    }

    /// The rank destroys its queue pairs.
    pub(super) fn destroy(&mut self, rank: usize, random: &mut Random) {
        for qp in 0..self.qps.len() {
            self.break_end(rank, qp, FLUSHED, random);
        }
        self.queues[rank].iter_mut().for_each(VecDeque::clear);
    }

    /// The next completion of a rail's.
    pub(super) fn completion(&mut self, rank: usize, rail: usize) -> Option<Completion> {
        self.queues[rank][rail].pop_front()
    }
}
