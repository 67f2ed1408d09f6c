//! Memory that the devices of this rank may reach.
//!
//! Owns what is registered: for as long as the user says, or for as long as a sub-chunk is under way. Keeps nothing
//! beyond that, so no region can outlive the memory that it is about without somebody breaking their word. Must not
//! know what the memory holds.

use super::gpu::gdr_mode::GdrMode;
use super::gpu::{AddressRange, GpuRegistrar};
use super::objects::{AccessFlags, MemoryRegion, ProtectionDomain};
use super::wire::MAX_RAILS;
use crate::config::{GpuDirect, Registration};
use crate::error::{Error, Result};
use crate::memory::{Piece, Registrar};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

/// What is registered.
#[derive(Clone, Copy, Debug)]
enum RegisteredRange {
    Host(Piece),
    /// At all rails from the beginning. The worst way is this rung; it is never touched here.
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

/// Memory that is registered at each rail, at once or when the rail is first needed.
pub(super) struct RegisteredMemory {
    memory: RegisteredRange,
    access: AccessFlags,
    pds: Arc<[Arc<ProtectionDomain>]>,
    by_rail: [OnceLock<MemoryRegion>; MAX_RAILS],
}

impl std::fmt::Debug for RegisteredMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let AddressRange { address, len } = self.memory.span();
        write!(f, "Region({address:#x}+{len})")
    }
}

// SAFETY: a region is an address range with keys; nothing is read or written through it here.
unsafe impl Sync for RegisteredMemory {}

impl RegisteredMemory {
    fn new(pds: &Arc<[Arc<ProtectionDomain>]>, piece: Piece, access: AccessFlags) -> Self {
        Self::of(pds, RegisteredRange::Host(piece), access)
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
            let message = format!("memory of a GPU is not registered at rail {rail}");
            return Err(Error::internal(message));
        };
        let region = self.pds[rail].register(piece, self.access)?;
        Ok(slot.get_or_init(|| region))
    }

    /// The key for this rank's own requests at a rail. No memory needs none.
    pub(super) fn lkey(&self, rail: usize) -> Result<u32> {
        if self.memory.span().len == 0 {
            return Ok(0);
        }
        self.at(rail).map(MemoryRegion::lkey)
    }

    /// The keys for a peer's requests, by rail.
    pub(super) fn rkeys(&self) -> Result<[u32; MAX_RAILS]> {
        let mut keys = [0; MAX_RAILS];
        if self.memory.span().len == 0 {
            return Ok(keys);
        }
        for (rail, key) in keys.iter_mut().enumerate().take(self.pds.len()) {
            *key = self.at(rail)?.rkey();
        }
        Ok(keys)
    }

    fn contains(&self, piece: Piece) -> bool {
        let AddressRange { address, len } = self.memory.span();
        let from = piece.as_ptr() as u64;
        from >= address && from + piece.len() as u64 <= address + len as u64
    }
}

/// A region that somebody has registered, this many times.
struct RegistryEntry {
    region: Arc<RegisteredMemory>,
    count: usize,
}

/// All regions of a rank.
pub(super) struct MemoryRegistry {
    pds: Arc<[Arc<ProtectionDomain>]>,
    relaxed: bool,
    /// Registered until further notice, in no order: there are few.
    entries: RwLock<Vec<RegistryEntry>>,
    /// Of sub-chunks under way, so that those that go to several peers are registered once.
    transient: Mutex<HashMap<(usize, usize), Weak<RegisteredMemory>>>,
    /// Whether memory that nobody registered is copied through slots instead.
    stages: bool,
    /// How memory of GPUs is reached, and the GPUs once there was any.
    gpu_direct: GpuDirect,
    gpus: OnceLock<GpuRegistrar>,
    /// The first region on a GPU that must not read what devices wrote before a flush.
    flush_source: OnceLock<Arc<RegisteredMemory>>,
}

/// Entries of `passing` before those are removed whose sub-chunks are through.
const TRANSIENT_LIMIT: usize = 4096;

