//! The report as text.
//!
//! Owns the layout.

use super::byte_size::rounded;
use super::device_probe::{DeviceProbe, LibraryReport};
use super::facts::Facts;
use super::findings::{Finding, Severity};
use super::gpu::GpuReport;
use super::process::{MemoryReport, ProcessorReport};
use super::rdma::RdmaReport;
use super::report::DoctorReport;
use super::sockets::SocketReport;
use super::topology::{TopologyReport, TreeNode};
use crate::output::counted;
use flexring::internal::transport::verbs::inventory::{
    Gid, GidKind, Inventory, LinkLayer, PortState, RdmaDevice, RdmaPort,
};
use flexring::internal::transport::verbs::port_selection::PortUse;

/// The width of the column with headings.
const MARGIN: usize = 11;

/// The whole report.
pub fn render(report: &DoctorReport) -> String {
    let facts = &report.facts;
    let mut text = format!("flexring {} on {}, {}\n", facts.version, facts.host, facts.system);
    if let Some(rank) = &facts.rank {
        text += &format!("rank {} of {}, set by {}\n", rank.rank, rank.world, rank.launcher);
    }
    text += "\n";
    let with = |has, what| format!("{} {what}", if has { "with" } else { "without" });
    let build = format!("{}, {}", with(facts.build.verbs, "verbs"), with(facts.build.cuda, "CUDA"));
    text += &line("build", &build);
    if let Some(kernels) = &facts.build.kernels {
        text += &line("", &format!("GPU kernels: {kernels}"));
    }
    text += &line("processor", &processor(&facts.processor));
    text += &line("memory", &memory(&facts.memory));
    text += &sockets(&facts.sockets);
    text += &rdma(&facts.rdma);
    text += &gpus(&facts.gpus);
    text += &topology(&facts.topology);
    text += &settings(facts);
    text += "\n";
    for transport in &report.transports {
        let usable = if transport.usable { "yes" } else { "no" };
        text += &line(transport.name, &format!("{usable:3}  {}", transport.why));
    }
    text += "\n";
    for finding in &report.findings {
        text += &finding_lines(finding);
    }
    text += if !report.runs() {
        "flexring cannot run here with these settings\n"
    } else if report.findings.iter().any(|finding| finding.severity == Severity::Problem) {
        "flexring runs here, but not as well as it could\n"
    } else {
        "flexring runs here\n"
    };
    text
}

/// The part about the devices of a described machine.
pub fn render_machine(report: &DoctorReport, name: &str) -> String {
    let facts = &report.facts;
    let mut text = line("machine", name);
    text += &rdma(&facts.rdma);
    text += &gpus(&facts.gpus);
    text += &topology(&facts.topology);
    text
}

fn line(heading: &str, text: &str) -> String {
    format!("{heading:MARGIN$}{text}\n")
}

fn finding_lines(finding: &Finding) -> String {
    let heading = match finding.severity {
        Severity::Error => "error",
        Severity::Problem => "problem",
        Severity::Note => "note",
    };
    let fix = finding.fix.as_ref().map(|fix| line("", &format!("fix: {fix}"))).unwrap_or_default();
    line(heading, &finding.message) + &fix
}

fn processor(processor: &ProcessorReport) -> String {
    let ProcessorReport { cores, simd, nodes, .. } = processor;
    let local: Vec<String> =
        nodes.iter().filter(|node| node.local).map(|node| node.number.to_string()).collect();
    let numa = match nodes.len() {
        0 | 1 => String::new(),
        all => format!(", on NUMA node {} of {all}", local.join(", ")),
    };
    format!("{}, {}{numa}", counted(*cores, "core"), simd.unwrap_or("no instruction set"))
}

fn memory(memory: &MemoryReport) -> String {
    let limit = match memory.memlock_bytes {
        None => "any amount may be locked".to_owned(),
        Some(_) if memory.memlock_exempt => "any amount may be locked (CAP_IPC_LOCK)".to_owned(),
        Some(limit) => format!("{} may be locked", rounded(limit)),
    };
    let on_gpus = memory.relay_bytes.map(|bytes| format!(", {} for kernels", rounded(bytes)));
    format!(
        "{limit}; RDMA needs {} ({} of {}{}, and queues)",
        rounded(memory.needed_bytes),
        counted(usize::try_from(memory.slots).unwrap_or_default(), "slot"),
        rounded(memory.slot_bytes),
        on_gpus.unwrap_or_default()
    )
}

