//! Memory of users that peers and devices reach: neighbours read it, RDMA devices send from it and write to it.
//!
//! Owns its allocation, and its announcement to neighbours and devices. Must not know its contents.

use super::registered_pages::{RegisteredPages, SharedVector};
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
    /// What users have registered, by address and length. Kept without devices, too, so that wrong arguments of
    /// `deregister` are refused in either case.
    registered: Mutex<HashMap<(usize, usize), UserRegistration>>,
    /// Whether registered memory is shared with neighbours.
    shares: bool,
}

/// Memory that the user has registered.
struct UserRegistration {
    /// Registrations that are not reverted yet, at least 1.
    count: usize,
    pages: Arc<RegisteredPages>,
    /// What is registered with the devices.
    on_devices: Piece,
}

impl UserMemory {
    /// The memory of a communicator. `shares` is whether registered memory may become part of the arena.
    pub(super) fn new(node: Arc<NodeMemory>, registrar: Option<Arc<dyn Registrar>>, shares: bool) -> Self {
        let shares = shares && node.processes() > 1;
        Self { node, leases: Mutex::default(), registrar, registered: Mutex::default(), shares }
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

    /// Whether registered memory is shared with neighbours, where it can be.
    pub(super) fn shares(&self) -> bool {
        self.shares
    }

    /// Registers memory: shares it with neighbours if `may_share`, which implies [`shares`](Self::shares), and if it can be, and
    /// registers it with the devices, if there are any.
    pub(super) fn register(&self, piece: Piece, may_share: bool) -> Result<()> {
        let mut registered = self.registered();
        if let Some(registration) = registered.get_mut(&address_and_length(piece)) {
            self.register_with_devices(registration.on_devices)?;
            registration.count += 1;
            return Ok(());
        }
        let is_own = self.arena().offset_of(piece).is_some();
        let arena = Some(self.arena()).filter(|_| may_share && !is_own);
        let pages = Arc::new(RegisteredPages::new(arena, piece));
        let shared = pages.find(self.arena(), piece).map(|vector| vector.alias());
        let on_devices = shared.unwrap_or(piece);
        self.register_with_devices(on_devices)?;
        if let Some(offset) = shared.and_then(|alias| self.arena().offset_of(alias)) {
            self.announce(offset, piece.len());
        }
        registered.insert(address_and_length(piece), UserRegistration { count: 1, pages, on_devices });
        Ok(())
    }

    fn register_with_devices(&self, piece: Piece) -> Result<()> {
        if let Some(registrar) = &self.registrar {
            registrar.register(piece)?;
        }
        reach(FaultPoint::MemoryRegistered);
        Ok(())
    }

    /// Undoes one registration of exactly this memory.
    pub(super) fn deregister(&self, piece: Piece) -> Result<()> {
        reach(FaultPoint::MemoryDeregistered);
        let mut registered = self.registered();
        let Some(registration) = registered.get_mut(&address_and_length(piece)) else {
            let message = format!(
                "{} bytes at {:p} are not registered: deregister takes the address and length that were registered",
                piece.len(),
                piece.as_ptr()
            );
            return Err(Error::invalid_argument(message));
        };
        registration.count -= 1;
        let on_devices = registration.on_devices;
        // Deregistered before its pages are private again.
        let _last =
            if registration.count == 0 { registered.remove(&address_and_length(piece)) } else { None };
        self.registrar.as_ref().map_or(Ok(()), |registrar| registrar.deregister(on_devices))
    }

    /// Whether neighbours may share memory that is registered now.
    pub(super) fn has_registered(&self) -> bool {
        self.shares && !self.registered().is_empty()
    }

    /// `piece` as neighbours read it, if it is registered and shared with them.
    pub(super) fn shared_vector(&self, piece: Piece) -> Option<SharedVector> {
        if !self.shares || piece.is_empty() {
            return None;
        }
        self.registered().values().find_map(|known| known.pages.find(self.arena(), piece))
    }

    fn registered(&self) -> MutexGuard<'_, HashMap<(usize, usize), UserRegistration>> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for UserMemory {
    fn drop(&mut self) {
        // The arena may live on, for other communicators.
        for (offset, bytes) in std::mem::take(&mut *self.leases()).into_values() {
            self.free(offset, bytes);
        }
        // What is still registered becomes private again after the devices have given it up.
        for registration in std::mem::take(&mut *self.registered()).into_values() {
            if let Some(registrar) = &self.registrar {
                (0..registration.count).for_each(|_| registrar.try_deregister(registration.on_devices));
            }
        }
    }
}

fn address_and_length(piece: Piece) -> (usize, usize) {
    (piece.as_ptr() as usize, piece.len())
}

/// A vector that is registered with a communicator until it is dropped. See [`register`](super::Communicator::register).
pub struct Registered<'a, T: Element> {
    creator: CreatorProcess,
    vector: &'a mut [T],
    piece: Piece,
    user_memory: &'a UserMemory,
}

impl<'a, T: Element> Registered<'a, T> {
    pub(super) fn new(user_memory: &'a UserMemory, vector: &'a mut [T], may_share: bool) -> Result<Self> {
        let piece = lend_in_place(vector, |piece| user_memory.register(piece, may_share).map(|()| piece))?;
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
