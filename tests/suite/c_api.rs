//! Compiles, links and runs C programs that use the C ABI.

use crate::harness::free_port;
use crate::programs::{libraries, present, program, root, simulated_cuda, succeed};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The command in README.md that links the static library.
const LINK_LINE: &str =
    "cc program.c -Iinclude target/release/libflexring.a -lpthread -ldl -lm -Wl,--gc-sections -s -o program";

/// Timeout of one program; none of them takes that long, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(150);

fn can_compile() -> bool {
    present("cc", "C compiler")
}

/// Compiles `source` with the command `line`, with strict warnings. Returns the path of the program.
fn compiled(line: &str, source: &str, folder: &Path) -> PathBuf {
    let path = folder.join(Path::new(source).file_stem().expect("a source has a name"));
    let archive = libraries().archive;
    let archive = archive.to_str().expect("a path in UTF-8");
    let path_text = path.to_str().expect("a path in UTF-8");
    let arguments = line.split_whitespace().map(|argument| match argument {
        "program.c" => source,
        "program" => path_text,
        "target/release/libflexring.a" => archive,
        other => other,
    });
    let arguments: Vec<&str> = arguments.collect();
    let mut compiler = program(arguments[0]);
    compiler.current_dir(root()).args(["-std=gnu11", "-Wall", "-Wextra", "-Werror"]).args(&arguments[1..]);
    succeed(&mut compiler, LIMIT);
    path
}

/// Compiles a program of `tests/c` with the documented command, and runs it.
fn passes(name: &str) {
    if !can_compile() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = compiled(LINK_LINE, &format!("tests/c/{name}.c"), folder.path());
    let printed = succeed(program(path).env("FLEXRING_REGISTER_SHARED", "1"), LIMIT);
    assert_eq!(printed, format!("{name}: ok\n"));
}

#[test]
fn four_processes_reduce_every_type_and_operation() {
    passes("all_reduce");
}

#[test]
fn four_processes_run_the_other_collectives() {
    passes("collectives");
}

#[test]
fn bad_input_is_refused_and_outputs_are_not_written() {
    passes("bad_input");
}

#[test]
fn an_abort_ends_a_blocked_call_at_once() {
    passes("abort");
}

#[test]
fn closed_descriptors_are_not_taken_and_end_no_process_in_a_wait() {
    passes("closed_descriptors");
}

#[test]
fn misused_handles_nested_calls_and_early_exits_are_errors() {
    passes("misuse");
}

#[test]
fn forked_children_cannot_use_communicators_and_hide_no_death() {
    passes("fork");
}

#[test]
fn memory_is_registered_in_parts_in_two_communicators_and_during_calls() {
    passes("registered");
}

#[test]
fn communicators_are_split_and_shrunk_also_after_a_death() {
    passes("shrink");
}

/// Compiles a program and passes it to `run`. The program uses the simulated CUDA driver.
fn on_simulated_gpus(source: &str, run: impl FnOnce(&dyn Fn() -> Command)) {
    if !can_compile() {
        return;
    }
    let Some(driver) = simulated_cuda() else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let path = compiled(LINK_LINE, source, folder.path());
    run(&|| {
        let mut command = program(&path);
        command.env("LD_LIBRARY_PATH", &driver);
        command
    });
}

#[test]
fn bad_gpu_memory_and_bad_streams_are_refused() {
    on_simulated_gpus("tests/c/gpu_bad_input.c", |program| {
        let ok = "gpu_bad_input: ok\n";
        assert_eq!(succeed(program().arg("two").env("SIMCUDA_GPUS", "2"), LIMIT), ok);
        assert_eq!(succeed(program().arg("none").env_remove("LD_LIBRARY_PATH"), LIMIT), ok);
    });
}

