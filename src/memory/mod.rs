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

/// Whether there is memory at an address that this process can read. Drivers reserve addresses for GPUs without any access,
/// and keep them when the memory is freed, so that something is mapped there says nothing.
pub(crate) fn is_readable(at: *const u8) -> bool {
    const SET: usize = 8;
    let word = at.map_addr(|address| address / SET * SET);
    // SAFETY: the kernel reads the set, or says that it cannot; then it refuses the first argument, and does nothing.
    let told = unsafe { libc::syscall(libc::SYS_rt_sigprocmask, -1, word, std::ptr::null_mut::<u8>(), SET) };
    told == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
}

/// What names a rank's memory on a GPU to its neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// A number that the process drew which has it. Process ids will not do: containers of a node may have the same ones.
    pub process: u64,
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

    /// Closes all that was opened, which no job reads any more. `false` if something stays open until the process ends.
    fn close(&mut self) -> bool;

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
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    #[test]
    fn memory_without_access_is_not_readable() {
        let page = rustix::param::page_size();
        for (access, readable) in [(ProtFlags::READ, true), (ProtFlags::empty(), false)] {
            // SAFETY: it is memory of its own, which nobody reads but the kernel.
            let start = unsafe { mmap_anonymous(std::ptr::null_mut(), page, access, MapFlags::PRIVATE) };
            let start = start.expect("memory");
            assert_eq!(is_readable(start.cast()), readable);
            assert_eq!(is_readable(start.cast::<u8>().wrapping_add(page - 1)), readable);
            // SAFETY: nobody uses it.
            unsafe { munmap(start, page) }.expect("memory");
        }
        assert!(!is_readable(std::ptr::without_provenance(16)));
    }
}
