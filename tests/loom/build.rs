//! Selects loom's atomics in the files of flexring that have a choice.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cfg=loom");
}
