//! Compiles the GPU kernels to embed (feature `cuda`): machine code if there is a CUDA compiler,
//! NVRTC or nvcc. If not, only the source is embedded, which NVRTC compiles when it is first needed.

use nvrtc::Nvrtc;
use std::collections::hash_map::DefaultHasher;
use std::env;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

#[path = "src/device/cuda/nvrtc.rs"]
#[allow(unsafe_code, dead_code, reason = "it calls a C library; some of it is used at run time only")]
mod nvrtc;

/// The sources of the kernels. The first one is compiled and includes the others.
const SOURCES: [&str; 7] = [
    "kernels/collective.cu",
    "kernels/collective.h",
    "kernels/items.h",
    "kernels/transfers.h",
    "kernels/memory_order.h",
    "kernels/number.h",
    "kernels/reduce.h",
];

/// Options that give the same results as the host device. nvcc and NVRTC both accept them.
const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=false"];

/// Architectures to compile machine code for, if the compiler supports them. Machine code runs on later
/// architectures of the same generation, so sm_103 runs that of sm_100. sm_89 has conversions of 8-bit floats
/// that sm_80 lacks.
const ARCHITECTURES: [u32; 7] = [70, 75, 80, 89, 90, 100, 120];

/// Those of them to embed as PTX too, which the driver compiles further: for GPUs of a generation without
/// machine code, and for those of embedded boards, which run no machine code of other GPUs.
const PTX_ARCHITECTURES: [u32; 2] = [80, 120];

/// The only one in debug builds and tests, as each one takes a minute of processor time. Its machine code or
/// its PTX runs on all GPUs but those of sm_70 and sm_75, for which NVRTC compiles the source. A test
/// compiles some kernels for the other generations.
const DEBUG_ARCHITECTURE: u32 = 80;

/// The newest major version of CUDA whose machine code old drivers load: 12.x makes code for drivers from 525
/// on.
const PREFERRED: i32 = 12;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    println!("cargo::rerun-if-changed=src/device/cuda/nvrtc.rs");
    for source in SOURCES {
        println!("cargo::rerun-if-changed={source}");
    }
    for variable in ["FLEXRING_CUDA_KERNELS", "FLEXRING_CUDA_WHEELS", "CUDA_HOME", "CUDA_PATH"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let out = PathBuf::from(variable("OUT_DIR").expect("cargo sets OUT_DIR"));
    let choice = variable("FLEXRING_CUDA_KERNELS").unwrap_or_else(|| "auto".to_owned());
    let compiler = if choice == "nvrtc" {
        Err("flexring was built with FLEXRING_CUDA_KERNELS=nvrtc".to_owned())
    } else {
        find_compiler()
    };
    let has_compiler = compiler.is_ok();
    let all = choice == "nvcc" || variable("PROFILE").as_deref() != Some("debug");
    let compiled = compiler.and_then(|compiler| EmbeddedKernels::compile(&compiler, all, &out));
    let kernels = match (choice.as_str(), compiled) {
        ("auto" | "nvcc", Ok(kernels)) => kernels,
        ("auto" | "nvrtc", Err(why)) => {
            if choice == "auto" && has_compiler {
                println!("cargo::warning=GPU kernels are embedded as source: {why}");
            }
            EmbeddedKernels { reason: why, ..EmbeddedKernels::default() }
        }
        ("nvcc", Err(why)) => stop(&format!("FLEXRING_CUDA_KERNELS=nvcc, but {why}")),
        (other, _) => stop(&format!("FLEXRING_CUDA_KERNELS must be nvcc, nvrtc or auto, not {other:?}")),
    };
    // Constants and not variables of the compiler, which `cargo run` and `cargo test` would set for the
    // program as well.
    let origin = format!(
        "pub(super) const CHOICE: &str = {choice:?};\n\
         #[cfg(test)]\n\
         pub(super) const HAS_COMPILER: bool = {has_compiler};\n"
    );
    fs::write(out.join("kernels.rs"), kernels.to_rust() + &origin).expect("OUT_DIR can be written");
}

