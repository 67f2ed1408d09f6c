//! GPU memory that programs map by themselves: physical allocations (`cuMemCreate`) at addresses of their
//! choice (`cuMemMap`), as PyTorch does with `expandable_segments` and NCCL in `ncclMemAlloc`.
//!
//! Owns which physical allocations are behind a range, and how other processes map them. Must not know how
//! descriptors get there.

use super::objects::{Gpu, log_failure};
use crate::cuda_driver::{Address, AllocationProperties, MemoryAccess, MemoryLocation, PhysicalHandle};
use crate::descriptor::above_standard;
use crate::error::{Error, Result};
use rustix::io::{FdFlags, fcntl_setfd};
use std::ffi::{c_int, c_uint, c_void};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: c_uint = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_GPU: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_AND_WRITE: c_uint = 3;

/// A reference to a physical allocation. While there is one, no other allocation gets its handle.
#[derive(Debug)]
struct Physical {
    gpu: Arc<Gpu>,
    handle: PhysicalHandle,
}

impl Physical {
    /// What is mapped at this address of this process.
    fn at(gpu: &Arc<Gpu>, at: Address) -> Result<Self> {
        let mut handle = 0;
        // SAFETY: the out-parameter is writable; the address is only looked up.
        unsafe { gpu.driver().physical_retain(&raw mut handle, at as *mut c_void)? };
        Ok(Self { gpu: Arc::clone(gpu), handle })
    }

    fn import(gpu: &Arc<Gpu>, descriptor: &OwnedFd) -> Result<Self> {
        let mut handle = 0;
        let number = descriptor.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the out-parameter is writable; the driver checks the descriptor.
        unsafe { gpu.driver().physical_import(&raw mut handle, number, DESCRIPTOR)? };
        Ok(Self { gpu: Arc::clone(gpu), handle })
    }

    fn export(&self) -> Result<OwnedFd> {
        let driver = self.gpu.driver();
        let mut properties = AllocationProperties::default();
        // SAFETY: the out-parameter is writable, and the handle is live.
        unsafe { driver.physical_properties(&raw mut properties, self.handle)? };
        if properties.handle_types & DESCRIPTOR == 0 {
            return Err(Error::unsupported(
                "they were allocated without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR (fix: request it in cuMemCreate)",
            ));
        }
        let mut number: c_int = -1;
        // SAFETY: as above; for this type the driver writes an int.
        unsafe { driver.physical_export((&raw mut number).cast(), self.handle, DESCRIPTOR, 0)? };
        if number < 0 {
            return Err(Error::unsupported("the driver returned no descriptor"));
        }
        // SAFETY: it is a new descriptor, which is owned here.
        let exported = unsafe { OwnedFd::from_raw_fd(number) };
        let kept = above_standard(exported).and_then(|exported| {
            // CUDA does not say that a program which the process starts does not inherit it.
            fcntl_setfd(&exported, FdFlags::CLOEXEC)?;
            Ok(exported)
        });
        kept.map_err(|cause| Error::io("cannot keep the descriptor of memory", cause))
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: the reference is owned, and dropped once.
        log_failure(unsafe { self.gpu.driver().physical_release(self.handle) });
    }
}

/// A physical allocation, and where this process has mapped it.
#[derive(Debug)]
struct MappedPart {
    start: Address,
    bytes: usize,
    memory: Physical,
}

impl MappedPart {
    fn at(gpu: &Arc<Gpu>, at: Address) -> Result<Self> {
        let (mut start, mut bytes) = (0, 0);
        let memory = Physical::at(gpu, at)?;
        // SAFETY: the out-parameters are writable; the address is only looked up.
        unsafe { gpu.driver().memory_range(&raw mut start, &raw mut bytes, at)? };
        Ok(Self { start, bytes, memory })
    }

    fn end(&self) -> Address {
        self.start + self.bytes as Address
    }

    /// Whether it is still there, and nothing else.
    fn is_mapped(&self) -> bool {
        Self::at(&self.memory.gpu, self.start).is_ok_and(|now| {
            (now.start, now.bytes, now.memory.handle) == (self.start, self.bytes, self.memory.handle)
        })
    }
}

/// Physical allocations that the program has mapped side by side. They are not freed before this is dropped.
#[derive(Debug)]
pub(crate) struct MappedParts(Vec<MappedPart>);

