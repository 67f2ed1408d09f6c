//! The hot paths whose instructions `make bench-gate` counts with callgrind.
//!
//! One thread drives each of them, so that the counts repeat: peers are played by `echo`, or have done their
//! part before. Arithmetic is plain code on every processor. The functions with `#[library_benchmark]` are
//! counted, what `setup` names is not.

#![allow(unsafe_code, reason = "pieces are made of the benchmark's own memory")]

mod echo;
mod memory;

use echo::Echo;
use flexring::internal::device::host::Host;
use flexring::internal::executor::{BoundCall, CallPath, Executor, ExecutorParts};
use flexring::internal::memory::Piece;
use flexring::internal::transport::shm::{ArenaLayout, Mailbox, NodeMemory, Region, RegionOfRank, Shm};
use flexring::internal::transport::tcp::{LinkOptions, Listener, Tcp};
use flexring::internal::transport::{
    AnyTransport, Event, Events, InPlaceTransport, PostedTransport, Transport, local,
};
use flexring::{Communicator, ReduceOp};
use flexring_core::call::Call;
use flexring_core::config::{Algorithm, Config, Simd};
use flexring_core::fault::Fault;
use flexring_core::secret::SecretKey;
use flexring_core::trace::Trace;
use flexring_plan::lowering::{Movement, Plan, ProgramSpec};
use flexring_plan::planner::{self, Details};
use flexring_plan::topology::Topology;
use gungraun::{library_benchmark, library_benchmark_group, main};
use memory::{all_reduce, bound, facts, zeros};
use rustix::event::{PollFd, PollFlags};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a sub-chunk: so few that its way counts, and not its arithmetic.
const SUBCHUNK: usize = 64;

/// Sub-chunks of each rank's shard.
const SUBCHUNKS: usize = 64;

/// Longest small message in bytes.
const SMALL: usize = 4096;

/// Calls before the counted one, after which nothing is done for the first time.
const WARM_UPS: u64 = 3;

/// A rank with the executor whose calls are counted.
struct OneRank {
    executor: Executor,
    path: CallPath,
    bound: BoundCall,
}

impl OneRank {
    /// Rank 0 of `world` ranks, reached by `transport`, with a mailbox if all are on one node.
    fn executor(world: usize, transport: AnyTransport, mailbox: Option<Mailbox>) -> Executor {
        let parts = ExecutorParts {
            rank: 0,
            world,
            transports: vec![transport],
            routes: vec![0; world],
            device: Box::new(Host::new(Simd::Scalar).expect("on every processor")),
            slots: (0..=4 * world).map(|_| zeros(SMALL)).collect(),
            mailbox,
            fault: Arc::new(Fault::new()),
            spin: Duration::from_secs(1),
            timeout: Duration::from_secs(60),
            ranks_per_core: 1,
            trace: Trace::new(None),
        };
        Executor::new(parts).expect("an executor")
    }

    /// Rank 0 of a ring of `world` nodes or of a node, warmed up.
    fn in_ring(topology: &Topology, transport: AnyTransport) -> Self {
        let (config, world) = (Config::default(), topology.world());
        let details = Details::of(&config);
        let schedule = planner::plan(Algorithm::Ring, topology, &details).expect("a ring");
        let plan = Plan::on(schedule, topology, config.lowering);
        let spec = ProgramSpec { movement: Movement::Waves, ..ProgramSpec::ALL_REDUCE };
        let mut executor = Self::executor(world, transport, None);
        let number = executor.install(Arc::new(plan.program(0, spec))).expect("enough slots");
        let vector = zeros(world * SUBCHUNKS * SUBCHUNK);
        let bound = bound(all_reduce(0, vector.len() / size_of::<f32>()), vector);
        let path = CallPath::Program { number, facts: facts(&bound.call, vector, SUBCHUNK, world) };
        let mut rank = Self { executor, path, bound };
        (0..WARM_UPS).for_each(|_| rank.call());
        rank
    }

    fn call(&mut self) {
        self.bound.call.sequence += 1;
        self.executor.run(&self.bound, &self.path, &|error| error).expect("the call succeeds");
    }
}

/// Rank 0 of four nodes, over links that write to posted memory, as TCP and RDMA do.
fn posted_ring() -> OneRank {
    let topology = Topology::from_names(&["a", "b", "c", "d"]);
    OneRank::in_ring(&topology, AnyTransport::Posted(Box::new(Echo::<false>::new(SUBCHUNK))))
}

