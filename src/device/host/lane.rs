//! How elements are stored, and how they become accumulators and are rounded back.
//!
//! Owns the conversions of f16 and bf16. Must not know any arithmetic, nor more of instruction sets than that
//! they can convert f16 faster than plain code.

use super::instructions::Instructions;
use super::number::Number;
use half::{bf16, f16};

/// A stored element.
pub(super) trait Lane: Copy {
    /// What its values are accumulated in.
    type Acc: Number;

    /// Whether [`widen`](Self::widen) and [`narrow`](Self::narrow) are cheap enough for the inside of a loop
    /// that does something else, too. Otherwise whole tiles are converted at a time.
    const DIRECT: bool = true;

    /// The element's value, exactly.
    fn widen(self) -> Self::Acc;

    /// The element nearest to a value; ties go to the even one.
    fn narrow(value: Self::Acc) -> Self;

    /// Widens `len` elements.
    ///
    /// # Safety
    /// `from` is aligned and valid for reads of `len` elements, `into` for writes; they do not overlap. The
    /// processor has the instructions `I`.
    #[inline(always)]
    unsafe fn widen_all<I: Instructions>(into: *mut Self::Acc, from: *const Self, len: usize) {
        for i in 0..len {
            // SAFETY: i < len, for which the caller vouches.
            unsafe { *into.add(i) = (*from.add(i)).widen() };
        }
    }

    /// Narrows `len` values.
    ///
    /// # Safety
    /// As [`widen_all`](Self::widen_all).
    #[inline(always)]
    unsafe fn narrow_all<I: Instructions>(into: *mut Self, from: *const Self::Acc, len: usize) {
        for i in 0..len {
            // SAFETY: i < len, for which the caller vouches.
            unsafe { *into.add(i) = Self::narrow(*from.add(i)) };
        }
    }
}

macro_rules! its_own_accumulator {
    ($($ty:ty),*) => {$(
        impl Lane for $ty {
            type Acc = Self;

            #[inline(always)]
            fn widen(self) -> Self {
                self
            }

            #[inline(always)]
            fn narrow(value: Self) -> Self {
                value
            }
        }
    )*};
}

its_own_accumulator!(i8, u8, i32, u32, i64, u64, f32, f64);

impl Lane for bf16 {
    type Acc = f32;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        // Carries into the upper half when the lower one is beyond the middle, or on it with an odd upper half.
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        // Cut off, a NaN could become an infinity.
        let quiet = bits >> 16 | 0x40;
        Self::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
    }
}

// What F16C and NEON do in one instruction, in steps that any vector unit can do. (The conversions of the
// `half` crate branch, which keeps loops scalar.)
impl Lane for f16 {
    type Acc = f32;
    const DIRECT: bool = false;

    #[inline(always)]
    fn widen(self) -> f32 {
        /// What an exponent of f16 lacks to be one of f32.
        const REBIAS: u32 = (127 - 15) << 23;
        let bits = u32::from(self.to_bits());
        let sign = (bits & 0x8000) << 16;
        let magnitude = (bits & 0x7fff) << 13;
        // A subnormal is m * 2^-24: as the fraction of a number with the exponent -14, it has a leading one too many.
        let one = 1 << 23;
        let least = f32::from_bits(REBIAS + one);
        let subnormal = f32::from_bits(REBIAS + one + magnitude) - least;
        let wide = if magnitude < one {
            subnormal.to_bits()
        } else if magnitude >= 31 << 23 {
            // Infinities and NaNs have the largest exponent in both.
            magnitude + 2 * REBIAS
        } else {
            magnitude + REBIAS
        };
        f32::from_bits(sign | wide)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        const REBIAS: u32 = (127 - 15) << 23;
        let bits = value.to_bits();
        let sign = bits >> 16 & 0x8000;
        let magnitude = bits & 0x7fff_ffff;
        // The spacing of floats from a half on is that of subnormal f16: the addition rounds.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let normal = (magnitude + 0xfff + (magnitude >> 13 & 1)).wrapping_sub(REBIAS) >> 13;
        let beyond = if value.is_nan() { 0x7e00 } else { 0x7c00 };
        let short = if magnitude < REBIAS + (1 << 23) {
            subnormal
        } else if magnitude >= 65536f32.to_bits() {
            beyond
        } else {
            normal
        };
        Self::from_bits((sign | short) as u16)
    }

    #[inline(always)]
    unsafe fn widen_all<I: Instructions>(into: *mut f32, from: *const Self, len: usize) {
        // SAFETY: the caller's promise is the same.
        unsafe { I::widen_f16(into, from, len) }
    }

    #[inline(always)]
    unsafe fn narrow_all<I: Instructions>(into: *mut Self, from: *const f32, len: usize) {
        // SAFETY: the caller's promise is the same.
        unsafe { I::narrow_f16(into, from, len) }
    }
}
