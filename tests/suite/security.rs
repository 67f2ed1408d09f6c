//! Strangers against whole jobs of processes, and the table of promises in SECURITY.md.

use crate::harness::{free_port, once_unchanged, with_watchdog};
use flexring::internal::bootstrap::{RendezvousPoint, choose_address};
use flexring::{Communicator, Identity, ReduceOp};
use flexring_core::config::{Config, SecretText};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(40);

/// A rank of `perf` as a process of its own, in an environment that contains these variables only.
fn perf_rank(rank: usize, address: &str, port: u16, variables: &[(&str, &str)]) -> Command {
    // With a hard limit for the number of descriptors, so that the process cannot raise it.
    let mut command = Command::new("sh");
    command
        .args([
            "-c",
            "ulimit -n 128; exec \"$0\" perf -b 8 -e 1K -f 128 -w 1 -n 2",
            env!("CARGO_BIN_EXE_flexring"),
        ])
        .env_clear()
        .envs(variables.iter().copied())
        .envs([("FLEXRING_WORLD_SIZE", "2"), ("FLEXRING_MASTER_ADDR", address)])
        .env("FLEXRING_CONNECT_TIMEOUT_MS", "20000")
        .env("FLEXRING_RANK", rank.to_string())
        .env("FLEXRING_MASTER_PORT", port.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn finish(rank: Child) -> (Output, String) {
    let output = rank.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, text)
}

#[test]
fn strangers_get_at_most_a_quarter_of_the_descriptors() {
    with_watchdog(LIMIT, || {
        let port = free_port();
        let zero = perf_rank(0, "127.0.0.1", port, &[]).spawn().expect("started");
        let descriptors = || {
            let folder = std::fs::read_dir(format!("/proc/{}/fd", zero.id()));
            folder.map_or(0, Iterator::count)
        };
        let until = Instant::now() + LIMIT;
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            assert!(Instant::now() < until, "rank 0 does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        let before = once_unchanged(descriptors);
        let mut most = 0;
        let strangers: Vec<TcpStream> = (0..300)
            .filter_map(|_| {
                let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok();
                most = most.max(descriptors());
                stream
            })
            .collect();
        let mut left = 20;
        while left > 0 {
            std::thread::sleep(Duration::from_millis(10));
            most = most.max(descriptors());
            // Count once they are accepted.
            if most > before + 16 || Instant::now() > until {
                left -= 1;
            }
        }
        // One more while it is accepted.
        assert!(most <= before + 128 / 4 + 1, "{most} descriptors, {before} before the strangers came");
        assert!(most > before + 16, "the strangers were not accepted: {most} descriptors, {before} before");
        let one = perf_rank(1, "127.0.0.1", port, &[]).spawn().expect("started");
        for rank in [zero, one] {
            let (output, text) = finish(rank);
            assert!(output.status.success(), "{text}");
        }
        drop(strangers);
    });
}

/// The settings and the identity of a rank of two that meet at `port`.
fn member(rank: usize, port: u16) -> (Config, Identity) {
    let config = Config {
        secret: Some(SecretText::new("a secret for two processes")),
        connect_timeout: Duration::from_secs(20),
        timeout: Duration::from_secs(20),
        ..Config::default()
    };
    let rendezvous = RendezvousPoint::at("127.0.0.1".to_owned(), port);
    let mut identity = Identity::alone();
    (identity.rank, identity.world, identity.rendezvous, identity.token) = (rank, 2, rendezvous, 7);
    (config, identity)
}

fn add_up(rank: usize, port: u16) {
    let (config, identity) = member(rank, port);
    let communicator = Communicator::with_config(&config, &identity).expect("the world meets");
    let mut vector = vec![rank as i32 + 1; 1000];
    communicator.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
    assert!(vector.iter().all(|sum| *sum == 3));
}

/// Rank 0 in a process that has no descriptor left when rank 1 calls, for half a second.
#[test]
fn a_process_out_of_descriptors_still_finds_its_ranks() {
    const PORT: &str = "STARVED_RANK_PORT";
    if let Ok(port) = std::env::var(PORT) {
        return starve(port.parse().expect("a port"));
    }
    with_watchdog(LIMIT, || {
        let port = free_port();
        let name =
            crate::harness::test_name(module_path!(), "a_process_out_of_descriptors_still_finds_its_ranks");
        let mut starved = Command::new(std::env::current_exe().expect("this binary"))
            .args([&name, "--exact", "--nocapture"])
            .env(PORT, port.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let out = BufReader::new(starved.stdout.take().expect("its output is piped"));
        let mut lines = out.lines().map_while(Result::ok);
        assert!(lines.any(|line| line.contains("no descriptor is left")));
        add_up(1, port);
        // A closed pipe would fail the other test.
        lines.for_each(drop);
        assert!(starved.wait().expect("it ends").success());
    });
}

fn starve(port: u16) {
    let limit = Some(200);
    setrlimit(Resource::Nofile, Rlimit { current: limit, maximum: limit }).expect("a lower limit");
    let rank = std::thread::spawn(move || add_up(0, port));
    while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
        std::thread::sleep(Duration::from_millis(5));
    }
    // The rank waits for the other one.
    once_unchanged(|| std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count));
    let files: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
    assert!(files.len() > 50, "only {} files could be opened", files.len());
    writeln!(std::io::stdout(), "no descriptor is left").expect("the parent reads");
    std::thread::sleep(Duration::from_millis(500));
    drop(files);
    rank.join().expect("a sum");
}

#[test]
fn a_job_that_other_hosts_can_join_is_warned_of_once() {
    with_watchdog(LIMIT, || {
        let address = choose_address(&Config::default()).expect("an interface");
        if address.is_loopback() {
            eprintln!("skipped: this machine has no interface but loopback");
            return;
        }
        let warning = "the job has no secret: every process that reaches";
        for (variables, warnings) in
            [(vec![], 1), (vec![("FLEXRING_SECRET", "0123456789abcdef0123456789abcdef")], 0)]
        {
            let port = free_port();
            let ranks = [0, 1].map(|rank| perf_rank(rank, &address.to_string(), port, &variables).spawn());
            let [zero, one] = ranks.map(|rank| finish(rank.expect("started")));
            assert!(zero.0.status.success() && one.0.status.success(), "{}\n{}", zero.1, one.1);
            assert_eq!(zero.1.matches(warning).count(), warnings, "{}", zero.1);
            assert_eq!(one.1.matches(warning).count(), 0, "{}", one.1);
        }
    });
}

/// The names of all Unix sockets of this network namespace that begin with `prefix`.
fn sockets(prefix: &str) -> Vec<String> {
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let names = sockets.lines().filter_map(|line| line.split_once('@').map(|(_, name)| name.to_owned()));
    names.filter(|name| name.starts_with(prefix)).collect()
}

/// Those that hand out a secret for this port.
fn secret_sockets(port: u16) -> Vec<String> {
    sockets(&format!("flexring-secret-{port}-"))
}

/// Reads what the socket of this name sends, in a process that the command `wrapper` starts, and returns the
/// number of bytes.
fn bytes_from(wrapper: &[&str], name: &str) -> String {
    let program = format!(
        "import socket; s = socket.socket(socket.AF_UNIX); s.settimeout(5); s.connect('\\0{name}'); print(len(s.recv(64)))"
    );
    let output = Command::new(wrapper[0])
        .args(&wrapper[1..])
        .args(["/usr/bin/python3", "-c", &program])
        .output()
        .expect("the wrapper starts");
    String::from_utf8_lossy(&output.stdout).trim().to_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// A rank of `perf` as mpirun starts two of them on one node, by the command `wrapper`.
fn node_rank(wrapper: &[&str], rank: &str, port: u16, timeout_ms: u32) -> Child {
    let mut command = Command::new(wrapper[0]);
    command.args(&wrapper[1..]).arg(env!("CARGO_BIN_EXE_flexring"));
    command.args(["perf", "-b", "8", "-e", "8", "-w", "1", "-n", "2"]).env_clear();
    command.envs([
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_NAMESPACE", "security"),
    ]);
    command.env("FLEXRING_CONNECT_TIMEOUT_MS", timeout_ms.to_string());
    command.env("OMPI_COMM_WORLD_RANK", rank).env("OMPI_COMM_WORLD_LOCAL_RANK", rank);
    command.env("FLEXRING_MASTER_PORT", port.to_string());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("started")
}

/// The name of the one socket that begins with `prefix`, once there is one.
fn socket(prefix: &str) -> String {
    let until = Instant::now() + LIMIT;
    loop {
        if let [name] = sockets(prefix).as_slice() {
            return name.clone();
        }
        assert!(Instant::now() < until, "there is no socket {prefix}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The name under which rank 0 of this port hands out its secret.
fn secret_socket(port: u16) -> String {
    socket(&format!("flexring-secret-{port}-"))
}

/// Runs a command as it is.
const DIRECTLY: &[&str] = &["/usr/bin/env"];
/// Runs a command as another user.
const AS_NOBODY: &[&str] = &["setpriv", "--reuid=65534", "--clear-groups"];
/// Runs a command as the same user in another PID and mount namespace, as another container on the host's
/// network.
const IN_CONTAINER: &[&str] = &["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"];

/// Whether this machine can run the tests of other users and containers.
fn can_be_others() -> bool {
    let runs = |wrapper: &[&str]| {
        Command::new(wrapper[0]).args(&wrapper[1..]).args(["/usr/bin/python3", "-c", ""]).output()
    };
    let can = rustix::process::geteuid().is_root()
        && [AS_NOBODY, IN_CONTAINER]
            .iter()
            .all(|wrapper| runs(wrapper).is_ok_and(|out| out.status.success()));
    if !can {
        eprintln!("skipped: it needs root, setpriv, unshare, and python3, which connects");
    }
    can
}

#[test]
fn another_user_of_the_node_gets_neither_secret_nor_status() {
    if !can_be_others() {
        return;
    }
    with_watchdog(LIMIT, || {
        let port = free_port();
        let zero = node_rank(DIRECTLY, "0", port, 20_000);
        let name = secret_socket(port);
        let status = socket(&format!("flexring-status-0-{}-", zero.id()));
        // As many as are read of the status.
        for (name, bytes) in [(&name, "32"), (&status, "64")] {
            assert_eq!(bytes_from(DIRECTLY, name), bytes);
            assert_eq!(bytes_from(AS_NOBODY, name), "0");
        }
        for rank in [zero, node_rank(DIRECTLY, "1", port, 20_000)] {
            let (output, text) = finish(rank);
            assert!(output.status.success(), "{text}");
        }
        assert!(secret_sockets(port).is_empty(), "the name is free once the job has ended");
    });
}

#[test]
fn status_of_a_process_of_another_user_names_the_user() {
    if !can_be_others() {
        return;
    }
    let mut command = Command::new(AS_NOBODY[0]);
    command.args(&AS_NOBODY[1..]).arg("cat").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut process = command.spawn().expect("started");
    let mut input = process.stdin.take().expect("standard input");
    input.write_all(b"x").expect("written");
    // Once it has answered, it is the other user's.
    process.stdout.as_mut().expect("standard output").read_exact(&mut [0]).expect("an answer");
    let (code, _, stderr) = crate::command::run(&format!("status --pid {}", process.id()), &[]);
    drop(input);
    process.wait().expect("it ends with its input");
    assert_eq!(code, Some(1), "{stderr}");
    let expected =
        format!("process {} belongs to user 65534: run flexring status as that user", process.id());
    assert!(stderr.contains(&expected), "{stderr}");
}

/// Counter-example: a process of the same user in another container got the secret, and joined with shared
/// memory.
#[test]
fn another_container_of_the_same_user_does_not_get_the_secret() {
    if !can_be_others() {
        return;
    }
    with_watchdog(LIMIT, || {
        let port = free_port();
        // Beside the job, and below it.
        for wrapper in [IN_CONTAINER, DIRECTLY] {
            let mut zero = node_rank(wrapper, "0", port, 20_000);
            let name = secret_socket(port);
            assert_eq!(bytes_from(IN_CONTAINER, &name), "0", "rank 0 runs by {wrapper:?}");
            let (output, text) = finish(node_rank(IN_CONTAINER, "1", port, 1500));
            assert!(!output.status.success());
            for part in ["offered by a process of another PID namespace", "set FLEXRING_SECRET on all ranks"]
            {
                assert!(text.contains(part), "{part}: {text}");
            }
            zero.kill().expect("it waits for rank 1");
            let (_, text) = finish(zero);
            let warning = "did not hand the job's secret to a process of another PID namespace";
            assert_eq!(text.matches(warning).count(), 1, "{text}");
        }
    });
}

/// Counter-example: a job that ran as the overflow uid took every user that its namespace does not map for
/// its own.
#[test]
fn a_job_of_a_user_that_is_not_unique_hands_out_no_secret() {
    let unmapped = ["unshare", "--user"];
    if !can_be_others() {
        return;
    }
    with_watchdog(LIMIT, || {
        let port = free_port();
        let ranks = ["0", "1"].map(|rank| node_rank(&unmapped, rank, port, 3000));
        for rank in ranks {
            let (output, text) = finish(rank);
            assert!(!output.status.success(), "{text}");
            for part in ["runs as user 65534", "does not map", "set FLEXRING_SECRET on all ranks"] {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
    });
}

/// Runs a command as a user whose threads are limited, which they are not for root, and which may read all
/// files.
const AS_LIMITED: &[&str] = &[
    "setpriv",
    "--reuid=23456",
    "--clear-groups",
    "--inh-caps=+dac_override",
    "--ambient-caps=+dac_override",
];

/// Counter-example: the errors of the others said that rank 1 had died.
#[test]
fn a_rank_that_cannot_start_a_thread_is_named_with_the_cause() {
    if !can_be_others() {
        return;
    }
    with_watchdog(LIMIT, || {
        // The number of its threads for which a rank can join.
        for threads in 1..12 {
            let port = free_port();
            let limit = format!("--nproc={threads}");
            let variables = [("FLEXRING_SECRET", "0123456789abcdef0123456789abcdef")];
            let mut one = Command::new("prlimit");
            one.arg(&limit).args(AS_LIMITED).arg(env!("CARGO_BIN_EXE_flexring"));
            one.args(["perf", "-b", "8", "-e", "1K", "-f", "128", "-w", "1", "-n", "2"])
                .env_clear()
                .envs(variables);
            one.envs([
                ("FLEXRING_WORLD_SIZE", "2"),
                ("FLEXRING_RANK", "1"),
                ("FLEXRING_MASTER_ADDR", "127.0.0.1"),
            ]);
            one.env("FLEXRING_MASTER_PORT", port.to_string()).stdout(Stdio::piped()).stderr(Stdio::piped());
            let one = one.spawn().expect("prlimit starts");
            let zero = perf_rank(0, "127.0.0.1", port, &variables).spawn().expect("started");
            let [(zero, on_zero), (one, on_one)] = [finish(zero), finish(one)];
            if one.status.success() && zero.status.success() {
                assert!(threads > 2, "a rank has a thread for its control connection");
                return;
            }
            assert!(on_zero.contains("rank 1: cannot start"), "with {threads} threads: {on_zero}");
            for text in [on_zero, on_one] {
                for part in ["cannot start", "`ulimit -u`"] {
                    assert!(text.contains(part), "{part}, with {threads} threads: {text}");
                }
            }
        }
        panic!("12 threads are not enough");
    });
}

/// Counter-example: `ulimit -f` was reported as "files of 0", and `ulimit -v` without a fix.
#[test]
fn limits_of_files_and_address_space_are_named_with_their_fix() {
    let perf = |limit: String| {
        let mut command = Command::new("prlimit");
        command.arg(limit).arg(env!("CARGO_BIN_EXE_flexring"));
        command.args(["perf", "--ranks", "2", "-b", "8", "-e", "8", "-w", "1", "-n", "1"]);
        command.env("FLEXRING_CONNECT_TIMEOUT_MS", "2000");
        let output = command.stdin(Stdio::null()).output().ok()?;
        Some(String::from_utf8_lossy(&output.stderr).into_owned())
    };
    with_watchdog(LIMIT, move || {
        let Some(text) = perf("--fsize=1000000".to_owned()) else {
            return eprintln!("skipped: there is no prlimit");
        };
        assert!(
            text.contains("the limit of this process is 1000000 bytes (fix: raise it, `ulimit -f`)"),
            "{text}"
        );
        // A program that is too large for a limit does not even start.
        let mut texts = (10..48).rev().filter_map(|step| perf(format!("--as={}", step * (2 << 20))));
        let fix = "(fix: raise the limit of address space, `ulimit -v`)";
        assert!(texts.any(|text| text.contains(fix)), "no limit was named");
    });
}

/// Appends the Rust sources under `folder`.
fn read_sources(folder: &Path, sources: &mut String) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            read_sources(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push_str(&std::fs::read_to_string(&path).expect("text"));
        }
    }
}

#[test]
fn every_promise_of_security_md_has_a_test() {
    let root = crate::programs::root();
    let mut sources = String::new();
    read_sources(&root.join("src"), &mut sources);
    read_sources(&root.join("crates"), &mut sources);
    read_sources(&root.join("tests"), &mut sources);
    let text = std::fs::read_to_string(root.join("SECURITY.md")).expect("SECURITY.md");
    let (_, table) = text.split_once("| promise | tests |").expect("a table of promises");
    let rows: Vec<&str> = table.lines().filter(|line| line.starts_with("| ") && line.contains('`')).collect();
    assert!(rows.len() > 5, "{rows:?}");
    for row in rows {
        let names: Vec<&str> =
            row.rsplit(" | ").next().expect("tests").split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "no test: {row}");
        for name in names {
            assert!(
                sources.contains(&format!("fn {name}(")),
                "SECURITY.md names a test that does not exist: {name}"
            );
        }
    }
}
