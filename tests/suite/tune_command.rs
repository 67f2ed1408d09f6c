//! `flexring tune` as a process, and profiles in jobs.

use crate::fault_matrix::network::run_inside;
use crate::harness::{Setup, World, spawn};
use crate::programs::{root, succeed};
use flexring::{Communicator, ReduceOp};
use flexring_core::config::{Config, Size};
use flexring_plan::tuning::{TuningProfile, parse, write};
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

/// Runs the command with `arguments`, separated by white space, and `variables` as its whole environment, in
/// `folder`.
fn run(folder: &Path, arguments: &str, variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flexring"));
    command.args(arguments.split_whitespace()).env_clear().envs(variables.iter().copied());
    command.current_dir(folder).output().expect("the command can be started")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The profile that `flexring tune` writes for these ranks, in a short form of the measurement.
fn tuned(folder: &Path, ranks: usize, variables: &[(&str, &str)]) -> TuningProfile {
    let flags = format!("tune --ranks {ranks} -o profile.toml --sizes 16K,256K --time-ms 1");
    let output = run(folder, &flags, variables);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!((output.status.code(), &*err), (Some(0), ""), "{out}");
    assert!(out.contains("wrote profile.toml after ") && out.contains("all-reduces of 16K: "), "{out}");
    let written = std::fs::read_to_string(folder.join("profile.toml")).expect("the profile was written");
    let drafts = std::fs::read_dir(folder)
        .expect("the folder")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    assert_eq!(drafts.filter(|name| name.ends_with(".part")).count(), 0);
    parse("profile.toml", &written).expect("the profile can be read")
}

#[test]
fn a_profile_of_four_ranks_is_written_and_loaded() {
    let folder = tempfile::tempdir().expect("a folder");
    let profile = tuned(folder.path(), 4, &[]);
    assert_eq!((profile.cluster.world(), &*profile.cluster.transport), (4, "memory"));
    assert_eq!(profile.classes.len(), 1);
    assert!(profile.choices.last().is_some_and(|choice| choice.up_to.is_none()));
    let perf = |ranks: usize| {
        let flags = format!("perf --ranks {ranks} -b 16K -e 1M -f 64 -n 1 -w 1");
        run(folder.path(), &flags, &[("FLEXRING_TUNING", "profile.toml")])
    };
    let output = perf(4);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && out.contains("# Out of bounds values : 0 OK"), "{out}\n{err}");
    assert!(out.contains(&format!("(measured on {}: FLEXRING_TUNING)", profile.date)), "{out}");
    let output = perf(2);
    let err = text(&output.stderr);
    assert!(!output.status.success());
    // One line for both ranks: the error is the same.
    assert!(
        err.contains("ranks 0 and 1: ")
            && err.contains("FLEXRING_TUNING=profile.toml is the profile of another cluster: ")
            && err.contains("it is for 4 ranks, but the job has 2: run `flexring tune` on this one"),
        "{err}"
    );
}

/// Starts the ranks of a job on the nodes of bench/lab.sh, with the arguments after the program.
const JOB: &str = "program=$1; shift; rank=0; ranks=
for node in $LAB_NODES; do
    FLEXRING_RANK=$rank ip netns exec $node $program \"$@\" & ranks=\"$ranks $!\"; rank=$((rank + 1))
done
for pid in $ranks; do wait $pid; done";

#[test]
fn the_links_of_switches_and_nodes_are_told_apart_in_a_job_on_a_tree() {
    let name = "tune_command::the_links_of_switches_and_nodes_are_told_apart_in_a_job_on_a_tree";
    match run_inside(name) {
        Ok(None) => {}
        Ok(Some(status)) => return assert!(status.success(), "see above"),
        Err(why) => return eprintln!("skipped: {why}"),
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("profile.toml");
    // Two nodes at a switch whose link has half their rate, and one at the first switch.
    let mut lab = Command::new(root().join("bench/lab.sh"));
    lab.args(["[", "80mbit", "80mbit", "]", "40mbit", "80mbit", "--", "sh", "-ec", JOB, "sh"]);
    lab.args([env!("CARGO_BIN_EXE_flexring"), "tune", "--sizes", "64K", "-o"]).arg(&path);
    for (setting, value) in [
        ("FLEXRING_WORLD_SIZE", "3"),
        ("FLEXRING_MASTER_ADDR", "198.18.0.1"),
        ("FLEXRING_MASTER_PORT", "29400"),
        ("FLEXRING_TOPOLOGY", "(1+1)+1"),
    ] {
        lab.env(setting, value);
    }
    succeed(&mut lab, Duration::from_secs(150));
    let text = std::fs::read_to_string(&path).expect("the profile was written");
    let profile = parse("profile.toml", &text).expect("the profile can be read");
    assert_eq!((&*profile.cluster.switches, profile.switches.len()), ("((0 1) 2)", 1));
    let switch = profile.switches[0];
    let nodes: Vec<_> = profile.nodes.iter().filter_map(|node| node.uplink).collect();
    assert_eq!(nodes.len(), 3);
    // Shapers let no link carry more, up to what passes at once.
    for uplink in &nodes {
        assert!(uplink.up.max(uplink.down) < 12_500_000, "{text}");
    }
    assert!(switch.up.max(switch.down) < 6_250_000, "{text}");
}

#[test]
fn a_profile_over_tcp_is_refused_in_shared_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let profile = tuned(folder.path(), 2, &[("FLEXRING_TRANSPORT", "tcp")]);
    assert_eq!(profile.cluster.transport, "tcp");
    let perf = run(folder.path(), "perf --ranks 2 -b 1K -e 1K", &[("FLEXRING_TUNING", "profile.toml")]);
    let err = text(&perf.stderr);
    assert!(
        !perf.status.success() && err.contains("it was measured over tcp, but the job uses memory"),
        "{err}"
    );
}

