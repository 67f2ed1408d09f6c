//! The output of rank 0: the file of the profile, and a summary on standard output.
//!
//! Owns the text, and the failure of all ranks if the file cannot be written.

use super::choices::FastestPlan;
use super::session::TuningSession;
use crate::output::{counted, duration};
use crate::output_file::OutputFile;
use flexring::{Communicator, Error, Result};
use flexring_core::config::{Algorithm, Size};
use flexring_plan::tuning::{LinkClass, MeasuredUplink, TuningProfile, write};
use std::io::Write;
use std::path::Path;

/// Longest reason in bytes that rank 0 sends to the others.
const LONGEST_REASON: usize = 1024;

/// The file of the profile, on rank 0.
pub struct ProfileOutput(Option<OutputFile>);

impl ProfileOutput {
    /// Checks on rank 0 that the file can be written. All ranks of `comm` call this.
    ///
    /// # Errors
    /// `System` with the reason on all ranks if it cannot; any error of a call.
    pub fn new(comm: &Communicator, path: &Path) -> Result<Self> {
        let file = (comm.rank() == 0).then(|| OutputFile::new(path));
        let mut reason = [0u8; LONGEST_REASON];
        if let Some(Err(error)) = file.as_ref().map(OutputFile::check) {
            let message = error.message().as_bytes();
            let len = message.len().min(LONGEST_REASON);
            reason[..len].copy_from_slice(&message[..len]);
        }
        comm.broadcast(&mut reason, 0)?;
        let len = reason.iter().position(|byte| *byte == 0).unwrap_or(LONGEST_REASON);
        if len > 0 {
            let reason = String::from_utf8_lossy(&reason[..len]);
            return Err(Error::system(format!(
                "the profile cannot be written on the node of rank 0: {reason}"
            )));
        }
        Ok(Self(file))
    }

    /// Writes the profile, and prints the summary, on rank 0.
    ///
    /// # Errors
    /// `System` if the file or standard output cannot be written.
    pub fn close(
        self,
        profile: &TuningProfile,
        fastest: &[FastestPlan],
        session: &TuningSession,
    ) -> Result<()> {
        let Some(file) = self.0 else { return Ok(()) };
        file.write(write(profile).as_bytes())?;
        let path = file.path().display();
        let mut text = summary(profile, fastest);
        if session.is_cut {
            text += "some measurements were left out for lack of time: fewer --sizes or a shorter --time-ms make room\n";
        }
        text +=
            &format!("wrote {path} after {}: FLEXRING_TUNING={path} loads it\n", duration(session.elapsed()));
        let printed = std::io::stdout().write_all(text.as_bytes());
        printed.map_err(|cause| Error::io("cannot write to standard output", cause))
    }
}

fn summary(profile: &TuningProfile, fastest: &[FastestPlan]) -> String {
    let TuningProfile { cluster, nodes, switches, classes, slots, sockets_per_link, .. } = profile;
    let mut text = format!(
        "{} on {}, transport {}, fingerprint {}\n",
        counted(cluster.world(), "rank"),
        counted(nodes.len(), "node"),
        cluster.transport,
        cluster.fingerprint()
    );
    for LinkClass { name, pairs, latency, slowest, fastest } in classes {
        text += &format!(
            "links {name}: {}, {}, {} to {}\n",
            counted(*pairs, "pair"),
            duration(*latency as f64 * 1e-9),
            rate(*slowest),
            rate(*fastest)
        );
    }
    for (node, measured) in cluster.nodes.iter().zip(nodes) {
        text +=
            &format!("node {}: copies {}, sums {}", node.host, rate(measured.copy), rate(measured.reduce));
        if let Some(uplink) = measured.uplink {
            text += &format!(", {}", uplink_text(uplink));
        }
        text.push('\n');
    }
    for (number, uplink) in switches.iter().enumerate() {
        text += &format!("switch {number} below the root: {}\n", uplink_text(*uplink));
    }
    for best in fastest {
        text += &format!(
            "all-reduces of {}: {}, sub-chunks of {}: {}; without a profile {}\n",
            Size(best.bytes),
            match best.algorithm {
                Algorithm::Auto => "the plan without a profile".to_owned(),
                algorithm => format!("{} ({})", algorithm.name(), best.lowering.name()),
            },
            best.subchunk,
            duration(best.seconds),
            duration(best.untuned_seconds)
        );
    }
    text + &format!("{slots} slots, {}\n", counted(*sockets_per_link, "socket") + " per link")
}

fn uplink_text(MeasuredUplink { up, down, latency, burst }: MeasuredUplink) -> String {
    let burst = match burst {
        None | Some(0) => String::new(),
        Some(bytes) => format!(", {} KiB at once after a pause", bytes.div_ceil(1024)),
    };
    format!("link up {}, down {}, {}{burst}", rate(up), rate(down), duration(latency as f64 * 1e-9))
}

fn rate(bytes: u64) -> String {
    match bytes as f64 {
        rate if rate >= 1e9 => format!("{:.2} GB/s", rate / 1e9),
        rate => format!("{:.1} MB/s", rate / 1e6),
    }
}
