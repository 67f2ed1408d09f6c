//! Unique ids on the wire.
//!
//! A unique id contains the secret of its world. Ranks that make a world from another one send the id over
//! connections that others may read, so it is encrypted by a key that only the ranks of the first world have.
//!
//! Owns that encryption: a key stream of HMAC-SHA-256 with a random number, and an authentication code over
//! both.

use super::unique_id::UniqueId;
use crate::error::{Error, Result};
use crate::secret::{AuthenticationCode, MAC_BYTES, SecretKey, random_bytes};

/// Bytes of the random number.
const NONCE: usize = 16;
/// Bytes of a hidden id.
const HIDDEN: usize = NONCE + UniqueId::SIZE + MAC_BYTES;

impl UniqueId {
    /// The id, encrypted with `key`.
    ///
    /// # Errors
    /// `System` if there are no random numbers.
    pub fn hide(&self, key: &SecretKey) -> Result<Vec<u8>> {
        let nonce: [u8; NONCE] = random_bytes()?;
        let mut hidden = nonce.to_vec();
        hidden.extend(apply_key_stream(key, &nonce, self.as_bytes()));
        let code = key.mac("hidden id", &[&hidden]);
        hidden.extend(code);
        Ok(hidden)
    }

    /// The id that was hidden with `key`.
    ///
    /// # Errors
    /// `InvalidArgument` if the bytes were hidden with another key, or changed.
    pub fn reveal(hidden: &[u8], key: &SecretKey) -> Result<Self> {
        let refuse = || Error::invalid_argument("a unique id from another rank is damaged or forged");
        let hidden: &[u8; HIDDEN] = hidden.try_into().map_err(|_| refuse())?;
        let (message, code) = hidden.split_at(HIDDEN - MAC_BYTES);
        let code: &AuthenticationCode = code.try_into().map_err(|_| refuse())?;
        if !key.verify("hidden id", &[message], code) {
            return Err(refuse());
        }
        let (nonce, id) = message.split_at(NONCE);
        Self::from_bytes(&apply_key_stream(key, nonce, id))
    }
}

/// Encrypts or decrypts `bytes`.
fn apply_key_stream(key: &SecretKey, nonce: &[u8], bytes: &[u8]) -> Vec<u8> {
    let mut output = Vec::with_capacity(bytes.len());
    for (position, block) in (0u64..).zip(bytes.chunks(32)) {
        let stream = key.derive("hidden id", &[nonce, &position.to_le_bytes()]);
        output.extend(block.iter().zip(stream.as_bytes()).map(|(byte, key)| byte ^ key));
    }
    output
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_revealed_with_the_same_key_only_and_unchanged_only() {
        let address = "127.0.0.1:4321".parse().expect("an address");
        let id = UniqueId::new(u128::MAX / 3, &[address]);
        let key = SecretKey::from_parts("test", &[b"one"]);
        let [hidden, again] = [(); 2].map(|()| id.hide(&key).expect("random numbers"));
        assert_eq!(UniqueId::reveal(&hidden, &key), Ok(id));
        assert_ne!(hidden, again, "equal ids look different");
        let secret = &id.as_bytes()[..26];
        assert!(!hidden.windows(8).any(|bytes| secret.windows(8).any(|part| part == bytes)));
        assert!(UniqueId::reveal(&hidden, &SecretKey::from_parts("test", &[b"other"])).is_err());
        for at in 0..hidden.len() {
            let mut changed = hidden.clone();
            changed[at] ^= 1;
            assert!(UniqueId::reveal(&changed, &key).is_err(), "byte {at}");
            assert!(UniqueId::reveal(&hidden[..at], &key).is_err());
        }
    }
}
