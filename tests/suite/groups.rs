//! Sends and receives: every message arrives at the rank that it is for, in order, whatever groups the two
//! ranks divide them into; and calls without a counterpart are errors that name the ranks, never wrong data
//! and never a hang.

use crate::collectives::{elements, noise, token};
use crate::harness::{Rank, Setup, TestElement, World, spawn};
use flexring::{Communicator, Element, Error, ErrorKind, Operation, OwnedOperation, ReduceOp, Result};
use half::bf16;
use std::ops::DerefMut;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// From no elements to many sub-chunks.
const COUNTS: [usize; 7] = [0, 1, 7, 64, 1000, 4099, 30_011];

/// The worlds of this run whose vectors are on the host.
fn host_worlds() -> impl Iterator<Item = World> {
    World::enabled().iter().copied().filter(|world| !world.is_gpu())
}

/// The length of message `number` from one rank to another.
fn count_of(from: usize, to: usize, number: usize) -> usize {
    COUNTS[(from * 3 + to * 5 + number) % COUNTS.len()]
}

/// The elements of message `number` from one rank to another: they tell sender, receiver, number and index.
fn content<T: TestElement>(from: usize, to: usize, number: usize) -> Vec<T> {
    elements(count_of(from, to, number), |at| token::<T>(from * 11 + to * 3 + number, at))
}

type Vector<T> = Box<dyn DerefMut<Target = [T]>>;

/// A vector with this content, from the memory that peers read directly or from the heap.
fn vector<T: Element>(comm: &Communicator, content: Vec<T>, pool: bool) -> Vector<T> {
    if !pool {
        return Box::new(content);
    }
    let mut buffer = comm.alloc::<T>(content.len()).expect("memory");
    buffer.copy_from_slice(&content);
    Box::new(buffer)
}

/// The messages of one rank with others.
struct Messages<T> {
    rank: usize,
    sends: Vec<(usize, usize, Vector<T>)>,
    receives: Vec<(usize, usize, Vector<T>)>,
}

impl<T: TestElement> Messages<T> {
    /// `each` messages to and from each of these peers.
    fn new(comm: &Rank, peers: &[usize], each: usize, pool: bool) -> Self {
        let rank = comm.rank();
        let all = || peers.iter().flat_map(|peer| (0..each).map(|number| (*peer, number)));
        let send = |(peer, number)| (peer, number, vector(comm, content(rank, peer, number), pool));
        let receive = |(peer, number)| {
            let noise = elements(count_of(peer, rank, number), noise::<T>);
            (peer, number, vector(comm, noise, pool))
        };
        Self { rank, sends: all().map(send).collect(), receives: all().map(receive).collect() }
    }

    /// All sends and then all receives.
    fn operations(&mut self) -> Vec<Operation<'_>> {
        let Self { sends, receives, .. } = self;
        let sends = sends.iter().map(|(peer, _, vector)| Operation::send(vector, *peer));
        sends.chain(receives.iter_mut().map(|(peer, _, vector)| Operation::recv(vector, *peer))).collect()
    }

    fn check(&self) {
        let rank = self.rank;
        for (peer, number, vector) in &self.receives {
            assert!(
                vector[..] == content::<T>(*peer, rank, *number)[..],
                "message {number} from {peer} to {rank}"
            );
        }
        for (peer, number, vector) in &self.sends {
            assert!(
                vector[..] == content::<T>(rank, *peer, *number)[..],
                "the input of {number} from {rank} to {peer}"
            );
        }
    }
}

/// Exchanges messages of one type in several ways.
fn exchange<T: TestElement>(comm: &Rank, pool: bool) {
    let (rank, world) = (comm.rank(), comm.world_size());
    let all: Vec<usize> = (0..world).collect();
    let mut messages = Messages::<T>::new(comm, &all, 3, pool);
    comm.group(messages.operations()).expect("all ranks exchange with all, and with themselves");
    messages.check();
    // A ring, in which each rank sends first, so that no rank may wait for its send.
    let mut sent = Messages::<T>::new(comm, &[(rank + 1) % world], 1, pool);
    let mut received = Messages::<T>::new(comm, &[(rank + world - 1) % world], 1, pool);
    let ring = sent.operations().into_iter().take(1).chain(received.operations().into_iter().skip(1));
    comm.group(ring).expect("each rank sends to the next one");
    received.check_received();
    // One rank has one group, the other single calls in another order.
    let pair = if rank % 2 == 0 { rank + 1 } else { rank - 1 };
    if pair < world {
        let mut messages = Messages::<T>::new(comm, &[pair], 2, pool);
        if rank < pair {
            comm.group(messages.operations()).expect("the peer makes the counterparts");
        } else {
            let Messages { sends, receives, .. } = &mut messages;
            for (send, receive) in sends.iter().zip(receives) {
                comm.recv(&mut receive.2, pair).expect("the peer sends");
                comm.send(&send.2, pair).expect("the peer receives");
            }
        }
        messages.check();
    }
}

