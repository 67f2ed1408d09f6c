//! The unique id: 128 bytes that identify a world and contain its coordinator's addresses.
//!
//! Owns their layout. The token in them is the secret of the world: who has the id can join. Programs copy
//! ids from the process that created them to all ranks by any means, so they may arrive damaged, truncated or
//! from another version, and are checked.

use crate::error::{Error, Result};
use crate::secret::SecretKey;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use twox_hash::XxHash3_64;
use zerocopy::little_endian::{U16, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, Unaligned};

const MAGIC: [u8; 8] = *b"flexring";
const VERSION: u8 = 1;
const FAMILY_V4: u8 = 4;
const FAMILY_V6: u8 = 6;

/// Identifies a world and contains the addresses of its coordinator, as 128 opaque bytes.
///
/// ```
/// use flexring::config::Config;
/// use flexring::{Communicator, UniqueId, create_unique_id};
///
/// # fn main() -> flexring::Result<()> {
/// // One rank creates the id, and the program passes its bytes to the others.
/// let id = create_unique_id(&Config::from_env()?)?;
/// let copy = UniqueId::from_bytes(id.as_bytes())?;
/// let comm = Communicator::from_unique_id(1, &copy, 0)?;
/// # drop(comm);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(Layout);

/// The bytes of an id. Integers are little-endian.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct Layout {
    magic: [u8; 8],
    version: u8,
    /// The number of addresses in use, at least 1.
    address_count: u8,
    /// Random, and secret: only the ranks of the world know it.
    token: U128,
    addresses: [AddressEntry; UniqueId::MAX_ADDRESSES],
    padding: [u8; 18],
    /// XXH3 of all bytes before it.
    checksum: U64,
}

/// One address of a coordinator.
#[derive(Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct AddressEntry {
    /// 4 or 6.
    family: u8,
    /// The octets of the address. An IPv4 address uses the first four.
    ip: [u8; 16],
    port: U16,
}

impl UniqueId {
    /// The length of an id in bytes.
    pub const SIZE: usize = size_of::<Layout>();
    /// How many addresses an id can hold.
    pub(super) const MAX_ADDRESSES: usize = 4;

    /// The id of a coordinator that listens on `addresses`, of which the first four are kept.
    pub(super) fn new(token: u128, addresses: &[SocketAddr]) -> Self {
        let mut layout = Layout {
            magic: MAGIC,
            version: VERSION,
            address_count: addresses.len().min(Self::MAX_ADDRESSES) as u8,
            token: token.into(),
            addresses: Default::default(),
            padding: [0; 18],
            checksum: U64::ZERO,
        };
        for (entry, address) in layout.addresses.iter_mut().zip(addresses) {
            *entry = AddressEntry::new(*address);
        }
        layout.checksum = layout.expected_checksum();
        Self(layout)
    }

