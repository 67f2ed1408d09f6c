//! Secret keys: how one is derived from another, and how a message is authenticated with one.
//!
//! Owns the choice of algorithm (HMAC-SHA-256) and the encoding of what is authenticated.

use crate::error::{Error, Result};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use std::fmt;

/// Length of an authentication code in bytes.
pub const MAC_BYTES: usize = 32;

/// An authentication code. Compare it by [`SecretKey::verify`] only, which takes the same time for all codes.
pub type AuthenticationCode = [u8; MAC_BYTES];

/// A secret of 32 bytes, known only to those that may take part. It cannot be printed and has no `==`.
#[derive(Clone)]
pub struct SecretKey([u8; 32]);

impl SecretKey {
    /// A random key.
    ///
    /// # Errors
    /// `System` if the system has no random numbers.
    pub fn random() -> Result<Self> {
        random_bytes().map(Self)
    }

    /// The key with these bytes, which must be secret and uniformly distributed.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The bytes of the key, for passing it to another process of this user.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// A key from secrets of any length. Keys from different labels or parts are unrelated.
    #[must_use]
    pub fn from_parts(label: &str, parts: &[&[u8]]) -> Self {
        // As HKDF's extraction does, with a fixed salt.
        Self(*b"flexring: key from secret parts.").derive(label, parts)
    }

    /// The key for one purpose, which `label` names. It reveals nothing about this key, and keys from
    /// different labels or parts are unrelated.
    #[must_use]
    pub fn derive(&self, label: &str, parts: &[&[u8]]) -> Self {
        Self(self.hmac("key", label, parts).finalize().into_bytes().into())
    }

    /// The authentication code of a message that consists of `parts`. Messages with different labels have
    /// unrelated codes.
    #[must_use]
    pub fn mac(&self, label: &str, parts: &[&[u8]]) -> AuthenticationCode {
        self.hmac("message", label, parts).finalize().into_bytes().into()
    }

    /// Whether `code` is the authentication code of this message. The time that it takes does not depend on
    /// the code.
    #[must_use]
    pub fn verify(&self, label: &str, parts: &[&[u8]], code: &AuthenticationCode) -> bool {
        self.hmac("message", label, parts).verify_slice(code).is_ok()
    }

    /// Every field is preceded by its length, so no two lists of fields have the same encoding.
    fn hmac(&self, use_: &str, label: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
        // HMAC pads a key that is shorter than a block with zeros.
        let mut block = [0; 64];
        block[..32].copy_from_slice(&self.0);
        let mut hmac = Hmac::<Sha256>::new(&block.into());
        for field in [use_.as_bytes(), label.as_bytes()].iter().chain(parts) {
            hmac.update(&(field.len() as u64).to_le_bytes());
            hmac.update(field);
        }
        hmac
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretKey(hidden)")
    }
}

/// Random bytes, for keys and for numbers that must not repeat.
///
/// # Errors
/// `System` if the system has no random numbers.
pub fn random_bytes<const COUNT: usize>() -> Result<[u8; COUNT]> {
    let mut bytes = [0; COUNT];
    getrandom::fill(&mut bytes)
        .map_err(|cause| Error::system(format!("cannot get random bytes: {cause}")))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_depend_on_key_label_and_division_into_parts() {
        let key = SecretKey::from_parts("test", &[b"secret"]);
        let code = key.mac("hello", &[b"ab", b"c"]);
        assert!(key.verify("hello", &[b"ab", b"c"], &code));
        for (label, parts) in [
            ("hello", vec![b"a".as_slice(), b"bc"]),
            ("hello", vec![b"abc"]),
            ("hello", vec![b"ab", b"c", b""]),
            ("hell", vec![b"oab", b"c"]),
            ("proof", vec![b"ab", b"c"]),
        ] {
            assert!(!key.verify(label, &parts, &code), "{label} {parts:?}");
        }
        let other = SecretKey::from_parts("test", &[b"Secret"]);
        assert!(!other.verify("hello", &[b"ab", b"c"], &code));
        assert!(!key.derive("hello", &[]).verify("hello", &[b"ab", b"c"], &code));
    }

    #[test]
    fn a_derived_key_is_no_code_that_the_parent_gives_away() {
        let key = SecretKey::from_parts("test", &[b"secret"]);
        assert_ne!(key.derive("x", &[b"y"]).0, key.mac("x", &[b"y"]));
    }

    #[test]
    fn codes_are_those_of_hmac_sha_256() {
        // RFC 4231, test case 2, through the same crates.
        let mut hmac = Hmac::<Sha256>::new_from_slice(b"Jefe").expect("any length");
        hmac.update(b"what do ya want for nothing?");
        let code: AuthenticationCode = hmac.finalize().into_bytes().into();
        assert_eq!(code[..8], [0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e]);
    }

    #[test]
    fn a_key_is_never_printed() {
        let key = SecretKey::from_bytes([0x41; 32]);
        assert_eq!(format!("{key:?}"), "SecretKey(hidden)");
    }

    #[test]
    fn random_keys_differ() {
        let [one, other] = [SecretKey::random(), SecretKey::random()].map(|key| key.expect("random bytes"));
        assert_ne!(one.0, other.0);
    }
}
