//! The transport: all links of a rank, the devices that carry them, and how the rank sleeps until a
//! completion.
//!
//! Owns the order in which links are polled, aborted and closed.

mod abort;
mod on_demand;
mod port_states;

use super::gpu::{FlushQueue, Flusher};
use super::link_batch::{LinkBatch, RailDevice, watch};
use super::link_directory::LinkDirectory;
use super::objects::{AsyncEvent, Destruction, PortAttributes};
use super::options::VerbsOptions;
use super::peer::{Peer, list_failures, peer_index_of};
use super::port_selection::Rail;
use super::rail_counters::RailCounters;
use super::rail_faults::RailFault;
use super::registry::MemoryRegistry;
use super::wire::{MAX_RAILS, WINDOW};
use crate::call::Call;
use crate::descriptor;
use crate::error::{Error, Result};
use crate::fault::{Fault, FaultWatch};
use crate::memory::Piece;
use crate::transport::{Events, PostedTransport, Rank, Transport};
use on_demand::{LinkSet, OnDemand};
use port_states::PortStates;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a closing rank waits for the goodbyes of its peers before it destroys its queue pairs: a few
/// times the retransmission time of a lost acknowledgement over a software device. An adapter retransmits
/// after 4.3 s, for which no rank waits: if the acknowledgement of a job's very last message is lost, its
/// sender takes this rank for lost.
const GOODBYE_TIMEOUT: Duration = Duration::from_millis(300);

/// How long a closing rank waits until all its writes are acknowledged.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// How often a polling rank looks at broken queue pairs.
const BROKEN_INTERVAL: Duration = Duration::from_millis(10);

/// A rank's links over RDMA devices.
pub(crate) struct Verbs {
    peers: Vec<Peer>,
    /// By rank: its index in `peers`.
    index_of_rank: Vec<Option<usize>>,
    devices: Vec<RailDevice>,
    /// By device: its rail, and its port.
    rails: Vec<(Rail, PortAttributes)>,
    /// By device.
    counters: Arc<[RailCounters]>,
    /// Holds back completed receives until a flush, if registered GPU memory needs one. Dropped before the
    /// registry, which has the memory that flushes read.
    flushes: Option<FlushQueue>,
    registry: Arc<MemoryRegistry>,
    /// Whether this rank's current call is on a GPU.
    on_gpu: bool,
    /// Readable when a completion queue or a device has an event.
    epoll: OwnedFd,
    /// Peers that the next poll visits.
    run_queue: VecDeque<usize>,
    /// Whether the completion queues are armed, and nothing has completed since.
    armed: bool,
    /// Whether the caller may have slept since peers and devices were last asked to notify it.
    may_sleep: bool,
    /// Whether the next poll reads asynchronous events: after a sleep.
    check_async_events: bool,
    options: VerbsOptions,
    /// The links that calls need besides those that were made with the communicator.
    on_demand: OnDemand,
    /// Sequence number of the current call.
    sequence: u64,
    /// Which ports of the rails work.
    ports: PortStates,
    /// When the next look at broken queue pairs is due, if any are broken.
    next_look: Option<Instant>,
    /// When idle queue pairs were last probed.
    last_probe: Instant,
    aborted: bool,
    fault: Arc<Fault>,
    /// Wakes this rank when the fault is raised.
    fault_watch: FaultWatch,
}

impl Verbs {
    pub(super) fn new(
        peers: Vec<Peer>,
        devices: Vec<RailDevice>,
        rails: Vec<(Rail, PortAttributes)>,
        registry: Arc<MemoryRegistry>,
        options: VerbsOptions,
        fault: Arc<Fault>,
        (directory, batch, counters): (LinkDirectory, LinkBatch, Arc<[RailCounters]>),
    ) -> Result<Self> {
        let mut index_of_rank = vec![None; directory.rails.len()];
        for (index, peer) in peers.iter().enumerate() {
            index_of_rank[peer.rank()] = Some(index);
        }
        let cannot_watch = |cause| Error::io("cannot watch devices with epoll", cause);
        let epoll = open_epoll(&devices).map_err(cannot_watch)?;
        watch(&epoll, directory.out_of_band.wake_fd()).map_err(cannot_watch)?;
        Ok(Self {
            run_queue: VecDeque::with_capacity(peers.len()),
            peers,
            index_of_rank,
            devices,
            rails,
            counters,
            registry,
            flushes: None,
            on_gpu: false,
            epoll,
            armed: false,
            may_sleep: false,
            check_async_events: false,
            options,
            on_demand: OnDemand::new(directory, batch),
            sequence: 0,
            ports: PortStates::default(),
            next_look: None,
            last_probe: Instant::now(),
            aborted: false,
            fault_watch: fault.watch()?,
            fault,
        })
    }