impl<T: TestElement> Messages<T> {
    fn check_received(&self) {
        for (peer, number, vector) in &self.receives {
            assert!(vector[..] == content::<T>(*peer, self.rank, *number)[..], "{number} from {peer}");
        }
    }
}

/// Tests every way of sending with every count, between collectives of any path.
fn check_all(world: World) {
    if !world.is_enabled() {
        return;
    }
    // Simulated hardware is slow, so test one world size only.
    for ranks in if world.is_simulated() { 3..=3 } else { 1..=5 } {
        spawn(&Setup::new(world, ranks), |comm| {
            for turn in 0..2 {
                let pool = turn == 1;
                exchange::<f32>(&comm, pool);
                exchange::<u8>(&comm, !pool);
                comm.barrier().expect("all ranks call it");
                exchange::<bf16>(&comm, pool);
                comm.all_reduce(&mut [1f64; 5000], ReduceOp::Sum).expect("all ranks call it");
                exchange::<i64>(&comm, pool);
            }
        });
    }
}

#[test]
fn every_message_arrives_between_threads() {
    check_all(World::Local);
}

#[test]
fn every_message_arrives_over_shm() {
    check_all(World::Shm);
}

#[test]
fn every_message_arrives_over_tcp() {
    check_all(World::Tcp);
}

#[test]
fn every_message_arrives_on_two_nodes() {
    check_all(World::Mixed);
}

#[test]
fn every_message_arrives_over_rdma() {
    check_all(World::Verbs);
}

#[test]
fn every_message_arrives_over_rdma_with_staging() {
    check_all(World::VerbsStaged);
}

#[test]
fn every_message_arrives_on_two_nodes_over_rdma() {
    check_all(World::VerbsMixed);
}

/// Vectors on GPUs are sent between processes, and from a rank to itself. These ranks are threads of one
/// process, whose kernels would wait for each other without being launched together.
#[cfg(feature = "cuda")]
#[test]
fn messages_on_gpus_between_threads_are_refused() {
    use flexring::gpu::{GpuBuffer, gpu_count};

    for &world in World::enabled().iter().filter(|world| world.is_gpu()) {
        spawn(&Setup::new(world, 3), |comm| {
            let (rank, gpu) = (comm.rank(), comm.rank() % gpu_count().expect("a driver"));
            for number in 0..COUNTS.len() {
                let given = content::<i32>(rank, rank, number);
                let mut send = GpuBuffer::new(gpu, given.len()).expect("memory");
                let mut receive = GpuBuffer::new(gpu, given.len()).expect("memory");
                send.write(&given).expect("a copy");
                receive.write(&elements(given.len(), noise::<i32>)).expect("a copy");
                comm.send_recv_on_gpu(&send, rank, &mut receive, rank).expect("a rank may send to itself");
                comm.synchronize().expect("the call succeeds");
                let mut received = vec![0; given.len()];
                receive.read(&mut received).expect("a copy");
                assert!(received == given, "{world:?}: message {number} to itself");
                if !given.is_empty() {
                    let to = (rank + 1) % 3;
                    let error = comm.send_on_gpu(&send, to).expect_err("the peer is a thread");
                    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                    assert!(error.message().contains("a process of its own"), "{error}");
                }
            }
        });
    }
}

#[test]
fn a_group_may_have_messages_of_several_types() {
    for world in host_worlds() {
        spawn(&Setup::new(world, 2), |comm| {
            let peer = 1 - comm.rank();
            let (bytes, doubles) = ([7u8; 5], vec![0.5f64; 3000]);
            let (mut got_bytes, mut got_doubles) = ([0u8; 5], vec![0f64; 3000]);
            let group = [
                Operation::send(&bytes, peer),
                Operation::send(&doubles, peer),
                Operation::recv(&mut got_bytes, peer),
                Operation::recv(&mut got_doubles, peer),
            ];
            comm.group(group).expect("the types correspond");
            assert_eq!((got_bytes, got_doubles), (bytes, doubles));
            comm.group([]).expect("nothing to do");
        });
    }
}

