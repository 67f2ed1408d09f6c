//! Replays a CUDA graph of all-reduces very often, and checks its results and this process's memory.
//!
//! `cargo bench --bench gpu_replays [-- REPLAYS]`, as a rank that FLEXRING_RANK and the variables beside it
//! describe. The results are checked after every hundredth of the replays (100,000 by default), those of
//! registered vectors after each. Each call changes every element, so a call that is missing, that runs twice
//! or that reads what an earlier one left is seen. Prints a line of JSON for a short and for a long vector,
//! which has a tenth of the replays, and for a long one that is registered. Ends with 1 if a result is wrong.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

use flexring::gpu::GpuBuffer;
use flexring::{Communicator, Error, ReduceOp, Result};
use std::time::{Duration, Instant};

/// Calls of a graph.
const CALLS: usize = 20;
/// A short and long vectors: elements, and whether they are registered.
const VECTORS: [(usize, bool); 3] = [(1 << 10, false), (1 << 17, false), (1 << 17, true)];

fn main() {
    let replays = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(100_000);
    let outcome = Communicator::from_env().and_then(|comm| {
        VECTORS.iter().enumerate().try_for_each(|(index, &(count, is_registered))| {
            // Long vectors take ten times as long.
            let replays = if index == 0 { replays } else { replays / 10 };
            let vector = GpuBuffer::new(0, count)?;
            if is_registered {
                measure(&comm, &mut *comm.register_on_gpu(vector)?, replays, is_registered)
            } else {
                measure(&comm, &mut { vector }, replays, is_registered)
            }
        })
    });
    if let Err(error) = outcome {
        println!("{}", serde_json::json!({ "error": error.message() }));
        std::process::exit(1);
    }
}

fn measure(
    comm: &Communicator,
    vector: &mut GpuBuffer<u32>,
    replays: usize,
    is_registered: bool,
) -> Result<()> {
    let count = vector.len();
    // The sum of all ranks' factors is odd, so products with it never run out of bits. Calls with factors go
    // through stages; without, there are bits enough for one replay.
    let (first, others) = (1, if is_registered { 1 } else { 2 });
    let factor = if comm.rank() == 0 { first } else { others };
    let op = if is_registered { ReduceOp::Sum } else { ReduceOp::PreMulSum(f64::from(factor)) };
    let sum = first + others * (comm.world_size() as u32 - 1);
    let of = |rank: usize, at: usize, round: usize| (at * 31 + rank * 7 + round) as u32 + 1;

    let capture = vector.begin_capture()?;
    for _ in 0..CALLS {
        comm.all_reduce_on_gpu(vector, op)?;
    }
    let graph = capture.end()?;
    let every = if is_registered { 1 } else { (replays / 100).max(1) };
    let memory = resident_kib()?;
    let (mut taken, mut rounds) = (Duration::ZERO, 0);
    for round in 0..replays / every {
        let own: Vec<u32> = (0..count).map(|at| of(comm.rank(), at, round)).collect();
        vector.write(&own)?;
        let begun = Instant::now();
        for _ in 0..every {
            graph.launch()?;
        }
        vector.synchronize()?;
        taken += begun.elapsed();
        let mut found = vec![0; count];
        vector.read(&mut found)?;
        comm.status()?;
        let later = sum.wrapping_pow((CALLS * every) as u32 - 1);
        let expected = |at: usize| {
            let rest = (1..comm.world_size()).fold(0u32, |all, rank| all.wrapping_add(of(rank, at, round)));
            of(0, at, round).wrapping_mul(first).wrapping_add(rest.wrapping_mul(others)).wrapping_mul(later)
        };
        let wrong = (0..count).filter(|&at| found[at] != expected(at)).count();
        if wrong > 0 {
            let replay = (round + 1) * every;
            return Err(Error::internal(format!(
                "{wrong} of {count} elements are wrong after replay {replay}"
            )));
        }
        rounds += 1;
    }
    let seconds = taken.as_secs_f64();
    comm.synchronize()?;
    if comm.rank() == 0 {
        let replays = rounds * every;
        println!(
            "{}",
            serde_json::json!({
                "bytes": count * size_of::<u32>(), "registered": is_registered, "ranks": comm.world_size(), "calls": CALLS, "replays": replays,
                "checks": rounds, "seconds": seconds, "call_us": seconds * 1e6 / (replays * CALLS) as f64,
                "memory_kib": [memory, resident_kib()?],
            })
        );
    }
    Ok(())
}

/// This process's resident memory.
fn resident_kib() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse().ok());
    kib.ok_or_else(|| Error::internal("/proc/self/status has no VmRSS"))
}
