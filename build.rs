//! Makes what is embedded of the GPU kernels (feature `cuda`): machine code, where there is an nvcc, else nothing, and
//! NVRTC compiles their source when it is first needed.

use std::collections::hash_map::DefaultHasher;
use std::env;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the kernels are made of; the first is what is compiled.
const SOURCES: [&str; 3] = ["kernels/reduce.cu", "kernels/number.h", "kernels/batch.h"];

/// Architectures that get machine code of their own, where nvcc knows them. That for one runs on all of its generation
/// that are not older, so sm_86 and sm_87 run sm_80's. sm_89 has conversions of eight bits that sm_80 lacks.
const ARCHITECTURES: [u32; 7] = [70, 75, 80, 89, 90, 100, 120];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for source in SOURCES {
        println!("cargo:rerun-if-changed={source}");
    }
    for variable in ["FLEXRING_CUDA_KERNELS", "FLEXRING_CUDA_WHEELS", "CUDA_HOME", "CUDA_PATH"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    let out = PathBuf::from(variable("OUT_DIR").expect("cargo says where to write"));
    let choice = variable("FLEXRING_CUDA_KERNELS").unwrap_or_else(|| "auto".to_owned());
    let made = match choice.as_str() {
        "nvrtc" => Err("it was built so (FLEXRING_CUDA_KERNELS=nvrtc)".to_owned()),
        "nvcc" => Ok(machine_code(&out).unwrap_or_else(|why| {
            // Cargo shows this in red, and no backtrace.
            eprintln!("FLEXRING_CUDA_KERNELS=nvcc, but {why}");
            std::process::exit(1)
        })),
        "auto" => machine_code(&out),
        other => {
            eprintln!("FLEXRING_CUDA_KERNELS is nvcc, nvrtc or auto, not {other:?}");
            std::process::exit(1)
        }
    };
    let constants = match made {
        Ok(made) => made,
        Err(why) => {
            if choice == "auto" && !why.starts_with("there is no nvcc") {
                println!("cargo:warning=GPU kernels are embedded as source: {why}");
            }
            Made { code: None, architectures: Vec::new(), compiler: why }
        }
    };
    fs::write(out.join("kernels.rs"), constants.to_rust()).expect("OUT_DIR can be written");
}

/// What `src/device/cuda/image.rs` includes.
struct Made {
    /// The file with the machine code.
    code: Option<PathBuf>,
    architectures: Vec<u32>,
    /// What made it; without machine code, why there is none.
    compiler: String,
}

impl Made {
    fn to_rust(&self) -> String {
        let code = self.code.as_ref().map_or("None".to_owned(), |path| {
            // Drivers read it in words.
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

/// Compiles the kernels into one file for all architectures; says why not.
fn machine_code(out: &Path) -> Result<Made, String> {
    let nvcc = nvcc()?;
    println!("cargo:rerun-if-changed={}", nvcc.display());
    let version = said_by(Command::new(&nvcc).arg("--version"))?;
    let known = said_by(Command::new(&nvcc).arg("--list-gpu-code"))?;
    let known: Vec<u32> =
        known.lines().filter_map(|line| line.trim().strip_prefix("sm_")?.parse().ok()).collect();
    let architectures: Vec<u32> = ARCHITECTURES.into_iter().filter(|number| known.contains(number)).collect();
    let Some(oldest) = architectures.first() else {
        return Err(format!("{} compiles for none of sm_{ARCHITECTURES:?}", nvcc.display()));
    };

    let release =
        version.split("release ").nth(1).and_then(|rest| rest.split(',').next()).unwrap_or("unknown");

    let mut words: Vec<String> =
        ["-std=c++17", "--fmad=false", "--fatbin", "-t0"].map(str::to_owned).to_vec();
    // The drivers that older toolkits' code runs on need not know how it is compressed; there are 10 MB otherwise.
    if release.split('.').next().and_then(|major| major.parse().ok()).is_some_and(|major: u32| major >= 13) {
        words.push("--compress-mode=size".to_owned());
    }
    for number in &architectures {
        words.extend(["-gencode".to_owned(), format!("arch=compute_{number},code=sm_{number}")]);
    }
    // What newer GPUs' drivers compile from.
    words.extend(["-gencode".to_owned(), format!("arch=compute_{oldest},code=compute_{oldest}")]);
    words.push(SOURCES[0].to_owned());

    let file = made_once(out, &(&version, &words), |file| {
        said_by(Command::new(&nvcc).args(&words).arg("-o").arg(file)).map(|_| ())
    })?;
    Ok(Made { code: Some(file), architectures, compiler: format!("nvcc {release}") })
}

/// The file that `make` writes, unless one of the same sources and `how` is there already: debug and release builds,
/// tests and lints all need the same.
fn made_once(
    out: &Path,
    how: &impl Hash,
    make: impl Fn(&Path) -> Result<(), String>,
) -> Result<PathBuf, String> {
    let mut hasher = DefaultHasher::new();
    how.hash(&mut hasher);
    for source in SOURCES {
        fs::read(source).map_err(|cause| format!("{source} cannot be read: {cause}"))?.hash(&mut hasher);
    }
    // OUT_DIR is target/PROFILE/build/PACKAGE/out.
    let shared = out.ancestors().nth(4).unwrap_or(out).join("cuda-kernels");
    fs::create_dir_all(&shared).map_err(|cause| format!("{} cannot be made: {cause}", shared.display()))?;
    let file = shared.join(format!("{:016x}.fatbin", hasher.finish()));
    if !file.exists() {
        let unfinished = out.join("unfinished.fatbin");
        make(&unfinished)?;
        fs::rename(&unfinished, &file)
            .map_err(|cause| format!("{} cannot be made: {cause}", file.display()))?;
    }
    Ok(file)
}

/// The first nvcc of CUDA_HOME, CUDA_PATH, PATH and the wheels that `make setup-cuda` installs.
fn nvcc() -> Result<PathBuf, String> {
    let named = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os);
    let named = named.map(|home| PathBuf::from(home).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let candidates = named.chain(env::split_paths(&path)).map(|folder| folder.join("nvcc"));
    let root = PathBuf::from(variable("CARGO_MANIFEST_DIR").unwrap_or_default());
    let wheels =
        variable("FLEXRING_CUDA_WHEELS").map_or_else(|| root.join("target/cuda-toolkit"), PathBuf::from);
    let found = candidates.chain(in_wheels(&wheels)).find(|candidate| candidate.is_file());
    found.ok_or_else(|| {
        "there is no nvcc in CUDA_HOME, CUDA_PATH, PATH or target/cuda-toolkit (make setup-cuda)".to_owned()
    })
}

/// Where PyPI's wheels put nvcc, in a folder of `pip install --target` or in a virtual environment.
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

/// What a command printed; if it failed, the first line that tells why.
fn said_by(command: &mut Command) -> Result<String, String> {
    let program = Path::new(command.get_program()).display().to_string();
    let output = command.output().map_err(|cause| format!("{program} cannot be run: {cause}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let line =
        said.lines().find(|line| line.contains("error") || line.contains("fatal")).or(said.lines().next());
    Err(format!("{program} failed: {}", line.unwrap_or("it says nothing").trim()))
}
