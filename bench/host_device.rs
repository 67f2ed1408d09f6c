//! Measures the host device beside `memcpy`: bytes read and written per second.
#![allow(clippy::print_stdout, unsafe_code, reason = "a measurement prints, and makes pieces")]

use flexring::DType;
use flexring::config::Simd;
use flexring::device::host::Host;
use flexring::device::{Arithmetic, Device, Finish, Job, Operand};
use flexring::memory::Piece;
use std::ptr::NonNull;
use std::sync::Barrier;
use std::time::Instant;

const LARGE: usize = 64 << 20;
const SUBCHUNK: usize = 512 << 10;
const HOT: usize = 256 << 10;

fn main() {
    let only: Option<Simd> = std::env::args().find_map(|a| Simd::parse(&a));
    let simds: Vec<Simd> = [Simd::Scalar, Simd::Avx2, Simd::Avx512, Simd::Neon]
        .into_iter()
        .filter(|s| Host::new(*s).is_ok() && only.is_none_or(|o| o == *s))
        .collect();
    for threads in [1, 2] {
        for (total, grain, what) in [(LARGE, SUBCHUNK, "64M by 512K"), (HOT, HOT, "256K hot")] {
            let memcpy = measure(threads, total, grain, 1, |pieces| {
                let (into, from) = (pieces[0], pieces[1]);
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into.as_ptr(), into.len()) };
            });
            println!("{threads} thread(s), {what}: memcpy {memcpy:.1} GB/s");
            println!(
                "{:8}{:10}{:>4}{:>9}{:>11}{:>10}{:>12}",
                "simd", "dtype", "k", "plain", "streaming", "in place", "in pl str"
            );
            for &simd in &simds {
                for dtype in [DType::F32, DType::BF16, DType::F16, DType::I32, DType::F64] {
                    for k in [1, 2, 4] {
                        if k == 1 && dtype != DType::F32 {
                            continue;
                        }
                        let rate = |streaming, in_place| {
                            measure(threads, total, grain, k, |pieces| {
                                let mut host = Host::new(simd).unwrap();
                                let mut ops = [Operand { piece: pieces[1], factor: None }; 8];
                                for (o, p) in ops.iter_mut().zip(&pieces[1..]) {
                                    o.piece = *p;
                                }
                                let job = Job {
                                    dtype,
                                    arithmetic: Arithmetic::Sum,
                                    into: if in_place { pieces[1] } else { pieces[0] },
                                    operands: &ops[..k],
                                    finish: Finish::Keep,
                                    streaming,
                                };
                                host.submit(&job, 0).unwrap();
                            })
                        };
                        println!(
                            "{:8}{:10}{:>4}{:>9.1}{:>11.1}{:>10.1}{:>12.1}",
                            simd.name(),
                            dtype.name(),
                            k,
                            rate(false, false),
                            rate(true, false),
                            if k > 1 { rate(false, true) } else { f64::NAN },
                            if k > 1 { rate(true, true) } else { f64::NAN }
                        );
                    }
                }
            }
        }
    }
}

fn measure(threads: usize, total: usize, grain: usize, k: usize, work: impl Fn(&[Piece]) + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let passes = if total == HOT { 200 } else { 1 };
    let seconds: f64 = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let mut buffers: Vec<Vec<u64>> = (0..=k).map(|_| vec![0u64; total / 8 + 512]).collect();
                    let pieces: Vec<Piece> = buffers
                        .iter_mut()
                        .map(|b| {
                            for x in b.iter_mut() {
                                *x = 0x3c003c003c003c00;
                            }
                            unsafe { Piece::new(NonNull::new(b.as_mut_ptr().cast::<u8>()).unwrap(), total) }
                        })
                        .collect();
                    let mut best = f64::INFINITY;
                    for _ in 0..7 {
                        barrier.wait();
                        let start = Instant::now();
                        for _ in 0..passes {
                            let mut at = 0;
                            while at < total {
                                let mut now = [Piece::EMPTY; 9];
                                for (n, p) in now.iter_mut().zip(&pieces) {
                                    *n = p.narrow(at, grain);
                                }
                                work(&now[..=k]);
                                at += grain;
                            }
                        }
                        best = best.min(start.elapsed().as_secs_f64() / passes as f64);
                    }
                    best
                })
            })
            .collect();
        handles.into_iter().map(|h| h.join().unwrap()).fold(0.0, f64::max)
    });
    threads as f64 * (total * (k + 1)) as f64 / seconds / 1e9
}
