//! A completion queue with its completion channel.
//!
//! Owns polling and arming.

use super::bindings::{
    IBV_WC_BAD_RESP_ERR, IBV_WC_FATAL_ERR, IBV_WC_GENERAL_ERR, IBV_WC_LOC_ACCESS_ERR, IBV_WC_LOC_LEN_ERR,
    IBV_WC_LOC_PROT_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_RDMA_READ, IBV_WC_RDMA_WRITE,
    IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_REM_ABORT_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR,
    IBV_WC_REM_OP_ERR, IBV_WC_RESP_TIMEOUT_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR,
    IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR, ibv_comp_channel, ibv_cq, ibv_wc,
};
use super::context::{Context, set_nonblocking};
use super::handle::VerbsHandle;
use super::library::{Library, ibv_poll_cq, ibv_req_notify_cq};
use super::verb::{Verb, errno, failed};
use crate::descriptor::StandardHeld;
use crate::error::{Error, Result};
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Completions that one call of `ibv_poll_cq` returns at most.
const POLL_BATCH: usize = 16;

/// The status of a failed work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WcStatus {
    /// Numbered as `ibv_wc_status`.
    pub code: u32,
    /// The cause in the numbering of the device's driver; 0 if it reports none.
    pub vendor_err: u32,
}

impl WcStatus {
    /// The request was not executed, because its queue pair was in the error state.
    #[cfg(test)]
    pub(crate) const FLUSHED: Self = Self { code: IBV_WC_WR_FLUSH_ERR, vendor_err: 0 };

    /// Whether the request was flushed, whatever the driver says besides.
    pub(crate) fn is_flushed(self) -> bool {
        self.code == IBV_WC_WR_FLUSH_ERR
    }

    /// Whether the request itself is refused, so that it fails again wherever it is posted. Not a local
    /// protection error, by which older versions of Soft-RoCE also say that a packet found no route.
    pub(crate) fn is_wrong_request(self) -> bool {
        matches!(
            self.code,
            IBV_WC_LOC_LEN_ERR | IBV_WC_LOC_ACCESS_ERR | IBV_WC_REM_INV_REQ_ERR | IBV_WC_REM_ACCESS_ERR
        )
    }

    /// Whether the peer acknowledged nothing.
    pub(crate) fn is_unanswered(self) -> bool {
        matches!(self.code, IBV_WC_RETRY_EXC_ERR | IBV_WC_RESP_TIMEOUT_ERR)
    }

    /// Whether a device was refused access to memory that is registered, if the request is right.
    pub(crate) fn is_refused_access(self) -> bool {
        matches!(self.code, IBV_WC_LOC_PROT_ERR | IBV_WC_REM_ACCESS_ERR | IBV_WC_REM_OP_ERR)
    }

