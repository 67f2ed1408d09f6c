//! The instruction sets.
//!
//! Owns the one place where the kernels are compiled for each of them, and the few intrinsics that the
//! compiler does not find by itself: conversions of f16, and stores past the cache. Must not know what is
//! computed.

use super::kernel;
use super::lane::{GROUP, Lane, f16_to_f32, f32_to_f16, narrow_pairs, widen_pairs};
use super::number::Combine;
use crate::device::Job;
use half::f16;

/// The bytes of a cache line, which is what stores past the cache should fill one after the other.
pub(super) const LINE: usize = 64;

/// A set of instructions that the kernels can be compiled for.
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

    /// Widens a group.
    ///
    /// # Safety
    /// The processor has these instructions.
    #[inline(always)]
    unsafe fn widen_f16(group: [f16; GROUP]) -> [f32; GROUP] {
        // SAFETY: both are as large, and words may have any bits.
        let pairs = unsafe { std::mem::transmute::<[f16; GROUP], [u32; GROUP / 2]>(group) };
        widen_pairs(
            pairs,
            |pair| f16_to_f32(pair & 0xffff),
            |pair| f16_to_f32(pair >> 16),
        )
    }

    /// Rounds a group.
    ///
    /// # Safety
    /// The processor has these instructions.
    #[inline(always)]
    unsafe fn narrow_f16(group: [f32; GROUP]) -> [f16; GROUP] {
        let pairs = narrow_pairs(group, |low, high| f32_to_f16(low) | f32_to_f16(high) << 16);
        // SAFETY: both are as large, and all bits are an f16.
        unsafe { std::mem::transmute(pairs) }
    }

    /// Writes a group, past the cache if these instructions can. [`fence`](Self::fence) orders it before
    /// whatever is stored later.
    ///
    /// # Safety
    /// `into` is valid for writes of a group, and aligned to a group or a [`LINE`], whichever is less. The
    /// processor has these instructions.
    #[inline(always)]
    unsafe fn store_past_cache<T: Copy>(into: *mut T, group: [T; GROUP]) {
        // SAFETY: the caller vouches for a group.
        unsafe { into.cast::<[T; GROUP]>().write_unaligned(group) }
    }

    /// Makes what was stored past the cache visible to other threads before anything that is stored later.
    #[inline(always)]
    fn fence() {}
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
        unsafe fn store_past_cache<T: Copy>(into: *mut T, group: [T; GROUP]) {
            use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
            const { assert!(size_of::<[T; GROUP]>().is_multiple_of(size_of::<__m128i>())) }
            for at in 0..size_of::<[T; GROUP]>() / size_of::<__m128i>() {
                // SAFETY: within the group, for which the caller vouches; SSE2 is in the baseline.
                unsafe {
                    let part = _mm_loadu_si128(group.as_ptr().cast::<__m128i>().add(at));
                    _mm_stream_si128(into.cast::<__m128i>().add(at), part);
                }
            }
        }

        #[cfg(target_arch = "x86_64")]
        #[inline(always)]
        fn fence() {
            // SAFETY: SSE is in the baseline.
            unsafe { std::arch::x86_64::_mm_sfence() }
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
        unsafe fn widen_f16(group: [f16; GROUP]) -> [f32; GROUP] {
            let mut wide = [0.0; GROUP];
            for at in (0..GROUP).step_by(8) {
                // SAFETY: eight elements from `at` on are within the group; the caller vouches for F16C.
                unsafe {
                    let half = _mm_loadu_si128(group.as_ptr().add(at).cast());
                    _mm256_storeu_ps(wide.as_mut_ptr().add(at), _mm256_cvtph_ps(half));
                }
            }
            wide
        }

        #[inline(always)]
        unsafe fn narrow_f16(group: [f32; GROUP]) -> [f16; GROUP] {
            let mut narrow = [f16::ZERO; GROUP];
            for at in (0..GROUP).step_by(8) {
                // SAFETY: eight elements from `at` on are within the group; the caller vouches for F16C.
                unsafe {
                    let half =
                        _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(group.as_ptr().add(at)));
                    _mm_storeu_si128(narrow.as_mut_ptr().add(at).cast(), half);
                }
            }
            narrow
        }

        #[inline(always)]
        unsafe fn store_past_cache<T: Copy>(into: *mut T, group: [T; GROUP]) {
            if !size_of::<[T; GROUP]>().is_multiple_of(size_of::<__m256i>()) {
                // SAFETY: the caller's promise is the same.
                return unsafe { baseline::Here::store_past_cache(into, group) };
            }
            for at in 0..size_of::<[T; GROUP]>() / size_of::<__m256i>() {
                // SAFETY: within the group, for which the caller vouches, as for the instructions.
                unsafe {
                    let part = _mm256_loadu_si256(group.as_ptr().cast::<__m256i>().add(at));
                    _mm256_stream_si256(into.cast::<__m256i>().add(at), part);
                }
            }
        }

        #[inline(always)]
        fn fence() {
            baseline::Here::fence();
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
        shells! { #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")] }

        #[inline(always)]
        unsafe fn widen_f16(group: [f16; GROUP]) -> [f32; GROUP] {
            let mut wide = [0.0; GROUP];
            // SAFETY: both are groups of sixteen; the caller vouches for the instructions.
            unsafe {
                let half = _mm256_loadu_si256(group.as_ptr().cast());
                _mm512_storeu_ps(wide.as_mut_ptr(), _mm512_cvtph_ps(half));
            }
            wide
        }

        #[inline(always)]
        unsafe fn narrow_f16(group: [f32; GROUP]) -> [f16; GROUP] {
            let mut narrow = [f16::ZERO; GROUP];
            // SAFETY: both are groups of sixteen; the caller vouches for the instructions.
            unsafe {
                let half = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_loadu_ps(group.as_ptr()));
                _mm256_storeu_si256(narrow.as_mut_ptr().cast(), half);
            }
            narrow
        }

        #[inline(always)]
        unsafe fn store_past_cache<T: Copy>(into: *mut T, group: [T; GROUP]) {
            if !size_of::<[T; GROUP]>().is_multiple_of(size_of::<__m512i>()) {
                // SAFETY: the caller's promise is the same, and whoever has AVX-512 F has AVX2.
                return unsafe { avx2::Here::store_past_cache(into, group) };
            }
            for at in 0..size_of::<[T; GROUP]>() / size_of::<__m512i>() {
                // SAFETY: within the group, for which the caller vouches, as for the instructions.
                unsafe {
                    let part = _mm512_loadu_si512(group.as_ptr().cast::<__m512i>().add(at));
                    _mm512_stream_si512(into.cast::<__m512i>().add(at), part);
                }
            }
        }

        #[inline(always)]
        fn fence() {
            baseline::Here::fence();
        }
    }
}

