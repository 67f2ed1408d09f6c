//! GPU memory, registered: on devices that do nothing, and on whatever RDMA device there is, with memory of the host that
//! a driver made for tests takes for a GPU's.

use super::flush::{Flusher, WriteOrdering};
use super::gdr_mode::{GdrMode, GdrRegistration, GdrUnavailable, RejectedMode};
use super::register::{AddressRange, GpuDriver, GpuRegistrar};
use crate::config::{Config, GpuDirect, Registration};
use crate::error::ErrorKind;
use crate::memory::{Piece, Registrar};
use crate::transport::verbs::inventory::{Affinity, Inventory};
use crate::transport::verbs::objects::{AccessFlags, Context, ProtectionDomain, Shim, Verb};
use crate::transport::verbs::options::VerbsOptions;
use crate::transport::verbs::port_selection::{self, Rail};
use crate::transport::verbs::probe;
use crate::transport::verbs::registry::MemoryRegistry;
use memmap2::MmapMut;
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A driver with one GPU, which has all memory there is and exports a file in place of it.
#[derive(Clone, Default)]
struct FakeGpuDriver {
    exported: Arc<Mutex<Vec<AddressRange>>>,
}

impl GpuDriver for FakeGpuDriver {
    fn gpu_of(&self, address: u64) -> Result<usize, String> {
        if address < 4096 { Err("nothing is there".to_owned()) } else { Ok(0) }
    }

    fn synchronize(&self, _address: u64) {}

    fn writes(&self, _gpu: usize) -> Result<WriteOrdering, String> {
        Ok(WriteOrdering { ordering: Some(0), compute_major: 8, coherent: false })
    }

    fn exports(&self, _gpu: usize) -> Result<(), GdrUnavailable> {
        Ok(())
    }

    fn export(&self, pages: AddressRange) -> Result<OwnedFd, String> {
        self.exported.lock().expect("no test panics with it").push(pages);
        rustix::fs::memfd_create("pretender", rustix::fs::MemfdFlags::CLOEXEC)
            .map_err(|cause| cause.to_string())
    }
}

impl GpuRegistrar {
    /// Those of the driver made for tests.
    pub(in crate::transport::verbs) fn pretended() -> Self {
        gpus(GpuDirect::Auto)
    }
}

fn gpus(asked: GpuDirect) -> GpuRegistrar {
    GpuRegistrar::of(asked, Box::new(FakeGpuDriver::default()))
}

/// A domain of no device, whose first verb of this sort fails so.
fn inert(name: &str, verb: Verb, errno: Errno) -> Arc<ProtectionDomain> {
    let shim = Shim::failing(verb, 0, errno.raw_os_error());
    ProtectionDomain::new(&Context::inert(name, shim)).expect("inert")
}

/// The same, whose driver takes DMA-BUFs: it misses the one that does not exist.
fn modern(name: &str) -> Arc<ProtectionDomain> {
    inert(name, Verb::RegDmabufMr, Errno::BADF)
}

/// The same, whose driver takes none, as inert ones do.
fn old(name: &str) -> Arc<ProtectionDomain> {
    ProtectionDomain::new(&Context::inert(name, Shim::none())).expect("inert")
}

fn regions(pds: Vec<Arc<ProtectionDomain>>) -> MemoryRegistry {
    MemoryRegistry::new(pds, true, Registration::Stage, 4096).expect("inert")
}

/// Some bytes of an imaginary GPU.
const SPAN: AddressRange = AddressRange { address: 0x7f00_0001_1200, len: 0x3000 };

fn piece(span: AddressRange) -> Piece {
    let start = NonNull::new(span.address as *mut u8).expect("not at zero");
    // SAFETY: nothing reads or writes it.
    unsafe { Piece::new(start, span.len) }
}

