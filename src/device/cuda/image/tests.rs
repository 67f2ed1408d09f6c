//! Both sources of an image, checked without a GPU by inspecting the images.

use super::*;
use crate::test_effort::cases;
use std::time::Instant;

/// The libraries of the wheels that `make setup-cuda` installs.
fn wheels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("target/cuda-toolkit/nvidia/cu13/lib")
}

/// NVRTC; if it is missing, `None` and a line that says so.
fn nvrtc() -> Option<Nvrtc> {
    match Nvrtc::find(Some(&wheels())) {
        Ok(nvrtc) => Some(nvrtc),
        Err(why) => {
            println!("skipped: {why} (make setup-cuda)");
            None
        }
    }
}

/// A small source that compiles fast.
const SMALL: KernelSource<'static> = KernelSource {
    name: c"small.cu",
    text: c"#include \"name.h\"\nextern \"C\" __global__ void NAME(int* at) { *at = 1; }",
    headers: &[(c"name.h", c"#define NAME small")],
};

fn symbols() -> Vec<&'static CStr> {
    let arithmetics = [Arithmetic::Sum, Arithmetic::Prod, Arithmetic::Max, Arithmetic::Min];
    let of = |dtype| arithmetics.map(|arithmetic| symbol(dtype, arithmetic));
    DType::ALL.into_iter().flat_map(of).chain([COPY]).collect()
}

fn holds(image: &[u8], name: &CStr) -> bool {
    image.windows(name.count_bytes()).any(|window| window == name.to_bytes())
}

#[test]
fn kernels_are_named_by_operation_and_type() {
    assert_eq!(symbol(DType::BF16, Arithmetic::Max), c"flexring_max_bfloat16");
    for dtype in DType::ALL {
        let name = format!("flexring_sum_{}", dtype.name());
        assert_eq!(symbol(dtype, Arithmetic::Sum).to_bytes(), name.as_bytes());
    }
}

#[test]
fn the_compile_target_suits_the_gpu() {
    let known = [75, 80, 86, 90, 100, 120];
    let target = |major, minor| target(&known, major, minor);
    assert_eq!(target(9, 0).as_deref(), Some("sm_90"));
    assert_eq!(
        target(8, 9).as_deref(),
        Some("sm_86"),
        "machine code of an older architecture of the generation"
    );
    assert_eq!(target(11, 0).as_deref(), Some("compute_100"), "the driver compiles PTX further");
    assert_eq!(target(13, 2).as_deref(), Some("compute_120"));
    assert_eq!(target(7, 0), None);
}

#[test]
fn gpus_that_are_too_old_are_refused() {
    assert!(embedded(b"code", &[75, 90], 7, 5).is_ok());
    assert!(embedded(b"code", &[75, 90], 12, 1).is_ok());
    let error = embedded(b"code", &[75, 90], 6, 1).expect_err("too old");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("compute capability 6.1, and "), "{error}");
    assert!(error.message().contains(" kernels for 7.5 and newer"), "{error}");

    if nvrtc().is_some() {
        let error = compiled(&SMALL, Some(&wheels()), None, 3, 5).expect_err("too old");
        assert!(error.message().contains("compute capability 3.5, and NVRTC "), "{error}");
    }
}

#[test]
fn every_kernel_is_compiled_by_nvrtc() {
    let Some(nvrtc) = nvrtc() else { return };
    // sm_75 lacks conversions that sm_90 has. A compilation takes half a minute, and build.rs compiles for all of them.
    let tried: &[u32] = if cases(1) > 1 { &[75, 80, 90] } else { &[90] };
    let known = nvrtc.architectures();
    for number in tried.iter().copied().filter(|number| known.contains(number)) {
        let begin = Instant::now();
        let image = compiled(&SOURCE, Some(&wheels()), None, number / 10, number % 10).expect("it compiles");
        println!("sm_{number}: {} bytes in {:.1} s", image.len(), begin.elapsed().as_secs_f64());
        assert!(image.starts_with(b"\x7fELF"), "machine code");
        for name in symbols() {
            assert!(holds(&image, name), "sm_{number} lacks {}", name.to_string_lossy());
        }
    }
    // A GPU that is newer than NVRTC gets PTX.
    let image = compiled(&SOURCE, Some(&wheels()), None, 99, 9).expect("it compiles");
    let text = String::from_utf8_lossy(&image);
    assert!(text.contains(".version ") && text.contains(".entry flexring_sum_float8e4m3("));
    assert!(!text.contains("fma.rn."), "no contraction to FMA");
    assert!(!text.contains(".ftz"), "no flush to zero");
}

