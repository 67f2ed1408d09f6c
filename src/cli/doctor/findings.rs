//! What follows from the facts: what is wrong, how much that matters, and what fixes it.
//!
//! Owns the rules. Pure: the facts are all it knows.

use super::report::{DoctorReport, RdmaReport};
use super::text::size;
use flexring::transport::verbs::port_selection::{PortDecision, PortUse};
use serde::Serialize;

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// flexring cannot run with these settings.
    Error,
    /// Something that is there cannot be used, or is much slower than it could be.
    Problem,
    /// Good to know.
    Note,
}

/// Something that follows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub severity: Severity,
    pub message: String,
    /// What fixes it: a command, or what to do.
    pub fix: Option<String>,
}

/// All that follows, the worst first.
pub fn diagnose(report: &DoctorReport) -> Vec<Finding> {
    let mut findings = Findings(Vec::new());
    settings(report, &mut findings);
    processor(report, &mut findings);
    transports(report, &mut findings);
    sockets(report, &mut findings);
    rdma(report, &mut findings);
    memory(report, &mut findings);
    gpus(report, &mut findings);
    findings.0.sort_by_key(|finding| finding.severity);
    findings.0
}

struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, severity: Severity, message: impl Into<String>, fix: Option<&str>) {
        self.0.push(Finding { severity, message: message.into(), fix: fix.map(str::to_owned) });
    }
}

fn settings(report: &DoctorReport, findings: &mut Findings) {
    for words in report.settings.unusable.iter().chain(&report.settings.launcher) {
        findings.add(Severity::Error, words, None);
    }
    for (name, meant) in &report.settings.unknown {
        let fix = format!("if {meant} is meant, rename it; if not, unset {name}");
        findings.add(Severity::Problem, format!("{name} is no setting of flexring"), Some(&fix));
    }
}

fn processor(report: &DoctorReport, findings: &mut Findings) {
    if let Some(words) = &report.processor.simd_failure {
        findings.add(Severity::Error, words, Some("unset FLEXRING_SIMD"));
    }
}

/// Transports that the settings need and this machine has not.
fn transports(report: &DoctorReport, findings: &mut Findings) {
    let needed = report.needed();
    for transport in report.transports.iter().filter(|one| !one.usable && needed.contains(&one.name)) {
        let asked = report.settings.transport.name();
        let words = format!("FLEXRING_TRANSPORT={asked} needs {}, but {}", transport.name, transport.why);
        let fix = match transport.name {
            "verbs" if !report.build.verbs => Some(WITH_VERBS),
            "verbs" => None,
            "tcp" => {
                Some("unset FLEXRING_SOCKET_IFNAME, or FLEXRING_TRANSPORT=shm if all ranks share this node")
            }
            _ => Some("FLEXRING_TRANSPORT=tcp"),
        };
        findings.add(Severity::Error, words, fix);
    }
}

const WITH_VERBS: &str = "cargo build --release --features verbs";

fn sockets(report: &DoctorReport, findings: &mut Findings) {
    let elsewhere = report.sockets.chosen.is_some_and(|chosen| !chosen.is_loopback());
    if report.needed().contains(&"tcp") && report.sockets.chosen.is_some() && !elsewhere {
        let fix = "ip link set <interface> up, or name one in FLEXRING_SOCKET_IFNAME";
        findings.add(
            Severity::Note,
            "other nodes cannot reach this one by TCP: only the loopback is up",
            Some(fix),
        );
    }
}

