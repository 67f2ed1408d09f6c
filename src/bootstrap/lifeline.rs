//! The lifeline: one rank's control connection, from the meeting to the goodbye.
//!
//! Owns the thread that says "I live" and listens for verdicts, and the exchange of cards among ranks. Must
//! not know what a call does: the executor writes a [`Status`] and reports what fails.
//!
//! Whatever ends one world ends as the same [`Fault`] on all its ranks, and touches no other world.

use super::connection::Connection;
use super::frame::{Caller, FRAME_LIMIT, Terms, ToHub, ToRank, VERSION, decode, encode};
use super::hub::Hub;
use super::launcher::{Identity, Meeting};
use super::meeting::{self, Way};
use super::roster::Process;
use super::silence::{Silence, seconds};
use super::status::{Standing, Status};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::fault::Fault;
use crate::transport::Rank;
use crate::wake::WakeFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a report waits for the verdict on it.
const VERDICT_PATIENCE: Duration = Duration::from_secs(1);
/// How long a goodbye may take.
const GOODBYE_PATIENCE: Duration = Duration::from_millis(800);
/// How much longer than the hub a rank waits for an exchange, so that it hears who was missing.
const GRACE: Duration = Duration::from_secs(2);

/// A rank's place among its world.
#[derive(Debug)]
pub struct Lifeline {
    rank: Rank,
    world: usize,
    timeout: Duration,
    shared: Arc<Shared>,
    /// The number of the last exchange; held while one is under way, so that they keep their order.
    exchanges: Mutex<u64>,
    thread: Option<JoinHandle<()>>,
    /// Rank 0's, if the ranks meet at an address. Dropped last: the others may still need it.
    _hub: Option<Hub>,
}

/// What the lifeline shares with its thread.
#[derive(Debug)]
struct Shared {
    fault: Arc<Fault>,
    status: Arc<Status>,
    desk: Mutex<Desk>,
    changed: Condvar,
    wake: WakeFd,
}

/// What lies between the threads of a rank and its lifeline's thread.
#[derive(Debug, Default)]
struct Desk {
    outgoing: Vec<ToHub>,
    gathered: Option<(u64, Vec<Vec<u8>>)>,
    verdict: Option<Error>,
    leaving: bool,
    /// The thread has ended or is about to: nothing more comes or goes.
    over: bool,
}

