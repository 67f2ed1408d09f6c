//! Why a subcommand failed.
//!
//! Owns the distinction behind the exit codes, and the prefix of an error on standard error.

use flexring::{Error, ErrorKind};

/// The prefix of an error message on standard error. The parent of local ranks looks for it in their output.
pub const ERROR_PREFIX: &str = "error: ";

/// Why a subcommand did not succeed.
#[derive(Debug)]
pub enum CommandError {
    /// The flags or settings cannot be used: exit code 2.
    Usage(String),
    /// Something failed, or a result was wrong: exit code 1.
    Failed(String),
    /// Exit code 1 without a message, because the subcommand printed it already.
    Reported,
}

impl From<Error> for CommandError {
    fn from(error: Error) -> Self {
        match error.kind() {
            ErrorKind::InvalidSetting => Self::Usage(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}