#[cfg(target_arch = "aarch64")]
pub(super) mod neon {
    //! NEON, which is in the baseline of its architecture, with its conversions of f16.

    use super::*;
    use std::arch::aarch64::{float32x4_t, uint16x4_t, vld1_u16, vld1q_f32, vst1_u16, vst1q_f32};
    use std::arch::asm;

    pub(in super::super) struct Here;

    // The conversions have no stable intrinsics yet in the oldest compiler that is supported.
    impl Instructions for Here {
        shells! {}

        #[inline(always)]
        unsafe fn widen_f16(group: [f16; GROUP]) -> [f32; GROUP] {
            let mut wide = [0.0; GROUP];
            for at in (0..GROUP).step_by(4) {
                // SAFETY: four elements from `at` on are within the group; NEON is in the baseline.
                unsafe {
                    let half: uint16x4_t = vld1_u16(group.as_ptr().add(at).cast());
                    let single: float32x4_t;
                    asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) single, in(vreg) half,
                        options(pure, nomem, nostack, preserves_flags));
                    vst1q_f32(wide.as_mut_ptr().add(at), single);
                }
            }
            wide
        }

        #[inline(always)]
        unsafe fn narrow_f16(group: [f32; GROUP]) -> [f16; GROUP] {
            let mut narrow = [f16::ZERO; GROUP];
            for at in (0..GROUP).step_by(4) {
                // SAFETY: four elements from `at` on are within the group; NEON is in the baseline.
                unsafe {
                    let single: float32x4_t = vld1q_f32(group.as_ptr().add(at));
                    let half: uint16x4_t;
                    asm!("fcvtn {0:v}.4h, {1:v}.4s", out(vreg) half, in(vreg) single,
                        options(pure, nomem, nostack, preserves_flags));
                    vst1_u16(narrow.as_mut_ptr().add(at).cast(), half);
                }
            }
            narrow
        }
    }
}