#[test]
fn compiled_images_are_cached() {
    if nvrtc().is_none() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let cache = folder.path().join("not/there/yet");
    let image = || compiled(&SMALL, Some(&wheels()), Some(&cache), 9, 0).expect("it compiles");
    let first = image();
    let entries = || {
        let entries = std::fs::read_dir(&cache).expect("the cache");
        entries.map(|entry| entry.expect("an entry").path()).collect::<Vec<_>>()
    };
    let [entry] = &entries()[..] else { panic!("one entry and no temporary file: {:?}", entries()) };
    let begin = Instant::now();
    assert!(image() == first);
    println!("from the cache in {:?}", begin.elapsed());

    // The entry is used: a different image with a valid digest is returned.
    write(entry, b"another image").expect("an entry");
    assert!(image() == b"another image");
    for damaged in [&b""[..], b"short", &first[..]] {
        std::fs::write(entry, damaged).expect("an entry");
        assert!(read(entry).is_none());
    }
    assert!(image() == first, "compiled again");
    assert!(read(entry).is_some_and(|image| image == first));
}

#[test]
fn a_wrong_source_fails_with_the_compilers_message() {
    if nvrtc().is_none() {
        return;
    }
    let wrong = KernelSource { text: c"void kernel() { none(); }", ..SMALL };
    let error = compiled(&wrong, Some(&wheels()), None, 9, 0).expect_err("it is wrong");
    assert_eq!(error.kind(), ErrorKind::Internal);
    assert!(error.message().contains("for sm_90: nvrtcCompileProgram failed: "), "{error}");
    assert!(error.message().contains("small.cu(1)") && error.message().contains("none"), "{error}");
}

#[test]
fn a_cache_that_cannot_be_written_is_not_an_error() {
    if nvrtc().is_none() {
        return;
    }
    // Not even root can create folders there.
    compiled(&SMALL, Some(&wheels()), Some(Path::new("/dev/null/flexring")), 9, 0).expect("it compiles");
}

/// What is embedded must follow from FLEXRING_CUDA_KERNELS and from whether there was an nvcc, both at build time.
#[test]
fn what_is_embedded_follows_from_the_build() {
    println!("{}", origin());
    let has_nvcc = env!("FLEXRING_BUILD_HAS_NVCC") == "true";
    let (expects_machine_code, reason) = match env!("FLEXRING_BUILD_CUDA_KERNELS") {
        "nvrtc" => (false, "FLEXRING_CUDA_KERNELS=nvrtc"),
        "nvcc" => (true, ""),
        "auto" => (has_nvcc, "there is no nvcc"),
        other => panic!("build.rs accepts nvrtc, nvcc and auto, not {other}"),
    };
    assert_eq!(is_embedded(), expects_machine_code, "{}", origin());
    let image = image(9, 0);
    if expects_machine_code {
        let image = image.expect("embedded machine code");
        assert!(image.len() > 1 << 16 && image.as_ptr().addr().is_multiple_of(16));
        assert!(origin().starts_with("machine code for sm_"));
        assert!(ARCHITECTURES.contains(&90));
        return;
    }
    assert!(ARCHITECTURES.is_empty());
    assert!(COMPILER.contains(reason) && origin().contains(reason), "{}", origin());
    if Nvrtc::find(None).is_ok() {
        assert!(image.expect("NVRTC compiles the source").starts_with(b"\x7fELF"));
    } else {
        let error = image.expect_err("nothing to compile with");
        assert!(error.message().contains("there is no NVRTC"), "{error}");
        assert!(error.message().contains("build flexring where nvcc is"), "{error}");
    }
}