#[test]
fn whole_pages_are_exported_once_for_all_rails() {
    let driver = FakeGpuDriver::default();
    let gpus = GpuRegistrar::of(GpuDirect::Auto, Box::new(driver.clone()));
    let regions = regions(vec![modern("a"), modern("b")]);
    assert_eq!(regions.register_gpu(&gpus, SPAN).expect("inert"), GdrMode::DmaBuf);
    let page = rustix::param::page_size() as u64;
    let exported = driver.exported.lock().expect("no other thread").clone();
    let [pages] = exported[..] else { panic!("{exported:?}") };
    assert_eq!((pages.address % page, pages.len as u64 % page), (0, 0));
    let (end, inner) = (pages.address + pages.len as u64, SPAN.address + SPAN.len as u64);
    assert!(pages.address <= SPAN.address && SPAN.address - pages.address < page, "{pages:?}");
    assert!(end >= inner && end - inner < page, "{pages:?}");
}

#[test]
fn gpu_memory_is_found_until_it_was_deregistered_as_often() {
    let (gpus, regions) = (gpus(GpuDirect::Auto), regions(vec![modern("a")]));
    for _ in 0..2 {
        assert_eq!(regions.register_gpu(&gpus, SPAN).expect("inert"), GdrMode::DmaBuf);
    }
    let all = piece(SPAN);
    let region = regions.find(all.narrow(1, 100)).expect("it is registered");
    assert_eq!((region.lkey(0).expect("at once"), region.rkeys().expect("at once")[0]), (7, 7));
    assert!(Arc::ptr_eq(&region, &regions.for_sending(all).expect("it is registered")));
    assert!(Arc::ptr_eq(&region, &regions.for_receiving(all)));
    regions.deregister_gpu(SPAN).expect("registered twice");
    assert!(regions.find(all).is_some());
    regions.deregister_gpu(SPAN).expect("registered twice");
    assert!(regions.find(all).is_none());
    let error = regions.deregister_gpu(SPAN).expect_err("not registered any more");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn each_rail_has_its_own_rung_and_the_worst_is_told() {
    let auto = gpus(GpuDirect::Auto);
    let mixed = regions(vec![modern("a"), old("b")]);
    assert_eq!(mixed.register_gpu(&auto, SPAN).expect("inert"), GdrMode::PeerMem);
    assert!(mixed.find(piece(SPAN)).is_some());
    // A message may take any rail, so what one cannot reach is copied for all.
    let lame = regions(vec![modern("a"), inert("b", Verb::RegMr, Errno::FAULT)]);
    assert_eq!(lame.register_gpu(&auto, SPAN).expect("inert"), GdrMode::HostStaging);
    assert!(lame.find(piece(SPAN)).is_none(), "and nothing is kept");
    // The next range is tried again, and only the first refusal was of the shim.
    assert_eq!(lame.register_gpu(&auto, SPAN).expect("inert"), GdrMode::PeerMem);
}

#[test]
fn settings_are_obeyed_or_an_error_names_gpu_device_and_mend() {
    let off = regions(vec![modern("a")]);
    assert_eq!(
        off.register_gpu(&gpus(GpuDirect::Off), SPAN).expect("it needs nothing"),
        GdrMode::HostStaging
    );
    let peer = regions(vec![modern("a")]);
    assert_eq!(peer.register_gpu(&gpus(GpuDirect::Peer), SPAN).expect("inert"), GdrMode::PeerMem);
    let error = regions(vec![modern("a"), old("b")])
        .register_gpu(&gpus(GpuDirect::Dmabuf), SPAN)
        .expect_err("b takes none");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let words =
        "GPU 0 and b: FLEXRING_GPU_DIRECT=dmabuf is not possible: the driver of b takes no DMA-BUF; fix: ";
    assert!(error.message().starts_with(words), "{error}");
}

#[test]
fn what_is_no_memory_of_a_gpu_is_refused_in_words() {
    let regions = regions(vec![modern("a")]);
    for span in [
        AddressRange { address: 64, len: 64 },
        AddressRange { address: u64::MAX - 10, len: 100 },
        AddressRange { address: 1 << 40, len: 0 },
    ] {
        let error = regions.register_gpu(&gpus(GpuDirect::Auto), span).expect_err("it is none");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains(" are no memory of a GPU: "), "{error}");
    }
}

