//! Memory of a GPU with a stream of its own.
//!
//! Owns the order of their destruction. Must not know what lies in the memory.

use super::objects::{GpuMemory, Stream};
use crate::error::Result;

/// An allocation, and the stream of all vectors in it.
pub(super) struct StreamMemory {
    // Dropped first: it waits for the operations that still use the memory.
    pub(super) stream: Stream,
    pub(super) memory: GpuMemory,
}

impl StreamMemory {
    pub(super) fn synchronize(&self) -> Result<()> {
        let _entered = self.memory.gpu().enter()?;
        Ok(self.stream.synchronize()?)
    }
}

impl Drop for StreamMemory {
    fn drop(&mut self) {
        if let Err(error) = self.synchronize() {
            log::debug!("a vector on a GPU is dropped: {}", error.message());
        }
    }
}
