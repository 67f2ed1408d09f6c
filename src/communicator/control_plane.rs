//! The control plane of a communicator: how ranks learn of each other's calls and failures.
//!
//! Owns the choice between the control connection of ranks that are processes and the shared state of ranks
//! that are threads of one process. Must not know how processes detect failures (`bootstrap`), nor what a
//! call does.

use super::shared_connections;
use crate::bootstrap::{
    Abort, CallState, CallsMade, ControlConnection, ROWS_IN_ERROR, RankActivity, RankReport, WorldStatus,
    departed_before_call, excluded_by, host_name,
};
use crate::call::Call;
use crate::error::{Error, ErrorKind, Result};
use crate::fault::Fault;
use crate::rank::Rank;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Reports this rank's calls and failures to the other ranks.
pub(super) enum ControlPlane {
    /// Ranks are processes.
    Processes(Arc<ControlConnection>),
    /// Ranks are threads of this process.
    Threads(LocalMember),
}

impl ControlPlane {
    /// Reports that this rank enters a call. Fails if another rank has left without it.
    #[inline]
    pub(super) fn enter_call(&self, call: &Call) -> Result<()> {
        match self {
            Self::Processes(connection) => connection.enter_call(call),
            Self::Threads(member) => member.enter_call(call),
        }
    }

    /// Reports that this rank has left the call that it entered last.
    #[inline]
    pub(super) fn leave_call(&self) {
        match self {
            Self::Processes(connection) => connection.call_state().leave(),
            Self::Threads(member) => member.leave_call(),
        }
    }

    /// A rank that has left, the one that has finished fewest calls.
    #[cfg(feature = "cuda")]
    pub(super) fn leaver(&self) -> Option<Rank> {
        match self {
            Self::Processes(connection) => connection.leaver(),
            Self::Threads(_) => None,
        }
    }

    /// Reports that a kernel of this rank waits in this call, or in none any more. Another rank may be in
    /// another call at this place.
    #[cfg(feature = "cuda")]
    pub(super) fn set_kernel_call(&self, call: Option<Call>) {
        match self {
            Self::Processes(connection) => connection.call_state().set_kernel_call(call),
            Self::Threads(member) => member.compare_kernel_call(call),
        }
    }

    /// Reports that this rank failed, and returns the root cause, which is the same on all ranks.
    pub(super) fn report_failure(&self, error: Error) -> Error {
        match self {
            Self::Processes(connection) => connection.report(error),
            Self::Threads(member) => member.report_failure(error),
        }
    }

    /// Tells the other ranks that this one makes no more calls, before its links are closed. Dropping does
    /// the rest. No link may need the control connection any more.
    pub(super) fn begin_leaving(&self) {
        match self {
            Self::Processes(connection) => shared_connections::begin_leaving(connection),
            Self::Threads(_) => {}
        }
    }

    /// Ends the communicator on all ranks.
    pub(super) fn abort(&self, fault: &Fault, rank: Rank, abort: Abort<'_>) {
        match self {
            Self::Processes(connection) => connection.abort(abort),
            Self::Threads(_) => {
                fault.raise(abort.error_of(rank));
            }
        }
    }
}

/// The shared state of ranks that are threads of one process: one fault, and the progress of each rank.
pub(super) struct LocalGroup {
    /// By rank.
    progress: Mutex<Vec<CallProgress>>,
    /// Ranks that a shrink has left out by name: by which ranks, and after at most how many calls.
    excluded: Mutex<BTreeMap<Rank, (Vec<Rank>, u64)>>,
    fault: Arc<Fault>,
}

/// Where a rank is in the sequence of calls.
#[derive(Clone, Copy, Debug)]
enum CallProgress {
    /// Between two calls. `finished` is the sequence number of the last one, 0 before the first.
    Idle { finished: u64 },
    /// In a call.
    InCall(Call),
    /// The rank's communicator was dropped.
    Left { finished: u64 },
}

impl CallProgress {
    /// Sequence number of the last call that the rank finished or entered.
    fn last_call(self) -> u64 {
        match self {
            Self::Idle { finished } | Self::Left { finished } => finished,
            Self::InCall(call) => call.last_collective(),
        }
    }
}

impl LocalGroup {
    pub(super) fn new(world: usize, fault: Arc<Fault>) -> Arc<Self> {
        let progress = Mutex::new(vec![CallProgress::Idle { finished: 0 }; world]);
        Arc::new(Self { progress, excluded: Mutex::default(), fault })
    }

    /// Number of ranks.
    pub(super) fn world(&self) -> usize {
        self.lock().len()
    }

    /// The ranks whose communicators are not dropped.
    pub(super) fn present(&self) -> Vec<Rank> {
        let has_left = |progress: &CallProgress| matches!(progress, CallProgress::Left { .. });
        self.lock()
            .iter()
            .enumerate()
            .filter(|(_, progress)| !has_left(progress))
            .map(|(rank, _)| rank)
            .collect()
    }

