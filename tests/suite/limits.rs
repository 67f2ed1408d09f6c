//! Ranks where the system limits or walks the memory of processes: core dumps, locked memory, refused system
//! calls.

use crate::harness::{call_until_failure, test_name};
use crate::programs::{libraries, present, program, root, run, succeed};
use crate::rank_processes::{check_ranks, is_rank, run_ranks};
use flexring::{Communicator, ReduceOp};
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Timeout of one program; none of them takes that long, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(100);
const MIB: usize = 1 << 20;

/// Sums vectors of several lengths, in memory of malloc and of the arena.
fn check_sums(comm: &Communicator) {
    for len in [3, 100_000] {
        let mut vector = vec![1u32; len];
        comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
        assert!(vector.iter().all(|element| *element == comm.world_size() as u32));
        let mut buffer = comm.alloc::<u32>(len).expect("memory");
        buffer.fill(1);
        comm.all_reduce(&mut buffer[..], ReduceOp::Sum).expect("a sum");
        assert!(buffer.iter().all(|element| *element == comm.world_size() as u32));
    }
}

#[test]
fn a_core_dump_has_the_vectors_of_the_user_and_not_the_arenas() {
    const PAGE: usize = 4096;
    let pattern = |at: usize| (at * 7 % 251) as u8 ^ 0x5a;
    let place = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
    if place.contains(['/', '|']) || getrlimit(Resource::Core).maximum.is_some_and(|limit| limit < 1 << 30) {
        eprintln!("skipped: core dumps are not written to the folder of a process");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_str().expect("a path in UTF-8");
    let test = test_name(module_path!(), "a_core_dump_has_the_vectors_of_the_user_and_not_the_arenas");
    let ended = run_ranks(&test, 2, &[("CORE_FOLDER", path)], || {
        std::env::set_current_dir(std::env::var_os("CORE_FOLDER").expect("a folder")).expect("a folder");
        let comm = Communicator::from_env().expect("a communicator");
        check_sums(&comm);
        let mut buffer = comm.alloc::<u8>(4 * MIB).expect("memory");
        buffer.iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern(at % PAGE));
        comm.barrier().expect("all ranks are there");
        if comm.rank() == 0 {
            // A dump with arenas ends here, before it fills the disk.
            let limit = Some(256 << 20);
            setrlimit(Resource::Core, Rlimit { current: limit, maximum: limit }).expect("a lower limit");
            std::process::abort();
        }
        call_until_failure(&comm);
    });
    if is_rank() {
        return;
    }
    assert!(ended[1].0.success(), "{}", ended[1].1);
    let files = std::fs::read_dir(folder.path()).expect("a folder").map(|file| file.expect("a file").path());
    let files: Vec<PathBuf> = files.collect();
    assert_eq!(files.len(), 1, "{}\n{files:?}", ended[0].1);
    let dump = std::fs::read(&files[0]).expect("a core dump");
    let page: Vec<u8> = (0..PAGE).map(pattern).collect();
    let found = dump.chunks(PAGE).filter(|chunk| *chunk == page).count();
    assert!(found >= 4 * MIB / PAGE, "{found} pages of the user's vector are in the dump");
    assert!(dump.len() < 64 * MIB, "a core dump of {} bytes", dump.len());
}

#[test]
fn a_process_that_locks_its_memory_locks_what_it_uses() {
    let test = test_name(module_path!(), "a_process_that_locks_its_memory_locks_what_it_uses");
    check_ranks(&test, 2, || {
        // Whatever goes wrong ends this process and no other.
        let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
        let memory = || {
            let status = std::fs::read_to_string("/proc/self/status").expect("the kernel sums it up");
            let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).expect("a sum");
            line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") << 10
        };
        if mlockall(MlockAllFlags::FUTURE).is_err() || !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: this process may not lock memory");
        }
        let comm = Communicator::from_env().expect("a communicator");
        check_sums(&comm);
        let before = memory();
        mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE).expect("memory");
        check_sums(&comm);
        let after = memory();
        assert!(after < 128 * MIB, "{before} bytes of shared memory, then {after}");
        comm.barrier().expect("all ranks are there");
    });
}