/// Unlike a panic, this prints no backtrace.
fn stop(message: &str) -> ! {
    eprintln!("{message}");
    std::process::exit(1)
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// The constants that `src/device/cuda/image/mod.rs` includes.
#[derive(Default)]
struct EmbeddedKernels {
    /// Architecture and file of each piece of machine code, ascending.
    code: Vec<(u32, PathBuf)>,
    ptx: Vec<(u32, PathBuf)>,
    /// Name and version of the compiler; without machine code, the reason why there is none.
    reason: String,
    /// The major version of CUDA that the compiler belongs to.
    major: i32,
}

impl EmbeddedKernels {
    /// Compiles for all architectures that the compiler supports, or for [`DEBUG_ARCHITECTURE`] only. The
    /// error says why that is not possible.
    fn compile(compiler: &Compiler, all: bool, out: &Path) -> Result<Self, String> {
        println!("cargo::rerun-if-changed={}", compiler.file().display());
        let files = SOURCES.map(|path| {
            let text = fs::read_to_string(path).map_err(|cause| format!("cannot read {path}: {cause}"))?;
            Ok((path.trim_start_matches("kernels/"), without_comments(&text)))
        });
        let files = files.into_iter().collect::<Result<Vec<_>, String>>()?;
        let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (*name, text.as_str())).collect();
        let wanted = if all { &ARCHITECTURES[..] } else { &[DEBUG_ARCHITECTURE] };
        let wanted = wanted.iter().copied().filter(|number| compiler.architectures().contains(number));
        let wanted: Vec<u32> = wanted.collect();
        if wanted.is_empty() {
            return Err(format!("{} supports none of the architectures {ARCHITECTURES:?}", compiler.name()));
        }
        let compiled = in_parallel(&wanted, |number| compile_once(out, number, compiler, &files))?;
        let paired = |at: usize| {
            let files = wanted.iter().zip(&compiled);
            files.filter_map(|(number, files)| Some((*number, files.get(at)?.clone()))).collect()
        };
        Ok(Self { code: paired(0), ptx: paired(1), reason: compiler.name(), major: compiler.major() })
    }

    fn to_rust(&self) -> String {
        let images = |files: &[(u32, PathBuf)]| {
            let images = files.iter().map(|(architecture, path)| {
                // The driver reads it in machine words.
                format!(
                    "EmbeddedImage {{ architecture: {architecture}, bytes: {{\n\
                     #[repr(align(16))]\n\
                     struct Aligned<T: ?Sized>(T);\n\
                     static BYTES: &Aligned<[u8]> = &Aligned(*include_bytes!({path:?}));\n\
                     &BYTES.0\n\
                     }} }},\n"
                )
            });
            images.collect::<String>()
        };
        let sources = SOURCES.map(|path| {
            // The sources may have moved when this is compiled: a target directory outlives the folders that
            // source distributions are unpacked to.
            format!(
                "({:?}, include_str!(concat!(env!(\"CARGO_MANIFEST_DIR\"), \"/\", {path:?}))),\n",
                path.trim_start_matches("kernels/")
            )
        });
        format!(
            "pub(super) const SOURCES: &[(&str, &str)] = &[{}];\n\
             pub(super) const OPTIONS: &[&str] = &{OPTIONS:?};\n\
             pub(super) const MACHINE_CODE: &[EmbeddedImage] = &[{}];\n\
             pub(super) const PTX: &[EmbeddedImage] = &[{}];\n\
             pub(super) const COMPILER: &str = {:?};\n\
             pub(super) const COMPILER_MAJOR: i32 = {};\n",
            sources.concat(),
            images(&self.code),
            images(&self.ptx),
            self.reason,
            self.major,
        )
    }
}

/// A source of kernels without its comments, so that a change of these costs no minutes of compiling. No
/// literal there has two slashes.
fn without_comments(source: &str) -> String {
    let code = |line: &str| format!("{}\n", line.split("//").next().unwrap_or_default().trim_end());
    source.lines().map(code).collect()
}