#[test]
fn ranks_without_messages_take_no_part_and_may_leave() {
    for world in host_worlds() {
        spawn(&Setup::new(world, 4), |comm| {
            comm.all_reduce(&mut [1f32; 3000], ReduceOp::Sum).expect("all ranks call it");
            match comm.rank() {
                // The others go on after rank 0 has left, and after rank 1 has.
                0 => (),
                rank => {
                    for round in 0..30 {
                        let peers = [[2, 3], [3, 1], [1, 2]][rank - 1];
                        let mut messages = Messages::<i32>::new(&comm, &peers, 1, round % 2 == 0);
                        comm.group(messages.operations()).expect("three ranks exchange");
                        messages.check();
                    }
                    let (mut token, next, before) = ([0u8; 1], rank % 3 + 1, (rank + 1) % 3 + 1);
                    if rank == 1 {
                        comm.send(&[1u8], next).expect("rank 2 receives");
                        return;
                    }
                    comm.recv(&mut token, before).expect("the rank before sends");
                    if rank == 2 {
                        std::thread::sleep(Duration::from_millis(50));
                        comm.send(&token, next).expect("rank 3 receives");
                    }
                    assert_eq!(token, [1]);
                }
            }
        });
    }
}

#[test]
fn asynchronous_messages_return_their_vectors() {
    for world in host_worlds() {
        spawn(&Setup::new(world, 3), |comm| {
            let (rank, world) = (comm.rank(), comm.world_size());
            let (next, before) = ((rank + 1) % world, (rank + world - 1) % world);
            let group = vec![
                OwnedOperation::Send(vec![rank as u32; 2000], next),
                OwnedOperation::Recv(vec![9; 2000], before),
            ];
            let request = comm.group_async(group).expect("a request");
            let single = if rank == 0 {
                comm.send_async(vec![5u32; 70], 1).expect("a request")
            } else if rank == 1 {
                comm.recv_async(vec![0u32; 70], 0).expect("a request")
            } else {
                comm.group_async(vec![OwnedOperation::Send(vec![1u32], 2), OwnedOperation::Recv(vec![0], 2)])
                    .expect("a request")
                    .wait()
                    .map(|mut own| comm.send_async(own.remove(1).into_vector(), 2).is_err())
                    .expect("rank 2 sends to itself");
                comm.all_reduce_async(vec![0u32; 70], ReduceOp::Max).expect("a request")
            };
            let vectors = request.wait().expect("all ranks exchange");
            let vectors: Vec<_> = vectors.into_iter().map(OwnedOperation::into_vector).collect();
            assert_eq!(vectors, [vec![rank as u32; 2000], vec![before as u32; 2000]]);
            if rank < 2 {
                let vector = single.wait().expect("both ranks call it");
                assert_eq!(vector, [5; 70]);
                comm.all_reduce(&mut vec![0u32; 70], ReduceOp::Max).expect("all ranks call it");
            } else {
                single.wait().expect("all ranks call it");
            }
        });
    }
}

/// Makes the same call on all ranks, then `body`, and then a collective. Returns the first error of each
/// rank.
fn first_errors(setup: &Setup, body: impl Fn(&Rank) -> Result<()> + Sync) -> Vec<Error> {
    let first_is_over = Barrier::new(setup.ranks);
    spawn(setup, |comm| {
        comm.barrier().expect("the first calls agree");
        first_is_over.wait();
        let begun = Instant::now();
        let outcome = body(&comm).and_then(|()| comm.all_reduce(&mut [1f32; 5000], ReduceOp::Sum));
        assert!(begun.elapsed() < Duration::from_secs(10), "it took {:?}", begun.elapsed());
        outcome.expect_err("the calls do not correspond")
    })
}

#[test]
fn messages_of_another_length_or_type_than_expected_are_an_error_that_names_both_ranks() {
    for world in host_worlds() {
        for (sent, expected) in [(5, 7), (0, 5), (5, 0), (30_000, 5), (30_000, 30_001)] {
            let errors = first_errors(&Setup::new(world, 3), |comm| match comm.rank() {
                0 => comm.recv(&mut vec![0f32; expected], 2),
                2 => comm.send(&vec![1f32; sent], 0),
                _ => Ok(()),
            });
            let phrase = format!("rank 2 sends {sent} x float to rank 0, which expects {expected} x float");
            for error in errors {
                assert_eq!(error.kind(), ErrorKind::Disagreement, "{world:?}: {error}");
                assert!(error.message().contains(&phrase), "{world:?} {phrase}: {error}");
            }
        }
        let errors = first_errors(&Setup::new(world, 2), |comm| match comm.rank() {
            0 => comm.recv(&mut [0f32; 3], 1),
            _ => comm.send(&[1i32; 3], 0),
        });
        for error in errors {
            let phrase = "rank 1 sends 3 x int32 to rank 0, which expects 3 x float";
            assert!(error.message().contains(phrase), "{world:?}: {error}");
        }
    }
}

