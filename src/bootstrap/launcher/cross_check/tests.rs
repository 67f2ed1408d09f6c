//! Table-driven tests of environments with the variables of several launchers.

use super::super::tests::lookup;
use super::super::*;
use super::*;
use crate::error::ErrorKind;

/// A script that exports these for its programs.
const EXPORTED: &str = "WORLD_SIZE=4 MASTER_ADDR=n0 MASTER_PORT=29500";
const TORCHRUN: &str = "MASTER_ADDR=n0 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=none";
const STEP: &str = "SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_JOB_NODELIST=n[0-1]";

fn open_mpi(rank: usize, world: usize) -> String {
    format!("OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE={world} OMPI_COMM_WORLD_LOCAL_SIZE={world}")
}

fn mpich(rank: usize, world: usize) -> String {
    format!("PMI_RANK={rank} PMI_SIZE={world} MPI_LOCALNRANKS={world}")
}

fn slurm(rank: usize, world: usize) -> String {
    format!("{STEP} SLURM_PROCID={rank} SLURM_STEP_NUM_TASKS={world}")
}

fn torch(rank: usize, world: usize) -> String {
    format!("RANK={rank} WORLD_SIZE={world} MASTER_ADDR=n0 MASTER_PORT=29500")
}

fn identify(environment: &[&str]) -> Result<Identity> {
    let environment = environment.join(" ");
    identity(&Config::read(lookup(&environment))?, lookup(&environment))
}

#[test]
fn a_launcher_with_missing_variables_is_skipped_for_another() {
    let [ompi, hydra, srun] = [open_mpi(1, 4), mpich(1, 4), slurm(1, 4)];
    for (environment, launcher) in [
        ([EXPORTED, &ompi], "Open MPI"),
        ([EXPORTED, &hydra], "MPICH"),
        ([EXPORTED, &srun], "Slurm"),
        (["RANK=7", &ompi], "Open MPI"),
        (["RANK=first WORLD_SIZE=4", &srun], "Slurm"),
        (["PMI_SIZE=2", &srun], "Slurm"),
        (["OMPI_COMM_WORLD_SIZE=2", &torch(1, 4)], "torchrun"),
        (["SLURM_STEP_ID=0 SLURM_PROCID=3", &torch(1, 4)], "torchrun"),
    ] {
        let identity = identify(&environment).unwrap_or_else(|error| panic!("{environment:?}: {error}"));
        assert_eq!((identity.rank, identity.world, identity.launcher), (1, 4, launcher), "{environment:?}");
    }
    let error = identify(&[EXPORTED]).expect_err("no other launcher");
    assert!(error.message().contains("RANK is not"), "{error}");
}

#[test]
fn an_exported_address_serves_launchers_without_one() {
    for launcher in [
        "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2",
        "PMI_RANK=1 PMI_SIZE=4 MPI_LOCALNRANKS=2",
    ] {
        let identity = identify(&[EXPORTED, launcher]).expect("an identity");
        assert!(!identity.one_node);
        assert!(matches!(&identity.rendezvous, RendezvousPoint::Address { host, .. } if host == "n0"));
    }
}

