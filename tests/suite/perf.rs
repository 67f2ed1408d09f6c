//! `flexring perf` with local ranks and in a job, and `flexring env`, as processes.

use crate::harness::free_port;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The command in an environment without settings and without variables of launchers.
fn flexring(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flexring"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let launcher = ["OMPI_", "PMI_", "PMIX_", "SLURM_"].iter().any(|kind| text.starts_with(kind));
        if launcher || text.starts_with("FLEXRING_") || text == "RANK" || text == "WORLD_SIZE" {
            command.env_remove(&name);
        }
    }
    command.args(arguments.split_whitespace()).stdin(Stdio::null());
    command
}

fn output(command: &mut Command) -> (Output, String, String) {
    let output = command.output().expect("the command starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    (output, out, err)
}

/// Runs `perf` and returns the cells of its rows.
fn rows(arguments: &str) -> Vec<Vec<String>> {
    let (output, out, err) = output(&mut flexring(&format!("perf -w 1 -n 2 {arguments}")));
    assert!(output.status.success(), "{arguments}\n{out}\n{err}");
    assert!(out.contains("# Out of bounds values : 0 OK\n# Avg bus bandwidth    : "), "{out}");
    out.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split_whitespace().map(str::to_owned).collect())
        .collect()
}

fn read_json(path: &Path) -> Value {
    let text = std::fs::read(path).expect("a report was written");
    serde_json::from_slice(&text).expect("the report is JSON")
}

