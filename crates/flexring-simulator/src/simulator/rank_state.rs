//! One rank: its pipeline and its thread.
//!
//! Owns what the thread does now, and the notifications that it has not handled. Must not know other ranks,
//! links or time.

use super::activity::ActivityId;
use super::event_queue::VirtualTime;
use flexring_core::trace::{MessagePart, SpanActivity};
use flexring_plan::Rank;
use flexring_plan::pipeline::{Location, Pipeline};
use flexring_plan::program::{Body, BufferKind, OperandSource, StepId};
use std::collections::VecDeque;

/// What happened on a rank's links, as the events of a transport. Peers are named as in the rank's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notification {
    SendComplete { peer: Rank },
    RecvReady { peer: Rank },
    RecvComplete { peer: Rank },
}

/// An addition or copy in progress.
#[derive(Debug)]
pub struct RankJob {
    pub step: StepId,
    pub sub: u64,
    pub stages: bool,
    /// Whether the job only copies data of this rank, after which the executor looks at its links.
    pub is_own_copy: bool,
    /// Whether the rank's thread still works on it.
    pub thread_works: bool,
    /// Transfers from the memory of peers, which the job reads in place.
    pub reads: usize,
    pub activity: ActivityId,
    pub begun: VirtualTime,
}

/// Equal notifications that followed each other, with what caused them.
#[derive(Debug)]
struct ReceivedNotification {
    notification: Notification,
    cause: ActivityId,
    times: u32,
}

/// The state of one rank.
#[derive(Debug)]
pub struct RankState {
    pub pipeline: Pipeline,
    pub job: Option<RankJob>,
    inbox: VecDeque<ReceivedNotification>,
    /// What the rank did or was notified of last.
    pub cause: ActivityId,
    pub done: bool,
}

/// A job that the pipeline asks for.
pub struct RequestedJob {
    /// Bytes of the result.
    pub bytes: u64,
    /// Bytes that this rank's thread reads and writes.
    pub moved: u64,
}

impl RankState {
    /// A rank whose pipeline is started.
    pub fn new(pipeline: Pipeline) -> Self {
        Self { pipeline, job: None, inbox: VecDeque::new(), cause: ActivityId::NONE, done: false }
    }

    /// Adds a notification to those that the pipeline does not have yet.
    pub fn receive(&mut self, notification: Notification, cause: ActivityId) {
        match self.inbox.back_mut() {
            Some(last) if (last.notification, last.cause) == (notification, cause) => last.times += 1,
            _ => self.inbox.push_back(ReceivedNotification { notification, cause, times: 1 }),
        }
    }

    /// Bytes of a step's sub-chunk.
    pub fn bytes(&self, step: StepId, sub: u64, element_bytes: u64) -> u64 {
        let elements = self.pipeline.elements(step, sub);
        (elements.end - elements.start) * element_bytes
    }

    /// What an addition takes; `None` if the result is already in its place. Adds the peers whose messages
    /// are read in place to `peers`.
    pub fn combine(
        &self,
        step: StepId,
        sub: u64,
        in_place: bool,
        element_bytes: u64,
        peers: &mut Vec<Rank>,
    ) -> Option<RequestedJob> {
        let Body::Combine { operands, .. } = &*self.pipeline.program().steps[step as usize].body else {
            return None;
        };
        if let [OperandSource::Own { buffer, scaled: false }] = operands[..]
            && (in_place || buffer == BufferKind::Output)
        {
            return None;
        }
        let bytes = self.bytes(step, sub, element_bytes);
        for part in 0..operands.len() {
            if let Location::Peer { peer, .. } = self.pipeline.operand_location(step, part, sub) {
                peers.push(peer);
            }
        }
        Some(RequestedJob { bytes, moved: bytes * (operands.len() as u64 + 1) })
    }

    /// Reports the end of a job to the pipeline.
    pub fn finish(&mut self, job: &RankJob) -> Result<(), String> {
        if job.stages {
            self.pipeline.stage_complete(job.step, job.sub);
            return Ok(());
        }
        self.pipeline.combine_complete(job.step).map_err(|violation| violation.0)
    }

    /// What a job is in a timeline.
    pub fn activity(&self, job: &RankJob) -> SpanActivity {
        match &*self.pipeline.program().steps[job.step as usize].body {
            Body::Combine { operands, .. } if operands.len() > 1 => SpanActivity::Reduce,
            _ => SpanActivity::Copy,
        }
    }

    /// A step's sub-chunk in a timeline.
    pub fn part(&self, step: StepId, sub: u64, element_bytes: u64) -> MessagePart {
        MessagePart { step, sub, bytes: self.bytes(step, sub, element_bytes) as usize }
    }

    /// Reports all notifications to the pipeline, in their order. `readable` is called before each message
    /// that can be read in place, with its sender. Whether there were any.
    pub fn poll(&mut self, mut readable: impl FnMut(&Self, Rank)) -> Result<bool, String> {
        let any = !self.inbox.is_empty();
        while let Some(ReceivedNotification { notification, cause, times }) = self.inbox.pop_front() {
            self.cause = cause;
            for _ in 0..times {
                let handled = match notification {
                    Notification::SendComplete { peer } => self.pipeline.send_complete(peer),
                    Notification::RecvReady { peer } => {
                        readable(self, peer);
                        self.pipeline.recv_ready(peer).map(drop)
                    }
                    Notification::RecvComplete { peer } => self.pipeline.recv_complete(peer),
                };
                handled.map_err(|violation| violation.0)?;
            }
        }
        Ok(any)
    }
}