#[test]
fn a_step_down_is_told_once_for_each_gpu_device_and_reason() {
    let gpus = gpus(GpuDirect::Auto);
    let taken = |words: &str, by_setting| {
        let reason = GdrUnavailable { message: words.to_owned(), fix: Some("modprobe it"), by_setting };
        GdrRegistration::<()> {
            mode: GdrMode::PeerMem,
            rejected: vec![RejectedMode { mode: GdrMode::DmaBuf, reason }],
            region: None,
        }
    };
    let first = gpus.new_warnings(0, "a", &taken("it is old", false));
    assert_eq!(first, ["a does not reach memory of GPU 0 by DMA-BUF: it is old; fix: modprobe it"]);
    assert!(gpus.new_warnings(0, "a", &taken("it is old", false)).is_empty());
    assert_eq!(gpus.new_warnings(1, "a", &taken("it is old", false)).len(), 1);
    assert_eq!(gpus.new_warnings(0, "b", &taken("it is old", false)).len(), 1);
    assert_eq!(gpus.new_warnings(0, "a", &taken("it is small", false)).len(), 1);
    assert!(gpus.new_warnings(0, "a", &taken("it is unwanted", true)).is_empty(), "who set that knows");
}

#[test]
fn with_or_without_a_driver_nothing_panics() {
    let regions = regions(vec![modern("a")]);
    let error = regions.register_gpu(&GpuRegistrar::new(GpuDirect::Auto), SPAN).expect_err("no GPU has it");
    let words = "the 12288 bytes at 0x7f0000011200 are no memory of a GPU: ";
    assert!(error.message().starts_with(words), "{error}");
    #[cfg(not(feature = "cuda"))]
    assert!(error.message().ends_with("this build has no CUDA"), "{error}");
}

/// The first rail of this machine, open; `None`, with a word, if it has none.
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
    let context = Context::open(&rails[0].device, shim).expect("it can be opened");
    Some((rails[0].clone(), ProtectionDomain::new(&context).expect("a domain")))
}

/// Memory of the host, and where it is: not at the beginning of a page.
fn memory() -> (MmapMut, AddressRange) {
    let memory = MmapMut::map_anon(1 << 16).expect("memory");
    let address = memory.as_ptr() as u64 + 512;
    (memory, AddressRange { address, len: 40_000 })
}

fn flusher(rail: &Rail, pd: &Arc<ProtectionDomain>) -> Flusher {
    let port = pd.context().port(rail.port).expect("the rail's port");
    Flusher::new(pd, rail, port, &VerbsOptions::new(&Config::default())).expect("a queue pair")
}

/// Polls until so many flushes are over.
fn wait(flusher: &mut Flusher, count: u64) -> crate::error::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(20);
    while flusher.poll()? < count {
        assert!(Instant::now() < deadline, "{count} flushes are not over");
        std::thread::yield_now();
    }
    Ok(())
}

#[test]
fn a_real_device_says_whether_it_takes_dmabufs() {
    let Some((rail, pd)) = rail() else { return };
    let errno = Errno::from_raw_os_error(pd.probe_dmabuf());
    println!("{} answers {errno:?}", rail.device);
    let answers = probe::probe(&rail.device, &[rail.port, 99]).expect("it can be opened");
    let mtu = answers.mtus[0].expect("it knows");
    assert!(mtu.is_power_of_two() && (256..=4096).contains(&mtu), "{mtu}");
    assert_eq!(answers.mtus[1], None, "there is no such port");
    if rail.device.starts_with("rxe") {
        assert!(matches!(errno, Errno::OPNOTSUPP | Errno::PROTONOSUPPORT), "{errno:?}");
        let why = answers.dmabufs.expect_err("devices made of software take none");
        assert!(why.message.contains("DMA-BUF"), "{why:?}");
        // What is no DMA-BUF at all is refused the same way.
        let file = rustix::fs::memfd_create("none", rustix::fs::MemfdFlags::CLOEXEC).expect("a file");
        let refused = pd.register_dmabuf(std::os::fd::AsFd::as_fd(&file), 0, 4096, 0, AccessFlags::SEND);
        assert_eq!(refused.err().map(Errno::from_raw_os_error), Some(errno));
    }
}