impl MappedParts {
    /// Those behind these addresses.
    ///
    /// # Errors
    /// `System` if a part is no memory that was mapped.
    pub(super) fn of(gpu: &Arc<Gpu>, range: &Range<Address>) -> Result<Self> {
        let _entered = gpu.enter()?;
        let mut parts: Vec<MappedPart> = Vec::new();
        while parts.last().is_none_or(|last| last.end() < range.end) {
            let at = parts.last().map_or(range.start, MappedPart::end);
            let part = MappedPart::at(gpu, at)?;
            let begins = if parts.is_empty() { part.start <= at } else { part.start == at };
            if !begins || part.end() <= at {
                return Err(Error::internal(format!("the driver says that {part:?} is mapped at {at:#x}")));
            }
            parts.push(part);
        }
        Ok(Self(parts))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Their addresses.
    pub(super) fn range(&self) -> Range<Address> {
        self.0.first().map_or(0, |first| first.start)..self.0.last().map_or(0, MappedPart::end)
    }

    /// Whether those behind these addresses are still mapped there: they were neither unmapped nor replaced.
    pub(super) fn are_mapped(&self, gpu: &Gpu, range: &Range<Address>) -> bool {
        let Ok(_entered) = gpu.enter() else { return false };
        let mut touched = self.0.iter().filter(|part| part.start < range.end && range.start < part.end());
        touched.all(MappedPart::is_mapped)
    }

    /// A descriptor of each, and its length.
    ///
    /// # Errors
    /// `Unsupported` if they were allocated without support for that; `System` if the driver fails.
    pub(super) fn export(&self) -> Result<Vec<(u64, OwnedFd)>> {
        self.0.iter().map(|part| Ok((part.bytes as u64, part.memory.export()?))).collect()
    }
}

/// Physical allocations of another process, mapped side by side for this GPU's kernels. Dropped without
/// [`close`](Self::close), they stay mapped.
#[derive(Debug)]
pub(crate) struct ImportedParts {
    gpu: Arc<Gpu>,
    start: Address,
    bytes: usize,
    /// What is mapped: offsets and lengths.
    mapped: Vec<(usize, usize)>,
}

impl ImportedParts {
    /// Maps allocations that were exported, given their lengths. May wait for the GPU.
    ///
    /// # Errors
    /// `System` if the driver refuses.
    pub(crate) fn new(gpu: &Arc<Gpu>, parts: &[(u64, OwnedFd)]) -> Result<Self> {
        let mut lengths = parts.iter().map(|(bytes, _)| usize::try_from(*bytes).ok());
        let bytes = lengths.try_fold(0usize, |sum, bytes| sum.checked_add(bytes?));
        let bytes = bytes.ok_or_else(|| Error::unsupported("they are longer than any GPU's memory"))?;
        let (_entered, mut start) = (gpu.enter()?, 0);
        // SAFETY: the out-parameter is writable.
        unsafe { gpu.driver().addresses_reserve(&raw mut start, bytes, 0, 0, 0)? };
        let mut memory = Self { gpu: Arc::clone(gpu), start, bytes, mapped: Vec::with_capacity(parts.len()) };
        match memory.map(parts) {
            Ok(()) => Ok(memory),
            Err(error) => {
                memory.close();
                Err(error)
            }
        }
    }

    /// Maps all in the addresses, which are reserved. The context is current.
    fn map(&mut self, parts: &[(u64, OwnedFd)]) -> Result<()> {
        let (driver, mut offset) = (self.gpu.driver(), 0);
        for (bytes, descriptor) in parts {
            let (physical, bytes) = (Physical::import(&self.gpu, descriptor)?, *bytes as usize);
            // SAFETY: the addresses are reserved, and nothing is mapped there. The driver checks the length.
            unsafe { driver.memory_map(self.start + offset as Address, bytes, 0, physical.handle, 0)? };
            self.mapped.push((offset, bytes));
            offset += bytes;
        }
        let location = MemoryLocation { kind: ON_GPU, id: self.gpu.ordinal as c_int };
        let access = MemoryAccess { location, flags: READ_AND_WRITE };
        // SAFETY: all of it is mapped, and the description is read.
        unsafe { Ok(driver.memory_access(self.start, self.bytes, &raw const access, 1)?) }
    }

    /// Where this process has them.
    pub(crate) fn start(&self) -> Address {
        self.start
    }

    /// Unmaps all, when no kernel accesses it any more. May wait for the GPU. `false` if the driver refuses.
    pub(crate) fn close(self) -> bool {
        let closed = self.gpu.enter().and_then(|_entered| {
            let driver = self.gpu.driver();
            for (offset, bytes) in &self.mapped {
                // SAFETY: it was mapped with this length. The host has no reference to the memory; a kernel
                // that accesses it would break the GPU's context, and nothing else.
                unsafe { driver.memory_unmap(self.start + *offset as Address, *bytes)? };
            }
            // SAFETY: it was reserved with this length, and nothing is mapped there.
            unsafe { driver.addresses_free(self.start, self.bytes) }
        });
        let is_closed = closed.is_ok();
        log_failure(closed);
        is_closed
    }
}
