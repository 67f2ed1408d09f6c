//! NVRTC, CUDA's compiler as a library.
//!
//! Owns the library, opened when it is first needed; without it, compiling fails with an explanation. Must
//! not know what is compiled. `build.rs` uses this file too, so it imports nothing of the crate.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::{NonNull, null_mut};

/// The result of every function: 0 for success.
type NvrtcCode = c_int;

/// File names of the library, the newest first. The version behind each name is fixed.
const NAMES: [&str; 4] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"];

/// The next step for a user without NVRTC.
pub(super) const FIX: &str = "install CUDA's NVRTC (Debian's cuda-nvrtc package, PyPI's nvidia-cuda-nvrtc, or a toolkit \
     that CUDA_HOME names), or build flexring where NVRTC or nvcc is";

/// The stack of a thread that compiles: NVRTC 13.0 was seen to exceed the 2 MiB that threads usually have.
pub(super) const STACK: usize = 64 << 20;

/// NVRTC.
#[derive(Debug)]
pub(super) struct Nvrtc {
    version: (c_int, c_int),
    /// Supported architectures, ascending; 90 is compute capability 9.0.
    architectures: Vec<u32>,
    functions: Functions,
}

/// What a source was compiled to.
pub(super) struct CompiledProgram {
    /// Empty for `compute_…`.
    pub machine_code: Vec<u8>,
    /// Ends with a NUL.
    pub ptx: Vec<u8>,
}

#[derive(Debug)]
struct Functions {
    error_string: unsafe extern "C" fn(NvrtcCode) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut *mut c_void,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> NvrtcCode,
    destroy: unsafe extern "C" fn(*mut *mut c_void) -> NvrtcCode,
    compile: unsafe extern "C" fn(*mut c_void, c_int, *const *const c_char) -> NvrtcCode,
    log_size: unsafe extern "C" fn(*mut c_void, *mut usize) -> NvrtcCode,
    log: unsafe extern "C" fn(*mut c_void, *mut c_char) -> NvrtcCode,
    cubin_size: unsafe extern "C" fn(*mut c_void, *mut usize) -> NvrtcCode,
    cubin: unsafe extern "C" fn(*mut c_void, *mut c_char) -> NvrtcCode,
    ptx_size: unsafe extern "C" fn(*mut c_void, *mut usize) -> NvrtcCode,
    ptx: unsafe extern "C" fn(*mut c_void, *mut c_char) -> NvrtcCode,
}

/// A function of an open library.
///
/// # Safety
/// `F` is the function pointer type of the library's function `name`.
unsafe fn function<F: Copy>(library: NonNull<c_void>, name: &CStr) -> Result<F, String> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) }
    // SAFETY: the library is open and is never closed.
    let symbol = unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) };
    if symbol.is_null() {
        return Err(format!("NVRTC is too old: it has no {}", name.to_string_lossy()));
    }
    // SAFETY: the caller guarantees the type, which has the size of a pointer.
    Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&symbol) })
}

/// Opens a library and never closes it.
fn open(name: &Path) -> Option<NonNull<c_void>> {
    let name = CString::new(name.as_os_str().as_bytes()).ok()?;
    // SAFETY: opening CUDA's libraries runs their initializers, which is allowed at any time.
    NonNull::new(unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) })
}

/// Opens the library in `folder`, together with its built-ins, which NVRTC does not look for there by itself.
fn open_in(folder: &Path) -> Option<NonNull<c_void>> {
    let found = NAMES.into_iter().map(|name| folder.join(name)).find(|path| path.exists())?;
    for entry in std::fs::read_dir(folder).ok()?.flatten() {
        if entry.file_name().as_bytes().starts_with(b"libnvrtc-builtins.so") {
            open(&entry.path());
        }
    }
    open(&found)
}

/// Library folders of CUDA toolkits.
fn folders() -> Vec<PathBuf> {
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let homes = homes.chain([PathBuf::from("/usr/local/cuda")]);
    homes.flat_map(|home| [home.join("lib64"), home.join("lib")]).collect()
}

impl Nvrtc {
    /// The first NVRTC of at most this major version: in `folder` if it is given, then on the loader's path,
    /// then in toolkits. A driver loads the machine code of toolkits up to its own major version.
    pub(super) fn find(folder: Option<&Path>, most: c_int) -> Result<Self, String> {
        let on_path = NAMES.into_iter().filter_map(|name| open(OsStr::new(name).as_ref()).map(Self::of));
        let in_toolkits = folders().into_iter().filter_map(|folder| Self::in_folder(&folder));
        let all = folder.and_then(Self::in_folder).into_iter().chain(on_path).chain(in_toolkits);
        let mut failure = "there is no NVRTC: libnvrtc.so is not found".to_owned();
        for nvrtc in all {
            match nvrtc {
                Ok(nvrtc) if nvrtc.major() <= most => return Ok(nvrtc),
                Ok(nvrtc) => {
                    failure = format!("NVRTC {} is too new for a driver of CUDA {most}", nvrtc.version());
                }
                Err(why) => failure = why,
            }
        }
        Err(failure)
    }

    /// The NVRTC in a folder, if there is one. The error says why it cannot be used.
    pub(super) fn in_folder(folder: &Path) -> Option<Result<Self, String>> {
        Some(Self::of(open_in(folder)?))
    }

