use super::*;
use flexring::Boolean;
use flexring_core::float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};

/// The operations that elements of this type have.
fn ops<T: ExactElement>() -> impl Iterator<Item = RedOp> {
    RedOp::ALL.into_iter().filter(|op| op.is_defined_for(T::DTYPE))
}

macro_rules! every_type {
    ($body:ident) => {
        $body::<i8>();
        $body::<u8>();
        $body::<i16>();
        $body::<u16>();
        $body::<i32>();
        $body::<u32>();
        $body::<i64>();
        $body::<u64>();
        $body::<f16>();
        $body::<f32>();
        $body::<f64>();
        $body::<bf16>();
        $body::<F8E4M3>();
        $body::<F8E5M2>();
    };
}

fn combine<T: ExactElement>(op: RedOp, a: T, b: T) -> T {
    match op {
        RedOp::BitAnd => a.common_bits(b),
        RedOp::BitOr => a.complement().common_bits(b.complement()).complement(),
        RedOp::BitXor => a.different_bits(b),
        RedOp::Sum | RedOp::PreMulSum | RedOp::Avg => a.plus(b),
        RedOp::Prod => a.times(b),
        RedOp::Min => {
            if b < a {
                b
            } else {
                a
            }
        }
        RedOp::Max => {
            if b > a {
                b
            } else {
                a
            }
        }
    }
}

fn scaled<T: ExactElement>(pattern: &CheckPattern<T>, rank: usize, value: T) -> T {
    if pattern.op == RedOp::PreMulSum { value.times(T::of_factor(T::factor(rank))) } else { value }
}

fn finish<T: ExactElement>(pattern: &CheckPattern<T>, sum: Option<T>) -> T {
    let sum = sum.unwrap_or_else(|| pattern.neutral());
    if pattern.op == RedOp::Avg { sum.over(pattern.world) } else { sum }
}

/// The reduction of the ranks' vectors, counting each rank `times(rank)` times.
fn reduce<T: ExactElement>(
    pattern: &CheckPattern<T>,
    vectors: &[Vec<T>],
    times: impl Fn(usize) -> usize,
) -> Vec<T> {
    let ranks: Vec<usize> =
        (0..vectors.len()).flat_map(|rank| std::iter::repeat_n(rank, times(rank))).collect();
    let reduced = |index: usize| {
        // In descending order of ranks, unlike the pattern itself.
        let shares = ranks.iter().rev().map(|rank| scaled(pattern, *rank, vectors[*rank][index]));
        finish(pattern, shares.reduce(|a, b| combine(pattern.op, a, b)))
    };
    (0..vectors[0].len()).map(reduced).collect()
}

/// For each rank, the reduction without it and the reduction that counts it twice. Computed from prefix and
/// suffix reductions, because there are millions of cases.
fn altered<T: ExactElement>(pattern: &CheckPattern<T>, vectors: &[Vec<T>]) -> Vec<[Vec<T>; 2]> {
    let add = |a: Option<T>, b: Option<T>| match (a, b) {
        (Some(a), Some(b)) => Some(combine(pattern.op, a, b)),
        (a, b) => a.or(b),
    };
    let mut altered = vec![[Vec::new(), Vec::new()]; vectors.len()];
    for index in 0..vectors[0].len() {
        let shares: Vec<T> =
            vectors.iter().enumerate().map(|(rank, vector)| scaled(pattern, rank, vector[index])).collect();
        let mut behind: Vec<Option<T>> = vec![None];
        for share in shares.iter().rev() {
            behind.push(add(behind[behind.len() - 1], Some(*share)));
        }
        behind.reverse();
        let mut before = None;
        for (rank, share) in shares.iter().enumerate() {
            let lost = add(before, behind[rank + 1]);
            let twice = add(add(before, Some(*share)), behind[rank]);
            altered[rank][0].push(finish(pattern, lost));
            altered[rank][1].push(finish(pattern, twice));
            before = add(before, Some(*share));
        }
    }
    altered
}

fn vectors<T: ExactElement>(pattern: &CheckPattern<T>, count: usize, round: usize) -> Vec<Vec<T>> {
    let fill = |rank| {
        let mut vector = vec![T::default(); count];
        pattern.fill(rank, round * count, &mut vector);
        vector
    };
    (0..pattern.world).map(fill).collect()
}

