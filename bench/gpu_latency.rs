//! Measures the latency of all-reduces on a GPU between two ranks, and how long a call keeps the caller's
//! thread.
//!
//! `cargo bench --bench gpu_latency [-- CALLS]`. The ranks are threads of this process, or processes if
//! FLEXRING_RANK and the variables beside it describe them. Rank 0 prints a line of JSON for each size, in
//! microseconds: `caller_us` is the time that the caller's thread spends in a call, `waited_us` the time of a
//! call until its result is there, and `enqueued_us` the mean of CALLS calls (200 by default) that are
//! enqueued back to back.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

use flexring::gpu::GpuBuffer;
use flexring::{Communicator, ReduceOp, Result};
use std::time::Instant;

/// Vectors of 8 B to 1 MiB.
const SIZES: [usize; 11] =
    [8, 32, 128, 512, 2 << 10, 4 << 10, 8 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20];
/// Ranks in this process.
const THREADS: usize = 2;

fn main() {
    let calls = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(200);
    if let Err(error) = measure(calls) {
        println!("{}", serde_json::json!({ "error": error.message() }));
        std::process::exit(1);
    }
}

fn measure(calls: usize) -> Result<()> {
    if std::env::var_os("FLEXRING_RANK").is_some() {
        return rank(&Communicator::from_env()?, calls);
    }
    let ranks = Communicator::local(THREADS)?;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = ranks.into_iter().map(|comm| scope.spawn(move || rank(&comm, calls))).collect();
        ranks
            .into_iter()
            .try_for_each(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

fn rank(comm: &Communicator, calls: usize) -> Result<()> {
    for bytes in SIZES {
        let count = bytes / size_of::<f32>();
        let mut vector = GpuBuffer::<f32>::new(0, count)?;
        let ones = vec![1.0_f32; count];
        vector.write(&ones)?;
        // Maxima, so that the values do not grow from call to call.
        for _ in 0..10 {
            comm.all_reduce_on_gpu(&mut vector, ReduceOp::Max)?;
        }
        vector.synchronize()?;

        let (mut caller, mut waited) = (Vec::with_capacity(calls), Vec::with_capacity(calls));
        for _ in 0..calls {
            let start = Instant::now();
            comm.all_reduce_on_gpu(&mut vector, ReduceOp::Max)?;
            caller.push(start.elapsed().as_secs_f64());
            vector.synchronize()?;
            waited.push(start.elapsed().as_secs_f64());
        }

        let (start, mut busy) = (Instant::now(), Vec::with_capacity(calls));
        for _ in 0..calls {
            let start = Instant::now();
            comm.all_reduce_on_gpu(&mut vector, ReduceOp::Max)?;
            busy.push(start.elapsed().as_secs_f64());
        }
        vector.synchronize()?;
        let enqueued = start.elapsed().as_secs_f64() / calls as f64;

        vector.write(&ones)?;
        comm.all_reduce_on_gpu(&mut vector, ReduceOp::Sum)?;
        let mut sum = ones;
        vector.read(&mut sum)?;
        comm.synchronize()?;
        let wrong = sum.iter().filter(|&&sum| sum != comm.world_size() as f32).count();
        if comm.rank() == 0 {
            println!(
                "{}",
                serde_json::json!({
                    "bytes": bytes, "calls": calls, "wrong": wrong,
                    "caller_us": percentiles(caller), "waited_us": percentiles(waited),
                    "caller_enqueued_us": percentiles(busy), "enqueued_us": enqueued * 1e6,
                })
            );
        }
    }
    Ok(())
}

/// Median, 99th percentile and maximum of times in seconds, in microseconds.
fn percentiles(mut seconds: Vec<f64>) -> serde_json::Value {
    seconds.sort_by(f64::total_cmp);
    let at = |part: f64| seconds.get((seconds.len() as f64 * part) as usize).copied().unwrap_or(0.0) * 1e6;
    serde_json::json!({ "median": at(0.5), "p99": at(0.99), "worst": seconds.last().copied().unwrap_or(0.0) * 1e6 })
}