    /// Sends a hello and a trial over every queue pair, and waits for the peers' hellos. All ranks must be
    /// connected. A queue pair without a hello until the deadline is not used, and a warning is logged.
    /// Returns the rails that carried hellos and lost the trial, whatever the outcome.
    ///
    /// # Errors
    /// `PeerLost` if a peer is unreachable over every queue pair; the fault that was raised meanwhile.
    pub(crate) fn handshake(&mut self, deadline: Instant) -> (Result<()>, Vec<RailFault>) {
        let outcome = self.exchange_hellos(deadline);
        let mut lost = Vec::new();
        for peer in &self.peers {
            let rank = peer.rank();
            let fault = |(rail, theirs, cause)| RailFault { rail, other_end: Some((rank, theirs)), cause };
            lost.extend(peer.lost_trials().map(fault));
        }
        (outcome, lost)
    }

    fn exchange_hellos(&mut self, deadline: Instant) -> Result<()> {
        // A rank that is ahead may already make further links to this one.
        let planned = self.peers.len();
        for peer in &mut self.peers {
            (0..peer.qp_count()).try_for_each(|qp| peer.greet(qp))?;
        }
        let mut events = Events::new();
        loop {
            let is_pending = |peer: &Peer| {
                (0..peer.qp_count()).any(|qp| {
                    let state = &peer.link.qps[qp];
                    state.is_alive() && !(state.is_idle() && peer.link.hello_received(qp))
                })
            };
            self.poll(&mut events)?;
            let peers = &mut self.peers[..planned];
            // While a link is made, nothing is known to come back.
            peers.iter_mut().for_each(|peer| peer.link.give_up());
            peers.iter().try_for_each(|peer| peer.link.check())?;
            if !peers.iter().any(is_pending) {
                return Ok(());
            }
            self.fault.check_waiting()?;
            if Instant::now() > deadline {
                for peer in peers {
                    peer.break_late_trials(false);
                    for qp in 0..peer.qp_count() {
                        if !peer.link.hello_received(qp) {
                            let message = "no hello arrived from the peer";
                            peer.break_qp(qp, &Error::peer_lost(message));
                        }
                    }
                    peer.link.give_up();
                    peer.link.check()?;
                }
                return Ok(());
            }
            if self.set_need_wakeup() {
                self.sleep(Duration::from_millis(50));
                self.clear_need_wakeup();
            }
        }
    }

    /// The devices and ports that carry the links, as in `mlx5_0:1+mlx5_1:1`.
    pub(crate) fn summary(&self) -> String {
        let rails: Vec<String> =
            self.devices.iter().map(|device| format!("{}:{}", device.context.name(), device.port)).collect();
        rails.join("+")
    }

    /// What each rail carries.
    pub(crate) fn counters(&self) -> &Arc<[RailCounters]> {
        &self.counters
    }

    /// The flush queue, if registered GPU memory needs flushes.
    fn make_flushes(&self) -> Result<Option<FlushQueue>> {
        let Some((from, keys)) = self.registry.flush_source()? else { return Ok(None) };
        let flusher =
            |((device, (rail, port)), failure): ((&RailDevice, &(Rail, PortAttributes)), &Option<Error>)| {
                let works = failure.is_none();
                works.then(|| Flusher::new(&device.pd, rail, *port, &self.options)).transpose()
            };
        let rails = self.devices.iter().zip(&self.rails).zip(self.ports.failures());
        let flushers = rails.map(flusher).collect::<Result<Vec<_>>>()?;
        Ok(Some(FlushQueue::new(flushers, from, &keys)))
    }

    /// Sets the registrar of GPU memory, in place of CUDA's driver, for tests.
    #[cfg(test)]
    pub(super) fn set_gpus(&self, gpus: super::gpu::GpuRegistrar) {
        self.registry.set_gpus(gpus);
    }

    /// Whether receives on a GPU are flushed.
    #[cfg(test)]
    pub(super) fn flushes(&self) -> bool {
        self.flushes.is_some()
    }

    /// The index of a peer in `peers`.
    fn index(&self, peer: Rank) -> Result<usize> {
        if self.aborted {
            return Err(aborted());
        }
        self.index_of_rank
            .get(peer)
            .copied()
            .flatten()
            .ok_or_else(|| Error::internal(format!("there is no verbs link to rank {peer}")))
    }

