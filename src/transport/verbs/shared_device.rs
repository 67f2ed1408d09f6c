//! The open devices of this process, which all its communicators share.
//!
//! Owns which devices are open, their protection domains, and which user has not handled which event yet. A
//! device is open as long as a communicator uses it.

use super::objects::{AsyncEvent, Context, Library, ProtectionDomain, Shim};
use super::shared_regions::SharedRegions;
use crate::error::Result;
use crate::process::PerProcess;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The devices that this process has opened. A forked child has none of its parent's.
static OPEN: PerProcess<Mutex<Vec<OpenDevice>>> = PerProcess::new();

/// A device that is open as long as it is used.
struct OpenDevice {
    key: DeviceKey,
    device: Weak<SharedDevice>,
}

/// What must be equal for communicators to share a device.
#[derive(Clone, PartialEq)]
struct DeviceKey {
    /// Where the functions of libibverbs are, which several files may provide.
    library: usize,
    name: String,
    /// In tests, faults concern the ranks of one shim only.
    shim: Shim,
}

/// A device that communicators of this process share: its context and its protection domain.
pub(super) struct SharedDevice {
    pd: Arc<ProtectionDomain>,
    regions: Arc<SharedRegions>,
    /// Events for each user. The device reports an event once, to the user that reads it first.
    inboxes: Mutex<Vec<Weak<EventInbox>>>,
}

/// Events that a user has not handled yet. None is there twice, so a user that is idle for long keeps few.
type EventInbox = Mutex<VecDeque<AsyncEvent>>;

impl SharedDevice {
    /// The device of this name. Opens it unless it is open.
    ///
    /// # Errors
    /// `System` if it cannot be opened or has no protection domain left.
    pub(super) fn open(library: &'static Library, name: &str, shim: &Shim) -> Result<Arc<Self>> {
        let key = DeviceKey {
            library: std::ptr::from_ref(library).addr(),
            name: name.to_owned(),
            shim: shim.clone(),
        };
        Self::find_or_open(key, || Context::open(library, name, shim.clone()))
    }

    /// [`open`](Self::open), of a device that does not exist.
    #[cfg(test)]
    pub(super) fn open_inert(name: &str, shim: &Shim) -> Result<Arc<Self>> {
        let key = DeviceKey { library: 0, name: name.to_owned(), shim: shim.clone() };
        Self::find_or_open(key, || Context::open_inert(name, shim.clone()))
    }

    fn find_or_open(key: DeviceKey, open: impl FnOnce() -> Result<Arc<Context>>) -> Result<Arc<Self>> {
        // Locked until the device is open, so that no two threads open it.
        let mut devices = OPEN.get().lock().unwrap_or_else(PoisonError::into_inner);
        devices.retain(|open| open.device.strong_count() > 0);
        let found = devices.iter().filter(|open| open.key == key).find_map(|open| {
            let device = open.device.upgrade()?;
            // It may have failed while no communicator was in a call.
            device.read_events();
            (!device.context().has_failed()).then_some(device)
        });
        if let Some(device) = found {
            return Ok(device);
        }
        let device = Self::of(&open()?)?;
        devices.push(OpenDevice { key, device: Arc::downgrade(&device) });
        Ok(device)
    }

    /// A device that only its opener uses.
    ///
    /// # Errors
    /// `System` if it has no protection domain left.
    fn of(context: &Arc<Context>) -> Result<Arc<Self>> {
        let pd = ProtectionDomain::new(context)?;
        Ok(Arc::new(Self { pd, regions: Arc::default(), inboxes: Mutex::default() }))
    }

    /// The open device.
    pub(super) fn context(&self) -> &Arc<Context> {
        self.pd.context()
    }

    /// The domain in which all communicators register memory and create queue pairs.
    pub(super) fn pd(&self) -> &Arc<ProtectionDomain> {
        &self.pd
    }

    /// What communicators have registered there.
    pub(super) fn regions(&self) -> &Arc<SharedRegions> {
        &self.regions
    }

    /// A further user, which gets every event from now on, and a failure before.
    pub(super) fn subscribe(self: &Arc<Self>) -> DeviceEvents {
        let mut inboxes = self.lock_inboxes();
        let mut events = VecDeque::new();
        if self.context().has_failed() {
            events.push_back(AsyncEvent::Fatal);
        }
        let inbox = Arc::new(Mutex::new(events));
        inboxes.retain(|inbox| inbox.strong_count() > 0);
        inboxes.push(Arc::downgrade(&inbox));
        DeviceEvents { inbox, device: Arc::clone(self) }
    }

    /// Takes all events from the device and gives them to its users. Does not block.
    fn read_events(&self) {
        let inboxes = self.lock_inboxes();
        while let Some(event) = self.context().next_async_event() {
            if event == AsyncEvent::Fatal {
                self.context().set_failed();
            }
            for inbox in inboxes.iter().filter_map(Weak::upgrade) {
                let mut inbox = inbox.lock().unwrap_or_else(PoisonError::into_inner);
                inbox.retain(|known| *known != event);
                inbox.push_back(event);
            }
        }
    }

