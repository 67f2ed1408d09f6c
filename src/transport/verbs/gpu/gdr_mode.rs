//! The ladder to a GPU's memory: which way an RDMA device takes to it, and why none that is better.
//!
//! Owns the decision and its words. Pure: what drivers and devices answer comes through [`GdrSupport`] and [`GdrTarget`], and
//! nothing is asked before its answer matters. Must not know CUDA or verbs.
//!
//! | rung | how | what it needs |
//! |---|---|---|
//! | DMA-BUF | `cuMemGetHandleForAddressRange`, `ibv_reg_dmabuf_mr` | open kernel module of the GPU, Linux 5.12, an RDMA driver that takes them |
//! | peer memory | `ibv_reg_mr` of the GPU's address | `nvidia_peermem` |
//! | pinned host memory | copies through slots that are registered anyway | nothing |
//!
//! With `FLEXRING_GPU_DIRECT=auto` every refusal leads one rung down, for the range in question only: one range may be
//! too large for what is left of the GPU's BAR while the next one fits, and what GPU and device refuse in general they
//! refuse the next range too, at the price of a question. With a setting that names a rung, a refusal is an error.

#[cfg(test)]
mod tests;

use crate::config::GpuDirect;
use crate::error::{Error, Result as OrError};
use rustix::io::Errno;

/// A way from an RDMA device to a GPU's memory. Those that are better come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GdrMode {
    /// The GPU's driver exports a DMA-BUF, which the RDMA device's driver imports.
    DmaBuf,
    /// The RDMA core asks the GPU's driver about an address, through a module that knows both.
    PeerMem,
    /// The device reaches host memory only, and bytes are copied between that and the GPU.
    HostStaging,
}

/// Why a rung cannot be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GdrUnavailable {
    /// As a clause: `the driver's kernel module is not the open one`.
    pub message: String,
    /// What fixes it, if anything does: a command, or what to do.
    pub fix: Option<&'static str>,
    /// Whether it could perhaps be had with other settings.
    pub by_setting: bool,
}

/// A rung that was left for the next one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedMode {
    /// Which.
    pub mode: GdrMode,
    /// Why.
    pub reason: GdrUnavailable,
}

/// What can be known of a GPU and an RDMA device before any memory is registered.
pub trait GdrSupport {
    /// Whether the GPU's driver exports memory as DMA-BUFs.
    ///
    /// # Errors
    /// Why not.
    fn exports_dmabuf(&self) -> Result<(), GdrUnavailable>;

    /// Whether the RDMA device's driver takes DMA-BUFs.
    ///
    /// # Errors
    /// Why not.
    fn nic_imports_dmabuf(&self) -> Result<(), GdrUnavailable>;

    /// Whether the RDMA device takes addresses of GPU memory.
    ///
    /// # Errors
    /// Why not.
    fn nic_supports_peermem(&self) -> Result<(), GdrUnavailable>;
}

/// A range of a GPU's memory that an RDMA device shall reach.
pub trait GdrTarget: GdrSupport {
    /// What a range is once it is registered.
    type Registered;

    /// Exports the range and registers what comes of it.
    ///
    /// # Errors
    /// Who refused, and how.
    fn register_dmabuf(&self) -> Result<Self::Registered, DmabufError>;

    /// Registers the range by its address.
    ///
    /// # Errors
    /// The errno of the RDMA device's driver.
    fn register_peermem(&self) -> Result<Self::Registered, i32>;
}

/// Who refused a DMA-BUF of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DmabufError {
    /// The GPU's driver, in these words.
    Export(String),
    /// The RDMA device's driver, with this errno.
    Register(i32),
}

/// How a range is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GdrRegistration<R> {
    /// The rung.
    pub mode: GdrMode,
    /// Those above it, the best first.
    pub rejected: Vec<RejectedMode>,
    /// The range, registered; not on the last rung, which has nothing to register.
    pub region: Option<R>,
}

impl GdrMode {
    /// All of them, the best first.
    pub const ALL: [Self; 3] = [Self::DmaBuf, Self::PeerMem, Self::HostStaging];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::DmaBuf => "DMA-BUF",
            Self::PeerMem => "peer memory",
            Self::HostStaging => "pinned host memory",
        }
    }

    /// Whether it may be had at all, as far as can be known before any memory is registered.
    ///
    /// # Errors
    /// Why not.
    pub fn availability(self, asked: GpuDirect, of: &impl GdrSupport) -> Result<(), GdrUnavailable> {
        let allowed = match self {
            Self::DmaBuf => matches!(asked, GpuDirect::Auto | GpuDirect::Dmabuf),
            Self::PeerMem => matches!(asked, GpuDirect::Auto | GpuDirect::Peer),
            Self::HostStaging => return Ok(()),
        };
        if !allowed {
            let message = format!("FLEXRING_GPU_DIRECT={} rules it out", asked.name());
            return Err(GdrUnavailable { message, fix: None, by_setting: true });
        }
        match self {
            Self::DmaBuf => of.exports_dmabuf().and_then(|()| of.nic_imports_dmabuf()),
            _ => of.nic_supports_peermem(),
        }
    }

    fn is_named_by(self, asked: GpuDirect) -> bool {
        matches!((self, asked), (Self::DmaBuf, GpuDirect::Dmabuf) | (Self::PeerMem, GpuDirect::Peer))
    }
}

