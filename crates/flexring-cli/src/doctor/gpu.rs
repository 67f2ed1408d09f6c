//! GPUs, their driver, and the GDR modes by which RDMA devices access their memory.
//!
//! Owns the evidence for each GDR mode: the kernel's files, the answers of the RDMA devices and of CUDA's
//! driver, as far as they are available. No memory is registered, so the result is an expectation.

use super::device_probe::DeviceProbe;
use flexring::internal::transport::verbs::gpu::gdr_mode::{self, GdrSupport, GdrUnavailable};
use flexring_core::config::GpuDirect;
use serde::Serialize;
use std::fs;
use std::path::Path;

/// The GPUs of this machine.
#[derive(Clone, Debug, Default, Serialize)]
pub struct GpuReport {
    /// NVIDIA's kernel module, if it is loaded.
    pub driver: Option<NvidiaDriver>,
    pub devices: Vec<PciGpu>,
    /// The answers of CUDA's driver, if this build can query it.
    pub cuda: Option<CudaReport>,
    /// The GDR modes, the best first; none without a GPU.
    pub gdr_modes: Vec<GdrModeReport>,
}

/// The GPUs that are visible to this process through CUDA's driver, which may be fewer than the machine has.
#[derive(Clone, Debug, Default, Serialize)]
pub struct CudaReport {
    pub devices: Vec<CudaDevice>,
    /// Why no GPU is visible.
    pub failure: Option<String>,
}

/// A GPU that this process can use.
#[derive(Clone, Debug, Serialize)]
pub struct CudaDevice {
    /// The number in `FLEXRING_GPU`.
    pub number: usize,
    pub name: String,
    /// The PCI address.
    pub address: String,
    /// The compute capability, such as `9.0`.
    pub capability: String,
    pub memory_bytes: u64,
}

/// NVIDIA's kernel module.
#[derive(Clone, Debug, Serialize)]
pub struct NvidiaDriver {
    pub version: String,
    /// Whether its kernel module is the open-source one.
    pub open: bool,
}

/// A GPU of this machine.
#[derive(Clone, Debug, Serialize)]
pub struct PciGpu {
    /// The PCI address.
    pub address: String,
    pub model: Option<String>,
}

/// Whether a GDR mode is expected to work.
#[derive(Clone, Debug, Serialize)]
pub struct GdrModeReport {
    pub name: &'static str,
    pub possible: bool,
    /// The reason for `possible`.
    pub why: String,
    /// A command or an instruction that makes it possible, if there is one.
    pub fix: Option<&'static str>,
}

impl GpuReport {
    /// The GPUs of the machine below `root`. `software` names the rails' devices if all are software devices;
    /// `probes` are the answers of the rails' devices that were opened.
    pub fn read(root: &Path, allowed: GpuDirect, software: &[String], probes: &[DeviceProbe]) -> Self {
        let driver = driver(&text(&root.join("proc/driver/nvidia/version")));
        let devices = gpus_of(root);
        // A file tree has no driver that could be queried.
        let cuda = if root == Path::new("/") { visible() } else { None };
        let mut gpus = Self { driver, devices, cuda, gdr_modes: Vec::new() };
        if !gpus.devices.is_empty() {
            let known = LocalGdrSupport {
                driver: gpus.driver.as_ref(),
                kernel: KernelInfo::read(root),
                software,
                probes,
                live: root == Path::new("/"),
            };
            gpus.gdr_modes =
                gdr_mode::GdrMode::ALL.into_iter().map(|mode| known.mode(mode, allowed)).collect();
        }
        gpus
    }

    /// The mode that is expected to be used.
    pub fn expected(&self) -> Option<&GdrModeReport> {
        self.gdr_modes.iter().find(|mode| mode.possible)
    }
}

/// The evidence about GDR modes.
struct LocalGdrSupport<'a> {
    driver: Option<&'a NvidiaDriver>,
    kernel: KernelInfo,
    software: &'a [String],
    /// The answers of the rails' devices.
    probes: &'a [DeviceProbe],
    /// Whether this is the machine itself, so that CUDA's driver can be queried too.
    live: bool,
}

