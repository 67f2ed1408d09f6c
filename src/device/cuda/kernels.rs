//! The kernels of one GPU, loaded once in a process.
//!
//! Owns the module, which is never unloaded, how many CTAs of each kernel the GPU holds, how many
//! communicators share it, and how a kernel is launched. Must not know calls.

use crate::cuda_driver::{
    DriverError, DriverHandle, DriverResult, INVALID_VALUE, LaunchAttribute, LaunchConfig, NOT_SUPPORTED,
};
use crate::device::cuda::collective::CollectiveParameters;
use crate::device::cuda::image;
use crate::device::cuda::objects::{Gpu, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};
use cudarc::driver::sys::{
    CUdevice_attribute as Attribute, CUfunction_attribute, CUlaunchAttributeID, CUlaunchMemSyncDomain,
};
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Threads of a CTA, at most: `kMaxThreads` in kernels/reduce.h.
const THREADS: u32 = 512;
/// The first version of the driver that has memory-synchronization domains.
const DOMAINS_SINCE: u32 = 12_000;
/// The first compute capability that has them.
const DOMAINS_FROM: (u32, u32) = (9, 0);

/// A kernel.
struct KernelFunction {
    raw: DriverHandle,
    /// CTAs of it that the whole GPU holds at a time.
    resident: u32,
}

/// The kernels of one GPU.
pub(super) struct GpuKernels {
    gpu: Arc<Gpu>,
    /// By type.
    functions: Vec<KernelFunction>,
    /// The attributes of a launch; `None` if the driver has none.
    attributes: Option<Vec<LaunchAttribute>>,
    /// Communicators of this process that use the GPU.
    users: AtomicUsize,
}

// SAFETY: functions may be launched from any thread; the driver locks.
unsafe impl Send for GpuKernels {}
// SAFETY: as above.
unsafe impl Sync for GpuKernels {}

/// The kernels of all GPUs that this process uses. They keep the GPUs' contexts.
static LOADED: Mutex<Vec<Arc<GpuKernels>>> = Mutex::new(Vec::new());

impl GpuKernels {
    /// The kernels of a GPU. The first call for a context loads them and launches each once, so that no
    /// later launch loads anything: that would wait for kernels that run.
    ///
    /// # Errors
    /// `Unsupported` if the GPU cannot run them; `System` if it fails.
    pub(super) fn of(gpu: &Arc<Gpu>) -> Result<Arc<Self>> {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        // A module ends with its context.
        loaded.retain(|kernels| kernels.gpu.is_alive());
        if let Some(known) = loaded.iter().find(|kernels| kernels.gpu.ordinal == gpu.ordinal) {
            return Ok(Arc::clone(known));
        }
        let mut new = Self::load(gpu)?;
        new.launch_all_once()?;
        let new = Arc::new(new);
        loaded.push(Arc::clone(&new));
        Ok(new)
    }

    fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let driver = gpu.driver();
        let _entered = gpu.enter()?;
        // It is never unloaded.
        let module = load_module(gpu)?;
        let processors =
            driver.attribute(gpu.ordinal as usize, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let mut functions = Vec::new();
        for dtype in DType::ALL {
            let name = image::symbol(dtype);
            let named = |failure: DriverError| {
                Error::internal(format!("the kernel {} cannot be used: {failure}", name.to_string_lossy()))
            };
            let (mut raw, mut local, mut blocks) = (null_mut(), 0, 0);
            // SAFETY: the out-parameters are writable, and the module is live.
            unsafe {
                driver.module_function(&raw mut raw, module, name.as_ptr()).map_err(named)?;
                let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES as c_uint;
                driver.function_attribute(&raw mut local, attribute, raw).map_err(named)?;
                driver.resident_blocks(&raw mut blocks, raw, THREADS as c_int, 0).map_err(named)?;
            }
            if local != 0 {
                // The driver would allocate it at a launch, and wait for running kernels.
                let message = format!(
                    "the kernel {} uses {local} bytes of local memory on {gpu:?}: please report this",
                    name.to_string_lossy()
                );
                return Err(Error::unsupported(message));
            }
            let resident = (processors.unsigned_abs() * blocks.unsigned_abs()).max(1);
            functions.push(KernelFunction { raw, resident });
        }
        Ok(Self { gpu: Arc::clone(gpu), functions, attributes: attributes(gpu)?, users: AtomicUsize::new(0) })
    }