#[test]
fn partial_sums_fit_scratch_memory_with_the_sub_chunks_of_a_profile() {
    // Rings of sub-chunks were allocated for 128 KiB and laid out for the profile's 256 KiB.
    let profile = root().join("tests/data/tuning.toml");
    let mut setup = Setup::new(World::Mixed, 4);
    (setup.config.tuning, setup.config.subchunk) = (Some(profile.display().to_string()), Size(128 << 10));
    setup.nodes = &["a", "a", "b", "c"];
    let count = 4 << 20;
    spawn(&setup, |rank| {
        let given: Vec<f32> = (0..count).map(|at| (at % 7 + rank.rank()) as f32).collect();
        let mut sums = vec![0.0; count];
        rank.reduce_into(&given, &mut sums, ReduceOp::Sum, 0).expect("a sum");
        let is_sum = |(at, sum): (usize, &f32)| *sum == (4 * (at % 7) + 6) as f32;
        assert!(rank.rank() != 0 || sums.iter().enumerate().all(is_sum));
    });
}

#[test]
fn an_unusable_profile_is_refused_on_all_ranks_with_file_line_cause_and_fix() {
    let folder = tempfile::tempdir().expect("a folder");
    let example = include_str!("../data/tuning.toml");
    std::fs::write(folder.path().join("nan.toml"), example.replace("slots = 128", "slots = nan"))
        .expect("a file");
    for (file, words) in [
        (
            "nan.toml",
            "nan.toml:7: invalid type: floating point `NaN`, expected a whole number from 2 to 65536",
        ),
        ("missing.toml", "FLEXRING_TUNING=missing.toml cannot be read on the node of rank 0: "),
    ] {
        let perf = run(folder.path(), "perf --ranks 2 -b 1K -e 1K", &[("FLEXRING_TUNING", file)]);
        let err = text(&perf.stderr);
        assert!(!perf.status.success() && err.contains("ranks 0 and 1: ") && err.contains(words), "{err}");
    }
}

#[test]
fn flags_of_tune_are_checked_before_anything_is_measured() {
    let folder = tempfile::tempdir().expect("a folder");
    for (flags, words) in [
        ("--ranks 2 --sizes 0", "expected a number of bytes from 4 to 1G in multiples of 4"),
        ("--ranks 2 --time-ms 0", "0 is not in 1..=10000"),
        ("--sizes 4K", "give --ranks N to start N ranks on this machine"),
        (
            "--ranks 2 -o /nowhere/profile.toml",
            "ranks 0 and 1: system error: the profile cannot be written on the node of rank 0: cannot create /nowhere/profile.toml, whose",
        ),
        (
            &format!(
                "--ranks 2 --sizes {}",
                (1..=65).map(|size| (4 * size).to_string()).collect::<Vec<_>>().join(",")
            ),
            "--sizes has 65 lengths: give at most 64",
        ),
    ] {
        let output = run(folder.path(), &format!("tune {flags}"), &[]);
        let err = text(&output.stderr);
        assert!(!output.status.success() && err.contains(words), "{flags}: {err}");
    }
}

#[test]
fn calls_use_the_plan_and_the_sub_chunk_of_their_length() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("profile.toml");
    let ranks = |config: &Config| Communicator::local_with(config, 3).expect("three ranks");
    let example = parse("f", include_str!("../data/tuning.toml")).expect("a profile");
    let here = ranks(&Config::default());
    let node = flexring_plan::tuning::MeasuredNode { uplink: None, ..example.nodes[0] };
    let profile = TuningProfile { cluster: here[0].cluster().clone(), nodes: vec![node], ..example };
    drop(here);
    std::fs::write(&path, write(&profile)).expect("the profile is written");
    let tuning = Some(path.to_str().expect("a name in Unicode").to_owned());
    let ranks = ranks(&Config { tuning, mailbox: Size(0), ..Config::default() });
    assert!(ranks[0].summary().contains("128 sub-chunks of 256K"), "{}", ranks[0].summary());
    std::thread::scope(|scope| {
        for comm in &ranks {
            scope.spawn(move || {
                for count in [1usize, 1 << 12, 1 << 14, (1 << 14) + 1, 1 << 18, (1 << 19) + 3] {
                    let mut vector: Vec<u32> = (0..count as u32).collect();
                    comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
                    assert!(
                        vector.iter().zip(0..).all(|(sum, index): (_, u32)| *sum == 3 * index),
                        "{count}"
                    );
                }
                // A part selects its plans by its shape, and has no choice that needs the longer sub-chunks.
                let color = i32::from(comm.rank() == 2);
                let part = comm.split(color, 0).expect("a part").expect("a member");
                assert!(!part.summary().contains("FLEXRING_TUNING"), "{}", part.summary());
                assert!(part.summary().contains("sub-chunks of 128K"), "{}", part.summary());
            });
        }
    });
    let set = Config { subchunk: Size(64 << 10), ..Config::default() };
    assert_eq!(profile.configure(&set).subchunk, Size(64 << 10));
}