    /// What is usually the cause, and the fix.
    fn cause(self) -> Option<&'static str> {
        match self.code {
            IBV_WC_LOC_LEN_ERR | IBV_WC_LOC_ACCESS_ERR => {
                Some("this rank's request was wrong, which is a bug of flexring: the peer is not lost")
            }
            IBV_WC_LOC_PROT_ERR => Some(
                "this rank's device could not access the memory; for GPU memory usually because PCI Access Control Services (ACS) \
                 or an IOMMU are between the two: lspci -vvv shows SrcValid+ at a bridge whose ACS is on; switch it off in the \
                 firmware, boot with iommu=pt, or set FLEXRING_GPU_DIRECT=off",
            ),
            IBV_WC_REM_INV_REQ_ERR => {
                Some("the peer's device refused the request, which is a bug of flexring")
            }
            IBV_WC_REM_ACCESS_ERR | IBV_WC_REM_OP_ERR => Some(
                "the peer's device could not access its memory: the peer is ending, or, for GPU memory, Access Control Services \
                 (ACS) or an IOMMU are on there: set FLEXRING_GPU_DIRECT=off to test it",
            ),
            IBV_WC_RETRY_EXC_ERR => Some(
                "no acknowledgement came: the peer or a cable is down, the network loses packets (does FLEXRING_IB_TC name a lossless \
                 class, and do all switches pass packets of the ports' MTU?), no route leads to its address \
                 (FLEXRING_IB_GID_INDEX), or it takes longer than FLEXRING_IB_TIMEOUT",
            ),
            _ => None,
        }
    }
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // As libibverbs names them.
        let text = match self.code {
            IBV_WC_SUCCESS => "success",
            IBV_WC_LOC_LEN_ERR => "local length error",
            IBV_WC_LOC_QP_OP_ERR => "local QP operation error",
            IBV_WC_LOC_PROT_ERR => "local protection error",
            IBV_WC_WR_FLUSH_ERR => "Work Request Flushed Error",
            IBV_WC_BAD_RESP_ERR => "bad response error",
            IBV_WC_LOC_ACCESS_ERR => "local access error",
            IBV_WC_REM_INV_REQ_ERR => "remote invalid request error",
            IBV_WC_REM_ACCESS_ERR => "remote access error",
            IBV_WC_REM_OP_ERR => "remote operation error",
            IBV_WC_RETRY_EXC_ERR => "transport retry counter exceeded",
            IBV_WC_RNR_RETRY_EXC_ERR => "RNR retry counter exceeded",
            IBV_WC_REM_ABORT_ERR => "aborted error",
            IBV_WC_FATAL_ERR => "fatal error",
            IBV_WC_RESP_TIMEOUT_ERR => "response timeout error",
            IBV_WC_GENERAL_ERR => "general error",
            _ => "unknown",
        };
        write!(f, "{text} (status {}", self.code)?;
        if self.vendor_err != 0 {
            write!(f, ", vendor error {:#x}", self.vendor_err)?;
        }
        f.write_str(")")?;
        self.cause().map_or(Ok(()), |cause| write!(f, ": {cause}"))
    }
}

/// The completion of a work request. It has no other fields of `ibv_wc`: only these are valid after a
/// failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Completion {
    /// The id of the work request.
    pub id: u64,
    /// `Ok(None)` for a write or read of this rank; `Ok(Some((immediate, bytes)))` for a receive.
    pub outcome: std::result::Result<Option<(u32, u32)>, WcStatus>,
}

/// A completion queue and its completion channel.
pub(crate) struct CompletionQueue {
    queue: VerbsHandle<ibv_cq>,
    channel: VerbsHandle<ibv_comp_channel>,
    number: u64,
    /// Events read from the channel. They must be acknowledged before the queue is destroyed.
    unacknowledged: AtomicU32,
    context: Arc<Context>,
    /// In tests without a device: completions that `poll` returns.
    #[cfg(test)]
    pub(crate) injected: std::sync::Mutex<std::collections::VecDeque<Completion>>,
}

