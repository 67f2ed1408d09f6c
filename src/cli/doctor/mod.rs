//! `flexring doctor`: what this machine offers flexring, what is wrong, and how to fix it.
//!
//! Owns gathering the facts, the conclusions and their text. Needs no privileges, and works without RDMA and GPUs. A build
//! with verbs opens the RDMA devices to query them; other builds read the kernel's files only. The library selects RDMA
//! ports, interfaces and GDR modes, as it does for a communicator.
//!
//! | file | owns |
//! |---|---|
//! | `process` | processors, memory limits, settings, the rank |
//! | `sockets` | network interfaces |
//! | `rdma` | RDMA devices and the selected ports |
//! | `device_probe` | the answers of opened RDMA devices |
//! | `gpu` | GPUs, their driver, and the GDR modes |
//! | `facts` | all of these in one tree |
//! | `transports` | which transports can be used |
//! | `findings` | what is wrong, how severe it is, and how to fix it |
//! | `report` | facts and conclusions together |
//! | `text` | the report as text |
//! | `byte_size` | byte counts as text |

mod byte_size;
mod device_probe;
mod facts;
mod findings;
mod gpu;
mod process;
mod rdma;
mod report;
mod sockets;
#[cfg(test)]
mod tests;
mod text;
mod transports;

use crate::error::CommandError;
use crate::output;
use clap::Args;
use report::DoctorReport;
use std::path::Path;

/// Report what this machine offers flexring, what is wrong and how to fix it
///
/// Shows processors, memory, interfaces, RDMA devices with the ports and addresses that would be used, GPUs, and the
/// settings that are set. Ends with the findings and commands that fix them. Within a job, every rank can run it.
///
/// Exits with 1 if flexring cannot run here with these settings.
#[derive(Args, Debug)]
pub struct DoctorOptions {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(options: &DoctorOptions) -> Result<(), CommandError> {
    let variables = std::env::vars_os()
        .map(|(name, text)| (name.to_string_lossy().into_owned(), text.to_string_lossy().into_owned()));
    let report = DoctorReport::gather(Path::new("/"), &variables.collect());
    output::print(&if options.json { output::json(&report)? } else { text::render(&report) })?;
    if report.runs() { Ok(()) } else { Err(CommandError::Reported) }
}
