//! The source of the GPU kernels, compiled for the CPU: gives the same bits as the host device for every
//! type, operation, alignment and length (only the payload and sign of NaNs may differ), and keeps its
//! protocol between ranks under random work.
#![allow(
    unsafe_code,
    clippy::print_stderr,
    reason = "a test calls compiled C++ on memory of its own, and says what it skips"
)]

use fastrand::Rng;
use flexring::DType;
use flexring::internal::device::cuda::image::symbol;
use flexring::internal::device::host::Host;
use flexring::internal::device::{Arithmetic, Device, Finish, Job, Submitted};
use flexring::internal::memory::Piece;
use flexring_core::config::Simd;
use flexring_plan::device_program::ItemPlace;
use flexring_plan::test_util::{ListedCall, contribution, listed_calls, random_plan};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::ptr::NonNull;
use std::sync::OnceLock;

/// The operations that elements of this type have.
fn arithmetics(dtype: DType) -> impl Iterator<Item = Arithmetic> {
    Arithmetic::ALL.into_iter().filter(move |arithmetic| arithmetic.is_defined_for(dtype))
}

/// The bytes around a destination, which must not change.
const CANARY: u8 = 0xa5;

/// The mark of an operand that is multiplied: `kScaled` in kernels/reduce.h.
const SCALED: u64 = 1 << 63;
/// More than a warp has threads.
const OPERANDS: usize = 70;

type Sum =
    unsafe extern "C" fn(*const c_char, *const u64, c_uint, *mut c_void, u64, c_uint, c_uint, f64) -> c_int;

/// Adds elements at these addresses, those with a factor multiplied by it, with the kernel of this name.
/// False if it refuses.
fn sum(
    kernel: &CStr,
    operands: &[(u64, Option<f64>)],
    into: u64,
    count: usize,
    arithmetic: Arithmetic,
    divide: u32,
) -> bool {
    let sum = kernels().expect("a compiler: the test has checked it");
    let factor = operands.iter().find_map(|operand| operand.1).unwrap_or(1.0);
    let words: Vec<u64> =
        operands.iter().map(|(at, factor)| if factor.is_some() { at | SCALED } else { *at }).collect();
    let into = into as *mut c_void;
    // SAFETY: all addresses are valid for as many elements.
    let outcome = unsafe {
        sum(
            kernel.as_ptr(),
            words.as_ptr(),
            words.len() as c_uint,
            into,
            count as u64,
            arithmetic as c_uint,
            divide,
            factor,
        )
    };
    outcome == 0
}

/// What g++ makes of these sources in kernels/host with these options, compiled once for all tests; `None`
/// where there is no compiler, or where it does not know the options.
fn compiled(sources: &[&str], options: &[&str]) -> Option<PathBuf> {
    let root = crate::programs::root();
    let common = [
        "-std=c++17",
        "-ffp-contract=off",
        "-pthread",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-Ikernels",
    ];
    let mut hasher = DefaultHasher::new();
    (sources, options, common).hash(&mut hasher);
    for folder in ["kernels", "kernels/host"] {
        let entries = std::fs::read_dir(root.join(folder)).expect("the folder of the kernels can be read");
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
        paths.sort();
        for path in paths.iter().filter(|path| path.is_file()) {
            std::fs::read(path).expect("a source can be read").hash(&mut hasher);
        }
    }
    let compiled =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kernels-{:016x}.so", hasher.finish()));
    if compiled.exists() {
        return Some(compiled);
    }
    // Tests that run at the same time may compile it twice; each moves a complete file into place.
    let unfinished = compiled.with_extension(std::process::id().to_string());
    let compile = |input: &[PathBuf]| {
        let mut compiler = Command::new("g++");
        compiler.current_dir(root).args(common).args(options).args(input).arg("-o").arg(&unfinished);
        match compiler.output() {
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => None,
            output => Some(output.expect("the compiler runs")),
        }
    };
    let probe = compiled.with_extension("probe.cpp");
    std::fs::write(&probe, "int main() {}").expect("a file can be written");
    if !compile(&[probe]).is_some_and(|output| output.status.success()) {
        eprintln!("skipped: no g++, or not with {options:?}");
        return None;
    }
    let sources: Vec<PathBuf> = sources.iter().map(|name| Path::new("kernels/host").join(name)).collect();
    let output = compile(&sources)?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&unfinished, &compiled).expect("the file can be moved into place");
    Some(compiled)
}

