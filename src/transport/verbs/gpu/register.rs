//! Registers ranges of GPU memory by the best available GDR mode.
//!
//! Owns exporting and registering, and the warning for each mode that is not available.

use super::driver::{AddressRange, GpuDriver, NoGpuDriver};
use super::gdr_mode::{
    self, DmabufError, GdrMode, GdrRegistration, GdrSupport, GdrTarget, GdrUnavailable, RejectedMode,
};
use super::write_ordering::needs_flush;
use crate::config::GpuDirect;
use crate::error::{Error, Result as OrError};
use crate::transport::verbs::objects::{AccessFlags, MemoryRegion, ProtectionDomain};
use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

/// Registers memory of this process's GPUs with RDMA devices.
pub(in crate::transport::verbs) struct GpuRegistrar {
    setting: GpuDirect,
    driver: Arc<dyn GpuDriver>,
    /// The warnings that were logged already.
    warned: Mutex<BTreeSet<String>>,
}

impl GpuRegistrar {
    /// A registrar with CUDA's driver, if there is one. `setting` is `FLEXRING_GPU_DIRECT`.
    pub(in crate::transport::verbs) fn new(setting: GpuDirect) -> Self {
        #[cfg(feature = "cuda")]
        let driver: Arc<dyn GpuDriver> = match super::cuda::CudaQueries::open() {
            Ok(cuda) => Arc::new(cuda),
            Err(why) => Arc::new(NoGpuDriver(why)),
        };
        #[cfg(not(feature = "cuda"))]
        let driver = Arc::new(NoGpuDriver("this build has no CUDA".to_owned()));
        Self::with_driver(setting, driver)
    }

    pub(super) fn with_driver(setting: GpuDirect, driver: Arc<dyn GpuDriver>) -> Self {
        Self { setting, driver, warned: Mutex::default() }
    }

    /// The setting by which modes are chosen.
    pub(in crate::transport::verbs) fn setting(&self) -> GpuDirect {
        self.setting
    }

    /// Registers a range at all rails, at each by its best mode. Returns the worst of these modes and the
    /// regions by rail. If the worst is [`GdrMode::HostStaging`] there are no regions: a message may take any
    /// rail, so memory that one of them cannot reach is staged for all.
    ///
    /// # Errors
    /// `InvalidArgument` if this is not GPU memory; `Unsupported` if the setting requires a mode that is not
    /// available.
    pub(in crate::transport::verbs) fn register(
        &self,
        pds: &[Arc<ProtectionDomain>],
        range: AddressRange,
        access: AccessFlags,
    ) -> OrError<(GdrMode, Vec<MemoryRegion>)> {
        let invalid = |why: &str| {
            let AddressRange { address, len } = range;
            let message = format!("the {len} bytes at {address:#x} are not GPU memory: {why}");
            Error::invalid_argument(message)
        };
        let (pages, offset) = range
            .pages(rustix::param::page_size())
            .filter(|_| range.len > 0)
            .ok_or_else(|| invalid("the range is empty or exceeds the address space"))?;
        let gpu = self.driver.gpu_of(range.address).map_err(|why| invalid(&why))?;
        self.driver.synchronize(range.address);
        let (exported, exported_over_pci) = (OnceCell::new(), OnceCell::new());
        let mut worst = None;
        let mut regions = Vec::new();
        for pd in pds {
            let target = RailTarget {
                registrar: self,
                gpu,
                pd,
                range,
                pages,
                offset,
                access,
                exported: &exported,
                exported_over_pci: &exported_over_pci,
            };
            let device = pd.context().name();
            let registration = gdr_mode::register(self.setting, &target)
                .map_err(|error| error.context(format_args!("GPU {gpu} and {device}")))?;
            for warning in self.new_warnings(gpu, device, &registration) {
                log::warn!("{warning}");
            }
            worst = worst.max(Some(registration.mode));
            regions.extend(registration.region);
        }
        let mode = worst.unwrap_or(GdrMode::HostStaging);
        if mode == GdrMode::HostStaging {
            regions.clear();
        }
        Ok((mode, regions))
    }

    /// Whether the GPU with this memory needs a flush before it reads what the devices of so many rails wrote
    /// to it, or one of them sends it on.
    ///
    /// # Errors
    /// `InvalidArgument` if this is not GPU memory.
    pub(in crate::transport::verbs) fn needs_flush(
        &self,
        range: AddressRange,
        rails: usize,
    ) -> OrError<bool> {
        let writes = self.driver.gpu_of(range.address).and_then(|gpu| self.driver.writes(gpu));
        writes.map(|writes| needs_flush(writes, rails)).map_err(Error::invalid_argument)
    }

