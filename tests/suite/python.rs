//! Runs the tests of the Python bindings, and the training example on four ranks.

use crate::harness::free_port;
use crate::programs::{libraries, program, root, simulated_cuda, succeed};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Timeout of one interpreter; none of these tests takes that long, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(300);

/// The interpreters to try. Not each of them can import all modules.
const INTERPRETERS: [&str; 2] = ["python3", "/usr/bin/python3"];

/// The first interpreter that can import these modules. Prints a note if there is none.
pub fn interpreter(modules: &str) -> Option<&'static str> {
    let found = interpreter_that_runs(&format!("import {modules}"));
    if found.is_none() {
        eprintln!("skipped: no python3 that can import {modules}");
    }
    found
}

/// The first interpreter that runs this program without an error.
fn interpreter_that_runs(text: &str) -> Option<&'static str> {
    let runs = |name: &&str| {
        let output = Command::new(name).args(["-c", text]).output();
        output.is_ok_and(|output| output.status.success())
    };
    INTERPRETERS.into_iter().find(runs)
}

/// An interpreter that uses the bindings of this checkout and the library of this build.
fn python(interpreter: &str, folder: &Path) -> Command {
    let mut python = program(interpreter);
    python
        .current_dir(folder)
        .env("PYTHONPATH", root().join("python"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("FLEXRING_LIBRARY", &libraries().shared)
        .env("GLOO_SOCKET_IFNAME", "lo")
        .env("OMP_NUM_THREADS", "1");
    python
}

/// Runs unit tests with this interpreter. Tests skip what it cannot import, and what needs a GPU if there is
/// none.
fn passes_unit_tests(interpreter: &str, arrange: impl FnOnce(&mut Command)) {
    let mut python = python(interpreter, &root().join("python"));
    python.args(["-m", "unittest"]);
    arrange(&mut python);
    let text = succeed(python.arg("-v"), LIMIT);
    assert!(text.contains("\nOK"), "{text}");
    let reasons: BTreeSet<&str> = text.lines().filter_map(|line| line.split("... skipped ").nth(1)).collect();
    for reason in reasons {
        eprintln!("skipped: unit tests of {interpreter}, {reason}");
    }
}

fn all_tests(python: &mut Command) {
    python.args(["discover", "-t", ".", "-s", "tests"]);
}

#[test]
fn the_unit_tests_pass_with_plain_python() {
    if let Some(interpreter) = interpreter("ctypes") {
        passes_unit_tests(interpreter, all_tests);
    }
}

#[test]
fn the_unit_tests_pass_with_numpy_and_torch() {
    if let Some(interpreter) = interpreter("numpy, torch.distributed") {
        passes_unit_tests(interpreter, all_tests);
    }
}

#[test]
fn the_gpu_tests_pass_with_the_simulated_driver() {
    let (Some(interpreter), Some(driver)) = (interpreter("ctypes"), simulated_cuda()) else {
        return;
    };
    passes_unit_tests(interpreter, |python| {
        python.arg("tests.test_gpu").env("LD_LIBRARY_PATH", driver);
    });
}

#[test]
fn training_gives_the_same_losses_over_flexring_and_gloo() {
    let Some(interpreter) = interpreter("torch.distributed.run") else {
        return;
    };
    let logs = tempfile::tempdir().expect("a folder");
    let mut torchrun = python(interpreter, root());
    torchrun.args(["-m", "torch.distributed.run", "--nproc_per_node", "4", "--master_addr", "127.0.0.1"]);
    torchrun.args(["--master_port", &free_port().to_string()]);
    // PyTorch 1.13 with Python 3.11 does not start ranks without these two options.
    torchrun.args(["--redirects", "1", "--tee", "1", "--log_dir"]).arg(logs.path());
    torchrun.args(["examples/train_digits.py", "--backend", "flexring", "--steps", "45"]);
    let text = succeed(&mut torchrun, LIMIT);
    assert!(text.contains("the loss curve agrees with Gloo's"), "{text}");
}

/// `make test-long` checks several versions of torch, also with four ranks.
#[test]
fn torch_runs_over_the_backend() {
    let Some(interpreter) = interpreter_that_runs("import torch; assert torch.__version__ >= (2, 14)") else {
        eprintln!("skipped: no python3 with torch 2.14 or later");
        return;
    };
    let mut checks = python(interpreter, &root().join("python/tests"));
    // The package is no installed one, which torch would find by itself.
    checks.args(["torch_checks.py", "--ranks", "2"]).env("CHECK_IMPORT", "1");
    succeed(&mut checks, LIMIT);
}

#[test]
fn torch_before_2_8_refuses_the_backend() {
    let Some(interpreter) =
        interpreter_that_runs("import torch.distributed; assert torch.__version__ < (2, 8)")
    else {
        eprintln!("skipped: no python3 with a torch before 2.8");
        return;
    };
    let program = "import flexring.torch, torch.distributed as dist
try: dist.init_process_group('flexring', store=dist.HashStore(), rank=0, world_size=1)
except RuntimeError as error: print(error)";
    let text = succeed(python(interpreter, root()).args(["-c", program]), LIMIT);
    assert!(
        text.contains("needs torch 2.8 or later") && text.contains("flexring.torch.register(model)"),
        "{text}"
    );
}

#[test]
fn the_shrink_example_loses_ranks_and_trains_on() {
    let Some(interpreter) = interpreter("ctypes") else {
        return;
    };
    // A rank in the middle, and rank 0, at which the ranks found each other.
    let mut example = python(interpreter, root());
    let text = succeed(example.args(["examples/shrink.py", "--ranks", "4", "--lose", "2,0"]), LIMIT);
    assert!(text.contains("2 ranks ended with the same parameters"), "{text}");
}

#[test]
fn package_and_crate_have_the_same_version() {
    let version = format!("\"{}\"", env!("CARGO_PKG_VERSION"));
    let text =
        std::fs::read_to_string(root().join("python/flexring/__init__.py")).expect("a file of the package");
    let line = text.lines().find_map(|line| line.strip_prefix("__version__ = "));
    assert_eq!(line, Some(version.as_str()));
}