/// Compiles for each architecture on one of as many threads as cargo grants. The error is that of the first
/// one that failed.
fn in_parallel<T: Send>(
    architectures: &[u32],
    compile: impl Fn(u32) -> Result<T, String> + Sync,
) -> Result<Vec<T>, String> {
    let jobs = variable("NUM_JOBS").and_then(|jobs| jobs.parse().ok()).unwrap_or(1);
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(number) = architectures.get(at) else { return done };
            done.push((at, compile(*number)));
        }
    };
    let mut done = thread::scope(|scope| {
        let threads: Vec<_> = (0..architectures.len().min(jobs))
            .map(|_| thread::Builder::new().stack_size(nvrtc::STACK).spawn_scoped(scope, work))
            .collect();
        let results = threads.into_iter().map(|thread| thread.expect("a thread starts").join());
        results.flat_map(|result| result.expect("compiling does not panic")).collect::<Vec<_>>()
    });
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

/// The files with machine code and, for some architectures, PTX, cached by everything that they depend on:
/// debug and release builds, tests and lints share them.
fn compile_once(
    out: &Path,
    architecture: u32,
    compiler: &Compiler,
    files: &[(&str, &str)],
) -> Result<Vec<PathBuf>, String> {
    let has_ptx = PTX_ARCHITECTURES.contains(&architecture);
    let named = |kind| {
        let target = format!("{kind}_{architecture}");
        let mut hasher = DefaultHasher::new();
        (&target, compiler.name(), files, OPTIONS).hash(&mut hasher);
        format!("{target}-{:016x}", hasher.finish())
    };
    let names = ["sm", "compute"].into_iter().take(1 + usize::from(has_ptx)).map(named);
    let names: Vec<String> = names.collect();
    // OUT_DIR is target/PROFILE/build/PACKAGE/out.
    let shared = out.ancestors().nth(4).unwrap_or(out).join("cuda-kernels");
    // Builds for other targets and Rust versions have a folder of their own, below the usual one.
    let above = shared.ancestors().nth(2).unwrap_or(out).join("cuda-kernels");
    let within = |folder: &Path| names.iter().map(|name| folder.join(name)).collect::<Vec<_>>();
    let candidates = [within(&shared), within(&above)];
    if let Some(found) = candidates.iter().find(|files| files.iter().all(|file| file.exists())) {
        return Ok(found.clone());
    }
    let images = compiler.compile(files, architecture, has_ptx, out)?;
    let [files, _] = candidates;
    for (image, file) in images.iter().zip(&files) {
        let unfinished = out.join(format!("{architecture}.unfinished"));
        fs::create_dir_all(&shared)
            .and_then(|()| fs::write(&unfinished, image))
            .and_then(|()| fs::rename(&unfinished, file))
            .map_err(|cause| format!("cannot create {}: {cause}", file.display()))?;
    }
    Ok(files)
}

/// A compiler of CUDA's.
enum Compiler {
    Nvrtc { library: Nvrtc, folder: PathBuf },
    Nvcc { program: PathBuf, version: String, architectures: Vec<u32> },
}

impl Compiler {
    /// The nvcc at this path.
    fn nvcc(program: PathBuf) -> Option<Self> {
        if !program.is_file() {
            return None;
        }
        let version = output_of(Command::new(&program).arg("--version")).ok()?;
        let version = version.split("release ").nth(1)?.split(',').next()?.to_owned();
        let architectures = output_of(Command::new(&program).arg("--list-gpu-code")).ok()?;
        let architectures =
            architectures.lines().filter_map(|line| line.trim().strip_prefix("sm_")?.parse().ok());
        Some(Self::Nvcc { version, architectures: architectures.collect(), program })
    }

    /// Name and version.
    fn name(&self) -> String {
        match self {
            Self::Nvrtc { library, .. } => format!("NVRTC {}", library.version()),
            Self::Nvcc { version, .. } => format!("nvcc {version}"),
        }
    }

    fn major(&self) -> i32 {
        match self {
            Self::Nvrtc { library, .. } => library.major(),
            Self::Nvcc { version, .. } => {
                version.split('.').next().and_then(|major| major.parse().ok()).unwrap_or_default()
            }
        }
    }

    /// What changes when another version is installed.
    fn file(&self) -> &Path {
        match self {
            Self::Nvrtc { folder, .. } => folder,
            Self::Nvcc { program, .. } => program,
        }
    }

