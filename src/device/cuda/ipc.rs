//! GPU memory shared between the processes of a node, by CUDA IPC.
//!
//! Owns the exported allocation and the opened ones. Must not know what they hold, nor which ranks the others
//! are.

use super::objects::{Gpu, GpuMemory, address};
use super::{peer_memory, pointer};
use crate::cuda_driver::Address;
use crate::error::{Error, Result};
use crate::memory::{Export, MemorySpace, Piece, Sharing, lend, lend_in_place};
use crate::process_number::process_number;
use crate::secret::random_bytes;
use std::ptr::NonNull;
use std::sync::Arc;

/// What one rank exports and opens.
pub(crate) struct Ipc {
    gpu: Arc<Gpu>,
    process: u64,
    memory: Arc<GpuMemory>,
    handle: [u64; 8],
    pattern: [u64; 2],
    opened: Vec<Address>,
}

impl Ipc {
    /// Exports `memory`, which nothing uses yet, and writes a random pattern to its start.
    ///
    /// # Errors
    /// `System` if the driver does not export it.
    pub(crate) fn new(gpu: &Arc<Gpu>, memory: &Arc<GpuMemory>) -> Result<Self> {
        let process = process_number()?;
        let handle = peer_memory::export(gpu, address(memory.piece()))?;
        let pattern = [u64::from_ne_bytes(random_bytes()?), u64::from_ne_bytes(random_bytes()?)];
        // SAFETY: both have this length, and nothing else accesses them.
        lend(&pattern, &mut [], |pattern, _| unsafe {
            gpu.copy_now(memory.piece().narrow(0, size_of::<[u64; 2]>()), pattern)
        })?;
        let memory = Arc::clone(memory);
        Ok(Self { gpu: Arc::clone(gpu), process, memory, handle, pattern, opened: Vec::new() })
    }

    /// Whether the memory begins with this pattern.
    fn reads(&self, memory: Piece, pattern: [u64; 2]) -> Result<bool> {
        let mut read = [0u64; 2];
        if memory.len() < size_of_val(&read) {
            return Ok(false);
        }
        // SAFETY: both have this length. The owner does not write its memory before all ranks have opened it.
        lend_in_place(&mut read, |into| unsafe { self.gpu.copy_now(into, memory.narrow(0, into.len())) })?;
        Ok(read == pattern)
    }
}

impl Sharing for Ipc {
    fn own(&self) -> Piece {
        self.memory.piece()
    }

    fn export(&self) -> Export {
        Export {
            process: self.process,
            gpu: self.gpu.ordinal,
            address: address(self.memory.piece()),
            len: self.memory.piece().len() as u64,
            handle: self.handle,
            pattern: self.pattern,
        }
    }

    fn open(&mut self, export: &Export) -> Result<Piece> {
        let refuse = |message: String| Err(Error::unsupported(message));
        let Ok(len) = usize::try_from(export.len) else {
            return refuse(format!("{} bytes are more than any GPU has", export.len));
        };
        let start = if export.process == self.process {
            // A process cannot open its own allocation, and does not need to.
            let start = export.address as *const u8;
            if pointer::locate(start, len)? != Some(MemorySpace::Gpu(self.gpu.ordinal)) {
                return refuse(format!(
                    "it is memory of GPU {} in this process, not of {:?}",
                    export.gpu, self.gpu
                ));
            }
            export.address
        } else {
            let start = peer_memory::open(&self.gpu, &export.handle)?;
            self.opened.push(start);
            if pointer::locate(start as *const u8, len).is_err() {
                return refuse("it is shorter than its owner announced".to_owned());
            }
            start
        };
        let Some(start) = NonNull::new(start as *mut u8) else {
            return refuse("the driver returned a null address".to_owned());
        };
        // SAFETY: the driver confirmed the length, and the owner keeps the memory until this rank has closed
        // it.
        let memory = unsafe { Piece::on_gpu(start, len, self.gpu.ordinal) };
        if self.reads(memory, export.pattern)? {
            return Ok(memory);
        }
        refuse(
            "this GPU reads other data there than its owner has written: access between the two GPUs is broken, as it is on \
             some systems with an IOMMU"
                .to_owned(),
        )
    }

    fn close(&mut self) -> bool {
        let mut all = true;
        for start in self.opened.drain(..) {
            all &= peer_memory::close(&self.gpu, start);
        }
        all
    }

    fn abandon(&mut self) {
        std::mem::forget(Arc::clone(&self.memory));
    }
}

impl Drop for Ipc {
    fn drop(&mut self) {
        self.close();
    }
}
