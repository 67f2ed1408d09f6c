//! TCP: links of one or several sockets to each peer, all driven by one thread without blocking.
//!
//! Owns the sockets of a rank and the list of those that can move something. Must not know who needs which
//! message, nor how the addresses of peers were found out.
//!
//! | file | owns |
//! |---|---|
//! | `connect` | listening, calling, and who is at the other end |
//! | `greeting` | what both ends of a new connection tell each other |
//! | `link` | one peer: the order of its messages, and what its loss means |
//! | `stream` | one socket: two queues of frames, and its readiness |
//! | `frame` | one frame: its layout, and how far it has come |

mod connect;
mod frame;
mod greeting;
mod link;
mod stream;

#[cfg(test)]
mod tests;

pub use connect::Listener;

use crate::call::Call;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::memory::Piece;
use crate::transport::{Events, PostedTransport, Rank, Transport};
use link::Link;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

/// Messages that may be under way on one socket in one direction.
///
/// Not tuned yet. Over loopback on a busy machine of two cores, 4 were faster than 16 in most rounds (512 KiB
/// messages, one way), by no more than rounds differed. `bench/tcp_link.rs` on an idle machine is to settle it.
const WINDOW: usize = 16;

/// Events that one system call can bring; more of them wait for the next.
const HARVEST: usize = 64;

const NO_TIME: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// A rank's TCP links.
///
/// The kernel tells once when a socket becomes ready (edge-triggered epoll); until a system call says that it
/// is not, it counts as ready. So a socket that has nothing to offer costs nothing, and the descriptor of the
/// epoll instance is a bell that does not ring for what is known already.
#[derive(Debug)]
pub struct Tcp {
    links: Vec<Link>,
    /// Where in `links` each rank's is.
    places: Vec<Option<usize>>,
    sockets_per_link: usize,
    epoll: OwnedFd,
    /// The streams that the next poll looks at, by link and socket.
    list: VecDeque<(usize, usize)>,
    given_up: bool,
}

impl Tcp {
    /// Makes the links to `peers`, of which each is given with an address that it listens at. The higher of two
    /// ranks calls the lower one, `sockets_per_link` times; nobody waits for anybody in particular. `token` is
    /// what all ranks of this communicator know and nobody else.
    ///
    /// # Errors
    /// `Rendezvous`, naming peer, address and cause, if a link is not there by `deadline`; `Disagreement` if a
    /// peer has another number of sockets per link; `System` if this machine lacks descriptors; or the error
    /// that was raised as `fault` meanwhile.
    pub fn connect(
        listener: Listener,
        me: Rank,
        peers: &[(Rank, SocketAddr)],
        token: u64,
        sockets_per_link: usize,
        deadline: Instant,
        fault: &Fault,
    ) -> Result<Self> {
        let sockets = connect::meet(listener, me, peers, token, sockets_per_link, deadline, fault)?;
        let mut links = Vec::with_capacity(peers.len());
        let mut places = vec![None; peers.iter().map(|(peer, _)| peer + 1).max().unwrap_or(0)];
        for (&(peer, address), sockets) in peers.iter().zip(sockets) {
            places[peer] = Some(links.len());
            links.push(Link::new(peer, address, sockets, WINDOW));
        }
        let epoll =
            Self::watch(&links).map_err(|cause| Error::io("cannot watch sockets with epoll", cause))?;
        log::debug!("tcp: rank {me} is linked to {} ranks, {sockets_per_link} sockets each", peers.len());
        Ok(Self {
            list: VecDeque::with_capacity(links.len() * sockets_per_link),
            links,
            places,
            sockets_per_link,
            epoll,
            given_up: false,
        })
    }

    /// Has the kernel hold at most about this many bytes per socket that the peer has not acknowledged.
    ///
    /// # Errors
    /// `System` if the kernel refuses.
    pub fn limit_send_buffers(&self, bytes: usize) -> Result<()> {
        for stream in self.links.iter().flat_map(|link| &link.streams) {
            // The kernel counts its own overhead too, and doubles what it is told to make up for it.
            rustix::net::sockopt::set_socket_send_buffer_size(stream, bytes)
                .map_err(|cause| Error::io("cannot limit the buffer of a socket", cause))?;
        }
        Ok(())
    }