impl Lifeline {
    /// Meets the other ranks and begins to live: when this returns, all have come. As rank 0 of a meeting at
    /// an address, it is the host. `fault` is raised when this world fails.
    ///
    /// # Errors
    /// `Rendezvous` if the ranks do not find each other within `connect_timeout`; `Disagreement` if they
    /// differ in release, world size or settings; `PeerLost` if one dies meanwhile; `System`.
    pub fn join(identity: &Identity, config: &Config, fault: Arc<Fault>) -> Result<Self> {
        let deadline = Instant::now() + config.connect_timeout;
        let hub = match &identity.meeting {
            Meeting::Address { host, port } if identity.rank == 0 => {
                let listeners = meeting::listen(host, *port)?;
                Some(Hub::open(identity.token, listeners, format!("{host} port {port}"))?)
            }
            Meeting::Address { .. } | Meeting::Id(_) => None,
        };
        let way = hub.as_ref().map_or(Way::Meeting(&identity.meeting), |hub| Way::Own(hub.addresses()));
        let caller = Caller {
            version: VERSION.to_owned(),
            token: identity.token,
            rank: identity.rank,
            world: identity.world,
            process: Process::this(),
        };
        let terms = Terms {
            settings: config.shared(),
            patience: config.connect_timeout,
            timeout: config.connect_timeout,
            heartbeat: config.heartbeat,
        };
        let (connection, keeper) = meeting::attend(&way, &caller, &terms, deadline, &fault)?;
        let shared = Arc::new(Shared {
            fault,
            status: Arc::default(),
            desk: Mutex::default(),
            changed: Condvar::new(),
            wake: WakeFd::new()?,
        });
        let keeping = Keeping {
            shared: shared.clone(),
            connection,
            keeper,
            heartbeat: config.heartbeat,
            standing: Standing::Idle { finished: 0 },
            closing: false,
        };
        let thread = std::thread::Builder::new()
            .name("flexring-lifeline".to_owned())
            .spawn(move || keeping.run())
            .map_err(|cause| Error::system("cannot start the lifeline's thread", cause))?;
        Ok(Self {
            rank: identity.rank,
            world: identity.world,
            timeout: config.connect_timeout,
            shared,
            exchanges: Mutex::new(0),
            thread: Some(thread),
            _hub: hub,
        })
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn world(&self) -> usize {
        self.world
    }

    /// Where the executor says which call it is in; heartbeats tell the others.
    #[must_use]
    pub fn status(&self) -> &Arc<Status> {
        &self.shared.status
    }

    /// Gives every rank's `mine` to every rank, in the order of ranks; `what` it is, for messages. All ranks
    /// must call this in the same order. With nothing to give it is a barrier.
    ///
    /// # Errors
    /// `InvalidArgument` if `mine` is longer than 8 MiB divided by the ranks; `Timeout`, naming the ranks
    /// that did not come, after `connect_timeout`; or what else has failed this world.
    pub fn all_gather(&self, what: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        // Half the limit is for the parts, and more than enough for what lies around them.
        let limit = FRAME_LIMIT / 2 / self.world;
        if mine.len() > limit {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "cannot exchange {what}: {} bytes are more than the {limit} that each of {} ranks may give",
                    mine.len(),
                    self.world
                ),
            ));
        }
        let mut exchanges = self.exchanges.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.fault.check()?;
        *exchanges += 1;
        let expected = *exchanges;
        self.shared.say(ToHub::Gather { number: expected, what: what.to_owned(), part: mine.to_vec() });
        let mut parts = None;
        self.shared.wait(self.timeout + GRACE, |desk| {
            parts = desk.gathered.take_if(|(number, _)| *number == expected).map(|(_, parts)| parts);
            parts.is_some() || desk.verdict.is_some() || desk.over
        });
        match parts {
            Some(parts) if parts.len() == self.world => Ok(parts),
            Some(parts) => Err(Error::new(
                ErrorKind::Internal,
                format!("an exchange of {what} among {} ranks gave {} parts", self.world, parts.len()),
            )),
            None => {
                self.shared.fault.check()?;
                Err(Error::new(
                    ErrorKind::Timeout,
                    format!("the hub did not answer an exchange of {what} within {}", seconds(self.timeout)),
                ))
            }
        }
    }

    /// Tells the world that this rank's call failed, while it still stands in that call, and gives back what
    /// counts for all: a verdict of the hub, which knows of deaths and of who has not called, or `error` if
    /// none comes within a second. `suspect` is the rank that `error` blames, if any. Raises the fault.
    pub fn report(&self, error: Error, suspect: Option<Rank>) -> Error {
        // Seen from the thread that enters calls, this is always known.
        let standing = self.shared.status.read();
        self.shared.say(ToHub::Report {
            error: error.clone(),
            suspect,
            standing: standing.unwrap_or(Standing::Idle { finished: 0 }),
        });
        let mut verdict = None;
        self.shared.wait(VERDICT_PATIENCE, |desk| {
            verdict.clone_from(&desk.verdict);
            verdict.is_some() || desk.over
        });
        self.shared.fault.raise(verdict.unwrap_or(error))
    }

    /// Ends this world for everybody, from any thread and at once: raises the fault here, and lets the hub
    /// tell the others.
    pub fn abort(&self, reason: &str) {
        let message = format!("rank {}: {reason}", self.rank);
        self.shared.fault.raise(Error::new(ErrorKind::Aborted, message));
        self.shared.say(ToHub::Abort { reason: reason.to_owned() });
    }

    /// Says goodbye, as dropping does. Takes a second at most.
    pub fn leave(self) {
        drop(self);
    }
}

impl Drop for Lifeline {
    fn drop(&mut self) {
        self.shared.desk().leaving = true;
        self.shared.ring();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the lifeline's thread of rank {} panicked", self.rank);
        }
    }
}

impl Shared {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        self.wake.notify();
    }

    /// Lays something on the desk for the hub. Does not block.
    fn say(&self, said: ToHub) {
        self.desk().outgoing.push(said);
        self.ring();
    }

    /// Waits until `done` says so, at most this long.
    fn wait(&self, patience: Duration, mut done: impl FnMut(&mut Desk) -> bool) {
        let desk = self.desk();
        // Whether it was done or late is seen by what `done` has taken.
        let _ = self.changed.wait_timeout_while(desk, patience, |desk| !done(desk));
    }
}

/// The lifeline's thread.
struct Keeping {
    shared: Arc<Shared>,
    connection: Connection,
    /// What the hub's process is called.
    keeper: String,
    heartbeat: Duration,
    /// Where this rank was last seen to stand.
    standing: Standing,
    /// Whether the hub said that it may go away.
    closing: bool,
}

/// Why a connection is no more: "closed", or "has been silent for …".
struct Gone(String);

impl Keeping {
    fn run(mut self) {
        if let Err(Gone(cause)) = self.live()
            && !self.closing
        {
            self.mourn(&cause);
        }
        self.shared.desk().over = true;
        self.shared.changed.notify_all();
    }