#[test]
fn gpu_failures_are_reported_on_every_rank() {
    on_simulated_gpus("tests/c/gpu_failures.c", |program| {
        for (failure, phrase, settings) in [
            ("unusable", "compute capability 5.0", &[("SIMCUDA_CAPABILITY", "5.0")][..]),
            // The first allocation is the program's own.
            ("short", "out of memory", &[("SIMCUDA_FAIL", "cuMemAlloc_v2:2:2")]),
            ("short", "out of memory", &[("SIMCUDA_FAIL", "cuMemAlloc_v2:3:2")]),
            ("reset", "cudaDeviceReset", &[]),
            ("short", "page-locked", &[("SIMCUDA_FAIL", "cuMemHostRegister_v2:1:1")]),
            // The first items of work belong to the program and to the first launch of each kernel. Then each
            // call has a kernel and an event.
            ("broken", "an illegal memory access", &[("SIMCUDA_FAIL", "work:24:700")]),
            ("broken", "an illegal memory access", &[("SIMCUDA_FAIL", "work:25:700")]),
            ("broken", "an illegal memory access", &[("SIMCUDA_FAIL", "work:42:700")]),
            ("broken", "cuEventRecord failed", &[("SIMCUDA_FAIL", "cuEventRecord:2:1")]),
            ("broken", "cuLaunchKernelEx failed", &[("SIMCUDA_FAIL", "cuLaunchKernelEx:17:719")]),
        ] {
            let text = succeed(program().args([failure, phrase]).envs(settings.iter().copied()), LIMIT);
            assert!(text.ends_with("gpu_failures: ok\n"), "{text}");
        }
    });
}

#[test]
fn streams_may_be_destroyed_full_or_blocked() {
    on_simulated_gpus("tests/c/gpu_streams.c", |program| {
        for case in ["destroyed", "full", "blocked", "freed"] {
            for setting in [("CUDA_DEVICE_MAX_CONNECTIONS", "1"), ("SIMCUDA_IMPLICIT_SYNC", "1")] {
                let text = succeed(program().arg(case).envs([setting]), LIMIT);
                assert!(text.ends_with("gpu_streams: ok\n"), "{case}: {text}");
            }
        }
    });
}

#[test]
fn a_rank_reserves_48_mib_of_its_gpu_and_pins_one() {
    on_simulated_gpus("tests/c/gpu_memory.c", |program| {
        let port = free_port().to_string();
        let mut command = program();
        command.envs([("FLEXRING_MASTER_ADDR", "127.0.0.1"), ("FLEXRING_MASTER_PORT", &port)]);
        let text = succeed(&mut command, LIMIT);
        assert!(text.ends_with("gpu_memory: ok\n"), "{text}");
    });
}

#[test]
fn the_gpu_example_runs() {
    on_simulated_gpus("examples/all_reduce_gpu.c", |program| {
        let port = free_port().to_string();
        let ranks = ["0", "1"].map(|rank| {
            let mut example = program();
            example.envs([("FLEXRING_RANK", rank), ("FLEXRING_WORLD_SIZE", "2")]);
            example.envs([("FLEXRING_MASTER_ADDR", "127.0.0.1"), ("FLEXRING_MASTER_PORT", &port)]);
            std::thread::spawn(move || succeed(&mut example, LIMIT))
        });
        for (rank, thread) in ranks.into_iter().enumerate() {
            let text = thread.join().expect("a rank that succeeds");
            assert_eq!(text, format!("rank {rank} of 2: the average is 0.5\n"));
        }
    });
}

#[test]
fn the_tested_link_command_is_the_documented_one() {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap_or_default();
    for line in
        readme.lines().map(str::trim).filter(|line| line.starts_with("cc ") && line.contains("libflexring.a"))
    {
        assert_eq!(line, LINK_LINE, "README.md and tests/suite/c_api.rs differ");
    }
}

