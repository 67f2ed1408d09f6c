//! The thread of a rank's control connection.
//!
//! Owns the connection: it sends heartbeats and queued messages, and receives root causes and news of other
//! ranks, for all worlds of the connection. It ends when the rank has left them all. Must not know who waits
//! for them: it shares its results with the handles ([`Shared`]).
//!
//! Once per heartbeat interval it sends one sign of life of the connection, and the call states of those
//! subworlds in which this rank's has changed. `subworlds` says why this is enough.

use super::control_state::{ConnectionRequest, Shared, SharedConnection, WorldKey};
use super::framed_stream::FramedStream;
use super::heartbeat::{HeartbeatMonitor, seconds};
use super::protocol::{FRAME_LIMIT, ToCoordinator, ToRank, decode, encode};
use super::world_client::WorldClient;
use crate::error::Result;
use crate::fault_point::{FaultPoint, reach};
use crate::peer_text::PeerText;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long leaving may take.
const GOODBYE_TIMEOUT: Duration = Duration::from_millis(800);
/// Maximum interval between heartbeats once a rank has left, so that the coordinator soon hears of a call
/// that the leaver does not make.
const DEPARTED_HEARTBEAT: Duration = Duration::from_millis(250);
/// How often a rank looks whether a process has ended.
const EXIT_CHECK: Duration = Duration::from_millis(10);
/// Reads after a connection has failed, at most: the other end may never stop sending.
const LAST_READS: usize = 64;
/// How long a call that was entered while a rank left may take to become visible to the control connection's
/// thread.
const CALL_VISIBLE: Duration = Duration::from_millis(20);

/// The thread that serves the control connection.
pub(super) struct ControlThread {
    connection: Arc<SharedConnection>,
    stream: FramedStream,
    /// Description of the coordinator's process.
    host_process: PeerText,
    heartbeat: Duration,
    worlds: BTreeMap<WorldKey, WorldClient>,
}

/// Why the connection ended: a verb phrase such as `closed` or `has been silent for 10 s`.
pub(super) struct ConnectionLost(String);

impl ConnectionLost {
    fn invalid_frame() -> Self {
        Self("carried an invalid frame".to_owned())
    }
}

impl ControlThread {
    /// Serves `stream`, whose other end is the coordinator in the process that `host_process` describes.
    pub(super) fn new(
        shared: Arc<Shared>,
        stream: FramedStream,
        host_process: PeerText,
        heartbeat: Duration,
    ) -> Self {
        let connection = Arc::clone(&shared.connection);
        let first = WorldClient::first(shared, host_process.clone());
        Self { connection, stream, host_process, heartbeat, worlds: BTreeMap::from([(None, first)]) }
    }

    /// The body of the thread.
    pub(super) fn run(mut self) {
        let outcome = self.run_until_leaving();
        if let Err(ConnectionLost(cause)) = &outcome {
            self.on_connection_lost(cause);
            self.show_held_failures();
        }
        // A world that begins now is lost as well.
        for request in self.connection.end() {
            if let ConnectionRequest::Begin(shared, _) = request {
                self.begin(shared);
            }
        }
        if let Err(ConnectionLost(cause)) = outcome {
            self.worlds
                .values_mut()
                .filter(|world| !world.is_open)
                .for_each(|world| world.on_coordinator_lost(&cause));
        }
        self.worlds.values().for_each(WorldClient::end);
    }

    /// Serves the connection until this rank has left all worlds.
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
            self.handle_requests(now);
            self.expire_leaving(now);
            if self.worlds.values().all(|world| world.leaving.is_some()) {
                self.shut_down();
                return Ok(());
            }
            // Skip the heartbeat while writes are pending; the timeout detects a stuck coordinator.
            let interval = self.heartbeat_interval();
            if last_heartbeat.is_none_or(|sent| now >= sent + interval) {
                if !self.stream.has_unsent() {
                    self.send_heartbeats();
                }
                last_heartbeat = Some(now);
            }
            if let Err(lost) = self.flush() {
                // What the coordinator has sent before says more than the end of the connection.
                for _ in 0..LAST_READS {
                    if !self.receive()? {
                        break;
                    }
                }
                return Err(lost);
            }
            let next_look = self.show_failures(now);
            let leaving = self.worlds.values().filter_map(|world| world.leaving);
            let next_heartbeat = last_heartbeat.unwrap_or(now) + interval;
            self.wait(leaving.chain(next_look).chain([next_heartbeat]).min().unwrap_or(now));
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

