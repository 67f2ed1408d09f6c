//! Devices: where additions and copies happen.
//!
//! Owns the arithmetic. Must not know ranks, links, schedules or why two pieces are added: a [`Job`] says
//! which bytes go where, and that is all a device sees.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod host;

use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Piece;
use std::ffi::c_void;
use std::ptr::null_mut;

/// The arithmetic of a reduction; averages and factors are said apart, in [`Finish`] and [`Operand`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// `a + b`; integers wrap.
    Sum,
    /// `a * b`; integers wrap.
    Prod,
    /// IEEE 754-2019 `maximum` for floats: NaN if either is NaN, and -0 < +0.
    Max,
    /// IEEE 754-2019 `minimum` for floats.
    Min,
}

impl Arithmetic {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Sum, Self::Prod, Self::Max, Self::Min];
}

/// One input of a job.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// Where its elements are; as long as the destination.
    pub piece: Piece,
    /// What each element is multiplied with as it is read (in f32 for floats of 16 and 8 bits), if anything.
    pub factor: Option<f64>,
}

/// What happens to the reduced value before it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// Nothing.
    Keep,
    /// It is divided by this many ranks (in f32 for floats of 16 and 8 bits; integers truncate toward zero).
    Divide(u32),
}

/// Reduce the operands, in their order, into `into`: `into = finish(((o0 · o1) · o2) · …)`.
///
/// With one operand this is a copy. `into` may be the very same piece as one of the operands and must not
/// overlap any of them otherwise. Floats of 16 and 8 bits are widened to f32, accumulated there, and rounded
/// once.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// The element type. Pieces are aligned to its size unless they are copied only.
    pub dtype: DType,
    /// The arithmetic.
    pub arithmetic: Arithmetic,
    /// The destination; its length is a multiple of the element size.
    pub into: Piece,
    /// The inputs, at least one.
    pub operands: &'a [Operand],
    /// The last step.
    pub finish: Finish,
    /// Whether the destination is too large to be read again from a cache, so that it is best written past it.
    pub streaming: bool,
}

/// A caller's stream on a GPU, as CUDA's driver and runtime hand it out. Whoever makes one promises that it is live until it
/// has passed what is put in it.
#[derive(Clone, Copy, Debug)]
pub struct CallerStream(*mut c_void);

// SAFETY: it is an address that only CUDA's driver follows, on any thread.
unsafe impl Send for CallerStream {}

impl CallerStream {
    /// The default stream.
    pub const DEFAULT: Self = Self(null_mut());

    /// The stream with this handle; NULL is the default one.
    ///
    /// # Safety
    /// The stream is live, or NULL, until it has passed all that is put in it.
    #[must_use]
    pub unsafe fn new(handle: *mut c_void) -> Self {
        Self(handle)
    }

    /// Its handle.
    #[must_use]
    pub fn handle(self) -> *mut c_void {
        self.0
    }
}

/// Whether a job was done at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// It is done.
    Done,
    /// It will be reported by [`Device::poll`] under its ticket.
    InFlight,
}

/// Something that runs jobs. Those that are under way at the same time do not depend on each other.
pub trait Device: Send {
    /// Starts a job.
    ///
    /// # Errors
    /// `Unsupported` for a dtype or arithmetic that the device lacks; `System` if it failed.
    fn submit(&mut self, job: &Job<'_>, ticket: u64) -> Result<Submitted>;

    /// Reports the tickets of jobs that have become done since the last poll; those that are alike in where their
    /// pieces are in the order in which they were submitted. Jobs may wait for a poll to be started.
    ///
    /// # Errors
    /// `System` if the device failed.
    fn poll(&mut self, done: &mut dyn FnMut(u64)) -> Result<()>;

    /// Gives all jobs up: afterwards none touches memory any more, whatever its outcome, and none is reported.
    fn give_up(&mut self);
}
