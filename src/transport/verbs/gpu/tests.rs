//! Registering GPU memory: on inert devices, and on the RDMA device of this machine, if it has one, with host
//! memory that a fake GPU driver takes for GPU memory.

use super::driver::{AddressRange, GpuDriver};
use super::flush::Flusher;
use super::gdr_mode::{GdrMode, GdrRegistration, GdrUnavailable, RejectedMode};
use super::register::GpuRegistrar;
use super::write_ordering::WriteOrdering;
use crate::config::{Config, GpuDirect, Registration};
use crate::error::ErrorKind;
use crate::memory::{Piece, Registrar};
use crate::transport::verbs::inventory::{Affinity, Inventory};
use crate::transport::verbs::objects::{AccessFlags, Context, Library, ProtectionDomain, Shim, Verb};
use crate::transport::verbs::options::VerbsOptions;
use crate::transport::verbs::port_selection::{self, Rail};
use crate::transport::verbs::probe;
use crate::transport::verbs::registry::MemoryRegistry;
use crate::transport::verbs::shared_regions::{RegionKey, SharedRegions};
use memmap2::MmapMut;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A driver with one GPU, to which all memory belongs. It exports an empty file in place of a DMA-BUF.
#[derive(Clone, Default)]
struct FakeGpuDriver {
    exported: Arc<Mutex<Vec<AddressRange>>>,
    /// Whether each was to be accessed over PCI Express.
    over_pci: Arc<Mutex<Vec<bool>>>,
    /// Whether the processor has a link to the GPU, and whether the driver is too old to tell ways apart.
    is_coherent: bool,
    refuses_pci: bool,
    /// By address: memory that was allocated and not freed. It is the host's.
    allocated: Arc<Mutex<BTreeMap<u64, MmapMut>>>,
    /// Whether there is no memory left to allocate.
    is_full: bool,
}

impl FakeGpuDriver {
    /// The addresses of memory that was allocated and not freed.
    fn allocated(&self) -> Vec<u64> {
        self.allocated.lock().expect("no test panics while holding the lock").keys().copied().collect()
    }
}

impl GpuDriver for FakeGpuDriver {
    fn gpu_of(&self, address: u64) -> Result<usize, String> {
        if address < 4096 { Err("the page at 0 is not mapped".to_owned()) } else { Ok(0) }
    }

    fn synchronize(&self, _address: u64) {}

    fn allocate_beside(&self, _address: u64, len: usize) -> Result<u64, String> {
        if self.is_full {
            return Err("out of memory".to_owned());
        }
        let memory = MmapMut::map_anon(len).map_err(|cause| cause.to_string())?;
        let address = memory.as_ptr() as u64;
        self.allocated.lock().expect("no test panics while holding the lock").insert(address, memory);
        Ok(address)
    }

    fn free(&self, address: u64) {
        let mut allocated = self.allocated.lock().expect("no test panics while holding the lock");
        assert!(allocated.remove(&address).is_some(), "{address:#x} is freed once");
    }

    fn writes(&self, _gpu: usize) -> Result<WriteOrdering, String> {
        Ok(WriteOrdering { ordering: Some(0), compute_major: 8, coherent: self.is_coherent })
    }

    fn exports_dmabuf(&self, _gpu: usize) -> Result<(), GdrUnavailable> {
        Ok(())
    }

    fn export(&self, _address: u64, pages: AddressRange, over_pci: bool) -> Result<OwnedFd, String> {
        self.exported.lock().expect("no test panics while holding the lock").push(pages);
        self.over_pci.lock().expect("no test panics while holding the lock").push(over_pci);
        if over_pci && self.refuses_pci {
            return Err("invalid argument".to_owned());
        }
        rustix::fs::memfd_create("fake-dmabuf", rustix::fs::MemfdFlags::CLOEXEC)
            .map_err(|cause| cause.to_string())
    }
}

impl GpuRegistrar {
    /// A registrar with the fake driver.
    pub(in crate::transport::verbs) fn with_fake_driver() -> Self {
        registrar(GpuDirect::Auto)
    }
}