    /// Records that `members` have shrunk the communicator after these calls, without `excluded`.
    pub(super) fn record_shrink(&self, members: &[Rank], excluded: &[Rank], calls: CallsMade) {
        let mut known = self.excluded.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|rank, _| !members.contains(rank));
        known.extend(excluded.iter().map(|rank| (*rank, (members.to_vec(), calls.last_together()))));
    }

    /// Raises the fault if a rank is in a call that another rank has left without.
    fn check_departures(&self, progress: &[CallProgress]) {
        let left = progress.iter().enumerate().filter_map(|(rank, progress)| match progress {
            CallProgress::Left { finished } => Some((*finished, rank)),
            _ => None,
        });
        let Some((finished, leaver)) = left.min() else { return };
        for (rank, progress) in progress.iter().enumerate() {
            if let CallProgress::InCall(call) = progress
                && call.last_collective() > finished
            {
                let message = departed_before_call(&format!("rank {leaver}"), finished, rank, call);
                self.fault.raise(Error::peer_lost(message));
            }
        }
    }

    /// The state of all ranks.
    fn status(&self, progress: &[CallProgress]) -> WorldStatus {
        let (host, pid) = (host_name(), std::process::id());
        let row = |(rank, progress): (Rank, &CallProgress)| {
            let (activity, state) = match progress {
                CallProgress::Idle { finished } => {
                    (RankActivity::Idle, CallState::Idle { finished: *finished })
                }
                CallProgress::Left { finished } => {
                    (RankActivity::Left, CallState::Idle { finished: *finished })
                }
                CallProgress::InCall(call) => (RankActivity::Idle, CallState::InCall(*call)),
            };
            RankReport::new(rank, &host, pid, activity).with_state(&state)
        };
        WorldStatus::new(progress.iter().enumerate().map(row).collect(), None)
    }

    /// Adds to a timeout which ranks have not made the call, and the state of all ranks.
    fn explain_timeout(&self, error: &Error) -> Error {
        let progress = self.lock();
        let current = progress.iter().map(|progress| progress.last_call()).max().unwrap_or(0);
        let mut message = error.message().to_owned();
        for (rank, progress) in progress.iter().enumerate() {
            // Writing to a String cannot fail.
            let _ = match progress {
                CallProgress::Idle { finished } if *finished < current => {
                    write!(message, "; rank {rank} has not made call #{current}: its last was #{finished}")
                }
                CallProgress::Left { finished } if *finished < current => {
                    write!(message, "; rank {rank} left after call #{finished}")
                }
                _ => Ok(()),
            };
        }
        let table = self.status(&progress).table(ROWS_IN_ERROR);
        Error::new(error.kind(), format!("{message}\n{}", table.trim_end()))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<CallProgress>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One rank of a [`LocalGroup`].
pub(super) struct LocalMember {
    pub(super) group: Arc<LocalGroup>,
    pub(super) rank: Rank,
}

impl LocalMember {
    /// Enters a call. Raises the fault if another rank is in a different call with the same sequence number,
    /// or has left without this call.
    fn enter_call(&self, call: &Call) -> Result<()> {
        let mut progress = self.group.lock();
        progress[self.rank] = CallProgress::InCall(*call);
        for (other, progress) in progress.iter().enumerate() {
            let CallProgress::InCall(theirs) = progress else { continue };
            if theirs.contradicts(call) {
                let message = call.difference(self.rank, theirs, other);
                self.group.fault.raise(Error::disagreement(message));
            }
        }
        self.group.check_departures(&progress);
        self.group.fault.check()
    }

    /// Raises the fault if another rank is in a different call with the sequence number of this one, in which
    /// a kernel waits.
    #[cfg(feature = "cuda")]
    fn compare_kernel_call(&self, call: Option<Call>) {
        let progress = self.group.lock();
        let (Some(call), CallProgress::Idle { .. }) = (call, progress[self.rank]) else { return };
        for (other, progress) in progress.iter().enumerate() {
            if let CallProgress::InCall(theirs) = progress
                && theirs.contradicts(&call)
            {
                let message = call.difference(self.rank, theirs, other);
                self.group.fault.raise(Error::disagreement(message));
            }
        }
    }

    /// How many calls this rank has finished. Only between two calls.
    pub(super) fn calls_made(&self) -> CallsMade {
        let has_failed = self.group.fault.get().is_some();
        let last = self.group.lock()[self.rank].last_call();
        // The last one may be the call that failed.
        CallsMade { finished: last.saturating_sub(u64::from(has_failed)), has_failed }
    }

    /// Fails if other ranks have left this one out of a shrink to which its own call belongs, after these
    /// calls.
    pub(super) fn check_excluded(&self, calls: CallsMade) -> Result<()> {
        let known = self.group.excluded.lock().unwrap_or_else(PoisonError::into_inner);
        match known.get(&self.rank) {
            Some((by, until)) if calls.finished <= *until => Err(excluded_by(by, self.rank)),
            _ => Ok(()),
        }
    }

    fn leave_call(&self) {
        let mut progress = self.group.lock();
        progress[self.rank] = CallProgress::Idle { finished: progress[self.rank].last_call() };
    }

    fn report_failure(&self, error: Error) -> Error {
        let timed_out = error.kind() == ErrorKind::Timeout;
        self.group.fault.raise(if timed_out { self.group.explain_timeout(&error) } else { error })
    }
}

impl Drop for LocalMember {
    fn drop(&mut self) {
        let mut progress = self.group.lock();
        progress[self.rank] = CallProgress::Left { finished: progress[self.rank].last_call() };
        self.group.check_departures(&progress);
    }
}
