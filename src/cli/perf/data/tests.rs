use super::*;
use half::{bf16, f16};

const OPS: [Op; 6] = [Op::Sum, Op::Prod, Op::Min, Op::Max, Op::Avg, Op::PreMulSum];

macro_rules! every_type {
    ($body:ident) => {
        $body::<i8>();
        $body::<u8>();
        $body::<i32>();
        $body::<u32>();
        $body::<i64>();
        $body::<u64>();
        $body::<f16>();
        $body::<f32>();
        $body::<f64>();
        $body::<bf16>();
    };
}

/// What a reduction gives that counts each rank so many times, from the vectors that ranks really contribute.
fn reduce<T: Number>(pattern: &Pattern<T>, vectors: &[Vec<T>], times: impl Fn(usize) -> usize) -> Vec<T> {
    let ranks: Vec<usize> =
        (0..vectors.len()).flat_map(|rank| std::iter::repeat_n(rank, times(rank))).collect();
    let scaled = |rank: usize, index: usize| match pattern.op {
        Op::PreMulSum => vectors[rank][index].times(T::of_factor(T::factor(rank))),
        _ => vectors[rank][index],
    };
    let reduced = |index: usize| {
        // Backwards, so that the order is another one than the pattern's own.
        let mut shares = ranks.iter().rev().map(|rank| scaled(*rank, index));
        match pattern.op {
            Op::Sum | Op::PreMulSum => shares.fold(T::of(0), T::plus),
            Op::Avg => shares.fold(T::of(0), T::plus).over(vectors.len()),
            Op::Prod => shares.fold(T::of(1), T::times),
            Op::Min => {
                let first = shares.next().unwrap_or_default();
                shares.fold(first, |a, b| if b < a { b } else { a })
            }
            Op::Max => {
                let first = shares.next().unwrap_or_default();
                shares.fold(first, |a, b| if b > a { b } else { a })
            }
        }
    };
    (0..vectors[0].len()).map(reduced).collect()
}

fn vectors<T: Number>(pattern: &Pattern<T>, count: usize, round: usize) -> Vec<Vec<T>> {
    let fill = |rank| {
        let mut vector = vec![T::default(); count];
        pattern.fill(rank, round, &mut vector);
        vector
    };
    (0..pattern.world).map(fill).collect()
}

fn a_right_result_passes<T: Number>() {
    for op in OPS {
        for world in (1..=70).chain([300]) {
            let pattern = Pattern::<T>::new(op, world);
            let vectors = vectors(&pattern, pattern.period.min(400) + 13, 0);
            let finding = pattern.verify(0, &reduce(&pattern, &vectors, |_| 1));
            assert_eq!(finding, Finding::default(), "{op:?} {} {world}", T::DTYPE.name());
        }
    }
}

#[test]
fn right_results_pass_in_every_world() {
    every_type!(a_right_result_passes);
}

fn a_lost_or_doubled_rank_is_named<T: Number>() {
    for op in OPS {
        // Counting the largest element twice changes nothing, so that cannot be told.
        let changes: &[(usize, &str)] = if matches!(op, Op::Min | Op::Max) {
            &[(0, "is missing")]
        } else {
            &[(0, "is missing"), (2, "is counted twice")]
        };
        for world in 1..=70 {
            let pattern = Pattern::<T>::new(op, world);
            let vectors = vectors(&pattern, pattern.turns, 0);
            for culprit in 0..world {
                for (times, words) in changes {
                    if world == 1 && matches!(op, Op::Min | Op::Max) {
                        continue;
                    }
                    let count = |rank| if rank == culprit { *times } else { 1 };
                    let finding = pattern.verify(0, &reduce(&pattern, &vectors, count));
                    let sentence = finding.sentence.unwrap_or_default();
                    let named = sentence.ends_with(&format!(": rank {culprit} {words}"));
                    assert!(named, "{op:?} {} rank {culprit} of {world}: {sentence:?}", T::DTYPE.name());
                }
            }
        }
    }
}

#[test]
fn a_rank_that_is_lost_or_counted_twice_is_named_in_every_world() {
    every_type!(a_lost_or_doubled_rank_is_named);
}

fn a_short_vector_is_checked_in_rounds<T: Number>() {
    for op in OPS {
        for (world, count) in [(5, 1), (70, 1), (70, 3), (33, 8)] {
            let pattern = Pattern::<T>::new(op, world);
            for culprit in 0..world {
                let wrong: u64 = (0..pattern.rounds(count))
                    .map(|round| {
                        let vectors = vectors(&pattern, count, round);
                        let lost = reduce(&pattern, &vectors, |rank| usize::from(rank != culprit));
                        pattern.verify(round, &lost).wrong
                    })
                    .sum();
                assert!(wrong > 0, "{op:?} {} rank {culprit} of {world}", T::DTYPE.name());
            }
        }
    }
}

#[test]
fn even_one_element_gives_every_rank_its_turn() {
    every_type!(a_short_vector_is_checked_in_rounds);
}

fn a_misplaced_result_is_noticed<T: Number>() {
    for op in OPS {
        for world in [2, 4, 7] {
            let pattern = Pattern::<T>::new(op, world);
            let mut whole = vec![T::default(); 1 << 14];
            let table = pattern.table(0, 0, |position| pattern.expected(position));
            (0..whole.len()).for_each(|index| whole[index] = table[index % table.len()]);
            whole.rotate_left(1 << 12);
            assert!(pattern.verify(0, &whole).wrong > 1 << 10, "{op:?} {} {world}", T::DTYPE.name());
        }
    }
}

#[test]
fn data_from_another_place_is_noticed() {
    every_type!(a_misplaced_result_is_noticed);
}

#[test]
fn stories_are_told_in_words() {
    let pattern = Pattern::<i32>::new(Op::Sum, 4);
    let vectors = vectors(&pattern, 100, 0);
    let told = |times: [usize; 4]| {
        pattern.verify(0, &reduce(&pattern, &vectors, |rank| times[rank])).sentence.unwrap_or_default()
    };
    assert_eq!(told([1, 1, 0, 1]), "first wrong element 0: got 69, expected 85: rank 2 is missing");
    assert!(told([2, 1, 1, 0]).ends_with(": rank 0 is counted twice and rank 3 is missing"));
    assert!(told([0, 0, 1, 0]).ends_with(": only rank 2 is there"));
    assert!(told([0, 0, 0, 0]).ends_with(": nobody's contribution is there"));
    assert!(told([7, 1, 1, 1]).ends_with("got 91, expected 85"));
}
