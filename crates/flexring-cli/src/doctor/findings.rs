//! The findings: what is wrong, how severe it is, and how to fix it.
//!
//! Owns the rules. Pure: everything is derived from the facts and the reports on transports.

use super::byte_size::rounded;
use super::facts::Facts;
use super::rdma::RdmaReport;
use super::transports::TransportReport;
use flexring::internal::transport::verbs::port_selection::{PortDecision, PortUse};
use flexring_core::config::TransportChoice;
use serde::Serialize;

/// How severe a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// flexring cannot run with these settings.
    Error,
    /// Something present cannot be used, or is much slower than it could be.
    Problem,
    /// Information that may explain results; nothing must change.
    Note,
}

/// Something that is wrong or worth knowing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub severity: Severity,
    pub message: String,
    /// A command or an instruction that fixes it, if there is one.
    pub fix: Option<String>,
}

/// Derives all findings, the most severe first.
pub fn diagnose(facts: &Facts, reports: &[TransportReport]) -> Vec<Finding> {
    let mut findings = Findings(Vec::new());
    settings(facts, &mut findings);
    processor(facts, &mut findings);
    transports(facts, reports, &mut findings);
    sockets(facts, &mut findings);
    rdma(facts, &mut findings);
    without_rdma(facts, reports, &mut findings);
    memory(facts, &mut findings);
    gpus(facts, &mut findings);
    findings.0.sort_by_key(|finding| finding.severity);
    findings.0
}

struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, severity: Severity, message: impl Into<String>, fix: Option<&str>) {
        self.0.push(Finding { severity, message: message.into(), fix: fix.map(str::to_owned) });
    }
}

fn settings(facts: &Facts, findings: &mut Findings) {
    for message in facts.settings.unusable.iter().chain(&facts.settings.launcher) {
        findings.add(Severity::Error, message, None);
    }
    for (name, similar) in &facts.settings.unknown {
        let fix = match similar {
            Some(similar) => format!("if {similar} is meant, rename it; if not, unset {name}"),
            None => format!("unset {name}; `flexring env` lists the settings"),
        };
        findings.add(Severity::Problem, format!("{name} is not a setting of flexring"), Some(&fix));
    }
}

fn processor(facts: &Facts, findings: &mut Findings) {
    if let Some(message) = &facts.processor.simd_failure {
        findings.add(Severity::Error, message, None);
    }
}

/// Transports that the settings require and this machine lacks.
fn transports(facts: &Facts, reports: &[TransportReport], findings: &mut Findings) {
    let required = facts.required_transports();
    for transport in reports.iter().filter(|one| !one.usable && required.contains(&one.name)) {
        if transport.name == "shm" && facts.settings.transport != TransportChoice::Shm {
            let message = format!("the ranks of a node use TCP, which is slower: {}", transport.why);
            findings.add(Severity::Problem, message, None);
            continue;
        }
        let setting = facts.settings.transport.name();
        let message = format!("FLEXRING_TRANSPORT={setting} needs {}, but {}", transport.name, transport.why);
        let fix = match transport.name {
            "verbs" if !facts.build.verbs => Some(BUILD_WITH_VERBS),
            "verbs" => None,
            "tcp" => {
                Some("unset FLEXRING_SOCKET_IFNAME, or FLEXRING_TRANSPORT=shm if all ranks share this node")
            }
            _ => Some("FLEXRING_TRANSPORT=tcp"),
        };
        findings.add(Severity::Error, message, fix);
    }
}

const BUILD_WITH_VERBS: &str =
    "cargo build --release, without --no-default-features or with --features verbs";

