//! The queries to the GPU driver about memory that RDMA devices access.
//!
//! Owns the trait, which CUDA's driver and the tests implement.

use super::gdr_mode::GdrUnavailable;
use super::write_ordering::WriteOrdering;
use crate::memory::Piece;
use std::os::fd::OwnedFd;

/// A range of addresses, on a GPU or the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::transport::verbs) struct AddressRange {
    pub address: u64,
    /// Bytes.
    pub len: usize,
}

impl AddressRange {
    /// The addresses of a piece.
    pub(in crate::transport::verbs) fn of(piece: Piece) -> Self {
        Self { address: piece.as_ptr() as u64, len: piece.len() }
    }

    /// The range extended to whole pages of the host's size, as only these are exported, and the offset of
    /// the range in them.
    ///
    /// GPU memory is allocated in larger pages than any host's, so the extension belongs to the same
    /// allocation or to none. Only the range itself is registered afterwards.
    pub(super) fn pages(self, page: usize) -> Option<(Self, u64)> {
        let page = page as u64;
        let start = self.address / page * page;
        let end = self.address.checked_add(self.len as u64)?.checked_next_multiple_of(page)?;
        let pages = Self { address: start, len: usize::try_from(end - start).ok()? };
        Some((pages, self.address - start))
    }
}

/// A GPU driver. Errors are texts for messages.
pub(super) trait GpuDriver: Send + Sync {
    /// The number of the GPU whose memory is at this address.
    fn gpu_of(&self, address: u64) -> Result<usize, String>;

    /// Makes synchronous copies of this memory complete before their call returns. Some return earlier by
    /// default, and an RDMA device that reads the memory next does not wait for the GPU.
    fn synchronize(&self, address: u64);

    /// Whether the driver exports memory of this GPU as DMA-BUFs.
    fn exports_dmabuf(&self, gpu: usize) -> Result<(), GdrUnavailable>;

    /// Exports whole pages of the host's size as a DMA-BUF, with memory at `address` within the first. Where
    /// a processor's link is the GPU's usual way, `over_pci` asks for PCI Express instead.
    fn export(&self, address: u64, pages: AddressRange, over_pci: bool) -> Result<OwnedFd, String>;

    /// Allocates memory of the GPU whose memory is at `address`, and returns where it is.
    fn allocate_beside(&self, address: u64, len: usize) -> Result<u64, String>;

    /// Frees what [`allocate_beside`](Self::allocate_beside) returned. No device may access it any more.
    fn free(&self, address: u64);

    /// The order in which this GPU sees the writes of other devices.
    fn writes(&self, gpu: usize) -> Result<WriteOrdering, String>;
}

/// Stands in if there is no GPU driver; every query fails with this text.
pub(super) struct NoGpuDriver(pub String);

impl GpuDriver for NoGpuDriver {
    fn gpu_of(&self, _address: u64) -> Result<usize, String> {
        Err(self.0.clone())
    }

    fn synchronize(&self, _address: u64) {}

    fn exports_dmabuf(&self, _gpu: usize) -> Result<(), GdrUnavailable> {
        Err(GdrUnavailable::new(&self.0))
    }

    fn export(&self, _address: u64, _pages: AddressRange, _over_pci: bool) -> Result<OwnedFd, String> {
        Err(self.0.clone())
    }

    fn allocate_beside(&self, _address: u64, _len: usize) -> Result<u64, String> {
        Err(self.0.clone())
    }

    fn free(&self, _address: u64) {}

    fn writes(&self, _gpu: usize) -> Result<WriteOrdering, String> {
        Err(self.0.clone())
    }
}
