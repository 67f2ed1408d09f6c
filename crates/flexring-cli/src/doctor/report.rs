//! The report: the facts and the conclusions from them.
//!
//! Owns the keys of the conclusions in JSON.

use super::facts::Facts;
use super::findings::{self, Finding, Severity};
use super::process::Variables;
use super::transports::TransportReport;
use serde::Serialize;
use std::path::Path;

/// The report of `flexring doctor`.
#[derive(Clone, Debug, Serialize)]
pub struct DoctorReport {
    #[serde(flatten)]
    pub facts: Facts,
    pub transports: Vec<TransportReport>,
    /// The findings, the most severe first.
    pub findings: Vec<Finding>,
}

impl DoctorReport {
    /// The report about this process on the machine whose `/sys`, `/proc` and `/dev` are below `root`.
    pub fn gather(root: &Path, variables: &Variables) -> Self {
        Self::new(Facts::gather(root, variables))
    }

    /// Draws the conclusions from the facts.
    pub fn new(facts: Facts) -> Self {
        let transports = TransportReport::all(&facts);
        let findings = findings::diagnose(&facts, &transports);
        Self { facts, transports, findings }
    }

    /// Whether a communicator with these settings can be created here.
    pub fn runs(&self) -> bool {
        self.findings.iter().all(|finding| finding.severity != Severity::Error)
    }
}
