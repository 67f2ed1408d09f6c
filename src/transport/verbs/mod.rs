//! Verbs: RDMA devices, which of their ports a rank uses, and what connects them to a peer's.
//!
//! What needs no library of the devices is compiled always, so that `flexring doctor` can tell about any machine.
//! Must not know schedules, nor how ranks find each other.
//!
//! | file | owns |
//! |---|---|
//! | `inventory` | what RDMA devices there are, as the kernel's files tell |
//! | `port_selection` | which of their ports become rails, why the others do not, and which rails of two ranks are connected |
//! | `objects` | owners of devices, domains, queues, queue pairs and registered memory |
//! | `regions` | what memory is registered, and for how long |
//! | `gpu` | which way devices take to a GPU's memory, and what must be known of it |
//! | `probe` | what an open device says of itself, for `flexring doctor` |
//! | `wire`, `board` | what ranks write into each other's memory |
//! | `link` | one peer's messages, over one queue pair or many: pure |
//! | `peer` | the link and its queue pairs together |
//! | `connect` | opening, connecting, trying |
//! | `transport` | all links of a rank |

#[cfg(feature = "verbs")]
mod connect;
#[cfg(feature = "verbs")]
mod control_buffer;
#[cfg_attr(
    all(feature = "verbs", not(test)),
    allow(dead_code, reason = "called by the device that runs on a GPU")
)]
pub mod gpu;
pub mod inventory;
#[cfg(feature = "verbs")]
mod link;
#[cfg(feature = "verbs")]
mod objects;
#[cfg(feature = "verbs")]
mod peer;
pub mod port_selection;
#[cfg(feature = "verbs")]
pub mod probe;
#[cfg(feature = "verbs")]
mod registry;
#[cfg(all(test, feature = "verbs"))]
mod tests;
#[cfg(feature = "verbs")]
mod transport;
#[cfg(feature = "verbs")]
mod wire;

#[cfg(feature = "verbs")]
pub(crate) use connect::{ConnectInfo, UnconnectedVerbs, VerbsOptions};
