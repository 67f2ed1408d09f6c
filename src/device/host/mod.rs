//! The host device: reductions and copies by the calling thread, and threads that help it.
//!
//! Owns the choice of the instruction set at run time, and the checks that make a job safe to run. `submit`
//! runs the job to completion.
//!
//! | file | owns |
//! |---|---|
//! | `number` | the arithmetic of one accumulator |
//! | `conversion` | conversions of 16-bit floats in plain code |
//! | `instructions` | the intrinsics of each instruction set |
//! | `lane` | how element types are stored, widened and rounded |
//! | `kernel` | the reduction, generic over type, operation and instruction set |
//! | `compiled` | the kernels compiled for each instruction set |
//! | `reduction_threads` | threads that share jobs with the one that submits them |

mod compiled;
mod conversion;
mod instructions;
mod kernel;
mod lane;
mod number;
mod reduction_threads;

use super::{Arithmetic, Device, Finish, Job, Operand, Submitted};
use crate::config::Simd;
use crate::dtype::{Boolean, DType};
use crate::error::{Error, Result};
use crate::float8::{F8E4M3, F8E5M2};
use crate::memory::{Loan, Piece};
use compiled::Compiled;
use half::{bf16, f16};
use lane::Lane;
use number::BitNumber;
use reduction_threads::{ReductionThreads, RunJob};
use std::fmt;

/// A kernel for one type, operation and instruction set.
type Reduce = unsafe fn(&Job<'_>);

/// The kernels of one instruction set.
#[derive(Clone, Copy, Debug)]
struct Kernels {
    reduce: fn(DType, Arithmetic) -> Reduce,
    copy: unsafe fn(*mut u8, *const u8, usize, bool),
}

impl Kernels {
    fn of<I: Compiled>() -> Self {
        Self { reduce: by_dtype::<I>, copy: I::copy }
    }

    /// The kernels for `simd`, if this build has them and this processor can run them.
    fn find(simd: Simd) -> Option<Self> {
        match simd {
            Simd::Scalar => Some(Self::of::<instructions::baseline::Baseline>()),
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") => {
                Some(Self::of::<instructions::avx2::Avx2>())
            }
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl") =>
            {
                Some(Self::of::<instructions::avx512::Avx512>())
            }
            // NEON is in the baseline of its architecture.
            #[cfg(target_arch = "aarch64")]
            Simd::Neon => Some(Self::of::<instructions::neon::Neon>()),
            _ => None,
        }
    }
}

impl RunJob for Kernels {
    unsafe fn run(self, job: &Job<'_>) {
        let (into, len) = (job.into.as_ptr(), job.into.len());
        if let Some(from) = only_copied(job) {
            let from = from.as_ptr();
            if from != into {
                // SAFETY: both pieces have `len` bytes and do not overlap, as `check` verified.
                unsafe { (self.copy)(into, from, len, job.streaming) }
            }
        } else if len > 0 {
            // SAFETY: `check` verified lengths, alignment and overlap for the job's type.
            unsafe { (self.reduce)(job.dtype, job.arithmetic)(job) };
        }
    }
}

fn by_dtype<I: Compiled>(dtype: DType, arithmetic: Arithmetic) -> Reduce {
    let of = match dtype {
        DType::I8 => by_operation::<I, i8>,
        DType::U8 => by_operation::<I, u8>,
        DType::I16 => by_operation::<I, i16>,
        DType::U16 => by_operation::<I, u16>,
        DType::I32 => by_operation::<I, i32>,
        DType::U32 => by_operation::<I, u32>,
        DType::I64 => by_operation::<I, i64>,
        DType::U64 => by_operation::<I, u64>,
        DType::Bool => by_operation::<I, Boolean>,
        DType::F16 => by_arithmetic::<I, f16>,
        DType::F32 => by_arithmetic::<I, f32>,
        DType::F64 => by_arithmetic::<I, f64>,
        DType::BF16 => by_arithmetic::<I, bf16>,
        DType::F8E4M3 => by_arithmetic::<I, F8E4M3>,
        DType::F8E5M2 => by_arithmetic::<I, F8E5M2>,
    };
    of(arithmetic)
}

/// The kernels of a type that has all operations.
fn by_operation<I: Compiled, L: Lane<Acc: BitNumber>>(arithmetic: Arithmetic) -> Reduce {
    match arithmetic {
        Arithmetic::BitAnd => I::reduce::<L, number::BitAnd>,
        Arithmetic::BitOr => I::reduce::<L, number::BitOr>,
        Arithmetic::BitXor => I::reduce::<L, number::BitXor>,
        _ => by_arithmetic::<I, L>(arithmetic),
    }
}

/// The kernels of a type without bitwise operations, of which `check` refuses jobs.
fn by_arithmetic<I: Compiled, L: Lane>(arithmetic: Arithmetic) -> Reduce {
    match arithmetic {
        Arithmetic::Prod => I::reduce::<L, number::Prod>,
        Arithmetic::Max => I::reduce::<L, number::Max>,
        Arithmetic::Min => I::reduce::<L, number::Min>,
        _ => I::reduce::<L, number::Sum>,
    }
}

