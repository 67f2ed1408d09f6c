//! The GDR mode (GPUDirect RDMA): how an RDMA device accesses GPU memory, and why no better mode is
//! available.
//!
//! Owns the choice and its messages. Pure: the answers of drivers and devices come through [`GdrSupport`] and
//! [`GdrTarget`], and no query is made before its answer matters.
//!
//! | mode | how | requirements |
//! |---|---|---|
//! | DMA-BUF | `cuMemGetHandleForAddressRange`, `ibv_reg_dmabuf_mr` | open kernel module of the GPU, Linux 5.12, an RDMA driver that imports them |
//! | peer memory | `ibv_reg_mr` of the GPU address | `nvidia_peermem` |
//! | pinned host memory | copies through slots that are registered anyway | none |
//!
//! With `FLEXRING_GPU_DIRECT=auto`, a refusal leads to the next mode, for that range only: one range may be
//! too large for the free part of the GPU's BAR while the next one fits. A refusal that applies to the GPU or
//! the device in general is repeated for the next range, at the cost of a query. If the setting names a mode,
//! a refusal is an error.

#[cfg(test)]
mod tests;

use crate::config::GpuDirect;
use crate::error::{Error, Result as OrError};
use rustix::io::Errno;
use std::fmt;

/// How an RDMA device accesses GPU memory, the best mode first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GdrMode {
    /// The GPU driver exports a DMA-BUF, and the RDMA driver imports it.
    DmaBuf,
    /// The RDMA core resolves GPU addresses through a kernel module (`nvidia_peermem`).
    PeerMem,
    /// The RDMA device accesses host memory only, and data is copied between it and the GPU.
    HostStaging,
}

/// Why a GDR mode is not available.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GdrUnavailable {
    /// The cause, as a clause: `the driver's kernel module is not the open one`.
    pub message: String,
    /// A command or an instruction that fixes the cause, if there is one.
    pub fix: Option<&'static str>,
    /// Whether a setting excludes the mode, so that it may be available with another setting.
    pub by_setting: bool,
}

/// A mode that is not available.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedMode {
    /// The unavailable mode.
    pub mode: GdrMode,
    /// The cause, with a fix if there is one.
    pub reason: GdrUnavailable,
}

/// The support of GDR by a GPU and an RDMA device, as far as it is known before memory is registered.
pub trait GdrSupport {
    /// Whether the GPU driver exports memory as DMA-BUFs.
    ///
    /// # Errors
    /// The reason why not.
    fn exports_dmabuf(&self) -> Result<(), GdrUnavailable>;

    /// Whether the RDMA driver imports DMA-BUFs.
    ///
    /// # Errors
    /// The reason why not.
    fn nic_imports_dmabuf(&self) -> Result<(), GdrUnavailable>;

    /// Whether the RDMA core resolves addresses of GPU memory.
    ///
    /// # Errors
    /// The reason why not.
    fn nic_supports_peermem(&self) -> Result<(), GdrUnavailable>;
}

/// A range of GPU memory that is to be registered with an RDMA device.
pub trait GdrTarget: GdrSupport {
    /// The registered range.
    type Registered;

    /// Exports the range as a DMA-BUF and registers that.
    ///
    /// # Errors
    /// The step that failed, with its cause.
    fn register_dmabuf(&self) -> Result<Self::Registered, DmabufError>;

    /// Registers the range by its address.
    ///
    /// # Errors
    /// The errno of the RDMA driver.
    fn register_peermem(&self) -> Result<Self::Registered, i32>;
}

/// The step that failed to register a range as a DMA-BUF.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DmabufError {
    /// The GPU driver did not export the range; the text is its message.
    Export(String),
    /// The RDMA driver did not import the DMA-BUF; the number is its errno.
    Register(i32),
}

/// A range that is registered by the best available mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GdrRegistration<R> {
    /// The mode of this range.
    pub mode: GdrMode,
    /// The better modes that are not available, the best first.
    pub rejected: Vec<RejectedMode>,
    /// The registered range; `None` for [`GdrMode::HostStaging`], which registers nothing.
    pub region: Option<R>,
}

impl GdrMode {
    /// All modes, the best first.
    pub const ALL: [Self; 3] = [Self::DmaBuf, Self::PeerMem, Self::HostStaging];

