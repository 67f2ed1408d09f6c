//! The thread of a rank's control connection.
//!
//! Owns the connection: it sends heartbeats and queued messages, and receives root causes and news of other ranks. Must not
//! know who waits for them: it shares its results with the handle ([`Shared`]).

use super::call_state::{CallState, CallStateCell, departed_before_call};
use super::framed_stream::FramedStream;
use super::heartbeat::{HeartbeatMonitor, seconds};
use super::protocol::{FRAME_LIMIT, ToCoordinator, ToRank, decode, encode};
use crate::call::Call;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::fault_point::{FaultPoint, reach};
use crate::interrupt::longest_sleep;
use crate::rank::Rank;
use crate::wake::WakeFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often a thread that waits for the coordinator checks the fault.
const FAULT_CHECK: Duration = Duration::from_millis(100);

/// How long leaving may take.
const GOODBYE_TIMEOUT: Duration = Duration::from_millis(800);
/// Maximum interval between heartbeats once a rank has left, so that the coordinator soon hears of a call that the
/// leaver does not make.
const DEPARTED_HEARTBEAT: Duration = Duration::from_millis(250);
/// How long a call that was entered while a rank left may take to become visible to the control connection's thread.
const CALL_VISIBLE: Duration = Duration::from_millis(20);

/// State shared between the handle and the control connection's thread.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) rank: Rank,
    pub(super) fault: Arc<Fault>,
    pub(super) call_state: Arc<CallStateCell>,
    /// The rank that left after the fewest calls.
    departure: Departure,
    state: Mutex<SharedState>,
    changed: Condvar,
    wake: WakeFd,
}

/// The part of the shared state that the mutex protects.
#[derive(Debug, Default)]
pub(super) struct SharedState {
    send_queue: Vec<ToCoordinator>,
    pub(super) gathered: Option<(u64, Vec<Vec<u8>>)>,
    pub(super) root_cause: Option<Error>,
    pub(super) leaving: bool,
    /// The thread has ended or is about to: no message is sent or received any more.
    pub(super) ended: bool,
}

/// The rank that left after the fewest calls, as far as the coordinator has announced.
#[derive(Debug)]
struct Departure {
    /// The rank. Valid if `finished` is not `u64::MAX`.
    rank: AtomicU64,
    /// How many calls it finished; `u64::MAX` if no rank has left.
    finished: AtomicU64,
}

impl Departure {
    fn none() -> Self {
        Self { rank: AtomicU64::new(0), finished: AtomicU64::new(u64::MAX) }
    }

    fn is_known(&self) -> bool {
        self.finished.load(Ordering::Relaxed) != u64::MAX
    }

    fn record(&self, rank: Rank, finished: u64) {
        self.rank.store(rank as u64, Ordering::Relaxed);
        // Readers that see the number see its rank, or one that left later with a smaller number.
        self.finished.store(finished, Ordering::Release);
    }

    /// Fails if a rank has left without `call`, in which `rank` is. Costs one load if no rank has left.
    fn check(&self, rank: Rank, call: &Call) -> Result<()> {
        let finished = self.finished.load(Ordering::Acquire);
        if call.last_collective() <= finished {
            return Ok(());
        }
        let leaver = self.rank.load(Ordering::Relaxed) as Rank;
        let message = departed_before_call(&format!("rank {leaver}"), finished, rank, call);
        Err(Error::peer_lost(message).with_suspect(leaver))
    }
}

impl Shared {
    pub(super) fn new(rank: Rank, fault: Arc<Fault>) -> Result<Self> {
        Ok(Self {
            rank,
            fault,
            call_state: Arc::default(),
            departure: Departure::none(),
            state: Mutex::default(),
            changed: Condvar::new(),
            wake: WakeFd::new()?,
        })
    }

    /// Records that this rank enters a call. Fails if a rank has left without that call. Called by the executing thread.
    pub(super) fn enter_call(&self, call: &Call) -> Result<()> {
        self.call_state.enter(call);
        self.departure.check(self.rank, call)
    }

    /// Lets the thread end.
    pub(super) fn request_leave(&self) {
        self.state().leaving = true;
        self.wake.notify();
    }

    pub(super) fn state(&self) -> MutexGuard<'_, SharedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a message for the coordinator. Does not block.
    pub(super) fn send(&self, message: ToCoordinator) {
        self.state().send_queue.push(message);
        self.wake.notify();
    }

