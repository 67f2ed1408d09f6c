//! The memory that a communicator shares with its kernels on one GPU.
//!
//! Owns the pinned control memory, the state in GPU memory, the staging memory of small messages, and the
//! words that start, finish and abort calls. None of it is ever freed, because a kernel may read it at any
//! time after its launch; a later communicator uses it again once all kernels have ended. Must not know
//! rings, nor how kernels are launched.

use super::kernel_kind::KernelKind;
use super::layout::{HostControl, STATE_BYTES};
use crate::cuda_driver::Address;
use crate::device::cuda::naps::nap_until;
use crate::device::cuda::objects::{Gpu, GpuMemory, address};
use crate::device::cuda::pinned::PinnedMemory;
use crate::device::cuda::pointer::locate;
use crate::error::Result;
use crate::memory::{Piece, lend};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long the host waits for a kernel that is to end. A kernel that runs sees the word in microseconds;
/// longer than that, it waits for a GPU that is busy with another process, or the context is broken.
const END_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes of a page, to which staging memory is rounded.
const PAGE: usize = 4096;

/// The memory of one communicator.
struct EngineMemory {
    /// A `HostControl`, then staging memory for an input and an output.
    host: PinnedMemory,
    state: GpuMemory,
    /// Bytes of each part of the staging memory.
    staging: usize,
    /// The number of the last call.
    calls: u64,
}

/// Memory whose communicators have ended, and with them all kernels.
static SPARE: Mutex<Vec<EngineMemory>> = Mutex::new(Vec::new());

impl EngineMemory {
    fn new(gpu: &Arc<Gpu>, staging: usize) -> Result<Self> {
        let control = size_of::<HostControl>().next_multiple_of(PAGE);
        let host = PinnedMemory::new(gpu, control + 2 * staging)?;
        let state = GpuMemory::new(gpu, STATE_BYTES)?;
        lend(&vec![0u8; STATE_BYTES], &mut [], |zeros, _| {
            // SAFETY: both have this length and are borrowed until the copy completes.
            unsafe { gpu.copy_now(state.piece(), zeros) }
        })?;
        Ok(Self { host, state, staging, calls: 0 })
    }

    /// The memory, unless the context that it was allocated in has been destroyed, as `cudaDeviceReset` does.
    /// A driver that does not number contexts may at least not know the memory any more.
    fn if_valid(self) -> Option<Self> {
        let state = self.state.piece();
        let is_alive = self.state.gpu().is_alive();
        if is_alive
            && matches!(locate(state.as_ptr(), STATE_BYTES), Ok(Some(memory)) if memory == state.memory())
        {
            return Some(self);
        }
        // The driver would refuse to release what no longer exists, or release what is there now.
        std::mem::forget(self);
        None
    }

    fn is_for(&self, gpu: &Gpu, staging: usize) -> bool {
        self.state.gpu().ordinal == gpu.ordinal && self.staging == staging
    }
}

/// The memory that a communicator shares with its kernels. Dropping it calls no function of the driver.
pub(super) struct Control {
    /// Never dropped: it is leaked, or used again.
    memory: ManuallyDrop<EngineMemory>,
    /// The number of the last call whose kernel was launched.
    launched: AtomicU64,
    /// The number of the last call that was prepared for a launch.
    calls: AtomicU64,
    /// The kind of the running call's kernel, by [`KernelKind::code`].
    kind: AtomicU64,
    /// Whether a kernel has not ended in time.
    stuck: AtomicBool,
}

impl Control {
    /// Control memory for a GPU, with staging memory for inputs and outputs of up to `staging` bytes: that of
    /// a communicator that has ended, or new.
    ///
    /// # Errors
    /// `System` if there is too little memory.
    pub(super) fn new(gpu: &Arc<Gpu>, staging: usize) -> Result<Arc<Self>> {
        let staging = staging.next_multiple_of(PAGE);
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        let index = spare.iter().position(|memory| memory.is_for(gpu, staging));
        let used = index.map(|index| spare.swap_remove(index));
        drop(spare);
        let used = used.and_then(EngineMemory::if_valid);
        let memory = used.map_or_else(|| EngineMemory::new(gpu, staging), Ok)?;
        let calls = memory.calls;
        Ok(Arc::new(Self {
            memory: ManuallyDrop::new(memory),
            launched: AtomicU64::new(calls),
            calls: AtomicU64::new(calls),
            kind: AtomicU64::new(0),
            stuck: AtomicBool::new(false),
        }))
    }

    /// The words that host and kernels share.
    pub(super) fn words(&self) -> &HostControl {
        // SAFETY: the memory begins with a `HostControl`, which is aligned to less than a page and was
        // zeroed; all its words are atomics. It is never freed.
        unsafe { self.memory.host.start().cast::<HostControl>().as_ref() }
    }

    /// The address of the words on the GPU.
    pub(super) fn host_address(&self) -> Address {
        self.memory.host.address()
    }

    /// The address of the kernels' state in GPU memory.
    pub(super) fn state_address(&self) -> Address {
        address(self.memory.state.piece())
    }

