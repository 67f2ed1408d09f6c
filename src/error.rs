//! What can go wrong, in words.
//!
//! Owns the one error type of the crate: a kind that a program can match on, and a sentence that a person
//! can act on. Errors travel between ranks, so both survive a trip over the control connection. Must not
//! know who raises them.

use std::fmt;

/// The result of everything that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// What sort of failure an [`Error`] is. The numbers are those of the C ABI and never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[repr(u8)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A pointer, count, enum or argument that no call can accept.
    InvalidArgument = 1,
    /// An environment variable or setting that cannot be parsed, or that contradicts another.
    InvalidSetting = 2,
    /// The operating system refused something: memory, a descriptor, a socket.
    System = 3,
    /// The ranks could not find each other: an unreachable master, a port in use, a rank that never came.
    Rendezvous = 4,
    /// Ranks differ in version, settings, program, count, dtype or operation.
    Disagreement = 5,
    /// A rank died or its connection broke.
    PeerLost = 6,
    /// A deadline passed.
    Timeout = 7,
    /// Somebody called `abort`, or the communicator has failed before.
    Aborted = 8,
    /// What was asked for is not built into this binary or not possible here.
    Unsupported = 9,
    /// A bug in flexring.
    Internal = 10,
}

impl ErrorKind {
    /// The name used in messages and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid argument",
            Self::InvalidSetting => "invalid setting",
            Self::System => "system error",
            Self::Rendezvous => "rendezvous failed",
            Self::Disagreement => "ranks disagree",
            Self::PeerLost => "peer lost",
            Self::Timeout => "timed out",
            Self::Aborted => "aborted",
            Self::Unsupported => "unsupported",
            Self::Internal => "internal error",
        }
    }
}

/// A failure: its kind and a sentence that says what, where, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    /// Whose death would explain it.
    suspect: Option<usize>,
}

impl Error {
    /// An error of `kind`; `message` is lower case, without a final full stop.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), suspect: None }
    }

    /// A system call that failed while doing `what`.
    pub fn system(what: impl fmt::Display, cause: impl Into<std::io::Error>) -> Self {
        Self::new(ErrorKind::System, format!("{what}: {}", cause.into()))
    }

    /// What sort of failure this is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The sentence.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The same error, said in the context of `what`: `what: message`.
    #[must_use]
    pub fn within(self, what: impl fmt::Display) -> Self {
        Self { message: format!("{what}: {}", self.message), ..self }
    }

    /// The same error, with the rank whose death would explain it.
    #[must_use]
    pub fn blaming(self, rank: usize) -> Self {
        Self { suspect: Some(rank), ..self }
    }

    /// The rank whose death would explain the error, if there is one.
    #[must_use]
    pub fn suspect(&self) -> Option<usize> {
        self.suspect
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.message)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_as_a_sentence_with_its_context() {
        let error = Error::new(ErrorKind::Timeout, "rank 3 did not come").within("rendezvous");
        assert_eq!(error.to_string(), "timed out: rendezvous: rank 3 did not come");
    }
}
