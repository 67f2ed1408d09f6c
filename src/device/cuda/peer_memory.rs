//! Allocations of other allocators than flexring's, and those of other processes of the node.
//!
//! Owns how the driver names an allocation, exports, opens and closes it. Must not know who accesses it.

use super::objects::{Gpu, log_failure};
use crate::cuda_driver::{Address, IpcByValue};
use crate::error::{Error, Result};
use crate::memory::Piece;
use cudarc::driver::sys::CUpointer_attribute as Attribute;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: enables peer access if the memory is on another GPU.
const ENABLE_PEER_ACCESS: u32 = 1;

/// An allocation of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allocation {
    pub start: Address,
    pub bytes: usize,
    /// A number that, unlike the address, no later allocation gets.
    pub id: u64,
}

impl Allocation {
    /// That which has this memory.
    ///
    /// # Errors
    /// `System` if the driver does not know it.
    pub(crate) fn of(gpu: &Gpu, memory: Piece) -> Result<Self> {
        let (driver, at) = (gpu.driver(), memory.as_ptr() as Address);
        // SAFETY: the driver writes an address, a length and a number of 64 bits.
        unsafe {
            Ok(Self {
                start: driver.pointer::<Address>(Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at)?,
                bytes: driver.pointer::<usize>(Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE, at)?,
                id: driver.pointer::<u64>(Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, at)?,
            })
        }
    }

    /// Whether it still exists: its memory was not freed, and allocated again.
    pub(crate) fn exists(&self, gpu: &Gpu) -> bool {
        // SAFETY: the driver writes a number of 64 bits.
        let id =
            unsafe { gpu.driver().pointer::<u64>(Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, self.start) };
        id.is_ok_and(|id| id == self.id)
    }

    /// The name by which other processes open it.
    ///
    /// # Errors
    /// `System` if the driver does not export it, as memory that was mapped piece by piece or that is of a
    /// pool.
    pub(crate) fn export(&self, gpu: &Gpu) -> Result<[u64; 8]> {
        export(gpu, self.start)
    }
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
pub(crate) fn open(gpu: &Gpu, name: &[u64; 8]) -> Result<Address> {
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
pub(crate) fn close(gpu: &Gpu, start: Address) -> bool {
    // SAFETY: the host has no reference to the memory. A kernel that accesses it would break the GPU's
    // context, and nothing else.
    let closed = gpu.enter().and_then(|_entered| unsafe { gpu.driver().ipc_close(start) });
    let is_closed = closed.is_ok();
    log_failure(closed);
    is_closed
}
