//! How the report reads.
//!
//! Owns the layout. Must not judge.

use super::device_probe::DeviceProbe;
use super::findings::{Finding, Severity};
use super::gpu::GpuReport;
use super::process::{MemoryReport, ProcessorReport};
use super::report::{DoctorReport, RdmaReport, SocketReport};
use crate::output::counted;
use flexring::config::Size;
use flexring::transport::verbs::inventory::{
    Gid, GidKind, Inventory, LinkLayer, PortState, RdmaDevice, RdmaPort,
};
use flexring::transport::verbs::port_selection::PortUse;

/// The width of the words that lines begin with.
const MARGIN: usize = 11;

/// The whole text.
pub fn render(report: &DoctorReport) -> String {
    let mut text = format!("flexring {} on {}, {}\n", report.version, report.host, report.system);
    if let Some(rank) = &report.rank {
        text += &format!("as rank {} of {}, says {}\n", rank.rank, rank.world, rank.launcher);
    }
    text += "\n";
    let with = |has, what| format!("{} {what}", if has { "with" } else { "without" });
    let build = format!("{}, {}", with(report.build.verbs, "verbs"), with(report.build.cuda, "CUDA"));
    text += &line("build", &build);
    if let Some(kernels) = &report.build.kernels {
        text += &line("", &format!("GPU kernels: {kernels}"));
    }
    text += &line("processor", &processor(&report.processor));
    text += &line("memory", &memory(&report.memory));
    text += &sockets(&report.sockets);
    text += &rdma(&report.rdma);
    text += &gpus(&report.gpus);
    text += &settings(report);
    text += "\n";
    for transport in &report.transports {
        let usable = if transport.usable { "yes" } else { "no" };
        text += &line(transport.name, &format!("{usable:3}  {}", transport.why));
    }
    text += "\n";
    for finding in &report.findings {
        text += &told(finding);
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

fn line(word: &str, words: &str) -> String {
    format!("{word:MARGIN$}{words}\n")
}

fn told(finding: &Finding) -> String {
    let word = match finding.severity {
        Severity::Error => "error",
        Severity::Problem => "problem",
        Severity::Note => "note",
    };
    let fix = finding.fix.as_ref().map(|fix| line("", &format!("fix: {fix}"))).unwrap_or_default();
    line(word, &finding.message) + &fix
}

fn processor(processor: &ProcessorReport) -> String {
    let ProcessorReport { cores, simd, nodes, .. } = processor;
    let ours: Vec<String> =
        nodes.iter().filter(|node| node.local).map(|node| node.number.to_string()).collect();
    let numa = match nodes.len() {
        0 | 1 => String::new(),
        all => format!(", on NUMA node {} of {all}", ours.join(", ")),
    };
    format!("{}, {}{numa}", counted(*cores, "core"), simd.unwrap_or("no instruction set"))
}

fn memory(memory: &MemoryReport) -> String {
    let limit = match memory.memlock_bytes {
        None => "any amount may be locked".to_owned(),
        Some(_) if memory.memlock_exempt => "any amount may be locked (CAP_IPC_LOCK)".to_owned(),
        Some(limit) => format!("{} may be locked", size(limit)),
    };
    let on_gpus = memory.gpu_slot_bytes.map(|bytes| format!(", as many of {} for GPUs", size(bytes)));
    format!(
        "{limit}; RDMA needs {} ({} of {}{}, and queues)",
        size(memory.needed_bytes),
        counted(usize::try_from(memory.slots).unwrap_or_default(), "slot"),
        size(memory.slot_bytes),
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
        let word = if text.is_empty() { "sockets" } else { "" };
        text += &line(word, &format!("{:width$}  {}{state}{chosen}", socket.name, socket.address));
    }
    if sockets.interfaces.is_empty() { line("sockets", "no interface") } else { text }
}

fn rdma(rdma: &RdmaReport) -> String {
    let modules = if rdma.modules.is_empty() {
        "no module of it is loaded".to_owned()
    } else {
        format!("modules {}", rdma.modules.join(", "))
    };
    let mut text = match rdma.inventory.devices.len() {
        0 => line("RDMA", &format!("no device; {modules}")),
        devices => line("RDMA", &format!("{}; {modules}", counted(devices, "device"))),
    };
    for (device, distance) in rdma.inventory.devices.iter().zip(&rdma.distances) {
        text += &line("", &format!("{}: {}", device.name, about(device, *distance)));
        let probe = rdma.probes.iter().find(|probe| probe.device == device.name);
        text += &probe.map(answered).unwrap_or_default();
        for port in &device.ports {
            text += &ported(rdma, device, port);
        }
    }
    text
}

/// `mlx5_core at 0000:3b:00.0, NUMA node 0 (distance 10), firmware 28.39.1002`
fn about(device: &RdmaDevice, distance: u32) -> String {
    let mut words = device.driver.clone().unwrap_or_else(|| "made of software".to_owned());
    if let Some(address) = device.pci.address() {
        words += &format!(" at {address}");
    }
    if let Some(numa) = device.pci.numa {
        words += &format!(", NUMA node {numa} (distance {distance})");
    }
    if let Some(firmware) = &device.firmware {
        words += &format!(", firmware {firmware}");
    }
    words
}

/// What the device says of itself, its ports left out.
fn answered(probe: &DeviceProbe) -> String {
    let words = match (&probe.failure, &probe.why_not) {
        (Some(failure), _) => format!("  cannot be asked: {failure}"),
        (None, Some(reason)) => format!("  GPU memory by DMA-BUF: no, {}", reason.message),
        (None, None) => "  GPU memory by DMA-BUF: yes".to_owned(),
    };
    line("", &words)
}

/// A port, what became of it, and its GID table.
fn ported(rdma: &RdmaReport, device: &RdmaDevice, port: &RdmaPort) -> String {
    let decisions = &rdma.selection.decisions;
    let decision =
        decisions.iter().find(|decision| decision.device == device.name && decision.port == port.number);
    let mut words = format!("  port {}: {}, {}", port.number, port.layer.name(), port.state);
    if port.state == PortState::Active {
        words += &format!(", {} Gbit/s", port.rate_mbps as f64 / 1000.0);
    }
    if port.layer == LinkLayer::InfiniBand {
        words += &format!(", LID {}", port.lid);
    }
    if let Some(netdev) = &port.netdev {
        words += &interface(&rdma.inventory, netdev);
    }
    let probe = rdma.probes.iter().find(|probe| probe.device == device.name);
    if let Some(mtu) = probe.and_then(|probe| probe.mtu(port.number)) {
        words += &format!(", active MTU {mtu}");
    }
    let mut text = line("", &words);
    match decision.map(|decision| &decision.outcome) {
        Some(PortUse::Rail(rail)) => text += &line("", &format!("    used as rail {rail}")),
        Some(PortUse::Rejected(reason)) => text += &line("", &format!("    not used: it {}", reason.message)),
        None => {}
    }
    let choice = decision.and_then(|decision| decision.gid.as_ref());
    let is_rail = decision.is_some_and(|decision| matches!(decision.outcome, PortUse::Rail(_)));
    let taken = if is_rail { "chosen" } else { "would be chosen" };
    let shown = |gid: &Gid| match gid.kind {
        GidKind::InfiniBand => gid.address.to_string(),
        _ => gid.ip().to_string(),
    };
    let width = port.gids.iter().map(|gid| shown(gid).len()).max().unwrap_or(0);
    for gid in &port.gids {
        let kind = gid.kind.name();
        let netdev = gid.netdev.as_deref().unwrap_or_default();
        let address = shown(gid);
        let words = format!("    GID {:2}  {address:width$}  {kind}  {netdev}", gid.index);
        let chosen = choice.filter(|choice| choice.index == gid.index);
        let why = chosen.map(|choice| format!("  {taken}: {}", choice.why)).unwrap_or_default();
        text += &line("", &format!("{}{why}", words.trim_end()));
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
            let memory = size(gpu.memory_bytes);
            let words = format!("compute capability {}, {memory}, at {}", gpu.capability, gpu.address);
            text += &line("", &format!("CUDA {}: {}, {words}", gpu.number, gpu.name));
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

fn settings(report: &DoctorReport) -> String {
    let set: Vec<String> =
        report.settings.set.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let mut text = String::new();
    for (place, words) in set.iter().enumerate() {
        text += &line(if place == 0 { "settings" } else { "" }, words);
    }
    if set.is_empty() { line("settings", "none is set") } else { text }
}

/// Bytes as people say them: `128K`, `9.1M`.
pub fn size(bytes: u64) -> String {
    let whole = Size(usize::try_from(bytes).unwrap_or(usize::MAX)).to_string();
    match bytes {
        _ if whole.len() <= 4 => whole,
        0..0x10_0000 => format!("{:.1}K", bytes as f64 / 1024.0),
        0x10_0000..0x4000_0000 => format!("{:.1}M", bytes as f64 / 1024.0 / 1024.0),
        _ => format!("{:.1}G", bytes as f64 / 1024.0 / 1024.0 / 1024.0),
    }
}
