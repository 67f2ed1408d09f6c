//! NVIDIA GPUs: reductions by flexring's own kernels, copies, and calls that are ordered in CUDA streams.
//!
//! Owns all work on a GPU. Must not know ranks, links or schedules, nor how the driver is opened: that is
//! `cuda_driver`.
//!
//! | file | owns |
//! |---|---|
//! | `objects` | RAII types for the driver's handles |
//! | `image`, `nvrtc` | the kernels' machine code, or their source and the run-time compiler |
//! | `collective` | the calls that kernels run: their memory, their form, what kernels report |
//! | `kernels`, `launcher` | loading and launching kernels, in callers' streams |
//! | `pinned` | page-locked host memory |
//! | `naps` | how threads wait for kernels that end soon |
//! | `inventory` | the GPUs that this process sees |
//! | `buffer` | users' buffers on a GPU, and slices of them |
//! | `graph` | graphs of calls on users' buffers |
//! | `vector` | the vector types that calls accept |
//! | `ipc` | GPU memory shared between the processes of a node |
//! | `peer_memory`, `mapped_memory` | allocations as the driver exports and opens them, whole or mapped in parts |
//! | `stream_memory` | memory with a stream of its own |
//! | `pointer` | whether an address is host or GPU memory |

mod buffer;
pub(crate) mod collective;
mod graph;
pub mod image;
mod inventory;
pub(crate) mod ipc;
mod kernels;
mod launcher;
pub(crate) mod mapped_memory;
pub(crate) mod naps;
mod nvrtc;
pub(crate) mod objects;
pub(crate) mod peer_memory;
mod pinned;
pub(crate) mod pointer;
mod stream_memory;
mod vector;

pub use buffer::{GpuBuffer, GpuSlice};
pub use graph::{GpuCapture, GpuGraph};
pub use inventory::{GpuInfo, gpu_count, gpu_info};
pub(crate) use launcher::{Launcher, PreparedCollective};
pub use vector::GpuVector;
