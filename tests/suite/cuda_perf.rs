//! `flexring perf --device cuda`, and `doctor` and `env` about GPUs, run as commands. Runs only with
//! `WORLDS=gpu`, except for the test without a driver.

use flexring::gpu::{gpu_count, gpu_info};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// The command. In a bundle (`tests/gpu/bundle.sh`) it is not where it was built.
fn command() -> Command {
    Command::new(std::env::var_os("COMMAND").unwrap_or_else(|| env!("CARGO_BIN_EXE_flexring").into()))
}

/// Whether GPUs are tested in this run; prints a line if not.
fn is_enabled() -> bool {
    let here = std::env::var("WORLDS").as_deref() == Ok("gpu");
    if !here {
        eprintln!("skipped: GPUs are tested where WORLDS=gpu");
    }
    here
}

/// Runs the command with these arguments and variables. Its exit code, stdout and stderr.
fn run(arguments: &str, variables: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let output = command()
        .args(arguments.split_whitespace())
        .envs(variables.iter().copied())
        .output()
        .expect("the command can be started");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// The rows of a table without wrong results, split into columns.
fn rows(arguments: &str) -> Vec<Vec<String>> {
    let (code, out, err) = run(&format!("perf --device cuda -n 2 -w 2 {arguments}"), &[]);
    assert_eq!(code, Some(0), "{arguments}: {err}\n{out}");
    let rows = out.lines().filter(|line| !line.starts_with('#'));
    let rows: Vec<Vec<String>> =
        rows.map(|row| row.split_whitespace().map(str::to_owned).collect()).collect();
    for row in &rows {
        assert_eq!((row.len(), &*row[8], &*row[12]), (13, "0", "0"), "{arguments}: {row:?}");
    }
    rows
}

#[test]
fn every_type_and_operation_is_right() {
    if is_enabled() {
        for ranks in [1, 3] {
            let rows = rows(&format!("--ranks {ranks} -b 8 -e 64K -f 8192 -d all -o all"));
            // As in `perf::every_type_and_operation_is_correct_in_small_worlds`.
            assert_eq!(rows.len(), (6 * 6 + 8 * 9 + 7) * 2, "types, operations and sizes");
        }
    }
}

#[test]
fn every_collective_is_right_over_every_transport() {
    if is_enabled() {
        for collective in ["all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce"] {
            for transport in ["auto", "tcp"] {
                // Some of these sizes do not divide into parts, and some give empty parts.
                let flags = format!("--collective {collective} --root 2 --transport {transport}");
                let rows = rows(&format!("--ranks 3 -b 7 -e 700000 -f 100 -d bfloat16 {flags}"));
                assert_eq!(rows.len(), 3, "sizes");
            }
        }
    }
}

#[test]
fn a_shared_gpu_is_reported_once_and_the_report_names_every_rank() {
    if !is_enabled() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.json");
    let ranks = gpu_count().expect("a driver") + 1;
    let arguments = format!("perf --device cuda --ranks {ranks} -b 1K -e 1K --json {}", path.display());
    let (code, out, err) = run(&arguments, &[]);
    assert_eq!((code, &*err), (Some(0), ""), "{out}");
    let name = gpu_info(0).expect("a GPU").name;
    let line = format!("\n# {ranks} ranks share {} GPU", ranks - 1);
    assert_eq!(out.matches(&line).count(), 1, "{line} in {out}");
    assert!(out.contains(&format!("({name})\n")), "{out}");
    let report: Value = serde_json::from_slice(&std::fs::read(&path).expect("a report")).expect("JSON");
    assert_eq!(report["memory"], "gpu");
    let gpu = |rank: usize| report["ranks"][rank]["gpu"].clone();
    assert_eq!((&gpu(0)["number"], &gpu(0)["name"]), (&0.into(), &name.into()));
    assert_eq!(gpu(ranks - 1), gpu(0), "from the first GPU again");
    let timing = &report["rows"][0]["in_place"];
    assert!(timing["mean_us"].as_f64().is_some_and(|mean| mean > 0.0), "{timing}");
    assert_eq!(timing["median"], Value::Null, "calls have no times of their own");
}

/// The rows of the report of two ranks.
fn report(arguments: &str) -> Value {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.json");
    rows(&format!("--ranks 2 --json {} {arguments}", path.display()));
    serde_json::from_slice(&std::fs::read(&path).expect("a report")).expect("JSON")
}

#[test]
fn graphs_of_short_and_long_calls_are_timed_and_right() {
    if !is_enabled() {
        return;
    }
    let graphs = report("--graph 3 -b 8 -e 2M -f 262144");
    assert_eq!((&graphs["graph"], graphs["rows"].as_array().map(Vec::len)), (&3.into(), Some(2)));
    for place in ["out_of_place", "in_place"] {
        let timing = &graphs["rows"][0][place];
        assert_eq!((&timing["iterations"], &timing["wrong"]), (&6.into(), &0.into()), "two launches");
        assert!(timing["mean_us"].as_f64().is_some_and(|mean| mean > 0.0), "{timing}");
        assert_eq!(timing["waited_us"], Value::Null, "no call is awaited alone");
    }
    for collective in ["reduce-scatter", "all-gather", "broadcast", "reduce", "all-to-all"] {
        report(&format!("--graph 2 -b 1K -e 1K --collective {collective}"));
    }
}

#[test]
fn the_report_has_enqueued_and_waited_times() {
    if !is_enabled() {
        return;
    }
    let timing = &report("-b 8 -e 8")["rows"][0]["in_place"];
    let us = |key: &str| timing[key].as_f64().unwrap_or_else(|| panic!("{key} in {timing}"));
    assert!(us("mean_us") > 0.0 && 0.0 < us("caller_us") && us("caller_us") <= us("waited_us"), "{timing}");
}

#[test]
fn registered_vectors_are_timed_and_right() {
    if is_enabled() {
        let variables = [("FLEXRING_LOG", "debug")];
        for flags in ["", "--graph 3", "--collective all-gather -d float"] {
            let flags = format!("--ranks 3 -b 3M -e 3M -n 4 -w 4 --memory registered {flags}");
            let (code, out, err) = run(&format!("perf --device cuda {flags}"), &variables);
            assert_eq!(code, Some(0), "{flags}: {err}\n{out}");
            assert_eq!(
                err.matches("kernels access registered vectors directly").count(),
                3,
                "{flags}: {err}"
            );
        }
    }
}

#[test]
fn kernels_run_calls_between_nodes() {
    if is_enabled() {
        let flags = "perf --device cuda --ranks 3 --transport tcp -b 1M -e 1M -n 4 -w 4";
        let (code, out, err) = run(flags, &[("FLEXRING_LOG", "debug")]);
        assert_eq!(code, Some(0), "{err}\n{out}");
        assert_eq!(err.matches("and reach that of 1 of 3 ranks").count(), 3, "{err}");
    }
}

#[test]
fn graphs_without_gpus_are_refused() {
    for (arguments, words) in [
        ("perf --ranks 1 --graph 4", "--graph captures calls on a GPU: add --device cuda"),
        ("perf --ranks 1 -G 4", "give --graph N"),
    ] {
        let (code, _, err) = run(arguments, &[]);
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains(words), "{err}");
    }
}

