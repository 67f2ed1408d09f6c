//! Ranks in namespaces: machines with several networks, names that become known later, and containers.
//!
//! Ranks are processes of this test binary. They print what they found.

use crate::fault_matrix::network::{self, Network};
use crate::harness::{free_port, test_name, with_watchdog};
use crate::programs::program;
use flexring::{Communicator, ReduceOp};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);
/// Set in ranks only.
const IS_RANK: &str = "TEST_RANK_IN_A_NAMESPACE";
const ELEMENTS: usize = 1 << 20;

/// What a rank does.
#[test]
fn a_rank_in_a_namespace() {
    if std::env::var_os(IS_RANK).is_none() {
        return;
    }
    let mut out = std::io::stdout();
    let report = with_watchdog(LIMIT, || {
        let comm = match Communicator::from_env() {
            Ok(comm) => comm,
            Err(error) => return format!("failed: {}", error.message()),
        };
        let mut vector = vec![comm.rank() as u32 + 1; ELEMENTS];
        comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
        let world = comm.world_size() as u32;
        assert!(vector.iter().all(|sum| *sum == world * (world + 1) / 2));
        comm.barrier().expect("all have the sum");
        let sent = |interface: &str| {
            let path = format!("/sys/class/net/{interface}/statistics/tx_bytes");
            std::fs::read_to_string(path).map_or(0, |bytes| bytes.trim().parse::<usize>().expect("a number"))
        };
        // All but what the control connections send.
        let [usual, fast] =
            [Network::INTERFACE, Network::DATA_INTERFACE].map(|interface| sent(interface) >= ELEMENTS);
        let nodes = comm.topology().nodes();
        format!("{nodes} nodes, sent by the usual network: {usual}, by the fast one: {fast}")
    });
    writeln!(out, "\nreport: {report}").expect("the test reads");
}

