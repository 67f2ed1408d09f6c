//! The packets by which the ranks of a node exchange descriptors, and how each proves that its sender belongs
//! to the job.
//!
//! Owns their encoding. A rank is named by its place: its index among the ranks of the node.

use crate::secret::{MAC_BYTES, SecretKey};

/// Longest packet in bytes.
pub(super) const MAX_PACKET: usize = 1 + 4 * MAX_PLACES + MAC_BYTES;

/// Most places that a packet lists; more missing ranks than that are not listed.
const MAX_PLACES: usize = 1024;

/// The first packet of a member, with its descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExchangeHello {
    /// The sender's place.
    pub place: usize,
    /// A random number, which the answers are bound to.
    pub nonce: [u8; 16],
}

impl ExchangeHello {
    const BYTES: usize = 4 + 16 + MAC_BYTES;

    fn fields(&self) -> [u8; 20] {
        let mut fields = [0; 20];
        fields[..4].copy_from_slice(&(self.place as u32).to_le_bytes());
        fields[4..].copy_from_slice(&self.nonce);
        fields
    }

    /// The packet, authenticated with the key of the leader's socket.
    pub(super) fn encode(&self, key: &SecretKey) -> [u8; Self::BYTES] {
        let mut packet = [0; Self::BYTES];
        packet[..20].copy_from_slice(&self.fields());
        packet[20..].copy_from_slice(&key.mac("shared memory: hello", &[&self.fields()]));
        packet
    }

    /// The hello in a packet; `None` if its sender does not have the key.
    pub(super) fn decode(packet: &[u8], key: &SecretKey) -> Option<Self> {
        let packet: &[u8; Self::BYTES] = packet.try_into().ok()?;
        let (place, rest) = packet.split_first_chunk::<4>()?;
        let (nonce, code) = rest.split_first_chunk::<16>()?;
        let hello = Self { place: u32::from_le_bytes(*place) as usize, nonce: *nonce };
        key.verify("shared memory: hello", &[&hello.fields()], code.try_into().ok()?).then_some(hello)
    }
}

/// An answer of the leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The descriptors that come with it are those of the ranks at these places, in this order.
    Descriptors(Vec<usize>),
    /// The ranks at these places did not come in time.
    Missing(Vec<usize>),
}

impl Answer {
    /// The packet that answers `hello`.
    pub(super) fn encode(&self, key: &SecretKey, hello: &ExchangeHello) -> Vec<u8> {
        let (kind, places) = match self {
            Self::Descriptors(places) => (0u8, places),
            Self::Missing(places) => (1, places),
        };
        let mut packet = vec![kind];
        places.iter().take(MAX_PLACES).for_each(|place| packet.extend((*place as u32).to_le_bytes()));
        let code = key.mac("shared memory: answer", &[&hello.fields(), &packet]);
        packet.extend(code);
        packet
    }

    /// The answer to `hello` in a packet; `None` if its sender does not have the key or answers another
    /// hello.
    pub(super) fn decode(packet: &[u8], key: &SecretKey, hello: &ExchangeHello) -> Option<Self> {
        let (fields, code) = packet.split_last_chunk::<MAC_BYTES>()?;
        let genuine = key.verify("shared memory: answer", &[&hello.fields(), fields], code);
        let (kind, places) = fields.split_first().filter(|_| genuine)?;
        let places = places.chunks_exact(4);
        let places = places
            .map(|place| u32::from_le_bytes([place[0], place[1], place[2], place[3]]) as usize)
            .collect();
        match kind {
            0 => Some(Self::Descriptors(places)),
            1 => Some(Self::Missing(places)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_understood_only_with_the_key_and_unchanged() {
        let [key, other] = [1, 2].map(|byte| SecretKey::from_bytes([byte; 32]));
        let hello = ExchangeHello { place: 300, nonce: [7; 16] };
        let packet = hello.encode(&key);
        assert_eq!(ExchangeHello::decode(&packet, &key), Some(hello));
        assert_eq!(ExchangeHello::decode(&packet, &other), None);
        for answer in
            [Answer::Descriptors(vec![0, 2, 70_000]), Answer::Missing(vec![]), Answer::Missing(vec![5])]
        {
            let packet = answer.encode(&key, &hello);
            assert!(packet.len() <= MAX_PACKET);
            assert_eq!(Answer::decode(&packet, &key, &hello), Some(answer));
            assert_eq!(Answer::decode(&packet, &other, &hello), None);
            let later = ExchangeHello { nonce: [8; 16], ..hello };
            assert_eq!(Answer::decode(&packet, &key, &later), None, "an answer to another hello");
        }
        for changed in 0..packet.len() {
            let mut packet = packet;
            packet[changed] ^= 1;
            assert_eq!(ExchangeHello::decode(&packet, &key), None, "byte {changed}");
        }
        for len in 0..packet.len() {
            assert_eq!(ExchangeHello::decode(&packet[..len], &key), None);
            assert_eq!(Answer::decode(&packet[..len], &key, &hello), None);
        }
    }
}
