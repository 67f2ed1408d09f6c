//! Calls that take effect in the caller's stream.
//!
//! Owns the two words that a call and a stream tell each other: *ready*, the stream has come to the call, and *done*, the
//! stream may go on. Must not know what a call does in between.
//!
//! The stream writes the first and waits for the second by memory operations, which cost it nothing, or, where the driver
//! lacks them, by functions that it calls on the host. Done is one counter, since calls end in the order in which they
//! were put in streams; ready is a word for each call, since streams come to them in any order.

use super::objects::{Event, Gpu, Stream, Words};
use crate::cuda_driver::{Address, Failure, Handle};
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
/// Where the counter of calls that are done stands, behind the words of those that are ready.
const DONE: usize = CALLS;
/// How long a thread sleeps between two looks at a word.
const NAP: Duration = Duration::from_micros(20);
/// Naps between two questions whether the GPU is still well: a stream of a broken context comes to nothing any more.
const NAPS_PER_PULSE: u32 = 256;
/// How long the end of a communicator waits for streams to pass what it had them wait for. They need nobody for that.
const LAST_PATIENCE: Duration = Duration::from_secs(5);

/// The words of a communicator and a GPU.
pub(crate) struct Order {
    gpu: Arc<Gpu>,
    words: Arc<Words>,
    /// Whether streams write and wait themselves.
    by_stream: bool,
    /// Fails to tell when the context is broken, as everything does then; stands for nothing.
    pulse: Arc<Event>,
    streams: Mutex<Streams>,
}

#[derive(Default)]
struct Streams {
    /// Calls so far.
    calls: u32,
    /// By stream, a point behind its last call.
    passed: HashMap<usize, Event>,
}

/// One call's number, and where it is told.
struct Place {
    words: Arc<Words>,
    number: u32,
}

/// One call's place in a stream. When it is dropped the stream goes on, whatever came of the call.
pub(crate) struct Gate {
    place: Place,
    gpu: Arc<Gpu>,
    pulse: Arc<Event>,
}

impl Order {
    /// # Errors
    /// `System` if the GPU fails.
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let words = Arc::new(Words::new(gpu, CALLS + 1)?);
        let by_stream = writes_and_waits(gpu, &words)?;
        if !by_stream {
            log::info!(
                "{gpu:?} has no stream memory operations: streams wait for calls by functions on the host"
            );
        }
        let pulse = Arc::new(Event::new(gpu)?);
        Ok(Self { gpu: Arc::clone(gpu), words, by_stream, pulse, streams: Mutex::default() })
    }

    /// Puts a call in a stream, NULL being the default one: what was put there before comes before it, and what is
    /// put there later after it, and likewise for `other`, a stream that something of the call belongs to. Calls must end
    /// in the order in which they were put in streams.
    ///
    /// # Errors
    /// `InvalidArgument` if the stream is of another context; `Unsupported` if it is being captured.
    pub(crate) fn enqueue(&self, stream: CallerStream, other: Option<CallerStream>) -> Result<Gate> {
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
        // SAFETY: as above, and the place may be written.
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
        while number.wrapping_sub(self.words.get(DONE).load(Ordering::Acquire)) > CALLS as u32 {
            std::thread::sleep(NAP);
        }
        let ready = number as usize % CALLS;
        if let Some(other) = other {
            self.follow(stream, other)?;
        }
        // SAFETY: the stream is live, and the words live until every stream has passed.
        unsafe {
            if self.by_stream {
                driver.stream_write_value(stream, self.words.address(ready), number, 0)?;
                wait_in_stream(&self.gpu, stream, self.words.address(DONE), number)?;
            } else {
                call_back(&self.gpu, stream, tell_ready, self.place(number))?;
                call_back(&self.gpu, stream, wait_done, self.place(number))?;
            }
        }
        if let Some(other) = other {
            self.follow(other, stream)?;
        }
        let passed = match streams.passed.entry(stream as usize) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(new) => new.insert(Event::new(&self.gpu)?),
        };
        // SAFETY: as above.
        unsafe { passed.record_in(stream)? };
        Ok(Gate { place: self.place(number), gpu: Arc::clone(&self.gpu), pulse: Arc::clone(&self.pulse) })
    }

    /// Has what comes later in one stream wait for what is in another.
    fn follow(&self, stream: Handle, other: Handle) -> Result<()> {
        let event = Event::new(&self.gpu)?;
        // SAFETY: both are callers' streams. The driver keeps the event for as long as it is waited for.
        unsafe {
            event.record_in(other)?;
            event.wait_in(stream)?;
        }
        Ok(())
    }

    fn place(&self, number: u32) -> Place {
        Place { words: Arc::clone(&self.words), number }
    }
}