fn registrar(setting: GpuDirect) -> GpuRegistrar {
    GpuRegistrar::with_driver(setting, Arc::new(FakeGpuDriver::default()))
}

/// A domain without a device, on which the first call of this verb fails with this errno.
fn inert(name: &str, verb: Verb, errno: Errno) -> Arc<ProtectionDomain> {
    let shim = Shim::failing(verb, 0, errno.raw_os_error());
    ProtectionDomain::new(&Context::inert(name, shim)).expect("inert")
}

/// A domain whose driver imports DMA-BUFs: it reports that the probed one does not exist.
fn with_dmabuf(name: &str) -> Arc<ProtectionDomain> {
    inert(name, Verb::RegDmabufMr, Errno::BADF)
}

/// A domain whose driver does not import DMA-BUFs.
fn without_dmabuf(name: &str) -> Arc<ProtectionDomain> {
    ProtectionDomain::new(&Context::inert(name, Shim::none())).expect("inert")
}

fn regions(pds: Vec<Arc<ProtectionDomain>>) -> MemoryRegistry {
    MemoryRegistry::new(pds, true, Registration::Stage, 4096).expect("inert")
}

/// A range of imaginary GPU memory.
const RANGE: AddressRange = AddressRange { address: 0x7f00_0001_1200, len: 0x3000 };

fn piece(range: AddressRange) -> Piece {
    let start = NonNull::new(range.address as *mut u8).expect("the address is not 0");
    // SAFETY: nothing accesses the memory.
    unsafe { Piece::new(start, range.len) }
}

/// Counter-example: data between ConnectX-8 and a GB300's GPU took the processor's link.
#[test]
fn adapters_with_data_direct_reach_gpus_over_pci_express() {
    for (is_coherent, refuses_pci, expected) in
        [(true, false, &[true][..]), (false, false, &[false]), (true, true, &[true, false])]
    {
        let driver = FakeGpuDriver { is_coherent, refuses_pci, ..FakeGpuDriver::default() };
        let gpus = GpuRegistrar::with_driver(GpuDirect::Dmabuf, Arc::new(driver.clone()));
        let shim = Shim::failing(Verb::RegDmabufMr, 0, Errno::BADF.raw_os_error()).with_data_direct();
        let pd = ProtectionDomain::new(&Context::inert("direct", shim)).expect("inert");
        let (mode, _) = gpus.register(&[pd], RANGE, AccessFlags::SEND).expect("inert");
        assert_eq!(mode, GdrMode::DmaBuf);
        assert_eq!(*driver.over_pci.lock().expect("no other thread"), expected);
    }
}

#[test]
fn whole_pages_are_exported_once_for_all_rails() {
    let driver = FakeGpuDriver::default();
    let gpus = GpuRegistrar::with_driver(GpuDirect::Auto, Arc::new(driver.clone()));
    let regions = regions(vec![with_dmabuf("a"), with_dmabuf("b")]);
    assert_eq!(regions.register_gpu(&gpus, RANGE).expect("inert"), GdrMode::DmaBuf);
    let page = rustix::param::page_size() as u64;
    let exported = driver.exported.lock().expect("no other thread").clone();
    let [pages] = exported[..] else { panic!("{exported:?}") };
    assert_eq!((pages.address % page, pages.len as u64 % page), (0, 0));
    let (end, inner) = (pages.address + pages.len as u64, RANGE.address + RANGE.len as u64);
    assert!(pages.address <= RANGE.address && RANGE.address - pages.address < page, "{pages:?}");
    assert!(end >= inner && end - inner < page, "{pages:?}");
}