#[test]
fn a_program_under_address_sanitizer_allocates_and_reduces() {
    const SOURCE: &str = r#"
        #include <flexring.h>
        #include <string.h>
        int main(void) {
            flexring_comm *comm;
            void *vector;
            if (flexring_comm_init_from_env(&comm) != 0 || flexring_alloc(comm, 1 << 20, &vector) != 0) return 1;
            memset(vector, 0, 1 << 20);
            if (flexring_all_reduce(vector, vector, 1 << 18, FLEXRING_FLOAT32, FLEXRING_SUM, comm, NULL) != 0) return 2;
            return flexring_free(comm, vector) != 0 || flexring_comm_free(comm) != 0;
        }
    "#;
    let folder = tempfile::tempdir().expect("a folder");
    let [source, path] = ["program.c", "program"].map(|name| folder.path().join(name));
    let library = libraries().shared;
    let compiler = |text: &str| {
        std::fs::write(&source, text).expect("a file");
        let mut compiler = program("cc");
        compiler.args(["-fsanitize=address", "-I"]).arg(root().join("include")).arg("-o");
        compiler.args([&path, &source, &library]);
        compiler
    };
    if !present("cc", "C compiler")
        || !run(&mut compiler("int main(void) { return 0; }"), LIMIT).status.success()
    {
        return eprintln!("skipped: no C compiler with AddressSanitizer");
    }
    succeed(&mut compiler(SOURCE), LIMIT);
    std::os::unix::fs::symlink(&library, folder.path().join("libflexring.so.0")).expect("a link");
    let mut sanitized = program(&path);
    sanitized.envs([("FLEXRING_RANK", "0"), ("FLEXRING_WORLD_SIZE", "1")]);
    succeed(sanitized.env("LD_LIBRARY_PATH", folder.path()), LIMIT);
}

/// Compiles the program that refuses memfd_create.
fn refuse_memfd(folder: &Path) -> Option<PathBuf> {
    if !present("cc", "C compiler") {
        return None;
    }
    let path = folder.join("refuse_memfd");
    let mut compiler = program("cc");
    compiler.args(["-Wall", "-Wextra", "-Werror", "-o"]).arg(&path);
    succeed(compiler.arg(root().join("tests/c/refuse_memfd.c")), LIMIT);
    Some(path)
}

/// The `flexring` command in which memfd_create fails with `error`; with `other` as `nothing` so does every
/// file that can be shared.
fn without_memfd(refuse: &Path, error: &str, other: &str, arguments: &str) -> Command {
    let mut command = program(refuse);
    command.args([error, other, env!("CARGO_BIN_EXE_flexring")]).args(arguments.split_whitespace());
    command
}

#[test]
fn ranks_share_memory_without_memfds_or_use_tcp() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(refuse) = refuse_memfd(folder.path()) else { return };
    for (error, other, transport, links) in [
        ("EPERM", "shm", "auto", "shm to 1 rank"),
        ("ENOSYS", "shm", "shm", "shm to 1 rank"),
        ("EPERM", "nothing", "auto", "tcp to 1 rank"),
        ("ENOSYS", "nothing", "tcp", "tcp to 1 rank"),
    ] {
        let arguments = format!("perf --ranks 2 -e 1M -f 128 -n 2 --transport {transport}");
        let text = succeed(&mut without_memfd(&refuse, error, other, &arguments), LIMIT);
        assert!(text.contains(links) && text.contains("Out of bounds values : 0 OK"), "{text}");
        assert_eq!(
            text.contains("ranks of a node use TCP"),
            (other, transport) == ("nothing", "auto"),
            "{text}"
        );
    }
    let ended = run(&mut without_memfd(&refuse, "EPERM", "nothing", "perf --ranks 2 --transport shm"), LIMIT);
    let error = "FLEXRING_TRANSPORT=shm: this process cannot share memory: memfd_create is refused (Operation not permitted";
    assert!(!ended.status.success() && ended.text.contains(error), "{}", ended.text);
    // A rank alone on its node needs no memory that others could map.
    succeed(&mut without_memfd(&refuse, "EPERM", "nothing", "perf --ranks 1 -e 8"), LIMIT);
}

