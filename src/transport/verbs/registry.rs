//! The memory that the devices of this rank may access.
//!
//! Owns registrations: until the user deregisters, or while a sub-chunk is in flight. Keeps none longer, so
//! no registration outlives its memory unless the caller violates `register`'s contract.

use super::gpu::gdr_mode::GdrMode;
use super::gpu::{AddressRange, GpuRegistrar, GpuTrials, LandingMemory};
use super::objects::{AccessFlags, MemoryRegion, ProtectionDomain};
use super::shared_regions::{RegionKey, SharedRegion, SharedRegions};
use super::wire::MAX_RAILS;
use crate::config::{GpuDirect, Registration};
use crate::error::{Error, Result};
use crate::memory::{Piece, Registrar, map_unforked};
use crate::trace::timed_registration;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

/// An address range that is registered.
#[derive(Clone, Copy, Debug)]
enum RegisteredRange {
    Host(Piece),
    /// Memory of a GPU, registered at all rails when it is added. The mode is the slowest of all rails. The
    /// host never accesses it.
    Gpu(AddressRange, GdrMode),
}

impl RegisteredRange {
    fn span(self) -> AddressRange {
        match self {
            Self::Host(piece) => AddressRange::of(piece),
            Self::Gpu(span, _) => span,
        }
    }
}

/// A memory region of one communicator, or one that several use.
enum HeldRegion {
    Own(MemoryRegion),
    Shared(Arc<MemoryRegion>),
}

impl std::ops::Deref for HeldRegion {
    type Target = MemoryRegion;
    fn deref(&self) -> &MemoryRegion {
        match self {
            Self::Own(region) => region,
            Self::Shared(region) => region,
        }
    }
}

/// Memory registered at each rail, immediately or when the rail first needs it.
pub(super) struct RegisteredMemory {
    memory: RegisteredRange,
    access: AccessFlags,
    pds: Arc<[Arc<ProtectionDomain>]>,
    by_rail: [OnceLock<HeldRegion>; MAX_RAILS],
}

impl std::fmt::Debug for RegisteredMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let AddressRange { address, len } = self.memory.span();
        write!(f, "RegisteredMemory({address:#x}+{len})")
    }
}

// SAFETY: this is an address range with keys; nothing is read or written through it here.
unsafe impl Sync for RegisteredMemory {}

impl RegisteredMemory {
    /// Memory that is registered when a rail first needs it. Memory of a GPU is not: registering it may wait
    /// for the GPU, which waits for the call that runs. Its keys cannot be had.
    fn new(pds: &Arc<[Arc<ProtectionDomain>]>, piece: Piece, access: AccessFlags) -> Self {
        let memory = if piece.is_host() {
            RegisteredRange::Host(piece)
        } else {
            RegisteredRange::Gpu(AddressRange::of(piece), GdrMode::HostStaging)
        };
        Self::of(pds, memory, access)
    }

    fn of(pds: &Arc<[Arc<ProtectionDomain>]>, memory: RegisteredRange, access: AccessFlags) -> Self {
        Self { memory, access, pds: Arc::clone(pds), by_rail: Default::default() }
    }

    fn at(&self, rail: usize) -> Result<&MemoryRegion> {
        let slot = &self.by_rail[rail];
        if let Some(region) = slot.get() {
            return Ok(region);
        }
        let RegisteredRange::Host(piece) = self.memory else {
            let message = format!("GPU memory is not registered at rail {rail}");
            return Err(Error::internal(message));
        };
        let register = || self.pds[rail].register(piece, self.access);
        let region = timed_registration(piece.len(), register)?;
        Ok(slot.get_or_init(|| HeldRegion::Own(region)))
    }

    /// The rails whose devices work. The others refuse every registration, and need none: no queue pair uses
    /// them.
    fn working_rails(&self) -> impl Iterator<Item = (usize, &Arc<ProtectionDomain>)> {
        self.pds.iter().enumerate().filter(|(_, pd)| !pd.context().has_failed())
    }

    /// Registers host memory at all rails, unless other communicators of this process have. They share it
    /// until the last of the results is dropped.
    ///
    /// # Errors
    /// `System` if it cannot be registered at a rail.
    fn share(&self, piece: Piece, regions: &[Arc<SharedRegions>]) -> Result<Vec<Arc<SharedRegion>>> {
        let share = |(rail, pd): (usize, &Arc<ProtectionDomain>)| {
            let shared = regions[rail].register(pd, piece, self.access)?;
            self.by_rail[rail].get_or_init(|| HeldRegion::Shared(Arc::clone(shared.region())));
            Ok(shared)
        };
        self.working_rails().map(share).collect()
    }

