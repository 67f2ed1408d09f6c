//! Steps that ranks take together if they are threads of one process: the last rank to come acts for all of
//! them.
//!
//! Owns waiting for each other.

use crate::error::{Error, Result};
use crate::interrupt;
use crate::rank::Rank;
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often a rank that waits checks whether others have left.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// What a rank asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum GatheringRequest {
    /// A communicator without these ranks.
    Shrink { exclude: Vec<Rank> },
    /// A communicator for each color, ordered by key.
    Split { color: i32, key: i32 },
}

/// What each rank gets: `None` if it is in no new world.
type GatheringResults<R> = BTreeMap<Rank, Result<Option<R>>>;

/// Where the ranks of one communicator meet.
pub(super) struct LocalGathering<R> {
    state: Mutex<GatheringState<R>>,
    changed: Condvar,
}

struct GatheringState<R> {
    requests: BTreeMap<Rank, GatheringRequest>,
    results: GatheringResults<R>,
}

impl<R> LocalGathering<R> {
    pub(super) fn new() -> Self {
        let state = GatheringState { requests: BTreeMap::new(), results: BTreeMap::new() };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Waits until no rank in `missing`, given those that have come, is missing. The last one calls `finish`
    /// with all requests, which returns the results of all ranks that have come.
    ///
    /// # Errors
    /// That of this rank's result; on all ranks that have come, the error of `missing`, if a rank cannot come
    /// any more, or the error that `late` returns for the ranks that are missing at `deadline`.
    pub(super) fn gather(
        &self,
        rank: Rank,
        request: GatheringRequest,
        missing: impl Fn(&BTreeMap<Rank, GatheringRequest>) -> Result<Vec<Rank>>,
        finish: impl FnOnce(BTreeMap<Rank, GatheringRequest>) -> GatheringResults<R>,
        deadline: Instant,
        late: impl Fn(&[Rank]) -> Error,
    ) -> Result<Option<R>> {
        let mut state = self.lock();
        state.requests.insert(rank, request);
        loop {
            if let Some(result) = state.results.remove(&rank) {
                return result;
            }
            let absent = missing(&state.requests);
            if absent.as_ref().is_ok_and(Vec::is_empty) {
                let requests = std::mem::take(&mut state.requests);
                let mut results = finish(requests);
                let mine = results.remove(&rank);
                state.results.append(&mut results);
                self.changed.notify_all();
                return mine.unwrap_or(Ok(None));
            }
            if let Err(interrupted) = interrupt::check() {
                state.requests.remove(&rank);
                return Err(interrupted);
            }
            let failure = match absent {
                Err(error) => Some(error),
                Ok(absent) => (Instant::now() >= deadline).then(|| late(&absent)),
            };
            if let Some(error) = failure {
                // All that wait get the same error.
                for waiting in
                    std::mem::take(&mut state.requests).into_keys().filter(|waiting| *waiting != rank)
                {
                    state.results.insert(waiting, Err(error.clone()));
                }
                self.changed.notify_all();
                return Err(error);
            }
            let waited = self.changed.wait_timeout(state, CHECK_INTERVAL);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, GatheringState<R>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