/// Waits until `holds` returns true, and fails with `condition` after `limit`.
fn within(limit: Duration, condition: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < limit, "{condition}: not within {limit:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a process runs. A zombie does not.
fn is_alive(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

/// A `perf` that runs longer than any test, the process ids of its ranks, and its output up to the first row.
struct LongRun {
    child: Child,
    pids: Vec<i32>,
    out: BufReader<std::process::ChildStdout>,
    seen: String,
}

impl LongRun {
    fn start(arguments: &str) -> Self {
        Self::start_with(arguments, &[])
    }

    fn start_with(arguments: &str, variables: &[(&str, &str)]) -> Self {
        let mut command = flexring(&format!("perf -b 1K -e 4M -i 4 -n 200 -c 0 {arguments}"));
        command.envs(variables.iter().copied());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the command starts");
        let out = BufReader::new(child.stdout.take().expect("its output is piped"));
        let mut long_run = Self { child, pids: Vec::new(), out, seen: String::new() };
        loop {
            let at = long_run.seen.len();
            let bytes = long_run.out.read_line(&mut long_run.seen).expect("it prints text");
            let line = &long_run.seen[at..];
            if let Some((_, rest)) = line.split_once(" Pid ") {
                let pid = rest.split_whitespace().next().and_then(|pid| pid.parse().ok());
                long_run.pids.push(pid.expect("a process id"));
            }
            if bytes == 0 || !line.starts_with('#') {
                return long_run;
            }
        }
    }

    fn kill_rank(&self, rank: usize) {
        let pid = Pid::from_raw(self.pids[rank]).expect("not zero");
        kill_process(pid, Signal::KILL).expect("the rank runs");
    }

    /// Waits for the end. Returns standard output, standard error and the exit code.
    fn end(mut self) -> (String, String, Option<i32>) {
        let (mut out, mut err) = (std::mem::take(&mut self.seen), String::new());
        // Standard error is read in a thread, so that neither pipe fills up.
        let mut stderr = self.child.stderr.take().expect("its errors are piped");
        let errors = std::thread::spawn(move || {
            stderr.read_to_string(&mut err).expect("its errors are text");
            err
        });
        self.out.read_to_string(&mut out).expect("it prints text");
        let child = &mut self.child;
        let mut status = None;
        within(Duration::from_secs(10), "the end of the command", || {
            status = child.try_wait().expect("it is our child");
            status.is_some()
        });
        let pids = &self.pids;
        within(Duration::from_secs(10), "the end of all ranks", || !pids.iter().any(|pid| is_alive(*pid)));
        (out, errors.join().expect("no panic"), status.and_then(|status| status.code()))
    }
}

impl Drop for LongRun {
    fn drop(&mut self) {
        // The ranks end with the command, so that a failed test leaves no process behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn every_type_and_operation_is_correct_in_small_worlds() {
    for ranks in [1, 2, 4] {
        let rows = rows(&format!("--ranks {ranks} -b 8 -e 64K -f 8192 -d all -o all"));
        // Floats have six operations, integers the bitwise ones as well, and booleans no average and no
        // factor.
        assert_eq!(rows.len(), (6 * 6 + 8 * 9 + 7) * 2, "types, operations and sizes");
        for row in rows {
            assert_eq!((row.len(), &*row[8], &*row[12]), (13, "0", "0"), "{row:?}");
        }
    }
}

#[test]
fn a_barrier_is_measured_in_one_row_without_a_size() {
    let rows = rows("--ranks 3 --collective barrier");
    assert_eq!(rows.len(), 1);
    assert_eq!((&rows[0][..2], &*rows[0][3]), (&["0".to_owned(), "0".to_owned()][..], "none"));
}

#[test]
fn every_collective_is_correct_and_measured_as_in_nccl_tests() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.json");
    // The root column, the number of parts of a vector, and busbw / algbw.
    for (collective, root, parts, factor) in [
        ("all_reduce", -1, 1, 4.0 / 3.0),
        ("reduce_scatter", -1, 3, 2.0 / 3.0),
        ("reduce-scatter", -1, 3, 2.0 / 3.0),
        ("all_gather", -1, 3, 2.0 / 3.0),
        ("all-gather", -1, 3, 2.0 / 3.0),
        ("broadcast", 2, 1, 1.0),
        ("reduce", 2, 1, 1.0),
        ("gather", 2, 3, 2.0 / 3.0),
        ("scatter", 2, 3, 2.0 / 3.0),
        ("all-to-all", -1, 3, 2.0 / 3.0),
        ("send_recv", -1, 1, 1.0),
        ("sendrecv", -1, 1, 1.0),
    ] {
        let flags = "--ranks 3 --root 2 -b 48 -e 480000 -f 10000 -d double -o all";
        let rows = rows(&format!("{flags} --collective {collective} --json {}", path.display()));
        let reduces = collective.contains("reduce");
        assert_eq!(
            rows.len(),
            if reduces { 6 * 2 } else { 2 },
            "{collective}: operations, if any, and sizes"
        );
        for (row, size) in rows.iter().zip([48, 480_000].into_iter().cycle()) {
            let count = size / 8 / parts;
            let head = [size.to_string(), count.to_string(), "double".to_owned()];
            assert_eq!((&row[..3], &*row[4]), (&head[..], &*root.to_string()), "{collective}");
            assert_eq!(&*row[3] == "none", !reduces, "{collective}: {row:?}");
            assert_eq!((row.len(), &*row[8], &*row[12]), (13, "0", "0"), "{collective}: {row:?}");
        }
        let report = read_json(&path);
        // nccl-tests writes its name as one word.
        let name = collective.replace('-', "_").replace("sendrecv", "send_recv");
        assert_eq!(report["collective"], name);
        for row in report["rows"].as_array().expect("rows") {
            assert_eq!(row["root"], root);
            for placement in ["out_of_place", "in_place"] {
                let timing = |field: &str| row[placement][field].as_f64().expect(field);
                assert!((timing("busbw") - timing("algbw") * factor).abs() < 1e-9, "{collective}: {row}");
                let bytes = timing("algbw") * 1e3 * timing("mean_us");
                assert!((bytes - row["size"].as_f64().expect("a size")).abs() < 1e-3, "{collective}: {row}");
            }
        }
    }
}

#[test]
fn every_type_is_correct_in_every_collective_over_every_transport() {
    for collective in ["reduce-scatter", "all-gather", "broadcast", "reduce"] {
        for flags in ["--transport shm", "--transport tcp", "--memory heap", "--algo tree"] {
            // Some of these sizes are too small for parts, and some give empty parts.
            let rows =
                rows(&format!("--ranks 3 -b 7 -e 70000 -f 100 -d all --collective {collective} {flags}"));
            assert_eq!(rows.len(), 15 * 3, "types and sizes");
            let right = |row: &Vec<String>| row[8] == "0" && row[12] == "0";
            assert!(rows.iter().all(right), "{collective} {flags}: {rows:?}");
        }
    }
}

#[test]
fn every_transport_and_memory_is_correct() {
    for flags in ["--transport shm", "--transport tcp", "--memory heap", "--lowering chain", "--algo ring"] {
        let rows = rows(&format!("--ranks 3 -b 12 -e 1M -f 1000 {flags}"));
        assert!(rows.iter().all(|row| row[8] == "0" && row[12] == "0"), "{flags}: {rows:?}");
        assert_eq!(rows.len(), 2);
    }
}

#[test]
fn every_algorithm_is_correct_on_a_topology() {
    for algorithm in
        ["ring", "rabenseifner", "flexreduce", "weighted", "tree", "star", "local-master", "parameter-server"]
    {
        let rows = rows(&format!("--ranks 5 --topology 2+3 --algo {algorithm} -b 12 -e 1M -f 1000"));
        assert!(rows.iter().all(|row| row[8] == "0" && row[12] == "0"), "{algorithm}: {rows:?}");
    }
}

#[test]
fn sums_over_links_that_form_no_tree_are_right() {
    let file = crate::programs::root().join("examples/torus.toml");
    let rows = rows(&format!("--topology {} --transport tcp -b 4 -e 4M -f 1000", file.display()));
    assert!(rows.iter().all(|row| row[8] == "0" && row[12] == "0"), "{rows:?}");
}

#[test]
fn a_topology_determines_the_number_of_ranks() {
    let (output, out, err) = output(&mut flexring("perf --topology 1+2 -e 8"));
    assert!(output.status.success(), "{err}");
    assert!(out.contains("# FLEXRING_TOPOLOGY=1+2\n"), "{out}");
    assert_eq!(out.matches(" Pid ").count(), 3, "{out}");
    assert!(out.contains("#   any schedule takes at least 0.01 us by the links' bandwidths: "), "{out}");
    let (output, out, err) = self::output(&mut flexring("perf --topology 1+x"));
    assert_eq!((output.status.code(), &*out), (Some(2), ""), "{err}");
    assert!(err.contains("\"1+x\", at character 3"), "{err}");
    // In a job it starts no ranks, and the topology must match the world.
    let mut job = flexring("perf --topology 1+2 -e 8");
    job.envs([("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")]);
    let (output, _, err) = self::output(&mut job);
    assert!(!output.status.success() && err.contains("it names rank 2, but there are 1 ranks"), "{err}");
}

#[test]
fn flags_override_the_settings_of_all_ranks() {
    let (output, out, err) = output(&mut flexring("perf --ranks 2 -e 8 --transport tcp --timeout-ms 7000"));
    assert!(output.status.success(), "{err}");
    assert!(out.contains("# FLEXRING_TIMEOUT_MS=7000\n# FLEXRING_TRANSPORT=tcp\n"), "{out}");
    assert!(out.contains("tcp to 1 rank"), "{out}");
}

#[test]
fn unchecked_results_are_marked_as_not_available() {
    let rows = rows("--ranks 1 -e 8 -c 0");
    assert_eq!((&*rows[0][8], &*rows[0][12]), ("N/A", "N/A"));
}

#[test]
fn the_report_contains_ranks_rows_and_statistics() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.json");
    let rows = rows(&format!("--ranks 2 -b 4K -e 16K -f 4 -d double -o avg --json {}", path.display()));
    let report = read_json(&path);
    assert_eq!(report["world"], 2);
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert!(report["summary"].as_str().is_some_and(|summary| summary.starts_with("rank 0 of 2")));
    assert_eq!(report["ranks"].as_array().map(Vec::len), Some(2));
    assert_eq!(report["rows"].as_array().map(Vec::len), Some(rows.len()));
    assert_eq!(report.get("error"), None);
    for row in report["rows"].as_array().expect("rows") {
        assert_eq!((&row["type"], &row["redop"]), (&"double".into(), &"avg".into()));
        assert_eq!(row.get("least_us"), None, "no file has bandwidths of links");
        assert_eq!(row["size"].as_u64(), row["count"].as_u64().map(|count| count * 8));
        for placement in ["out_of_place", "in_place"] {
            let timing = |field: &str| row[placement][field].as_f64().expect(field);
            assert!(timing("min") <= timing("median") && timing("median") <= timing("max"), "{row}");
            assert!(timing("mean_us") > 0.0 && timing("p95") <= timing("max") && timing("first") > 0.0);
            assert!((timing("busbw") - timing("algbw")).abs() < 1e-9, "2 (n - 1) / n is 1 for two ranks");
            assert_eq!(row[placement]["wrong"], 0);
        }
    }
}

#[test]
fn with_adaptation_the_report_compares_measured_and_predicted_times() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.json");
    let arguments = format!(
        "perf --ranks 3 --topology 1+1+1 --transport tcp -b 1M -e 1M -w 1 -n 8 --json {}",
        path.display()
    );
    let (run, out, err) = output(flexring(&arguments).env("FLEXRING_ADAPT", "1"));
    assert!(run.status.success(), "{out}\n{err}");
    assert!(out.contains("\n# Links in bit/s        : ") && out.contains("(us)"), "{out}");
    let report = read_json(&path);
    // Three links of 10 Gbit/s carry four vectors.
    let (row, least) = (&report["rows"][0], 4e6 * f64::from(1 << 20) / 3.75e9);
    assert!(row["least_us"].as_f64().is_some_and(|us| (us - least).abs() < 1e-3), "{row}");
    let timing = |field: &str| row["in_place"][field].as_f64().expect("a number");
    assert!((timing("least_ratio") * least / timing("mean_us") - 1.0).abs() < 1e-6, "{row}");
    let adaptation = &report["adaptation"];
    assert_eq!(adaptation["nodes"].as_array().map(Vec::len), Some(3), "{adaptation}");
    // On a busy machine links may seem to differ just before the end, which begins new statistics.
    let times = &adaptation["calls"][0];
    let is_replanned = adaptation["replans"] != 0;
    assert!(is_replanned || times["bytes"] == 1 << 20, "{adaptation}");
    for time in ["measured_us", "predicted_us"] {
        assert!(is_replanned || times[time].as_f64().is_some_and(|time| time > 0.0), "{adaptation}");
    }
    // With an algorithm of the user there is nothing to adapt.
    let (run, out, err) = output(flexring(&format!("{arguments} --algo ring")).env("FLEXRING_ADAPT", "1"));
    assert!(run.status.success() && !out.contains("# Links"), "{out}\n{err}");
    assert!(err.contains("FLEXRING_ADAPT=1 has no effect: the settings name an algorithm"), "{err}");
}