    /// The index of a peer in `peers`. If there is no link to it, begins to make one.
    fn index_or_connect(&mut self, peer: Rank) -> Result<usize> {
        match self.index_of_rank.get(peer) {
            Some(None) if !self.aborted => {
                let (on_demand, mut links) = self.link_set();
                on_demand.open(&mut links, peer)
            }
            _ => self.index(peer),
        }
    }

    /// What making a further link changes and needs.
    fn link_set(&mut self) -> (&mut OnDemand, LinkSet<'_>) {
        let links = LinkSet {
            peers: &mut self.peers,
            index_of_rank: &mut self.index_of_rank,
            run_queue: &mut self.run_queue,
            devices: &mut self.devices,
            rails: &self.rails,
            counters: &self.counters,
            registry: &self.registry,
            options: &self.options,
            epoll: &self.epoll,
            armed: &mut self.armed,
            sequence: self.sequence,
            ports: &mut self.ports,
        };
        (&mut self.on_demand, links)
    }

    /// Makes the next poll visit a peer.
    fn schedule(&mut self, index: usize) {
        self.peers[index].schedule(&mut self.run_queue);
    }

    /// Polls all completion queues until they are empty.
    fn poll_completions(&mut self) -> Result<()> {
        let Self { devices, peers, run_queue, .. } = self;
        let mut any = false;
        for device in devices {
            for queue in &device.queues {
                any |= queue.poll(|completion| {
                    let Some(peer) = peers.get_mut(peer_index_of(completion.id)) else { return Ok(()) };
                    peer.schedule(run_queue);
                    peer.handle_completion(&completion)
                })?;
            }
        }
        if any {
            self.armed = false;
        }
        Ok(())
    }

    /// Handles the asynchronous events of the devices.
    fn handle_async_events(&mut self) {
        self.check_async_events = false;
        for rail in 0..self.devices.len() {
            while let Some(event) = self.devices[rail].events.next() {
                let device = &self.devices[rail];
                let name = device.context.name();
                match event {
                    AsyncEvent::PortDown(port) if port == device.port => {
                        self.ports.set_down(rail, true);
                        log::warn!(
                            "verbs: port {port} of {name} went down; writes in flight there are retried for a while"
                        );
                    }
                    AsyncEvent::PortUp(port) if port == device.port => {
                        self.ports.set_down(rail, false);
                        log::info!("verbs: port {port} of {name} came up");
                    }
                    AsyncEvent::PortDown(_) | AsyncEvent::PortUp(_) => {}
                    AsyncEvent::Other(what) => log::info!("verbs: {name}: {what}"),
                    AsyncEvent::Fatal => self.fail_rail(rail, "the device failed"),
                    AsyncEvent::QueueOverran(number) => {
                        let mut mine = device.queues.iter().map(|queue| queue.number());
                        let flushes = self.flushes.as_ref();
                        let is_mine = |number| {
                            mine.any(|mine| mine == number)
                                || flushes.is_some_and(|flushes| flushes.uses(rail, number))
                        };
                        // The device has queues of other communicators, too.
                        if number.is_none_or(is_mine) {
                            self.fail_rail(rail, "its completion queue overran");
                        }
                    }
                }
            }
        }
    }

    /// Looks at broken queue pairs if that is due. All completions must have been polled.
    fn look_at_broken(&mut self) {
        let now = Instant::now();
        if self.next_look.is_none_or(|due| due > now) {
            return;
        }
        self.next_look = None;
        if self.on_demand.cannot_connect() {
            self.peers.iter_mut().for_each(|peer| peer.link.stop_reconnecting());
        }
        self.ports.refresh(&self.devices, now);
        let Self { peers, run_queue, on_demand, ports, .. } = self;
        let mut messages = Vec::new();
        for peer in peers.iter_mut().filter(|peer| peer.needs_look()) {
            peer.look(now, &|rail| ports.works(rail), &mut messages);
            on_demand.send_rail_messages(peer, &mut messages);
            peer.schedule(run_queue);
            self.next_look = Some(now + BROKEN_INTERVAL);
        }
    }

    /// The device of a rail has failed: its rail is not used any more.
    fn fail_rail(&mut self, rail: usize, what: &str) {
        let error = Error::system(format!("{}: {what}", self.devices[rail].context.name()));
        log::warn!("verbs: {}; its rail is not used any more", error.message());
        if let Some(flushes) = &mut self.flushes {
            flushes.fail(rail, self.on_gpu.then(|| error.clone()));
        }
        self.ports.set_failed(rail, error);
        let Self { peers, run_queue, ports, devices, .. } = self;
        let failures = &ports.failures()[..devices.len()];
        if failures.iter().all(Option::is_some) {
            log::warn!("verbs: no rail of this rank is left: {}", list_failures(failures.iter().flatten()));
        }
        for peer in peers {
            peer.fail_rail(rail, failures);
            peer.schedule(run_queue);
        }
    }

