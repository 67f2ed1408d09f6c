//! How the ranks of one node exchange the descriptors of their arenas and wake-ups: datagrams over abstract sockets, which
//! have no name in any file system.
//!
//! Owns these sockets and who may send to them. Must not know what is done with the arenas afterwards.

use super::layout::ArenaLayout;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::memory::{Arena, PeerArena};
use crate::rank::RankList;
use crate::transport::Rank;
use crate::wake::WakeFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, recvmsg, sendmsg_addr,
    socket_with,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Another rank of the node.
#[derive(Clone)]
pub struct Neighbour {
    /// Its rank in the world.
    pub rank: Rank,
    /// Its index among the ranks of the node.
    pub local_rank: usize,
    /// Its arena, mapped for reading.
    pub arena: Arc<PeerArena>,
    /// Wakes its executor. The only descriptor that neighbours write to: a forged notification costs its owner one look at
    /// its queues.
    pub wake: Arc<WakeFd>,
    /// Wakes the thread that prefaults neighbours' buffers for it, if there is one.
    pub prefault: Option<Arc<WakeFd>>,
}

/// All ranks of a node, as one of them sees them.
pub struct Neighbours {
    /// This rank's index among them.
    pub local_rank: usize,
    /// Wakes this rank's executor.
    pub wake: Arc<WakeFd>,
    /// Wakes the thread that prefaults neighbours' buffers for this rank, if there is one.
    pub prefault: Option<Arc<WakeFd>>,
    /// All ranks of the node but this one, by index.
    pub others: Vec<Neighbour>,
}

impl Neighbour {
    /// The rank `rank` of the world, number `local_rank` on the node, with its descriptors. Its arena is laid out by `layout`.
    ///
    /// # Errors
    /// As for [`PeerArena::new`].
    pub fn new(
        rank: Rank,
        local_rank: usize,
        arena: OwnedFd,
        wake: WakeFd,
        prefault: Option<WakeFd>,
        layout: ArenaLayout,
    ) -> Result<Self> {
        let arena = PeerArena::new(arena, layout.neighbours(), layout.bytes())
            .map_err(|error| error.context(format_args!("rank {rank}")))?;
        if layout.is_prefaulted() {
            arena.prefault(0, layout.populated());
        }
        let (wake, prefault) = (Arc::new(wake), prefault.map(Arc::new));
        Ok(Self { rank, local_rank, arena: Arc::new(arena), wake, prefault })
    }
}

/// A socket that receives the neighbours' descriptors. Created before the ranks exchange its secret at the rendezvous.
pub struct DescriptorExchange {
    socket: OwnedFd,
    secret: [u8; 16],
}

/// Bytes of a datagram: the secret of the receiving socket, and the sender's index on the node.
const DATAGRAM: usize = 16 + 8;

