//! Programs that tests run: the paths of flexring's libraries, and processes with a time limit that leave no
//! children behind.

use rustix::process::{Pid, Signal, kill_process_group};
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The root of the repository. This file is also part of the tests of `nccl/`, which is a package of its own.
pub fn root() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().find(|folder| folder.join("ARCHITECTURE.md").is_file()).unwrap_or(package)
}

/// The libraries that programs in other languages link.
#[derive(Debug)]
pub struct Libraries {
    /// `libflexring.a`
    pub archive: PathBuf,
    /// `libflexring.so`
    pub shared: PathBuf,
}

/// The libraries that cargo built for this test, as a dependency of it: they are in its folder.
pub fn libraries() -> Libraries {
    let test = std::env::current_exe().expect("the path of the test binary is known");
    let named = |name: &str| {
        let file = test.with_file_name(name);
        assert!(file.is_file(), "cargo should have built {}", file.display());
        file
    };
    Libraries { archive: named("libflexring.a"), shared: named("libflexring.so") }
}

/// The folder of the simulated CUDA driver, for `LD_LIBRARY_PATH`. `None`, with a message that the test is
/// skipped, if it cannot be built, or if this build has no machine code for GPUs: NVRTC uses undocumented
/// driver functions, which the simulated driver does not have, and would abort the process.
pub fn simulated_cuda() -> Option<PathBuf> {
    #[cfg(feature = "cuda")]
    let embedded = flexring::internal::device::cuda::image::is_embedded();
    #[cfg(not(feature = "cuda"))]
    let embedded = false;
    if !embedded {
        eprintln!("skipped: no machine code for GPUs is in this build (make setup-cuda installs a compiler)");
        return None;
    }
    if !present("g++", "C++ compiler for the simulated CUDA driver") {
        return None;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("simulated-cuda");
    succeed(Command::new(root().join("tests/gpu/driver/build.sh")).arg(&folder), Duration::from_secs(300));
    Some(folder)
}

/// Runs the body of the test `name` with a CUDA driver and with `settings` in its environment. With
/// `WORLDS=gpu` that is CUDA's own driver, in this process if all its settings are already set. Otherwise it
/// is the simulated driver, in a process of its own.
#[cfg(feature = "cuda")]
pub fn with_cuda(name: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    let is = |name: &str, value: &str| std::env::var(name).is_ok_and(|is| is == value);
    let gpus = is("WORLDS", "gpu");
    // CUDA's own driver reads its variables when the process starts.
    if gpus && settings.iter().all(|(name, value)| !name.starts_with("CUDA_") || is(name, value)) {
        return body();
    }
    let mut again = program(std::env::current_exe().expect("the path of the test binary is known"));
    again.args([name, "--exact", "--nocapture"]).envs([("WORLDS", "gpu"), ("RUST_TEST_THREADS", "1")]);
    again.envs(settings.iter().copied());
    if !gpus {
        let Some(driver) = simulated_cuda() else { return };
        again.env("LD_LIBRARY_PATH", driver);
    }
    let text = succeed(&mut again, Duration::from_secs(120));
    assert!(text.contains("1 passed"), "{text}");
}

/// Exit status and output of a program. Standard output and standard error are interleaved in the order of
/// writing.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub text: String,
}

/// A program without the flexring settings of the test's environment, which uses the loopback interface.
pub fn program(path: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(path);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("FLEXRING_") {
            command.env_remove(name);
        }
    }
    command.env("FLEXRING_SOCKET_IFNAME", "lo");
    command
}

/// Runs a program in a process group of its own, and kills that group if it takes longer than `limit`.
pub fn run(command: &mut Command, limit: Duration) -> Ended {
    let output = tempfile::NamedTempFile::new().expect("a temporary file");
    let reopen = || -> File { output.as_file().try_clone().expect("a second handle") };
    command.stdin(Stdio::null()).stdout(reopen()).stderr(reopen()).process_group(0);
    let mut child = command.spawn().unwrap_or_else(|cause| panic!("cannot run {command:?}: {cause}"));
    let status = wait(&mut child, limit);
    // Launchers end their children on SIGTERM. Other processes are in this group.
    let group = Pid::from_child(&child);
    if status.is_none() {
        let _ = kill_process_group(group, Signal::TERM);
        let _ = wait(&mut child, GRACE);
    }
    let _ = kill_process_group(group, Signal::KILL);
    let text = String::from_utf8_lossy(&std::fs::read(output.path()).unwrap_or_default()).into_owned();
    let Some(status) = status else {
        let _ = child.wait();
        panic!("{command:?} took longer than {limit:?}:\n{text}");
    };
    Ended { status, text }
}

/// Time between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(5);

/// Waits for a child, but no longer than `limit`.
fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let begun = Instant::now();
    while begun.elapsed() < limit {
        let status = child.try_wait().expect("waitpid of a child succeeds");
        if status.is_some() {
            return status;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    None
}

/// Runs a program that must succeed, and returns its output.
pub fn succeed(command: &mut Command, limit: Duration) -> String {
    let ended = run(command, limit);
    assert!(ended.status.success(), "{command:?} ended with {}:\n{}", ended.status, ended.text);
    ended.text
}

/// Whether a program exists. Prints that the test is skipped if it does not.
pub fn present(program: &str, name: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        eprintln!("skipped: no {name}");
    }
    found
}