    /// The local key at a rail, for this rank's own requests. 0 for an empty range.
    ///
    /// # Errors
    /// `System` if the memory cannot be registered there.
    pub(super) fn lkey(&self, rail: usize) -> Result<u32> {
        if self.memory.span().len == 0 {
            return Ok(0);
        }
        self.at(rail).map(MemoryRegion::lkey)
    }

    /// The remote keys by rail, for a peer's requests. 0 for an empty range, and for a rail whose device has
    /// failed.
    ///
    /// # Errors
    /// `System` if the memory cannot be registered at a rail.
    pub(super) fn rkeys(&self) -> Result<[u32; MAX_RAILS]> {
        let mut keys = [0; MAX_RAILS];
        if self.memory.span().len == 0 {
            return Ok(keys);
        }
        for (rail, _) in self.working_rails() {
            keys[rail] = self.at(rail)?.rkey();
        }
        Ok(keys)
    }

    fn contains(&self, piece: Piece) -> bool {
        let AddressRange { address, len } = self.memory.span();
        let from = piece.as_ptr() as u64;
        from >= address && from + piece.len() as u64 <= address + len as u64
    }
}

/// Memory that the user has registered.
struct RegistryEntry {
    region: Arc<RegisteredMemory>,
    /// By rail that worked then: what lets other communicators use the registration.
    shared: Vec<Arc<SharedRegion>>,
    /// Registrations that are not reverted yet, at least 1.
    count: usize,
}

/// What devices are tried with, and flushes read: memory of this library on a GPU, as users free theirs when
/// they like.
struct Landing {
    // Deregistered before it is freed.
    region: Arc<RegisteredMemory>,
    _memory: LandingMemory,
    needs_flush: bool,
}

/// All registered memory of a rank.
pub(super) struct MemoryRegistry {
    pds: Arc<[Arc<ProtectionDomain>]>,
    /// By rail: what the communicators of this process have registered.
    shared_regions: Vec<Arc<SharedRegions>>,
    /// Whether devices may reorder writes into memory that the user registered.
    relaxed: bool,
    /// Registered by the user, in no order: there are few.
    entries: RwLock<Vec<RegistryEntry>>,
    /// Sub-chunks in flight, by address and length, so that one sent to several peers is registered once.
    transient: Mutex<HashMap<(usize, usize), Weak<RegisteredMemory>>>,
    /// Whether unregistered memory is staged through slots of the pool.
    stages: bool,
    /// How devices reach GPU memory.
    gpu_direct: GpuDirect,
    /// Opened when GPU memory is first registered.
    gpus: OnceLock<GpuRegistrar>,
    /// How devices are tried with memory of a GPU before they access any of it.
    trials: Option<GpuTrials>,
    /// Memory of the first GPU, which stands for all; `None` inside if a device does not reach it.
    landing: OnceLock<Option<Landing>>,
}

/// Size of `transient` at which the entries of completed sub-chunks are removed.
const TRANSIENT_LIMIT: usize = 4096;

impl MemoryRegistry {
    /// An empty registry. With `Registration::Auto`, it measures whether unregistered sub-chunks of this many
    /// bytes are better registered or staged.
    ///
    /// # Errors
    /// `System` if memory cannot be registered.
    pub(super) fn new(
        pds: Vec<Arc<ProtectionDomain>>,
        relaxed: bool,
        registration: Registration,
        subchunk: usize,
    ) -> Result<Self> {
        let pds: Arc<[Arc<ProtectionDomain>]> = pds.into();
        let stages = match registration {
            Registration::Subchunk => false,
            Registration::Stage => true,
            Registration::Auto => {
                let (registering, copying) = measure(&pds, subchunk)?;
                log::debug!(
                    "verbs: registering {subchunk} bytes takes {registering:?}, copying them {copying:?}"
                );
                copying < registering
            }
        };
        Ok(Self {
            shared_regions: pds.iter().map(|_| Arc::default()).collect(),
            pds,
            relaxed,
            entries: RwLock::default(),
            transient: Mutex::default(),
            stages,
            gpu_direct: GpuDirect::Auto,
            gpus: OnceLock::new(),
            trials: None,
            landing: OnceLock::new(),
        })
    }

