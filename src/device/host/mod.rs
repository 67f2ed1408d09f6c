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
use crate::error::{Error, ErrorKind, Result};
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
        Self {
            reduce: by_dtype::<I>,
            copy_past_cache: I::copy_past_cache,
        }
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
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("f16c") =>
            {
                Some(Self::of::<instructions::avx512::Here>())
            }
            // NEON is in the baseline of its architecture.
            #[cfg(target_arch = "aarch64")]
            Simd::Neon => Some(Self::of::<instructions::baseline::Here>()),
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
            Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the instruction set {} is not to be had on this processor; the best one here is {best}, \
                     which FLEXRING_SIMD=auto chooses",
                    simd.name()
                ),
            )
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
        check(job)?;
        let into = job.into;
        match *job.operands {
            [only] if only.factor.is_none() && job.finish == Finish::Keep => {
                let from = only.piece;
                if from == into {
                } else if job.streaming {
                    // SAFETY: `check`
                    unsafe { (self.kernels.copy_past_cache)(into.as_ptr(), from.as_ptr(), into.len()) }
                } else {
                    // SAFETY: `check`
                    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into.as_ptr(), into.len()) }
                }
            }
            _ => {
                let reduce = (self.kernels.reduce)(job.dtype, job.arithmetic);
                // SAFETY: check
                unsafe { reduce(job) };
            }
        }
        Ok(Submitted::Done)
    }

    fn poll(&mut self, _done: &mut dyn FnMut(u64)) -> Result<()> {
        Ok(())
    }

    fn quiesce(&mut self) {}
}

fn check(_job: &Job<'_>) -> Result<()> {
    Ok(())
}