    /// The functions of an open library.
    fn of(library: NonNull<c_void>) -> Result<Self, String> {
        // SAFETY: the types are those of nvrtc.h, with enums as integers.
        unsafe {
            let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> NvrtcCode =
                function(library, c"nvrtcVersion")?;
            let count: unsafe extern "C" fn(*mut c_int) -> NvrtcCode =
                function(library, c"nvrtcGetNumSupportedArchs")?;
            let list: unsafe extern "C" fn(*mut c_int) -> NvrtcCode =
                function(library, c"nvrtcGetSupportedArchs")?;
            let functions = Functions {
                error_string: function(library, c"nvrtcGetErrorString")?,
                create: function(library, c"nvrtcCreateProgram")?,
                destroy: function(library, c"nvrtcDestroyProgram")?,
                compile: function(library, c"nvrtcCompileProgram")?,
                log_size: function(library, c"nvrtcGetProgramLogSize")?,
                log: function(library, c"nvrtcGetProgramLog")?,
                cubin_size: function(library, c"nvrtcGetCUBINSize")?,
                cubin: function(library, c"nvrtcGetCUBIN")?,
                ptx_size: function(library, c"nvrtcGetPTXSize")?,
                ptx: function(library, c"nvrtcGetPTX")?,
            };
            let (mut major, mut minor, mut count_of_architectures) = (0, 0, 0);
            functions.check("nvrtcVersion", version(&raw mut major, &raw mut minor))?;
            functions.check("nvrtcGetNumSupportedArchs", count(&raw mut count_of_architectures))?;
            let mut architectures = vec![0; usize::try_from(count_of_architectures).unwrap_or(0)];
            functions.check("nvrtcGetSupportedArchs", list(architectures.as_mut_ptr()))?;
            let mut architectures: Vec<u32> =
                architectures.into_iter().filter_map(|number: c_int| number.try_into().ok()).collect();
            architectures.sort_unstable();
            Ok(Self { version: (major, minor), architectures, functions })
        }
    }

    /// The version, such as `12.9`.
    pub(super) fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// The major version.
    pub(super) fn major(&self) -> c_int {
        self.version.0
    }

    /// Supported architectures, ascending; 90 is compute capability 9.0.
    pub(super) fn architectures(&self) -> &[u32] {
        &self.architectures
    }

    /// Compiles the first of `files` to PTX, and for `sm_…` that to machine code. A file is a name and a
    /// text; the first one includes the others. The error contains the compiler's log.
    pub(super) fn compile(
        &self,
        files: &[(&str, &str)],
        architecture: &str,
        more: &[&str],
    ) -> Result<CompiledProgram, String> {
        let strings = |of: fn(&(&str, &str)) -> Vec<u8>| {
            let strings = files.iter().map(|file| CString::new(of(file)));
            strings.collect::<Result<Vec<_>, _>>().map_err(|_| "a source contains a NUL".to_owned())
        };
        let (names, texts) = (strings(|file| file.0.into())?, strings(|file| file.1.into())?);
        let ([name, names @ ..], [text, texts @ ..]) = (&names[..], &texts[..]) else {
            return Err("there is no source".to_owned());
        };
        let pointers = |strings: &[CString]| strings.iter().map(|text| text.as_ptr()).collect::<Vec<_>>();
        let (names, texts) = (pointers(names), pointers(texts));
        let mut program = NvrtcProgram { handle: null_mut(), functions: &self.functions };
        // SAFETY: all texts are NUL-terminated and outlive the call, which copies them; both arrays have the
        // same length.
        let code = unsafe {
            (self.functions.create)(
                &raw mut program.handle,
                text.as_ptr(),
                name.as_ptr(),
                names.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        self.functions.check("nvrtcCreateProgram", code)?;

        let options = more.iter().map(|word| (*word).to_owned());
        let options = options.chain([format!("--gpu-architecture={architecture}")]);
        let options: Vec<CString> = options.filter_map(|word| CString::new(word).ok()).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|word| word.as_ptr()).collect();
        // SAFETY: the program exists, and the options are NUL-terminated and outlive the call.
        let code =
            unsafe { (self.functions.compile)(program.handle, pointers.len() as c_int, pointers.as_ptr()) };
        if let Err(failed) = self.functions.check("nvrtcCompileProgram", code) {
            let log = program.read(self.functions.log_size, self.functions.log).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            return Err(format!("{failed}: {}", log.trim_matches(|letter| letter == '\0' || letter == '\n')));
        }
        Ok(CompiledProgram {
            machine_code: program.read(self.functions.cubin_size, self.functions.cubin)?,
            ptx: program.read(self.functions.ptx_size, self.functions.ptx)?,
        })
    }
}

impl Functions {
    /// Converts a result code to an error message.
    fn check(&self, function: &str, code: NvrtcCode) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the function accepts any code.
        let message = unsafe { (self.error_string)(code) };
        if message.is_null() {
            return Err(format!("{function} failed ({code})"));
        }
        // SAFETY: it is a string of the library, which is never freed.
        let message = unsafe { CStr::from_ptr(message) };
        Err(format!("{function} failed: {} ({code})", message.to_string_lossy()))
    }
}

/// A program that is being compiled.
struct NvrtcProgram<'a> {
    /// Null until created.
    handle: *mut c_void,
    functions: &'a Functions,
}

impl NvrtcProgram<'_> {
    /// The output that `write` produces; `size` returns its length.
    fn read(
        &self,
        size: unsafe extern "C" fn(*mut c_void, *mut usize) -> NvrtcCode,
        write: unsafe extern "C" fn(*mut c_void, *mut c_char) -> NvrtcCode,
    ) -> Result<Vec<u8>, String> {
        let mut len = 0;
        // SAFETY: the program exists, and the out-parameter is writable.
        self.functions.check("NVRTC", unsafe { size(self.handle, &raw mut len) })?;
        let mut bytes = vec![0u8; len];
        // SAFETY: the buffer has the length that the library asked for.
        self.functions.check("NVRTC", unsafe { write(self.handle, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for NvrtcProgram<'_> {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: it was created and has no other owner.
            unsafe { (self.functions.destroy)(&raw mut self.handle) };
        }
    }
}