/// The compiled kernels; `None` if there is no compiler.
fn kernels() -> Option<Sum> {
    static KERNELS: OnceLock<Option<Sum>> = OnceLock::new();
    *KERNELS.get_or_init(|| {
        let library = compiled(&["launch.cpp"], &["-O2", "-shared", "-fPIC"])?;
        let path = CString::new(library.to_str().expect("a path in UTF-8")).expect("no zeros");
        // SAFETY: the library is compiled from this checkout and has no initializers; it is never closed.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null(), "it can be loaded");
        // SAFETY: the library is open.
        let function = unsafe { libc::dlsym(library, c"flexring_host_sum".as_ptr()) };
        assert!(!function.is_null(), "kernels/host/launch.cpp exports it");
        // SAFETY: this is its type.
        Some(unsafe { std::mem::transmute::<*mut c_void, Sum>(function) })
    })
}

/// The format of a float: bits of mantissa, and the mask of the exponent.
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

/// Random bits of an element: any bits, a special value, or a number of moderate size, so that sums must
/// round.
fn random_element(dtype: DType, random: &mut Rng) -> u64 {
    let width = dtype.size() as u32 * 8;
    let (bits, sign) = (random.u64(..), 1 << (width - 1));
    let mask = u64::MAX >> (64 - width);
    let Some((mantissa, largest)) = format(dtype) else {
        // Includes the smallest and largest signed and unsigned values.
        return [0, 1, sign, sign - 1, mask, bits, bits, bits][random.usize(..8)] & mask;
    };
    match random.usize(..16) {
        0 => {
            let special = [0, 1, largest - 1, largest, largest + 1, 1 << mantissa, (1 << mantissa) - 1];
            (special[random.usize(..special.len())] | bits & sign) & mask
        }
        1..7 => bits & mask,
        _ => {
            let middle = largest >> 1 & largest;
            let near = middle + (bits & ((8 << mantissa) - 1).min(largest >> 2));
            (near | bits & sign) & mask
        }
    }
}

fn random_vector(dtype: DType, count: usize, random: &mut Rng) -> Vec<u8> {
    (0..count)
        .flat_map(|_| random_element(dtype, random).to_le_bytes().into_iter().take(dtype.size()))
        .collect()
}

fn element(dtype: DType, bytes: &[u8], at: usize) -> u64 {
    let size = dtype.size();
    bytes[at * size..(at + 1) * size].iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte))
}

/// Memory that starts with a 16-byte granule, and a vector at a given offset in it between canaries.
struct VectorMemory {
    granules: Vec<u128>,
    start: usize,
    len: usize,
}

impl VectorMemory {
    fn holding(bytes: &[u8], skew: usize) -> Self {
        let start = 32 + skew;
        let granules = vec![u128::from_ne_bytes([CANARY; 16]); (start + bytes.len() + 32).div_ceil(16)];
        let mut memory = Self { granules, start, len: bytes.len() };
        memory.all()[start..start + bytes.len()].copy_from_slice(bytes);
        memory
    }

    fn all(&mut self) -> &mut [u8] {
        let len = size_of_val(&self.granules[..]);
        // SAFETY: the bytes of the granules; every bit pattern is valid for them.
        unsafe { std::slice::from_raw_parts_mut(self.granules.as_mut_ptr().cast(), len) }
    }