/// Rank 0 of a node of two, whose messages are read where they are, as in shared memory.
fn in_place_ring() -> OneRank {
    let topology = Topology::from_names(&["a", "a"]);
    OneRank::in_ring(&topology, AnyTransport::InPlace(Box::new(Echo::<true>::new(SUBCHUNK))))
}

// The executor's way for a program of many sub-chunks.
#[library_benchmark]
#[bench::posted(setup = posted_ring)]
#[bench::in_place(setup = in_place_ring)]
fn subchunks(mut rank: OneRank) -> OneRank {
    rank.call();
    rank
}

/// The memory and the regions of two ranks on one node.
struct Node {
    memories: Vec<NodeMemory>,
    regions: Vec<Region>,
}

impl Node {
    fn new() -> Self {
        let layout = ArenaLayout::new(2, SMALL, 2, SMALL);
        let memories = local::share_memory(2, [7; 16]).expect("memory");
        let region = |memory: &NodeMemory| memory.own().region(layout, None).expect("memory");
        let regions = memories.iter().map(region).collect();
        Self { memories, regions }
    }

    /// The transport and the mailbox of a rank.
    fn links_of(&mut self, rank: usize) -> (Shm, Mailbox) {
        let address =
            |(rank, region): (usize, &Region)| RegionOfRank { rank, place: rank, region: region.address() };
        let ranks: Vec<RegionOfRank> = self.regions.iter().enumerate().map(address).collect();
        let region = &mut self.regions[rank];
        let neighbours = self.memories[rank].neighbours(region, &ranks).expect("two ranks");
        let shm = Shm::new("shm", 2, region.arena(), &neighbours).expect("a layout that fits");
        (shm, Mailbox::new(region.arena(), &neighbours, rank).expect("a layout that fits"))
    }
}

/// Rank 0 of a node of two, and the mailbox of rank 1, in which its part of the next call is.
struct SmallCall {
    rank: OneRank,
    peer: Mailbox,
    _node: Node,
}

impl SmallCall {
    /// Rank 0 with a vector of `bytes`, warmed up.
    fn new(bytes: usize) -> Self {
        let mut node = Node::new();
        let (shm, mailbox) = node.links_of(0);
        let (_, peer) = node.links_of(1);
        let executor = OneRank::executor(2, AnyTransport::InPlace(Box::new(shm)), Some(mailbox));
        let vector = zeros(bytes);
        let bound = bound(all_reduce(0, bytes / size_of::<f32>()), vector);
        let rank = OneRank { executor, path: CallPath::Small, bound };
        let mut call = Self { rank, peer, _node: node };
        for _ in 0..WARM_UPS {
            call.post_of_peer();
            call.rank.call();
        }
        call.post_of_peer();
        call
    }

    fn post_of_peer(&mut self) {
        let Call { sequence, count, dtype, .. } = self.rank.bound.call;
        self.peer.begin(all_reduce(sequence + 1, count as usize).to_words(), count as usize * dtype.size());
        self.peer.post();
    }
}

// A small all-reduce between the ranks of a node.
#[library_benchmark]
#[bench::bytes_8(args = (8), setup = SmallCall::new)]
#[bench::bytes_4096(args = (4096), setup = SmallCall::new)]
fn small_all_reduce(mut call: SmallCall) -> SmallCall {
    call.rank.call();
    call
}

/// Both ends of a link of shared memory.
struct ShmPair {
    ends: [Shm; 2],
    events: Events,
    message: Piece,
    _node: Node,
}

impl ShmPair {
    fn new(bytes: usize) -> Self {
        let mut node = Node::new();
        let message = node.regions[0].layout().pool().piece(node.regions[0].arena()).narrow(0, bytes);
        let ends = [0, 1].map(|rank| node.links_of(rank).0);
        let mut pair = Self { ends, events: Events::with_capacity(64), message, _node: node };
        for (end, peer) in pair.ends.iter_mut().zip([1, 0]) {
            end.begin(1);
            end.announce(peer, &all_reduce(1, 1)).expect("a link");
        }
        for end in &mut pair.ends {
            end.poll(&mut pair.events).expect("both entered");
        }
        (0..WARM_UPS).for_each(|_| pair.transfer());
        pair
    }

    /// One message, until its memory is free again.
    fn transfer(&mut self) {
        self.events.clear();
        let [sender, receiver] = &mut self.ends;
        sender.send(1, self.message).expect("a link");
        receiver.poll(&mut self.events).expect("a link");
        receiver.release(0);
        sender.poll(&mut self.events).expect("a link");
        assert!(matches!(
            (self.events.front(), self.events.back()),
            (Some(Event::RecvReady { peer: 0, .. }), Some(Event::SendComplete { peer: 1 }))
        ));
    }
}

