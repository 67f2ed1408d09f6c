//! Which ports of RDMA devices a rank uses as rails, and why the others are left.
//!
//! Owns the choice. Pure: what there is comes from a [`Inventory`], what is wanted from the settings, and what is near
//! from a [`Affinity`]. Must not know how a port is opened.

mod gid;
mod hca_filter;
mod pairing;
#[cfg(test)]
mod tests;

pub use gid::GidChoice;
pub use pairing::{describe_mismatch, pair_rails};

use super::inventory::{
    Affinity, DeviceAccess, Gid, GidKind, Inventory, LinkLayer, PortState, RdmaDevice, RdmaPort,
};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use hca_filter::HcaFilter;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A port that a rank uses, as the rank tells the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rail {
    /// The device's name.
    pub device: String,
    /// The port's number, from 1.
    pub port: u8,
    /// What it speaks; never `Other`.
    pub layer: LinkLayer,
    /// Where in the GID table the rank's address is.
    pub gid_index: u8,
    /// That address.
    pub gid: [u8; 16],
    /// What packets that bear it look like.
    pub gid_kind: GidKind,
    /// The LID on InfiniBand; 0 on Ethernet.
    pub lid: u16,
    /// Where in the table of partition keys.
    pub pkey_index: u16,
    /// What rails that reach each other best have in common: the IP network such as `10.1.0.0/24` of the GID, or the
    /// subnet's prefix in hexadecimal on InfiniBand.
    pub network: String,
    /// Mbit/s; 0 if unknown.
    pub rate_mbps: u64,
    /// The NUMA node, if it has one.
    pub numa: Option<u32>,
}

/// What became of every port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PortSelection {
    /// The rails, the nearest first.
    pub rails: Vec<Rail>,
    /// Every port there is, in the inventory's order.
    pub decisions: Vec<PortDecision>,
}

/// What became of a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PortDecision {
    /// The device's name.
    pub device: String,
    /// The port's number.
    pub port: u8,
    /// The GID that is or would be its address, if there is one.
    pub gid: Option<GidChoice>,
    /// Whether it is used.
    pub port_use: PortUse,
}

/// Whether a port is used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortUse {
    /// It is the rail of this number.
    Rail(usize),
    /// It is left.
    Rejected(Rejection),
}

/// Why a port is left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rejection {
    /// What is the matter with it, as a clause whose subject is the port: `is down`.
    pub message: String,
    /// What fixes it, if anything does: a command, or what to do.
    pub fix: Option<String>,
    /// Whether it would be used with other settings.
    pub by_setting: bool,
    /// Whether it could be used, but better ones are.
    pub spare: bool,
}

impl Rejection {
    fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), fix: None, by_setting: false, spare: false }
    }

    fn with_fix(self, fix: impl Into<String>) -> Self {
        Self { fix: Some(fix.into()), ..self }
    }

    fn by_setting(self) -> Self {
        Self { by_setting: true, ..self }
    }

    fn spare(self) -> Self {
        Self { spare: true, ..self }
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.fix {
            Some(fix) => write!(f, "{} ({fix})", self.message),
            None => f.write_str(&self.message),
        }
    }
}

/// Chooses the rails of this rank, the nearest first, at most as many as `FLEXRING_IB_RAILS` says.
///
/// # Errors
/// `InvalidSetting` if the settings leave no port or cannot be parsed; `System`, saying for each port what is wrong
/// with it and what fixes that, if there is no port that works.
pub fn select(inventory: &Inventory, config: &Config, from: &Affinity) -> Result<PortSelection> {
    let selection = decide(inventory, config, from)?;
    if selection.rails.is_empty() { Err(no_rail_error(inventory, config, &selection)) } else { Ok(selection) }
}

