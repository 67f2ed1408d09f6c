//! The configuration of a communicator, as programs pass it.

use crate::status::{Failure, Outcome};
use crate::types::ncclConfig_t;
use std::ffi::{CStr, c_char, c_int};

/// What nccl.h puts into `magic`.
const MAGIC: u32 = 0xcafe_beef;
/// What nccl.h puts into fields that the program leaves as they are.
const UNDEFINED: c_int = c_int::MIN;
/// The first version with configurations.
const FIRST_VERSION: u32 = 21400;
/// Bytes before the field `netName`, which version 2.17 added.
const NET_NAME: usize = 32;

/// Whether calls that make this communicator wait for the result. `None` if `config` is NULL or does not say.
/// The other fields tune NCCL's algorithms, and have no effect.
///
/// # Safety
/// `config` is NULL or points to a configuration that is as long as its field `size`.
pub(crate) unsafe fn blocking(config: *const ncclConfig_t) -> Outcome<Option<bool>> {
    if config.is_null() {
        return Ok(None);
    }
    if !config.is_aligned() {
        return Err(Failure::argument(format!("the configuration at {config:p} is not aligned")));
    }
    // SAFETY: all configurations have these fields, and the pointer is aligned.
    let fields = unsafe { config.read() };
    if fields.magic != MAGIC || fields.size < size_of::<ncclConfig_t>() || fields.version < FIRST_VERSION {
        return Err(Failure::argument("the configuration was not initialized with NCCL_CONFIG_INITIALIZER"));
    }
    if fields.size >= NET_NAME + size_of::<*const c_char>() {
        // SAFETY: the field is in the `size` bytes of the configuration, and aligned as it is.
        let name = unsafe { config.cast::<u8>().add(NET_NAME).cast::<*const c_char>().read() };
        if !name.is_null() {
            // SAFETY: nccl.h asks for a C string.
            let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
            let message = format!(
                "netName is {name:?}, but flexring has no network plugins: FLEXRING_TRANSPORT chooses"
            );
            return Err(Failure::usage(message));
        }
    }
    match fields.blocking {
        UNDEFINED => Ok(None),
        0 => Ok(Some(false)),
        1 => Ok(Some(true)),
        other => Err(Failure::argument(format!("blocking is {other} in the configuration, neither 0 nor 1"))),
    }
}
