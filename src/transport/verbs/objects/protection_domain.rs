//! A protection domain.
//!
//! Owns its allocation and release, and how long registering takes.

use super::bindings::ibv_pd;
use super::context::Context;
use super::handle::VerbsHandle;
use super::library::Library;
use super::verb::{Verb, errno, failed};
use crate::error::Result;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A protection domain. Memory that is registered in it is reachable only through queue pairs of the same
/// domain.
pub(crate) struct ProtectionDomain {
    handle: VerbsHandle<ibv_pd>,
    /// By length in bytes: how long registering memory takes, once it was measured.
    registration_times: Mutex<BTreeMap<usize, Duration>>,
    /// Whether memory had to be registered with relaxed ordering, although that was not asked for.
    pub(super) has_relaxed_keys_only: AtomicBool,
    pub(super) context: Arc<Context>,
}

impl ProtectionDomain {
    /// Allocates a protection domain.
    ///
    /// # Errors
    /// `System` if the device has none left.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        let error = |errno| failed(Verb::AllocPd, &context.site(), errno);
        if let Some(errno) = context.shim.injected_errno(Verb::AllocPd) {
            return Err(error(errno));
        }
        let handle = match context.raw() {
            // SAFETY: the context is open.
            Some((raw, library)) => VerbsHandle::from_raw(unsafe { (library.ibv_alloc_pd)(raw) }, library)
                .ok_or_else(|| error(errno()))?,
            None => VerbsHandle::inert(),
        };
        Ok(Arc::new(Self {
            handle,
            registration_times: Mutex::default(),
            has_relaxed_keys_only: AtomicBool::new(false),
            context: Arc::clone(context),
        }))
    }

    pub(super) fn raw(&self) -> Option<(*mut ibv_pd, &'static Library)> {
        self.handle.raw()
    }

    /// How long registering memory of `len` bytes takes. Measured once for each length.
    ///
    /// # Errors
    /// Those of `measure`.
    pub(crate) fn registration_time(
        &self,
        len: usize,
        measure: impl FnOnce() -> Result<Duration>,
    ) -> Result<Duration> {
        let times = || self.registration_times.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = times().get(&len) {
            return Ok(*known);
        }
        let measured = measure()?;
        times().insert(len, measured);
        Ok(measured)
    }

    /// Whether the device was found to register memory with relaxed ordering only.
    pub(crate) fn has_relaxed_keys_only(&self) -> bool {
        self.has_relaxed_keys_only.load(Ordering::Relaxed)
    }

    /// The device of this domain.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        if let Some((raw, library)) = self.raw() {
            // SAFETY: everything that was created in the domain holds an Arc of it, so none of it is alive.
            let code = unsafe { (library.ibv_dealloc_pd)(raw) };
            if code != 0 {
                let cause = std::io::Error::from_raw_os_error(code);
                log::warn!("cannot deallocate a protection domain of {}: {cause}", self.context.name());
            }
        }
    }
}
