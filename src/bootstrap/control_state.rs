//! What the handles of a control connection share with its thread.
//!
//! Owns what is requested of the thread, for all worlds of the connection, and for each world what the thread
//! has received and what the executor writes. There is one wake-up descriptor per connection.

use super::call_state::{CallStateCell, departed_before_call};
use super::peer_message_queue::PeerMessageQueue;
use super::protocol::{MAX_SUBWORLDS, ToCoordinator, WorldId, part_limit};
use crate::call::Call;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::interrupt::longest_sleep;
use crate::rank::Rank;
use crate::wake::WakeFd;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often a thread that waits for the coordinator checks the fault.
const FAULT_CHECK: Duration = Duration::from_millis(100);
/// How much longer than the thread itself a handle waits for the end of leaving.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);

/// A world of a control connection: the one that it was made for, or a further one.
pub(super) type WorldKey = Option<WorldId>;

/// What is requested of a connection's thread.
#[derive(Debug)]
pub(super) enum ConnectionRequest {
    /// Serve this subworld, beginning with this message.
    Begin(Arc<Shared>, ToCoordinator),
    /// Send a message of this world.
    Send(WorldKey, ToCoordinator),
    /// Leave this world.
    Leave(WorldKey),
}

/// What the handles of all worlds of one connection share with its thread.
#[derive(Debug)]
pub(super) struct SharedConnection {
    pub(super) wake: WakeFd,
    state: Mutex<ConnectionState>,
}

/// The part that the mutex protects.
#[derive(Debug, Default)]
struct ConnectionState {
    requests: Vec<ConnectionRequest>,
    /// The subworlds of the connection.
    further: BTreeSet<WorldId>,
    /// The thread has ended or is about to: it takes no requests any more.
    ended: bool,
}

impl SharedConnection {
    fn new() -> Result<Self> {
        Ok(Self { wake: WakeFd::new()?, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the connection has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.state().ended
    }

    /// Passes a request to the thread. Does not block.
    fn request(&self, request: ConnectionRequest) {
        let mut state = self.state();
        if !state.ended {
            state.requests.push(request);
            drop(state);
            self.wake.notify();
        }
    }

    /// Lets the thread serve a subworld, beginning with `message`.
    ///
    /// # Errors
    /// `InvalidArgument` if the connection has a world with this id; `System` if it has too many; `PeerLost`
    /// if it has ended.
    pub(super) fn begin(&self, id: WorldId, shared: &Arc<Shared>, message: ToCoordinator) -> Result<()> {
        let mut state = self.state();
        if state.ended {
            let message = "cannot open a communicator: the process that runs the coordinator has left";
            return Err(Error::peer_lost(message));
        }
        if state.further.len() >= MAX_SUBWORLDS {
            return Err(Error::system(format!(
                "cannot open a communicator: this process has {MAX_SUBWORLDS} over one control connection, which is the \
                 maximum: free some of them"
            )));
        }
        if !state.further.insert(id) {
            let message =
                "cannot open a communicator: this process has one with the same id over this connection";
            return Err(Error::invalid_argument(message));
        }
        state.requests.push(ConnectionRequest::Begin(Arc::clone(shared), message));
        drop(state);
        self.wake.notify();
        Ok(())
    }

    /// Whether this process opens, or has, a subworld with this id over the connection.
    #[cfg(test)]
    pub(super) fn has_further(&self, id: WorldId) -> bool {
        self.state().further.contains(&id)
    }

    /// The requests since the last call.
    pub(super) fn take_requests(&self) -> Vec<ConnectionRequest> {
        std::mem::take(&mut self.state().requests)
    }

    /// Accepts no requests from now on, and returns the last ones.
    pub(super) fn end(&self) -> Vec<ConnectionRequest> {
        let mut state = self.state();
        state.ended = true;
        std::mem::take(&mut state.requests)
    }

    /// The world is no world of this connection any more.
    pub(super) fn forget(&self, world: WorldKey) {
        if let Some(id) = world {
            self.state().further.remove(&id);
        }
    }
}

/// State of one world, shared between its handle and the connection's thread.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) connection: Arc<SharedConnection>,
    pub(super) world: WorldKey,
    pub(super) rank: Rank,
    pub(super) fault: Arc<Fault>,
    pub(super) call_state: Arc<CallStateCell>,
    /// The rank that left after the fewest calls.
    pub(super) departure: Departure,
    /// Whether a message of another rank is unread. Tells readers without the mutex.
    pub(super) has_peer_messages: AtomicBool,
    state: Mutex<SharedState>,
    changed: Condvar,
}

/// The part of the shared state that the mutex protects.
#[derive(Debug, Default)]
pub(super) struct SharedState {
    /// All ranks have opened the world. Only for subworlds.
    pub(super) is_open: bool,
    /// The exchange that this rank waits for.
    pub(super) gathering: Option<AwaitedExchange>,
    pub(super) peer_messages: PeerMessageQueue,
    pub(super) root_cause: Option<Error>,
    /// The world has failed, and shows it when a process has ended.
    pub(super) is_held: bool,
    /// This rank has left, or the thread has ended: no message is sent or received any more.
    pub(super) ended: bool,
}

/// An exchange that a rank waits for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct AwaitedExchange {
    pub(super) number: u64,
    /// How many ranks give a part.
    pub(super) world: usize,
    /// The parts so far, in rank order.
    pub(super) parts: Vec<Vec<u8>>,
}

