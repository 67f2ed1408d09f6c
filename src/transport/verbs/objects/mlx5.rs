//! libmlx5, for what its adapters can do besides verbs: Data Direct, by which ConnectX-8 reaches GPU memory
//! over PCI Express where a processor's link is the usual way.
//!
//! Owns opening the library.

use super::bindings::{ibv_context, ibv_mr, ibv_pd};
use super::library::address;
use crate::process::PerProcess;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;

/// The flag of a region that the adapter accesses by Data Direct.
pub(super) const DATA_DIRECT: c_int = 1;

type RegisterDmabuf = unsafe extern "C" fn(*mut ibv_pd, u64, usize, u64, c_int, c_int, c_int) -> *mut ibv_mr;
type DataDirectPath = unsafe extern "C" fn(*mut ibv_context, *mut c_char, usize) -> c_int;

/// Its functions. It is never closed.
#[derive(Clone, Copy)]
pub(super) struct Mlx5 {
    pub(super) register_dmabuf: RegisterDmabuf,
    data_direct_path: DataDirectPath,
}

impl Mlx5 {
    /// The library, if it is installed and new enough (rdma-core 54).
    pub(super) fn get() -> Option<Self> {
        static OPEN: PerProcess<OnceLock<Option<Mlx5>>> = PerProcess::new();
        *OPEN.get().get_or_init(Self::open)
    }

    fn open() -> Option<Self> {
        const VERSION: &str = "MLX5_1.25\0";
        // SAFETY: opening a library runs its initializers. libibverbs opens the same one as a provider.
        let handle = unsafe { libc::dlopen(c"libmlx5.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let handle = NonNull::new(handle)?;
        // SAFETY: the handle is live, and the functions have these types in this version.
        unsafe {
            let register = address(handle, "mlx5dv_reg_dmabuf_mr\0", VERSION)?;
            let path = address(handle, "mlx5dv_get_data_direct_sysfs_path\0", VERSION)?;
            Some(Self {
                register_dmabuf: std::mem::transmute::<NonNull<c_void>, RegisterDmabuf>(register),
                data_direct_path: std::mem::transmute::<NonNull<c_void>, DataDirectPath>(path),
            })
        }
    }

    /// Whether an adapter has Data Direct.
    ///
    /// # Safety
    /// The context is open.
    pub(super) unsafe fn has_data_direct(self, context: *mut ibv_context) -> bool {
        let mut path = [0; 256];
        // SAFETY: as the caller guarantees, and the text is as long as it says. Other vendors' are refused.
        unsafe { (self.data_direct_path)(context, path.as_mut_ptr(), path.len()) == 0 }
    }
}
