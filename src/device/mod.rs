//! Devices: where additions and copies happen.
//!
//! Owns the arithmetic. Must not know ranks, links or schedules: a [`Job`] names the memory, the type and the
//! operation, and nothing else.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod host;
pub(crate) mod kernel_start;
pub(crate) mod relay_link;

use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Piece;
use std::ffi::c_void;
use std::ptr::null_mut;

/// The arithmetic of a reduction. Averages and factors are separate: see [`Finish`] and [`Operand`].
/// The numbers are those of `Operation` in `kernels/collective.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Arithmetic {
    /// `a + b`; integers wrap.
    Sum = 0,
    /// `a * b`; integers wrap.
    Prod = 1,
    /// IEEE 754-2019 `maximum` for floats: NaN if either is NaN, and -0 < +0.
    Max = 2,
    /// IEEE 754-2019 `minimum` for floats.
    Min = 3,
    /// `a & b`, for integers and booleans, as the following two.
    BitAnd = 4,
    /// `a | b`.
    BitOr = 5,
    /// `a ^ b`.
    BitXor = 6,
}

impl Arithmetic {
    /// All operations.
    pub const ALL: [Self; 7] =
        [Self::Sum, Self::Prod, Self::Max, Self::Min, Self::BitAnd, Self::BitOr, Self::BitXor];

    /// Whether the operation exists for elements of this type.
    #[must_use]
    pub fn is_defined_for(self, dtype: DType) -> bool {
        let is_bitwise = matches!(self, Self::BitAnd | Self::BitOr | Self::BitXor);
        !(is_bitwise && dtype.is_float())
    }
}

/// One input of a job.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// The elements; as long as the destination.
    pub piece: Piece,
    /// Each element is multiplied with this when it is read (in f32 for floats of 16 and 8 bits), if given.
    pub factor: Option<f64>,
}

/// The last step before the reduced value is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The value is written unchanged.
    Keep,
    /// The value is divided by a number of ranks (in f32 for floats of 16 and 8 bits; integers truncate
    /// toward zero).
    Divide(u32),
}

/// A reduction of the operands, in their order, into `into`: `into = finish(((o0 · o1) · o2) · …)`.
///
/// With one operand this is a copy. `into` may be the very same piece as one of the operands and must not
/// overlap any of them otherwise. Floats of 16 and 8 bits are widened to f32, accumulated there, and rounded
/// once.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// The element type. Pieces are aligned to its size, except in a job that only copies.
    pub dtype: DType,
    /// The arithmetic.
    pub arithmetic: Arithmetic,
    /// The destination; its length is a multiple of the element size.
    pub into: Piece,
    /// The inputs, at least one.
    pub operands: &'a [Operand],
    /// The last step.
    pub finish: Finish,
    /// Whether the destination exceeds the cache, so that non-temporal stores are faster.
    pub streaming: bool,
}

/// A caller's stream on a GPU, as a handle of CUDA's driver or runtime. The creator of a `CallerStream`
/// guarantees that the stream is live until it has completed everything that is enqueued in it.
#[derive(Clone, Copy, Debug)]
pub struct CallerStream(*mut c_void);

// SAFETY: it is a handle that only CUDA's driver dereferences, on any thread.
unsafe impl Send for CallerStream {}

impl CallerStream {
    /// The default stream.
    pub const DEFAULT: Self = Self(null_mut());

    /// The stream with this handle; NULL is the default one.
    ///
    /// # Safety
    /// The stream is NULL, or live until it has completed everything that is enqueued in it.
    #[must_use]
    pub unsafe fn new(handle: *mut c_void) -> Self {
        Self(handle)
    }

    /// The handle for CUDA's driver.
    #[must_use]
    pub fn handle(self) -> *mut c_void {
        self.0
    }
}

/// Whether a submitted job is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// The job is complete.
    Done,
    /// [`Device::poll`] will report its ticket.
    InFlight,
}

/// Runs jobs. Jobs that are in flight at the same time do not depend on each other.
pub trait Device: Send {
    /// Starts a job.
    ///
    /// # Errors
    /// `Unsupported` for a type or operation that the device lacks; `System` if the device failed.
    fn submit(&mut self, job: &Job<'_>, ticket: u64) -> Result<Submitted>;

    /// Reports the tickets of jobs that completed since the last poll. Jobs whose pieces are in the same
    /// kinds of memory are reported in the order of submission. A device may start jobs only in a poll.
    ///
    /// # Errors
    /// `System` if the device failed.
    fn poll(&mut self, done: &mut dyn FnMut(u64)) -> Result<()>;

    /// Aborts all jobs: afterwards none of them accesses memory, and none is reported.
    fn abort(&mut self);
}
