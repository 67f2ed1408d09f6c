//! Both sources of an image, checked without a GPU by inspecting the images.

use super::compiler::{compiled, from_source, read, target, write};
use super::cubin::functions;
use super::embedded::{CHOICE, HAS_COMPILER, OPTIONS, SOURCES};
use super::ptx::accesses_of_peers;
use super::*;
use crate::error::ErrorKind;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The library of the wheel that `make setup-cuda` installs.
fn wheels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("target/cuda-toolkit/nvidia/cuda_nvrtc/lib")
}

/// NVRTC; if it is missing, `None` and a line that says so.
fn nvrtc() -> Option<Nvrtc> {
    match Nvrtc::find(Some(&wheels()), ANY_DRIVER) {
        Ok(nvrtc) => Some(nvrtc),
        Err(why) => {
            println!("skipped: {why} (make setup-cuda)");
            None
        }
    }
}

/// What NVRTC compiles from `files` for a GPU of compute capability 9.0.
fn for_sm_90(files: &[(&str, &str)], cache: Option<&Path>) -> Result<Vec<u8>> {
    compiled(files, Some(&wheels()), cache, (9, 0), ANY_DRIVER)
}

/// A small source that compiles fast.
const SMALL: &[(&str, &str)] = &[
    ("small.cu", "#include \"name.h\"\nextern \"C\" __global__ void NAME(int* at) { *at = 1; }"),
    ("name.h", "#define NAME small"),
];

/// The sources with the kernels of some types, as all would take a minute or more.
fn with_types(names: &[&str]) -> Vec<(&'static str, &'static str)> {
    let mut files = SOURCES.to_vec();
    // The first file includes the others.
    let types: String = names.iter().map(|name| format!(" with({name})")).collect();
    files[0].1 = String::leak(format!("#define FLEXRING_TYPES(with){types}\n{}", files[0].1));
    files
}

/// The names of all kernels.
fn symbols() -> Vec<String> {
    DType::ALL.into_iter().map(|dtype| symbol(dtype).to_str().expect("ASCII").to_owned()).collect()
}

fn holds(image: &[u8], name: &str) -> bool {
    image.windows(name.len()).any(|window| window == name.as_bytes())
}

#[test]
fn kernels_are_named_by_type() {
    for dtype in DType::ALL {
        assert_eq!(symbol(dtype).to_bytes(), format!("flexring_collective_{}", dtype.name()).as_bytes());
    }
}

#[test]
fn the_compile_target_suits_the_gpu() {
    let known = [75, 80, 86, 90, 100, 120];
    let target = |major, minor| target(&known, (major, minor));
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
    let error = compiled(SMALL, Some(&wheels()), None, (6, 1), ANY_DRIVER).expect_err("too old");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("compute capability 6.1, and flexring's kernels need 7.0"), "{error}");
}

#[test]
fn images_are_tried_from_the_closest_to_the_most_general() {
    let images = |all: &[u32]| -> Vec<EmbeddedImage> {
        all.iter().map(|architecture| EmbeddedImage { architecture: *architecture, bytes: b"" }).collect()
    };
    let (code, ptx) = (images(&[70, 75, 80, 86, 89, 90, 100, 120]), images(&[80, 120]));
    let names = |major, minor| {
        let attempts = Attempt::all(&code, &ptx, (major, minor));
        attempts.into_iter().map(|attempt| attempt.name).collect::<Vec<_>>()
    };
    assert_eq!(names(7, 0), ["sm_70"]);
    assert_eq!(names(8, 0), ["sm_80", "compute_80"]);
    assert_eq!(names(8, 7), ["sm_86", "compute_80"], "machine code of an older GPU of the generation");
    assert_eq!(names(9, 0), ["sm_90", "compute_80"]);
    assert_eq!(names(10, 3), ["sm_100", "compute_80"]);
    assert_eq!(names(11, 0), ["compute_80"], "no machine code of this generation");
    assert_eq!(names(12, 1), ["sm_120", "compute_120"]);
    assert_eq!(names(13, 0), ["compute_120"]);
    assert!(names(6, 1).is_empty());
}

