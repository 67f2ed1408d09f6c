//! Which ports of RDMA devices a rank uses as rails, and why it does not use the others.
//!
//! Owns the decision for each port. Pure: the devices come from an [`Inventory`], the preferences from the
//! settings, and distances from an [`Affinity`].
//!
//! | file | owns |
//! |---|---|
//! | `rail` | a selected port with its address |
//! | `rejection` | why a port is not used |
//! | `port_check` | the requirements that a port must meet |
//! | `gid` | which GID is a port's address |
//! | `hca_filter` | `FLEXRING_IB_HCA` |
//! | `division` | which ports each rank of a node uses |
//! | `pairing` | which rails of two ranks are connected |

mod division;
mod gid;
mod hca_filter;
mod pairing;
mod port_check;
mod rail;
mod rejection;
#[cfg(test)]
mod tests;

pub use division::{Offer, divide, rails_of_world, reaches_gpu};
pub use gid::GidChoice;
pub use pairing::{describe_mismatch, first_unreachable, match_rails, pair_rails};
pub use rail::{MAX_RAILS, Rail};
pub use rejection::Rejection;

use super::inventory::{Affinity, Inventory};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use hca_filter::HcaFilter;
use serde::Serialize;
use std::cmp::Reverse;

/// The rails of a rank that is alone on its node, and the decision for every port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PortSelection {
    /// The rails, the nearest first.
    pub rails: Vec<Rail>,
    /// The decisions for all ports, in the order of the inventory.
    pub decisions: Vec<PortDecision>,
}

/// The decision for a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PortDecision {
    /// The device's name, such as `mlx5_0`.
    pub device: String,
    /// The port's number, from 1.
    pub port: u8,
    /// The GID that is or would be the port's address, if it has a suitable one.
    pub gid: Option<GidChoice>,
    /// Whether the port is used.
    pub outcome: PortUse,
}

/// Whether a port is used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortUse {
    /// The port is the rail with this index.
    Rail(usize),
    /// The port is not used, for this reason.
    Rejected(Rejection),
}

/// Selects the rails of this rank as if it were alone on its node, the nearest first, at most as many as
/// `FLEXRING_IB_RAILS` allows.
///
/// # Errors
/// `InvalidSetting` if the settings exclude all ports or cannot be parsed; `System`, with cause and fix for
/// each port, if no port works.
pub fn select(inventory: &Inventory, config: &Config, from: &Affinity) -> Result<PortSelection> {
    let selection = decide(inventory, config, from)?;
    if selection.rails.is_empty() { Err(no_rail_error(inventory, config, &selection)) } else { Ok(selection) }
}

/// The ports that this rank can use, from which the ranks of its node choose together.
///
/// # Errors
/// As for [`select`].
pub fn offer(inventory: &Inventory, config: &Config, from: &Affinity) -> Result<Offer> {
    select(inventory, config, from)?;
    Ok(survey(inventory, config, from)?.offer)
}

/// Why the first port cannot be used that settings admit, with the fix.
///
/// # Errors
/// As for [`decide`].
pub fn missing(inventory: &Inventory, config: &Config, from: &Affinity) -> Result<Option<Error>> {
    let error = |PortDecision { device, port, outcome, .. }: PortDecision| match outcome {
        // A slow port, which settings may admit, is a spare one with a fix.
        PortUse::Rejected(reason) if !reason.by_setting && (!reason.spare || reason.fix.is_some()) => {
            Some(Error::system(format!("{device}:{port} {reason}")))
        }
        _ => None,
    };
    Ok(decide(inventory, config, from)?.decisions.into_iter().find_map(error))
}

/// Decides for every port whether it becomes a rail. In contrast to [`select`], having no rail is not an
/// error.
///
/// # Errors
/// `InvalidSetting` if `FLEXRING_IB_HCA` cannot be parsed.
pub fn decide(inventory: &Inventory, config: &Config, from: &Affinity) -> Result<PortSelection> {
    let Survey { offer, mut decisions, ports } = survey(inventory, config, from)?;
    let share = divide(&[&offer]).swap_remove(0);
    let nearest = offer.rails.first();
    for (port, (decision, rail)) in ports.into_iter().zip(&offer.rails).enumerate() {
        decisions[decision].outcome = match (share.iter().position(|used| *used == port), nearest) {
            (Some(number), _) => PortUse::Rail(number),
            (None, Some(nearest)) if offer.is_near_gpu && rail.distance > nearest.distance => {
                let (mine, near) = (rail.distance, nearest.distance);
                let message =
                    format!("is not needed: it is {mine} from the GPU, and {} is {near}", nearest.device);
                PortUse::Rejected(Rejection::new(message).spare())
            }
            (None, _) => {
                let most = share.len();
                let message =
                    format!("is not needed: FLEXRING_IB_RAILS={most} other ports are as near or nearer");
                PortUse::Rejected(Rejection::new(message).by_setting().spare())
            }
        };
    }
    let rails = share.into_iter().map(|port| offer.rails[port].clone()).collect();
    Ok(PortSelection { rails, decisions })
}

/// What is known of all ports before they are divided.
struct Survey {
    offer: Offer,
    /// Of the offer's ports: the index of the decision.
    ports: Vec<usize>,
    /// The decisions for all ports; those of the offer's ports are provisional.
    decisions: Vec<PortDecision>,
}