#[test]
fn a_rank_that_calls_a_collective_instead_of_its_counterpart_is_named() {
    for world in host_worlds() {
        for is_open in [false, true] {
            let errors = first_errors(&Setup::new(world, 3), |comm| {
                let peer = [2, 2, 0][comm.rank()];
                if is_open && comm.rank() != 1 {
                    let mut messages = Messages::<u8>::new(comm, &[peer], 1, false);
                    comm.group(messages.operations())?;
                }
                if comm.rank() == 2 { comm.send(&vec![1f32; 40_000], 0) } else { Ok(()) }
            });
            for error in errors {
                assert_eq!(error.kind(), ErrorKind::Disagreement, "{world:?} {is_open}: {error}");
                let names_both = ["rank 0", "rank 2"].iter().all(|rank| error.message().contains(rank));
                assert!(names_both, "{world:?} {is_open}: {error}");
            }
        }
    }
}

#[test]
fn a_missing_counterpart_ends_at_the_deadline_with_its_rank() {
    for world in host_worlds() {
        for receives in [false, true] {
            let mut setup = Setup::new(world, 3);
            setup.config.timeout = Duration::from_secs(2);
            let errors = spawn(&setup, |comm| {
                comm.barrier().expect("all ranks call it");
                let begun = Instant::now();
                let outcome = match comm.rank() {
                    1 if receives => comm.recv(&mut [0f32; 9000], 2),
                    1 => comm.send(&[1f32; 9000], 2),
                    _ => loop {
                        std::thread::sleep(Duration::from_millis(20));
                        let status = comm.status();
                        if status.is_err() || begun.elapsed() > Duration::from_secs(15) {
                            break status;
                        }
                    },
                };
                assert!(begun.elapsed() < Duration::from_secs(15), "it took {:?}", begun.elapsed());
                outcome.expect_err("rank 2 makes no counterpart")
            });
            let clause = if receives {
                "waits for rank 2 to send to it"
            } else {
                "waits for rank 2 to receive from it"
            };
            for error in errors {
                assert_eq!(error.kind(), ErrorKind::Timeout, "{world:?}: {error}");
                assert!(error.message().contains(clause), "{world:?}: {error}");
            }
        }
    }
}

#[test]
fn a_peer_that_leaves_without_its_counterpart_is_named() {
    for world in host_worlds() {
        for (is_open, receives) in [(false, false), (false, true), (true, false), (true, true)] {
            let errors = spawn(&Setup::new(world, 3), |comm| {
                comm.barrier().expect("all ranks call it");
                if is_open && comm.rank() > 0 {
                    let mut messages = Messages::<u8>::new(&comm, &[3 - comm.rank()], 1, false);
                    comm.group(messages.operations()).expect("both ranks exchange");
                }
                if comm.rank() != 1 {
                    return None;
                }
                let begun = Instant::now();
                let outcome = if receives {
                    comm.recv(&mut [0f32; 9000], 2)
                } else {
                    comm.send(&vec![1f32; 9_000_000], 2)
                };
                assert!(begun.elapsed() < Duration::from_secs(15), "it took {:?}", begun.elapsed());
                Some(outcome.expect_err("rank 2 has left"))
            });
            for error in errors.into_iter().flatten() {
                assert_eq!(error.kind(), ErrorKind::PeerLost, "{world:?} {is_open} {receives}: {error}");
                assert!(error.message().contains("rank 2"), "{world:?} {is_open} {receives}: {error}");
            }
        }
    }
}

#[test]
fn bad_arguments_are_refused_and_the_communicator_still_works() {
    for world in host_worlds() {
        spawn(&Setup::new(world, 2), |comm| {
            let (rank, peer) = (comm.rank(), 1 - comm.rank());
            let refused = |outcome: Result<()>, phrase: &str| {
                let error = outcome.expect_err(phrase);
                assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
                assert!(error.message().contains(phrase), "{error} does not contain {phrase:?}");
            };
            refused(comm.send(&[1f32], 2), "send to rank 2: there are 2 ranks, from 0");
            let any =
                "there are 2 ranks, from 0; a receive names the rank that sends, there is none from any rank";
            refused(comm.recv(&mut [1f32], usize::MAX), any);
            refused(comm.send(&[1f32], rank), "sends 1 vectors to itself and receives 0");
            let mut receive = [0f32; 3];
            let own = [Operation::send(&[1f32; 2], rank), Operation::recv(&mut receive, rank)];
            refused(comm.group(own), "sends 2 x float to itself and expects 3 x float");
            let own = [Operation::send(&[1i32; 3], rank), Operation::recv(&mut receive, rank)];
            refused(comm.group(own), "sends 3 x int32 to itself and expects 3 x float");
            let mut messages = Messages::<i32>::new(&comm, &[peer], 2, false);
            comm.group(messages.operations()).expect("the communicator still works");
            messages.check();
        });
    }
}