    fn watch(links: &[Link]) -> rustix::io::Result<OwnedFd> {
        use epoll::EventFlags as On;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (place, link) in links.iter().enumerate() {
            for (at, stream) in link.streams.iter().enumerate() {
                let data = epoll::EventData::new_u64((place as u64) << 32 | at as u64);
                epoll::add(&epoll, stream, data, On::IN | On::OUT | On::RDHUP | On::ET)?;
            }
        }
        Ok(epoll)
    }

    fn place(&self, peer: Rank) -> Result<usize> {
        self.places
            .get(peer)
            .copied()
            .flatten()
            .ok_or_else(|| Error::internal(format!("there is no tcp link to rank {peer}")))
    }

    /// Has the next poll look at a stream.
    fn enlist(&mut self, place: usize, at: usize) {
        let stream = &mut self.links[place].streams[at];
        if !stream.enlisted {
            stream.enlisted = true;
            self.list.push_back((place, at));
        }
    }

    /// Learns from the kernel which sockets have become ready.
    fn collect(&mut self) -> Result<()> {
        let mut harvest = [MaybeUninit::uninit(); HARVEST];
        let happened = match epoll::wait(&self.epoll, &mut harvest, Some(&NO_TIME)) {
            Ok((happened, _)) => happened,
            Err(Errno::INTR) => return Ok(()),
            Err(cause) => return Err(Error::io("cannot learn which sockets are ready", cause)),
        };
        for epoll::Event { flags, data } in happened.iter().copied() {
            let (place, at) = ((data.u64() >> 32) as usize, data.u64() as u32 as usize);
            let stream = &mut self.links[place].streams[at];
            stream.learn(flags);
            if stream.can_move() {
                self.enlist(place, at);
            }
        }
        Ok(())
    }

    fn full(&self, peer: Rank, what: &str) -> Error {
        let window = self.window();
        Error::internal(format!("more than {window} {what} rank {peer} are under way"))
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
        if self.links.iter().any(Link::is_busy) {
            log::error!("tcp: call {sequence} begins while messages of the last one are under way");
            self.abort();
        }
        // What goes wrong here goes wrong again in the next poll, which can say so.
        let _ = self.collect();
        for place in 0..self.links.len() {
            self.links[place].begin(sequence);
            self.enlist(place, 0);
        }
    }

    fn announce(&mut self, peer: Rank, call: &Call) -> Result<()> {
        let place = self.place(peer)?;
        let at = self.links[place].announce(call)?;
        self.enlist(place, at);
        Ok(())
    }

    fn send(&mut self, peer: Rank, piece: Piece) -> Result<()> {
        let place = self.place(peer)?;
        if self.links[place].under_way().0 >= self.window() as u64 {
            return Err(self.full(peer, "messages to"));
        }
        let at = self.links[place].send(piece)?;
        self.enlist(place, at);
        Ok(())
    }

    fn poll(&mut self, events: &mut Events) -> Result<bool> {
        if self.given_up {
            return Err(Error::peer_lost("the tcp links were given up"));
        }
        self.collect()?;
        let mut moved = false;
        for _ in 0..self.list.len() {
            let Some((place, at)) = self.list.pop_front() else {
                break;
            };
            let link = &mut self.links[place];
            link.streams[at].enlisted = false;
            moved |= link.step(at, events)?;
            if link.streams[at].can_move() {
                self.enlist(place, at);
            }
        }
        Ok(moved)
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn set_need_wakeup(&mut self) -> bool {
        self.list.is_empty() && !self.given_up
    }

    fn clear_need_wakeup(&mut self) {}

    fn abort(&mut self) {
        self.given_up = true;
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
        let place = self.place(peer)?;
        if self.links[place].under_way().1 >= self.window() as u64 {
            return Err(self.full(peer, "landings for"));
        }
        let at = self.links[place].post_recv(piece)?;
        self.enlist(place, at);
        Ok(())
    }
}
