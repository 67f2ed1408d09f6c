//! The number of this process.
//!
//! Owns that number, by which ranks find out which of them share a process.

use crate::error::Result;
use crate::secret::random_bytes;
use std::sync::OnceLock;

/// A number that no other process in the world has; every call in a process returns the same one. Process ids
/// may repeat across containers, and a random number across a fork.
///
/// # Errors
/// `System` if the system has no random numbers.
pub fn process_number() -> Result<u64> {
    static DRAWN: OnceLock<u64> = OnceLock::new();
    let drawn = match DRAWN.get() {
        Some(drawn) => *drawn,
        None => {
            let random = random_bytes()?;
            *DRAWN.get_or_init(|| u64::from_ne_bytes(random))
        }
    };
    Ok(drawn ^ u64::from(std::process::id()))
}