    fn piece(&mut self) -> Piece {
        let (start, len) = (self.start, self.len);
        let first = NonNull::from(&mut self.all()[start]);
        // SAFETY: within the memory, which its owner keeps while the piece is used.
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

/// A reduction, and the alignment of its vectors.
#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    arithmetic: Arithmetic,
    count: usize,
    /// Of each operand; all have the same factor or none.
    factors: Vec<Option<f64>>,
    divide: u32,
    /// Offset in a granule, in elements, of each operand and, last, of the destination.
    skews: Vec<usize>,
    /// The operand that the result replaces, if any.
    in_place: Option<usize>,
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
        }
    }

    fn operands(&self) -> usize {
        self.factors.len()
    }

    /// The memory of each operand and, last, of the destination.
    fn memories(&self, inputs: &[Vec<u8>]) -> Vec<VectorMemory> {
        let nothing = vec![0x11; self.count * self.dtype.size()];
        let vectors = inputs.iter().chain([&nothing]);
        vectors
            .zip(&self.skews)
            .map(|(bytes, skew)| VectorMemory::holding(bytes, skew * self.dtype.size()))
            .collect()
    }

    fn destination(&self) -> usize {
        self.in_place.unwrap_or(self.operands())
    }

    fn on_host(&self, host: &mut Host, inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut memories = self.memories(inputs);
        let pieces: Vec<Piece> = memories.iter_mut().map(VectorMemory::piece).collect();
        let operands: Vec<_> = pieces
            .iter()
            .zip(&self.factors)
            .map(|(piece, factor)| flexring::internal::device::Operand { piece: *piece, factor: *factor })
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

    fn on_gpu(&self, memories: &mut [VectorMemory]) {
        let addresses: Vec<u64> =
            memories.iter_mut().map(|memory| memory.piece().as_ptr().addr() as u64).collect();
        let operands: Vec<_> = addresses.iter().copied().zip(self.factors.iter().copied()).collect();
        let (into, kernel) = (addresses[self.destination()], symbol(self.dtype));
        let known = sum(kernel, &operands, into, self.count, self.arithmetic, self.divide);
        assert!(known, "no kernel {}", kernel.to_string_lossy());
    }
}

/// Runs a case, also on the host, and compares the results.
fn check(host: &mut Host, random: &mut Rng, case: &Case) {
    let inputs: Vec<Vec<u8>> =
        (0..case.operands()).map(|_| random_vector(case.dtype, case.count, random)).collect();
    check_with(host, case, &inputs);
}

fn check_with(host: &mut Host, case: &Case, inputs: &[Vec<u8>]) {
    let mut memories = case.memories(inputs);
    case.on_gpu(&mut memories);
    let expected = case.on_host(host, inputs);
    let found = memories[case.destination()].vector();
    for (nth, memory) in memories.iter_mut().enumerate() {
        assert!(memory.is_intact_around(), "wrote beyond vector {nth}: {case:?}");
        let written = nth == case.destination() || nth == case.operands();
        assert!(written || memory.vector() == inputs[nth], "wrote to operand {nth}: {case:?}");
    }
    if found == expected {
        return;
    }
    for at in 0..case.count {
        let [found, expected] = [&found, &expected].map(|bytes| element(case.dtype, bytes, at));
        let nans = is_nan(case.dtype, found) && is_nan(case.dtype, expected);
        // The host copies a single operand as it is.
        let both_true = case.dtype == DType::Bool && found > 0 && expected > 0;
        assert!(
            found == expected || nans || both_true,
            "element {at}: {found:#x} not {expected:#x}, from {:x?}: {case:?}",
            inputs.iter().map(|input| element(case.dtype, input, at)).collect::<Vec<_>>()
        );
    }
}

/// A random factor in the range of the type, or none.
fn random_factor(dtype: DType, random: &mut Rng) -> Option<f64> {
    match random.usize(..4) {
        0 => None,
        1 => Some(3.0),
        2 if dtype.is_float() => Some(1.0 / 3.0),
        2 if matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64) => {
            Some(-(random.usize(..100) as f64))
        }
        _ => Some(random.usize(..100) as f64),
    }
}

fn host() -> Option<Host> {
    kernels().map(|_| Host::new(Simd::Auto).expect("a host device"))
}

/// Counts around multiples of granules, and of what a thread reads at a time.
fn counts(dtype: DType, block: usize) -> Vec<usize> {
    let granule = 16 / dtype.size();
    let at_once = block * granule * if dtype.size() == 1 { 2 } else { 4 };
    let edges = [granule, 2 * granule, 3 * granule, block * granule, at_once, 2 * at_once, 3 * at_once];
    let edges = edges.into_iter().flat_map(|edge| [edge - 1, edge, edge + 1]);
    [0, 1, 2, 3, 7, 15, 16, 17, 31, 33].into_iter().chain(edges).collect()
}

