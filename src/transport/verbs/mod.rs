//! The verbs transport: RDMA devices, which of their ports a rank uses, and the links to peers over them.
//!
//! libibverbs is opened when a device is first used. The modules without it are always compiled, so that
//! `flexring doctor` reports in a build without the feature `verbs`, too. Dependencies point from the bottom
//! of this table upwards.
//!
//! | file | owns |
//! |---|---|
//! | `inventory` | the RDMA devices that the kernel lists |
//! | `port_selection` | which ports become rails, why others do not, and which rails of two ranks are connected |
//! | `objects` | libibverbs, and RAII owners of contexts, protection domains, completion queues, queue pairs and memory regions |
//! | `wire` | what ranks write into each other's memory: immediate data and control entries |
//! | `options` | link settings, and the path attributes that follow from them |
//! | `rail_counters` | what each rail has carried |
//! | `gpu` | how devices reach GPU memory, and when writes to it must be flushed |
//! | `probe` | what libibverbs and an open device report about themselves, for `flexring doctor` |
//! | `shared_regions` | registrations that several communicators of a process use |
//! | `shared_device` | the open devices, which all communicators of a process share, and their events |
//! | `control_buffer` | reading and writing control entries |
//! | `registry` | which memory is registered, and for how long |
//! | `link` | the protocol of one link over one or more queue pairs, without I/O |
//! | `peer` | one link together with its queue pairs |
//! | `peer/reconnect` | connecting queue pairs in the place of broken ones |
//! | `connect_info` | what ranks send each other to connect queue pairs |
//! | `link_batch` | the devices of the rails; memory and completion queues that several links share |
//! | `rail_faults` | which rails are left out because they do not work on some rank |
//! | `link_directory` | which rails of two ranks are connected, and over which paths |
//! | `transport` | all links of a rank |
//! | `transport/on_demand` | links that a call needs and that do not exist yet |
//! | `connect` | opening devices, exchanging addresses, connecting |

#[cfg(feature = "verbs")]
mod connect;
#[cfg(feature = "verbs")]
mod connect_info;
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
mod link_batch;
#[cfg(feature = "verbs")]
mod link_directory;
#[cfg(feature = "verbs")]
mod objects;
#[cfg(feature = "verbs")]
mod options;
#[cfg(feature = "verbs")]
mod peer;
pub mod port_selection;
#[cfg(feature = "verbs")]
pub mod probe;
mod rail_counters;
#[cfg(feature = "verbs")]
mod rail_faults;
#[cfg(feature = "verbs")]
mod registry;
#[cfg(feature = "verbs")]
mod shared_device;
#[cfg(feature = "verbs")]
mod shared_regions;
#[cfg(all(test, feature = "verbs"))]
mod tests;
#[cfg(feature = "verbs")]
mod transport;
#[cfg(feature = "verbs")]
mod wire;

#[cfg(feature = "verbs")]
pub(crate) use connect::UnconnectedVerbs;
#[cfg(feature = "verbs")]
pub(crate) use connect_info::{ConnectInfo, OutOfBand};
#[cfg(all(test, feature = "verbs"))]
pub(crate) use link_batch::LinkResources;
#[cfg(feature = "verbs")]
pub(crate) use link_directory::LinkDirectory;
#[cfg(feature = "verbs")]
pub(crate) use options::{VerbsOptions, far_rail};
pub(crate) use rail_counters::RailCounters;
pub use rail_counters::RailStatistics;
#[cfg(feature = "verbs")]
pub(crate) use rail_faults::{RailFault, SetupFailure, rails_to_drop, remove_rails};
