//! Allocations of other allocators than flexring's, and those of other processes of the node.
//!
//! Owns how the driver names an allocation, exports, opens and closes it. Must not know who accesses it.

use super::mapped_memory::{ImportedParts, MappedParts};
use super::objects::{Gpu, log_failure};
use crate::cuda_driver::{Address, IpcByValue};
use crate::error::{Error, Result};
use crate::memory::Piece;
use cudarc::driver::sys::CUpointer_attribute as Attribute;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: enables peer access if the memory is on another GPU.
const ENABLE_PEER_ACCESS: u32 = 1;

/// Memory of this process that other processes open as a whole.
#[derive(Debug)]
pub(crate) struct Allocation {
    range: Range<Address>,
    backing: AllocationBacking,
}

/// What is behind the addresses of an [`Allocation`].
#[derive(Debug)]
enum AllocationBacking {
    /// An allocation of `cuMemAlloc`: a number that, unlike the address, no later one gets.
    Whole(u64),
    /// Physical allocations, which the program has mapped.
    Mapped(MappedParts),
}

/// By what other processes open an allocation.
pub(crate) enum Exported {
    /// The driver's name of it.
    Name([u64; 8]),
    /// Descriptors of its parts, and their lengths.
    Parts(Vec<(u64, OwnedFd)>),
}

impl Allocation {
    /// The smallest one that has this memory.
    ///
    /// # Errors
    /// `System` if the driver does not know it; `Unsupported` if it was neither allocated by `cuMemAlloc` nor
    /// mapped, as memory of a pool.
    pub(crate) fn of(gpu: &Arc<Gpu>, memory: Piece) -> Result<Self> {
        let (driver, wanted) = (gpu.driver(), addresses(memory));
        let at = wanted.start;
        // SAFETY: the driver writes a boolean, which is not longer than this; the other bytes stay zero.
        let is_whole =
            unsafe { driver.pointer::<u32>(Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, at) };
        // Drivers without this attribute know no other memory.
        if is_whole == Ok(0) {
            // SAFETY: the driver writes a handle of 64 bits.
            let pool = unsafe { driver.pointer::<u64>(Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, at) };
            if pool.is_ok_and(|pool| pool != 0) {
                return Err(Error::unsupported("they are memory of a pool"));
            }
            let parts = MappedParts::of(gpu, &wanted).map_err(|error| {
                let why = error.message();
                Error::unsupported(format!("they are not mapped as a whole: {why}"))
            })?;
            return Ok(Self { range: parts.range(), backing: AllocationBacking::Mapped(parts) });
        }
        // SAFETY: the driver writes an address, a length and a number of 64 bits.
        unsafe {
            let start = driver.pointer::<Address>(Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at)?;
            let bytes = driver.pointer::<usize>(Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, at)?;
            let id = driver.pointer::<u64>(Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, at)?;
            Ok(Self { range: start..start + bytes as Address, backing: AllocationBacking::Whole(id) })
        }
    }

    /// Its first address.
    pub(crate) fn start(&self) -> Address {
        self.range.start
    }

    /// Behind its last address.
    pub(crate) fn end(&self) -> Address {
        self.range.end
    }

    /// How many descriptors export it, besides its name.
    pub(crate) fn parts(&self) -> usize {
        match &self.backing {
            AllocationBacking::Whole(_) => 0,
            AllocationBacking::Mapped(parts) => parts.len(),
        }
    }

    /// Its length in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Whether all of this memory has addresses in it.
    pub(crate) fn contains(&self, memory: Piece) -> bool {
        let wanted = addresses(memory);
        self.range.start <= wanted.start && wanted.end <= self.range.end
    }

    /// Whether these bytes, by address and length, still are what they were: neither freed and allocated
    /// again, nor unmapped.
    pub(crate) fn has(&self, gpu: &Gpu, (start, len): (usize, usize)) -> bool {
        let start = start as Address;
        match &self.backing {
            AllocationBacking::Whole(id) => {
                let attribute = Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID;
                // SAFETY: the driver writes a number of 64 bits.
                let now = unsafe { gpu.driver().pointer::<u64>(attribute, self.range.start) };
                now.is_ok_and(|now| now == *id)
            }
            AllocationBacking::Mapped(parts) => parts.are_mapped(gpu, &(start..start + len as Address)),
        }
    }

