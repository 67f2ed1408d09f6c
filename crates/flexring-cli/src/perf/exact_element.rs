//! The arithmetic of the element types for the check of `flexring perf`.
//!
//! Owns sums, products and averages of numbers that are exact in each type, independent of the kernels that
//! are checked.

use flexring::{Boolean, Element};
use flexring_core::float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};
use std::fmt::Display;

/// An element type with predictable results for small numbers.
pub trait ExactElement: Element + PartialEq + PartialOrd + Display {
    /// The number of base-4 digits that a sum holds exactly, for any digits.
    const SUM_DIGITS: usize;
    /// The number of base-4 digits that an average over `world` ranks distinguishes despite one rounding
    /// error.
    fn average_digits(world: usize) -> usize;
    /// The unit of the digits of an average of floats.
    const AVERAGE_UNIT: i64 = 1;
    /// The number of base-4 digits in the exponent of [`BASE`](Self::BASE) before its powers repeat or
    /// overflow.
    const PRODUCT_DIGITS: usize;
    /// The base of products. Powers of 3 have the longest period among wrapping integers; powers of 2 are
    /// exact in floats.
    const BASE: i64;
    /// Whether the type has negative numbers.
    const SIGNED: bool;

    /// The whole number `value`, wrapped into the range of the type.
    fn of(value: i64) -> Self;
    /// A number for each index from -50 to 114, in ascending order of the index; 0 for index 0 only.
    fn distinct(index: i64) -> Self {
        Self::of(index)
    }
    /// The factor of `rank` in a pre-multiplied sum. Consecutive ranks have different factors.
    fn factor(rank: usize) -> f64;
    /// The exact inverse: `inverse(factor)` times `factor` is 1.
    fn inverse(factor: f64) -> Self;
    /// Converts a factor to this type.
    fn of_factor(factor: f64) -> Self;
    /// Sum; wrapping for integers.
    fn plus(self, other: Self) -> Self;
    /// Product; wrapping for integers.
    fn times(self, other: Self) -> Self;
    /// Quotient by a number of ranks; integers truncate toward zero.
    fn over(self, ranks: usize) -> Self;
    /// The number of bits that bitwise operations distinguish; 0 for types without such operations.
    const BITS: usize = 0;
    /// The element with one bit, less than [`BITS`](Self::BITS).
    fn bit(_index: usize) -> Self {
        Self::default()
    }
    /// The bits that `self` does not have.
    fn complement(self) -> Self {
        self
    }
    /// The bits that both elements have.
    fn common_bits(self, _other: Self) -> Self {
        self
    }
    /// The bits that one of the two elements has, but not the other.
    fn different_bits(self, _other: Self) -> Self {
        self
    }
    /// Whether two numbers differ by one rounding error at most; integers must be equal.
    fn is_near(self, other: Self) -> bool;
}

