//! Table-driven tests of each launcher's environment.

use super::variables::first_host;
use super::*;
use crate::error::ErrorKind;

/// `NAME=text` pairs, separated by blanks.
pub(in crate::bootstrap) fn lookup(environment: &str) -> impl Fn(&str) -> Option<String> {
    |name| {
        environment
            .split_whitespace()
            .filter_map(|pair| pair.split_once('='))
            .find(|(key, _)| *key == name)
            .map(|(_, text)| text.to_owned())
    }
}

fn identify(environment: &str) -> Result<Identity> {
    identity(&Config::read(lookup(environment))?, lookup(environment))
}

fn summary(environment: &str) -> String {
    let identity = identify(environment).unwrap_or_else(|error| panic!("{environment}: {error}"));
    let place = match &identity.rendezvous {
        derived @ RendezvousPoint::Address { host, .. }
            if *derived == RendezvousPoint::derived(host.clone(), identity.token) =>
        {
            format!("{host}:derived")
        }
        RendezvousPoint::Address { host, port, .. } => format!("{host}:{port}"),
        RendezvousPoint::Id(_) => "id".to_owned(),
    };
    let known = if identity.token == 0 { "anonymous" } else { "named" };
    format!("{} of {} at {place}, {known}, by {}", identity.rank, identity.world, identity.launcher)
}

const OMPI: &str =
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 PMIX_NAMESPACE=1172701185 OMPI_COMM_WORLD_LOCAL_SIZE";
const SLURM: &str = "SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_JOB_ID=77 SLURM_STEP_ID=0";

#[test]
fn reads_every_launcher() {
    for (environment, expected) in [
        (
            "FLEXRING_RANK=1 FLEXRING_WORLD_SIZE=2 FLEXRING_MASTER_ADDR=a FLEXRING_MASTER_PORT=7".to_owned(),
            "1 of 2 at a:7, anonymous, by FLEXRING_RANK",
        ),
        (
            "FLEXRING_RANK=1 FLEXRING_WORLD_SIZE=2 FLEXRING_MASTER_ADDR=a".to_owned(),
            "1 of 2 at a:derived, anonymous, by FLEXRING_RANK",
        ),
        (
            "FLEXRING_RANK=0 FLEXRING_WORLD_SIZE=1".to_owned(),
            "0 of 1 at 127.0.0.1:0, anonymous, by FLEXRING_RANK",
        ),
        (
            "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=h MASTER_PORT=29500 TORCHELASTIC_RUN_ID=x"
                .to_owned(),
            "3 of 4 at h:derived, named, by torchrun",
        ),
        (
            "RANK=3 WORLD_SIZE=4 LOCAL_WORLD_SIZE=4".to_owned(),
            "3 of 4 at 127.0.0.1:derived, anonymous, by torchrun",
        ),
        (
            "RANK=3 WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=29500 FLEXRING_MASTER_PORT=9 FLEXRING_RANK=2"
                .to_owned(),
            "2 of 4 at h:9, named, by torchrun",
        ),
        (format!("{OMPI}=4"), "1 of 4 at 127.0.0.1:derived, named, by Open MPI"),
        (format!("{OMPI}=2 FLEXRING_MASTER_ADDR=n0"), "1 of 4 at n0:derived, named, by Open MPI"),
        (
            "PMI_RANK=0 PMI_SIZE=2 MPI_LOCALNRANKS=2 PMI_JOBID=j".to_owned(),
            "0 of 2 at 127.0.0.1:derived, named, by MPICH",
        ),
        (
            "PMI_ID=1 PMI_SIZE=2 FLEXRING_MASTER_ADDR=n0 FLEXRING_MASTER_PORT=5".to_owned(),
            "1 of 2 at n0:5, anonymous, by MPICH",
        ),
        (format!("{SLURM} SLURM_JOB_NODELIST=node[03-07,9]"), "5 of 8 at node03:derived, named, by Slurm"),
        (
            format!("{SLURM} SLURM_JOB_NODELIST=a,b SLURM_STEP_NODELIST=b SLURM_STEP_NUM_TASKS=6"),
            "5 of 6 at b:derived, named, by Slurm",
        ),
        (
            format!("{SLURM} SLURM_NNODES=1 SLURM_JOB_NODELIST=a"),
            "5 of 8 at 127.0.0.1:derived, named, by Slurm",
        ),
        // The most specific launcher wins: mpirun within a Slurm job, torchrun within either.
        (format!("{SLURM} {OMPI}=4"), "1 of 4 at 127.0.0.1:derived, named, by Open MPI"),
    ] {
        assert_eq!(summary(&environment), expected, "{environment}");
    }
}

