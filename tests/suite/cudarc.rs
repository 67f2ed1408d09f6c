//! Calls on cudarc's vectors, with the simulated driver or, with WORLDS=gpu, the machine's driver.

use crate::harness::{Rank, Setup, World, spawn, spawn_processes, test_name};
use crate::programs::with_cuda;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use flexring::ReduceOp;
use std::sync::{Arc, Barrier};

const COUNT: usize = 30_000;

fn stream() -> Arc<CudaStream> {
    CudaContext::new(0).expect("a GPU").new_stream().expect("a stream")
}

/// Every kind of call, one after another in a stream, without waiting in between.
fn reduces_slices(rank: &Rank, stream: &Arc<CudaStream>) {
    let own = rank.rank() as f32 + 1.0;
    for _ in 0..5 {
        let mut vector = stream.clone_htod(&vec![own; COUNT]).expect("memory");
        rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a sum");
        let mut out = stream.alloc_zeros::<f32>(COUNT).expect("memory");
        rank.all_reduce_into_on_gpu(&vector, &mut out, ReduceOp::Avg).expect("an average");
        drop(vector);
        let mut half = stream.alloc_zeros::<f32>(COUNT / 2).expect("memory");
        rank.reduce_scatter_on_gpu(&out, &mut half, ReduceOp::Max).expect("a maximum");
        rank.all_gather_on_gpu(&half, &mut out).expect("all parts");
        drop(half);
        assert_eq!(stream.clone_dtoh(&out).expect("a result"), vec![3.0; COUNT]);
    }
}

/// Two threads with streams of their own. Creating a stream in cudarc waits for the whole GPU, so all streams exist before
/// the first call.
fn threads(name: &str, body: impl Fn(Rank, [Arc<CudaStream>; 2]) + Sync) {
    with_cuda(&test_name(module_path!(), name), &[], || {
        let all = Barrier::new(2);
        spawn(&Setup::new(World::Gpu, 2), |rank| {
            let streams = [stream(), stream()];
            all.wait();
            body(rank, streams);
        });
    });
}

/// Two processes, with a driver with these settings.
fn processes_reduce_slices(name: &str, settings: &[(&str, &str)]) {
    with_cuda(&test_name(module_path!(), name), settings, || {
        let setup = Setup::new(World::Gpu, 2);
        let name = test_name(module_path!(), name);
        for rank in spawn_processes(&name, &setup, |rank| reduces_slices(&rank, &stream())) {
            assert!(rank.status.success(), "{}", String::from_utf8_lossy(&rank.stderr));
        }
    });
}

#[test]
fn processes_reduce_slices_that_are_dropped_right_after_the_call() {
    processes_reduce_slices("processes_reduce_slices_that_are_dropped_right_after_the_call", &[]);
}

#[test]
fn drivers_without_memory_pools_are_supported() {
    // Without pools cudarc waits for the stream before it frees. Freeing waits for all GPU work of the process, so ranks as
    // threads would wait for each other.
    processes_reduce_slices("drivers_without_memory_pools_are_supported", &[("SIMCUDA_POOLS", "0")]);
}

#[test]
fn drivers_without_memory_operations_are_supported() {
    // Streams use host functions in place of memory operations.
    processes_reduce_slices("drivers_without_memory_operations_are_supported", &[("SIMCUDA_MEMOPS", "0")]);
}

#[test]
fn a_stream_that_waits_for_a_call_does_not_block_it() {
    let settings = [("SIMCUDA_CONNECTIONS", "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", "1")];
    processes_reduce_slices("a_stream_that_waits_for_a_call_does_not_block_it", &settings);
}

#[test]
fn a_host_function_that_waits_for_a_call_does_not_block_it() {
    let settings = [("SIMCUDA_CONNECTIONS", "1"), ("SIMCUDA_MEMOPS", "0")];
    processes_reduce_slices("a_host_function_that_waits_for_a_call_does_not_block_it", &settings);
}

#[test]
fn threads_reduce_slices_in_streams_of_their_own() {
    threads("threads_reduce_slices_in_streams_of_their_own", |rank, [stream, _]| {
        reduces_slices(&rank, &stream);
    });
}

#[test]
fn only_the_elements_of_a_view_are_reduced() {
    threads("only_the_elements_of_a_view_are_reduced", |rank, [stream, _]| {
        let mut vector: CudaSlice<i32> = stream.clone_htod(&[1, 2, 3, 4, 5, 6]).expect("memory");
        rank.all_reduce_on_gpu(&mut vector.slice_mut(1..4), ReduceOp::Sum).expect("a sum");
        rank.broadcast_on_gpu(&mut vector.slice_mut(5..5), 0).expect("nothing to do");
        assert_eq!(stream.clone_dtoh(&vector).expect("a result"), [1, 4, 6, 8, 5, 6]);
    });
}

#[test]
fn a_call_on_vectors_of_two_streams_is_ordered_in_both() {
    threads("a_call_on_vectors_of_two_streams_is_ordered_in_both", |rank, [first, second]| {
        for round in 0..5 {
            let input = first.clone_htod(&vec![f64::from(round); COUNT]).expect("memory");
            let mut output = second.alloc_zeros::<f64>(COUNT).expect("memory");
            rank.all_reduce_into_on_gpu(&input, &mut output, ReduceOp::Sum).expect("a sum");
            // Freed in the first stream, which waits for the call.
            drop(input);
            let again = first.clone_htod(&vec![-1.0f64; COUNT]).expect("memory");
            let result = second.clone_dtoh(&output).expect("a result");
            assert_eq!(result, vec![2.0 * f64::from(round); COUNT]);
            drop(again);
        }
    });
}