    /// Sets how devices reach GPU memory.
    pub(super) fn with_gpu_direct(self, gpu_direct: GpuDirect) -> Self {
        Self { gpu_direct, ..self }
    }

    /// Tries devices with memory of a GPU before they access any of it.
    pub(super) fn with_trials(self, trials: GpuTrials) -> Self {
        Self { trials: Some(trials), ..self }
    }

    /// Sets what other communicators of this process have registered, by rail.
    pub(super) fn with_shared_regions(self, shared_regions: Vec<Arc<SharedRegions>>) -> Self {
        Self { shared_regions, ..self }
    }

    /// Ends the sharing of registrations with other communicators: the one that has declared that this memory
    /// stays as it is ends. Buffers of the user may keep the registry longer.
    pub(super) fn end_sharing(&self) {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        entries.iter_mut().for_each(|entry| entry.shared.clear());
    }

    /// Sets the registrar of GPU memory, in place of CUDA's driver, for tests.
    #[cfg(test)]
    pub(super) fn set_gpus(&self, gpus: GpuRegistrar) {
        assert!(self.gpus.set(gpus).is_ok(), "GPU memory was registered before");
    }

    fn writable(&self) -> AccessFlags {
        AccessFlags { remote_write: true, remote_read: false, relaxed: self.relaxed }
    }

    /// Registers, at all rails, memory that the caller keeps alive as long as the result, such as control
    /// buffers. Devices never reorder writes to it.
    ///
    /// # Errors
    /// `System` if it cannot be registered.
    pub(super) fn register_internal(
        &self,
        piece: Piece,
        remote_write: bool,
    ) -> Result<Arc<RegisteredMemory>> {
        let region =
            RegisteredMemory::new(&self.pds, piece, AccessFlags { remote_write, ..AccessFlags::SEND });
        region.rkeys()?;
        Ok(Arc::new(region))
    }

