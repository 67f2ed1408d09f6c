//! RDMA devices, their ports and GIDs, and the network interfaces that belong to them, as plain data.

use super::affinity::PciLocation;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// The RDMA devices of a machine, and the network interfaces that belong to them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Inventory {
    /// The devices by name, in natural order: `mlx5_2` comes before `mlx5_10`.
    pub devices: Vec<RdmaDevice>,
    /// The network interfaces of the devices' ports, by name.
    pub netdevs: Vec<Netdev>,
    /// All addresses of this network namespace.
    pub addresses: Vec<InterfaceAddress>,
}

/// An RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RdmaDevice {
    /// The device's name, such as `mlx5_0`.
    pub name: String,
    /// The kernel's node type: `CA` for InfiniBand and RoCE, `RNIC` for iWARP.
    pub kind: String,
    /// The node GUID, in the kernel's notation.
    pub node_guid: String,
    /// The version of the firmware, if the device has one.
    pub firmware: Option<String>,
    /// The driver of the PCI device, such as `mlx5_core`; `None` for a software device.
    pub driver: Option<String>,
    /// Where the device is plugged in; empty for a software device.
    pub pci: PciLocation,
    /// The file through which programs open the device, such as `/dev/infiniband/uverbs0`, if the kernel
    /// offers one.
    pub uverbs: Option<String>,
    /// Whether this process may open that file.
    pub access: DeviceAccess,
    /// The ports, by number.
    pub ports: Vec<RdmaPort>,
}

/// Whether this process can open a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceAccess {
    /// This process can open the device.
    Granted,
    /// The file exists, but this user has no permission.
    Denied,
    /// The kernel offers a file, but it is not in `/dev`, for example in a container without access to it.
    Missing,
    /// The kernel offers no file: `ib_uverbs` is not loaded.
    Unknown,
}

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RdmaPort {
    /// The port's number, from 1.
    pub number: u8,
    /// The logical state: whether the port carries data.
    pub state: PortState,
    /// The physical state in the kernel's words: `LinkUp`, `Polling`, `Disabled`.
    pub physical_state: String,
    /// InfiniBand, Ethernet or another link layer.
    pub layer: LinkLayer,
    /// The rate in Mbit/s; 0 if unknown.
    pub rate_mbps: u64,
    /// The LID that the InfiniBand subnet manager assigned; 0 for none.
    pub lid: u16,
    /// The LID of the subnet manager; 0 for none.
    pub sm_lid: u16,
    /// The partition keys as (index, key), without empty entries.
    pub pkeys: Vec<(u16, u16)>,
    /// The GID table, without empty entries.
    pub gids: Vec<Gid>,
    /// The network interface of the port, if it has one.
    pub netdev: Option<String>,
}

/// The logical state of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortState {
    /// The port has no link.
    Down,
    /// The link is up, but the InfiniBand subnet manager has not configured the port.
    Init,
    /// The subnet manager has configured the port, but does not let data through yet.
    Armed,
    /// The port carries data.
    Active,
    /// Any other state.
    Other,
}

/// The link layer of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LinkLayer {
    /// InfiniBand, addressed by LID.
    InfiniBand,
    /// Ethernet, which means RoCE.
    Ethernet,
    /// Any other link layer, such as that of Amazon's EFA.
    Other,
}

/// An entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gid {
    /// The index in the table. Verbs number entries with 8 bits.
    pub index: u8,
    /// The 16 bytes of the GID, which on RoCE are an IP address.
    pub address: Ipv6Addr,
    /// The format of packets that are sent from this GID.
    pub kind: GidKind,
    /// The network interface that has this address.
    pub netdev: Option<String>,
}

/// The format of packets that are sent from a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GidKind {
    /// InfiniBand packets.
    InfiniBand,
    /// RoCE version 1: Ethernet frames with an ethertype of their own.
    RoceV1,
    /// RoCE version 2: UDP packets.
    RoceV2,
}

/// A network interface of a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Netdev {
    /// The interface's name.
    pub name: String,
    /// The MTU in bytes.
    pub mtu: Option<u32>,
    /// The operational state in the kernel's words: `up`, `down`.
    pub state: Option<String>,
}

/// An address of a network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InterfaceAddress {
    /// The interface's name.
    pub netdev: String,
    /// The IPv4 or IPv6 address.
    pub ip: IpAddr,
    /// The length of the network prefix in bits.
    pub prefix: u8,
}

impl Inventory {
    /// The interface of this name, if it belongs to a port.
    #[must_use]
    pub fn netdev(&self, name: &str) -> Option<&Netdev> {
        self.netdevs.iter().find(|netdev| netdev.name == name)
    }

    /// Whether the GID belongs to an interface of another network namespace, such as that of another
    /// container with a virtual function of this adapter. False if no interface of any port is in this
    /// namespace: the kernel has no such information, or this container uses the adapters of its host.
    #[must_use]
    pub fn is_elsewhere(&self, gid: &Gid) -> bool {
        let is_here = |netdev: &Netdev| netdev.mtu.is_some() || netdev.state.is_some();
        let netdev = gid.netdev.as_ref().and_then(|name| self.netdev(name));
        netdev.is_some_and(|netdev| !is_here(netdev)) && self.netdevs.iter().any(is_here)
    }

    /// The address of this network namespace that equals the GID, if there is one.
    #[must_use]
    pub fn address(&self, gid: &Gid) -> Option<&InterfaceAddress> {
        self.addresses.iter().find(|address| address.ip == gid.ip())
    }
}

impl Gid {
    /// On InfiniBand, the LID in the GID by which routers reach the port from other subnets (FLID); 0 if the
    /// GID has none.
    #[must_use]
    pub fn flid(&self) -> u16 {
        let [_, _, _, _, high, low, ..] = self.address.octets();
        u16::from_be_bytes([high, low])
    }

    /// The GID as an IP address. On InfiniBand it has no meaning.
    #[must_use]
    pub fn ip(&self) -> IpAddr {
        self.address.to_ipv4_mapped().map_or(IpAddr::V6(self.address), IpAddr::V4)
    }
}

impl Netdev {
    /// The largest RDMA payload in bytes that fits into a frame with the headers of RoCE, computed as in the
    /// kernel; `None` if not even 256 bytes fit.
    #[must_use]
    pub fn rdma_mtu(&self) -> Option<u32> {
        // GRH, UDP, BTH, the two largest extended headers, and the checksum.
        const HEADERS: u32 = 40 + 8 + 12 + 4 + 28 + 4;
        let room = self.mtu?.checked_sub(HEADERS)?;
        [4096, 2048, 1024, 512, 256].into_iter().find(|mtu| *mtu <= room)
    }
}

impl LinkLayer {
    /// The name for messages.
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
    /// The name for messages.
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
