//! A Slurm cluster of this machine alone.
//!
//! Owns its daemons and their folder.

use crate::harness::free_port;
use crate::programs::program;
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long the daemons may take until the node is ready.
const START: Duration = Duration::from_secs(40);

/// Running daemons. Dropping it ends them.
pub struct Slurm {
    folder: tempfile::TempDir,
    daemons: Vec<Child>,
}

impl Slurm {
    /// Starts the daemons, and waits until the node is ready.
    pub fn start() -> Self {
        let mut slurm = Self { folder: tempfile::tempdir().expect("a folder"), daemons: Vec::new() };
        let at = |name: &str| slurm.folder.path().join(name);
        // munged refuses a folder that others may write to.
        std::fs::set_permissions(slurm.folder.path(), Permissions::from_mode(0o755)).expect("permissions");
        let (state, spool, socket, key) = (at("state"), at("spool"), at("munge.socket"), at("munge.key"));
        for folder in [&state, &spool] {
            std::fs::create_dir(folder).expect("a folder");
        }
        let random: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(128).collect();
        std::fs::write(&key, random).expect("a key");
        std::fs::set_permissions(&key, Permissions::from_mode(0o400)).expect("permissions");
        std::fs::write(at("slurm.conf"), slurm.settings()).expect("a configuration");

        let mut munged = Command::new("munged");
        munged.args(["--foreground", "--force"]).arg("--key-file").arg(&key).arg("--socket").arg(&socket);
        for (option, file) in
            [("--pid-file", "munged.pid"), ("--log-file", "munged.log"), ("--seed-file", "munged.seed")]
        {
            munged.arg(option).arg(at(file));
        }
        slurm.daemon("munged", &mut munged);
        let conf = slurm.folder.path().join("slurm.conf");
        slurm.wait(|_| socket.exists());
        slurm.daemon("slurmctld", Command::new("slurmctld").args(["-D", "-c", "-f"]).arg(&conf));
        slurm.daemon("slurmd", Command::new("slurmd").args(["-D", "-c", "-f"]).arg(&conf));
        slurm.wait(|slurm| {
            let state = slurm.command("sinfo").args(["--noheader", "--format=%T"]).output();
            state.is_ok_and(|state| state.stdout.starts_with(b"idle"))
        });
        slurm
    }

    /// A program that uses this cluster.
    pub fn command(&self, name: &str) -> Command {
        let mut command = program(name);
        command.env("SLURM_CONF", self.folder.path().join("slurm.conf"));
        command
    }

    fn settings(&self) -> String {
        let folder = self.folder.path().display();
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("a host name");
        let host = host.trim().split('.').next().unwrap_or_default();
        let (controller, node) = (free_port(), free_port());
        format!(
            "ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 Port={node} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:8
"
        )
    }

    fn daemon(&mut self, name: &str, command: &mut Command) {
        let log = || File::options().append(true).create(true).open(self.log(name)).expect("a log");
        command.stdin(Stdio::null()).stdout(log()).stderr(log());
        self.daemons.push(command.spawn().unwrap_or_else(|cause| panic!("cannot start {name}: {cause}")));
    }

    fn log(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(format!("{name}.output"))
    }

    /// Waits until `is_ready`.
    fn wait(&mut self, is_ready: impl Fn(&Self) -> bool) {
        let begun = Instant::now();
        while !is_ready(self) {
            let ended = self.daemons.iter_mut().any(|daemon| !matches!(daemon.try_wait(), Ok(None)));
            if ended || begun.elapsed() > START {
                let logs = ["munged", "slurmctld", "slurmd"].map(|name| read(&self.log(name)));
                panic!("Slurm does not start:\n{}", logs.join("\n"));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        for daemon in self.daemons.iter_mut().rev() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

fn read(path: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
}
