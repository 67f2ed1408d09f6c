//! Where kernels find the memory of jobs.
//!
//! Owns the pinned ranges and their addresses on the GPU, and bounce slots for memory that cannot be pinned.
//! Must not know descriptors.

use crate::device::cuda::objects::{Gpu, address};
use crate::device::cuda::pinned::{PinnedMemory, PinnedRange};
use crate::error::{Error, Result};
use crate::memory::{Arena, Piece};
use std::sync::Arc;

/// The host memory that a device works with.
pub(crate) struct HostSide<'a> {
    /// Number of slots in the pool for calls on GPUs, and bytes of each.
    pub slots: (usize, usize),
    /// The memory of that pool, and its arena.
    pub pool: Piece,
    pub arena: &'a Arc<Arena>,
    /// The pools of neighbours; mapped for as long as the device is used.
    pub viewed: &'a [Piece],
}

/// Where a kernel finds an operand.
#[derive(Debug, PartialEq)]
pub(super) enum OperandPlace {
    /// At this address.
    At(u64),
    /// At this address, in the bounce slot with this number, which belongs to the job until it is complete.
    Bounced(u64, usize),
    /// Nowhere, until a bounce slot is free.
    Busy,
}

/// Pinned memory for operands whose own memory cannot be pinned.
struct BounceSlots {
    memory: PinnedMemory,
    slot: usize,
    free: Vec<usize>,
}

/// The memory that kernels of one communicator access.
pub(super) struct AddressMap {
    pinned: Vec<PinnedRange>,
    bounce: Option<BounceSlots>,
}

impl AddressMap {
    /// Pins the pool and those of neighbours, and makes bounce slots if one of those cannot be pinned.
    ///
    /// # Errors
    /// `System` if this rank's own pool cannot be pinned.
    ///
    /// # Safety
    /// All of `host` stays mapped for as long as this lives.
    pub(super) unsafe fn new(gpu: &Arc<Gpu>, host: &HostSide<'_>) -> Result<Self> {
        let (slots, slot) = host.slots;
        // SAFETY: the caller guarantees the memory.
        let own = unsafe { PinnedRange::new(gpu, host.pool, false) }.map_err(|error| {
            error.context(format!(
                "{gpu:?} cannot be used, because it does not reach the {slots} slots of {slot} bytes on the host; lower \
                 FLEXRING_SLOTS or FLEXRING_GPU_SUBCHUNK, or keep the data on the host"
            ))
        })?;
        let mut pinned = vec![own];
        let mut unpinned = Vec::new();
        for pool in host.viewed {
            // SAFETY: as above.
            match unsafe { PinnedRange::new(gpu, *pool, true) } {
                Ok(range) => pinned.push(range),
                Err(error) => unpinned.push(error),
            }
        }
        let bounce = match unpinned.first() {
            None => None,
            Some(error) => {
                log::warn!(
                    "{gpu:?} does not reach the memory of {} of {} neighbours: the CPU copies their data first, which is slower: {}",
                    unpinned.len(),
                    host.viewed.len(),
                    error.message()
                );
                // A job has at most one operand of each neighbour. Two jobs can be in flight.
                Some(BounceSlots::new(gpu, 2 * unpinned.len(), slot)?)
            }
        };
        Ok(Self { pinned, bounce })
    }

    /// The address of a piece on the GPU; `None` for host memory that is not pinned.
    pub(super) fn address(&self, piece: Piece) -> Option<u64> {
        if !piece.is_host() {
            return Some(address(piece));
        }
        self.pinned.iter().find_map(|range| range.address_of(piece))
    }

    /// Where a kernel finds an operand. Copies it to a bounce slot if its memory is not pinned.
    ///
    /// # Errors
    /// `Internal` if it is not pinned and exceeds a bounce slot.
    ///
    /// # Safety
    /// The piece is valid for reads.
    pub(super) unsafe fn operand(&mut self, piece: Piece) -> Result<OperandPlace> {
        if let Some(at) = self.address(piece) {
            return Ok(OperandPlace::At(at));
        }
        let slots = self.bounce.as_mut().filter(|bounce| piece.len() <= bounce.slot);
        let Some(slots) = slots else {
            let message = format!("{} bytes of host memory are not pinned for the GPU", piece.len());
            return Err(Error::internal(message));
        };
        let Some(number) = slots.free.pop() else { return Ok(OperandPlace::Busy) };
        let into = slots.memory.piece().narrow(number * slots.slot, piece.len());
        // SAFETY: the caller guarantees the operand. No job uses the slot, which is other memory and as long.
        unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), into.as_ptr(), piece.len()) };
        Ok(OperandPlace::Bounced(slots.memory.address() + (number * slots.slot) as u64, number))
    }

    /// Frees bounce slots.
    pub(super) fn free(&mut self, numbers: impl Iterator<Item = usize>) {
        if let Some(bounce) = &mut self.bounce {
            bounce.free.extend(numbers);
        }
    }

    /// Keeps all memory pinned until the process ends.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.pinned));
        std::mem::forget(self.bounce.take());
    }
}

impl BounceSlots {
    fn new(gpu: &Arc<Gpu>, count: usize, slot: usize) -> Result<Self> {
        Ok(Self { memory: PinnedMemory::new(gpu, count * slot)?, slot, free: (0..count).collect() })
    }
}
