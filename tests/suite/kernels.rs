//! The GPU kernels' very source, compiled for a processor: their bits are the host device's, for every type, operation,
//! alignment and length. Only the payload and sign of a NaN may differ.
#![allow(
    unsafe_code,
    clippy::print_stderr,
    reason = "a test calls compiled C++ on memory of its own, and says what it skips"
)]

use flexring::DType;
use flexring::config::Simd;
use flexring::device::cuda::batch::{Batch, BatchBuilder, KernelOperand, OPERANDS};
use flexring::device::cuda::image::{COPY, symbol};
use flexring::device::host::Host;
use flexring::device::{Arithmetic, Device, Finish, Job, Submitted};
use flexring::memory::Piece;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::num::NonZeroU32;
use std::path::Path;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::OnceLock;

const ARITHMETICS: [Arithmetic; 4] = [Arithmetic::Sum, Arithmetic::Prod, Arithmetic::Max, Arithmetic::Min];

/// What is around a destination, and must still be there afterwards.
const CANARY: u8 = 0xa5;

type Launch = unsafe extern "C" fn(*const c_char, c_uint, c_uint, c_uint, *const c_void) -> c_int;

/// The compiled kernels; `None` where there is no compiler.
fn kernels() -> Option<Launch> {
    static KERNELS: OnceLock<Option<Launch>> = OnceLock::new();
    *KERNELS.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let library = folder.path().join("kernels.so");
        let mut compiler = Command::new("g++");
        compiler.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")));
        compiler.args(["-O2", "-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]);
        compiler.args([
            "-Wno-unknown-pragmas",
            "-shared",
            "-fPIC",
            "kernels/host/launch.cpp",
            "-Ikernels",
            "-o",
        ]);
        let output = match compiler.arg(&library).output() {
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => {
                eprintln!("skipped: no g++");
                return None;
            }
            output => output.expect("the compiler runs"),
        };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let path = CString::new(library.to_str().expect("a path in UTF-8")).expect("no zeros");
        // SAFETY: the library was just made and initialises nothing; it is never closed.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null(), "it can be loaded");
        // SAFETY: the library is open.
        let function = unsafe { libc::dlsym(library, c"flexring_host_launch".as_ptr()) };
        assert!(!function.is_null(), "kernels/host/launch.cpp exports it");
        // SAFETY: this is its type.
        Some(unsafe { std::mem::transmute::<*mut c_void, Launch>(function) })
    })
}

/// Random numbers that are the same in every run (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// How a float lies in its bits: bits of mantissa, and the bits that are 1 in the largest exponent.
fn format(dtype: DType) -> Option<(u32, u64)> {
    match dtype {
        DType::F16 => Some((10, 0x7c00)),
        DType::BF16 => Some((7, 0x7f80)),
        DType::F32 => Some((23, 0x7f80_0000)),
        DType::F64 => Some((52, 0x7ff0_0000_0000_0000)),
        DType::F8E4M3 => Some((3, 0x78)),
        DType::F8E5M2 => Some((2, 0x7c)),
        _ => None,
    }
}

fn is_nan(dtype: DType, bits: u64) -> bool {
    let Some((_, largest)) = format(dtype) else { return false };
    let magnitude = bits & !(1 << (dtype.size() * 8 - 1));
    if dtype == DType::F8E4M3 { magnitude == 0x7f } else { magnitude > largest }
}

/// An element's bits: any at all, something special, or a number that meets others of its size.
fn random_element(dtype: DType, random: &mut Random) -> u64 {
    let width = dtype.size() as u32 * 8;
    let (bits, sign) = (random.next(), 1 << (width - 1));
    let mask = u64::MAX >> (64 - width);
    let Some((mantissa, largest)) = format(dtype) else {
        // The least and the largest of either sort among them.
        return [0, 1, sign, sign - 1, mask, bits, bits, bits][random.below(8)] & mask;
    };
    match random.below(16) {
        0 => {
            let special = [0, 1, largest - 1, largest, largest + 1, 1 << mantissa, (1 << mantissa) - 1];
            (special[random.below(special.len())] | bits & sign) & mask
        }
        1..7 => bits & mask,
        _ => {
            let middle = largest >> 1 & largest;
            let near = middle + (bits & ((8 << mantissa) - 1).min(largest >> 2));
            (near | bits & sign) & mask
        }
    }
}

fn random_vector(dtype: DType, count: usize, random: &mut Random) -> Vec<u8> {
    (0..count)
        .flat_map(|_| random_element(dtype, random).to_le_bytes().into_iter().take(dtype.size()))
        .collect()
}

fn element(dtype: DType, bytes: &[u8], at: usize) -> u64 {
    let size = dtype.size();
    bytes[at * size..(at + 1) * size].iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte))
}