impl SharedState {
    /// Adds the next parts of an exchange, if this rank waits for it.
    ///
    /// # Errors
    /// `Disagreement` if they are more or longer than the ranks may give.
    pub(super) fn add_gathered(&mut self, number: u64, parts: Vec<Vec<u8>>) -> Result<()> {
        let Some(gathering) = self.gathering.as_mut().filter(|gathering| gathering.number == number) else {
            return Ok(());
        };
        let limit = part_limit(gathering.world);
        if gathering.parts.len() + parts.len() > gathering.world
            || parts.iter().any(|part| part.len() > limit)
        {
            return Err(Error::disagreement(format!(
                "the coordinator sent more in exchange #{number} than {} ranks can give, which no release of flexring does; do all \
                 ranks run the same version?",
                gathering.world
            )));
        }
        gathering.parts.extend(parts);
        Ok(())
    }

    /// Takes the parts of the exchange, if all have arrived.
    pub(super) fn take_gathered(&mut self) -> Option<Vec<Vec<u8>>> {
        let is_complete = |gathering: &mut AwaitedExchange| gathering.parts.len() == gathering.world;
        self.gathering.take_if(is_complete).map(|gathering| gathering.parts)
    }
}

/// The rank that left after the fewest calls, as far as the coordinator has announced.
#[derive(Debug)]
pub(super) struct Departure {
    /// The rank. Valid if `finished` is not `u64::MAX`.
    rank: AtomicU64,
    /// How many calls it finished; `u64::MAX` if no rank has left.
    finished: AtomicU64,
}

impl Departure {
    fn none() -> Self {
        Self { rank: AtomicU64::new(0), finished: AtomicU64::new(u64::MAX) }
    }

    pub(super) fn is_known(&self) -> bool {
        self.finished.load(Ordering::Relaxed) != u64::MAX
    }

    pub(super) fn record(&self, rank: Rank, finished: u64) {
        self.rank.store(rank as u64, Ordering::Relaxed);
        // Readers that see the number see its rank, or one that left later with a smaller number.
        self.finished.store(finished, Ordering::Release);
    }

    /// The rank that has finished fewest calls, if any has left.
    pub(super) fn leaver(&self) -> Option<Rank> {
        let is_known = self.finished.load(Ordering::Acquire) != u64::MAX;
        is_known.then(|| self.rank.load(Ordering::Relaxed) as Rank)
    }

    /// Fails if a rank has left without `call`, in which `rank` is. Costs one load if no rank has left.
    #[inline]
    pub(super) fn check(&self, rank: Rank, call: &Call) -> Result<()> {
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
    /// The state of the world that a new connection is made for.
    pub(super) fn new(rank: Rank, fault: Arc<Fault>) -> Result<Self> {
        Ok(Self::in_world(Arc::new(SharedConnection::new()?), None, rank, fault))
    }

    /// The state of a subworld of this connection.
    pub(super) fn further(&self, id: WorldId, rank: Rank, fault: Arc<Fault>) -> Self {
        Self::in_world(Arc::clone(&self.connection), Some(id), rank, fault)
    }

    fn in_world(connection: Arc<SharedConnection>, world: WorldKey, rank: Rank, fault: Arc<Fault>) -> Self {
        Self {
            connection,
            world,
            rank,
            fault,
            call_state: Arc::default(),
            departure: Departure::none(),
            has_peer_messages: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Records that this rank enters a call. Fails if a rank has left without that call. Called by the
    /// executing thread.
    pub(super) fn enter_call(&self, call: &Call) -> Result<()> {
        self.call_state.enter(call);
        self.departure.check(self.rank, call)
    }

    /// Queues a message of another rank, and wakes its reader.
    ///
    /// # Errors
    /// `Disagreement` if too many are unread.
    pub(super) fn add_peer_message(&self, from: Rank, message: Vec<u8>) -> Result<()> {
        let mut state = self.state();
        state.peer_messages.push(from, message)?;
        self.has_peer_messages.store(true, Ordering::Release);
        Ok(())
    }

    /// Begins to leave the world. Further times have no effect.
    pub(super) fn begin_leaving(&self) {
        self.connection.request(ConnectionRequest::Leave(self.world));
    }

    /// Leaves the world, and waits until the thread has done so.
    pub(super) fn leave(&self) {
        self.begin_leaving();
        let wait = self.changed.wait_timeout_while(self.state(), LEAVE_TIMEOUT, |state| !state.ended);
        let (state, _) = wait.unwrap_or_else(PoisonError::into_inner);
        if !state.ended {
            log::error!("the control connection's thread of rank {} does not let it leave", self.rank);
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, SharedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the shared state, and wakes the threads that wait for it.
    pub(super) fn change(&self, change: impl FnOnce(&mut SharedState)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    /// The error of a rank that needs the coordinator after its process has left.
    pub(super) fn coordinator_has_left(&self, what: &str) -> Error {
        match self.departure.leaver() {
            Some(leaver) => Error::peer_lost(format!(
                "{what}: rank {leaver} has left, and so has the process that runs the coordinator"
            ))
            .with_suspect(leaver),
            None => Error::peer_lost(format!("{what}: the process that runs the coordinator has left")),
        }
    }

    /// Queues a message for the coordinator. Does not block.
    pub(super) fn send(&self, message: ToCoordinator) {
        self.connection.request(ConnectionRequest::Send(self.world, message));
    }

    /// Waits until `done` returns true, at most for `timeout`, or until the program wants the thread back.
    /// Callers see from what `done` has taken, and from the fault, why the wait ended.
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
                self.send(ToCoordinator::Abort { reason: error.message().into() });
                return;
            }
        }
    }
}
