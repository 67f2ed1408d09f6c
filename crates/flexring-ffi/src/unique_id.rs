//! The id by which ranks find each other if the program distributes it itself.

use super::status::{flexring_result, guarded};
use flexring::{UniqueId, create_unique_id};
use flexring_core::config::Config;
use flexring_core::error::Error;

/// Bytes of a unique id.
pub const FLEXRING_UNIQUE_ID_BYTES: usize = 128;
const _: () = assert!(FLEXRING_UNIQUE_ID_BYTES == UniqueId::SIZE, "the C ABI gives the size");

/// Identifies a world that is about to be created. Plain bytes: pass it to the other ranks by any means that
/// keeps it secret, because every process that has it can join.
#[allow(non_camel_case_types, reason = "named as C names types")]
#[derive(Clone, Copy)]
#[repr(C)]
pub struct flexring_unique_id {
    /// Opaque bytes.
    pub internal: [u8; FLEXRING_UNIQUE_ID_BYTES],
}

/// Creates an id for a new world. The process that calls this must live until all ranks have joined; usually
/// it is rank 0. An id can be used for one world only, and expires if no rank uses it for ten times
/// FLEXRING_CONNECT_TIMEOUT_MS.
///
/// # Safety
/// `out` is NULL or points to a flexring_unique_id that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_get_unique_id(out: *mut flexring_unique_id) -> flexring_result {
    guarded(|| {
        if out.is_null() {
            return Err(Error::invalid_argument("flexring_get_unique_id: out is NULL"));
        }
        let id = create_unique_id(&Config::from_env()?)?;
        // SAFETY: `out` is not NULL, and the caller guarantees that it may be written; bytes have no
        // alignment.
        unsafe { out.write(flexring_unique_id { internal: *id.as_bytes() }) };
        Ok(())
    })
}
