//! The ladder to a GPU's memory: which way an RDMA device takes to it, and why none that is better.
//!
//! Owns the decision and its words. Pure: what drivers and devices answer comes through [`Prospects`] and [`Range`], and
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
use crate::error::{Error, ErrorKind, Result as OrError};
use rustix::io::Errno;

/// A way from an RDMA device to a GPU's memory. Those that are better come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rung {
    /// The GPU's driver exports a DMA-BUF, which the RDMA device's driver imports.
    Dmabuf,
    /// The RDMA core asks the GPU's driver about an address, through a module that knows both.
    Peer,
    /// The device reaches host memory only, and bytes are copied between that and the GPU.
    Host,
}

/// Why a rung cannot be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    /// As a clause: `the driver's kernel module is not the open one`.
    pub words: String,
    /// What mends it, if anything does: a command, or what to do.
    pub mend: Option<&'static str>,
    /// Whether it could perhaps be had with other settings.
    pub by_setting: bool,
}

/// A rung that was left for the next one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// Which.
    pub rung: Rung,
    /// Why.
    pub reason: Reason,
}

/// What can be known of a GPU and an RDMA device before any memory is registered.
pub trait Prospects {
    /// Whether the GPU's driver exports memory as DMA-BUFs.
    ///
    /// # Errors
    /// Why not.
    fn exports(&self) -> Result<(), Reason>;

    /// Whether the RDMA device's driver takes DMA-BUFs.
    ///
    /// # Errors
    /// Why not.
    fn takes_dmabufs(&self) -> Result<(), Reason>;

    /// Whether the RDMA device takes addresses of GPU memory.
    ///
    /// # Errors
    /// Why not.
    fn takes_addresses(&self) -> Result<(), Reason>;
}

/// A range of a GPU's memory that an RDMA device shall reach.
pub trait Range: Prospects {
    /// What a range is once it is registered.
    type Region;

    /// Exports the range and registers what comes of it.
    ///
    /// # Errors
    /// Who refused, and how.
    fn by_dmabuf(&self) -> Result<Self::Region, Refusal>;

    /// Registers the range by its address.
    ///
    /// # Errors
    /// The errno of the RDMA device's driver.
    fn by_address(&self) -> Result<Self::Region, i32>;
}

/// Who refused a DMA-BUF of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The GPU's driver, in these words.
    Export(String),
    /// The RDMA device's driver, with this errno.
    Register(i32),
}

/// How a range is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken<R> {
    /// The rung.
    pub rung: Rung,
    /// Those above it, the best first.
    pub left: Vec<Left>,
    /// The range, registered; not on the last rung, which has nothing to register.
    pub region: Option<R>,
}

impl Rung {
    /// All of them, the best first.
    pub const ALL: [Self; 3] = [Self::Dmabuf, Self::Peer, Self::Host];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dmabuf => "DMA-BUF",
            Self::Peer => "peer memory",
            Self::Host => "pinned host memory",
        }
    }

    /// Whether it may be had at all, as far as can be known before any memory is registered.
    ///
    /// # Errors
    /// Why not.
    pub fn prospect(self, asked: GpuDirect, of: &impl Prospects) -> Result<(), Reason> {
        let allowed = match self {
            Self::Dmabuf => matches!(asked, GpuDirect::Auto | GpuDirect::Dmabuf),
            Self::Peer => matches!(asked, GpuDirect::Auto | GpuDirect::Peer),
            Self::Host => return Ok(()),
        };
        if !allowed {
            let words = format!("FLEXRING_GPU_DIRECT={} rules it out", asked.name());
            return Err(Reason { words, mend: None, by_setting: true });
        }
        match self {
            Self::Dmabuf => of.exports().and_then(|()| of.takes_dmabufs()),
            _ => of.takes_addresses(),
        }
    }

    fn is_named_by(self, asked: GpuDirect) -> bool {
        matches!((self, asked), (Self::Dmabuf, GpuDirect::Dmabuf) | (Self::Peer, GpuDirect::Peer))
    }
}

