//! The arithmetic of one accumulator.
//!
//! Owns addition, multiplication, maximum, minimum, factors and division for each accumulator type. All of it
//! is free of branches, so that the compiler can vectorize loops over it.

/// An accumulator type.
pub(super) trait Number: Copy {
    /// A number of ranks, prepared for division.
    type Divisor: Copy;

    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn maximum(self, other: Self) -> Self;
    fn minimum(self, other: Self) -> Self;

    /// `factor` converted to this type.
    fn factor(factor: f64) -> Self;

    /// Prepares a division by `ranks`, at least 2.
    fn divisor(ranks: u32) -> Self::Divisor;
    fn quotient(self, divisor: Self::Divisor) -> Self;
}

/// An accumulator type with bitwise operations.
pub(super) trait BitNumber: Number {
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
}

/// An operation on numbers `N` as a type, so that the compiler generates a loop for each.
pub(super) trait Combine<N> {
    fn combine(left: N, right: N) -> N;
}

macro_rules! combine {
    ($($name:ident = $trait:ident::$method:ident),*) => {$(
        pub(super) struct $name;
        impl<N: $trait> Combine<N> for $name {
            #[inline(always)]
            fn combine(left: N, right: N) -> N {
                left.$method(right)
            }
        }
    )*};
}

combine!(
    Sum = Number::sum,
    Prod = Number::product,
    Max = Number::maximum,
    Min = Number::minimum,
    BitAnd = BitNumber::and,
    BitOr = BitNumber::or,
    BitXor = BitNumber::xor
);

macro_rules! float {
    ($($ty:ident),*) => {$(
        impl Number for $ty {
            type Divisor = $ty;

            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self * other
            }

            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                let larger = if self > other { self } else { other };
                // Equal numbers have equal bits, except for zeros: the result is -0 only if both are.
                let tie = Self::from_bits(self.to_bits() & other.to_bits());
                let value = if self == other { tie } else { larger };
                // If `other` is NaN, the comparison above has chosen it.
                if self.is_nan() { self } else { value }
            }

            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                let smaller = if self < other { self } else { other };
                // As above, but the result is -0 if either zero is.
                let tie = Self::from_bits(self.to_bits() | other.to_bits());
                let value = if self == other { tie } else { smaller };
                if self.is_nan() { self } else { value }
            }

            #[inline(always)]
            fn factor(factor: f64) -> Self {
                factor as Self
            }

            #[inline(always)]
            fn divisor(ranks: u32) -> Self {
                ranks as Self
            }

            #[inline(always)]
            fn quotient(self, divisor: Self) -> Self {
                self / divisor
            }
        }
    )*};
}

float!(f32, f64);

macro_rules! integer {
    ($($ty:ident: $divisor:ty, $prepare:expr, $divide:expr;)*) => {$(
        impl Number for $ty {
            type Divisor = $divisor;

            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn maximum(self, other: Self) -> Self {
                self.max(other)
            }

            #[inline(always)]
            fn minimum(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline(always)]
            fn factor(factor: f64) -> Self {
                factor as Self
            }

            #[inline(always)]
            fn divisor(ranks: u32) -> Self::Divisor {
                $prepare(ranks)
            }

            #[inline(always)]
            fn quotient(self, divisor: Self::Divisor) -> Self {
                $divide(self, divisor)
            }
        }

        impl BitNumber for $ty {
            #[inline(always)]
            fn and(self, other: Self) -> Self {
                self & other
            }

            #[inline(always)]
            fn or(self, other: Self) -> Self {
                self | other
            }

            #[inline(always)]
            fn xor(self, other: Self) -> Self {
                self ^ other
            }
        }
    )*};
}

