//! Reports on machines that are file trees, and findings.

use super::device_probe::{DeviceProbe, LibraryReport};
use super::facts::Facts;
use super::findings::{Finding, Severity};
use super::gpu::GpuReport;
use super::process::Variables;
use super::report::DoctorReport;
use super::text::render;
use fake::{ETHERNET, FakeMachine, FakePort, GIDS_OF_ETH0, INFINIBAND};
use flexring::internal::transport::verbs::gpu::gdr_mode::GdrUnavailable;
use flexring_core::config::GpuDirect;

#[path = "../../../../src/transport/verbs/inventory/fake.rs"]
#[allow(dead_code, reason = "shared with the tests of the inventory")]
mod fake;

const ROCE: FakePort<'_> = FakePort { gids: GIDS_OF_ETH0, ..ETHERNET };

fn variables(pairs: &[(&str, &str)]) -> Variables {
    pairs.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
}

/// The report on a machine, by a build with all features, for a process without a memlock limit.
fn report(machine: &FakeMachine, pairs: &[(&str, &str)]) -> DoctorReport {
    let mut facts = Facts::gather(machine.root(), &variables(pairs));
    facts.build.verbs = true;
    facts.build.cuda = true;
    facts.memory.memlock_bytes = None;
    DoctorReport::new(facts)
}

fn found(report: &DoctorReport, message: &str) -> Finding {
    let found = report.findings.iter().find(|finding| finding.message.contains(message));
    found.unwrap_or_else(|| panic!("{message:?} in {:#?}", report.findings)).clone()
}

fn contains(text: &str, lines: &[&str]) {
    for line in lines {
        assert!(text.contains(line), "{line:?} in\n{text}");
    }
}

#[test]
fn flexring_runs_on_a_machine_without_devices() {
    let report = report(&FakeMachine::new(), &[]);
    assert!(report.runs());
    let note = found(&report, "there is no RDMA device");
    assert_eq!(note.severity, Severity::Note);
    assert!(note.fix.expect("a fix").contains("rdma link add rxe0 type rxe netdev eth0"));
    contains(
        &render(&report),
        &["RDMA       no device; no RDMA module is loaded\n", "GPU        no device\n"],
    );
}

#[test]
fn slow_start_after_a_pause_is_noted() {
    let note = |setting: &str, transport: &str| {
        let machine = FakeMachine::new();
        machine.file("proc/sys/net/ipv4/tcp_slow_start_after_idle", setting);
        let findings = report(&machine, &[("FLEXRING_TRANSPORT", transport)]).findings;
        findings.into_iter().find(|finding| finding.message.contains("TCP returns to slow start"))
    };
    assert_eq!(note("1\n", "auto").expect("a note").severity, Severity::Note);
    assert_eq!([note("0\n", "auto"), note("1\n", "shm")], [None, None]);
}

#[test]
fn roce_is_reported_with_ports_addresses_and_mtu() {
    let machine = FakeMachine::new();
    let down = FakePort { state: "1: DOWN", gids: &[], ..ETHERNET };
    machine.device("rxe0", &[ROCE, down]).netdev("eth0", 1500);
    machine.file("sys/module/rdma_rxe/refcnt", "1").file("sys/module/ib_core/refcnt", "3");
    let report = report(&machine, &[]);
    let text = render(&report);
    contains(
        &text,
        &[
            "\nRDMA       1 device; modules ib_core, rdma_rxe\n           rxe0: software device\n",
            "  port 1: Ethernet, active, 100 Gbit/s, eth0 with MTU 1500, 1024 in RDMA packets\n",
            "    used as rail 0\n",
            "    GID  1  fe80::42:acff:fe11:2  RoCE v2  eth0\n",
            "    GID  3  10.1.0.5              RoCE v2  eth0  chosen: RoCE v2, IPv4 10.1.0.5 of eth0, the first",
            "  port 2: Ethernet, down\n",
            "    not used: it is down\n",
            "\nverbs      yes  over rxe0:1\n",
            "\nnote       the MTU of eth0, 1500, limits RDMA packets to 1024 bytes instead of 4096\n",
            "           fix: ip link set eth0 mtu 9000",
        ],
    );
    assert_eq!(found(&report, "rxe0:2 is down").severity, Severity::Note);
    assert!(text.ends_with("flexring runs here\n"), "{text}");
    assert_eq!(text.matches("chosen:").count(), 1);
    machine.file("sys/class/infiniband/rxe0/ports/1/state", "1: DOWN");
    contains(
        &render(&self::report(&machine, &[])),
        &["RoCE v2  eth0  would be chosen: RoCE v2, IPv4 10.1.0.5"],
    );
}