impl LocalGdrSupport<'_> {
    /// The report on a mode.
    fn mode(&self, mode: gdr_mode::GdrMode, allowed: GpuDirect) -> GdrModeReport {
        let name = mode.name();
        match mode.availability(allowed, self) {
            Err(reason) => GdrModeReport { name, possible: false, why: reason.message, fix: reason.fix },
            Ok(()) => GdrModeReport { name, possible: true, why: self.why(mode), fix: None },
        }
    }

    /// The reason why a mode is expected to work.
    fn why(&self, mode: gdr_mode::GdrMode) -> String {
        match mode {
            gdr_mode::GdrMode::DmaBuf => {
                let version = self.driver.map_or("", |driver| &driver.version);
                let devices: Vec<&str> = self.probes.iter().map(|probe| &*probe.device).collect();
                let taken = if devices.is_empty() {
                    String::new()
                } else {
                    format!(", and the driver of {} imports DMA-BUFs", devices.join(", "))
                };
                format!("open kernel module {version}{taken}")
            }
            gdr_mode::GdrMode::PeerMem => {
                format!("{} is loaded", self.kernel.peer_module.unwrap_or_default())
            }
            gdr_mode::GdrMode::HostStaging => "works everywhere".to_owned(),
        }
    }
}

impl GdrSupport for LocalGdrSupport<'_> {
    fn exports_dmabuf(&self) -> Result<(), GdrUnavailable> {
        let Some(driver) = self.driver else {
            return Err(GdrUnavailable::new("no NVIDIA driver is loaded").with_fix("modprobe nvidia"));
        };
        if !driver.open {
            let fix = "install the driver's open kernel modules (nvidia-open)";
            return Err(
                GdrUnavailable::new("the driver's kernel module is not the open-source one").with_fix(fix)
            );
        }
        if self.kernel.version.is_some_and(|version| version < (5, 12)) {
            return Err(GdrUnavailable::new("the kernel is older than 5.12").with_fix("boot a newer kernel"));
        }
        if self.live { cuda() } else { Ok(()) }
    }

    fn nic_imports_dmabuf(&self) -> Result<(), GdrUnavailable> {
        if let Some(why) = self.probes.iter().find_map(|probe| probe.why_not.as_ref()) {
            return Err(why.clone());
        }
        if self.kernel.has_symbol("ib_umem_dmabuf_get") == Some(false) {
            let message = "the kernel's RDMA core is not loaded or does not support DMA-BUFs";
            return Err(GdrUnavailable::new(message).with_fix("modprobe ib_uverbs"));
        }
        if !self.software.is_empty() {
            let devices = self.software.join(", ");
            return Err(GdrUnavailable::new(format!("{devices} is a software device, which does no DMA")));
        }
        Ok(())
    }

    fn nic_supports_peermem(&self) -> Result<(), GdrUnavailable> {
        if self.kernel.has_symbol("ib_register_peer_memory_client") == Some(false) {
            let fix = "install NVIDIA's RDMA drivers (DOCA or MLNX_OFED), then modprobe nvidia-peermem";
            return Err(
                GdrUnavailable::new("the kernel's RDMA core does not support peer memory").with_fix(fix)
            );
        }
        match self.kernel.peer_module {
            Some(_) => Ok(()),
            None => Err(GdrUnavailable::new("its module is not loaded").with_fix("modprobe nvidia-peermem")),
        }
    }
}

/// Whether CUDA's driver exports DMA-BUFs, if this build can query it.
fn cuda() -> Result<(), GdrUnavailable> {
    #[cfg(all(feature = "verbs", feature = "cuda"))]
    return flexring::internal::transport::verbs::gpu::exports();
    #[cfg(not(all(feature = "verbs", feature = "cuda")))]
    Ok(())
}