/// Memory that begins with a 16-byte granule; the vector in it lies where it is told to, canaries around it.
struct Memory {
    granules: Vec<u128>,
    start: usize,
    len: usize,
}

impl Memory {
    fn holding(bytes: &[u8], skew: usize) -> Self {
        let start = 32 + skew;
        let granules = vec![u128::from_ne_bytes([CANARY; 16]); (start + bytes.len() + 32).div_ceil(16)];
        let mut memory = Self { granules, start, len: bytes.len() };
        memory.all()[start..start + bytes.len()].copy_from_slice(bytes);
        memory
    }

    fn all(&mut self) -> &mut [u8] {
        let len = size_of_val(&self.granules[..]);
        // SAFETY: the bytes of the granules, which any byte may be written to.
        unsafe { std::slice::from_raw_parts_mut(self.granules.as_mut_ptr().cast(), len) }
    }

    fn piece(&mut self) -> Piece {
        let (start, len) = (self.start, self.len);
        let first = NonNull::from(&mut self.all()[start]);
        // SAFETY: within the memory, which its user keeps while the piece is used.
        unsafe { Piece::new(first, len) }
    }

    fn vector(&mut self) -> Vec<u8> {
        let (start, len) = (self.start, self.len);
        self.all()[start..start + len].to_vec()
    }

    fn is_intact_around(&mut self) -> bool {
        let (start, end) = (self.start, self.start + self.len);
        let all = self.all();
        all[..start].iter().chain(&all[end..]).all(|byte| *byte == CANARY)
    }
}

/// A reduction, and how its vectors lie.
#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    arithmetic: Arithmetic,
    count: usize,
    factors: Vec<Option<f64>>,
    divide: u32,
    /// Elements by which each operand, and last the destination, is beyond a granule.
    skews: Vec<usize>,
    /// Which operand the result replaces, if any.
    in_place: Option<usize>,
    grid: u32,
    block: u32,
}

impl Case {
    fn new(dtype: DType, arithmetic: Arithmetic, count: usize, operands: usize) -> Self {
        Self {
            dtype,
            arithmetic,
            count,
            factors: vec![None; operands],
            divide: 0,
            skews: vec![0; operands + 1],
            in_place: None,
            grid: 2,
            block: 32,
        }
    }

    fn operands(&self) -> usize {
        self.factors.len()
    }

    /// The vectors' memory: that of the operands, and last the destination's.
    fn memories(&self, inputs: &[Vec<u8>]) -> Vec<Memory> {
        let nothing = vec![0x11; self.count * self.dtype.size()];
        let vectors = inputs.iter().chain([&nothing]);
        vectors
            .zip(&self.skews)
            .map(|(bytes, skew)| Memory::holding(bytes, skew * self.dtype.size()))
            .collect()
    }

    fn destination(&self) -> usize {
        self.in_place.unwrap_or(self.operands())
    }

    fn on_host(&self, host: &mut Host, inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut memories = self.memories(inputs);
        let pieces: Vec<Piece> = memories.iter_mut().map(Memory::piece).collect();
        let operands: Vec<_> = pieces
            .iter()
            .zip(&self.factors)
            .map(|(piece, factor)| flexring::device::Operand { piece: *piece, factor: *factor })
            .collect();
        let job = Job {
            dtype: self.dtype,
            arithmetic: self.arithmetic,
            into: pieces[self.destination()],
            operands: &operands,
            finish: if self.divide == 0 { Finish::Keep } else { Finish::Divide(self.divide) },
            streaming: false,
        };
        assert_eq!(host.submit(&job, 0).expect("a sound job"), Submitted::Done);
        memories[self.destination()].vector()
    }

    fn push(&self, filling: &mut BatchBuilder, memories: &mut [Memory]) -> bool {
        let addresses: Vec<u64> =
            memories.iter_mut().map(|memory| memory.piece().as_ptr().addr() as u64).collect();
        let operands =
            addresses.iter().zip(&self.factors).map(|(at, factor)| KernelOperand::new(*at, *factor));
        let into = addresses[self.destination()];
        filling.push(into, self.count as u64, operands, NonZeroU32::new(self.divide))
    }
}

fn launch(kernel: &CStr, grid: (u32, u32), block: u32, batch: &Batch) -> bool {
    let launch = kernels().expect("asked before");
    // SAFETY: the batch is laid out as kernels are told, and all that it points to is there.
    unsafe { launch(kernel.as_ptr(), grid.0, grid.1, block, (&raw const *batch).cast()) == 0 }
}