#[test]
fn gpu_memory_is_registered_until_the_last_deregistration() {
    let (gpus, regions) = (registrar(GpuDirect::Auto), regions(vec![with_dmabuf("a")]));
    for _ in 0..2 {
        assert_eq!(regions.register_gpu(&gpus, RANGE).expect("inert"), GdrMode::DmaBuf);
    }
    let all = piece(RANGE);
    let region = regions.find(all.narrow(1, 100)).expect("the memory is registered");
    assert_eq!(
        (
            region.lkey(0).expect("the memory is registered"),
            region.rkeys().expect("the memory is registered")[0]
        ),
        (7, 7)
    );
    assert!(Arc::ptr_eq(&region, &regions.for_sending(all)));
    assert!(Arc::ptr_eq(&region, &regions.for_receiving(all)));
    regions.deregister_gpu(RANGE).expect("registered twice");
    assert!(regions.find(all).is_some());
    regions.deregister_gpu(RANGE).expect("registered twice");
    assert!(regions.find(all).is_none());
    let error = regions.deregister_gpu(RANGE).expect_err("the memory is no longer registered");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn communicators_share_a_registration_of_gpu_memory_until_the_last_of_them_ends_it() {
    let (driver, pds) = (FakeGpuDriver::default(), vec![with_dmabuf("a"), without_dmabuf("b")]);
    let gpus = GpuRegistrar::with_driver(GpuDirect::Auto, Arc::new(driver.clone()));
    let shared: [Arc<SharedRegions>; 2] = Default::default();
    let of_one_communicator = || regions(pds.clone()).with_shared_regions(shared.to_vec());
    let (one, other) = (of_one_communicator(), of_one_communicator());
    let register = |registry: &MemoryRegistry| registry.register_gpu(&gpus, RANGE).expect("inert");
    let exports = || {
        let exported = driver.exported.lock().expect("no other thread");
        let contains = |pages: &&AddressRange| {
            (pages.address..pages.address + pages.len as u64).contains(&RANGE.address)
        };
        exported.iter().filter(contains).count()
    };
    assert_eq!(register(&one), GdrMode::PeerMem);
    let first = exports();
    assert_eq!(register(&other), GdrMode::PeerMem, "the worst of the rails, as at first");
    assert_eq!(exports(), first, "it was registered once");
    let keys = |registry: &MemoryRegistry| {
        let region = registry.find(piece(RANGE)).expect("registered");
        region.rkeys().expect("registered at both rails")
    };
    assert_eq!(keys(&one), keys(&other));
    let access = AccessFlags { remote_write: true, remote_read: true, relaxed: true };
    let is_shared = || {
        let key = RegionKey::gpu(RANGE, access, GpuDirect::Auto);
        shared.each_ref().map(|regions| regions.find(&key).is_some())
    };
    one.deregister_gpu(RANGE).expect("registered");
    assert_eq!(is_shared(), [true; 2], "the other communicator still has it");
    register(&one);
    assert_eq!(exports(), first);
    one.deregister_gpu(RANGE).expect("registered");
    other.deregister_gpu(RANGE).expect("registered");
    assert_eq!(is_shared(), [false; 2], "the last of them has ended it");
    register(&one);
    assert_eq!(is_shared(), [true; 2]);
}

#[test]
fn flushes_read_memory_of_this_library_until_the_registry_is_dropped() {
    let driver = FakeGpuDriver::default();
    let gpus = GpuRegistrar::with_driver(GpuDirect::Auto, Arc::new(driver.clone()));
    let regions = regions(vec![with_dmabuf("a"), without_dmabuf("b")]);
    assert!(regions.flush_source().expect("nothing is registered").is_none());
    regions.register_gpu(&gpus, RANGE).expect("inert");
    let source = regions.flush_source().expect("registered").expect("this GPU needs flushes");
    assert_eq!((driver.allocated(), &source.1[..2]), (vec![source.0], &[7, 7][..]));
    assert_eq!(source.0 % 4096, 0, "whole pages are exported");
    // The user may free what was registered first, and go on with other memory.
    let other = AddressRange { address: RANGE.address + 0x10_0000, ..RANGE };
    regions.register_gpu(&gpus, other).expect("inert");
    regions.deregister_gpu(RANGE).expect("registered once");
    assert_eq!(regions.flush_source().expect("registered"), Some(source));
    assert_eq!(driver.allocated(), [source.0], "one page for all of the GPU's memory");
    drop(regions);
    assert!(driver.allocated().is_empty());
}

#[test]
fn memory_of_a_gpu_that_has_none_left_is_staged() {
    let driver = Arc::new(FakeGpuDriver { is_full: true, ..FakeGpuDriver::default() });
    for (setting, mode) in [(GpuDirect::Auto, Some(GdrMode::HostStaging)), (GpuDirect::Dmabuf, None)] {
        let gpus = GpuRegistrar::with_driver(setting, driver.clone());
        let regions = regions(vec![with_dmabuf("a")]);
        assert_eq!(regions.register_gpu(&gpus, RANGE).ok(), mode);
        assert!(regions.find(piece(RANGE)).is_none());
    }
}

#[test]
fn each_rail_has_its_own_mode_and_the_worst_is_returned() {
    let auto = registrar(GpuDirect::Auto);
    let mixed = regions(vec![with_dmabuf("a"), without_dmabuf("b")]);
    assert_eq!(mixed.register_gpu(&auto, RANGE).expect("inert"), GdrMode::PeerMem);
    assert!(mixed.find(piece(RANGE)).is_some());
    // A message may take any rail, so memory that one rail cannot reach is staged for all.
    let limited = regions(vec![with_dmabuf("a"), inert("b", Verb::RegMr, Errno::FAULT)]);
    assert_eq!(limited.register_gpu(&auto, RANGE).expect("inert"), GdrMode::HostStaging);
    assert!(limited.find(piece(RANGE)).is_none(), "no region is kept");
    // The next registration is tried again; the shim refused only the first.
    assert_eq!(limited.register_gpu(&auto, RANGE).expect("inert"), GdrMode::PeerMem);
}

#[test]
fn a_required_mode_is_used_or_an_error_names_gpu_device_and_fix() {
    let off = regions(vec![with_dmabuf("a")]);
    assert_eq!(
        off.register_gpu(&registrar(GpuDirect::Off), RANGE).expect("host staging has no requirements"),
        GdrMode::HostStaging
    );
    let peer = regions(vec![with_dmabuf("a")]);
    assert_eq!(peer.register_gpu(&registrar(GpuDirect::Peer), RANGE).expect("inert"), GdrMode::PeerMem);
    let error = regions(vec![with_dmabuf("a"), without_dmabuf("b")])
        .register_gpu(&registrar(GpuDirect::Dmabuf), RANGE)
        .expect_err("b does not import DMA-BUFs");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let message = "GPU 0 and b: FLEXRING_GPU_DIRECT=dmabuf is not possible: the driver of b does not import \
                   DMA-BUFs; fix: ";
    assert!(error.message().starts_with(message), "{error}");
}

#[test]
fn memory_that_is_not_gpu_memory_is_refused() {
    let regions = regions(vec![with_dmabuf("a")]);
    for range in [
        AddressRange { address: 64, len: 64 },
        AddressRange { address: u64::MAX - 10, len: 100 },
        AddressRange { address: 1 << 40, len: 0 },
    ] {
        let error =
            regions.register_gpu(&registrar(GpuDirect::Auto), range).expect_err("it is not GPU memory");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains(" are not GPU memory: "), "{error}");
    }
}

