//! The data of a check: vectors whose reduction tells which rank is lost or counted twice.
//!
//! Owns what every rank contributes at every position and what must come out. Must not know how it is reduced.
//!
//! In a sum, a rank contributes a power of 4 of its own, so the sum written in base 4 has a digit per rank: 1 if it
//! was added once, 0 if it was lost, 2 if it was added twice. All digits fit into the type without rounding, in
//! whichever order they are added. Where a type has fewer digits than there are ranks, the ranks take turns:
//! at each position one group of them carries digits and the others contribute zeros. Averages do the same in units
//! that survive the division. Products do the same in the exponent. In a pre-multiplied sum each rank has another
//! factor and contributes its digit divided by it. For minima and maxima each position has one winner, who is
//! followed one step behind by the next rank, and so on.
//!
//! From one position to the next the turn, the digit of each rank, the digit that nobody has, and the sign change
//! with a prime period, so that data from another place is noticed too.

use super::exact_element::ExactElement;
use super::redop::RedOp;
use std::fmt;
use std::marker::PhantomData;

/// Contributions and results of one operation over one element type in one world.
#[derive(Clone, Debug)]
pub struct Pattern<T> {
    op: RedOp,
    world: usize,
    roles: Encoding<T>,
    /// After so many positions each rank had its turn.
    turns: usize,
    period: usize,
}

/// How the ranks share a position.
#[derive(Clone, Debug)]
enum Encoding<T> {
    /// A group of ranks has a digit each, counted in `unit`s.
    Digits { weights: Vec<T>, group: usize },
    /// The ranks stand on the rungs of a ladder.
    Ranking(PhantomData<T>),
}

/// The rungs of a ladder, as many as the smallest types have room for; all ranks further behind share the last one.
const STEPS: usize = 100;
/// In how many places a ladder stands.
const OFFSETS: usize = 8;
/// Vectors are seldom cut in multiples of this or a larger prime.
const LEAST_PERIOD: usize = 251;

/// What verifying a vector found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckResult {
    /// How many elements are wrong.
    pub wrong: u64,
    /// What the first of them tells.
    pub sentence: Option<String>,
}

impl CheckResult {
    /// Both findings in one.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self { wrong: self.wrong + other.wrong, sentence: self.sentence.or(other.sentence) }
    }
}