/// Runs cases of one type and operation in one launch, and each of them on the host.
fn try_out(host: &mut Host, random: &mut Random, cases: &[Case]) {
    let inputs: Vec<Vec<Vec<u8>>> = cases
        .iter()
        .map(|case| (0..case.operands()).map(|_| random_vector(case.dtype, case.count, random)).collect())
        .collect();
    try_out_with(host, cases, &inputs);
}

fn try_out_with(host: &mut Host, cases: &[Case], inputs: &[Vec<Vec<u8>>]) {
    let mut filling = BatchBuilder::default();
    let mut memories: Vec<Vec<Memory>> =
        cases.iter().zip(inputs).map(|(case, inputs)| case.memories(inputs)).collect();
    for (case, memories) in cases.iter().zip(&mut memories) {
        assert!(case.push(&mut filling, memories), "there is room");
    }
    let first = &cases[0];
    let kernel = symbol(first.dtype, first.arithmetic);
    let grid = (first.grid, filling.tasks() as u32);
    assert!(launch(kernel, grid, first.block, filling.batch()), "there is {}", kernel.to_string_lossy());

    for ((case, inputs), memories) in cases.iter().zip(inputs).zip(&mut memories) {
        let expected = case.on_host(host, inputs);
        let found = memories[case.destination()].vector();
        for (nth, memory) in memories.iter_mut().enumerate() {
            assert!(memory.is_intact_around(), "wrote beyond vector {nth}: {case:?}");
            let written = nth == case.destination() || nth == case.operands();
            assert!(written || memory.vector() == inputs[nth], "wrote to operand {nth}: {case:?}");
        }
        if found == expected {
            continue;
        }
        for at in 0..case.count {
            let [found, expected] = [&found, &expected].map(|bytes| element(case.dtype, bytes, at));
            let nans = is_nan(case.dtype, found) && is_nan(case.dtype, expected);
            assert!(
                found == expected || nans,
                "element {at}: {found:#x} not {expected:#x}, from {:x?}: {case:?}",
                inputs.iter().map(|input| element(case.dtype, input, at)).collect::<Vec<_>>()
            );
        }
    }
}

/// A factor that the type can hold, if any.
fn random_factor(dtype: DType, random: &mut Random) -> Option<f64> {
    match random.below(4) {
        0 => None,
        1 => Some(3.0),
        2 if dtype.is_float() => Some(1.0 / 3.0),
        2 if matches!(dtype, DType::I8 | DType::I32 | DType::I64) => Some(-(random.below(100) as f64)),
        _ => Some(random.below(100) as f64),
    }
}

fn host() -> Option<Host> {
    kernels().map(|_| Host::new(Simd::Auto).expect("there is always one"))
}

/// Counts around the ends of granules, of what a block takes at once, and of the whole grid.
fn counts(dtype: DType, block: usize) -> Vec<usize> {
    let granule = 16 / dtype.size();
    let at_once = block * granule * if dtype.size() == 1 { 2 } else { 4 };
    let edges = [granule, 2 * granule, 3 * granule, block * granule, at_once, 2 * at_once, 3 * at_once];
    let edges = edges.into_iter().flat_map(|edge| [edge - 1, edge, edge + 1]);
    [0, 1, 2, 3, 7, 15, 16, 17, 31, 33].into_iter().chain(edges).collect()
}

#[test]
fn every_type_operation_and_finish_has_the_bits_of_the_host() {
    let Some(mut host) = host() else { return };
    for dtype in DType::ALL {
        let random = &mut Random(dtype as u64);
        let granule = 16 / dtype.size();
        for arithmetic in ARITHMETICS {
            for operands in [1, 2, 3, 7, OPERANDS] {
                for divide in [0, 1, 2, 3, 8, operands as u32 + 1, 300, u32::MAX] {
                    for in_place in [None, Some(0), Some(operands - 1)] {
                        let block = [1, 32, 64][random.below(3)];
                        let counts = counts(dtype, block);
                        let mut case =
                            Case::new(dtype, arithmetic, counts[random.below(counts.len())], operands);
                        case.grid = [1, 2, 3, 5][random.below(4)];
                        (case.block, case.divide, case.in_place) = (block as u32, divide, in_place);
                        if operands == OPERANDS {
                            case.count %= 300;
                        }
                        // Half of them lie alike.
                        let alike = random.below(granule);
                        let odd = random.below(2) == 0;
                        for skew in &mut case.skews {
                            *skew = if odd { random.below(granule) } else { alike };
                        }
                        try_out(&mut host, random, std::slice::from_ref(&case));
                        for factor in &mut case.factors {
                            *factor = random_factor(dtype, random);
                        }
                        try_out(&mut host, random, std::slice::from_ref(&case));
                    }
                }
            }
        }
    }
}

