//! Results of calls, and the messages of errors.

use crate::comm::Comm;
use crate::group;
use crate::handles;
use crate::types::{NCCL_VERSION_CODE, ncclComm_t, ncclResult_t};
use flexring_ffi::status::{flexring_last_error, flexring_result};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

/// Why a call failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub code: ncclResult_t,
    pub message: String,
}

/// The outcome of a step of a call.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    pub(crate) fn new(code: ncclResult_t, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self::new(ncclResult_t::ncclInvalidArgument, message)
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(ncclResult_t::ncclInvalidUsage, message)
    }

    pub(crate) fn system(message: impl Into<String>) -> Self {
        Self::new(ncclResult_t::ncclSystemError, message)
    }

    /// A panic as an error. Its message has been printed.
    pub(crate) fn panicked() -> Self {
        Self::new(ncclResult_t::ncclInternalError, "a bug in flexring: it panicked, see standard error")
    }

    /// The failure, with a description of what failed before its message.
    pub(crate) fn context(self, what: impl fmt::Display) -> Self {
        Self { message: format!("{what}: {}", self.message), ..self }
    }
}

thread_local! {
    /// The message of this thread's last call that failed.
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
    /// The text that ncclGetLastError has returned to this thread.
    static RETURNED: RefCell<CString> = RefCell::default();
}

/// The message of the last failure in any thread: threads of this library report failures here.
static LAST_OF_PROCESS: Mutex<String> = Mutex::new(String::new());

/// Remembers the message of a failure.
pub(crate) fn record(failure: &Failure) {
    let _ = LAST.try_with(|last| last.replace(failure.message.clone()));
    failure.message.clone_into(&mut LAST_OF_PROCESS.lock().unwrap_or_else(PoisonError::into_inner));
}

/// Runs the body of the function `name`. Errors and panics become a code, and a message for
/// `ncclGetLastError`.
pub(crate) fn guarded(name: &str, body: impl FnOnce() -> Outcome<ncclResult_t>) -> ncclResult_t {
    ended(name, body).unwrap_or_else(|failure| failure.code)
}

/// [`guarded`] for functions that take part in groups: an error in a group is also the result of the group.
pub(crate) fn guarded_in_group(name: &str, body: impl FnOnce() -> Outcome<ncclResult_t>) -> ncclResult_t {
    ended(name, body).unwrap_or_else(|failure| {
        let code = failure.code;
        group::fail(failure);
        code
    })
}

/// The outcome of the function `name`, with its failure recorded.
fn ended(name: &str, body: impl FnOnce() -> Outcome<ncclResult_t>) -> Outcome<ncclResult_t> {
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| Err(Failure::panicked()));
    outcome.map_err(|failure| failure.context(name)).inspect_err(record)
}

/// The outcome of a call of flexring's C ABI on this thread.
pub(crate) fn check(result: flexring_result) -> Outcome {
    if result == flexring_result::FLEXRING_SUCCESS {
        return Ok(());
    }
    // SAFETY: the text is valid until this thread's next call that fails.
    let message = unsafe { CStr::from_ptr(flexring_last_error()) };
    Err(Failure::new(code_of(result), message.to_string_lossy()))
}

/// NCCL's code for a result of flexring.
fn code_of(result: flexring_result) -> ncclResult_t {
    match result {
        flexring_result::FLEXRING_SUCCESS => ncclResult_t::ncclSuccess,
        flexring_result::FLEXRING_INVALID_ARGUMENT => ncclResult_t::ncclInvalidArgument,
        flexring_result::FLEXRING_INVALID_SETTING
        | flexring_result::FLEXRING_DISAGREEMENT
        | flexring_result::FLEXRING_UNSUPPORTED => ncclResult_t::ncclInvalidUsage,
        flexring_result::FLEXRING_SYSTEM_ERROR | flexring_result::FLEXRING_RENDEZVOUS_FAILED => {
            ncclResult_t::ncclSystemError
        }
        flexring_result::FLEXRING_PEER_LOST | flexring_result::FLEXRING_ABORTED => {
            ncclResult_t::ncclRemoteError
        }
        flexring_result::FLEXRING_TIMEOUT => ncclResult_t::ncclTimeout,
        flexring_result::FLEXRING_INTERNAL_ERROR => ncclResult_t::ncclInternalError,
    }
}

