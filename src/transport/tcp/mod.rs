//! TCP: links of one or several sockets to each peer, all driven by one thread without blocking.
//!
//! Owns the sockets of a rank and the queue of those that may move bytes.
//!
//! | file | owns |
//! |---|---|
//! | `listener` | the listening sockets |
//! | `connect` | connecting, accepting, and identifying the other end |
//! | `congestion` | the congestion control of a socket |
//! | `unauthenticated` | accepted connections whose other end is not known yet |
//! | `handshake` | the first messages of each end of a connection, and what they prove |
//! | `link` | one peer: the order of its messages, and what a lost connection means |
//! | `stream` | one socket: two queues of frames, and its readiness |
//! | `socket` | the socket itself, plain or encrypted |
//! | `frame` | one frame: its layout, and how much of it is sent or received |

mod congestion;
mod connect;
mod frame;
mod handshake;
mod link;
mod listener;
mod socket;
mod stream;
mod tcp_info;
mod unauthenticated;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;

pub(crate) use connect::{check_connected, start_connecting};
pub use listener::Listener;
pub use socket::LinkOptions;

use crate::call::Call;
use crate::descriptor;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::memory::Piece;
use crate::secret::SecretKey;
use crate::transport::{Events, PostedTransport, Rank, Transport};
use link::Link;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

/// Messages that may be in flight on one socket in one direction.
///
/// Not tuned yet. Over loopback on a busy machine with two cores, 4 was faster than 16 in most rounds (512
/// KiB messages, one direction), by no more than the difference between rounds. To be measured with
/// `bench/tcp_link.rs` on an idle machine.
const WINDOW: usize = 16;

/// Epoll events that one system call returns at most; further events wait for the next call.
const EPOLL_EVENTS: usize = 64;

/// Most posted receives with which polls probe. More are a sign of long vectors, whose time depends on
/// bandwidth, so the rest of the call does without.
const MOST_PROBED_RECEIVES: usize = 8;

/// Most links with which polls probe, so that it takes little time to see that none has anything to send.
const MOST_PROBED_LINKS: usize = 16;

/// Polls in a row that find nothing, after which a poll announces what was to be announced with a message,
/// and asks epoll even if polls probe: a rank that may spin for long, or waits for a peer that is gone, would
/// not tell its other peers what it runs, nor hear from them. These are about 0.3 ms, so an all-reduce that
/// waits for less does not pay for it.
const MOST_IDLE_POLLS: u32 = 1024;

/// The least send buffer of a connection within this machine, in bytes. The packets of the loopback device
/// have up to 64 KiB: with a buffer for fewer than two of them, a sender waits for acknowledgements that the
/// receiver delays (all-reduces of 64 KiB take 44 ms with 32 KiB, and 0.02 ms with 64).
const LOCAL_SEND_BUFFER: usize = 128 << 10;

const NO_TIME: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// A rank's TCP links.
///
/// Epoll is edge-triggered: it reports once when a socket becomes ready, and the socket counts as ready until
/// a system call would block. So an idle socket costs nothing, and the epoll descriptor does not wake this
/// rank for readiness that was reported before.
///
/// While a rank waits for few messages, and has nothing to send, polls **probe**: they read the message that
/// was posted first without asking epoll, and ask it only if there is none, and messages of other peers are
/// awaited. Waiting for a message is one system call less then: an all-reduce of 8 bytes between two ranks on
/// loopback takes 4.3 us instead of 4.9. Before the rank sleeps it asks epoll again, whose descriptor it
/// sleeps on.
#[derive(Debug)]
pub struct Tcp {
    links: Vec<Link>,
    /// By rank, the index of its link.
    link_of_rank: Vec<Option<usize>>,
    sockets_per_link: usize,
    epoll: OwnedFd,
    /// The streams that the next poll drives, by link and socket.
    ready: VecDeque<(usize, usize)>,
    /// The posted receives of this call that may be incomplete, by link and number on the link, oldest first;
    /// none if there were too many.
    posted: VecDeque<(usize, u64)>,
    /// Whether there were too many posted receives in this call.
    posted_many: bool,
    /// Whether polls may probe: not after this rank was about to sleep, until something moves.
    may_probe: bool,
    /// Whether the last poll did not ask epoll.
    skipped_epoll: bool,
    /// Polls that found nothing since one did, or since the last of [`MOST_IDLE_POLLS`].
    idle_polls: u32,
    aborted: bool,
}

