//! Descriptors of allocations on GPUs, which the ranks of a node send to each other while their communicator
//! works: those of memory that has no name by which the driver opens it.
//!
//! Owns a rank's socket for them, and the packets. A packet is sent without waiting, over a connection of its
//! own, and stays in the socket until its rank looks. It has the secret of the socket, which only ranks of
//! the communicator know. Processes of other users are refused before they are read; descriptors of other
//! processes of this user are closed when their secret turns out to be wrong.

use super::exchange::channel::{
    ChannelListener, DescriptorChannel, PACKET_DESCRIPTORS, Received, SocketName, warn_of_refusal,
};
use crate::error::Result;
use crate::secret::random_bytes;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use zerocopy::{FromBytes as _, IntoBytes as _};

/// The most parts of an allocation: one packet has the descriptors of all.
pub(super) const MOST_PARTS: usize = PACKET_DESCRIPTORS;
/// Words before the lengths of the parts.
const HEADER: usize = 5;
/// Connections that one call accepts.
const MOST_ACCEPTED: usize = 1024;

/// Where a rank gets descriptors: the name of its socket, and the secret.
pub(super) type PartsAddress = [u64; 4];

/// The parts of an allocation that a rank has named.
#[derive(Debug)]
pub(super) struct PartsPacket {
    /// The index of its owner on the node.
    pub owner: usize,
    /// As in the owner's notices.
    pub number: usize,
    pub count: u64,
    /// The length and the descriptor of each part.
    pub parts: Vec<(u64, OwnedFd)>,
}

impl PartsPacket {
    /// Sends it, which the receiver need not be ready for. `false` if it has to be sent again later, because
    /// queues are full.
    ///
    /// # Errors
    /// That of the system if the receiver does not take any.
    pub fn send(&self, to: PartsAddress) -> rustix::io::Result<bool> {
        let mut words = vec![to[2], to[3], self.owner as u64, self.number as u64, self.count];
        words.extend(self.parts.iter().map(|(bytes, _)| bytes));
        let descriptors: Vec<BorrowedFd<'_>> = self.parts.iter().map(|(_, part)| part.as_fd()).collect();
        let sent = DescriptorChannel::connect(&name(to)).and_then(|channel| match channel.foreign_user() {
            None => channel.send(words.as_bytes(), &descriptors),
            Some(_) => Err(Errno::PERM),
        });
        match sent {
            Ok(()) => Ok(true),
            // The receiver may have closed a connection on which nothing had come yet.
            Err(
                Errno::AGAIN
                | Errno::NOBUFS
                | Errno::TOOMANYREFS
                | Errno::INTR
                | Errno::PIPE
                | Errno::CONNRESET,
            ) => Ok(false),
            Err(cause) => Err(cause),
        }
    }

    /// The packet of these words; `None` if it is not for `address`.
    fn decode(words: &[u64], descriptors: Vec<OwnedFd>, address: PartsAddress) -> Option<Self> {
        let (header, lengths) = words.split_first_chunk::<HEADER>()?;
        let [first, second, owner, number, count] = *header;
        if [first, second] != address[2..] || lengths.len() != descriptors.len() {
            return None;
        }
        let parts = lengths.iter().copied().zip(descriptors).collect();
        Some(Self {
            owner: usize::try_from(owner).ok()?,
            number: usize::try_from(number).ok()?,
            count,
            parts,
        })
    }
}

/// A rank's socket.
#[derive(Debug)]
pub(super) struct PartsSocket {
    listener: ChannelListener,
    address: PartsAddress,
}

impl PartsSocket {
    /// Opens a socket with a random name and a random secret.
    ///
    /// # Errors
    /// `System` if no socket can be created or the system has no random numbers.
    pub fn new() -> Result<Self> {
        let mut address: PartsAddress = [0; 4];
        address.as_mut_bytes().copy_from_slice(&random_bytes::<32>()?);
        Ok(Self { listener: ChannelListener::new(&name(address))?, address })
    }

    pub fn address(&self) -> PartsAddress {
        self.address
    }