    fn lock_inboxes(&self) -> MutexGuard<'_, Vec<Weak<EventInbox>>> {
        self.inboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The events of a device, for one of its users.
pub(super) struct DeviceEvents {
    inbox: Arc<EventInbox>,
    device: Arc<SharedDevice>,
}

impl DeviceEvents {
    /// The next event, if there is one. Never blocks.
    ///
    /// The descriptor of the device wakes all users that sleep, but one of them may read the event before
    /// another has seen that. The other finds it after its sleep, which is at most half a second long.
    pub(super) fn next(&self) -> Option<AsyncEvent> {
        self.device.read_events();
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::super::objects::Verb;
    use super::*;

    /// `IBV_EVENT_DEVICE_FATAL`, `IBV_EVENT_PORT_ERR` and `IBV_EVENT_PORT_ACTIVE`.
    const DEVICE_FATAL: u32 = 8;
    const PORT_ERR: u32 = 10;
    const PORT_ACTIVE: u32 = 9;

    fn open(shim: &Shim) -> Arc<SharedDevice> {
        SharedDevice::open_inert("inert", shim).expect("inert")
    }

    fn opened(shim: &Shim) -> (u64, u64) {
        (shim.calls(Verb::OpenDevice), shim.calls(Verb::AllocPd))
    }

    #[test]
    fn a_device_is_opened_once_while_it_is_used() {
        let shim = Shim::none();
        let devices: Vec<_> = (0..10).map(|_| open(&shim)).collect();
        assert_eq!(opened(&shim), (1, 1));
        assert!(devices.iter().all(|device| Arc::ptr_eq(device, &devices[0])));
        let events = devices[0].subscribe();
        drop(devices);
        assert!(Arc::ptr_eq(&open(&shim), &events.device), "a user of its events keeps it open");
        drop(events);
        open(&shim);
        assert_eq!(opened(&shim), (2, 2), "it was closed with its last user");
    }

    #[test]
    fn devices_of_other_names_are_others() {
        let shim = Shim::none();
        let one = open(&shim);
        let other = SharedDevice::open_inert("other", &shim).expect("inert");
        assert!(!Arc::ptr_eq(&one, &other));
        assert_eq!(other.context().name(), "other");
    }

    #[test]
    fn threads_that_open_a_device_at_once_get_the_same() {
        let shim = Shim::none();
        let start = std::sync::Barrier::new(4);
        let devices: Vec<_> = std::thread::scope(|scope| {
            let open = || {
                start.wait();
                open(&shim)
            };
            let opening: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
            opening.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        assert!(devices.iter().all(|device| Arc::ptr_eq(device, &devices[0])));
        assert_eq!(opened(&shim), (1, 1));
    }

    #[test]
    fn a_device_that_failed_is_opened_again_for_later_users() {
        let shim = Shim::none();
        let failed = open(&shim);
        let events = failed.subscribe();
        // No user reads the event before the next one comes.
        let shim = shim.with_event(DEVICE_FATAL);
        let next = open(&shim);
        assert!(!Arc::ptr_eq(&failed, &next));
        assert_eq!(events.next(), Some(AsyncEvent::Fatal), "earlier users get the event");
        assert_eq!(next.subscribe().next(), None, "later ones do not");
        assert_eq!(failed.subscribe().next(), Some(AsyncEvent::Fatal), "it was opened before it failed");
        assert!(Arc::ptr_eq(&open(&shim), &next), "the new one is shared");
        assert_eq!(opened(&shim), (2, 2));
    }

    #[test]
    fn a_device_that_cannot_be_opened_is_tried_again_by_the_next_user() {
        let shim = Shim::failing(Verb::OpenDevice, 0, rustix::io::Errno::NODEV.raw_os_error());
        let error = SharedDevice::open_inert("inert", &shim).map(drop).expect_err("it cannot be opened");
        assert!(error.message().starts_with("ibv_open_device failed on inert"), "{error}");
        open(&shim);
    }

    #[test]
    fn every_user_gets_every_event_once() {
        let shim = Shim::none();
        let device = open(&shim);
        let users = [device.subscribe(), device.subscribe()];
        let mut shim = shim;
        for event in [PORT_ERR, PORT_ACTIVE, PORT_ERR] {
            shim = shim.with_event(event);
            // The first user reads all of them.
            users[0].device.read_events();
        }
        for user in users {
            let expected = [AsyncEvent::PortUp(1), AsyncEvent::PortDown(1)];
            assert_eq!(std::iter::from_fn(|| user.next()).collect::<Vec<_>>(), expected, "the latest last");
        }
    }

    #[test]
    fn a_forked_child_opens_its_own_device() {
        let shim = Shim::none();
        let parents = open(&shim);
        // SAFETY: the child uses only this thread's objects and the allocator, which the C library makes
        // usable after a fork.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_own = !Arc::ptr_eq(&open(&shim), &parents);
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(if is_own { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: `status` may be written.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert!(Arc::ptr_eq(&open(&shim), &parents), "the parent still has it");
    }
}
