//! GPUs, their driver, and how RDMA devices reach their memory.
//!
//! Owns the ladder: DMA-BUF, else peer memory, else pinned host memory. Asks the kernel's files only, so it tells what
//! is to be expected; the devices themselves have the last word.

use flexring::config::GpuDirect;
use serde::Serialize;
use std::fs;
use std::path::Path;

/// What there is.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Gpus {
    /// The driver that is loaded.
    pub driver: Option<Driver>,
    pub devices: Vec<Gpu>,
    /// The rungs, the best first; none without a GPU.
    pub ladder: Vec<Rung>,
}

/// NVIDIA's driver.
#[derive(Clone, Debug, Serialize)]
pub struct Driver {
    pub version: String,
    /// Whether its kernel module is the open one.
    pub open: bool,
}

/// A GPU.
#[derive(Clone, Debug, Serialize)]
pub struct Gpu {
    /// Its PCI address.
    pub address: String,
    pub model: Option<String>,
}

/// A way to a GPU's memory.
#[derive(Clone, Debug, Serialize)]
pub struct Rung {
    pub name: &'static str,
    pub possible: bool,
    /// Why it is possible, or why not.
    pub why: String,
    /// What would make it possible.
    pub mend: Option<&'static str>,
}

impl Gpus {
    /// What is below `root`. `software` are the rails, if all are made of software.
    pub fn read(root: &Path, allowed: GpuDirect, software: &[String]) -> Self {
        let driver = driver(&text(&root.join("proc/driver/nvidia/version")));
        let mut devices = of_driver(root);
        if devices.is_empty() {
            devices = of_pci(root);
        }
        let mut gpus = Self { driver, devices, ladder: Vec::new() };
        if !gpus.devices.is_empty() {
            let kernel = Kernel::read(root);
            gpus.ladder = vec![
                gpus.dmabuf(&kernel, allowed, software),
                peer(&kernel, allowed),
                Rung {
                    name: "pinned host memory",
                    possible: true,
                    why: "works everywhere".to_owned(),
                    mend: None,
                },
            ];
        }
        gpus
    }

    /// The rung that is expected to be taken.
    pub fn expected(&self) -> Option<&Rung> {
        self.ladder.iter().find(|rung| rung.possible)
    }

    fn dmabuf(&self, kernel: &Kernel, allowed: GpuDirect, software: &[String]) -> Rung {
        let no = |why: &str, mend| Rung { name: "DMA-BUF", possible: false, why: why.to_owned(), mend };
        if !matches!(allowed, GpuDirect::Auto | GpuDirect::Dmabuf) {
            return no(&format!("FLEXRING_GPU_DIRECT={} rules it out", allowed.name()), None);
        }
        let Some(driver) = &self.driver else {
            return no("no NVIDIA driver is loaded", Some("modprobe nvidia"));
        };
        if !driver.open {
            let mend = "install the driver's open kernel modules (nvidia-open)";
            return no("the driver's kernel module is not the open one", Some(mend));
        }
        if kernel.version.is_some_and(|version| version < (5, 12)) {
            return no("the kernel is older than 5.12", Some("boot a newer kernel"));
        }
        if kernel.knows("ib_umem_dmabuf_get") == Some(false) {
            return no(
                "the kernel's RDMA core is not loaded or knows no DMA-BUF",
                Some("modprobe ib_uverbs"),
            );
        }
        if !software.is_empty() {
            return no(&format!("{} is made of software and does no DMA", software.join(", ")), None);
        }
        let why = format!("open kernel module {}", driver.version);
        Rung { name: "DMA-BUF", possible: true, why, mend: None }
    }
}

fn peer(kernel: &Kernel, allowed: GpuDirect) -> Rung {
    let rung = |possible, why: &str, mend| Rung { name: "peer memory", possible, why: why.to_owned(), mend };
    if !matches!(allowed, GpuDirect::Auto | GpuDirect::Peer) {
        return rung(false, &format!("FLEXRING_GPU_DIRECT={} rules it out", allowed.name()), None);
    }
    match (kernel.peer_module, kernel.knows("ib_register_peer_memory_client")) {
        (_, Some(false)) => {
            let mend = "install NVIDIA's RDMA drivers (DOCA or MLNX_OFED), then modprobe nvidia-peermem";
            rung(false, "the kernel's RDMA core takes no peer memory", Some(mend))
        }
        (Some(module), _) => rung(true, &format!("{module} is loaded"), None),
        (None, _) => rung(false, "its module is not loaded", Some("modprobe nvidia-peermem")),
    }
}

/// What the kernel can.
struct Kernel {
    version: Option<(u32, u32)>,
    peer_module: Option<&'static str>,
    /// Its functions, if it tells.
    symbols: Option<String>,
}

impl Kernel {
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

    /// Whether it has this function, if it tells.
    fn knows(&self, function: &str) -> Option<bool> {
        let symbols = self.symbols.as_ref()?;
        Some(symbols.lines().any(|line| line.split_whitespace().nth(2) == Some(function)))
    }
}

/// `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build ...`
fn driver(text: &str) -> Option<Driver> {
    let line = text.lines().find(|line| line.starts_with("NVRM version:"))?;
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    let version = line.split_whitespace().find(is_version)?.to_owned();
    Some(Driver { version, open: line.contains("Open Kernel Module") })
}

/// What the driver tells.
fn of_driver(root: &Path) -> Vec<Gpu> {
    let folder = root.join("proc/driver/nvidia/gpus");
    let gpu = |address: String| {
        let information = text(&folder.join(&address).join("information"));
        let model = information.lines().find_map(|line| line.strip_prefix("Model:"));
        Gpu { model: model.map(|model| model.trim().to_owned()), address }
    };
    names(&folder).into_iter().map(gpu).collect()
}

/// What the PCI bus tells where no driver does.
fn of_pci(root: &Path) -> Vec<Gpu> {
    let folder = root.join("sys/bus/pci/devices");
    let is_gpu = |address: &String| {
        let device = folder.join(address);
        text(&device.join("vendor")).trim() == "0x10de" && text(&device.join("class")).starts_with("0x03")
    };
    names(&folder).into_iter().filter(is_gpu).map(|address| Gpu { address, model: None }).collect()
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
