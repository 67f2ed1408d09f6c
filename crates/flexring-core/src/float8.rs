//! 8-bit floats as the Open Compute Project defines them and PyTorch rounds them.
//!
//! Owns their bits and conversions, which are free of branches so that loops over them vectorise. There is no
//! arithmetic: reductions accumulate in f32.
//!
//! We keep our own types instead of a crate: conversions must round exactly like the GPU kernels, overflow to
//! NaN in E4M3, and vectorise.

use std::cmp::Ordering;
use std::fmt;

/// Four exponent bits and three mantissa bits. There are no infinities: values that round beyond 448, the
/// largest number, become NaN.
///
/// ```
/// # use flexring_core::float8::F8E4M3;
/// assert_eq!(F8E4M3::from_f32(3.3).to_f32(), 3.25);
/// ```
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct F8E4M3(u8);

/// Five exponent bits and two mantissa bits: the upper half of an f16, including infinities.
///
/// ```
/// # use flexring_core::float8::F8E5M2;
/// assert_eq!(F8E5M2::from_f32(3.3).to_f32(), 3.5);
/// ```
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct F8E5M2(u8);

impl F8E4M3 {
    /// The largest number, 448.
    pub const MAX: Self = Self(0x7e);

    /// A quiet NaN.
    pub const NAN: Self = Self(0x7f);

    /// Rounds `value` to the nearest number, ties to even.
    #[inline(always)]
    #[must_use]
    pub const fn from_f32(value: f32) -> Self {
        let (sign, magnitude) = parts(value);
        // f32 values from 2^14 on are spaced like this type's subnormals, so the addition rounds.
        let subnormal = (f32::from_bits(magnitude) + 16384.0).to_bits().wrapping_sub(141 << 23);
        let normal = magnitude.wrapping_add(0x7ffff + (magnitude >> 20 & 1)).wrapping_sub(120 << 23) >> 20;
        let finite = if magnitude < 121 << 23 { subnormal } else { normal };
        // The tie between 448 and the next step rounds to 448, which is even.
        let bits = if magnitude > 464f32.to_bits() { 0x7f } else { finite };
        Self((sign | bits) as u8)
    }

    /// Converts to f32, exactly.
    #[inline(always)]
    #[must_use]
    pub const fn to_f32(self) -> f32 {
        let value = widened(self.0, 20, 120);
        let bits = if self.0 & 0x7f == 0x7f { value.to_bits() | 0x7fc0_0000 } else { value.to_bits() };
        f32::from_bits(bits)
    }

    /// Whether this is a NaN.
    #[must_use]
    pub const fn is_nan(self) -> bool {
        self.0 & 0x7f == 0x7f
    }
}

impl F8E5M2 {
    /// The largest finite number, 57344.
    pub const MAX: Self = Self(0x7b);

    /// Positive infinity.
    pub const INFINITY: Self = Self(0x7c);

    /// A quiet NaN.
    pub const NAN: Self = Self(0x7e);

    /// Rounds `value` to the nearest number, ties to even.
    #[inline(always)]
    #[must_use]
    pub const fn from_f32(value: f32) -> Self {
        let (sign, magnitude) = parts(value);
        // f32 values from 2^7 on are spaced like this type's subnormals, so the addition rounds.
        let subnormal = (f32::from_bits(magnitude) + 128.0).to_bits().wrapping_sub(134 << 23);
        let normal = magnitude.wrapping_add(0xfffff + (magnitude >> 21 & 1)).wrapping_sub(112 << 23) >> 21;
        let finite = if magnitude < 113 << 23 { subnormal } else { normal };
        let beyond = if magnitude > f32::INFINITY.to_bits() { 0x7e } else { 0x7c };
        let bits = if magnitude >= 65536f32.to_bits() { beyond } else { finite };
        Self((sign | bits) as u8)
    }

    /// Converts to f32, exactly.
    #[inline(always)]
    #[must_use]
    pub const fn to_f32(self) -> f32 {
        let value = widened(self.0, 21, 112);
        // Infinities and NaNs have the largest exponent in both formats.
        let bits = if self.0 & 0x7c == 0x7c { value.to_bits() | 0x7f80_0000 } else { value.to_bits() };
        f32::from_bits(bits)
    }

    /// Whether this is a NaN.
    #[must_use]
    pub const fn is_nan(self) -> bool {
        self.0 & 0x7f > 0x7c
    }
}

/// Splits a float into its sign, moved to bit 7, and its other bits.
#[inline(always)]
const fn parts(value: f32) -> (u32, u32) {
    (value.to_bits() >> 24 & 0x80, value.to_bits() & 0x7fff_ffff)
}

/// The f32 value of an 8-bit float whose mantissa ends `shift` bits from the right of f32's, and whose
/// exponent bias is `bias` less than f32's. Does not multiply a subnormal f32, which is slow on many
/// processors.
#[inline(always)]
const fn widened(bits: u8, shift: u32, bias: u32) -> f32 {
    const ONE: u32 = 1 << 23;
    let sign = (bits as u32 & 0x80) << 24;
    let magnitude = (bits as u32 & 0x7f) << shift;
    // As the fraction of a number with the least exponent, a subnormal has a leading one too many.
    let least = (bias << 23) + ONE;
    let subnormal = f32::from_bits(least + magnitude) - f32::from_bits(least);
    let normal = magnitude + (bias << 23);
    f32::from_bits(sign | if magnitude < ONE { subnormal.to_bits() } else { normal })
}

