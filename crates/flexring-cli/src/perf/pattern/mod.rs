//! The data of a check: vectors whose reduction identifies a rank that is missing or counted twice.
//!
//! Owns the contribution of every rank at every position and the expected result.
//!
//! In a sum, each rank contributes its own power of 4, so the sum written in base 4 has one digit per rank: 1
//! if the rank was added once, 0 if it is missing, 2 if it was added twice. All digits fit into the type
//! without rounding, in any order of addition. Where a type has fewer digits than there are ranks, the ranks
//! are divided into groups: at each position one group contributes digits and the other ranks contribute
//! zeros. Averages use a unit that survives the division. Products use the digits of the exponent. In a
//! pre-multiplied sum each rank has a different factor and contributes its digit divided by that factor. In
//! bitwise operations each rank of a group has a bit of its own, which no other rank changes; truth values
//! are numbers of one bit. For minima and maxima, the ranks contribute consecutive values in an order that
//! rotates by one rank per position, so that each rank is the winner at some position.
//!
//! The group, the digit of each rank, the unused digit and the sign change from position to position with a
//! prime period, so that data from a wrong position is detected too.

use super::exact_element::ExactElement;
use super::redop::RedOp;
use flexring::DType;
use std::fmt;
use std::marker::PhantomData;

/// Contributions and results of one operation on one element type in a world of one size.
#[derive(Clone, Debug)]
pub struct CheckPattern<T> {
    op: RedOp,
    world: usize,
    encoding: Encoding<T>,
    /// The number of groups. After this many positions, each rank has contributed a distinguishable value.
    groups: usize,
    /// The number of positions after which all contributions repeat.
    period: usize,
}

/// How contributions identify their ranks.
#[derive(Clone, Debug)]
enum Encoding<T> {
    /// Each rank of a group of `group` ranks contributes one of the `weights`.
    Digits { weights: Vec<T>, group: usize },
    /// The ranks contribute consecutive values.
    Ranking(PhantomData<T>),
}

/// The number of different values in a ranking, limited by the smallest types. Ranks beyond it share the last
/// value.
const STEPS: usize = 100;
/// The number of different offsets of a ranking.
const OFFSETS: usize = 8;
/// The smallest period. A prime, because vectors are rarely divided at multiples of a large prime.
const MIN_PERIOD: usize = 251;

/// The result of verifying a vector.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckResult {
    /// The number of wrong elements.
    pub wrong: u64,
    /// A description of the first wrong element.
    pub sentence: Option<String>,
}

impl CheckResult {
    /// Combines two results; the first description is kept.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { wrong: self.wrong + other.wrong, sentence: self.sentence.or(other.sentence) }
    }
}

impl<T: ExactElement> CheckPattern<T> {
    /// The pattern of `op` for `world` ranks, at least 1.
    pub fn new(op: RedOp, world: usize) -> Self {
        let powers = |base: T, digits: usize| {
            // base^(4^0), base^(4^1), base^(4^2), …
            let fourth = |power: &T| Some(power.times(*power).times(power.times(*power)));
            std::iter::successors(Some(base), fourth).take(digits).collect()
        };
        let digits = |unit: T, digits: usize| -> Vec<T> {
            std::iter::successors(Some(unit), |weight| Some(weight.times(T::of(4)))).take(digits).collect()
        };
        let weights = match op {
            _ if op.is_bitwise() || T::DTYPE == DType::Bool => {
                // The element that changes nothing stands for the unused digit.
                (0..T::BITS).map(T::bit).chain((T::BITS == 1).then(T::default)).collect()
            }
            RedOp::Sum | RedOp::PreMulSum => digits(T::of(1), T::SUM_DIGITS),
            RedOp::Prod => powers(T::of(T::BASE), T::PRODUCT_DIGITS),
            RedOp::Avg if T::DTYPE.is_float() => digits(T::of(T::AVERAGE_UNIT), T::average_digits(world)),
            RedOp::Avg => match T::average_digits(world) {
                0 => vec![distinguishing_unit(world)],
                fitting => digits(T::of(world as i64), fitting),
            },
            RedOp::Min | RedOp::Max | RedOp::BitAnd | RedOp::BitOr | RedOp::BitXor => Vec::new(),
        };
        if weights.is_empty() {
            let encoding = Encoding::Ranking(PhantomData);
            return Self { op, world, encoding, groups: world, period: prime_from(OFFSETS * world) };
        }
        // One digit stays unused, so that the sum differs between positions.
        let group = (weights.len() - 1).max(1);
        let groups = world.div_ceil(group);
        let period = prime_from(2 * groups * weights.len());
        Self { op, world, encoding: Encoding::Digits { weights, group }, groups, period }
    }

