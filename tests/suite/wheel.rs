//! The wheel: what pip builds from the repository works in an environment of its own, without the repository.
//!
//! The wheel has the library and the command of this build, so that nothing is compiled for it.
//! `tests/wheel`, which `make test-long` runs, also lets it build them, from a source distribution.

use crate::programs::{libraries, present, program, root, run, succeed};
use crate::python::interpreter;
use std::fs::read_dir;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);

/// Two ranks reduce a vector with the installed package. Prints the path of its library.
const ALL_REDUCE: &str = "
import array, flexring, threading
id, sums = flexring.unique_id(), [None, None]
def rank(number):
    with flexring.Communicator.from_unique_id(id, number, 2) as comm:
        sums[number] = list(comm.all_reduce(array.array('f', [number, 20])))
ranks = [threading.Thread(target=rank, args=[number]) for number in range(2)]
for thread in ranks: thread.start()
for thread in ranks: thread.join()
assert sums == [[1, 40]] * 2, sums
print(flexring.library_path())
";

/// A program of the environment, outside of the repository.
fn installed(name: &str, folder: &Path) -> Command {
    let mut command = program(folder.join("venv/bin").join(name));
    command.current_dir(folder).env_remove("PYTHONPATH");
    command
}

/// Builds the wheel in `folder` and returns its name. Prints that the test is skipped if pip cannot get the
/// builder.
fn build(interpreter: &str, folder: &Path) -> Option<String> {
    let from = folder.join("from");
    std::fs::create_dir(&from).expect("a folder");
    // Debug information is most of their size, and takes seconds to compress.
    for (file, name) in
        [(libraries().shared, "libflexring.so"), (env!("CARGO_BIN_EXE_flexring").into(), "flexring")]
    {
        succeed(Command::new("strip").arg("--strip-debug").arg(file).arg("-o").arg(from.join(name)), LIMIT);
    }
    let mut pip = program(interpreter);
    pip.args(["-m", "pip", "wheel", "--no-deps", "--retries", "1", "--wheel-dir"]).arg(folder.join("wheels"));
    let ended = run(pip.arg(root()).env("FLEXRING_WHEEL_FROM", &from), LIMIT);
    if ended.text.contains("No matching distribution found for") {
        eprintln!("skipped: pip cannot get hatchling and pyelftools, which build the wheel");
        return None;
    }
    assert!(ended.status.success(), "{}", ended.text);
    let mut files =
        read_dir(folder.join("wheels")).expect("a folder").map(|file| file.expect("a file").file_name());
    files.next().and_then(|name| name.into_string().ok())
}

#[test]
fn an_installed_wheel_reduces_and_has_the_command() {
    let Some(interpreter) = interpreter("pip, venv") else { return };
    if !present("strip", "strip of binutils") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let Some(wheel) = build(interpreter, folder) else { return };
    let version = env!("CARGO_PKG_VERSION");
    // manylinux: nothing is linked that some distribution lacks, such as libibverbs.
    assert!(wheel.starts_with(&format!("flexring-{version}-py3-none-manylinux_2_")), "{wheel}");
    assert!(wheel.ends_with(&format!("_{}.whl", std::env::consts::ARCH)), "{wheel}");
    for left in ["build", "dist", "python/build", "flexring.egg-info", "python/flexring.egg-info"] {
        assert!(!root().join(left).exists(), "the build left {left}");
    }

    succeed(program(interpreter).args(["-m", "venv", "--without-pip"]).arg(folder.join("venv")), LIMIT);
    let mut pip = program(interpreter);
    pip.args(["-m", "pip", "--python"]).arg(folder.join("venv")).args(["install", "--no-deps", "--no-index"]);
    succeed(pip.arg(folder.join("wheels").join(&wheel)), LIMIT);
    let text = succeed(installed("python", folder).args(["-c", ALL_REDUCE]), LIMIT);
    assert!(text.contains("/venv/lib/") && text.contains("/flexring/libflexring.so\n"), "{text}");
    let text = succeed(installed("flexring", folder).arg("--version"), LIMIT);
    assert!(text.starts_with(&format!("flexring {version}")), "{text}");
    let text = succeed(installed("python", folder).args(["-m", "flexring.doctor"]), LIMIT);
    assert!(text.contains("\ntorch      not installed (optional)\n") && text.contains("\nbuild "), "{text}");
    let json = succeed(installed("python", folder).args(["-m", "flexring.doctor", "--json"]), LIMIT);
    assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok(), "{json}");
}

#[test]
fn annotations_find_misspelled_arguments() {
    let Some(interpreter) = interpreter("mypy") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let mut mypy = program(interpreter);
    mypy.current_dir(folder.path()).env("MYPYPATH", root().join("python"));
    mypy.args(["-m", "mypy", "--strict", "--follow-imports", "silent"]);
    succeed(mypy.arg(root().join("python/tests/typed_example.py")), LIMIT);
}

/// With the settings of `pyproject.toml`.
#[test]
fn the_package_passes_strict_type_checks() {
    let Some(interpreter) = interpreter("mypy") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let mut mypy = program(interpreter);
    mypy.current_dir(root()).args(["-m", "mypy", "--cache-dir"]).arg(folder.path());
    let text = succeed(&mut mypy, LIMIT);
    assert!(text.contains("no issues found"), "{text}");
}