    fn architectures(&self) -> &[u32] {
        match self {
            Self::Nvrtc { library, .. } => library.architectures(),
            Self::Nvcc { architectures, .. } => architectures,
        }
    }

    /// Better compilers are greater: one whose machine code old drivers load, and then one for more
    /// architectures.
    fn merit(&self) -> (bool, usize) {
        let supported = ARCHITECTURES.iter().filter(|number| self.architectures().contains(number));
        (self.major() <= PREFERRED, supported.count())
    }

    /// Machine code and, if wanted, PTX, which ends with a NUL, as the driver requires.
    fn compile(
        &self,
        files: &[(&str, &str)],
        architecture: u32,
        has_ptx: bool,
        out: &Path,
    ) -> Result<Vec<Vec<u8>>, String> {
        let program = match self {
            Self::Nvrtc { library, .. } => {
                let compiled = library.compile(files, &format!("sm_{architecture}"), &OPTIONS)?;
                let images = [compiled.machine_code, compiled.ptx];
                return Ok(images.into_iter().take(1 + usize::from(has_ptx)).collect());
            }
            Self::Nvcc { program, .. } => program,
        };
        let output = out.join(format!("{architecture}.nvcc"));
        let compile = |option: &str, target: String| {
            let mut command = Command::new(program);
            command.args(OPTIONS).args([option, &format!("--gpu-architecture={target}"), SOURCES[0], "-o"]);
            output_of(command.arg(&output))?;
            fs::read(&output).map_err(|cause| format!("cannot read {}: {cause}", output.display()))
        };
        let mut images = vec![compile("--cubin", format!("sm_{architecture}"))?];
        if has_ptx {
            let mut ptx = compile("--ptx", format!("compute_{architecture}"))?;
            ptx.push(0);
            images.push(ptx);
        }
        Ok(images)
    }
}

/// The best compiler in CUDA_HOME, CUDA_PATH, PATH, the wheels that `make setup-cuda` installs, and where
/// NVRTC is usually installed; of equal ones the first.
fn find_compiler() -> Result<Compiler, String> {
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    let path = env::var_os("PATH").unwrap_or_default();
    let programs = env::split_paths(&path).map(|folder| folder.join("nvcc"));
    let programs: Vec<PathBuf> = homes.clone().map(|home| home.join("bin/nvcc")).chain(programs).collect();
    let root = PathBuf::from(variable("CARGO_MANIFEST_DIR").unwrap_or_default());
    let wheels =
        variable("FLEXRING_CUDA_WHEELS").map_or_else(|| root.join("target/cuda-toolkit"), PathBuf::from);
    let beside = programs.iter().filter(|program| program.is_file());
    let beside = beside.filter_map(|program| Some(program.parent()?.parent()?.to_owned()));
    let libraries = homes.chain(beside).chain([PathBuf::from("/usr/local/cuda")]);
    let libraries = libraries.flat_map(|home| [home.join("lib64"), home.join("lib")]);

    let nvrtc = |folder: PathBuf| Some(Compiler::Nvrtc { library: Nvrtc::in_folder(&folder)?.ok()?, folder });
    let found = libraries.chain(in_wheels(&wheels)).filter_map(nvrtc);
    let found = found.chain(programs.iter().cloned().filter_map(Compiler::nvcc));
    let best = found.reduce(|best, other| if other.merit() > best.merit() { other } else { best });
    best.ok_or_else(|| {
        "there is neither NVRTC nor nvcc in CUDA_HOME, CUDA_PATH, PATH or target/cuda-toolkit (make setup-cuda)"
            .to_owned()
    })
}

/// Where PyPI's wheels install NVRTC, in a folder of `pip install --target` or in a virtual environment.
fn in_wheels(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder.join("lib")).into_iter().flatten().flatten();
    let sites = entries.map(|entry| entry.path().join("site-packages")).chain([folder.to_owned()]);
    let toolkits = ["nvidia/cuda_nvrtc/lib", "nvidia/cu13/lib"];
    sites.flat_map(|site| toolkits.map(|toolkit| site.join(toolkit))).collect()
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