#[test]
fn reads_the_local_rank() {
    for (environment, expected) in [
        ("RANK=3 WORLD_SIZE=4 LOCAL_RANK=1".to_owned(), Some(1)),
        ("RANK=3 WORLD_SIZE=4".to_owned(), None),
        (format!("{OMPI}=2 OMPI_COMM_WORLD_LOCAL_RANK=0 LOCAL_RANK=7"), Some(0)),
        ("PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=1".to_owned(), Some(1)),
        (format!("{SLURM} SLURM_LOCALID=2"), Some(2)),
        ("LOCAL_RANK=1".to_owned(), None),
    ] {
        assert_eq!(local_rank(lookup(&environment)).expect("valid"), expected, "{environment}");
    }
}

#[test]
fn a_unique_id_replaces_the_address() {
    let id = UniqueId::new(42, &["10.0.0.1:999".parse().expect("an address")]);
    let hex = id.to_hex();
    let identity = identify(&format!("{OMPI}=2 FLEXRING_UNIQUE_ID={hex}")).expect("no address is needed");
    assert_eq!(identity.rendezvous, RendezvousPoint::Id(id));
    assert_eq!((identity.rank, identity.token), (1, id.job()));
    let error = identify(&format!("{OMPI}=2 FLEXRING_UNIQUE_ID=00{hex}")).expect_err("too long");
    assert_eq!(error.kind(), ErrorKind::InvalidSetting);
    assert!(error.message().contains("FLEXRING_UNIQUE_ID"), "{error}");
}

#[test]
fn token_is_equal_within_a_job_and_differs_between_jobs() {
    let token = |rank: usize, job: &str| {
        identify(&format!(
            "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE={job}"
        ))
        .expect("valid")
        .token
    };
    assert_eq!(token(0, "a"), token(1, "a"));
    assert_ne!(token(0, "a"), token(0, "b"));
}

#[test]
fn jobs_of_torchrun_have_ports_that_no_other_job_needs() {
    let ports = |environment: &str| match identify(environment).expect("valid").rendezvous {
        RendezvousPoint::Address { port, further_ports, .. } => [vec![port], further_ports].concat(),
        RendezvousPoint::Id(_) => panic!("no id is set"),
    };
    let job =
        |rank: usize, port: u16| ports(&format!("RANK={rank} WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT={port}"));
    for port in [29_500, 65_535] {
        let ports = job(0, port);
        assert_eq!(ports, job(1, port), "all ranks derive them");
        assert_eq!(ports.len(), 3);
        // Not those of torchrun's stores, of this job and of one at the next port.
        assert!(
            ports.iter().all(|port| (20_000..=30_000).contains(port) && !(29_500..29_502).contains(port))
        );
        assert_ne!(ports[0], job(0, port - 1)[0]);
    }
    assert_eq!(ports("FLEXRING_RANK=0 FLEXRING_WORLD_SIZE=2 FLEXRING_MASTER_ADDR=h"), [20_000], "no name");
    assert_eq!(ports("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=29500 FLEXRING_MASTER_PORT=9"), [9]);
}

