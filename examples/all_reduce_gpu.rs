//! Sums a vector in GPU memory. Rank r of a node uses GPU r, modulo the number of GPUs.
//!
//!     cargo build --release --example all_reduce_gpu
//!     mpirun -np 2 target/release/examples/all_reduce_gpu

use flexring::gpu::{GpuBuffer, gpu_count};
use flexring::{Communicator, ReduceOp, Result};

const LENGTH: usize = 1 << 20;

fn main() -> Result<()> {
    let comm = Communicator::from_env()?;
    let gpu = comm.local_rank() % gpu_count()?;
    let mut vector = GpuBuffer::<f32>::new(gpu, LENGTH)?;
    vector.write(&vec![comm.rank() as f32; LENGTH])?;

    // Is enqueued in the vector's stream and returns. A failure is reported by the next call or by
    // `synchronize`.
    comm.all_reduce_on_gpu(&mut vector, ReduceOp::Sum)?;
    comm.synchronize()?;

    let mut sums = vec![0.0; LENGTH];
    vector.read(&mut sums)?;
    let expected = (comm.world_size() * (comm.world_size() - 1) / 2) as f32;
    assert!(sums.iter().all(|sum| *sum == expected));
    println!("rank {} of {}: the sum on GPU {gpu} is {}", comm.rank(), comm.world_size(), sums[0]);
    Ok(())
}
