//! Which entry of a port's GID table is the rank's address.
//!
//! Owns the preference among entries.

use super::rejection::Rejection;
use crate::config::{Config, Family};
use crate::transport::verbs::inventory::{Gid, GidKind, Inventory, LinkLayer, RdmaPort};
use serde::Serialize;
use std::net::IpAddr;

/// The chosen entry of a GID table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GidChoice {
    /// The index in the table.
    pub index: u8,
    /// Why this entry was chosen, as a clause.
    pub why: String,
}

/// Chooses the entry of `port` that is its address.
///
/// # Errors
/// The port has no entry, or none that the settings allow.
pub(super) fn choose<'a>(
    port: &'a RdmaPort,
    inventory: &Inventory,
    config: &Config,
) -> Result<(&'a Gid, GidChoice), Rejection> {
    let chosen = |gid: &'a Gid, why: String| Ok((gid, GidChoice { index: gid.index, why }));
    if let Some(index) = config.ib_gid_index {
        let gid = port.gids.iter().find(|gid| usize::from(gid.index) == index);
        let name = config.source("FLEXRING_IB_GID_INDEX");
        let gid = gid.ok_or_else(|| no_such_entry(port, index, &name))?;
        return chosen(gid, format!("set by {name}={index}: {}", describe(gid)));
    }
    if port.layer == LinkLayer::InfiniBand {
        if let Some(gid) = port.gids.iter().find(|gid| flid(gid, config) != 0) {
            return chosen(gid, format!("its FLID {:#x} is reached from other subnets", gid.flid()));
        }
        let gid =
            port.gids.iter().min_by_key(|gid| gid.index).ok_or_else(|| {
                Rejection::new("has no GID").with_fix("reload the driver, or reset the device")
            })?;
        return chosen(gid, "InfiniBand is addressed by LID; the first GID names the subnet".to_owned());
    }
    let fits = |gid: &&Gid| match config.ib_family {
        Family::Auto => true,
        Family::Ipv4 => gid.ip().is_ipv4(),
        Family::Ipv6 => gid.ip().is_ipv6(),
    };
    let best = port.gids.iter().filter(fits).min_by_key(|gid| {
        // If all interfaces are elsewhere, this may be a container that uses those of its host.
        let elsewhere = inventory.is_elsewhere(gid);
        // An address that this network namespace does not have may belong to another container. If it belongs
        // to the host of this container, there is no better one. In both cases, it is preferred to a
        // link-local address, which routers do not forward.
        let class = class(gid);
        let foreign = inventory.address(gid).is_none();
        (elsewhere, gid.kind != wanted(config), class == LINK_LOCAL, foreign, class, gid.index)
    });
    let gid = best.ok_or_else(|| none_fits(port, config))?;
    let mut why = describe(gid);
    if gid.kind != wanted(config) {
        why += &format!(", as there is no {}", wanted(config).name());
    } else if inventory.is_elsewhere(gid) {
        why += ", an interface of another network namespace, as none of this one belongs to the port";
    } else if port.gids.len() > 1 {
        why += ", the first by version, family and index";
    }
    chosen(gid, why)
}

/// The FLID of a port on InfiniBand with this GID; 0 if the GID has none, or is not the one that the settings
/// take it from.
pub(super) fn flid(gid: &Gid, config: &Config) -> u16 {
    if usize::from(gid.index) == config.ib_flid_gid_index { gid.flid() } else { 0 }
}

fn wanted(config: &Config) -> GidKind {
    if config.ib_roce_version == 1 { GidKind::RoceV1 } else { GidKind::RoceV2 }
}

const LINK_LOCAL: u8 = 2;

/// The preference by address family, the best first: IPv4, IPv6, link-local IPv6.
fn class(gid: &Gid) -> u8 {
    match gid.ip() {
        IpAddr::V4(_) => 0,
        IpAddr::V6(address) if address.is_unicast_link_local() => LINK_LOCAL,
        IpAddr::V6(_) => 1,
    }
}

/// Describes a GID, such as `RoCE v2, IPv4 10.1.0.5 of eth0`.
fn describe(gid: &Gid) -> String {
    let family = match class(gid) {
        0 => "IPv4",
        1 => "IPv6",
        _ => "link-local IPv6",
    };
    let of = gid.netdev.as_ref().map_or_else(String::new, |netdev| format!(" of {netdev}"));
    match gid.kind {
        GidKind::InfiniBand => gid.address.to_string(),
        kind => format!("{}, {family} {}{of}", kind.name(), gid.ip()),
    }
}

fn no_such_entry(port: &RdmaPort, index: usize, name: &str) -> Rejection {
    let present: Vec<String> = port.gids.iter().map(|gid| gid.index.to_string()).collect();
    let present = if present.is_empty() { "none".to_owned() } else { present.join(", ") };
    Rejection::new(format!("has no GID {index}, which {name} requires; it has: {present}"))
        .with_fix(format!("unset {name}"))
        .by_setting()
}

fn none_fits(port: &RdmaPort, config: &Config) -> Rejection {
    if !port.gids.is_empty() {
        let family = config.ib_family.name();
        return Rejection::new(format!("has no GID that FLEXRING_IB_FAMILY={family} allows"))
            .with_fix("unset FLEXRING_IB_FAMILY, or add such an address to its interface")
            .by_setting();
    }
    let netdev = port.netdev.as_deref().unwrap_or("<interface>");
    Rejection::new("has no GID, as its interface has no address")
        .with_fix(format!("ip address add <address>/<prefix> dev {netdev}"))
}
