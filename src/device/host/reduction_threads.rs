//! Threads that share the host's jobs with the thread that submits them.
//!
//! Owns the split of a job into parts by elements, and how threads claim parts and sleep. A part is a job of
//! its own over the same operands in the same order, so results have the same bits for any number of threads.
//!
//! One word has the number of the shared job and of its parts that are not claimed. Any thread that is free
//! claims the next part, the submitting one included: a helper that the kernel does not run delays only the
//! part that it has claimed.

use crate::device::{Job, Operand};
use crate::error::{Error, Result};
use crate::process::spawn;
use std::fmt;
use std::hint::spin_loop;
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::thread::{Builder, JoinHandle, park, yield_now};
use std::time::{Duration, Instant};

/// Bytes of a part. Its destination begins at a multiple of it, but for the first one. Estimated, not
/// measured: adding 16 KiB takes a core about 1 us, ten times as long as claiming it.
const PART_BYTES: usize = 16 << 10;

/// How long a helper spins for the next job before it sleeps. At 50 Gbit/s sub-chunks of 128 KiB arrive every
/// 20 us.
const SPIN: Duration = Duration::from_micros(50);

/// Spins between two looks at the clock, or between two yields.
const SPINS: u32 = 64;

/// Operands for which each thread has room without an allocation.
const OPERANDS: usize = 64;

/// Runs jobs on the calling thread.
pub(super) trait RunJob: Copy + Send + Sync + 'static {
    /// Runs a job.
    ///
    /// # Safety
    /// The job was checked as a whole: its pieces are valid, of one length and aligned to its type, and the
    /// destination is one of the operands or overlaps none.
    unsafe fn run(self, job: &Job<'_>);
}

/// What the threads share.
struct SharedJob<R> {
    runner: R,
    /// The shared job. Valid while a part of it is claimed and not done.
    job: AtomicPtr<Job<'static>>,
    /// The number of the job, and in the lower 32 bits how many of its parts are not claimed.
    claims: AtomicU64,
    /// Parts of the job that are not done.
    unfinished: AtomicU32,
    /// Helpers that sleep or are about to, by bit.
    sleeping: AtomicU64,
    stops: AtomicBool,
}

/// The threads that help the one that submits jobs. They end when this is dropped.
pub(super) struct ReductionThreads<R> {
    shared: Arc<SharedJob<R>>,
    helpers: Vec<JoinHandle<()>>,
    /// The operands of a part of this thread.
    operands: Vec<Operand>,
}

impl<R> fmt::Debug for ReductionThreads<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReductionThreads({})", self.helpers.len())
    }
}

impl<R: RunJob> ReductionThreads<R> {
    /// Starts this many helpers, at most 63.
    ///
    /// # Errors
    /// `System` if the kernel has no further thread.
    pub(super) fn start(runner: R, helpers: usize) -> Result<Self> {
        let shared = Arc::new(SharedJob {
            runner,
            job: AtomicPtr::new(null_mut()),
            claims: AtomicU64::new(0),
            unfinished: AtomicU32::new(0),
            sleeping: AtomicU64::new(0),
            stops: AtomicBool::new(false),
        });
        // Those that were started end with this value if a further one cannot be.
        let mut threads = Self { shared, helpers: Vec::new(), operands: Vec::with_capacity(OPERANDS) };
        for number in 0..helpers.min(63) {
            let shared = Arc::clone(&threads.shared);
            let helper =
                spawn(Builder::new().name(format!("flexring-sum{number}")), move || shared.help(number));
            let helper = helper.map_err(|cause| Error::io("cannot start a thread for reductions", cause))?;
            threads.helpers.push(helper);
        }
        Ok(threads)
    }

    /// Runs a job on this thread and the helpers. Returns when all of it is done.
    ///
    /// # Safety
    /// As for [`RunJob::run`].
    pub(super) unsafe fn run(&mut self, job: &Job<'_>) {
        let shared = &*self.shared;
        let parts = count_parts(job);
        if job.into.len() < 2 * PART_BYTES {
            // SAFETY: the caller has the same obligations.
            return unsafe { shared.runner.run(job) };
        }
        // No part of an earlier job is claimed or can be claimed: all were done when the call before
        // returned.
        shared.job.store(std::ptr::from_ref(job).cast_mut().cast(), Ordering::Relaxed);
        shared.unfinished.store(parts, Ordering::Relaxed);
        let number = (shared.claims.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        // Sequentially consistent, as in `sleep`: either this thread sees that a helper is about to sleep, or
        // the helper sees the job.
        shared.claims.store(number << 32 | u64::from(parts), Ordering::SeqCst);
        if shared.sleeping.load(Ordering::SeqCst) != 0 {
            // This thread takes a part, too.
            let needed = parts as usize - 1;
            let sleeps = |(number, _): &(usize, &JoinHandle<()>)| {
                shared.sleeping.load(Ordering::SeqCst) >> number & 1 == 1
            };
            for (number, helper) in self.helpers.iter().enumerate().filter(sleeps).take(needed) {
                shared.sleeping.fetch_and(!(1 << number), Ordering::SeqCst);
                helper.thread().unpark();
            }
        }
        while let Some(part) = shared.claim() {
            // SAFETY: the part is claimed; the caller has the obligations of `RunJob::run`.
            unsafe { shared.run_part(part, &mut self.operands) };
        }
        let mut spins = 0;
        while shared.unfinished.load(Ordering::Acquire) > 0 {
            spins += 1;
            // A helper that has a part may wait for this thread's core.
            if spins % SPINS == 0 { yield_now() } else { spin_loop() }
        }
    }
}

impl<R> Drop for ReductionThreads<R> {
    fn drop(&mut self) {
        self.shared.stops.store(true, Ordering::SeqCst);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            if helper.join().is_err() {
                log::error!("a thread for reductions panicked");
            }
        }
    }
}