    /// Does what the handles ask for.
    fn handle_requests(&mut self, now: Instant) {
        for request in self.connection.take_requests() {
            match request {
                ConnectionRequest::Begin(shared, message) => {
                    self.begin(shared);
                    self.enqueue(&message);
                }
                ConnectionRequest::Send(key, message) => {
                    if self.worlds.get(&key).is_some_and(|world| world.leaving.is_none()) {
                        self.enqueue_in(key, &message);
                    }
                }
                ConnectionRequest::Leave(key) => {
                    let stays = |world: &&mut WorldClient| world.leaving.is_none();
                    let Some(world) = self.worlds.get_mut(&key).filter(stays) else { continue };
                    world.leaving = Some(now + GOODBYE_TIMEOUT);
                    let state = world.state();
                    reach(FaultPoint::ControlLeaves);
                    self.enqueue_in(key, &ToCoordinator::Goodbye(state));
                }
            }
        }
    }

    fn begin(&mut self, shared: Arc<Shared>) {
        let world = WorldClient::further(Arc::clone(&shared), self.host_process.clone());
        self.worlds.insert(shared.world, world);
    }

    fn enqueue(&mut self, message: &ToCoordinator) {
        self.enqueue_in(None, message);
    }

    /// Queues a message of this world.
    fn enqueue_in(&mut self, key: WorldKey, message: &ToCoordinator) {
        let encoded: Result<_> = match key {
            None => encode(message),
            Some(id) => message.in_world(id).and_then(|message| encode(&message)),
        };
        match encoded {
            Ok(bytes) => self.stream.enqueue(bytes),
            Err(error) => log::error!("cannot encode a message to the coordinator: {error}"),
        }
    }

    fn heartbeat_interval(&self) -> Duration {
        if self.worlds.values().any(|world| world.shared.departure.is_known()) {
            self.heartbeat.min(DEPARTED_HEARTBEAT)
        } else {
            self.heartbeat
        }
    }

    /// Sends a sign of life, and the call states of subworlds that have changed.
    fn send_heartbeats(&mut self) {
        if self.worlds.get(&None).is_some_and(WorldClient::is_active) {
            self.send_state(None);
        } else {
            self.enqueue(&ToCoordinator::Alive);
        }
        let changed = |(key, world): (&WorldKey, &WorldClient)| {
            (key.is_some() && world.is_active() && world.has_changed()).then_some(*key)
        };
        let changed: Vec<WorldKey> = self.worlds.iter().filter_map(changed).collect();
        for key in changed {
            self.send_state(key);
        }
    }

    /// Sends the call state in this world.
    fn send_state(&mut self, key: WorldKey) {
        if let Some(state) =
            self.worlds.get_mut(&key).filter(|world| world.is_active()).map(WorldClient::state)
        {
            self.enqueue_in(key, &ToCoordinator::Heartbeat(state));
            reach(FaultPoint::ControlSentHeartbeat);
        }
    }

    fn flush(&mut self) -> std::result::Result<(), ConnectionLost> {
        self.stream.flush().map_err(|cause| ConnectionLost(format!("broke ({cause})")))
    }

    fn wait(&self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        let mut fds = [
            PollFd::new(&self.connection.wake, PollFlags::IN),
            PollFd::new(&self.stream, self.stream.poll_flags()),
        ];
        // An interrupted wait ends early; the next one makes up for it.
        let _ = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
        self.connection.wake.drain();
    }

    /// Handles received messages. Whether any bytes arrived.
    fn receive(&mut self) -> std::result::Result<bool, ConnectionLost> {
        let received = self.stream.receive(FRAME_LIMIT);
        for frame in &received.frames {
            let message = decode::<ToRank>(frame).ok_or_else(ConnectionLost::invalid_frame)?;
            self.on_message(message)?;
        }
        received.end.map_or(Ok(received.any), |cause| Err(ConnectionLost(cause)))
    }

    /// Handles a message of the coordinator. Fails if it is not valid.
    pub(super) fn on_message(&mut self, message: ToRank) -> std::result::Result<(), ConnectionLost> {
        let (key, message) = match message {
            ToRank::InWorld { world, message } => match decode::<ToRank>(&message) {
                None | Some(ToRank::InWorld { .. }) => return Err(ConnectionLost::invalid_frame()),
                Some(message) => (Some(world), message),
            },
            message => (None, message),
        };
        self.on_world_message(key, message);
        Ok(())
    }

