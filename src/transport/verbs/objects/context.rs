//! An open device and its asynchronous events.
//!
//! Owns opening and closing.

use super::bindings::{
    IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_GID_CHANGE, IBV_EVENT_LID_CHANGE,
    IBV_EVENT_PKEY_CHANGE, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, IBV_EVENT_QP_ACCESS_ERR,
    IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_PORT_ACTIVE, IBV_QPF_GRH_REQUIRED, ibv_async_event,
    ibv_context, ibv_device_attr, ibv_port_attr,
};
use super::fork_protection;
use super::handle::VerbsHandle;
use super::library::Library;
use super::shim::Shim;
use super::verb::{CallSite, Verb, errno, failed};
use crate::descriptor::StandardHeld;
use crate::error::{Error, Result};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// An open device (`ibv_context`).
pub(crate) struct Context {
    handle: VerbsHandle<ibv_context>,
    name: String,
    /// Whether the device has failed or was removed. It then refuses every verb, so that no further
    /// communicator can use it as it is open now.
    has_failed: AtomicBool,
    limits: Option<DeviceLimits>,
    pub(super) shim: Shim,
}

/// What a device has at most (`ibv_device_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceLimits {
    /// Completion queues.
    pub queues: usize,
    /// Entries of a completion queue.
    pub completions: usize,
    /// Queue pairs.
    pub queue_pairs: usize,
    /// Requests in each direction of a queue pair.
    pub requests: usize,
}

/// The attributes of a port (`ibv_port_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortAttributes {
    pub active: bool,
    pub lid: u16,
    /// The active MTU, numbered as `ibv_mtu`: 1 is 256 bytes, 5 is 4096.
    pub mtu: u32,
    /// Whether packets need a global routing header even within the subnet.
    pub needs_global: bool,
}

/// An asynchronous event of a device (`ibv_async_event`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AsyncEvent {
    /// The device failed, or was removed.
    Fatal,
    /// The completion queue with this [number](super::CompletionQueue::number) overran; `None` if it is not
    /// known which.
    QueueOverran(Option<u64>),
    /// The port of this number went down.
    PortDown(u8),
    /// The port of this number came up.
    PortUp(u8),
    /// Any other event, with its description for the log.
    Other(&'static str),
}

impl AsyncEvent {
    /// The event of this `ibv_event_type`; `port` is the port's number, if it is a port's event, and `queue`
    /// that of the completion queue.
    fn of(event_type: u32, port: u8, queue: Option<u64>) -> Self {
        match event_type {
            // Also reported when the device is removed.
            IBV_EVENT_DEVICE_FATAL => Self::Fatal,
            IBV_EVENT_CQ_ERR => Self::QueueOverran(queue),
            IBV_EVENT_PORT_ERR => Self::PortDown(port),
            IBV_EVENT_PORT_ACTIVE => Self::PortUp(port),
            IBV_EVENT_QP_FATAL | IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR => {
                // Its completions report the failure too, and identify the link.
                Self::Other("a queue pair failed")
            }
            // Queue pairs that can no longer reach their peers break by themselves.
            IBV_EVENT_LID_CHANGE | IBV_EVENT_GID_CHANGE => Self::Other("its address changed"),
            IBV_EVENT_PKEY_CHANGE => Self::Other("its partition keys changed"),
            _ => Self::Other("an event without consequences"),
        }
    }
}

