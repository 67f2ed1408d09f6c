//! Which ports of RDMA devices a rank uses as rails, and why the others are left.
//!
//! Owns the choice. Pure: what there is comes from a [`Survey`], what is wanted from the settings, and what is near
//! from a [`Standpoint`]. Must not know how a port is opened.

mod gid;
mod hca;
mod pairing;
#[cfg(test)]
mod tests;

pub use gid::GidChoice;
pub use pairing::{describe_mismatch, pair};

use super::survey::{Access, Device, Gid, GidKind, LinkLayer, Port, PortState, Standpoint, Survey};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use hca::Filter;
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
pub struct Selection {
    /// The rails, the nearest first.
    pub rails: Vec<Rail>,
    /// Every port there is, in the survey's order.
    pub verdicts: Vec<Verdict>,
}

/// What became of a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// The device's name.
    pub device: String,
    /// The port's number.
    pub port: u8,
    /// The GID that is or would be its address, if there is one.
    pub gid: Option<GidChoice>,
    /// Whether it is used.
    pub outcome: Outcome,
}

/// Whether a port is used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It is the rail of this number.
    Rail(usize),
    /// It is left.
    Left(Reason),
}

/// Why a port is left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reason {
    /// What is the matter with it, as a clause whose subject is the port: `is down`.
    pub words: String,
    /// What mends it, if anything does: a command, or what to do.
    pub mend: Option<String>,
    /// Whether it would be used with other settings.
    pub by_setting: bool,
    /// Whether it could be used, but better ones are.
    pub spare: bool,
}

impl Reason {
    fn of(words: impl Into<String>) -> Self {
        Self { words: words.into(), mend: None, by_setting: false, spare: false }
    }

    fn mended(self, mend: impl Into<String>) -> Self {
        Self { mend: Some(mend.into()), ..self }
    }

    fn by_setting(self) -> Self {
        Self { by_setting: true, ..self }
    }

    fn spare(self) -> Self {
        Self { spare: true, ..self }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.mend {
            Some(mend) => write!(f, "{} ({mend})", self.words),
            None => f.write_str(&self.words),
        }
    }
}

/// Chooses the rails of this rank, the nearest first, at most as many as `FLEXRING_IB_RAILS` says.
///
/// # Errors
/// `InvalidSetting` if the settings leave no port or cannot be parsed; `System`, saying for each port what is wrong
/// with it and what mends that, if there is no port that works.
pub fn select(survey: &Survey, config: &Config, from: &Standpoint) -> Result<Selection> {
    let selection = judge(survey, config, from)?;
    if selection.rails.is_empty() { Err(nothing(survey, config, &selection)) } else { Ok(selection) }
}

/// The same, where no rail at all is an answer like any other.
///
/// # Errors
/// `InvalidSetting` if `FLEXRING_IB_HCA` cannot be parsed.
pub fn judge(survey: &Survey, config: &Config, from: &Standpoint) -> Result<Selection> {
    let filter = config.ib_hca.as_deref().map(Filter::parse).transpose()?;
    let mut verdicts = Vec::new();
    let mut usable = Vec::new();
    for device in &survey.devices {
        for port in &device.ports {
            let gid = gid::choose(port, survey, config);
            let choice = gid.as_ref().ok().map(|(_, choice)| choice.clone());
            let found = fit(device, port, filter.as_ref(), config).and(gid).map(|(gid, _)| gid);
            let reason = found.as_ref().err().cloned().unwrap_or_else(|| Reason::of("is not needed"));
            if let Ok(gid) = found {
                let distance = from.distance(&device.place);
                usable.push((verdicts.len(), distance, rail(device, port, gid, survey, config)));
            }
            verdicts.push(Verdict {
                device: device.name.clone(),
                port: port.number,
                gid: choice,
                outcome: Outcome::Left(reason),
            });
        }
    }
    // The survey's order decides between what is equally near and fast.
    usable.sort_by_key(|(place, distance, rail)| (*distance, Reverse(rail.rate_mbps), *place));
    let fastest = usable.iter().map(|(_, _, rail)| rail).max_by_key(|rail| rail.rate_mbps).cloned();
    let mut rails: Vec<Rail> = Vec::new();
    for (place, _, rail) in usable {
        let named = filter.as_ref().is_some_and(|filter| filter.names(&rail.device, rail.port));
        let slow = fastest.as_ref().filter(|fastest| !named && rail.rate_mbps < fastest.rate_mbps / 2);
        verdicts[place].outcome = if let Some(fastest) = slow {
            Outcome::Left(slower(&rail, fastest))
        } else if rails.len() == config.ib_rails {
            let words =
                format!("is not needed: FLEXRING_IB_RAILS={} others are as near or nearer", rails.len());
            Outcome::Left(Reason::of(words).by_setting().spare())
        } else {
            rails.push(rail);
            Outcome::Rail(rails.len() - 1)
        };
    }
    Ok(Selection { rails, verdicts })
}

/// A slow rail would hold the others up, or be idle.
fn slower(rail: &Rail, fastest: &Rail) -> Reason {
    let words = format!(
        "has {}, less than half of what {}:{} has",
        speed(rail.rate_mbps),
        fastest.device,
        fastest.port
    );
    Reason::of(words).mended("FLEXRING_IB_HCA can name it").spare()
}

