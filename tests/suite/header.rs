//! `include/flexring.h` is generated from `crates/flexring-ffi` and committed. `FLEXRING_BLESS=1 cargo test
//! --test suite header` rewrites it.

use crate::programs::root;
use std::path::PathBuf;
use std::process::Command;

/// The files of the C ABI, in the order in which they appear in the header.
const SOURCES: [&str; 11] = [
    "status",
    "unique_id",
    "comm",
    "statistics",
    "buffer",
    "types",
    "collectives",
    "async_collectives",
    "exchanges",
    "groups",
    "interrupt",
];

const INTRODUCTION: &str = "\
/*
 * flexring: an all-reduce engine for clusters that are not symmetric.
 *
 * Every function except flexring_last_error and flexring_version returns a flexring_result. Outputs are written last
 * and only on success. A handle may be used from any thread; its calls run one at a time. Every rank must make the
 * same calls in the same order, apart from sends and receives. Vectors are memory of the host or of a GPU; see flexring_all_reduce for streams.
 *
 * This file is generated from crates/flexring-ffi.
 */";

fn committed() -> PathBuf {
    root().join("include/flexring.h")
}

/// Macros with the header's version, for comparison with `flexring_version()`.
fn version_macros() -> String {
    let number = |text: &str| text.parse::<u32>().expect("a version has three numbers");
    let (major, minor, patch) = (
        number(env!("CARGO_PKG_VERSION_MAJOR")),
        number(env!("CARGO_PKG_VERSION_MINOR")),
        number(env!("CARGO_PKG_VERSION_PATCH")),
    );
    let macros = [
        ("FLEXRING_VERSION_MAJOR", major),
        ("FLEXRING_VERSION_MINOR", minor),
        ("FLEXRING_VERSION_PATCH", patch),
        ("FLEXRING_VERSION", major * 10_000 + minor * 100 + patch),
    ];
    let lines = macros.map(|(name, value)| format!("#define {name} {value}"));
    format!(
        "\n// The version of this header, numbered as flexring_version() numbers the library.\n{}",
        lines.join("\n")
    )
}

/// The header as generated from the current sources.
fn generated() -> String {
    let mut config =
        cbindgen::Config::from_file(root().join("cbindgen.toml")).expect("cbindgen.toml is valid");
    config.header = Some(INTRODUCTION.to_owned());
    config.after_includes = Some(version_macros());
    let sources = SOURCES.iter().fold(cbindgen::Builder::new().with_config(config), |builder, name| {
        builder.with_src(root().join(format!("crates/flexring-ffi/src/{name}.rs")))
    });
    let mut bytes = Vec::new();
    sources.generate().expect("the C ABI has a header").write(&mut bytes);
    let text = String::from_utf8(bytes).expect("a header is text");
    // In C, the safety section is the contract that the caller must keep.
    text.replace("// # Safety\n", "// The caller promises:\n")
}

#[test]
fn the_committed_header_is_current() {
    let (path, new) = (committed(), generated());
    if std::env::var_os("FLEXRING_BLESS").is_some() {
        std::fs::write(&path, &new).expect("the header can be written");
    }
    let old = std::fs::read_to_string(&path).unwrap_or_default();
    let line = old.lines().zip(new.lines()).position(|(old, new)| old != new);
    assert!(
        old == new,
        "include/flexring.h is out of date from line {} on; FLEXRING_BLESS=1 cargo test --test suite header rewrites it",
        line.unwrap_or_else(|| old.lines().count().min(new.lines().count())) + 1
    );
}

#[test]
fn the_header_declares_every_function_of_the_c_abi() {
    let header = generated();
    for file in std::fs::read_dir(root().join("crates/flexring-ffi/src")).expect("the C ABI") {
        let source = std::fs::read_to_string(file.expect("a file").path()).expect("a source");
        let functions = source.split("extern \"C\" fn ").skip(1);
        for function in functions.filter_map(|rest| rest.split('(').next()) {
            assert!(header.contains(&format!("{function}(")), "{function} is missing");
        }
    }
}

/// Compiles the header alone. Skipped if there is no such compiler.
fn compiles(compiler: &str, language: &str, standard: &str) {
    let mut command = Command::new(compiler);
    command.args(["-x", language, standard, "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"]);
    match command.arg(committed()).output() {
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => eprintln!("skipped: no {compiler}"),
        Err(cause) => panic!("cannot run {compiler}: {cause}"),
        Ok(output) => {
            assert!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

#[test]
fn the_header_compiles_as_strict_c99_c11_and_cpp() {
    compiles("cc", "c", "-std=c99");
    compiles("cc", "c", "-std=c11");
    compiles("c++", "c++", "-std=c++11");
    compiles("c++", "c++", "-std=c++20");
}
