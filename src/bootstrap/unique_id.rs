//! The unique id: 128 bytes that identify a world and contain its coordinator's addresses.
//!
//! Owns their layout. Programs copy them from the process that created them to all ranks by any means, so
//! they may arrive damaged, truncated or from another version, and are checked.

use crate::error::{Error, Result};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: [u8; 8] = *b"flexring";
const VERSION: u8 = 1;
const TOKEN_AT: usize = 10;
const ADDRESSES_AT: usize = 26;
/// Bytes per address: family, 16 bytes of address, two of port.
const ADDRESS_SIZE: usize = 19;
const CHECKSUM_AT: usize = UniqueId::SIZE - 8;

/// Identifies a world and contains the addresses of its coordinator, as 128 opaque bytes.
///
/// Layout: `flexring`, a version, the number of addresses, 16 random bytes (the token), the addresses, zeros,
/// and a checksum.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; Self::SIZE]);

impl UniqueId {
    /// The length of an id in bytes.
    pub const SIZE: usize = 128;
    /// How many addresses an id can hold.
    pub(super) const MAX_ADDRESSES: usize = (CHECKSUM_AT - ADDRESSES_AT) / ADDRESS_SIZE;

    /// The id of a coordinator that listens on `addresses`, of which the first four are kept.
    pub(super) fn new(token: u128, addresses: &[SocketAddr]) -> Self {
        let addresses = &addresses[..addresses.len().min(Self::MAX_ADDRESSES)];
        let mut bytes = [0; Self::SIZE];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = VERSION;
        bytes[9] = addresses.len() as u8;
        bytes[TOKEN_AT..ADDRESSES_AT].copy_from_slice(&token.to_le_bytes());
        for (entry, address) in bytes[ADDRESSES_AT..CHECKSUM_AT].chunks_exact_mut(ADDRESS_SIZE).zip(addresses)
        {
            match address.ip() {
                IpAddr::V4(ip) => {
                    entry[0] = 4;
                    entry[1..5].copy_from_slice(&ip.octets());
                }
                IpAddr::V6(ip) => {
                    entry[0] = 6;
                    entry[1..17].copy_from_slice(&ip.octets());
                }
            }
            entry[17..].copy_from_slice(&address.port().to_le_bytes());
        }
        let checksum = xxh3_64(&bytes[..CHECKSUM_AT]);
        bytes[CHECKSUM_AT..].copy_from_slice(&checksum.to_le_bytes());
        Self(bytes)
    }

    /// The bytes, for copying to all ranks.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; Self::SIZE] {
        &self.0
    }

    /// Parses the bytes of an id.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` unless they come unchanged from [`as_bytes`](Self::as_bytes) of the same version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let refuse = |why: String| Err(Error::invalid_argument(format!("invalid unique id: {why}")));
        let Ok(bytes) = <[u8; Self::SIZE]>::try_from(bytes) else {
            return refuse(format!("{} bytes instead of {}", bytes.len(), Self::SIZE));
        };
        if bytes[..8] != MAGIC {
            return refuse(
                "its bytes were not made by flexring; give every rank a copy of the id that one process created"
                    .to_owned(),
            );
        }
        if bytes[8] != VERSION {
            return refuse(format!(
                "it has version {} and this flexring reads version {VERSION}: all ranks must run the same release",
                bytes[8]
            ));
        }
        if bytes[CHECKSUM_AT..] != xxh3_64(&bytes[..CHECKSUM_AT]).to_le_bytes() {
            return refuse("its bytes were damaged in transit".to_owned());
        }
        let id = Self(bytes);
        // The checksum is right, so only forged bytes can fail here.
        if !(1..=Self::MAX_ADDRESSES).contains(&usize::from(bytes[9]))
            || id.entries().any(|entry| decode(entry).is_none())
        {
            return refuse("its addresses are invalid".to_owned());
        }
        Ok(id)
    }

    /// The bytes in hexadecimal, for environment variables and files.
    #[must_use]
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Parses the hexadecimal text of an id. Surrounding blanks are ignored.
    ///
    /// # Errors
    ///
    /// `InvalidArgument` unless it comes from [`to_hex`](Self::to_hex).
    pub fn from_hex(text: &str) -> Result<Self> {
        let text = text.trim().as_bytes();
        let mut bytes = Vec::with_capacity(text.len() / 2);
        for pair in text.chunks(2) {
            let byte = std::str::from_utf8(pair)
                .ok()
                .filter(|pair| pair.len() == 2 && pair.bytes().all(|digit| digit.is_ascii_hexdigit()))
                .and_then(|pair| u8::from_str_radix(pair, 16).ok());
            let Some(byte) = byte else {
                return Err(Error::invalid_argument(format!(
                    "invalid unique id: expected {} hexadecimal digits, not \"{}\"",
                    2 * Self::SIZE,
                    String::from_utf8_lossy(&text[..text.len().min(2 * Self::SIZE)])
                )));
            };
            bytes.push(byte);
        }
        Self::from_bytes(&bytes)
    }

    /// The token by which the ranks of this world identify themselves.
    pub(super) fn token(&self) -> u128 {
        let mut token = [0; 16];
        token.copy_from_slice(&self.0[TOKEN_AT..ADDRESSES_AT]);
        u128::from_le_bytes(token)
    }

    /// The addresses that the coordinator listens on, preferred ones first.
    pub(super) fn addresses(&self) -> Vec<SocketAddr> {
        self.entries().filter_map(decode).collect()
    }

    fn entries(&self) -> impl Iterator<Item = &[u8]> {
        self.0[ADDRESSES_AT..CHECKSUM_AT].chunks_exact(ADDRESS_SIZE).take(usize::from(self.0[9]))
    }
}