impl<R: RunJob> SharedJob<R> {
    /// Runs parts until the threads end.
    fn help(&self, number: usize) {
        let mut operands = Vec::with_capacity(OPERANDS);
        let mut idle_since = Instant::now();
        let mut spins = 0;
        while !self.stops.load(Ordering::Relaxed) {
            if let Some(part) = self.claim() {
                // SAFETY: the part is claimed, and the submitting thread has the obligations of `RunJob::run`
                // until it is done.
                unsafe { self.run_part(part, &mut operands) };
                (idle_since, spins) = (Instant::now(), 0);
                continue;
            }
            spins += 1;
            if spins % SPINS == 0 && idle_since.elapsed() > SPIN {
                self.sleep(number);
                (idle_since, spins) = (Instant::now(), 0);
            }
            spin_loop();
        }
    }

    /// Sleeps until the next job, unless there is one. May return early.
    fn sleep(&self, number: usize) {
        self.sleeping.fetch_or(1 << number, Ordering::SeqCst);
        let is_idle = self.claims.load(Ordering::SeqCst) as u32 == 0;
        if is_idle && !self.stops.load(Ordering::SeqCst) {
            park();
        }
        self.sleeping.fetch_and(!(1 << number), Ordering::Relaxed);
    }

    /// Claims a part of the shared job, if one is left. Its number counts from the end of the job.
    fn claim(&self) -> Option<usize> {
        let take = |claims: u64| (claims as u32 > 0).then(|| claims - 1);
        // Acquires the job that the number in the word stands for.
        let claims = self.claims.fetch_update(Ordering::Acquire, Ordering::Relaxed, take).ok()?;
        Some(claims as u32 as usize - 1)
    }

    /// Runs a part of the shared job. `operands` is reused.
    ///
    /// # Safety
    /// This thread has claimed the part and not run it yet. The shared job is as [`RunJob::run`] demands.
    unsafe fn run_part(&self, part: usize, operands: &mut Vec<Operand>) {
        // SAFETY: the job stays as it is until all its parts are done, and this one is not.
        let job = unsafe { &*self.job.load(Ordering::Relaxed) };
        let Range { start, end } = range_of_part(job, part);
        operands.clear();
        operands.extend(job.operands.iter().map(|operand| narrow(operand, start, end - start)));
        let part = Job { into: job.into.narrow(start, end - start), operands, ..*job };
        let guard = AbortOnUnwind;
        // SAFETY: the part has pieces of one length within those of the job, whose destinations no other part
        // has. It starts at an element, as destinations are aligned to elements and parts to `PART_BYTES`; a
        // copy has no elements.
        unsafe { self.runner.run(&part) };
        std::mem::forget(guard);
        // Releases what was written to the submitting thread, which may end the job now.
        self.unfinished.fetch_sub(1, Ordering::Release);
    }
}

/// Ends the process if a part panics: other threads use the job, and the submitting one would wait for the
/// part without end.
struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        std::process::abort();
    }
}

/// The bytes of an operand that belong to a part.
fn narrow(operand: &Operand, offset: usize, len: usize) -> Operand {
    Operand { piece: operand.piece.narrow(offset, len), ..*operand }
}

/// Bytes between the destination and the multiple of [`PART_BYTES`] before it.
fn skew(job: &Job<'_>) -> usize {
    job.into.as_ptr().addr() % PART_BYTES
}

/// The number of parts of a job.
fn count_parts(job: &Job<'_>) -> u32 {
    (skew(job) + job.into.len()).div_ceil(PART_BYTES) as u32
}

/// The bytes of a part of a job, which is not empty.
fn range_of_part(job: &Job<'_>, part: usize) -> Range<usize> {
    let at = |multiple: usize| (multiple * PART_BYTES).saturating_sub(skew(job)).min(job.into.len());
    at(part)..at(part + 1)
}
