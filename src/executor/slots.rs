//! The slots of the pool: memory for messages that cannot be sent from, or received into, the caller's
//! vectors.
//!
//! Owns the memory of each slot. Must not know which slot is free: the pipeline counts them.

use crate::memory::{Piece, populate};
use crate::plan::call_layout::SlotMemory;

/// Equal slots in one memory, and a spare one that the pipeline does not use.
struct SlotSet {
    slots: Vec<Piece>,
    /// For calls without elements, and for short inputs that must be copied.
    spare: Option<Piece>,
    /// Whether the pages of all slots exist.
    populated: bool,
}

impl SlotSet {
    /// A pool of these pieces, the last of which is the spare one.
    fn new(mut slots: Vec<Piece>) -> Self {
        let spare = slots.pop();
        Self { slots, spare, populated: false }
    }

    fn spare(&self, len: usize) -> Piece {
        self.spare.unwrap_or(Piece::EMPTY).narrow(0, len)
    }

    fn slot_bytes(&self) -> usize {
        self.slots.first().map_or(usize::MAX, |slot| slot.len())
    }
}

/// The slots of calls on a GPU. Each exists twice.
struct GpuSlots {
    /// In pinned host memory.
    host: SlotSet,
    /// In the memory of the GPU.
    gpu: SlotSet,
    /// By slot, which of the two the message in flight uses.
    memory: Vec<SlotMemory>,
}

/// All slots of a rank.
pub(super) struct Slots {
    host: SlotSet,
    gpu: Option<GpuSlots>,
}

impl Slots {
    /// Slots for calls on the host: equal pieces, the last of which is not counted.
    pub(super) fn new(slots: Vec<Piece>) -> Self {
        Self { host: SlotSet::new(slots), gpu: None }
    }

    /// Adds slots for calls on a GPU, as many as for calls on the host: in pinned host memory, and in that of
    /// the GPU.
    pub(super) fn use_gpu(&mut self, host: Vec<Piece>, gpu: Vec<Piece>) {
        let memory = vec![SlotMemory::Host; gpu.len()];
        self.gpu = Some(GpuSlots { host: SlotSet::new(host), gpu: SlotSet::new(gpu), memory });
    }

    /// Makes the pages of the slots for calls on the host exist, before the first call that uses many of
    /// them, so that later calls do not fault. On nodes of many ranks they do not exist before.
    pub(super) fn populate(&mut self) {
        if !std::mem::replace(&mut self.host.populated, true) {
            self.host.slots.iter().for_each(|slot| populate(*slot));
        }
    }

    /// Whether there are slots for calls on a GPU.
    pub(super) fn have_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// The number of slots.
    pub(super) fn count(&self) -> usize {
        self.host.slots.len()
    }

    /// Bytes of a slot in calls on the host.
    pub(super) fn slot_bytes(&self) -> usize {
        self.host.slot_bytes()
    }

    /// The first `len` bytes of the spare slot in host memory.
    pub(super) fn spare(&self, len: usize) -> Piece {
        self.host.spare(len)
    }

    /// The first `len` bytes of the spare slot in the memory of the GPU.
    pub(super) fn gpu_spare(&self, len: usize) -> Piece {
        self.gpu.as_ref().map_or(Piece::EMPTY, |gpu| gpu.gpu.spare(len))
    }

    /// A slot in the memory of the GPU, if there is one.
    pub(super) fn on_gpu(&self, slot: usize) -> Option<Piece> {
        self.gpu.as_ref().and_then(|gpu| gpu.gpu.slots.get(slot).copied())
    }

    /// Chooses the memory of a slot for the next message that uses it in a call on a GPU.
    pub(super) fn set_memory(&mut self, slot: usize, memory: SlotMemory) {
        if let Some(entry) = self.gpu.as_mut().and_then(|gpu| gpu.memory.get_mut(slot)) {
            *entry = memory;
        }
    }

    /// The memory of a slot in a call, on the host or on a GPU.
    pub(super) fn piece(&self, slot: usize, on_gpu: bool) -> Piece {
        let pool = match &self.gpu {
            Some(gpu) if on_gpu => match gpu.memory.get(slot) {
                Some(SlotMemory::Gpu) => &gpu.gpu,
                Some(SlotMemory::Host) | None => &gpu.host,
            },
            _ => &self.host,
        };
        pool.slots[slot]
    }
}
