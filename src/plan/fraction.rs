//! Exact parts of a vector: fractions, and spans between two of them.
//!
//! A schedule speaks of fractions, so that it serves every count. They become element ranges once, here, by
//! one monotone map: equal fractions give equal elements, so spans that meet in the schedule meet in memory,
//! and nothing is ever counted twice or left out by rounding.

use std::cmp::Ordering;
use std::fmt;
use std::ops::Range;

/// A number from 0 to 1, in lowest terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fraction {
    numerator: u64,
    denominator: u64,
}

impl Fraction {
    /// The start of the vector.
    pub const ZERO: Self = Self { numerator: 0, denominator: 1 };
    /// The end of the vector.
    pub const ONE: Self = Self { numerator: 1, denominator: 1 };

    /// `numerator / denominator`.
    ///
    /// # Panics
    /// If that is no number from 0 to 1.
    #[must_use]
    pub fn new(numerator: u64, denominator: u64) -> Self {
        assert!(
            denominator > 0 && numerator <= denominator,
            "{numerator}/{denominator} is no part of a vector"
        );
        let divisor = gcd(numerator, denominator);
        Self { numerator: numerator / divisor, denominator: denominator / divisor }
    }

    /// How many of `count` elements lie before this point, rounded down to a multiple of `align` elements;
    /// the end of the vector is always `count`.
    #[must_use]
    pub fn element(self, count: u64, align: u64) -> u64 {
        if self == Self::ONE {
            return count;
        }
        // The product of two u64 fits a u128, and the quotient is at most `count`.
        let exact = (u128::from(self.numerator) * u128::from(count) / u128::from(self.denominator)) as u64;
        exact - exact % align.max(1)
    }

    /// The parts of the fraction, in lowest terms: numerator and denominator.
    #[must_use]
    pub fn parts(self) -> (u64, u64) {
        (self.numerator, self.denominator)
    }
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

impl Ord for Fraction {
    fn cmp(&self, other: &Self) -> Ordering {
        let left = u128::from(self.numerator) * u128::from(other.denominator);
        let right = u128::from(other.numerator) * u128::from(self.denominator);
        left.cmp(&right)
    }
}

impl PartialOrd for Fraction {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for Fraction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.denominator {
            1 => write!(f, "{}", self.numerator),
            _ => write!(f, "{}/{}", self.numerator, self.denominator),
        }
    }
}

/// A part of the vector, from `start` up to but without `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// Where it begins.
    pub start: Fraction,
    /// Where the next one begins.
    pub end: Fraction,
}

impl Span {
    /// The whole vector.
    pub const WHOLE: Self = Self { start: Fraction::ZERO, end: Fraction::ONE };

    /// The `index`-th of `parts` equal parts.
    #[must_use]
    pub fn part(index: usize, parts: usize) -> Self {
        Self {
            start: Fraction::new(index as u64, parts as u64),
            end: Fraction::new(index as u64 + 1, parts as u64),
        }
    }

    /// Its elements, in a vector of `count`, with boundaries at multiples of `align`.
    #[must_use]
    pub fn elements(self, count: u64, align: u64) -> Range<u64> {
        self.start.element(count, align)..self.end.element(count, align)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {})", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fractions_are_exact_and_ordered() {
        assert_eq!(Fraction::new(2, 6), Fraction::new(1, 3));
        assert!(Fraction::new(1, 3) < Fraction::new(333_334, 1_000_000));
        assert!(Fraction::new(u64::MAX - 1, u64::MAX) < Fraction::ONE);
        assert_eq!(Fraction::new(u64::MAX - 1, u64::MAX).element(u64::MAX, 1), u64::MAX - 1);
    }

    proptest! {
        #[test]
        fn parts_tile_every_vector(parts in 1usize..70, count in 0u64..5000, align in 1u64..40) {
            let mut next = 0;
            for index in 0..parts {
                let elements = Span::part(index, parts).elements(count, align);
                prop_assert_eq!(elements.start, next);
                prop_assert!(elements.end >= elements.start);
                next = elements.end;
            }
            prop_assert_eq!(next, count);
        }
    }
}
