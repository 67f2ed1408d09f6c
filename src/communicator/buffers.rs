//! Buffers of users: allocation, registration, and where an address lies.
//!
//! Owns the methods of the communicator for them.

use super::runner::CallRunner;
use super::{Communicator, Registered};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::memory::{Buffer, MemorySpace, Piece};
use std::ptr::NonNull;

impl Communicator {
    /// Allocates a vector of `len` zeros in memory that the other ranks of this node read directly, and that
    /// is registered with the RDMA devices that this communicator uses.
    ///
    /// # Errors
    /// `System` if there is not that much memory.
    pub fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        self.check_process()?;
        self.runner.user_memory.alloc(len)
    }

    /// Registers a vector with the RDMA devices that this communicator uses, for as long as the returned
    /// guard lives. Calls on it, or on parts of it, then copy and register nothing. [`Registered::into_vec`]
    /// returns the vector.
    ///
    /// With `FLEXRING_REGISTER_SHARED=1`, the other ranks of this node read it directly, too: its whole
    /// pages, if they are private memory without a file and 64 KiB or more, are replaced by others with the
    /// same contents, which forked children do not have: access ends them by SIGSEGV. Nothing else may rely
    /// on its pages meanwhile, such as another library that has registered them with a device.
    ///
    /// # Errors
    /// `System` if the memory cannot be locked or a device has no room for it. The vector is then freed.
    pub fn register<T: Element>(&self, vector: Vec<T>) -> Result<Registered<'_, T>> {
        self.check_process()?;
        let may_share = self.may_share(vector.as_ptr().cast(), size_of_val(&vector[..]))?;
        Registered::new(&self.runner.user_memory, vector, may_share)
    }

    /// [`register`](Self::register) by address, for the C API. Ends with
    /// [`deregister_piece`](Self::deregister_piece).
    #[doc(hidden)]
    pub fn register_piece(&self, piece: Piece) -> Result<()> {
        self.check_not_nested()?;
        if piece.is_host() {
            let may_share = self.may_share(piece.as_ptr(), piece.len())?;
            return self.runner.user_memory.register(piece, may_share);
        }
        let runner = &self.runner;
        runner.open_gpu(piece.memory())?;
        runner.user_memory.register(piece, false)?;
        runner.offer_to_kernels(piece).inspect_err(|_| {
            let _ = self.deregister_piece(piece);
        })
    }

    /// Whether the pages of host memory may be replaced: not those that are known to a GPU, which would go on
    /// to access the old ones.
    fn may_share(&self, start: *const u8, len: usize) -> Result<bool> {
        Ok(self.runner.user_memory.shares() && self.runner.gpu_state.locate(start, len)?.is_none())
    }

    /// Undoes one [`register_piece`](Self::register_piece) of exactly this memory. Where that makes shared
    /// pages private again, it waits for the running call that uses them; on a GPU, for kernels that may
    /// access it.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not registered; `Timeout` if the call still runs after
    /// `FLEXRING_TIMEOUT_MS`: it stays registered with the devices, so call again.
    #[doc(hidden)]
    pub fn deregister_piece(&self, piece: Piece) -> Result<()> {
        self.check_not_nested()?;
        let runner = &*self.runner;
        let CallRunner { user_memory, timeout, .. } = runner;
        if !piece.is_host() {
            runner.take_from_kernels(piece)?;
        }
        user_memory.deregister(piece, *timeout, &|| runner.check_waiting())
    }

    /// [`alloc`](Self::alloc) of plain bytes by address, for the C API. Ends with
    /// [`end_lease`](Self::end_lease).
    #[doc(hidden)]
    pub fn lease(&self, bytes: usize) -> Result<NonNull<u8>> {
        self.runner.user_memory.lease(bytes)
    }

    /// Frees leased memory; `false` if nothing is leased at this address.
    #[doc(hidden)]
    pub fn end_lease(&self, start: *const u8) -> bool {
        self.runner.user_memory.end_lease(start)
    }

    /// Whether the bytes at `start` are memory of the host or of a GPU.
    ///
    /// # Errors
    /// `InvalidArgument` if this process cannot access them.
    #[inline]
    #[doc(hidden)]
    pub fn memory_of(&self, start: *const u8, len: usize) -> Result<MemorySpace> {
        if self.runner.user_memory.contains(start, len) {
            return Ok(MemorySpace::Host);
        }
        if let Some(memory) = self.runner.gpu_state.locate(start, len)? {
            return Ok(memory);
        }
        if let Some(end) = self.runner.user_memory.unreadable_end(start, len) {
            let why = self.runner.gpu_state.why_none();
            let why = why.unwrap_or_else(|| "of a context that is gone".to_owned());
            return Err(Error::invalid_argument(format!(
                "{end:p} is no memory of this process: was it freed, or is it a GPU's, and {why}?"
            )));
        }
        Ok(MemorySpace::Host)
    }
}