impl GdrUnavailable {
    /// A reason with nothing to fix it.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), fix: None, by_setting: false }
    }

    /// The same with what fixes it.
    #[must_use]
    pub fn with_fix(self, fix: &'static str) -> Self {
        Self { fix: Some(fix), ..self }
    }

    /// Why and what fixes it, in one clause.
    #[must_use]
    pub fn sentence(&self) -> String {
        let fix = self.fix.map(|fix| format!("; fix: {fix}")).unwrap_or_default();
        format!("{}{fix}", self.message)
    }
}

/// The best rung on which a range can be had.
///
/// # Errors
/// `Unsupported` if the setting names a rung and that cannot be had.
pub fn register<R: GdrTarget>(asked: GpuDirect, range: &R) -> OrError<GdrRegistration<R::Registered>> {
    let mut rejected = Vec::new();
    for mode in [GdrMode::DmaBuf, GdrMode::PeerMem] {
        let registered = mode.availability(asked, range).and_then(|()| match mode {
            GdrMode::DmaBuf => range.register_dmabuf().map_err(|refusal| refusal.reason()),
            _ => range.register_peermem().map_err(address_refused),
        });
        match registered {
            Ok(region) => return Ok(GdrRegistration { mode, rejected, region: Some(region) }),
            Err(reason) if mode.is_named_by(asked) => {
                let words =
                    format!("FLEXRING_GPU_DIRECT={} is not possible: {}", asked.name(), reason.sentence());
                return Err(Error::unsupported(words));
            }
            Err(reason) => rejected.push(RejectedMode { mode, reason }),
        }
    }
    Ok(GdrRegistration { mode: GdrMode::HostStaging, rejected, region: None })
}

/// What it means that `device` answers with `errno` when it shall register a DMA-BUF that does not exist: a driver that
/// takes them looks for it first.
///
/// # Errors
/// If the driver takes none.
pub fn dmabuf_support(device: &str, errno: i32) -> Result<(), GdrUnavailable> {
    match Errno::from_raw_os_error(errno) {
        Errno::OPNOTSUPP => Err(GdrUnavailable::new(format!("the driver of {device} takes no DMA-BUF"))
            .with_fix("use a driver of it that does, as mlx5_ib of Linux 5.12 or newer")),
        Errno::PROTONOSUPPORT | Errno::NOSYS | Errno::NOTTY => {
            Err(GdrUnavailable::new(format!("the kernel registers no DMA-BUF with {device}"))
                .with_fix("boot Linux 5.12 or newer"))
        }
        _ => Ok(()),
    }
}

/// Where GPU memory lies for a device: it may be larger than that.
const BAR: &str =
    "see BAR1 in nvidia-smi -q; Above 4G Decoding and Resizable BAR in the firmware make it larger";

impl DmabufError {
    fn reason(&self) -> GdrUnavailable {
        match self {
            Self::Export(words) => {
                GdrUnavailable::new(format!("the GPU's driver does not export this memory: {words}"))
                    .with_fix("use memory of cudaMalloc")
            }
            Self::Register(errno) if *errno == Errno::NOMEM.raw_os_error() => {
                GdrUnavailable::new("the GPU's BAR has no room for this range").with_fix(BAR)
            }
            Self::Register(errno) => GdrUnavailable::new(failed("ibv_reg_dmabuf_mr", *errno)),
        }
    }
}

/// Why a range could not be registered by its address.
fn address_refused(errno: i32) -> GdrUnavailable {
    match Errno::from_raw_os_error(errno) {
        // To the kernel it is then an address like any other, with no memory behind it.
        Errno::FAULT => GdrUnavailable::new("no module tells the kernel's RDMA core of GPU memory")
            .with_fix("modprobe nvidia-peermem"),
        Errno::NOMEM => GdrUnavailable::new("the GPU's BAR has no room for this range").with_fix(BAR),
        _ => GdrUnavailable::new(failed("ibv_reg_mr", errno)),
    }
}

fn failed(verb: &str, errno: i32) -> String {
    format!("{verb} failed: {}", std::io::Error::from_raw_os_error(errno))
}