// Processors have no vector division of integers, so these multiply by a reciprocal or divide as floats.
integer! {
    i8: i32, reciprocal_8, |a: i8, n: i32| {
        // The product is slightly too large in magnitude, so for negative numbers the shift gives the
        // quotient minus 1.
        let a = i32::from(a);
        (((a * n) >> 16) - (a >> 31)) as i8
    };
    u8: i32, reciprocal_8, |a: u8, n: i32| ((i32::from(a) * n) >> 16) as u8;
    // As for 32-bit numbers below, with the precision of an f32.
    i16: f32, |ranks: u32| ranks as f32, |a: i16, n: f32| {
        // SAFETY: n >= 2, so the quotient is finite and fits.
        unsafe { (f32::from(a) / n).to_int_unchecked::<i32>() as i16 }
    };
    u16: f32, |ranks: u32| ranks as f32, |a: u16, n: f32| {
        // SAFETY: n >= 2, so the quotient is finite and fits.
        unsafe { (f32::from(a) / n).to_int_unchecked::<i32>() as u16 }
    };
    // A quotient a / n of 32-bit numbers that is not an integer differs from every integer by at least 1/n,
    // which is more than the rounding error of an f64. So truncating the float gives the truncated quotient.
    i32: f64, f64::from, |a: i32, n: f64| {
        // SAFETY: n >= 2, so the quotient is finite and fits.
        unsafe { (f64::from(a) / n).to_int_unchecked::<i32>() }
    };
    u32: f64, f64::from, |a: u32, n: f64| {
        // SAFETY: n >= 2, so the quotient is finite and fits.
        unsafe { (f64::from(a) / n).to_int_unchecked::<u32>() }
    };
    i64: Reciprocal, Reciprocal::of, |a: i64, n: Reciprocal| {
        let magnitude = n.times(a.unsigned_abs()) as i64;
        if a < 0 { -magnitude } else { magnitude }
    };
    u64: Reciprocal, Reciprocal::of, |a, n: Reciprocal| n.times(a);
}

/// A truth value: 0 or 1. Sums and maxima are true if either is, products and minima if both are.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Truth(u8);

impl Truth {
    #[inline(always)]
    pub(super) fn of(value: bool) -> Self {
        Self(value.into())
    }

    #[inline(always)]
    pub(super) fn is_true(self) -> bool {
        self.0 != 0
    }
}

impl Number for Truth {
    type Divisor = ();

    #[inline(always)]
    fn sum(self, other: Self) -> Self {
        self.or(other)
    }

    #[inline(always)]
    fn product(self, other: Self) -> Self {
        self.and(other)
    }

    #[inline(always)]
    fn maximum(self, other: Self) -> Self {
        self.or(other)
    }

    #[inline(always)]
    fn minimum(self, other: Self) -> Self {
        self.and(other)
    }

    #[inline(always)]
    fn factor(factor: f64) -> Self {
        Self::of(factor != 0.0)
    }

    #[inline(always)]
    fn divisor(_ranks: u32) {}

    #[inline(always)]
    fn quotient(self, _divisor: ()) -> Self {
        self
    }
}

impl BitNumber for Truth {
    #[inline(always)]
    fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    #[inline(always)]
    fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    #[inline(always)]
    fn xor(self, other: Self) -> Self {
        Self(self.0 ^ other.0)
    }
}

/// The least integer above 2^16 / n. It is precise enough for 8-bit numbers; [`Reciprocal`] explains why.
#[inline(always)]
fn reciprocal_8(ranks: u32) -> i32 {
    // An 8-bit number divided by 256 or more is 0.
    (1 << 16) / ranks.min(256) as i32 + 1
}

/// 2^128 / n, rounded up, for an n from 2 to 2^32.
///
/// It exceeds the true reciprocal by less than 2^-128, so the product with a 64-bit a is too large by less
/// than 2^-64, which is less than the 1/n that would reach the next integer. Two multiplications replace a
/// division of 40 to 90 cycles.
#[derive(Clone, Copy)]
pub(super) struct Reciprocal {
    high: u64,
    low: u64,
}

impl Reciprocal {
    #[inline(always)]
    fn of(ranks: u32) -> Self {
        let value = u128::MAX / u128::from(ranks) + 1;
        Self { high: (value >> 64) as u64, low: value as u64 }
    }

    /// `a / n`, rounded down.
    #[inline(always)]
    fn times(self, a: u64) -> u64 {
        let low = (u128::from(self.low) * u128::from(a)) >> 64;
        ((u128::from(self.high) * u128::from(a) + low) >> 64) as u64
    }
}
