//! Real launchers: torchrun, Open MPI, MPICH and Slurm start ranks, which find each other, compute exact
//! sums, and name a killed rank.
//!
//! Ranks are processes of this test binary. They report by files, because launchers treat output differently.

mod slurm;

use crate::harness::{
    call_until_failure, free_port, let_others_finish, signal_self, test_name, with_watchdog,
};
use crate::programs::{present, program, run};
use flexring::{Communicator, ReduceOp};
use slurm::Slurm;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Timeout of one launcher; none of them takes that long, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(150);

const RANKS: usize = 3;

/// The folder of the reports. Set in ranks only.
const FOLDER: &str = "TEST_LAUNCHED_IN";
/// Set if rank 1 is to be killed.
const KILLS: &str = "TEST_LAUNCHED_KILLS";

/// What a rank does.
#[test]
fn a_rank_of_a_launcher() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    with_watchdog(Duration::from_secs(40), || {
        let comm = Communicator::from_env().expect("the world meets");
        let report = |name: &str, text: &str| {
            let path = Path::new(&folder).join(format!("{name} {}", comm.rank()));
            std::fs::write(path, text).expect("a report");
        };
        assert_eq!(comm.world_size(), RANKS);
        for count in [1, 50_000] {
            let mut vector = vec![comm.rank() as u32 + 1; count];
            comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
            assert!(vector.iter().all(|element| *element == 6));
        }
        report("sums", "exact");
        if std::env::var_os(KILLS).is_none() {
            return;
        }
        let last = let_others_finish(&comm);
        if comm.rank() == 1 {
            signal_self(rustix::process::Signal::KILL);
        }
        let error = last.err().unwrap_or_else(|| call_until_failure(&comm));
        report("error", error.message());
    });
}

/// Starts ranks with the command that `launcher` returns, for each of `runs`: with or without a rank that is
/// killed.
fn starts_ranks_that_reduce_and_name_a_killed_rank(runs: &[bool], launcher: impl Fn() -> Command) {
    for &kills in runs {
        let folder = tempfile::tempdir().expect("a folder");
        let mut command = launcher();
        // Launchers end the other ranks by SIGTERM when one was killed, but these have something to report.
        command.args(["sh", "-c", "trap '' TERM; exec \"$@\"", "rank"]);
        command.arg(std::env::current_exe().expect("this binary"));
        command.args([&test_name(module_path!(), "a_rank_of_a_launcher"), "--exact", "--nocapture"]);
        command.env(FOLDER, folder.path());
        if kills {
            command.env(KILLS, "1");
        }
        let ended = run(&mut command, LIMIT);
        let report = |name: &str, rank: usize| {
            std::fs::read_to_string(folder.path().join(format!("{name} {rank}"))).unwrap_or_default()
        };
        for rank in 0..RANKS {
            assert_eq!(report("sums", rank), "exact", "rank {rank}: {}", ended.text);
            let error = report("error", rank);
            let named = error.contains("rank 1 (pid ");
            assert_eq!(named, kills && rank != 1, "rank {rank}: {error:?}: {}", ended.text);
        }
        assert!(kills || ended.status.success(), "{}: {}", ended.status, ended.text);
    }
}

#[test]
fn open_mpi_starts_ranks() {
    if !present("mpirun.openmpi", "Open MPI (openmpi-bin)") {
        return;
    }
    starts_ranks_that_reduce_and_name_a_killed_rank(&[false, true], || {
        let mut mpirun = program("mpirun.openmpi");
        // Containers often run as root, and may have fewer cores than ranks.
        mpirun.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        mpirun.args(["--oversubscribe", "--enable-recovery", "-np"]).arg(RANKS.to_string());
        mpirun
    });
}

