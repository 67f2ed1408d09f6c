//! Fuzz targets: what every one of them has in common. The targets are tests, next to what they test, of
//! crates that install [`MeasuringAllocator`].
//!
//! Owns how inputs are found and how a failure is reported.
//!
//! `cargo test` replays the inputs of `tests/corpus/TARGET.hex`, then runs mutations of them for a fraction
//! of a second. `make fuzz` runs each target under libFuzzer, guided by coverage, for
//! `FLEXRING_FUZZ_SECONDS`.

mod allocation_limit;
mod input_reader;
#[cfg(fuzzing)]
mod libfuzzer;
mod mutator;

pub use allocation_limit::{AllocationLimit, MeasuringAllocator};
pub use input_reader::{InputReader, block};

use crate::effort::cases;
use mutator::Mutator;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long mutations run in `cargo test`, in milliseconds. `FLEXRING_TEST_EFFORT` scales it.
const USUAL_MILLISECONDS: u64 = 300;
/// How long one input may take, on a busy machine.
const LONGEST_INPUT: Duration = Duration::from_secs(10);

/// What is fuzzed.
pub struct FuzzTarget {
    /// Name of the file with its inputs.
    pub name: &'static str,
    /// Bytes of the longest input.
    pub longest: usize,
    /// Heap memory that one input may take, in bytes: more is a failure.
    pub memory: usize,
}

impl FuzzTarget {
    /// Runs `check` on the seeds, the committed inputs, and mutations of both. `check` panics if an input
    /// does what none may do.
    pub fn run(&self, seeds: &[Vec<u8>], check: impl Fn(&[u8])) {
        let inputs = Vec::from_iter(seeds.iter().cloned().chain(self.corpus()));
        for input in &inputs {
            self.check(input, &check);
        }
        #[cfg(fuzzing)]
        if let Some(seconds) = seconds() {
            libfuzzer::run(self, &inputs, seconds, &|input| self.check(input, &check));
        }
        let time = seconds().unwrap_or(Duration::from_millis(cases(USUAL_MILLISECONDS)));
        // Tests try equal inputs in each run, more of them with a larger effort, so that a failure comes from
        // a change of the code.
        let seed = if seconds().is_some() { fastrand::u64(..) } else { 1 };
        let mut mutator = Mutator::new(inputs, self.longest, seed);
        let (begun, mut runs) = (Instant::now(), 0u64);
        while begun.elapsed() < time {
            self.check(&mutator.next(), &check);
            runs += 1;
        }
        println!("{}: {runs} random inputs", self.name);
    }

    /// Runs one input. If it fails, keeps it in a file.
    fn check(&self, input: &[u8], check: &impl Fn(&[u8])) {
        let begun = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let limit = AllocationLimit::start();
            check(input);
            let peak = limit.peak();
            assert!(
                peak <= self.memory,
                "an input of {} bytes took {peak} bytes of memory, the limit is {}",
                input.len(),
                self.memory
            );
            assert!(begun.elapsed() < LONGEST_INPUT, "an input took {:?}", begun.elapsed());
        }));
        let Err(panic) = outcome else { return };
        let path = self.folder("failures").join(format!("{:016x}", twox_hash::XxHash3_64::oneshot(input)));
        let kept = path.parent().is_some_and(|folder| std::fs::create_dir_all(folder).is_ok())
            && std::fs::write(&path, input).is_ok();
        let place = if kept { path.display().to_string() } else { "that follows".to_owned() };
        let hex: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
        println!(
            "the target {0} fails on the input {place}: keep it in tests/corpus/{0}.hex:\n{hex}",
            self.name
        );
        resume_unwind(panic)
    }

    /// The committed inputs: one in each line, in hexadecimal. Lines that begin with `#` say what an input
    /// has found.
    fn corpus(&self) -> Vec<Vec<u8>> {
        let path = root().join("tests/corpus").join(format!("{}.hex", self.name));
        let Ok(text) = std::fs::read_to_string(&path) else { return Vec::new() };
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.map(|line| from_hex(line).unwrap_or_else(|| panic!("{}: {line}", path.display()))).collect()
    }

    /// A folder under `target/fuzz` for what a run finds.
    fn folder(&self, kind: &str) -> PathBuf {
        root().join("target/fuzz").join(kind).join(self.name)
    }
}

/// The folder of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn from_hex(line: &str) -> Option<Vec<u8>> {
    let pairs = line.as_bytes().chunks(2);
    pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}

/// How long `make fuzz` runs each target.
fn seconds() -> Option<Duration> {
    let text = std::env::var("FLEXRING_FUZZ_SECONDS").ok()?;
    let seconds = text.parse().unwrap_or_else(|_| panic!("FLEXRING_FUZZ_SECONDS={text} is not a number"));
    Some(Duration::from_secs(seconds))
}

#[cfg(test)]
#[global_allocator]
static MEASURING: MeasuringAllocator = MeasuringAllocator;

#[test]
#[should_panic(expected = "bytes of memory, the limit is 1000")]
fn an_input_that_takes_too_much_memory_fails() {
    let target = FuzzTarget { name: "self_test", longest: 8, memory: 1000 };
    target.check(b"x", &|_| drop(std::hint::black_box(vec![1u8; 5000])));
}