#[test]
fn every_type_operation_and_finish_gives_the_hosts_bits() {
    let Some(mut host) = host() else { return };
    for dtype in DType::ALL {
        let random = &mut Rng::with_seed(dtype as u64);
        let granule = 16 / dtype.size();
        for arithmetic in arithmetics(dtype) {
            for operands in [1, 2, 3, 7, OPERANDS] {
                for divide in [0, 1, 2, 3, 8, operands as u32 + 1, 300, u32::MAX] {
                    for in_place in [None, Some(0), Some(operands - 1)] {
                        let block = [1, 32, 64][random.usize(..3)];
                        let counts = counts(dtype, block);
                        let mut case =
                            Case::new(dtype, arithmetic, counts[random.usize(..counts.len())], operands);
                        (case.divide, case.in_place) = (divide, in_place);
                        if operands == OPERANDS {
                            case.count %= 300;
                        }
                        // In half of the cases all vectors have the same alignment.
                        let alike = random.usize(..granule);
                        let odd = random.usize(..2) == 0;
                        for skew in &mut case.skews {
                            *skew = if odd { random.usize(..granule) } else { alike };
                        }
                        check(&mut host, random, &case);
                        let common = random_factor(dtype, random);
                        for factor in &mut case.factors {
                            *factor = common.filter(|_| random.usize(..3) > 0);
                        }
                        check(&mut host, random, &case);
                    }
                }
            }
        }
    }
}

#[test]
fn every_alignment_and_length_is_processed_completely() {
    let Some(mut host) = host() else { return };
    for dtype in DType::ALL {
        let random = &mut Rng::with_seed(100 + dtype as u64);
        let granule = 16 / dtype.size();
        for into in 0..granule {
            for operand in 0..granule {
                for count in counts(dtype, 8) {
                    let mut case = Case::new(dtype, Arithmetic::Sum, count, 2);
                    case.skews = vec![operand, into, into];
                    check(&mut host, random, &case);
                }
            }
        }
    }
}

#[test]
fn every_pair_of_8_bit_values_is_reduced_correctly() {
    let Some(mut host) = host() else { return };
    let pairs = || (0..=u8::MAX).flat_map(|first| (0..=u8::MAX).map(move |second| (first, second)));
    let (first, second): (Vec<u8>, Vec<u8>) = pairs().unzip();
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.size() == 1) {
        for arithmetic in arithmetics(dtype) {
            for (divide, factor) in [(0, None), (3, None), (128, None), (0, Some(3.0)), (7, Some(100.0))] {
                let mut case = Case::new(dtype, arithmetic, first.len(), 2);
                (case.divide, case.factors[1]) = (divide, factor);
                check_with(&mut host, &case, &[first.clone(), second.clone()]);
            }
        }
    }
}

#[test]
fn every_16_bit_float_is_widened_and_rounded_correctly() {
    let Some(mut host) = host() else { return };
    let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    for dtype in [DType::F16, DType::BF16] {
        // The results are between elements, near ties, subnormal, and beyond the largest number.
        for factor in
            [1.0, 0.5, 1.0 / 3.0, 1.0 + 1.0 / 2048.0, 1.0 / 257.0, 1e-3, -7.0, 1e30, 1e-30, f64::INFINITY]
        {
            let mut case = Case::new(dtype, Arithmetic::Sum, 1 << 16, 1);
            case.factors[0] = Some(factor);
            check_with(&mut host, &case, std::slice::from_ref(&every));
        }
        for other in (0..=u16::MAX).step_by(1021) {
            let others = other.to_le_bytes().repeat(1 << 16);
            for arithmetic in arithmetics(dtype) {
                let case = Case::new(dtype, arithmetic, 1 << 16, 2);
                check_with(&mut host, &case, &[every.clone(), others.clone()]);
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
                let mut source = VectorMemory::holding(&bytes[..len], from);
                let mut target = VectorMemory::holding(&vec![0; len], into);
                let at = |memory: &mut VectorMemory| memory.piece().as_ptr().addr() as u64;
                let (operands, into_at) = ([(at(&mut source), None)], at(&mut target));
                assert!(sum(symbol(DType::U8), &operands, into_at, len, Arithmetic::Sum, 0));
                assert_eq!(target.vector(), bytes[..len], "{len} bytes from {from} to {into}");
                assert!(target.is_intact_around(), "{len} bytes from {from} to {into}");
            }
        }
    }
}

#[test]
fn unknown_kernels_and_too_many_operands_are_refused() {
    let Some(_) = host() else { return };
    let sum = |kernel, operands| sum(kernel, &vec![(0, None); operands], 0, 0, Arithmetic::Sum, 0);
    assert!(!sum(c"flexring_collective_quad", 1));
    assert!(!sum(symbol(DType::U8), 1024) && !sum(symbol(DType::U8), 0));
    assert!(sum(symbol(DType::U8), 1023));
}