#[test]
fn all_ranks_use_the_requested_gpu() {
    if !is_enabled() {
        return;
    }
    let (code, out, err) = run("perf --device cuda --ranks 2 -e 8", &[("FLEXRING_GPU", "0")]);
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(out.matches(" device  0 [").count(), 2, "{out}");
    let (code, _, err) = run("perf --device cuda --ranks 2 -e 8", &[("FLEXRING_GPU", "99")]);
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("there is no GPU 99: this process sees"), "{err}");
}

#[test]
fn a_rank_uses_the_gpu_of_its_local_rank() {
    if !is_enabled() {
        return;
    }
    let port = (20_000 + std::process::id() % 10_000).to_string();
    let rank = |rank: &str| {
        let mut command = command();
        command.args("perf --device cuda -w 0 -n 1 -e 1K --transport tcp".split_whitespace());
        let local = [("RANK", rank), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")];
        command.envs(local).env("MASTER_PORT", &port);
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        command.spawn().expect("the command can be started")
    };
    let outputs = [rank("0"), rank("1")].map(|child| child.wait_with_output().expect("it ends"));
    for output in &outputs {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let table = String::from_utf8_lossy(&outputs[0].stdout);
    assert_eq!(table.matches(" device  0 [").count(), 2, "{table}");
}

#[test]
fn doctor_reports_gpus_and_kernels() {
    let (_, text, _) = run("doctor", &[]);
    let (_, json, _) = run("doctor --json", &[]);
    let report: Value = serde_json::from_str(&json).expect("JSON");
    let kernels = flexring::internal::device::cuda::image::origin();
    assert_eq!(report["build"]["kernels"], kernels);
    assert!(text.contains(&format!("\n           GPU kernels: {kernels}\n")), "{text}");
    let cuda = &report["gpus"]["cuda"];
    match gpu_count() {
        Ok(_) => {
            let gpu = gpu_info(0).expect("a GPU");
            let (major, minor) = gpu.capability;
            assert_eq!(cuda["devices"][0]["capability"], format!("{major}.{minor}"));
            let line = format!("CUDA 0: {}, compute capability {major}.{minor}, ", gpu.name);
            assert!(text.contains(&line), "{line} in\n{text}");
        }
        Err(error) => {
            assert_eq!(cuda["failure"], error.message());
            assert!(text.contains(&format!("CUDA: {}\n", error.message())), "{text}");
        }
    }
    for command in ["env", "--version", "-V"] {
        let (_, out, _) = run(command, &[]);
        assert!(out.ends_with(&format!("\nGPU kernels: {kernels}\n")), "{command}: {out}");
    }
}

#[test]
fn without_a_driver_the_error_names_the_next_step() {
    if gpu_count().is_ok() || Path::new("/dev/nvidiactl").exists() {
        return eprintln!("skipped: there is a driver");
    }
    for arguments in ["perf --device cuda --ranks 2", "perf --device cuda"] {
        let (code, out, err) = run(arguments, &[("RANK", "0"), ("WORLD_SIZE", "1")]);
        assert_eq!((code, &*out), (Some(1), ""), "{err}");
        assert!(err.contains("there is no CUDA driver: libcuda.so.1 is not found"), "{err}");
        assert!(err.contains("leave out --device cuda"), "{err}");
        assert_eq!(err.lines().count(), 1, "{err}");
    }
    let (code, _, err) = run("perf --ranks 1 --device cuda --memory heap", &[]);
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("--memory"), "{err}");
}
