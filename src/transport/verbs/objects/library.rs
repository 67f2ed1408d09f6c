//! libibverbs, opened when a device is first used.
//!
//! Owns opening the library, its functions, and the verbs that are inline functions of `verbs.h`: those go
//! through the operations of a context, which its driver provides. One program serves machines with and
//! without RDMA, with old and new versions of rdma-core.
//!
//! Symbols are looked up with the version whose ABI `bindings.rs` describes, because libibverbs still exports
//! functions of an older ABI (`IBVERBS_1.0`) under the same names. Functions that came after `IBVERBS_1.1`
//! are optional.

use super::bindings::{
    _compat_ibv_port_attr, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device,
    ibv_device_attr, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_recv_wr,
    ibv_send_wr, ibv_wc, verbs_context,
};
use crate::error::{Error, Result};
use crate::named_file;
use crate::process::PerProcess;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void};
use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// The library's name if the settings give no other.
const NAME: &str = "libibverbs.so.1";

/// The next step for a user without the library.
const FIX: &str = "install rdma-core's libibverbs and the provider of the device (Debian: libibverbs1 and ibverbs-providers), or \
     name the library in FLEXRING_IBVERBS";

/// Defines [`Library`] from the functions' symbol versions and types.
macro_rules! functions {
    (
        required { $($needed_version:literal $needed:ident($($needed_ty:ty),*) -> $needed_result:ty;)* }
        optional { $($version:literal $name:ident($($ty:ty),*) -> $result:ty;)* }
    ) => {
        /// An open libibverbs. It is never closed.
        pub(crate) struct Library {
            /// The file, without symbolic links; `None` if the loader does not report it.
            file: Option<PathBuf>,
            $(pub(super) $needed: unsafe extern "C" fn($($needed_ty),*) -> $needed_result,)*
            $(pub(super) $name: Option<unsafe extern "C" fn($($ty),*) -> $result>,)*
        }

        impl Library {
            /// Looks up all functions. The error lists the required ones that are missing.
            ///
            /// # Safety
            /// `library` is a handle of a libibverbs, which is never closed.
            unsafe fn find(library: NonNull<c_void>) -> std::result::Result<Self, Vec<String>> {
                let mut missing = Vec::new();
                $(
                    let symbol = concat!(stringify!($needed), "\0");
                    let version = concat!($needed_version, "\0");
                    // SAFETY: the caller passes a live handle.
                    let $needed = unsafe { address(library, symbol, version) };
                    if $needed.is_none() {
                        missing.push(concat!(stringify!($needed), "@", $needed_version).to_owned());
                    }
                )*
                $(
                    let symbol = concat!(stringify!($name), "\0");
                    // SAFETY: the caller passes a live handle.
                    let $name = unsafe { address(library, symbol, concat!($version, "\0")) };
                )*
                let ($(Some($needed),)*) = ($($needed,)*) else { return Err(missing) };
                // SAFETY: each address is that of the function of this name and version, and the type is that
                // of verbs.h. With rdma-sys-check, the compiler compares the types.
                Ok(unsafe { Self {
                    file: None,
                    $($needed: std::mem::transmute::<
                        NonNull<c_void>,
                        unsafe extern "C" fn($($needed_ty),*) -> $needed_result,
                    >($needed),)*
                    $($name: std::mem::transmute::<
                        Option<NonNull<c_void>>,
                        Option<unsafe extern "C" fn($($ty),*) -> $result>,
                    >($name),)*
                } })
            }

            /// The optional functions that this library lacks, with their versions.
            pub(crate) fn missing(&self) -> Vec<&'static str> {
                let mut missing = Vec::new();
                $(if self.$name.is_none() {
                    missing.push(concat!(stringify!($name), "@", $version));
                })*
                missing
            }
        }

        /// Each type is that of rdma-sys, or this does not compile.
        #[cfg(feature = "rdma-sys-check")]
        mod same_types {
            use rdma_sys::*;
            use std::ffi::{c_char, c_int, c_uint, c_void};
            $(const _: unsafe extern "C" fn($($needed_ty),*) -> $needed_result = rdma_sys::$needed;)*
            $(const _: unsafe extern "C" fn($($ty),*) -> $result = rdma_sys::$name;)*
        }
    };
}