/// The program that plays the ranks of a node on the kernels of collectives; see
/// kernels/host/collective_stress.cpp.
fn collective_stress(options: &[&str]) -> Option<PathBuf> {
    let options = [options, &["-DFLEXRING_STRESSED"]].concat();
    compiled(&["collective_stress.cpp", "launch.cpp"], &options)
}

/// Runs it; with a rule, the kernels break it.
fn play_collectives(program: &Path, worlds: u32, rule: Option<u32>) -> Output {
    let rule = rule.map(|rule| rule.to_string());
    let arguments = ["1".to_owned(), worlds.to_string()].into_iter().chain(rule);
    let program = &mut Command::new(program);
    program.args(arguments).env("TSAN_OPTIONS", "halt_on_error=1").output().expect("the program runs")
}

fn expect_right_results(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The number of the rule that only ThreadSanitizer sees broken, because this machine orders stores:
/// `kOrderedWords`.
const ORDERED_WORDS: u32 = 6;

/// The rules of lists: `kWaitForItems` to `kItemsInOrder`.
const ITEM_RULES: std::ops::RangeInclusive<u32> = 12..=15;

/// Wrong results, hangs, failures that are not reported: each rule is there to prevent one, which is seen
/// where the kernels break it.
#[test]
fn collectives_are_right_and_broken_rules_are_noticed() {
    let Some(program) = collective_stress(&["-O1", "-DFLEXRING_READS_EARLY"]) else { return };
    expect_right_results(&play_collectives(&program, 20, None));
    for rule in (1..=11).filter(|rule| *rule != ORDERED_WORDS) {
        let output = play_collectives(&program, 20, Some(rule));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains("failed: "), "rule {rule} was broken, and nothing was noticed");
        println!("rule {rule}: {}, {}", stderr.trim(), output.status);
    }
}

#[test]
fn nothing_but_the_protocol_orders_collectives() {
    let Some(program) = collective_stress(&["-O1", "-g", "-fsanitize=thread"]) else { return };
    expect_right_results(&play_collectives(&program, 4, None));
    let output = play_collectives(&program, 4, Some(ORDERED_WORDS));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("data race"), "words without order were not noticed: {stderr}");
}

/// CTAs of several threads, each rank in a process of its own; see kernels/host/collective_threads.cpp.
#[test]
fn barriers_order_the_threads_of_collectives() {
    let options = ["-DFLEXRING_STRESSED", "-DFLEXRING_CTA_THREADS", "-DFLEXRING_READS_EARLY"];
    for (sanitizer, calls) in [(&[][..], "40"), (&["-g", "-fsanitize=thread"][..], "12")] {
        let options = [&options, &["-O1"][..], sanitizer].concat();
        let Some(program) = compiled(&["collective_threads.cpp"], &options) else { return };
        for seed in ["1", "2", "3"] {
            let program = &mut Command::new(&program);
            let output = program.args([seed, calls]).env("TSAN_OPTIONS", "halt_on_error=1").output();
            expect_right_results(&output.expect("the program runs"));
        }
    }
}

/// The rules of transfers: `kWaitForMessages`, `kWaitForSlots`, `kAnyTransfer` and `kHeadersCompared`.
const TRANSFER_RULES: [u32; 4] = [13, 14, 16, 17];

/// The program that moves messages between ranks; see kernels/host/transfers_stress.cpp.
fn transfers_stress(options: &[&str]) -> Option<PathBuf> {
    let stressed = ["-DFLEXRING_STRESSED", "-DFLEXRING_TYPES(with)=with(uint8, Uint8)"];
    compiled(&["transfers_stress.cpp", "launch.cpp"], &[options, &stressed].concat())
}

#[test]
fn messages_arrive_and_broken_rules_are_noticed() {
    let Some(program) = transfers_stress(&["-O1"]) else { return };
    expect_right_results(&play_collectives(&program, 200, None));
    for rule in TRANSFER_RULES {
        let output = play_collectives(&program, 200, Some(rule));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains("failed: "), "rule {rule} was broken, and nothing was noticed");
    }
}

#[test]
fn nothing_but_the_protocol_orders_messages() {
    let Some(program) = transfers_stress(&["-O1", "-g", "-fsanitize=thread"]) else { return };
    expect_right_results(&play_collectives(&program, 40, None));
}

