//! Interruption of waiting calls.

use super::status::{flexring_result, guarded};
use flexring_core::interrupt;
use std::ffi::c_int;

/// Sets a function that calls of this thread call about every 50 milliseconds while they wait; NULL removes
/// it. If it returns another number than 0, the call ends: the communicator is aborted on all ranks, and the
/// call returns FLEXRING_ABORTED.
///
/// It is for languages that run signal handlers when the interrupted thread returns to them, as Python does.
/// There, `check` runs these handlers.
///
/// # Safety
/// `check` is NULL or a function that returns normally: it neither throws nor jumps. It may be called until
/// it is removed or this thread ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_set_interrupt_check(
    check: Option<extern "C" fn() -> c_int>,
) -> flexring_result {
    guarded(|| {
        interrupt::set_check(check);
        Ok(())
    })
}