impl Drop for Order {
    fn drop(&mut self) {
        let until = Instant::now() + LAST_PATIENCE;
        let streams = self.streams.get_mut().unwrap_or_else(PoisonError::into_inner);
        let passed = |event: &Event| self.gpu.enter().and_then(|_entered| event.is_over()).unwrap_or(true);
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
            std::thread::sleep(NAP);
        }
    }
}

impl Gate {
    /// Waits until the stream has come to the call.
    ///
    /// # Errors
    /// The fault, if it is raised meanwhile; `System` if the GPU fails.
    pub(crate) fn wait_ready(&self, fault: &Fault) -> Result<()> {
        let Place { words, number } = &self.place;
        let word = words.get(*number as usize % CALLS);
        let mut looks = 0u32;
        while word.load(Ordering::Acquire) != *number {
            fault.check()?;
            looks = looks.saturating_add(1);
            if looks < 100 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
            if looks.is_multiple_of(NAPS_PER_PULSE) {
                self.gpu
                    .enter()
                    .and_then(|_entered| self.pulse.is_over())
                    .map_err(|failure| Error::from(failure).context(format_args!("{:?}", self.gpu)))?;
            }
        }
        Ok(())
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.place.words.get(DONE).store(self.place.number, Ordering::Release);
    }
}

/// Tries whether streams can write words and wait for them.
fn writes_and_waits(gpu: &Arc<Gpu>, words: &Words) -> Result<bool> {
    let stream = Stream::new(gpu)?;
    let entered = gpu.enter()?;
    // SAFETY: the stream is live, and the words are until it is done. It waits for what is there already.
    let told = unsafe {
        gpu.driver()
            .stream_write_value(stream.raw(), words.address(0), 0, 0)
            .and_then(|()| wait_in_stream(gpu, stream.raw(), words.address(DONE), 0))
    };
    stream.synchronize()?;
    drop(entered);
    Ok(told.is_ok())
}

/// # Safety
/// The stream is live, and the word is until the stream has passed.
unsafe fn wait_in_stream(
    gpu: &Gpu,
    stream: Handle,
    at: Address,
    number: u32,
) -> std::result::Result<(), Failure> {
    // Compares as counters do that begin anew after 2^32.
    let at_least = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as c_uint;
    // SAFETY: the caller vouches for both.
    unsafe { gpu.driver().stream_wait_value(stream, at, number, at_least) }
}

/// # Safety
/// The stream is live.
unsafe fn call_back(
    gpu: &Gpu,
    stream: Handle,
    function: unsafe extern "C" fn(*mut c_void),
    place: Place,
) -> std::result::Result<(), Failure> {
    let argument = Box::into_raw(Box::new(place));
    // SAFETY: the caller vouches for the stream; the function takes the place, which is its own from now on.
    unsafe { gpu.driver().launch_host_function(stream, function, argument.cast()) }.inspect_err(|_| {
        // SAFETY: it was made above, and nobody else got it.
        drop(unsafe { Box::from_raw(argument) });
    })
}

/// # Safety
/// `place` is a boxed place, which is given away.
unsafe extern "C" fn tell_ready(place: *mut c_void) {
    // SAFETY: the caller vouches for it.
    let Place { words, number } = *unsafe { Box::from_raw(place.cast::<Place>()) };
    words.get(number as usize % CALLS).store(number, Ordering::Release);
    keep(words);
}

/// # Safety
/// As for [`tell_ready`].
unsafe extern "C" fn wait_done(place: *mut c_void) {
    // SAFETY: as above.
    let Place { words, number } = *unsafe { Box::from_raw(place.cast::<Place>()) };
    while (words.get(DONE).load(Ordering::Acquire).wrapping_sub(number) as i32) < 0 {
        std::thread::sleep(NAP);
    }
    keep(words);
}

/// Lets go of the words without freeing them: a function that the driver calls must not call the driver. Their order,
/// which holds them too, outlives every function that is still to be called.
fn keep(words: Arc<Words>) {
    if let Some(last) = Arc::into_inner(words) {
        std::mem::forget(last);
    }
}