fn decode(entry: &[u8]) -> Option<SocketAddr> {
    let ip = match entry.first()? {
        4 => IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(entry.get(1..5)?).ok()?)),
        6 => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(entry.get(1..17)?).ok()?)),
        _ => return None,
    };
    let port = u16::from_le_bytes(entry.get(17..19)?.try_into().ok()?);
    (port != 0).then(|| SocketAddr::new(ip, port))
}

impl fmt::Debug for UniqueId {
    /// Shows the addresses and hides the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("UniqueId").field(&self.addresses()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id() -> UniqueId {
        UniqueId::new(
            0x1234_5678_9abc_def0 << 64 | 77,
            &["127.0.0.1:4321".parse().expect("an address"), "[fd00::2]:65535".parse().expect("an address")],
        )
    }

    #[test]
    fn round_trips_through_bytes_and_hex() {
        let id = id();
        assert_eq!(UniqueId::from_bytes(id.as_bytes()), Ok(id));
        assert_eq!(UniqueId::from_hex(&format!(" {}\n", id.to_hex().to_uppercase())), Ok(id));
        assert_eq!(id.token(), 0x1234_5678_9abc_def0 << 64 | 77);
        assert_eq!(format!("{id:?}"), "UniqueId([127.0.0.1:4321, [fd00::2]:65535])");
    }

    #[test]
    fn keeps_as_many_addresses_as_fit() {
        let many = vec!["10.0.0.1:1".parse().expect("an address"); 9];
        let id = UniqueId::new(1, &many);
        assert_eq!(id.addresses().len(), UniqueId::MAX_ADDRESSES);
        assert!(UniqueId::from_bytes(id.as_bytes()).is_ok());
    }

    #[test]
    fn rejects_an_invalid_id_with_a_reason() {
        let flipped = |at: usize| {
            let mut bytes = *id().as_bytes();
            bytes[at] ^= 1;
            UniqueId::from_bytes(&bytes).expect_err("damaged").to_string()
        };
        assert!(flipped(0).contains("not made by flexring"));
        assert!(flipped(8).contains("version"));
        for at in 9..UniqueId::SIZE {
            assert!(flipped(at).contains("damaged"), "byte {at}");
        }
        for (text, expected) in [
            ("", "0 bytes instead of 128"),
            ("abc", "hexadecimal"),
            ("+1", "hexadecimal"),
            ("é", "hexadecimal"),
            ("00", "1 bytes instead of 128"),
        ] {
            let error = UniqueId::from_hex(text).expect_err(text);
            assert!(error.message().contains(expected), "{error}");
        }
    }

    proptest! {
        #[test]
        fn parsers_accept_any_input_without_panicking(bytes: Vec<u8>, text: String, at in 0..120usize, byte: u8) {
            let _ = UniqueId::from_bytes(&bytes);
            let _ = UniqueId::from_hex(&text);
            // Forged bytes with a correct checksum.
            let mut forged = *id().as_bytes();
            forged[at] = byte;
            let checksum = xxh3_64(&forged[..CHECKSUM_AT]).to_le_bytes();
            forged[CHECKSUM_AT..].copy_from_slice(&checksum);
            if let Ok(id) = UniqueId::from_bytes(&forged) {
                prop_assert!(!id.addresses().is_empty());
            }
        }
    }
}