fn rdma(report: &DoctorReport, findings: &mut Findings) {
    let RdmaReport { inventory, selection, failure, distances, .. } = &report.rdma;
    if inventory.devices.is_empty() {
        let fix = "load the driver of one: modprobe mlx5_ib; or make one of software: rdma link add rxe0 type rxe \
                    netdev eth0";
        findings.add(Severity::Note, "there is no RDMA device: TCP connects nodes", Some(fix));
        return;
    }
    // With devices of which none can be used somebody has had a mind to.
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
    if let Some(words) = failure {
        if findings.0.len() == before {
            findings.add(severity, words, None);
        }
        return;
    }
    for probe in report.rdma.probes.iter().filter(|probe| report.rdma.has_rail(&probe.device)) {
        if let Some(failure) = &probe.failure {
            findings.add(Severity::Problem, failure, None);
        }
    }
    if !report.build.verbs {
        findings.add(Severity::Problem, "there is RDMA here, but this build cannot use it", Some(WITH_VERBS));
    }
    for netdev in inventory.netdevs.iter().filter(|netdev| carries_rail(report, &netdev.name)) {
        if let (Some(mtu), Some(room)) = (netdev.mtu, netdev.rdma_mtu().filter(|room| *room < 4096)) {
            let name = &netdev.name;
            let words =
                format!("the MTU of {name}, {mtu}, lets RDMA packets carry {room} bytes and not 4096");
            let fix = format!("ip link set {name} mtu 9000, on all nodes, if the switches let it pass");
            findings.add(Severity::Note, words, Some(&fix));
        }
    }
    // The first rail is the nearest.
    if let Some(rail) = selection.rails.first()
        && let Some(at) = inventory.devices.iter().position(|device| device.name == rail.device)
        && let Some(numa) = rail.numa.filter(|_| distances[at] > 10)
    {
        let device = &rail.device;
        let words = format!(
            "even the nearest rail, {device}, is on NUMA node {numa}, where this process does not run"
        );
        findings.add(Severity::Note, words, Some(&format!("numactl --cpunodebind={numa} --membind={numa}")));
    }
}

/// Whether a rail's GID is of this interface.
fn carries_rail(report: &DoctorReport, netdev: &str) -> bool {
    let RdmaReport { inventory, selection, .. } = &report.rdma;
    let ports =
        inventory.devices.iter().flat_map(|device| device.ports.iter().map(move |port| (device, port)));
    ports.filter(|(_, port)| port.netdev.as_deref() == Some(netdev)).any(|(device, port)| {
        selection.rails.iter().any(|rail| rail.device == device.name && rail.port == port.number)
    })
}

/// Registered memory is locked.
fn memory(report: &DoctorReport, findings: &mut Findings) {
    let memory = &report.memory;
    let Some(limit) = memory.memlock_bytes.filter(|limit| *limit < memory.needed_bytes) else {
        return;
    };
    // Who is exempt, or has nothing to register with, need not care.
    if memory.memlock_exempt || report.rdma.inventory.devices.is_empty() {
        return;
    }
    let words = format!(
        "{} may be locked, but RDMA needs {} for its pool and queues",
        size(limit),
        size(memory.needed_bytes)
    );
    let fix = "ulimit -l unlimited; or memlock in /etc/security/limits.conf, LimitMEMLOCK=infinity in a systemd \
                unit, docker run --ulimit memlock=-1";
    findings.add(Severity::Problem, words, Some(fix));
}

/// GPUs that flexring cannot use, and a better way to their memory than the one that is expected.
fn gpus(report: &DoctorReport, findings: &mut Findings) {
    if report.gpus.devices.is_empty() {
        return;
    }
    let failure = report.gpus.cuda.as_ref().and_then(|cuda| cuda.failure.as_ref());
    if !report.build.cuda {
        let fix = "cargo build --release, without --no-default-features or with --features cuda";
        findings.add(Severity::Problem, "there are GPUs here, but this build cannot use them", Some(fix));
    } else if let Some(failure) = failure {
        let fix = "install NVIDIA's driver, or let this process see it (in a container: --gpus all); nvidia-smi tells";
        let words = format!("there are GPUs here, but this process cannot use them: {failure}");
        findings.add(Severity::Problem, words, Some(fix));
    }
    let Some(expected) = report.gpus.expected().filter(|_| !report.rdma.selection.rails.is_empty()) else {
        return;
    };
    if expected.name == "pinned host memory" {
        for mode in report.gpus.gdr_modes.iter().filter(|mode| mode.fix.is_some()) {
            let words = format!("RDMA to GPU memory by {} is not possible: {}", mode.name, mode.why);
            findings.add(Severity::Note, words, mode.fix);
        }
    }
}
