//! `flexring doctor`: what this machine has for flexring, what is wrong with it, and what fixes that.
//!
//! Owns the report, how it is gathered and how it reads. Needs no privileges, and works where there is neither RDMA nor
//! a GPU; a build with verbs opens the RDMA devices and asks them, others read the kernel's files only. What is chosen
//! among RDMA devices, interfaces and ways to GPU memory the library decides, as it would for a communicator.
//!
//! | file | owns |
//! |---|---|
//! | `report` | the facts as plain data, in one tree, gathered |
//! | `process` | what this process may do: processors, memory, settings, its rank |
//! | `answers` | what RDMA devices say of themselves |
//! | `gpu` | GPUs, their driver, and how RDMA devices reach their memory |
//! | `findings` | what follows from the facts: what is wrong, how much, and what fixes it |
//! | `words` | how it reads |

mod device_probe;
mod findings;
mod gpu;
mod process;
mod report;
#[cfg(test)]
mod tests;
mod text;

use crate::error::CommandError;
use crate::output;
use clap::Args;
use report::DoctorReport;
use std::path::Path;

/// Say what this machine has for flexring, what is wrong with it and what fixes that
///
/// Shows processors, memory, interfaces, RDMA devices with the ports and addresses that would be used, GPUs, and the
/// settings that are set. Ends with what is wrong, and the command that fixes it. Within a job, every rank can run it.
///
/// Exits with 1 if flexring cannot run here, or not with the FLEXRING_TRANSPORT that is set.
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
