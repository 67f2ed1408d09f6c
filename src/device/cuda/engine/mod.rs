//! The engine: one resident kernel per call, and the work that the host gives it.
//!
//! Owns the protocol between the host and the kernels of `kernels/engine.cu`; docs/gpu.md explains it. Must
//! not know ranks, links or programs.
//!
//! | file | owns |
//! |---|---|
//! | `layout` | the memory that host and kernels share |
//! | `control` | who allocates it, and the words that start, finish and abort calls |
//! | `ring` | the host's side of a ring of descriptors |
//! | `address_map` | where kernels find host memory |
//! | `device` | the device: which job goes to which ring |
//! | `kernel_kind`, `kernels` | which kernel a call needs; loading and launching kernels |
//! | `launcher` | the launches in callers' streams |
//! | `resident_call` | a call, as its worker sees it |
//! | `instance` | the parts that belong together |

mod address_map;
mod control;
mod device;
mod instance;
mod kernel_kind;
mod kernels;
mod launcher;
mod layout;
mod resident_call;
mod ring;

pub(crate) use address_map::HostSide;
pub use device::Cuda;
pub(crate) use instance::{EngineParts, GpuEngine};
pub(crate) use kernel_kind::KernelKind;
pub(crate) use launcher::{Launcher, PreparedCollective, PreparedLaunch};
pub(crate) use resident_call::ResidentCall;
