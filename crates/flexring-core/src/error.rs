//! The error type of the crate: a kind that programs match on, and a sentence that says what to do.
//!
//! Owns [`Error`] and [`ErrorKind`]. Errors are sent to other ranks over the control connection, so kind,
//! message and suspect are serialized.

use crate::peer_text::{self, PeerText};
use crate::rank::Rank;
use rustix::process::{Resource, getrlimit};
use std::any::Any;
use std::fmt;
use std::io;
use std::sync::Arc;

/// The result of every fallible operation of the crate, which an [`Error`]'s example shows.
pub type Result<T> = std::result::Result<T, Error>;

/// The kind of an [`Error`], as its example shows. The numbers are those of the C ABI and never change.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    serde::Serialize,
    serde::Deserialize,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[repr(u8)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A pointer, count, enum or argument that no call can accept.
    #[strum(to_string = "invalid argument")]
    InvalidArgument = 1,
    /// An environment variable or setting that cannot be parsed, or that contradicts another.
    #[strum(to_string = "invalid setting")]
    InvalidSetting = 2,
    /// The operating system refused memory, a descriptor, a socket or another resource.
    #[strum(to_string = "system error")]
    System = 3,
    /// The ranks could not find each other: an unreachable master, a port in use, a rank that did not join.
    #[strum(to_string = "rendezvous failed")]
    Rendezvous = 4,
    /// Ranks differ in version, settings, program, count, dtype or operation.
    #[strum(to_string = "ranks disagree")]
    Disagreement = 5,
    /// A rank died or its connection broke.
    #[strum(to_string = "peer lost")]
    PeerLost = 6,
    /// A deadline passed.
    #[strum(to_string = "timed out")]
    Timeout = 7,
    /// A rank called `abort`, or the communicator failed earlier.
    #[strum(to_string = "aborted")]
    Aborted = 8,
    /// The request is not built into this binary or not possible on this machine.
    #[strum(to_string = "unsupported")]
    Unsupported = 9,
    /// A bug in flexring.
    #[strum(to_string = "internal error")]
    Internal = 10,
}

impl ErrorKind {
    /// Every kind, in the order of their numbers.
    pub const ALL: &'static [Self] = <Self as strum::VariantArray>::VARIANTS;

    /// The name used in messages and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// A failure: its kind, and one sentence that says what failed, where, and what to do about it.
///
/// Two errors are equal if kind, message and suspect are; the source does not count, because it stays behind
/// when an error is sent to another rank.
///
/// [`Debug`](fmt::Debug) prints the sentence as [`Display`](fmt::Display) does, because programs whose `main`
/// returns an error, and `expect`, print it.
///
/// ```
/// # use flexring_core::error::{Error, ErrorKind, Result};
/// # fn go_on_with_the_others() -> Result<()> { Ok(()) }
/// fn handle(outcome: Result<()>) -> Result<()> {
///     match outcome {
///         // The communicator refuses further calls, so shrink it.
///         Err(error) if error.kind() == ErrorKind::PeerLost => go_on_with_the_others(),
///         outcome => outcome,
///     }
/// }
/// # handle(Err(Error::peer_lost("rank 3 died"))).unwrap();
/// ```
#[derive(Clone, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Error(
    // Boxed, so that the results of successful calls are one word, which functions return in a register.
    Box<ErrorParts>,
);

#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
struct ErrorParts {
    kind: ErrorKind,
    #[serde(deserialize_with = "peer_text::lines")]
    message: String,
    /// The rank whose failure would explain this error.
    suspect: Option<Rank>,
    #[serde(skip)]
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

/// How flexring's crates make errors.
#[doc(hidden)]
impl Error {
    /// An error whose kind is decided at run time. Where the kind is fixed, call the constructor named after
    /// it.
    ///
    /// `message` is lower case and has no final full stop, here and in all constructors.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(ErrorParts { kind, message: message.into(), suspect: None, source: None }))
    }

    /// An [`ErrorKind::InvalidArgument`] error.
    pub fn invalid_argument(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    /// An [`ErrorKind::InvalidSetting`] error.
    pub fn invalid_setting(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidSetting, message)
    }

