//! File trees of machines for tests, in the layout of the kernel.
//!
//! Owns writing them. The tests of the command include this file too, so it uses nothing of this crate.

use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A machine as a file tree in a temporary directory.
pub struct FakeMachine {
    folder: TempDir,
}

/// A port as the kernel shows it, to be written by [`FakeMachine::device`].
#[derive(Clone, Copy)]
pub struct FakePort<'a> {
    pub state: &'a str,
    pub layer: &'a str,
    pub rate: &'a str,
    pub lid: &'a str,
    /// (index, GID, type, network interface)
    pub gids: &'a [(usize, &'a str, &'a str, &'a str)],
}

/// An active InfiniBand port.
pub const INFINIBAND: FakePort<'_> = FakePort {
    state: "4: ACTIVE",
    layer: "InfiniBand",
    rate: "400 Gb/sec (4X NDR)",
    lid: "0x1f",
    gids: &[(0, "fe80:0000:0000:0000:9803:9b03:0067:ce60", "IB/RoCE v1", "")],
};

/// An active Ethernet port without GIDs.
pub const ETHERNET: FakePort<'_> =
    FakePort { state: "4: ACTIVE", layer: "Ethernet", rate: "100 Gb/sec (4X EDR)", lid: "0x0", gids: &[] };

/// The GID table of an Ethernet port with an IPv4 and an IPv6 address.
pub const GIDS_OF_ETH0: &[(usize, &str, &str, &str)] = &[
    (0, "fe80:0000:0000:0000:0042:acff:fe11:0002", "IB/RoCE v1", "eth0"),
    (1, "fe80:0000:0000:0000:0042:acff:fe11:0002", "RoCE v2", "eth0"),
    (2, "0000:0000:0000:0000:0000:ffff:0a01:0005", "IB/RoCE v1", "eth0"),
    (3, "0000:0000:0000:0000:0000:ffff:0a01:0005", "RoCE v2", "eth0"),
    (4, "fd00:0000:0000:0001:0000:0000:0000:0005", "IB/RoCE v1", "eth0"),
    (5, "fd00:0000:0000:0001:0000:0000:0000:0005", "RoCE v2", "eth0"),
    (6, "0000:0000:0000:0000:0000:0000:0000:0000", "", ""),
];

impl FakeMachine {
    /// A machine without files.
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("create a directory") }
    }

    pub fn root(&self) -> &Path {
        self.folder.path()
    }

    /// Writes a file with a final newline.
    pub fn file(&self, path: &str, text: &str) -> &Self {
        let path = self.with_parents(path);
        fs::write(path, format!("{text}\n")).expect("write a file");
        self
    }

    /// Writes a symbolic link to a directory of this machine, and creates the directory.
    pub fn link(&self, path: &str, target: &str) -> &Self {
        let target = self.root().join(target);
        fs::create_dir_all(&target).expect("create a directory");
        std::os::unix::fs::symlink(target, self.with_parents(path)).expect("write a link");
        self
    }

    fn with_parents(&self, path: &str) -> PathBuf {
        let path = self.root().join(path);
        fs::create_dir_all(path.parent().expect("a path with a parent")).expect("create a directory");
        path
    }

    /// Writes NUMA nodes of four processors each, with these distances, and the processors that this process
    /// may run on.
    pub fn numa(&self, distances: &[&str], allowed: &str) -> &Self {
        for (node, distances) in distances.iter().enumerate() {
            let folder = format!("sys/devices/system/node/node{node}");
            self.file(&format!("{folder}/distance"), distances);
            self.file(&format!("{folder}/cpulist"), &format!("{}-{}", 4 * node, 4 * node + 3));
        }
        self.file("proc/self/status", &format!("Name:\tx\nCpus_allowed_list:\t{allowed}"))
    }

    /// Writes a device at a PCI path, such as `pci0000:3a/0000:3a:00.0/0000:3b:00.0`, of a NUMA node.
    pub fn hca(&self, name: &str, slot: &str, numa: i32, ports: &[FakePort<'_>]) -> &Self {
        let device = format!("sys/devices/{slot}");
        self.file(&format!("{device}/numa_node"), &numa.to_string());
        self.link(&format!("{device}/driver"), "sys/bus/pci/drivers/mlx5_core");
        self.link(&format!("sys/class/infiniband/{name}/device"), &device);
        self.file(&format!("sys/class/infiniband/{name}/fw_ver"), "28.39.1002");
        self.device(name, ports)
    }

    /// Writes a software device, or completes one that [`hca`](Self::hca) began.
    pub fn device(&self, name: &str, ports: &[FakePort<'_>]) -> &Self {
        let folder = format!("sys/class/infiniband/{name}");
        self.file(&format!("{folder}/node_type"), "1: CA");
        self.file(&format!("{folder}/node_guid"), "9803:9b03:0067:ce60");
        for (number, port) in ports.iter().enumerate() {
            let folder = format!("{folder}/ports/{}", number + 1);
            for (name, text) in [
                ("state", port.state),
                ("phys_state", if port.state == "1: DOWN" { "3: Disabled" } else { "5: LinkUp" }),
                ("link_layer", port.layer),
                ("rate", port.rate),
                ("lid", port.lid),
                ("sm_lid", "0x1"),
                ("pkeys/0", "0xffff"),
                ("pkeys/1", "0x0000"),
            ] {
                self.file(&format!("{folder}/{name}"), text);
            }
            for (index, gid, kind, netdev) in port.gids {
                self.file(&format!("{folder}/gids/{index}"), gid);
                // The kernel refuses to read an unused entry; here it does not exist.
                if !kind.is_empty() {
                    self.file(&format!("{folder}/gid_attrs/types/{index}"), kind);
                    self.file(&format!("{folder}/gid_attrs/ndevs/{index}"), netdev);
                }
            }
        }
        let file = format!("uverbs{name}");
        self.file(&format!("sys/class/infiniband_verbs/{file}/ibdev"), name);
        self.file(&format!("dev/infiniband/{file}"), "")
    }

    /// Writes a network interface that is up.
    pub fn netdev(&self, name: &str, mtu: u32) -> &Self {
        self.file(&format!("sys/class/net/{name}/mtu"), &mtu.to_string());
        self.file(&format!("sys/class/net/{name}/operstate"), "up")
    }
}
