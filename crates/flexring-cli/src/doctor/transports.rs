//! Which transports can be used.
//!
//! Owns that conclusion from the facts.

use super::facts::Facts;
use super::sockets::SocketReport;
use serde::Serialize;

/// Whether a transport can be used.
#[derive(Clone, Debug, Serialize)]
pub struct TransportReport {
    pub name: &'static str,
    pub usable: bool,
    pub why: String,
}

impl TransportReport {
    /// The reports on all transports.
    pub fn all(facts: &Facts) -> Vec<Self> {
        vec![Self::shm(facts), Self::tcp(facts), Self::verbs(facts)]
    }

    fn shm(facts: &Facts) -> Self {
        let memory = &facts.memory;
        let why = match (&memory.memfd_failure, &memory.sharing_failure) {
            (_, Some(failure)) => failure.clone(),
            (Some(cause), None) => format!("in /dev/shm, because memfd_create is refused: {cause}"),
            (None, None) => "memfd works; /dev/shm is not needed".to_owned(),
        };
        Self { name: "shm", usable: memory.sharing_failure.is_none(), why }
    }

    fn tcp(facts: &Facts) -> Self {
        let SocketReport { chosen, why, .. } = &facts.sockets;
        let why = chosen.map_or_else(|| why.clone(), |address| format!("at {address}"));
        Self { name: "tcp", usable: chosen.is_some(), why }
    }

    fn verbs(facts: &Facts) -> Self {
        let rdma = &facts.rdma;
        let rails: Vec<String> =
            rdma.selection.rails.iter().map(|rail| format!("{}:{}", rail.device, rail.port)).collect();
        let missing = match (&rdma.failure, rdma.inventory.devices.len()) {
            (None, _) => None,
            (Some(_), 0) => Some("there is no RDMA device"),
            (Some(_), _) => Some("no RDMA port can be used"),
        };
        let opens =
            |device: &str| rdma.probes.iter().all(|probe| probe.device != device || probe.failure.is_none());
        let opens_any = missing.is_some() || rdma.selection.rails.iter().any(|rail| opens(&rail.device));
        let why = match (facts.build.verbs, missing) {
            (true, None) if facts.settings.tls => {
                "RDMA devices cannot encrypt, and FLEXRING_TLS=1".to_owned()
            }
            (true, None) if rdma.library_failure().is_some() => "libibverbs cannot be used".to_owned(),
            (true, None) if !opens_any => "no RDMA device can be opened".to_owned(),
            (true, None) => format!("over {}", rails.join(", ")),
            (true, Some(missing)) => missing.to_owned(),
            (false, None) => "this build has no verbs".to_owned(),
            (false, Some(missing)) => format!("this build has no verbs, and {missing}"),
        };
        let has_library = facts.build.verbs && rdma.library_failure().is_none();
        let usable = has_library && rdma.failure.is_none() && opens_any && !facts.settings.tls;
        Self { name: "verbs", usable, why }
    }
}