    /// The registered memory that contains a piece, if there is any.
    pub(super) fn find(&self, piece: Piece) -> Option<Arc<RegisteredMemory>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.iter().find(|entry| entry.region.contains(piece)).map(|entry| Arc::clone(&entry.region))
    }

    /// Whether unregistered memory is staged through slots of the pool.
    pub(super) fn stages(&self) -> bool {
        self.stages
    }

    /// The registered memory that a piece is sent from. If the user registered none, the registration ends
    /// when the result is dropped. It is registered when its key is first needed.
    pub(super) fn for_sending(&self, piece: Piece) -> Arc<RegisteredMemory> {
        if let Some(region) = self.find(piece) {
            return region;
        }
        let mut transient = self.transient.lock().unwrap_or_else(PoisonError::into_inner);
        let range = (piece.as_ptr() as usize, piece.len());
        if let Some(region) = transient.get(&range).and_then(Weak::upgrade) {
            return region;
        }
        if transient.len() >= TRANSIENT_LIMIT {
            transient.retain(|_, region| region.strong_count() > 0);
        }
        let region = Arc::new(RegisteredMemory::new(&self.pds, piece, AccessFlags::SEND));
        transient.insert(range, Arc::downgrade(&region));
        region
    }

    /// The registered memory in which a peer may write a piece. If the user registered none, the registration
    /// ends when the result is dropped.
    pub(super) fn for_receiving(&self, piece: Piece) -> Arc<RegisteredMemory> {
        self.find(piece).unwrap_or_else(|| Arc::new(RegisteredMemory::new(&self.pds, piece, self.writable())))
    }

    /// Registers GPU memory, as [`register`](Registrar::register) does for host memory. Returns how devices
    /// reach it. With [`GdrMode::HostStaging`] they do not: nothing is registered, and nothing must be
    /// deregistered.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not memory of a GPU; `Unsupported` if the setting names a mode that is
    /// unavailable.
    pub(super) fn register_gpu(&self, gpus: &GpuRegistrar, span: AddressRange) -> Result<GdrMode> {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = entries.iter_mut().find(|entry| entry.region.memory.span() == span) {
            let RegisteredRange::Gpu(_, mode) = entry.region.memory else {
                let message = "this memory is already registered as host memory";
                return Err(Error::invalid_argument(message));
            };
            entry.count += 1;
            return Ok(mode);
        }
        let access = AccessFlags { remote_read: true, ..self.writable() };
        let (mut mode, shared) = self.share_gpu(gpus, span, access)?;
        if mode != GdrMode::HostStaging && !self.reaches_gpu(gpus, span)? {
            mode = GdrMode::HostStaging;
        }
        if mode != GdrMode::HostStaging {
            let by_rail = shared.iter().map(|shared| HeldRegion::Shared(Arc::clone(shared.region())));
            let region = self.on_gpu(span, mode, access, by_rail);
            entries.push(RegistryEntry { region, shared, count: 1 });
        }
        Ok(mode)
    }

    /// Whether all devices reach memory of the GPU with this memory. Warns if one does not.
    ///
    /// # Errors
    /// `Unsupported` if one does not and the setting names a way.
    fn reaches_gpu(&self, gpus: &GpuRegistrar, beside: AddressRange) -> Result<bool> {
        if let Some(known) = self.landing.get() {
            return Ok(known.is_some());
        }
        let outcome = self.try_gpu(gpus, beside);
        if let Err(error) = &outcome {
            let message = format!("GPU memory that is registered cannot be accessed: {}", error.message());
            if gpus.setting() != GpuDirect::Auto {
                return Err(Error::unsupported(message));
            }
            log::warn!("verbs: data on GPUs is copied through host memory: {message}");
        }
        Ok(self.landing.get_or_init(|| outcome.ok()).is_some())
    }

    fn try_gpu(&self, gpus: &GpuRegistrar, beside: AddressRange) -> Result<Landing> {
        let memory = gpus.allocate_landing(beside)?;
        let (span, access) = (memory.range(), AccessFlags { remote_read: true, ..self.writable() });
        let (mode, by_rail) = gpus.register(&self.pds, span, access)?;
        if mode == GdrMode::HostStaging {
            return Err(Error::system("devices cannot access memory that was allocated for them"));
        }
        if let Some(trials) = &self.trials {
            for (rail, (pd, region)) in self.pds.iter().zip(&by_rail).enumerate() {
                let tried = trials.run(rail, pd, span.address, region);
                tried.map_err(|error| error.context(pd.context().name()))?;
            }
        }
        let region = self.on_gpu(span, mode, access, by_rail.into_iter().map(HeldRegion::Own));
        Ok(Landing { region, needs_flush: gpus.needs_flush(span, self.pds.len())?, _memory: memory })
    }

    /// Registers GPU memory at all rails, unless other communicators of this process have. Returns the worst
    /// of the modes, and the regions by rail; none with [`GdrMode::HostStaging`].
    ///
    /// # Errors
    /// As for [`register_gpu`](Self::register_gpu).
    fn share_gpu(
        &self,
        gpus: &GpuRegistrar,
        span: AddressRange,
        access: AccessFlags,
    ) -> Result<(GdrMode, Vec<Arc<SharedRegion>>)> {
        let key = RegionKey::gpu(span, access, gpus.setting());
        let known: Option<Vec<_>> = self.shared_regions.iter().map(|regions| regions.find(&key)).collect();
        if let Some(known) = known
            && let Some(mode) = known.iter().filter_map(|shared| shared.mode()).max()
        {
            return Ok((mode, known));
        }
        let (mode, by_rail) = gpus.register(&self.pds, span, access)?;
        let share =
            |(regions, region): (&Arc<SharedRegions>, MemoryRegion)| regions.insert(key, region, Some(mode));
        Ok((mode, self.shared_regions.iter().zip(by_rail).map(share).collect()))
    }

    /// Memory of a GPU that is registered at all rails.
    fn on_gpu(
        &self,
        span: AddressRange,
        mode: GdrMode,
        access: AccessFlags,
        by_rail: impl Iterator<Item = HeldRegion>,
    ) -> Arc<RegisteredMemory> {
        let region = RegisteredMemory::of(&self.pds, RegisteredRange::Gpu(span, mode), access);
        for (slot, registered) in region.by_rail.iter().zip(by_rail) {
            slot.get_or_init(|| registered);
        }
        Arc::new(region)
    }

    /// What a flush reads, if one is needed: an address on the GPU, and its remote keys by rail.
    ///
    /// # Errors
    /// `Internal` if that memory is not registered at a rail.
    pub(super) fn flush_source(&self) -> Result<Option<(u64, [u32; MAX_RAILS])>> {
        let landing = self.landing.get().and_then(Option::as_ref);
        let Some(Landing { region, needs_flush: true, .. }) = landing else { return Ok(None) };
        Ok(Some((region.memory.span().address, region.rkeys()?)))
    }

    /// Reverts one registration of exactly this GPU memory, as [`deregister`](Registrar::deregister) does.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not registered.
    #[cfg(test)]
    pub(super) fn deregister_gpu(&self, span: AddressRange) -> Result<()> {
        self.remove(span)
    }

    fn is_registered(&self, span: AddressRange) -> bool {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.iter().any(|entry| entry.region.memory.span() == span)
    }

    fn remove(&self, span: AddressRange) -> Result<()> {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = entries.iter().position(|entry| entry.region.memory.span() == span) else {
            return Err(Error::invalid_argument("this memory is not registered"));
        };
        entries[at].count -= 1;
        if entries[at].count == 0 {
            // Messages in flight keep it registered until they complete.
            entries.swap_remove(at);
        }
        Ok(())
    }
}

