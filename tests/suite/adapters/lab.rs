//! Nodes with adapters that are in memory: `tests/verbs`, and trees of files for `/sys` and
//! `/dev`.
//!
//! Owns building the libraries, the mounts, and starting ranks. Each rank is in a mount namespace of its own,
//! and counts as a rank of the node whose tree it sees.

use super::fake::FakeMachine;
use crate::harness::free_port;
use crate::programs::{Ended, program, root, run, succeed};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// Makes a tree part of what a process sees, and then runs a program: `$0` is the tree, a folder below which
/// the mounts of this process are kept comes first, then the program. `/sys/class` and `/dev` belong to
/// file systems without new entries, so others take their places, with what is needed of the old ones.
const ENTER: &str = r#"
own=$1; shift
mkdir -p "$own/class" "$own/dev" "$own/shm"
mount --bind /sys/class "$own/class"
mount --bind /dev "$own/dev"
mount --bind /dev/shm "$own/shm"
mount -t tmpfs none /sys/class
mkdir /sys/class/net
nets="$own/class/net"; [ ! -d "$0/sys/class/net" ] || nets="$0/sys/class/net"
mount --bind "$nets" /sys/class/net
for name in infiniband infiniband_verbs; do
    [ -d "$0/sys/class/$name" ] || continue
    mkdir "/sys/class/$name"
    mount --bind "$0/sys/class/$name" "/sys/class/$name"
done
[ ! -d "$0/sys/bus/pci/devices" ] || mount --bind "$0/sys/bus/pci/devices" /sys/bus/pci/devices
[ ! -d "$0/sys/devices/system/node" ] || mount --bind "$0/sys/devices/system/node" /sys/devices/system/node
mount -t tmpfs none /dev
mkdir /dev/shm
mount --bind "$own/shm" /dev/shm
for name in null zero full random urandom; do
    touch "/dev/$name"
    mount --bind "$own/dev/$name" "/dev/$name"
done
ln -s /proc/self/fd /dev/fd
[ ! -d "$0/dev/infiniband" ] || { mkdir /dev/infiniband; mount --bind "$0/dev/infiniband" /dev/infiniband; }
exec "$@"
"#;

/// A node: its files, how its adapters differ from good ones (see `libibverbs.c`), and settings of its ranks.
pub struct Node {
    pub machine: FakeMachine,
    pub quirks: String,
    pub settings: Vec<(&'static str, String)>,
    pub ranks: usize,
}

impl Node {
    pub fn new(machine: FakeMachine, ranks: usize) -> Self {
        Self { machine, quirks: String::new(), settings: Vec::new(), ranks }
    }

    pub fn quirks(mut self, quirks: &str) -> Self {
        self.quirks = quirks.to_owned();
        self
    }

    pub fn set(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.settings.push((name, value.into()));
        self
    }
}

/// How the ranks ended, by rank.
#[derive(Debug)]
pub struct Job(pub Vec<Ended>);

impl Job {
    /// The text of all ranks, after all succeeded and rank 0 found the right sums.
    pub fn sums_are_right(&self) -> String {
        let text = self.text();
        assert!(self.0.iter().all(|rank| rank.status.success()), "{text}");
        assert!(self.0[0].text.contains("# Out of bounds values : 0 OK"), "{text}");
        text
    }