#[test]
fn quotes_incomplete_settings() {
    for (environment, expected) in [
        ("RANK=1", vec!["RANK=\"1\"", "WORLD_SIZE is not"]),
        ("WORLD_SIZE=4", vec!["WORLD_SIZE=\"4\"", "RANK is not"]),
        ("RANK=one WORLD_SIZE=4", vec!["RANK=\"one\"", "whole number"]),
        ("RANK=4 WORLD_SIZE=4", vec!["RANK=\"4\"", "WORLD_SIZE=\"4\""]),
        ("FLEXRING_RANK=1", vec!["FLEXRING_RANK=\"1\"", "FLEXRING_WORLD_SIZE is not"]),
        ("FLEXRING_WORLD_SIZE=2", vec!["FLEXRING_WORLD_SIZE=\"2\"", "FLEXRING_RANK is not"]),
        ("FLEXRING_RANK=0 FLEXRING_WORLD_SIZE=0", vec!["FLEXRING_WORLD_SIZE=\"0\""]),
        (
            "FLEXRING_RANK=9 RANK=1 WORLD_SIZE=4 MASTER_ADDR=a",
            vec!["FLEXRING_RANK=\"9\"", "WORLD_SIZE=\"4\""],
        ),
        ("OMPI_COMM_WORLD_RANK=0", vec!["OMPI_COMM_WORLD_RANK=\"0\"", "OMPI_COMM_WORLD_SIZE"]),
        ("PMI_SIZE=2", vec!["PMI_SIZE=\"2\"", "PMI_RANK"]),
        ("SLURM_PROCID=0 SLURM_STEP_ID=0", vec!["SLURM_PROCID=\"0\"", "SLURM_STEP_NUM_TASKS"]),
    ] {
        let error = identify(environment).expect_err(environment);
        assert_eq!(error.kind(), ErrorKind::InvalidSetting, "{environment}: {error}");
        for text in expected {
            assert!(error.message().contains(text), "{environment}: {error}");
        }
    }
}

#[test]
fn names_missing_settings() {
    for (environment, expected) in [
        ("", "FLEXRING_WORLD_SIZE"),
        ("SLURM_PROCID=0 SLURM_NTASKS=4", "batch script"),
        ("FLEXRING_RANK=0 FLEXRING_WORLD_SIZE=2", "FLEXRING_MASTER_ADDR"),
        (
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            "mpirun -x FLEXRING_MASTER_ADDR=",
        ),
        ("PMI_RANK=0 PMI_SIZE=4 MPI_LOCALNRANKS=2", "mpiexec -genv FLEXRING_MASTER_ADDR"),
        ("RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2", "MASTER_ADDR"),
    ] {
        let error = identify(environment).expect_err(environment);
        assert_eq!(error.kind(), ErrorKind::Rendezvous, "{environment}: {error}");
        assert!(error.message().contains(expected), "{environment}: {error}");
    }
}

#[test]
fn complete_settings_override_an_invalid_launcher() {
    let all = "FLEXRING_RANK=0 FLEXRING_WORLD_SIZE=2 FLEXRING_MASTER_ADDR=a FLEXRING_MASTER_PORT=1 RANK=x";
    assert!(identify(all).is_ok());
}

#[test]
fn takes_the_first_host_of_a_node_list() {
    for (list, host) in [
        ("node7", "node7"),
        ("node[03-07,9]", "node03"),
        ("node[9,3]-ib,other", "node9-ib"),
        ("rack[1-2]n[3-4]", "rack1n3"),
        ("a-b,c", "a-b"),
    ] {
        assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
    }
    for list in ["", ",a", "[", "[]"] {
        assert_eq!(first_host(list), None, "{list}");
    }
}

#[test]
fn a_job_on_one_node_is_known_by_its_launcher() {
    for (environment, one_node) in [
        ("RANK=3 WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=29500".to_owned(), true),
        ("RANK=3 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=29500".to_owned(), false),
        (format!("{OMPI}=4"), true),
        (format!("{OMPI}=2 FLEXRING_MASTER_ADDR=n0"), false),
        ("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALNRANKS=2 PMI_JOBID=j".to_owned(), true),
        (format!("{SLURM} SLURM_STEP_NUM_NODES=1"), true),
        (format!("{SLURM} SLURM_STEP_NUM_NODES=2 SLURM_JOB_NODELIST=node[03-07,9]"), false),
        // The launcher speaks of another world.
        (format!("{OMPI}=4 FLEXRING_WORLD_SIZE=8 FLEXRING_RANK=6"), false),
        ("FLEXRING_RANK=1 FLEXRING_WORLD_SIZE=2 FLEXRING_MASTER_ADDR=127.0.0.1".to_owned(), false),
    ] {
        assert_eq!(identify(&environment).expect("an identity").one_node, one_node, "{environment}");
    }
}

#[test]
fn a_damaged_unique_id_is_not_quoted() {
    let error = identify("FLEXRING_RANK=0 FLEXRING_WORLD_SIZE=1 FLEXRING_UNIQUE_ID=abcdef0123xyz")
        .expect_err("damaged");
    assert!(error.message().contains("FLEXRING_UNIQUE_ID") && !error.message().contains("abcdef"), "{error}");
}