#[test]
fn a_training_step_is_measured_in_buckets_and_as_one_vector() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.json");
    // In reverse order: the first bucket ends at 1 MiB, the other one with the last gradient.
    let model = "5,3000,262144";
    for memory in ["pool", "heap"] {
        let flags = format!("--ranks 2 --model {model} --memory {memory} -o avg --json {}", path.display());
        let (output, out, err) = output(&mut flexring(&format!("perf -w 0 -n 2 {flags}")));
        assert!(output.status.success(), "{out}\n{err}");
        assert!(out.contains("# model 5,3000,262144 elements 265149 warmup iters: 0"), "{out}");
        assert!(out.ends_with("# Out of bounds values : 0 OK\n"), "{out}");
        let rows: Vec<&str> = out.lines().filter(|line| !line.starts_with('#')).collect();
        let cells: Vec<&str> = rows[0].split_whitespace().collect();
        assert_eq!((rows.len(), &cells[..5]), (1, &["1060596", "3", "2", "float", "avg"][..]));
        assert_eq!((cells.len(), cells[8], cells[12]), (14, "0", "0"), "{out}");
        let report = read_json(&path);
        let row = &report["models"][0];
        assert_eq!((report["memory"].as_str(), row["model"].as_str()), (Some(memory), Some(model)));
        assert_eq!(row["buckets"], serde_json::json!([1_048_576, 12_020]));
        for way in ["bucketed", "fused"] {
            assert!(row[way]["mean_us"].as_f64().expect("a time") > 0.0 && row[way]["wrong"] == 0, "{row}");
        }
        assert!(row["ratio"].as_f64().expect("a ratio") > 0.0);
    }
}

