//! GPU memory shared between the processes of a node, by CUDA IPC.
//!
//! Owns the exported allocation and the opened ones. Must not know what they hold, nor which ranks the others are.

use super::objects::{Gpu, GpuMemory, address};
use super::pointer;
use crate::cuda_driver::{Address, IpcByValue};
use crate::error::{Error, Result};
use crate::memory::{Export, MemorySpace, Piece, Sharing, lend, lend_in_place};
use crate::process_number::process_number;
use crate::secret::random_bytes;
use std::ptr::NonNull;
use std::sync::Arc;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: enables peer access if the memory is on another GPU.
const ENABLE_PEER_ACCESS: u32 = 1;

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
        let _entered = gpu.enter()?;
        let mut handle = IpcByValue([0; 64]);
        // SAFETY: the out-parameter is writable, and the address is the start of an allocation.
        unsafe { gpu.driver().ipc_export(&raw mut handle, address(memory.piece()))? };
        let word =
            |number: usize| u64::from_ne_bytes(std::array::from_fn(|byte| handle.0[8 * number + byte]));
        let handle = std::array::from_fn(word);
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
            let mut handle = [0; 64];
            for (bytes, word) in handle.chunks_exact_mut(8).zip(export.handle) {
                bytes.copy_from_slice(&word.to_ne_bytes());
            }
            let _entered = self.gpu.enter()?;
            let mut start = 0;
            // SAFETY: the out-parameter is writable; the driver checks the handle.
            unsafe { self.gpu.driver().ipc_open(&raw mut start, IpcByValue(handle), ENABLE_PEER_ACCESS)? };
            self.opened.push(start);
            if pointer::locate(start as *const u8, len).is_err() {
                return refuse("it is shorter than its owner announced".to_owned());
            }
            start
        };
        let Some(start) = NonNull::new(start as *mut u8) else {
            return refuse("the driver returned a null address".to_owned());
        };
        // SAFETY: the driver confirmed the length, and the owner keeps the memory until this rank has closed it.
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
            // SAFETY: it was opened above, and nothing reads it any more.
            let close = |_| unsafe { self.gpu.driver().ipc_close(start) };
            // In a broken context every call fails.
            if let Err(failure) = self.gpu.enter().and_then(close) {
                log::debug!("{failure}");
                all = false;
            }
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