    /// The number of checks of `count` elements after which each rank has contributed a distinguishable
    /// value.
    pub fn rounds(&self, count: usize) -> usize {
        self.groups.div_ceil(count.max(1))
    }

    /// Fills `vector` with the contribution of `rank` from position `first` on, the number of elements that
    /// were checked before: so repeated short checks cover all positions.
    pub fn fill(&self, rank: usize, first: usize, vector: &mut [T]) {
        let table = self.table(first, vector.len(), |position| self.contribution(rank, position));
        for part in vector.chunks_mut(table.len()) {
            part.copy_from_slice(&table[..part.len()]);
        }
    }

    /// Compares `vector` with the expected result from position `first` on.
    pub fn verify(&self, first: usize, vector: &[T]) -> CheckResult {
        let table = self.table(first, vector.len(), |position| self.expected(position));
        compare(
            vector,
            &table,
            |got, expected| self.is_right(got, expected),
            |index, got, expected| {
                let mut sentence = format!("first wrong element {index}: got {got}, expected {expected}");
                if let Some(explanation) = self.explain((first + index) % self.period, got) {
                    sentence += &format!(": {explanation}");
                }
                sentence
            },
        )
    }

    /// Compares the input vector of `rank` with what [`fill`](Self::fill) wrote to it.
    pub fn verify_input(&self, rank: usize, first: usize, vector: &[T]) -> CheckResult {
        let table = self.table(first, vector.len(), |position| self.contribution(rank, position));
        compare(
            vector,
            &table,
            |got, given| got == given,
            |index, got, given| format!("element {index} of the input was changed from {given} to {got}"),
        )
    }

    /// The values from position `first` on: one period, or `count` elements if fewer.
    fn table(&self, first: usize, count: usize, value: impl Fn(usize) -> T) -> Vec<T> {
        let length = self.period.min(count).max(1);
        (0..length).map(|index| value((first + index) % self.period)).collect()
    }

    fn is_right(&self, got: T, expected: T) -> bool {
        if self.op == RedOp::Avg { got.is_near(expected) } else { got == expected }
    }

    fn contribution(&self, rank: usize, position: usize) -> T {
        let value = self.share(rank, position);
        match self.op {
            RedOp::PreMulSum => value.times(T::inverse(T::factor(rank))),
            _ => value,
        }
    }

    /// The share of `rank` in the result: its contribution times its factor.
    fn share(&self, rank: usize, position: usize) -> T {
        let (turn, round) = (position % self.groups, position / self.groups);
        match &self.encoding {
            Encoding::Digits { weights, group } => {
                if rank / group != turn {
                    return self.neutral();
                }
                let weight = weights[(rank % group + round) % weights.len()];
                if self.is_bitwise() {
                    return if self.is_and() { weight.complement() } else { weight };
                }
                let negative = T::SIGNED && self.op != RedOp::Prod && round / weights.len() % 2 == 1;
                if negative { weight.times(T::of(-1)) } else { weight }
            }
            Encoding::Ranking(_) => {
                let behind = self.behind(rank, position).min(STEPS) as i64;
                let place = (round % OFFSETS) as i64 - if T::SIGNED { STEPS as i64 / 2 } else { 0 };
                let rungs = if self.op == RedOp::Max { STEPS as i64 - behind } else { behind };
                T::distinct(place + rungs)
            }
        }
    }

