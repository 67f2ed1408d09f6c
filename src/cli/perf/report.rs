//! What was measured, as `--json` writes it.
//!
//! Owns the statistics and the names of the fields. Must not know how it was measured.

use flexring::{Error, ErrorKind, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Everything. What is not known yet is empty.
#[derive(Debug, Default, Serialize)]
pub struct PerfReport {
    /// The version of flexring.
    pub version: &'static str,
    /// What was called.
    pub collective: &'static str,
    /// How many ranks there are.
    pub world: usize,
    /// What the communicator says of itself.
    pub summary: String,
    /// The ranks, in order.
    pub ranks: Vec<RankInfo>,
    /// The settings that are not the defaults.
    pub settings: BTreeMap<&'static str, String>,
    /// Where vectors lay: `pool`, `heap` or `gpu`.
    pub memory: &'static str,
    /// What was measured.
    pub rows: Vec<PerfRow>,
    /// The mean of all bus bandwidths, in GB/s.
    pub avg_busbw: f64,
    /// What ended it early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Where a rank runs.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RankInfo {
    /// The rank.
    pub rank: usize,
    /// Its process.
    pub pid: u32,
    /// Its machine.
    pub host: String,
    /// Its GPU, if vectors were on one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<RankGpu>,
}

/// The GPU of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RankGpu {
    /// Its number among those that the rank sees.
    pub number: u32,
    /// Its PCI address.
    pub address: String,
    /// What it is called.
    pub name: String,
}

/// A row of the table.
#[derive(Debug, Serialize)]
pub struct PerfRow {
    /// Bytes; of all parts together.
    pub size: usize,
    /// Elements; of one part, where each rank has a part.
    pub count: usize,
    /// Their type.
    #[serde(rename = "type")]
    pub dtype: &'static str,
    /// The operation; `none` if there is none.
    pub redop: &'static str,
    /// The rank at which it begins or ends; -1 if it is like all others.
    pub root: i64,
    /// The result in another vector.
    pub out_of_place: Timing,
    /// The result in the same vector.
    pub in_place: Timing,
}

/// Times in microseconds, averaged over the ranks; bandwidths in GB/s. Calls on GPUs have no times of their own.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Timing {
    /// The mean over the iterations.
    pub mean_us: f64,
    /// The shortest iteration.
    pub min: Option<f64>,
    /// Half of the iterations were shorter.
    pub median: Option<f64>,
    /// 95 of 100 iterations were not longer.
    pub p95: Option<f64>,
    /// The longest iteration.
    pub max: Option<f64>,
    /// The very first call of this size: a warm-up, if there is one.
    pub first: Option<f64>,
    /// Bytes by mean time.
    pub algbw: f64,
    /// The same, scaled to what each link carries.
    pub busbw: f64,
    /// How many elements were wrong, on all ranks together; none if nobody looked.
    pub wrong: Option<u64>,
}

impl Timing {
    /// Sums up calls that took so many microseconds, of which the first `warmup` do not count, and which had a bus
    /// carry their bytes times `bus_factor`.
    pub fn of(times: &[f64], warmup: usize, bytes: usize, bus_factor: f64) -> Self {
        let mut sorted = times[warmup.min(times.len())..].to_vec();
        sorted.sort_by(f64::total_cmp);
        let (Some(first), Some(min), Some(max)) = (times.first(), sorted.first(), sorted.last()) else {
            return Self::default();
        };
        let n = sorted.len();
        let mean_us = sorted.iter().sum::<f64>() / n as f64;
        Self {
            min: Some(*min),
            median: Some(f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2])),
            p95: Some(sorted[(n * 95).div_ceil(100) - 1]),
            max: Some(*max),
            ..Self::of_all(*first, mean_us, bytes, bus_factor)
        }
    }

    /// Sums up calls that were timed together.
    pub fn of_all(first: f64, mean_us: f64, bytes: usize, bus_factor: f64) -> Self {
        let algbw = if mean_us > 0.0 { bytes as f64 / mean_us / 1e3 } else { 0.0 };
        Self { mean_us, first: Some(first), algbw, busbw: algbw * bus_factor, ..Self::default() }
    }
}