    /// The name for messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::DmaBuf => "DMA-BUF",
            Self::PeerMem => "peer memory",
            Self::HostStaging => "pinned host memory",
        }
    }

    /// Whether the mode may be available under `setting`, as far as it is known before memory is registered.
    ///
    /// # Errors
    /// The reason why not.
    pub fn availability(self, setting: GpuDirect, of: &impl GdrSupport) -> Result<(), GdrUnavailable> {
        let allowed = match self {
            Self::DmaBuf => matches!(setting, GpuDirect::Auto | GpuDirect::Dmabuf),
            Self::PeerMem => matches!(setting, GpuDirect::Auto | GpuDirect::Peer),
            Self::HostStaging => return Ok(()),
        };
        if !allowed {
            let message = format!("FLEXRING_GPU_DIRECT={} excludes it", setting.name());
            return Err(GdrUnavailable { message, fix: None, by_setting: true });
        }
        match self {
            Self::DmaBuf => of.exports_dmabuf().and_then(|()| of.nic_imports_dmabuf()),
            _ => of.nic_supports_peermem(),
        }
    }

    fn is_required_by(self, setting: GpuDirect) -> bool {
        matches!((self, setting), (Self::DmaBuf, GpuDirect::Dmabuf) | (Self::PeerMem, GpuDirect::Peer))
    }
}

impl GdrUnavailable {
    /// A cause without a fix.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), fix: None, by_setting: false }
    }

    /// Adds a fix: a command or an instruction.
    #[must_use]
    pub fn with_fix(self, fix: &'static str) -> Self {
        Self { fix: Some(fix), ..self }
    }
}

/// The cause and the fix in one clause.
impl fmt::Display for GdrUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fix {
            Some(fix) => write!(f, "{}; fix: {fix}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

/// Registers a range by the best available mode.
///
/// # Errors
/// `Unsupported` if the setting requires a mode that is not available.
pub fn register<R: GdrTarget>(setting: GpuDirect, range: &R) -> OrError<GdrRegistration<R::Registered>> {
    let mut rejected = Vec::new();
    for mode in [GdrMode::DmaBuf, GdrMode::PeerMem] {
        let registered = mode.availability(setting, range).and_then(|()| match mode {
            GdrMode::DmaBuf => range.register_dmabuf().map_err(|error| error.reason()),
            _ => range.register_peermem().map_err(peermem_error),
        });
        match registered {
            Ok(region) => return Ok(GdrRegistration { mode, rejected, region: Some(region) }),
            Err(reason) if mode.is_required_by(setting) => {
                let message = format!("FLEXRING_GPU_DIRECT={} is not possible: {reason}", setting.name());
                return Err(Error::unsupported(message));
            }
            Err(reason) => rejected.push(RejectedMode { mode, reason }),
        }
    }
    Ok(GdrRegistration { mode: GdrMode::HostStaging, rejected, region: None })
}

/// Whether the driver of `device` imports DMA-BUFs, given the `errno` from registering one that does not
/// exist. A driver that imports them looks up the descriptor first.
///
/// # Errors
/// The driver or the kernel does not import DMA-BUFs.
pub fn dmabuf_support(device: &str, errno: i32) -> Result<(), GdrUnavailable> {
    match Errno::from_raw_os_error(errno) {
        Errno::OPNOTSUPP => {
            Err(GdrUnavailable::new(format!("the driver of {device} does not import DMA-BUFs"))
                .with_fix("use a driver that does, such as mlx5_ib of Linux 5.12 or newer"))
        }
        Errno::PROTONOSUPPORT | Errno::NOSYS | Errno::NOTTY => {
            Err(GdrUnavailable::new(format!("the kernel does not register DMA-BUFs with {device}"))
                .with_fix("boot Linux 5.12 or newer"))
        }
        _ => Ok(()),
    }
}

/// The fix for a BAR that is too small. The BAR is the window through which devices access GPU memory.
const BAR: &str =
    "see BAR1 in nvidia-smi -q; Above 4G Decoding and Resizable BAR in the firmware make it larger";

impl DmabufError {
    fn reason(&self) -> GdrUnavailable {
        match self {
            Self::Export(message) => {
                GdrUnavailable::new(format!("the GPU's driver does not export this memory: {message}"))
                    .with_fix("use memory from cudaMalloc")
            }
            Self::Register(errno) if *errno == Errno::NOMEM.raw_os_error() => {
                GdrUnavailable::new("the GPU's BAR has no room for this range").with_fix(BAR)
            }
            Self::Register(errno) => GdrUnavailable::new(failed("ibv_reg_dmabuf_mr", *errno)),
        }
    }
}

/// The reason for an errno from registering a range by its address.
fn peermem_error(errno: i32) -> GdrUnavailable {
    match Errno::from_raw_os_error(errno) {
        // Without the module, the kernel takes it for a host address without memory.
        Errno::FAULT => GdrUnavailable::new("no kernel module resolves GPU addresses for the RDMA core")
            .with_fix("modprobe nvidia-peermem"),
        Errno::NOMEM => GdrUnavailable::new("the GPU's BAR has no room for this range").with_fix(BAR),
        _ => GdrUnavailable::new(failed("ibv_reg_mr", errno)),
    }
}

fn failed(verb: &str, errno: i32) -> String {
    format!("{verb} failed: {}", std::io::Error::from_raw_os_error(errno))
}