// A message through shared memory.
#[library_benchmark]
#[bench::bytes_4096(args = (4096), setup = ShmPair::new)]
fn shm_message(mut pair: ShmPair) -> ShmPair {
    pair.transfer();
    pair
}

/// Both ends of a TCP link over loopback.
struct TcpPair {
    ends: [Tcp; 2],
    events: Events,
    sent: Piece,
    received: Piece,
}

impl TcpPair {
    fn new(bytes: usize) -> Self {
        let listeners =
            [(); 2].map(|()| Listener::bind(&[IpAddr::V4(Ipv4Addr::LOCALHOST)], None).expect("a port"));
        let [first, second] = [0, 1].map(|rank: usize| listeners[rank].endpoints()[0]);
        let connect = |me: usize, listener, address| {
            let key = SecretKey::from_parts("benchmark", &[]);
            let options = LinkOptions {
                connect_timeout: Duration::from_secs(10),
                sockets_per_link: 1,
                is_encrypted: false,
            };
            let deadline = Instant::now() + Duration::from_secs(60);
            let peers = [(1 - me, address)];
            Tcp::connect(listener, me, &peers, &|_| key.clone(), options, deadline, &Fault::new())
        };
        let [one, other] = listeners;
        let ends = std::thread::scope(|scope| {
            let other = scope.spawn(move || connect(1, other, vec![first]));
            [connect(0, one, vec![second]), other.join().expect("no panic")].map(|end| end.expect("a link"))
        });
        let (sent, received) = (zeros(bytes), zeros(bytes));
        let mut pair = Self { ends, events: Events::with_capacity(64), sent, received };
        for (end, peer) in pair.ends.iter_mut().zip([1, 0]) {
            end.begin(1);
            end.announce(peer, &all_reduce(1, 1)).expect("a link");
        }
        // A rank sends what it announces when it is polled.
        let mut entered = 0;
        while entered < 2 {
            for end in &mut pair.ends {
                pair.events.clear();
                end.poll(&mut pair.events).expect("a link");
                entered +=
                    pair.events.iter().filter(|event| matches!(event, Event::PeerEntered { .. })).count();
            }
        }
        (0..WARM_UPS).for_each(|_| pair.transfer());
        pair
    }

    /// One message, from the call that sends it to the event that says it is there.
    fn transfer(&mut self) {
        let [sender, receiver] = &mut self.ends;
        receiver.post_recv(0, self.received).expect("a link");
        sender.send(1, self.sent).expect("a link");
        await_event(sender, &mut self.events, |event| matches!(event, Event::SendComplete { .. }));
        // Sleeps until the message is there: polling would count differently from run to run.
        let wake_fd = receiver.wake_fd().expect("always there");
        let mut readable = [PollFd::from_borrowed_fd(wake_fd.as_fd(), PollFlags::IN)];
        rustix::event::poll(&mut readable, None).expect("it becomes readable");
        await_event(receiver, &mut self.events, |event| matches!(event, Event::RecvComplete { .. }));
    }
}

/// Polls until this event comes.
fn await_event(end: &mut Tcp, events: &mut Events, is_awaited: impl Fn(&Event) -> bool) {
    events.clear();
    while !events.iter().any(&is_awaited) {
        end.poll(events).expect("a link");
    }
}

// A message over TCP.
#[library_benchmark]
#[bench::bytes_8(args = (8), setup = TcpPair::new)]
fn tcp_message(mut pair: TcpPair) -> TcpPair {
    pair.transfer();
    pair
}

/// A communicator of one rank, warmed up.
fn alone() -> Communicator {
    let config = Config { simd: Simd::Scalar, ..Config::default() };
    let comm = Communicator::local_with(&config, 1).expect("one rank").remove(0);
    for _ in 0..WARM_UPS {
        comm.all_reduce(&mut [1f32; 2], ReduceOp::Sum).expect("the call succeeds");
    }
    comm
}

// A call's way from the API to the executor and back: checks, the order of calls, the plan from the cache, an
// empty program.
#[library_benchmark]
#[bench::plan_from_cache(setup = alone)]
fn call(comm: Communicator) -> Communicator {
    comm.all_reduce(&mut [1f32; 2], ReduceOp::Sum).expect("the call succeeds");
    comm
}

library_benchmark_group!(
    name = hot_paths,
    benchmarks = [subchunks, small_all_reduce, shm_message, tcp_message, call]
);

main!(library_benchmark_groups = hot_paths);
