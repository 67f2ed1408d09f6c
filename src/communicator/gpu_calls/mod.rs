//! Calls on the memory of a GPU. Builds without the feature `cuda` use `absent.rs`, which makes none.
//!
//! | file | owns |
//! |---|---|
//! | `collectives.rs` | the public methods |
//! | `registered_vector.rs` | vectors of users that are registered |
//! | `stream_calls.rs` | how a call takes effect in a stream; what callers do for the driver in the worker's place |
//! | `kernel_calls.rs` | how the kernel of a call is launched or captured; what the worker carries for it |

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod collectives;
#[cfg(feature = "cuda")]
mod kernel_calls;
#[cfg(feature = "cuda")]
mod registered_vector;
mod stream_calls;

#[cfg(feature = "cuda")]
pub use registered_vector::RegisteredOnGpu;