impl Tcp {
    /// Connects to `peers`, each given with the addresses that it listens on, which are tried in this order.
    /// The higher of two ranks connects to the lower one, as often as the options say; all links are
    /// established concurrently. `key` gives the key of the link to a peer: only the two ranks may know it,
    /// and no two communicators may use one.
    ///
    /// # Errors
    /// `Rendezvous`, naming peer, addresses and cause, if a link is not established by `deadline`, or if no
    /// address leads to the peer; `Disagreement` if a peer has another number of sockets per link; `System`
    /// if the process has no descriptor left; or the error of `fault` if it is raised meanwhile.
    pub fn connect(
        listener: Listener,
        me: Rank,
        peers: &[(Rank, Vec<SocketAddr>)],
        key: &dyn Fn(Rank) -> SecretKey,
        options: LinkOptions,
        deadline: Instant,
        fault: &Fault,
    ) -> Result<Self> {
        let sockets = connect::connect_all(listener, me, peers, key, options, deadline, fault)?;
        let LinkOptions { sockets_per_link, is_encrypted, .. } = options;
        let mut links = Vec::with_capacity(peers.len());
        let mut link_of_rank = vec![None; peers.iter().map(|(peer, _)| peer + 1).max().unwrap_or(0)];
        for ((peer, addresses), sockets) in peers.iter().zip(sockets) {
            let address = match sockets.first().map(|socket| socket.get().peer_addr()) {
                // The one that was reached.
                Some(Ok(address)) if *peer < me => address,
                _ => addresses[0],
            };
            link_of_rank[*peer] = Some(links.len());
            links.push(Link::new(*peer, address, sockets, WINDOW));
        }
        let epoll =
            Self::register(&links).map_err(|cause| Error::io("cannot add sockets to epoll", cause))?;
        log::debug!(
            "tcp: rank {me} is linked to {} ranks, {sockets_per_link} sockets each{}",
            peers.len(),
            if is_encrypted { ", encrypted" } else { "" }
        );
        Ok(Self {
            ready: VecDeque::with_capacity(links.len() * sockets_per_link),
            posted: VecDeque::with_capacity(MOST_PROBED_RECEIVES),
            posted_many: false,
            links,
            link_of_rank,
            sockets_per_link,
            epoll,
            may_probe: true,
            skipped_epoll: false,
            idle_polls: 0,
            aborted: false,
        })
    }

    /// Limits the bytes per socket that the peer has not acknowledged to about `bytes_to(peer)`; within this
    /// machine to at least 128 KiB.
    ///
    /// # Errors
    /// `System` if the kernel refuses.
    pub fn limit_send_buffers(&self, bytes_to: impl Fn(Rank) -> usize) -> Result<()> {
        let failed = |cause| Error::io("cannot limit the send buffer of a socket", cause);
        for link in &self.links {
            let bytes = bytes_to(link.peer);
            for stream in &link.streams {
                let is_local = link.is_local(stream).map_err(failed)?;
                let bytes = if is_local { bytes.max(LOCAL_SEND_BUFFER) } else { bytes };
                // The kernel doubles this value, because it counts its own overhead too.
                rustix::net::sockopt::set_socket_send_buffer_size(stream, bytes.min(i32::MAX as usize))
                    .map_err(failed)?;
            }
        }
        Ok(())
    }

    /// An epoll instance with all sockets.
    fn register(links: &[Link]) -> rustix::io::Result<OwnedFd> {
        use epoll::EventFlags as On;
        let epoll = descriptor::poll_set()?;
        for (index, link) in links.iter().enumerate() {
            for (socket, stream) in link.streams.iter().enumerate() {
                let data = epoll::EventData::new_u64((index as u64) << 32 | socket as u64);
                epoll::add(&epoll, stream, data, On::IN | On::OUT | On::RDHUP | On::ET)?;
            }
        }
        Ok(epoll)
    }

