//! What travels on a connection between two ranks that shrink.
//!
//! Owns the frames, their longest length, and the numbers by which a process finds the rank that a connection
//! is for.

use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::secret::{AuthenticationCode, SecretKey};

/// The first bytes of an opening.
pub(super) const SHRINK_MAGIC: [u8; 8] = *b"flexshrk";
/// Version of these frames.
pub(super) const SHRINK_VERSION: u32 = 4;

/// A random number that an end draws for one connection.
pub(super) type SessionNonce = [u8; 16];

/// Names one rank of one communicator in the world. It is public: it is derived from the key of the
/// communicator, and reveals nothing about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct ServiceNumber([u8; 16]);

impl ServiceNumber {
    /// The number of a rank of the communicator with this key.
    pub(super) fn new(key: &SecretKey, rank: Rank) -> Self {
        let code = key.mac("service number", &[&(rank as u64).to_le_bytes()]);
        let mut number = [0; 16];
        number.copy_from_slice(&code[..16]);
        Self(number)
    }
}

/// What one end sends to the other.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(super) enum ShrinkFrame {
    /// The first frame of the end that connected. `to` is the rank that it looks for.
    Opening {
        magic: [u8; 8],
        version: u32,
        to: ServiceNumber,
        from: Rank,
        nonce: SessionNonce,
    },
    /// The answer of that rank.
    Accepted {
        nonce: SessionNonce,
    },
    /// The answer of a process that has no such rank any more, with the random number of the opening.
    Gone {
        nonce: SessionNonce,
    },
    Message {
        code: AuthenticationCode,
        payload: Vec<u8>,
    },
    Notice {
        code: AuthenticationCode,
        payload: Vec<u8>,
    },
}

/// The longest frame between ranks of such a world, in bytes: three lists of ranks with at most five bytes
/// each, and an error message.
pub(super) fn frame_limit(world: usize) -> usize {
    16 * world + (64 << 10)
}

/// The payload of a frame.
///
/// # Errors
/// `Internal` if the value cannot be encoded.
pub(super) fn payload_of(value: &impl serde::Serialize) -> Result<Vec<u8>> {
    postcard::to_stdvec(value)
        .map_err(|cause| Error::internal(format!("cannot encode a message of a shrink: {cause}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_of_every_communicator_has_a_number_of_its_own() {
        let key = |text: &str| SecretKey::from_parts("test", &[text.as_bytes()]);
        let numbers = [("one", 0), ("one", 1), ("another", 0), ("another", 1)]
            .map(|(text, rank)| ServiceNumber::new(&key(text), rank));
        for (index, number) in numbers.iter().enumerate() {
            assert!(!numbers[..index].contains(number), "{numbers:?}");
        }
        assert_eq!(numbers[0], ServiceNumber::new(&key("one"), 0));
    }
}
