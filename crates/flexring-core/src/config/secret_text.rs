//! The text of a setting that must stay secret.
//!
//! Owns keeping it out of tables, messages and debugging output.

use super::values::SettingValue;
use crate::secret::SecretKey;
use std::borrow::Cow;
use std::fmt;

/// A secret that a user gave. It is never shown.
#[derive(Clone)]
pub struct SecretText(String);

impl SecretText {
    /// A secret with this text, without the blanks around it.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(text.trim().to_owned())
    }

    /// The bytes of the secret.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl PartialEq for SecretText {
    /// Takes the same time wherever the texts differ.
    fn eq(&self, other: &Self) -> bool {
        let key = SecretKey::from_parts("comparison", &[]);
        key.verify("text", &[self.as_bytes()], &key.mac("text", &[other.as_bytes()]))
    }
}

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretText(hidden)")
    }
}

impl SettingValue for Option<SecretText> {
    fn expected() -> Cow<'static, str> {
        "at least 16 bytes that cannot be guessed".into()
    }
    // Whether it is long enough is checked where it is used, because the error of a setting that cannot be
    // parsed quotes it.
    fn parse(text: &str) -> Option<Self> {
        (!text.trim().is_empty()).then(|| Some(SecretText::new(text)))
    }
    fn show(&self) -> String {
        if self.is_some() { "set (hidden)" } else { "unset" }.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn a_secret_appears_in_no_output() {
        let lookup = |name: &str| (name == "FLEXRING_SECRET").then(|| " 5ecret-0123456789 ".to_owned());
        let config = Config::read(lookup).expect("settings");
        assert_eq!(config.secret, Some(SecretText::new("5ecret-0123456789")));
        assert_ne!(config.secret, Some(SecretText::new("5ecret-0123456780")));
        let shown = format!("{config:?} {:?} {:?}", config.table(lookup), config.shared());
        assert!(shown.contains("set (hidden)") && !shown.contains("5ecret"), "{shown}");
    }
}
