//! `flexring doctor`: what this machine offers flexring, what is wrong, and how to fix it.
//!
//! Owns gathering the facts, the conclusions and their text. Needs no privileges, and works without RDMA and
//! GPUs. A build with verbs opens the RDMA devices to query them; other builds read the kernel's files only.
//! The library selects RDMA ports, interfaces and GDR modes, as it does for a communicator.
//!
//! | file | owns |
//! |---|---|
//! | `process` | processors, memory limits, settings, the rank |
//! | `sockets` | network interfaces |
//! | `rdma` | RDMA devices and the selected ports |
//! | `device_probe` | the answers of opened RDMA devices |
//! | `gpu` | GPUs, their driver, and the GDR modes |
//! | `topology` | where GPUs and RDMA devices are, and which ports the ranks of a job would use |
//! | `machine` | descriptions of other machines |
//! | `pair`, `pair_facts`, `pair_findings`, `division`, `pci`, `lossless`, `dcb` | tests between the nodes of a job, the ports of its ranks, and what may slow these down |
//! | `facts` | all of these in one tree |
//! | `transports` | which transports can be used |
//! | `findings` | what is wrong, how severe it is, and how to fix it |
//! | `report` | facts and conclusions together |
//! | `text` | the report as text |
//! | `byte_size` | byte counts as text |

mod byte_size;
mod dcb;
mod device_probe;
mod division;
mod facts;
mod findings;
mod gpu;
mod lossless;
mod machine;
mod pair;
mod pair_facts;
mod pair_findings;
mod pci;
mod process;
mod rdma;
mod report;
mod sockets;
#[cfg(test)]
mod tests;
mod text;
mod topology;
mod transports;

use crate::error::CommandError;
use crate::output;
use clap::Args;
use machine::Machine;
use report::DoctorReport;
use std::path::{Path, PathBuf};

/// Report what this machine offers flexring, what is wrong and how to fix it
///
/// Shows processors, memory, interfaces, RDMA devices with the ports and addresses that would be used, GPUs,
/// and the settings that are set. Ends with the findings and commands that fix them. Within a job, every rank
/// can run it. With --pair, the ranks of a job test their RDMA ports together.
///
/// Exits with 1 if flexring cannot run here with these settings, or if a port fails.
#[derive(Args, Debug)]
pub struct DoctorOptions {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Report on the machine of this description instead: a folder with its sys, proc and dev, or a file that
    /// lists them
    #[arg(long, value_name = "PATH")]
    machine: Option<PathBuf>,
    /// Test the RDMA ports between the nodes of this job, one after the other, with long packets and checked
    /// sums. Start one rank on each node; rank 0 prints a line for each port
    #[arg(long, conflicts_with = "machine")]
    pair: bool,
}

/// Runs the command.
pub fn run(options: &DoctorOptions) -> Result<(), CommandError> {
    let variables = std::env::vars_os()
        .map(|(name, text)| (name.to_string_lossy().into_owned(), text.to_string_lossy().into_owned()));
    let variables = variables.collect();
    if options.pair {
        return pair::run(options.json);
    }
    if let Some(path) = &options.machine {
        let machine = Machine::open(path)?;
        let report = DoctorReport::gather(machine.root(), &variables);
        return output::print(&if options.json {
            output::json(&report)?
        } else {
            text::render_machine(&report, &path.display().to_string())
        });
    }
    let report = DoctorReport::gather(Path::new("/"), &variables);
    output::print(&if options.json { output::json(&report)? } else { text::render(&report) })?;
    if report.runs() { Ok(()) } else { Err(CommandError::Reported) }
}
