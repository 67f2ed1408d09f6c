//! A completion queue with the channel to sleep on.

use super::Handle;
use super::context::{Context, set_nonblocking};
use super::verb::{Verb, errno, failed};
use crate::error::{Error, ErrorKind, Result};
use rdma_sys::{
    ibv_ack_cq_events, ibv_comp_channel, ibv_cq, ibv_create_comp_channel, ibv_create_cq,
    ibv_destroy_comp_channel, ibv_destroy_cq, ibv_get_cq_event, ibv_poll_cq, ibv_req_notify_cq, ibv_wc,
    ibv_wc_opcode, ibv_wc_status, ibv_wc_status_str,
};
use std::ffi::CStr;
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Completions that one call of the verb brings at most.
const HARVEST: usize = 16;

/// Why a work request did not succeed, as verbs number it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WcStatus(pub u32);

impl WcStatus {
    /// Nothing was done, as the queue pair broke before.
    pub(crate) const FLUSHED: Self = Self(ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: the function returns a text that lives for ever, for any number.
        let words = unsafe { CStr::from_ptr(ibv_wc_status_str(self.0)) };
        write!(f, "{} (status {})", words.to_string_lossy(), self.0)
    }
}

/// The end of a work request. What else verbs would tell is not valid after a failure, so it is not here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Completion {
    /// The request's own number.
    pub id: u64,
    /// `Ok(None)` for what this rank sent or read; `Ok(Some((immediate, bytes)))` for what a peer wrote.
    pub outcome: std::result::Result<Option<(u32, u32)>, WcStatus>,
}

/// A completion queue.
pub(crate) struct CompletionQueue {
    queue: Handle<ibv_cq>,
    channel: Handle<ibv_comp_channel>,
    /// Events got from the channel; they must be acknowledged before the queue is destroyed.
    unacknowledged: AtomicU32,
    context: Arc<Context>,
    /// In tests without a device: what was completed.
    #[cfg(test)]
    pub(crate) injected: std::sync::Mutex<std::collections::VecDeque<Completion>>,
}

impl CompletionQueue {
    /// A queue with room for `entries` completions.
    ///
    /// # Errors
    /// `System` if the device has no room for it.
    pub(crate) fn new(context: &Arc<Context>, entries: usize) -> Result<Arc<Self>> {
        let refused = |verb, errno| failed(verb, &context.site(), errno);
        for verb in [Verb::CreateCompChannel, Verb::CreateCq] {
            if let Some(errno) = context.shim.injected_errno(verb) {
                return Err(refused(verb, errno));
            }
        }
        // Owned step by step, so that what was made is freed if the next step fails.
        let mut made = Self {
            queue: Handle(None),
            channel: Handle(None),
            unacknowledged: AtomicU32::new(0),
            context: Arc::clone(context),
            #[cfg(test)]
            injected: std::sync::Mutex::default(),
        };
        let Some(raw) = context.raw() else { return Ok(Arc::new(made)) };
        // SAFETY: the context is open.
        let channel = unsafe { ibv_create_comp_channel(raw) };
        made.channel = Handle::returned(channel).ok_or_else(|| refused(Verb::CreateCompChannel, errno()))?;
        if let Some(fd) = made.event_fd() {
            set_nonblocking(fd)?;
        }
        let entries = i32::try_from(entries).unwrap_or(i32::MAX);
        // SAFETY: context and channel are alive.
        let queue = unsafe { ibv_create_cq(raw, entries, null_mut(), channel, 0) };
        made.queue = Handle::returned(queue).ok_or_else(|| {
            refused(Verb::CreateCq, errno()).within(format_args!("a completion queue of {entries} entries"))
        })?;
        Ok(Arc::new(made))
    }

    pub(super) fn raw(&self) -> Option<*mut ibv_cq> {
        self.queue.raw()
    }

