//! Whether a port can be used at all.
//!
//! Owns the requirements on device, port and settings, except for the GID. Must not compare ports.

use super::hca_filter::HcaFilter;
use super::rejection::Rejection;
use crate::config::Config;
use crate::transport::verbs::inventory::{DeviceAccess, LinkLayer, PortState, RdmaDevice, RdmaPort};

/// Checks everything but the GID.
///
/// # Errors
/// The first requirement that the port does not meet.
pub(super) fn check(
    device: &RdmaDevice,
    port: &RdmaPort,
    filter: Option<&HcaFilter>,
    config: &Config,
) -> Result<(), Rejection> {
    if filter.is_some_and(|filter| !filter.admits(&device.name, port.number)) {
        let name = config.source("FLEXRING_IB_HCA");
        return Err(Rejection::new(format!("is excluded by {name}")).by_setting());
    }
    match device.driver.as_deref() {
        Some("efa") => {
            let message = "is an Elastic Fabric Adapter, which flexring does not support, as it has no reliable connections";
            return Err(Rejection::new(message).with_fix("NCCL uses it by aws-ofi-nccl"));
        }
        Some("erdma") => {
            return Err(Rejection::new("is an eRDMA adapter, which flexring does not support"));
        }
        _ if device.kind == "RNIC" => {
            return Err(Rejection::new("uses iWARP, which flexring does not support"));
        }
        _ => {}
    }
    if port.layer == LinkLayer::Other {
        return Err(Rejection::new("supports neither InfiniBand nor RoCE"));
    }
    check_access(device)?;
    check_state(port)?;
    if port.layer == LinkLayer::InfiniBand && matches!(port.lid, 0 | 0xffff) {
        return Err(no_subnet_manager("has no LID"));
    }
    let index = config.ib_pkey;
    // If the table cannot be read, the device decides later.
    if !port.pkeys.is_empty() && !port.pkeys.iter().any(|(present, _)| usize::from(*present) == index) {
        let present: Vec<String> = port.pkeys.iter().map(|(index, _)| index.to_string()).collect();
        let message = format!(
            "has no partition key {index}, which FLEXRING_IB_PKEY requires; it has: {}",
            present.join(", ")
        );
        return Err(Rejection::new(message).with_fix("FLEXRING_IB_PKEY=0").by_setting());
    }
    Ok(())
}

fn check_access(device: &RdmaDevice) -> Result<(), Rejection> {
    let file = device.uverbs.as_deref().unwrap_or("/dev/infiniband/uverbs*");
    match device.access {
        DeviceAccess::Granted => Ok(()),
        DeviceAccess::Denied => {
            Err(Rejection::new("cannot be opened by this user").with_fix(format!("chmod a+rw {file}")))
        }
        DeviceAccess::Missing => Err(Rejection::new(format!("cannot be opened, as there is no {file}"))
            .with_fix("in a container: docker run --device=/dev/infiniband")),
        DeviceAccess::Unknown => Err(Rejection::new("cannot be opened, as the kernel offers no file for it")
            .with_fix("modprobe ib_uverbs")),
    }
}

fn check_state(port: &RdmaPort) -> Result<(), Rejection> {
    match (port.state, port.layer) {
        (PortState::Active, _) => Ok(()),
        (PortState::Init | PortState::Armed, LinkLayer::InfiniBand) => {
            Err(no_subnet_manager(&format!("is {}", port.state)))
        }
        (state, LinkLayer::Ethernet) => {
            let netdev = port.netdev.as_deref().unwrap_or("<interface>");
            Err(Rejection::new(format!("is {state}"))
                .with_fix(format!("ip link set {netdev} up, and check its cable")))
        }
        (state, _) => {
            let physical = match &*port.physical_state {
                "" => String::new(),
                physical => format!(", its physical state is {physical}"),
            };
            Err(Rejection::new(format!("is {state}{physical}")).with_fix("check its cable, and ibstat"))
        }
    }
}

fn no_subnet_manager(symptom: &str) -> Rejection {
    Rejection::new(format!("{symptom}, as no subnet manager has configured it"))
        .with_fix("start one: opensm on a node, or the one of the switch")
}
