//! The handle to the thread that answers ranks that shrink.
//!
//! Owns the thread's lifetime, and the order of agreeing and joining. Must not know how ranks agree.

use super::thread::{AgreedWorld, ServiceRequest, ServiceShared, ServiceThread, ShrinkServiceParams};
use crate::error::{Error, ErrorKind, Result};
use crate::interrupt;
use crate::process::{self, CreatorProcess};
use crate::rank::Rank;
use crate::wake::WakeFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How much longer than its deadline a caller waits for its thread.
const GRACE: Duration = Duration::from_secs(2);
/// How many system errors a rank tolerates while it joins new worlds.
const SYSTEM_ERRORS: u32 = 3;

/// The handle to a rank's service. Dropping it closes the sockets: other ranks then count this one as gone.
#[derive(Debug)]
pub struct ShrinkService {
    shared: Arc<ServiceShared>,
    /// Held during a shrink, so that one runs at a time.
    turn: Mutex<()>,
    thread: Option<JoinHandle<()>>,
    /// The process that has the thread.
    creator: CreatorProcess,
}

impl ShrinkService {
    /// Starts to serve the sockets.
    ///
    /// # Errors
    /// `System` if no descriptor or thread is available.
    pub fn start(params: ShrinkServiceParams) -> Result<Self> {
        let shared = Arc::new(ServiceShared {
            wake: WakeFd::new()?,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let thread = ServiceThread::new(Arc::clone(&shared), params);
        let builder = std::thread::Builder::new().name("flexring-shrink".to_owned());
        let thread = process::spawn(builder, move || thread.run())
            .map_err(|cause| Error::io("cannot start the thread that answers ranks that shrink", cause))?;
        Ok(Self { shared, turn: Mutex::default(), thread: Some(thread), creator: CreatorProcess::current() })
    }

    /// Agrees with the other ranks on who is left without `exclude`, and calls `join` to join their new world. If that
    /// fails because further ranks are lost, agrees again until `deadline`.
    ///
    /// # Errors
    /// `Rendezvous` if the others went on without this rank, or if ranks that cannot be reached may have gone on without
    /// this one; `Timeout`, naming them, if ranks that are alive do not shrink until `deadline`; `Disagreement` if ranks
    /// exclude different ranks; the error of `join`.
    pub fn shrink<T>(
        &self,
        exclude: Vec<Rank>,
        deadline: Instant,
        join: impl Fn(&AgreedWorld) -> Result<T>,
    ) -> Result<T> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.request(ServiceRequest::Call { exclude, deadline });
        let mut system_errors = 0;
        loop {
            let world = self.outcome(deadline)?;
            match join(&world) {
                Ok(joined) => {
                    self.request(ServiceRequest::Joined);
                    return Ok(joined);
                }
                Err(error) if may_pass(&error, &mut system_errors) && Instant::now() < deadline => {
                    log::info!(
                        "the new world of {} ranks failed, shrinking again: {error}",
                        world.members.len()
                    );
                    self.request(ServiceRequest::CallAgain);
                }
                Err(error) => {
                    self.request(ServiceRequest::GaveUp);
                    return Err(error);
                }
            }
        }
    }

    fn request(&self, request: ServiceRequest) {
        self.shared.lock().requests.push(request);
        self.shared.wake.notify();
    }

    fn outcome(&self, deadline: Instant) -> Result<AgreedWorld> {
        let until = deadline + GRACE;
        loop {
            let timeout = until.saturating_duration_since(Instant::now()).min(interrupt::longest_sleep());
            let state = self.shared.lock();
            let waited =
                self.shared.changed.wait_timeout_while(state, timeout, |state| state.outcome.is_none());
            let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if let Some(outcome) = state.outcome.take() {
                return outcome;
            }
            drop(state);
            let late = || Err(Error::internal("the thread that shrinks a communicator does not answer"));
            let waits = if Instant::now() < until { interrupt::check() } else { late() };
            if let Err(error) = waits {
                self.request(ServiceRequest::GaveUp);
                return Err(error);
            }
        }
    }
}

/// Whether joining may succeed with the ranks that are left then. The system reports the death of a rank, too, for example by
/// refusing a connection; but lack of memory does not pass.
fn may_pass(error: &Error, system_errors: &mut u32) -> bool {
    match error.kind() {
        ErrorKind::PeerLost | ErrorKind::Rendezvous | ErrorKind::Timeout | ErrorKind::Aborted => true,
        ErrorKind::System => {
            *system_errors += 1;
            *system_errors <= SYSTEM_ERRORS
        }
        _ => false,
    }
}

impl Drop for ShrinkService {
    fn drop(&mut self) {
        if !self.creator.is_current() {
            // A forked child has no such thread, and the lock may be held for ever.
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.lock().leaving = true;
        self.shared.wake.notify();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the thread that answers ranks that shrink panicked");
        }
    }
}