/// Mbit/s in words.
fn speed(mbps: u64) -> String {
    format!("{} Gbit/s", mbps as f64 / 1000.0)
}

/// Whether a port can be used.
type Fit = std::result::Result<(), Reason>;

/// Whether everything but the GID is right.
fn fit(device: &Device, port: &Port, filter: Option<&Filter>, config: &Config) -> Fit {
    if filter.is_some_and(|filter| !filter.admits(&device.name, port.number)) {
        return Err(Reason::of("is excluded by FLEXRING_IB_HCA").by_setting());
    }
    if device.kind == "RNIC" {
        return Err(Reason::of("speaks iWARP, which flexring does not"));
    }
    if port.layer == LinkLayer::Other {
        return Err(Reason::of("speaks neither InfiniBand nor RoCE"));
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
        return Err(Reason::of(words).mended("FLEXRING_IB_PKEY=0").by_setting());
    }
    Ok(())
}

fn openable(device: &Device) -> Fit {
    let file = device.uverbs.as_deref().unwrap_or("/dev/infiniband/uverbs*");
    match device.access {
        Access::Granted => Ok(()),
        Access::Denied => {
            Err(Reason::of("cannot be opened by this user").mended(format!("chmod a+rw {file}")))
        }
        Access::Missing => Err(Reason::of(format!("cannot be opened, as there is no {file} here"))
            .mended("in a container: docker run --device=/dev/infiniband")),
        Access::Unknown => {
            Err(Reason::of("cannot be opened, as the kernel offers no file for it")
                .mended("modprobe ib_uverbs"))
        }
    }
}

fn running(port: &Port) -> Fit {
    match (port.state, port.layer) {
        (PortState::Active, _) => Ok(()),
        (PortState::Init | PortState::Armed, LinkLayer::InfiniBand) => {
            Err(no_subnet_manager(&format!("is {}", port.state)))
        }
        (state, LinkLayer::Ethernet) => {
            let netdev = port.netdev.as_deref().unwrap_or("<interface>");
            Err(Reason::of(format!("is {state}"))
                .mended(format!("ip link set {netdev} up, and see to its cable")))
        }
        (state, _) => {
            let wire = match &*port.physical_state {
                "" => String::new(),
                wire => format!(", its wire {wire}"),
            };
            Err(Reason::of(format!("is {state}{wire}")).mended("see to its cable, and ibstat"))
        }
    }
}

fn no_subnet_manager(words: &str) -> Reason {
    Reason::of(format!("{words}, as no subnet manager has been there"))
        .mended("start one: opensm on a node, or the switch's own")
}

fn rail(device: &Device, port: &Port, gid: &Gid, survey: &Survey, config: &Config) -> Rail {
    let network = match port.layer {
        LinkLayer::InfiniBand => gid.address.octets()[..8].iter().map(|byte| format!("{byte:02x}")).collect(),
        _ => network(gid.ip(), survey.address(gid).map(|address| address.prefix)),
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
        numa: device.place.numa,
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
fn nothing(survey: &Survey, config: &Config, selection: &Selection) -> Error {
    /// More ports than that are not told one by one.
    const MOST: usize = 4;
    const ELSE: &str = "or use FLEXRING_TRANSPORT=tcp";
    let left: Vec<(&Verdict, &Reason)> = selection
        .verdicts
        .iter()
        .filter_map(|verdict| match &verdict.outcome {
            Outcome::Left(reason) => Some((verdict, reason)),
            Outcome::Rail(_) => None,
        })
        .collect();
    if left.is_empty() {
        let words = if survey.devices.is_empty() {
            "there is no RDMA device: load the driver of one (modprobe mlx5_ib), make one of software (rdma link add \
             rxe0 type rxe netdev eth0)"
        } else {
            "no RDMA device has a port: load its driver again"
        };
        return Error::new(ErrorKind::System, format!("{words}, {ELSE}"));
    }
    // Ports that are excluded explain nothing, unless there are no others.
    let filter = config.ib_hca.as_deref().and_then(|text| Filter::parse(text).ok());
    let admitted = |device: &str, port| filter.as_ref().is_none_or(|filter| filter.admits(device, port));
    let meant: Vec<_> = left.iter().filter(|(verdict, _)| admitted(&verdict.device, verdict.port)).collect();
    if meant.is_empty() {
        let there: Vec<String> =
            left.iter().map(|(verdict, _)| format!("{}:{}", verdict.device, verdict.port)).collect();
        let asked = config.ib_hca.as_deref().unwrap_or_default();
        let words =
            format!("FLEXRING_IB_HCA=\"{asked}\" leaves no RDMA port; there are: {}", there.join(", "));
        return Error::new(ErrorKind::InvalidSetting, words);
    }
    let mut told: Vec<String> = meant
        .iter()
        .take(MOST)
        .map(|(verdict, reason)| format!("{}:{} {reason}", verdict.device, verdict.port))
        .collect();
    if meant.len() > MOST {
        told.push(format!("and {} more, which flexring doctor lists", meant.len() - MOST));
    }
    let by_setting = meant.iter().all(|(_, reason)| reason.by_setting);
    let kind = if by_setting { ErrorKind::InvalidSetting } else { ErrorKind::System };
    Error::new(kind, format!("no RDMA port can be used: {}; mend that, {ELSE}", told.join("; ")))
}
