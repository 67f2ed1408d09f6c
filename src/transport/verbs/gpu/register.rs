//! Ranges of GPU memory, registered by the best rung of the ladder that can be had.
//!
//! Owns what of this is not decision: aligning, exporting, registering, and saying each step down once. Must not know
//! what keeps the regions, nor for how long.

use super::flush::{WriteOrdering, needs_flush};
use super::gdr_mode::{self, DmabufError, GdrMode, GdrRegistration, GdrSupport, GdrTarget, GdrUnavailable};
use crate::config::GpuDirect;
use crate::error::{Error, Result as OrError};
use crate::memory::Piece;
use crate::transport::verbs::objects::{AccessFlags, MemoryRegion, ProtectionDomain};
use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

/// A range of addresses on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::transport::verbs) struct AddressRange {
    pub address: u64,
    pub len: usize,
}

impl AddressRange {
    /// Where a piece is.
    pub(in crate::transport::verbs) fn of(piece: Piece) -> Self {
        Self { address: piece.as_ptr() as u64, len: piece.len() }
    }

    /// The pages of the host's size that it touches, since only such are exported, and where it begins in them.
    ///
    /// Memory of GPUs is allocated in larger pages than any host has, so what lies around a range is memory of the same
    /// allocation or of none; and only the range itself is registered afterwards.
    fn pages(self, page: usize) -> Option<(Self, u64)> {
        let page = page as u64;
        let start = self.address / page * page;
        let end = self.address.checked_add(self.len as u64)?.checked_next_multiple_of(page)?;
        let pages = Self { address: start, len: usize::try_from(end - start).ok()? };
        Some((pages, self.address - start))
    }
}

/// What the driver of GPUs is asked.
pub(super) trait GpuDriver: Send + Sync {
    /// The number of the GPU whose memory is at this address.
    fn gpu_of(&self, address: u64) -> Result<usize, String>;

    /// Has synchronous copies of this memory be over when their call returns, whatever else they could return before: a
    /// device that reads it next does not wait for the GPU.
    fn synchronize(&self, address: u64);

    /// Whether it exports memory of this GPU as DMA-BUFs.
    fn exports(&self, gpu: usize) -> Result<(), GdrUnavailable>;

    /// Exports whole pages of the host's size.
    fn export(&self, pages: AddressRange) -> Result<OwnedFd, String>;

    /// How this GPU sees what other devices write to it.
    fn writes(&self, gpu: usize) -> Result<WriteOrdering, String>;
}

/// The driver where there is none.
struct NoGpuDriver(String);

impl GpuDriver for NoGpuDriver {
    fn gpu_of(&self, _address: u64) -> Result<usize, String> {
        Err(self.0.clone())
    }

    fn synchronize(&self, _address: u64) {}

    fn exports(&self, _gpu: usize) -> Result<(), GdrUnavailable> {
        Err(GdrUnavailable::new(&self.0))
    }

    fn export(&self, _pages: AddressRange) -> Result<OwnedFd, String> {
        Err(self.0.clone())
    }

    fn writes(&self, _gpu: usize) -> Result<WriteOrdering, String> {
        Err(self.0.clone())
    }
}

/// The GPUs of this process, as RDMA devices see them.
pub(in crate::transport::verbs) struct GpuRegistrar {
    asked: GpuDirect,
    driver: Box<dyn GpuDriver>,
    /// What has been said already.
    told: Mutex<BTreeSet<String>>,
}

impl GpuRegistrar {
    /// The GPUs that CUDA's driver knows, if there is one.
    pub(in crate::transport::verbs) fn new(asked: GpuDirect) -> Self {
        #[cfg(feature = "cuda")]
        let driver: Box<dyn GpuDriver> = match super::cuda::CudaQueries::open() {
            Ok(cuda) => Box::new(cuda),
            Err(why) => Box::new(NoGpuDriver(why)),
        };
        #[cfg(not(feature = "cuda"))]
        let driver = Box::new(NoGpuDriver("this build has no CUDA".to_owned()));
        Self::of(asked, driver)
    }

    pub(super) fn of(asked: GpuDirect, driver: Box<dyn GpuDriver>) -> Self {
        Self { asked, driver, told: Mutex::default() }
    }

