//! What RDMA devices say of themselves once they are open.
//!
//! Owns the asking, which takes a build with verbs, and devices that are this machine's and not those of files.

use flexring::transport::verbs::gpu::ladder::Reason;
use flexring::transport::verbs::survey::Survey;
use serde::Serialize;
use std::path::Path;

/// What a device said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Answer {
    pub device: String,
    /// Why it cannot be opened, if so; then it said nothing.
    pub failure: Option<String>,
    /// By port, the bytes that its largest packets carry now.
    pub active_mtus: Vec<(u8, u32)>,
    /// Whether its driver takes GPU memory as DMA-BUFs, if it said so.
    pub takes_dmabufs: Option<bool>,
    /// Why not.
    #[serde(serialize_with = "words")]
    pub why_not: Option<Reason>,
}

impl Answer {
    /// The active MTU of a port, if it was told.
    pub fn mtu(&self, port: u8) -> Option<u32> {
        self.active_mtus.iter().find(|(number, _)| *number == port).map(|(_, mtu)| *mtu)
    }
}

fn words<S: serde::Serializer>(reason: &Option<Reason>, to: S) -> Result<S::Ok, S::Error> {
    reason.as_ref().map(|reason| &reason.words).serialize(to)
}

/// What the devices of this machine say that this process may open; nothing of a machine that is a tree of files.
#[cfg(feature = "verbs")]
pub fn of(root: &Path, survey: &Survey) -> Vec<Answer> {
    use flexring::transport::verbs::{probe, survey};
    if root != Path::new("/") {
        return Vec::new();
    }
    let answer = |device: &survey::Device| {
        let ports: Vec<u8> = device.ports.iter().map(|port| port.number).collect();
        let nothing = Answer {
            device: device.name.clone(),
            failure: None,
            active_mtus: Vec::new(),
            takes_dmabufs: None,
            why_not: None,
        };
        match probe::ask(&device.name, &ports) {
            Err(error) => Answer { failure: Some(error.message().to_owned()), ..nothing },
            Ok(told) => Answer {
                active_mtus: ports
                    .into_iter()
                    .zip(told.mtus)
                    .filter_map(|(port, mtu)| Some((port, mtu?)))
                    .collect(),
                takes_dmabufs: Some(told.dmabufs.is_ok()),
                why_not: told.dmabufs.err(),
                ..nothing
            },
        }
    };
    let devices = survey.devices.iter().filter(|device| device.access == survey::Access::Granted);
    devices.map(answer).collect()
}

/// What devices say that nobody can ask: nothing.
#[cfg(not(feature = "verbs"))]
pub fn of(_root: &Path, _survey: &Survey) -> Vec<Answer> {
    Vec::new()
}
