//! Connections that carry descriptors between processes of one user: packets over abstract Unix sockets,
//! which have no name in any file system.
//!
//! Owns the sockets, their names, and the check that both ends belong to one user. Names are public:
//! /proc/net/unix lists them.

use crate::descriptor;
use crate::error::{Error, Result};
use crate::logging::WarningLimit;
use crate::transport::credentials::foreign_user;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType, bind, connect, listen, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Most descriptors that the kernel passes in one packet.
const MAX_DESCRIPTORS: usize = 253;

/// Most descriptors that a packet takes. Few in tests, so that few ranks need several packets.
pub(in crate::transport::shm) const PACKET_DESCRIPTORS: usize = if cfg!(test) { 12 } else { MAX_DESCRIPTORS };

/// Connections that wait to be accepted; the kernel may lower it.
const BACKLOG: i32 = 4096;

/// The random part of an abstract socket's name.
pub(in crate::transport::shm) type SocketName = [u8; 16];

/// Connections of other users that one look refuses.
const MOST_REFUSED: usize = 64;

/// A socket that accepts connections of this user's processes.
#[derive(Debug)]
pub(in crate::transport::shm) struct ChannelListener(OwnedFd);

impl ChannelListener {
    /// Listens under this name.
    ///
    /// # Errors
    /// `System` if no socket can be created.
    pub(in crate::transport::shm) fn new(name: &SocketName) -> Result<Self> {
        let open = || {
            let socket = descriptor::unix_socket(SocketType::SEQPACKET)?;
            bind(&socket, &address(name)?)?;
            listen(&socket, BACKLOG)?;
            Ok(Self(socket))
        };
        open().map_err(|cause: Errno| {
            Error::io("cannot open the socket for the descriptors of this node's ranks", cause)
        })
    }

    /// The next connection, if there is one. Those of other users are closed, some at a time.
    ///
    /// # Errors
    /// `System` if the process has no descriptor left.
    pub(in crate::transport::shm) fn accept(&self) -> Result<Option<DescriptorChannel>> {
        // Others may connect for ever.
        for _ in 0..MOST_REFUSED {
            match descriptor::accept_unix(&self.0) {
                Ok(socket) => match foreign_user(&socket) {
                    None => return Ok(Some(DescriptorChannel(socket))),
                    Some(user) => warn_of_refusal(&format!("it is one of {user}")),
                },
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(cause) => {
                    return Err(Error::io("cannot accept the connection of a rank of this node", cause));
                }
            }
        }
        Ok(None)
    }
}

impl AsFd for ChannelListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What [`DescriptorChannel::receive`] finds.
#[derive(Debug)]
pub(in crate::transport::shm) enum Received {
    /// Nothing yet.
    Nothing,
    /// The other end is closed.
    Closed,
    /// A packet of this length, with these descriptors.
    Packet(usize, Vec<OwnedFd>),
    /// A packet whose descriptors did not all fit into this process.
    OutOfDescriptors,
}

/// One end of a connection. Non-blocking.
pub(in crate::transport::shm) struct DescriptorChannel(OwnedFd);

impl DescriptorChannel {
    /// Connects to the listener with this name.
    pub(in crate::transport::shm) fn connect(name: &SocketName) -> rustix::io::Result<Self> {
        let socket = descriptor::unix_socket(SocketType::SEQPACKET)?;
        connect(&socket, &address(name)?)?;
        Ok(Self(socket))
    }

    /// The user at the other end, as a phrase, if it is not this process's.
    pub(in crate::transport::shm) fn foreign_user(&self) -> Option<String> {
        foreign_user(&self.0)
    }

    /// Sends a packet with at most [`PACKET_DESCRIPTORS`] descriptors.
    pub(in crate::transport::shm) fn send(
        &self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> rustix::io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        sendmsg(&self.0, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL).map(drop)
    }

    /// The next packet, if there is one, with its bytes in `buffer`.
    ///
    /// # Errors
    /// `System` if the socket fails.
    pub(in crate::transport::shm) fn receive(&self, buffer: &mut [u8]) -> Result<Received> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [IoSliceMut::new(buffer)];
        let received = match recvmsg(&self.0, &mut bytes, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Nothing),
            Err(Errno::CONNRESET) => return Ok(Received::Closed),
            Err(cause) => return Err(Error::io("cannot receive from a rank of this node", cause)),
        };
        let mut descriptors = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        let moved: rustix::io::Result<Vec<OwnedFd>> =
            descriptors.into_iter().map(descriptor::above_standard).collect();
        let Ok(descriptors) = moved else { return Ok(Received::OutOfDescriptors) };
        // The buffer has room for all descriptors of a packet, so only the limit of this process can be the
        // reason.
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Ok(Received::OutOfDescriptors);
        }
        // No rank sends empty packets.
        if received.bytes == 0 {
            return Ok(Received::Closed);
        }
        Ok(Received::Packet(received.bytes, descriptors))
    }
}

impl AsFd for DescriptorChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Warns of a connection that is closed for this reason.
pub(in crate::transport::shm) fn warn_of_refusal(reason: &str) {
    static REFUSED: WarningLimit = WarningLimit::new();
    REFUSED.warn(format_args!(
        "refused a connection to the socket for the descriptors of this node's ranks: {reason}"
    ));
}

fn address(name: &SocketName) -> rustix::io::Result<SocketAddrUnix> {
    let name: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
    SocketAddrUnix::new_abstract_name(format!("flexring-{name}").as_bytes())
}
