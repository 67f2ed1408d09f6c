//! The kernel's files about RDMA devices.
//!
//! Owns where they are and their format.

use super::affinity::PciLocation;
use super::device::{
    DeviceAccess, Gid, GidKind, InterfaceAddress, Inventory, LinkLayer, Netdev, PortState, RdmaDevice,
    RdmaPort,
};
use super::sysfs::{names, target, text};
use super::topology_file::TopologyFile;
use std::collections::BTreeSet;
use std::net::Ipv6Addr;
use std::path::Path;

impl Inventory {
    /// The inventory of this machine.
    #[must_use]
    pub fn local() -> Self {
        Self::read(Path::new("/"), addresses())
    }

    /// The inventory of the machine whose `/sys` and `/dev` are below `root`, and whose interfaces have these
    /// `addresses`.
    ///
    /// A file that cannot be read counts as missing: the kernel refuses to read most entries of a GID table.
    #[must_use]
    pub fn read(root: &Path, addresses: Vec<InterfaceAddress>) -> Self {
        let mut devices: Vec<RdmaDevice> =
            names(&root.join("sys/class/infiniband")).iter().map(|name| device(root, name)).collect();
        let file = TopologyFile::of(root);
        for device in &mut devices {
            if let Some((path, numa)) = device.pci.address().and_then(|address| file.location(address)) {
                device.pci = PciLocation { path, numa };
            }
        }
        let ports = devices.iter().flat_map(|device| &device.ports);
        let netdevs_of = |port: &RdmaPort| {
            let of_gids = port.gids.iter().filter_map(|gid| gid.netdev.clone());
            of_gids.chain(port.netdev.clone()).collect::<Vec<_>>()
        };
        let netdevs: BTreeSet<String> = ports.flat_map(netdevs_of).collect();
        let netdevs = netdevs.into_iter().map(|name| netdev(root, name)).collect();
        Self { devices, netdevs, addresses }
    }
}

/// Whether the administrator of the machine below `root` has set a traffic class for all packets of a port.
/// Drivers that have such a setting write `Global tclass=106`, for example.
#[must_use]
pub fn sets_traffic_class(root: &Path, device: &str, port: u8) -> bool {
    let file = root.join("sys/class/infiniband").join(device).join(format!("tc/{port}/traffic_class"));
    text(&file).is_some_and(|text| text.bytes().any(|byte| matches!(byte, b'1'..=b'9')))
}

/// All addresses of this network namespace; none if the system does not list them.
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

fn device(root: &Path, name: &str) -> RdmaDevice {
    let folder = root.join("sys/class/infiniband").join(name);
    let uverbs = uverbs(root, name);
    let numbers = names(&folder.join("ports"));
    let ports = numbers.iter().filter_map(|number| Some(port(&folder, number.parse().ok()?))).collect();
    RdmaDevice {
        name: name.to_owned(),
        // `1: CA`
        kind: text(&folder.join("node_type")).map_or_else(String::new, |kind| after_colon(&kind).to_owned()),
        node_guid: text(&folder.join("node_guid")).unwrap_or_default(),
        firmware: text(&folder.join("fw_ver")),
        driver: target(&folder.join("device/driver")),
        pci: PciLocation::read(&folder.join("device")),
        access: access(root, uverbs.as_deref()),
        uverbs,
        ports,
    }
}

fn port(device: &Path, number: u8) -> RdmaPort {
    let folder = device.join("ports").join(number.to_string());
    let file = |name: &str| text(&folder.join(name)).unwrap_or_default();
    let layer = match &*file("link_layer") {
        "InfiniBand" => LinkLayer::InfiniBand,
        "Ethernet" => LinkLayer::Ethernet,
        _ => LinkLayer::Other,
    };
    let gids = gids(&folder, layer);
    RdmaPort {
        number,
        state: state(&file("state")),
        physical_state: after_colon(&file("phys_state")).to_owned(),
        layer,
        rate_mbps: rate(&file("rate")),
        lid: hexadecimal(&file("lid")).unwrap_or(0),
        sm_lid: hexadecimal(&file("sm_lid")).unwrap_or(0),
        pkeys: pkeys(&folder.join("pkeys")),
        netdev: gids.iter().find_map(|gid| gid.netdev.clone()).or_else(|| interface(device, number)),
        gids,
    }
}