/// Loads with a driver that answers with these results, and returns what it was given.
fn load_with(
    answers: &[std::result::Result<(), CUresult>],
    compile: Result<Vec<u8>>,
) -> (Result<()>, Vec<String>) {
    let images = [
        EmbeddedImage { architecture: 80, bytes: b"code" },
        EmbeddedImage { architecture: 90, bytes: b"not for this GPU" },
    ];
    let ptx = [EmbeddedImage { architecture: 80, bytes: b"ptx" }];
    let attempts = Attempt::all(&images, &ptx, (8, 6));
    let (mut given, mut answers) = (Vec::new(), answers.iter());
    let result = load_first(
        &attempts,
        || compile,
        (8, 6),
        12020,
        |image| {
            given.push(String::from_utf8_lossy(image).into_owned());
            let answer = *answers.next().expect("no more images are tried");
            answer.map_err(|code| DriverError { function: "cuModuleLoadData", code: Some(code as c_uint) })
        },
    );
    (result, given)
}

#[test]
fn the_next_image_is_tried_when_the_driver_rejects_one() {
    use CUresult::*;
    let source = || Ok(b"compiled".to_vec());
    let never = || Err(Error::internal("nothing is to be compiled"));

    assert_eq!(load_with(&[Ok(())], never()).1, ["code"]);
    let rejected = [Err(CUDA_ERROR_NO_BINARY_FOR_GPU), Ok(())];
    assert_eq!(load_with(&rejected, never()).1, ["code", "ptx"]);
    for rejection in [CUDA_ERROR_UNSUPPORTED_PTX_VERSION, CUDA_ERROR_INVALID_PTX, CUDA_ERROR_INVALID_IMAGE] {
        let (result, given) = load_with(&[Err(rejection), Err(rejection), Ok(())], source());
        assert!(result.is_ok(), "{result:?}");
        assert_eq!(given, ["code", "ptx", "compiled"]);
    }
}

#[test]
fn other_failures_of_the_driver_end_the_attempts() {
    for failure in [CUresult::CUDA_ERROR_OUT_OF_MEMORY, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS] {
        let (result, given) = load_with(&[Err(failure)], Ok(Vec::new()));
        assert_eq!(result.expect_err("it failed").kind(), ErrorKind::System);
        assert_eq!(given, ["code"]);
    }
}

#[test]
fn the_error_names_driver_capability_and_fix() {
    const REJECTED: std::result::Result<(), CUresult> = Err(CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU);
    let none = Err(Error::unsupported("there is no compiler; install one"));
    let (result, _) = load_with(&[REJECTED; 2], none);
    let error = result.expect_err("nothing can be loaded");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let fix =
        format!("update it to {} or newer; there is no compiler; install one", oldest_driver(COMPILER_MAJOR));
    for part in [
        "by driver",
        "with CUDA 12.2 on a GPU of compute capability 8.6: it rejects sm_80: ",
        "; compute_80: ",
        &fix,
    ] {
        assert!(error.message().contains(part), "{part} in {error}");
    }

    let (result, given) = load_with(&[REJECTED; 3], Ok(b"compiled".to_vec()));
    assert_eq!(given.len(), 3);
    let error = result.expect_err("nothing can be loaded");
    assert!(error.message().contains("what NVRTC compiled on this machine: "), "{error}");
}

#[test]
fn a_driver_gets_no_compiler_that_is_newer() {
    let Some(nvrtc) = nvrtc() else { return };
    let error = compiled(SMALL, Some(&wheels()), None, (9, 0), 1).expect_err("it is too new");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains(" is too new for a driver of CUDA 1; install "), "{error}");
    assert!(compiled(SMALL, Some(&wheels()), None, (9, 0), nvrtc.major()).is_ok());
}

/// A kernel with local memory could not run until the driver has allocated that memory, which waits for other
/// kernels; and a block of 512 threads must find its registers.
#[test]
fn kernels_use_no_local_memory() {
    for image in MACHINE_CODE {
        let functions = functions(image.bytes).expect("machine code");
        for name in symbols() {
            assert!(functions.contains_key(&name), "{} has {name}", image.architecture);
        }
        let most = functions.values().map(|function| function.registers).max();
        println!("sm_{}: {} bytes, {most:?} registers at most", image.architecture, image.bytes.len());
        for (name, function) in functions {
            assert_eq!(function.local, 0, "bytes of local memory of {name} for sm_{}", image.architecture);
            assert!(function.registers <= 128, "{name} for sm_{}: {function:?}", image.architecture);
        }
    }
}

