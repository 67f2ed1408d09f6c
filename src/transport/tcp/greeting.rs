//! The greeting that both ends of a new connection exchange before anything else.
//!
//! Owns its layout: 40 bytes, little endian. Must not know how it travels or what follows from it.

use crate::transport::Rank;

/// Bytes of a greeting.
pub(super) const GREETING: usize = 40;

/// Changes with every change of what is said on a connection.
const VERSION: u32 = 1;

/// Which end says it. They differ, so that nobody mistakes an echo of its own words for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The end that connected.
    Caller,
    /// The end that listened.
    Answerer,
}

impl Role {
    fn magic(self) -> [u8; 8] {
        match self {
            Self::Caller => *b"flexcall",
            Self::Answerer => *b"flexansw",
        }
    }
}

/// Who speaks to whom, about which connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Greeting {
    /// What only the ranks of this communicator know.
    pub token: u64,
    /// Who says it.
    pub from: Rank,
    /// Who is meant.
    pub to: Rank,
    /// Which socket of the link this is.
    pub socket: usize,
    /// How many sockets the speaker thinks that the link has.
    pub sockets: usize,
}

impl Greeting {
    /// The greeting as `role` says it.
    pub fn to_bytes(self, role: Role) -> [u8; GREETING] {
        let mut bytes = [0; GREETING];
        bytes[..8].copy_from_slice(&role.magic());
        bytes[8..16].copy_from_slice(&self.token.to_le_bytes());
        let words = [VERSION, self.from as u32, self.to as u32, self.socket as u32, self.sockets as u32];
        for (place, word) in bytes[16..].chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// What `role` said, or `None` if that is no greeting.
    pub fn from_bytes(bytes: &[u8; GREETING], role: Role) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk::<8>()?;
        let (token, rest) = rest.split_first_chunk::<8>()?;
        let mut words = [0; 6];
        for (word, place) in words.iter_mut().zip(rest.chunks_exact(4)) {
            *word = u32::from_le_bytes(place.try_into().ok()?);
        }
        let [version, from, to, socket, sockets, padding] = words;
        (*magic == role.magic() && version == VERSION && padding == 0).then_some(Self {
            token: u64::from_le_bytes(*token),
            from: from as Rank,
            to: to as Rank,
            socket: socket as usize,
            sockets: sockets as usize,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_survives_the_trip_and_is_no_echo() {
        let greeting = Greeting { token: u64::MAX - 7, from: 3, to: 1, socket: 2, sockets: 4 };
        let bytes = greeting.to_bytes(Role::Caller);
        assert_eq!(Greeting::from_bytes(&bytes, Role::Caller), Some(greeting));
        assert_eq!(Greeting::from_bytes(&bytes, Role::Answerer), None);
        assert_eq!(
            Greeting::from_bytes(b"GET / HTTP/1.1\r\nHost: rank-0.example\r\n\r\n", Role::Caller),
            None
        );
    }
}
