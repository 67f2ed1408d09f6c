//! The kernels against a reference that computes one element at a time, with every instruction set of this
//! processor.

use super::*;

use crate::device::Operand;
use crate::error::ErrorKind;
use fastrand::Rng;
use std::fmt::Debug;
use std::ptr::NonNull;

/// The operations that elements of this type have.
fn arithmetics(dtype: DType) -> impl Iterator<Item = Arithmetic> {
    Arithmetic::ALL.into_iter().filter(move |arithmetic| arithmetic.is_defined_for(dtype))
}

/// The bytes around a destination, which must not change.
const CANARY: u8 = 0xa5;

fn hosts() -> Vec<Host> {
    [Simd::Scalar, Simd::Avx2, Simd::Avx512, Simd::Neon]
        .into_iter()
        .filter_map(|simd| Host::new(simd).ok())
        .collect()
}

/// The reference arithmetic of an element type, in the simplest form.
trait Reference: Copy + Debug {
    const DTYPE: DType;
    type Wide: Copy;
    /// An element from random bits; sometimes a special value.
    fn from_random(bits: u64) -> Self;
    fn wide(self) -> Self::Wide;
    fn rounded(wide: Self::Wide) -> Self;
    fn scaled(wide: Self::Wide, factor: f64) -> Self::Wide;
    fn combined(arithmetic: Arithmetic, left: Self::Wide, right: Self::Wide) -> Self::Wide;
    fn divided(wide: Self::Wide, ranks: u32) -> Self::Wide;
    /// Equal in every bit, or both NaN.
    fn same(self, other: Self) -> bool;
}

macro_rules! integer_reference {
    ($($ty:ident => $dtype:ident),*) => {$(
        impl Reference for $ty {
            const DTYPE: DType = DType::$dtype;
            type Wide = Self;
            fn from_random(bits: u64) -> Self {
                match bits % 8 {
                    0 => Self::MIN,
                    1 => Self::MAX,
                    2 => (bits >> 56) as Self,
                    _ => (bits >> 3) as Self,
                }
            }
            fn wide(self) -> Self { self }
            fn rounded(wide: Self) -> Self { wide }
            fn scaled(wide: Self, factor: f64) -> Self { wide.wrapping_mul(factor as Self) }
            fn combined(arithmetic: Arithmetic, left: Self, right: Self) -> Self {
                match arithmetic {
                    Arithmetic::Sum => left.wrapping_add(right),
                    Arithmetic::Prod => left.wrapping_mul(right),
                    Arithmetic::Max => left.max(right),
                    Arithmetic::Min => left.min(right),
                    Arithmetic::BitAnd => left & right,
                    Arithmetic::BitOr => left | right,
                    Arithmetic::BitXor => left ^ right,
                }
            }
            fn divided(wide: Self, ranks: u32) -> Self { (i128::from(wide) / i128::from(ranks)) as Self }
            fn same(self, other: Self) -> bool { self == other }
        }
    )*};
}

impl Reference for Boolean {
    const DTYPE: DType = DType::Bool;
    type Wide = bool;
    fn from_random(bits: u64) -> Self {
        Self::from_byte([0, 0, 1, (bits >> 8) as u8][bits as usize % 4])
    }
    fn wide(self) -> bool {
        self.is_true()
    }
    fn rounded(wide: bool) -> Self {
        wide.into()
    }
    fn scaled(wide: bool, factor: f64) -> bool {
        wide && factor != 0.0
    }
    fn combined(arithmetic: Arithmetic, left: bool, right: bool) -> bool {
        match arithmetic {
            Arithmetic::Sum | Arithmetic::Max | Arithmetic::BitOr => left || right,
            Arithmetic::Prod | Arithmetic::Min | Arithmetic::BitAnd => left && right,
            Arithmetic::BitXor => left != right,
        }
    }
    fn divided(wide: bool, _ranks: u32) -> bool {
        wide
    }
    fn same(self, other: Self) -> bool {
        self == other
    }
}

integer_reference!(i8 => I8, u8 => U8, i16 => I16, u16 => U16, i32 => I32, u32 => U32, i64 => I64, u64 => U64);