impl CompletionQueue {
    /// Creates a queue with room for `entries` completions.
    ///
    /// # Errors
    /// `System` if the device has no resources for it.
    pub(crate) fn new(context: &Arc<Context>, entries: usize) -> Result<Arc<Self>> {
        let error = |verb, errno| failed(verb, &context.site(), errno);
        for verb in [Verb::CreateCompChannel, Verb::CreateCq] {
            if let Some(errno) = context.shim.injected_errno(verb) {
                return Err(error(verb, errno));
            }
        }
        static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);
        // Each object is owned as soon as it exists, so that it is released if the next step fails.
        let mut new = Self {
            queue: VerbsHandle::inert(),
            channel: VerbsHandle::inert(),
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
            unacknowledged: AtomicU32::new(0),
            context: Arc::clone(context),
            #[cfg(test)]
            injected: std::sync::Mutex::default(),
        };
        let Some((raw, library)) = context.raw() else { return Ok(Arc::new(new)) };
        let standard = StandardHeld::hold();
        // SAFETY: the context is open.
        let channel = unsafe { (library.ibv_create_comp_channel)(raw) };
        drop(standard);
        new.channel =
            VerbsHandle::from_raw(channel, library).ok_or_else(|| error(Verb::CreateCompChannel, errno()))?;
        if let Some(fd) = new.event_fd() {
            set_nonblocking(fd)?;
        }
        let entries = i32::try_from(entries).unwrap_or(i32::MAX);
        // SAFETY: the context is open.
        let vectors = unsafe { (*raw).num_comp_vectors };
        let vector = completion_vector(std::process::id(), new.number, vectors);
        let number = std::ptr::without_provenance_mut(new.number as usize);
        // SAFETY: context and channel are alive. The number comes back in events, and is not used as an
        // address.
        let queue = unsafe { (library.ibv_create_cq)(raw, entries, number, channel, vector) };
        new.queue = VerbsHandle::from_raw(queue, library).ok_or_else(|| {
            let limit = context.limits().map_or_else(String::new, |limits| {
                format!(", where the device allows {} queues of {}", limits.queues, limits.completions)
            });
            error(Verb::CreateCq, errno())
                .context(format_args!("a completion queue of {entries} entries{limit}"))
        })?;
        Ok(Arc::new(new))
    }

    pub(super) fn raw(&self) -> Option<(*mut ibv_cq, &'static Library)> {
        self.queue.raw()
    }

    /// Its number, different from that of any other completion queue of this process.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// A descriptor that becomes readable with the next completion after [`arm`](Self::arm); `None` without a
    /// device.
    pub(crate) fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the descriptor belongs to the channel and stays open while the channel lives.
        self.channel.raw().map(|(raw, _)| unsafe { BorrowedFd::borrow_raw((*raw).fd) })
    }

    /// Requests an event for the next completion. Completions that are in the queue already do not cause one,
    /// so the caller must poll once more afterwards.
    ///
    /// # Errors
    /// `System` if the device refuses.
    pub(crate) fn arm(&self) -> Result<()> {
        let error = |errno| Err(failed(Verb::ReqNotifyCq, &self.context.site(), errno));
        if let Some(errno) = self.context.shim.injected_errno(Verb::ReqNotifyCq) {
            return error(errno);
        }
        let Some((raw, _)) = self.raw() else { return Ok(()) };
        // SAFETY: the queue is alive.
        match unsafe { ibv_req_notify_cq(raw, 0) } {
            0 => Ok(()),
            errno => error(errno),
        }
    }

    /// Reads all events from the channel, so that the descriptor is no longer readable. Whether there were
    /// any.
    pub(crate) fn drain_events(&self) -> bool {
        let Some((channel, library)) = self.channel.raw() else { return false };
        let mut any = false;
        let (mut queue, mut cookie) = (null_mut(), null_mut());
        // SAFETY: the channel is alive and its descriptor is non-blocking; both pointers are valid for
        // writes.
        while unsafe { (library.ibv_get_cq_event)(channel, &raw mut queue, &raw mut cookie) } == 0 {
            self.unacknowledged.fetch_add(1, Ordering::Relaxed);
            any = true;
        }
        // Acknowledging takes a lock, so many events are acknowledged at once.
        if self.unacknowledged.load(Ordering::Relaxed) > 1 << 16 {
            self.acknowledge();
        }
        any
    }

    fn acknowledge(&self) {
        let events = self.unacknowledged.swap(0, Ordering::Relaxed);
        if let (Some((queue, library)), 1..) = (self.raw(), events) {
            // SAFETY: the queue is alive, and this many of its events were read and not acknowledged.
            unsafe { (library.ibv_ack_cq_events)(queue, events) };
        }
    }

    /// Takes completions from the queue until it is empty, and passes each to `handle`. Returns whether there
    /// were any.
    ///
    /// # Errors
    /// `System` if the device fails; any error of `handle`.
    pub(crate) fn poll(&self, mut handle: impl FnMut(Completion) -> Result<()>) -> Result<bool> {
        #[cfg(test)]
        if let Some(injected) =
            self.injected.lock().expect("no test panics while holding the lock").pop_front()
        {
            return handle(injected).map(|()| true);
        }
        let error = |errno| Err(failed(Verb::PollCq, &self.context.site(), errno));
        let Some((raw, _)) = self.raw() else { return Ok(false) };
        let mut any = false;
        loop {
            if let Some(errno) = self.context.shim.injected_errno(Verb::PollCq) {
                return error(errno);
            }
            let mut batch = [const { MaybeUninit::<ibv_wc>::uninit() }; POLL_BATCH];
            // SAFETY: the queue is alive, and the array has room for this many completions.
            let found = unsafe { ibv_poll_cq(raw, POLL_BATCH as i32, batch.as_mut_ptr().cast()) };
            let Ok(found) = usize::try_from(found) else {
                return error(rustix::io::Errno::IO.raw_os_error());
            };
            for completion in &mut batch[..found] {
                // SAFETY: the first `found` completions were written.
                let completion = unsafe { completion.assume_init_mut() };
                self.context.shim.alter(completion);
                handle(read(completion, &self.context)?)?;
            }
            any |= found > 0;
            if found < POLL_BATCH {
                return Ok(any);
            }
        }
    }
}