    /// Until this rank leaves.
    fn live(&mut self) -> std::result::Result<(), Gone> {
        let mut silence = Silence::new(self.heartbeat);
        let mut last = Instant::now();
        let mut next_beat = last;
        loop {
            let now = Instant::now();
            silence.lasts(now.saturating_duration_since(last));
            last = now;
            let leaving = self.clear_desk();
            if leaving {
                self.say_goodbye();
                return Ok(());
            }
            // A hub that does not read is not told more; its silence will tell.
            if now >= next_beat {
                if !self.connection.is_pending() {
                    self.beat();
                }
                next_beat = now + self.heartbeat;
            }
            self.flush()?;
            self.sleep(next_beat);
            if self.receive()? {
                silence.broken();
            }
            if let Some(silent) = silence.fatal() {
                return Err(Gone(format!("has been silent for {}", seconds(silent))));
            }
        }
    }

    /// Posts what lies on the desk. Whether this rank leaves.
    fn clear_desk(&mut self) -> bool {
        let (outgoing, leaving) = {
            let mut desk = self.shared.desk();
            (std::mem::take(&mut desk.outgoing), desk.leaving)
        };
        for said in &outgoing {
            self.post(said);
        }
        leaving
    }

    fn post(&mut self, said: &ToHub) {
        match encode(said) {
            Ok(bytes) => self.connection.post(bytes),
            Err(error) => log::error!("a rank cannot speak to its hub: {error}"),
        }
    }

    fn beat(&mut self) {
        let standing = self.standing();
        self.post(&ToHub::Beat(standing));
    }

    /// Where this rank stands; if that changes all the while, where it stood.
    fn standing(&mut self) -> Standing {
        if let Some(standing) = self.shared.status.read() {
            self.standing = standing;
        }
        self.standing
    }

    fn flush(&mut self) -> std::result::Result<(), Gone> {
        self.connection.flush().map_err(|cause| Gone(format!("broke ({cause})")))
    }

    fn sleep(&self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        let mut fds = [
            PollFd::new(&self.shared.wake, PollFlags::IN),
            PollFd::new(&self.connection, self.connection.interest()),
        ];
        // An interrupted wait is over early, and the next one makes up for it.
        let _ = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
        self.shared.wake.drain();
    }

    /// Reads what the hub says. Whether it said anything.
    fn receive(&mut self) -> std::result::Result<bool, Gone> {
        let received = self.connection.receive(FRAME_LIMIT);
        for frame in &received.frames {
            let Some(said) = decode::<ToRank>(frame) else {
                return Err(Gone("carried a frame that makes no sense".to_owned()));
            };
            self.hear(said);
        }
        received.end.map_or(Ok(received.any), |cause| Err(Gone(cause)))
    }

    fn hear(&mut self, said: ToRank) {
        match said {
            ToRank::Verdict(error) | ToRank::Foreign(error) => {
                log::debug!("verdict: {error}");
                self.judge(error);
            }
            ToRank::Gathered { number, parts } => {
                self.shared.desk().gathered = Some((number, parts));
                self.shared.changed.notify_all();
            }
            ToRank::Ask => self.beat(),
            ToRank::Closing => self.closing = true,
            ToRank::Heard | ToRank::Welcome { .. } | ToRank::Pulse => {}
        }
    }

    fn judge(&self, error: Error) {
        // The fault first: whoever waits at the desk looks at it next.
        self.shared.fault.raise(error.clone());
        self.shared.desk().verdict.get_or_insert(error);
        self.shared.changed.notify_all();
    }

    /// The hub is gone, and with it the process that it lived in.
    fn mourn(&mut self, cause: &str) {
        if self.shared.desk().verdict.is_some() {
            return;
        }
        let doing = match self.standing() {
            Standing::Within(call) => format!("while this rank was in {call}"),
            Standing::Idle { .. } => "while this rank was in no call".to_owned(),
        };
        let message = format!("{} is gone: the control connection to it {cause} {doing}", self.keeper);
        self.judge(Error::new(ErrorKind::PeerLost, message));
    }

    /// Says goodbye and waits until the hub hangs up, which it does when everybody it concerns has been told.
    fn say_goodbye(&mut self) {
        let until = Instant::now() + GOODBYE_PATIENCE;
        let standing = self.standing();
        self.post(&ToHub::Goodbye(standing));
        let mut finished = false;
        while Instant::now() < until {
            if self.flush().is_err() {
                return;
            }
            if !finished && !self.connection.is_pending() {
                // Closing at once could make the system forget the goodbye if something unread has come.
                self.connection.finish();
                finished = true;
            }
            self.sleep(until);
            if self.receive().is_err() {
                return;
            }
        }
        log::debug!("the hub did not answer a goodbye");
    }
}
