//! Reading the kernel's files about RDMA devices.
//!
//! Owns where they are and how they are written.

use super::{
    DeviceAccess, Gid, GidKind, InterfaceAddress, Inventory, LinkLayer, Netdev, PciLocation, PortState,
    RdmaDevice, RdmaPort,
};
use std::collections::BTreeSet;
use std::net::Ipv6Addr;
use std::path::Path;
use std::str::FromStr;

pub(super) fn survey(root: &Path, addresses: Vec<InterfaceAddress>) -> Inventory {
    let devices: Vec<RdmaDevice> =
        names(&root.join("sys/class/infiniband")).iter().map(|name| device(root, name)).collect();
    let ports = devices.iter().flat_map(|device| &device.ports);
    let named = |port: &RdmaPort| {
        let of_gids = port.gids.iter().filter_map(|gid| gid.netdev.clone());
        of_gids.chain(port.netdev.clone()).collect::<Vec<_>>()
    };
    let netdevs: BTreeSet<String> = ports.flat_map(named).collect();
    let netdevs = netdevs.into_iter().map(|name| netdev(root, name)).collect();
    Inventory { devices, netdevs, addresses }
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
    let word = |name: &str| text(&folder.join(name)).unwrap_or_default();
    let layer = match &*word("link_layer") {
        "InfiniBand" => LinkLayer::InfiniBand,
        "Ethernet" => LinkLayer::Ethernet,
        _ => LinkLayer::Other,
    };
    let gids = gids(&folder, layer);
    RdmaPort {
        number,
        state: state(&word("state")),
        physical_state: after_colon(&word("phys_state")).to_owned(),
        layer,
        rate_mbps: rate(&word("rate")),
        lid: hexadecimal(&word("lid")).unwrap_or(0),
        sm_lid: hexadecimal(&word("sm_lid")).unwrap_or(0),
        pkeys: pkeys(&folder.join("pkeys")),
        netdev: gids.iter().find_map(|gid| gid.netdev.clone()).or_else(|| interface(device, number)),
        gids,
    }
}

/// The interface of a port that has no GIDs to tell it.
fn interface(device: &Path, number: u8) -> Option<String> {
    let folder = device.join("device/net");
    let belongs = |name: &String| {
        let port: Option<u8> = text(&folder.join(name).join("dev_port")).and_then(|port| port.parse().ok());
        port.is_none_or(|port| port == number - 1)
    };
    // Devices made of software say whose they are.
    names(&folder).into_iter().find(belongs).or_else(|| text(&device.join("parent")))
}

fn gids(port: &Path, layer: LinkLayer) -> Vec<Gid> {
    let gid = |name: &String| {
        // Verbs count entries with a byte, but Soft-RoCE shows 1024 of them: so most are not even read.
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
    };
    names(&port.join("gids")).iter().filter_map(gid).collect()
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

/// `2.5 Gb/sec (1X SDR)` in Mbit/s; 0 if it is not to be understood.
fn rate(text: &str) -> u64 {
    let gbps: Option<f64> = text.split_whitespace().next().and_then(|number| number.parse().ok());
    gbps.filter(|gbps| (0.0..1e6).contains(gbps)).map_or(0, |gbps| (gbps * 1000.0).round() as u64)
}

fn hexadecimal(text: &str) -> Option<u16> {
    u16::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

fn after_colon(text: &str) -> &str {
    text.split_once(": ").map_or(text, |(_, word)| word)
}

/// What a file says, if it can be read and says anything.
pub(super) fn text(file: &Path) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
    (!text.is_empty()).then(|| text.to_owned())
}

/// The number that a file says.
pub(super) fn number<T: FromStr>(file: &Path) -> Option<T> {
    text(file)?.parse().ok()
}

/// The name of what a link points to.
fn target(link: &Path) -> Option<String> {
    let target = std::fs::read_link(link).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}

/// The names in a folder, in the order in which people count; none if it is not there.
pub(super) fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let name = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let mut names: Vec<String> = entries.flatten().map(name).collect();
    names.sort_by_cached_key(|name| counting(name));
    names
}

/// A key by which `mlx5_2` comes before `mlx5_10`.
pub(super) fn counting(name: &str) -> Vec<(String, u64)> {
    let mut parts = vec![(String::new(), 0_u64)];
    let mut in_number = false;
    for c in name.chars() {
        match (c.to_digit(10), parts.last_mut()) {
            (Some(digit), Some((_, number))) => {
                *number = number.saturating_mul(10).saturating_add(digit.into());
                in_number = true;
            }
            (None, Some((letters, _))) if !in_number => letters.push(c),
            _ => {
                parts.push((c.to_string(), 0));
                in_number = false;
            }
        }
    }
    parts
}