/// The completion vector, and thus the interrupt, of a process's completion queue on a device with this many
/// vectors. Spreads the queues of a process, and those of the processes of a node.
fn completion_vector(process: u32, number: u64, vectors: i32) -> i32 {
    match u64::try_from(vectors) {
        Ok(vectors @ 1..) => ((u64::from(process) + number) % vectors) as i32,
        _ => 0,
    }
}

fn read(completion: &ibv_wc, context: &Context) -> Result<Completion> {
    let id = completion.wr_id;
    if completion.status != IBV_WC_SUCCESS {
        return Ok(Completion {
            id,
            outcome: Err(WcStatus { code: completion.status, vendor_err: completion.vendor_err }),
        });
    }
    let outcome = match completion.opcode {
        IBV_WC_RDMA_WRITE | IBV_WC_RDMA_READ => None,
        IBV_WC_RECV_RDMA_WITH_IMM => {
            // SAFETY: for a write with immediate data, the union contains the immediate data.
            let immediate = unsafe { completion.imm_data_invalidated_rkey_union.imm_data };
            Some((u32::from_be(immediate), completion.byte_len))
        }
        other => {
            let message =
                format!("{} completed a work request that was never posted: opcode {other}", context.name());
            return Err(Error::internal(message));
        }
    };
    Ok(Completion { id, outcome: Ok(outcome) })
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        self.acknowledge();
        let warn = |object: &str, code: i32| {
            if code != 0 {
                let cause = std::io::Error::from_raw_os_error(code);
                log::warn!("cannot destroy a completion {object} of {}: {cause}", self.context.name());
            }
        };
        if let Some((raw, library)) = self.queue.raw() {
            // SAFETY: no queue pair uses it, since each holds an Arc of it. All its events were acknowledged.
            warn("queue", unsafe { (library.ibv_destroy_cq)(raw) });
        }
        if let Some((raw, library)) = self.channel.raw() {
            // SAFETY: the only queue that used it is destroyed.
            warn("channel", unsafe { (library.ibv_destroy_comp_channel)(raw) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_and_processes_have_different_completion_vectors() {
        let vectors = |process| (1..5).map(move |number| completion_vector(process, number, 4));
        assert_eq!(vectors(7).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(vectors(8).collect::<Vec<_>>(), [1, 2, 3, 0]);
        for (vectors, expected) in [(1, 0), (0, 0), (-1, 0)] {
            assert_eq!(completion_vector(u32::MAX, u64::from(u32::MAX), vectors), expected);
        }
    }

    #[test]
    fn a_status_tells_lost_peers_from_bugs() {
        let text = |code, vendor_err| WcStatus { code, vendor_err }.to_string();
        let retries =
            "transport retry counter exceeded (status 12, vendor error 0x81): no acknowledgement came";
        assert!(text(IBV_WC_RETRY_EXC_ERR, 0x81).starts_with(retries));
        let bug = "local length error (status 1): this rank's request was wrong, which is a bug of flexring";
        assert!(text(IBV_WC_LOC_LEN_ERR, 0).starts_with(bug), "{}", text(IBV_WC_LOC_LEN_ERR, 0));
        let local = text(IBV_WC_LOC_PROT_ERR, 0);
        assert!(local.contains("(ACS)") && local.contains("IOMMU") && !local.contains("bug"), "{local}");
        let remote = "remote access error (status 10, vendor error 0x88): the peer's device could not access its memory";
        assert!(text(IBV_WC_REM_ACCESS_ERR, 0x88).starts_with(remote));
        assert_eq!(text(77, 0), "unknown (status 77)");
        assert!(WcStatus { code: IBV_WC_WR_FLUSH_ERR, vendor_err: 0xf9 }.is_flushed());
    }
}
