//! The reason why a port is not used.

use serde::Serialize;
use std::fmt;

/// Why a port is not used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rejection {
    /// The cause, as a clause whose subject is the port: `is down`.
    pub message: String,
    /// A command or an instruction that fixes the cause, if there is one.
    pub fix: Option<String>,
    /// Whether the port would be used with other settings.
    pub by_setting: bool,
    /// Whether the port works, but better ones are used.
    pub spare: bool,
}

impl Rejection {
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), fix: None, by_setting: false, spare: false }
    }

    pub(super) fn with_fix(self, fix: impl Into<String>) -> Self {
        Self { fix: Some(fix.into()), ..self }
    }

    pub(super) fn by_setting(self) -> Self {
        Self { by_setting: true, ..self }
    }

    pub(super) fn spare(self) -> Self {
        Self { spare: true, ..self }
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.fix {
            Some(fix) => write!(f, "{} ({fix})", self.message),
            None => f.write_str(&self.message),
        }
    }
}
