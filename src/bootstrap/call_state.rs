//! The call that a rank is in, as its heartbeats report it.
//!
//! Owns the shared words: the executor writes them on every call, without lock, allocation or system call,
//! and the control connection's thread reads them for each heartbeat.

use crate::call::{Call, CallWords};
use crate::rank::Rank;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Whether a rank is in a call.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum CallState {
    /// The rank is between calls.
    Idle {
        /// Sequence number of the last call it left; 0 before its first.
        finished: u64,
    },
    /// The rank is in this call.
    InCall(Call),
}

impl CallState {
    /// The call that the rank is in, if any.
    #[must_use]
    pub fn call(&self) -> Option<&Call> {
        match self {
            Self::Idle { .. } => None,
            Self::InCall(call) => Some(call),
        }
    }

    /// Sequence number of the last call that the rank has left; 0 before its first.
    pub(super) fn finished(&self) -> u64 {
        match self {
            Self::Idle { finished } => *finished,
            Self::InCall(call) if call.is_collective() => call.sequence.saturating_sub(1),
            Self::InCall(call) => call.last_collective(),
        }
    }
}

impl fmt::Display for CallState {
    /// Completes a sentence about the rank: `while it was in all_reduce #17 (…)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Idle { finished: 0 } => f.write_str("before it had reported a call"),
            Self::Idle { finished } => write!(f, "after it had finished call #{finished}"),
            Self::InCall(call) => write!(f, "while it was in {call}"),
        }
    }
}

/// The name and sequence number of a call: `all_reduce #17`.
pub(super) fn call_name(call: &Call) -> String {
    if !call.is_collective() {
        return call.collective.name().to_owned();
    }
    format!("{} #{}", call.collective.name(), call.sequence)
}

/// Says that `leaver` has left without a call that `rank` is in.
pub(crate) fn departed_before_call(
    leaver: &str,
    finished: u64,
    rank: Rank,
    call: &dyn fmt::Display,
) -> String {
    let after = match finished {
        0 => "before its first call".to_owned(),
        _ => format!("after call #{finished}"),
    };
    format!(
        "{leaver} left {after}, and rank {rank} is in {call}: every rank must make the same calls before it leaves"
    )
}

/// The call state of this rank, shared between the executor and the control connection's thread.
///
/// A sequence lock: the version is odd while a write is in progress. A reader that sees the same even version
/// before and after its read has read one consistent state.
#[derive(Debug, Default)]
pub struct CallStateCell {
    version: AtomicU64,
    in_call: AtomicBool,
    words: [AtomicU64; size_of::<CallWords>() / size_of::<u64>()],
    /// A call in which a kernel of this rank waits, and how often that has changed.
    kernel: Mutex<(Option<Call>, u64)>,
}

impl CallStateCell {
    /// Records that this rank enters a call. Only the executing thread may call this and
    /// [`leave`](Self::leave).
    pub fn enter(&self, call: &Call) {
        self.change(|| {
            for (shared, word) in self.words.iter().zip(call.to_words()) {
                shared.store(word, Ordering::Relaxed);
            }
            self.in_call.store(true, Ordering::Relaxed);
        });
    }

    /// Records that this rank leaves the call it is in. Called by the thread that called
    /// [`enter`](Self::enter).
    pub fn leave(&self) {
        self.change(|| self.in_call.store(false, Ordering::Relaxed));
    }

    /// Records that a kernel of this rank waits in this call, or in none any more. It counts while the rank
    /// is in no other call.
    pub fn set_kernel_call(&self, call: Option<Call>) {
        let mut kernel = self.lock_kernel();
        if kernel.0 != call {
            *kernel = (call, kernel.1 + 1);
        }
    }

    fn lock_kernel(&self) -> MutexGuard<'_, (Option<Call>, u64)> {
        self.kernel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, write: impl FnOnce()) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        // Readers must see the odd version before any of the words that follow it.
        fence(Ordering::Release);
        write();
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// A number that changes with every state.
    pub(super) fn version(&self) -> u64 {
        self.version.load(Ordering::Relaxed).wrapping_add(self.lock_kernel().1)
    }

    /// The current state, or `None` if every attempt met a concurrent write. A rank that changes its state
    /// that often is not stuck, so callers may keep the previous state.
    #[must_use]
    pub fn read(&self) -> Option<CallState> {
        self.read_versioned().map(|(_, state)| state)
    }

    /// [`read`](Self::read) of the calls that the host runs.
    pub(super) fn read_host(&self) -> Option<CallState> {
        self.read_with(None).map(|(_, state)| state)
    }

    /// [`read`](Self::read), with the [`version`](Self::version) of the state.
    pub(super) fn read_versioned(&self) -> Option<(u64, CallState)> {
        let (kernel, changes) = *self.lock_kernel();
        self.read_with(kernel).map(|(version, state)| (version.wrapping_add(changes), state))
    }

    /// The state with this call of a kernel, and the version of the host's.
    fn read_with(&self, kernel: Option<Call>) -> Option<(u64, CallState)> {
        const ATTEMPTS: usize = 100;
        for _ in 0..ATTEMPTS {
            let version = self.version.load(Ordering::Acquire);
            let words: CallWords = std::array::from_fn(|at| self.words[at].load(Ordering::Relaxed));
            let in_call = self.in_call.load(Ordering::Relaxed);
            // All words must be read before the version is read again.
            fence(Ordering::Acquire);
            if version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version {
                let state = match (Call::from_words(words), kernel) {
                    (Some(call), _) if in_call => CallState::InCall(call),
                    (_, Some(call)) => CallState::InCall(call),
                    (call, None) => {
                        CallState::Idle { finished: call.map_or(0, |call| call.last_collective()) }
                    }
                };
                return Some((version, state));
            }
            std::hint::spin_loop();
        }
        None
    }
}

#[cfg(test)]
pub(super) fn example_call(sequence: u64) -> Call {
    Call {
        sequence,
        collective: crate::call::Collective::AllReduce,
        dtype: crate::dtype::DType::F32,
        op: 0,
        root: 0,
        count: 1024,
        program: 5,
        on_gpu: false,
        factor: 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tracks_entering_and_leaving() {
        let cell = CallStateCell::default();
        assert_eq!(cell.read(), Some(CallState::Idle { finished: 0 }));
        cell.enter(&example_call(17));
        assert_eq!(cell.read(), Some(CallState::InCall(example_call(17))));
        assert_eq!(
            cell.read().map(|state| state.to_string()).as_deref(),
            Some("while it was in all_reduce #17 (1024 x float, sum)")
        );
        cell.leave();
        assert_eq!(cell.read(), Some(CallState::Idle { finished: 17 }));
        assert_eq!(call_name(&example_call(17)), "all_reduce #17");
    }

    #[test]
    fn readers_never_see_parts_of_two_calls() {
        let cell = CallStateCell::default();
        let writing = AtomicBool::new(true);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for sequence in 1..=200_000 {
                    cell.enter(&Call { count: sequence, program: sequence, ..example_call(sequence) });
                    cell.leave();
                }
                writing.store(false, Ordering::Relaxed);
            });
            let mut seen = 0;
            while writing.load(Ordering::Relaxed) {
                match cell.read() {
                    Some(CallState::InCall(call)) => {
                        assert_eq!((call.count, call.program), (call.sequence, call.sequence));
                        assert!(call.sequence >= seen);
                        seen = call.sequence;
                    }
                    Some(CallState::Idle { finished }) => {
                        assert!(finished >= seen);
                        seen = finished;
                    }
                    None => {}
                }
            }
        });
    }
}