macro_rules! float_reference {
    ($($ty:ident as $wide:ident => $dtype:ident, $widen:expr, $round:expr, $special:expr;)*) => {$(
        impl Reference for $ty {
            const DTYPE: DType = DType::$dtype;
            type Wide = $wide;
            fn from_random(bits: u64) -> Self {
                let special = $special;
                match bits % 16 {
                    0 => special[(bits >> 8) as usize % special.len()],
                    // Any bits, including NaNs and subnormals.
                    1..8 => Self::from_bits((bits >> 8) as _),
                    // Numbers of similar size, so that sums must round.
                    _ => $round(((bits >> 40) as i32 - (1 << 23)) as $wide / 4096.0),
                }
            }
            fn wide(self) -> $wide { $widen(self) }
            fn rounded(wide: $wide) -> Self { $round(wide) }
            fn scaled(wide: $wide, factor: f64) -> $wide { wide * factor as $wide }
            fn combined(arithmetic: Arithmetic, left: $wide, right: $wide) -> $wide {
                let less = |a: $wide, b: $wide| a < b || a == b && a.is_sign_negative();
                match arithmetic {
                    Arithmetic::Sum => left + right,
                    Arithmetic::Prod => left * right,
                    _ if left.is_nan() || right.is_nan() => $wide::NAN,
                    Arithmetic::Max => if less(left, right) { right } else { left },
                    Arithmetic::Min => if less(left, right) { left } else { right },
                    _ => unreachable!("floats have no bitwise operations"),
                }
            }
            fn divided(wide: $wide, ranks: u32) -> $wide { wide / ranks as $wide }
            fn same(self, other: Self) -> bool {
                self.to_bits() == other.to_bits() || self.is_nan() && other.is_nan()
            }
        }
    )*};
}

float_reference! {
    f16 as f32 => F16, f16::to_f32_const, f16::from_f32_const, [
        f16::NAN, f16::INFINITY, f16::NEG_INFINITY, f16::ZERO, f16::NEG_ZERO, f16::MAX, f16::MIN,
        f16::MIN_POSITIVE, f16::MIN_POSITIVE_SUBNORMAL, f16::MAX_SUBNORMAL, f16::ONE,
    ];
    bf16 as f32 => BF16, bf16::to_f32_const, bf16::from_f32_const, [
        bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY, bf16::ZERO, bf16::NEG_ZERO, bf16::MAX, bf16::MIN,
        bf16::MIN_POSITIVE, bf16::MIN_POSITIVE_SUBNORMAL, bf16::MAX_SUBNORMAL, bf16::ONE,
    ];
    F8E4M3 as f32 => F8E4M3, F8E4M3::to_f32, F8E4M3::from_f32, [
        F8E4M3::NAN, F8E4M3::from_bits(0), F8E4M3::from_bits(0x80), F8E4M3::MAX, F8E4M3::from_bits(0xfe),
        F8E4M3::from_bits(1), F8E4M3::from_bits(7), F8E4M3::from_bits(8), F8E4M3::from_bits(0x38),
    ];
    F8E5M2 as f32 => F8E5M2, F8E5M2::to_f32, F8E5M2::from_f32, [
        F8E5M2::NAN, F8E5M2::INFINITY, F8E5M2::from_bits(0xfc), F8E5M2::from_bits(0), F8E5M2::from_bits(0x80),
        F8E5M2::MAX, F8E5M2::from_bits(1), F8E5M2::from_bits(3), F8E5M2::from_bits(4), F8E5M2::from_bits(0x3c),
    ];
    f32 as f32 => F32, |x| x, |x| x, [
        f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, f32::MAX, f32::MIN,
        f32::MIN_POSITIVE, f32::from_bits(1), f32::from_bits(0x8000_0001), 1.0,
    ];
    f64 as f64 => F64, |x| x, |x| x, [
        f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, f64::MAX, f64::MIN,
        f64::MIN_POSITIVE, f64::from_bits(1), f64::from_bits(1 << 63 | 1), 1.0,
    ];
}

/// Memory that starts at a cache line, so that tests control the alignment of their pieces.
struct AlignedMemory(Vec<[u64; 8]>);

impl AlignedMemory {
    /// Memory with `values` from element `start` on, and canaries around them.
    fn holding<T: Reference>(values: &[T], start: usize) -> Self {
        let bytes = (start + values.len()) * size_of::<T>() + 64;
        let mut memory = Self(vec![[u64::from_ne_bytes([CANARY; 8]); 8]; bytes.div_ceil(64) + 1]);
        for (i, value) in values.iter().enumerate() {
            // SAFETY: the memory has room for start + len elements.
            unsafe { memory.first().cast::<T>().add(start + i).write_unaligned(*value) };
        }
        memory
    }