#[test]
fn each_rejected_mode_is_reported_once_for_each_gpu_device_and_reason() {
    let gpus = registrar(GpuDirect::Auto);
    let registration = |message: &str, by_setting| {
        let reason = GdrUnavailable { message: message.to_owned(), fix: Some("modprobe it"), by_setting };
        GdrRegistration::<()> {
            mode: GdrMode::PeerMem,
            rejected: vec![RejectedMode { mode: GdrMode::DmaBuf, reason }],
            region: None,
        }
    };
    let first = gpus.new_warnings(0, "a", &registration("it is old", false));
    assert_eq!(first, ["a cannot access memory of GPU 0 by DMA-BUF: it is old; fix: modprobe it"]);
    assert!(gpus.new_warnings(0, "a", &registration("it is old", false)).is_empty());
    assert_eq!(gpus.new_warnings(1, "a", &registration("it is old", false)).len(), 1);
    assert_eq!(gpus.new_warnings(0, "b", &registration("it is old", false)).len(), 1);
    assert_eq!(gpus.new_warnings(0, "a", &registration("it is small", false)).len(), 1);
    assert!(
        gpus.new_warnings(0, "a", &registration("it is excluded", true)).is_empty(),
        "modes that a setting excludes are not reported"
    );
}

#[test]
fn imaginary_memory_is_refused_with_or_without_a_driver() {
    let regions = regions(vec![with_dmabuf("a")]);
    let error =
        regions.register_gpu(&GpuRegistrar::new(GpuDirect::Auto), RANGE).expect_err("it belongs to no GPU");
    let message = "the 12288 bytes at 0x7f0000011200 are not GPU memory: ";
    assert!(error.message().starts_with(message), "{error}");
    #[cfg(not(feature = "cuda"))]
    assert!(error.message().ends_with("this build has no CUDA"), "{error}");
}

