//! The output of rank 0: the file of the profile, and a summary on standard output.
//!
//! Owns the file until it is complete, and the text. Must not know how anything is measured.

use super::choices::FastestPlan;
use super::session::TuningSession;
use crate::output::{counted, duration};
use flexring::config::Size;
use flexring::plan::tuning::{LinkClass, TuningProfile, write};
use flexring::{Error, Result};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// A profile that is written to another name until it is complete.
pub struct ProfileOutput {
    path: PathBuf,
    unfinished: PathBuf,
    file: File,
}

impl ProfileOutput {
    /// Creates the file.
    ///
    /// # Errors
    /// `System` if it cannot be created.
    pub fn new(path: &Path) -> Result<Self> {
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(".unfinished");
        let unfinished = PathBuf::from(unfinished);
        let file = File::create(&unfinished)
            .map_err(|cause| Error::io(format!("cannot create {}", unfinished.display()), cause))?;
        Ok(Self { path: path.to_owned(), unfinished, file })
    }

    /// Writes the profile, and prints the summary.
    ///
    /// # Errors
    /// `System` if the file or standard output cannot be written.
    pub fn close(
        mut self,
        profile: &TuningProfile,
        fastest: &[FastestPlan],
        session: &TuningSession,
    ) -> Result<()> {
        let written = self.file.write_all(write(profile).as_bytes()).and_then(|()| self.file.sync_all());
        let named = written.and_then(|()| std::fs::rename(&self.unfinished, &self.path));
        let path = self.path.display().to_string();
        named.map_err(|cause| Error::io(format!("cannot write {path}"), cause))?;
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

impl Drop for ProfileOutput {
    fn drop(&mut self) {
        // It is gone if the profile is complete.
        let _ = std::fs::remove_file(&self.unfinished);
    }
}

fn summary(profile: &TuningProfile, fastest: &[FastestPlan]) -> String {
    let TuningProfile { cluster, nodes, classes, slots, sockets_per_link, .. } = profile;
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
            text += &format!(
                ", link up {}, down {}, {}",
                rate(uplink.up),
                rate(uplink.down),
                duration(uplink.latency as f64 * 1e-9)
            );
        }
        text.push('\n');
    }
    for best in fastest {
        text += &format!(
            "all-reduces of {}: {} ({}), sub-chunks of {}: {}; without a profile {}\n",
            Size(best.bytes),
            best.algorithm.name(),
            best.lowering.name(),
            best.subchunk,
            duration(best.seconds),
            duration(best.default_seconds)
        );
    }
    text + &format!("{slots} slots, {}\n", counted(*sockets_per_link, "socket") + " per link")
}

fn rate(bytes: u64) -> String {
    match bytes as f64 {
        rate if rate >= 1e9 => format!("{:.2} GB/s", rate / 1e9),
        rate => format!("{:.1} MB/s", rate / 1e6),
    }
}