    fn first(&mut self) -> *mut u8 {
        let unaligned = self.0.as_mut_ptr().cast::<u8>();
        unaligned.wrapping_add(unaligned.align_offset(64))
    }

    fn piece<T>(&mut self, start: usize, len: usize) -> Piece {
        let bytes = self.first().wrapping_add(start * size_of::<T>());
        // SAFETY: within the memory, which lives as long as the test uses the piece.
        unsafe { Piece::new(NonNull::new(bytes).expect("not null"), len * size_of::<T>()) }
    }

    fn values<T: Reference>(&mut self, start: usize, len: usize) -> Vec<T> {
        let piece = self.piece::<T>(start, len);
        // SAFETY: i < len, the length of the piece.
        (0..len).map(|i| unsafe { piece.as_ptr().cast::<T>().add(i).read_unaligned() }).collect()
    }

    fn is_intact_around<T>(&mut self, start: usize, len: usize) -> bool {
        let (first, last) = (start * size_of::<T>(), (start + len) * size_of::<T>());
        let all = size_of_val(&self.0[..]) - 64;
        let base = self.first();
        // SAFETY: at < all, which excludes the bytes that the alignment may take.
        (0..first).chain(last..all).all(|at| unsafe { base.add(at).read() } == CANARY)
    }
}

#[derive(Clone, Copy, Debug)]
enum Destination {
    Separate,
    Operand(usize),
}

#[derive(Clone, Debug)]
struct Case {
    arithmetic: Arithmetic,
    finish: Finish,
    factors: Vec<Option<f64>>,
    len: usize,
    into: Destination,
    streaming: bool,
}

/// Runs the case on every host and compares with the reference.
fn check_case<T: Reference>(hosts: &mut [Host], random: &mut Rng, case: &Case) {
    let k = case.factors.len();
    let inputs: Vec<Vec<T>> =
        (0..k).map(|_| (0..case.len).map(|_| T::from_random(random.u64(..))).collect()).collect();
    let expected: Vec<T> = (0..case.len)
        .map(|i| {
            let value = |nth: usize| {
                let wide = inputs[nth][i].wide();
                case.factors[nth].map_or(wide, |factor| T::scaled(wide, factor))
            };
            let wide = (1..k).fold(value(0), |wide, nth| T::combined(case.arithmetic, wide, value(nth)));
            T::rounded(match case.finish {
                Finish::Divide(ranks) => T::divided(wide, ranks),
                Finish::Keep => wide,
            })
        })
        .collect();
    let starts: Vec<usize> = (0..=k).map(|_| random.u64(..) as usize % 65).collect();
    for host in hosts {
        let mut sources: Vec<AlignedMemory> = inputs
            .iter()
            .zip(&starts)
            .map(|(values, start)| AlignedMemory::holding(values, *start))
            .collect();
        let mut apart = AlignedMemory::holding(&vec![T::from_random(3); case.len], starts[k]);
        let operands: Vec<Operand> = sources
            .iter_mut()
            .zip(&starts)
            .zip(&case.factors)
            .map(|((memory, start), factor)| Operand {
                piece: memory.piece::<T>(*start, case.len),
                factor: *factor,
            })
            .collect();
        let into = match case.into {
            Destination::Separate => apart.piece::<T>(starts[k], case.len),
            Destination::Operand(nth) => operands[nth].piece,
        };
        let job = Job {
            dtype: T::DTYPE,
            arithmetic: case.arithmetic,
            into,
            operands: &operands,
            finish: case.finish,
            streaming: case.streaming,
        };
        assert_eq!(host.submit(&job, 0).expect("a sound job"), Submitted::Done);
        let (memory, start) = match case.into {
            Destination::Separate => (&mut apart, starts[k]),
            Destination::Operand(nth) => (&mut sources[nth], starts[nth]),
        };
        let context = || format!("{:?} with {}: {case:?}", T::DTYPE, host.simd.name());
        assert!(memory.is_intact_around::<T>(start, case.len), "{} wrote beyond its piece", context());
        for (i, (found, expected)) in memory.values::<T>(start, case.len).iter().zip(&expected).enumerate() {
            let from = || inputs.iter().map(|input| input[i]).collect::<Vec<_>>();
            assert!(found.same(*expected), "{}: {found:?} not {expected:?} from {:?}", context(), from());
        }
    }
}