impl Reason {
    /// A reason with nothing to mend it.
    pub fn of(words: impl Into<String>) -> Self {
        Self { words: words.into(), mend: None, by_setting: false }
    }

    /// The same with what mends it.
    #[must_use]
    pub fn mended(self, mend: &'static str) -> Self {
        Self { mend: Some(mend), ..self }
    }

    /// Why and what mends it, in one clause.
    #[must_use]
    pub fn sentence(&self) -> String {
        let mend = self.mend.map(|mend| format!("; mend: {mend}")).unwrap_or_default();
        format!("{}{mend}", self.words)
    }
}

/// The best rung on which a range can be had.
///
/// # Errors
/// `Unsupported` if the setting names a rung and that cannot be had.
pub fn take<R: Range>(asked: GpuDirect, range: &R) -> OrError<Taken<R::Region>> {
    let mut left = Vec::new();
    for rung in [Rung::Dmabuf, Rung::Peer] {
        let registered = rung.prospect(asked, range).and_then(|()| match rung {
            Rung::Dmabuf => range.by_dmabuf().map_err(|refusal| refusal.reason()),
            _ => range.by_address().map_err(address_refused),
        });
        match registered {
            Ok(region) => return Ok(Taken { rung, left, region: Some(region) }),
            Err(reason) if rung.is_named_by(asked) => {
                let words =
                    format!("FLEXRING_GPU_DIRECT={} is not possible: {}", asked.name(), reason.sentence());
                return Err(Error::new(ErrorKind::Unsupported, words));
            }
            Err(reason) => left.push(Left { rung, reason }),
        }
    }
    Ok(Taken { rung: Rung::Host, left, region: None })
}

/// What it means that `device` answers with `errno` when it shall register a DMA-BUF that does not exist: a driver that
/// takes them looks for it first.
///
/// # Errors
/// If the driver takes none.
pub fn dmabuf_answer(device: &str, errno: i32) -> Result<(), Reason> {
    match Errno::from_raw_os_error(errno) {
        Errno::OPNOTSUPP => Err(Reason::of(format!("the driver of {device} takes no DMA-BUF"))
            .mended("use a driver of it that does, as mlx5_ib of Linux 5.12 or newer")),
        Errno::PROTONOSUPPORT | Errno::NOSYS | Errno::NOTTY => {
            Err(Reason::of(format!("the kernel registers no DMA-BUF with {device}"))
                .mended("boot Linux 5.12 or newer"))
        }
        _ => Ok(()),
    }
}

/// Where GPU memory lies for a device: it may be larger than that.
const BAR: &str =
    "see BAR1 in nvidia-smi -q; Above 4G Decoding and Resizable BAR in the firmware make it larger";

impl Refusal {
    fn reason(&self) -> Reason {
        match self {
            Self::Export(words) => {
                Reason::of(format!("the GPU's driver does not export this memory: {words}"))
                    .mended("use memory of cudaMalloc")
            }
            Self::Register(errno) if *errno == Errno::NOMEM.raw_os_error() => {
                Reason::of("the GPU's BAR has no room for this range").mended(BAR)
            }
            Self::Register(errno) => Reason::of(failed("ibv_reg_dmabuf_mr", *errno)),
        }
    }
}

/// Why a range could not be registered by its address.
fn address_refused(errno: i32) -> Reason {
    match Errno::from_raw_os_error(errno) {
        // To the kernel it is then an address like any other, with no memory behind it.
        Errno::FAULT => Reason::of("no module tells the kernel's RDMA core of GPU memory")
            .mended("modprobe nvidia-peermem"),
        Errno::NOMEM => Reason::of("the GPU's BAR has no room for this range").mended(BAR),
        _ => Reason::of(failed("ibv_reg_mr", errno)),
    }
}

fn failed(verb: &str, errno: i32) -> String {
    format!("{verb} failed: {}", std::io::Error::from_raw_os_error(errno))
}
