//! Element types: how they are stored, and how they are widened to accumulators and rounded back.
//!
//! Owns the choice of the accumulator, and the rounding of bf16.

use super::conversion::{GROUP, f16_to_f32, f32_to_f16, narrow_pairs, widen_pairs};
use super::instructions::Instructions;
use super::number::{Number, Truth};
use crate::dtype::Boolean;
use crate::float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};

/// An element type, as it is stored.
pub(super) trait Lane: Copy {
    /// The type that values are accumulated in.
    type Acc: Number;

    /// The value of the element, which the accumulator represents exactly.
    fn widen(self) -> Self::Acc;

    /// The element nearest to a value; ties go to the even one.
    fn narrow(value: Self::Acc) -> Self;

    /// Reads and widens a group, possibly in another order than in memory.
    ///
    /// # Safety
    /// `from` is valid for reads of a group. The processor has the instructions `I`.
    #[inline(always)]
    unsafe fn load<I: Instructions>(from: *const Self) -> [Self::Acc; GROUP] {
        // SAFETY: the caller guarantees a readable group.
        unsafe { from.cast::<[Self; GROUP]>().read_unaligned() }.map(Self::widen)
    }

    /// Narrows a group, and undoes the reordering of [`load`](Self::load).
    ///
    /// # Safety
    /// The processor has the instructions `I`.
    #[inline(always)]
    unsafe fn round<I: Instructions>(values: [Self::Acc; GROUP]) -> [Self; GROUP] {
        values.map(Self::narrow)
    }
}

macro_rules! exact_accumulator {
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

exact_accumulator!(i8, u8, i16, u16, i32, u32, i64, u64, f32, f64);

impl Lane for Boolean {
    type Acc = Truth;

    #[inline(always)]
    fn widen(self) -> Truth {
        Truth::of(self.is_true())
    }

    #[inline(always)]
    fn narrow(value: Truth) -> Self {
        value.is_true().into()
    }
}

impl Lane for bf16 {
    type Acc = f32;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self::from_bits((bf16_in_upper_half(value) >> 16) as u16)
    }

    #[inline(always)]
    unsafe fn load<I: Instructions>(from: *const Self) -> [f32; GROUP] {
        // SAFETY: the caller guarantees a readable group.
        let pairs = unsafe { from.cast::<[u32; GROUP / 2]>().read_unaligned() };
        widen_pairs(pairs, |pair| f32::from_bits(pair << 16), |pair| f32::from_bits(pair & 0xffff_0000))
    }

    #[inline(always)]
    unsafe fn round<I: Instructions>(values: [f32; GROUP]) -> [Self; GROUP] {
        let pairs = narrow_pairs(values, |low, high| {
            bf16_in_upper_half(low) >> 16 | bf16_in_upper_half(high) & 0xffff_0000
        });
        // SAFETY: both types have the same size, and every bit pattern is a bf16.
        unsafe { std::mem::transmute(pairs) }
    }
}

/// The bits of the nearest bf16 in the upper half; the lower half is undefined.
#[inline(always)]
fn bf16_in_upper_half(value: f32) -> u32 {
    let bits = value.to_bits();
    // Carries into the upper half if the lower half is above the middle, or at the middle with an odd upper
    // half.
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    // Truncation could turn a NaN into an infinity.
    let quiet = bits | 0x0040_0000;
    if value.is_nan() { quiet } else { rounded }
}

impl Lane for f16 {
    type Acc = f32;

    #[inline(always)]
    fn widen(self) -> f32 {
        f16_to_f32(u32::from(self.to_bits()))
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        Self::from_bits(f32_to_f16(value) as u16)
    }

    #[inline(always)]
    unsafe fn load<I: Instructions>(from: *const Self) -> [f32; GROUP] {
        // SAFETY: the caller guarantees a readable group and the instructions.
        unsafe { I::widen_f16(from.cast::<[Self; GROUP]>().read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn round<I: Instructions>(values: [f32; GROUP]) -> [Self; GROUP] {
        // SAFETY: the caller guarantees the instructions.
        unsafe { I::narrow_f16(values) }
    }
}

macro_rules! float8 {
    ($($ty:ty),*) => {$(
        impl Lane for $ty {
            type Acc = f32;

            #[inline(always)]
            fn widen(self) -> f32 {
                self.to_f32()
            }

            #[inline(always)]
            fn narrow(value: f32) -> Self {
                Self::from_f32(value)
            }
        }
    )*};
}

float8!(F8E4M3, F8E5M2);
