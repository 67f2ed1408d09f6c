//! The transport: all links of a rank, the devices that carry them, and how the rank sleeps until something comes.

use super::connect::Options;
use super::gpu::{FlushQueue, Flusher};
use super::objects::{AsyncEvent, CompletionQueue, Context, PortAttributes, ProtectionDomain};
use super::peer::{Peer, place_of};
use super::port_selection::Rail;
use super::regions::Regions;
use super::wire::{RAILS, WINDOW};
use crate::call::Call;
use crate::error::{Error, ErrorKind, Result};
use crate::fault::Fault;
use crate::memory::Piece;
use crate::transport::{Events, PostedTransport, Rank, Transport};
use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a rank that is done waits for its peers to be done, before it takes its queue pairs away: a few times as
/// long as an acknowledgement that was lost takes to be asked for again.
const LINGER: Duration = Duration::from_millis(300);

/// How long it waits until everything that it wrote has been acknowledged.
const FLUSH: Duration = Duration::from_secs(2);

/// How long a rank that gives up waits for its devices to let go of everything, once they were told to.
const LET_GO: Duration = Duration::from_millis(500);

/// What serves one rail.
pub(super) struct Device {
    pub queue: Arc<CompletionQueue>,
    pub pd: Arc<ProtectionDomain>,
    pub context: Arc<Context>,
    pub port: u8,
}

/// A rank's links over RDMA devices.
pub(crate) struct Verbs {
    peers: Vec<Peer>,
    /// Where in `peers` each rank is.
    places: Vec<Option<usize>>,
    devices: Vec<Device>,
    /// By device, the rail that it serves, and its port.
    rails: Vec<(Rail, PortAttributes)>,
    regions: Arc<Regions>,
    /// What has landed on a GPU that must not read it yet, where there is such a GPU.
    flushes: Option<FlushQueue>,
    /// Whether the call that this rank is in is on a GPU.
    on_gpu: bool,
    epoll: OwnedFd,
    /// The peers that the next poll looks at.
    list: VecDeque<usize>,
    /// Whether the completion queues ring at the next completion, and nothing has come since they were asked to.
    armed: bool,
    /// Whether devices are asked what happened to them: after a sleep.
    curious: bool,
    options: Options,
    probed: Instant,
    given_up: bool,
    fault: Arc<Fault>,
}

impl Verbs {
    pub(super) fn new(
        peers: Vec<Peer>,
        devices: Vec<Device>,
        rails: Vec<(Rail, PortAttributes)>,
        regions: Arc<Regions>,
        options: Options,
        fault: Arc<Fault>,
    ) -> Result<Self> {
        let mut places = vec![None; peers.iter().map(|peer| peer.rank() + 1).max().unwrap_or(0)];
        for (place, peer) in peers.iter().enumerate() {
            places[peer.rank()] = Some(place);
        }
        let epoll =
            watch(&devices).map_err(|cause| Error::system("cannot watch devices with epoll", cause))?;
        Ok(Self {
            list: VecDeque::with_capacity(peers.len()),
            peers,
            places,
            devices,
            rails,
            regions,
            flushes: None,
            on_gpu: false,
            epoll,
            armed: false,
            curious: false,
            options,
            probed: Instant::now(),
            given_up: false,
            fault,
        })
    }