/// The first rail of this machine, open; `None`, after printing why the test is skipped, if there is none.
fn rail() -> Option<(Rail, Arc<ProtectionDomain>)> {
    rail_with(Shim::none())
}

fn rail_with(shim: Shim) -> Option<(Rail, Arc<ProtectionDomain>)> {
    let inventory = Inventory::local();
    if inventory.devices.is_empty() {
        println!("skipped: no RDMA device here");
        return None;
    }
    let affinity = Affinity::read(std::path::Path::new("/"), None);
    let rails =
        port_selection::select(&inventory, &Config::default(), &affinity).expect("a usable port").rails;
    let library = Library::open(None).expect("libibverbs can be opened");
    let context = Context::open(library, &rails[0].device, shim).expect("the device can be opened");
    Some((rails[0].clone(), ProtectionDomain::new(&context).expect("a protection domain")))
}

/// Host memory, and a range of it that does not begin at a page boundary.
fn memory() -> (MmapMut, AddressRange) {
    let memory = MmapMut::map_anon(1 << 16).expect("memory");
    let address = memory.as_ptr() as u64 + 512;
    (memory, AddressRange { address, len: 40_000 })
}

fn flusher(rail: &Rail, pd: &Arc<ProtectionDomain>) -> Flusher {
    let port = pd.context().port(rail.port).expect("the rail's port");
    Flusher::new(pd, rail, port, &VerbsOptions::new(&Config::default())).expect("a queue pair")
}

/// Polls until this many flushes are complete.
fn wait(flusher: &mut Flusher, count: u64) -> crate::error::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(20);
    while flusher.poll()? < count {
        assert!(Instant::now() < deadline, "{count} flushes are not complete");
        std::thread::yield_now();
    }
    Ok(())
}

#[test]
fn a_real_device_reports_whether_it_imports_dmabufs() {
    let Some((rail, pd)) = rail() else { return };
    let errno = Errno::from_raw_os_error(pd.probe_dmabuf());
    println!("{} answers {errno:?}", rail.device);
    let answers = probe::probe(None, &rail.device, &[rail.port, 99]).expect("the device can be opened");
    let mtu = answers.mtus[0].expect("the port has an MTU");
    assert!(mtu.is_power_of_two() && (256..=4096).contains(&mtu), "{mtu}");
    assert_eq!(answers.mtus[1], None, "there is no such port");
    if rail.device.starts_with("rxe") {
        assert!(matches!(errno, Errno::OPNOTSUPP | Errno::PROTONOSUPPORT), "{errno:?}");
        let why = answers.dmabufs.expect_err("software devices do not import DMA-BUFs");
        assert!(why.message.contains("DMA-BUF"), "{why:?}");
        // A file that is not a DMA-BUF is refused with the same errno.
        let file = rustix::fs::memfd_create("none", rustix::fs::MemfdFlags::CLOEXEC).expect("a file");
        let refused =
            pd.register_dmabuf(std::os::fd::AsFd::as_fd(&file), 0, 4096, 0, AccessFlags::SEND, false);
        assert_eq!(refused.err().map(Errno::from_raw_os_error), Some(errno));
    }
}