    /// That by which other processes open it.
    ///
    /// # Errors
    /// `System` or `Unsupported` if the driver does not export it, as memory of a pool.
    pub(crate) fn export(&self, gpu: &Gpu) -> Result<Exported> {
        match &self.backing {
            AllocationBacking::Whole(_) => Ok(Exported::Name(export(gpu, self.range.start)?)),
            AllocationBacking::Mapped(parts) => Ok(Exported::Parts(parts.export()?)),
        }
    }
}

fn addresses(memory: Piece) -> Range<Address> {
    let start = memory.as_ptr() as Address;
    start..start + memory.len() as Address
}

/// The name of the allocation that begins at this address.
pub(super) fn export(gpu: &Gpu, start: Address) -> Result<[u64; 8]> {
    let _entered = gpu.enter()?;
    let mut handle = IpcByValue([0; 64]);
    // SAFETY: the out-parameter is writable; the driver checks the address.
    unsafe { gpu.driver().ipc_export(&raw mut handle, start)? };
    let word = |number: usize| u64::from_ne_bytes(std::array::from_fn(|byte| handle.0[8 * number + byte]));
    Ok(std::array::from_fn(word))
}

/// Opens an allocation of another process, for this GPU's kernels. May wait for the GPU.
///
/// # Errors
/// `System` if the driver refuses.
pub(super) fn open(gpu: &Gpu, name: &[u64; 8]) -> Result<Address> {
    let mut handle = [0; 64];
    for (bytes, word) in handle.chunks_exact_mut(8).zip(name) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    let (_entered, mut start) = (gpu.enter()?, 0);
    // SAFETY: the out-parameter is writable; the driver checks the handle.
    unsafe { gpu.driver().ipc_open(&raw mut start, IpcByValue(handle), ENABLE_PEER_ACCESS)? };
    if start == 0 {
        return Err(Error::unsupported("the driver returned a null address"));
    }
    Ok(start)
}

/// Closes an allocation that was opened, as often as it was, when no kernel accesses it any more. May wait
/// for the GPU. `false` if the driver refuses, as it does in a broken context.
pub(super) fn close(gpu: &Gpu, start: Address) -> bool {
    // SAFETY: the host has no reference to the memory. A kernel that accesses it would break the GPU's
    // context, and nothing else.
    let closed = gpu.enter().and_then(|_entered| unsafe { gpu.driver().ipc_close(start) });
    let is_closed = closed.is_ok();
    log_failure(closed);
    is_closed
}

/// An allocation of another process, which this GPU's kernels access.
pub(crate) enum OpenedMemory {
    /// One that was opened by its name.
    Whole(Address),
    /// One that was mapped by descriptors of its parts.
    Mapped(ImportedParts),
}

impl OpenedMemory {
    /// Opens an allocation. May wait for the GPU.
    ///
    /// # Errors
    /// `System` if the driver refuses.
    pub(crate) fn new(gpu: &Arc<Gpu>, exported: &Exported) -> Result<Self> {
        match exported {
            Exported::Name(name) => Ok(Self::Whole(open(gpu, name)?)),
            Exported::Parts(parts) => Ok(Self::Mapped(ImportedParts::new(gpu, parts)?)),
        }
    }

    /// Where it begins in this process.
    pub(crate) fn start(&self) -> Address {
        match self {
            Self::Whole(start) => *start,
            Self::Mapped(memory) => memory.start(),
        }
    }

    /// Closes it when no kernel accesses it any more. May wait for the GPU. `false` if the driver refuses.
    pub(crate) fn close(self, gpu: &Gpu) -> bool {
        match self {
            Self::Whole(start) => close(gpu, start),
            Self::Mapped(memory) => memory.close(),
        }
    }
}