/// The same, where no rail at all is an answer like any other.
///
/// # Errors
/// `InvalidSetting` if `FLEXRING_IB_HCA` cannot be parsed.
pub fn decide(inventory: &Inventory, config: &Config, from: &Affinity) -> Result<PortSelection> {
    let filter = config.ib_hca.as_deref().map(HcaFilter::parse).transpose()?;
    let mut decisions = Vec::new();
    let mut usable = Vec::new();
    for device in &inventory.devices {
        for port in &device.ports {
            let gid = gid::choose(port, inventory, config);
            let choice = gid.as_ref().ok().map(|(_, choice)| choice.clone());
            let found = fit(device, port, filter.as_ref(), config).and(gid).map(|(gid, _)| gid);
            let reason = found.as_ref().err().cloned().unwrap_or_else(|| Rejection::new("is not needed"));
            if let Ok(gid) = found {
                let distance = from.distance(&device.pci);
                usable.push((decisions.len(), distance, rail(device, port, gid, inventory, config)));
            }
            decisions.push(PortDecision {
                device: device.name.clone(),
                port: port.number,
                gid: choice,
                port_use: PortUse::Rejected(reason),
            });
        }
    }
    // The inventory's order decides between what is equally near and fast.
    usable.sort_by_key(|(place, distance, rail)| (*distance, Reverse(rail.rate_mbps), *place));
    let fastest = usable.iter().map(|(_, _, rail)| rail).max_by_key(|rail| rail.rate_mbps).cloned();
    let mut rails: Vec<Rail> = Vec::new();
    for (place, _, rail) in usable {
        let named = filter.as_ref().is_some_and(|filter| filter.names(&rail.device, rail.port));
        let slow = fastest.as_ref().filter(|fastest| !named && rail.rate_mbps < fastest.rate_mbps / 2);
        decisions[place].port_use = if let Some(fastest) = slow {
            PortUse::Rejected(slower(&rail, fastest))
        } else if rails.len() == config.ib_rails {
            let words =
                format!("is not needed: FLEXRING_IB_RAILS={} others are as near or nearer", rails.len());
            PortUse::Rejected(Rejection::new(words).by_setting().spare())
        } else {
            rails.push(rail);
            PortUse::Rail(rails.len() - 1)
        };
    }
    Ok(PortSelection { rails, decisions })
}

/// A slow rail would hold the others up, or be idle.
fn slower(rail: &Rail, fastest: &Rail) -> Rejection {
    let words = format!(
        "has {}, less than half of what {}:{} has",
        speed(rail.rate_mbps),
        fastest.device,
        fastest.port
    );
    Rejection::new(words).with_fix("FLEXRING_IB_HCA can name it").spare()
}

/// Mbit/s in words.
fn speed(mbps: u64) -> String {
    format!("{} Gbit/s", mbps as f64 / 1000.0)
}

/// Whether a port can be used.
type Fit = std::result::Result<(), Rejection>;

/// Whether everything but the GID is right.
fn fit(device: &RdmaDevice, port: &RdmaPort, filter: Option<&HcaFilter>, config: &Config) -> Fit {
    if filter.is_some_and(|filter| !filter.admits(&device.name, port.number)) {
        return Err(Rejection::new("is excluded by FLEXRING_IB_HCA").by_setting());
    }
    if device.kind == "RNIC" {
        return Err(Rejection::new("speaks iWARP, which flexring does not"));
    }
    if port.layer == LinkLayer::Other {
        return Err(Rejection::new("speaks neither InfiniBand nor RoCE"));
    }
    openable(device)?;
    running(port)?;
    if port.layer == LinkLayer::InfiniBand && matches!(port.lid, 0 | 0xffff) {
        return Err(no_subnet_manager("has no LID"));
    }
    let asked = config.ib_pkey;
    // A table that cannot be read is left to the device to judge.
    if !port.pkeys.is_empty() && !port.pkeys.iter().any(|(index, _)| usize::from(*index) == asked) {
        let there: Vec<String> = port.pkeys.iter().map(|(index, _)| index.to_string()).collect();
        let words = format!(
            "has no partition key {asked}, which FLEXRING_IB_PKEY asks for; there are: {}",
            there.join(", ")
        );
        return Err(Rejection::new(words).with_fix("FLEXRING_IB_PKEY=0").by_setting());
    }
    Ok(())
}

fn openable(device: &RdmaDevice) -> Fit {
    let file = device.uverbs.as_deref().unwrap_or("/dev/infiniband/uverbs*");
    match device.access {
        DeviceAccess::Granted => Ok(()),
        DeviceAccess::Denied => {
            Err(Rejection::new("cannot be opened by this user").with_fix(format!("chmod a+rw {file}")))
        }
        DeviceAccess::Missing => Err(Rejection::new(format!("cannot be opened, as there is no {file} here"))
            .with_fix("in a container: docker run --device=/dev/infiniband")),
        DeviceAccess::Unknown => Err(Rejection::new("cannot be opened, as the kernel offers no file for it")
            .with_fix("modprobe ib_uverbs")),
    }
}