#[test]
fn a_rank_started_by_a_launcher_joins_its_world() {
    let port = free_port();
    let rank = |rank: &str| {
        let mut command = flexring("perf -w 0 -n 1 -e 1K --transport tcp");
        command
            .envs([("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")])
            .env("MASTER_PORT", port.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().expect("the command starts")
    };
    let (zero, one) = (rank("0"), rank("1"));
    let outputs = [zero, one].map(|child| child.wait_with_output().expect("it ends"));
    let [table, nothing] = outputs.map(|output| {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    });
    assert!(table.contains("# FLEXRING_TRANSPORT=tcp\n") && table.contains(" 0 OK\n"), "{table}");
    assert_eq!(nothing, "", "only rank 0 prints");
}

#[test]
fn a_killed_rank_ends_the_run_and_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.json");
    let long_run = LongRun::start(&format!("--ranks 3 --json {}", path.display()));
    let pid = long_run.pids[2];
    long_run.kill_rank(2);
    let (out, err, code) = long_run.end();
    assert_eq!(code, Some(1));
    assert!(out.lines().any(|line| !line.starts_with('#')), "measured rows are kept: {out}");
    assert!(err.contains(&format!("rank 2 (pid {pid}) was killed by signal 9")), "{err}");
    assert_eq!(err.matches("ranks 0 and 1: ").count(), 1, "equal messages are merged: {err}");
    assert!(err.lines().any(|line| line.starts_with("ranks 0 and 1: ") && line.contains("rank 2 ")), "{err}");
    let report = read_json(&path);
    assert!(report["error"].as_str().is_some_and(|error| error.contains("rank 2")), "{report}");
    assert!(report["rows"].as_array().is_some_and(|rows| !rows.is_empty()));
}

