//! Result codes, and the message of the last error.

use flexring_core::error::{Error, ErrorKind, Result};
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The result of every call. 0 is success; otherwise flexring_last_error() returns a message.
#[allow(non_camel_case_types, reason = "named as C names types")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub enum flexring_result {
    /// The call succeeded.
    FLEXRING_SUCCESS = 0,
    /// An argument is not valid.
    FLEXRING_INVALID_ARGUMENT = 1,
    /// The value of an environment variable is not valid.
    FLEXRING_INVALID_SETTING = 2,
    /// The operating system, a driver or a device reported an error.
    FLEXRING_SYSTEM_ERROR = 3,
    /// The ranks did not find each other.
    FLEXRING_RENDEZVOUS_FAILED = 4,
    /// Ranks differ in version, settings, program, collective, root, count, type or operation.
    FLEXRING_DISAGREEMENT = 5,
    /// A rank died or its connection broke.
    FLEXRING_PEER_LOST = 6,
    /// A timeout expired.
    FLEXRING_TIMEOUT = 7,
    /// A rank called flexring_comm_abort, or the communicator has failed before.
    FLEXRING_ABORTED = 8,
    /// Not built into this library, or not supported by this machine.
    FLEXRING_UNSUPPORTED = 9,
    /// A bug in flexring.
    FLEXRING_INTERNAL_ERROR = 10,
}

impl From<ErrorKind> for flexring_result {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::InvalidArgument => Self::FLEXRING_INVALID_ARGUMENT,
            ErrorKind::InvalidSetting => Self::FLEXRING_INVALID_SETTING,
            ErrorKind::System => Self::FLEXRING_SYSTEM_ERROR,
            ErrorKind::Rendezvous => Self::FLEXRING_RENDEZVOUS_FAILED,
            ErrorKind::Disagreement => Self::FLEXRING_DISAGREEMENT,
            ErrorKind::PeerLost => Self::FLEXRING_PEER_LOST,
            ErrorKind::Timeout => Self::FLEXRING_TIMEOUT,
            ErrorKind::Aborted => Self::FLEXRING_ABORTED,
            ErrorKind::Unsupported => Self::FLEXRING_UNSUPPORTED,
            // `Internal`, the one that is left.
            _ => Self::FLEXRING_INTERNAL_ERROR,
        }
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs the body of an entry point. Errors and panics become a code, and a message for `flexring_last_error`.
pub(super) fn guarded(body: impl FnOnce() -> Result<()>) -> flexring_result {
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(Error::panicked(&*panic)));
    let Err(error) = outcome else {
        return flexring_result::FLEXRING_SUCCESS;
    };
    // A message may quote any text, but a C string ends at the first NUL.
    let message = CString::new(error.to_string().replace('\0', "?")).unwrap_or_default();
    // While the thread is being torn down, no caller can ask for the message.
    let _ = LAST.try_with(|last| last.replace(message));
    error.kind().into()
}

/// Checks that a pointer that a caller passed as `name` is not NULL.
#[inline]
pub(super) fn check_not_null<T>(pointer: *const T, function: &str, name: &str) -> Result<()> {
    if pointer.is_null() {
        return Err(Error::invalid_argument(format!("{function}: {name} is NULL")));
    }
    Ok(())
}

/// Checks a pointer that a caller passed as `name`: it is not NULL, and aligned.
#[inline]
pub(super) fn check_pointer<T>(pointer: *const T, function: &str, name: &str) -> Result<()> {
    check_not_null(pointer, function, name)?;
    if !pointer.is_aligned() {
        let bytes = align_of::<T>();
        let message = format!("{function}: {name} at {pointer:p} is not aligned to {bytes} bytes");
        return Err(Error::invalid_argument(message));
    }
    Ok(())
}

/// The message of this thread's last call that did not return FLEXRING_SUCCESS; empty if there was none.
/// Valid until this thread's next failing call. Never NULL.
#[unsafe(no_mangle)]
pub extern "C" fn flexring_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// The version of this library, as MAJOR * 10000 + MINOR * 100 + PATCH.
#[unsafe(no_mangle)]
pub extern "C" fn flexring_version() -> i32 {
    let number = |text: &str| text.parse::<i32>().unwrap_or(0);
    number(env!("CARGO_PKG_VERSION_MAJOR")) * 10000
        + number(env!("CARGO_PKG_VERSION_MINOR")) * 100
        + number(env!("CARGO_PKG_VERSION_PATCH"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_the_number_of_its_code() {
        for kind in ErrorKind::ALL {
            assert_eq!(flexring_result::from(*kind) as u8, *kind as u8, "{kind:?}");
        }
    }
}
