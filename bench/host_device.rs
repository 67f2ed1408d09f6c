//! Measures sums on the host device beside `memcpy`: bytes read and written per second, in GB/s.
//!
//! `cargo bench --bench host_device [-- scalar|avx2|avx512|neon] [kernels|threads]`. Large operands are
//! walked in sub-chunks as the pipeline does; small ones stay in the cache. With `kernels`, measures every
//! type and operation in the cache, which shows loops that the compiler did not vectorize. With `threads`,
//! measures one rank whose jobs are shared by `FLEXRING_THREADS` threads.
#![allow(
    unsafe_code,
    clippy::print_stdout,
    reason = "a benchmark makes pieces of its own memory and prints its results"
)]

use flexring::DType;
use flexring::internal::device::host::Host;
use flexring::internal::device::{Arithmetic, Device, Finish, Job, Operand};
use flexring::internal::memory::Piece;
use flexring_core::config::Simd;
use std::ptr::NonNull;
use std::sync::Barrier;
use std::time::Instant;

/// One pass over `total` bytes of every operand, `grain` bytes at a time, repeated `rounds` times per
/// measurement.
#[derive(Clone, Copy)]
struct Walk {
    name: &'static str,
    total: usize,
    grain: usize,
    rounds: usize,
}

const LARGE: Walk = Walk { name: "64 MiB in steps of 512 KiB", total: 64 << 20, grain: 512 << 10, rounds: 1 };

const CACHED: Walk = Walk { name: "256 KiB in the cache", total: 256 << 10, grain: 256 << 10, rounds: 100 };

/// Number of measurements. The best one counts, because on a shared machine the others include the load of
/// neighbours.
const REPEATS: usize = 9;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let simd = arguments.iter().find_map(|argument| Simd::parse(argument)).unwrap_or(Simd::Auto);
    let simd = match Host::new(simd) {
        Ok(host) => host.simd(),
        Err(error) => return println!("{error}"),
    };
    if arguments.iter().any(|argument| argument == "kernels") {
        return kernels(simd);
    }
    if arguments.iter().any(|argument| argument == "threads") {
        return shared_jobs(simd);
    }
    for threads in [1, 2] {
        for walk in [LARGE, CACHED] {
            sums(simd, threads, walk);
        }
    }
}

/// The kinds of job that a pipeline consists of.
fn sums(simd: Simd, threads: usize, walk: Walk) {
    let memcpy = rate(threads, walk, 1, |pieces| {
        // SAFETY: both pieces have the same length and belong to different vectors.
        unsafe { std::ptr::copy_nonoverlapping(pieces[1].as_ptr(), pieces[0].as_ptr(), pieces[0].len()) };
    });
    println!("\n{}, {threads} thread(s), {}; memcpy {memcpy:.1} GB/s", walk.name, simd.name());
    println!("{:>10} {:>9} {:>9} {:>9} {:>9}", "type", "operands", "apart", "past", "in place");
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::I32, DType::F64] {
        for k in [1, 2, 4, 8] {
            let measured = |into, streaming| {
                let job = Shape {
                    simd,
                    dtype,
                    arithmetic: Arithmetic::Sum,
                    k,
                    into,
                    streaming,
                    factor: None,
                    finish: Finish::Keep,
                };
                job.rate(threads, walk)
            };
            print!("{:>10} {k:>9} {:>9.1} {:>9.1}", dtype.name(), measured(0, false), measured(0, true));
            if k == 1 {
                println!(" {:>9}", "");
            } else {
                println!(" {:>9.1}", measured(1, false));
            }
        }
    }
}

/// Bytes that one rank's sums read and write per second, by the threads that share its jobs: sub-chunk after
/// sub-chunk of vectors that are in no cache, and the same sub-chunk again.
fn shared_jobs(simd: Simd) {
    const TOTAL: usize = 64 << 20;
    println!("{}, sums of two f32 vectors into a third, GB/s", simd.name());
    println!("{:>10} {:>21} {:>21}", "", "memory", "cache");
    println!(
        "{:>10} {:>10} {:>10} {:>10} {:>10}",
        "sub-chunk", "1 thread", "2 threads", "1 thread", "2 threads"
    );
    let [into, one, other] = &mut [0.0, 1.0, 2.0].map(|value| vec![value; TOTAL / 4]);
    let mut rate = |len: usize, is_cached, threads| {
        let host = Host::new(simd).expect("the instruction set was found before");
        let mut host = host.with_threads(threads).expect("a thread");
        let mut best = f64::INFINITY;
        for _ in 0..REPEATS {
            let start = Instant::now();
            for number in 0..TOTAL / len {
                let at = if is_cached { 0 } else { number * (len / 4) };
                let part = at..at + len / 4;
                host.sum(&mut into[part.clone()], &one[part.clone()], &other[part]).expect("equal lengths");
            }
            best = best.min(start.elapsed().as_secs_f64());
        }
        (3 * TOTAL) as f64 / best / 1e9
    };
    for len in [32 << 10, 128 << 10, 512 << 10, 1 << 20, 4 << 20] {
        print!("{:>9}K", len >> 10);
        for (is_cached, threads) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
            print!(" {:>10.1}", rate(len, is_cached, threads));
        }
        println!();
    }
}