#[test]
fn the_report_names_rank_0_if_it_is_killed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.json");
    let long_run = LongRun::start(&format!("--ranks 2 --json {}", path.display()));
    long_run.kill_rank(0);
    let (_, err, code) = long_run.end();
    assert_eq!(code, Some(1));
    assert!(err.contains("was killed by signal 9"), "{err}");
    let report = read_json(&path);
    assert!(report["error"].as_str().is_some_and(|error| error.contains("rank 0 (pid")), "{report}");
    assert!(report["rows"].as_array().is_some_and(|rows| !rows.is_empty()));
}

/// The TCP ports at which a process listens.
fn listening_ports(pid: i32) -> Vec<u16> {
    let sockets = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").flatten();
    let sockets = sockets.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let sockets: Vec<String> = sockets.map(|link| link.to_string_lossy().into_owned()).collect();
    let tables = ["tcp", "tcp6"].map(|name| std::fs::read_to_string(format!("/proc/{pid}/net/{name}")));
    let lines: Vec<String> = tables
        .into_iter()
        .flatten()
        .flat_map(|table| table.lines().map(str::to_owned).collect::<Vec<_>>())
        .collect();
    let listening = lines.iter().filter_map(|line| {
        let cells: Vec<&str> = line.split_whitespace().collect();
        let is_own = cells.get(3) == Some(&"0A") && sockets.contains(&format!("socket:[{}]", cells.get(9)?));
        is_own.then(|| u16::from_str_radix(cells[1].rsplit(':').next()?, 16).ok())?
    });
    listening.collect()
}