#[test]
fn a_remote_or_unconfigured_port_has_a_fix() {
    let machine = FakeMachine::new();
    machine.numa(&["10 21", "21 10"], "0-3");
    machine.hca("mlx5_0", "pci0000:3a/0000:3b:00.0", 1, &[INFINIBAND]);
    let far = report(&machine, &[]);
    let note = found(&far, "even the nearest rail, mlx5_0, is on NUMA node 1");
    assert_eq!(note.fix.as_deref(), Some("numactl --cpunodebind=1 --membind=1"));
    contains(
        &render(&far),
        &[
            "mlx5_0: mlx5_core at 0000:3b:00.0, NUMA node 1 (distance 21), firmware 28.39.1002\n",
            "  port 1: InfiniBand, active, 400 Gbit/s, LID 31\n",
            ", on NUMA node 0 of 2\n",
        ],
    );
    machine.file("sys/class/infiniband/mlx5_0/ports/1/state", "2: INIT");
    let down = report(&machine, &[]);
    let problem = found(&down, "mlx5_0:1 is initializing, as no subnet manager has configured it");
    assert_eq!(problem.severity, Severity::Problem);
    assert!(down.runs(), "there is TCP");
    let asked = report(&machine, &[("FLEXRING_TRANSPORT", "verbs")]);
    assert!(!asked.runs());
    found(&asked, "FLEXRING_TRANSPORT=verbs needs verbs, but no RDMA port can be used");
    let excluded = report(&machine, &[("FLEXRING_IB_HCA", "rxe")]);
    found(&excluded, "FLEXRING_IB_HCA=\"rxe\" admits no RDMA port; the ports are: mlx5_0:1");
}

#[test]
fn a_process_that_may_run_far_from_its_rail_is_advised_to_be_bound() {
    let machine = FakeMachine::new();
    machine.hca("mlx5_0", "pci0000:3a/0000:3b:00.0", 1, &[INFINIBAND]);
    machine.numa(&["10 21", "21 10"], "0-7");
    let note = found(
        &report(&machine, &[]),
        "the nearest rail, mlx5_0, is on NUMA node 1, and this process may run",
    );
    assert_eq!(note.fix.as_deref(), Some("numactl --cpunodebind=1 --membind=1"));
    machine.numa(&["10 21", "21 10"], "4-7");
    let bound = report(&machine, &[]);
    assert!(
        bound.findings.iter().all(|finding| !finding.message.contains("NUMA node")),
        "{:?}",
        bound.findings
    );
}

#[test]
fn the_report_says_what_jobs_do_if_rdma_cannot_be_used() {
    const FAIL: &str = " fail when they start";
    let is_silent = |report: &DoctorReport| report.findings.iter().all(|it| !it.message.contains(FAIL));
    let machine = FakeMachine::new();
    assert!(is_silent(&report(&machine, &[])), "without devices, TCP connects all nodes");
    machine.device("rxe0", &[ROCE]);
    assert!(is_silent(&report(&machine, &[])), "RDMA works");

    let mut unopened = report(&machine, &[]);
    let failure = Some("libibverbs.so.1 cannot be opened".to_owned());
    unopened.facts.rdma.library = Some(LibraryReport { failure, ..LibraryReport::default() });
    unopened = DoctorReport::new(unopened.facts);
    let problem = found(&unopened, "jobs on several nodes fail when they start: RDMA ports work here");
    assert_eq!(problem.severity, Severity::Problem);
    assert!(problem.fix.expect("a fix").contains("FLEXRING_TRANSPORT=auto-tcp"));

    machine.file("sys/class/infiniband/rxe0/ports/1/state", "1: DOWN");
    let note = found(&report(&machine, &[]), "jobs with other nodes that can use RDMA fail when they start");
    assert_eq!(note.severity, Severity::Note);
    for other in ["auto-tcp", "tcp", "shm"] {
        assert!(is_silent(&report(&machine, &[("FLEXRING_TRANSPORT", other)])), "{other}");
    }
}