impl Context {
    /// The device has reported that it failed.
    pub(crate) fn set_failed(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// Opens the device called `name` with this library.
    ///
    /// # Errors
    /// `System` if there is no device of that name or it cannot be opened.
    pub(crate) fn open(library: &'static Library, name: &str, shim: Shim) -> Result<Arc<Self>> {
        let site = CallSite { device: name.to_owned(), ..CallSite::default() };
        if let Some(errno) = shim.injected_errno(Verb::GetDeviceList) {
            return Err(failed(Verb::GetDeviceList, &site, errno));
        }
        fork_protection::protect(library, name, &shim)?;
        let _standard = StandardHeld::hold();
        let mut count = 0;
        // SAFETY: the count is valid for writes; a null pointer is handled below.
        let list = unsafe { (library.ibv_get_device_list)(&raw mut count) };
        if list.is_null() {
            return Err(failed(Verb::GetDeviceList, &site, errno()));
        }
        // SAFETY: until it is freed, the list has `count` devices, each with a NUL-terminated name.
        let found = (0..count as usize).map(|index| unsafe { *list.add(index) }).find(|device| {
            // SAFETY: as above.
            unsafe { CStr::from_ptr((library.ibv_get_device_name)(*device)) }.to_str() == Ok(name)
        });
        let opened = match (found, shim.injected_errno(Verb::OpenDevice)) {
            (None, _) => Err(Error::system(format!(
                "libibverbs has no device {name}: is the provider library of its driver installed?"
            ))),
            (Some(_), Some(errno)) => Err(failed(Verb::OpenDevice, &site, errno)),
            (Some(device), None) => {
                // SAFETY: the device belongs to the list, which is freed only afterwards.
                let raw = unsafe { (library.ibv_open_device)(device) };
                VerbsHandle::from_raw(raw, library).ok_or_else(|| failed(Verb::OpenDevice, &site, errno()))
            }
        };
        // SAFETY: the list is from ibv_get_device_list, and its devices are no longer used; open devices stay
        // valid.
        unsafe { (library.ibv_free_device_list)(list) };
        let handle = opened?;
        let limits = handle.raw().and_then(|(raw, library)| {
            let mut attributes = MaybeUninit::<ibv_device_attr>::zeroed();
            // SAFETY: the context is open, and all zeros are valid attributes: integers.
            let code = unsafe { (library.ibv_query_device)(raw, attributes.as_mut_ptr()) };
            // SAFETY: as above.
            let attributes = unsafe { attributes.assume_init() };
            let number = |limit: i32| usize::try_from(limit).unwrap_or(0);
            (code == 0).then(|| DeviceLimits {
                queues: number(attributes.max_cq),
                completions: number(attributes.max_cqe),
                queue_pairs: number(attributes.max_qp),
                requests: number(attributes.max_qp_wr),
            })
        });
        let context =
            Self { handle, name: name.to_owned(), has_failed: AtomicBool::new(false), limits, shim };
        if let Some(fd) = context.async_fd() {
            set_nonblocking(fd)?;
        }
        Ok(Arc::new(context))
    }

    /// A context without a device.
    #[cfg(test)]
    pub(crate) fn inert(name: &str, shim: Shim) -> Arc<Self> {
        let has_failed = AtomicBool::new(false);
        let handle = VerbsHandle::inert();
        Arc::new(Self { handle, name: name.to_owned(), has_failed, limits: None, shim })
    }

    /// Opens a device that does not exist.
    ///
    /// # Errors
    /// `System` if the shim lets it fail.
    #[cfg(test)]
    pub(crate) fn open_inert(name: &str, shim: Shim) -> Result<Arc<Self>> {
        let site = CallSite { device: name.to_owned(), ..CallSite::default() };
        match shim.injected_errno(Verb::OpenDevice) {
            Some(errno) => Err(failed(Verb::OpenDevice, &site, errno)),
            None => Ok(Self::inert(name, shim)),
        }
    }

    pub(super) fn raw(&self) -> Option<(*mut ibv_context, &'static Library)> {
        self.handle.raw()
    }

    /// The device's name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn site(&self) -> CallSite {
        CallSite { device: self.name.clone(), ..CallSite::default() }
    }

    /// What the device has at most; `None` if it does not say.
    pub(crate) fn limits(&self) -> Option<DeviceLimits> {
        self.limits
    }