impl MemoryRegistry {
    /// No regions yet. What is done with memory that nobody registers is measured on a sub-chunk of this many bytes,
    /// unless it is said.
    ///
    /// # Errors
    /// `System` if nothing can be registered.
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
            pds,
            relaxed,
            entries: RwLock::default(),
            transient: Mutex::default(),
            stages,
            gpu_direct: GpuDirect::Auto,
            gpus: OnceLock::new(),
            flush_source: OnceLock::new(),
        })
    }

    /// The same, which reaches memory of GPUs in this way.
    pub(super) fn with_gpu_direct(self, gpu_direct: GpuDirect) -> Self {
        Self { gpu_direct, ..self }
    }

    /// Takes what is registered as a GPU's for memory of these.
    #[cfg(test)]
    pub(super) fn set_gpus(&self, gpus: GpuRegistrar) {
        assert!(self.gpus.set(gpus).is_ok(), "before any GPU was asked for");
    }

    fn writable(&self) -> AccessFlags {
        AccessFlags { remote_write: true, remote_read: false, relaxed: self.relaxed }
    }

    /// Registers memory that this object's owner keeps for as long as it lives: boards, for one. Such writes are
    /// never carried out in another order.
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

    /// The region that a piece lies in, if somebody registered one.
    pub(super) fn find(&self, piece: Piece) -> Option<Arc<RegisteredMemory>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.iter().find(|entry| entry.region.contains(piece)).map(|entry| Arc::clone(&entry.region))
    }

    /// Whether memory that lies in no region is to be copied through slots.
    pub(super) fn stages(&self) -> bool {
        self.stages
    }

    /// The region that a piece is sent from: a known one, or one that lives as long as it is held.
    pub(super) fn for_sending(&self, piece: Piece) -> Result<Arc<RegisteredMemory>> {
        if let Some(region) = self.find(piece) {
            return Ok(region);
        }
        let mut transient = self.transient.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = (piece.as_ptr() as usize, piece.len());
        if let Some(region) = transient.get(&slot).and_then(Weak::upgrade) {
            return Ok(region);
        }
        if transient.len() >= TRANSIENT_LIMIT {
            transient.retain(|_, region| region.strong_count() > 0);
        }
        let region = Arc::new(RegisteredMemory::new(&self.pds, piece, AccessFlags::SEND));
        transient.insert(slot, Arc::downgrade(&region));
        Ok(region)
    }

    /// The region that a piece may be written in by a peer: a known one, or one that lives as long as it is held.
    pub(super) fn for_receiving(&self, piece: Piece) -> Arc<RegisteredMemory> {
        self.find(piece).unwrap_or_else(|| Arc::new(RegisteredMemory::new(&self.pds, piece, self.writable())))
    }

    /// Registers memory of a GPU, as [`register`](Registrar::register) does that of the host, and tells by which rung
    /// of the ladder devices reach it. On [`GdrMode::HostStaging`] they do not: nothing is registered, and nothing is to be taken
    /// back.
    ///
    /// # Errors
    /// `InvalidArgument` if it is no memory of a GPU; `Unsupported` if the setting names a rung that cannot be had.
    pub(super) fn register_gpu(&self, gpus: &GpuRegistrar, span: AddressRange) -> Result<GdrMode> {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = entries.iter_mut().find(|entry| entry.region.memory.span() == span) {
            let RegisteredRange::Gpu(_, mode) = entry.region.memory else {
                let message = "this memory is registered as the host's already";
                return Err(Error::invalid_argument(message));
            };
            entry.count += 1;
            return Ok(mode);
        }
        let access = AccessFlags { remote_read: true, ..self.writable() };
        let (mode, by_rail) = gpus.register(&self.pds, span, access)?;
        if mode != GdrMode::HostStaging {
            let region = RegisteredMemory::of(&self.pds, RegisteredRange::Gpu(span, mode), access);
            for (slot, registered) in region.by_rail.iter().zip(by_rail) {
                slot.get_or_init(|| registered);
            }
            let region = Arc::new(region);
            if gpus.needs_flush(span)? {
                self.flush_source.get_or_init(|| Arc::clone(&region));
            }
            entries.push(RegistryEntry { region, count: 1 });
        }
        Ok(mode)
    }

    /// What is read so that all that was written to the GPU before has arrived there, if that is needed: an address, and
    /// its key by rail.
    pub(super) fn flush_source(&self) -> Result<Option<(u64, [u32; MAX_RAILS])>> {
        let Some(region) = self.flush_source.get() else { return Ok(None) };
        Ok(Some((region.memory.span().address, region.rkeys()?)))
    }

    /// Takes one registration of exactly this memory of a GPU back, as [`deregister`](Registrar::deregister) does.
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
            // Messages that are under way keep it until they are through.
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
        region.rkeys()?;
        entries.push(RegistryEntry { region: Arc::new(region), count: 1 });
        Ok(())
    }

    fn deregister(&self, piece: Piece) -> Result<()> {
        if piece.is_empty() {
            return Ok(());
        }
        let span = AddressRange::of(piece);
        if !piece.is_host() && !self.is_registered(span) {
            // No device reaches it, so that it was not registered in truth.
            return Ok(());
        }
        self.remove(span)
    }
}

/// How long it takes to register and deregister a sub-chunk at all rails, and to copy it: the best of a few.
fn measure(pds: &Arc<[Arc<ProtectionDomain>]>, subchunk: usize) -> Result<(Duration, Duration)> {
    const TRIES: usize = 4;
    let mut from = vec![1u8; subchunk];
    let mut into = vec![2u8; subchunk];
    let (mut registering, mut copying) = (Duration::MAX, Duration::MAX);
    for _ in 0..TRIES {
        let start = Instant::now();
        crate::memory::lend_in_place(&mut from, |piece| {
            RegisteredMemory::new(pds, piece, AccessFlags::SEND).rkeys().map(drop)
        })?;
        registering = registering.min(start.elapsed());
        let start = Instant::now();
        into.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut into);
        copying = copying.min(start.elapsed());
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
    fn registered_memory_is_found_until_it_was_deregistered_as_often() {
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
    fn what_was_not_registered_is_so_for_as_long_as_it_is_under_way() {
        let registry = registry(&Shim::none(), Registration::Subchunk).expect("inert");
        let mut bytes = vec![0; 100];
        let all = piece(&mut bytes);
        let first = registry.for_sending(all).expect("inert");
        let second = registry.for_sending(all).expect("inert");
        assert!(Arc::ptr_eq(&first, &second), "one region for both peers");
        drop((first, second));
        assert_eq!(Arc::strong_count(&registry.for_sending(all).expect("inert")), 1, "nothing is kept");
        assert!(registry.find(all).is_none());
    }

    #[test]
    fn a_refusal_is_told_with_the_limit_to_raise() {
        let shim = Shim::failing(Verb::RegMr, 0, rustix::io::Errno::NOMEM.raw_os_error());
        let Err(error) = registry(&shim, Registration::Auto) else { panic!("nothing can be registered") };
        assert!(error.message().contains("ulimit -l unlimited"), "{error}");
    }
}