#[test]
fn launchers_within_launchers_count_from_the_inside() {
    for (environment, expected) in [
        // torchrun within one task for each node, whose agents may number the nodes in another order.
        (vec![torch(5, 8), TORCHRUN.to_owned(), slurm(0, 2)], (5, 8, "torchrun")),
        (vec![torch(5, 8), TORCHRUN.to_owned(), open_mpi(1, 2)], (5, 8, "torchrun")),
        (vec![torch(5, 8), TORCHRUN.to_owned(), mpich(1, 2)], (5, 8, "torchrun")),
        // An independent torchrun in each task.
        (vec![torch(1, 2), TORCHRUN.to_owned(), slurm(3, 4)], (1, 2, "torchrun")),
        // DeepSpeed and others set no variables of torchrun.
        (vec![torch(5, 8), "LOCAL_RANK=1".to_owned(), slurm(1, 2)], (5, 8, "torchrun")),
        (vec![torch(5, 8), "LOCAL_RANK=1".to_owned(), open_mpi(1, 2)], (5, 8, "torchrun")),
        // A program that spawns the ranks of its node.
        (vec![torch(5, 8), slurm(1, 2)], (5, 8, "torchrun")),
        (vec![torch(5, 8), mpich(1, 2)], (5, 8, "torchrun")),
        // Ray and others number the ranks in another order, and nodes have different numbers of GPUs.
        (vec![torch(0, 4), "LOCAL_RANK=0".to_owned(), open_mpi(1, 2)], (0, 4, "torchrun")),
        (vec![torch(4, 12), slurm(1, 2)], (4, 12, "torchrun")),
        // A program that takes its rank from srun or mpirun, and passes it on.
        (vec![torch(5, 8), slurm(5, 8)], (5, 8, "torchrun")),
        (vec![torch(5, 8), open_mpi(5, 8), slurm(1, 2)], (5, 8, "torchrun")),
        // Any launcher in an interactive step, `srun --pty bash`, or in a program that mpirun started once.
        (vec![torch(3, 4), slurm(0, 1)], (3, 4, "torchrun")),
        (vec![torch(3, 4), open_mpi(0, 1)], (3, 4, "torchrun")),
        (vec![open_mpi(3, 4), mpich(0, 1)], (3, 4, "Open MPI")),
        // mpirun starts one daemon on each further node by srun.
        (vec![open_mpi(5, 8), slurm(1, 2)], (5, 8, "Open MPI")),
        (vec![mpich(5, 8), slurm(1, 2)], (5, 8, "MPICH")),
        (vec![open_mpi(5, 8), mpich(1, 2), slurm(1, 2), "PMI_JOBID=77.0".to_owned()], (5, 8, "Open MPI")),
        // srun --mpi=pmi2: Slurm names the node of rank 0.
        (vec![mpich(5, 8), slurm(5, 8), "PMI_JOBID=77.0".to_owned()], (5, 8, "Slurm")),
        // srun's default of pmi2 leaves its PMI_JOBID to the ranks of mpirun's daemons.
        (vec![mpich(5, 8), slurm(1, 2), "PMI_JOBID=77.0".to_owned()], (5, 8, "MPICH")),
        // The shell of salloc has no step.
        (vec![torch(1, 2), "SLURM_JOB_ID=77 SLURM_NTASKS=8 SLURM_NNODES=2".to_owned()], (1, 2, "torchrun")),
        (vec![open_mpi(1, 2), "SLURM_JOB_ID=77 SLURM_NTASKS=8".to_owned()], (1, 2, "Open MPI")),
        // A batch script's own process is no step, though it has a number.
        (vec![torch(1, 2), "SLURM_JOB_ID=77 SLURM_NTASKS=8 SLURM_PROCID=0".to_owned()], (1, 2, "torchrun")),
        // The settings of flexring itself.
        (
            vec![
                torch(0, 1),
                open_mpi(1, 2),
                "FLEXRING_RANK=1 FLEXRING_WORLD_SIZE=2 FLEXRING_MASTER_ADDR=n0".to_owned(),
            ],
            (1, 2, "torchrun"),
        ),
    ] {
        let environment: Vec<&str> = environment.iter().map(String::as_str).collect();
        let identity = identify(&environment).unwrap_or_else(|error| panic!("{environment:?}: {error}"));
        assert_eq!((identity.rank, identity.world, identity.launcher), expected, "{environment:?}");
    }
}

