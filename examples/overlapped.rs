//! Starts an all-reduce for each layer and computes the next one meanwhile.
//!
//!     cargo build --release --example overlapped
//!     mpirun -np 4 target/release/examples/overlapped

use flexring::{Communicator, ReduceOp, Result};

const LAYERS: usize = 4;
const LENGTH: usize = 1 << 20;

fn main() -> Result<()> {
    let comm = Communicator::from_env()?;
    let mut pending = Vec::new();
    for layer in 0..LAYERS {
        let gradient = vec![(comm.rank() + layer) as f32; LENGTH];
        // The request owns the vector until the call completes. Calls run in the order in which they were
        // started.
        pending.push(comm.all_reduce_async(gradient, ReduceOp::Avg)?);
    }
    let middle = (comm.world_size() - 1) as f32 / 2.0;
    for (layer, request) in pending.into_iter().enumerate() {
        let gradient = request.wait()?;
        assert!(gradient.iter().all(|element| *element == middle + layer as f32));
    }
    println!("rank {} of {}: {LAYERS} layers are averaged", comm.rank(), comm.world_size());
    Ok(())
}