#[test]
fn a_build_without_verbs_says_how_to_get_one() {
    let machine = FakeMachine::new();
    machine.device("rxe0", &[ROCE]);
    let mut report = report(&machine, &[("FLEXRING_TRANSPORT", "verbs")]);
    report.facts.build.verbs = false;
    report = DoctorReport::new(report.facts);
    assert!(!report.runs());
    let fix = found(&report, "needs verbs, but this build has no verbs").fix;
    assert_eq!(
        fix.as_deref(),
        Some("cargo build --release, without --no-default-features or with --features verbs")
    );
    assert_eq!(found(&report, "there is RDMA here").severity, Severity::Problem);
}

#[test]
fn a_low_memlock_limit_is_a_problem_with_rdma() {
    let machine = FakeMachine::new();
    machine.device("rxe0", &[ROCE]);
    let mut report = report(&machine, &[("FLEXRING_SLOTS", "16")]);
    assert_eq!(report.facts.memory.needed_bytes, 17 * (128 << 10) + (1 << 20));
    machine.file("proc/driver/nvidia/gpus/0000:1b:00.0/information", "Model: \t\t NVIDIA H200\n");
    let job = [("FLEXRING_SLOTS", "16"), ("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")];
    assert_eq!(
        self::report(&machine, &job).facts.memory.needed_bytes,
        17 * (128 << 10) + (4 << 20) + (1 << 20),
        "with the slots of a link between kernels"
    );
    let job = [("FLEXRING_SLOTS", "16"), ("RANK", "0"), ("WORLD_SIZE", "33"), ("MASTER_ADDR", "a")];
    assert_eq!(self::report(&machine, &job).facts.memory.slots, 64, "two per peer");
    report.facts.memory.memlock_bytes = Some(64 << 10);
    report = DoctorReport::new(report.facts);
    let problem = found(&report, "64K may be locked, but RDMA needs 3.1M for its pool and queues");
    assert_eq!(problem.severity, Severity::Problem);
    assert!(problem.fix.expect("a fix").starts_with("ulimit -l unlimited; "));
    assert!(render(&report).ends_with("but not as well as it could\n"));
    report.facts.memory.memlock_exempt = true;
    report = DoctorReport::new(report.facts);
    assert!(report.findings.iter().all(|finding| !finding.message.contains("locked")));
}

#[test]
fn each_gdr_mode_has_a_reason() {
    const VERSION: &str = "proc/driver/nvidia/version";
    const OPEN: &str =
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release BuildInfo";
    const CLOSED: &str =
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024";
    const SYMBOLS: &str = "0 t ib_umem_dmabuf_get [ib_uverbs]\n0 T ib_register_peer_memory_client [ib_core]";
    let machine = || {
        let machine = FakeMachine::new();
        machine.hca("mlx5_0", "pci0000:3a/0000:3b:00.0", 0, &[INFINIBAND]);
        machine.file("proc/driver/nvidia/gpus/0000:1b:00.0/information", "Model: \t\t NVIDIA H200\nIRQ: 7");
        machine.file("proc/sys/kernel/osrelease", "6.8.0-45-generic").file("proc/kallsyms", SYMBOLS);
        machine
    };
    let expected = |machine: &FakeMachine, pairs: &[(&str, &str)]| {
        let report = report(machine, pairs);
        report.facts.gpus.expected().map(|mode| (mode.name, mode.why.clone())).expect("a GPU")
    };
    let open = machine();
    open.file(VERSION, OPEN);
    assert_eq!(expected(&open, &[]), ("DMA-BUF", "open kernel module 560.35.03".to_owned()));
    assert_eq!(expected(&open, &[("FLEXRING_GPU_DIRECT", "off")]).0, "pinned host memory");
    let text = render(&report(&open, &[]));
    contains(
        &text,
        &[
            "\nGPU        1 device; driver 560.35.03, open kernel module\n           NVIDIA H200 at 0000:1b:00.0\n",
            "RDMA by DMA-BUF             yes  open kernel module 560.35.03\n",
            "RDMA by peer memory         no   its module is not loaded\n",
        ],
    );
    let closed = machine();
    closed.file(VERSION, CLOSED);
    let report = report(&closed, &[]);
    assert_eq!(report.facts.gpus.expected().map(|mode| mode.name), Some("pinned host memory"));
    found(&report, "by DMA-BUF is not possible: the driver's kernel module is not the open-source one");
    let fix = found(&report, "by peer memory is not possible: its module is not loaded").fix;
    assert_eq!(fix.as_deref(), Some("modprobe nvidia-peermem"));
    closed.file("sys/module/nvidia_peermem/refcnt", "0");
    assert_eq!(expected(&closed, &[]), ("peer memory", "nvidia_peermem is loaded".to_owned()));
    let old = machine();
    old.file(VERSION, OPEN)
        .file("proc/sys/kernel/osrelease", "5.4.0-1-generic")
        .file("proc/kallsyms", "0 T x");
    let modes: Vec<String> =
        self::report(&old, &[]).facts.gpus.gdr_modes.iter().map(|mode| mode.why.clone()).collect();
    assert_eq!(
        modes,
        [
            "the kernel is older than 5.12",
            "the kernel's RDMA core does not support peer memory",
            "works everywhere"
        ]
    );
    let bare = FakeMachine::new();
    bare.file("sys/bus/pci/devices/0000:1b:00.0/vendor", "0x10de");
    bare.file("sys/bus/pci/devices/0000:1b:00.0/class", "0x030200");
    bare.file("sys/bus/pci/devices/0000:1c:00.0/vendor", "0x10de");
    bare.file("sys/bus/pci/devices/0000:1c:00.0/class", "0x068000");
    contains(
        &render(&self::report(&bare, &[])),
        &["1 device; no driver\n           NVIDIA at 0000:1b:00.0\n"],
    );
}