impl<T: ExactElement> Pattern<T> {
    /// The pattern for `op` in a world of `world` ranks, which is at least 1.
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
            RedOp::Sum | RedOp::PreMulSum => digits(T::of(1), T::SUM_DIGITS),
            RedOp::Prod => powers(T::of(T::BASE), T::PRODUCT_DIGITS),
            RedOp::Avg if T::DTYPE.is_float() => digits(T::of(T::AVERAGE_UNIT), T::average_digits(world)),
            RedOp::Avg => match T::average_digits(world) {
                0 => vec![distinguishing_unit(world)],
                fitting => digits(T::of(world as i64), fitting),
            },
            RedOp::Min | RedOp::Max => Vec::new(),
        };
        if weights.is_empty() {
            let roles = Encoding::Ranking(PhantomData);
            return Self { op, world, roles, turns: world, period: prime_from(OFFSETS * world) };
        }
        // One digit is nobody's, so that the sum is not the same everywhere.
        let group = (weights.len() - 1).max(1);
        let turns = world.div_ceil(group);
        let period = prime_from(2 * turns * weights.len());
        Self { op, world, roles: Encoding::Digits { weights, group }, turns, period }
    }

    /// How many checks of `count` elements it takes until each rank had its turn at some position.
    pub fn rounds(&self, count: usize) -> usize {
        self.turns.div_ceil(count.max(1))
    }

    /// Fills `vector` with what `rank` contributes from position `first` on. The check after one of n positions
    /// begins n further on.
    pub fn fill(&self, rank: usize, first: usize, vector: &mut [T]) {
        let table = self.table(first, vector.len(), |position| self.contribution(rank, position));
        for part in vector.chunks_mut(table.len()) {
            part.copy_from_slice(&table[..part.len()]);
        }
    }

    /// Compares `vector` with what must come out from position `first` on.
    pub fn verify(&self, first: usize, vector: &[T]) -> CheckResult {
        let table = self.table(first, vector.len(), |position| self.expected(position));
        compare(
            vector,
            &table,
            |got, expected| self.is_right(got, expected),
            |index, got, expected| {
                let mut sentence = format!("first wrong element {index}: got {got}, expected {expected}");
                if let Some(story) = self.explain((first + index) % self.period, got) {
                    sentence += &format!(": {story}");
                }
                sentence
            },
        )
    }

    /// Compares what `rank` contributed with what [`fill`](Self::fill) gave it.
    pub fn verify_input(&self, rank: usize, first: usize, vector: &[T]) -> CheckResult {
        let table = self.table(first, vector.len(), |position| self.contribution(rank, position));
        compare(
            vector,
            &table,
            |got, given| got == given,
            |index, got, given| format!("element {index} of the input was changed from {given} to {got}"),
        )
    }

    /// What `value` gives from position `first` on, until it repeats or `count` elements have theirs.
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

    /// What `rank` adds to the result.
    fn share(&self, rank: usize, position: usize) -> T {
        let (turn, round) = (position % self.turns, position / self.turns);
        match &self.roles {
            Encoding::Digits { weights, group } => {
                if rank / group != turn {
                    return self.nothing();
                }
                let weight = weights[(rank % group + round) % weights.len()];
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

    /// How many ranks are in front of `rank` on the ladder.
    fn behind(&self, rank: usize, position: usize) -> usize {
        (rank + position) % self.world
    }

    /// What changes no result.
    fn nothing(&self) -> T {
        T::of(i64::from(self.op == RedOp::Prod))
    }

    fn expected(&self, position: usize) -> T {
        self.result(position, |_| 1)
    }

    /// What comes out if each rank is counted so many times.
    fn result(&self, position: usize, times: impl Fn(usize) -> usize) -> T {
        let shares = self
            .concerned(position)
            .flat_map(|rank| std::iter::repeat_n(rank, times(rank)))
            .map(|rank| self.share(rank, position));
        match self.op {
            RedOp::Sum | RedOp::PreMulSum => shares.fold(self.nothing(), T::plus),
            RedOp::Avg => shares.fold(self.nothing(), T::plus).over(self.world),
            RedOp::Prod => shares.fold(self.nothing(), T::times),
            RedOp::Min => shares.reduce(|a, b| if b < a { b } else { a }).unwrap_or_default(),
            RedOp::Max => shares.reduce(|a, b| if b > a { b } else { a }).unwrap_or_default(),
        }
    }

    /// The ranks whose share counts at this position.
    fn concerned(&self, position: usize) -> std::ops::Range<usize> {
        match self.roles {
            Encoding::Digits { group, .. } => {
                let first = position % self.turns * group;
                first..(first + group).min(self.world)
            }
            Encoding::Ranking(_) => 0..self.world,
        }
    }

    /// The simplest story that ends with `got`.
    fn explain(&self, position: usize, got: T) -> Option<Explanation> {
        // On a ladder only those in front can be missed.
        let suspects: Vec<usize> = match self.roles {
            Encoding::Digits { .. } => self.concerned(position).collect(),
            Encoding::Ranking(_) => {
                self.concerned(position).filter(|rank| self.behind(*rank, position) < OFFSETS).collect()
            }
        };
        let changes = suspects.iter().flat_map(|rank| [Miscount::Lost(*rank), Miscount::Twice(*rank)]);
        let singles = changes.clone().map(Explanation::One);
        let pairs = changes.clone().flat_map(|first| {
            let later = changes.clone().filter(move |second| second.rank() > first.rank());
            later.map(move |second| Explanation::Two(first, second))
        });
        let only = suspects.iter().copied().map(Explanation::Only);
        let ends_so =
            |story: &Explanation| self.is_right(got, self.result(position, |rank| story.times(rank)));
        singles.chain(pairs).chain(only).chain([Explanation::Nobody]).find(ends_so)
    }
}

/// Compares a vector with a table that repeats.
pub fn compare<T: ExactElement>(
    vector: &[T],
    table: &[T],
    is_right: impl Fn(T, T) -> bool,
    sentence: impl Fn(usize, T, T) -> String,
) -> CheckResult {
    let mut finding = CheckResult::default();
    for (nth, part) in vector.chunks(table.len()).enumerate() {
        // Nearly always, and at the speed of memory.
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

/// A unit for averages of a type that is too narrow for the world: alone, lost and doubled it gives three different
/// quotients. If there is none, the largest: then only what is left of it is checked.
fn distinguishing_unit<T: ExactElement>(world: usize) -> T {
    let tells = |unit: T| {
        let (lost, once, twice) = (T::of(0), unit.over(world), unit.plus(unit).over(world));
        lost != once && once != twice && twice != lost
    };
    let both_signs = |unit: &T| tells(*unit) && (!T::SIGNED || tells(unit.times(T::of(-1))));
    (1..=127).map(T::of).find(both_signs).unwrap_or(T::of(127))
}

/// The least prime that is not below `least` nor [`LEAST_PERIOD`].
fn prime_from(least: usize) -> usize {
    let is_prime = |number: &usize| {
        (2..)
            .take_while(|divisor| divisor * divisor <= *number)
            .all(|divisor| !number.is_multiple_of(divisor))
    };
    (least.max(LEAST_PERIOD)..).find(is_prime).unwrap_or(least)
}

/// What may have happened to one rank's contribution.
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

/// What may have happened to a result.
#[derive(Clone, Copy, Debug)]
enum Explanation {
    One(Miscount),
    Two(Miscount, Miscount),
    Only(usize),
    Nobody,
}

impl Explanation {
    fn times(self, rank: usize) -> usize {
        let changed = |change: Miscount| (change.rank() == rank).then(|| change.times());
        match self {
            Self::One(change) => changed(change).unwrap_or(1),
            Self::Two(first, second) => changed(first).or_else(|| changed(second)).unwrap_or(1),
            Self::Only(one) => usize::from(one == rank),
            Self::Nobody => 0,
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(change) => change.fmt(f),
            Self::Two(first, second) => write!(f, "{first} and {second}"),
            Self::Only(rank) => write!(f, "only rank {rank} is there"),
            Self::Nobody => f.write_str("nobody's contribution is there"),
        }
    }
}

#[cfg(test)]
impl<T: ExactElement> Pattern<T> {
    /// The same with zeros for every digit.
    pub fn muted(mut self) -> Self {
        if let Encoding::Digits { weights, .. } = &mut self.roles {
            weights.fill(T::of(0));
        }
        self
    }
}

#[cfg(test)]
mod tests;
