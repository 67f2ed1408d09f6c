//! Protection of registered memory when this process forks.
//!
//! Owns whether libibverbs must protect it. Before Linux 5.12, a fork shares pinned pages with the child
//! until one of the two writes to them: then this process gets a copy, and devices go on using the old page.
//! If libibverbs was initialized for that, it excludes registered memory from forked children. Later kernels
//! copy pinned pages at the fork.

use super::bindings::{IBV_FORK_ENABLED, IBV_FORK_UNNEEDED};
use super::library::Library;
use super::shim::Shim;
use super::verb::{CallSite, Verb, failed};
use crate::error::Result;
use crate::process::PerProcess;
use rustix::io::Errno;
use std::sync::{Mutex, PoisonError};

/// Initializes libibverbs for forks, unless it is or the kernel does not need it. Called before memory is
/// registered on a device.
///
/// # Errors
/// `System` if it refuses, as it does if another library of this process has registered memory before.
pub(super) fn protect(library: &Library, device: &str, shim: &Shim) -> Result<()> {
    /// libibverbs does not lock what it initializes.
    static INITIALIZING: PerProcess<Mutex<()>> = PerProcess::new();
    let _one = INITIALIZING.get().lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: it only asks the kernel.
    let reported = || library.ibv_is_fork_initialized.map(|status| unsafe { status() });
    if !is_needed(shim.fork_status().or_else(reported)) {
        return Ok(());
    }
    let site = CallSite { device: device.to_owned(), ..CallSite::default() };
    let errno = match (shim.injected_errno(Verb::ForkInit), library.ibv_fork_init) {
        (Some(errno), _) => errno,
        // SAFETY: the lock is held, so that no other thread of this library calls it at the same time.
        (None, Some(initialize)) => unsafe { initialize() },
        (None, None) => Errno::NOSYS.raw_os_error(),
    };
    if errno == 0 { Ok(()) } else { Err(failed(Verb::ForkInit, &site, errno)) }
}

/// Whether libibverbs must be initialized, if it reports this `ibv_fork_status`. Versions before rdma-core 35
/// report none.
fn is_needed(status: Option<u32>) -> bool {
    !matches!(status, Some(IBV_FORK_ENABLED | IBV_FORK_UNNEEDED))
}

#[cfg(test)]
mod tests {
    use super::super::bindings::IBV_FORK_DISABLED;
    use super::*;
    use crate::error::Error;

    #[test]
    fn old_kernels_and_old_libraries_need_protection() {
        assert!(is_needed(Some(IBV_FORK_DISABLED)), "a kernel before 5.12");
        assert!(is_needed(None), "a library before rdma-core 35");
        assert!(!is_needed(Some(IBV_FORK_ENABLED)), "another library of this process initialized it");
        assert!(!is_needed(Some(IBV_FORK_UNNEEDED)));
    }

    #[test]
    fn an_old_kernel_is_protected_or_the_error_says_how() {
        let Ok(library) = Library::open(None) else {
            println!("skipped: libibverbs is not installed");
            return;
        };
        let refusing = || Shim::failing(Verb::ForkInit, 0, Errno::INVAL.raw_os_error());
        let old = refusing().on_old_kernel();
        let error = protect(library, "mlx5_0", &old).expect_err("it is called where it is needed");
        let check = |error: Error| {
            assert!(error.message().starts_with("ibv_fork_init failed on mlx5_0: Invalid"), "{error}");
            assert!(error.message().ends_with("set RDMAV_FORK_SAFE=1"), "{error}");
        };
        check(error);
        // The library initializes itself, unless another test of this process has registered memory.
        let _ = protect(library, "mlx5_0", &old).map_err(check);

        let new = refusing().on_new_kernel();
        protect(library, "mlx5_0", &new).expect("nothing is called");
        assert!(!new.triggered());
    }
}
