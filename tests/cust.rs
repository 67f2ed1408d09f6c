//! Calls on cust's buffers. cust links libcuda.so: `make test-cust` provides that of the simulated driver.

#![allow(clippy::disallowed_methods, reason = "Rust opens the standard descriptors of its programs")]

#[path = "suite/harness/mod.rs"]
mod harness;

use cust::memory::{CopyDestination, DeviceBuffer};
use flexring::ReduceOp;
use harness::{Rank, Setup, World, spawn_processes};

const COUNT: usize = 30_000;

fn reduces_buffers(rank: &Rank) {
    let _context = cust::quick_init().expect("a GPU");
    let own = rank.rank() as f32 + 1.0;
    for _ in 0..5 {
        // A copy from pageable memory may still be in flight when it returns.
        let mut vector = DeviceBuffer::from_slice(&vec![own; COUNT]).expect("memory");
        let mut receive = DeviceBuffer::from_slice(&vec![0f32; COUNT]).expect("memory");
        rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a sum");
        rank.all_reduce_into_on_gpu(&vector, &mut receive, ReduceOp::Avg).expect("an average");
        // The call has completed, so the buffer may be freed.
        drop(vector);
        let mut result = vec![0f32; COUNT];
        receive.copy_to(&mut result).expect("a result");
        assert_eq!(result, vec![3.0; COUNT]);
    }
    let mut empty = DeviceBuffer::<f32>::from_slice(&[]).expect("nothing");
    rank.all_reduce_on_gpu(&mut empty, ReduceOp::Sum).expect("nothing to do");

    // The call itself returns the error, because it waits for completion.
    let mut vector = DeviceBuffer::from_slice(&vec![own; COUNT]).expect("memory");
    if rank.rank() == 0 {
        rank.abort();
    }
    rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect_err("it was aborted");
}

#[test]
fn processes_reduce_buffers() {
    let setup = Setup::new(World::Gpu, 2);
    for rank in spawn_processes("processes_reduce_buffers", &setup, |rank| reduces_buffers(&rank)) {
        assert!(rank.status.success(), "{}", String::from_utf8_lossy(&rank.stderr));
    }
}