#[test]
fn all_listening_sockets_have_ports_of_the_given_range() {
    let first = free_port();
    let range = format!("{first}-{}", first + 30);
    let long_run = LongRun::start_with("--ranks 2 --transport tcp", &[("FLEXRING_PORT_RANGE", &range)]);
    for pid in long_run.pids.iter().copied() {
        // The kernel's list may lack sockets while others open and close.
        let mut ports = Vec::new();
        within(Duration::from_secs(10), "sockets for links and for shrinking", || {
            ports = listening_ports(pid);
            ports.len() >= 2
        });
        assert!(ports.iter().all(|port| (first..=first + 30).contains(port)), "{range}: {ports:?}");
    }
    let pids = long_run.pids.clone();
    drop(long_run);
    within(Duration::from_secs(10), "the end of all ranks", || !pids.iter().any(|pid| is_alive(*pid)));
    // A range that is used up, and one that is none.
    // The first thread of a process may be gone before the last one has closed the sockets.
    let mut listener = None;
    within(Duration::from_secs(10), "a free port", || {
        listener = std::net::TcpListener::bind(("0.0.0.0", first)).ok();
        listener.is_some()
    });
    for (range, code, message) in [
        (format!("{first}-{first}"), 1, "are in use: allow more ports"),
        ("30-20".to_owned(), 2, "expected two port numbers from 1 to 65535 joined by -"),
    ] {
        let (output, _, err) = output(flexring("perf --ranks 2 -e 8").env("FLEXRING_PORT_RANGE", &range));
        assert_eq!(output.status.code(), Some(code), "{err}");
        assert!(
            err.contains("FLEXRING_PORT_RANGE=") && err.contains(&range) && err.contains(message),
            "{err}"
        );
    }
    drop(listener);
}

#[test]
fn a_job_of_perf_is_found_by_any_of_its_processes() {
    let long_run = LongRun::start("--ranks 2");
    for pid in &long_run.pids {
        let (output, out, err) = output(&mut flexring(&format!("status --pid {pid}")));
        assert!(output.status.success(), "{err}");
        assert!(out.starts_with("job of 2 ranks, coordinator in process "), "{out}");
        assert!(long_run.pids.iter().all(|pid| out.contains(&format!("  {pid}  "))), "{out}");
        assert_eq!(out.matches("job of ").count(), 1, "{out}");
    }
}