#[test]
fn variables_left_over_from_another_job_are_refused_by_name() {
    for (environment, names) in [
        (vec![torch(0, 1), open_mpi(0, 2)], ["WORLD_SIZE=\"1\"", "OMPI_COMM_WORLD_SIZE=\"2\""]),
        (
            vec![torch(0, 1), open_mpi(1, 2)],
            ["RANK=\"0\"", "unset OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE"],
        ),
        (vec![torch(0, 2), open_mpi(1, 2)], ["RANK=\"0\"", "OMPI_COMM_WORLD_RANK=\"1\""]),
        (vec![torch(0, 1), mpich(1, 2)], ["unset RANK WORLD_SIZE", "PMI_RANK=\"1\""]),
        (vec![torch(0, 1), slurm(1, 2)], ["unset RANK WORLD_SIZE", "SLURM_STEP_NUM_TASKS=\"2\""]),
        (vec![torch(0, 1), "LOCAL_RANK=0".to_owned(), slurm(0, 2)], ["RANK=\"0\"", "SLURM_PROCID=\"0\""]),
        (vec![open_mpi(0, 4), mpich(1, 2)], ["OMPI_COMM_WORLD_RANK=\"0\"", "PMI_RANK=\"1\""]),
        (
            vec![torch(0, 1), open_mpi(1, 2), "FLEXRING_WORLD_SIZE=2".to_owned()],
            ["RANK=\"0\"", "FLEXRING_RANK"],
        ),
    ] {
        let environment: Vec<&str> = environment.iter().map(String::as_str).collect();
        let error = identify(&environment).expect_err(&environment.join(" "));
        assert_eq!(error.kind(), ErrorKind::InvalidSetting, "{environment:?}: {error}");
        for name in names {
            assert!(error.message().contains(name), "{environment:?}: {error}");
        }
    }
}

#[test]
fn processes_that_are_alone_though_a_launcher_started_several_are_noticed_once() {
    let warning = |environment: &[String]| {
        let environment = environment.join(" ");
        let config = Config::read(lookup(&environment)).expect("settings");
        let lookup = lookup(&environment);
        let environment = Environment(&lookup);
        let launchers = complete_launchers(&environment).expect("variables");
        let (_, world) = rank_and_world(&config, launchers.first()).expect("a rank");
        alone_among_several(&environment, world)
    };
    let flexring = "FLEXRING_RANK=0 FLEXRING_WORLD_SIZE=1".to_owned();
    for environment in [
        vec![flexring.clone(), open_mpi(0, 2)],
        vec![flexring.clone(), slurm(0, 2)],
        vec![open_mpi(0, 1), slurm(0, 2)],
        vec![mpich(0, 1), slurm(0, 2)],
        vec![torch(0, 1), TORCHRUN.to_owned(), slurm(0, 2)],
    ] {
        let warning = warning(&environment).unwrap_or_else(|| panic!("{environment:?}"));
        assert!(
            warning.contains(" started 2 processes (") && warning.contains("=\"1\" makes each"),
            "{warning}"
        );
    }
    for environment in [
        // The first process has the warning.
        vec![flexring.clone(), open_mpi(1, 2)],
        vec![flexring, open_mpi(0, 1)],
        vec![torch(0, 8), TORCHRUN.to_owned(), slurm(0, 2)],
        vec![open_mpi(0, 2)],
    ] {
        assert_eq!(warning(&environment), None, "{environment:?}");
    }
}

#[test]
fn ranks_that_do_not_suit_the_outer_launcher_are_noticed() {
    let warning = |environment: &[String]| {
        let environment = environment.join(" ");
        unusual_ranks(&Environment(&lookup(&environment)))
    };
    for environment in [
        // A multiple of the world, but not the rank of this process.
        vec![torch(0, 4), "LOCAL_RANK=0".to_owned(), open_mpi(1, 2)],
        vec![torch(0, 4), slurm(1, 2)],
        // Not a multiple.
        vec![torch(1, 5), slurm(0, 2)],
    ] {
        let warning = warning(&environment).unwrap_or_else(|| panic!("{environment:?}"));
        for text in ["RANK=\"", "do not suggest them: unset RANK WORLD_SIZE"] {
            assert!(warning.contains(text), "{warning}");
        }
    }
    for environment in [
        vec![torch(0, 4)],
        vec![torch(2, 4), slurm(1, 2)],
        vec![torch(3, 4), slurm(0, 1)],
        vec![torch(3, 4), slurm(3, 4)],
        vec![torch(0, 4), TORCHRUN.to_owned(), slurm(1, 2)],
        vec![open_mpi(0, 4), slurm(1, 2)],
    ] {
        assert_eq!(warning(&environment), None, "{environment:?}");
    }
}
