//! `libflexring_nccl.so` as C programs that were written for NCCL use it, and its symbols.

#![allow(clippy::print_stderr, reason = "a test reports what it skips")]
#![allow(clippy::disallowed_methods, reason = "Rust opens the standard descriptors of its programs")]

#[allow(dead_code, reason = "the suite uses all of it")]
#[path = "../../tests/suite/programs/mod.rs"]
mod programs;

use flexring_nccl::REFUSED;
use programs::{present, program, root, simulated_cuda, succeed};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Timeout of one program; none of them takes that long, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(100);

/// The shared library that cargo built together with this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("the path of the test binary is known");
    let library = test.with_file_name("libflexring_nccl.so");
    assert!(library.is_file(), "cargo should have built {}", library.display());
    library
}

/// The folder with NVIDIA's nccl.h, which `make setup` downloads; the repository does not contain it.
fn header_folder() -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("a folder in the target folder");
    let folder = target.join("nccl-header");
    let found = folder.join("nccl.h").is_file();
    if !found {
        eprintln!("skipped: no NVIDIA's nccl.h in {} (bench/setup_nccl.sh downloads it)", folder.display());
    }
    found.then_some(folder)
}

/// Compiles a program of `tests/c` against nccl.h, and passes it to `run`. It finds the library under its
/// SONAME.
fn with_program(name: &str, run: impl FnOnce(&dyn Fn() -> Command)) {
    let Some(header) = header_folder() else { return };
    if !present("cc", "C compiler") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(name);
    std::os::unix::fs::symlink(library(), folder.path().join("libflexring_nccl.so.2")).expect("a link");
    let mut compiler = program("cc");
    compiler.current_dir(root()).args([
        "-std=gnu11",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Inccl/tests/c/cuda",
        "-Iinclude",
    ]);
    // It is NVIDIA's, and has no prototypes.
    compiler.arg("-isystem").arg(header).arg(format!("nccl/tests/c/{name}.c")).arg(library());
    compiler.arg(format!("-Wl,-rpath,{}", folder.path().display())).args(["-ldl", "-o"]).arg(&path);
    succeed(&mut compiler, LIMIT);
    run(&|| program(&path));
}

/// Runs a program on simulated GPUs.
fn passes_on_gpus(name: &str, gpus: &str) {
    passes_with(name, &[("SIMCUDA_GPUS", gpus)], &[]);
}

/// Runs a program on simulated GPUs, with these settings and arguments.
fn passes_with(name: &str, settings: &[(&str, &str)], arguments: &[&str]) {
    let Some(driver) = simulated_cuda() else { return };
    with_program(name, |program| {
        let mut command = program();
        command.env("LD_LIBRARY_PATH", driver).envs(settings.iter().copied()).args(arguments);
        assert_eq!(succeed(&mut command, LIMIT), format!("{name}: ok\n"));
    });
}

#[test]
fn one_thread_makes_the_calls_of_four_gpus_in_groups() {
    passes_on_gpus("one_process", "4");
}

#[test]
fn processes_make_communicators_without_waiting_and_abort_them() {
    passes_on_gpus("processes", "1");
}

#[test]
fn processes_with_two_gpus_each_send_and_reduce_in_groups() {
    passes_on_gpus("two_by_two", "4");
}

#[test]
fn every_call_can_be_made_in_place_and_captured_into_a_graph() {
    // Without access to each other's memory, kernels exchange messages, and the stream copies inputs first.
    for (ranks, ipc) in [("1", "1"), ("2", "1"), ("3", "1"), ("3", "0")] {
        passes_with("graphs", &[("SIMCUDA_GPUS", "1"), ("FLEXRING_GPU_IPC", ipc)], &[ranks]);
    }
}

#[test]
fn bad_arguments_are_refused_with_a_code_and_a_sentence() {
    passes_on_gpus("errors", "1");
    with_program("errors", |program| {
        assert_eq!(succeed(program().arg("none").env_remove("LD_LIBRARY_PATH"), LIMIT), "errors: ok\n");
    });
}

/// The functions in the tables of docs/nccl.md, by heading, and whether they are supported.
fn documented() -> BTreeMap<String, BTreeMap<String, bool>> {
    let text = std::fs::read_to_string(root().join("docs/nccl.md")).expect("docs/nccl.md can be read");
    let mut tables: BTreeMap<String, BTreeMap<String, bool>> = BTreeMap::new();
    let mut heading = String::new();
    for line in text.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            title.clone_into(&mut heading);
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, functions, state, ..] = cells[..] else { continue };
        let supported = match state {
            "supported" => true,
            "refused" => false,
            _ => continue,
        };
        for function in functions.split('`').skip(1).step_by(2) {
            let before = tables.entry(heading.clone()).or_default().insert(function.to_owned(), supported);
            assert_eq!(before, None, "docs/nccl.md names {function} twice");
        }
    }
    tables
}

const OF_NCCL_H: &str = "Functions of nccl.h";
const OF_DEVICE_HEADERS: &str = "Functions of nccl_device.h";

#[test]
fn the_library_exports_what_the_documentation_lists_under_both_names() {
    if !present("nm", "nm") {
        return;
    }
    let symbols = succeed(program("nm").args(["-D", "--defined-only"]).arg(library()), LIMIT);
    let exported: BTreeSet<&str> =
        symbols.lines().filter_map(|line| line.split_whitespace().last()).collect();
    let documented = documented();
    let names =
        documented.values().flat_map(BTreeMap::keys).flat_map(|name| [name.clone(), format!("p{name}")]);
    let expected: BTreeSet<String> = names.collect();
    assert_eq!(exported, expected.iter().map(String::as_str).collect());
}

#[test]
fn the_documentation_calls_refused_what_is_refused() {
    let refused: BTreeSet<String> = REFUSED.iter().map(|(name, _)| (*name).to_owned()).collect();
    let documented = documented();
    let listed =
        documented.values().flatten().filter(|(_, supported)| !**supported).map(|(name, _)| name.clone());
    assert_eq!(listed.collect::<BTreeSet<String>>(), refused);
    assert!(documented[OF_DEVICE_HEADERS].values().all(|supported| !supported));
}

#[test]
fn the_documentation_lists_all_functions_of_nccl_h() {
    let Some(folder) = header_folder() else { return };
    let header = std::fs::read_to_string(folder.join("nccl.h")).expect("the header can be read");
    // A declaration is a type and a name with a parenthesis; comments and macros have no type before it.
    let declared = header.lines().filter_map(|line| {
        let line = line.trim_start();
        let result =
            ["ncclResult_t", "const char*", "void"].iter().find_map(|result| line.strip_prefix(result))?;
        let (name, _) = result.trim().split_once('(')?;
        Some(name.strip_prefix("pnccl").map_or(name.to_owned(), |rest| format!("nccl{rest}")))
    });
    let declared: BTreeSet<String> = declared.filter(|name| name.starts_with("nccl")).collect();
    let documented = documented();
    assert_eq!(documented[OF_NCCL_H].keys().cloned().collect::<BTreeSet<String>>(), declared);
}

#[test]
fn the_library_has_the_soname_that_is_installed() {
    if !present("readelf", "readelf") {
        return;
    }
    let dynamic = succeed(program("readelf").args(["-d", "-W"]).arg(library()), LIMIT);
    let soname = dynamic.lines().find(|line| line.contains("(SONAME)")).expect("a SONAME");
    assert!(soname.ends_with("[libflexring_nccl.so.2]"), "{soname}");
}
