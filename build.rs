//! Names the shared library, and compiles the GPU kernels to embed (feature `cuda`): machine code if there is an nvcc. If not,
//! only the source is embedded, which NVRTC compiles when it is first needed.

use std::collections::hash_map::DefaultHasher;
use std::env;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The sources of the kernels. The first one is compiled and includes the others.
const SOURCES: [&str; 3] = ["kernels/reduce.cu", "kernels/number.h", "kernels/batch.h"];

/// Architectures to compile machine code for, if nvcc supports them. Machine code runs on all later architectures of the same
/// generation, so sm_86 and sm_87 run that of sm_80. sm_89 has conversions of 8-bit floats that sm_80 lacks.
const ARCHITECTURES: [u32; 7] = [70, 75, 80, 89, 90, 100, 120];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    name_shared_library();
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for source in SOURCES {
        println!("cargo::rerun-if-changed={source}");
    }
    for variable in ["FLEXRING_CUDA_KERNELS", "FLEXRING_CUDA_WHEELS", "CUDA_HOME", "CUDA_PATH"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let out = PathBuf::from(variable("OUT_DIR").expect("cargo sets OUT_DIR"));
    let choice = variable("FLEXRING_CUDA_KERNELS").unwrap_or_else(|| "auto".to_owned());
    let nvcc = find_nvcc();
    // Tests check that what is embedded follows from these two.
    println!("cargo::rustc-env=FLEXRING_BUILD_CUDA_KERNELS={choice}");
    println!("cargo::rustc-env=FLEXRING_BUILD_HAS_NVCC={}", nvcc.is_ok());
    let compiled = match choice.as_str() {
        "nvrtc" => Err("flexring was built with FLEXRING_CUDA_KERNELS=nvrtc".to_owned()),
        "nvcc" => Ok(nvcc.and_then(|nvcc| machine_code(&nvcc, &out)).unwrap_or_else(|why| {
            // Unlike a panic, this prints no backtrace.
            eprintln!("FLEXRING_CUDA_KERNELS=nvcc, but {why}");
            std::process::exit(1)
        })),
        "auto" => nvcc.and_then(|nvcc| machine_code(&nvcc, &out)),
        other => {
            eprintln!("FLEXRING_CUDA_KERNELS must be nvcc, nvrtc or auto, not {other:?}");
            std::process::exit(1)
        }
    };
    let kernels = match compiled {
        Ok(kernels) => kernels,
        Err(why) => {
            if choice == "auto" && !why.starts_with("there is no nvcc") {
                println!("cargo::warning=GPU kernels are embedded as source: {why}");
            }
            EmbeddedKernels { code: None, architectures: Vec::new(), compiler: why }
        }
    };
    fs::write(out.join("kernels.rs"), kernels.to_rust()).expect("OUT_DIR can be written");
}

/// Sets the SONAME of `libflexring.so` to the name with the major version of the ABI, which is the crate's.
fn name_shared_library() {
    if variable("CARGO_CFG_TARGET_OS").as_deref() == Some("linux") {
        let major = variable("CARGO_PKG_VERSION_MAJOR").expect("cargo sets the version");
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libflexring.so.{major}");
    }
}

/// The constants that `src/device/cuda/image.rs` includes.
struct EmbeddedKernels {
    /// The file with the machine code, if there is any.
    code: Option<PathBuf>,
    architectures: Vec<u32>,
    /// Name and version of the compiler; without machine code, the reason why there is none.
    compiler: String,
}