    /// Launches each kernel once as launch 0, which returns at once, and waits for them.
    fn launch_all_once(&mut self) -> Result<()> {
        let stream = Stream::new(&self.gpu)?;
        let entered = self.gpu.enter()?;
        for dtype in DType::ALL {
            // SAFETY: the stream is live. Launch 0 accesses nothing.
            let launch = |kernels: &Self| unsafe {
                kernels.launch(dtype, [1, 32], stream.raw(), &CollectiveParameters::default())
            };
            match launch(self) {
                Err(DriverError { code: Some(INVALID_VALUE | NOT_SUPPORTED), .. })
                    if self.attributes.is_some() =>
                {
                    log::info!("{:?} launches kernels without attributes: the driver refuses them", self.gpu);
                    self.attributes = None;
                    launch(self)?;
                }
                launched => launched?,
            }
        }
        stream
            .synchronize()
            .map_err(|failure| Error::from(failure).context("the first launch of kernels"))?;
        drop(entered);
        Ok(())
    }

    /// Adds a communicator that uses the GPU.
    pub(super) fn add_user(&self) {
        self.users.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes one.
    pub(super) fn remove_user(&self) {
        self.users.fetch_sub(1, Ordering::Relaxed);
    }

    /// The number of CTAs of a launch: `wanted`, or an equal part of half the CTAs that the GPU holds, if
    /// that is less. The other half is left to other kernels, so that the CTAs of all communicators can run
    /// at the same time.
    pub(super) fn ctas(&self, dtype: DType, wanted: u32) -> u32 {
        let users = u32::try_from(self.users.load(Ordering::Relaxed)).unwrap_or(u32::MAX).max(1);
        wanted.min(self.functions[dtype as usize].resident / 2 / users).max(1)
    }

    /// CTAs of any kernel that the whole GPU holds at a time.
    pub(super) fn resident(&self) -> u32 {
        self.functions.iter().map(|function| function.resident).min().unwrap_or(1)
    }

    /// Enqueues the kernel for elements of a type, with this number of CTAs and of threads in each. The GPU's
    /// context is current.
    ///
    /// # Safety
    /// The stream is live; the memory that the parameters name is valid until the kernel ends.
    pub(super) unsafe fn launch(
        &self,
        dtype: DType,
        [ctas, threads]: [u32; 2],
        stream: DriverHandle,
        parameters: &CollectiveParameters,
    ) -> DriverResult {
        let function = self.functions[dtype as usize].raw;
        let parameters = (&raw const *parameters).cast_mut().cast::<c_void>();
        let mut arguments = [parameters];
        let arguments = arguments.as_mut_ptr();
        let driver = self.gpu.driver();
        let Some(attributes) = &self.attributes else {
            // SAFETY: the caller guarantees the parameters, which are copied, and the rest.
            return unsafe {
                driver.launch(function, ctas, 1, 1, threads, 1, 1, 0, stream, arguments, null_mut())
            };
        };
        let config = LaunchConfig {
            grid: [ctas, 1, 1],
            block: [threads, 1, 1],
            shared_memory: 0,
            stream,
            attributes: attributes.as_ptr(),
            attribute_count: attributes.len() as c_uint,
        };
        // SAFETY: as above; the attributes live until the driver returns.
        unsafe { driver.launch_extended(&raw const config, function, arguments, null_mut()) }
    }
}

/// The attributes of all launches: the highest priority, so that CTAs become resident before those of other
/// kernels, and, where there is one, a domain of their own, so that the fences of other kernels do not wait
/// for stores to peers.
fn attributes(gpu: &Gpu) -> Result<Option<Vec<LaunchAttribute>>> {
    let driver = gpu.driver();
    if driver.version()? < DOMAINS_SINCE {
        return Ok(None);
    }
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: the out-parameters are writable.
    unsafe { driver.context_priorities(&raw mut least, &raw mut greatest)? };
    let priority = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PRIORITY as c_uint;
    let mut attributes = vec![LaunchAttribute::new(priority, greatest)];
    if gpu.capability >= DOMAINS_FROM {
        let domain = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN as c_uint;
        let remote = CUlaunchMemSyncDomain::CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE as c_int;
        attributes.push(LaunchAttribute::new(domain, remote));
    }
    Ok(Some(attributes))
}

/// Loads the module. The context is current.
fn load_module(gpu: &Gpu) -> Result<DriverHandle> {
    let driver = gpu.driver();
    let version = c_int::try_from(driver.version()?).unwrap_or(c_int::MAX);
    let try_load = |image: &[u8]| {
        let mut raw = null_mut();
        // SAFETY: the out-parameter is writable; an image contains its own length.
        unsafe { driver.module_load(&raw mut raw, image.as_ptr().cast())? };
        Ok(raw)
    };
    image::load_image(gpu.capability, version, try_load)
        .map_err(|error| error.context(format_args!("{gpu:?}")))
}