impl DescriptorExchange {
    /// Opens a socket with a random name of 128 bits.
    ///
    /// # Errors
    /// `System` if no socket can be created.
    pub fn new() -> Result<Self> {
        let failed = |cause: Errno| {
            Error::io("cannot open the socket for the descriptors of this node's ranks", cause)
        };
        let mut secret = [0; 16];
        getrandom::fill(&mut secret)
            .map_err(|cause| Error::system(format!("cannot draw random bytes: {cause}")))?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None).map_err(failed)?;
        bind(&socket, &address(&secret).map_err(failed)?).map_err(failed)?;
        Ok(Self { socket, secret })
    }

    /// The secret that neighbours need to send to this socket.
    #[must_use]
    pub fn secret(&self) -> [u8; 16] {
        self.secret
    }

    /// Sends the descriptors of this rank's arena and wake-ups to every neighbour, and receives theirs. `node` lists the
    /// ranks of the node with the secrets of their sockets, in the same order on all of them; all arenas are laid out by
    /// `layout`.
    ///
    /// # Errors
    /// `Rendezvous`, naming the missing ranks, if some have not sent theirs by `deadline`; `System` if a neighbour cannot be
    /// reached; or the error of `fault` if it is raised meanwhile.
    pub fn run(
        self,
        me: Rank,
        node: &[(Rank, [u8; 16])],
        arena: &Arena,
        layout: ArenaLayout,
        deadline: Instant,
        fault: &Fault,
    ) -> Result<Neighbours> {
        let local_rank = node.iter().position(|(rank, _)| *rank == me).expect("this rank is on its node");
        let wake = Arc::new(WakeFd::new()?);
        let prefault = layout.is_prefaulted().then(WakeFd::new).transpose()?.map(Arc::new);
        let file = arena.read_only_file()?;
        let mut descriptors = vec![file.as_fd(), wake.as_fd()];
        descriptors.extend(prefault.as_ref().map(|prefault| prefault.as_fd()));
        let mut unsent: Vec<usize> = (0..node.len()).filter(|other| *other != local_rank).collect();
        let mut others: Vec<Neighbour> = Vec::with_capacity(unsent.len());
        while !unsent.is_empty() || others.len() + 1 < node.len() {
            fault.check()?;
            let mut blocked = Vec::new();
            for other in unsent.drain(..) {
                match self.send_descriptors(local_rank, &node[other].1, &descriptors) {
                    Ok(()) => {}
                    // Its queue is full, or too many descriptors are on their way; it drains the queue once it runs this function.
                    Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => blocked.push(other),
                    Err(cause) => {
                        return Err(Error::io(
                            format_args!(
                                "cannot reach rank {} on this node: do both share a network namespace? \
                                 (set FLEXRING_NODE to different names where they do not)",
                                node[other].0
                            ),
                            cause,
                        ));
                    }
                }
            }
            unsent = blocked;
            while let Some((from, descriptors)) = self.receive()? {
                let Some((rank, _)) =
                    node.get(from).filter(|_| others.iter().all(|other| other.local_rank != from))
                else {
                    continue;
                };
                let mut descriptors = descriptors.into_iter();
                let (Some(file), Some(wake)) = (descriptors.next(), descriptors.next()) else { continue };
                let prefault = descriptors.next().map(WakeFd::from);
                others.push(Neighbour::new(*rank, from, file, wake.into(), prefault, layout)?);
            }
            if Instant::now() >= deadline {
                let received = |(other, _): &(usize, _)| {
                    *other == local_rank || others.iter().any(|neighbour| neighbour.local_rank == *other)
                };
                let missing: Vec<Rank> = node
                    .iter()
                    .enumerate()
                    .filter(|entry| !received(entry))
                    .map(|(_, (rank, _))| *rank)
                    .collect();
                return Err(Error::rendezvous(format!(
                    "{} on this node did not share their memory before FLEXRING_CONNECT_TIMEOUT_MS ran out",
                    RankList::new(&missing)
                )));
            }
            if !unsent.is_empty() || others.len() + 1 < node.len() {
                self.wait(fault, unsent.is_empty(), deadline);
            }
        }
        others.sort_by_key(|other| other.local_rank);
        Ok(Neighbours { local_rank, wake, prefault, others })
    }

    fn send_descriptors(
        &self,
        local_rank: usize,
        secret: &[u8; 16],
        descriptors: &[BorrowedFd<'_>],
    ) -> rustix::io::Result<()> {
        let mut datagram = [0; DATAGRAM];
        datagram[..16].copy_from_slice(secret);
        datagram[16..].copy_from_slice(&(local_rank as u64).to_le_bytes());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        let bytes = [IoSlice::new(&datagram)];
        sendmsg_addr(&self.socket, &address(secret)?, &bytes, &mut ancillary, SendFlags::NOSIGNAL).map(drop)
    }

    /// The next datagram with the right secret, if one is there. All others are dropped.
    fn receive(&self) -> Result<Option<(usize, Vec<OwnedFd>)>> {
        loop {
            let mut datagram = [0; DATAGRAM];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut bytes = [IoSliceMut::new(&mut datagram)];
            let received = match recvmsg(&self.socket, &mut bytes, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Ok(message) => message.bytes,
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => continue,
                Err(cause) => return Err(Error::io("cannot receive from a rank of this node", cause)),
            };
            let mut descriptors = Vec::new();
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    descriptors.extend(rights);
                }
            }
            let local_rank = u64::from_le_bytes(std::array::from_fn(|byte| datagram[16 + byte]));
            if received == DATAGRAM && datagram[..16] == self.secret {
                return Ok(Some((local_rank as usize, descriptors)));
            }
            log::warn!(
                "dropped an unauthenticated datagram at the socket for the descriptors of this node's ranks"
            );
        }
    }

    /// Waits until a datagram may have come, or it is time to send again.
    fn wait(&self, fault: &Fault, all_sent: bool, deadline: Instant) {
        // A neighbour whose queue was full does not notify when it has room again.
        let retry = if all_sent { Duration::from_secs(1) } else { Duration::from_millis(1) };
        let timeout = deadline.saturating_duration_since(Instant::now()).min(retry);
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        let wake = fault.wake_fd();
        let mut descriptors = [PollFd::new(&self.socket, PollFlags::IN), PollFd::new(&wake, PollFlags::IN)];
        // The caller checks everything again, whatever ended the wait.
        let _ = poll(&mut descriptors, Some(&timeout));
    }
}

fn address(secret: &[u8; 16]) -> rustix::io::Result<SocketAddrUnix> {
    let mut name = *b"flexring-0123456789abcdef0123456789abcdef";
    for (digit, at) in name[9..].iter_mut().zip(0..) {
        let byte: u8 = secret[at / 2];
        let nibble = if at % 2 == 0 { byte >> 4 } else { byte & 15 };
        *digit = b"0123456789abcdef"[usize::from(nibble)];
    }
    SocketAddrUnix::new_abstract_name(&name)
}