/// The network interface of a port without GIDs, which would name it.
fn interface(device: &Path, number: u8) -> Option<String> {
    let folder = device.join("device/net");
    let belongs = |name: &String| {
        let port: Option<u8> = text(&folder.join(name).join("dev_port")).and_then(|port| port.parse().ok());
        port.is_none_or(|port| port == number - 1)
    };
    // A software device names its interface in `parent`.
    names(&folder).into_iter().find(belongs).or_else(|| text(&device.join("parent")))
}

fn gids(port: &Path, layer: LinkLayer) -> Vec<Gid> {
    names(&port.join("gids")).iter().filter_map(|name| gid(port, layer, name)).collect()
}

/// An entry of a port's GID table.
fn gid(port: &Path, layer: LinkLayer, name: &str) -> Option<Gid> {
    // Verbs number entries with 8 bits. Soft-RoCE shows 1024 entries, so most of them are not read.
    let index = name.parse().ok()?;
    let address: Ipv6Addr = text(&port.join("gids").join(name))?.parse().ok()?;
    if address.is_unspecified() {
        return None;
    }
    let kind = match (layer, text(&port.join("gid_attrs/types").join(name)).as_deref()) {
        (LinkLayer::InfiniBand, _) => GidKind::InfiniBand,
        (_, Some("RoCE v2")) => GidKind::RoceV2,
        _ => GidKind::RoceV1,
    };
    Some(Gid { index, address, kind, netdev: text(&port.join("gid_attrs/ndevs").join(name)) })
}

/// Where the GID table of an Ethernet port has an address now that was at `known`. The kernel may list it
/// elsewhere when a port has been down ([nccl#2183](https://github.com/NVIDIA/nccl/pull/2183)). `None`: it is
/// gone.
#[must_use]
pub fn gid_index(
    root: &Path,
    device: &str,
    port: u8,
    (address, kind): ([u8; 16], GidKind),
    known: u8,
) -> Option<u8> {
    let port = root.join("sys/class/infiniband").join(device).join(format!("ports/{port}"));
    let is_it = |gid: &Gid| gid.address.octets() == address && gid.kind == kind;
    let there = gid(&port, LinkLayer::Ethernet, &known.to_string());
    let found = there.filter(is_it).or_else(|| gids(&port, LinkLayer::Ethernet).into_iter().find(is_it));
    found.map(|gid| gid.index)
}

fn pkeys(folder: &Path) -> Vec<(u16, u16)> {
    let pkey = |index: &String| Some((index.parse().ok()?, hexadecimal(&text(&folder.join(index))?)?));
    names(folder).iter().filter_map(pkey).filter(|(_, key)| *key != 0).collect()
}

fn uverbs(root: &Path, device: &str) -> Option<String> {
    let folder = root.join("sys/class/infiniband_verbs");
    let belongs = |name: &String| text(&folder.join(name).join("ibdev")).as_deref() == Some(device);
    names(&folder).into_iter().find(belongs).map(|name| format!("/dev/infiniband/{name}"))
}

fn access(root: &Path, file: Option<&str>) -> DeviceAccess {
    use rustix::fs::Access as Mode;
    use rustix::io::Errno;
    let Some(file) = file else {
        return DeviceAccess::Unknown;
    };
    match rustix::fs::access(root.join(file.trim_start_matches('/')), Mode::READ_OK | Mode::WRITE_OK) {
        Ok(()) => DeviceAccess::Granted,
        Err(Errno::NOENT) => DeviceAccess::Missing,
        Err(_) => DeviceAccess::Denied,
    }
}

fn netdev(root: &Path, name: String) -> Netdev {
    let folder = root.join("sys/class/net").join(&name);
    let mtu = text(&folder.join("mtu")).and_then(|mtu| mtu.parse().ok());
    Netdev { mtu, state: text(&folder.join("operstate")), name }
}

/// `4: ACTIVE`
fn state(text: &str) -> PortState {
    match text.split(':').next().unwrap_or_default() {
        "1" => PortState::Down,
        "2" => PortState::Init,
        "3" => PortState::Armed,
        "4" => PortState::Active,
        _ => PortState::Other,
    }
}

/// `2.5 Gb/sec (1X SDR)` in Mbit/s; 0 if the text has another form.
fn rate(text: &str) -> u64 {
    let gbps: Option<f64> = text.split_whitespace().next().and_then(|number| number.parse().ok());
    gbps.filter(|gbps| (0.0..1e6).contains(gbps)).map_or(0, |gbps| (gbps * 1000.0).round() as u64)
}

fn hexadecimal(text: &str) -> Option<u16> {
    u16::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

fn after_colon(text: &str) -> &str {
    text.split_once(": ").map_or(text, |(_, rest)| rest)
}