/// The world of `ranks` as kernels/host/items_stress.cpp reads it.
fn text_of(ranks: &[ListedCall]) -> String {
    let mut text = format!("{}\n", ranks.len());
    let mut line = |values: &mut dyn Iterator<Item = u64>| {
        values.for_each(|value| write!(text, "{value} ").expect("a string takes all"));
        text.push('\n');
    };
    // Elements have 32 bits, of which a sum of contributions has those of the ranks and those of the place.
    let element = |value: u64| (value & 0xffff_ffff).wrapping_add((value >> 32) << 12) & 0xffff_ffff;
    for call in ranks {
        let list = &call.program;
        let input: Vec<u64> = call.input.clone().map(|at| element(contribution(list.rank, at))).collect();
        let expected: Vec<u64> = call.expected().map(|value| value.map_or(u64::MAX, element)).collect();
        line(&mut [input.len() as u64].into_iter().chain(input));
        line(&mut [expected.len() as u64].into_iter().chain(expected));
        let shared = if call.in_place { [call.count, call.input.start, call.output.start] } else { [0; 3] };
        line(&mut shared.into_iter().chain([list.scratch, list.copied, list.links.len() as u64]));
        for link in &list.links {
            line(&mut [link.peer as u64, link.sends.into(), link.receives.into()].into_iter());
        }
        line(&mut [list.items.len() as u64].into_iter());
        let (mut places, mut waits) = (Vec::<ItemPlace>::new(), Vec::<u64>::new());
        for item in &list.items {
            let flags = u64::from(item.scales) | u64::from(item.last) << 1;
            let (sources, destinations) = (list.sources(item), list.destinations(item));
            let counts =
                [sources.len(), destinations.len(), list.waits(item).len()].map(|count| count as u64);
            let first = [u64::from(item.elements), flags, places.len() as u64, waits.len() as u64];
            line(&mut first.into_iter().chain(counts));
            places.extend(sources.iter().chain(destinations).copied());
            waits.extend(list.waits(item).iter().map(|wait| u64::from(*wait)));
        }
        line(&mut [places.len() as u64].into_iter());
        for place in &places {
            let (kind, link, at) = match *place {
                ItemPlace::Input(at) => (0, 0, at),
                ItemPlace::Output(at) => (1, 0, at),
                ItemPlace::Scratch(at) => (2, 0, at),
                ItemPlace::Message { link, number } => (3, link.into(), number.into()),
                ItemPlace::InputCopy(at) => (4, 0, at),
            };
            line(&mut [kind, link, at].into_iter());
        }
        line(&mut [waits.len() as u64].into_iter().chain(waits));
    }
    text
}

/// Worlds with random plans and collectives, in a file that is removed at the end.
fn listed_worlds(worlds: u64) -> tempfile::NamedTempFile {
    let world = |seed| {
        let mut random = Rng::with_seed(seed);
        let (_, plan, spec) = random_plan(&mut random);
        let lag = (spec.in_waves() && random.bool()).then_some(1);
        listed_calls(&mut random, &plan, spec, lag, 64, 64).map(|ranks| text_of(&ranks))
    };
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(&file, (0..worlds).filter_map(world).collect::<String>()).expect("the file is written");
    file
}

/// Runs the program that plays ranks on lists of items; see kernels/host/items_stress.cpp. With a rule, the
/// kernels break it.
fn play_lists(program: &Path, lists: &Path, rule: Option<u32>) -> Output {
    let rule = rule.map(|rule| rule.to_string());
    let program = &mut Command::new(program);
    program.args(["1", "3"]).arg(lists).args(rule).env("TSAN_OPTIONS", "halt_on_error=1");
    program.output().expect("the program runs")
}

fn items_stress(options: &[&str]) -> Option<PathBuf> {
    let stressed = ["-DFLEXRING_STRESSED", "-DFLEXRING_TYPES(with)=with(uint32, Uint32)"];
    compiled(&["items_stress.cpp", "launch.cpp"], &[options, &stressed].concat())
}

#[test]
fn lists_are_right_and_broken_rules_are_noticed() {
    let Some(program) = items_stress(&["-O1"]) else { return };
    let lists = listed_worlds(200);
    expect_right_results(&play_lists(&program, lists.path(), None));
    for rule in ITEM_RULES {
        let output = play_lists(&program, lists.path(), Some(rule));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains("failed: "), "rule {rule} was broken, and nothing was noticed");
    }
}

#[test]
fn nothing_but_the_protocol_orders_lists() {
    let Some(program) = items_stress(&["-O1", "-g", "-fsanitize=thread"]) else { return };
    expect_right_results(&play_lists(&program, listed_worlds(40).path(), None));
}