macro_rules! common {
    ($($ty:ident),*) => {$(
        impl $ty {
            /// The number with these bits.
            #[inline(always)]
            #[must_use]
            pub const fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            /// The bits of this number.
            #[inline(always)]
            #[must_use]
            pub const fn to_bits(self) -> u8 {
                self.0
            }
        }

        impl PartialEq for $ty {
            fn eq(&self, other: &Self) -> bool {
                self.to_f32() == other.to_f32()
            }
        }

        impl PartialOrd for $ty {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                self.to_f32().partial_cmp(&other.to_f32())
            }
        }

        impl From<$ty> for f32 {
            fn from(value: $ty) -> Self {
                value.to_f32()
            }
        }

        impl fmt::Debug for $ty {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.to_f32(), f)
            }
        }

        impl fmt::Display for $ty {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.to_f32(), f)
            }
        }
    )*};
}

common!(F8E4M3, F8E5M2);

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    /// The value of the bits by definition.
    fn value(bits: u8, mantissa: u32, bias: i32) -> f64 {
        let (exponent, fraction) = (i32::from(bits & 0x7f) >> mantissa, bits & ((1 << mantissa) - 1));
        let fraction = f64::from(fraction) / f64::from(1 << mantissa);
        let magnitude = match exponent {
            0 => fraction * f64::from(1 - bias).exp2(),
            _ => (1.0 + fraction) * f64::from(exponent - bias).exp2(),
        };
        if bits < 0x80 { magnitude } else { -magnitude }
    }

    #[test]
    fn all_values_match_the_definition() {
        for bits in 0..=u8::MAX {
            let (e4m3, e5m2) = (F8E4M3::from_bits(bits), F8E5M2::from_bits(bits));
            if bits & 0x7f == 0x7f {
                assert!(e4m3.is_nan() && e4m3.to_f32().is_nan());
            } else {
                assert_eq!(f64::from(e4m3.to_f32()), value(bits, 3, 7));
                assert_eq!(F8E4M3::from_f32(e4m3.to_f32()).to_bits(), bits);
            }
            let half = f16::from_bits(u16::from(bits) << 8).to_f32();
            assert_eq!(e5m2.is_nan(), half.is_nan());
            if half.is_nan() {
                assert!(e5m2.to_f32().is_nan() && F8E5M2::from_f32(half).is_nan());
            } else {
                assert_eq!(e5m2.to_f32().to_bits(), half.to_bits());
                assert_eq!(F8E5M2::from_f32(half).to_bits(), bits);
            }
        }
        assert!(F8E4M3::from_f32(f32::NAN).is_nan() && F8E4M3::from_f32(f32::INFINITY).is_nan());
        assert_eq!(F8E4M3::MAX.to_f32(), 448.0);
        assert_eq!(F8E5M2::MAX.to_f32(), 57344.0);
    }

    /// Checks the values between two neighbours: each half rounds to the nearer one, and the middle to the
    /// even one.
    fn check_rounding(low: f32, high: f32, even: u8, odd: u8, narrow: fn(f32) -> u8, even_is_low: bool) {
        let middle = (low + high) / 2.0;
        let (below, above) = (f32::from_bits(middle.to_bits() - 1), f32::from_bits(middle.to_bits() + 1));
        let (first, second) = if even_is_low { (even, odd) } else { (odd, even) };
        for (value, expected) in
            [(low, first), (below, first), (middle, even), (above, second), (high, second)]
        {
            assert_eq!(narrow(value), expected, "{value:e}");
            assert_eq!(narrow(-value), expected | 0x80, "-{value:e}");
        }
    }

    #[test]
    fn rounds_to_nearest_with_ties_to_even() {
        for bits in 0..0x7e_u8 {
            let narrow = |value| F8E4M3::from_f32(value).to_bits();
            let (low, high) = (F8E4M3(bits).to_f32(), F8E4M3(bits + 1).to_f32());
            let even = bits + (bits & 1);
            check_rounding(low, high, even, bits + 1 - (bits & 1), narrow, bits & 1 == 0);
        }
        for bits in 0..0x7c_u8 {
            let narrow = |value| F8E5M2::from_f32(value).to_bits();
            let (low, high) = (F8E5M2(bits).to_f32(), F8E5M2(bits + 1).to_f32());
            // Infinity takes the place of the next number.
            let high = if high.is_finite() { high } else { 65536.0 };
            check_rounding(low, high, bits + (bits & 1), bits + 1 - (bits & 1), narrow, bits & 1 == 0);
        }
        for (value, expected) in [(464.0, 0x7e), (464.1, 0x7f), (480.0, 0x7f), (1e30, 0x7f)] {
            assert_eq!(F8E4M3::from_f32(value).to_bits(), expected, "{value}");
        }
        assert_eq!(F8E5M2::from_f32(f32::INFINITY).to_bits(), 0x7c);
        assert_eq!(F8E5M2::from_f32(-1e30).to_bits(), 0xfc);
    }
}
