//! Memory: who may touch which bytes, and from where.
//!
//! Owns the arena (a rank's memory that peers on the node can read), the buffers that users take from it, and
//! the [`Piece`] that everything below the communicator is handed instead of a raw pointer. Must not know
//! ranks' programs or what the bytes mean.

mod arena;
mod buffer;
mod piece;

pub use arena::{Arena, PeerArena};
pub use buffer::Buffer;
pub use piece::{Memory, Piece};
pub(crate) use piece::{lend, lend_in_place};

use crate::error::Result;

/// Whether there is memory at an address that this process can read. Addresses that CUDA's driver keeps for GPUs are mapped,
/// and cannot be read.
pub(crate) fn is_readable(at: *const u8) -> bool {
    const NO_SUCH_CHANGE: libc::c_long = -1;
    // What is asked for is no change of the signal mask, which the kernel notices when it has read the mask, or failed to.
    const MASK: usize = 8;
    let start = at.map_addr(|address| address / MASK * MASK);
    // SAFETY: the address is the kernel's to read, which fails where there is no memory, and nothing is written.
    let told = unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, NO_SUCH_CHANGE, start, std::ptr::null_mut::<u8>(), MASK)
    };
    told == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
}

/// What names a rank's memory on a GPU to its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// The process that has it.
    pub process: u32,
    /// The number of the GPU among those that this process sees, and where it has the memory.
    pub gpu: u32,
    /// As above.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// What other processes open it by.
    pub handle: [u64; 8],
}

/// Memory on a GPU that neighbours may read, and theirs, which this rank may read.
pub trait Sharing: Send {
    /// What is shared with the neighbours. They read it for as long as this lives.
    fn own(&self) -> Piece;

    /// How it is named to them.
    fn export(&self) -> Export;

    /// Opens a neighbour's, for as long as this lives.
    ///
    /// # Errors
    /// `Unsupported` if this process cannot reach it.
    fn open(&mut self, export: &Export) -> Result<Piece>;

    /// Closes all that was opened. No job reads it any more.
    fn close(&mut self);

    /// Leaves the memory to the end of the process, because there are neighbours that may still have it open.
    fn abandon(&mut self);
}

/// Something that devices must be told of memory that they shall reach.
pub trait Registrar: Send + Sync {
    /// Registers memory until it is deregistered as often. It must stay what it is until then.
    ///
    /// # Errors
    /// `System` if the system or a device refuses.
    fn register(&self, piece: Piece) -> Result<()>;

    /// Takes one registration of exactly this memory back. Operations under way keep it until they are over.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not registered.
    fn deregister(&self, piece: Piece) -> Result<()>;

    /// Registers memory that is usable without, only slower; a refusal is told in the log.
    fn tell(&self, piece: Piece) {
        if let Err(error) = self.register(piece) {
            log::warn!("{} bytes are not registered and move more slowly: {}", piece.len(), error.message());
        }
    }

    /// Takes back what [`tell`](Self::tell) did.
    fn forget(&self, piece: Piece) {
        if let Err(error) = self.deregister(piece) {
            log::debug!("{} bytes were not registered: {}", piece.len(), error.message());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::is_readable;

    #[test]
    fn what_can_be_read_is_told_from_what_is_only_mapped() {
        let page = rustix::param::page_size();
        let map = memmap2::MmapOptions::new().len(2 * page).map_anon().expect("memory").make_read_only();
        let map = map.expect("memory");
        assert!(is_readable(map.as_ptr()) && is_readable(map[2 * page - 1..].as_ptr()));
        // SAFETY: nothing is in the second page, and nobody reads it any more.
        let told = unsafe {
            rustix::mm::mprotect(
                map[page..].as_ptr().cast_mut().cast(),
                page,
                rustix::mm::MprotectFlags::empty(),
            )
        };
        told.expect("it is ours");
        assert!(is_readable(map[page - 1..].as_ptr()) && !is_readable(map.as_ptr().wrapping_add(page)));
        assert!(!is_readable(std::ptr::null()) && !is_readable(usize::MAX as *const u8));
    }
}
