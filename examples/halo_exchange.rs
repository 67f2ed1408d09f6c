//! Exchanges the borders of a domain with both neighbours, in one group of sends and receives.
//!
//!     cargo build --release --example halo_exchange
//!     mpirun -np 4 target/release/examples/halo_exchange

use flexring::{Communicator, Operation, Result};

const BORDER: usize = 1 << 16;

fn main() -> Result<()> {
    let comm = Communicator::from_env()?;
    let (rank, world) = (comm.rank(), comm.world_size());
    let (left, right) = ((rank + world - 1) % world, (rank + 1) % world);
    let mine = vec![rank as f64; BORDER];
    let (mut from_left, mut from_right) = (vec![0.0f64; BORDER], vec![0.0f64; BORDER]);

    // None of them waits for another, so no order of ranks can deadlock. With two ranks both neighbours are
    // the same: the n-th send to a rank matches its n-th receive.
    comm.group([
        Operation::send(&mine, right),
        Operation::send(&mine, left),
        Operation::recv(&mut from_left, left),
        Operation::recv(&mut from_right, right),
    ])?;

    assert!(from_left.iter().all(|element| *element == left as f64));
    assert!(from_right.iter().all(|element| *element == right as f64));
    println!("rank {rank} of {world} has the borders of {left} and {right}");
    Ok(())
}