fn check_all_cases<T: Reference>() {
    const LENGTHS: [usize; 25] = [
        0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1000,
        4099,
    ];
    let (mut hosts, mut random) = (hosts(), Rng::with_seed(u64::from(T::DTYPE as u8)));
    for arithmetic in arithmetics(T::DTYPE) {
        for k in [1, 2, 3, 4, 5, 8, 9] {
            for finish in [Finish::Keep, Finish::Divide(1), Finish::Divide(3), Finish::Divide(k as u32 + 1)] {
                for into in [Destination::Separate, Destination::Operand(0), Destination::Operand(k - 1)] {
                    for streaming in [false, true] {
                        for factors in [vec![None; k], (0..k).map(|_| factor(&mut random)).collect()] {
                            // Every length with every k, but not with every other parameter.
                            let some = random.u64(..) as usize;
                            for len in [LENGTHS[some % 25], LENGTHS[some / 25 % 25], some / 625 % 300] {
                                let factors = factors.clone();
                                let case = Case { arithmetic, finish, factors, len, into, streaming };
                                check_case::<T>(&mut hosts, &mut random, &case);
                            }
                        }
                    }
                }
            }
        }
    }
    for len in LENGTHS {
        for (into, streaming) in
            [(Destination::Separate, true), (Destination::Separate, false), (Destination::Operand(1), false)]
        {
            let (arithmetic, finish) = (Arithmetic::Sum, Finish::Keep);
            let case = Case { arithmetic, finish, factors: vec![None; 2], len, into, streaming };
            check_case::<T>(&mut hosts, &mut random, &case);
        }
    }
}

fn factor(random: &mut Rng) -> Option<f64> {
    match random.u64(..) % 4 {
        0 => None,
        1 => Some(1.0),
        2 => Some(3.0),
        _ => Some((random.u64(..) % 100) as f64),
    }
}

macro_rules! agree_with_the_reference {
    ($($name:ident: $ty:ty),*) => {$(
        #[test]
        fn $name() {
            check_all_cases::<$ty>();
        }
    )*};
}

agree_with_the_reference! {
    int8_agrees_with_the_reference: i8,
    uint8_agrees_with_the_reference: u8,
    int16_agrees_with_the_reference: i16,
    uint16_agrees_with_the_reference: u16,
    bool_agrees_with_the_reference: Boolean,
    int32_agrees_with_the_reference: i32,
    uint32_agrees_with_the_reference: u32,
    int64_agrees_with_the_reference: i64,
    uint64_agrees_with_the_reference: u64,
    half_agrees_with_the_reference: f16,
    bfloat16_agrees_with_the_reference: bf16,
    float_agrees_with_the_reference: f32,
    double_agrees_with_the_reference: f64,
    float8e4m3_agrees_with_the_reference: F8E4M3,
    float8e5m2_agrees_with_the_reference: F8E5M2
}

/// Runs a job over whole vectors on one host.
fn run<T: Reference>(
    host: &mut Host,
    arithmetic: Arithmetic,
    inputs: &[(&[T], Option<f64>)],
    finish: Finish,
) -> Vec<T> {
    let len = inputs[0].0.len();
    let mut sources: Vec<AlignedMemory> =
        inputs.iter().map(|(values, _)| AlignedMemory::holding(values, 0)).collect();
    let mut into = AlignedMemory::holding(inputs[0].0, 0);
    let operands: Vec<Operand> = sources
        .iter_mut()
        .zip(inputs)
        .map(|(memory, (_, factor))| Operand { piece: memory.piece::<T>(0, len), factor: *factor })
        .collect();
    let into_piece = into.piece::<T>(0, len);
    let job =
        Job { dtype: T::DTYPE, arithmetic, into: into_piece, operands: &operands, finish, streaming: false };
    host.submit(&job, 0).expect("a sound job");
    into.values(0, len)
}

