//! The GPU that a communicator works with.
//!
//! Owns which GPU that is, and what a communicator keeps on it. Builds without the feature `cuda` use
//! `absent.rs`, which has the interface of `cuda.rs` and refuses all memory of GPUs.

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod kernel_calls;
mod kernel_offer;
#[cfg(feature = "cuda")]
mod kernel_watch;
#[cfg(feature = "cuda")]
mod registered_memory;

#[cfg(not(feature = "cuda"))]
pub(super) use absent::{GpuState, RelayedCall, forbid_calls, known, may_exist, numa_node, relay_slots};
#[cfg(all(feature = "verbs", not(feature = "cuda")))]
pub(super) use absent::{address, is_coherent};
#[cfg(feature = "cuda")]
pub(super) use cuda::{GpuState, forbid_calls, known, may_exist, numa_node, relay_slots};
#[cfg(all(feature = "verbs", feature = "cuda"))]
pub(super) use cuda::{address, is_coherent};
pub(super) use kernel_offer::{KernelOffer, most_ctas};
#[cfg(feature = "cuda")]
pub(super) use {
    cuda::{OpenedGpu, PreparedCollective},
    kernel_calls::{CarriedCall, KernelCalls, RelayedCall},
    kernel_watch::{KernelOwner, KernelWatch, difference},
    registered_memory::OfferedMemory,
};