fn sockets(facts: &Facts, findings: &mut Findings) {
    let loopback = facts.sockets.chosen.is_some_and(|chosen| chosen.is_loopback());
    if facts.required_transports().contains(&"tcp") && loopback {
        let fix = "ip link set <interface> up, or name one in FLEXRING_SOCKET_IFNAME";
        findings.add(
            Severity::Note,
            "other nodes cannot reach this one by TCP: only the loopback is up",
            Some(fix),
        );
    }
    let tcp_connects_nodes =
        facts.required_transports().contains(&"tcp") && facts.rdma.selection.rails.is_empty();
    if tcp_connects_nodes && facts.sockets.slow_start_after_idle {
        findings.add(
            Severity::Note,
            "TCP returns to slow start after 0.2 s without a call, so that the next one takes longer",
            Some("sysctl -w net.ipv4.tcp_slow_start_after_idle=0"),
        );
    }
}

fn rdma(facts: &Facts, findings: &mut Findings) {
    let RdmaReport { inventory, selection, failure, distances, .. } = &facts.rdma;
    if inventory.devices.is_empty() {
        let fix = "load a driver: modprobe mlx5_ib; or add a software device: rdma link add rxe0 type rxe netdev eth0";
        findings.add(Severity::Note, "there is no RDMA device: TCP connects nodes", Some(fix));
        return;
    }
    // Devices of which no port can be used are probably a mistake.
    let severity = if failure.is_some() { Severity::Problem } else { Severity::Note };
    let before = findings.0.len();
    for PortDecision { device, port, outcome, .. } in &selection.decisions {
        if let PortUse::Rejected(reason) = outcome
            && !reason.spare
            && !(reason.by_setting && (failure.is_none() || reason.fix.is_none()))
        {
            findings.add(severity, format!("{device}:{port} {}", reason.message), reason.fix.as_deref());
        }
    }
    if let Some(message) = failure {
        if findings.0.len() == before {
            findings.add(severity, message, None);
        }
        return;
    }
    if let Some(failure) = facts.rdma.library_failure() {
        findings.add(Severity::Problem, format!("there is RDMA here, but {failure}"), None);
    }
    for probe in facts.rdma.probes.iter().filter(|probe| facts.rdma.has_rail(&probe.device)) {
        if let Some(failure) = &probe.failure {
            findings.add(Severity::Problem, failure, None);
        }
    }
    if !facts.build.verbs {
        findings.add(
            Severity::Problem,
            "there is RDMA here, but this build cannot use it",
            Some(BUILD_WITH_VERBS),
        );
    }
    for netdev in inventory.netdevs.iter().filter(|netdev| carries_rail(facts, &netdev.name)) {
        if let (Some(mtu), Some(room)) = (netdev.mtu, netdev.rdma_mtu().filter(|room| *room < 4096)) {
            let name = &netdev.name;
            let message =
                format!("the MTU of {name}, {mtu}, limits RDMA packets to {room} bytes instead of 4096");
            let fix = format!("ip link set {name} mtu 9000, on all nodes, if the switches allow it");
            findings.add(Severity::Note, message, Some(&fix));
        }
    }
    // The first rail is the nearest.
    if let Some(rail) = selection.rails.first()
        && let Some(index) = inventory.devices.iter().position(|device| device.name == rail.device)
        && let Some(numa) = rail.numa
    {
        let device = &rail.device;
        let is_bound = facts.processor.nodes.iter().all(|node| !node.local || node.number == numa);
        let message = if distances[index] > 10 {
            format!(
                "even the nearest rail, {device}, is on NUMA node {numa}, where this process does not run"
            )
        } else if !is_bound {
            format!(
                "the nearest rail, {device}, is on NUMA node {numa}, and this process may run, and poll it, elsewhere"
            )
        } else {
            return;
        };
        let fix = format!("numactl --cpunodebind={numa} --membind={numa}");
        findings.add(Severity::Note, message, Some(&fix));
    }
}

