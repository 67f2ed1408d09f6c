//! The RDMA devices of this machine, as the kernel shows them in `/sys` and `/dev`.
//!
//! Owns the data and reading it, below any root, so that tests can provide file trees of other machines.
//! Opens no device and needs no library. Must not know which device is worth using: that is `port_selection`.
//!
//! | file | owns |
//! |---|---|
//! | `device` | devices, ports, GIDs and interfaces as plain data |
//! | `affinity` | NUMA nodes and PCI paths: how far a device is from this process or its GPU |
//! | `reader` | where the kernel shows the devices, and in what format |
//! | `hw_counters` | the counters of a port's driver |
//! | `topology_file` | NCCL's file of where devices are |
//! | `sysfs` | reading small files and directories |
//! | `fake` | file trees for tests |

mod affinity;
mod device;
#[cfg(test)]
pub(crate) mod fake;
mod hw_counters;
mod reader;
mod sysfs;
#[cfg(test)]
mod tests;
mod topology_file;

pub use affinity::{Affinity, Distance, NumaNode, PciDistance, PciLocation};
pub use device::{
    DeviceAccess, Gid, GidKind, InterfaceAddress, Inventory, LinkLayer, Netdev, PortState, RdmaDevice,
    RdmaPort,
};
pub use hw_counters::{loss_signs, retransmissions};
pub use reader::{addresses, gid_index, sets_traffic_class};
pub use topology_file::unusable_topology_file;