    /// Probes queue pairs without a pending completion, so that a lost peer is detected.
    fn probe(&mut self) -> Result<()> {
        self.last_probe = Instant::now();
        for peer in &mut self.peers {
            for qp in 0..peer.qp_count() {
                if let Some(probe) = peer.link.probe(qp)? {
                    peer.post_now(&probe)?;
                }
            }
        }
        Ok(())
    }

    fn sleep(&self, longest: Duration) {
        let longest = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
        let mut fds = [
            PollFd::from_borrowed_fd(self.epoll.as_fd(), PollFlags::IN),
            PollFd::new(&self.fault_watch, PollFlags::IN),
        ];
        let _ = rustix::event::poll(&mut fds, Some(&longest));
    }

    fn full(&self, peer: Rank, what: &str) -> Error {
        Error::internal(format!("more than {WINDOW} {what} rank {peer} are in flight"))
    }

    /// Sends goodbyes and waits for the peers' for a short while, so that no peer misses the acknowledgement
    /// of its last write.
    fn leave(&mut self) -> Result<()> {
        self.on_demand.close();
        let mut told = vec![false; self.peers.len()];
        let began = Instant::now();
        let mut events = Events::new();
        loop {
            // A link may become ready meanwhile.
            for (peer, told) in self.peers.iter_mut().zip(&mut told) {
                if peer.is_ready() && !std::mem::replace(told, true) {
                    peer.link.goodbye();
                    peer.schedule(&mut self.run_queue);
                }
            }
            self.poll(&mut events)?;
            self.fault.check()?;
            // A peer that cannot write to this rank yet misses nothing.
            let mut peers = self.peers.iter().filter(|peer| peer.is_ready());
            let drained = peers.clone().all(|peer| peer.link.is_drained());
            let left = peers.all(|peer| peer.link.has_left());
            let waited = began.elapsed();
            if (drained && (left || waited > GOODBYE_TIMEOUT)) || waited > DRAIN_TIMEOUT {
                return Ok(());
            }
            if self.set_need_wakeup() {
                self.sleep(Duration::from_millis(20));
                self.clear_need_wakeup();
            }
        }
    }
}

/// One descriptor for the events of all devices and completion queues.
fn open_epoll(devices: &[RailDevice]) -> rustix::io::Result<OwnedFd> {
    let epoll = descriptor::poll_set()?;
    for device in devices {
        let queues = device.queues.iter().filter_map(|queue| queue.event_fd());
        queues.chain(device.context.async_fd()).try_for_each(|fd| watch(&epoll, fd))?;
    }
    Ok(epoll)
}