/// Debug builds embed machine code for sm_80. Here the kernel of bytes, which moves blocks and messages of
/// all types, is compiled for every other generation, and that of 8-bit floats for those that convert these
/// by instructions of their own. The source has no case for sm_75 that it does not have for sm_70.
#[test]
fn kernels_compile_for_every_generation() {
    const BYTES: &str = "uint8, Uint8";
    const FLOATS: &str = "float8e4m3, E4m3";
    let Some(nvrtc) = nvrtc() else { return };
    let cases: [(u32, &[&str]); 5] =
        [(70, &[BYTES]), (89, &[FLOATS]), (90, &[BYTES, FLOATS]), (100, &[BYTES, FLOATS]), (120, &[BYTES])];
    for (number, types) in cases {
        if !nvrtc.architectures().contains(&number) {
            println!("skipped: this NVRTC does not compile for sm_{number}");
            continue;
        }
        let files = with_types(types);
        let compiled = nvrtc.compile(&files, &format!("sm_{number}"), OPTIONS).expect("it compiles");
        let functions = functions(&compiled.machine_code).expect("machine code");
        for name in types.iter().filter_map(|names| names.split(',').next()) {
            assert!(functions.contains_key(&format!("flexring_collective_{name}")), "{functions:?}");
        }
        for (name, function) in functions {
            assert_eq!(function.local, 0, "bytes of local memory of {name} for sm_{number}");
            assert!(function.registers <= 128, "{name} for sm_{number}: {function:?}");
        }
    }
}

#[test]
fn local_memory_is_found_in_machine_code() {
    if nvrtc().is_none() {
        return;
    }
    let text = "extern \"C\" __global__ void indexes(int* at, int n) {\n\
                int many[64];\n\
                for (int i = 0; i < n; ++i) many[(i * 7) & 63] += at[i];\n\
                at[0] = many[n & 63];\n\
                }\n\
                extern \"C\" __global__ void plain(int* at) { *at = 1; }";
    let functions = functions(&for_sm_90(&[("local.cu", text)], None).expect("it compiles"));
    let functions = functions.expect("machine code");
    assert_eq!(functions["indexes"].local, 256);
    assert_eq!(functions["plain"].local, 0);
    assert!(functions["plain"].registers > 0);
}

/// What build.rs embeds. Where it embeds nothing, NVRTC compiles the source for one architecture.
#[test]
fn images_hold_every_kernel() {
    let compiled;
    let images = if MACHINE_CODE.is_empty() && nvrtc().is_some() {
        let begin = Instant::now();
        compiled = for_sm_90(SOURCES, None).expect("it compiles");
        println!("sm_90: {} bytes in {:.1} s", compiled.len(), begin.elapsed().as_secs_f64());
        vec![&compiled[..]]
    } else {
        MACHINE_CODE.iter().map(|image| image.bytes).collect()
    };
    for image in images {
        assert!(image.starts_with(b"\x7fELF"), "machine code");
        for name in symbols() {
            assert!(holds(image, &name), "{name} is missing");
        }
    }
    for image in PTX {
        assert!(image.bytes.ends_with(b"\0"), "the driver reads PTX up to a NUL");
        let text = String::from_utf8_lossy(image.bytes);
        assert!(text.contains(".version ") && text.contains(".entry flexring_collective_float8e4m3("));
        assert!(!text.contains("fma.rn."), "no contraction to FMA");
        assert!(!text.contains(".ftz"), "no flush to zero");
    }
}

/// Other GPUs see accesses of a kernel to their memory only if these have the scope of the system; and see no
/// atomic operation where the link between them has none.
#[test]
fn kernels_access_memory_of_peers_with_the_scope_of_the_system() {
    if PTX.is_empty() {
        println!("skipped: no PTX is embedded");
    }
    for image in PTX {
        let text = String::from_utf8_lossy(image.bytes);
        assert!(!text.contains("ld.global.nc"), "memory that others write is not constant");
        let kernels: Vec<&str> = text.split(".visible .entry flexring_collective_").skip(1).collect();
        assert_eq!(kernels.len(), DType::ALL.len());
        for kernel in kernels {
            let name = kernel.split('(').next().unwrap_or_default();
            let accesses = accesses_of_peers(kernel);
            // Packets of entries and data, words, operands, results, `ready` and `done`.
            assert!(accesses.as_ref().is_ok_and(|count| *count >= 8), "{name}: {accesses:?}");
        }
    }
}

