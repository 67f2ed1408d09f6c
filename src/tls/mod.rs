//! TLS 1.3 over sockets that do not block, for connections whose ends prove by codes of their own that they
//! belong to one job.
//!
//! Owns the keys of this process and the sessions.
//!
//! There are no certificates: every process draws a key and sends it raw (RFC 7250), and a client accepts
//! any. What authenticates a connection is its [`SessionBinding`]: both ends derive it from the keys of the
//! session (RFC 8446, section 7.5) and include it in what their codes cover. A process in the middle has one
//! session with each end, with two bindings, and knows no code that covers either.
//!
//! | file | owns |
//! |---|---|
//! | `keys` | the key of this process, and the parameters of all sessions |
//! | `session` | one session: its buffers, and what it reads and sends |

mod keys;
mod session;

#[cfg(test)]
mod tests;

pub use session::{SessionBinding, TlsRole, TlsSession};

/// Why a code over a binding may be wrong, besides a wrong key. Continues a sentence.
pub const INTERCEPTOR: &str = ", or a process in between intercepts the encryption";
