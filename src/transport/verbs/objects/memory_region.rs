//! Registered memory and the rights to it.
//!
//! Owns registration and deregistration.

use super::bindings::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_RELAXED_ORDERING, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE,
    ibv_mr,
};
use super::handle::VerbsHandle;
use super::library::Library;
use super::mlx5::{DATA_DIRECT, Mlx5};
use super::protection_domain::ProtectionDomain;
use super::verb::{Verb, errno, failed};
use crate::error::Result;
use crate::memory::Piece;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const NOT_SUPPORTED: i32 = rustix::io::Errno::OPNOTSUPP.raw_os_error();

/// The rights to registered memory. The local device may always read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AccessFlags {
    /// Peers may write to it.
    pub remote_write: bool,
    /// RDMA reads may read it, as flushes of GPU memory do.
    pub remote_read: bool,
    /// The device may reorder writes to it (relaxed ordering); the data is complete only with the completion.
    pub relaxed: bool,
}

impl AccessFlags {
    /// Send-only: the local device reads it, and nothing else has access.
    pub(crate) const SEND: Self = Self { remote_write: false, remote_read: false, relaxed: false };

    fn flags(self) -> u32 {
        let mut flags = 0;
        if self.remote_write {
            flags |= IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
        }
        if self.remote_read {
            flags |= IBV_ACCESS_REMOTE_READ;
        }
        if self.relaxed {
            flags |= IBV_ACCESS_RELAXED_ORDERING;
        }
        flags
    }
}

/// Registered memory. While it lives, the device may read it, and peers that have its rkey may access it as
/// its [`AccessFlags`] allow.
pub(crate) struct MemoryRegion {
    handle: VerbsHandle<ibv_mr>,
    lkey: u32,
    rkey: u32,
    pd: Arc<ProtectionDomain>,
}

impl MemoryRegion {
    /// The key for this rank's own work requests.
    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The key for the peers' work requests.
    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Takes ownership of a region that a verb returned; `None` for a null pointer.
    fn from_raw(raw: *mut ibv_mr, library: &'static Library, pd: &Arc<ProtectionDomain>) -> Option<Self> {
        let handle = VerbsHandle::from_raw(raw, library)?;
        // SAFETY: the region was just created, and its keys do not change.
        let (lkey, rkey) = unsafe { ((*raw).lkey, (*raw).rkey) };
        Some(Self { handle, lkey, rkey, pd: Arc::clone(pd) })
    }

    /// A region in a domain without a device.
    fn inert(pd: &Arc<ProtectionDomain>) -> Self {
        Self { handle: VerbsHandle::inert(), lkey: 7, rkey: 7, pd: Arc::clone(pd) }
    }
}

impl ProtectionDomain {
    /// Registers host memory, which must stay mapped while the region lives.
    ///
    /// # Errors
    /// `System` if the kernel cannot pin the memory or the device has no resources for the region.
    pub(crate) fn register(self: &Arc<Self>, piece: Piece, access: AccessFlags) -> Result<MemoryRegion> {
        self.register_address(piece.as_ptr() as u64, piece.len(), access)
            .map_err(|errno| failed(Verb::RegMr, &self.context.site(), errno))
    }

    /// Registers memory by its address: host memory or, with a peer memory module, GPU memory.
    ///
    /// # Errors
    /// The errno; `EFAULT` if there is no memory at this address that the kernel can resolve.
    pub(crate) fn register_address(
        self: &Arc<Self>,
        address: u64,
        len: usize,
        access: AccessFlags,
    ) -> std::result::Result<MemoryRegion, i32> {
        self.with_its_keys(access, |access| {
            if let Some(errno) = self.context.shim.injected_errno(Verb::RegMr) {
                return Err(errno);
            }
            self.context.shim.registered(address, len);
            let Some((raw, library)) = self.raw() else { return Ok(MemoryRegion::inert(self)) };
            let start = address as *mut c_void;
            // SAFETY: the domain is alive. The kernel checks that the range is mapped and pins it, and
            // nothing here accesses it. The caller guarantees that the range stays mapped while the region
            // lives, as the contract of pieces requires.
            let region = unsafe {
                match library.ibv_reg_mr_iova2 {
                    // It removes the optional flag, relaxed ordering, where the driver does not support it.
                    Some(register) => register(raw, start, len, address, access.flags()),
                    None => {
                        let access = AccessFlags { relaxed: false, ..access };
                        (library.ibv_reg_mr)(raw, start, len, access.flags() as i32)
                    }
                }
            };
            MemoryRegion::from_raw(region, library, self).ok_or_else(errno)
        })
    }

