//! The kernels that are part of this build: their source, and machine code if there was a compiler.
//!
//! Owns what `build.rs` wrote. Must not know which of it a GPU can run.

/// What is embedded for one architecture.
#[derive(Clone, Copy, Debug)]
pub(super) struct EmbeddedImage {
    /// 90 is compute capability 9.0.
    pub architecture: u32,
    pub bytes: &'static [u8],
}

// Defines SOURCES (name and text of each file, the first of which is compiled), the compiler's OPTIONS,
// MACHINE_CODE and PTX (each ascending by architecture), COMPILER (its name and version, or why there is no
// machine code), COMPILER_MAJOR, CHOICE (FLEXRING_CUDA_KERNELS of the build), and for tests HAS_COMPILER
// (whether there was one).
include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

// A build with FLEXRING_CUDA_KERNELS=nvrtc contains no machine code and no PTX.
const _: () = assert!(!matches!(CHOICE.as_bytes(), b"nvrtc") || MACHINE_CODE.is_empty() && PTX.is_empty());