#[test]
fn the_link_command_names_all_native_libraries() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("empty.rs");
    std::fs::write(&source, "").expect("a file");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut rustc = program(rustc);
    rustc
        .args(["--crate-type", "staticlib", "--print", "native-static-libs", "--out-dir"])
        .arg(folder.path());
    let text = succeed(rustc.arg(&source), LIMIT);
    let libraries = text
        .lines()
        .find_map(|line| line.split("native-static-libs: ").nth(1))
        .expect("rustc prints the native libraries");
    // The C compiler links these by default. librt and libutil are parts of the C library on all supported
    // systems.
    let implicit = ["-lc", "-lgcc_s", "-lgcc_eh", "-lgcc", "-lrt", "-lutil"];
    for library in libraries.split_whitespace().filter(|library| !implicit.contains(library)) {
        assert!(
            LINK_LINE.split_whitespace().any(|argument| argument == library),
            "the link command lacks {library}"
        );
    }
}

/// The SONAME of the shared library: its name with the major version of the ABI.
const SONAME: &str = concat!("libflexring.so.", env!("CARGO_PKG_VERSION_MAJOR"));

/// Installs the shared library in `folder` as `make install` does: under its SONAME, with a link for the
/// linker.
fn install_shared(folder: &Path) {
    std::fs::copy(libraries().shared, folder.join(SONAME)).expect("a file");
    std::os::unix::fs::symlink(SONAME, folder.join("libflexring.so")).expect("a link");
}

#[test]
fn the_shared_library_has_a_soname_with_the_major_version() {
    if !present("readelf", "readelf") {
        return;
    }
    let dynamic = succeed(program("readelf").args(["-d", "-W"]).arg(libraries().shared), LIMIT);
    let soname = dynamic.lines().find(|line| line.contains("(SONAME)")).expect("a SONAME");
    assert!(soname.ends_with(&format!("[{SONAME}]")), "{soname}");
    let loader = std::fs::read_to_string(root().join("python/flexring/_library.py")).expect("the loader");
    assert!(loader.contains(&format!("\"{SONAME}\"")), "Python looks for another name than {SONAME}");
}

#[test]
fn the_shared_library_links_and_exports_only_the_c_abi() {
    if !can_compile() {
        return;
    }
    let shared = libraries().shared;
    let folder = tempfile::tempdir().expect("a folder");
    install_shared(folder.path());
    let installed = folder.path().to_str().expect("a path in UTF-8");
    let line = format!(
        "cc program.c -Iinclude -L{installed} -Wl,-rpath,{installed} -lflexring -lpthread -o program"
    );
    let path = compiled(&line, "tests/c/bad_input.c", folder.path());
    assert_eq!(succeed(&mut program(path), LIMIT), "bad_input: ok\n");

    if present("nm", "nm") {
        let symbols = succeed(program("nm").args(["-D", "--defined-only"]).arg(&shared), LIMIT);
        let others: Vec<&str> = symbols
            .lines()
            .filter_map(|line| line.split_whitespace().last())
            .filter(|name| !name.starts_with("flexring_"))
            .collect();
        assert!(others.is_empty(), "these symbols are not part of the C ABI: {others:?}");
    }
}

