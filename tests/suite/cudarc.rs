//! Calls on cudarc's vectors, with the simulated driver or, with WORLDS=gpu, the machine's driver.

use crate::harness::{Rank, Setup, World, join, spawn, spawn_processes, test_name};
use crate::programs::with_cuda;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use flexring::gpu::GpuBuffer;
use flexring::internal::bootstrap::Coordinator;
use flexring::{ErrorKind, Identity, ReduceOp};
use std::sync::{Arc, Barrier, mpsc};

const COUNT: usize = 30_000;

const GRAPH_FLAGS: CUgraphInstantiate_flags =
    CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;

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

/// Two threads with two streams each.
fn threads(name: &str, settings: &[(&str, &str)], body: impl Fn(Rank, [Arc<CudaStream>; 2]) + Sync) {
    with_cuda(&test_name(module_path!(), name), settings, || {
        spawn(&Setup::new(World::Gpu, 2), |rank| body(rank, [stream(), stream()]));
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
    // Without pools cudarc waits for the stream before it frees.
    processes_reduce_slices("drivers_without_memory_pools_are_supported", &[("SIMCUDA_POOLS", "0")]);
}

#[test]
fn one_hardware_queue_is_enough() {
    processes_reduce_slices("one_hardware_queue_is_enough", &[("CUDA_DEVICE_MAX_CONNECTIONS", "1")]);
}

#[test]
fn many_hardware_queues_change_nothing() {
    processes_reduce_slices("many_hardware_queues_change_nothing", &[("CUDA_DEVICE_MAX_CONNECTIONS", "32")]);
}

#[test]
fn allocations_that_wait_for_the_gpu_do_not_block_calls() {
    let settings = [("SIMCUDA_IMPLICIT_SYNC", "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", "1")];
    processes_reduce_slices("allocations_that_wait_for_the_gpu_do_not_block_calls", &settings);
}

#[test]
fn threads_reduce_slices_in_streams_of_their_own() {
    threads("threads_reduce_slices_in_streams_of_their_own", &[], |rank, [stream, _]| {
        reduces_slices(&rank, &stream);
    });
}

#[test]
fn threads_share_one_hardware_queue_and_a_driver_that_waits() {
    let settings = [("SIMCUDA_IMPLICIT_SYNC", "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", "1")];
    threads("threads_share_one_hardware_queue_and_a_driver_that_waits", &settings, |rank, [stream, _]| {
        reduces_slices(&rank, &stream);
    });
}

/// What programs do around calls: a copy to pageable memory, as in `tensor.cpu()`, holds the driver's lock
/// until the call is over; so may an allocation and a release.
fn copies_and_allocates_after_calls(rank: &Rank, stream: &Arc<CudaStream>) {
    let mut vector = stream.clone_htod(&vec![rank.rank() as f32; COUNT]).expect("memory");
    for round in 0..10 {
        rank.all_reduce_on_gpu(&mut vector, ReduceOp::Avg).expect("an average");
        let copy = stream.clone_dtoh(&vector).expect("a copy");
        assert!(copy.iter().all(|got| *got == 0.5), "round {round}");
        rank.all_reduce_on_gpu(&mut vector, ReduceOp::Avg).expect("an average");
        let other = GpuBuffer::<f32>::new(0, 1000 + round).expect("memory");
        rank.all_reduce_on_gpu(&mut vector, ReduceOp::Avg).expect("an average");
        drop(other);
    }
}

#[test]
fn threads_copy_and_allocate_right_after_calls() {
    threads("threads_copy_and_allocate_right_after_calls", &[], |rank, [stream, _]| {
        copies_and_allocates_after_calls(&rank, &stream);
    });
}

#[test]
fn processes_copy_and_allocate_right_after_calls() {
    let name = test_name(module_path!(), "processes_copy_and_allocate_right_after_calls");
    with_cuda(&name, &[("SIMCUDA_IMPLICIT_SYNC", "1")], || {
        let body = |rank: Rank| copies_and_allocates_after_calls(&rank, &stream());
        for rank in spawn_processes(&name, &Setup::new(World::Gpu, 2), body) {
            assert!(rank.status.success(), "{}", String::from_utf8_lossy(&rank.stderr));
        }
    });
}

#[test]
fn more_work_than_the_driver_queues_is_enqueued() {
    threads("more_work_than_the_driver_queues_is_enqueued", &[], |rank, [stream, _]| {
        let mut vector = stream.alloc_zeros::<i32>(100).expect("memory");
        for _ in 0..30 {
            rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a sum");
            for _ in 0..50 {
                stream.memset_zeros(&mut vector).expect("a fill");
            }
        }
        assert_eq!(stream.clone_dtoh(&vector).expect("a result"), [0; 100]);
    });
}

#[test]
fn two_communicators_of_a_process_take_turns() {
    let name = "two_communicators_of_a_process_take_turns";
    with_cuda(&test_name(module_path!(), name), &[], || {
        let setup = Setup::new(World::Gpu, 2);
        let second = Coordinator::create(&setup.config).expect("a coordinator");
        spawn(&setup, |first| {
            let (identity, streams) =
                (Identity::from_unique_id(2, &second.1, first.rank()), [stream(), stream()]);
            let second = join(&setup.config, &identity.expect("an identity")).expect("a second world");
            let mut vectors =
                streams.each_ref().map(|stream| stream.clone_htod(&vec![1f32; COUNT]).expect("memory"));
            for _ in 0..5 {
                first.all_reduce_on_gpu(&mut vectors[0], ReduceOp::Sum).expect("a sum");
                second.all_reduce_on_gpu(&mut vectors[1], ReduceOp::Sum).expect("a sum");
            }
            for (stream, vector) in streams.iter().zip(&vectors) {
                assert_eq!(stream.clone_dtoh(vector).expect("a result"), vec![32f32; COUNT]);
            }
        });
    });
}

#[test]
fn a_stream_may_be_destroyed_right_after_a_call() {
    threads("a_stream_may_be_destroyed_right_after_a_call", &[], |rank, _| {
        for round in 0..5 {
            let stream = stream();
            let mut vector = stream.clone_htod(&vec![round; COUNT]).expect("memory");
            rank.all_reduce_on_gpu(&mut vector, ReduceOp::Max).expect("a maximum");
            // Frees the vector in its stream, and destroys the stream.
            drop((vector, stream));
        }
        rank.synchronize().expect("all calls succeed");
    });
}

#[test]
fn calls_do_not_break_the_capture_of_another_thread() {
    let name = "calls_do_not_break_the_capture_of_another_thread";
    with_cuda(&test_name(module_path!(), name), &[], || {
        // What the test itself does to prepare and to check would break a capture.
        let all = Barrier::new(2);
        spawn(&Setup::new(World::Gpu, 2), |rank| {
            let [stream, captured] = [stream(), stream()];
            let mut vector = stream.clone_htod(&vec![1f32; COUNT]).expect("memory");
            stream.synchronize().expect("a GPU that works");
            all.wait();
            std::thread::scope(|scope| {
                let (begun, begin) = mpsc::channel();
                let (done, over) = mpsc::channel::<()>();
                // One capture: to make a graph of one would break another.
                let capture = (rank.rank() == 0).then(|| {
                    scope.spawn(move || {
                        let global = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
                        captured.begin_capture(global).expect("a capture");
                        begun.send(()).expect("a listener");
                        let _ = over.recv();
                        captured.end_capture(GRAPH_FLAGS).expect("the capture is valid");
                    })
                });
                if capture.is_some() {
                    begin.recv().expect("a capture");
                }
                for _ in 0..5 {
                    rank.all_reduce_on_gpu(&mut vector, ReduceOp::Avg).expect("an average");
                }
                rank.synchronize().expect("all calls succeed");
                drop(done);
                if let Some(capture) = capture {
                    capture.join().expect("a valid capture");
                }
            });
            all.wait();
            assert_eq!(stream.clone_dtoh(&vector).expect("a result"), vec![1.0; COUNT]);
        });
    });
}

#[test]
fn a_stream_that_is_captured_is_refused_and_works_afterwards() {
    let name = "a_stream_that_is_captured_is_refused_and_works_afterwards";
    threads(name, &[], |rank, [stream, _]| {
        let mut vector = stream.clone_htod(&vec![1i64; COUNT]).expect("memory");
        let relaxed = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        stream.begin_capture(relaxed).expect("a capture");
        let error = rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect_err("it cannot be replayed");
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.message().contains("being captured"), "{error}");
        // When cudarc lends the vector, it waits for an event from before the capture. That ends the capture,
        // and cudarc reports it later. tests/c/gpu_bad_input.c checks that a refused call leaves a capture
        // valid.
        let _ = stream.context().check_err();
        let _ = stream.end_capture(GRAPH_FLAGS);
        rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a sum");
        assert_eq!(stream.clone_dtoh(&vector).expect("a result"), vec![2; COUNT]);
    });
}

#[test]
fn only_the_elements_of_a_view_are_reduced() {
    threads("only_the_elements_of_a_view_are_reduced", &[], |rank, [stream, _]| {
        let mut vector: CudaSlice<i32> = stream.clone_htod(&[1, 2, 3, 4, 5, 6]).expect("memory");
        rank.all_reduce_on_gpu(&mut vector.slice_mut(1..4), ReduceOp::Sum).expect("a sum");
        rank.broadcast_on_gpu(&mut vector.slice_mut(5..5), 0).expect("nothing to do");
        assert_eq!(stream.clone_dtoh(&vector).expect("a result"), [1, 4, 6, 8, 5, 6]);
    });
}

#[test]
fn a_call_on_vectors_of_two_streams_is_ordered_in_both() {
    threads("a_call_on_vectors_of_two_streams_is_ordered_in_both", &[], |rank, [first, second]| {
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
