//! Host memory that kernels access: allocated to be page-locked, or page-locked where it is.
//!
//! Owns both, their addresses on the GPU, and the list of ranges that this process has page-locked. Must not
//! know what the memory holds.

use super::objects::{Gpu, log_failure};
use crate::cuda_driver::Address;
use crate::error::{Error, Result};
use crate::memory::{Piece, map_unforked};
use cudarc::driver::sys::{
    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_READ_ONLY,
    CUdevice_attribute as Attribute,
};
use memmap2::MmapRaw;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Page-locked host memory. It is mapped by this process and not allocated by the driver (`cuMemHostAlloc`),
/// so that it exists until it is dropped: `cudaDeviceReset` would free what the driver allocated, while
/// threads poll it.
pub(crate) struct PinnedMemory {
    /// Dropped before the mapping.
    registration: HostRegistration,
    map: MmapRaw,
    address: Address,
}

impl PinnedMemory {
    /// `len` zeroed bytes, at least 1, aligned to a page.
    ///
    /// # Errors
    /// `System` if they cannot be allocated or page-locked.
    pub(crate) fn new(gpu: &Arc<Gpu>, len: usize) -> Result<Self> {
        let _entered = gpu.enter()?;
        let map = MmapRaw::from(map_unforked(len)?);
        let start =
            NonNull::new(map.as_mut_ptr()).ok_or_else(|| Error::internal("a mapping begins at zero"))?;
        // SAFETY: the mapping has this length, and lives longer than its registration.
        let piece = unsafe { Piece::new(start, len) };
        // SAFETY: as above.
        unsafe { register(gpu, piece, false)? };
        let registration = HostRegistration { gpu: Arc::clone(gpu), start, len };
        Ok(Self { address: address_on(gpu, start)?, registration, map })
    }

    /// The first byte.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.registration.start
    }

    /// The whole allocation. The piece must not outlive this object.
    pub(crate) fn piece(&self) -> Piece {
        // SAFETY: the mapping has this length and lives as long as `self`, which all users hold.
        unsafe { Piece::new(self.start(), self.map.len()) }
    }

    /// The address on the GPU that it was page-locked for.
    pub(crate) fn address(&self) -> Address {
        self.address
    }
}

/// The address on a GPU of page-locked host memory.
fn address_on(gpu: &Gpu, start: NonNull<u8>) -> Result<Address> {
    let mut address = 0;
    // SAFETY: the out-parameter is writable, and the driver only looks the memory up.
    unsafe { gpu.driver().host_address(&raw mut address, start.as_ptr().cast(), 0)? };
    Ok(address)
}

/// A page-locked range of host memory.
struct HostRegistration {
    gpu: Arc<Gpu>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it is an address and a length; nothing is read or written through them here.
unsafe impl Send for HostRegistration {}
// SAFETY: as above.
unsafe impl Sync for HostRegistration {}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        if let Ok(_entered) = self.gpu.enter() {
            // SAFETY: the memory was registered by `host_register`, and is still mapped.
            log_failure(unsafe { self.gpu.driver().host_unregister(self.start.as_ptr().cast()) });
        }
    }
}

/// All ranges that this process has page-locked. The driver refuses to lock a range twice.
static REGISTRATIONS: Mutex<Vec<Weak<HostRegistration>>> = Mutex::new(Vec::new());

fn registrations() -> MutexGuard<'static, Vec<Weak<HostRegistration>>> {
    REGISTRATIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Host memory that is page-locked for as long as this or another `PinnedRange` of the same memory lives.
pub(crate) struct PinnedRange {
    piece: Piece,
    address: Address,
    registration: Option<Arc<HostRegistration>>,
}

impl PinnedRange {
    /// Page-locks `piece`. `read_only`: it is mapped for reading only, as the memory of a neighbour is.
    ///
    /// # Errors
    /// `System` if it cannot be locked, or its mapping is not supported.
    ///
    /// # Safety
    /// The memory stays mapped for as long as this lives.
    pub(crate) unsafe fn new(gpu: &Arc<Gpu>, piece: Piece, read_only: bool) -> Result<Self> {
        let mut registrations = registrations();
        let start = NonNull::new(piece.as_ptr()).ok_or_else(|| Error::internal("a piece begins at zero"))?;
        registrations.retain(|registration| registration.strong_count() > 0);
        let same = |known: &Arc<HostRegistration>| known.start == start && known.len == piece.len();
        let known = registrations.iter().filter_map(Weak::upgrade).find(same);
        let _entered = gpu.enter()?;
        let registration = match known {
            Some(known) => known,
            None => {
                // SAFETY: the caller guarantees the memory.
                unsafe { register(gpu, piece, read_only)? };
                let new = Arc::new(HostRegistration { gpu: Arc::clone(gpu), start, len: piece.len() });
                registrations.push(Arc::downgrade(&new));
                new
            }
        };
        Ok(Self { piece, address: address_on(gpu, start)?, registration: Some(registration) })
    }

    /// The address on the GPU of `part`, if it lies in this range.
    pub(crate) fn address_of(&self, part: Piece) -> Option<Address> {
        let offset = (part.as_ptr() as usize).checked_sub(self.piece.as_ptr() as usize)?;
        let inside = part.is_host() && offset.checked_add(part.len())? <= self.piece.len();
        inside.then_some(self.address + offset as Address)
    }
}

impl Drop for PinnedRange {
    fn drop(&mut self) {
        // Under the lock, so that the range is unlocked before another thread tries to lock it again.
        let _registrations = registrations();
        self.registration = None;
    }
}

/// Page-locks a range in the current context.
///
/// # Safety
/// The memory stays mapped until it is unregistered.
unsafe fn register(gpu: &Gpu, piece: Piece, read_only: bool) -> Result<()> {
    let driver = gpu.driver();
    let mut flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
    // Without the attribute the driver refuses the flag. A GPU that uses the host's page tables does not need
    // it.
    let supported = Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED;
    if read_only && driver.attribute(gpu.ordinal as usize, supported).is_ok_and(|supported| supported != 0) {
        flags |= CU_MEMHOSTREGISTER_READ_ONLY;
    }
    // SAFETY: the caller guarantees the memory.
    let registered = unsafe { driver.host_register(piece.as_ptr().cast(), piece.len(), flags) };
    registered.map_err(|failure| {
        Error::from(failure)
            .context(format_args!("{} bytes of host memory cannot be page-locked", piece.len()))
    })
}