    /// Waits until `done` returns true, at most for `timeout`, or until the program wants the thread back. Callers see from
    /// what `done` has taken, and from the fault, why the wait ended.
    pub(super) fn wait(&self, timeout: Duration, mut done: impl FnMut(&mut SharedState) -> bool) {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let state = self.state();
            // The fault may also be raised by a thread that does not wake this one, such as that of a shrink.
            let slice = left.min(longest_sleep()).min(FAULT_CHECK);
            let waited = self.changed.wait_timeout_while(state, slice, |state| !done(state));
            let (state, wait) = waited.unwrap_or_else(PoisonError::into_inner);
            drop(state);
            if !wait.timed_out() || slice == left || self.fault.check().is_err() {
                return;
            }
            if let Err(error) = self.fault.check_waiting() {
                // The other ranks wait for this one.
                self.send(ToCoordinator::Abort { reason: error.message().to_owned() });
                return;
            }
        }
    }
}

/// The thread that serves the control connection.
pub(super) struct ControlThread {
    shared: Arc<Shared>,
    stream: FramedStream,
    /// Description of the coordinator's process.
    host_process: String,
    heartbeat: Duration,
    /// The last known call state of this rank.
    state: CallState,
    /// Whether the coordinator announced that it may close the connection.
    closing: bool,
    /// Whether this rank has sent its goodbye, after which it sends no more.
    leaving: bool,
}

/// Why the connection ended: a verb phrase such as `closed` or `has been silent for 10 s`.
struct ConnectionLost(String);

impl ControlThread {
    /// Serves `stream`, whose other end is the coordinator in the process that `host_process` describes.
    pub(super) fn new(
        shared: Arc<Shared>,
        stream: FramedStream,
        host_process: String,
        heartbeat: Duration,
    ) -> Self {
        let state = CallState::Idle { finished: 0 };
        Self { shared, stream, host_process, heartbeat, state, closing: false, leaving: false }
    }

    /// The body of the thread.
    pub(super) fn run(mut self) {
        match self.run_until_leaving() {
            Ok(()) => {}
            Err(ConnectionLost(cause)) if !self.closing => self.on_coordinator_lost(&cause),
            Err(_) => self.on_coordinator_closed(),
        }
        self.shared.state().ended = true;
        self.shared.changed.notify_all();
    }

    /// Serves the connection until this rank leaves.
    fn run_until_leaving(&mut self) -> std::result::Result<(), ConnectionLost> {
        let mut monitor = HeartbeatMonitor::new(self.heartbeat);
        let mut last = Instant::now();
        let mut last_heartbeat = None;
        // What came together with the welcome.
        self.receive()?;
        loop {
            let now = Instant::now();
            monitor.advance(now.saturating_duration_since(last));
            last = now;
            let leaving = self.send_queued();
            if leaving {
                self.shut_down();
                return Ok(());
            }
            // Skip the heartbeat while writes are pending; the timeout detects a stuck coordinator.
            let interval = self.heartbeat_interval();
            if last_heartbeat.is_none_or(|sent| now >= sent + interval) {
                if !self.stream.has_unsent() {
                    self.send_heartbeat();
                }
                last_heartbeat = Some(now);
            }
            self.flush()?;
            self.wait(last_heartbeat.unwrap_or(now) + interval);
            if self.receive()? {
                monitor.reset();
            }
            if let Some(silent) = monitor.expired() {
                // If the coordinator is only stopped, it learns that this rank did not fail.
                self.enqueue(&ToCoordinator::GaveUp { silent });
                let _ = self.flush();
                return Err(ConnectionLost(format!("has been silent for {}", seconds(silent))));
            }
        }
    }

    /// Sends the queued messages. Whether this rank is leaving.
    fn send_queued(&mut self) -> bool {
        let (send_queue, leaving) = {
            let mut state = self.shared.state();
            (std::mem::take(&mut state.send_queue), state.leaving)
        };
        for message in &send_queue {
            self.enqueue(message);
        }
        leaving
    }

    fn enqueue(&mut self, message: &ToCoordinator) {
        match encode(message) {
            Ok(bytes) => self.stream.enqueue(bytes),
            Err(error) => log::error!("cannot encode a message to the coordinator: {error}"),
        }
    }

    fn heartbeat_interval(&self) -> Duration {
        if self.shared.departure.is_known() { self.heartbeat.min(DEPARTED_HEARTBEAT) } else { self.heartbeat }
    }

