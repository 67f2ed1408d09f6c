//! The thread that answers ranks that shrink, for all communicators of this process.
//!
//! Owns the listening sockets, the accepted connections until their rank is known, and the ranks that it
//! serves, each with connections and an agreement of its own. Must not block, and must not know how ranks
//! agree.

use super::frame::{ServiceNumber, frame_limit};
use super::ports_shared::{PortsShared, ShrinkSocket};
use super::served_rank::ServedRank;
use super::unidentified::{Routing, UnidentifiedConnections};
use crate::descriptor;
use crate::descriptor_limit;
use crate::wake::sleep;
use rustix::event::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Connections accepted per listener before others are served again.
const ACCEPT_BATCH: usize = 64;
/// How long the listeners are ignored after the system ran out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Accepted connections that may be unauthenticated, in addition to one for each rank of each communicator.
/// All together have at most a quarter of the descriptors of the process.
const UNAUTHENTICATED: usize = 64;
/// How many ranks that have left are remembered: others learn at once that they are gone, even while this
/// process joins a communicator.
const REMEMBERED: usize = 1024;

/// The thread of some ports.
pub(super) struct ShrinkThread {
    shared: Arc<PortsShared>,
    sockets: Vec<ShrinkSocket>,
    /// Accepted connections whose rank is not known.
    unidentified: UnidentifiedConnections,
    ranks: Vec<ServedRank>,
    /// Ranks that have left, the newest last.
    departed: VecDeque<ServiceNumber>,
    /// Whether others may look for ranks that are not served yet.
    are_joining: bool,
    max_unauthenticated: usize,
    accept_resumes: Option<Instant>,
}

/// What is ready.
#[derive(Debug, Default)]
struct ReadyIo {
    accept: bool,
    unidentified: Vec<bool>,
    /// For each served rank, its connections in their order.
    ranks: Vec<Vec<bool>>,
}

impl ShrinkThread {
    pub(super) fn new(shared: Arc<PortsShared>, sockets: Vec<ShrinkSocket>) -> Self {
        Self {
            shared,
            sockets,
            unidentified: UnidentifiedConnections::default(),
            ranks: Vec::new(),
            departed: VecDeque::new(),
            are_joining: false,
            max_unauthenticated: descriptor_limit::unauthenticated(UNAUTHENTICATED),
            accept_resumes: None,
        }
    }

    /// Serves until the last handle is dropped.
    pub(super) fn run(mut self) {
        // After a panic, too.
        let _ended = EndedThread(Arc::clone(&self.shared));
        loop {
            let ready = self.wait();
            let now = Instant::now();
            if self.accept_resumes.is_some_and(|at| now >= at) {
                self.accept_resumes = None;
            }
            let was_woken = self.shared.wake.drain();
            // Ranks and connections are added behind those that are ready.
            for (rank, ready) in self.ranks.iter_mut().zip(&ready.ranks) {
                rank.on_ready(ready, now);
            }
            let worlds = self.ranks.iter().map(ServedRank::world);
            self.unidentified.receive(&ready.unidentified, frame_limit(worlds.max().unwrap_or_default()));
            let is_leaving = was_woken && self.update();
            if ready.accept {
                self.accept(now);
            }
            self.route(now);
            for rank in &mut self.ranks {
                rank.advance(was_woken, now);
            }
            self.remove_departed();
            self.unidentified.remove_late(now);
            if is_leaving {
                return;
            }
        }
    }

    /// Takes over what the handles have changed. Whether there are no handles any more.
    fn update(&mut self) -> bool {
        let update = self.shared.update();
        self.are_joining = update.are_joining;
        if !update.arrived.is_empty() {
            self.ranks.extend(update.arrived);
            let wanted: usize = self.ranks.iter().map(ServedRank::world).sum();
            self.max_unauthenticated = descriptor_limit::unauthenticated(UNAUTHENTICATED + wanted);
        }
        update.leaving
    }

