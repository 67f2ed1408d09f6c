//! NVIDIA GPUs: reductions by flexring's own kernels, copies, and calls that take effect in streams.
//!
//! Owns all work on a GPU. Must not know ranks, links or schedules, nor how the driver is opened: that is `cuda_driver`.
//!
//! | file | owns |
//! |---|---|
//! | `objects` | what the driver makes, each with its owner |
//! | `image`, `nvrtc` | the kernels' machine code, or their source and its compiler |
//! | `batch` | what a launch is told |
//! | `device` | the device: which stream does which job |
//! | `found` | which GPUs there are |
//! | `buffer` | vectors that users keep on a GPU, and parts of them |
//! | `vector` | vectors that calls take |
//! | `ipc` | memory between the processes of a node |
//! | `order` | calls that take effect in the caller's stream |
//! | `alone` | the device without ranks, to be measured |
//! | `pointer` | whose memory an address is |

mod alone;
pub mod batch;
mod buffer;
mod device;
mod found;
pub mod image;
pub(crate) mod ipc;
mod nvrtc;
pub(crate) mod objects;
pub(crate) mod order;
pub(crate) mod pointer;
mod vector;

#[doc(hidden)]
pub use alone::Alone;
pub use buffer::{GpuBuffer, GpuSlice};
pub use device::Cuda;
pub(crate) use device::HostSide;
pub use found::{GpuFacts, gpu_facts, gpus};
pub use vector::GpuVector;