    /// Handles a message of one world.
    fn on_world_message(&mut self, key: WorldKey, message: ToRank) {
        // The rank may have left the world while the message was on its way.
        let Some(world) = self.worlds.get_mut(&key) else { return };
        match message {
            ToRank::RootCause(error) => {
                log::debug!("root cause: {error}");
                world.on_root_cause(error);
                if !world.is_open {
                    self.end(key);
                }
            }
            ToRank::Gathered { number, parts } => {
                let mut outcome = Ok(());
                world.shared.change(|state| outcome = state.add_gathered(number, parts));
                if let Err(error) = outcome {
                    world.fail(error);
                }
            }
            ToRank::RequestState => self.send_state(key),
            ToRank::AwaitExit { process, ends } => world.on_await_exit(process, ends),
            ToRank::Closing => world.on_closing(),
            ToRank::Left { rank, finished } => {
                world.shared.departure.record(rank, finished);
                self.send_state(key);
            }
            ToRank::FromPeer { from, message } => {
                if let Err(error) = world.shared.add_peer_message(from, message) {
                    world.fail(error);
                }
            }
            ToRank::Welcome { host, .. } => world.on_opened(host),
            ToRank::Notice(text) => log::warn!("rank {}: {text}", world.shared.rank),
            // The last world ends with the connection.
            ToRank::LeaveAck if world.leaving.is_some() && self.worlds.len() > 1 => self.end(key),
            ToRank::LeaveAck
            | ToRank::Refused(_)
            | ToRank::Challenge(_)
            | ToRank::HelloAck(_)
            | ToRank::HeartbeatAck
            | ToRank::Attempt(_)
            | ToRank::Moved(_)
            | ToRank::TryAgain(_)
            | ToRank::Status(_)
            | ToRank::InWorld { .. } => {}
        }
    }

    /// Shows the failures whose time has come. Returns when to look again, if there are others.
    fn show_failures(&mut self, now: Instant) -> Option<Instant> {
        self.worlds.values_mut().for_each(|world| world.show_failure(now));
        self.worlds.values().any(WorldClient::is_held).then(|| now + EXIT_CHECK)
    }

    /// Waits, without a connection, until all failures are shown, or this rank leaves.
    fn show_held_failures(&mut self) {
        while let Some(next_look) = self.show_failures(Instant::now()) {
            let left = next_look.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(&self.connection.wake, PollFlags::IN)];
            let _ = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
            self.connection.wake.drain();
            self.handle_requests(Instant::now());
            let left = |(key, world): (&WorldKey, &WorldClient)| world.leaving.map(|_| *key);
            let left: Vec<WorldKey> = self.worlds.iter().filter_map(left).collect();
            left.into_iter().for_each(|key| self.end(key));
        }
    }

    /// This rank is no part of the world any more.
    fn end(&mut self, key: WorldKey) {
        if let Some(world) = self.worlds.remove(&key) {
            world.end();
        }
    }

    /// Ends the worlds whose goodbyes have not been answered in time.
    fn expire_leaving(&mut self, now: Instant) {
        let is_expired = |world: &WorldClient| world.leaving.is_some_and(|until| now >= until);
        let expired: Vec<WorldKey> =
            self.worlds.iter().filter(|(_, world)| is_expired(world)).map(|(key, _)| *key).collect();
        for key in expired {
            // The last world ends with the connection.
            if self.worlds.len() > 1 {
                log::debug!("the coordinator did not answer a goodbye");
                self.end(key);
            }
        }
    }

    /// The connection has ended. That is no failure of a world whose ranks in the coordinator's process have
    /// left.
    fn on_connection_lost(&mut self, cause: &str) {
        for world in self.worlds.values_mut().filter(|world| !world.is_closing) {
            world.on_coordinator_lost(cause);
        }
        if self.worlds.values().any(|world| world.is_closing) {
            std::thread::sleep(CALL_VISIBLE);
        }
        for world in self.worlds.values_mut().filter(|world| world.is_closing) {
            world.on_coordinator_closed();
        }
    }

    /// Waits until the coordinator closes the connection, after the last goodbye. It does so once all ranks
    /// concerned are notified.
    fn shut_down(&mut self) {
        let until = Instant::now() + GOODBYE_TIMEOUT;
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