    /// The text of all ranks.
    pub fn text(&self) -> String {
        let each = self.0.iter().enumerate().map(|(rank, ended)| format!("rank {rank}: {}", ended.text));
        each.collect::<Vec<_>>().join("\n")
    }
}

/// The folder of the libraries, for `LD_LIBRARY_PATH`, or why there is none.
fn libraries() -> Result<PathBuf, String> {
    if !cfg!(feature = "verbs") {
        return Err("this build has no RDMA".to_owned());
    }
    if !rustix::process::geteuid().is_root() {
        return Err("mount namespaces need root".to_owned());
    }
    let mut mount = Command::new("unshare");
    mount.args(["--mount", "--propagation", "private", "mount", "-t", "tmpfs", "none", "/sys/class"]);
    let mounted = mount.output().map_err(|cause| format!("unshare: {cause}"))?;
    if !mounted.status.success() {
        return Err(String::from_utf8_lossy(&mounted.stderr).trim().to_owned());
    }
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        return Err("no libibverbs-dev for the adapters in memory".to_owned());
    }
    if Command::new("gcc").arg("--version").stdout(Stdio::null()).status().is_err() {
        return Err("no C compiler for the adapters in memory".to_owned());
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake-verbs");
    fs::create_dir_all(&folder).expect("a folder");
    let changed = |file: &Path| fs::metadata(file).and_then(|it| it.modified()).ok();
    for name in ["libibverbs", "libmlx5"] {
        let [source, exports] = ["c", "map"].map(|end| root().join(format!("tests/verbs/{name}.{end}")));
        let library = folder.join(format!("{name}.so.1"));
        if changed(&library) >= changed(&source).max(changed(&exports)) {
            continue;
        }
        // Other tests may be using what is there.
        let new = tempfile::Builder::new().tempfile_in(&folder).expect("a file").into_temp_path();
        let mut compiler = Command::new("gcc");
        compiler.args(["-shared", "-fPIC", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]);
        compiler.arg(format!("-Wl,-soname,{name}.so.1")).arg("-o").arg(&*new).arg(source);
        compiler.arg(format!("-Wl,--version-script={}", exports.display()));
        succeed(&mut compiler, LIMIT);
        new.persist(&library).expect("renamed");
    }
    Ok(folder)
}

/// Runs a test of each case at once, as most of their time is waiting.
pub fn at_once<Case: Sync>(cases: &[Case], test: impl Fn(&Case) + Sync) {
    std::thread::scope(|scope| {
        for case in cases {
            scope.spawn(|| test(case));
        }
    });
}

/// Runs `flexring ARGUMENTS` as every rank of a job on these nodes. `None`, with a message that the test is
/// skipped, where that is impossible. The machines of continuous integration, which set `CI`, may not skip
/// it.
pub fn job(nodes: &[Node], arguments: &str) -> Option<Job> {
    let libraries = match libraries() {
        Ok(libraries) => libraries,
        Err(cause) => {
            assert!(std::env::var_os("CI").is_none(), "there are no adapters in memory: {cause}");
            eprintln!("skipped: {cause}");
            return None;
        }
    };
    let network = tempfile::tempdir().expect("a folder");
    let places: Vec<usize> = nodes.iter().enumerate().flat_map(|(at, node)| vec![at; node.ranks]).collect();
    let port = free_port();
    let rank = |(rank, at): (usize, &usize)| {
        let node = &nodes[*at];
        let mut command = program("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-ec", ENTER]);
        command.arg(node.machine.root()).arg(network.path().join(format!("rank{rank}")));
        command.arg(env!("CARGO_BIN_EXE_flexring")).args(arguments.split_whitespace());
        command.env("FAKE_VERBS", network.path()).env("FAKE_VERBS_ADAPTERS", &node.quirks);
        command.env("FLEXRING_RANK", rank.to_string()).env("FLEXRING_WORLD_SIZE", places.len().to_string());
        command.env("FLEXRING_MASTER_ADDR", "127.0.0.1").env("FLEXRING_MASTER_PORT", port.to_string());
        command.env("FLEXRING_NODE", format!("node{at}")).env("FLEXRING_THREADS", "1");
        command.envs(node.settings.iter().map(|(name, value)| (name, value)));
        let others = node.settings.iter().filter(|(name, _)| *name == "LD_LIBRARY_PATH");
        let paths = others.map(|(_, path)| path.clone()).chain([libraries.display().to_string()]);
        command.env("LD_LIBRARY_PATH", paths.collect::<Vec<_>>().join(":"));
        command
    };
    let ranks: Vec<Command> = places.iter().enumerate().map(rank).collect();
    let run = |mut command: Command| std::thread::spawn(move || run(&mut command, LIMIT));
    let ranks: Vec<_> = ranks.into_iter().map(run).collect();
    Some(Job(ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()))
}
