//! The arithmetic of the element types, as the check of `flexring perf` needs it.
//!
//! Owns what sums, products and averages of few exact numbers must give, written apart from the kernels that it
//! checks. Must not know which numbers are added, nor how many.

use flexring::Element;
use flexring::float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};
use std::fmt::Display;

/// An element type whose results can be foretold.
pub trait ExactElement: Element + PartialEq + PartialOrd + Display {
    /// How many base-4 digits a sum holds exactly, whichever digits they are.
    const SUM_DIGITS: usize;
    /// How many base-4 digits an average over `world` ranks shows apart, one rounding error or not.
    fn average_digits(world: usize) -> usize;
    /// What the digits of an average are counted in, if they are not whole ranks.
    const AVERAGE_UNIT: i64 = 1;
    /// How many base-4 digits the exponent of a power of [`BASE`](Self::BASE) has before powers repeat or overflow.
    const PRODUCT_DIGITS: usize;
    /// What products are powers of. Powers of 3 repeat last among the wrapping integers; for floats, 2 is exact.
    const BASE: i64;
    /// Whether there are negative numbers.
    const SIGNED: bool;

    /// A whole number of this type, wrapped into its range.
    fn of(value: i64) -> Self;
    /// Different numbers for different places from -50 to 114, none of them 0 but that for 0.
    fn distinct(place: i64) -> Self {
        Self::of(place)
    }
    /// A factor of a pre-multiplied sum for `rank`; neighbouring ranks have different ones.
    fn factor(rank: usize) -> f64;
    /// The number that gives 1 when multiplied by `factor`, exactly.
    fn inverse(factor: f64) -> Self;
    /// `factor` as a number of this type.
    fn of_factor(factor: f64) -> Self;
    /// The sum, wrapping.
    fn plus(self, other: Self) -> Self;
    /// The product, wrapping.
    fn times(self, other: Self) -> Self;
    /// The quotient by a number of ranks; integers truncate toward zero.
    fn over(self, ranks: usize) -> Self;
    /// Whether two numbers are equal but for one rounding error.
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
                // Digits are counted in units of the world, so that none is lost to truncation.
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
                // Every step of Newton's doubles the bits that are right, beginning with three.
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

            fn is_near(self, other: Self) -> bool {
                self == other
            }
        }
    )*};
}

integers! {
    i8: 3, 3;
    u8: 4, 3;
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
                // Three bits less than the mantissa has: quotients of neighbouring sums lie four of its steps apart.
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

// A sum of two digits is exact if only one of them is not 0, which two digits are enough for: they are one rank's and
// nobody's.
macro_rules! eight_bits {
    ($($ty:ident),*) => {$(
        impl ExactElement for $ty {
            const SUM_DIGITS: usize = 2;
            // Far from the subnormals, divided by any number of ranks that is tried.
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

            fn distinct(place: i64) -> Self {
                // One step of the type for one place: whole numbers are soon too far apart.
                Self::from_bits(place.unsigned_abs() as u8 | if place < 0 { 0x80 } else { 0 })
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

#[cfg(test)]
mod tests {
    use super::*;

    fn factors_can_be_undone<T: ExactElement>() {
        for rank in 0..200 {
            let factor = T::factor(rank);
            let product = T::inverse(factor).times(T::of_factor(factor));
            assert!(product == T::of(1), "{} gives {product}", T::DTYPE.name());
            assert_ne!(factor, T::factor(rank + 1), "neighbours differ");
        }
    }

    #[test]
    fn every_factor_has_an_exact_inverse() {
        factors_can_be_undone::<i8>();
        factors_can_be_undone::<u8>();
        factors_can_be_undone::<i32>();
        factors_can_be_undone::<u32>();
        factors_can_be_undone::<i64>();
        factors_can_be_undone::<u64>();
        factors_can_be_undone::<f16>();
        factors_can_be_undone::<bf16>();
        factors_can_be_undone::<f32>();
        factors_can_be_undone::<f64>();
        factors_can_be_undone::<F8E4M3>();
        factors_can_be_undone::<F8E5M2>();
    }

    #[test]
    fn averages_keep_their_digits() {
        assert_eq!([1, 2, 3, 8, 9, 42, 43].map(i8::average_digits), [3, 3, 2, 2, 1, 1, 0]);
        assert_eq!([1, 85, 86].map(u8::average_digits), [4, 1, 0]);
    }
}