macro_rules! integers {
    ($($ty:ident: $digits:literal, $product_digits:literal;)*) => {$(
        impl ExactElement for $ty {
            const SUM_DIGITS: usize = $digits;
            const PRODUCT_DIGITS: usize = $product_digits;
            const BASE: i64 = 3;
            const SIGNED: bool = $ty::MIN != 0;

            fn average_digits(world: usize) -> usize {
                // The unit of the digits is the number of ranks, so that no digit is lost to truncation.
                let fits = |digits: &usize| ((1i128 << (2 * *digits)) - 1) * world as i128 <= i128::from($ty::MAX);
                (1..=$digits).take_while(fits).last().unwrap_or(0)
            }

            fn of(value: i64) -> Self {
                value as Self
            }

            fn factor(rank: usize) -> f64 {
                // Odd numbers have an inverse among the wrapping integers.
                (2 * (rank % 64) + 1) as f64
            }

            fn inverse(factor: f64) -> Self {
                // Every Newton step doubles the number of correct bits, which is three at the start.
                let factor = Self::of_factor(factor);
                (0..5).fold(factor, |inverse, _| {
                    inverse.wrapping_mul(Self::of(2).wrapping_sub(factor.wrapping_mul(inverse)))
                })
            }

            fn of_factor(factor: f64) -> Self {
                factor as Self
            }

            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            fn times(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            fn over(self, ranks: usize) -> Self {
                (i128::from(self) / ranks as i128) as Self
            }

            const BITS: usize = $ty::BITS as usize;

            fn bit(index: usize) -> Self {
                1 << index
            }

            fn complement(self) -> Self {
                !self
            }

            fn common_bits(self, other: Self) -> Self {
                self & other
            }

            fn different_bits(self, other: Self) -> Self {
                self ^ other
            }

            fn is_near(self, other: Self) -> bool {
                self == other
            }
        }
    )*};
}

integers! {
    i8: 3, 3;
    u8: 4, 3;
    i16: 7, 7;
    u16: 8, 7;
    i32: 15, 15;
    u32: 16, 15;
    i64: 31, 31;
    u64: 32, 31;
}

macro_rules! floats {
    ($($ty:ident: $digits:literal, $average_digits:literal, $product_digits:literal, $from:expr, $to:expr;)*) => {$(
        impl ExactElement for $ty {
            const SUM_DIGITS: usize = $digits;
            const PRODUCT_DIGITS: usize = $product_digits;
            const BASE: i64 = 2;
            const SIGNED: bool = true;

            fn average_digits(_world: usize) -> usize {
                // Three bits less than the mantissa: quotients of adjacent sums are at least four units in
                // the last place apart.
                $average_digits
            }

            fn of(value: i64) -> Self {
                $from(value as f64)
            }

            fn factor(rank: usize) -> f64 {
                f64::from((rank % 15) as i32 - 7).exp2()
            }

            fn inverse(factor: f64) -> Self {
                $from(1.0 / factor)
            }

            fn of_factor(factor: f64) -> Self {
                $from(factor)
            }

            fn plus(self, other: Self) -> Self {
                self + other
            }

            fn times(self, other: Self) -> Self {
                self * other
            }

            fn over(self, ranks: usize) -> Self {
                $from($to(self) / ranks as f64)
            }

            fn is_near(self, other: Self) -> bool {
                self.to_bits().abs_diff(other.to_bits()) <= 1
            }
        }
    )*};
}

floats! {
    f16: 5, 4, 2, f16::from_f64, f16::to_f64;
    bf16: 4, 2, 3, bf16::from_f64, bf16::to_f64;
    f32: 12, 10, 3, |value| value as f32, f64::from;
    f64: 26, 25, 5, |value| value, |value: f64| value;
}

// With two digits, one belongs to a rank and one to no rank. A sum has then at most one digit that is not 0,
// and is exact.
macro_rules! eight_bits {
    ($($ty:ident),*) => {$(
        impl ExactElement for $ty {
            const SUM_DIGITS: usize = 2;
            // Stays above the subnormals when divided by any number of ranks in the tests.
            const AVERAGE_UNIT: i64 = 16;
            const PRODUCT_DIGITS: usize = 2;
            const BASE: i64 = 2;
            const SIGNED: bool = true;

            fn average_digits(_world: usize) -> usize {
                2
            }

            fn of(value: i64) -> Self {
                Self::from_f32(value as f32)
            }

            fn distinct(index: i64) -> Self {
                // Consecutive bit patterns, because whole numbers above 8 or 16 are not all exact in eight
                // bits.
                Self::from_bits(index.unsigned_abs() as u8 | if index < 0 { 0x80 } else { 0 })
            }

            fn factor(rank: usize) -> f64 {
                f64::from((rank % 9) as i32 - 4).exp2()
            }

            fn inverse(factor: f64) -> Self {
                Self::from_f32(1.0 / factor as f32)
            }

            fn of_factor(factor: f64) -> Self {
                Self::from_f32(factor as f32)
            }

            fn plus(self, other: Self) -> Self {
                Self::from_f32(self.to_f32() + other.to_f32())
            }

            fn times(self, other: Self) -> Self {
                Self::from_f32(self.to_f32() * other.to_f32())
            }

            fn over(self, ranks: usize) -> Self {
                Self::from_f32(self.to_f32() / ranks as f32)
            }

            fn is_near(self, other: Self) -> bool {
                self.to_bits().abs_diff(other.to_bits()) <= 1
            }
        }
    )*};
}

eight_bits!(F8E4M3, F8E5M2);

/// Sums of truth values are true if any of them is, products if all are.
impl ExactElement for Boolean {
    const SUM_DIGITS: usize = 1;
    const PRODUCT_DIGITS: usize = 1;
    const BASE: i64 = 1;
    const SIGNED: bool = false;
    const BITS: usize = 1;

    fn average_digits(_world: usize) -> usize {
        1
    }

    fn of(value: i64) -> Self {
        (value != 0).into()
    }

    fn distinct(index: i64) -> Self {
        // Odd numbers are true, so that the elements of a copy differ.
        (index % 2 != 0).into()
    }

    fn factor(rank: usize) -> f64 {
        (1 + rank % 2) as f64
    }

    fn inverse(_factor: f64) -> Self {
        true.into()
    }

    fn of_factor(factor: f64) -> Self {
        (factor != 0.0).into()
    }

    fn plus(self, other: Self) -> Self {
        (self.is_true() | other.is_true()).into()
    }

    fn times(self, other: Self) -> Self {
        (self.is_true() & other.is_true()).into()
    }

    fn over(self, _ranks: usize) -> Self {
        self
    }

    fn bit(_index: usize) -> Self {
        true.into()
    }

    fn complement(self) -> Self {
        (!self.is_true()).into()
    }

    fn common_bits(self, other: Self) -> Self {
        (self.is_true() & other.is_true()).into()
    }

    fn different_bits(self, other: Self) -> Self {
        (self.is_true() != other.is_true()).into()
    }

    fn is_near(self, other: Self) -> bool {
        self == other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factors_have_inverses<T: ExactElement>() {
        for rank in 0..200 {
            let factor = T::factor(rank);
            let product = T::inverse(factor).times(T::of_factor(factor));
            assert!(product == T::of(1), "{} gives {product}", T::DTYPE.name());
            assert_ne!(factor, T::factor(rank + 1), "consecutive ranks have different factors");
        }
    }

    #[test]
    fn every_factor_has_an_exact_inverse() {
        factors_have_inverses::<i8>();
        factors_have_inverses::<u8>();
        factors_have_inverses::<i16>();
        factors_have_inverses::<u16>();
        factors_have_inverses::<i32>();
        factors_have_inverses::<u32>();
        factors_have_inverses::<i64>();
        factors_have_inverses::<u64>();
        factors_have_inverses::<f16>();
        factors_have_inverses::<bf16>();
        factors_have_inverses::<f32>();
        factors_have_inverses::<f64>();
        factors_have_inverses::<F8E4M3>();
        factors_have_inverses::<F8E5M2>();
    }

    #[test]
    fn averages_have_fewer_digits_in_larger_worlds() {
        assert_eq!([1, 2, 3, 8, 9, 42, 43].map(i8::average_digits), [3, 3, 2, 2, 1, 1, 0]);
        assert_eq!([1, 85, 86].map(u8::average_digits), [4, 1, 0]);
    }
}
