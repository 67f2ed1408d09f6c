//! Calls that take effect in the caller's stream.
//!
//! Owns the two words that a call and a stream tell each other: *started*, the stream has come to the call, and *done*, the
//! stream may go on. Must not know what a call does in between.
//!
//! The stream writes the first and waits for the second by memory operations, which cost it nothing, or, where the driver
//! lacks them, by functions that it calls on the host. Done is one counter, since calls end in the order in which they
//! were put in streams; started is a word for each call, since streams come to them in any order.

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

/// Calls that may be under way at once. The next one waits for the oldest.
const CALLS: usize = 4096;
/// Where the counter of calls that are done stands, behind the words of those that are started.
const FINISHED: usize = CALLS;
/// How long a thread sleeps between two polls at a word.
const POLL_INTERVAL: Duration = Duration::from_micros(20);
/// Naps between two questions whether the GPU is still well: a stream of a broken context comes to nothing any more.
const POLLS_PER_HEALTH_CHECK: u32 = 256;
/// How long the end of a communicator waits for streams to pass what it had them wait for. They need nobody for that.
const DROP_TIMEOUT: Duration = Duration::from_secs(5);

/// The words of a communicator and a GPU.
pub(crate) struct StreamOrder {
    gpu: Arc<Gpu>,
    words: Arc<PinnedWords>,
    /// Whether streams write and wait themselves.
    memory_operations: bool,
    /// Fails to tell when the context is broken, as everything does then; stands for nothing.
    health_check: Arc<StreamEvent>,
    streams: Mutex<Streams>,
}

#[derive(Default)]
struct Streams {
    /// Calls so far.
    calls: u32,
    /// By stream, a point behind its last call.
    passed: HashMap<usize, StreamEvent>,
}

/// One call's number, and where it is result.
struct CallSlot {
    words: Arc<PinnedWords>,
    number: u32,
}

/// One call's slot in a stream. When it is dropped the stream goes on, whatever came of the call.
pub(crate) struct StreamGate {
    slot: CallSlot,
    gpu: Arc<Gpu>,
    health_check: Arc<StreamEvent>,
}

impl StreamOrder {
    /// # Errors
    /// `System` if the GPU fails.
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let words = Arc::new(PinnedWords::new(gpu, CALLS + 1)?);
        let memory_operations = supports_memory_operations(gpu, &words)?;
        if !memory_operations {
            log::info!(
                "{gpu:?} has no stream memory operations: streams wait for calls by functions on the host"
            );
        }
        let health_check = Arc::new(StreamEvent::new(gpu)?);
        Ok(Self { gpu: Arc::clone(gpu), words, memory_operations, health_check, streams: Mutex::default() })
    }

    /// Puts a call in a stream, NULL being the default one: what was put there before comes before it, and what is
    /// put there later after it, and likewise for `other`, a stream that something of the call belongs to. Calls must end
    /// in the order in which they were put in streams.
    ///
    /// # Errors
    /// `InvalidArgument` if the stream is of another context; `Unsupported` if it is being captured.
    pub(crate) fn enqueue(&self, stream: CallerStream, other: Option<CallerStream>) -> Result<StreamGate> {
        let stream = stream.handle();
        let other = other.map(CallerStream::handle).filter(|other| *other != stream);
        // SAFETY: whoever made a caller's stream vouches that it is live.
        if !stream.is_null() && !unsafe { self.gpu.has_stream(stream) }? {
            let words = format!(
                "the stream is not of the primary context of {:?}, where the communicator works",
                self.gpu
            );
            return Err(Error::invalid_argument(words));
        }
        let _entered = self.gpu.enter()?;
        let driver = self.gpu.driver();
        let mut capturing = 0;
        // SAFETY: as above, and the slot may be written.
        unsafe { driver.stream_capturing(stream, &raw mut capturing)? };
        if capturing != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_uint {
            let words = "the stream is being captured into a graph, but a call is made anew each time: call outside of the capture";
            return Err(Error::unsupported(words));
        }
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let number = streams.calls.wrapping_add(1);
        // Not used again if this fails half-way.
        streams.calls = number;
        // Its word is free when the call that had it before is over.
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

    /// Has what comes later in one stream wait for what is in another.
    fn follow(&self, stream: DriverHandle, other: DriverHandle) -> Result<()> {
        let event = StreamEvent::new(&self.gpu)?;
        // SAFETY: both are callers' streams. The driver keeps the event for as long as it is waited for.
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
                    "a stream of {:?} has not come to a call of a communicator that was ended",
                    self.gpu
                );
                // It will look at the words when it does.
                std::mem::forget(Arc::clone(&self.words));
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

impl StreamGate {
    /// Waits until the stream has come to the call.
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

/// Tries whether streams can write words and wait for them.
fn supports_memory_operations(gpu: &Arc<Gpu>, words: &PinnedWords) -> Result<bool> {
    let stream = Stream::new(gpu)?;
    let entered = gpu.enter()?;
    // SAFETY: the stream is live, and the words are until it is done. It waits for what is there already.
    let result = unsafe {
        gpu.driver()
            .stream_write_value(stream.raw(), words.address(0), 0, 0)
            .and_then(|()| wait_in_stream(gpu, stream.raw(), words.address(FINISHED), 0))
    };
    stream.synchronize()?;
    drop(entered);
    Ok(result.is_ok())
}

/// # Safety
/// The stream is live, and the word is until the stream has passed.
unsafe fn wait_in_stream(
    gpu: &Gpu,
    stream: DriverHandle,
    at: Address,
    number: u32,
) -> std::result::Result<(), DriverError> {
    // Compares as counters do that begin anew after 2^32.
    let at_least = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as c_uint;
    // SAFETY: the caller vouches for both.
    unsafe { gpu.driver().stream_wait_value(stream, at, number, at_least) }
}

/// # Safety
/// The stream is live.
unsafe fn enqueue_host_function(
    gpu: &Gpu,
    stream: DriverHandle,
    function: unsafe extern "C" fn(*mut c_void),
    slot: CallSlot,
) -> std::result::Result<(), DriverError> {
    let argument = Box::into_raw(Box::new(slot));
    // SAFETY: the caller vouches for the stream; the function takes the slot, which is its own from now on.
    unsafe { gpu.driver().launch_host_function(stream, function, argument.cast()) }.inspect_err(|_| {
        // SAFETY: it was made above, and nobody else got it.
        drop(unsafe { Box::from_raw(argument) });
    })
}

/// # Safety
/// `slot` is a boxed slot, which is given away.
unsafe extern "C" fn store_started(slot: *mut c_void) {
    // SAFETY: the caller vouches for it.
    let CallSlot { words, number } = *unsafe { Box::from_raw(slot.cast::<CallSlot>()) };
    words.get(number as usize % CALLS).store(number, Ordering::Release);
    leak_last(words);
}

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

/// Lets go of the words without freeing them: a function that the driver calls must not call the driver. Their order,
/// which holds them too, outlives every function that is still to be called.
fn leak_last(words: Arc<PinnedWords>) {
    if let Some(last) = Arc::into_inner(words) {
        std::mem::forget(last);
    }
}