#[test]
fn unknown_settings_cause_one_warning_on_each_node_of_a_job() {
    let port = free_port();
    let rank = |rank: &str, node: &str, local_rank: &str| {
        let mut command = flexring("perf -w 0 -n 1 -e 8");
        command
            .envs([
                ("RANK", rank),
                ("WORLD_SIZE", "3"),
                ("MASTER_ADDR", "127.0.0.1"),
                ("LOCAL_RANK", local_rank),
            ])
            .envs([("FLEXRING_NODE", node), ("FLEXRING_ALOG", "ring"), ("FLEXRING_FOO", "1")])
            .env("MASTER_PORT", port.to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        command.spawn().expect("the command starts")
    };
    let ranks = [rank("0", "left", "0"), rank("1", "left", "1"), rank("2", "right", "0")];
    let errors = ranks.map(|child| {
        let output = child.wait_with_output().expect("it ends");
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{err}");
        err
    });
    for err in [&errors[0], &errors[2]] {
        assert_eq!(
            err.matches("FLEXRING_ALOG is not a flexring setting; did you mean FLEXRING_ALGO?").count(),
            1,
            "{err}"
        );
        assert_eq!(err.matches("FLEXRING_FOO is not a flexring setting\n").count(), 1, "{err}");
    }
    assert!(!errors[1].contains("FLEXRING_ALOG"), "{}", errors[1]);
}

#[test]
fn ranks_end_with_their_parent() {
    let mut long_run = LongRun::start("--ranks 2");
    long_run.child.kill().expect("it runs");
    long_run.child.wait().expect("it ends");
    let pids = long_run.pids.clone();
    assert_eq!(pids.len(), 2);
    within(Duration::from_secs(10), "the end of all ranks", || !pids.iter().any(|pid| is_alive(*pid)));
}

#[test]
fn flags_that_cannot_be_used_are_quoted() {
    for (flags, message) in [
        ("--frobnicate", "--frobnicate"),
        ("-b 1.5M", "1.5M"),
        ("-d flaot", "flaot"),
        ("-o sub", "sub"),
        ("--algo rign", "rign"),
        ("-b 2M -e 1M", "--minbytes 2M"),
        ("--collective gathers", "broadcast, reduce, gather, scatter, all_to_all, barrier or send_recv"),
        ("--collective reduce --root 1", "--root 1 is not a rank: there are 1, from 0"),
        ("--model resnet51", "expected resnet50, gpt2, or the number of elements of each gradient"),
        ("--model gpt2 -e 1M", "--maxbytes"),
        ("--model gpt2 --device cuda", "--model measures host vectors: leave out --device cuda"),
    ] {
        let (output, out, err) = output(&mut flexring(&format!("perf --ranks 1 {flags}")));
        assert_eq!((output.status.code(), &*out), (Some(2), ""), "{flags}: {err}");
        assert!(err.contains(message), "{flags}: {err}");
    }
}

#[test]
fn without_ranks_or_a_launcher_the_error_names_the_next_step() {
    let (output, out, err) = output(&mut flexring("perf"));
    assert_eq!((output.status.code(), &*out), (Some(2), ""));
    assert!(err.contains("--ranks N") && err.contains("torchrun, mpirun or srun"), "{err}");
}

#[test]
fn an_unwritable_report_fails_before_anything_is_measured() {
    let (output, out, err) = output(&mut flexring("perf --ranks 2 --json /nowhere/report.json"));
    assert_eq!((output.status.code(), &*out), (Some(1), ""), "{err}");
    assert!(err.contains("cannot create /nowhere/report.json, whose folder must exist"), "{err}");
}

#[test]
fn settings_are_listed_with_their_origin() {
    let mut command = flexring("env --json");
    let (output, out, err) = output(command.env("FLEXRING_SUBCHUNK", "1024K"));
    assert!(output.status.success(), "{err}");
    let rows: Value = serde_json::from_str(&out).expect("JSON");
    let row =
        |name: &str| rows.as_array().and_then(|rows| rows.iter().find(|row| row["name"] == name).cloned());
    let subchunk = row("FLEXRING_SUBCHUNK").expect("listed");
    assert_eq!((&subchunk["value"], &subchunk["origin"]), (&"1M".into(), &"environment".into()));
    assert_eq!(row("FLEXRING_ALGO").expect("listed")["origin"], "default");
}

#[test]
fn settings_that_cannot_be_parsed_are_all_quoted() {
    for command in ["env", "perf --ranks 2 -e 8"] {
        let mut command = flexring(command);
        command.env("FLEXRING_SUBCHUNK", "1000").env("FLEXRING_ALGO", "rign");
        let (output, out, err) = output(&mut command);
        assert_eq!((output.status.code(), &*out), (Some(2), ""), "{err}");
        assert!(err.contains("FLEXRING_ALGO=\"rign\""), "{err}");
    }
}

#[test]
fn misspelt_settings_cause_a_warning() {
    for command in ["env", "perf --ranks 1 -e 8"] {
        let (output, _, err) = output(flexring(command).env("FLEXRING_ALOG", "ring"));
        assert!(output.status.success(), "{err}");
        assert_eq!(err, "warning: FLEXRING_ALOG is not a flexring setting; did you mean FLEXRING_ALGO?\n");
    }
}