    /// Staging memory for an input and an output of this many bytes; `None` if they are too long.
    pub(super) fn staging(&self, input: usize, output: usize) -> Option<(Piece, Piece)> {
        let EngineMemory { host, staging, .. } = &*self.memory;
        let first = size_of::<HostControl>().next_multiple_of(PAGE);
        let part = |number: usize, len: usize| {
            (len <= *staging).then(|| host.piece().narrow(first + number * staging, len))
        };
        Some((part(0, input)?, part(1, output)?))
    }

    /// The address on the GPU of a piece of staging memory.
    pub(super) fn staging_address(&self, piece: Piece) -> Option<Address> {
        let whole = self.memory.host.piece();
        let offset = (piece.as_ptr() as usize).checked_sub(whole.as_ptr() as usize)?;
        let inside = piece.is_host() && offset.checked_add(piece.len())? <= whole.len();
        inside.then_some(self.memory.host.address() + offset as Address)
    }

    /// The number of the next call. Numbers are not used again.
    pub(super) fn next_call(&self) -> u64 {
        self.calls.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Notes that the kernel of this call is being launched; called in the order of calls. Returns the last
    /// call before it, to which [`undo_launched`](Self::undo_launched) goes back.
    pub(super) fn set_launched(&self, call: u64) -> u64 {
        self.launched.swap(call, Ordering::Relaxed)
    }

    /// Notes that the launch after the kernel of call `last` failed.
    pub(super) fn undo_launched(&self, last: u64) {
        self.launched.store(last, Ordering::Relaxed);
    }

    /// Whether the kernel of this call has started: it has copied a small message's input, and works on the
    /// rings.
    pub(super) fn has_started(&self, call: u64) -> bool {
        self.words().kernel.started.load(Ordering::Acquire) >= call
    }

    /// Notes which kernel runs, or that none does.
    pub(super) fn set_running(&self, kind: Option<KernelKind>) {
        self.kind.store(kind.map_or(0, KernelKind::code), Ordering::Relaxed);
    }

    /// The [`KernelKind::code`] of the kernel that runs; 0 if none does.
    pub(super) fn running(&self) -> u64 {
        self.kind.load(Ordering::Relaxed)
    }

    /// Ends the kernel of this call, and all before it.
    pub(super) fn finish(&self, call: u64) {
        self.set_running(None);
        self.words().host.finished.store(call, Ordering::Release);
    }

    /// Has all kernels end, those that run and those that start later.
    pub(super) fn abort(&self) {
        self.words().host.aborted.store(u64::MAX, Ordering::Release);
    }

    /// Whether all kernels end at once.
    pub(super) fn is_aborted(&self) -> bool {
        self.words().host.aborted.load(Ordering::Relaxed) != 0
    }

    /// Waits until every kernel that has started has ended, but no longer than a second. `false` if one has
    /// not: then the memory that its descriptors name must never be freed.
    pub(super) fn wait_ended(&self) -> bool {
        // The store of `aborted` or `finished` precedes the load of `started`.
        fence(Ordering::SeqCst);
        self.wait_ended_until(self.words().kernel.started.load(Ordering::Acquire))
    }

    /// Like [`wait_ended`](Self::wait_ended), for all kernels that were launched, also those that have not
    /// started. These access only control memory, but a driver call that frees memory waits for them and for
    /// their stream.
    pub(super) fn wait_launched(&self) -> bool {
        self.wait_ended_until(self.launched.load(Ordering::Relaxed))
    }

    fn wait_ended_until(&self, call: u64) -> bool {
        let kernel = &self.words().kernel;
        let ended = wait_for(END_TIMEOUT, || kernel.ended.load(Ordering::Acquire) >= call);
        if !ended && !self.stuck.swap(true, Ordering::Relaxed) {
            log::warn!(
                "a kernel on {:?} did not end within {END_TIMEOUT:?}: the memory that it may access is not freed",
                self.memory.state.gpu()
            );
        }
        ended
    }

    /// Waits until the kernels of all calls that have finished have ended, but no longer than `longest`.
    /// `false` if one has not.
    pub(super) fn wait_finished(&self, longest: Duration) -> bool {
        let HostControl { host, kernel, .. } = self.words();
        let finished = host.finished.load(Ordering::Relaxed);
        wait_for(longest, || kernel.ended.load(Ordering::Acquire) >= finished)
    }

    /// Whether a kernel has not ended in time.
    pub(super) fn is_stuck(&self) -> bool {
        self.stuck.load(Ordering::Relaxed)
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let kernel = &self.words().kernel;
        let launched = self.launched.load(Ordering::Relaxed);
        let finished = self.words().host.finished.load(Ordering::Relaxed);
        // The last kernel ends within microseconds of its call.
        let clean = !self.is_aborted()
            && !self.is_stuck()
            && finished >= launched
            && wait_for(END_TIMEOUT, || kernel.ended.load(Ordering::Acquire) >= launched);
        if clean {
            // SAFETY: it is not used again.
            let mut memory = unsafe { ManuallyDrop::take(&mut self.memory) };
            memory.calls = self.calls.load(Ordering::Relaxed);
            SPARE.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
        }
    }
}

/// Waits until `is_so`, but no longer than `longest`. Whether it is.
fn wait_for(longest: Duration, is_so: impl Fn() -> bool) -> bool {
    let begun = Instant::now();
    let mut holds = false;
    nap_until(|| {
        holds = is_so();
        holds || begun.elapsed() > longest
    });
    holds
}
