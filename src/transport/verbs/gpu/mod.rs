//! GPU memory: how RDMA devices reach it, and when what they wrote there can be read.
//!
//! Owns the way to a range of a GPU's memory and the words for every way that is not open. Must not know kernels,
//! streams, links or messages. The host never touches memory of a GPU: here it is an address with a length.
//!
//! | file | owns |
//! |---|---|
//! | `gdr_mode` | which way is taken: pure |
//! | `register` | taking it: ranges of GPU memory, registered |
//! | `cuda` | what CUDA's driver answers, if there is one |
//! | `flush` | making sure that what a device wrote has arrived |

pub mod gdr_mode;

#[cfg(all(feature = "verbs", feature = "cuda"))]
mod cuda;
#[cfg(feature = "verbs")]
mod flush;
#[cfg(feature = "verbs")]
mod register;
#[cfg(all(test, feature = "verbs"))]
mod tests;

#[cfg(feature = "verbs")]
pub(super) use flush::{FlushQueue, Flusher};
#[cfg(feature = "verbs")]
pub(super) use register::{AddressRange, GpuRegistrar};

/// Whether CUDA's driver exports the memory of every GPU that this process sees as DMA-BUFs, as it says itself.
///
/// # Errors
/// Why not, be it that there is no driver.
#[cfg(all(feature = "verbs", feature = "cuda"))]
pub fn exports() -> Result<(), gdr_mode::GdrUnavailable> {
    use register::GpuDriver;
    let cuda = cuda::CudaQueries::open().map_err(gdr_mode::GdrUnavailable::new)?;
    let count = cuda.count().map_err(gdr_mode::GdrUnavailable::new)?;
    (0..count).try_for_each(|gpu| cuda.exports(gpu))
}
