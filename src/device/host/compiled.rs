//! The kernels, compiled for each instruction set.
//!
//! Owns the functions with target features, into which a whole kernel is inlined.

use super::instructions::{self, Instructions};
use super::kernel;
use super::lane::Lane;
use super::number::Combine;
use crate::device::Job;

/// An instruction set that the kernels are compiled for.
pub(super) trait Compiled: Instructions {
    /// [`kernel::reduce`], compiled for this instruction set.
    ///
    /// # Safety
    /// As for [`kernel::reduce`].
    unsafe fn reduce<L: Lane, C: Combine<L::Acc>>(job: &Job<'_>);

    /// [`kernel::copy`], compiled for this instruction set.
    ///
    /// # Safety
    /// As for [`kernel::copy`].
    unsafe fn copy(into: *mut u8, from: *const u8, len: usize, streaming: bool);
}

/// Compiles the kernels with these target features: everything that they call is inlined.
macro_rules! compile {
    ($(#[$features:meta])? for $set:ty) => {
        impl Compiled for $set {
            unsafe fn reduce<L: Lane, C: Combine<L::Acc>>(job: &Job<'_>) {
                $(#[$features])?
                unsafe fn inner<L: Lane, C: Combine<L::Acc>>(job: &Job<'_>) {
                    // SAFETY: the caller has the obligations of `kernel::reduce`.
                    unsafe { kernel::reduce::<$set, L, C>(job) }
                }
                // SAFETY: as above; the caller guarantees the instructions too.
                unsafe { inner::<L, C>(job) }
            }

            unsafe fn copy(into: *mut u8, from: *const u8, len: usize, streaming: bool) {
                $(#[$features])?
                unsafe fn inner(into: *mut u8, from: *const u8, len: usize, streaming: bool) {
                    // SAFETY: the caller has the obligations of `kernel::copy`.
                    unsafe { kernel::copy::<$set>(into, from, len, streaming) }
                }
                // SAFETY: as above; the caller guarantees the instructions too.
                unsafe { inner(into, from, len, streaming) }
            }
        }
    };
}

compile! { for instructions::baseline::Baseline }
#[cfg(target_arch = "x86_64")]
compile! { #[target_feature(enable = "avx2,f16c")] for instructions::avx2::Avx2 }
#[cfg(target_arch = "x86_64")]
compile! {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    for instructions::avx512::Avx512
}
#[cfg(target_arch = "aarch64")]
compile! { for instructions::neon::Neon }