fn every_pattern<T: Reference>(from_bits: fn(u16) -> T) {
    let all: Vec<T> = (0..=u16::MAX).map(from_bits).collect();
    for mut host in hosts() {
        for factor in [1.0, 0.5, 1.0 / 3.0, 1e-3, -7.0, f64::INFINITY] {
            let found = run(&mut host, Arithmetic::Sum, &[(&all, Some(factor))], Finish::Keep);
            for (input, found) in all.iter().zip(found) {
                let expected = T::rounded(T::scaled(input.wide(), factor));
                assert!(found.same(expected), "{input:?} * {factor}: {found:?} not {expected:?}");
            }
        }
        for other in (0..=u16::MAX).step_by(1021).map(from_bits) {
            let others = vec![other; all.len()];
            for arithmetic in arithmetics(T::DTYPE) {
                let found = run(&mut host, arithmetic, &[(&all, None), (&others, None)], Finish::Keep);
                for (input, found) in all.iter().zip(found) {
                    let expected = T::rounded(T::combined(arithmetic, input.wide(), other.wide()));
                    assert!(
                        found.same(expected),
                        "{arithmetic:?}({input:?}, {other:?}): {found:?} not {expected:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn every_f16_is_widened_and_rounded_to_the_nearest() {
    every_pattern(f16::from_bits);
}

#[test]
fn every_bfloat16_is_widened_and_rounded_to_the_nearest() {
    every_pattern(bf16::from_bits);
}

#[test]
fn the_plain_conversions_round_floats_of_every_kind() {
    // Around each tie of two neighbours, and over the whole range.
    let ties = (0..0x7c00u16).map(|bits| {
        let (low, high) = (f16::from_bits(bits).to_f64(), f16::from_bits(bits + 1).to_f64());
        if high.is_finite() { (low + high) / 2.0 } else { 65520.0 }
    });
    let near = ties.flat_map(|tie| [-1i32, 0, 1].map(|d| ((tie as f32).to_bits() as i32 + d) as u32));
    for bits in near.chain((0..=u32::MAX).step_by(4093)) {
        for value in [f32::from_bits(bits), -f32::from_bits(bits)] {
            assert!(<f16 as Lane>::narrow(value).same(f16::from_f32_const(value)), "{value:e}");
            assert!(<bf16 as Lane>::narrow(value).same(bf16::from_f32_const(value)), "{value:e}");
        }
    }
}

#[test]
fn sums_of_f16_are_rounded_once() {
    // With rounding after each addition, every element would be lost: 2048 + 1 rounds to 2048.
    let (large, one) = ([f16::from_f32(2048.0); 33], [f16::ONE; 33]);
    for mut host in hosts() {
        let inputs = [(&large[..], None), (&one, None), (&one, None), (&one, None), (&one, None)];
        for value in run(&mut host, Arithmetic::Sum, &inputs, Finish::Keep) {
            assert_eq!(value.to_f32(), 2052.0);
        }
    }
}

#[test]
fn integers_divide_like_the_processor() {
    fn check<T: Reference + PartialEq>() {
        let mut random = Rng::with_seed(5);
        let values: Vec<T> = (0..1000).map(|_| T::from_random(random.u64(..))).collect();
        let some = (0..60).map(|_| (random.u64(..) >> 32 >> (random.u64(..) % 32)) as u32).filter(|n| *n > 0);
        for ranks in (1..20).chain([127, 128, 129, 255, 256, 257, u32::MAX - 1, u32::MAX]).chain(some) {
            for mut host in hosts() {
                let found = run(&mut host, Arithmetic::Sum, &[(&values, None)], Finish::Divide(ranks));
                for (value, found) in values.iter().zip(found) {
                    assert_eq!(found, T::rounded(T::divided(value.wide(), ranks)), "{value:?} / {ranks}");
                }
            }
        }
    }
    check::<i8>();
    check::<u8>();
    check::<i32>();
    check::<u32>();
    check::<i64>();
    check::<u64>();
    check::<i16>();
    check::<u16>();
}

#[test]
fn copies_need_no_alignment_and_stay_within_their_piece() {
    let values: Vec<u8> = (0..6000u32).map(|i| i as u8).collect();
    for mut host in hosts() {
        let cases = [(4000, 1, 3), (4000, 3, 2), (2048, 6, 6), (2040, 2, 9), (56, 5, 7), (0, 1, 1)];
        for ((len, from, into), streaming) in cases.into_iter().flat_map(|case| [(case, false), (case, true)])
        {
            let mut source = AlignedMemory::holding(&values, 0);
            let mut target = AlignedMemory::holding(&[] as &[u8], 5000);
            let piece = source.piece::<u8>(from, len);
            let job = Job {
                dtype: DType::F64,
                arithmetic: Arithmetic::Sum,
                into: target.piece::<u8>(into, len),
                operands: &[Operand { piece, factor: None }],
                finish: Finish::Keep,
                streaming,
            };
            host.submit(&job, 0).expect("a sound job");
            assert_eq!(target.values::<u8>(into, len), values[from..from + len]);
            assert!(target.is_intact_around::<u8>(into, len));
        }
    }
}

#[test]
fn threads_share_long_jobs_within_their_pieces() {
    let with_threads = |host: Host| host.with_threads(3).expect("threads");
    let (mut hosts, mut random) =
        (hosts().into_iter().map(with_threads).collect::<Vec<_>>(), Rng::with_seed(8));
    for len in [0, 1, 4095, 4096, 4097, 8192, 20_001] {
        for (k, into) in [
            (1, Destination::Separate),
            (2, Destination::Separate),
            (2, Destination::Operand(1)),
            (5, Destination::Operand(0)),
        ] {
            let (arithmetic, finish) = (Arithmetic::Sum, Finish::Divide(k as u32));
            let case = Case { arithmetic, finish, factors: vec![None; k], len, into, streaming: k == 5 };
            check_case::<f32>(&mut hosts, &mut random, &case);
            check_case::<i8>(&mut hosts, &mut random, &case);
        }
    }
}

#[test]
fn sums_have_the_same_bits_with_any_number_of_threads() {
    let mut random = Rng::with_seed(9);
    let mut vector = || (0..50_000).map(|_| f16::from_random(random.u64(..))).collect::<Vec<_>>();
    let (one, other, third) = (vector(), vector(), vector());
    let inputs = [(&one[..], None), (&other, Some(0.3)), (&third, None)];
    let sums = |threads: usize| {
        let mut host = Host::new(Simd::Auto).and_then(|host| host.with_threads(threads)).expect("threads");
        let mut sums = Vec::new();
        for pause in [0, 0, 1, 0] {
            // Helpers sleep after a while.
            std::thread::sleep(std::time::Duration::from_millis(pause));
            let values = run(&mut host, Arithmetic::Sum, &inputs, Finish::Divide(3));
            sums.push(values.into_iter().map(f16::to_bits).collect::<Vec<_>>());
        }
        sums
    };
    let expected = sums(1);
    for threads in [2, 3, 64] {
        assert!(sums(threads) == expected, "{threads} threads");
    }
}

#[test]
fn unsound_jobs_are_rejected_with_the_reason() {
    let mut host = Host::new(Simd::Auto).expect("a host device");
    let mut memory = AlignedMemory::holding(&[0u8; 1024], 0);
    let mut piece = |start, len| memory.piece::<u8>(start, len);
    let (low, high) = (piece(0, 64), piece(512, 64));
    for (into, operands, finish, reason) in [
        (low, vec![], Finish::Keep, "no operand"),
        (low, vec![high], Finish::Divide(0), "0 ranks"),
        (piece(0, 62), vec![piece(512, 62)], Finish::Keep, "within an element"),
        (low, vec![high, piece(512, 60)], Finish::Keep, "operand of 60 bytes"),
        (low, vec![high, piece(4, 64)], Finish::Keep, "overlaps"),
        (low, vec![high, piece(257, 64)], Finish::Keep, "aligned"),
        (piece(2, 64), vec![high, high], Finish::Keep, "aligned"),
    ] {
        let operands: Vec<Operand> =
            operands.into_iter().map(|piece| Operand { piece, factor: None }).collect();
        let (dtype, arithmetic) = (DType::F32, Arithmetic::Sum);
        let job = Job { dtype, arithmetic, into, operands: &operands, finish, streaming: false };
        let error = host.submit(&job, 0).expect_err(reason);
        assert_eq!(error.kind(), ErrorKind::Internal);
        assert!(error.message().contains(reason), "{error}");
    }
}

#[test]
fn a_missing_instruction_set_is_rejected_by_name() {
    let missing = if cfg!(target_arch = "x86_64") { Simd::Neon } else { Simd::Avx2 };
    let error = Host::new(missing).expect_err("not on this architecture");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains(missing.name()), "{error}");
    assert_ne!(Host::new(Simd::Auto).expect("a host device").simd(), Simd::Auto);
}
