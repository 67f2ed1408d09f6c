//! Topologies and plans from users: valid ones are used, and invalid ones fail on every rank with the same
//! message before any data is sent.

use crate::harness::{Setup, World, join, spawn, with_watchdog};
use flexring::internal::bootstrap::Coordinator;
use flexring::{Error, ErrorKind, Identity, ReduceOp};
use flexring_core::config::{Algorithm, Config, Dimensions, Servers};
use flexring_plan::plan_file;
use flexring_plan::planner::{flexreduce, ring};
use flexring_plan::topology::Topology;
use std::path::PathBuf;
use std::time::Duration;

/// A temporary file.
struct File {
    path: PathBuf,
    _folder: tempfile::TempDir,
}

fn file(name: &str, text: &str) -> File {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    std::fs::write(&path, text).expect("a file");
    File { path, _folder: folder }
}

impl File {
    fn name(&self) -> String {
        self.path.display().to_string()
    }
}

/// The errors of three ranks that join after `change` has made the settings of some of them invalid.
fn refused(change: impl Fn(usize, &mut Config) + Sync) -> Vec<Error> {
    with_watchdog(Duration::from_secs(60), || {
        let setup = Setup::new(World::Shm, 3);
        let (_coordinator, id) = Coordinator::create(&setup.config).expect("a coordinator");
        std::thread::scope(|scope| {
            let rank = |rank| {
                let (setup, change, id) = (&setup, &change, &id);
                scope.spawn(move || {
                    let mut config = setup.config_of(rank);
                    change(rank, &mut config);
                    let identity = Identity::from_unique_id(setup.ranks, id, rank).expect("an identity");
                    join(&config, &identity).expect_err("no rank can join")
                })
            };
            let ranks: Vec<_> = (0..setup.ranks).map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().expect("the rank returns its error")).collect()
        })
    })
}

/// Checks that the errors of all ranks have this kind and contain all `texts`.
fn all_contain(errors: &[Error], kind: ErrorKind, texts: &[&str]) {
    for error in errors {
        assert_eq!(error.kind(), kind, "{error}");
        for text in texts {
            assert!(error.message().contains(text), "{error} does not contain {text}");
        }
    }
}

#[test]
fn a_topology_that_does_not_match_the_ranks_is_refused_on_every_rank() {
    let short = |text: &'static str| refused(move |_, config| config.topology = Some(text.to_owned()));
    all_contain(&short("1+1"), ErrorKind::InvalidSetting, &["FLEXRING_TOPOLOGY=1+1", "leaves out rank 2"]);
    all_contain(
        &short("2+2"),
        ErrorKind::InvalidSetting,
        &["FLEXRING_TOPOLOGY=2+2", "names rank 3, but there are 3 ranks"],
    );
    all_contain(&short("1+1+1@0G"), ErrorKind::InvalidSetting, &["1+1+1@0G", "\"0G\" is too low"]);
    all_contain(&short("/nowhere/at.all"), ErrorKind::InvalidSetting, &["/nowhere/at.all", "cannot be read"]);
    for (first, second, texts) in
        [("[0, 1]", "[1, 2]", "rank 1"), ("[0]", "[1]", "rank 2"), ("[0, 1]", "[3]", "rank 3")]
    {
        let text =
            format!("[[node]]\nname = \"a\"\nranks = {first}\n[[node]]\nname = \"b\"\nranks = {second}\n");
        let file = file("topology.toml", &text);
        let errors = refused(|_, config| config.topology = Some(file.name()));
        all_contain(&errors, ErrorKind::InvalidSetting, &["topology.toml", texts]);
    }
}

#[test]
fn a_plan_that_loses_or_duplicates_a_contribution_is_refused() {
    let plan = plan_file::write(&ring::plan(&Topology::from_names(&["a", "a", "a"])), None);
    let lossy = plan.replacen(
        "\"participants\": [\n            1,\n            2,\n            0",
        "\"participants\": [\n            2,\n            0",
        1,
    );
    assert_ne!(lossy, plan);
    let all_refuse = |name: &str, text: &str, words: &str| {
        let plan = file(name, text);
        let errors = refused(|_, config| config.plan_file = Some(plan.name()));
        all_contain(&errors, ErrorKind::InvalidSetting, &[name, words]);
    };
    all_refuse("loses.json", &lossy, "the contribution of rank 1 to [0, 1/3) is missing");

    let group = r#"{"span":{"start":"0","end":"1"},"participants":[0,1,2],"root":0}"#;
    let doubles =
        format!(r#"{{"name":"twice","world":3,"levels":[{{"groups":[{group}]}},{{"groups":[{group}]}}]}}"#);
    all_refuse("doubles.json", &doubles, "is counted more than once");

    let group = r#"{"span":{"start":"0","end":"1"},"participants":[0,1],"root":2}"#;
    let leaves_out =
        format!(r#"{{"name":"server","world":3,"helpers":[2],"levels":[{{"groups":[{group}]}}]}}"#);
    all_refuse("leaves_out.json", &leaves_out, "rank 2 contributes nothing");
}

#[test]
fn dimensions_servers_and_shapes_that_do_not_match_are_refused() {
    let errors = refused(|_, config| {
        config.algo = Algorithm::Hierarchical;
        config.dimensions = Some(Dimensions(vec![2, 2]));
    });
    all_contain(&errors, ErrorKind::InvalidSetting, &["dimensions 2x2 have 4 points, but there are 3 ranks"]);
    let errors = refused(|_, config| {
        config.algo = Algorithm::ParameterServer;
        config.servers = Some(Servers(vec![0, 7]));
    });
    all_contain(&errors, ErrorKind::InvalidSetting, &["server 7 is not a rank: there are 3, from 0"]);
    let errors = refused(|_, config| {
        config.algo = Algorithm::Blueconnect;
        config.topology = Some("2+1".to_owned());
    });
    all_contain(&errors, ErrorKind::InvalidSetting, &["BlueConnect needs a symmetric topology"]);
}

#[test]
fn ranks_with_different_topologies_do_not_start() {
    let errors = refused(|rank, config| {
        config.topology = Some(if rank == 2 { "1+2" } else { "2+1" }.to_owned());
    });
    all_contain(&errors, ErrorKind::Disagreement, &["ranks 0 and 2 made different plans"]);
    // Only one rank has an invalid topology, and all ranks get the error.
    let errors = refused(|rank, config| {
        config.topology = Some(if rank == 1 { "1+1" } else { "2+1" }.to_owned());
    });
    all_contain(&errors, ErrorKind::InvalidSetting, &["leaves out rank 2"]);
}

#[test]
fn valid_topologies_and_plans_are_used() {
    let topology = Topology::from_names(&["a", "a", "b", "b", "b"]);
    let plan = file("plan.json", &plan_file::write(&flexreduce::plan(&topology).expect("small"), Some(60)));
    let short = |config: &mut Config| config.topology = Some("2+3".to_owned());
    let from_file = |config: &mut Config| config.plan_file = Some(plan.name());
    for change in [&short as &dyn Fn(&mut Config), &from_file] {
        for &world in World::enabled() {
            let mut setup = Setup::new(world, 5);
            change(&mut setup.config);
            spawn(&setup, |comm| {
                assert!(comm.summary().contains("flexreduce"), "{}", comm.summary());
                for count in [1, 60, 50_000] {
                    let mut vector = vec![1i32 << comm.rank(); count];
                    comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
                    assert!(vector.iter().all(|sum| *sum == 31), "{world:?}, {count}");
                }
            });
        }
    }
}