    /// Registers a range at all rails, each by the best rung that it can be had by there. The rung that is returned is
    /// the worst of these; if that is [`GdrMode::HostStaging`] there are no regions, as a message may take any rail, so memory
    /// that one of them cannot reach is copied for all.
    ///
    /// # Errors
    /// `InvalidArgument` if this is not a GPU's memory; `Unsupported` if the setting names a rung that cannot be had.
    pub(in crate::transport::verbs) fn register(
        &self,
        pds: &[Arc<ProtectionDomain>],
        span: AddressRange,
        access: AccessFlags,
    ) -> OrError<(GdrMode, Vec<MemoryRegion>)> {
        let invalid = |why: &str| {
            let AddressRange { address, len } = span;
            let words = format!("the {len} bytes at {address:#x} are no memory of a GPU: {why}");
            Error::invalid_argument(words)
        };
        let (pages, offset) = span
            .pages(rustix::param::page_size())
            .filter(|_| span.len > 0)
            .ok_or_else(|| invalid("no memory lies there"))?;
        let gpu = self.driver.gpu_of(span.address).map_err(|why| invalid(&why))?;
        self.driver.synchronize(span.address);
        let exported = OnceCell::new();
        let mut worst = None;
        let mut regions = Vec::new();
        for pd in pds {
            let attempt =
                RailTarget { gpus: self, gpu, pd, span, pages, offset, access, exported: &exported };
            let device = pd.context().name();
            let taken = gdr_mode::register(self.asked, &attempt)
                .map_err(|error| error.context(format_args!("GPU {gpu} and {device}")))?;
            for new_warnings in self.new_warnings(gpu, device, &taken) {
                log::warn!("{new_warnings}");
            }
            worst = worst.max(Some(taken.mode));
            regions.extend(taken.region);
        }
        let mode = worst.unwrap_or(GdrMode::HostStaging);
        if mode == GdrMode::HostStaging {
            regions.clear();
        }
        Ok((mode, regions))
    }

    /// Whether the GPU that this memory is of must not read what devices wrote there before a flush.
    ///
    /// # Errors
    /// `InvalidArgument` if it is of none.
    pub(in crate::transport::verbs) fn needs_flush(&self, span: AddressRange) -> OrError<bool> {
        let writes = self.driver.gpu_of(span.address).and_then(|gpu| self.driver.writes(gpu));
        writes.map(needs_flush).map_err(|words| Error::invalid_argument(words))
    }

    /// What there is to say of a way down that has not been said before.
    pub(super) fn new_warnings<R>(
        &self,
        gpu: usize,
        device: &str,
        taken: &GdrRegistration<R>,
    ) -> Vec<String> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let mut new_warnings = Vec::new();
        for rejected in taken.rejected.iter().filter(|rejected| !rejected.reason.by_setting) {
            let (way, why) = (rejected.mode.name(), rejected.reason.sentence());
            let words = format!("{device} does not reach memory of GPU {gpu} by {way}: {why}");
            if told.insert(words.clone()) {
                new_warnings.push(words);
            }
        }
        new_warnings
    }
}

/// One range at one rail.
struct RailTarget<'a> {
    gpus: &'a GpuRegistrar,
    gpu: usize,
    pd: &'a Arc<ProtectionDomain>,
    span: AddressRange,
    pages: AddressRange,
    offset: u64,
    access: AccessFlags,
    /// Exported once for all rails, when the first one needs it. Regions keep the DMA-BUF themselves.
    exported: &'a OnceCell<Result<OwnedFd, String>>,
}

impl GdrSupport for RailTarget<'_> {
    fn exports_dmabuf(&self) -> Result<(), GdrUnavailable> {
        self.gpus.driver.exports(self.gpu)
    }

    fn nic_imports_dmabuf(&self) -> Result<(), GdrUnavailable> {
        gdr_mode::dmabuf_support(self.pd.context().name(), self.pd.probe_dmabuf())
    }

    fn nic_supports_peermem(&self) -> Result<(), GdrUnavailable> {
        // There is no way to know but to try.
        Ok(())
    }
}

impl GdrTarget for RailTarget<'_> {
    type Registered = MemoryRegion;

    fn register_dmabuf(&self) -> Result<MemoryRegion, DmabufError> {
        let exported = self.exported.get_or_init(|| self.gpus.driver.export(self.pages));
        let dmabuf = exported.as_ref().map_err(|words| DmabufError::Export(words.clone()))?;
        let AddressRange { address, len } = self.span;
        self.pd
            .register_dmabuf(dmabuf.as_fd(), self.offset, len, address, self.access)
            .map_err(DmabufError::Register)
    }

    fn register_peermem(&self) -> Result<MemoryRegion, i32> {
        self.pd.register_address(self.span.address, self.span.len, self.access)
    }
}
