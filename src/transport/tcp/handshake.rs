//! The handshake of a new connection: who each end is, and the proof that it belongs to the job.
//!
//! Owns the layout of its four messages, little-endian but for one mark, and what their codes authenticate.
//!
//! The initiator sends a hello; the acceptor a challenge with a nonce and a code over both; the initiator a
//! code over both; the acceptor a byte, so that the initiator connects again if the acceptor gave the
//! connection up before it received the code. The keys are derived from the job's secret and from random
//! numbers of both ranks, so they are new for each communicator, and the nonces are new for each connection:
//! recorded messages are of no use later.
//!
//! If the job is encrypted, all but the hello is, and the codes also cover the binding of the encryption: a
//! process in the middle has another binding with each end.

use crate::secret::{AuthenticationCode, MAC_BYTES, SecretKey};
use crate::transport::Rank;
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, Unaligned};

/// Bytes of a hello.
pub(super) const HELLO: usize = size_of::<WireHello>();
/// Bytes of a challenge.
pub(super) const CHALLENGE: usize = size_of::<WireChallenge>();
/// Bytes of the initiator's proof.
pub(super) const PROOF: usize = MAC_BYTES;
/// What the acceptor sends once it has verified the proof.
pub(super) const ACCEPTED: [u8; 1] = *b"!";

/// Version of the protocol. Changes with every change of what travels on a connection.
const VERSION: u32 = 4;
/// In the byte order of the sender, because vectors travel in it.
const BYTE_ORDER_MARK: u32 = 0x0102_0304;

/// Each end has its own magic bytes, so an echo is not mistaken for an answer.
const INITIATOR: [u8; 8] = *b"flexcall";
const ACCEPTOR: [u8; 8] = *b"flexansw";

const FROM_INITIATOR: &str = "tcp link, initiator";
const FROM_ACCEPTOR: &str = "tcp link, acceptor";

/// A random number that is used once.
pub(super) type LinkNonce = [u8; 16];

#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct WireHello {
    magic: [u8; 8],
    byte_order: [u8; 4],
    version: U32,
    from: U32,
    to: U32,
    socket: U32,
    sockets: U32,
    encrypted: U32,
    nonce: LinkNonce,
}

#[derive(FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct WireChallenge {
    magic: [u8; 8],
    sockets: U32,
    padding: U32,
    nonce: LinkNonce,
    code: AuthenticationCode,
}

/// The first message of the initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LinkHello {
    /// The initiator.
    pub from: Rank,
    /// The acceptor.
    pub to: Rank,
    /// Index of this socket in its link.
    pub socket: usize,
    /// The number of sockets per link that the initiator uses.
    pub sockets: usize,
    /// Whether the initiator encrypts what follows.
    pub encrypted: bool,
    pub nonce: LinkNonce,
}

impl LinkHello {
    /// The bytes of this message.
    pub fn to_bytes(self) -> [u8; HELLO] {
        zerocopy::transmute!(WireHello {
            magic: INITIATOR,
            byte_order: BYTE_ORDER_MARK.to_ne_bytes(),
            version: VERSION.into(),
            from: (self.from as u32).into(),
            to: (self.to as u32).into(),
            socket: (self.socket as u32).into(),
            sockets: (self.sockets as u32).into(),
            encrypted: u32::from(self.encrypted).into(),
            nonce: self.nonce,
        })
    }

    /// The message, or `None` if the bytes are no hello of this version and byte order.
    pub fn from_bytes(bytes: &[u8; HELLO]) -> Option<Self> {
        let wire: WireHello = zerocopy::transmute!(*bytes);
        let known = wire.magic == INITIATOR
            && wire.byte_order == BYTE_ORDER_MARK.to_ne_bytes()
            && wire.version == VERSION
            && wire.encrypted.get() <= 1;
        known.then_some(Self {
            from: wire.from.get() as Rank,
            to: wire.to.get() as Rank,
            socket: wire.socket.get() as usize,
            sockets: wire.sockets.get() as usize,
            encrypted: wire.encrypted.get() == 1,
            nonce: wire.nonce,
        })
    }
}

/// The acceptor's answer to a hello, as it travels. Its code proves that the acceptor knows the key.
/// `binding` is that of the encryption, or empty.
pub(super) fn challenge(
    key: &SecretKey,
    hello: &[u8; HELLO],
    sockets: usize,
    nonce: LinkNonce,
    binding: &[u8],
) -> [u8; CHALLENGE] {
    let mut wire = WireChallenge {
        magic: ACCEPTOR,
        sockets: (sockets as u32).into(),
        padding: 0.into(),
        nonce,
        code: [0; MAC_BYTES],
    };
    wire.code = key.mac(FROM_ACCEPTOR, &[hello, binding, &wire.as_bytes()[..CHALLENGE - MAC_BYTES]]);
    zerocopy::transmute!(wire)
}

/// The number of sockets per link that the acceptor uses, if this challenge proves that it knows the key.
pub(super) fn verify_challenge(
    key: &SecretKey,
    hello: &[u8; HELLO],
    challenge: &[u8; CHALLENGE],
    binding: &[u8],
) -> Option<usize> {
    let wire: WireChallenge = zerocopy::transmute!(*challenge);
    let covered = [hello.as_slice(), binding, &challenge[..CHALLENGE - MAC_BYTES]];
    let is_proved = key.verify(FROM_ACCEPTOR, &covered, &wire.code);
    (is_proved && wire.magic == ACCEPTOR).then_some(wire.sockets.get() as usize)
}