#[test]
fn compiled_images_are_cached() {
    if nvrtc().is_none() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let cache = folder.path().join("not/there/yet");
    let image = || for_sm_90(SMALL, Some(&cache)).expect("it compiles");
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
fn a_cached_image_that_another_user_can_write_is_not_used() {
    let folder = tempfile::tempdir().expect("a folder");
    let entry = folder.path().join("entry");
    write(&entry, b"image").expect("an entry");
    assert_eq!(read(&entry).as_deref(), Some(&b"image"[..]));
    for mode in [0o620, 0o602] {
        std::fs::set_permissions(&entry, Permissions::from_mode(mode)).expect("the owner may");
        assert_eq!(read(&entry), None);
    }
    std::fs::set_permissions(&entry, Permissions::from_mode(0o600)).expect("the owner may");
    match std::os::unix::fs::chown(&entry, Some(65_534), None) {
        Ok(()) => assert_eq!(read(&entry), None),
        Err(cause) => eprintln!("skipped: an entry of another user: {cause}"),
    }
}

#[test]
fn a_wrong_source_fails_with_the_compilers_message() {
    if nvrtc().is_none() {
        return;
    }
    let wrong = [("small.cu", "void kernel() { none(); }")];
    let error = for_sm_90(&wrong, None).expect_err("it is wrong");
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
    for_sm_90(SMALL, Some(Path::new("/dev/null/flexring"))).expect("it compiles");
}

/// What a build does that embeds no machine code.
#[test]
fn nvrtc_compiles_the_source_where_nothing_is_embedded() {
    let reason = "flexring was built with FLEXRING_CUDA_KERNELS=nvrtc";
    assert!(origin_of_source(reason).starts_with(&format!("the source alone, because {reason}; ")));
    if nvrtc().is_none() {
        return;
    }
    let files = Vec::leak(with_types(&["uint32, Uint32"]));
    let compile = || from_source(files, Some(wheels()), None, (9, 0), ANY_DRIVER);
    let images = Attempt::all(&[], &[], (9, 0));
    let image = load_first(&images, compile, (9, 0), ANY_DRIVER, |image| Ok(image.to_vec()));
    assert!(image.expect("NVRTC compiles the source").starts_with(b"\x7fELF"));
}

/// What is embedded must follow from FLEXRING_CUDA_KERNELS and from whether there was a compiler, both at
/// build time.
#[test]
fn what_is_embedded_follows_from_the_build() {
    println!("{}", origin());
    let (expects_machine_code, reason) = match CHOICE {
        "nvrtc" => (false, "FLEXRING_CUDA_KERNELS=nvrtc"),
        "nvcc" => (true, ""),
        "auto" => (HAS_COMPILER, "there is neither NVRTC nor nvcc"),
        other => panic!("build.rs accepts nvrtc, nvcc and auto, not {other}"),
    };
    assert_eq!(is_embedded(), expects_machine_code, "{}", origin());
    let image = load_image((9, 0), ANY_DRIVER, |image| Ok((image.to_vec(), image.as_ptr().addr())));
    if expects_machine_code {
        let (image, address) = image.expect("embedded machine code");
        assert!(image.len() > 1 << 16 && address.is_multiple_of(16));
        assert!(origin().starts_with("machine code for sm_"));
        assert!(MACHINE_CODE.is_sorted_by_key(|image| image.architecture));
        return;
    }
    assert!(PTX.is_empty());
    assert!(COMPILER.contains(reason) && origin().contains(reason), "{}", origin());
    if Nvrtc::find(None, ANY_DRIVER).is_ok() {
        assert!(image.expect("NVRTC compiles the source").0.starts_with(b"\x7fELF"));
    } else {
        let error = image.expect_err("nothing to compile with");
        assert!(error.message().contains("there is no NVRTC"), "{error}");
        assert!(error.message().contains("build flexring where NVRTC or nvcc is"), "{error}");
    }
}