/// The host device: reduces and copies on the thread that submits a job, and on those that help it.
#[derive(Debug)]
pub struct Host {
    simd: Simd,
    kernels: Kernels,
    threads: Option<ReductionThreads<Kernels>>,
}

impl Host {
    /// A device that uses the instruction set `simd`, or the best one for `auto`.
    ///
    /// # Errors
    /// `Unsupported` if this processor lacks it.
    pub fn new(simd: Simd) -> Result<Self> {
        const BEST_FIRST: [Simd; 4] = [Simd::Avx512, Simd::Avx2, Simd::Neon, Simd::Scalar];
        let find = |simd| Kernels::find(simd).map(|kernels| Self { simd, kernels, threads: None });
        let best = || BEST_FIRST.into_iter().find_map(find);
        if simd == Simd::Auto { best() } else { find(simd) }.ok_or_else(|| {
            let best = best().map_or("scalar", |host| host.simd.name());
            Error::unsupported(format!(
                "this processor lacks the instruction set {}; the best one it has is {best}",
                simd.name()
            ))
        })
    }

    /// This device, with jobs that are run by this many threads at once, the one that submits them included.
    ///
    /// # Errors
    /// `System` if the kernel has no further thread.
    pub fn with_threads(self, threads: usize) -> Result<Self> {
        let helpers = threads.saturating_sub(1);
        let threads = (helpers > 0).then(|| ReductionThreads::start(self.kernels, helpers)).transpose()?;
        Ok(Self { threads, ..self })
    }

    /// Writes the sums of the floats of `one` and `other` to `into`, for measurements.
    ///
    /// # Errors
    /// `Internal` if the three are not equally long.
    pub fn sum(&mut self, into: &mut [f32], one: &[f32], other: &[f32]) -> Result<()> {
        let (into, operands) = (Loan::of_mut(into), [Loan::of(one), Loan::of(other)]);
        let operands = operands.map(|loan| Operand { piece: loan.piece(), factor: None });
        let job = Job {
            dtype: DType::F32,
            arithmetic: Arithmetic::Sum,
            into: into.piece(),
            operands: &operands,
            finish: Finish::Keep,
            streaming: false,
        };
        self.submit(&job, 0).map(drop)
    }

    /// The instruction set in use, never `auto`.
    #[must_use]
    pub fn simd(&self) -> Simd {
        self.simd
    }
}

impl Device for Host {
    fn submit(&mut self, job: &Job<'_>, _ticket: u64) -> Result<Submitted> {
        check(job, only_copied(job).is_some())?;
        // SAFETY: the job was checked. `find` verified that the processor runs the kernels.
        unsafe {
            match &mut self.threads {
                Some(threads) => threads.run(job),
                None => self.kernels.run(job),
            }
        }
        Ok(Submitted::Done)
    }

    fn poll(&mut self, _done: &mut dyn FnMut(u64)) -> Result<()> {
        Ok(())
    }

    fn abort(&mut self) {}
}

/// The source of a job that only copies.
fn only_copied(job: &Job<'_>) -> Option<Piece> {
    match job.operands {
        [only] if only.factor.is_none() && matches!(job.finish, Finish::Keep | Finish::Divide(1)) => {
            Some(only.piece)
        }
        _ => None,
    }
}

/// Rejects a job that would have the kernels access memory outside of its pieces.
fn check(job: &Job<'_>, only_copied: bool) -> Result<()> {
    let (into, len) = (job.into.as_ptr().addr(), job.into.len());
    if job.operands.is_empty() {
        return refuse(job, format_args!("has no operand"));
    }
    if !only_copied && !job.arithmetic.is_defined_for(job.dtype) {
        return refuse(job, format_args!("has no operation {:?}", job.arithmetic));
    }
    if job.finish == Finish::Divide(0) {
        return refuse(job, format_args!("divides by 0 ranks"));
    }
    if !job.dtype.divides(len) {
        return refuse(job, format_args!("ends within an element, after {len} bytes"));
    }
    // The bitwise or of addresses is a multiple of a power of two, such as the size of an element, only if
    // each of them is.
    let mut addresses = into;
    for operand in job.operands {
        let (from, given) = (operand.piece.as_ptr().addr(), operand.piece.len());
        if given != len {
            return refuse(job, format_args!("has an operand of {given} bytes for {len}"));
        }
        let distance = from.abs_diff(into);
        if distance != 0 && distance < len {
            let why = format_args!("has an operand that overlaps the destination but for {distance} bytes");
            return refuse(job, why);
        }
        addresses |= from;
    }
    // An empty piece may have any address.
    if !only_copied && len > 0 && !job.dtype.divides(addresses) {
        return refuse(job, format_args!("is not aligned to {} bytes", job.dtype.size()));
    }
    Ok(())
}

/// The error for a job that is wrong. A function of its own, so that [`check`] is short, of which short calls
/// make two.
#[cold]
fn refuse(job: &Job<'_>, why: fmt::Arguments<'_>) -> Result<()> {
    Err(Error::internal(format!("the host device received a job of {} that {why}", job.dtype.name())))
}

#[cfg(test)]
mod tests;
