//! What one communicator has on one GPU.
//!
//! Owns how its parts are put together, and what is refused before anything is launched. Must not know calls.

use super::control::Control;
use super::kernel_kind::KernelKind;
use super::kernels::GpuKernels;
use crate::device::cuda::objects::Gpu;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Piece;
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use std::path::Path;
use std::sync::Arc;

/// The sizes of an engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineParts {
    /// The largest number of CTAs of a call.
    pub ctas: u32,
    /// Bytes of the longest small message.
    pub small: usize,
    /// Whether no other kernel needs the GPU, so that a call may fill it.
    pub alone: bool,
}

/// Control memory, kernels and staging memory of one communicator on one GPU.
pub(crate) struct GpuEngine {
    pub(super) gpu: Arc<Gpu>,
    pub(super) kernels: Arc<GpuKernels>,
    pub(super) control: Arc<Control>,
    parts: EngineParts,
}

impl GpuEngine {
    /// An engine on this GPU. The first one of a process loads the kernels. Calls the driver, which may wait
    /// for running kernels, so no kernel may depend on the thread.
    ///
    /// # Errors
    /// `Unsupported` if the GPU or the system cannot run resident kernels; `System` if there is too little
    /// memory.
    pub(crate) fn new(gpu: &Arc<Gpu>, parts: EngineParts) -> Result<Arc<Self>> {
        check_system(
            std::fs::read_to_string("/proc/version").ok().as_deref(),
            Path::new("/dev/dxg").exists(),
        )?;
        let limited = Attribute::CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT;
        if gpu.driver().attribute(gpu.ordinal as usize, limited)? != 0 {
            log::warn!(
                "{gpu:?} has a time limit for kernels, because it drives a display: a call that waits longer for other ranks fails; \
                 use a GPU without a display"
            );
        }
        let kernels = GpuKernels::of(gpu, parts.small)?;
        let control = Control::new(gpu, parts.small)?;
        kernels.add_user();
        Ok(Arc::new(Self { gpu: Arc::clone(gpu), kernels, control, parts }))
    }

    /// Host memory for the input and the output of a small message, of this many bytes. Valid while a
    /// communicator uses it.
    ///
    /// # Panics
    /// If one of them is longer than [`EngineParts::small`].
    pub(crate) fn staging(&self, input: usize, output: usize) -> (Piece, Piece) {
        self.control.staging(input, output).expect("small messages fit the staging memory")
    }

    /// Waits until every kernel that was launched has ended, but no longer than a second. `false` if one has
    /// not: then the memory that calls named must never be freed. Calls no function of the driver.
    pub(crate) fn wait_ended(&self) -> bool {
        self.control.wait_launched()
    }

    /// CTAs of a collective of any type that the GPU holds at a time.
    pub(crate) fn resident_collectives(&self) -> u32 {
        let of = |dtype: DType| self.kernels.resident(KernelKind::Collective(dtype));
        DType::ALL.into_iter().map(of).min().unwrap_or(1)
    }

    /// The number of CTAs of a call.
    pub(super) fn ctas(&self, kind: KernelKind) -> u32 {
        if self.parts.alone {
            return self.parts.ctas.min(self.kernels.resident(kind));
        }
        self.kernels.ctas(kind, self.parts.ctas)
    }
}

impl Drop for GpuEngine {
    fn drop(&mut self) {
        self.kernels.remove_user();
    }
}

impl std::fmt::Debug for GpuEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GpuEngine({:?}, {:?})", self.gpu, self.parts)
    }
}

/// Refuses systems where a kernel need not start without further calls of the driver.
fn check_system(version: Option<&str>, has_dxg: bool) -> Result<()> {
    let is_wsl = has_dxg || version.is_some_and(|version| version.to_ascii_lowercase().contains("microsoft"));
    if is_wsl {
        let message = "WSL2 cannot run calls on GPU memory: its driver launches kernels in batches, so a kernel may never start; \
                       use Linux, or keep the data on the host";
        return Err(Error::unsupported(message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wsl_is_refused() {
        assert!(check_system(Some("Linux version 6.8.0-45-generic (buildd@lcy02)"), false).is_ok());
        assert!(check_system(None, false).is_ok());
        assert!(check_system(Some("Linux version 5.15.153.1-microsoft-standard-WSL2"), false).is_err());
        let error = check_system(None, true).expect_err("the device of WSL2");
        assert!(error.message().contains("WSL2"), "{error:?}");
    }
}