#[test]
fn a_real_device_steps_down_from_dmabufs_and_flushes() {
    let Some((rail, pd)) = rail() else { return };
    let regions = MemoryRegistry::new(vec![Arc::clone(&pd)], true, Registration::Stage, 4096).expect("inert");
    let (mut memory, span) = memory();
    if rail.device.starts_with("rxe") {
        let error = regions.register_gpu(&gpus(GpuDirect::Dmabuf), span).expect_err("it takes none");
        println!("{error}");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }
    // A file is no DMA-BUF for any driver; memory of the host is registered by its address.
    assert_eq!(regions.register_gpu(&gpus(GpuDirect::Auto), span).expect("it is memory"), GdrMode::PeerMem);
    let region = regions.find(piece(span)).expect("it is registered");
    let rkey = region.rkeys().expect("at once")[0];

    let mut flusher = flusher(&rail, &pd);
    let mut begun = 0;
    for (offset, byte) in [(0, 1), (span.len - 1, 2), (17, 3)] {
        memory[512 + offset] = byte;
        let number = flusher.begin(span.address + offset as u64, rkey).expect("connected").expect("room");
        assert_eq!(number, begun);
        begun += 1;
        wait(&mut flusher, begun).expect("it may be read");
        assert_eq!(flusher.landed(), byte, "the device has read it where it is");
    }
    // As many as fit, and then more, as they end.
    while begun < 200 {
        match flusher.begin(span.address, rkey).expect("connected") {
            Some(number) => begun = number + 1,
            None => _ = flusher.poll().expect("it may be read"),
        }
    }
    wait(&mut flusher, begun).expect("it may be read");
    regions.deregister_gpu(span).expect("registered once");
}

#[test]
fn a_real_device_refuses_to_flush_what_may_not_be_read() {
    let Some((rail, pd)) = rail() else { return };
    let regions = MemoryRegistry::new(vec![Arc::clone(&pd)], true, Registration::Stage, 4096).expect("inert");
    let (_memory, span) = memory();
    // Memory of the host is not registered for reading.
    regions.register(piece(span)).expect("it is memory");
    let rkey = regions.find(piece(span)).expect("registered").rkeys().expect("registered")[0];
    for key in [rkey, rkey ^ 0x55] {
        let mut flusher = flusher(&rail, &pd);
        flusher.begin(span.address, key).expect("it is asked only");
        let error = wait(&mut flusher, 1).expect_err("it may not be read");
        assert_eq!(error.kind(), ErrorKind::System);
        let words = format!("what {} wrote to GPU memory cannot be flushed: ", rail.device);
        assert!(error.message().starts_with(&words), "{error}");
    }
    // And what is nowhere cannot be registered, which for a GPU's memory means a module is missing.
    let nowhere = AddressRange { address: 1 << 46, len: 4096 };
    assert_eq!(regions.register_gpu(&gpus(GpuDirect::Auto), nowhere).expect("auto"), GdrMode::HostStaging);
    let error = regions.register_gpu(&gpus(GpuDirect::Peer), nowhere).expect_err("it is nowhere");
    assert!(error.message().ends_with("fix: modprobe nvidia-peermem"), "{error}");
}

#[test]
fn a_flush_that_fails_is_an_error_with_its_cause() {
    const GENERAL_ERROR: u32 = 21;
    let shim = Shim::failing_completion(1, GENERAL_ERROR);
    let Some((rail, pd)) = rail_with(shim.clone()) else { return };
    let regions = MemoryRegistry::new(vec![Arc::clone(&pd)], true, Registration::Stage, 4096).expect("inert");
    let (_memory, span) = memory();
    regions.register_gpu(&gpus(GpuDirect::Auto), span).expect("it is memory");
    let rkey = regions.find(piece(span)).expect("registered").rkeys().expect("registered")[0];
    let mut flusher = flusher(&rail, &pd);
    flusher.begin(span.address, rkey).expect("connected");
    wait(&mut flusher, 1).expect("the first is well");
    assert!(!shim.triggered());
    flusher.begin(span.address, rkey).expect("connected");
    let error = wait(&mut flusher, 2).expect_err("the second is not");
    assert!(shim.triggered());
    assert!(error.message().ends_with(" cannot be flushed: general error (status 21)"), "{error}");
}