#[test]
fn pkg_config_gives_the_compiler_and_linker_flags() {
    if !can_compile() || !present("pkg-config", "pkg-config") {
        return;
    }
    let prefix = tempfile::tempdir().expect("a folder");
    let at = |path: &str| prefix.path().join(path);
    for folder in ["lib/pkgconfig", "include"] {
        std::fs::create_dir_all(at(folder)).expect("a folder");
    }
    let template = std::fs::read_to_string(root().join("flexring.pc.in")).expect("the template");
    let prefix_text = prefix.path().to_str().expect("a path in UTF-8");
    let filled = template.replace("@PREFIX@", prefix_text).replace("@VERSION@", env!("CARGO_PKG_VERSION"));
    std::fs::write(at("lib/pkgconfig/flexring.pc"), filled).expect("a file");
    std::fs::copy(root().join("include/flexring.h"), at("include/flexring.h")).expect("a file");

    let query = |options: &[&str]| {
        let mut pkg_config = program("pkg-config");
        pkg_config.env("PKG_CONFIG_PATH", at("lib/pkgconfig")).args(options).arg("flexring");
        succeed(&mut pkg_config, LIMIT)
    };
    assert_eq!(query(&["--modversion"]).trim(), env!("CARGO_PKG_VERSION"));
    query(&["--validate"]);

    // The program runs with either library installed alone.
    let runs = |options: &[&str]| {
        let line =
            format!("cc program.c {} -Wl,-rpath,{prefix_text}/lib -lpthread -o program", query(options));
        let path = compiled(&line, "tests/c/bad_input.c", prefix.path());
        assert_eq!(succeed(&mut program(path), LIMIT), "bad_input: ok\n");
    };
    install_shared(&at("lib"));
    runs(&["--cflags", "--libs"]);
    for name in [SONAME, "libflexring.so"] {
        std::fs::remove_file(at("lib").join(name)).expect("a file");
    }
    std::fs::copy(libraries().archive, at("lib/libflexring.a")).expect("a file");
    runs(&["--static", "--cflags", "--libs"]);
}

/// The text of the first block of this language in the section "A complete program" of docs/c-api.md.
fn documented(language: &str) -> String {
    let document = std::fs::read_to_string(root().join("docs/c-api.md")).expect("docs/c-api.md can be read");
    let (_, section) = document.split_once("## A complete program").expect("the section exists");
    let (_, block) = section.split_once(&format!("```{language}\n")).expect("the section has this block");
    block.split_once("```").expect("the block ends").0.to_owned()
}

#[test]
fn the_documented_program_is_compiled_linked_and_run_as_documented() {
    if !can_compile() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = folder.path().join("prefix");
    for part in ["include", "lib"] {
        std::fs::create_dir_all(prefix.join(part)).expect("a folder");
    }
    std::fs::copy(root().join("include/flexring.h"), prefix.join("include/flexring.h")).expect("a file");
    std::fs::copy(libraries().archive, prefix.join("lib/libflexring.a")).expect("a file");
    install_shared(&prefix.join("lib"));
    std::fs::write(folder.path().join("mean.c"), documented("c")).expect("a file");
    let commands = documented("sh");
    let commands: Vec<&str> = commands.lines().filter(|line| line.starts_with("cc ")).collect();
    assert_eq!(commands.len(), 2, "with the static library, and with the shared one");
    for command in commands {
        let mut shell = program("sh");
        shell.args(["-c", command]).current_dir(folder.path()).env("PREFIX", &prefix);
        succeed(&mut shell, LIMIT);
        let mut mean = program(folder.path().join("mean"));
        let text = succeed(mean.envs([("FLEXRING_RANK", "0"), ("FLEXRING_WORLD_SIZE", "1")]), LIMIT);
        assert_eq!(text, "rank 0 of 1: the mean is 0\n", "{command}");
        std::fs::remove_file(folder.path().join("mean")).expect("the program");
    }
}

#[test]
fn the_example_runs_as_a_single_rank() {
    if !can_compile() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = compiled(LINK_LINE, "examples/all_reduce.c", folder.path());
    let mut example = program(path);
    let text = succeed(example.envs([("FLEXRING_RANK", "0"), ("FLEXRING_WORLD_SIZE", "1")]), LIMIT);
    assert!(text.contains("rank 0 of 1"), "{text}");
}

#[test]
fn the_example_runs_under_mpirun() {
    if !can_compile() || !present("mpirun", "mpirun") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = compiled(LINK_LINE, "examples/all_reduce.c", folder.path());
    let mut mpirun = program("mpirun");
    // Containers often run as root, and may have fewer cores than ranks.
    mpirun.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    let text = succeed(mpirun.args(["--oversubscribe", "-np", "4"]).arg(path), LIMIT);
    for rank in 0..4 {
        assert!(text.contains(&format!("rank {rank} of 4")), "{text}");
    }
}
