//! The rates at which ranks copy and add, on the host.
//!
//! Owns the loops. GPUs are not measured.

use super::session::TuningSession;
use flexring::Result;
use flexring::internal::device::host::Host;
use std::time::Instant;

/// Steps of the progress.
pub const STEPS: usize = 2;

/// Elements of each vector: 16 MiB, more than the caches that a rank has for itself.
const ELEMENTS: usize = 4 << 20;

/// Bytes per second that the slowest rank of each node reads and writes, by node, while all ranks do the
/// same.
pub struct DeviceRates {
    pub copy: Vec<u64>,
    pub reduce: Vec<u64>,
}

/// Measures copies, then sums of two vectors of floats.
///
/// # Errors
/// Any error of a call.
pub fn measure(session: &mut TuningSession) -> Result<DeviceRates> {
    let mut host = Host::new(session.config.simd)?;
    let (mut into, one, other) = (vec![1f32; ELEMENTS], vec![1f32; ELEMENTS], vec![1f32; ELEMENTS]);
    let copy = rate(session, 2, "copies", |block| {
        into[block.clone()].copy_from_slice(&one[block]);
        Ok(())
    })?;
    let reduce = rate(session, 3, "sums", |block| {
        host.sum(&mut into[block.clone()], &one[block.clone()], &other[block])
    })?;
    Ok(DeviceRates { copy, reduce })
}

/// Runs `act` on all blocks of the vectors, over and over. It moves each byte of a block `moves` times.
fn rate(
    session: &mut TuningSession,
    moves: usize,
    what: &str,
    mut act: impl FnMut(std::ops::Range<usize>) -> Result<()>,
) -> Result<Vec<u64>> {
    session.step(|| format!("rates of {what}"))?;
    let block = (session.config.subchunk.0 / size_of::<f32>()).min(ELEMENTS);
    session.comm.barrier()?;
    let begun = Instant::now();
    let mut bytes = 0;
    'time: loop {
        for start in (0..ELEMENTS).step_by(block) {
            let range = start..(start + block).min(ELEMENTS);
            bytes += moves * range.len() * size_of::<f32>();
            act(range)?;
            if begun.elapsed() >= session.time {
                break 'time;
            }
        }
    }
    let mine = bytes as f64 / begun.elapsed().as_secs_f64();
    let mut all = vec![0f64; session.comm.world_size()];
    session.comm.all_gather(&[mine], &mut all)?;
    let nodes = session.comm.cluster().nodes.iter();
    let slowest = nodes.map(|node| node.ranks.iter().map(|rank| all[*rank]).fold(f64::INFINITY, f64::min));
    Ok(slowest.map(|rate| (rate as u64).max(1)).collect())
}