    /// Queries a port.
    ///
    /// # Errors
    /// `System` if the device refuses.
    pub(crate) fn port(&self, port: u8) -> Result<PortAttributes> {
        let site = CallSite { port: Some(port), ..self.site() };
        if let Some(errno) = self.shim.injected_errno(Verb::QueryPort) {
            return Err(failed(Verb::QueryPort, &site, errno));
        }
        let Some((raw, library)) = self.raw() else {
            return Ok(PortAttributes { active: true, lid: 1, mtu: 3, needs_global: false });
        };
        // SAFETY: all zeros are a valid ibv_port_attr: it consists of integers.
        let mut attributes: ibv_port_attr = unsafe { MaybeUninit::zeroed().assume_init() };
        // SAFETY: the context is open.
        let code = unsafe { library.query_port(raw, port, &mut attributes) };
        if code != 0 {
            return Err(failed(Verb::QueryPort, &site, code));
        }
        let active = attributes.state == IBV_PORT_ACTIVE;
        let needs_global = attributes.flags & IBV_QPF_GRH_REQUIRED != 0;
        Ok(PortAttributes { active, lid: attributes.lid, mtu: attributes.active_mtu, needs_global })
    }

    /// A descriptor that is readable while there is an asynchronous event; `None` without a device.
    pub(crate) fn async_fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the descriptor belongs to the context and stays open while the context is open.
        self.raw().map(|(raw, _)| unsafe { BorrowedFd::borrow_raw((*raw).async_fd) })
    }

    /// Takes the next asynchronous event, if there is one. Never blocks.
    pub(crate) fn next_async_event(&self) -> Option<AsyncEvent> {
        if let Some(event_type) = self.shim.injected_event() {
            return Some(AsyncEvent::of(event_type, 1, None));
        }
        let (raw, library) = self.raw()?;
        let mut event = MaybeUninit::<ibv_async_event>::uninit();
        // SAFETY: the context is open and its descriptor is non-blocking; the event is written if 0 is
        // returned.
        if unsafe { (library.ibv_get_async_event)(raw, event.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: the call above wrote it.
        let mut event = unsafe { event.assume_init() };
        // SAFETY: events of ports have a port number; for other events, reading it yields a number that is
        // not used.
        let port = unsafe { event.element.port_num } as u8;
        let queue = (event.event_type == IBV_EVENT_CQ_ERR).then(|| {
            // SAFETY: the event is that of a completion queue, which is not destroyed before the event is
            // acknowledged.
            unsafe { (*event.element.cq).cq_context }.addr() as u64
        });
        let kind = AsyncEvent::of(event.event_type, port, queue);
        // SAFETY: the event was read above and is acknowledged once.
        unsafe { (library.ibv_ack_async_event)(&raw mut event) };
        Some(kind)
    }
}

/// Makes a descriptor of libibverbs non-blocking.
pub(super) fn set_nonblocking(fd: BorrowedFd<'_>) -> Result<()> {
    fcntl_getfl(fd)
        .and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK))
        .map_err(|cause| Error::io("cannot make a descriptor of libibverbs non-blocking", cause))
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Some((raw, library)) = self.raw() {
            // SAFETY: the context is open, and every object that was created from it is destroyed: each holds
            // an Arc of it.
            if unsafe { (library.ibv_close_device)(raw) } != 0 {
                log::warn!("cannot close {}: {}", self.name, std::io::Error::last_os_error());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_failures_changes_of_a_port_or_without_consequences() {
        let of = |event_type| AsyncEvent::of(event_type, 2, Some(7));
        // Numbered as `ibv_event_type`: DEVICE_FATAL and CQ_ERR.
        assert_eq!((of(8), of(0)), (AsyncEvent::Fatal, AsyncEvent::QueueOverran(Some(7))));
        assert_eq!((of(10), of(9)), (AsyncEvent::PortDown(2), AsyncEvent::PortUp(2)));
        // QP_FATAL to QP_ACCESS_ERR; LID_CHANGE, PKEY_CHANGE and GID_CHANGE; an event of a newer library.
        for other in [1, 2, 3, 11, 12, 18, 99] {
            assert!(matches!(of(other), AsyncEvent::Other(_)), "{other}");
        }
    }

    #[test]
    fn an_injected_event_is_reported_once() {
        let context = Context::inert("inert", Shim::none().with_event(10));
        assert_eq!(context.next_async_event(), Some(AsyncEvent::PortDown(1)));
        assert_eq!(context.next_async_event(), None);
    }
}
