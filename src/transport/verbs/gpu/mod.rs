//! GPU memory: how RDMA devices reach it, and when data that they wrote there is visible.
//!
//! Owns the GDR mode (GPUDirect RDMA) of every range of GPU memory, and the flush after writes to it. The
//! host never accesses GPU memory: here it is an address with a length.
//!
//! | file | owns |
//! |---|---|
//! | `gdr_mode` | the choice of the GDR mode: pure |
//! | `write_ordering` | whether a GPU needs a flush: pure |
//! | `driver` | the queries to the GPU driver, as a trait |
//! | `cuda` | the CUDA driver's answers |
//! | `register` | registering ranges of GPU memory by the chosen mode |
//! | `loopback` | the trial whether a device reaches a GPU's memory |
//! | `flush` | waiting until data that a device wrote has arrived; `order_model` has the evidence |

pub mod gdr_mode;

#[cfg(all(feature = "verbs", feature = "cuda"))]
mod cuda;
#[cfg(feature = "verbs")]
mod driver;
#[cfg(feature = "verbs")]
mod flush;
#[cfg(feature = "verbs")]
mod loopback;
#[cfg(all(test, feature = "verbs"))]
mod order_model;
#[cfg(feature = "verbs")]
mod register;
#[cfg(all(test, feature = "verbs"))]
mod tests;
#[cfg(feature = "verbs")]
mod write_ordering;

#[cfg(feature = "verbs")]
pub(super) use driver::AddressRange;
#[cfg(feature = "verbs")]
pub(super) use flush::{FlushQueue, Flusher};
#[cfg(feature = "verbs")]
pub(super) use loopback::GpuTrials;
#[cfg(feature = "verbs")]
pub(super) use register::{GpuRegistrar, LandingMemory};

/// Whether the CUDA driver exports the memory of every GPU that this process sees as DMA-BUFs.
///
/// # Errors
/// The reason why not, including that there is no driver.
#[cfg(all(feature = "verbs", feature = "cuda"))]
pub fn exports() -> Result<(), gdr_mode::GdrUnavailable> {
    use driver::GpuDriver;
    let cuda = cuda::CudaQueries::open().map_err(gdr_mode::GdrUnavailable::new)?;
    let count = cuda.count().map_err(gdr_mode::GdrUnavailable::new)?;
    (0..count).try_for_each(|gpu| cuda.exports_dmabuf(gpu))
}