/// The initiator's answer to a challenge: the proof that it knows the key.
pub(super) fn proof(
    key: &SecretKey,
    hello: &[u8; HELLO],
    challenge: &[u8; CHALLENGE],
    binding: &[u8],
) -> [u8; PROOF] {
    key.mac(FROM_INITIATOR, &[hello, binding, challenge])
}

/// Whether this answer to a challenge proves that the initiator knows the key.
pub(super) fn verify_proof(
    key: &SecretKey,
    hello: &[u8; HELLO],
    challenge: &[u8; CHALLENGE],
    binding: &[u8],
    proof: &[u8; PROOF],
) -> bool {
    key.verify(FROM_INITIATOR, &[hello, binding, challenge], proof)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a connection that is not encrypted.
    const BINDING: &[u8] = &[];

    fn key(text: &[u8]) -> SecretKey {
        SecretKey::from_parts("test", &[text])
    }

    fn hello() -> LinkHello {
        LinkHello { from: 3, to: 1, socket: 2, sockets: 4, encrypted: false, nonce: [7; 16] }
    }

    #[test]
    fn both_ends_prove_that_they_know_the_key() {
        let (key, hello) = (key(b"key"), hello().to_bytes());
        assert_eq!(LinkHello::from_bytes(&hello), Some(self::hello()));
        let challenge = challenge(&key, &hello, 5, [9; 16], BINDING);
        assert_eq!(verify_challenge(&key, &hello, &challenge, BINDING), Some(5));
        assert!(verify_proof(&key, &hello, &challenge, BINDING, &proof(&key, &hello, &challenge, BINDING)));
    }

    #[test]
    fn a_wrong_key_and_every_changed_bit_are_noticed() {
        let (right, wrong, sent) = (key(b"key"), key(b"Key"), hello().to_bytes());
        let asked = challenge(&right, &sent, 4, [9; 16], BINDING);
        let proved = proof(&right, &sent, &asked, BINDING);
        assert_eq!(verify_challenge(&wrong, &sent, &asked, BINDING), None);
        assert!(!verify_proof(&wrong, &sent, &asked, BINDING, &proved));
        for bit in 0..8 * HELLO {
            let mut changed = sent;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(verify_challenge(&right, &changed, &asked, BINDING), None, "bit {bit} of the hello");
            assert!(!verify_proof(&right, &changed, &asked, BINDING, &proved), "bit {bit} of the hello");
        }
        for bit in 0..8 * CHALLENGE {
            let mut changed = asked;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(
                verify_challenge(&right, &sent, &changed, BINDING),
                None,
                "bit {bit} of the challenge"
            );
            assert!(!verify_proof(&right, &sent, &changed, BINDING, &proved), "bit {bit} of the challenge");
        }
    }

    #[test]
    fn codes_cover_the_binding_of_the_encryption() {
        let (key, hello) = (key(b"key"), hello().to_bytes());
        let [ours, theirs] = [[1; 32], [2; 32]];
        let challenge = challenge(&key, &hello, 4, [9; 16], &ours);
        assert_eq!(verify_challenge(&key, &hello, &challenge, &ours), Some(4));
        let proof = proof(&key, &hello, &challenge, &ours);
        assert!(verify_proof(&key, &hello, &challenge, &ours, &proof));
        for other in [theirs.as_slice(), BINDING] {
            assert_eq!(verify_challenge(&key, &hello, &challenge, other), None);
            assert!(!verify_proof(&key, &hello, &challenge, other, &proof));
        }
    }

    #[test]
    fn a_recorded_proof_answers_no_other_challenge() {
        let (key, hello) = (key(b"key"), hello().to_bytes());
        let [first, second] = [[1; 16], [2; 16]].map(|nonce| challenge(&key, &hello, 4, nonce, BINDING));
        let proof = proof(&key, &hello, &first, BINDING);
        assert!(!verify_proof(&key, &hello, &second, BINDING, &proof));
    }

    #[test]
    fn the_code_of_one_end_is_none_of_the_other() {
        let (key, hello) = (key(b"key"), hello().to_bytes());
        let challenge = challenge(&key, &hello, 4, [9; 16], BINDING);
        let code = challenge.last_chunk().expect("a code");
        assert!(!verify_proof(&key, &hello, &challenge, BINDING, code));
    }

    #[test]
    fn other_protocols_versions_and_byte_orders_are_no_hello() {
        let hello = hello().to_bytes();
        let with = |at: usize, byte: u8| {
            let mut changed = hello;
            changed[at] = byte;
            LinkHello::from_bytes(&changed)
        };
        assert_eq!((with(0, b'F'), with(12, 1), with(15, 2)), (None, None, None));
        let mut swapped = hello;
        swapped[8..12].reverse();
        assert_eq!(LinkHello::from_bytes(&swapped), None);
        assert_eq!(
            LinkHello::from_bytes(b"GET / HTTP/1.1\r\nHost: rank-0.example.net:40000\r\n\r\n\r\n"),
            None
        );
    }

    #[test]
    fn the_layout_has_no_gaps() {
        let hello = LinkHello {
            from: 9,
            to: 10,
            socket: 11,
            sockets: 12,
            encrypted: true,
            nonce: *b"0123456789abcdef",
        };
        let bytes = hello.to_bytes();
        assert_eq!(bytes[..8], *b"flexcall");
        assert_eq!(bytes[8..12], 0x0102_0304u32.to_ne_bytes());
        assert_eq!(
            bytes[12..],
            *b"\x04\0\0\0\x09\0\0\0\x0a\0\0\0\x0b\0\0\0\x0c\0\0\0\x01\0\0\x000123456789abcdef"
        );
        assert_eq!((HELLO, CHALLENGE, PROOF), (52, 64, 32));
    }
}
