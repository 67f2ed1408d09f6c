//! The instruction sets.
//!
//! Owns the intrinsics that the compiler does not generate by itself: conversions of f16, and non-temporal
//! stores.

use super::conversion::{GROUP, f16_to_f32, f32_to_f16, narrow_pairs, widen_pairs};
use half::f16;

/// Bytes of a cache line. Non-temporal stores should fill whole lines in order.
pub(super) const LINE: usize = 64;

/// An instruction set that the kernels can be compiled for.
pub(super) trait Instructions {
    /// Widens a group, possibly in another order.
    ///
    /// # Safety
    /// The processor has these instructions.
    #[inline(always)]
    unsafe fn widen_f16(group: [f16; GROUP]) -> [f32; GROUP] {
        // SAFETY: both types have the same size, and every bit pattern is a u32.
        let pairs = unsafe { std::mem::transmute::<[f16; GROUP], [u32; GROUP / 2]>(group) };
        widen_pairs(pairs, |pair| f16_to_f32(pair & 0xffff), |pair| f16_to_f32(pair >> 16))
    }

    /// Rounds a group, and undoes the reordering of [`widen_f16`](Self::widen_f16).
    ///
    /// # Safety
    /// The processor has these instructions.
    #[inline(always)]
    unsafe fn narrow_f16(group: [f32; GROUP]) -> [f16; GROUP] {
        let pairs = narrow_pairs(group, |low, high| f32_to_f16(low) | f32_to_f16(high) << 16);
        // SAFETY: both types have the same size, and every bit pattern is an f16.
        unsafe { std::mem::transmute(pairs) }
    }

    /// Writes a group with non-temporal stores if the instruction set has them. [`fence`](Self::fence) orders
    /// them before later stores.
    ///
    /// # Safety
    /// `into` is valid for writes of a group, and aligned to a group or a [`LINE`], whichever is less. The
    /// processor has these instructions.
    #[inline(always)]
    unsafe fn store_non_temporal<T: Copy>(into: *mut T, group: [T; GROUP]) {
        // SAFETY: the caller guarantees a writable group.
        unsafe { into.cast::<[T; GROUP]>().write_unaligned(group) }
    }

    /// Orders earlier non-temporal stores before all later stores, as seen by other threads.
    #[inline(always)]
    fn fence() {}
}

pub(super) mod baseline {
    //! The instructions that every processor of the architecture has.

    use super::*;

    pub(in super::super) struct Baseline;

    impl Instructions for Baseline {
        #[cfg(target_arch = "x86_64")]
        #[inline(always)]
        unsafe fn store_non_temporal<T: Copy>(into: *mut T, group: [T; GROUP]) {
            use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
            const { assert!(size_of::<[T; GROUP]>().is_multiple_of(size_of::<__m128i>())) }
            for at in 0..size_of::<[T; GROUP]>() / size_of::<__m128i>() {
                // SAFETY: within the group, which the caller guarantees to be writable; SSE2 is in the
                // baseline.
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
    //! AVX2 with F16C. Without FMA, because contracted sums would differ from those of other instruction
    //! sets.

    use super::*;
    use std::arch::x86_64::*;

    pub(in super::super) struct Avx2;

    impl Instructions for Avx2 {
        #[inline(always)]
        unsafe fn widen_f16(group: [f16; GROUP]) -> [f32; GROUP] {
            let mut wide = [0.0; GROUP];
            for at in (0..GROUP).step_by(8) {
                // SAFETY: the eight elements from `at` on are in the group; the caller guarantees F16C.
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
                // SAFETY: the eight elements from `at` on are in the group; the caller guarantees F16C.
                unsafe {
                    let half =
                        _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(group.as_ptr().add(at)));
                    _mm_storeu_si128(narrow.as_mut_ptr().add(at).cast(), half);
                }
            }
            narrow
        }

        #[inline(always)]
        unsafe fn store_non_temporal<T: Copy>(into: *mut T, group: [T; GROUP]) {
            if !size_of::<[T; GROUP]>().is_multiple_of(size_of::<__m256i>()) {
                // SAFETY: the caller guarantees the same.
                return unsafe { baseline::Baseline::store_non_temporal(into, group) };
            }
            for at in 0..size_of::<[T; GROUP]>() / size_of::<__m256i>() {
                // SAFETY: within the group, which the caller guarantees to be writable, as it does the
                // instructions.
                unsafe {
                    let part = _mm256_loadu_si256(group.as_ptr().cast::<__m256i>().add(at));
                    _mm256_stream_si256(into.cast::<__m256i>().add(at), part);
                }
            }
        }

        #[inline(always)]
        fn fence() {
            baseline::Baseline::fence();
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod avx512 {
    //! AVX-512 F, BW, DQ and VL.

    use super::*;
    use std::arch::x86_64::*;

    pub(in super::super) struct Avx512;

    impl Instructions for Avx512 {
        #[inline(always)]
        unsafe fn widen_f16(group: [f16; GROUP]) -> [f32; GROUP] {
            let mut wide = [0.0; GROUP];
            // SAFETY: both groups have sixteen elements; the caller guarantees the instructions.
            unsafe {
                let half = _mm256_loadu_si256(group.as_ptr().cast());
                _mm512_storeu_ps(wide.as_mut_ptr(), _mm512_cvtph_ps(half));
            }
            wide
        }

        #[inline(always)]
        unsafe fn narrow_f16(group: [f32; GROUP]) -> [f16; GROUP] {
            let mut narrow = [f16::ZERO; GROUP];
            // SAFETY: both groups have sixteen elements; the caller guarantees the instructions.
            unsafe {
                let half = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_loadu_ps(group.as_ptr()));
                _mm256_storeu_si256(narrow.as_mut_ptr().cast(), half);
            }
            narrow
        }

        #[inline(always)]
        unsafe fn store_non_temporal<T: Copy>(into: *mut T, group: [T; GROUP]) {
            if !size_of::<[T; GROUP]>().is_multiple_of(size_of::<__m512i>()) {
                // SAFETY: the caller guarantees the same, and a processor with AVX-512 F has AVX2.
                return unsafe { avx2::Avx2::store_non_temporal(into, group) };
            }
            for at in 0..size_of::<[T; GROUP]>() / size_of::<__m512i>() {
                // SAFETY: within the group, which the caller guarantees to be writable, as it does the
                // instructions.
                unsafe {
                    let part = _mm512_loadu_si512(group.as_ptr().cast::<__m512i>().add(at));
                    _mm512_stream_si512(into.cast::<__m512i>().add(at), part);
                }
            }
        }

        #[inline(always)]
        fn fence() {
            baseline::Baseline::fence();
        }
    }
}

#[cfg(target_arch = "aarch64")]
pub(super) mod neon {
    //! NEON, which is in the baseline of its architecture, and its conversions of f16.

    use super::*;
    use std::arch::aarch64::{float32x4_t, uint16x4_t, vld1_u16, vld1q_f32, vst1_u16, vst1q_f32};
    use std::arch::asm;

    pub(in super::super) struct Neon;

    // The conversions have no stable intrinsics in the oldest supported compiler.
    impl Instructions for Neon {
        #[inline(always)]
        unsafe fn widen_f16(group: [f16; GROUP]) -> [f32; GROUP] {
            let mut wide = [0.0; GROUP];
            for at in (0..GROUP).step_by(4) {
                // SAFETY: the four elements from `at` on are in the group; NEON is in the baseline.
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
                // SAFETY: the four elements from `at` on are in the group; NEON is in the baseline.
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
