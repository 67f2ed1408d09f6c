//! How elements are stored, and how they become accumulators and are rounded back.
//!
//! Owns the conversions of f16 and bf16; those of eight bits have their own. Must not know any arithmetic, nor more of instruction sets than that
//! they can convert f16 faster than plain code.

use super::instructions::Instructions;
use super::number::Number;
use crate::float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};

/// How many elements are read, combined and written at a time, whatever their type. Sixteen f32 are one vector of
/// the widest sort, and leave most registers free.
pub(super) const GROUP: usize = 16;

/// A stored element.
pub(super) trait Lane: Copy {
    /// What its values are accumulated in.
    type Acc: Number;

    /// The element's value, exactly.
    fn widen(self) -> Self::Acc;

    /// The element nearest to a value; ties go to the even one.
    fn narrow(value: Self::Acc) -> Self;

    /// Reads and widens a group.
    ///
    /// # Safety
    /// `from` is valid for reads of a group. The processor has the instructions `I`.
    #[inline(always)]
    unsafe fn load<I: Instructions>(from: *const Self) -> [Self::Acc; GROUP] {
        // SAFETY: the caller vouches for a group.
        unsafe { from.cast::<[Self; GROUP]>().read_unaligned() }.map(Self::widen)
    }

    /// Narrows a group.
    ///
    /// # Safety
    /// The processor has the instructions `I`.
    #[inline(always)]
    unsafe fn round<I: Instructions>(values: [Self::Acc; GROUP]) -> [Self; GROUP] {
        values.map(Self::narrow)
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

// Sixteen-bit elements are handled in pairs, each in a 32-bit word, so that nothing is ever wider or narrower than
// a float's bits: compilers vectorise that as it stands, but give up on conversions between vectors of 16 and
// 32 bits. (Measured with bf16, k=2, in the cache: 7 GB/s as sixteen numbers, 31 GB/s as eight pairs.) The
// elements of a group are thereby reordered, which no arithmetic minds, and `round` puts them back.

/// The elements of one half of each pair, then those of the other.
#[inline(always)]
pub(super) fn widen_pairs<T>(
    pairs: [u32; GROUP / 2],
    low: impl Fn(u32) -> T,
    high: impl Fn(u32) -> T,
) -> [T; GROUP] {
    std::array::from_fn(|i| if i < GROUP / 2 { low(pairs[i]) } else { high(pairs[i - GROUP / 2]) })
}

#[inline(always)]
pub(super) fn narrow_pairs<T: Copy>(values: [T; GROUP], join: impl Fn(T, T) -> u32) -> [u32; GROUP / 2] {
    std::array::from_fn(|i| join(values[i], values[i + GROUP / 2]))
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
        // SAFETY: the caller vouches for a group.
        let pairs = unsafe { from.cast::<[u32; GROUP / 2]>().read_unaligned() };
        widen_pairs(pairs, |pair| f32::from_bits(pair << 16), |pair| f32::from_bits(pair & 0xffff_0000))
    }

    #[inline(always)]
    unsafe fn round<I: Instructions>(values: [f32; GROUP]) -> [Self; GROUP] {
        let pairs = narrow_pairs(values, |low, high| {
            bf16_in_upper_half(low) >> 16 | bf16_in_upper_half(high) & 0xffff_0000
        });
        // SAFETY: both are as large, and all bits are a bf16.
        unsafe { std::mem::transmute(pairs) }
    }
}

/// The bits of the nearest bf16, in the upper half; what is in the lower one does not matter.
#[inline(always)]
fn bf16_in_upper_half(value: f32) -> u32 {
    let bits = value.to_bits();
    // Carries into the upper half when the lower one is beyond the middle, or on it with an odd upper half.
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    // Cut off, a NaN could become an infinity.
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
        // SAFETY: the caller vouches for a group and for the instructions.
        unsafe { I::widen_f16(from.cast::<[Self; GROUP]>().read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn round<I: Instructions>(values: [f32; GROUP]) -> [Self; GROUP] {
        // SAFETY: the caller vouches for the instructions.
        unsafe { I::narrow_f16(values) }
    }
}

macro_rules! eight_bits {
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

eight_bits!(F8E4M3, F8E5M2);

/// What an exponent of f16 lacks to be one of f32.
const REBIAS: u32 = (127 - 15) << 23;

/// The float that an f16's bits stand for. (The `half` crate's own conversion branches, and so stays scalar.)
#[inline(always)]
pub(super) fn f16_to_f32(bits: u32) -> f32 {
    const ONE: u32 = 1 << 23;
    let sign = (bits & 0x8000) << 16;
    let magnitude = (bits & 0x7fff) << 13;
    // A subnormal is m * 2^-24: as the fraction of a number with the exponent -14, it has a leading one too many.
    let subnormal = f32::from_bits(REBIAS + ONE + magnitude) - f32::from_bits(REBIAS + ONE);
    // Infinities and NaNs have the largest exponent in both formats.
    let beyond = if magnitude >= 31 << 23 { REBIAS } else { 0 };
    let normal = magnitude + REBIAS + beyond;
    f32::from_bits(sign | if magnitude < ONE { subnormal.to_bits() } else { normal })
}

/// The bits of the f16 nearest to a float.
#[inline(always)]
pub(super) fn f32_to_f16(value: f32) -> u32 {
    let bits = value.to_bits();
    let sign = bits >> 16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // The spacing of floats from a half on is that of subnormal f16: the addition rounds.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let normal = (magnitude + 0xfff + (magnitude >> 13 & 1)).wrapping_sub(REBIAS) >> 13;
    let beyond = if value.is_nan() { 0x7e00 } else { 0x7c00 };
    let finite = if magnitude < REBIAS + (1 << 23) { subnormal } else { normal };
    sign | if magnitude >= 65536f32.to_bits() { beyond } else { finite }
}
