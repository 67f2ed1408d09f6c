//! Collectives that kernels run themselves, in CUDA graphs: processes of one node, with the simulated driver
//! or, with WORLDS=gpu, the machine's driver.

use crate::harness::{Rank, Setup, World, let_others_finish, spawn_processes_with, test_name};
use crate::programs::with_cuda;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaGraph, CudaSlice, CudaStream};
use flexring::gpu::GpuBuffer;
use flexring::{ErrorKind, ReduceOp};
use std::process::Output;
use std::sync::Arc;
use std::time::{Duration, Instant};

const GRAPH_FLAGS: CUgraphInstantiate_flags =
    CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
/// Longer than one exchange moves.
const LONG: usize = 50_001;

/// A stream whose vectors can be used in captures: cudarc does not order them by events.
pub fn stream() -> Arc<CudaStream> {
    let context = CudaContext::new(0).expect("a GPU");
    // SAFETY: each test uses one stream at a time for a vector, or orders its streams itself.
    #[allow(unsafe_code)]
    unsafe {
        context.disable_event_tracking();
    }
    context.new_stream().expect("a stream")
}

/// Captures what `calls` enqueues in the stream.
pub fn capture(stream: &Arc<CudaStream>, calls: impl FnOnce()) -> CudaGraph {
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).expect("a capture");
    calls();
    stream.end_capture(GRAPH_FLAGS).expect("a valid capture").expect("a graph")
}

fn read(stream: &Arc<CudaStream>, vector: &CudaSlice<f32>) -> Vec<f32> {
    stream.clone_dtoh(vector).expect("a result")
}

/// Runs `body` in `ranks` processes, which must all succeed.
fn processes(name: &str, ranks: usize, body: impl Fn(Rank)) {
    processes_with(name, ranks, &[], body);
}

