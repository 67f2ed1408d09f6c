//! Memory that others reach: neighbours read it, devices send from it and write to it.
//!
//! Owns who must be told of such memory, and tells them. Must not know what is kept in it.

use crate::dtype::Element;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Arena, Buffer, Piece, Registrar, lend_in_place};
use crate::transport::shm::RemotePrefault;
use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A rank's memory that others reach.
pub(super) struct UserMemory {
    pub arena: Arc<Arena>,
    /// Tells the neighbours of new buffers, if there are neighbours.
    pub prefault: Option<RemotePrefault>,
    /// Tells the devices, if there are devices.
    pub registrar: Option<Arc<dyn Registrar>>,
    /// What users have registered, by address and length, and how often: told wrong the same with and without devices.
    pub registered: Mutex<HashMap<(usize, usize), usize>>,
}

impl UserMemory {
    /// A vector of `len` zeros.
    pub(super) fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        let buffer = Buffer::new(Arc::clone(&self.arena), len, self.registrar.clone())?;
        self.announce(buffer.offset(), size_of_val(&buffer[..]));
        Ok(buffer)
    }

    /// The same as plain bytes, for somebody who keeps the address only.
    pub(super) fn lease(&self, bytes: usize) -> Result<NonNull<u8>> {
        let (offset, start) = self.arena.lease(bytes)?;
        self.announce(offset, bytes);
        if let (Some(registrar), Some(piece)) = (&self.registrar, self.arena.piece(offset, bytes)) {
            registrar.tell(piece);
        }
        Ok(start)
    }

    /// Whether this memory lies in the arena.
    pub(super) fn has(&self, start: *const u8, len: usize) -> bool {
        self.arena.has(start, len)
    }

    /// Takes a lease back; `false` if nothing was leased at this address.
    pub(super) fn end_lease(&self, start: *const u8) -> bool {
        if let (Some(registrar), Some(piece)) = (&self.registrar, self.arena.leased(start)) {
            registrar.forget(piece);
        }
        self.arena.end_lease(start)
    }

    fn announce(&self, offset: usize, bytes: usize) {
        if let Some(prefault) = &self.prefault {
            prefault.announce(offset, bytes);
        }
    }

    /// Registers memory of the user's own with the devices, if there are any.
    pub(super) fn register(&self, piece: Piece) -> Result<()> {
        if let Some(registrar) = &self.registrar {
            registrar.register(piece)?;
        }
        *self.registered().entry(key(piece)).or_default() += 1;
        Ok(())
    }

    /// Takes one registration of exactly this memory back.
    pub(super) fn deregister(&self, piece: Piece) -> Result<()> {
        let mut registered = self.registered();
        let Some(count) = registered.get_mut(&key(piece)) else {
            let words = format!(
                "{} bytes at {:p} are not registered: the same address and length are given back that were registered",
                piece.len(),
                piece.as_ptr()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, words));
        };
        *count -= 1;
        if *count == 0 {
            registered.remove(&key(piece));
        }
        self.registrar.as_ref().map_or(Ok(()), |registrar| registrar.deregister(piece))
    }

    fn registered(&self) -> MutexGuard<'_, HashMap<(usize, usize), usize>> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn key(piece: Piece) -> (usize, usize) {
    (piece.as_ptr() as usize, piece.len())
}

/// A vector that is registered with the RDMA devices of a communicator.
pub struct Registered<'a, T: Element> {
    vector: &'a mut [T],
    piece: Piece,
    user_memory: &'a UserMemory,
}

impl<'a, T: Element> Registered<'a, T> {
    pub(super) fn new(user_memory: &'a UserMemory, vector: &'a mut [T]) -> Result<Self> {
        let piece = lend_in_place(vector, |piece| user_memory.register(piece).map(|()| piece))?;
        Ok(Self { vector, piece, user_memory })
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
        if let Err(error) = self.user_memory.deregister(self.piece) {
            log::warn!("cannot deregister a vector: {}", error.message());
        }
    }
}
