//! Averages a gradient over all ranks.
//!
//!     cargo build --release --example all_reduce
//!     mpirun -np 4 target/release/examples/all_reduce
//!
//! torchrun and srun can start it, too. Without a launcher, start each rank by hand:
//!
//!     export FLEXRING_WORLD_SIZE=2 FLEXRING_MASTER_ADDR=127.0.0.1 FLEXRING_MASTER_PORT=29600
//!     FLEXRING_RANK=0 target/release/examples/all_reduce & FLEXRING_RANK=1 target/release/examples/all_reduce

use flexring::{Communicator, ReduceOp, Result};

fn main() -> Result<()> {
    let comm = Communicator::from_env()?;

    // Any slice can be used. Other ranks of this node read this memory without a copy.
    let mut gradient = comm.alloc::<f32>(1 << 20)?;
    gradient.fill(comm.rank() as f32);

    comm.all_reduce(&mut gradient, ReduceOp::Avg)?;

    let expected = (comm.world_size() - 1) as f32 / 2.0;
    assert!(gradient.iter().all(|element| *element == expected));
    println!("rank {} of {}: the average is {}", comm.rank(), comm.world_size(), gradient[0]);
    Ok(())
}