    /// A descriptor that becomes readable with the next completion after [`arm`](Self::arm); none if inert.
    pub(crate) fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the descriptor belongs to the channel and stays open for as long as that lives.
        self.channel.raw().map(|raw| unsafe { BorrowedFd::borrow_raw((*raw).fd) })
    }

    /// Has the bell ring at the next completion. Those that are there already do not ring it: poll once more.
    ///
    /// # Errors
    /// `System` if the device refuses.
    pub(crate) fn arm(&self) -> Result<()> {
        let refused = |errno| Err(failed(Verb::ReqNotifyCq, &self.context.site(), errno));
        if let Some(errno) = self.context.shim.injected_errno(Verb::ReqNotifyCq) {
            return refused(errno);
        }
        let Some(raw) = self.raw() else { return Ok(()) };
        // SAFETY: the queue is alive.
        match unsafe { ibv_req_notify_cq(raw, 0) } {
            0 => Ok(()),
            errno => refused(errno),
        }
    }

    /// Silences the bell.
    pub(crate) fn drain_events(&self) {
        let Some(channel) = self.channel.raw() else { return };
        let (mut queue, mut cookie) = (null_mut(), null_mut());
        // SAFETY: the channel is alive and its descriptor does not block; both places may be written.
        while unsafe { ibv_get_cq_event(channel, &raw mut queue, &raw mut cookie) } == 0 {
            self.unacknowledged.fetch_add(1, Ordering::Relaxed);
        }
        // Acknowledging takes a lock, so it is done for many at a time.
        if self.unacknowledged.load(Ordering::Relaxed) > 1 << 16 {
            self.acknowledge();
        }
    }

    fn acknowledge(&self) {
        let events = self.unacknowledged.swap(0, Ordering::Relaxed);
        if let (Some(queue), 1..) = (self.raw(), events) {
            // SAFETY: the queue is alive, and this many of its events were got and not acknowledged.
            unsafe { ibv_ack_cq_events(queue, events) };
        }
    }

    /// Takes completions out of the queue and tells them one by one, until there are none.
    ///
    /// # Errors
    /// `System` if the device fails; whatever `tell` returns.
    pub(crate) fn poll(&self, mut tell: impl FnMut(Completion) -> Result<()>) -> Result<bool> {
        #[cfg(test)]
        if let Some(injected) = self.injected.lock().expect("no test panics with it").pop_front() {
            return tell(injected).map(|()| true);
        }
        let refused = |errno| Err(failed(Verb::PollCq, &self.context.site(), errno));
        let Some(raw) = self.raw() else { return Ok(false) };
        let mut any = false;
        loop {
            if let Some(errno) = self.context.shim.injected_errno(Verb::PollCq) {
                return refused(errno);
            }
            let mut harvest = [const { MaybeUninit::<ibv_wc>::uninit() }; HARVEST];
            // SAFETY: the queue is alive, and the array has room for this many completions.
            let found = unsafe { ibv_poll_cq(raw, HARVEST as i32, harvest.as_mut_ptr().cast()) };
            let Ok(found) = usize::try_from(found) else {
                return refused(rustix::io::Errno::IO.raw_os_error());
            };
            for completion in &mut harvest[..found] {
                // SAFETY: the first `found` completions were written.
                let completion = unsafe { completion.assume_init_mut() };
                self.context.shim.alter(completion);
                tell(read(completion, &self.context)?)?;
            }
            any |= found > 0;
            if found < HARVEST {
                return Ok(any);
            }
        }
    }
}

fn read(completion: &ibv_wc, context: &Context) -> Result<Completion> {
    let id = completion.wr_id;
    if completion.status != ibv_wc_status::IBV_WC_SUCCESS {
        return Ok(Completion { id, outcome: Err(WcStatus(completion.status)) });
    }
    let outcome = match completion.opcode {
        ibv_wc_opcode::IBV_WC_RDMA_WRITE | ibv_wc_opcode::IBV_WC_RDMA_READ => None,
        ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM => {
            // SAFETY: a write with immediate data has just that in the union.
            let immediate = unsafe { completion.imm_data_invalidated_rkey_union.imm_data };
            Some((u32::from_be(immediate), completion.byte_len))
        }
        other => {
            let words =
                format!("{} completed something that nobody asked for: opcode {other}", context.name());
            return Err(Error::new(ErrorKind::Internal, words));
        }
    };
    Ok(Completion { id, outcome: Ok(outcome) })
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        self.acknowledge();
        let warn = |what: &str, code: i32| {
            if code != 0 {
                let cause = std::io::Error::from_raw_os_error(code);
                log::warn!("cannot destroy a completion {what} of {}: {cause}", self.context.name());
            }
        };
        if let Some(raw) = self.queue.raw() {
            // SAFETY: no queue pair uses it: each holds an Arc of it. All its events were acknowledged.
            warn("queue", unsafe { ibv_destroy_cq(raw) });
        }
        if let Some(raw) = self.channel.raw() {
            // SAFETY: the only queue that used it is gone.
            warn("channel", unsafe { ibv_destroy_comp_channel(raw) });
        }
    }
}
