//! Registrations of host memory that several communicators of a process use.
//!
//! Owns which memory is registered with a device, as long as a communicator has declared that it stays as it is. Must not know the
//! communicators.

use super::objects::{AccessFlags, MemoryRegion, ProtectionDomain};
use crate::error::Result;
use crate::memory::Piece;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The shared regions of a protection domain, by address, length and rights.
#[derive(Default)]
pub(super) struct SharedRegions(Mutex<HashMap<(usize, usize, AccessFlags), Weak<SharedRegion>>>);

/// A communicator's right to registered memory that others may use, too. Further communicators find it while any of them has this: as
/// long as one has declared that the memory stays as it is. The region itself may live longer, for messages in flight.
pub(super) struct SharedRegion(Arc<MemoryRegion>);

impl SharedRegion {
    /// The registered memory.
    pub(super) fn region(&self) -> &Arc<MemoryRegion> {
        &self.0
    }
}

impl SharedRegions {
    /// Registers host memory in `pd`, unless a communicator has registered exactly this memory with the same rights.
    ///
    /// # Errors
    /// `System` if it cannot be registered.
    pub(super) fn register(
        &self,
        pd: &Arc<ProtectionDomain>,
        piece: Piece,
        access: AccessFlags,
    ) -> Result<Arc<SharedRegion>> {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (piece.as_ptr() as usize, piece.len(), access);
        if let Some(known) = lock().get(&key).and_then(Weak::upgrade) {
            return Ok(known);
        }
        // Not locked meanwhile, as pinning much memory takes long. Two threads may register the same memory, which is not wrong.
        let new = Arc::new(SharedRegion(Arc::new(pd.register(piece, access)?)));
        let mut regions = lock();
        regions.retain(|_, region| region.strong_count() > 0);
        regions.insert(key, Arc::downgrade(&new));
        Ok(new)
    }
}