#[test]
fn answers_of_devices_take_precedence_over_files() {
    let machine = FakeMachine::new();
    machine.hca("mlx5_0", "pci0000:3a/0000:3b:00.0", 0, &[INFINIBAND]);
    machine.file("proc/driver/nvidia/gpus/0000:1b:00.0/information", "Model: NVIDIA H200");
    let version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release BuildInfo";
    machine.file("proc/driver/nvidia/version", version);
    let mut report = report(&machine, &[]);
    assert!(report.facts.rdma.probes.is_empty(), "files probe nothing");
    let no = DeviceProbe {
        device: "mlx5_0".to_owned(),
        failure: None,
        active_mtus: vec![(1, 4096)],
        imports_dmabuf: Some(false),
        why_not: Some(
            GdrUnavailable::new("the driver of mlx5_0 does not import DMA-BUFs").with_fix("use another"),
        ),
    };
    let yes = DeviceProbe { imports_dmabuf: Some(true), why_not: None, ..no.clone() };
    let dmabuf_mode = |probes: &[DeviceProbe]| {
        GpuReport::read(machine.root(), GpuDirect::Auto, &[], probes).gdr_modes.swap_remove(0)
    };
    let why = "open kernel module 560.35.03, and the driver of mlx5_0 imports DMA-BUFs";
    assert_eq!(dmabuf_mode(&[yes]).why, why);
    report.facts.gpus.gdr_modes[0] = dmabuf_mode(std::slice::from_ref(&no));
    report.facts.rdma.probes = vec![no];
    report = DoctorReport::new(report.facts);
    contains(
        &render(&report),
        &[
            "           mlx5_0: mlx5_core at 0000:3b:00.0, NUMA node 0 (distance 10), firmware 28.39.1002\n             \
             GPU memory by DMA-BUF: no, the driver of mlx5_0 does not import DMA-BUFs\n",
            "  port 1: InfiniBand, active, 400 Gbit/s, LID 31, active MTU 4096\n",
            "RDMA by DMA-BUF             no   the driver of mlx5_0 does not import DMA-BUFs\n",
        ],
    );
    let fix = found(&report, "by DMA-BUF is not possible: the driver of mlx5_0 does not import DMA-BUFs").fix;
    assert_eq!(fix.as_deref(), Some("use another"));
    report.facts.rdma.probes[0].failure = Some("ibv_open_device failed on mlx5_0".to_owned());
    report = DoctorReport::new(report.facts);
    assert_eq!(found(&report, "ibv_open_device failed on mlx5_0").severity, Severity::Problem);
    contains(&render(&report), &["  cannot be opened: ibv_open_device failed on mlx5_0\n"]);
}