/// Checks a pointer that the call writes to: it is not NULL, and aligned.
pub(crate) fn check_out<T>(pointer: *mut T, name: &str) -> Outcome {
    if pointer.is_null() {
        return Err(Failure::argument(format!("{name} is NULL")));
    }
    if !pointer.is_aligned() {
        let bytes = align_of::<T>();
        return Err(Failure::argument(format!("{name} at {pointer:p} is not aligned to {bytes} bytes")));
    }
    Ok(())
}

/// Declares functions of NCCL's ABI, and exports each under both of its names. The body of a function returns
/// an `Outcome<ncclResult_t>`. It stands in both: if one called the other, a profiler's replacement would
/// call itself. Functions that take part in groups are declared after `guarded_in_group:`.
macro_rules! nccl_functions {
    (guarded_in_group: $($functions:tt)*) => { $crate::status::nccl_functions! { @guarded_in_group $($functions)* } };
    (@$guard:ident $($(#[$attribute:meta])* fn $name:ident / $profiled:ident ($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        $(#[$attribute])*
        ///
        /// # Safety
        /// As nccl.h states for the arguments; communicators may be any value.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $crate::types::ncclResult_t {
            $crate::status::$guard(stringify!($name), || $body)
        }

        #[doc = concat!("[`", stringify!($name), "`] for profilers.")]
        ///
        /// # Safety
        /// As for the function of that name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $profiled($($argument: $type),*) -> $crate::types::ncclResult_t {
            $crate::status::$guard(stringify!($name), || $body)
        }
    )*};
    ($($functions:tt)*) => { $crate::status::nccl_functions! { @guarded $($functions)* } };
}
pub(crate) use nccl_functions;

nccl_functions! {
    /// Writes the version of nccl.h that this library implements.
    fn ncclGetVersion / pncclGetVersion(version: *mut c_int) {
        check_out(version, "version")?;
        // SAFETY: the pointer is not NULL, and the caller guarantees that it may be written.
        unsafe { version.write(NCCL_VERSION_CODE) };
        Ok(ncclResult_t::ncclSuccess)
    }
}

/// A text for each code. Never NULL. The code is a number, because a caller may pass any.
fn error_string(code: c_int) -> *const c_char {
    let text = match code {
        0 => c"no error",
        1 => c"CUDA error (ncclGetLastError has the details)",
        2 => c"system error (ncclGetLastError has the details)",
        3 => c"internal error: a bug in flexring (ncclGetLastError has the details)",
        4 => c"invalid argument (ncclGetLastError has the details)",
        5 => c"invalid usage (ncclGetLastError has the details)",
        6 => c"another rank failed, or the connection to it (ncclGetLastError has the details)",
        7 => c"operation in progress",
        8 => c"timeout (ncclGetLastError has the details)",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// Returns a text for a result.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(result: c_int) -> *const c_char {
    error_string(result)
}

/// [`ncclGetErrorString`] for profilers.
#[unsafe(no_mangle)]
pub extern "C" fn pncclGetErrorString(result: c_int) -> *const c_char {
    error_string(result)
}

fn last_error(comm: ncclComm_t) -> *const c_char {
    let text = catch_unwind(|| {
        let of_comm = handles::find(comm).ok().and_then(|comm: std::sync::Arc<Comm>| comm.failure());
        let own = || LAST.try_with(|last| last.borrow().clone()).ok().filter(|text| !text.is_empty());
        let any = || LAST_OF_PROCESS.lock().unwrap_or_else(PoisonError::into_inner).clone();
        of_comm.map(|failure| failure.message).or_else(own).unwrap_or_else(any)
    });
    let text = CString::new(text.unwrap_or_default().replace('\0', "?")).unwrap_or_default();
    let returned = RETURNED.try_with(|returned| {
        returned.replace(text);
        returned.borrow().as_ptr()
    });
    returned.unwrap_or(c"".as_ptr())
}

/// The sentence of the failure that ended this communicator, if it has failed; else of this thread's last
/// call that failed; else of the last one of any thread. Empty if there was none, never NULL. Valid until
/// this thread's next call of this function.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(comm: ncclComm_t) -> *const c_char {
    last_error(comm)
}

/// [`ncclGetLastError`] for profilers.
#[unsafe(no_mangle)]
pub extern "C" fn pncclGetLastError(comm: ncclComm_t) -> *const c_char {
    last_error(comm)
}