    /// The number of ranks before `rank` in the ranking at this position.
    fn behind(&self, rank: usize, position: usize) -> usize {
        (rank + position) % self.world
    }

    /// Whether elements are combined bit by bit.
    fn is_bitwise(&self) -> bool {
        self.op.is_bitwise() || T::DTYPE == DType::Bool
    }

    /// Whether a bit of the result is set only if it is in all elements.
    fn is_and(&self) -> bool {
        let is_bool = T::DTYPE == DType::Bool;
        self.op == RedOp::BitAnd || (is_bool && matches!(self.op, RedOp::Prod | RedOp::Min))
    }

    /// The neutral element of sums, products and bitwise operations.
    fn neutral(&self) -> T {
        if self.is_bitwise() {
            return if self.is_and() { T::default().complement() } else { T::default() };
        }
        T::of(i64::from(self.op == RedOp::Prod))
    }

    /// The combination of two elements bit by bit.
    fn combine_bits(&self, left: T, right: T) -> T {
        let common = left.common_bits(right);
        match self.op {
            RedOp::BitXor => left.different_bits(right),
            _ if self.is_and() => common,
            _ => left.different_bits(right).different_bits(common),
        }
    }

    fn expected(&self, position: usize) -> T {
        self.result(position, |_| 1)
    }

    /// The result if each rank is counted `times(rank)` times.
    fn result(&self, position: usize, times: impl Fn(usize) -> usize) -> T {
        let shares = self
            .effective_ranks(position)
            .flat_map(|rank| std::iter::repeat_n(rank, times(rank)))
            .map(|rank| self.share(rank, position));
        if self.is_bitwise() {
            return shares.fold(self.neutral(), |left, right| self.combine_bits(left, right));
        }
        match self.op {
            RedOp::Sum | RedOp::PreMulSum => shares.fold(self.neutral(), T::plus),
            RedOp::Avg => shares.fold(self.neutral(), T::plus).over(self.world),
            RedOp::Prod => shares.fold(self.neutral(), T::times),
            RedOp::Min => shares.reduce(|a, b| if b < a { b } else { a }).unwrap_or_default(),
            RedOp::Max => shares.reduce(|a, b| if b > a { b } else { a }).unwrap_or_default(),
            RedOp::BitAnd | RedOp::BitOr | RedOp::BitXor => self.neutral(),
        }
    }

    /// The ranks whose share affects the result at this position.
    fn effective_ranks(&self, position: usize) -> std::ops::Range<usize> {
        match self.encoding {
            Encoding::Digits { group, .. } => {
                let first = position % self.groups * group;
                first..(first + group).min(self.world)
            }
            Encoding::Ranking(_) => 0..self.world,
        }
    }

    /// The simplest explanation of the wrong result `got`.
    fn explain(&self, position: usize, got: T) -> Option<Explanation> {
        // In a ranking, a missing rank changes the result only if it is among the first.
        let suspects: Vec<usize> = match self.encoding {
            Encoding::Digits { .. } => self.effective_ranks(position).collect(),
            Encoding::Ranking(_) => {
                self.effective_ranks(position).filter(|rank| self.behind(*rank, position) < OFFSETS).collect()
            }
        };
        let changes = suspects.iter().flat_map(|rank| [Miscount::Lost(*rank), Miscount::Twice(*rank)]);
        let singles = changes.clone().map(Explanation::One);
        let pairs = changes.clone().flat_map(|first| {
            let later = changes.clone().filter(move |second| second.rank() > first.rank());
            later.map(move |second| Explanation::Two(first, second))
        });
        let only = suspects.iter().copied().map(Explanation::Only);
        let fits = |explanation: &Explanation| {
            self.is_right(got, self.result(position, |rank| explanation.times(rank)))
        };
        singles.chain(pairs).chain(only).chain([Explanation::None]).find(fits)
    }
}