    /// The bytes, for copying to all ranks.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; Self::SIZE] {
        zerocopy::transmute_ref!(&self.0)
    }

    /// Parses the bytes of an id.
    ///
    /// # Errors
    /// `InvalidArgument` unless they come unchanged from [`as_bytes`](Self::as_bytes) of the same version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let refuse = |why: String| Err(Error::invalid_argument(format!("invalid unique id: {why}")));
        let Ok(layout) = Layout::read_from_bytes(bytes) else {
            return refuse(format!("{} bytes instead of {}", bytes.len(), Self::SIZE));
        };
        if layout.magic != MAGIC {
            return refuse(
                "its bytes were not made by flexring; give every rank a copy of the id that one process created"
                    .to_owned(),
            );
        }
        if layout.version != VERSION {
            return refuse(format!(
                "it has version {} and this flexring reads version {VERSION}: all ranks must run the same release",
                layout.version
            ));
        }
        if layout.checksum != layout.expected_checksum() {
            return refuse("its bytes were damaged in transit".to_owned());
        }
        let id = Self(layout);
        // The checksum is right, so only forged bytes can fail here.
        if !(1..=Self::MAX_ADDRESSES).contains(&usize::from(layout.address_count))
            || id.entries().any(|entry| entry.decode().is_none())
        {
            return refuse("its addresses are invalid".to_owned());
        }
        Ok(id)
    }

    /// The bytes in hexadecimal, for environment variables and files.
    #[must_use]
    pub fn to_hex(&self) -> String {
        self.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Parses the hexadecimal text of an id. Surrounding blanks are ignored.
    ///
    /// # Errors
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
                // Not quoted, because it may be most of an id, which is secret.
                return Err(Error::invalid_argument(format!(
                    "invalid unique id: expected {} hexadecimal digits, not a text of {} bytes with other characters",
                    2 * Self::SIZE,
                    text.len()
                )));
            };
            bytes.push(byte);
        }
        Self::from_bytes(&bytes)
    }

    /// The secret of this world.
    pub(super) fn token(&self) -> u128 {
        self.0.token.get()
    }

    /// The public number of this world, from which its secret cannot be computed.
    pub(super) fn job(&self) -> u128 {
        let code = SecretKey::from_parts("unique id", &[&self.0.token.to_bytes()]).mac("job number", &[]);
        u128::from_le_bytes(std::array::from_fn(|at| code[at]))
    }

    /// The addresses that the coordinator listens on, preferred ones first.
    pub(super) fn addresses(&self) -> Vec<SocketAddr> {
        self.entries().filter_map(AddressEntry::decode).collect()
    }

    fn entries(&self) -> impl Iterator<Item = &AddressEntry> {
        self.0.addresses.iter().take(usize::from(self.0.address_count))
    }
}

impl Layout {
    fn expected_checksum(&self) -> U64 {
        let bytes = self.as_bytes();
        XxHash3_64::oneshot(&bytes[..bytes.len() - size_of::<U64>()]).into()
    }
}

impl AddressEntry {
    fn new(address: SocketAddr) -> Self {
        let mut entry = Self { port: address.port().into(), ..Self::default() };
        match address.ip() {
            IpAddr::V4(ip) => {
                entry.family = FAMILY_V4;
                entry.ip[..4].copy_from_slice(&ip.octets());
            }
            IpAddr::V6(ip) => {
                entry.family = FAMILY_V6;
                entry.ip = ip.octets();
            }
        }
        entry
    }

    /// The address that this entry encodes; `None` if the family is unknown or the port is 0.
    fn decode(&self) -> Option<SocketAddr> {
        let ip = match (self.family, self.ip) {
            (FAMILY_V4, [a, b, c, d, ..]) => IpAddr::V4(Ipv4Addr::new(a, b, c, d)),
            (FAMILY_V6, octets) => IpAddr::V6(Ipv6Addr::from(octets)),
            _ => return None,
        };
        let port = self.port.get();
        (port != 0).then(|| SocketAddr::new(ip, port))
    }
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
        assert_ne!(id.job(), id.token(), "the number that ranks send is not the secret");
        assert_eq!(format!("{id:?}"), "UniqueId([127.0.0.1:4321, [fd00::2]:65535])");
    }

    #[test]
    fn keeps_as_many_addresses_as_fit() {
        let many = vec!["10.0.0.1:1".parse().expect("an address"); 9];
        let id = UniqueId::new(1, &many);
        assert_eq!(id.addresses().len(), UniqueId::MAX_ADDRESSES);
        assert!(UniqueId::from_bytes(id.as_bytes()).is_ok());
        assert_eq!(UniqueId::SIZE, 128, "the C ABI and NCCL's unique id have 128 bytes");
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
            let checksum = XxHash3_64::oneshot(&forged[..120]).to_le_bytes();
            forged[120..].copy_from_slice(&checksum);
            if let Ok(id) = UniqueId::from_bytes(&forged) {
                prop_assert!(!id.addresses().is_empty());
            }
        }
    }
}