    fn link_index(&self, peer: Rank) -> Result<usize> {
        self.link_of_rank
            .get(peer)
            .copied()
            .flatten()
            .ok_or_else(|| Error::internal(format!("there is no tcp link to rank {peer}")))
    }

    /// Has the next poll drive a stream.
    fn enqueue(&mut self, link: usize, socket: usize) {
        let stream = &mut self.links[link].streams[socket];
        if !stream.queued {
            stream.queued = true;
            self.ready.push_back((link, socket));
        }
    }

    /// Updates the readiness of the sockets from epoll.
    fn poll_readiness(&mut self) -> Result<()> {
        let mut buffer = [MaybeUninit::uninit(); EPOLL_EVENTS];
        let events = match epoll::wait(&self.epoll, &mut buffer, Some(&NO_TIME)) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => return Ok(()),
            Err(cause) => return Err(Error::io("cannot wait for sockets with epoll", cause)),
        };
        for epoll::Event { flags, data } in events.iter().copied() {
            let (link, socket) = ((data.u64() >> 32) as usize, data.u64() as u32 as usize);
            let stream = &mut self.links[link].streams[socket];
            stream.update_readiness(flags);
            if stream.can_move() {
                self.enqueue(link, socket);
            }
        }
        Ok(())
    }

    /// Has the next drive read the message that was posted first, if polls probe. Whether only messages of
    /// that peer are awaited.
    fn probe(&mut self) -> Option<bool> {
        while let Some((link, number)) = self.posted.front() {
            if !self.links[*link].has_received(*number) {
                break;
            }
            self.posted.pop_front();
        }
        let (link, number) = *self.posted.front()?;
        let is_allowed = self.may_probe && self.links.len() <= MOST_PROBED_LINKS;
        if !is_allowed || self.links.iter().any(Link::has_unsent) {
            return None;
        }
        let socket = self.links[link].socket_of(number);
        self.links[link].streams[socket].assume_readable();
        self.enqueue(link, socket);
        Some(self.posted.iter().all(|(other, _)| *other == link))
    }

    /// Lists the next receive of a link as posted.
    fn note_posted(&mut self, link: usize) {
        if self.posted_many || self.posted.len() == MOST_PROBED_RECEIVES {
            self.posted.clear();
            self.posted_many = true;
        } else {
            self.posted.push_back((link, self.links[link].recvs_posted()));
        }
    }

    /// Has the next drive send the announcements that were to go with a message.
    fn queue_announcements(&mut self) {
        for link in 0..self.links.len() {
            if self.links[link].queue_announcement() {
                self.enqueue(link, 0);
            }
        }
    }

    fn forget_posted(&mut self) {
        self.posted.clear();
        self.posted_many = false;
    }

    /// Drives the streams that are ready. Whether anything moved.
    fn drive_ready(&mut self, events: &mut Events) -> Result<bool> {
        let mut moved = false;
        for _ in 0..self.ready.len() {
            let Some((index, socket)) = self.ready.pop_front() else {
                break;
            };
            let link = &mut self.links[index];
            link.streams[socket].queued = false;
            moved |= link.drive(socket, events)?;
            if link.streams[socket].can_move() {
                self.enqueue(index, socket);
            }
        }
        Ok(moved)
    }

    fn window_exceeded(&self, peer: Rank, what: &str) -> Error {
        let window = self.window();
        Error::internal(format!("more than {window} {what} rank {peer} are in flight"))
    }
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn can_send_from(&self, piece: Piece) -> bool {
        piece.is_host()
    }

    fn window(&self) -> usize {
        WINDOW * self.sockets_per_link
    }

    fn begin(&mut self, sequence: u64) {
        // Finds peers that have left. Their last messages must be read before anything is sent to them, or
        // they are lost. An error here occurs again in the next poll, which can return it.
        let _ = self.poll_readiness();
        self.begin_together(sequence);
    }

    /// Does without epoll, a system call of 0.4 to 0.8 us: an all-reduce of 8 bytes between two ranks on
    /// loopback takes 7.8 us instead of 8.8 (AMD EPYC).
    fn begin_together(&mut self, sequence: u64) {
        if self.links.iter().any(Link::is_busy) {
            log::error!("tcp: call {sequence} begins while messages of the last one are in flight");
            self.abort();
        }
        self.forget_posted();
        for link in 0..self.links.len() {
            self.links[link].begin(sequence);
            self.enqueue(link, 0);
        }
    }

    fn begin_link(&mut self, peer: Rank, sequence: u64) -> Result<()> {
        let link = self.link_index(peer)?;
        if self.links.iter().any(Link::is_busy) {
            self.posted.retain(|(other, _)| *other != link);
        } else {
            self.forget_posted();
        }
        self.links[link].begin(sequence);
        self.enqueue(link, 0);
        Ok(())
    }

    fn announce(&mut self, peer: Rank, call: &Call) -> Result<()> {
        let link = self.link_index(peer)?;
        let socket = self.links[link].announce(call)?;
        self.enqueue(link, socket);
        Ok(())
    }

    fn announce_with_message(&mut self, peer: Rank, call: &Call) -> Result<()> {
        let link = self.link_index(peer)?;
        self.links[link].announce_with_message(call)
    }

    fn send(&mut self, peer: Rank, piece: Piece) -> Result<()> {
        let link = self.link_index(peer)?;
        if self.links[link].in_flight().0 >= self.window() as u64 {
            return Err(self.window_exceeded(peer, "messages to"));
        }
        let socket = self.links[link].send(piece)?;
        self.enqueue(link, socket);
        Ok(())
    }

    fn poll(&mut self, events: &mut Events) -> Result<bool> {
        if self.aborted {
            return Err(Error::peer_lost("the tcp links were aborted"));
        }
        let is_sole = self.probe();
        let mut moved = is_sole.is_some() && self.drive_ready(events)?;
        let waits_long = self.idle_polls == MOST_IDLE_POLLS;
        self.skipped_epoll = moved || is_sole == Some(true) && !waits_long;
        if !self.skipped_epoll {
            if waits_long {
                self.idle_polls = 0;
                self.queue_announcements();
            }
            self.poll_readiness()?;
            moved = self.drive_ready(events)?;
        }
        self.may_probe |= moved;
        self.idle_polls = if moved { 0 } else { self.idle_polls + 1 };
        Ok(moved)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.epoll.as_fd())
    }

    fn stalled(&self, peer: Rank) -> Option<String> {
        let link = &self.links[self.link_index(peer).ok()?];
        link.streams.iter().find_map(|stream| tcp_info::stalled(stream, link.address))
    }

    fn set_need_wakeup(&mut self) -> bool {
        self.queue_announcements();
        if std::mem::take(&mut self.skipped_epoll) {
            // What epoll has not reported yet would end the sleep at once.
            self.may_probe = false;
            return false;
        }
        self.ready.is_empty() && !self.aborted
    }

    fn clear_need_wakeup(&mut self) {}

    fn abort(&mut self) {
        self.aborted = true;
        self.forget_posted();
        self.links.iter_mut().for_each(Link::shut);
    }
}

impl PostedTransport for Tcp {
    fn can_recv_into(&self, piece: Piece) -> bool {
        piece.is_host()
    }

    fn stages_host_memory(&self) -> bool {
        false
    }

    fn post_recv(&mut self, peer: Rank, piece: Piece) -> Result<()> {
        let link = self.link_index(peer)?;
        if self.links[link].in_flight().1 >= self.window() as u64 {
            return Err(self.window_exceeded(peer, "receives from"));
        }
        self.note_posted(link);
        let socket = self.links[link].post_recv(piece)?;
        self.enqueue(link, socket);
        Ok(())
    }
}
