//! The handle to the thread that answers ranks that shrink.
//!
//! Owns the thread's lifetime, and the order of agreeing and joining. Must not know how ranks agree.

use super::message::CallsMade;
use super::request::{AgreedWorld, ServiceRequest, ServiceShared};
use super::thread::{ServiceThread, ShrinkServiceParams};
use crate::error::{Error, ErrorKind, Result};
use crate::interrupt::{self, InterruptWatch};
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
    /// Number of calls to agree so far. Held during a shrink, so that one runs at a time.
    calls: Mutex<u64>,
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
        Ok(Self { shared, calls: Mutex::default(), thread: Some(thread), creator: CreatorProcess::current() })
    }

    /// Agrees with the other ranks that shrink after these `calls` on who is left without `exclude`, and calls `join` to join their new world. If that
    /// fails because further ranks are lost, agrees again until `deadline`. An interrupt by the program ends it at once.
    ///
    /// # Errors
    /// `Rendezvous` if the others went on without this rank or exclude it, or if ranks that cannot be reached may have gone on without
    /// this one; `Timeout`, naming them, if ranks that are alive do not shrink until `deadline`; `Disagreement` if ranks
    /// exclude different ranks; `Aborted` if the program interrupts it; the error of `join`.
    pub fn shrink<T>(
        &self,
        exclude: Vec<Rank>,
        calls: CallsMade,
        deadline: Instant,
        join: impl Fn(&AgreedWorld) -> Result<T>,
    ) -> Result<T> {
        let mut number = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        *number += 1;
        self.request(ServiceRequest::Call { number: *number, exclude, calls, deadline });
        let watch = InterruptWatch::start();
        let mut system_errors = 0;
        loop {
            let world = self.outcome(*number, deadline)?;
            let joined = join(&world);
            // An interrupt may look like an error that may pass.
            if joined.is_err()
                && let Err(interrupted) = watch.check()
            {
                self.request(ServiceRequest::GaveUp);
                return Err(interrupted);
            }
            match joined {
                Ok(joined) => {
                    self.request(ServiceRequest::Joined);
                    return Ok(joined);
                }
                Err(error) if may_pass(&error, &mut system_errors) && Instant::now() < deadline => {
                    log::info!(
                        "the new world of {} ranks failed, shrinking again: {error}",
                        world.members.len()
                    );
                    *number += 1;
                    self.request(ServiceRequest::CallAgain { number: *number });
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

    /// Waits for the outcome of the call with this number. The outcome of an earlier call, which ended before its caller
    /// received it, is discarded.
    fn outcome(&self, number: u64, deadline: Instant) -> Result<AgreedWorld> {
        let until = deadline + GRACE;
        loop {
            let timeout = until.saturating_duration_since(Instant::now()).min(interrupt::longest_sleep());
            let state = self.shared.lock();
            let waited =
                self.shared.changed.wait_timeout_while(state, timeout, |state| !state.has_outcome(number));
            let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if let Some((_, outcome)) = state.outcome.take_if(|(of, _)| *of == number) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::unique_id::UniqueId;
    use crate::fault::Fault;
    use std::ffi::c_int;

    extern "C" fn ends() -> c_int {
        1
    }

    /// A handle without a thread: the tests take its requests and publish the outcomes.
    fn handle() -> ShrinkService {
        let shared = Arc::new(ServiceShared {
            wake: WakeFd::new().expect("an event descriptor"),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        ShrinkService { shared, calls: Mutex::default(), thread: None, creator: CreatorProcess::current() }
    }

    const CALLS: CallsMade = CallsMade { finished: 0, has_failed: false };

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn world() -> AgreedWorld {
        let id = UniqueId::new(1, &["127.0.0.1:1".parse().expect("an address")]);
        AgreedWorld { members: vec![0, 2], id, fault: Arc::new(Fault::new().expect("an event descriptor")) }
    }

    #[test]
    fn an_interrupt_while_a_world_is_joined_ends_the_shrink() {
        let service = handle();
        service.shared.lock().outcome = Some((1, Ok(world())));
        let joined: Result<()> = service.shrink(Vec::new(), CALLS, soon(), |world| {
            interrupt::set_check(Some(ends));
            let error = world.fault.check_waiting().expect_err("an interrupt");
            interrupt::set_check(None);
            Err(error)
        });
        assert_eq!(joined.expect_err("an interrupt").kind(), ErrorKind::Aborted);
        let requests = std::mem::take(&mut service.shared.lock().requests);
        assert!(
            matches!(requests[..], [ServiceRequest::Call { .. }, ServiceRequest::GaveUp]),
            "{requests:?}"
        );
    }

    #[test]
    fn the_outcome_of_an_earlier_call_is_ignored() {
        let service = handle();
        interrupt::set_check(Some(ends));
        let interrupted: Result<()> = service.shrink(Vec::new(), CALLS, soon(), |_| Ok(()));
        interrupt::set_check(None);
        assert_eq!(interrupted.expect_err("an interrupt").kind(), ErrorKind::Aborted);
        // The thread had agreed on a world when it received the request to give up.
        service.shared.lock().outcome = Some((1, Ok(world())));
        let second: Result<()> = std::thread::scope(|scope| {
            scope.spawn(|| {
                let is_call =
                    |request: &ServiceRequest| matches!(request, ServiceRequest::Call { number: 2, .. });
                while !service.shared.lock().requests.iter().any(is_call) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                service.shared.lock().outcome = Some((2, Err(Error::rendezvous("the second call failed"))));
                service.shared.changed.notify_all();
            });
            service.shrink(Vec::new(), CALLS, soon(), |_| Ok(()))
        });
        assert_eq!(second.expect_err("it failed").message(), "the second call failed");
    }
}
