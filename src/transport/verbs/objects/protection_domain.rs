//! A protection domain and the memory that is registered in it.

use super::Handle;
use super::context::Context;
use super::verb::{Verb, errno, failed};
use crate::error::Result;
use crate::memory::Piece;
use rdma_sys::{
    ibv_access_flags, ibv_alloc_pd, ibv_dealloc_pd, ibv_dereg_mr, ibv_mr, ibv_pd, ibv_reg_dmabuf_mr,
    ibv_reg_mr_iova2,
};
use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

/// A protection domain: what is registered here can be reached through this device's queue pairs only.
pub(crate) struct ProtectionDomain {
    handle: Handle<ibv_pd>,
    pub(super) context: Arc<Context>,
}

/// What may be done with registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AccessFlags {
    /// Peers may write it. Else this rank may only send from it.
    pub remote_write: bool,
    /// It may be read from afar, as flushes of GPU memory do.
    pub remote_read: bool,
    /// The device may carry out writes to it in another order than they came; only their completion tells.
    pub relaxed: bool,
}

impl AccessFlags {
    /// This rank may send from it, and nobody may write it.
    pub(crate) const SEND: Self = Self { remote_write: false, remote_read: false, relaxed: false };

    fn flags(self) -> u32 {
        let mut flags = 0;
        if self.remote_write {
            flags |= ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0 | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        }
        if self.remote_read {
            flags |= ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;
        }
        if self.relaxed {
            // One of the optional flags: libibverbs takes it away where the driver does not know it.
            flags |= ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0;
        }
        flags
    }
}

impl ProtectionDomain {
    /// A new domain.
    ///
    /// # Errors
    /// `System` if the device has none left.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        let refused = |errno| failed(Verb::AllocPd, &context.site(), errno);
        if let Some(errno) = context.shim.injected_errno(Verb::AllocPd) {
            return Err(refused(errno));
        }
        let handle = match context.raw() {
            // SAFETY: the context is open.
            Some(raw) => Handle::returned(unsafe { ibv_alloc_pd(raw) }).ok_or_else(|| refused(errno()))?,
            None => Handle(None),
        };
        Ok(Arc::new(Self { handle, context: Arc::clone(context) }))
    }

    pub(super) fn raw(&self) -> Option<*mut ibv_pd> {
        self.handle.raw()
    }

    /// The device.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Registers a stretch of memory, which must stay mapped for as long as the region lives.
    ///
    /// # Errors
    /// `System` if the kernel cannot pin it or the device has no room for it.
    pub(crate) fn register(self: &Arc<Self>, piece: Piece, access: AccessFlags) -> Result<MemoryRegion> {
        self.register_address(piece.as_ptr() as u64, piece.len(), access)
            .map_err(|errno| failed(Verb::RegMr, &self.context.site(), errno))
    }

    /// Registers what lies at an address, be it of the host or, with peer memory, of a GPU.
    ///
    /// # Errors
    /// The errno: `EFAULT` if no memory that the kernel knows of lies there.
    pub(crate) fn register_address(
        self: &Arc<Self>,
        address: u64,
        len: usize,
        access: AccessFlags,
    ) -> std::result::Result<MemoryRegion, i32> {
        if let Some(errno) = self.context.shim.injected_errno(Verb::RegMr) {
            return Err(errno);
        }
        let Some(raw) = self.raw() else {
            return Ok(MemoryRegion { handle: Handle(None), lkey: 7, rkey: 7, pd: Arc::clone(self) });
        };
        let start = address as *mut c_void;
        // SAFETY: the domain is alive. The kernel checks that the range is mapped and pins it, and nothing here touches
        // it; the caller promises that it stays what it is while the region lives, as the contract of pieces says.
        let region = unsafe { ibv_reg_mr_iova2(raw, start, len, address, access.flags()) };
        self.own(region).ok_or_else(errno)
    }

    /// Registers `len` bytes from `offset` of a dmabuf, under the addresses from `address` on.
    ///
    /// # Errors
    /// `System`; its errno tells whether the driver knows dmabufs at all.
    pub(crate) fn register_dmabuf(
        self: &Arc<Self>,
        dmabuf: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        address: u64,
        access: AccessFlags,
    ) -> std::result::Result<MemoryRegion, i32> {
        if let Some(errno) = self.context.shim.injected_errno(Verb::RegDmabufMr) {
            return Err(errno);
        }
        let Some(raw) = self.raw() else {
            return Ok(MemoryRegion { handle: Handle(None), lkey: 7, rkey: 7, pd: Arc::clone(self) });
        };
        let flags = access.flags() as i32;
        // SAFETY: the domain is alive; the kernel checks the descriptor and the range.
        let region = unsafe { ibv_reg_dmabuf_mr(raw, offset, len, address, dmabuf.as_raw_fd(), flags) };
        self.own(region).ok_or_else(errno)
    }

    /// Asks whether the driver could register a dmabuf: it is given none, and answers with an errno.
    pub(crate) fn probe_dmabuf(&self) -> i32 {
        match (self.raw(), self.context.shim.injected_errno(Verb::RegDmabufMr)) {
            (_, Some(errno)) => errno,
            (None, _) => rustix::io::Errno::OPNOTSUPP.raw_os_error(),
            (Some(raw), None) => {
                // SAFETY: the domain is alive. A descriptor of -1 is refused whatever else is asked.
                let region = unsafe { ibv_reg_dmabuf_mr(raw, 0, 4096, 0, -1, 0) };
                debug_assert!(region.is_null(), "there is no dmabuf -1");
                errno()
            }
        }
    }

    fn own(self: &Arc<Self>, region: *mut ibv_mr) -> Option<MemoryRegion> {
        let handle = Handle::returned(region)?;
        // SAFETY: the region was just made, and its keys do not change.
        let (lkey, rkey) = unsafe { ((*region).lkey, (*region).rkey) };
        Some(MemoryRegion { handle, lkey, rkey, pd: Arc::clone(self) })
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        if let Some(raw) = self.raw() {
            // SAFETY: all that was made in the domain holds an Arc of it, so none of it lives.
            let code = unsafe { ibv_dealloc_pd(raw) };
            if code != 0 {
                let cause = std::io::Error::from_raw_os_error(code);
                log::warn!("cannot free a protection domain of {}: {cause}", self.context.name());
            }
        }
    }
}

/// Registered memory. While it lives the device may read it, and peers that know its key may write it if they
/// were given that right.
pub(crate) struct MemoryRegion {
    handle: Handle<ibv_mr>,
    lkey: u32,
    rkey: u32,
    pd: Arc<ProtectionDomain>,
}

impl MemoryRegion {
    /// The key by which this rank's own requests name it.
    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The key by which peers' requests name it.
    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        if let Some(raw) = self.handle.raw() {
            // SAFETY: the region is alive; its domain is too, as this holds it.
            let code = unsafe { ibv_dereg_mr(raw) };
            if code != 0 {
                let cause = std::io::Error::from_raw_os_error(code);
                log::warn!("cannot deregister memory from {}: {cause}", self.pd.context.name());
            }
        }
    }
}