fn check_correct_results<T: ExactElement>() {
    for op in ops::<T>() {
        for world in (1..=70).chain([300]) {
            let pattern = CheckPattern::<T>::new(op, world);
            let vectors = vectors(&pattern, 280, 0);
            let finding = pattern.verify(0, &reduce(&pattern, &vectors, |_| 1));
            assert_eq!(finding, CheckResult::default(), "{op:?} {} {world}", T::DTYPE.name());
        }
    }
}

#[test]
fn correct_results_pass_in_every_world() {
    every_type!(check_correct_results);
    check_correct_results::<Boolean>();
}

fn check_miscounted_ranks<T: ExactElement>() {
    for op in ops::<T>() {
        let idempotent = matches!(op, RedOp::Min | RedOp::Max | RedOp::BitAnd | RedOp::BitOr);
        for world in 1..=70 {
            let pattern = CheckPattern::<T>::new(op, world);
            let vectors = vectors(&pattern, pattern.groups, 0);
            for (culprit, [lost, twice]) in altered(&pattern, &vectors).iter().enumerate() {
                let named = |vector: &[T], error: &str| {
                    let sentence = pattern.verify(0, vector).sentence.unwrap_or_default();
                    let named = sentence.ends_with(&format!(": rank {culprit} {error}"));
                    assert!(named, "{op:?} {} rank {culprit} of {world}: {sentence:?}", T::DTYPE.name());
                };
                if idempotent {
                    // Counting a rank twice does not change a minimum or maximum. Those of no rank are not
                    // defined.
                    assert_eq!(pattern.verify(0, twice).wrong, 0);
                    if world > 1 {
                        named(lost, "is missing");
                    }
                } else {
                    named(lost, "is missing");
                    // Twice the same bits are none.
                    named(twice, if op == RedOp::BitXor { "is missing" } else { "is counted twice" });
                }
            }
        }
    }
}

#[test]
fn a_missing_or_doubly_counted_rank_is_named_in_every_world() {
    every_type!(check_miscounted_ranks);
}

fn check_short_vectors<T: ExactElement>() {
    for op in ops::<T>() {
        for (world, count) in [(5, 1), (70, 1), (70, 3), (33, 8)] {
            let pattern = CheckPattern::<T>::new(op, world);
            let mut detected = vec![false; world];
            for round in 0..pattern.rounds(count) {
                let vectors = vectors(&pattern, count, round);
                for (culprit, [lost, _]) in altered(&pattern, &vectors).iter().enumerate() {
                    detected[culprit] |= pattern.verify(round * count, lost).wrong > 0;
                }
            }
            assert!(
                detected.iter().all(|detected| *detected),
                "{op:?} {} {world}: {detected:?}",
                T::DTYPE.name()
            );
        }
    }
}

#[test]
fn rounds_of_short_vectors_detect_every_missing_rank() {
    every_type!(check_short_vectors);
    check_short_vectors::<Boolean>();
}

fn check_misplaced_results<T: ExactElement>() {
    for op in ops::<T>() {
        for world in [2, 4, 7] {
            let pattern = CheckPattern::<T>::new(op, world);
            let mut whole = vec![T::default(); 1 << 14];
            let table = pattern.table(0, pattern.period, |position| pattern.expected(position));
            (0..whole.len()).for_each(|index| whole[index] = table[index % table.len()]);
            whole.rotate_left(1 << 12);
            assert!(pattern.verify(0, &whole).wrong > 1 << 10, "{op:?} {} {world}", T::DTYPE.name());
        }
    }
}

#[test]
fn data_from_a_wrong_position_is_detected() {
    every_type!(check_misplaced_results);
}

#[test]
fn explanations_name_the_ranks() {
    let pattern = CheckPattern::<i32>::new(RedOp::Sum, 4);
    let vectors = vectors(&pattern, 100, 0);
    let sentence = |times: [usize; 4]| {
        pattern.verify(0, &reduce(&pattern, &vectors, |rank| times[rank])).sentence.unwrap_or_default()
    };
    assert_eq!(sentence([1, 1, 0, 1]), "first wrong element 0: got 69, expected 85: rank 2 is missing");
    assert!(sentence([2, 1, 1, 0]).ends_with(": rank 0 is counted twice and rank 3 is missing"));
    assert!(sentence([0, 0, 1, 0]).ends_with(": only rank 2 is there"));
    assert!(sentence([0, 0, 0, 0]).ends_with(": no rank's contribution is there"));
    assert!(sentence([7, 1, 1, 1]).ends_with("got 91, expected 85"));
}
