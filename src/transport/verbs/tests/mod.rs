//! The contract of transports on the RDMA devices of this machine. Without devices the tests print that they
//! are skipped.
//!
//! The ranks are threads of one process, which exchange their [`ConnectInfo`](super::ConnectInfo) and the
//! messages about links in memory.

mod contract;
mod faults;
mod forks;
mod on_demand;
pub(super) mod out_of_band;
mod paths;
mod sharing;

use super::LinkDirectory;
use super::connect::UnconnectedVerbs;
use super::gpu::GpuRegistrar;
use super::inventory::{Affinity, Inventory};
use super::objects::Shim;
use super::options::VerbsOptions;
use super::port_selection::{Rail, select};
use super::rail_faults::SetupFailure;
use super::transport::Verbs;
use super::wire::LinkShape;
use crate::call::Call;
use crate::config::{AdaptiveRouting, Config, Registration};
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::memory::{Piece, Registrar};
use crate::rank::Rank;
use crate::secret::SecretKey;
use crate::transport::fixtures::{call, piece};
use crate::transport::{Event, Events, PostedTransport, Transport};
use out_of_band::MemoryMessages;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of a sub-chunk.
const SUBCHUNK: usize = 64 << 10;

/// Runs a test on the rails of this machine, if there are any. Fails if the test takes longer than `limit`.
#[allow(clippy::print_stderr, reason = "a skipped test says so")]
fn on_rails(limit: Duration, test: impl FnOnce(&[Rail]) + Send + 'static) {
    if std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some()) {
        let selection = select(&Inventory::local(), &Config::default(), &Affinity::local(None));
        let rails = selection.expect("some device can be used").rails;
        with_timeout(limit, move || test(&rails));
    } else {
        eprintln!("skipped: no RDMA device here");
    }
}

/// Runs a closure in a thread, and panics if it takes longer than `limit`.
fn with_timeout<T: Send + 'static>(limit: Duration, run: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, waiting) = mpsc::channel();
    let running = thread::spawn(move || done.send(run()));
    match waiting.recv_timeout(limit) {
        Ok(outcome) => outcome,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("no result within {limit:?}"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match running.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(_) => panic!("the thread ended without a result"),
        },
    }
}

/// Bytes of the longest eager message.
const LONGEST_EAGER: usize = 4096;

/// How the ranks of a test are linked.
#[derive(Clone)]
struct LinkSetup {
    ranks: usize,
    rails: Vec<Rail>,
    /// Whether each rank is linked with all others from the beginning; otherwise calls make all links.
    planned: bool,
    qps_per_rail: usize,
    registration: Registration,
    /// Whether long messages are written apart from their immediate data.
    adaptive_routing: AdaptiveRouting,
    /// Whether calls are on GPUs.
    on_gpu: bool,
    /// The fault that occurs on rank 0.
    shim: Shim,
    /// Whether all ranks have the devices of rank 0, as ranks that are threads of one process have.
    shares_devices: bool,
}

impl LinkSetup {
    /// Two ranks, linked over the first `count` of these rails.
    fn over(rails: &[Rail], count: usize) -> Self {
        Self {
            ranks: 2,
            rails: rails[..count].to_vec(),
            planned: true,
            qps_per_rail: 1,
            registration: Registration::Subchunk,
            adaptive_routing: AdaptiveRouting::Auto,
            on_gpu: false,
            shim: Shim::none(),
            shares_devices: false,
        }
    }

    fn options(&self, me: Rank) -> VerbsOptions {
        VerbsOptions {
            // These tests count what a fault costs.
            reconnect: Duration::ZERO,
            link_shape: LinkShape { qps_per_rail: self.qps_per_rail, longest_eager: LONGEST_EAGER },
            registration: self.registration,
            adaptive_routing: self.adaptive_routing,
            subchunk: SUBCHUNK,
            shim: if me == 0 || self.shares_devices { self.shim.clone() } else { Shim::none() },
            ..VerbsOptions::new(&Config::default())
        }
    }