/// Lets a command run the body of a rank.
fn as_rank(mut command: Command, rank: usize, world: usize, host: &str, port: u16) -> Command {
    command.args([&test_name(module_path!(), "a_rank_in_a_namespace"), "--exact", "--nocapture"]);
    command.env(IS_RANK, "1").env("FLEXRING_RANK", rank.to_string());
    command.env("FLEXRING_WORLD_SIZE", world.to_string());
    command.env("FLEXRING_MASTER_ADDR", host).env("FLEXRING_MASTER_PORT", port.to_string());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// What the ranks report, by rank.
fn reports(ranks: Vec<Child>) -> Vec<String> {
    let report = |rank: Child| {
        let output = rank.wait_with_output().expect("it ends");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let report = text.lines().find_map(|line| line.strip_prefix("report: ")).map(str::to_owned);
        report.unwrap_or_else(|| format!("none: {text}{}", String::from_utf8_lossy(&output.stderr)))
    };
    // At the same time, as all fill their pipes.
    let ranks: Vec<_> = ranks.into_iter().map(|rank| std::thread::spawn(move || report(rank))).collect();
    ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
}

/// Starts a rank on each node of a network, by the default of `FLEXRING_SOCKET_IFNAME`.
fn run_on(network: &Network, ranks: usize, change: impl Fn(usize, Command) -> Command) -> Vec<String> {
    let rank = |rank| {
        let mut command = change(rank, network.command(rank));
        command.env_remove("FLEXRING_SOCKET_IFNAME");
        let mut command = as_rank(command, rank, ranks, &Network::address(0), 29_400);
        command.env("FLEXRING_CONNECT_TIMEOUT_MS", "20000").spawn().expect("started")
    };
    reports((0..ranks).map(rank).collect())
}

/// Runs a test in namespaces of its own, or returns `false` in the process that is there.
fn runs_inside(name: &str) -> bool {
    match network::run_inside(&test_name(module_path!(), name)) {
        Ok(None) => return false,
        Ok(Some(status)) => assert!(status.success(), "{status}"),
        Err(cause) => eprintln!("skipped: {cause}"),
    }
    true
}

#[test]
fn interfaces_that_lead_to_no_peer_are_not_used() {
    if runs_inside("interfaces_that_lead_to_no_peer_are_not_used") {
        return;
    }
    with_watchdog(LIMIT, || {
        // A VPN, a container engine and a link-local cable, which the system lists first. Every node has the
        // same addresses.
        let decoys = [
            "link add vpn0 type veth peer name vpn1",
            "addr add 10.9.0.1/24 dev vpn0",
            "link add docker0 type bridge",
            "link set vpn1 master docker0",
            "addr add 172.17.0.1/16 dev docker0",
            "link add cable0 type veth peer name cable1",
            "addr add 169.254.7.7/16 dev cable0",
            "link set vpn0 up",
            "link set vpn1 up",
            "link set docker0 up",
            "link set cable0 up",
            "link set cable1 up",
        ];
        let network = Network::with_interfaces(0, 2, &decoys);
        network.add_duplicate_address();
        for report in run_on(&network, 2, |_, command| command) {
            assert_eq!(report, "2 nodes, sent by the usual network: true, by the fast one: false");
        }
    });
}

#[test]
fn the_faster_of_two_networks_is_used_if_it_leads_to_the_peer() {
    if runs_inside("the_faster_of_two_networks_is_used_if_it_leads_to_the_peer") {
        return;
    }
    with_watchdog(LIMIT, || {
        let folder = tempfile::tempdir().expect("a folder");
        // Virtual interfaces all have 10000 Mbit/s.
        let speeds = [1_000, 100_000].map(|speed: u32| {
            let path = folder.path().join(speed.to_string());
            std::fs::write(&path, format!("{speed}\n")).expect("written");
            path
        });
        for (number, (of_rank_1, is_cut, uses_fast)) in
            [(1, false, true), (0, false, false), (1, true, false)].into_iter().enumerate()
        {
            let network = Network::new(number, 2);
            network.add_data_network();
            if is_cut {
                network.separate_data(1);
            }
            let reports = run_on(&network, 2, |rank, command| {
                let speed = if rank == 1 { &speeds[of_rank_1] } else { &speeds[1] };
                let interface = Network::DATA_INTERFACE;
                let file = format!("$(readlink -f /sys/class/net/{interface}/speed)");
                let script = format!("mount --bind \"$0\" \"{file}\"; exec \"$@\"");
                let mut arguments = command.get_args();
                let mut within = program(command.get_program());
                // ip netns exec NODE
                within
                    .args(arguments.by_ref().take(3))
                    .args(["sh", "-ec", &script])
                    .arg(speed)
                    .args(arguments);
                within
            });
            for report in reports {
                let expected = format!(
                    "2 nodes, sent by the usual network: {}, by the fast one: {uses_fast}",
                    !uses_fast
                );
                assert_eq!(report, expected, "run {number}");
            }
        }
    });
}

#[test]
fn a_rank_that_another_one_cannot_reach_is_named_before_the_time_out() {
    if runs_inside("a_rank_that_another_one_cannot_reach_is_named_before_the_time_out") {
        return;
    }
    with_watchdog(LIMIT, || {
        let network = Network::new(0, 3);
        network.drop_packets(2, 1);
        let reports = run_on(&network, 3, |_, command| command);
        for report in &reports {
            assert!(report.contains("rank 1 listens at 198.18.0.2:"), "{report}");
            assert!(report.contains("but rank 2 gets no answer from there within 5."), "{report}");
        }
    });
}

#[test]
fn rank_0_waits_for_its_own_name() {
    if !rustix::process::geteuid().is_root() || !std::path::Path::new("/etc/nsswitch.conf").exists() {
        eprintln!("skipped: only root can replace the names of hosts");
        return;
    }
    with_watchdog(LIMIT, || {
        let folder = tempfile::tempdir().expect("a folder");
        let [hosts, order] = ["hosts", "order"].map(|name| folder.path().join(name));
        std::fs::write(&hosts, "127.0.0.1 localhost\n").expect("written");
        std::fs::write(&order, "hosts: files\n").expect("written");
        let port = free_port();
        let script =
            "mount --bind \"$0\" /etc/hosts; mount --bind \"$1\" /etc/nsswitch.conf; shift; exec \"$@\"";
        let rank = |rank| {
            let mut command = program("unshare");
            command.args(["--mount", "--propagation", "private", "sh", "-ec", script]);
            command.arg(&hosts).arg(&order).arg(std::env::current_exe().expect("this binary"));
            as_rank(command, rank, 2, "rank-0.job.example", port).spawn().expect("started")
        };
        let mut ranks = vec![rank(0), rank(1)];
        std::thread::sleep(Duration::from_secs(1));
        let early = ranks[0].try_wait().expect("a child");
        std::fs::write(&hosts, "127.0.0.1 localhost\n127.0.0.1 rank-0.job.example\n").expect("written");
        assert!(early.is_none(), "rank 0 has not waited");
        for report in reports(ranks) {
            assert!(report.starts_with("1 nodes"), "{report}");
        }
    });
}

/// A process that holds a user namespace. Dropping it ends it.
struct UserNamespace(Child);

impl UserNamespace {
    /// One whose users are those of this machine from `first` on.
    fn new(first: u32) -> Result<Self, String> {
        let mut unshare = Command::new("unshare");
        unshare
            .args(["--user", "sh", "-c", "echo made; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut namespace = Self(unshare.spawn().map_err(|cause| format!("unshare: {cause}"))?);
        let out = namespace.0.stdout.take().expect("its output is piped");
        let made = BufReader::new(out).lines().next();
        if !matches!(made, Some(Ok(line)) if line == "made") {
            return Err("no user namespace can be made here".to_owned());
        }
        for map in ["uid_map", "gid_map"] {
            let path = format!("/proc/{}/{map}", namespace.0.id());
            std::fs::write(path, format!("0 {first} 65536")).map_err(|cause| cause.to_string())?;
        }
        Ok(namespace)
    }

    /// A program that runs there as its root.
    fn command(&self) -> Command {
        let mut command = program("nsenter");
        command.args(["--user", "--setuid", "0", "--setgid", "0", "--target", &self.0.id().to_string()]);
        command
    }
}

impl Drop for UserNamespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn containers_share_memory_exactly_if_they_have_one_user() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can map users");
        return;
    }
    with_watchdog(LIMIT, || {
        let namespaces = [0, 100_000].map(UserNamespace::new);
        let namespaces = match namespaces {
            [Ok(same), Ok(other)] => [same, other],
            [Err(cause), _] | [_, Err(cause)] => return eprintln!("skipped: {cause}"),
        };
        let this = std::env::current_exe().expect("this binary");
        let starts = namespaces[1].command().arg(&this).arg("--list").output();
        if !starts.is_ok_and(|output| output.status.success()) {
            return eprintln!("skipped: other users cannot start {}", this.display());
        }
        let plain = || program("env");
        let separate = || {
            let mut command = program("unshare");
            command.args(["--pid", "--fork"]);
            command
        };
        for (name, one, other, nodes) in [
            ("a user namespace of the same user", plain(), namespaces[0].command(), 1),
            ("a user namespace of another user", plain(), namespaces[1].command(), 2),
            ("another user on rank 0", namespaces[1].command(), plain(), 2),
            ("a PID namespace", plain(), separate(), 1),
        ] {
            let port = free_port();
            let ranks = [one, other].into_iter().enumerate().map(|(rank, mut command)| {
                command.arg(&this);
                as_rank(command, rank, 2, "127.0.0.1", port).spawn().expect("started")
            });
            for report in reports(ranks.collect()) {
                assert!(report.starts_with(&format!("{nodes} nodes")), "{name}: {report}");
            }
        }
    });
}
