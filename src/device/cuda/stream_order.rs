//! The order of calls in the caller's stream.
//!
//! Owns the two flags between a call and its stream: *started*, set when the stream reaches the call, and *finished*, for which
//! the stream waits. Must not know what a call does in between.
//!
//! The stream sets the first and waits for the second by stream memory operations, which take no GPU time, or, where the
//! driver lacks them, by host functions. Finished is one counter, because calls end in the order in which they were
//! enqueued. Started is a word per call, because streams reach their calls in any order.

use super::objects::{Gpu, PinnedWords, Stream, StreamEvent};
use crate::cuda_driver::{Address, DriverError, DriverHandle};
use crate::device::CallerStream;
use crate::error::{Error, Result};
use crate::fault::Fault;
use cudarc::driver::sys::{CUstreamCaptureStatus, CUstreamWaitValue_flags};
use std::collections::HashMap;
use std::ffi::{c_uint, c_void};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The largest number of unfinished calls. The next call waits for the oldest one.
const CALLS: usize = 4096;
/// Index of the counter of finished calls, behind the words of started calls.
const FINISHED: usize = CALLS;
/// How long a thread sleeps between two reads of a word.
const POLL_INTERVAL: Duration = Duration::from_micros(20);
/// Polls between two health checks of the context: a stream of a broken context never reaches the call.
const POLLS_PER_HEALTH_CHECK: u32 = 256;
/// How long the end of a communicator waits for streams to pass its waits. All of these are satisfied by then.
const DROP_TIMEOUT: Duration = Duration::from_secs(5);

/// The stream order of one communicator on one GPU.
pub(crate) struct StreamOrder {
    gpu: Arc<Gpu>,
    words: Arc<PinnedWords>,
    /// Whether the driver has stream memory operations.
    memory_operations: bool,
    /// An event that was never recorded. Querying it fails if the context is broken.
    health_check: Arc<StreamEvent>,
    streams: Mutex<Streams>,
}

#[derive(Default)]
struct Streams {
    /// Calls enqueued so far.
    calls: u32,
    /// By stream, an event behind its last call.
    passed: HashMap<usize, StreamEvent>,
}

/// The number of one call, and the words that it uses.
struct CallSlot {
    words: Arc<PinnedWords>,
    number: u32,
}

/// One call's place in a stream. Dropping it lets the stream continue, whether the call succeeded or not.
pub(crate) struct StreamGate {
    slot: CallSlot,
    gpu: Arc<Gpu>,
    health_check: Arc<StreamEvent>,
}

impl StreamOrder {
    /// Allocates the words and checks what the driver supports.
    ///
    /// # Errors
    /// `System` if the GPU fails.
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let words = Arc::new(PinnedWords::new(gpu, CALLS + 1)?);
        let memory_operations = supports_memory_operations(gpu, &words)?;
        if !memory_operations {
            log::info!("{gpu:?} has no stream memory operations: streams wait for calls by host functions");
        }
        let health_check = Arc::new(StreamEvent::new(gpu)?);
        Ok(Self { gpu: Arc::clone(gpu), words, memory_operations, health_check, streams: Mutex::default() })
    }

    /// Enqueues a call in `stream` (NULL is the default stream): it runs after the earlier work of the stream and before the
    /// later work, and likewise for `other`, a second stream that a buffer of the call belongs to. Calls must finish in the
    /// order in which they were enqueued.
    ///
    /// # Errors
    /// `InvalidArgument` if the stream is of another context; `Unsupported` if it is being captured.
    pub(crate) fn enqueue(&self, stream: CallerStream, other: Option<CallerStream>) -> Result<StreamGate> {
        let stream = stream.handle();
        let other = other.map(CallerStream::handle).filter(|other| *other != stream);
        // SAFETY: the creator of a `CallerStream` promised that it is live.
        if !stream.is_null() && !unsafe { self.gpu.has_stream(stream) }? {
            let message = format!(
                "the stream is not of the primary context of {:?}, where the communicator works",
                self.gpu
            );
            return Err(Error::invalid_argument(message));
        }
        let _entered = self.gpu.enter()?;
        let driver = self.gpu.driver();
        let mut capturing = 0;
        // SAFETY: as above, and the out-parameter is writable.
        unsafe { driver.stream_capturing(stream, &raw mut capturing)? };
        if capturing != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_uint {
            let message = "the stream is being captured into a graph, which cannot replay a call: call outside of the capture";
            return Err(Error::unsupported(message));
        }
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let number = streams.calls.wrapping_add(1);
        // The number is not reused if this function fails below.
        streams.calls = number;
        // The word is free when the call that used it before has finished.
        while number.wrapping_sub(self.words.get(FINISHED).load(Ordering::Acquire)) > CALLS as u32 {
            std::thread::sleep(POLL_INTERVAL);
        }
        let started = number as usize % CALLS;
        if let Some(other) = other {
            self.follow(stream, other)?;
        }
        // SAFETY: the stream is live, and the words live until every stream has passed.
        unsafe {
            if self.memory_operations {
                driver.stream_write_value(stream, self.words.address(started), number, 0)?;
                wait_in_stream(&self.gpu, stream, self.words.address(FINISHED), number)?;
            } else {
                enqueue_host_function(&self.gpu, stream, store_started, self.slot(number))?;
                enqueue_host_function(&self.gpu, stream, wait_finished, self.slot(number))?;
            }
        }
        if let Some(other) = other {
            self.follow(other, stream)?;
        }
        let passed = match streams.passed.entry(stream as usize) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(new) => new.insert(StreamEvent::new(&self.gpu)?),
        };
        // SAFETY: as above.
        unsafe { passed.record_in(stream)? };
        Ok(StreamGate {
            slot: self.slot(number),
            gpu: Arc::clone(&self.gpu),
            health_check: Arc::clone(&self.health_check),
        })
    }

    /// Has the later work of `stream` wait for the current work of `other`.
    fn follow(&self, stream: DriverHandle, other: DriverHandle) -> Result<()> {
        let event = StreamEvent::new(&self.gpu)?;
        // SAFETY: both streams are live. The driver keeps a destroyed event until no stream waits for it.
        unsafe {
            event.record_in(other)?;
            event.wait_in(stream)?;
        }
        Ok(())
    }

    fn slot(&self, number: u32) -> CallSlot {
        CallSlot { words: Arc::clone(&self.words), number }
    }
}