    /// Connects all ranks, without the handshake.
    fn link(&self) -> Result<Vec<ConnectedRank>> {
        let faults: Vec<_> = (0..self.ranks).map(|_| Arc::new(Fault::new())).collect();
        let mut ends = MemoryMessages::world(self.ranks).into_iter();
        let open = |me: Rank| {
            let key = SecretKey::from_parts("test", &[]);
            let directory = LinkDirectory {
                me,
                rails: vec![self.rails.clone(); self.ranks],
                key: Box::new(move |_| key.clone()),
                out_of_band: Box::new(ends.next().expect("one for each rank")),
            };
            let peers: Vec<Rank> = (0..self.ranks).filter(|peer| self.planned && *peer != me).collect();
            UnconnectedVerbs::open(directory, &peers, self.options(me)).map_err(SetupFailure::into_error)
        };
        let prepared: Vec<_> = (0..self.ranks).map(open).collect::<Result<_>>()?;
        let connect_info: Vec<_> =
            prepared.iter().map(UnconnectedVerbs::connect_info).collect::<Result<_>>()?;
        prepared.iter().try_for_each(UnconnectedVerbs::send_links)?;
        let connect = |(me, prepared): (Rank, UnconnectedVerbs)| {
            let registrar = prepared.registrar();
            let deadline = Instant::now() + Duration::from_secs(20);
            // A rank may wait for what lower ones send while they connect.
            let received = prepared.receive_links(deadline, &faults[me])?;
            let verbs = prepared.connect(&connect_info, received, &faults[me]);
            let verbs = verbs.map_err(SetupFailure::into_error)?;
            Ok(ConnectedRank {
                me,
                ranks: self.ranks,
                on_gpu: self.on_gpu,
                verbs,
                registrar,
                faults: faults.clone(),
            })
        };
        prepared.into_iter().enumerate().map(connect).collect()
    }

    /// Connects the ranks, runs `act` on each in its own thread, and drops the links. Returns the outcomes by
    /// rank.
    fn run(&self, act: impl Fn(&mut ConnectedRank) -> Result<()> + Sync) -> Result<Vec<Result<()>>> {
        Ok(run_linked(self.link()?, act))
    }
}

/// Runs `act` on each of these ranks in its own thread, and drops the links. Returns the outcomes by rank.
fn run_linked(
    ranks: Vec<ConnectedRank>,
    act: impl Fn(&mut ConnectedRank) -> Result<()> + Sync,
) -> Vec<Result<()>> {
    let act = &act;
    thread::scope(|scope| {
        let running = ranks.into_iter().map(|mut rank| {
            scope.spawn(move || {
                let (handshake, _) = rank.verbs.handshake(Instant::now() + Duration::from_secs(20));
                handshake.and_then(|()| act(&mut rank)).inspect_err(|error| rank.fail(error))
            })
        });
        let running: Vec<_> = running.collect();
        running.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
    })
}

/// One rank of a test, connected to all others.
struct ConnectedRank {
    me: Rank,
    ranks: usize,
    on_gpu: bool,
    verbs: Verbs,
    registrar: Arc<dyn Registrar>,
    faults: Vec<Arc<Fault>>,
}

impl ConnectedRank {
    fn peers(&self) -> impl Iterator<Item = Rank> + use<> {
        let me = self.me;
        (0..self.ranks).filter(move |peer| *peer != me)
    }

    /// Aborts the links and raises the error at all ranks.
    fn fail(&mut self, error: &Error) {
        self.verbs.abort();
        for fault in &self.faults {
            fault.raise(error.clone());
        }
    }

