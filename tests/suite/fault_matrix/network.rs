//! A network of namespaces, one for each rank, whose links can be set down.
//!
//! Owns their creation and removal: they belong to a mount namespace that only the processes of a test are
//! in, so they vanish with its last process, however that ends.

use crate::programs::program;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};

/// The variable by which a process knows that it is in such a mount namespace.
const INSIDE: &str = "FAULT_MATRIX_NAMESPACES";

/// Runs the test `name` of this binary in namespaces of its own, where a [`Network`] can be made. `None` in
/// the process that runs there.
///
/// # Errors
/// Why there can be no such namespaces.
pub fn run_inside(name: &str) -> Result<Option<ExitStatus>, String> {
    if std::env::var_os(INSIDE).is_some() {
        return Ok(None);
    }
    if !rustix::process::geteuid().is_root() {
        return Err("network namespaces need root".to_owned());
    }
    let unshare = |script: &str, arguments: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "--net", "--pid", "--fork", "--kill-child"]);
        command.args(["--mount-proc", "sh", "-ec", script]).args(arguments);
        command
    };
    let probe = "mount -t tmpfs none /run; ip netns add probe; ip link add probe type bridge";
    let output =
        unshare(probe, &[]).stdin(Stdio::null()).output().map_err(|cause| format!("unshare: {cause}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).trim().to_owned());
    }
    let this = std::env::current_exe().expect("this binary");
    let mut command = unshare("mount -t tmpfs none /run; exec \"$@\"", &["sh"]);
    command.arg(this).args([name, "--exact", "--nocapture"]).env(INSIDE, "1");
    // Ends with the test, also when the test is killed.
    Ok(Some(command.process_group(0).status().expect("unshare")))
}

/// Namespaces of ranks that are connected by a switch.
#[derive(Debug)]
pub struct Network {
    /// Distinguishes the networks of a test.
    number: usize,
    ranks: usize,
}

impl Network {
    /// The name of the interface of each rank.
    pub const INTERFACE: &str = "up0";
    /// The name of the interface of each rank to the second network.
    pub const DATA_INTERFACE: &str = "up1";

    /// A network for this number of ranks. Each `number` is used once at a time.
    pub fn new(number: usize, ranks: usize) -> Self {
        Self::with_interfaces(number, ranks, &[])
    }

    /// A network whose nodes have other interfaces, too, which these lines of `ip` make before.
    pub fn with_interfaces(number: usize, ranks: usize, interfaces: &[&str]) -> Self {
        let network = Self { number, ranks };
        let (switch, nodes) = (network.switch(), (0..ranks).map(|rank| network.node(rank)));
        let all: Vec<String> = nodes.chain([switch.clone()]).collect();
        ip(&[], all.iter().map(|name| format!("netns add {name}")));
        for rank in 0..ranks {
            ip(&["-n", &network.node(rank)], interfaces.iter().map(|line| (*line).to_owned()));
        }
        let ports = (0..ranks).flat_map(|rank| {
            let node = network.node(rank);
            [
                format!("link add port{rank} type veth peer name {} netns {node}", Self::INTERFACE),
                format!("link set port{rank} master bridge up"),
            ]
        });
        let bridge = ["link add bridge type bridge", "link set bridge up"].map(str::to_owned);
        ip(&["-n", &switch], bridge.into_iter().chain(ports));
        for rank in 0..ranks {
            let lines = [
                "link set lo up".to_owned(),
                format!("addr add {}/24 dev {}", Self::address(rank), Self::INTERFACE),
                format!("link set {} up", Self::INTERFACE),
            ];
            ip(&["-n", &network.node(rank)], lines);
        }
        network
    }

    /// The address of a rank, one of those that are reserved for benchmarks (RFC 2544).
    pub fn address(rank: usize) -> String {
        format!("198.18.0.{}", rank + 1)
    }

    /// A command that runs this binary as a rank.
    pub fn command(&self, rank: usize) -> Command {
        let mut command = program("ip");
        command.args(["netns", "exec", &self.node(rank)]);
        command.arg(std::env::current_exe().expect("this binary"));
        command.env("FLEXRING_SOCKET_IFNAME", Self::INTERFACE);
        command
    }

    /// Gives each node an address that the switch has already, so that no socket can have it.
    pub fn add_duplicate_address(&self) {
        ip(&["-n", &self.switch()], ["addr add fd00::7/64 dev bridge nodad".to_owned()]);
        for rank in 0..self.ranks {
            let address = format!("addr add fd00::7/64 dev {}", Self::INTERFACE);
            ip(&["-n", &self.node(rank)], [address]);
        }
    }

    /// Connects the ranks by a second network, of 198.19.0.0/24, over
    /// [`DATA_INTERFACE`](Self::DATA_INTERFACE).
    pub fn add_data_network(&self) {
        let interface = Self::DATA_INTERFACE;
        let ports = (0..self.ranks).flat_map(|rank| {
            let node = self.node(rank);
            [
                format!("link add data{rank} type veth peer name {interface} netns {node}"),
                format!("link set data{rank} master bridge up"),
            ]
        });
        ip(&["-n", &self.switch()], ports);
        for rank in 0..self.ranks {
            let address = format!("addr add 198.19.0.{}/24 dev {interface}", rank + 1);
            ip(&["-n", &self.node(rank)], [address, format!("link set {interface} up")]);
        }
    }

    /// From now on the second network drops the packets from and to this rank.
    pub fn cut_data(&self, rank: usize) {
        ip(&["-n", &self.switch()], [format!("link set data{rank} down")]);
    }

    /// Takes a rank off the second network, which it does not notice.
    pub fn separate_data(&self, rank: usize) {
        ip(&["-n", &self.switch()], [format!("link set data{rank} nomaster")]);
    }

    /// Loses everything that one rank sends to another.
    pub fn drop_packets(&self, from: usize, to: usize) {
        let (to, interface) = (Self::address(to), Self::INTERFACE);
        let line = format!("neigh replace {to} lladdr 02:00:00:00:00:99 dev {interface} nud permanent");
        ip(&["-n", &self.node(from)], [line]);
    }

    fn node(&self, rank: usize) -> String {
        format!("n{}-{rank}", self.number)
    }

    fn switch(&self) -> String {
        format!("n{}-switch", self.number)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let names = (0..self.ranks).map(|rank| self.node(rank)).chain([self.switch()]);
        ip(&[], names.map(|name| format!("netns del {name}")));
    }
}

/// Runs `ip` with these lines as its batch.
fn ip(options: &[&str], lines: impl IntoIterator<Item = String>) {
    let mut command = Command::new("ip");
    let mut child = command.args(options).args(["-batch", "-"]).stdin(Stdio::piped()).spawn().expect("ip");
    let lines: String = lines.into_iter().map(|line| line + "\n").collect();
    child.stdin.take().expect("a pipe").write_all(lines.as_bytes()).expect("ip reads it");
    assert!(child.wait().expect("a child").success(), "ip failed on:\n{lines}");
}