/// What jobs on several nodes do if there are RDMA devices here that cannot be used.
fn without_rdma(facts: &Facts, reports: &[TransportReport], findings: &mut Findings) {
    let usable = reports.iter().any(|report| report.name == "verbs" && report.usable);
    if usable || facts.rdma.inventory.devices.is_empty() || facts.settings.transport != TransportChoice::Auto
    {
        return;
    }
    let offers = facts.build.verbs && !facts.rdma.selection.rails.is_empty();
    let (severity, message) = if offers {
        let message =
            "jobs on several nodes fail when they start: RDMA ports work here, but flexring cannot use them";
        (Severity::Problem, message)
    } else {
        let message =
            "jobs with other nodes that can use RDMA fail when they start; if none can, TCP connects them";
        (Severity::Note, message)
    };
    let fix = "fix the cause, or allow TCP by FLEXRING_TRANSPORT=auto-tcp on all ranks";
    findings.add(severity, message, Some(fix));
}

/// Whether this interface belongs to a rail.
fn carries_rail(facts: &Facts, netdev: &str) -> bool {
    let RdmaReport { inventory, selection, .. } = &facts.rdma;
    let ports =
        inventory.devices.iter().flat_map(|device| device.ports.iter().map(move |port| (device, port)));
    ports.filter(|(_, port)| port.netdev.as_deref() == Some(netdev)).any(|(device, port)| {
        selection.rails.iter().any(|rail| rail.device == device.name && rail.port == port.number)
    })
}

/// The memory of communicators, and the memlock limit, which applies to registered memory.
fn memory(facts: &Facts, findings: &mut Findings) {
    let memory = &facts.memory;
    if let Some(failure) = &memory.failure {
        findings.add(Severity::Error, failure, None);
    }
    if memory.memfd_failure.is_some() && memory.sharing_failure.is_none() {
        let message = "memfd_create is refused here: ranks of a node share no more memory than /dev/shm has";
        let fix = "allow memfd_create in the seccomp profile, or enlarge /dev/shm, in Docker with --shm-size";
        findings.add(Severity::Note, message, Some(fix));
    }
    let Some(limit) = memory.memlock_bytes.filter(|limit| *limit < memory.needed_bytes) else {
        return;
    };
    // The limit does not matter to an exempt process, or without a device.
    if memory.memlock_exempt || facts.rdma.inventory.devices.is_empty() {
        return;
    }
    let message = format!(
        "{} may be locked, but RDMA needs {} for its pool and queues",
        rounded(limit),
        rounded(memory.needed_bytes)
    );
    let fix = "ulimit -l unlimited; or memlock in /etc/security/limits.conf, LimitMEMLOCK=infinity in a systemd \
               unit, docker run --ulimit memlock=-1";
    findings.add(Severity::Problem, message, Some(fix));
}

/// GPUs that flexring cannot use, and GDR modes that would be better than the expected one.
fn gpus(facts: &Facts, findings: &mut Findings) {
    if facts.gpus.devices.is_empty() {
        return;
    }
    let failure = facts.gpus.cuda.as_ref().and_then(|cuda| cuda.failure.as_ref());
    if !facts.build.cuda {
        let fix = "cargo build --release, without --no-default-features or with --features cuda";
        findings.add(Severity::Problem, "there are GPUs here, but this build cannot use them", Some(fix));
    } else if let Some(failure) = failure {
        let fix = "install NVIDIA's driver, or make it visible to this process (in a container: --gpus all); \
                   check with nvidia-smi";
        let message = format!("there are GPUs here, but this process cannot use them: {failure}");
        findings.add(Severity::Problem, message, Some(fix));
    }
    let Some(expected) = facts.gpus.expected().filter(|_| !facts.rdma.selection.rails.is_empty()) else {
        return;
    };
    if expected.name == "pinned host memory" {
        for mode in facts.gpus.gdr_modes.iter().filter(|mode| mode.fix.is_some()) {
            let message = format!("RDMA to GPU memory by {} is not possible: {}", mode.name, mode.why);
            findings.add(Severity::Note, message, mode.fix);
        }
    }
}