#[test]
fn every_alignment_and_length_is_done_whole_and_nothing_else() {
    let Some(mut host) = host() else { return };
    for dtype in DType::ALL {
        let random = &mut Random(100 + dtype as u64);
        let granule = 16 / dtype.size();
        for into in 0..granule {
            for operand in 0..granule {
                for count in counts(dtype, 8) {
                    let mut case = Case::new(dtype, Arithmetic::Sum, count, 2);
                    case.block = 8;
                    case.skews = vec![operand, into, into];
                    try_out(&mut host, random, &[case]);
                }
            }
        }
    }
}

#[test]
fn tasks_of_a_launch_are_done_each_by_itself() {
    let Some(mut host) = host() else { return };
    let random = &mut Random(7);
    for dtype in DType::ALL {
        for arithmetic in ARITHMETICS {
            let case = |nth: usize, random: &mut Random| {
                let mut case = Case::new(dtype, arithmetic, [5, 0, 1000, 64][nth % 4], 1 + nth % 8);
                case.divide = nth as u32 % 5;
                case.factors[0] = random_factor(dtype, random);
                case
            };
            let cases: Vec<Case> = (0..16).map(|nth| case(nth, random)).collect();
            try_out(&mut host, random, &cases);
        }
    }
}

#[test]
fn every_pair_of_eight_bits_is_right() {
    let Some(mut host) = host() else { return };
    let pairs = || (0..=u8::MAX).flat_map(|first| (0..=u8::MAX).map(move |second| (first, second)));
    let (first, second): (Vec<u8>, Vec<u8>) = pairs().unzip();
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.size() == 1) {
        for arithmetic in ARITHMETICS {
            for (divide, factor) in [(0, None), (3, None), (128, None), (0, Some(3.0)), (7, Some(100.0))] {
                let mut case = Case::new(dtype, arithmetic, first.len(), 2);
                (case.divide, case.factors[1]) = (divide, factor);
                try_out_with(&mut host, &[case], &[vec![first.clone(), second.clone()]]);
            }
        }
    }
}

#[test]
fn every_float_of_sixteen_bits_is_widened_and_rounded_right() {
    let Some(mut host) = host() else { return };
    let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for dtype in [DType::F16, DType::BF16] {
        // What comes out lies between elements, near ties, among subnormals, and beyond the largest.
        for factor in
            [1.0, 0.5, 1.0 / 3.0, 1.0 + 1.0 / 2048.0, 1.0 / 257.0, 1e-3, -7.0, 1e30, 1e-30, f64::INFINITY]
        {
            let mut case = Case::new(dtype, Arithmetic::Sum, 1 << 16, 1);
            case.factors[0] = Some(factor);
            try_out_with(&mut host, &[case], &[vec![every.clone()]]);
        }
        for other in (0..=u16::MAX).step_by(1021) {
            let others = other.to_le_bytes().repeat(1 << 16);
            for arithmetic in ARITHMETICS {
                let case = Case::new(dtype, arithmetic, 1 << 16, 2);
                try_out_with(&mut host, &[case], &[vec![every.clone(), others.clone()]]);
            }
        }
    }
}

#[test]
fn copies_need_no_alignment_and_stay_within_their_piece() {
    let Some(_) = host() else { return };
    let bytes: Vec<u8> = (0..3000u32).map(|nth| (nth * 7 + nth / 256) as u8).collect();
    for from in 0..16 {
        for into in 0..16 {
            for len in [0, 1, 2, 14, 15, 16, 17, 31, 32, 33, 47, 511, 512, 513, 1024, 2999] {
                for block in [1, 8, 40] {
                    let mut source = Memory::holding(&bytes[..len], from);
                    let mut target = Memory::holding(&vec![0; len], into);
                    let mut filling = BatchBuilder::default();
                    let at = |memory: &mut Memory| memory.piece().as_ptr().addr() as u64;
                    let operand = KernelOperand::new(at(&mut source), None);
                    assert!(filling.push(at(&mut target), len as u64, std::iter::once(operand), None));
                    assert!(launch(COPY, (3, 1), block, filling.batch()));
                    assert_eq!(target.vector(), bytes[..len], "{len} bytes from {from} to {into}");
                    assert!(target.is_intact_around(), "{len} bytes from {from} to {into}");
                }
            }
        }
    }
}

#[test]
fn what_a_gpu_would_refuse_is_refused() {
    let Some(_) = host() else { return };
    let filling = BatchBuilder::default();
    assert!(!launch(c"flexring_sum_quad", (1, 1), 32, filling.batch()));
    assert!(!launch(COPY, (1, 1), 513, filling.batch()));
    assert!(!launch(COPY, (0, 1), 32, filling.batch()));
    assert!(launch(COPY, (1, 16), 32, filling.batch()), "tasks of nothing");
}
