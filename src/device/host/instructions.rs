//! The instruction sets.
//!
//! Owns the one place where the kernels are compiled for each of them, and the few intrinsics that the
//! compiler does not find by itself: conversions of f16, stores past the cache, prefetches. Must not know
//! what is computed.

use super::kernel;
use super::lane::Lane;
use super::number::Combine;
use crate::device::Job;
use half::f16;

/// The bytes of a cache line, which is what stores past the cache should fill at once.
pub(super) const LINE: usize = 64;

/// A set of instructions that a kernel can be compiled for.
pub(super) trait Instructions {
    /// [`kernel::reduce`], compiled for this instruction set.
    ///
    /// # Safety
    /// As for [`kernel::reduce`].
    unsafe fn reduce<L: Lane, C: Combine>(job: &Job<'_>);

    /// [`kernel::copy_past_cache`], compiled for this instruction set.
    ///
    /// # Safety
    /// As for [`kernel::copy_past_cache`].
    unsafe fn copy_past_cache(into: *mut u8, from: *const u8, len: usize);

    /// Widens `len` values.
    ///
    /// # Safety
    /// `from` is aligned and valid for reads of `len` elements, `into` for writes; they do not overlap. The
    /// processor has these instructions.
    #[inline(always)]
    unsafe fn widen_f16(into: *mut f32, from: *const f16, len: usize) {
        for i in 0..len {
            // SAFETY: i < len, for which the caller vouches.
            unsafe { *into.add(i) = (*from.add(i)).widen() };
        }
    }

    /// Rounds `len` values.
    ///
    /// # Safety
    /// As for [`widen_f16`](Self::widen_f16).
    #[inline(always)]
    unsafe fn narrow_f16(into: *mut f16, from: *const f32, len: usize) {
        for i in 0..len {
            // SAFETY: i < len, for which the caller vouches.
            unsafe { *into.add(i) = f16::narrow(*from.add(i)) };
        }
    }

    /// Copies one cache line, past the cache if these instructions can. [`fence`](Self::fence) orders it before later
    /// stores.
    ///
    /// # Safety
    /// `from` is valid for reads of [`LINE`] bytes, `into` for writes and aligned to a line; they do not
    /// overlap. The processor has these instructions.
    #[inline(always)]
    unsafe fn stream_line(into: *mut u8, from: *const u8) {
        // SAFETY: the caller vouches for both.
        unsafe { std::ptr::copy_nonoverlapping(from, into, LINE) }
    }

    /// Makes what was streamed visible to other threads before anything that is stored later.
    #[inline(always)]
    fn fence() {}

    /// Asks for the cache line of `at`, which may be any address.
    #[inline(always)]
    fn prefetch(_at: *const u8) {}
}

/// Compiles the kernels under a set of target features: all they call is inlined into these shells.
macro_rules! shells {
    ($(#[$features:meta])?) => {
        unsafe fn reduce<L: Lane, C: Combine>(job: &Job<'_>) {
            $(#[$features])?
            unsafe fn shell<L: Lane, C: Combine>(job: &Job<'_>) {
                // SAFETY: passed on to the caller.
                unsafe { kernel::reduce::<Here, L, C>(job) }
            }
            // SAFETY: passed on to the caller, who vouches for the processor, too.
            unsafe { shell::<L, C>(job) }
        }

        unsafe fn copy_past_cache(into: *mut u8, from: *const u8, len: usize) {
            $(#[$features])?
            unsafe fn shell(into: *mut u8, from: *const u8, len: usize) {
                // SAFETY: passed on to the caller.
                unsafe { kernel::copy_past_cache::<Here>(into, from, len) }
            }
            // SAFETY: passed on to the caller, who vouches for the processor, too.
            unsafe { shell(into, from, len) }
        }
    };
}

pub(super) mod baseline {
    //! What every processor of the architecture has.

    use super::*;

    pub(in super::super) struct Here;

    impl Instructions for Here {
        shells! {}

        #[cfg(target_arch = "x86_64")]
        #[inline(always)]
        unsafe fn stream_line(into: *mut u8, from: *const u8) {
            use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
            for at in (0..LINE).step_by(size_of::<__m128i>()) {
                // SAFETY: within a line, for which the caller vouches; SSE2 is in the baseline.
                unsafe {
                    _mm_stream_si128(into.add(at).cast(), _mm_loadu_si128(from.add(at).cast()));
                }
            }
        }

        #[cfg(target_arch = "x86_64")]
        #[inline(always)]
        fn fence() {
            std::arch::x86_64::_mm_sfence();
        }

        #[cfg(target_arch = "x86_64")]
        #[inline(always)]
        fn prefetch(at: *const u8) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch never faults; SSE is in the baseline.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2 {
    //! AVX2 with F16C. Not FMA: contracted sums would differ from those of other instruction sets.

    use super::*;
    use std::arch::x86_64::*;

    pub(in super::super) struct Here;

    impl Instructions for Here {
        shells! { #[target_feature(enable = "avx2,f16c")] }

        #[inline(always)]
        unsafe fn widen_f16(into: *mut f32, from: *const f16, len: usize) {
            let whole = len & !7;
            for i in (0..whole).step_by(8) {
                // SAFETY: i + 8 <= len, for which the caller vouches, as for the instructions.
                unsafe {
                    let narrow = _mm_loadu_si128(from.add(i).cast());
                    _mm256_storeu_ps(into.add(i), _mm256_cvtph_ps(narrow));
                }
            }
            // SAFETY: the rest of what the caller vouches for.
            unsafe { baseline::Here::widen_f16(into.add(whole), from.add(whole), len - whole) }
        }

        #[inline(always)]
        unsafe fn narrow_f16(into: *mut f16, from: *const f32, len: usize) {
            let whole = len & !7;
            for i in (0..whole).step_by(8) {
                // SAFETY: i + 8 <= len, for which the caller vouches, as for the instructions.
                unsafe {
                    let wide = _mm256_loadu_ps(from.add(i));
                    let narrow = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(wide);
                    _mm_storeu_si128(into.add(i).cast(), narrow);
                }
            }
            // SAFETY: the rest of what the caller vouches for.
            unsafe { baseline::Here::narrow_f16(into.add(whole), from.add(whole), len - whole) }
        }

        #[inline(always)]
        unsafe fn stream_line(into: *mut u8, from: *const u8) {
            for at in (0..LINE).step_by(size_of::<__m256i>()) {
                // SAFETY: within a line, for which the caller vouches, as for the instructions.
                unsafe {
                    _mm256_stream_si256(into.add(at).cast(), _mm256_loadu_si256(from.add(at).cast()));
                }
            }
        }

        #[inline(always)]
        fn fence() {
            baseline::Here::fence();
        }

        #[inline(always)]
        fn prefetch(at: *const u8) {
            baseline::Here::prefetch(at);
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod avx512 {
    //! AVX-512 F, BW, DQ and VL.

    use super::*;
    use std::arch::x86_64::*;

    pub(in super::super) struct Here;

    impl Instructions for Here {
        shells! { #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")] }

        #[inline(always)]
        unsafe fn widen_f16(into: *mut f32, from: *const f16, len: usize) {
            let whole = len & !15;
            for i in (0..whole).step_by(16) {
                // SAFETY: i + 16 <= len, for which the caller vouches, as for the instructions.
                unsafe {
                    let narrow = _mm256_loadu_si256(from.add(i).cast());
                    _mm512_storeu_ps(into.add(i), _mm512_cvtph_ps(narrow));
                }
            }
            // SAFETY: the rest of what the caller vouches for.
            unsafe { baseline::Here::widen_f16(into.add(whole), from.add(whole), len - whole) }
        }

        #[inline(always)]
        unsafe fn narrow_f16(into: *mut f16, from: *const f32, len: usize) {
            let whole = len & !15;
            for i in (0..whole).step_by(16) {
                // SAFETY: i + 16 <= len, for which the caller vouches, as for the instructions.
                unsafe {
                    let wide = _mm512_loadu_ps(from.add(i));
                    let narrow = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(wide);
                    _mm256_storeu_si256(into.add(i).cast(), narrow);
                }
            }
            // SAFETY: the rest of what the caller vouches for.
            unsafe { baseline::Here::narrow_f16(into.add(whole), from.add(whole), len - whole) }
        }

        #[inline(always)]
        unsafe fn stream_line(into: *mut u8, from: *const u8) {
            // SAFETY: the caller vouches for the line and for the instructions.
            unsafe { _mm512_stream_si512(into.cast(), _mm512_loadu_si512(from.cast())) }
        }

        #[inline(always)]
        fn fence() {
            baseline::Here::fence();
        }

        #[inline(always)]
        fn prefetch(at: *const u8) {
            baseline::Here::prefetch(at);
        }
    }
}