    /// Polls until there is an event, and sleeps in between.
    fn wait(&mut self, events: &mut Events) -> Result<()> {
        while events.is_empty() {
            self.faults[self.me].check()?;
            if !self.verbs.poll(events)? && self.verbs.set_need_wakeup() {
                let wake = self.verbs.wake_fd().expect("a descriptor");
                let watch = self.faults[self.me].watch()?;
                let fds = [wake, watch.as_fd()];
                let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
                let longest = Timespec { tv_sec: 1, tv_nsec: 0 };
                rustix::event::poll(&mut fds, Some(&longest)).expect("poll works");
                self.verbs.clear_need_wakeup();
            }
        }
        Ok(())
    }

    fn next(&mut self) -> Result<Event> {
        let mut events = Events::new();
        self.wait(&mut events)?;
        assert_eq!(events.len(), 1, "one event at a time: {events:?}");
        Ok(events[0])
    }

    /// Polls for 100 ms and fails if there is an event.
    fn expect_silence(&mut self) {
        let mut events = Events::new();
        let until = Instant::now() + Duration::from_millis(100);
        while Instant::now() < until {
            self.verbs.poll(&mut events).expect("no failure");
            thread::sleep(Duration::from_millis(1));
        }
        assert!(events.is_empty(), "{events:?}");
    }

    /// Polls for the peer's call with this sequence number.
    fn expect_entered(&mut self, sequence: u64) {
        match self.next().expect("an event") {
            Event::PeerEntered { call: theirs, .. } => assert_eq!(theirs, call(sequence)),
            other => panic!("{other:?} instead of the peer's call"),
        }
    }

    /// Begins a call and announces it to all peers.
    fn begin(&mut self, sequence: u64) -> Result<()> {
        self.verbs.begin(sequence);
        let call = Call { on_gpu: self.on_gpu, ..call(sequence) };
        self.peers().try_for_each(|peer| self.verbs.announce(peer, &call))
    }

    /// Exchanges messages of these lengths, the same in each direction, with all other ranks in one call.
    fn exchange(&mut self, sequence: u64, lens: &[usize], memory: &mut dyn MessageMemory) -> Result<()> {
        self.begin(sequence)?;
        let mut exchanges: Vec<_> = (0..self.ranks).map(|_| PeerExchange::default()).collect();
        let mut events = Events::new();
        while self.peers().any(|peer| !exchanges[peer].is_complete(lens)) {
            for peer in self.peers() {
                let exchange = &mut exchanges[peer];
                while exchange.sent < lens.len() && exchange.sources.len() < self.verbs.window() {
                    let source = memory.take(lens[exchange.sent]);
                    assert!(self.verbs.can_send_from(source));
                    fill(source, self.me, sequence, exchange.sent);
                    self.verbs.send(peer, source)?;
                    exchange.sources.push_back(source);
                    exchange.sent += 1;
                }
                while exchange.recvs_posted() < lens.len()
                    && exchange.destinations.len() < self.verbs.window()
                {
                    let destination = memory.take(lens[exchange.recvs_posted()]);
                    assert!(self.verbs.can_recv_into(destination));
                    self.verbs.post_recv(peer, destination)?;
                    exchange.destinations.push_back(destination);
                }
            }
            self.wait(&mut events)?;
            for event in events.drain(..) {
                match event {
                    Event::PeerEntered { peer, call: theirs } => {
                        assert_eq!(theirs, Call { on_gpu: self.on_gpu, ..call(sequence) });
                        assert!(
                            !std::mem::replace(&mut exchanges[peer].peer_entered, true),
                            "the peer enters the call once"
                        );
                    }
                    Event::SendComplete { peer } => {
                        let source = exchanges[peer].sources.pop_front().expect("a queued message");
                        fill(source, 99, sequence, 0);
                        memory.release(source);
                    }
                    Event::RecvComplete { peer } => {
                        let exchange = &mut exchanges[peer];
                        assert!(exchange.peer_entered, "a message came before the call");
                        let destination = exchange.destinations.pop_front().expect("a posted receive");
                        check(destination, peer, sequence, exchange.received);
                        exchange.received += 1;
                        memory.release(destination);
                    }
                    Event::RecvReady { .. } => panic!("nothing is delivered in place"),
                }
            }
        }
        Ok(())
    }
}

