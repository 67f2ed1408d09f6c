//! The handle to a rank that the thread serves.
//!
//! Owns how long the rank is served, and the order of agreeing and joining.

use super::listener::ShrinkListener;
use super::message::CallsMade;
use super::ports::ShrinkPorts;
use super::request::{AgreedWorld, ServiceRequest, ServiceShared};
use super::served_rank::{ServedRank, ServedRankParams};
use super::session::SessionParams;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::interrupt::{self, InterruptWatch};
use crate::rank::Rank;
use crate::secret::SecretKey;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How much longer than its deadline a caller waits for its thread.
const GRACE: Duration = Duration::from_secs(2);
/// How many system errors a rank tolerates while it joins new worlds.
const SYSTEM_ERRORS: u32 = 3;

/// What a service needs.
#[derive(Debug)]
pub struct ShrinkServiceParams {
    /// This process's rank.
    pub me: Rank,
    /// By rank, the endpoints of its [`ShrinkListener`] by which this rank may reach it, in the order in
    /// which they are tried. What the first one says decides whether the rank is gone.
    pub endpoints: Vec<Vec<SocketAddr>>,
    /// Authenticates the ranks of this communicator. No other communicator has it.
    pub key: SecretKey,
    /// The handle by which other ranks have found this one so far.
    pub listener: ShrinkListener,
    /// Ranks of a node for each of its cores, rounded up: where many ranks share a core, they may answer
    /// later.
    pub ranks_per_core: usize,
    /// For the coordinator of a new world.
    pub config: Config,
}

/// The handle to a rank's service. All services of a process share a thread and its sockets. Dropping the
/// handle ends the service: other ranks then count this one as gone.
#[derive(Debug)]
pub struct ShrinkService {
    shared: Arc<ServiceShared>,
    /// Number of calls to agree so far. Held during a shrink, so that one runs at a time.
    calls: Mutex<u64>,
    /// Last, because they may close after the service has ended.
    ports: Arc<ShrinkPorts>,
}

impl ShrinkService {
    /// Has the thread of the listener serve the rank.
    ///
    /// # Errors
    /// `Internal` if the thread has ended.
    pub fn start(params: ShrinkServiceParams) -> Result<Self> {
        let ShrinkServiceParams { me, endpoints, key, listener, ranks_per_core, config } = params;
        let session = SessionParams { key, me, world: endpoints.len(), is_encrypted: config.tls.0 };
        let shared = Arc::new(ServiceShared::default());
        let params = ServedRankParams { session, endpoints, ranks_per_core, config };
        let ports = listener.serve(ServedRank::new(Arc::clone(&shared), params))?;
        Ok(Self { shared, calls: Mutex::default(), ports })
    }

    /// Agrees with the other ranks that shrink after these `calls` on who is left without `exclude`, and
    /// calls `join` to join their new world. If that fails because further ranks are lost, agrees again until
    /// `deadline`. An interrupt by the program ends it at once.
    ///
    /// # Errors
    /// `Rendezvous` if the others went on without this rank or exclude it, or if ranks that cannot be reached
    /// may have gone on without this one; `Timeout`, naming them, if ranks that are alive do not shrink until
    /// `deadline`; `Disagreement` if ranks exclude different ranks; `Aborted` if the program interrupts it;
    /// the error of `join`.
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
        self.ports.wake();
    }

    /// Waits for the outcome of the call with this number. The outcome of an earlier call, which ended before
    /// its caller received it, is discarded.
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

/// Whether joining may succeed with the ranks that are left then. The system reports the death of a rank,
/// too, for example by refusing a connection; but lack of memory does not pass.
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
        if !self.ports.are_of_this_process() {
            // A forked child has no such thread, and the lock may be held for ever.
            return;
        }
        self.shared.lock().leaving = true;
        self.ports.wake();
        // When this returns, the connections are closed, and other ranks that ask learn that this one is
        // gone.
        let state = self.shared.changed.wait_while(self.shared.lock(), |state| state.served);
        drop(state.unwrap_or_else(PoisonError::into_inner));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::unique_id::UniqueId;
    use crate::fault::Fault;
    use std::ffi::c_int;
    use std::net::Ipv4Addr;

    extern "C" fn ends() -> c_int {
        1
    }

    /// A handle whose rank is not served: the tests take its requests and publish the outcomes.
    fn handle() -> ShrinkService {
        let ports = ShrinkPorts::at(&[Ipv4Addr::LOCALHOST.into()], None).expect("a port");
        ShrinkService { shared: Arc::default(), calls: Mutex::default(), ports }
    }

    const CALLS: CallsMade = CallsMade { finished: 0, has_failed: false };

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn world() -> AgreedWorld {
        let id = UniqueId::new(1, &["127.0.0.1:1".parse().expect("an address")]);
        AgreedWorld { members: vec![0, 2], id, fault: Arc::new(Fault::new()) }
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