fn running(port: &RdmaPort) -> Fit {
    match (port.state, port.layer) {
        (PortState::Active, _) => Ok(()),
        (PortState::Init | PortState::Armed, LinkLayer::InfiniBand) => {
            Err(no_subnet_manager(&format!("is {}", port.state)))
        }
        (state, LinkLayer::Ethernet) => {
            let netdev = port.netdev.as_deref().unwrap_or("<interface>");
            Err(Rejection::new(format!("is {state}"))
                .with_fix(format!("ip link set {netdev} up, and see to its cable")))
        }
        (state, _) => {
            let wire = match &*port.physical_state {
                "" => String::new(),
                wire => format!(", its wire {wire}"),
            };
            Err(Rejection::new(format!("is {state}{wire}")).with_fix("see to its cable, and ibstat"))
        }
    }
}

fn no_subnet_manager(words: &str) -> Rejection {
    Rejection::new(format!("{words}, as no subnet manager has been there"))
        .with_fix("start one: opensm on a node, or the switch's own")
}

fn rail(device: &RdmaDevice, port: &RdmaPort, gid: &Gid, inventory: &Inventory, config: &Config) -> Rail {
    let network = match port.layer {
        LinkLayer::InfiniBand => gid.address.octets()[..8].iter().map(|byte| format!("{byte:02x}")).collect(),
        _ => network(gid.ip(), inventory.address(gid).map(|address| address.prefix)),
    };
    Rail {
        device: device.name.clone(),
        port: port.number,
        layer: port.layer,
        gid_index: gid.index,
        gid: gid.address.octets(),
        gid_kind: gid.kind,
        lid: if port.layer == LinkLayer::InfiniBand { port.lid } else { 0 },
        pkey_index: u16::try_from(config.ib_pkey).unwrap_or_default(),
        network,
        rate_mbps: port.rate_mbps,
        numa: device.pci.numa,
    }
}

/// The network of an address, `10.1.0.0/24`. Where nobody tells how long its prefix is, as long as most are.
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

/// Why there is no rail, and what to do about it.
fn no_rail_error(inventory: &Inventory, config: &Config, selection: &PortSelection) -> Error {
    /// More ports than that are not told one by one.
    const MOST: usize = 4;
    const ELSE: &str = "or use FLEXRING_TRANSPORT=tcp";
    let left: Vec<(&PortDecision, &Rejection)> = selection
        .decisions
        .iter()
        .filter_map(|decision| match &decision.port_use {
            PortUse::Rejected(reason) => Some((decision, reason)),
            PortUse::Rail(_) => None,
        })
        .collect();
    if left.is_empty() {
        let words = if inventory.devices.is_empty() {
            "there is no RDMA device: load the driver of one (modprobe mlx5_ib), make one of software (rdma link add \
             rxe0 type rxe netdev eth0)"
        } else {
            "no RDMA device has a port: load its driver again"
        };
        return Error::system(format!("{words}, {ELSE}"));
    }
    // Ports that are excluded explain nothing, unless there are no others.
    let filter = config.ib_hca.as_deref().and_then(|text| HcaFilter::parse(text).ok());
    let admitted = |device: &str, port| filter.as_ref().is_none_or(|filter| filter.admits(device, port));
    let meant: Vec<_> =
        left.iter().filter(|(decision, _)| admitted(&decision.device, decision.port)).collect();
    if meant.is_empty() {
        let there: Vec<String> =
            left.iter().map(|(decision, _)| format!("{}:{}", decision.device, decision.port)).collect();
        let asked = config.ib_hca.as_deref().unwrap_or_default();
        let words =
            format!("FLEXRING_IB_HCA=\"{asked}\" leaves no RDMA port; there are: {}", there.join(", "));
        return Error::invalid_setting(words);
    }
    let mut told: Vec<String> = meant
        .iter()
        .take(MOST)
        .map(|(decision, reason)| format!("{}:{} {reason}", decision.device, decision.port))
        .collect();
    if meant.len() > MOST {
        told.push(format!("and {} more, which flexring doctor lists", meant.len() - MOST));
    }
    let by_setting = meant.iter().all(|(_, reason)| reason.by_setting);
    let kind = if by_setting { ErrorKind::InvalidSetting } else { ErrorKind::System };
    Error::new(kind, format!("no RDMA port can be used: {}; fix that, {ELSE}", told.join("; ")))
}