    fn send_heartbeat(&mut self) {
        let state = self.state();
        self.enqueue(&ToCoordinator::Heartbeat(state));
        reach(FaultPoint::ControlSentHeartbeat);
    }

    /// The call state of this rank, or the last known one if the executor changes it during the read.
    fn state(&mut self) -> CallState {
        if let Some(state) = self.shared.call_state.read() {
            self.state = state;
        }
        self.state
    }

    fn flush(&mut self) -> std::result::Result<(), ConnectionLost> {
        self.stream.flush().map_err(|cause| ConnectionLost(format!("broke ({cause})")))
    }

    fn wait(&self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        let mut fds = [
            PollFd::new(&self.shared.wake, PollFlags::IN),
            PollFd::new(&self.stream, self.stream.poll_flags()),
        ];
        // An interrupted wait ends early; the next one makes up for it.
        let _ = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
        self.shared.wake.drain();
    }

    /// Handles received messages. Whether any bytes arrived.
    fn receive(&mut self) -> std::result::Result<bool, ConnectionLost> {
        let received = self.stream.receive(FRAME_LIMIT);
        for frame in &received.frames {
            let Some(message) = decode::<ToRank>(frame) else {
                return Err(ConnectionLost("carried an invalid frame".to_owned()));
            };
            self.on_message(message);
        }
        received.end.map_or(Ok(received.any), |cause| Err(ConnectionLost(cause)))
    }

    pub(super) fn on_message(&mut self, message: ToRank) {
        match message {
            ToRank::RootCause(error) => {
                log::debug!("root cause: {error}");
                self.fail(error);
            }
            ToRank::Gathered { number, parts } => {
                self.shared.state().gathered = Some((number, parts));
                self.shared.changed.notify_all();
            }
            ToRank::RequestState if !self.leaving => self.send_heartbeat(),
            ToRank::Closing => self.closing = true,
            ToRank::Left { rank, finished } => {
                self.shared.departure.record(rank, finished);
                if !self.leaving {
                    self.send_heartbeat();
                }
            }
            ToRank::RequestState
            | ToRank::Refused(_)
            | ToRank::Challenge(_)
            | ToRank::HelloAck(_)
            | ToRank::Welcome { .. }
            | ToRank::HeartbeatAck
            | ToRank::Attempt(_)
            | ToRank::Moved(_)
            | ToRank::TryAgain(_)
            | ToRank::Status(_) => {}
        }
    }

    fn fail(&self, error: Error) {
        // Raise the fault first: threads that wait for the shared state check the fault next.
        self.shared.fault.raise(error.clone());
        self.shared.state().root_cause.get_or_insert(error);
        self.shared.changed.notify_all();
    }

    /// The coordinator is gone, and with it the process it ran in.
    fn on_coordinator_lost(&mut self, cause: &str) {
        if self.shared.state().root_cause.is_some() {
            return;
        }
        let activity = match self.state() {
            CallState::InCall(call) => format!("while this rank was in {call}"),
            CallState::Idle { .. } => "while this rank was in no call".to_owned(),
        };
        let message =
            format!("{} is gone: the control connection to it {cause} {activity}", self.host_process);
        self.fail(Error::peer_lost(message));
    }

    /// The coordinator's process has ended after it had announced that. A call that this rank is in, and that another rank has
    /// left without, fails now: the coordinator did not hear of it.
    fn on_coordinator_closed(&mut self) {
        std::thread::sleep(CALL_VISIBLE);
        if let CallState::InCall(call) = self.state()
            && let Err(error) = self.shared.departure.check(self.shared.rank, &call)
        {
            self.fail(error);
        }
    }

    /// Sends a goodbye and waits until the coordinator closes the connection. It does so once all ranks
    /// concerned are notified.
    fn shut_down(&mut self) {
        let until = Instant::now() + GOODBYE_TIMEOUT;
        let state = self.state();
        reach(FaultPoint::ControlLeaves);
        self.enqueue(&ToCoordinator::Goodbye(state));
        self.leaving = true;
        let mut finished = false;
        while Instant::now() < until {
            if !finished && self.flush().is_err() {
                return;
            }
            if !finished && !self.stream.has_unsent() {
                // Closing at once could discard the goodbye if received data is still unread.
                self.stream.shut_down_write();
                reach(FaultPoint::ControlSentGoodbye);
                finished = true;
            }
            self.wait(until);
            if self.receive().is_err() {
                return;
            }
        }
        log::debug!("the coordinator did not close the connection after a goodbye");
    }
}