    /// Fills the queue of connections.
    #[cfg(test)]
    pub fn fill(&self) {
        rustix::net::listen(&self.listener, 1).expect("it listens already");
        while DescriptorChannel::connect(&name(self.address)).is_ok() {}
    }

    /// The packets that have come, in the order in which each rank sent its own.
    ///
    /// # Errors
    /// `System` if the process has no descriptor left.
    pub fn receive(&self) -> Result<Vec<PartsPacket>> {
        let mut packets = Vec::new();
        for _ in 0..MOST_ACCEPTED {
            let mut words = [0u64; HEADER + MOST_PARTS];
            let accepted = self.listener.accept();
            let received = accepted
                .and_then(|channel| channel.map(|channel| channel.receive(words.as_mut_bytes())).transpose());
            let (bytes, descriptors) = match received {
                Ok(None) => break,
                // What has come is used; the rest stays in the queue.
                Err(_) if !packets.is_empty() => break,
                Err(error) => return Err(error),
                Ok(Some(received)) => match received {
                    Received::Packet(bytes, descriptors) => (bytes, descriptors),
                    Received::Nothing | Received::Closed => continue,
                    Received::OutOfDescriptors => {
                        log::debug!("memory of a neighbour is not accessed directly: raise `ulimit -n`");
                        continue;
                    }
                },
            };
            let words = <[u64]>::ref_from_bytes(&words.as_bytes()[..bytes]).unwrap_or_default();
            match PartsPacket::decode(words, descriptors, self.address) {
                Some(packet) => packets.push(packet),
                None => warn_of_refusal("it does not have the secret of this communicator"),
            }
        }
        Ok(packets)
    }
}

fn name(address: PartsAddress) -> SocketName {
    let mut name = SocketName::default();
    name.copy_from_slice(address[..2].as_bytes());
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor;
    use rustix::fs::MemfdFlags;

    fn packet(owner: usize, lengths: &[u64]) -> PartsPacket {
        let part = |bytes: &u64| (*bytes, descriptor::memory("a part", MemfdFlags::empty()).expect("a file"));
        PartsPacket { owner, number: 3, count: 9, parts: lengths.iter().map(part).collect() }
    }

    #[test]
    fn packets_wait_for_their_receiver() {
        let socket = PartsSocket::new().expect("a socket");
        assert!(socket.receive().expect("nothing").is_empty());
        for lengths in [vec![5, 6], vec![7; MOST_PARTS]] {
            let sent = packet(1, &lengths);
            assert_eq!(sent.send(socket.address()), Ok(true));
            drop(sent);
            let packets = socket.receive().expect("a packet");
            let [PartsPacket { owner: 1, number: 3, count: 9, parts }] = &packets[..] else {
                panic!("{packets:?}")
            };
            assert!(parts.iter().map(|(bytes, _)| *bytes).eq(lengths));
        }
        let address = socket.address();
        drop(socket);
        assert_eq!(packet(1, &[1]).send(address), Err(Errno::CONNREFUSED));
    }

    #[test]
    fn packets_of_strangers_are_dropped() {
        let socket = PartsSocket::new().expect("a socket");
        let [first, second, third, fourth] = socket.address();
        assert_eq!(packet(0, &[1]).send([first, second, third, fourth ^ 1]), Ok(true));
        let silent = DescriptorChannel::connect(&name(socket.address())).expect("a connection");
        let odd = DescriptorChannel::connect(&name(socket.address())).expect("a connection");
        odd.send(&[1, 2, 3], &[]).expect("a packet");
        // Fewer descriptors than lengths.
        let short = DescriptorChannel::connect(&name(socket.address())).expect("a connection");
        short.send([third, fourth, 0, 0, 1, 100].as_bytes(), &[]).expect("a packet");
        assert_eq!(packet(2, &[1]).send(socket.address()), Ok(true));
        let owners: Vec<usize> =
            socket.receive().expect("packets").iter().map(|packet| packet.owner).collect();
        assert_eq!(owners, [2]);
        drop(silent);
    }
}