    /// Allocates memory on the GPU with this memory, for flushes to read.
    ///
    /// # Errors
    /// `System` if the GPU has none left, or the driver cannot tell its context.
    pub(in crate::transport::verbs) fn allocate_landing(
        &self,
        beside: AddressRange,
    ) -> OrError<LandingMemory> {
        let failed = |why: String| Error::system(format!("cannot allocate {LANDING_BYTES} bytes: {why}"));
        let address = self.driver.allocate_beside(beside.address, LANDING_BYTES).map_err(failed)?;
        let range = AddressRange { address, len: LANDING_BYTES };
        let landing = LandingMemory { range, driver: Arc::clone(&self.driver) };
        let gpu_of = |address| self.driver.gpu_of(address).map_err(failed);
        let (wanted, found) = (gpu_of(beside.address)?, gpu_of(address)?);
        if found != wanted {
            return Err(failed(format!("they would be on GPU {found}, and not on GPU {wanted}")));
        }
        Ok(landing)
    }

    /// The warnings about rejected modes that were not returned before.
    pub(super) fn new_warnings<R>(
        &self,
        gpu: usize,
        device: &str,
        registration: &GdrRegistration<R>,
    ) -> Vec<String> {
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        let mut warnings = Vec::new();
        for rejected in registration.rejected.iter().filter(|rejected| !rejected.reason.by_setting) {
            let RejectedMode { mode, reason } = rejected;
            let warning = format!("{device} cannot access memory of GPU {gpu} by {}: {reason}", mode.name());
            if warned.insert(warning.clone()) {
                warnings.push(warning);
            }
        }
        warnings
    }
}

/// Bytes that are allocated for flushes: a page of the largest size that hosts have, since only whole pages
/// are exported.
const LANDING_BYTES: usize = 64 << 10;

/// Memory of this library on a GPU, freed when it is dropped. Its contents have no meaning.
pub(in crate::transport::verbs) struct LandingMemory {
    range: AddressRange,
    driver: Arc<dyn GpuDriver>,
}

impl LandingMemory {
    /// Where it is.
    pub(in crate::transport::verbs) fn range(&self) -> AddressRange {
        self.range
    }
}

impl Drop for LandingMemory {
    fn drop(&mut self) {
        self.driver.free(self.range.address);
    }
}

/// A range of GPU memory that is to be registered at one rail.
struct RailTarget<'a> {
    registrar: &'a GpuRegistrar,
    gpu: usize,
    pd: &'a Arc<ProtectionDomain>,
    range: AddressRange,
    /// The range extended to whole pages.
    pages: AddressRange,
    /// The offset of the range in the pages, in bytes.
    offset: u64,
    access: AccessFlags,
    /// Exported once for all rails, when the first one needs it. Memory regions keep the DMA-BUF open
    /// themselves.
    exported: &'a OnceCell<Result<OwnedFd, String>>,
    /// As `exported`, over PCI Express where a processor's link is the usual way.
    exported_over_pci: &'a OnceCell<Result<OwnedFd, String>>,
}

impl RailTarget<'_> {
    /// Registers the range as a DMA-BUF, for Data Direct or not.
    fn import(&self, is_direct: bool) -> Result<MemoryRegion, DmabufError> {
        let driver = &self.registrar.driver;
        let over_pci = is_direct && driver.writes(self.gpu).is_ok_and(|writes| writes.coherent);
        let exported = if over_pci { self.exported_over_pci } else { self.exported };
        let exported = exported.get_or_init(|| driver.export(self.range.address, self.pages, over_pci));
        let dmabuf = exported.as_ref().map_err(|message| DmabufError::Export(message.clone()))?;
        let AddressRange { address, len } = self.range;
        self.pd
            .register_dmabuf(dmabuf.as_fd(), self.offset, len, address, self.access, is_direct)
            .map_err(DmabufError::Register)
    }
}

impl GdrSupport for RailTarget<'_> {
    fn exports_dmabuf(&self) -> Result<(), GdrUnavailable> {
        self.registrar.driver.exports_dmabuf(self.gpu)
    }

    fn nic_imports_dmabuf(&self) -> Result<(), GdrUnavailable> {
        gdr_mode::dmabuf_support(self.pd.context().name(), self.pd.probe_dmabuf())
    }

    fn nic_supports_peermem(&self) -> Result<(), GdrUnavailable> {
        // Only registering a range shows it.
        Ok(())
    }
}

impl GdrTarget for RailTarget<'_> {
    type Registered = MemoryRegion;

    fn register_dmabuf(&self) -> Result<MemoryRegion, DmabufError> {
        if self.pd.has_data_direct() {
            match self.import(true) {
                Ok(region) => return Ok(region),
                Err(error) => {
                    let device = self.pd.context().name();
                    log::warn!("verbs: {device} does not use Data Direct for GPU {}: {error:?}", self.gpu);
                }
            }
        }
        self.import(false)
    }

    fn register_peermem(&self) -> Result<MemoryRegion, i32> {
        self.pd.register_address(self.range.address, self.range.len, self.access)
    }
}
