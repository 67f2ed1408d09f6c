//! Conversions of 16-bit floats in plain code, for groups of elements.
//!
//! Owns the size of a group and the conversions that need no instruction set.

/// The number of elements that are read, combined and written at a time, whatever their type. Sixteen f32
/// fill one register of the widest instruction set, and leave most registers free.
pub(super) const GROUP: usize = 16;

// 16-bit elements are handled in pairs, each in a 32-bit word, so that every value has the width of an f32:
// the compiler vectorizes such loops, but not conversions between vectors of 16 and 32 bits. (Measured with
// bf16, k=2, in the cache: 7 GB/s as sixteen numbers, 31 GB/s as eight pairs.) This reorders the elements of
// a group, which does not matter to elementwise arithmetic; `narrow_pairs` restores the order.

/// Splits pairs: the values of all low halves, then those of all high halves.
#[inline(always)]
pub(super) fn widen_pairs<T>(
    pairs: [u32; GROUP / 2],
    low: impl Fn(u32) -> T,
    high: impl Fn(u32) -> T,
) -> [T; GROUP] {
    std::array::from_fn(|i| if i < GROUP / 2 { low(pairs[i]) } else { high(pairs[i - GROUP / 2]) })
}

/// Joins values to pairs; the inverse of [`widen_pairs`].
#[inline(always)]
pub(super) fn narrow_pairs<T: Copy>(values: [T; GROUP], join: impl Fn(T, T) -> u32) -> [u32; GROUP / 2] {
    std::array::from_fn(|i| join(values[i], values[i + GROUP / 2]))
}

/// The difference between the exponent biases of f32 and f16, in place.
const REBIAS: u32 = (127 - 15) << 23;

/// The value of an f16, given by its bits. (The conversion of the `half` crate branches, so it is not
/// vectorized.)
#[inline(always)]
pub(super) fn f16_to_f32(bits: u32) -> f32 {
    const ONE: u32 = 1 << 23;
    let sign = (bits & 0x8000) << 16;
    let magnitude = (bits & 0x7fff) << 13;
    // A subnormal is m * 2^-24. As the fraction of a number with exponent -14 it has a leading one too many.
    let subnormal = f32::from_bits(REBIAS + ONE + magnitude) - f32::from_bits(REBIAS + ONE);
    // Infinities and NaNs have the largest exponent of either format.
    let beyond = if magnitude >= 31 << 23 { REBIAS } else { 0 };
    let normal = magnitude + REBIAS + beyond;
    f32::from_bits(sign | if magnitude < ONE { subnormal.to_bits() } else { normal })
}

/// The bits of the f16 nearest to a value; ties go to the even one.
#[inline(always)]
pub(super) fn f32_to_f16(value: f32) -> u32 {
    let bits = value.to_bits();
    let sign = bits >> 16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // Floats from 0.5 on are spaced like subnormal f16, so the addition rounds.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let normal = (magnitude + 0xfff + (magnitude >> 13 & 1)).wrapping_sub(REBIAS) >> 13;
    let beyond = if value.is_nan() { 0x7e00 } else { 0x7c00 };
    let finite = if magnitude < REBIAS + (1 << 23) { subnormal } else { normal };
    sign | if magnitude >= 65536f32.to_bits() { beyond } else { finite }
}
