//! A rail: a port that a rank uses, with its address.
//!
//! Owns what ranks exchange about their rails.

use super::gid::flid;
use crate::config::Config;
use crate::transport::verbs::inventory::{
    Gid, GidKind, Inventory, LinkLayer, PciDistance, RdmaDevice, RdmaPort,
};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// RDMA ports that a rank uses at most.
pub const MAX_RAILS: usize = 8;

/// A port that a rank uses, in the form that ranks exchange.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rail {
    /// The device's name, such as `mlx5_0`.
    #[serde(deserialize_with = "crate::peer_text::one_line")]
    pub device: String,
    /// The port's number, from 1.
    pub port: u8,
    /// The link layer; never `Other`.
    pub layer: LinkLayer,
    /// The index of [`gid`](Self::gid) in the port's GID table.
    pub gid_index: u8,
    /// The GID that is the rail's address.
    pub gid: [u8; 16],
    /// The format of packets that are sent from the GID.
    pub gid_kind: GidKind,
    /// The LID on InfiniBand; 0 on Ethernet.
    pub lid: u16,
    /// The index of the partition key in the port's table.
    pub pkey_index: u16,
    /// The partition key at that index, with the bit of full members; 0 if unknown, or on Ethernet, which has
    /// no other partitions.
    pub partition: u16,
    /// The LID under which routers know the port in other InfiniBand subnets (FLID); 0 if there is none.
    pub flid: u16,
    /// The network of the rail; rails of the same network are connected first. The IP network of the GID,
    /// such as `10.1.0.0/24`, or on InfiniBand the subnet prefix in hexadecimal.
    #[serde(deserialize_with = "crate::peer_text::one_line")]
    pub network: String,
    /// The rate in Mbit/s; 0 if unknown.
    pub rate_mbps: u64,
    /// The NUMA node of the device, if it has one.
    pub numa: Option<u32>,
    /// The position of the port among all of its node, in the order of the devices' names.
    pub position: u16,
    /// How far the device is from the rank's GPU or processors.
    pub distance: PciDistance,
    /// Whether it is a software device, such as Soft-RoCE.
    pub is_software: bool,
    /// Whether other ranks of the node use the port, and this one only to reach peers that its own ports do
    /// not reach. The division decides; ranks do not exchange it.
    #[serde(skip)]
    pub is_reserve: bool,
}

impl Rail {
    /// The rail over `port` of `device`, addressed by `gid`. It has no position yet.
    pub(super) fn new(
        (device, port): (&RdmaDevice, &RdmaPort),
        distance: PciDistance,
        gid: &Gid,
        inventory: &Inventory,
        config: &Config,
    ) -> Self {
        let is_infiniband = port.layer == LinkLayer::InfiniBand;
        let flid = if is_infiniband { flid(gid, config) } else { 0 };
        let pkey_index = u16::try_from(config.ib_pkey).unwrap_or_default();
        let key = port.pkeys.iter().find(|(index, _)| *index == pkey_index);
        let network = match port.layer {
            LinkLayer::InfiniBand => {
                let mut prefix = gid.address.octets();
                if flid != 0 {
                    // Ports of one subnet may have different FLIDs.
                    prefix[4..6].fill(0);
                }
                prefix[..8].iter().map(|byte| format!("{byte:02x}")).collect()
            }
            _ => network(gid.ip(), inventory.address(gid).map(|address| address.prefix)),
        };
        Self {
            device: device.name.clone(),
            port: port.number,
            layer: port.layer,
            gid_index: gid.index,
            gid: gid.address.octets(),
            gid_kind: gid.kind,
            lid: if is_infiniband { port.lid } else { 0 },
            pkey_index,
            partition: key.filter(|_| is_infiniband).map_or(0, |(_, key)| *key),
            flid,
            network,
            rate_mbps: port.rate_mbps,
            numa: device.pci.numa,
            position: 0,
            distance,
            is_software: device.driver.is_none(),
            is_reserve: false,
        }
    }
}

#[cfg(test)]
impl Rail {
    /// A rail on InfiniBand, for tests.
    pub(in crate::transport::verbs) fn example() -> Self {
        Self {
            device: "inert".to_owned(),
            port: 1,
            layer: LinkLayer::InfiniBand,
            gid_index: 0,
            gid: [0; 16],
            gid_kind: GidKind::InfiniBand,
            lid: 1,
            pkey_index: 0,
            partition: 0xffff,
            flid: 0,
            network: "0".to_owned(),
            rate_mbps: 1,
            numa: None,
            position: 0,
            distance: PciDistance::Node,
            is_software: false,
            is_reserve: false,
        }
    }
}

/// The network of an address, such as `10.1.0.0/24`. If the prefix length is unknown, it is assumed to be the
/// most common one: 24 for IPv4 and 64 for IPv6.
fn network(ip: IpAddr, prefix: Option<u8>) -> String {
    let (prefix, network) = match ip {
        IpAddr::V4(ip) => {
            let prefix = prefix.unwrap_or(24).min(32);
            let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
            (prefix, IpAddr::V4(Ipv4Addr::from_bits(ip.to_bits() & mask)))
        }
        IpAddr::V6(ip) => {
            let prefix = prefix.unwrap_or(64).min(128);
            let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
            (prefix, IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() & mask)))
        }
    };
    format!("{network}/{prefix}")
}
