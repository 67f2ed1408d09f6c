//! Exact points of a vector as fractions, and the spans between two of them.
//!
//! Owns the arithmetic, and the only conversion to elements. Schedules use fractions, so one serves every
//! count. The conversion is monotone and equal fractions give equal elements, so spans that are adjacent in
//! the schedule are adjacent in memory, and rounding neither duplicates nor drops an element.

use std::cmp::Ordering;
use std::fmt;
use std::ops::Range;

// Not `num_rational::Ratio<u128>`: for 100,000 fractions as FlexReduce makes them, its sums take 2.0 times
// and its sorting takes 3.7 times as long. Planning for large clusters consists of these two.
/// A number from 0 to 1, in lowest terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fraction {
    numerator: u128,
    denominator: u128,
}

/// Denominators stay below this, so that the sum of two numerators fits 128 bits.
const LIMIT: u128 = 1 << 124;

impl Fraction {
    /// The start of the vector.
    pub const ZERO: Self = Self { numerator: 0, denominator: 1 };
    /// The end of the vector.
    pub const ONE: Self = Self { numerator: 1, denominator: 1 };

    /// `numerator / denominator`.
    ///
    /// # Panics
    /// If the denominator is 0 or the result is above 1.
    #[must_use]
    pub fn new(numerator: u64, denominator: u64) -> Self {
        assert!(
            denominator > 0 && numerator <= denominator,
            "{numerator}/{denominator} is not in the range from 0 to 1"
        );
        Self::reduced(numerator.into(), denominator.into()).expect("64 bits are below the limit")
    }

    fn reduced(numerator: u128, denominator: u128) -> Option<Self> {
        let divisor = gcd(numerator, denominator);
        let (numerator, denominator) = (numerator / divisor, denominator / divisor);
        (denominator < LIMIT && numerator <= denominator).then_some(Self { numerator, denominator })
    }

    /// The sum; `None` if it is above 1 or its denominator exceeds 124 bits.
    #[must_use]
    pub fn plus(self, other: Self) -> Option<Self> {
        if self.denominator == other.denominator {
            return Self::reduced(self.numerator + other.numerator, self.denominator);
        }
        let shared = gcd(self.denominator, other.denominator);
        let stretch = other.denominator / shared;
        let denominator = self.denominator.checked_mul(stretch)?;
        let left = self.numerator.checked_mul(stretch)?;
        let right = other.numerator.checked_mul(self.denominator / shared)?;
        Self::reduced(left.checked_add(right)?, denominator)
    }

    /// The product; `None` if its denominator exceeds 124 bits.
    #[must_use]
    pub fn times(self, other: Self) -> Option<Self> {
        let (across, along) =
            (gcd(self.numerator, other.denominator), gcd(other.numerator, self.denominator));
        let numerator = (self.numerator / across).checked_mul(other.numerator / along)?;
        let denominator = (self.denominator / along).checked_mul(other.denominator / across)?;
        Self::reduced(numerator, denominator)
    }

    /// Number of elements before this point in a vector of `count` elements, rounded down to a multiple of
    /// `align`. For [`Fraction::ONE`] always `count`.
    #[must_use]
    pub fn element(self, count: u64, align: u64) -> u64 {
        if self == Self::ONE {
            return count;
        }
        let exact = match self.numerator.checked_mul(count.into()) {
            Some(product) => (product / self.denominator) as u64,
            None => self.long_element(count),
        };
        exact - exact % align.max(1)
    }

    /// Multiplies by `count` and divides bit by bit, for products that exceed 128 bits.
    fn long_element(self, count: u64) -> u64 {
        let (mut quotient, mut rest) = (0, 0);
        for bit in (0..u64::BITS).rev() {
            quotient *= 2;
            rest = 2 * rest + if count >> bit & 1 == 1 { self.numerator } else { 0 };
            while rest >= self.denominator {
                rest -= self.denominator;
                quotient += 1;
            }
        }
        quotient
    }

    /// Numerator and denominator, in lowest terms.
    #[must_use]
    pub fn parts(self) -> (u128, u128) {
        (self.numerator, self.denominator)
    }

    /// The nearest floating-point number, for drawings and estimates.
    #[must_use]
    pub fn to_f64(self) -> f64 {
        self.numerator as f64 / self.denominator as f64
    }

    /// Parses what [`Display`](fmt::Display) writes, such as `0`, `1` or `2/3`; `None` if it is not a number
    /// from 0 to 1.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (numerator, denominator) = text.split_once('/').unwrap_or((text, "1"));
        let denominator: u128 = denominator.trim().parse().ok().filter(|denominator| *denominator > 0)?;
        Self::reduced(numerator.trim().parse().ok()?, denominator)
    }
}