impl Drop for StreamOrder {
    fn drop(&mut self) {
        let until = Instant::now() + DROP_TIMEOUT;
        let streams = self.streams.get_mut().unwrap_or_else(PoisonError::into_inner);
        let passed =
            |event: &StreamEvent| self.gpu.enter().and_then(|_entered| event.is_over()).unwrap_or(true);
        while !streams.passed.values().all(passed) {
            if Instant::now() > until {
                log::warn!(
                    "a stream of {:?} has not reached a call of a communicator that has ended",
                    self.gpu
                );
                // The stream will still access the words, so they are leaked.
                std::mem::forget(Arc::clone(&self.words));
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

impl StreamGate {
    /// Waits until the stream reaches the call.
    ///
    /// # Errors
    /// The fault, if it is raised meanwhile; `System` if the GPU fails.
    pub(crate) fn wait_started(&self, fault: &Fault) -> Result<()> {
        let CallSlot { words, number } = &self.slot;
        let word = words.get(*number as usize % CALLS);
        let mut polls = 0u32;
        while word.load(Ordering::Acquire) != *number {
            fault.check()?;
            polls = polls.saturating_add(1);
            if polls < 100 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(POLL_INTERVAL);
            }
            if polls.is_multiple_of(POLLS_PER_HEALTH_CHECK) {
                self.gpu
                    .enter()
                    .and_then(|_entered| self.health_check.is_over())
                    .map_err(|failure| Error::from(failure).context(format_args!("{:?}", self.gpu)))?;
            }
        }
        Ok(())
    }
}

impl Drop for StreamGate {
    fn drop(&mut self) {
        self.slot.words.get(FINISHED).store(self.slot.number, Ordering::Release);
    }
}

/// Tests whether the driver supports stream memory operations.
fn supports_memory_operations(gpu: &Arc<Gpu>, words: &PinnedWords) -> Result<bool> {
    let stream = Stream::new(gpu)?;
    let entered = gpu.enter()?;
    // SAFETY: the stream is live, and the words live until it is synchronized. The wait is satisfied already.
    let result = unsafe {
        gpu.driver()
            .stream_write_value(stream.raw(), words.address(0), 0, 0)
            .and_then(|()| wait_in_stream(gpu, stream.raw(), words.address(FINISHED), 0))
    };
    stream.synchronize()?;
    drop(entered);
    Ok(result.is_ok())
}

/// Has a stream wait until the word at `at` reaches `number`.
///
/// # Safety
/// The stream is live, and the word lives until the stream has passed.
unsafe fn wait_in_stream(
    gpu: &Gpu,
    stream: DriverHandle,
    at: Address,
    number: u32,
) -> std::result::Result<(), DriverError> {
    // Compares modulo 2^32, so the counter may wrap.
    let at_least = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as c_uint;
    // SAFETY: the caller guarantees both.
    unsafe { gpu.driver().stream_wait_value(stream, at, number, at_least) }
}

/// Enqueues a host function that consumes a boxed `CallSlot`.
///
/// # Safety
/// The stream is live.
unsafe fn enqueue_host_function(
    gpu: &Gpu,
    stream: DriverHandle,
    function: unsafe extern "C" fn(*mut c_void),
    slot: CallSlot,
) -> std::result::Result<(), DriverError> {
    let argument = Box::into_raw(Box::new(slot));
    // SAFETY: the caller guarantees the stream; the function takes ownership of the slot.
    unsafe { gpu.driver().launch_host_function(stream, function, argument.cast()) }.inspect_err(|_| {
        // SAFETY: it was allocated above, and the driver did not take it.
        drop(unsafe { Box::from_raw(argument) });
    })
}

/// Host function that marks the call as started.
///
/// # Safety
/// `slot` is a boxed `CallSlot`, whose ownership passes to this function.
unsafe extern "C" fn store_started(slot: *mut c_void) {
    // SAFETY: the caller guarantees it.
    let CallSlot { words, number } = *unsafe { Box::from_raw(slot.cast::<CallSlot>()) };
    words.get(number as usize % CALLS).store(number, Ordering::Release);
    leak_last(words);
}

/// Host function that waits until the call has finished.
///
/// # Safety
/// As for [`store_started`].
unsafe extern "C" fn wait_finished(slot: *mut c_void) {
    // SAFETY: as above.
    let CallSlot { words, number } = *unsafe { Box::from_raw(slot.cast::<CallSlot>()) };
    while (words.get(FINISHED).load(Ordering::Acquire).wrapping_sub(number) as i32) < 0 {
        std::thread::sleep(POLL_INTERVAL);
    }
    leak_last(words);
}

/// Drops a reference to the words, but leaks the last one: a host function must not call the driver, as freeing does. The
/// `StreamOrder` also holds the words and outlives every enqueued function, so nothing leaks normally.
fn leak_last(words: Arc<PinnedWords>) {
    if let Some(last) = Arc::into_inner(words) {
        std::mem::forget(last);
    }
}
