//! What RDMA devices this machine has, as the kernel tells in `/sys` and `/dev`.
//!
//! Owns the facts and their reading, from any root, so that tests can bring a machine of their own. Opens no device
//! and needs no library. Must not know which device is worth using: that is `select`'s.

mod affinity;
#[cfg(test)]
pub(crate) mod fake;
mod sysfs;
#[cfg(test)]
mod tests;

pub use affinity::{Affinity, NumaNode, PciLocation};

use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

/// The RDMA devices of a machine, and the network interfaces that belong to them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Inventory {
    /// The devices, in the order of their names, in which `mlx5_2` comes before `mlx5_10`.
    pub devices: Vec<RdmaDevice>,
    /// The network interfaces of their ports, by name.
    pub netdevs: Vec<Netdev>,
    /// All addresses of this network namespace.
    pub addresses: Vec<InterfaceAddress>,
}

/// An RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RdmaDevice {
    /// Its name, such as `mlx5_0`.
    pub name: String,
    /// What the kernel calls it: `CA` for InfiniBand and RoCE, `RNIC` for iWARP.
    pub kind: String,
    /// The GUID, as the kernel writes it.
    pub node_guid: String,
    /// The version of its firmware.
    pub firmware: Option<String>,
    /// The driver of its PCI device, such as `mlx5_core`.
    pub driver: Option<String>,
    /// Where it is plugged in; nowhere if it is made of software.
    pub pci: PciLocation,
    /// The file through which programs open it, such as `/dev/infiniband/uverbs0`, if the kernel made one.
    pub uverbs: Option<String>,
    /// Whether this process may open that file.
    pub access: DeviceAccess,
    /// Its ports.
    pub ports: Vec<RdmaPort>,
}

/// Whether a device can be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceAccess {
    /// It can.
    Granted,
    /// The file is there, but not for this user.
    Denied,
    /// The kernel knows the file, but it is not in `/dev`, as in a container that was not given it.
    Missing,
    /// The kernel has no such file: `ib_uverbs` is not loaded.
    Unknown,
}

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RdmaPort {
    /// Its number, from 1.
    pub number: u8,
    /// Whether it carries data.
    pub state: PortState,
    /// What its wire does, as the kernel says it: `LinkUp`, `Polling`, `Disabled`.
    pub physical_state: String,
    /// What it speaks.
    pub layer: LinkLayer,
    /// Its rate in Mbit/s; 0 if unknown.
    pub rate_mbps: u64,
    /// Its LID, which InfiniBand's subnet manager gave it; 0 for none.
    pub lid: u16,
    /// The LID of the subnet manager; 0 for none.
    pub sm_lid: u16,
    /// Its partition keys: index and key, those that are empty left out.
    pub pkeys: Vec<(u16, u16)>,
    /// Its GIDs, those that are empty left out.
    pub gids: Vec<Gid>,
    /// Its network interface.
    pub netdev: Option<String>,
}

/// The state of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortState {
    /// No link.
    Down,
    /// The link is there, but InfiniBand's subnet manager has not been.
    Init,
    /// The subnet manager is about to let data through.
    Armed,
    /// Data can flow.
    Active,
    /// Anything else.
    Other,
}

/// What a port speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet, so RoCE.
    Ethernet,
    /// Something else, such as Amazon's EFA.
    Other,
}

/// An entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gid {
    /// Where in the table.
    pub index: u8,
    /// Its 16 bytes, which on RoCE are an IP address.
    pub address: Ipv6Addr,
    /// What packets that bear it look like.
    pub kind: GidKind,
    /// The network interface whose address it is.
    pub netdev: Option<String>,
}

/// What packets that bear a GID look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// RoCE version 1: Ethernet frames of their own kind.
    RoceV1,
    /// RoCE version 2: UDP.
    RoceV2,
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Netdev {
    /// Its name.
    pub name: String,
    /// Its MTU in bytes.
    pub mtu: Option<u32>,
    /// What the kernel says of it: `up`, `down`.
    pub state: Option<String>,
}

/// An address of a network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InterfaceAddress {
    /// The interface.
    pub netdev: String,
    /// The address.
    pub ip: IpAddr,
    /// How many of its bits are those of its network.
    pub prefix: u8,
}

impl Inventory {
    /// This machine.
    #[must_use]
    pub fn local() -> Self {
        Self::read(Path::new("/"), addresses())
    }

    /// The machine whose `/sys` and `/dev` are below `root`, and whose interfaces have these `addresses`.
    ///
    /// What cannot be read counts as not there: a GID table is mostly entries that the kernel refuses to read.
    #[must_use]
    pub fn read(root: &Path, addresses: Vec<InterfaceAddress>) -> Self {
        sysfs::survey(root, addresses)
    }

    /// The interface of this name, if it belongs to a port.
    #[must_use]
    pub fn netdev(&self, name: &str) -> Option<&Netdev> {
        self.netdevs.iter().find(|netdev| netdev.name == name)
    }

    /// The address of this network namespace that a GID is.
    #[must_use]
    pub fn address(&self, gid: &Gid) -> Option<&InterfaceAddress> {
        self.addresses.iter().find(|address| address.ip == gid.ip())
    }
}

impl Gid {
    /// The IP address that it is on RoCE.
    #[must_use]
    pub fn ip(&self) -> IpAddr {
        self.address.to_ipv4_mapped().map_or(IpAddr::V6(self.address), IpAddr::V4)
    }
}

impl Netdev {
    /// Bytes of the largest RDMA payload that fits into one of its frames with RoCE's headers, as the kernel
    /// reckons; none if not even the smallest does.
    #[must_use]
    pub fn rdma_mtu(&self) -> Option<u32> {
        // GRH, UDP, BTH, the two largest extended headers, and the checksum.
        const HEADERS: u32 = 40 + 8 + 12 + 4 + 28 + 4;
        let room = self.mtu?.checked_sub(HEADERS)?;
        [4096, 2048, 1024, 512, 256].into_iter().find(|mtu| *mtu <= room)
    }
}

impl LinkLayer {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::InfiniBand => "InfiniBand",
            Self::Ethernet => "Ethernet",
            Self::Other => "an unknown link layer",
        }
    }
}

impl GidKind {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::InfiniBand => "InfiniBand",
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
        }
    }
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Down => "down",
            Self::Init => "initializing",
            Self::Armed => "armed",
            Self::Active => "active",
            Self::Other => "in an unknown state",
        })
    }
}

/// All addresses of this network namespace; none if the system does not tell.
#[must_use]
pub fn addresses() -> Vec<InterfaceAddress> {
    let Ok(found) = if_addrs::get_if_addrs() else {
        return Vec::new();
    };
    let prefix = |address: &if_addrs::IfAddr| match address {
        if_addrs::IfAddr::V4(address) => address.prefixlen,
        if_addrs::IfAddr::V6(address) => address.prefixlen,
    };
    let address = |interface: if_addrs::Interface| InterfaceAddress {
        ip: interface.ip(),
        prefix: prefix(&interface.addr),
        netdev: interface.name,
    };
    found.into_iter().map(address).collect()
}
