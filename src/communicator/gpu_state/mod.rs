//! The GPU that a communicator works with, and what it keeps there.
//!
//! Builds without the feature `cuda` use `absent.rs`, which has the interface of `cuda.rs` and refuses all
//! memory of GPUs.
//!
//! | file | owns |
//! |---|---|
//! | `cuda.rs` | which GPU it is |
//! | `kernel_state.rs` | the memory of calls, lists and captured calls; how the communicator waits for kernels |
//! | `recent_lists.rs` | which lists are kept |
//! | `kernel_offer.rs` | how many CTAs the ranks agree on |
//! | `kernel_watch.rs` | the thread that watches kernels, for failures and time limits |
//! | `registered_memory.rs` | memory of users that the kernels of all ranks of the node access |

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod cuda;
mod kernel_offer;
#[cfg(feature = "cuda")]
mod kernel_state;
#[cfg(feature = "cuda")]
mod kernel_watch;
#[cfg(feature = "cuda")]
mod recent_lists;
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
    kernel_state::{CarriedCall, KernelState, RelayedCall},
    kernel_watch::{KernelOwner, KernelWatch, difference},
    registered_memory::OfferedMemory,
};