    /// Sleeps until an event.
    fn wait(&self) -> ReadyIo {
        let now = Instant::now();
        let mut fds = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        let listening = if self.accept_resumes.is_none() { &*self.sockets } else { &[] };
        fds.extend(listening.iter().map(|listening| PollFd::new(&listening.socket, PollFlags::IN)));
        fds.extend(self.unidentified.poll_fds());
        let mut counts = Vec::with_capacity(self.ranks.len());
        for rank in &self.ranks {
            let before = fds.len();
            rank.poll_fds(&mut fds);
            counts.push(fds.len() - before);
        }
        let until = self
            .ranks
            .iter()
            .filter_map(ServedRank::deadline)
            .chain(self.accept_resumes)
            .chain(self.unidentified.deadline())
            .min();
        // An interrupted wait ends early, and the next one makes up for it.
        if sleep(&mut fds, until.map(|at| at.saturating_duration_since(now))).is_err() {
            return ReadyIo::default();
        }
        let mut ready = fds[1..].iter().map(|fd| !fd.revents().is_empty());
        let mut next = |count: usize| Vec::from_iter(ready.by_ref().take(count));
        ReadyIo {
            accept: next(listening.len()).contains(&true),
            unidentified: next(self.unidentified.len()),
            ranks: counts.into_iter().map(next).collect(),
        }
    }

    fn accept(&mut self, now: Instant) {
        for index in 0..self.sockets.len() {
            for _ in 0..ACCEPT_BATCH {
                let accepted = descriptor::accept_tcp(&self.sockets[index].socket);
                match accepted.map(|(stream, _)| self.unidentified.add(stream, now)) {
                    Ok(Ok(())) => self.limit_unauthenticated(),
                    Ok(Err(cause)) => {
                        log::debug!("cannot use a connection between ranks that shrink: {cause}");
                    }
                    Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => break,
                    Err(cause) => {
                        // Mostly out of descriptors. The listener stays readable, so polling it would spin.
                        log::debug!("cannot accept a connection of a rank that shrinks: {cause}");
                        self.accept_resumes = Some(now + ACCEPT_PAUSE);
                        break;
                    }
                }
            }
        }
    }

    /// Closes the oldest unauthenticated connections if there are too many, whichever rank they are for.
    fn limit_unauthenticated(&mut self) {
        let with_ranks: usize = self.ranks.iter().map(ServedRank::unauthenticated).sum();
        for _ in self.max_unauthenticated..self.unidentified.len() + with_ranks {
            let oldest_of = |rank: &mut ServedRank| rank.oldest_unauthenticated();
            let oldest = self.ranks.iter_mut().filter_map(|rank| Some((oldest_of(rank)?, rank)));
            match (self.unidentified.oldest(), oldest.min_by_key(|(opened, _)| *opened)) {
                (Some(unidentified), Some((opened, rank))) if opened < unidentified => {
                    rank.remove_oldest_unauthenticated();
                }
                (None, Some((_, rank))) => rank.remove_oldest_unauthenticated(),
                _ => self.unidentified.remove_oldest(),
            }
        }
    }

    /// Hands connections to the ranks that they are for.
    fn route(&mut self, now: Instant) {
        let Self { unidentified, ranks, departed, are_joining, .. } = self;
        let routed =
            unidentified.route(now, |number| match ranks.iter().position(|rank| rank.number() == *number) {
                Some(position) => Routing::To(position),
                None if *are_joining && !departed.contains(number) => Routing::Wait,
                None => Routing::Refuse,
            });
        for (position, connection) in routed {
            ranks[position].accept(connection, now);
        }
    }

    fn remove_departed(&mut self) {
        let mut departed = Vec::new();
        self.ranks.retain(|rank| {
            if rank.has_left() {
                departed.push(rank.number());
            }
            !rank.has_left()
        });
        for number in departed {
            if self.departed.len() == REMEMBERED {
                self.departed.pop_front();
            }
            self.departed.push_back(number);
        }
    }
}

/// Says that the thread has ended when it is dropped.
struct EndedThread(Arc<PortsShared>);

impl Drop for EndedThread {
    fn drop(&mut self) {
        self.0.end();
    }
}