fn sockets(sockets: &SocketReport) -> String {
    let width = sockets.interfaces.iter().map(|socket| socket.name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for socket in &sockets.interfaces {
        let state = if socket.up { "" } else { "  down" };
        let chosen = if sockets.chosen == Some(socket.address) {
            format!("  used: {}", sockets.why)
        } else {
            String::new()
        };
        let heading = if text.is_empty() { "sockets" } else { "" };
        text += &line(heading, &format!("{:width$}  {}{state}{chosen}", socket.name, socket.address));
    }
    if sockets.interfaces.is_empty() { line("sockets", "no interface") } else { text }
}

fn rdma(rdma: &RdmaReport) -> String {
    let modules = if rdma.modules.is_empty() {
        "no RDMA module is loaded".to_owned()
    } else {
        format!("modules {}", rdma.modules.join(", "))
    };
    let mut text = match rdma.inventory.devices.len() {
        0 => line("RDMA", &format!("no device; {modules}")),
        devices => line("RDMA", &format!("{}; {modules}", counted(devices, "device"))),
    };
    text += &rdma.library.as_ref().map(library_line).unwrap_or_default();
    for (device, distance) in rdma.inventory.devices.iter().zip(&rdma.distances) {
        text += &line("", &format!("{}: {}", device.name, device_text(device, *distance)));
        let probe = rdma.probes.iter().find(|probe| probe.device == device.name);
        text += &probe.map(probe_lines).unwrap_or_default();
        for port in &device.ports {
            text += &port_lines(rdma, device, port);
        }
    }
    text
}

/// `libibverbs 1.14.44.0: /usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0`
fn library_line(library: &LibraryReport) -> String {
    if let Some(failure) = &library.failure {
        return line("", failure);
    }
    let version = library.version.as_ref().map(|version| format!(" {version}")).unwrap_or_default();
    let file = library.file.as_ref().map(|file| format!(": {}", file.display())).unwrap_or_default();
    let missing = match &library.missing[..] {
        [] => String::new(),
        missing => format!(", without {}", missing.join(", ")),
    };
    line("", &format!("libibverbs{version}{file}{missing}"))
}

/// `mlx5_core at 0000:3b:00.0, NUMA node 0 (distance 10), firmware 28.39.1002`
fn device_text(device: &RdmaDevice, distance: u32) -> String {
    let mut text = device.driver.clone().unwrap_or_else(|| "software device".to_owned());
    if let Some(address) = device.pci.address() {
        text += &format!(" at {address}");
    }
    if let Some(numa) = device.pci.numa {
        text += &format!(", NUMA node {numa} (distance {distance})");
    }
    if let Some(firmware) = &device.firmware {
        text += &format!(", firmware {firmware}");
    }
    text
}

/// The answers of a device, without those about its ports.
fn probe_lines(probe: &DeviceProbe) -> String {
    let answer = match (&probe.failure, &probe.why_not) {
        (Some(failure), _) => format!("  cannot be opened: {failure}"),
        (None, Some(reason)) => format!("  GPU memory by DMA-BUF: no, {}", reason.message),
        (None, None) => "  GPU memory by DMA-BUF: yes".to_owned(),
    };
    line("", &answer)
}

/// A port, whether it is used, and its GID table.
fn port_lines(rdma: &RdmaReport, device: &RdmaDevice, port: &RdmaPort) -> String {
    let decisions = &rdma.selection.decisions;
    let decision =
        decisions.iter().find(|decision| decision.device == device.name && decision.port == port.number);
    let mut text = format!("  port {}: {}, {}", port.number, port.layer.name(), port.state);
    if port.state == PortState::Active {
        text += &format!(", {} Gbit/s", port.rate_mbps as f64 / 1000.0);
    }
    if port.layer == LinkLayer::InfiniBand {
        text += &format!(", LID {}", port.lid);
    }
    if let Some(netdev) = &port.netdev {
        text += &interface(&rdma.inventory, netdev);
    }
    let probe = rdma.probes.iter().find(|probe| probe.device == device.name);
    if let Some(mtu) = probe.and_then(|probe| probe.mtu(port.number)) {
        text += &format!(", active MTU {mtu}");
    }
    let mut text = line("", &text);
    match decision.map(|decision| &decision.outcome) {
        Some(PortUse::Rail(rail)) => text += &line("", &format!("    used as rail {rail}")),
        Some(PortUse::Rejected(reason)) => text += &line("", &format!("    not used: it {}", reason.message)),
        None => {}
    }
    let choice = decision.and_then(|decision| decision.gid.as_ref());
    let is_rail = decision.is_some_and(|decision| matches!(decision.outcome, PortUse::Rail(_)));
    let label = if is_rail { "chosen" } else { "would be chosen" };
    let shown = |gid: &Gid| match gid.kind {
        GidKind::InfiniBand => gid.address.to_string(),
        _ => gid.ip().to_string(),
    };
    let width = port.gids.iter().map(|gid| shown(gid).len()).max().unwrap_or(0);
    for gid in &port.gids {
        let kind = gid.kind.name();
        let netdev = gid.netdev.as_deref().unwrap_or_default();
        let address = shown(gid);
        let entry = format!("    GID {:2}  {address:width$}  {kind}  {netdev}", gid.index);
        let chosen = choice.filter(|choice| choice.index == gid.index);
        let why = chosen.map(|choice| format!("  {label}: {}", choice.why)).unwrap_or_default();
        text += &line("", &format!("{}{why}", entry.trim_end()));
    }
    text
}

/// `, eth0 with MTU 1500, 1024 in RDMA packets`
fn interface(inventory: &Inventory, name: &str) -> String {
    let netdev = inventory.netdev(name);
    match netdev.and_then(|netdev| netdev.mtu) {
        None => format!(", {name}"),
        Some(mtu) => {
            let room = netdev.and_then(|netdev| netdev.rdma_mtu());
            let room = room.map_or_else(|| "nothing".to_owned(), |room| room.to_string());
            format!(", {name} with MTU {mtu}, {room} in RDMA packets")
        }
    }
}

fn gpus(gpus: &GpuReport) -> String {
    let driver = match &gpus.driver {
        None => "no driver".to_owned(),
        Some(driver) => {
            let open = if driver.open { "open" } else { "proprietary" };
            format!("driver {}, {open} kernel module", driver.version)
        }
    };
    let devices = match gpus.devices.len() {
        0 => "no device".to_owned(),
        devices => counted(devices, "device"),
    };
    let known = gpus.driver.is_some() || !gpus.devices.is_empty();
    let mut text = line("GPU", &if known { format!("{devices}; {driver}") } else { devices });
    for gpu in &gpus.devices {
        text += &line("", &format!("{} at {}", gpu.model.as_deref().unwrap_or("NVIDIA"), gpu.address));
    }
    if let Some(cuda) = &gpus.cuda {
        for gpu in &cuda.devices {
            let memory = rounded(gpu.memory_bytes);
            let details = format!("compute capability {}, {memory}, at {}", gpu.capability, gpu.address);
            text += &line("", &format!("CUDA {}: {}, {details}", gpu.number, gpu.name));
        }
        if let Some(failure) = &cuda.failure {
            text += &line("", &format!("CUDA: {failure}"));
        }
    }
    for mode in &gpus.gdr_modes {
        let possible = if mode.possible { "yes" } else { "no" };
        text += &line("", &format!("RDMA by {:18}  {possible:3}  {}", mode.name, mode.why));
    }
    text
}

fn topology(topology: &TopologyReport) -> String {
    let mut lines = Vec::new();
    topology.tree.iter().for_each(|node| draw(node, 0, &mut lines));
    let mut text = String::new();
    for (index, place) in lines.iter().enumerate() {
        text += &line(if index == 0 { "topology" } else { "" }, place);
    }
    let width = topology.ranks.iter().map(|rank| rank.rank.len()).max().unwrap_or(0);
    for (index, rank) in topology.ranks.iter().enumerate() {
        let ports: Vec<String> = rank
            .ports
            .iter()
            .map(|port| {
                let staged = match port.reaches_gpu {
                    Some(false) => format!(", farther than FLEXRING_GDR_LEVEL={}", topology.gdr_level),
                    _ => String::new(),
                };
                format!("{}:{} ({}{staged})", port.device, port.port, port.distance)
            })
            .collect();
        let ports = if ports.is_empty() { "no port".to_owned() } else { ports.join(", ") };
        let heading = if index == 0 { "ranks" } else { "" };
        text += &line(heading, &format!("{:width$}  {ports}", rank.rank));
    }
    text
}

/// The lines of a place and of all below it.
fn draw(node: &TreeNode, depth: usize, lines: &mut Vec<String>) {
    lines.push(format!("{}{}", "  ".repeat(depth), node.label));
    node.below.iter().for_each(|below| draw(below, depth + 1, lines));
}

fn settings(facts: &Facts) -> String {
    let set: Vec<String> = facts.settings.set.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let mut text = String::new();
    for (index, setting) in set.iter().enumerate() {
        text += &line(if index == 0 { "settings" } else { "" }, setting);
    }
    match (set.is_empty(), facts.settings.unusable.is_empty()) {
        (false, _) => text,
        (true, true) => line("settings", "none is set"),
        (true, false) => line("settings", "none can be used"),
    }
}