/// The GPUs that are visible to this process.
#[cfg(feature = "cuda")]
fn visible() -> Option<CudaReport> {
    use flexring::gpu::{gpu_count, gpu_info};
    let devices =
        gpu_count().and_then(|count| (0..count).map(gpu_info).collect::<flexring::Result<Vec<_>>>());
    Some(match devices {
        Err(error) => CudaReport { failure: Some(error.message().to_owned()), ..CudaReport::default() },
        Ok(devices) => {
            let devices = devices.into_iter().map(|gpu| CudaDevice {
                number: gpu.number,
                name: gpu.name,
                address: gpu.address,
                capability: format!("{}.{}", gpu.capability.0, gpu.capability.1),
                memory_bytes: gpu.memory,
            });
            CudaReport { devices: devices.collect(), failure: None }
        }
    })
}

/// This build cannot query CUDA's driver.
#[cfg(not(feature = "cuda"))]
fn visible() -> Option<CudaReport> {
    None
}

/// What the kernel supports.
struct KernelInfo {
    version: Option<(u32, u32)>,
    peer_module: Option<&'static str>,
    /// The contents of `/proc/kallsyms`, if it is readable.
    symbols: Option<String>,
}

impl KernelInfo {
    fn read(root: &Path) -> Self {
        let mut modules = ["nvidia_peermem", "nv_peer_mem"].into_iter();
        let release = text(&root.join("proc/sys/kernel/osrelease"));
        let mut numbers = release.split(['.', '-']).map_while(|part| part.parse().ok());
        Self {
            version: numbers.next().zip(numbers.next()),
            peer_module: modules.find(|module| root.join("sys/module").join(module).exists()),
            symbols: Some(text(&root.join("proc/kallsyms"))).filter(|symbols| !symbols.is_empty()),
        }
    }

    /// Whether the kernel has this function; `None` if unknown.
    fn has_symbol(&self, function: &str) -> Option<bool> {
        let symbols = self.symbols.as_ref()?;
        Some(symbols.lines().any(|line| line.split_whitespace().nth(2) == Some(function)))
    }
}

/// Parses `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build ...`
fn driver(text: &str) -> Option<NvidiaDriver> {
    let line = text.lines().find(|line| line.starts_with("NVRM version:"))?;
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    let version = line.split_whitespace().find(is_version)?.to_owned();
    Some(NvidiaDriver { version, open: line.contains("Open Kernel Module") })
}

/// The GPUs of the machine below `root`.
pub fn gpus_of(root: &Path) -> Vec<PciGpu> {
    let gpus = of_driver(root);
    if gpus.is_empty() { of_pci(root) } else { gpus }
}

/// The GPUs that NVIDIA's driver lists.
fn of_driver(root: &Path) -> Vec<PciGpu> {
    let folder = root.join("proc/driver/nvidia/gpus");
    let gpu = |address: String| {
        let information = text(&folder.join(&address).join("information"));
        let model = information.lines().find_map(|line| line.strip_prefix("Model:"));
        PciGpu { model: model.map(|model| model.trim().to_owned()), address }
    };
    names(&folder).into_iter().map(gpu).collect()
}

/// Of the GPU that lets other devices access the least memory (BAR1): its PCI address, and bytes. `None` if
/// there is none, or the system does not say.
pub fn smallest_window(root: &Path) -> Option<(String, u64)> {
    let window = |address: String| {
        let folder = root.join("sys/bus/pci/devices").join(&address);
        let resources = text(&folder.join("resource"));
        let mut numbers = resources.lines().nth(1)?.split_whitespace();
        let mut number = || u64::from_str_radix(numbers.next()?.trim_start_matches("0x"), 16).ok();
        let (first, last) = (number()?, number()?);
        Some((address, last.checked_sub(first).filter(|bytes| *bytes > 0)? + 1))
    };
    gpus_of(root).into_iter().map(|gpu| gpu.address).filter_map(window).min_by_key(|(_, bytes)| *bytes)
}

/// The NVIDIA GPUs on the PCI bus, for machines without a driver.
fn of_pci(root: &Path) -> Vec<PciGpu> {
    let folder = root.join("sys/bus/pci/devices");
    let is_gpu = |address: &String| {
        let device = folder.join(address);
        text(&device.join("vendor")).trim() == "0x10de" && text(&device.join("class")).starts_with("0x03")
    };
    names(&folder).into_iter().filter(is_gpu).map(|address| PciGpu { address, model: None }).collect()
}

fn text(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_default()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}