    /// Says hello over every queue pair, and waits until every peer has. All ranks must be connected. A queue pair
    /// over which that cannot be done is left out, with a word in the log.
    ///
    /// # Errors
    /// `PeerLost` if there is a peer that cannot be reached over any; the fault that was raised meanwhile.
    pub(crate) fn greet(&mut self, deadline: Instant) -> Result<()> {
        for peer in &mut self.peers {
            for pair in 0..peer.connections() {
                let hello = peer.link.hello(pair)?;
                peer.post_now(&hello)?;
            }
        }
        let mut events = Events::new();
        loop {
            let open = |peer: &Peer| {
                (0..peer.connections()).any(|pair| {
                    let state = &peer.link.pairs[pair];
                    state.is_alive() && !(state.is_idle() && peer.link.is_greeted(pair))
                })
            };
            self.poll(&mut events)?;
            self.peers.iter().try_for_each(|peer| peer.link.check())?;
            if !self.peers.iter().any(open) {
                return Ok(());
            }
            self.fault.check()?;
            if Instant::now() > deadline {
                for peer in &mut self.peers {
                    for pair in 0..peer.connections() {
                        if !peer.link.is_greeted(pair) {
                            let words = "the peer did not say hello over it";
                            peer.break_off(pair, &Error::new(ErrorKind::PeerLost, words));
                        }
                    }
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

    /// In words: what carries the links.
    pub(crate) fn summary(&self) -> String {
        let rails: Vec<String> =
            self.devices.iter().map(|device| format!("{}:{}", device.context.name(), device.port)).collect();
        rails.join("+")
    }

    /// What flushes what is written to a GPU, if there is one that needs it.
    fn make_flushes(&self) -> Result<Option<FlushQueue>> {
        let Some((from, keys)) = self.regions.to_flush()? else { return Ok(None) };
        let flusher = |(device, (rail, port)): (&Device, &(Rail, PortAttributes))| {
            Flusher::new(&device.pd, rail, *port, &self.options)
        };
        let flushers = self.devices.iter().zip(&self.rails).map(flusher).collect::<Result<Vec<_>>>()?;
        Ok(Some(FlushQueue::new(flushers, from, &keys)))
    }

    /// Takes what is registered as a GPU's for memory of these.
    #[cfg(test)]
    pub(super) fn pretend(&self, gpus: super::gpu::GpuRegistrar) {
        self.regions.pretend(gpus);
    }

    /// Whether what lands on a GPU is flushed.
    #[cfg(test)]
    pub(super) fn flushes(&self) -> bool {
        self.flushes.is_some()
    }

    fn place(&self, peer: Rank) -> Result<usize> {
        if self.given_up {
            return Err(given_up());
        }
        self.places
            .get(peer)
            .copied()
            .flatten()
            .ok_or_else(|| Error::new(ErrorKind::Internal, format!("there is no verbs link to rank {peer}")))
    }

    /// Has the next poll look at a peer.
    fn enlist(&mut self, place: usize) {
        self.peers[place].enlist(&mut self.list);
    }

    /// Takes what has completed.
    fn collect(&mut self) -> Result<()> {
        let Self { devices, peers, list, .. } = self;
        let mut any = false;
        for device in devices {
            any |= device.queue.poll(|completion| {
                let Some(peer) = peers.get_mut(place_of(completion.id)) else { return Ok(()) };
                peer.enlist(list);
                peer.completed(&completion)
            })?;
        }
        if any {
            self.armed = false;
        }
        Ok(())
    }

    /// Hears what has happened to the devices themselves.
    fn watch_devices(&mut self) {
        self.curious = false;
        for rail in 0..self.devices.len() {
            while let Some(happening) = self.devices[rail].context.next_async_event() {
                let device = &self.devices[rail];
                let name = device.context.name();
                match happening {
                    AsyncEvent::PortDown(port) if port == device.port => log::warn!(
                        "verbs: port {port} of {name} went down; what is under way there is tried again for a while"
                    ),
                    AsyncEvent::PortUp(port) if port == device.port => {
                        log::info!("verbs: port {port} of {name} came up");
                    }
                    AsyncEvent::PortDown(_) | AsyncEvent::PortUp(_) => {}
                    AsyncEvent::Other(what) => log::info!("verbs: {name}: {what}"),
                    AsyncEvent::Fatal(what) => {
                        let error = Error::new(ErrorKind::System, format!("{name}: {what}"));
                        for place in 0..self.peers.len() {
                            self.peers[place].break_off_rail(rail, &error);
                            self.enlist(place);
                        }
                    }
                }
            }
        }
    }

    /// Tries connections on which nothing is under way, so that a peer that is gone shows.
    fn probe(&mut self) -> Result<()> {
        self.probed = Instant::now();
        for peer in &mut self.peers {
            for pair in 0..peer.connections() {
                if let Some(probe) = peer.link.probe(pair)? {
                    peer.post_now(&probe)?;
                }
            }
        }
        Ok(())
    }

    fn sleep(&self, longest: Duration) {
        let longest = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
        let mut bells = [
            PollFd::from_borrowed_fd(self.wake_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.fault.wake_fd(), PollFlags::IN),
        ];
        let _ = rustix::event::poll(&mut bells, Some(&longest));
    }

    fn full(&self, peer: Rank, what: &str) -> Error {
        Error::new(ErrorKind::Internal, format!("more than {WINDOW} {what} rank {peer} are under way"))
    }

    /// Says goodbye and waits a little, so that nobody misses the acknowledgement of what it wrote last.
    fn leave(&mut self) -> Result<()> {
        self.peers.iter_mut().for_each(|peer| peer.link.bye());
        (0..self.peers.len()).for_each(|place| self.enlist(place));
        let began = Instant::now();
        let mut events = Events::new();
        loop {
            self.poll(&mut events)?;
            self.fault.check()?;
            let flushed = self.peers.iter().all(|peer| peer.link.is_flushed());
            let left = self.peers.iter().all(|peer| peer.link.has_left());
            let waited = began.elapsed();
            if (flushed && (left || waited > LINGER)) || waited > FLUSH {
                return Ok(());
            }
            if self.set_need_wakeup() {
                self.sleep(Duration::from_millis(20));
                self.clear_need_wakeup();
            }
        }
    }
}

/// One descriptor for all that devices have to tell.
fn watch(devices: &[Device]) -> rustix::io::Result<OwnedFd> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for device in devices {
        for bell in [device.queue.event_fd(), device.context.async_fd()].into_iter().flatten() {
            epoll::add(&epoll, bell, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
    }
    Ok(epoll)
}

impl Transport for Verbs {
    fn name(&self) -> &'static str {
        "verbs"
    }

    fn can_send_from(&self, piece: Piece) -> bool {
        (piece.is_host() && !self.regions.stages()) || self.regions.find(piece).is_some()
    }

    fn window(&self) -> usize {
        WINDOW
    }

    fn begin(&mut self, sequence: u64) {
        if self.peers.iter().any(|peer| peer.link.is_busy()) {
            log::error!("verbs: call {sequence} begins while messages of the last one are under way");
            self.abort();
        }
        for place in 0..self.peers.len() {
            self.peers[place].link.begin(sequence);
            self.enlist(place);
        }
    }

    fn announce(&mut self, peer: Rank, call: &Call) -> Result<()> {
        self.on_gpu = call.on_gpu;
        if call.on_gpu && self.flushes.is_none() {
            self.flushes = self.make_flushes()?;
        }
        let place = self.place(peer)?;
        self.peers[place].link.announce(call)?;
        self.enlist(place);
        Ok(())
    }

    fn send(&mut self, peer: Rank, piece: Piece) -> Result<()> {
        let place = self.place(peer)?;
        if self.peers[place].link.under_way().0 >= WINDOW as u64 {
            return Err(self.full(peer, "messages to"));
        }
        let eager = self.peers[place].link.sends_eagerly(piece.len());
        let region = if eager { None } else { Some(self.regions.for_sending(piece)?) };
        self.peers[place].link.send(piece, region)?;
        self.enlist(place);
        Ok(())
    }

    fn poll(&mut self, events: &mut Events) -> Result<bool> {
        if self.given_up {
            return Err(given_up());
        }
        if self.curious {
            self.watch_devices();
        }
        self.collect()?;
        let before = events.len();
        // A completion alone is no progress: that a peer acknowledges a probe does not mean that it does anything.
        let mut moved = false;
        for _ in 0..self.list.len() {
            let Some(place) = self.list.pop_front() else { break };
            let peer = &mut self.peers[place];
            peer.enlisted = false;
            moved |= peer.step(events)?;
            if peer.link.has_left() && peer.link.needs() {
                // What it sent before it left may still be found.
                self.enlist(place);
            }
        }
        if self.on_gpu
            && let Some(flushes) = &mut self.flushes
        {
            flushes.hold(events, before);
            flushes.step(events)?;
        }
        Ok(moved || events.len() > before)
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// The bell rings for completions that come after the queues were armed, so after arming them this rank looks
    /// once more before it sleeps.
    fn set_need_wakeup(&mut self) -> bool {
        // No bell rings when a flush is over; it soon is.
        let flushes = self.flushes.as_ref().is_some_and(FlushQueue::is_busy);
        if self.given_up || flushes || !self.list.is_empty() {
            return false;
        }
        if self.probed.elapsed() > self.options.heartbeat && self.probe().is_err() {
            return false;
        }
        if !self.armed {
            // Whoever cannot be armed is polled.
            self.armed = self.devices.iter().all(|device| device.queue.arm().is_ok());
            return false;
        }
        true
    }

    fn clear_need_wakeup(&mut self) {
        self.curious = true;
        if self.armed {
            self.devices.iter().for_each(|device| device.queue.drain_events());
        }
    }

    /// Once a queue pair is broken off, its device carries out nothing more that a peer asks for, and soon has let
    /// go of all requests. Destroying it can take much longer: a driver may wait until packets have left that cannot
    /// leave. So that is left to a thread of its own, which holds all that must outlive the queue pairs.
    fn abort(&mut self) {
        self.given_up = true;
        let reason = given_up();
        let mut peers = std::mem::take(&mut self.peers);
        peers.iter_mut().for_each(|peer| peer.give_up(&reason));
        let began = Instant::now();
        while !peers.iter().all(Peer::is_quiet) && began.elapsed() < LET_GO {
            for device in &self.devices {
                let told = device.queue.poll(|completion| match peers.get_mut(place_of(completion.id)) {
                    Some(peer) => peer.completed(&completion).or(Ok(())),
                    None => Ok(()),
                });
                if told.is_err() {
                    break;
                }
            }
            std::thread::yield_now();
        }
        bury(peers);
    }
}

impl PostedTransport for Verbs {
    fn can_recv_into(&self, piece: Piece) -> bool {
        self.can_send_from(piece)
    }

    fn stages_host_memory(&self) -> bool {
        self.regions.stages()
    }

    fn post_recv(&mut self, peer: Rank, piece: Piece) -> Result<()> {
        let place = self.place(peer)?;
        if self.peers[place].link.under_way().1 >= WINDOW as u64 {
            return Err(self.full(peer, "landings for"));
        }
        let (region, keys) = if self.peers[place].link.lands_eagerly(piece.len()) {
            (None, [0; RAILS])
        } else {
            let region = self.regions.for_landing(piece);
            let keys = region.rkeys()?;
            (Some(region), keys)
        };
        self.peers[place].link.land(piece, region, keys)?;
        self.enlist(place);
        Ok(())
    }
}

fn given_up() -> Error {
    Error::new(ErrorKind::PeerLost, "the verbs links were given up")
}

/// Destroys queue pairs, and waits for it only where no thread can be had.
fn bury(peers: Vec<Peer>) {
    if let Err(cause) = std::thread::Builder::new().name("flexring-bury".to_owned()).spawn(|| drop(peers)) {
        log::debug!("queue pairs are destroyed at once: {cause}");
    }
}

impl Drop for Verbs {
    fn drop(&mut self) {
        if !self.given_up
            && self.fault.get().is_none()
            && let Err(error) = self.leave()
        {
            log::debug!("verbs: while leaving: {}", error.message());
        }
        bury(std::mem::take(&mut self.peers));
    }
}