/// Measures every kernel.
fn kernels(simd: Simd) {
    println!("{}, in the cache", simd.name());
    println!("{:>10} {:>6} {:>9} {:>9} {:>9} {:>9}", "type", "op", "two", "five", "factor", "divide");
    for dtype in DType::ALL {
        let defined = |arithmetic: &Arithmetic| arithmetic.is_defined_for(dtype);
        for arithmetic in Arithmetic::ALL.into_iter().filter(defined) {
            let measured = |k, factor, finish| {
                Shape { simd, dtype, arithmetic, k, into: 0, streaming: false, factor, finish }
                    .rate(1, CACHED)
            };
            println!(
                "{:>10} {:>6} {:>9.1} {:>9.1} {:>9.1} {:>9.1}",
                dtype.name(),
                format!("{arithmetic:?}").to_lowercase(),
                measured(2, None, Finish::Keep),
                measured(5, None, Finish::Keep),
                measured(2, Some(2.0), Finish::Keep),
                measured(2, None, Finish::Divide(3)),
            );
        }
    }
}

/// A job without its memory. `into` is 0 for a separate destination, or the number of an operand, from 1.
#[derive(Clone, Copy)]
struct Shape {
    simd: Simd,
    dtype: DType,
    arithmetic: Arithmetic,
    k: usize,
    into: usize,
    streaming: bool,
    factor: Option<f64>,
    finish: Finish,
}

impl Shape {
    fn rate(self, threads: usize, walk: Walk) -> f64 {
        rate(threads, walk, self.k, |pieces| {
            let mut host = Host::new(self.simd).expect("the instruction set was found before");
            let operands: [Operand; 8] = std::array::from_fn(|nth| Operand {
                piece: pieces[1 + nth.min(self.k - 1)],
                factor: self.factor,
            });
            let job = Job {
                dtype: self.dtype,
                arithmetic: self.arithmetic,
                into: pieces[self.into],
                operands: &operands[..self.k],
                finish: self.finish,
                streaming: self.streaming,
            };
            host.submit(&job, 0).expect("a sound job");
        })
    }
}

/// Bytes that all threads together read from `k` operands and write to one destination, in GB/s.
fn rate(threads: usize, walk: Walk, k: usize, work: impl Fn(&[Piece]) + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let thread = || {
        // A normal number in every type: subnormal ones are slow on some processors.
        let mut vectors: Vec<Vec<u64>> =
            (0..=k).map(|_| vec![0x3f80_3f80_3f80_3f80; walk.total / 8]).collect();
        let pieces: Vec<Piece> = vectors
            .iter_mut()
            .map(|vector| {
                let start = NonNull::from(vector.as_mut_slice()).cast();
                // SAFETY: the vector lives until the thread ends, and only this thread accesses it.
                unsafe { Piece::new(start, walk.total) }
            })
            .collect();
        let mut best = f64::INFINITY;
        for _ in 0..REPEATS {
            barrier.wait();
            let start = Instant::now();
            for _ in 0..walk.rounds {
                for at in (0..walk.total).step_by(walk.grain) {
                    let now: [Piece; 9] =
                        std::array::from_fn(|nth| pieces[nth.min(k)].narrow(at, walk.grain));
                    work(&now[..=k]);
                }
            }
            best = best.min(start.elapsed().as_secs_f64());
        }
        best
    };
    let slowest = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(thread)).collect();
        handles
            .into_iter()
            .map(|handle| handle.join().expect("a measurement does not panic"))
            .fold(0.0, f64::max)
    });
    (threads * walk.rounds * walk.total * (k + 1)) as f64 / slowest / 1e9
}