fn gcd(mut a: u128, mut b: u128) -> u128 {
    // Division of 128-bit numbers is slow, and most numbers fit 64 bits.
    if let (Ok(mut a), Ok(mut b)) = (u64::try_from(a), u64::try_from(b)) {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        return a.into();
    }
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

impl Ord for Fraction {
    fn cmp(&self, other: &Self) -> Ordering {
        let (mut a, mut b, mut c, mut d) =
            (self.numerator, self.denominator, other.numerator, other.denominator);
        // Most fit 64 bits, whose products need no check.
        if (a | b | c | d) >> 64 == 0 {
            let product = |one: u128, other: u128| u128::from(one as u64) * u128::from(other as u64);
            return product(a, d).cmp(&product(c, b));
        }
        // Compares a/b with c/d: by cross products where they fit 128 bits, else by integer parts and then by
        // the reciprocals of the remainders.
        loop {
            if let (Some(left), Some(right)) = (a.checked_mul(d), c.checked_mul(b)) {
                return left.cmp(&right);
            }
            let order = (a / b).cmp(&(c / d));
            if order != Ordering::Equal {
                return order;
            }
            (a, b, c, d) = (d, c % d, b, a % b);
            if b == 0 || d == 0 {
                // The reciprocal of a zero remainder is infinite.
                return d.cmp(&b);
            }
        }
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

/// A part of the vector, from `start` (included) to `end` (excluded).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// First point of the span.
    pub start: Fraction,
    /// First point after the span.
    pub end: Fraction,
}

impl Span {
    /// The whole vector.
    pub const WHOLE: Self = Self { start: Fraction::ZERO, end: Fraction::ONE };

    /// Part number `index`, from 0, of `parts` equal parts.
    #[must_use]
    pub fn part(index: usize, parts: usize) -> Self {
        Self {
            start: Fraction::new(index as u64, parts as u64),
            end: Fraction::new(index as u64 + 1, parts as u64),
        }
    }

    /// Whether it contains no point.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.start >= self.end
    }

    /// Its exact length; `None` if the span is reversed or the computation exceeds 128 bits.
    #[must_use]
    pub fn length(self) -> Option<Fraction> {
        let (Fraction { numerator: a, denominator: b }, Fraction { numerator: c, denominator: d }) =
            (self.end, self.start);
        let difference = a.checked_mul(d)?.checked_sub(c.checked_mul(b)?)?;
        Fraction::reduced(difference, b.checked_mul(d)?)
    }

    /// The common part; empty if there is none.
    #[must_use]
    pub fn intersection(self, other: Self) -> Self {
        Self { start: self.start.max(other.start), end: self.end.min(other.end) }
    }

    /// Its length as a floating-point number, for drawings and estimates.
    #[must_use]
    pub fn extent(self) -> f64 {
        self.end.to_f64() - self.start.to_f64()
    }

    /// Its elements in a vector of `count`, with boundaries at multiples of `align` elements.
    #[must_use]
    #[inline]
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
        assert_eq!(Fraction::parse("2/6"), Some(Fraction::new(1, 3)));
        for wrong in ["", "1/0", "3/2", "-1/2", "0.5", "1/2/3"] {
            assert_eq!(Fraction::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_length_of_a_span_is_exact() {
        let span = Span { start: Fraction::new(1, 6), end: Fraction::new(5, 12) };
        assert_eq!(span.length(), Some(Fraction::new(1, 4)));
        assert_eq!(Span { start: span.end, end: span.start }.length(), None);
    }

    #[test]
    fn fractions_of_more_than_64_bits_are_exact() {
        let long = |numerator: u128| Fraction { numerator, denominator: LIMIT - 159 };
        let (less, more) = (long((LIMIT - 159) / 3), long((LIMIT - 159) / 3 + 1));
        assert!(less < more && more > Fraction::new(1, 3) && less <= Fraction::new(1, 3));
        assert!(less < Fraction::ONE && Fraction::ZERO < less && less.cmp(&less).is_eq());
        assert_eq!(more.element(300, 1), 100);
        assert_eq!(more.element(u64::MAX, 1), u64::MAX / 3);
        assert_eq!(less.plus(Fraction::new(1, 7)), None);
        assert_eq!(less.times(more), None);
    }

    proptest! {
        #[test]
        fn sums_products_and_order_are_those_of_rational_numbers(
            a in 0u64..2000, b in 1u64..2000, c in 0u64..2000, d in 1u64..2000,
        ) {
            let (a, c) = (a % (b + 1), c % (d + 1));
            let (left, right) = (Fraction::new(a, b), Fraction::new(c, d));
            prop_assert_eq!(left.cmp(&right), (a * d).cmp(&(c * b)));
            prop_assert_eq!(left.times(right), Some(Fraction::new(a * c, b * d)));
            let sum = a * d + c * b;
            prop_assert_eq!(left.plus(right), (sum <= b * d).then(|| Fraction::new(sum, b * d)));
            prop_assert_eq!(left.long_element(d * 1000), a * d * 1000 / b);
        }

        #[test]
        fn equal_parts_cover_every_vector_once(parts in 1usize..70, count in 0u64..5000, align in 1u64..40) {
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
