//! Gathers vectors of different lengths at rank 0: rank r has r + 1 thousand elements.
//!
//!     cargo build --release --example uneven_gather
//!     mpirun -np 4 target/release/examples/uneven_gather

use flexring::{Communicator, Result};

const THOUSAND: usize = 1000;

fn main() -> Result<()> {
    let comm = Communicator::from_env()?;
    let (rank, world) = (comm.rank(), comm.world_size());
    let mine = vec![rank as i32; (rank + 1) * THOUSAND];

    // An all-to-all with uneven counts, in which only rank 0 gets elements.
    let mut send_counts = vec![0; world];
    send_counts[0] = mine.len();
    let receive_counts: Vec<usize> =
        (0..world).map(|other| if rank == 0 { (other + 1) * THOUSAND } else { 0 }).collect();
    let mut gathered = vec![0; receive_counts.iter().sum()];
    comm.all_to_all_v(&mine, &send_counts, &mut gathered, &receive_counts)?;

    if rank == 0 {
        let mut rest = &gathered[..];
        for (other, count) in receive_counts.into_iter().enumerate() {
            let (part, after) = rest.split_at(count);
            assert!(part.iter().all(|element| *element == other as i32));
            rest = after;
        }
        println!("rank 0 has {} elements of {world} ranks", gathered.len());
    }
    Ok(())
}
