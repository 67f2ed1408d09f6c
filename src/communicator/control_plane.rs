//! Who watches over the ranks of a communicator: the control connection between processes, or the group that the
//! threads of one process share.

use crate::bootstrap::ControlConnection;
use crate::call::Call;
use crate::error::{Error, ErrorKind};
use crate::fault::Fault;
use crate::rank::Rank;
use std::sync::{Arc, Mutex, PoisonError};

/// What is told to the other ranks, and what they tell.
pub(super) enum ControlPlane {
    /// Ranks that are processes.
    ControlConnection(ControlConnection),
    /// Ranks that are threads of this process.
    LocalGroup(LocalMember),
}

impl ControlPlane {
    /// This rank enters a call.
    pub(super) fn enter(&self, call: &Call) {
        match self {
            Self::ControlConnection(control) => control.call_state().enter(call),
            Self::LocalGroup(member) => member.enter(call),
        }
    }

    /// This rank has left the call that it entered last.
    pub(super) fn leave(&self) {
        match self {
            Self::ControlConnection(control) => control.call_state().leave(),
            Self::LocalGroup(member) => member.leave(),
        }
    }

    /// Tells everybody that this rank failed, and returns what everybody is told to be the cause.
    pub(super) fn report(&self, error: Error) -> Error {
        match self {
            Self::ControlConnection(control) => {
                let suspect = error.suspect();
                control.report(error, suspect)
            }
            Self::LocalGroup(member) => member.report(error),
        }
    }

    /// Ends the communicator on all ranks.
    pub(super) fn abort(&self, fault: &Fault, rank: Rank) {
        let words = "the communicator was aborted";
        match self {
            Self::ControlConnection(control) => control.abort(words),
            Self::LocalGroup(_) => {
                fault.raise(Error::new(ErrorKind::Aborted, format!("rank {rank}: {words}")));
            }
        }
    }
}

/// Ranks that are threads of one process share one fault, and see each other's calls.
pub(super) struct LocalGroup {
    calls: Mutex<Vec<CallProgress>>,
    fault: Arc<Fault>,
}

#[derive(Clone, Copy, Debug)]
enum CallProgress {
    Idle { finished: u64 },
    In(Call),
    Left { finished: u64 },
}

impl LocalGroup {
    pub(super) fn new(world: usize, fault: Arc<Fault>) -> Arc<Self> {
        Arc::new(Self { calls: Mutex::new(vec![CallProgress::Idle { finished: 0 }; world]), fault })
    }

    /// Adds to a time-out which ranks are not in the call.
    fn explain(&self, error: &Error) -> Error {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let current = calls.iter().map(|standing| standing.finished()).max().unwrap_or(0);
        let mut words = error.message().to_owned();
        for (rank, standing) in calls.iter().enumerate() {
            match standing {
                CallProgress::Idle { finished } if *finished < current => {
                    words += &format!("; rank {rank} has not made call #{current}: its last was #{finished}");
                }
                CallProgress::Left { finished } if *finished < current => {
                    words += &format!("; rank {rank} left after call #{finished}");
                }
                _ => {}
            }
        }
        Error::new(error.kind(), words)
    }
}

/// One of them.
pub(super) struct LocalMember {
    pub(super) group: Arc<LocalGroup>,
    pub(super) rank: Rank,
}

impl LocalMember {
    fn enter(&self, call: &Call) {
        let mut calls = self.group.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls[self.rank] = CallProgress::In(*call);
        for (other, standing) in calls.iter().enumerate() {
            let CallProgress::In(theirs) = standing else { continue };
            if theirs.sequence == call.sequence && !theirs.agrees_with(call) {
                let words = call.difference(self.rank, theirs, other);
                self.group.fault.raise(Error::new(ErrorKind::Disagreement, words));
            }
        }
    }

    fn leave(&self) {
        let mut calls = self.group.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls[self.rank] = CallProgress::Idle { finished: calls[self.rank].finished() };
    }

    fn report(&self, error: Error) -> Error {
        let error = if error.kind() == ErrorKind::Timeout { self.group.explain(&error) } else { error };
        self.group.fault.raise(error)
    }
}

impl Drop for LocalMember {
    fn drop(&mut self) {
        let mut calls = self.group.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls[self.rank] = CallProgress::Left { finished: calls[self.rank].finished() };
    }
}

impl CallProgress {
    fn finished(self) -> u64 {
        match self {
            Self::Idle { finished } | Self::Left { finished } => finished,
            Self::In(call) => call.sequence,
        }
    }
}