#[test]
fn a_real_device_falls_back_from_dmabufs_and_flushes() {
    let Some((rail, pd)) = rail() else { return };
    let regions = MemoryRegistry::new(vec![Arc::clone(&pd)], true, Registration::Stage, 4096).expect("inert");
    let (mut memory, range) = memory();
    if rail.device.starts_with("rxe") {
        let error = regions
            .register_gpu(&registrar(GpuDirect::Dmabuf), range)
            .expect_err("it does not import DMA-BUFs");
        println!("{error}");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }
    // No driver takes a file for a DMA-BUF, but host memory can be registered by its address.
    assert_eq!(
        regions.register_gpu(&registrar(GpuDirect::Auto), range).expect("host memory can be registered"),
        GdrMode::PeerMem
    );
    let region = regions.find(piece(range)).expect("the memory is registered");
    let rkey = region.rkeys().expect("the memory is registered")[0];

    let mut flusher = flusher(&rail, &pd);
    let mut started = 0;
    for (offset, byte) in [(0, 1), (range.len - 1, 2), (17, 3)] {
        memory[512 + offset] = byte;
        let number = flusher.start(range.address + offset as u64, rkey).expect("connected").expect("room");
        assert_eq!(number, started);
        started += 1;
        wait(&mut flusher, started).expect("the memory is readable");
        assert_eq!(flusher.last_byte(), byte, "the device read the byte in place");
    }
    // As many flushes as possible at once, and more as they complete.
    while started < 200 {
        match flusher.start(range.address, rkey).expect("connected") {
            Some(number) => started = number + 1,
            None => _ = flusher.poll().expect("the memory is readable"),
        }
    }
    wait(&mut flusher, started).expect("the memory is readable");
    regions.deregister_gpu(range).expect("registered once");
}

#[test]
fn a_real_device_refuses_to_flush_without_read_access() {
    let Some((rail, pd)) = rail() else { return };
    let regions = MemoryRegistry::new(vec![Arc::clone(&pd)], true, Registration::Stage, 4096).expect("inert");
    let (_memory, range) = memory();
    // Host memory is not registered for remote reads.
    regions.register(piece(range)).expect("host memory can be registered");
    let rkey = regions.find(piece(range)).expect("registered").rkeys().expect("registered")[0];
    for key in [rkey, rkey ^ 0x55] {
        let mut flusher = flusher(&rail, &pd);
        flusher.start(range.address, key).expect("posting succeeds");
        let error = wait(&mut flusher, 1).expect_err("remote reads are not allowed");
        assert_eq!(error.kind(), ErrorKind::System);
        let message = format!("cannot flush the writes of {} to GPU memory: ", rail.device);
        assert!(error.message().starts_with(&message), "{error}");
    }
    // An unmapped address cannot be registered. For GPU memory, it means that a kernel module is missing.
    let unmapped = AddressRange { address: 1 << 46, len: 4096 };
    assert_eq!(
        regions.register_gpu(&registrar(GpuDirect::Auto), unmapped).expect("auto"),
        GdrMode::HostStaging
    );
    let error =
        regions.register_gpu(&registrar(GpuDirect::Peer), unmapped).expect_err("the address is not mapped");
    assert!(error.message().ends_with("fix: modprobe nvidia-peermem"), "{error}");
}

#[test]
fn a_failed_flush_is_an_error_with_its_cause() {
    const GENERAL_ERROR: u32 = 21;
    let shim = Shim::failing_completion(1, GENERAL_ERROR);
    let Some((rail, pd)) = rail_with(shim.clone()) else { return };
    let regions = MemoryRegistry::new(vec![Arc::clone(&pd)], true, Registration::Stage, 4096).expect("inert");
    let (_memory, range) = memory();
    regions.register_gpu(&registrar(GpuDirect::Auto), range).expect("host memory can be registered");
    let rkey = regions.find(piece(range)).expect("registered").rkeys().expect("registered")[0];
    let mut flusher = flusher(&rail, &pd);
    flusher.start(range.address, rkey).expect("connected");
    wait(&mut flusher, 1).expect("the first flush succeeds");
    assert!(!shim.triggered());
    flusher.start(range.address, rkey).expect("connected");
    let error = wait(&mut flusher, 2).expect_err("the second flush fails");
    assert!(shim.triggered());
    assert!(error.message().ends_with(" to GPU memory: general error (status 21)"), "{error}");
}
