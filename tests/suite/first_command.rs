//! README's first command, run by cargo as a new user runs it.

use crate::programs::{present, program, root, succeed};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

/// Compiling the build script, on a busy machine.
const LIMIT: Duration = Duration::from_secs(240);

/// The package that cargo runs has flexring's name, features and build script. Its program executes the
/// command that was built with this test: compiling flexring in another profile would take minutes.
fn package(folder: &Path) {
    std::fs::create_dir_all(folder.join("src")).expect("a folder");
    let write = |name: &str, text: String| std::fs::write(folder.join(name), text).expect("a file");
    write(
        "Cargo.toml",
        format!(
            "[package]\nname = \"flexring\"\nversion = {:?}\nedition = \"2024\"\nbuild = {:?}\n\n\
             [features]\ndefault = [\"cuda\"]\ncuda = []\n\n[build-dependencies]\nlibc = \"0.2\"\n\n[workspace]\n",
            env!("CARGO_PKG_VERSION"),
            root().join("build.rs"),
        ),
    );
    std::fs::copy(root().join("Cargo.lock"), folder.join("Cargo.lock")).expect("a file");
    write(
        "src/main.rs",
        format!(
            "use std::os::unix::process::CommandExt;\n\
             fn main() {{\n\
             let mut command = std::process::Command::new({:?});\n\
             panic!(\"{{}}\", command.args(std::env::args_os().skip(1)).exec());\n\
             }}\n",
            env!("CARGO_BIN_EXE_flexring"),
        ),
    );
}

/// The programs of the packages that cargo uses in the root of the repository, with the names of these.
fn default_programs() -> Vec<String> {
    let mut cargo = program("cargo");
    cargo.args(["metadata", "--no-deps", "--offline", "--format-version=1"]).current_dir(root());
    let metadata: Value = serde_json::from_str(&succeed(&mut cargo, LIMIT)).expect("JSON");
    let list = |value: &Value| value.as_array().expect("an array").clone();
    let defaults = list(&metadata["workspace_default_members"]);
    let packages =
        list(&metadata["packages"]).into_iter().filter(|package| defaults.contains(&package["id"]));
    let programs = packages.flat_map(|package| {
        let is_program = |target: &Value| list(&target["kind"]).contains(&"bin".into());
        let programs = list(&package["targets"]).into_iter().filter(is_program);
        let named = |target: Value| format!("{}: {}", package["name"], target["name"]).replace('"', "");
        programs.map(named).collect::<Vec<_>>()
    });
    programs.collect()
}

#[test]
fn the_first_command_of_the_readme_prints_a_table_and_no_warning() {
    if !present("cargo", "cargo") {
        return;
    }
    assert_eq!(default_programs(), ["flexring-cli: flexring"], "what cargo runs");
    let readme = std::fs::read_to_string(root().join("README.md")).expect("README.md can be read");
    let command = readme.lines().find_map(|line| line.strip_prefix("    cargo run "));
    let command = command.expect("README.md has a command for cargo");
    // Kept between runs of this test.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("first-command");
    package(&folder);
    let mut cargo = program("cargo");
    cargo.arg("run").args(command.split_whitespace()).args(["-e", "64K"]).current_dir(&folder);
    cargo.env_remove("FLEXRING_SOCKET_IFNAME").env("CARGO_TARGET_DIR", folder.join("target"));
    // Those of a make that runs this test.
    for name in ["MAKEFLAGS", "MFLAGS", "CARGO_MAKEFLAGS"] {
        cargo.env_remove(name);
    }
    // Nothing is downloaded, cargo prints only errors, and no kernel is compiled.
    cargo.envs([
        ("CARGO_NET_OFFLINE", "true"),
        ("CARGO_TERM_QUIET", "true"),
        ("FLEXRING_CUDA_KERNELS", "nvrtc"),
    ]);
    let text = succeed(&mut cargo, LIMIT);
    // On a busy machine ranks that start slowly are waited for, which the others say after 5 s.
    let lines = text.lines().filter(|line| !line.contains(": waiting for "));
    let (notes, rows): (Vec<&str>, Vec<&str>) = lines.partition(|line| line.starts_with('#'));
    // Other lines are those of the table: sizes, and times of 13 columns.
    let sizes: Vec<&str> = rows.iter().filter_map(|row| row.split_whitespace().next()).collect();
    assert_eq!(sizes, ["8", "128", "2048", "32768"], "{text}");
    assert!(rows.iter().all(|row| row.split_whitespace().count() == 13), "{text}");
    assert!(notes.iter().any(|line| line.contains("warmup iters: 5+ iters: 20+ ")), "{text}");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let share = notes.iter().any(|line| line.contains("ranks share a core: short calls also wait"));
    assert_eq!(share, cores < 4, "{text}");
}