impl Registrar for MemoryRegistry {
    fn register(&self, piece: Piece) -> Result<()> {
        if piece.is_empty() {
            return Ok(());
        }
        if !piece.is_host() {
            // The driver is opened when it is first needed.
            let gpus = self.gpus.get_or_init(|| GpuRegistrar::new(self.gpu_direct));
            return self.register_gpu(gpus, AddressRange::of(piece)).map(drop);
        }
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let span = RegisteredRange::Host(piece).span();
        if let Some(entry) = entries.iter_mut().find(|entry| entry.region.memory.span() == span) {
            entry.count += 1;
            return Ok(());
        }
        let region = RegisteredMemory::new(&self.pds, piece, self.writable());
        let shared = region.share(piece, &self.shared_regions)?;
        entries.push(RegistryEntry { region: Arc::new(region), shared, count: 1 });
        Ok(())
    }

    fn reaches(&self, piece: Piece) -> bool {
        self.find(piece).is_some()
    }

    fn deregister(&self, piece: Piece) -> Result<()> {
        if piece.is_empty() {
            return Ok(());
        }
        let span = AddressRange::of(piece);
        if !piece.is_host() && !self.is_registered(span) {
            // With host staging no device reaches it, so `register` did not register it.
            return Ok(());
        }
        self.remove(span)
    }
}

/// How long registering and deregistering a sub-chunk at all rails takes, and how long copying it: the best
/// of a few tries each.
fn measure(pds: &[Arc<ProtectionDomain>], subchunk: usize) -> Result<(Duration, Duration)> {
    const TRIES: usize = 4;
    let mut from = map_unforked(subchunk)?;
    from.fill(1);
    let mut into = vec![2u8; subchunk];
    let mut copying = Duration::MAX;
    for _ in 0..TRIES {
        let start = Instant::now();
        into.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut into);
        copying = copying.min(start.elapsed());
    }
    let mut registering = Duration::ZERO;
    for pd in pds {
        registering += pd.registration_time(subchunk, || {
            let mut best = Duration::MAX;
            for _ in 0..TRIES {
                let start = Instant::now();
                crate::memory::lend_in_place(&mut from, |piece| {
                    pd.register(piece, AccessFlags::SEND).map(drop)
                })?;
                best = best.min(start.elapsed());
            }
            Ok(best)
        })?;
    }
    Ok((registering, copying))
}

#[cfg(test)]
mod tests {
    use super::super::objects::{Context, Shim, Verb};
    use super::*;
    use crate::error::ErrorKind;
    use crate::transport::fixtures::piece;

    fn registry(shim: &Shim, registration: Registration) -> Result<MemoryRegistry> {
        let pd = ProtectionDomain::new(&Context::inert("inert", shim.clone()))?;
        MemoryRegistry::new(vec![pd], true, registration, 4096)
    }

