//! Registrations of memory that several communicators of a process use.
//!
//! Owns which memory is registered with a device, as long as a communicator has declared that it stays as it
//! is.

use super::gpu::AddressRange;
use super::gpu::gdr_mode::GdrMode;
use super::objects::{AccessFlags, MemoryRegion, ProtectionDomain};
use crate::config::GpuDirect;
use crate::error::Result;
use crate::memory::Piece;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// What must be equal for communicators to share a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum RegionKey {
    /// Host memory by address and length, and its rights.
    Host(usize, usize, AccessFlags),
    /// Memory of a GPU by address and length, its rights, and the setting by which its mode was chosen.
    Gpu(u64, usize, AccessFlags, GpuDirect),
}

impl RegionKey {
    /// A range of GPU memory.
    pub(super) fn gpu(span: AddressRange, access: AccessFlags, setting: GpuDirect) -> Self {
        Self::Gpu(span.address, span.len, access, setting)
    }
}

/// The shared regions of a protection domain.
#[derive(Default)]
pub(super) struct SharedRegions(Mutex<HashMap<RegionKey, Weak<SharedRegion>>>);

/// A communicator's right to registered memory that others may use, too. Further communicators find it while
/// any of them has this: as long as one has declared that the memory stays as it is. The region itself may
/// live longer, for messages in flight.
pub(super) struct SharedRegion {
    region: Arc<MemoryRegion>,
    mode: Option<GdrMode>,
}

impl SharedRegion {
    /// The registered memory.
    pub(super) fn region(&self) -> &Arc<MemoryRegion> {
        &self.region
    }

    /// How devices reach it, if it is memory of a GPU.
    pub(super) fn mode(&self) -> Option<GdrMode> {
        self.mode
    }
}

impl SharedRegions {
    /// Registers host memory in `pd`, unless a communicator has registered exactly this memory with the same
    /// rights.
    ///
    /// # Errors
    /// `System` if it cannot be registered.
    pub(super) fn register(
        &self,
        pd: &Arc<ProtectionDomain>,
        piece: Piece,
        access: AccessFlags,
    ) -> Result<Arc<SharedRegion>> {
        let key = RegionKey::Host(piece.as_ptr() as usize, piece.len(), access);
        if let Some(known) = self.find(&key) {
            return Ok(known);
        }
        // Not locked meanwhile, as pinning much memory takes long. Two threads may register the same memory,
        // which is not wrong.
        Ok(self.insert(key, pd.register(piece, access)?, None))
    }

    /// The region that a communicator has registered.
    pub(super) fn find(&self, key: &RegionKey) -> Option<Arc<SharedRegion>> {
        self.lock().get(key).and_then(Weak::upgrade)
    }

    /// Shares a region, which is reached by this mode if it is memory of a GPU.
    pub(super) fn insert(
        &self,
        key: RegionKey,
        region: MemoryRegion,
        mode: Option<GdrMode>,
    ) -> Arc<SharedRegion> {
        let new = Arc::new(SharedRegion { region: Arc::new(region), mode });
        let mut regions = self.lock();
        regions.retain(|_, region| region.strong_count() > 0);
        regions.insert(key, Arc::downgrade(&new));
        new
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RegionKey, Weak<SharedRegion>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
