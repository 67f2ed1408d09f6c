//! The pointer to a libibverbs object.
//!
//! Owns whether there is an object, the library that it is from, and the `Send` and `Sync` implementations.

use super::library::Library;
use std::ptr::NonNull;

/// A pointer to a verbs object, and the library that created it. In tests it may be inert: there is no
/// object, and every verb on it succeeds without doing anything.
pub(super) struct VerbsHandle<T>(Option<(NonNull<T>, &'static Library)>);

impl<T> VerbsHandle<T> {
    /// Wraps the pointer that a verb of `library` returned; `None` for a null pointer, which means that the
    /// verb failed.
    pub(super) fn from_raw(raw: *mut T, library: &'static Library) -> Option<Self> {
        NonNull::new(raw).map(|raw| Self(Some((raw, library))))
    }

    /// A handle without an object: before the object is created, and in tests without a device.
    pub(super) fn inert() -> Self {
        Self(None)
    }

    /// The pointer and the library, or `None` if the handle is inert.
    pub(super) fn raw(&self) -> Option<(*mut T, &'static Library)> {
        self.0.map(|(raw, library)| (raw.as_ptr(), library))
    }
}

// SAFETY: a handle is an address. libibverbs allows its objects to be used from any thread, by one thread at
// a time for each object; the exclusive borrows of the owners' methods and the locks within libibverbs ensure
// that.
unsafe impl<T> Send for VerbsHandle<T> {}
// SAFETY: as above. Shared owners (contexts, protection domains, memory regions) are only read, or used
// through verbs that lock.
unsafe impl<T> Sync for VerbsHandle<T> {}