impl Transport for Verbs {
    fn name(&self) -> &'static str {
        "verbs"
    }

    fn can_send_from(&self, piece: Piece) -> bool {
        (piece.is_host() && !self.registry.stages()) || self.registry.find(piece).is_some()
    }

    fn window(&self) -> usize {
        WINDOW
    }

    fn end_sharing(&self) {
        self.registry.end_sharing();
    }

    fn begin(&mut self, sequence: u64) {
        if self.peers.iter().any(|peer| peer.link.is_busy()) {
            log::error!("verbs: call {sequence} begins while messages of the previous call are in flight");
            // The next poll fails, and the failure is reported before the links are aborted.
            self.aborted = true;
        }
        self.sequence = sequence;
        for index in 0..self.peers.len() {
            self.peers[index].link.begin(sequence);
            self.schedule(index);
        }
    }

    fn begin_link(&mut self, peer: Rank, sequence: u64) -> Result<()> {
        let index = self.index_or_connect(peer)?;
        self.peers[index].link.begin(sequence);
        self.schedule(index);
        Ok(())
    }

    fn announce(&mut self, peer: Rank, call: &Call) -> Result<()> {
        self.on_gpu = call.on_gpu;
        if call.on_gpu && self.flushes.is_none() {
            self.flushes = self.make_flushes()?;
        }
        let index = self.index_or_connect(peer)?;
        self.peers[index].link.announce(call)?;
        self.schedule(index);
        Ok(())
    }

    fn send(&mut self, peer: Rank, piece: Piece) -> Result<()> {
        let index = self.index(peer)?;
        if self.peers[index].link.in_flight().0 >= WINDOW as u64 {
            return Err(self.full(peer, "messages to"));
        }
        let eager = self.peers[index].link.sends_eagerly(piece.len());
        let region = (!eager).then(|| self.registry.for_sending(piece));
        self.peers[index].link.send(piece, region)?;
        self.schedule(index);
        Ok(())
    }

    fn poll(&mut self, events: &mut Events) -> Result<bool> {
        if self.aborted {
            return Err(aborted());
        }
        if self.check_async_events {
            self.handle_async_events();
        }
        let (on_demand, mut links) = self.link_set();
        on_demand.advance(&mut links)?;
        self.poll_completions()?;
        let before = events.len();
        // A completion alone is no progress: the device of an idle peer acknowledges probes too.
        let mut moved = false;
        for _ in 0..self.run_queue.len() {
            let Some(index) = self.run_queue.pop_front() else { break };
            let peer = &mut self.peers[index];
            peer.scheduled = false;
            moved |= peer.progress(events)?;
            if peer.needs_look() && self.next_look.is_none() {
                self.next_look = Some(Instant::now() + BROKEN_INTERVAL);
            }
            // What a peer wrote before it left may be in a completion queue. What does not fit the peer's
            // call is reported after the call.
            if (peer.link.has_left() && peer.link.needs_peer()) || peer.link.must_disagree() {
                self.schedule(index);
            }
        }
        if self.next_look.is_some() {
            self.look_at_broken();
        }
        if self.on_gpu
            && let Some(flushes) = &mut self.flushes
        {
            flushes.hold(events, before);
            flushes.step(events, |rail| self.counters[rail].arrivals())?;
        }
        Ok(moved || events.len() > before)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.epoll.as_fd())
    }

    /// Armed queues wake the sleeper only for later completions, so the first call arms them and returns
    /// `false`: the caller polls once more before it sleeps.
    fn set_need_wakeup(&mut self) -> bool {
        // The end of a flush wakes no sleeper, and it is near.
        let flushes = self.flushes.as_ref().is_some_and(FlushQueue::is_busy);
        if self.aborted || flushes || !self.run_queue.is_empty() {
            return false;
        }
        if self.last_probe.elapsed() > self.options.heartbeat && self.probe().is_err() {
            return false;
        }
        if !self.armed {
            // An mlx4 or mlx5 device ignores a request to arm as long as the event of the last one is not
            // read. Completion queues that cannot be armed are polled.
            self.armed = self.devices.iter().flat_map(|device| &device.queues).all(|queue| {
                queue.drain_events();
                queue.arm().is_ok()
            });
            return false;
        }
        self.may_sleep = true;
        true
    }

    /// Reading a descriptor is a system call, so those of completion queues are read only before the queues
    /// are armed, and after a possible sleep.
    fn clear_need_wakeup(&mut self) {
        self.check_async_events = true;
        if std::mem::take(&mut self.may_sleep) && self.armed {
            // An event uses up the request to arm, also one that comes after its completion was polled.
            let queues = self.devices.iter().flat_map(|device| &device.queues);
            self.armed = !queues.fold(false, |any, queue| queue.drain_events() | any);
        }
    }

    fn needs_control_connection(&self) -> bool {
        self.on_demand.is_pending() || self.peers.iter().any(Peer::needs_look)
    }

    fn abort(&mut self) {
        self.abort_links();
    }
}

impl PostedTransport for Verbs {
    fn can_recv_into(&self, piece: Piece) -> bool {
        self.can_send_from(piece)
    }

    fn stages_host_memory(&self) -> bool {
        self.registry.stages()
    }

    fn post_recv(&mut self, peer: Rank, piece: Piece) -> Result<()> {
        let index = self.index(peer)?;
        if self.peers[index].link.in_flight().1 >= WINDOW as u64 {
            return Err(self.full(peer, "receives from"));
        }
        let (region, keys) = if self.peers[index].link.receives_eagerly(piece.len()) {
            (None, [0; MAX_RAILS])
        } else {
            let region = self.registry.for_receiving(piece);
            let keys = region.rkeys()?;
            (Some(region), keys)
        };
        self.peers[index].link.post_recv(piece, region, keys)?;
        self.schedule(index);
        Ok(())
    }
}

fn aborted() -> Error {
    Error::peer_lost("the verbs links were aborted")
}

impl Drop for Verbs {
    fn drop(&mut self) {
        if !self.aborted
            && self.fault.get().is_none()
            && let Err(error) = self.leave()
        {
            log::debug!("verbs: closing the links failed: {}", error.message());
        }
        Destruction::begin(std::mem::take(&mut self.peers));
        self.registry.end_sharing();
    }
}