    /// An [`ErrorKind::System`] error without an `io::Error` behind it. See [`Error::io`].
    pub fn system(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::System, message)
    }

    /// An [`ErrorKind::System`] error for a failed system call: `context: cause`, with `cause` as its source.
    /// If the cause is a limit of this process or machine, the message says how to raise it.
    pub fn io(context: impl fmt::Display, cause: impl Into<io::Error>) -> Self {
        let cause = cause.into();
        let fix = match cause.raw_os_error() {
            Some(libc::EMFILE) => " (fix: raise the limit of descriptors of a process, `ulimit -n`)",
            Some(libc::ENFILE) => {
                " (fix: raise the limit of open files of this machine, the sysctl fs.file-max)"
            }
            Some(libc::ENOMEM) if getrlimit(Resource::As).current.is_some() => {
                " (fix: raise the limit of address space, `ulimit -v`)"
            }
            _ => "",
        };
        Self::system(format!("{context}: {cause}{fix}")).with_source(cause)
    }

    /// An [`ErrorKind::Rendezvous`] error.
    pub fn rendezvous(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Rendezvous, message)
    }

    /// An [`ErrorKind::Disagreement`] error.
    pub fn disagreement(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Disagreement, message)
    }

    /// An [`ErrorKind::PeerLost`] error. Add the lost rank by [`with_suspect`](Self::with_suspect) if its
    /// failure is only inferred, for example from a broken link.
    pub fn peer_lost(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::PeerLost, message)
    }

    /// An [`ErrorKind::Timeout`] error.
    pub fn timeout(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Timeout, message)
    }

    /// An [`ErrorKind::Aborted`] error.
    pub fn aborted(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Aborted, message)
    }

    /// An [`ErrorKind::Unsupported`] error.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// An [`ErrorKind::Internal`] error.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// An [`ErrorKind::Internal`] error for a panic with this payload.
    pub fn panicked(payload: &(dyn Any + Send)) -> Self {
        let message = payload.downcast_ref::<&str>().copied();
        let message = message.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        Self::internal(format!("flexring panicked, please report this: {}", message.unwrap_or("no message")))
    }

    /// Prefixes the message with `context`: `context: message`. Kind, suspect and source stay.
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.0.message = format!("{context}: {}", self.0.message);
        self
    }

    /// Says on which rank this failed, `rank 3: message`, unless the message names that rank itself.
    #[must_use]
    pub fn of_rank(self, rank: Rank) -> Self {
        let name = format!("rank {rank}");
        let is_whole = |rest: &str| !rest.starts_with(|next: char| next.is_ascii_digit());
        let is_named = self.message().split(&name).skip(1).any(is_whole);
        // `ranks 1 and 2 run different programs`
        if is_named || self.message().starts_with("ranks ") { self } else { self.context(name) }
    }

    /// Reduces the message to one line of limited length, without control characters: its sender is not
    /// authenticated.
    #[must_use]
    pub fn in_one_line(mut self) -> Self {
        self.0.message = PeerText::from(&*self.0.message).to_string();
        self
    }

    /// Keeps `source` as [`std::error::Error::source`]. The message must already say what matters in it.
    #[must_use]
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.0.source = Some(Arc::new(source));
        self
    }

    /// Names the rank whose failure would explain this error. The failure detector waits until that rank
    /// reports or is lost, before it settles on a root cause.
    #[must_use]
    pub fn with_suspect(mut self, rank: Rank) -> Self {
        self.0.suspect = Some(rank);
        self
    }
}

impl Error {
    /// The kind of this failure.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The sentence, without the kind's name.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The rank whose failure would explain this error, if one is known.
    #[must_use]
    pub fn suspect(&self) -> Option<Rank> {
        self.0.suspect
    }
}

impl PartialEq for Error {
    fn eq(&self, other: &Self) -> bool {
        (self.kind(), self.message(), self.suspect()) == (other.kind(), other.message(), other.suspect())
    }
}

impl Eq for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind().name(), self.message())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.0.source {
            Some(source) => Some(source.as_ref()),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error as _;

    #[test]
    fn debug_prints_the_sentence_that_a_user_reads() {
        let error = Error::peer_lost("rank 2 died").with_suspect(2);
        assert_eq!(format!("{error:?}"), "peer lost: rank 2 died");
        assert_eq!(format!("{:?}", Err::<(), _>(error)), "Err(peer lost: rank 2 died)");
    }

    #[test]
    fn results_without_a_value_are_one_word() {
        assert_eq!(size_of::<Result<()>>(), size_of::<usize>());
    }

    #[test]
    fn displays_kind_context_and_message() {
        let error = Error::timeout("rank 3 did not come").context("rendezvous");
        assert_eq!(error.to_string(), "timed out: rendezvous: rank 3 did not come");
    }

    #[test]
    fn a_rank_is_named_once() {
        for (message, expected) in [
            ("it failed", "rank 1: it failed"),
            ("rank 1 called all_reduce #2", "rank 1 called all_reduce #2"),
            ("waited 3 s for rank 12", "rank 1: waited 3 s for rank 12"),
            ("rank 0 called #1 and rank 1 called #2", "rank 0 called #1 and rank 1 called #2"),
            ("ranks 0 and 1 run different programs", "ranks 0 and 1 run different programs"),
        ] {
            assert_eq!(Error::timeout(message).of_rank(1).message(), expected);
        }
    }

    #[test]
    fn a_lack_of_descriptors_is_reported_with_its_fix() {
        let error = Error::io("cannot open a socket", io::Error::from_raw_os_error(libc::EMFILE));
        assert!(
            error.message().ends_with("(fix: raise the limit of descriptors of a process, `ulimit -n`)"),
            "{error}"
        );
        let error = Error::io("cannot open a socket", io::Error::from_raw_os_error(libc::EPERM));
        assert!(!error.message().contains("fix"), "{error}");
    }

    #[test]
    fn keeps_the_source_but_does_not_send_it() {
        let error = Error::io("cannot open a file", io::ErrorKind::NotFound).context("setup");
        let source = error.source().and_then(|source| source.downcast_ref::<io::Error>());
        assert_eq!(source.map(io::Error::kind), Some(io::ErrorKind::NotFound));
        let bytes = postcard::to_stdvec(&error).expect("serializable");
        let received: Error = postcard::from_bytes(&bytes).expect("an error");
        assert_eq!(received, error);
        assert!(received.source().is_none());
    }
}