/// As [`without_memfd`], with a `/dev/shm` of `size`, as a container has it.
fn with_small_shm(refuse: &Path, size: &str, arguments: &str) -> Command {
    let mut command = program("unshare");
    let script = format!("mount -t tmpfs -o size={size} tmpfs /dev/shm; exec \"$@\"");
    command.args(["--mount", "--propagation", "private", "sh", "-ec", &script, "sh"]);
    command
        .arg(refuse)
        .args(["EPERM", "shm", env!("CARGO_BIN_EXE_flexring")])
        .args(arguments.split_whitespace());
    command
}

#[test]
fn only_shared_memory_needs_room_in_dev_shm() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(refuse) = refuse_memfd(folder.path()) else { return };
    if !run(&mut with_small_shm(&refuse, "64M", "--version"), LIMIT).status.success() {
        return eprintln!("skipped: no file system can be mounted");
    }
    let perf = |size: &str, arguments: &str| {
        let arguments = format!("perf -e 1M -f 128 -n 2 {arguments}");
        run(&mut with_small_shm(&refuse, size, &arguments), LIMIT)
    };
    for (size, arguments, links) in [
        ("1M", "--ranks 1", ""),
        ("1M", "--ranks 2 --transport tcp", "tcp to 1 rank"),
        // Two ranks take less than 30 MiB.
        ("64M", "--ranks 2 --transport shm", "shm to 1 rank"),
        ("12M", "--ranks 2", "tcp to 1 rank"),
    ] {
        let ended = perf(size, arguments);
        assert!(ended.status.success() && ended.text.contains(links), "{size}, {arguments}: {}", ended.text);
        let is_slower = "ranks 0 and 1 need";
        assert_eq!(ended.text.matches(is_slower).count(), usize::from(size == "12M"), "{}", ended.text);
    }
    let ended = perf("12M", "--ranks 2 --transport shm");
    let error = "FLEXRING_TRANSPORT=shm: ranks 0 and 1 need";
    assert!(!ended.status.success() && ended.text.contains(error), "{}", ended.text);
}

#[test]
fn a_limit_of_files_does_not_concern_memory_that_is_not_shared() {
    for arguments in ["--ranks 1", "--ranks 2 --transport tcp"] {
        let mut perf = program("sh");
        perf.args([
            "-c",
            "ulimit -f 100; exec \"$@\"",
            "sh",
            env!("CARGO_BIN_EXE_flexring"),
            "perf",
            "-e",
            "1M",
            "-f",
            "128",
        ]);
        succeed(perf.args(["-n", "2"]).args(arguments.split_whitespace()), LIMIT);
    }
}

#[test]
fn doctor_tries_what_it_recommends() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(refuse) = refuse_memfd(folder.path()) else { return };
    let doctor = |other: &str, transport: &str| {
        let mut doctor = without_memfd(&refuse, "EPERM", other, "doctor");
        run(doctor.env("FLEXRING_TRANSPORT", transport), LIMIT)
    };
    let shared = doctor("shm", "auto");
    let lines = [
        "shm        yes  in /dev/shm, because memfd_create is refused: Operation not permitted",
        "--shm-size",
    ];
    assert!(
        shared.status.success() && lines.iter().all(|line| shared.text.contains(line)),
        "{}",
        shared.text
    );
    let slow = doctor("nothing", "auto");
    let line = "problem    the ranks of a node use TCP, which is slower: this process cannot share memory: memfd_create is refused";
    assert!(slow.status.success() && slow.text.contains(line), "{}", slow.text);
    let refused = doctor("nothing", "shm");
    assert!(
        !refused.status.success() && refused.text.contains("fix: FLEXRING_TRANSPORT=tcp"),
        "{}",
        refused.text
    );
    let followed = doctor("nothing", "tcp");
    assert!(followed.status.success() && followed.text.contains("flexring runs here"), "{}", followed.text);
    let mut perf = without_memfd(&refuse, "EPERM", "nothing", "perf --ranks 2 -e 8");
    succeed(perf.env("FLEXRING_TRANSPORT", "tcp"), LIMIT);
    // Nothing runs where memory cannot be had at all, and doctor says so.
    let mut doctor = program("sh");
    doctor.args(["-c", "ulimit -f 100; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_flexring"), "doctor"]);
    let ended = run(&mut doctor, LIMIT);
    assert!(!ended.status.success() && ended.text.contains("ulimit -f"), "{}", ended.text);
}