    #[test]
    fn registered_memory_is_found_until_it_is_deregistered_as_often() {
        let registry = registry(&Shim::none(), Registration::Stage).expect("inert");
        let mut bytes = vec![0; 100];
        let all = piece(&mut bytes);
        for _ in 0..2 {
            registry.register(all).expect("inert");
        }
        assert!(registry.find(all.narrow(10, 90)).is_some());
        registry.deregister(all).expect("registered twice");
        assert!(registry.find(all.narrow(0, 1)).is_some());
        registry.deregister(all).expect("registered twice");
        assert!(registry.find(all.narrow(0, 1)).is_none());
        let error = registry.deregister(all).expect_err("not registered any more");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn unregistered_memory_is_registered_while_it_is_in_flight() {
        let registry = registry(&Shim::none(), Registration::Subchunk).expect("inert");
        let mut bytes = vec![0; 100];
        let all = piece(&mut bytes);
        let first = registry.for_sending(all);
        let second = registry.for_sending(all);
        assert!(Arc::ptr_eq(&first, &second), "one registration for both peers");
        drop((first, second));
        assert_eq!(Arc::strong_count(&registry.for_sending(all)), 1, "nothing keeps the registration");
        assert!(registry.find(all).is_none());
    }

    #[test]
    fn communicators_share_a_registration_until_the_last_of_them_ends_it() {
        let shim = Shim::none();
        let pd = ProtectionDomain::new(&Context::inert("inert", shim.clone())).expect("inert");
        let regions = Arc::new(SharedRegions::default());
        let of_one_communicator = |relaxed| {
            let registry = MemoryRegistry::new(vec![Arc::clone(&pd)], relaxed, Registration::Stage, 4096);
            registry.expect("inert").with_shared_regions(vec![Arc::clone(&regions)])
        };
        let [one, other, strict] = [true, true, false].map(of_one_communicator);
        let mut bytes = vec![0; 100];
        let all = piece(&mut bytes);
        let registered = || shim.calls(Verb::RegMr);
        one.register(all).expect("inert");
        other.register(all).expect("inert");
        assert_eq!(registered(), 1);
        strict.register(all).expect("inert");
        other.register(all.narrow(0, 50)).expect("inert");
        assert_eq!(registered(), 3, "other rights, and another range");
        one.deregister(all).expect("registered");
        one.register(all).expect("inert");
        assert_eq!(registered(), 3, "the other communicator still has it registered");
        // A message in flight holds the region, but no communicator declares any more that the memory is the
        // same.
        let in_flight = one.find(all).expect("registered");
        one.deregister(all).expect("registered");
        other.deregister(all).expect("registered");
        one.register(all).expect("inert");
        assert_eq!(registered(), 4);
        drop(in_flight);
        // A buffer of the user keeps the registry of a communicator that has ended, whose memory may be other
        // memory by now.
        one.end_sharing();
        other.register(all).expect("inert");
        assert_eq!(registered(), 5);
    }

    /// Counter-example: when one of two devices had failed, no memory could be registered at the other one.
    #[test]
    fn memory_is_registered_at_the_devices_that_work() {
        let [works, fails] = ["works", "fails"].map(|name| Context::inert(name, Shim::none()));
        let pds = [&works, &fails].map(|context| ProtectionDomain::new(context).expect("inert"));
        let registry = MemoryRegistry::new(pds.to_vec(), true, Registration::Stage, 4096).expect("inert");
        let registry = registry.with_shared_regions(vec![Arc::default(), Arc::default()]);
        fails.set_failed();
        let mut bytes = vec![0; 100];
        let all = piece(&mut bytes);
        registry.register(all).expect("one device works");
        let region = registry.find(all).expect("registered");
        region.rkeys().expect("one device works");
        assert!(region.by_rail[0].get().is_some() && region.by_rail[1].get().is_none());
        registry.deregister(all).expect("registered");
    }

    #[test]
    fn forked_children_do_not_have_the_memory_that_is_measured() {
        let shim = Shim::none().recording_registrations();
        registry(&shim, Registration::Auto).expect("inert");
        let found = shim.registrations();
        assert!(!found.is_empty() && found.iter().all(|registered| registered.is_unforked), "{found:?}");
    }

    #[test]
    fn a_refused_registration_names_the_limit_to_raise() {
        let shim = Shim::failing(Verb::RegMr, 0, rustix::io::Errno::NOMEM.raw_os_error());
        let Err(error) = registry(&shim, Registration::Auto) else { panic!("nothing can be registered") };
        assert!(error.message().contains("ulimit -l unlimited"), "{error}");
    }
}
