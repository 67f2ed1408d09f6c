//! Measures sums of two random vectors on a GPU beside a copy on the GPU: bytes read and written per second,
//! in GB/s.
//!
//! `cargo bench --bench gpu_reduce [-- MIB [CTAS]]`. Prints a line of JSON for each measurement: vectors of
//! MIB MiB (256 by default), a sixteenth and a 256th of that, whole, and the longest ones also in sub-chunks
//! of 1 MiB and 128 KiB, by CTAS thread blocks (as many as the GPU holds by default, and for 0). The last
//! vector is also summed in sub-chunks of 4 KiB, which shows the cost of a descriptor. A measurement is made
//! from the host: it contains the start of the kernel and the wait for its end.
#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

use flexring::internal::device::cuda::{GpuBuffer, StandaloneDevice, gpu_info};
use flexring::{Element, Result};
use half::{bf16, f16};
use std::time::Instant;

/// Number of measurements. The best and the median are reported.
const REPEATS: usize = 15;
/// The shortest vector, so that there is something to measure.
const SHORTEST: usize = 64 << 10;

fn main() {
    let mut numbers = std::env::args().skip(1).filter_map(|word| word.parse::<usize>().ok());
    let mib = numbers.next().unwrap_or(256);
    let ctas = numbers.next().filter(|&ctas| ctas > 0).unwrap_or(usize::MAX);
    if let Err(error) = measure(mib << 20, ctas) {
        println!("{}", serde_json::json!({ "error": error.message() }));
        std::process::exit(1);
    }
}

fn measure(longest: usize, ctas: usize) -> Result<()> {
    let gpu = gpu_info(0)?.name;
    let mut device = StandaloneDevice::new(0, ctas)?;
    let lengths: Vec<usize> =
        [longest, longest / 16, longest / 256].into_iter().filter(|&bytes| bytes >= SHORTEST).collect();
    for &bytes in &lengths {
        let mut grains = vec![bytes];
        if bytes == longest {
            grains.extend([1 << 20, 128 << 10]);
        }
        if Some(&bytes) == lengths.last() {
            grains.push(4 << 10);
        }
        sums(&gpu, &mut device, bytes, &grains, |number| number)?;
        sums(&gpu, &mut device, bytes, &grains, bf16::from_f32)?;
        sums(&gpu, &mut device, bytes, &grains, f16::from_f32)?;
    }
    Ok(())
}

fn sums<T: Element>(
    gpu: &str,
    device: &mut StandaloneDevice,
    bytes: usize,
    grains: &[usize],
    of: fn(f32) -> T,
) -> Result<()> {
    let count = bytes / size_of::<T>();
    // Zeros are faster than other data on some GPUs, which draw less power for them.
    let mut random = fastrand::Rng::with_seed(12);
    let mut vectors = Vec::new();
    for _ in 0..3 {
        let elements: Vec<T> = (0..count).map(|_| of(random.f32() - 0.5)).collect();
        let mut vector = GpuBuffer::<T>::new(0, count)?;
        vector.write(&elements)?;
        vectors.push(vector);
    }
    let [into, one, other] = &mut vectors[..] else { return Ok(()) };
    // A copy reads and writes each byte; a sum reads two and writes one.
    let copy = timed(|| into.copy_from(one))?;
    report(gpu, T::DTYPE.name(), "copy", bytes, 2, &copy);
    for &grain in grains {
        let sum = timed(|| device.sum(into, &[one, other], grain / size_of::<T>()))?;
        report(gpu, T::DTYPE.name(), &format!("sum in {} KiB", grain >> 10), bytes, 3, &sum);
    }
    Ok(())
}

/// Seconds of each repetition, ascending.
fn timed(mut act: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    act()?;
    let mut seconds = Vec::new();
    for _ in 0..REPEATS {
        let start = Instant::now();
        act()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds)
}

fn report(gpu: &str, dtype: &str, what: &str, bytes: usize, moves: usize, seconds: &[f64]) {
    let rate = |seconds: f64| (bytes * moves) as f64 / seconds / 1e9;
    println!(
        "{}",
        serde_json::json!({
            "gpu": gpu, "type": dtype, "what": what, "bytes": bytes, "bytes_moved": bytes * moves,
            "median_us": seconds[seconds.len() / 2] * 1e6, "best_gb_s": rate(seconds[0]), "median_gb_s": rate(seconds[seconds.len() / 2]),
        })
    );
}
