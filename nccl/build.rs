//! Names the shared library, and hides the functions of flexring's own C ABI in it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        // 2 is the major version of NCCL's ABI, as in libnccl.so.2.
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libflexring_nccl.so.2");
        // A program may use libflexring.so, too, whose functions have the same names.
        println!("cargo::rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    }
}