impl PerfReport {
    /// Takes a row in.
    pub fn add(&mut self, row: PerfRow) {
        self.rows.push(row);
        let sum: f64 = self.rows.iter().map(|row| row.out_of_place.busbw + row.in_place.busbw).sum();
        self.avg_busbw = sum / (2 * self.rows.len()) as f64;
    }

    /// How many elements were wrong in all.
    pub fn wrong(&self) -> u64 {
        let timings = self.rows.iter().flat_map(|row| [&row.out_of_place, &row.in_place]);
        timings.filter_map(|timing| timing.wrong).sum()
    }
}

/// The file that a report is written to.
#[derive(Debug)]
pub struct ReportFile {
    path: PathBuf,
    /// Something like /dev/stdout, which is written once and not replaced.
    special: bool,
}

impl ReportFile {
    /// The file of this name.
    pub fn new(path: &Path) -> Self {
        let special = path.metadata().is_ok_and(|metadata| !metadata.is_file());
        Self { path: path.to_owned(), special }
    }

    /// Writes what there is so far.
    ///
    /// # Errors
    /// `System` if it cannot be written.
    pub fn save(&self, report: &impl Serialize) -> Result<()> {
        if self.special { Ok(()) } else { self.finish(report) }
    }

    /// Writes what there is in the end.
    ///
    /// # Errors
    /// `System` if it cannot be written.
    pub fn finish(&self, report: &impl Serialize) -> Result<()> {
        let failed = |cause| Error::system(format!("cannot write {}", self.path.display()), cause);
        let mut text = serde_json::to_vec_pretty(report)
            .map_err(|cause| Error::new(ErrorKind::Internal, format!("cannot write JSON: {cause}")))?;
        text.push(b'\n');
        if self.special {
            return std::fs::write(&self.path, text).map_err(failed);
        }
        // Whoever reads it meanwhile, or after a rank was killed, finds a whole report.
        let mut draft = self.path.clone().into_os_string();
        draft.push(".part");
        std::fs::write(&draft, text).and_then(|()| std::fs::rename(&draft, &self.path)).map_err(failed)
    }

    /// Adds `error` to a report whose writer did not live to do it; a report that tells an error is left as it is.
    ///
    /// # Errors
    /// `System` if it cannot be written.
    pub fn amend(&self, error: &str) -> Result<()> {
        if self.special {
            return Ok(());
        }
        let text = std::fs::read(&self.path).unwrap_or_default();
        let mut report = serde_json::from_slice(&text).unwrap_or_else(|_| serde_json::json!({ "rows": [] }));
        match report.as_object_mut() {
            Some(fields) if !fields.contains_key("error") => fields.insert("error".to_owned(), error.into()),
            _ => return Ok(()),
        };
        self.finish(&report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_summed_up_without_warm_ups() {
        let times: Vec<f64> = [900.0, 800.0].into_iter().chain((1..=20).map(f64::from)).collect();
        let timing = Timing::of(&times, 2, 21_000, 1.5);
        assert_eq!((timing.mean_us, timing.min, timing.max), (10.5, Some(1.0), Some(20.0)));
        assert_eq!((timing.median, timing.p95, timing.first), (Some(10.5), Some(19.0), Some(900.0)));
        assert_eq!((timing.algbw, timing.busbw), (2.0, 3.0));
    }

    #[test]
    fn an_error_is_added_to_what_was_saved() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = ReportFile::new(&folder.path().join("report.json"));
        let mut report = PerfReport { version: "1", world: 2, ..PerfReport::default() };
        report.add(PerfRow {
            size: 8,
            count: 2,
            dtype: "float",
            redop: "sum",
            root: -1,
            out_of_place: Timing::default(),
            in_place: Timing { busbw: 4.0, ..Timing::default() },
        });
        file.save(&report).expect("written");
        file.amend("rank 1 died").expect("amended");
        file.amend("and so on").expect("left alone");
        let read = std::fs::read(folder.path().join("report.json")).expect("there");
        let read: serde_json::Value = serde_json::from_slice(&read).expect("JSON");
        assert_eq!(read["error"], "rank 1 died");
        assert_eq!(read["rows"][0]["type"], "float");
        assert_eq!(read["avg_busbw"], 2.0);
    }
}
