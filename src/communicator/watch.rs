//! Who watches over the ranks of a communicator: the lifeline between processes, or the household that the
//! threads of one process share.

use crate::bootstrap::Lifeline;
use crate::call::{Call, Rank};
use crate::error::{Error, ErrorKind};
use crate::fault::Fault;
use std::sync::{Arc, Mutex, PoisonError};

/// What is told to the other ranks, and what they tell.
pub(super) enum Watch {
    /// Ranks that are processes.
    Lifeline(Lifeline),
    /// Ranks that are threads of this process.
    Household(Member),
}

impl Watch {
    /// This rank enters a call.
    pub(super) fn enter(&self, call: &Call) {
        match self {
            Self::Lifeline(lifeline) => lifeline.status().enter(call),
            Self::Household(member) => member.enter(call),
        }
    }

    /// This rank has left the call that it entered last.
    pub(super) fn leave(&self) {
        match self {
            Self::Lifeline(lifeline) => lifeline.status().leave(),
            Self::Household(member) => member.leave(),
        }
    }

    /// Tells everybody that this rank failed, and returns what everybody is told to be the cause.
    pub(super) fn report(&self, error: Error) -> Error {
        match self {
            Self::Lifeline(lifeline) => {
                let suspect = error.suspect();
                lifeline.report(error, suspect)
            }
            Self::Household(member) => member.report(error),
        }
    }

    /// Ends the communicator on all ranks.
    pub(super) fn abort(&self, fault: &Fault, rank: Rank) {
        let words = "the communicator was aborted";
        match self {
            Self::Lifeline(lifeline) => lifeline.abort(words),
            Self::Household(_) => {
                fault.raise(Error::new(ErrorKind::Aborted, format!("rank {rank}: {words}")));
            }
        }
    }
}

/// Ranks that are threads of one process share one fault, and see each other's calls.
pub(super) struct Household {
    calls: Mutex<Vec<Standing>>,
    fault: Arc<Fault>,
}

#[derive(Clone, Copy, Debug)]
enum Standing {
    Idle { finished: u64 },
    In(Call),
    Left { finished: u64 },
}

impl Household {
    pub(super) fn new(world: usize, fault: Arc<Fault>) -> Arc<Self> {
        Arc::new(Self { calls: Mutex::new(vec![Standing::Idle { finished: 0 }; world]), fault })
    }

    /// Adds to a time-out which ranks are not in the call.
    fn explain(&self, error: &Error) -> Error {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let current = calls.iter().map(|standing| standing.finished()).max().unwrap_or(0);
        let mut words = error.message().to_owned();
        for (rank, standing) in calls.iter().enumerate() {
            match standing {
                Standing::Idle { finished } if *finished < current => {
                    words += &format!("; rank {rank} has not made call #{current}: its last was #{finished}");
                }
                Standing::Left { finished } if *finished < current => {
                    words += &format!("; rank {rank} left after call #{finished}");
                }
                _ => {}
            }
        }
        Error::new(error.kind(), words)
    }
}

/// One of them.
pub(super) struct Member {
    pub(super) household: Arc<Household>,
    pub(super) rank: Rank,
}

impl Member {
    fn enter(&self, call: &Call) {
        let mut calls = self.household.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls[self.rank] = Standing::In(*call);
        for (other, standing) in calls.iter().enumerate() {
            let Standing::In(theirs) = standing else { continue };
            if theirs.sequence == call.sequence && !theirs.agrees_with(call) {
                let words = call.difference(self.rank, theirs, other);
                self.household.fault.raise(Error::new(ErrorKind::Disagreement, words));
            }
        }
    }

    fn leave(&self) {
        let mut calls = self.household.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls[self.rank] = Standing::Idle { finished: calls[self.rank].finished() };
    }

    fn report(&self, error: Error) -> Error {
        let error = if error.kind() == ErrorKind::Timeout { self.household.explain(&error) } else { error };
        self.household.fault.raise(error)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let mut calls = self.household.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls[self.rank] = Standing::Left { finished: calls[self.rank].finished() };
    }
}

impl Standing {
    fn finished(self) -> u64 {
        match self {
            Self::Idle { finished } | Self::Left { finished } => finished,
            Self::In(call) => call.sequence,
        }
    }
}