    /// Registers memory with these rights, or with relaxed ordering besides where the device has no other
    /// keys, as in some modes of firmware. What is written is read after its completion only.
    fn with_its_keys(
        &self,
        access: AccessFlags,
        register: impl Fn(AccessFlags) -> std::result::Result<MemoryRegion, i32>,
    ) -> std::result::Result<MemoryRegion, i32> {
        match register(access) {
            Err(NOT_SUPPORTED) if !access.relaxed => {
                let region = register(AccessFlags { relaxed: true, ..access })?;
                self.has_relaxed_keys_only.store(true, Ordering::Relaxed);
                Ok(region)
            }
            outcome => outcome,
        }
    }

    /// Whether the adapter has Data Direct.
    pub(crate) fn has_data_direct(&self) -> bool {
        match (self.context.raw(), Mlx5::get()) {
            // SAFETY: the context is open.
            (Some((raw, _)), Some(mlx5)) => unsafe { mlx5.has_data_direct(raw) },
            (Some(_), None) => false,
            (None, _) => self.context.shim.has_data_direct(),
        }
    }

    /// Registers `len` bytes from `offset` of a DMA-BUF, under the addresses from `address` on, to be
    /// accessed by Data Direct or not.
    ///
    /// # Errors
    /// The errno, which also shows whether the driver supports DMA-BUFs at all.
    pub(crate) fn register_dmabuf(
        self: &Arc<Self>,
        dmabuf: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        address: u64,
        access: AccessFlags,
        is_direct: bool,
    ) -> std::result::Result<MemoryRegion, i32> {
        self.with_its_keys(access, |access| {
            if let Some(errno) = self.context.shim.injected_errno(Verb::RegDmabufMr) {
                return Err(errno);
            }
            let Some((raw, library)) = self.raw() else { return Ok(MemoryRegion::inert(self)) };
            let (fd, flags) = (dmabuf.as_raw_fd(), access.flags() as i32);
            // SAFETY: the domain is alive; the kernel checks the descriptor and the range.
            let region = unsafe {
                match (library.ibv_reg_dmabuf_mr, Mlx5::get()) {
                    (_, Some(mlx5)) if is_direct => {
                        (mlx5.register_dmabuf)(raw, offset, len, address, fd, flags, DATA_DIRECT)
                    }
                    (Some(register), _) if !is_direct => register(raw, offset, len, address, fd, flags),
                    _ => return Err(NOT_SUPPORTED),
                }
            };
            MemoryRegion::from_raw(region, library, self).ok_or_else(errno)
        })
    }

    /// Finds out whether the driver supports DMA-BUFs, by registering one that does not exist. Returns the
    /// errno. A library without the function answers as such a driver does.
    pub(crate) fn probe_dmabuf(&self) -> i32 {
        if let Some(errno) = self.context.shim.injected_errno(Verb::RegDmabufMr) {
            return errno;
        }
        let found = self.raw().and_then(|(raw, library)| Some((raw, library.ibv_reg_dmabuf_mr?)));
        let Some((raw, register)) = found else { return NOT_SUPPORTED };
        // SAFETY: the domain is alive. The descriptor -1 is refused in any case, so nothing is registered.
        let region = unsafe { register(raw, 0, 4096, 0, -1, 0) };
        debug_assert!(region.is_null(), "a DMA-BUF with the descriptor -1 was registered");
        errno()
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        if let Some((raw, library)) = self.handle.raw() {
            // SAFETY: the region is alive, and so is its domain, which it holds.
            let code = unsafe { (library.ibv_dereg_mr)(raw) };
            if code != 0 {
                let cause = std::io::Error::from_raw_os_error(code);
                log::warn!("cannot deregister memory from {}: {cause}", self.pd.context.name());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::verbs::objects::{Context, Shim};
    use std::os::fd::AsFd;

    /// Counter-example: GPU memory was staged through host memory where firmware has relaxed ordering only.
    #[test]
    fn memory_of_all_kinds_is_registered_where_keys_have_relaxed_ordering_only() {
        let relaxed = AccessFlags { relaxed: true, ..AccessFlags::SEND };
        let mut memory = [0_u8; 8];
        let file = std::fs::File::open("/dev/null").expect("a descriptor");
        for verb in [Verb::RegMr, Verb::RegDmabufMr] {
            for (access, is_registered) in [(AccessFlags::SEND, true), (relaxed, false)] {
                let shim = Shim::failing(verb, 0, NOT_SUPPORTED);
                let pd = ProtectionDomain::new(&Context::inert("inert", shim)).expect("inert");
                let registered = match verb {
                    Verb::RegMr => pd.register_address(memory.as_mut_ptr() as u64, 8, access),
                    _ => pd.register_dmabuf(file.as_fd(), 0, 8, 0, access, false),
                };
                assert_eq!(registered.is_ok(), is_registered, "{verb:?} with {access:?}");
                assert_eq!(pd.has_relaxed_keys_only(), is_registered, "{verb:?}");
            }
        }
    }
}