/// The progress of one rank in one call with one peer.
#[derive(Default)]
struct PeerExchange {
    sources: VecDeque<Piece>,
    sent: usize,
    destinations: VecDeque<Piece>,
    received: usize,
    peer_entered: bool,
}

impl PeerExchange {
    fn recvs_posted(&self) -> usize {
        self.received + self.destinations.len()
    }

    fn is_complete(&self, lens: &[usize]) -> bool {
        let sent = self.sent == lens.len() && self.sources.is_empty();
        self.peer_entered && sent && self.received == lens.len()
    }
}

/// Where the messages of a test are sent from and received into.
trait MessageMemory {
    fn take(&mut self, len: usize) -> Piece;
    fn release(&mut self, piece: Piece);
}

/// Heap memory, kept to the end of the test.
#[derive(Default)]
struct HeapMemory(Vec<Vec<u8>>);

impl MessageMemory for HeapMemory {
    fn take(&mut self, len: usize) -> Piece {
        self.0.push(vec![0; len]);
        piece(self.0.last_mut().expect("just pushed"))
    }

    fn release(&mut self, _piece: Piece) {}
}

/// Slots of one sub-chunk each, reused.
struct MessagePool {
    slots: Vec<Piece>,
    whole: Piece,
    _bytes: Vec<u8>,
}

impl MessagePool {
    fn new(slots: usize) -> Self {
        let mut bytes = vec![0; slots * SUBCHUNK];
        let whole = piece(&mut bytes);
        Self::of(whole, bytes)
    }

    /// A pool whose pieces claim to be memory of GPU 0.
    fn on_gpu(slots: usize) -> Self {
        let mut bytes = vec![0; slots * SUBCHUNK];
        let start = std::ptr::NonNull::from(&mut bytes[..]).cast();
        // SAFETY: the pool keeps its bytes, and devices access them like any other memory.
        let whole = unsafe { Piece::on_gpu(start, bytes.len(), 0) };
        Self::of(whole, bytes)
    }

    fn of(whole: Piece, bytes: Vec<u8>) -> Self {
        let slots = (0..bytes.len() / SUBCHUNK).map(|slot| whole.narrow(slot * SUBCHUNK, SUBCHUNK)).collect();
        Self { slots, whole, _bytes: bytes }
    }
}

impl MessageMemory for MessagePool {
    fn take(&mut self, len: usize) -> Piece {
        self.slots.pop().expect("enough slots").narrow(0, len)
    }

    fn release(&mut self, piece: Piece) {
        let at = (piece.as_ptr() as usize - self.whole.as_ptr() as usize) / SUBCHUNK;
        self.slots.push(self.whole.narrow(at * SUBCHUNK, SUBCHUNK));
    }
}

/// The byte at an offset of a message.
fn byte(from: Rank, sequence: u64, number: usize, at: usize) -> u8 {
    let mixed = (from as u64 * 31 + sequence * 7 + number as u64 * 13 + at as u64)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

fn fill(piece: Piece, from: Rank, sequence: u64, number: usize) {
    for at in 0..piece.len() {
        // SAFETY: the piece belongs to this thread, and no device accesses it now.
        unsafe { piece.as_ptr().add(at).write(byte(from, sequence, number, at)) };
    }
}

fn check(piece: Piece, from: Rank, sequence: u64, number: usize) {
    // SAFETY: the piece belongs to this thread, and no device writes it any more.
    let bytes = unsafe { std::slice::from_raw_parts(piece.as_ptr(), piece.len()) };
    let wrong = (0..).zip(bytes).find(|(at, found)| **found != byte(from, sequence, number, *at));
    assert!(wrong.is_none(), "message {number} of rank {from}, {} bytes, differs at {wrong:?}", bytes.len());
}
