//! Memory of users that peers and devices reach: neighbours read it, RDMA devices send from it and write to it.
//!
//! Owns its allocation, and its announcement to neighbours and devices. Must not know its contents.

use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::fault_point::{FaultPoint, reach};
use crate::memory::{Arena, Buffer, Piece, Registrar, lend_in_place};
use crate::process::CreatorProcess;
use crate::transport::shm::NodeMemory;
use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Allocates and registers the memory that users give to calls.
pub(super) struct UserMemory {
    /// The process's memory, which other communicators may use, too.
    node: Arc<NodeMemory>,
    /// What users free by its address, as C does: offset and length in the arena, by address.
    leases: Mutex<HashMap<usize, (usize, usize)>>,
    /// Registers memory with the RDMA devices, if there are devices.
    registrar: Option<Arc<dyn Registrar>>,
    /// How often users have registered each memory, by address and length. Kept without devices, too, so that
    /// wrong arguments of `deregister` are refused in either case.
    registered: Mutex<HashMap<(usize, usize), usize>>,
}

impl UserMemory {
    pub(super) fn new(node: Arc<NodeMemory>, registrar: Option<Arc<dyn Registrar>>) -> Self {
        Self { node, leases: Mutex::default(), registrar, registered: Mutex::default() }
    }

    fn arena(&self) -> &Arc<Arena> {
        self.node.own().arena()
    }

    /// Allocates a vector of `len` zeros.
    pub(super) fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        let buffer = Buffer::new(Arc::clone(self.arena()), len, self.registrar.clone())?;
        self.announce(buffer.offset(), size_of_val(&buffer[..]));
        Ok(buffer)
    }

    /// Allocates zeroed bytes that the caller frees by address, at the latest when the communicator is freed.
    pub(super) fn lease(&self, bytes: usize) -> Result<NonNull<u8>> {
        let offset = self.arena().alloc(bytes)?;
        let piece = self.arena().piece(offset, bytes);
        let piece = piece.ok_or_else(|| Error::internal("an allocation exceeds its arena"))?;
        let start = NonNull::new(piece.as_ptr()).ok_or_else(|| Error::internal("an arena begins at zero"))?;
        self.leases().insert(start.as_ptr() as usize, (offset, bytes));
        self.announce(offset, bytes);
        if let Some(registrar) = &self.registrar {
            registrar.try_register(piece);
        }
        Ok(start)
    }

    /// Whether these bytes are part of the arena.
    pub(super) fn contains(&self, start: *const u8, len: usize) -> bool {
        self.arena().contains(start, len)
    }

    /// Frees leased bytes; `false` if nothing is leased at this address.
    pub(super) fn end_lease(&self, start: *const u8) -> bool {
        let lease = self.leases().remove(&(start as usize));
        lease.inspect(|(offset, bytes)| self.free(*offset, *bytes)).is_some()
    }

    fn free(&self, offset: usize, bytes: usize) {
        if let (Some(registrar), Some(piece)) = (&self.registrar, self.arena().piece(offset, bytes)) {
            registrar.try_deregister(piece);
        }
        self.arena().free(offset, bytes);
    }

    fn leases(&self) -> MutexGuard<'_, HashMap<usize, (usize, usize)>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn announce(&self, offset: usize, bytes: usize) {
        reach(FaultPoint::MemoryAllocated);
        self.node.announce(offset, bytes);
        reach(FaultPoint::MemoryAnnounced);
    }

    /// Lets no further communicator use this memory: a process that has it may be gone, and what it had would stay.
    pub(super) fn retire(&self) {
        self.node.retire();
    }

    /// Whether there are devices that memory is registered with.
    pub(super) fn has_devices(&self) -> bool {
        self.registrar.is_some()
    }

    /// Registers memory that is not in the arena with the devices, if there are any.
    pub(super) fn register(&self, piece: Piece) -> Result<()> {
        if let Some(registrar) = &self.registrar {
            registrar.register(piece)?;
        }
        reach(FaultPoint::MemoryRegistered);
        *self.registered().entry(address_and_length(piece)).or_default() += 1;
        Ok(())
    }

    /// Undoes one registration of exactly this memory.
    pub(super) fn deregister(&self, piece: Piece) -> Result<()> {
        reach(FaultPoint::MemoryDeregistered);
        let mut registered = self.registered();
        let Some(count) = registered.get_mut(&address_and_length(piece)) else {
            let message = format!(
                "{} bytes at {:p} are not registered: deregister takes the address and length that were registered",
                piece.len(),
                piece.as_ptr()
            );
            return Err(Error::invalid_argument(message));
        };
        *count -= 1;
        if *count == 0 {
            registered.remove(&address_and_length(piece));
        }
        self.registrar.as_ref().map_or(Ok(()), |registrar| registrar.deregister(piece))
    }

    fn registered(&self) -> MutexGuard<'_, HashMap<(usize, usize), usize>> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for UserMemory {
    fn drop(&mut self) {
        // The arena may live on, for other communicators.
        for (offset, bytes) in std::mem::take(&mut *self.leases()).into_values() {
            self.free(offset, bytes);
        }
    }
}

fn address_and_length(piece: Piece) -> (usize, usize) {
    (piece.as_ptr() as usize, piece.len())
}

/// A vector that is registered with the RDMA devices of a communicator until it is dropped.
pub struct Registered<'a, T: Element> {
    creator: CreatorProcess,
    vector: &'a mut [T],
    piece: Piece,
    user_memory: &'a UserMemory,
}

impl<'a, T: Element> Registered<'a, T> {
    pub(super) fn new(user_memory: &'a UserMemory, vector: &'a mut [T]) -> Result<Self> {
        let piece = lend_in_place(vector, |piece| user_memory.register(piece).map(|()| piece))?;
        Ok(Self { creator: CreatorProcess::current(), vector, piece, user_memory })
    }
}

impl<T: Element> Deref for Registered<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.vector
    }
}

impl<T: Element> DerefMut for Registered<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.vector
    }
}

impl<T: Element> Drop for Registered<'_, T> {
    fn drop(&mut self) {
        // A forked child would end the registration of its parent.
        if self.creator.is_current()
            && let Err(error) = self.user_memory.deregister(self.piece)
        {
            log::warn!("cannot deregister a vector: {}", error.message());
        }
    }
}