/// A script exports variables of torchrun for other programs, or they are left over in a shell.
#[test]
fn open_mpi_starts_ranks_despite_half_of_torchruns_variables_and_not_despite_others() {
    if !present("mpirun.openmpi", "Open MPI (openmpi-bin)") {
        return;
    }
    let mpirun = || {
        let mut mpirun = program("mpirun.openmpi");
        mpirun.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        mpirun.args(["--oversubscribe", "-np"]).arg(RANKS.to_string());
        mpirun.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")]);
        mpirun
    };
    starts_ranks_that_reduce_and_name_a_killed_rank(&[false], || {
        let mut mpirun = mpirun();
        mpirun.env("WORLD_SIZE", "8");
        mpirun
    });
    let folder = tempfile::tempdir().expect("a folder");
    let mut mpirun = mpirun();
    mpirun.arg(std::env::current_exe().expect("this binary"));
    mpirun.args([&test_name(module_path!(), "a_rank_of_a_launcher"), "--exact", "--nocapture"]);
    let ended = run(mpirun.envs([("RANK", "0"), ("WORLD_SIZE", "1")]).env(FOLDER, folder.path()), LIMIT);
    assert!(!ended.status.success(), "{}", ended.text);
    assert!(ended.text.contains("as torchrun sets them, contradict OMPI_COMM_WORLD_RANK="), "{}", ended.text);
    assert!(ended.text.contains("unset RANK WORLD_SIZE"), "{}", ended.text);
}

/// torchrun's store of each job listens at its MASTER_PORT.
#[test]
fn jobs_at_neighbouring_ports_of_torchrun_meet() {
    let stores = std::iter::repeat_with(|| {
        let one = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let next = one.local_addr().expect("bound").port().checked_add(1)?;
        Some((next - 1, one, std::net::TcpListener::bind(("127.0.0.1", next)).ok()?))
    });
    let stores = stores.take(100).flatten().next().expect("two ports");
    let port = stores.0;
    let folders = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    let mut ranks = Vec::new();
    for (job, folder) in folders.iter().enumerate() {
        for rank in 0..RANKS {
            let mut command = program(std::env::current_exe().expect("this binary"));
            command.args([&test_name(module_path!(), "a_rank_of_a_launcher"), "--exact", "--nocapture"]);
            command
                .envs([("RANK", rank), ("WORLD_SIZE", RANKS)].map(|(name, value)| (name, value.to_string())));
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", (usize::from(port) + job).to_string());
            command.env("TORCHELASTIC_RUN_ID", "none").env(FOLDER, folder.path());
            command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped());
            ranks.push(command.spawn().expect("started"));
        }
    }
    for rank in ranks {
        let output = rank.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    drop(stores);
}

#[test]
fn mpich_starts_ranks() {
    if !present("mpiexec.hydra", "MPICH (mpich)") {
        return;
    }
    starts_ranks_that_reduce_and_name_a_killed_rank(&[false, true], || {
        let mut mpiexec = program("mpiexec.hydra");
        mpiexec.arg("-n").arg(RANKS.to_string());
        // It kills all ranks as soon as one has failed. This shell hides that from it.
        mpiexec.args(["sh", "-c", "\"$@\" || true", "rank"]);
        mpiexec
    });
}

#[test]
fn torchrun_starts_ranks() {
    let torchrun = ["torchrun", "/usr/bin/torchrun"];
    let Some(torchrun) = torchrun
        .into_iter()
        .find(|name| Command::new(name).arg("--help").output().is_ok_and(|it| it.status.success()))
    else {
        eprintln!("skipped: no torchrun (python3-torch)");
        return;
    };
    let logs = tempfile::tempdir().expect("a folder");
    // The training example runs without a killed rank.
    starts_ranks_that_reduce_and_name_a_killed_rank(&[true], || {
        let mut command = program(torchrun);
        command.args(["--no_python", "--monitor_interval", "1", "--nproc_per_node"]).arg(RANKS.to_string());
        // All jobs of PyTorch 1.13 with --standalone meet at one port.
        command.args(["--master_addr", "127.0.0.1", "--master_port", &free_port().to_string()]);
        // PyTorch 1.13 with Python 3.11 does not start ranks without these two options.
        command.args(["--redirects", "1", "--tee", "1", "--log_dir"]).arg(logs.path());
        command
    });
}

#[test]
fn slurm_starts_ranks() {
    let programs = [("munged", "MUNGE"), ("slurmctld", "Slurm"), ("slurmd", "Slurm"), ("srun", "Slurm")];
    if !programs.iter().all(|(program, name)| present(program, &format!("{name} (slurm-wlm)"))) {
        return;
    }
    if !rustix::process::getuid().is_root() {
        eprintln!("skipped: Slurm's daemons are tested as root only");
        return;
    }
    let slurm = Slurm::start();
    starts_ranks_that_reduce_and_name_a_killed_rank(&[false, true], || {
        let mut srun = slurm.command("srun");
        srun.args(["--overcommit", "--immediate=90", "--ntasks"]).arg(RANKS.to_string());
        srun
    });
}
