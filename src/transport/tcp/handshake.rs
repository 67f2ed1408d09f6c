//! The handshake of a new connection: one message from each end, before anything else.
//!
//! Owns its layout: 40 bytes, little-endian. Must not know how the bytes travel or what follows from them.

use crate::transport::Rank;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, Unaligned};

/// Bytes of a message.
pub(super) const HANDSHAKE: usize = size_of::<WireHandshake>();

/// Version of the protocol. Changes with every change of what travels on a connection.
const VERSION: u32 = 1;

/// The end that sends a message. Each end has its own magic bytes, so an echo is not mistaken for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// The end that called `connect`.
    Initiator,
    /// The end that called `accept`.
    Acceptor,
}

impl Side {
    fn magic(self) -> [u8; 8] {
        match self {
            Self::Initiator => *b"flexcall",
            Self::Acceptor => *b"flexansw",
        }
    }
}

#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct WireHandshake {
    magic: [u8; 8],
    token: U64,
    version: U32,
    from: U32,
    to: U32,
    socket: U32,
    sockets: U32,
    padding: U32,
}

/// The identity of one connection, as its sender sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handshake {
    /// A random number that only the ranks of this communicator have.
    pub token: u64,
    /// The sender.
    pub from: Rank,
    /// The receiver.
    pub to: Rank,
    /// Index of this socket in its link.
    pub socket: usize,
    /// The number of sockets per link that the sender uses.
    pub sockets: usize,
}

impl Handshake {
    /// The message that `side` sends.
    pub fn to_bytes(self, side: Side) -> [u8; HANDSHAKE] {
        zerocopy::transmute!(WireHandshake {
            magic: side.magic(),
            token: self.token.into(),
            version: VERSION.into(),
            from: (self.from as u32).into(),
            to: (self.to as u32).into(),
            socket: (self.socket as u32).into(),
            sockets: (self.sockets as u32).into(),
            padding: 0.into(),
        })
    }

    /// The message that `side` sent, or `None` if the bytes are not a handshake of this version.
    pub fn from_bytes(bytes: &[u8; HANDSHAKE], side: Side) -> Option<Self> {
        let wire: WireHandshake = zerocopy::transmute!(*bytes);
        (wire.magic == side.magic() && wire.version == VERSION && wire.padding == 0).then_some(Self {
            token: wire.token.get(),
            from: wire.from.get() as Rank,
            to: wire.to.get() as Rank,
            socket: wire.socket.get() as usize,
            sockets: wire.sockets.get() as usize,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handshakes_round_trip_and_an_echo_is_rejected() {
        let handshake = Handshake { token: u64::MAX - 7, from: 3, to: 1, socket: 2, sockets: 4 };
        let bytes = handshake.to_bytes(Side::Initiator);
        assert_eq!(Handshake::from_bytes(&bytes, Side::Initiator), Some(handshake));
        assert_eq!(Handshake::from_bytes(&bytes, Side::Acceptor), None);
        assert_eq!(
            Handshake::from_bytes(b"GET / HTTP/1.1\r\nHost: rank-0.example\r\n\r\n", Side::Initiator),
            None
        );
    }

    #[test]
    fn the_layout_is_little_endian_without_gaps() {
        let bytes = Handshake { token: 0x0807_0605_0403_0201, from: 9, to: 10, socket: 11, sockets: 12 }
            .to_bytes(Side::Initiator);
        let expected = b"flexcall\x01\x02\x03\x04\x05\x06\x07\x08\x01\0\0\0\x09\0\0\0\x0a\0\0\0\x0b\0\0\0\x0c\0\0\0\0\0\0\0";
        assert_eq!(&bytes, expected);
    }
}