functions! {
    required {
        "IBVERBS_1.1" ibv_get_device_list(*mut c_int) -> *mut *mut ibv_device;
        "IBVERBS_1.1" ibv_free_device_list(*mut *mut ibv_device) -> ();
        "IBVERBS_1.1" ibv_get_device_name(*mut ibv_device) -> *const c_char;
        "IBVERBS_1.1" ibv_open_device(*mut ibv_device) -> *mut ibv_context;
        "IBVERBS_1.1" ibv_close_device(*mut ibv_context) -> c_int;
        "IBVERBS_1.1" ibv_get_async_event(*mut ibv_context, *mut ibv_async_event) -> c_int;
        "IBVERBS_1.1" ibv_ack_async_event(*mut ibv_async_event) -> ();
        "IBVERBS_1.1" ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        "IBVERBS_1.1" ibv_query_port(*mut ibv_context, u8, *mut _compat_ibv_port_attr) -> c_int;
        "IBVERBS_1.1" ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
        "IBVERBS_1.1" ibv_dealloc_pd(*mut ibv_pd) -> c_int;
        "IBVERBS_1.1" ibv_reg_mr(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        "IBVERBS_1.1" ibv_dereg_mr(*mut ibv_mr) -> c_int;
        "IBVERBS_1.0" ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
        "IBVERBS_1.0" ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
        "IBVERBS_1.1" ibv_create_cq(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        "IBVERBS_1.1" ibv_destroy_cq(*mut ibv_cq) -> c_int;
        "IBVERBS_1.1" ibv_get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        "IBVERBS_1.1" ibv_ack_cq_events(*mut ibv_cq, c_uint) -> ();
        "IBVERBS_1.1" ibv_create_qp(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        "IBVERBS_1.1" ibv_modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        "IBVERBS_1.1" ibv_destroy_qp(*mut ibv_qp) -> c_int;
    }
    optional {
        "IBVERBS_1.1" ibv_fork_init() -> c_int;
        "IBVERBS_1.8" ibv_reg_mr_iova2(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
        "IBVERBS_1.12" ibv_reg_dmabuf_mr(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
        "IBVERBS_1.13" ibv_is_fork_initialized() -> c_uint;
    }
}

/// The address of a symbol of this version.
///
/// # Safety
/// `library` is a live handle; both names end with NUL.
pub(super) unsafe fn address(
    library: NonNull<c_void>,
    symbol: &str,
    version: &str,
) -> Option<NonNull<c_void>> {
    // SAFETY: as the caller guarantees.
    NonNull::new(unsafe { libc::dlvsym(library.as_ptr(), symbol.as_ptr().cast(), version.as_ptr().cast()) })
}

impl Library {
    /// Opens the library of this name or path; `None` opens `libibverbs.so.1`. Opens each library once per
    /// process.
    ///
    /// # Errors
    /// `System`, with the loader's message or the missing functions, and the fix.
    pub(crate) fn open(name: Option<&str>) -> Result<&'static Self> {
        static OPEN: PerProcess<Mutex<BTreeMap<String, &'static Library>>> = PerProcess::new();
        let name = name.unwrap_or(NAME);
        let mut open = OPEN.get().lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = open.get(name) {
            return Ok(library);
        }
        let library: &'static Self = Box::leak(Box::new(Self::load(name)?));
        open.insert(name.to_owned(), library);
        Ok(library)
    }

    fn load(name: &str) -> Result<Self> {
        let path = CString::new(name).map_err(|_| {
            Error::invalid_setting(format!("FLEXRING_IBVERBS={name:?} cannot be used: expected a file name"))
        })?;
        // The loader would wait for the writer of a pipe.
        if name.contains('/')
            && let Err(cause) = named_file::open(name.as_ref())
            && cause.kind() == std::io::ErrorKind::InvalidInput
        {
            return Err(Error::io(format!("FLEXRING_IBVERBS={name:?} cannot be opened"), cause));
        }
        // SAFETY: opening a library runs its initializers. The user chose it, by installing or by naming it.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let Some(handle) = NonNull::new(handle) else {
            return Err(Error::system(format!("{name} cannot be opened: {}; {FIX}", loader_error())));
        };
        // SAFETY: the handle is live and is never closed. Its functions have the names and versions of
        // libibverbs.
        let found = unsafe { Self::find(handle) };
        let library = found.map_err(|missing| {
            let (first, others) = (&missing[0], missing.len() - 1);
            let others = if others > 0 { format!(" and {others} more functions") } else { String::new() };
            Error::system(format!(
                "{name} is no libibverbs that flexring can use: it has no {first}{others}; {FIX}"
            ))
        })?;
        Ok(Self { file: file_of(library.ibv_open_device as *const c_void), ..library })
    }

    /// The file that was opened, without symbolic links; `None` if the loader does not report it.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// The version in the file's name, such as `1.14.44.0`: the ABI 1.14 of rdma-core 44.0.
    pub(crate) fn version(&self) -> Option<&str> {
        let name = self.file()?.file_name()?.to_str()?;
        let (_, version) = name.split_once(".so.")?;
        // `libibverbs.so.1` alone says nothing of the version.
        version.contains('.').then_some(version)
    }

    /// Whether it has the function that registers DMA-BUFs.
    pub(crate) fn imports_dmabufs(&self) -> bool {
        self.ibv_reg_dmabuf_mr.is_some()
    }

    /// Queries a port with all attributes that the library supports; the others are 0.
    ///
    /// # Safety
    /// The context is open.
    pub(super) unsafe fn query_port(
        &self,
        context: *mut ibv_context,
        port: u8,
        attributes: &mut ibv_port_attr,
    ) -> c_int {
        // SAFETY: all zeros are valid integers.
        *attributes = unsafe { std::mem::zeroed() };
        let needed = size_of::<verbs_context>() - offset_of!(verbs_context, query_port);
        // SAFETY: the context is open. If its field says so, it is the last field of a verbs_context, of
        // which the field before it has the size; query_port is in it if it is that large.
        unsafe {
            let is_extended = (*context).abi_compat as usize == usize::MAX;
            let extended: *mut verbs_context =
                context.cast::<u8>().wrapping_sub(offset_of!(verbs_context, context)).cast();
            if is_extended
                && (*extended).sz >= needed
                && let Some(query_port) = (*extended).query_port
            {
                return query_port(context, port, attributes, size_of::<ibv_port_attr>());
            }
            (self.ibv_query_port)(context, port, std::ptr::from_mut(attributes).cast())
        }
    }
}

/// The message of the last failure of the dynamic loader on this thread.
fn loader_error() -> String {
    // SAFETY: the message is a C string that is valid until the next call of the loader on this thread.
    let message = unsafe { libc::dlerror() };
    if message.is_null() {
        return "the loader gives no reason".to_owned();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned()
}

/// The file of the library that contains this address.
fn file_of(address: *const c_void) -> Option<PathBuf> {
    // SAFETY: all zeros are a valid Dl_info: it consists of pointers.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is valid for writes; any address may be asked for.
    if unsafe { libc::dladdr(address, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the name belongs to a library that is never closed.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = Path::new(OsStr::from_bytes(name.to_bytes()));
    Some(path.canonicalize().unwrap_or_else(|_| path.to_owned()))
}

/// The errno of an operation that the driver does not have.
const NO_OPERATION: c_int = Errno::OPNOTSUPP.raw_os_error();

/// Posts send requests.
///
/// # Safety
/// As `ibv_post_send` requires.
#[inline]
pub(super) unsafe fn ibv_post_send(
    qp: *mut ibv_qp,
    first: *mut ibv_send_wr,
    bad: &mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the queue pair is alive, and so is its context.
    match unsafe { (*(*qp).context).ops.post_send } {
        // SAFETY: as the caller guarantees.
        Some(post) => unsafe { post(qp, first, bad) },
        None => NO_OPERATION,
    }
}

/// Posts receive requests.
///
/// # Safety
/// As `ibv_post_recv` requires.
#[inline]
pub(super) unsafe fn ibv_post_recv(
    qp: *mut ibv_qp,
    first: *mut ibv_recv_wr,
    bad: &mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the queue pair is alive, and so is its context.
    match unsafe { (*(*qp).context).ops.post_recv } {
        // SAFETY: as the caller guarantees.
        Some(post) => unsafe { post(qp, first, bad) },
        None => NO_OPERATION,
    }
}

/// Takes up to `count` completions; negative if the device failed.
///
/// # Safety
/// As `ibv_poll_cq` requires.
#[inline]
pub(super) unsafe fn ibv_poll_cq(cq: *mut ibv_cq, count: c_int, completions: *mut ibv_wc) -> c_int {
    // SAFETY: the queue is alive, and so is its context.
    match unsafe { (*(*cq).context).ops.poll_cq } {
        // SAFETY: as the caller guarantees.
        Some(poll) => unsafe { poll(cq, count, completions) },
        None => -NO_OPERATION,
    }
}

/// Requests an event for the next completion.
///
/// # Safety
/// The queue is alive.
#[inline]
pub(super) unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the queue is alive, and so is its context.
    match unsafe { (*(*cq).context).ops.req_notify_cq } {
        // SAFETY: as the caller guarantees.
        Some(request) => unsafe { request(cq, solicited_only) },
        None => NO_OPERATION,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(name: &str) -> String {
        match Library::open(Some(name)) {
            Err(error) => error.message().to_owned(),
            Ok(library) => panic!("{name} is taken for libibverbs: {:?}", library.file()),
        }
    }

    #[test]
    fn a_missing_library_is_an_error_with_the_loaders_reason_and_the_fix() {
        let message = refusal("/nowhere/libibverbs.so.1");
        assert!(message.starts_with("/nowhere/libibverbs.so.1 cannot be opened: "), "{message}");
        assert!(message.contains("No such file") && message.ends_with(FIX), "{message}");
    }

    #[test]
    fn another_library_is_refused_with_the_functions_that_it_lacks() {
        let message = refusal("libc.so.6");
        let start = "libc.so.6 is no libibverbs that flexring can use: it has no ibv_get_device_list@IBVERBS_1.1 and 21 more";
        assert!(message.starts_with(start), "{message}");
    }

    #[test]
    fn an_installed_library_has_all_functions_and_is_opened_once() {
        let Ok(library) = Library::open(None) else {
            println!("skipped: libibverbs is not installed");
            return;
        };
        assert!(std::ptr::eq(library, Library::open(None).expect("it is open")));
        assert!(library.version().is_none_or(|version| version.starts_with("1.")), "{:?}", library.file());
        println!("{:?} lacks {:?}", library.file(), library.missing());
    }
}