/// Checks all ports. Those that work and are not slow are offered: the nearest first, then the fastest, then
/// in the order of the inventory.
fn survey(inventory: &Inventory, config: &Config, from: &Affinity) -> Result<Survey> {
    let filter = HcaFilter::of(config)?;
    let mut decisions = Vec::new();
    let mut usable = Vec::new();
    for device in &inventory.devices {
        for port in &device.ports {
            let gid = gid::choose(port, inventory, config);
            let choice = gid.as_ref().ok().map(|(_, choice)| choice.clone());
            let checked =
                port_check::check(device, port, filter.as_ref(), config).and(gid).map(|(gid, _)| gid);
            let rejection =
                checked.as_ref().err().cloned().unwrap_or_else(|| Rejection::new("is not needed"));
            if let Ok(gid) = checked {
                let distance = from.distance(&device.pci);
                let rail = Rail::new((device, port), distance.pci, gid, inventory, config);
                // Ports that are down count, so that a rail has the same position on all nodes.
                let position = u16::try_from(decisions.len()).unwrap_or(u16::MAX);
                usable.push((decisions.len(), distance, Rail { position, ..rail }));
            }
            decisions.push(PortDecision {
                device: device.name.clone(),
                port: port.number,
                gid: choice,
                outcome: PortUse::Rejected(rejection),
            });
        }
    }
    let fastest = usable.iter().map(|(_, _, rail)| rail).max_by_key(|rail| rail.rate_mbps).cloned();
    let named = |rail: &Rail| filter.as_ref().is_some_and(|filter| filter.names(&rail.device, rail.port));
    usable.retain(|(index, _, rail)| {
        let slow = fastest.as_ref().filter(|fastest| !named(rail) && rail.rate_mbps < fastest.rate_mbps / 2);
        if let Some(fastest) = slow {
            decisions[*index].outcome = PortUse::Rejected(slower(rail, fastest));
        }
        slow.is_none()
    });
    usable.sort_by_key(|(index, distance, rail)| (*distance, Reverse(rail.rate_mbps), *index));
    let (ports, rails) = usable.into_iter().map(|(index, _, rail)| (index, rail)).unzip();
    let offer = Offer { rails, most: config.ib_rails, is_near_gpu: from.located_gpu().is_some() };
    Ok(Survey { offer, ports, decisions })
}

/// The rejection of a slow rail, which would delay the others or be idle.
fn slower(rail: &Rail, fastest: &Rail) -> Rejection {
    let message = format!(
        "has {}, less than half of what {}:{} has",
        rate(rail.rate_mbps),
        fastest.device,
        fastest.port
    );
    Rejection::new(message).with_fix("name it in FLEXRING_IB_HCA to use it").spare()
}

fn rate(mbps: u64) -> String {
    format!("{} Gbit/s", mbps as f64 / 1000.0)
}

/// The error that there is no rail, with causes and fixes.
fn no_rail_error(inventory: &Inventory, config: &Config, selection: &PortSelection) -> Error {
    /// At most this many ports are listed.
    const MOST: usize = 4;
    const ALTERNATIVE: &str = "or set FLEXRING_TRANSPORT=tcp";
    let rejected: Vec<(&PortDecision, &Rejection)> = selection
        .decisions
        .iter()
        .filter_map(|decision| match &decision.outcome {
            PortUse::Rejected(reason) => Some((decision, reason)),
            PortUse::Rail(_) => None,
        })
        .collect();
    if rejected.is_empty() {
        let message = if inventory.devices.is_empty() {
            "there is no RDMA device: load a driver (modprobe mlx5_ib), add a software device (rdma link add rxe0 type \
             rxe netdev eth0)"
        } else {
            "no RDMA device has a port: reload its driver"
        };
        return Error::system(format!("{message}, {ALTERNATIVE}"));
    }
    // Excluded ports are not listed, unless all ports are excluded.
    let filter = HcaFilter::of(config).ok().flatten();
    let admitted = |device: &str, port| filter.as_ref().is_none_or(|filter| filter.admits(device, port));
    let relevant: Vec<_> =
        rejected.iter().filter(|(decision, _)| admitted(&decision.device, decision.port)).collect();
    if relevant.is_empty() {
        let ports: Vec<String> =
            rejected.iter().map(|(decision, _)| format!("{}:{}", decision.device, decision.port)).collect();
        let setting = config.ib_hca.as_deref().unwrap_or_default();
        let name = config.source("FLEXRING_IB_HCA");
        let message =
            format!("{name}=\"{setting}\" admits no RDMA port; the ports are: {}", ports.join(", "));
        return Error::invalid_setting(message);
    }
    let mut causes: Vec<String> = relevant
        .iter()
        .take(MOST)
        .map(|(decision, reason)| format!("{}:{} {reason}", decision.device, decision.port))
        .collect();
    if relevant.len() > MOST {
        causes.push(format!("and {} more, which flexring doctor lists", relevant.len() - MOST));
    }
    let by_setting = relevant.iter().all(|(_, reason)| reason.by_setting);
    let kind = if by_setting { ErrorKind::InvalidSetting } else { ErrorKind::System };
    Error::new(kind, format!("no RDMA port can be used: {}; fix this, {ALTERNATIVE}", causes.join("; ")))
}