/// Compares a vector with repetitions of a table.
pub fn compare<T: ExactElement>(
    vector: &[T],
    table: &[T],
    is_right: impl Fn(T, T) -> bool,
    sentence: impl Fn(usize, T, T) -> String,
) -> CheckResult {
    let mut finding = CheckResult::default();
    for (nth, part) in vector.chunks(table.len()).enumerate() {
        // The fast path: correct parts compare as slices.
        if part == &table[..part.len()] {
            continue;
        }
        for (at, (got, expected)) in part.iter().zip(table).enumerate() {
            if !is_right(*got, *expected) {
                finding.wrong += 1;
                let index = nth * table.len() + at;
                finding.sentence.get_or_insert_with(|| sentence(index, *got, *expected));
            }
        }
    }
    finding
}

/// A unit for averages of a type that has no digit for `world` ranks: counted once, missing and counted twice
/// it gives three different quotients. If no unit does, the largest one, which detects some errors only.
fn distinguishing_unit<T: ExactElement>(world: usize) -> T {
    let distinguishes = |unit: T| {
        let (lost, once, twice) = (T::of(0), unit.over(world), unit.plus(unit).over(world));
        lost != once && once != twice && twice != lost
    };
    let both_signs = |unit: &T| distinguishes(*unit) && (!T::SIGNED || distinguishes(unit.times(T::of(-1))));
    (1..=127).map(T::of).find(both_signs).unwrap_or(T::of(127))
}

/// The smallest prime that is at least `least` and at least [`MIN_PERIOD`].
fn prime_from(least: usize) -> usize {
    let is_prime = |number: &usize| {
        (2..)
            .take_while(|divisor| divisor * divisor <= *number)
            .all(|divisor| !number.is_multiple_of(divisor))
    };
    (least.max(MIN_PERIOD)..).find(is_prime).unwrap_or(least)
}

/// How a wrong sum counts one rank's contribution: not at all, or twice.
#[derive(Clone, Copy, Debug)]
enum Miscount {
    Lost(usize),
    Twice(usize),
}

impl Miscount {
    fn rank(self) -> usize {
        let (Self::Lost(rank) | Self::Twice(rank)) = self;
        rank
    }

    fn times(self) -> usize {
        if matches!(self, Self::Lost(_)) { 0 } else { 2 }
    }
}

impl fmt::Display for Miscount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(rank) => write!(f, "rank {rank} is missing"),
            Self::Twice(rank) => write!(f, "rank {rank} is counted twice"),
        }
    }
}

/// An explanation of a wrong result.
#[derive(Clone, Copy, Debug)]
enum Explanation {
    One(Miscount),
    Two(Miscount, Miscount),
    Only(usize),
    None,
}

impl Explanation {
    fn times(self, rank: usize) -> usize {
        let changed = |change: Miscount| (change.rank() == rank).then(|| change.times());
        match self {
            Self::One(change) => changed(change).unwrap_or(1),
            Self::Two(first, second) => changed(first).or_else(|| changed(second)).unwrap_or(1),
            Self::Only(one) => usize::from(one == rank),
            Self::None => 0,
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(change) => change.fmt(f),
            Self::Two(first, second) => write!(f, "{first} and {second}"),
            Self::Only(rank) => write!(f, "only rank {rank} is there"),
            Self::None => f.write_str("no rank's contribution is there"),
        }
    }
}

#[cfg(test)]
impl<T: ExactElement> CheckPattern<T> {
    /// This pattern with zeros in place of all digits, as of a rank that contributes nothing.
    pub fn muted(mut self) -> Self {
        if let Encoding::Digits { weights, .. } = &mut self.encoding {
            weights.fill(T::of(0));
        }
        self
    }
}

#[cfg(test)]
mod tests;