fn processes_with(name: &str, ranks: usize, variables: &[(&str, &str)], body: impl Fn(Rank)) {
    for output in outputs(name, ranks, variables, body) {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

fn outputs(name: &str, ranks: usize, variables: &[(&str, &str)], body: impl Fn(Rank)) -> Vec<Output> {
    let mut outputs = Vec::new();
    let name = test_name(module_path!(), name);
    with_cuda(&name, &[], || {
        let mut all = vec![("FLEXRING_TIMEOUT_MS", "20000")];
        all.extend(variables);
        outputs = spawn_processes_with(&name, &Setup::new(World::Gpu, ranks), &all, &body);
    });
    outputs
}

/// Replays a graph with calls of some lengths, in which `between` is done.
fn replay_sums(rank: &Rank, between: impl Fn(&Arc<CudaStream>)) {
    for count in [1, 1000, LONG] {
        let stream = stream();
        let mut vector = stream.clone_htod(&vec![0f32; count]).expect("memory");
        let graph = capture(&stream, || {
            for _ in 0..4 {
                rank.all_reduce_on_gpu(&mut vector, ReduceOp::Avg).expect("it is captured");
            }
            rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("it is captured");
        });
        for round in 0..20 {
            let own = (round * 3 + rank.rank()) as f32;
            stream.memcpy_htod(&vec![own; count], &mut vector).expect("a copy");
            graph.launch().expect("a replay");
            // The mean of the ranks' numbers, three times.
            let expected = 3.0 * (round * 3 + 1) as f32;
            assert_eq!(read(&stream, &vector), vec![expected; count], "{count} elements, round {round}");
            if round == 10 {
                between(&stream);
            }
        }
        rank.synchronize().expect("all calls succeed");
    }
}

#[test]
fn replays_have_the_sums_of_the_vectors_at_that_time() {
    processes("replays_have_the_sums_of_the_vectors_at_that_time", 3, |rank| replay_sums(&rank, |_| {}));
}

/// A setting by which each rank is a node of its own.
const NODES: (&str, &str) = ("FLEXRING_TRANSPORT", "tcp");
/// One by which ranks do not reach each other's GPU memory.
const PINNED: (&str, &str) = ("FLEXRING_GPU_IPC", "0");

#[test]
fn graphs_of_ranks_on_several_nodes_take_turns_with_calls() {
    take_turns("graphs_of_ranks_on_several_nodes_take_turns_with_calls", NODES);
}

#[test]
fn graphs_of_ranks_without_access_to_each_others_memory_take_turns_with_calls() {
    take_turns("graphs_of_ranks_without_access_to_each_others_memory_take_turns_with_calls", PINNED);
}

fn take_turns(name: &str, setting: (&str, &str)) {
    processes_with(name, 3, &[setting], |rank| {
        replay_sums(&rank, |stream| {
            for count in [1, 1000, LONG] {
                let mut vector = stream.clone_htod(&vec![1f32; count]).expect("memory");
                rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a call");
                assert_eq!(read(stream, &vector), vec![3f32; count]);
            }
            rank.barrier().expect("a call on the host");
        });
    });
}

#[test]
fn launches_of_different_graphs_on_several_nodes_are_an_error() {
    let name = "launches_of_different_graphs_on_several_nodes_are_an_error";
    processes_with(name, 2, &[NODES], |rank| launch_different_graphs(&rank, "in the launch of a graph"));
}

/// In a gather, the ranks beside the root exchange no messages with other nodes.
#[test]
fn ranks_that_send_nothing_to_other_nodes_count_the_calls_of_graphs() {
    let name = "ranks_that_send_nothing_to_other_nodes_count_the_calls_of_graphs";
    let nodes = [("FLEXRING_NODE", "{pair}"), ("FLEXRING_TRANSPORT", "auto")];
    processes_with(name, 4, &nodes, |rank| {
        let stream = stream();
        let me = rank.rank();
        let mut vector = stream.clone_htod(&vec![me as f32; 1000]).expect("memory");
        let mut sum = stream.clone_htod(&[1f32; 100]).expect("memory");
        let sent = stream.clone_htod(&[me as f32; 10]).expect("memory");
        let mut received = stream.clone_htod(&[0f32; 10]).expect("memory");
        let mut gathered = stream.clone_htod(&[0f32; 40]).expect("memory");
        stream.synchronize().expect("a GPU that works");
        let mut calls = || {
            // Between the nodes, and before and after a collective.
            for _ in 0..2 {
                match me {
                    0 => rank.send_on_gpu(&sum, 3).expect("a call"),
                    3 => rank.recv_on_gpu(&mut sum, 0).expect("a call"),
                    _ => {}
                }
                rank.gather_on_gpu(&sent, &mut gathered, 0).expect("a call");
            }
            rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a call");
            rank.send_recv_on_gpu(&sent, (me + 1) % 4, &mut received, (me + 3) % 4).expect("a call");
        };
        calls();
        let graph = capture(&stream, &mut calls);
        for _ in 0..3 {
            graph.launch().expect("a replay");
        }
        calls();
        // The ranks' numbers, summed 5 times.
        assert_eq!(read(&stream, &vector), vec![6.0 * 256.0; 1000]);
        assert_eq!(read(&stream, &sum), vec![1.0; 100]);
        assert_eq!(read(&stream, &received), vec![((me + 3) % 4) as f32; 10]);
        rank.synchronize().expect("all calls succeed");
    });
}

/// As the ranks of experts that got no tokens.
#[test]
fn a_rank_without_elements_takes_part_in_uneven_exchanges() {
    let name = "a_rank_without_elements_takes_part_in_uneven_exchanges";
    for variables in [&[][..], &[NODES]] {
        processes_with(name, 3, variables, |rank| {
            let me = rank.rank();
            let count = |from: usize, to: usize| if from == 2 || to == 2 { 0 } else { 5 + from + 2 * to };
            let counts: Vec<usize> = (0..3).map(|to| count(me, to)).collect();
            let expected: Vec<usize> = (0..3).map(|from| count(from, me)).collect();
            let mut send = GpuBuffer::new(0, counts.iter().sum()).expect("memory");
            let mut receive = GpuBuffer::new(0, expected.iter().sum()).expect("memory");
            send.write(&vec![me as i32; send.len()]).expect("a copy");
            for _ in 0..3 {
                rank.all_to_all_v_on_gpu(&send, &counts, &mut receive, &expected).expect("a call");
            }
            rank.synchronize().expect("all calls succeed");
            let mut received = vec![9; receive.len()];
            receive.read(&mut received).expect("a copy");
            let blocks = (0..3).flat_map(|from| vec![from as i32; count(from, me)]);
            assert_eq!(received, blocks.collect::<Vec<i32>>());
        });
    }
}

/// Calls of so many other lengths come between replays that what a rank keeps of the captured ones is made
/// again.
#[test]
fn plans_that_users_chose_are_captured_and_replayed() {
    let name = "plans_that_users_chose_are_captured_and_replayed";
    let chosen = [("FLEXRING_ALGO", "ring"), ("FLEXRING_MAILBOX", "0")];
    processes_with(name, 3, &chosen, |rank| {
        replay_sums(&rank, |stream| {
            for count in 1..70 {
                let mut vector = stream.clone_htod(&vec![1f32; count]).expect("memory");
                rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a call");
                assert_eq!(read(stream, &vector), vec![3f32; count]);
            }
        });
    });
}

/// The simulated driver has the kernels skip calls after the first 20, so that the flags of these appear
/// again in calls 29 to 48. The long calls 19 and 20 have left packets that only the long calls 47 and 48
/// would read.
#[test]
fn packets_of_2_31_calls_ago_are_not_taken_for_new_ones() {
    let name = "packets_of_2_31_calls_ago_are_not_taken_for_new_ones";
    let skipped = ("SIMCUDA_CALLS_SKIPPED", "2147483620");
    let ended = outputs(name, 2, &[skipped], |rank| {
        let stream = stream();
        let mut vectors = [1, 30_000].map(|count| stream.alloc_zeros::<f32>(count).expect("memory"));
        for call in 1..=60 {
            let vector = &mut vectors[usize::from(call <= 20 || call > 46)];
            let own = (call * 2 + rank.rank()) as f32;
            stream.memcpy_htod(&vec![own; vector.len()], vector).expect("a copy");
            rank.all_reduce_on_gpu(vector, ReduceOp::Sum).expect("a call");
            let sum = (call * 4 + 1) as f32;
            assert_eq!(read(&stream, vector), vec![sum; vector.len()], "call {call}");
        }
    });
    for output in ended {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_graph_keeps_the_memory_of_its_vectors() {
    processes("a_graph_keeps_the_memory_of_its_vectors", 2, |rank| {
        for count in [5, LONG] {
            let mut send = GpuBuffer::<f32>::new(0, 2 * count).expect("memory");
            let mut receive = send.split_off(count);
            assert_eq!((send.len(), receive.len()), (count, count));
            send.write(&vec![1.0; count]).expect("a copy");
            let capture = receive.begin_capture().expect("a capture");
            rank.all_reduce_into_on_gpu(&send, &mut receive, ReduceOp::Sum).expect("it is captured");
            rank.all_reduce_into_on_gpu(&receive, &mut send, ReduceOp::Sum).expect("it is captured");
            let graph = capture.end().expect("a graph");
            for expected in [4.0, 16.0] {
                graph.launch().expect("a replay");
                let mut sum = vec![0.0; count];
                send.read(&mut sum).expect("a copy");
                assert_eq!(sum, vec![expected; count]);
            }
            drop((send, receive));
            graph.launch().expect("a replay");
            drop(graph);
            rank.synchronize().expect("all calls succeed");
        }
    });
}

#[test]
fn a_capture_that_is_dropped_or_broken_leaves_the_vector_usable() {
    processes("a_capture_that_is_dropped_or_broken_leaves_the_vector_usable", 2, |rank| {
        let mut vector = GpuBuffer::<f32>::new(0, 10).expect("memory");
        vector.write(&[1.0; 10]).expect("a copy");
        let capture = vector.begin_capture().expect("a capture");
        rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("it is captured");
        drop(capture);
        let capture = vector.begin_capture().expect("a capture");
        // A copy waits for the stream.
        vector.read(&mut [0.0; 10]).expect_err("the stream is being captured");
        assert_eq!(capture.end().expect_err("an invalid capture").kind(), ErrorKind::System);
        rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a call");
        let mut sum = [0.0; 10];
        vector.read(&mut sum).expect("a copy");
        assert_eq!(sum, [2.0; 10]);
    });
}

#[test]
fn graphs_and_calls_take_turns() {
    processes("graphs_and_calls_take_turns", 2, |rank| {
        let stream = stream();
        let mut vector = stream.clone_htod(&[1f32; 100]).expect("memory");
        let sum = capture(&stream, || rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a capture"));
        let mean =
            capture(&stream, || rank.all_reduce_on_gpu(&mut vector, ReduceOp::Avg).expect("a capture"));
        for _ in 0..10 {
            sum.launch().expect("a replay");
            mean.launch().expect("a replay");
            mean.launch().expect("a replay");
            rank.all_reduce_on_gpu(&mut vector, ReduceOp::Max).expect("a call");
            let mut on_host = [1f32];
            rank.all_reduce(&mut on_host, ReduceOp::Sum).expect("a call on the host");
            assert_eq!(on_host, [2.0]);
        }
        assert_eq!(read(&stream, &vector), vec![1024.0; 100]);
        rank.synchronize().expect("all calls succeed");
    });
}

#[test]
fn every_collective_can_be_captured() {
    processes("every_collective_can_be_captured", 3, |rank| {
        for count in [3, 3 * LONG] {
            let stream = stream();
            let own: Vec<f32> = (0..count).map(|at| (at % 97 + 1000 * rank.rank()) as f32).collect();
            let of = |from: usize, at: usize| (at % 97 + 1000 * from) as f32;
            let sum = |at: usize| (0..3).map(|from| of(from, at)).sum::<f32>();
            let (me, part) = (rank.rank(), count / 3);
            let send = stream.clone_htod(&own).expect("memory");
            let share = stream.clone_htod(&own[..part]).expect("memory");
            let zeros = |len: usize| stream.alloc_zeros::<f32>(len).expect("memory");
            let (mut summed, mut scattered, mut gathered) = (zeros(count), zeros(part), zeros(count));
            let (mut exchanged, mut rooted, mut everywhere) = (zeros(count), zeros(count), zeros(count));
            stream.synchronize().expect("a GPU that works");
            let graph = capture(&stream, || {
                rank.all_reduce_into_on_gpu(&send, &mut summed, ReduceOp::Sum).expect("a capture");
                rank.reduce_scatter_on_gpu(&send, &mut scattered, ReduceOp::Sum).expect("a capture");
                rank.all_gather_on_gpu(&share, &mut gathered).expect("a capture");
                rank.all_to_all_on_gpu(&send, &mut exchanged).expect("a capture");
                rank.all_reduce_into_on_gpu(&send, &mut rooted, ReduceOp::Max).expect("a capture");
                rank.broadcast_on_gpu(&mut rooted, 2).expect("a capture");
                rank.all_gather_on_gpu(&scattered, &mut everywhere).expect("a capture");
            });
            for _ in 0..3 {
                graph.launch().expect("a replay");
            }
            let all = |value: &dyn Fn(usize) -> f32| (0..count).map(value).collect::<Vec<f32>>();
            assert_eq!(read(&stream, &summed), all(&sum));
            assert_eq!(
                read(&stream, &scattered),
                (0..part).map(|at| sum(me * part + at)).collect::<Vec<f32>>()
            );
            assert_eq!(read(&stream, &gathered), all(&|at| of(at / part, at % part)));
            assert_eq!(read(&stream, &exchanged), all(&|at| of(at / part, me * part + at % part)));
            assert_eq!(read(&stream, &rooted), all(&|at| of(2, at)));
            assert_eq!(read(&stream, &everywhere), all(&sum));
            rank.synchronize().expect("all calls succeed");
        }
    });
}

/// The length of the block from one rank to another: some are empty, some have many messages.
fn block(from: usize, to: usize) -> usize {
    [0, 5, 1000, 70_001][(from + 2 * to) % 4]
}

#[test]
fn messages_and_uneven_blocks_can_be_captured() {
    capture_messages("messages_and_uneven_blocks_can_be_captured", &[]);
}

#[test]
fn messages_and_blocks_between_nodes_can_be_captured() {
    capture_messages("messages_and_blocks_between_nodes_can_be_captured", &[NODES]);
}

#[test]
fn messages_and_blocks_through_pinned_memory_can_be_captured() {
    capture_messages("messages_and_blocks_through_pinned_memory_can_be_captured", &[PINNED]);
}

/// Counter-example: a message that came in a call that does not receive it ended the communicator.
#[test]
fn ranks_divide_their_messages_into_different_calls() {
    for variables in [&[][..], &[NODES], &[PINNED]] {
        processes_with("ranks_divide_their_messages_into_different_calls", 3, variables, |rank| {
            let (stream, me) = (stream(), rank.rank());
            let vector = |value: usize| stream.clone_htod(&vec![value as f32; LONG]).expect("memory");
            let (one, two, three) = (vector(1), vector(2), vector(3));
            let (mut first, mut second, mut third) = (vector(0), vector(0), vector(0));
            stream.synchronize().expect("a GPU that works");
            for _ in 0..3 {
                match me {
                    0 => {
                        rank.send_on_gpu(&one, 1).expect("a call");
                        rank.send_recv_on_gpu(&two, 1, &mut first, 1).expect("a call");
                        rank.send_on_gpu(&one, 1).expect("a call");
                        rank.send_on_gpu(&two, 1).expect("a call");
                        assert_eq!(read(&stream, &first), vec![3f32; LONG]);
                    }
                    1 => {
                        rank.send_recv_on_gpu(&three, 0, &mut first, 0).expect("a call");
                        rank.recv_on_gpu(&mut second, 0).expect("a call");
                        assert_eq!(read(&stream, &first), vec![1f32; LONG]);
                        assert_eq!(read(&stream, &second), vec![2f32; LONG]);
                        rank.recv_on_gpu(&mut first, 0).expect("a call");
                        rank.recv_on_gpu(&mut third, 2).expect("a call");
                        rank.recv_on_gpu(&mut second, 0).expect("a call");
                        assert_eq!(read(&stream, &first), vec![1f32; LONG]);
                        assert_eq!(read(&stream, &second), vec![2f32; LONG]);
                        assert_eq!(read(&stream, &third), vec![3f32; LONG]);
                    }
                    _ => {
                        std::thread::sleep(Duration::from_millis(100));
                        rank.send_on_gpu(&three, 1).expect("a call");
                    }
                }
                rank.synchronize().expect("all calls succeed");
            }
            rank.barrier().expect("all messages have been received");
        });
    }
}

fn capture_messages(name: &str, variables: &[(&str, &str)]) {
    processes_with(name, 3, variables, |rank| {
        let stream = stream();
        let me = rank.rank();
        let (next, previous) = ((me + 1) % 3, (me + 2) % 3);
        let counts: Vec<usize> = (0..3).map(|to| block(me, to)).collect();
        let expected: Vec<usize> = (0..3).map(|from| block(from, me)).collect();
        let (sends, receives) = (counts.iter().sum(), expected.iter().sum());
        let zeros = |len: usize| stream.alloc_zeros::<f32>(len).expect("memory");
        let (mut send, mut sent) = (zeros(sends), zeros(LONG));
        let mut received = [zeros(receives), zeros(LONG), zeros(LONG), zeros(7), zeros(LONG)];
        stream.synchronize().expect("a GPU that works");
        let calls =
            |send: &CudaSlice<f32>,
             sent: &CudaSlice<f32>,
             [exchanged, ring, single, summed, blocks]: &mut [CudaSlice<f32>; 5]| {
                rank.all_to_all_v_on_gpu(send, &counts, exchanged, &expected).expect("a call");
                rank.send_recv_on_gpu(sent, next, ring, previous).expect("a call");
                // Ranks 0 and 1 send to each other, first the one and then the other.
                for from in [0, 1] {
                    match me {
                        2 => {}
                        _ if me == from => rank.send_on_gpu(sent, 1 - from).expect("a call"),
                        _ => rank.recv_on_gpu(single, from).expect("a call"),
                    }
                }
                rank.all_reduce_on_gpu(summed, ReduceOp::Sum).expect("a call");
                rank.all_to_all_on_gpu(sent, blocks).expect("a call");
            };
        let graph = capture(&stream, || calls(&send, &sent, &mut received));
        for round in 1..=6 {
            let of = |from: usize, at: usize| (1000 * round + 100 * from + at % 89) as f32;
            let own = |len: usize| (0..len).map(|at| of(me, at)).collect::<Vec<f32>>();
            stream.memcpy_htod(&own(sends), &mut send).expect("a copy");
            stream.memcpy_htod(&own(LONG), &mut sent).expect("a copy");
            if round % 3 == 0 {
                calls(&send, &sent, &mut received);
            } else {
                graph.launch().expect("a replay");
            }
            // Each rank has its blocks one after the other.
            let first = |from: usize| (0..me).map(|to| block(from, to)).sum::<usize>();
            let blocks =
                (0..3).flat_map(|from| (0..block(from, me)).map(move |at| of(from, first(from) + at)));
            assert_eq!(read(&stream, &received[0]), blocks.collect::<Vec<f32>>(), "round {round}");
            let from_rank = |from: usize| (0..LONG).map(|at| of(from, at)).collect::<Vec<f32>>();
            assert_eq!(read(&stream, &received[1]), from_rank(previous), "round {round}");
            let part = LONG / 3;
            let parts = (0..LONG).map(|at| of(at / part, me * part + at % part)).collect::<Vec<f32>>();
            assert_eq!(read(&stream, &received[4]), parts, "round {round}");
            if me != 2 {
                assert_eq!(read(&stream, &received[2]), from_rank(1 - me), "round {round}");
            }
        }
        rank.synchronize().expect("all calls succeed");
    });
}

#[test]
fn captures_of_different_calls_fail_when_they_are_captured() {
    processes("captures_of_different_calls_fail_when_they_are_captured", 2, |rank| {
        let stream = stream();
        let mut vector = stream.clone_htod(&vec![1f32; 100 + rank.rank()]).expect("memory");
        stream.synchronize().expect("a GPU that works");
        let mut outcome = Ok(());
        drop(capture(&stream, || outcome = rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum)));
        let error = outcome.expect_err("the ranks capture vectors of different lengths");
        assert_eq!(error.kind(), ErrorKind::Disagreement, "{error}");
        assert!(
            error.message().contains("100 x float") && error.message().contains("101 x float"),
            "{error}"
        );
        // Nothing was launched, so the communicator works.
        let mut vector = stream.clone_htod(&[1f32; 100]).expect("memory");
        rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a call");
        assert_eq!(read(&stream, &vector), vec![2.0; 100]);
    });
}

/// The error of the communicator, which must come within `limit`.
fn failure_within(rank: &Rank, limit: Duration) -> flexring::Error {
    let begun = Instant::now();
    loop {
        if let Err(error) = rank.status() {
            return error;
        }
        assert!(begun.elapsed() < limit, "no failure after {limit:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Ranks launch different graphs: an error with these words, before any output.
fn launch_different_graphs(rank: &Rank, words: &str) {
    let stream = stream();
    let mut vector = stream.clone_htod(&[1f32; 100]).expect("memory");
    let graphs = [0, 1]
        .map(|_| capture(&stream, || rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a capture")));
    graphs[rank.rank()].launch().expect("a replay");
    let error = failure_within(rank, Duration::from_secs(10));
    assert_eq!(error.kind(), ErrorKind::Disagreement, "{error}");
    assert!(error.message().contains(words), "{error}");
    assert_eq!(read(&stream, &vector), vec![1.0; 100]);
}

#[test]
fn replays_of_different_graphs_are_an_error_before_any_output() {
    let name = "replays_of_different_graphs_are_an_error_before_any_output";
    processes(name, 2, |rank| launch_different_graphs(&rank, "replay different graphs"));
}

#[test]
fn calls_that_differ_from_a_replay_are_an_error_before_any_output() {
    processes("calls_that_differ_from_a_replay_are_an_error_before_any_output", 2, |rank| {
        let stream = stream();
        let mut vector = stream.clone_htod(&[1f32; 100]).expect("memory");
        let graph =
            capture(&stream, || rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a capture"));
        if rank.rank() == 0 {
            graph.launch().expect("a replay");
        } else {
            // The communicator fails later than the call returns, or at once.
            let _ = rank.all_reduce_on_gpu(&mut vector, ReduceOp::Max);
        }
        let error = failure_within(&rank, Duration::from_secs(10));
        assert_eq!(error.kind(), ErrorKind::Disagreement, "{error}");
        assert!(error.message().contains("sum") && error.message().contains("max"), "{error}");
        assert_eq!(read(&stream, &vector), vec![1.0; 100]);
    });
}

#[test]
fn a_graph_of_a_communicator_that_has_ended_does_nothing_and_says_so() {
    let name = "a_graph_of_a_communicator_that_has_ended_does_nothing_and_says_so";
    let ended = outputs(name, 2, &[("FLEXRING_LOG", "error")], |rank| {
        let stream = stream();
        let mut vector = stream.clone_htod(&[1f32; 100]).expect("memory");
        let graph =
            capture(&stream, || rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a capture"));
        graph.launch().expect("a replay");
        assert_eq!(read(&stream, &vector), vec![2.0; 100]);
        drop(rank);
        for _ in 0..3 {
            graph.launch().expect("a launch that does nothing");
        }
        assert_eq!(read(&stream, &vector), vec![2.0; 100]);
        // The thread that watches kernels says so.
        std::thread::sleep(Duration::from_millis(300));
    });
    for output in ended {
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        assert_eq!(text.matches("has ended or failed: they did nothing").count(), 1, "{text}");
    }
}

#[test]
fn an_abort_ends_a_replay_on_all_ranks_at_once() {
    processes("an_abort_ends_a_replay_on_all_ranks_at_once", 2, |rank| {
        let stream = stream();
        let mut vector = stream.clone_htod(&[1f32; 100]).expect("memory");
        let graph =
            capture(&stream, || rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a capture"));
        let begun = Instant::now();
        if rank.rank() == 0 {
            graph.launch().expect("a replay");
            std::thread::sleep(Duration::from_millis(50));
            rank.abort();
        }
        let error = failure_within(&rank, Duration::from_secs(5));
        assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
        // The kernel has left.
        assert_eq!(read(&stream, &vector), vec![1.0; 100]);
        assert!(begun.elapsed() < Duration::from_secs(5));
    });
}

#[test]
fn the_deadline_of_a_replay_names_the_rank_that_does_not_come() {
    let name = "the_deadline_of_a_replay_names_the_rank_that_does_not_come";
    processes_with(name, 3, &[("FLEXRING_TIMEOUT_MS", "500")], |rank| {
        let stream = stream();
        let mut vector = stream.clone_htod(&[1f32; 100]).expect("memory");
        let graph =
            capture(&stream, || rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a capture"));
        if rank.rank() != 1 {
            graph.launch().expect("a replay");
        }
        let error = failure_within(&rank, Duration::from_secs(10));
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(error.message().contains("rank 1"), "{error}");
        assert_eq!(read(&stream, &vector), vec![1.0; 100]);
    });
}

#[test]
fn a_missing_message_ends_at_the_deadline_with_its_rank() {
    let name = "a_missing_message_ends_at_the_deadline_with_its_rank";
    processes_with(name, 3, &[("FLEXRING_TIMEOUT_MS", "500")], |rank| {
        let stream = stream();
        let mut vector = stream.clone_htod(&[1f32; 100]).expect("memory");
        rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a call");
        if rank.rank() == 0 {
            rank.recv_on_gpu(&mut vector, 2).expect("it is enqueued");
        }
        let error = failure_within(&rank, Duration::from_secs(10));
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(error.message().contains("rank 2 did not send what rank 0 receives"), "{error}");
        assert_eq!(read(&stream, &vector), vec![3.0; 100]);
    });
}

/// Another length, another type, and a collective in between: each is found before the memory is written.
#[test]
fn messages_that_differ_are_an_error() {
    for wrong in 0..3 {
        processes("messages_that_differ_are_an_error", 2, |rank| {
            let stream = stream();
            let mut vector = stream.clone_htod(&[1f32; 101]).expect("memory");
            let (mut shorter, numbers) = (
                stream.clone_htod(&[1f32; 100]).expect("memory"),
                stream.clone_htod(&[1i32; 101]).expect("memory"),
            );
            stream.synchronize().expect("a GPU that works");
            let mut calls = || match (rank.rank(), wrong) {
                (0, 0) => rank.send_on_gpu(&shorter, 1),
                (0, 1) => rank.send_on_gpu(&numbers, 1),
                (0, _) => {
                    rank.send_on_gpu(&vector, 1)?;
                    rank.all_reduce_on_gpu(&mut shorter, ReduceOp::Sum)
                }
                (_, 2) => {
                    rank.all_reduce_on_gpu(&mut shorter, ReduceOp::Sum)?;
                    rank.recv_on_gpu(&mut vector, 0)
                }
                _ => rank.recv_on_gpu(&mut vector, 0),
            };
            let _ = calls();
            let error = failure_within(&rank, Duration::from_secs(10));
            assert_eq!(error.kind(), ErrorKind::Disagreement, "{error}");
            let phrase = match wrong {
                0 => "rank 0 sends 100 x float to rank 1, which expects 101 x float",
                1 => "rank 0 sends 101 x int32 to rank 1, which expects 101 x float",
                _ => "rank 0 sent a message to rank 1 before or after a collective",
            };
            assert!(error.message().contains(phrase), "{error}");
            assert_eq!(read(&stream, &vector), vec![1.0; 101]);
            drop((shorter, numbers));
        });
    }
}

#[test]
fn two_graphs_that_run_at_the_same_time_are_an_error() {
    processes("two_graphs_that_run_at_the_same_time_are_an_error", 2, |rank| {
        let streams = [stream(), stream()];
        let graphs = streams.each_ref().map(|stream| {
            let mut vector = stream.clone_htod(&[1f32; 100]).expect("memory");
            let graph =
                capture(stream, || rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a capture"));
            (graph, vector)
        });
        // Only one rank replays, so that the first kernel waits while the second one begins.
        if rank.rank() == 0 {
            graphs.iter().for_each(|(graph, _)| graph.launch().expect("a replay"));
        }
        let error = failure_within(&rank, Duration::from_secs(10));
        assert!(error.message().contains("at the same time"), "{error}");
        for (stream, (_, vector)) in streams.iter().zip(&graphs) {
            assert_eq!(read(stream, vector), vec![1.0; 100]);
        }
    });
}

#[test]
fn a_killed_rank_ends_the_replays_of_the_others() {
    let ended = outputs("a_killed_rank_ends_the_replays_of_the_others", 3, &[], |rank| {
        let stream = stream();
        let mut vector = stream.clone_htod(&[1f32; 100]).expect("memory");
        let graph =
            capture(&stream, || rank.all_reduce_on_gpu(&mut vector, ReduceOp::Avg).expect("a capture"));
        for _ in 0..10 {
            graph.launch().expect("a replay");
        }
        assert_eq!(read(&stream, &vector), vec![1.0; 100]);
        let _ = let_others_finish(&rank);
        if rank.rank() == 1 {
            crate::harness::signal_self(rustix::process::Signal::KILL);
        }
        graph.launch().expect("a replay");
        let error = failure_within(&rank, Duration::from_secs(10));
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        assert!(error.message().contains("rank 1"), "{error}");
        stream.synchronize().expect("the kernel has left");
    });
    for (rank, output) in ended.iter().enumerate() {
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), rank != 1, "rank {rank}: {text}");
    }
}
