//! Describes a cluster in the program: two nodes with three ranks and one, whose links differ. The ranks are
//! threads of this process, so this runs without a launcher.
//!
//!     cargo run --release --example own_topology

use flexring::config::Config;
use flexring::{Communicator, ReduceOp, Result};

fn main() -> Result<()> {
    // As FLEXRING_TOPOLOGY. The plan gives the node with the slow link less to send.
    let config = Config { topology: Some("3@10G+1@1G".to_owned()), ..Config::from_env()? };
    let ranks = Communicator::local_with(&config, 4)?;
    println!("{}", ranks[0].summary());

    std::thread::scope(|scope| {
        let run = |comm: Communicator| {
            let mut vector = vec![1.0f32; 1 << 20];
            comm.all_reduce(&mut vector, ReduceOp::Sum)?;
            assert!(vector.iter().all(|element| *element == 4.0));
            Ok(())
        };
        let threads: Vec<_> = ranks.into_iter().map(|comm| scope.spawn(move || run(comm))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("the rank does not panic"))
    })
}
