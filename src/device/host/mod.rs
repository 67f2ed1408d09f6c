//! The host device: reductions and copies by the calling thread.
//!
//! Owns the choice of the instruction set, at run time, and the checks that make a job safe to run. A job is
//! done when it is submitted. Must not know what the loops look like.

mod instructions;
mod kernel;
mod lane;
mod number;

use super::{Arithmetic, Device, Finish, Job, Submitted};
use crate::config::Simd;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::float8::{F8E4M3, F8E5M2};
use crate::memory::Piece;
use half::{bf16, f16};
use instructions::Instructions;
use lane::Lane;

type Reduce = unsafe fn(&Job<'_>);

/// What is compiled once per instruction set.
#[derive(Clone, Copy, Debug)]
struct Kernels {
    reduce: fn(DType, Arithmetic) -> Reduce,
    copy_past_cache: unsafe fn(*mut u8, *const u8, usize),
}

impl Kernels {
    fn of<I: Instructions>() -> Self {
        Self { reduce: by_dtype::<I>, copy_past_cache: I::copy_past_cache }
    }

    /// The kernels for `simd`, if they are compiled in and this processor can run them.
    fn find(simd: Simd) -> Option<Self> {
        match simd {
            Simd::Scalar => Some(Self::of::<instructions::baseline::Here>()),
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") => {
                Some(Self::of::<instructions::avx2::Here>())
            }
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl") =>
            {
                Some(Self::of::<instructions::avx512::Here>())
            }
            // In the baseline of its architecture.
            #[cfg(target_arch = "aarch64")]
            Simd::Neon => Some(Self::of::<instructions::neon::Here>()),
            _ => None,
        }
    }
}

fn by_dtype<I: Instructions>(dtype: DType, arithmetic: Arithmetic) -> Reduce {
    let of = match dtype {
        DType::I8 => by_arithmetic::<I, i8>,
        DType::U8 => by_arithmetic::<I, u8>,
        DType::I32 => by_arithmetic::<I, i32>,
        DType::U32 => by_arithmetic::<I, u32>,
        DType::I64 => by_arithmetic::<I, i64>,
        DType::U64 => by_arithmetic::<I, u64>,
        DType::F16 => by_arithmetic::<I, f16>,
        DType::F32 => by_arithmetic::<I, f32>,
        DType::F64 => by_arithmetic::<I, f64>,
        DType::BF16 => by_arithmetic::<I, bf16>,
        DType::F8E4M3 => by_arithmetic::<I, F8E4M3>,
        DType::F8E5M2 => by_arithmetic::<I, F8E5M2>,
    };
    of(arithmetic)
}

fn by_arithmetic<I: Instructions, L: Lane>(arithmetic: Arithmetic) -> Reduce {
    match arithmetic {
        Arithmetic::Sum => I::reduce::<L, number::Sum>,
        Arithmetic::Prod => I::reduce::<L, number::Prod>,
        Arithmetic::Max => I::reduce::<L, number::Max>,
        Arithmetic::Min => I::reduce::<L, number::Min>,
    }
}

/// Reduces and copies on the thread that submits.
#[derive(Debug)]
pub struct Host {
    simd: Simd,
    kernels: Kernels,
}

impl Host {
    /// A device that uses the instruction set `simd`, or the best one for `auto`.
    ///
    /// # Errors
    /// `Unsupported` if this processor lacks it.
    pub fn new(simd: Simd) -> Result<Self> {
        const BEST_FIRST: [Simd; 4] = [Simd::Avx512, Simd::Avx2, Simd::Neon, Simd::Scalar];
        let find = |simd| Kernels::find(simd).map(|kernels| Self { simd, kernels });
        let best = || BEST_FIRST.into_iter().find_map(find);
        if simd == Simd::Auto { best() } else { find(simd) }.ok_or_else(|| {
            let best = best().map_or("scalar", |host| host.simd.name());
            Error::unsupported(format!(
                "the instruction set {} is not to be had on this processor; the best one here is {best}, \
                     which FLEXRING_SIMD=auto chooses",
                simd.name()
            ))
        })
    }

    /// The instruction set in use, never `auto`.
    #[must_use]
    pub fn simd(&self) -> Simd {
        self.simd
    }
}

impl Device for Host {
    fn submit(&mut self, job: &Job<'_>, _ticket: u64) -> Result<Submitted> {
        let copied = only_copied(job);
        check(job, copied.is_some())?;
        let (into, len) = (job.into.as_ptr(), job.into.len());
        if let Some(from) = copied {
            let from = from.as_ptr();
            if from == into {
                // It is there already.
            } else if job.streaming {
                // SAFETY: both pieces have `len` bytes and do not overlap, as was checked. The kernels were
                // found for this processor.
                unsafe { (self.kernels.copy_past_cache)(into, from, len) }
            } else {
                // SAFETY: both pieces have `len` bytes and do not overlap, as was checked.
                unsafe { std::ptr::copy_nonoverlapping(from, into, len) }
            }
        } else if len > 0 {
            let reduce = (self.kernels.reduce)(job.dtype, job.arithmetic);
            // SAFETY: lengths, alignment and overlap are as was checked, and of the job's own type. The kernels
            // were found for this processor.
            unsafe { reduce(job) };
        }
        Ok(Submitted::Done)
    }

    fn poll(&mut self, _done: &mut dyn FnMut(u64)) -> Result<()> {
        Ok(())
    }

    fn give_up(&mut self) {}
}

/// What the job copies, if that is all it does.
fn only_copied(job: &Job<'_>) -> Option<Piece> {
    match job.operands {
        [only] if only.factor.is_none() && matches!(job.finish, Finish::Keep | Finish::Divide(1)) => {
            Some(only.piece)
        }
        _ => None,
    }
}

/// Refuses a job that the kernels could not run without touching memory that is not theirs.
fn check(job: &Job<'_>, only_copied: bool) -> Result<()> {
    let refused = |why: String| {
        Err(Error::internal(format!("the host device was given a job over {} that {why}", job.dtype.name())))
    };
    let (into, len, size) = (job.into, job.into.len(), job.dtype.size());
    if job.operands.is_empty() {
        return refused("has no operand".to_owned());
    }
    if job.finish == Finish::Divide(0) {
        return refused("divides by 0 ranks".to_owned());
    }
    if !len.is_multiple_of(size) {
        return refused(format!("ends within an element, after {len} bytes"));
    }
    for operand in job.operands {
        let piece = operand.piece;
        if piece.len() != len {
            return refused(format!("has an operand of {} bytes for {len}", piece.len()));
        }
        let distance = piece.as_ptr().addr().abs_diff(into.as_ptr().addr());
        if distance != 0 && distance < len {
            return refused(format!("has an operand that overlaps the destination but for {distance} bytes"));
        }
    }
    // An empty piece may point anywhere.
    if !only_copied && len > 0 {
        let aligned = |piece: Piece| piece.as_ptr().addr().is_multiple_of(size);
        if !aligned(into) || !job.operands.iter().all(|operand| aligned(operand.piece)) {
            return refused(format!("is not aligned to {size} bytes"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