impl EmbeddedKernels {
    fn to_rust(&self) -> String {
        let code = self.code.as_ref().map_or("None".to_owned(), |path| {
            // The driver reads it in machine words.
            format!(
                "Some({{\n\
                 #[repr(align(16))]\n\
                 struct Aligned<T: ?Sized>(T);\n\
                 static CODE: &Aligned<[u8]> = &Aligned(*include_bytes!({path:?}));\n\
                 &CODE.0\n\
                 }})"
            )
        });
        format!(
            "const MACHINE_CODE: Option<&[u8]> = {code};\n\
             const ARCHITECTURES: &[u32] = &{:?};\n\
             const COMPILER: &str = {:?};\n",
            self.architectures, self.compiler
        )
    }
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// Compiles the kernels for all architectures into one file. The error says why that is not possible.
fn machine_code(nvcc: &Path, out: &Path) -> Result<EmbeddedKernels, String> {
    println!("cargo::rerun-if-changed={}", nvcc.display());
    let version = output_of(Command::new(nvcc).arg("--version"))?;
    let supported = output_of(Command::new(nvcc).arg("--list-gpu-code"))?;
    let supported: Vec<u32> =
        supported.lines().filter_map(|line| line.trim().strip_prefix("sm_")?.parse().ok()).collect();
    let architectures: Vec<u32> =
        ARCHITECTURES.into_iter().filter(|number| supported.contains(number)).collect();
    let Some(oldest) = architectures.first() else {
        return Err(format!("{} supports none of the architectures {ARCHITECTURES:?}", nvcc.display()));
    };

    let release =
        version.split("release ").nth(1).and_then(|rest| rest.split(',').next()).unwrap_or("unknown");

    let mut arguments: Vec<String> =
        ["-std=c++17", "--fmad=false", "--fatbin", "-t0"].map(str::to_owned).to_vec();
    // Compression saves 10 MB. The drivers that run code of older toolkits may not support it.
    if release.split('.').next().and_then(|major| major.parse().ok()).is_some_and(|major: u32| major >= 13) {
        arguments.push("--compress-mode=size".to_owned());
    }
    for number in &architectures {
        arguments.extend(["-gencode".to_owned(), format!("arch=compute_{number},code=sm_{number}")]);
    }
    // PTX, which the driver compiles for newer GPUs.
    arguments.extend(["-gencode".to_owned(), format!("arch=compute_{oldest},code=compute_{oldest}")]);
    arguments.push(SOURCES[0].to_owned());

    let file = compile_once(out, &(&version, &arguments), |file| {
        output_of(Command::new(nvcc).args(&arguments).arg("-o").arg(file)).map(|_| ())
    })?;
    Ok(EmbeddedKernels { code: Some(file), architectures, compiler: format!("nvcc {release}") })
}

/// The file that `compile` writes, cached by the sources and `options`: debug and release builds, tests and lints share it.
fn compile_once(
    out: &Path,
    options: &impl Hash,
    compile: impl Fn(&Path) -> Result<(), String>,
) -> Result<PathBuf, String> {
    let mut hasher = DefaultHasher::new();
    options.hash(&mut hasher);
    for source in SOURCES {
        fs::read(source).map_err(|cause| format!("cannot read {source}: {cause}"))?.hash(&mut hasher);
    }
    // OUT_DIR is target/PROFILE/build/PACKAGE/out.
    let shared = out.ancestors().nth(4).unwrap_or(out).join("cuda-kernels");
    fs::create_dir_all(&shared).map_err(|cause| format!("cannot create {}: {cause}", shared.display()))?;
    let file = shared.join(format!("{:016x}.fatbin", hasher.finish()));
    if !file.exists() {
        let unfinished = out.join("unfinished.fatbin");
        compile(&unfinished)?;
        fs::rename(&unfinished, &file)
            .map_err(|cause| format!("cannot create {}: {cause}", file.display()))?;
    }
    Ok(file)
}

/// The first nvcc in CUDA_HOME, CUDA_PATH, PATH and the wheels that `make setup-cuda` installs.
fn find_nvcc() -> Result<PathBuf, String> {
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os);
    let homes = homes.map(|home| PathBuf::from(home).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let candidates = homes.chain(env::split_paths(&path)).map(|folder| folder.join("nvcc"));
    let root = PathBuf::from(variable("CARGO_MANIFEST_DIR").unwrap_or_default());
    let wheels =
        variable("FLEXRING_CUDA_WHEELS").map_or_else(|| root.join("target/cuda-toolkit"), PathBuf::from);
    let found = candidates.chain(in_wheels(&wheels)).find(|candidate| candidate.is_file());
    found.ok_or_else(|| {
        "there is no nvcc in CUDA_HOME, CUDA_PATH, PATH or target/cuda-toolkit (make setup-cuda)".to_owned()
    })
}

/// Where PyPI's wheels install nvcc, in a folder of `pip install --target` or in a virtual environment.
fn in_wheels(folder: &Path) -> Vec<PathBuf> {
    let entries = |folder: PathBuf, prefix: &'static str| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let entries = entries.filter(move |entry| entry.file_name().to_string_lossy().starts_with(prefix));
        entries.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let sites = entries(folder.join("lib"), "python").into_iter().map(|python| python.join("site-packages"));
    let sites = std::iter::once(folder.to_owned()).chain(sites);
    sites
        .flat_map(|site| entries(site.join("nvidia"), "cu1"))
        .map(|toolkit| toolkit.join("bin/nvcc"))
        .collect()
}

/// The standard output of a command. If the command fails, its first error line.
fn output_of(command: &mut Command) -> Result<String, String> {
    let program = Path::new(command.get_program()).display().to_string();
    let output = command.output().map_err(|cause| format!("cannot run {program}: {cause}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let line = errors
        .lines()
        .find(|line| line.contains("error") || line.contains("fatal"))
        .or(errors.lines().next());
    Err(format!("{program} failed: {}", line.unwrap_or("no error message").trim()))
}
