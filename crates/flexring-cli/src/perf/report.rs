//! The report of a measurement, as `--json` writes it.
//!
//! Owns the statistics, the names of the JSON fields and the file.

use crate::output_file::OutputFile;
use flexring::{AdaptationStatistics, Error, RailStatistics, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// The whole report. Fields that are not known yet are empty.
#[derive(Debug, Default, Serialize)]
pub struct PerfReport {
    /// Version of flexring.
    pub version: &'static str,
    /// Name of the collective.
    pub collective: &'static str,
    /// Number of ranks.
    pub world: usize,
    /// The communicator's summary line.
    pub summary: String,
    /// The ranks, in ascending order.
    pub ranks: Vec<RankInfo>,
    /// The least time of any all-reduce by the bandwidths of the links, if a topology or a profile says what
    /// these are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub least_seconds_per_byte: Option<f64>,
    /// Settings that differ from their defaults, except those that identify a rank.
    pub settings: BTreeMap<&'static str, String>,
    /// Memory of the vectors: `pool`, `heap`, `registered` or `gpu`.
    pub memory: &'static str,
    /// Calls of a graph, with `--graph`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub graph: Option<usize>,
    /// The rows measured so far.
    pub rows: Vec<PerfRow>,
    /// The training steps measured so far, of `--model`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<ModelRow>,
    /// Mean of the bus bandwidths of all rows, in GB/s.
    pub avg_busbw: f64,
    /// Links, and measured and predicted times, with `FLEXRING_ADAPT=1`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adaptation: Option<AdaptationStatistics>,
    /// The error that ended the measurement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The process of a rank.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RankInfo {
    /// Rank in the world.
    pub rank: usize,
    /// Process id.
    pub pid: u32,
    /// Host name.
    pub host: String,
    /// GPU that held the vectors; `None` for vectors on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<RankGpu>,
    /// What each RDMA port of the rank has carried, once all rows are measured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rails: Vec<RailStatistics>,
}

/// The GPU of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RankGpu {
    /// Index among the GPUs that the rank can use.
    pub number: u32,
    /// PCI address.
    pub address: String,
    /// Product name.
    pub name: String,
}

/// A row of the table.
#[derive(Debug, Serialize)]
pub struct PerfRow {
    /// Bytes of the longer vector.
    pub size: usize,
    /// Elements of the longer vector, or of one part for collectives with a part per rank.
    pub count: usize,
    /// Element type.
    #[serde(rename = "type")]
    pub dtype: &'static str,
    /// Reduction operation; `none` for collectives that do not reduce.
    pub redop: &'static str,
    /// Root rank; -1 for collectives without a root.
    pub root: i64,
    /// The least time of any schedule in microseconds, by [`PerfReport::least_seconds_per_byte`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub least_us: Option<f64>,
    /// Timing of out-of-place calls.
    pub out_of_place: Timing,
    /// Timing of in-place calls.
    pub in_place: Timing,
}

/// The all-reduces of one training step.
#[derive(Debug, Serialize)]
pub struct ModelRow {
    /// Name of the model, or the lengths of its gradients.
    pub model: String,
    /// Bytes of all gradients.
    pub size: usize,
    /// Element type.
    #[serde(rename = "type")]
    pub dtype: &'static str,
    /// Reduction operation.
    pub redop: &'static str,
    /// Number of gradients.
    pub gradients: usize,
    /// Bytes of each bucket, in the order of the calls.
    pub buckets: Vec<usize>,
    /// The least time of any schedule in microseconds, by [`PerfReport::least_seconds_per_byte`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub least_us: Option<f64>,
    /// Timing of all buckets, from the start of the first call to the end of the last one.
    pub bucketed: Timing,
    /// Timing of one vector of the same size.
    pub fused: Timing,
    /// Median of the ratios of the two, each of one iteration.
    pub ratio: f64,
}

/// Times in microseconds, of the ranks that `--average` names; bandwidths in GB/s. Calls on GPUs are timed
/// together, so their `min`, `median`, `p95` and `max` are `None`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Timing {
    /// Mean over the iterations.
    pub mean_us: f64,
    /// Number of iterations.
    pub iterations: usize,
    /// Shortest iteration.
    pub min: Option<f64>,
    /// Median of the iterations.
    pub median: Option<f64>,
    /// 95th percentile of the iterations.
    pub p95: Option<f64>,
    /// Longest iteration.
    pub max: Option<f64>,
    /// Median time from the start of a call on a GPU until its result is there, of calls that are not
    /// enqueued behind others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waited_us: Option<f64>,
    /// Median time that such a call keeps the caller's thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub caller_us: Option<f64>,
    /// `mean_us` divided by the `least_us` of the row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub least_ratio: Option<f64>,
    /// First call of this size, which is a warm-up unless there are none.
    pub first: Option<f64>,
    /// Algorithm bandwidth: bytes divided by mean time.
    pub algbw: f64,
    /// Bus bandwidth: `algbw` times the bus factor of the collective.
    pub busbw: f64,
    /// Wrong elements on all ranks together; `None` if results were not checked.
    pub wrong: Option<u64>,
}

impl Timing {
    /// The statistics of calls that took `times` microseconds each, without the first `warmup` ones. `bytes`
    /// is the size of the vector, and `bus_factor` is busbw / algbw.
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
            median: Some(median(&sorted)),
            p95: Some(sorted[(n * 95).div_ceil(100) - 1]),
            max: Some(*max),
            ..Self::of_batch(*first, mean_us, n, bytes, bus_factor)
        }
    }

    /// The statistics of `iterations` calls that were timed together: `first` and `mean_us` are in
    /// microseconds.
    pub fn of_batch(first: f64, mean_us: f64, iterations: usize, bytes: usize, bus_factor: f64) -> Self {
        let algbw = if mean_us > 0.0 { bytes as f64 / mean_us / 1e3 } else { 0.0 };
        Self { mean_us, iterations, first: Some(first), algbw, busbw: algbw * bus_factor, ..Self::default() }
    }
}

/// The median of times in ascending order, of which there is at least one.
pub fn median(sorted: &[f64]) -> f64 {
    f64::midpoint(sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2])
}

impl PerfReport {
    /// The least time of a vector in microseconds, and `timings` as multiples of it, which are noted there.
    pub fn least_us(&self, bytes: usize, timings: [&mut Timing; 2]) -> Option<(f64, [f64; 2])> {
        let least = self.least_seconds_per_byte? * bytes as f64 * 1e6;
        Some((least, timings.map(|timing| *timing.least_ratio.insert(timing.mean_us / least))))
    }

    /// Adds a row and updates the average bus bandwidth.
    pub fn add(&mut self, row: PerfRow) {
        self.rows.push(row);
        let sum: f64 = self.rows.iter().map(|row| row.out_of_place.busbw + row.in_place.busbw).sum();
        self.avg_busbw = sum / (2 * self.rows.len()) as f64;
    }

    /// The number of wrong elements in all rows.
    pub fn wrong(&self) -> u64 {
        let rows = self.rows.iter().flat_map(|row| [&row.out_of_place, &row.in_place]);
        let models = self.models.iter().flat_map(|row| [&row.bucketed, &row.fused]);
        rows.chain(models).filter_map(|timing| timing.wrong).sum()
    }
}

/// The file of a report.
#[derive(Debug)]
pub struct ReportFile(OutputFile);

impl ReportFile {
    /// A report file at `path`. Does not access it yet.
    pub fn new(path: &Path) -> Self {
        Self(OutputFile::new(path))
    }

    /// Writes an unfinished report. Special files, such as /dev/stdout, are written by
    /// [`finish`](Self::finish) only.
    ///
    /// # Errors
    /// `System` if it cannot be written.
    pub fn save(&self, report: &impl Serialize) -> Result<()> {
        if self.0.is_special() { Ok(()) } else { self.finish(report) }
    }

    /// Writes the final report.
    ///
    /// # Errors
    /// `System` if it cannot be written.
    pub fn finish(&self, report: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_vec_pretty(report)
            .map_err(|cause| Error::internal(format!("cannot write JSON: {cause}")))?;
        text.push(b'\n');
        self.0.write(&text)
    }

    /// Adds `error` to the report on disk after rank 0 died before it could. A report that contains an error
    /// is not changed.
    ///
    /// # Errors
    /// `System` if it cannot be written.
    pub fn amend(&self, error: &str) -> Result<()> {
        if self.0.is_special() {
            return Ok(());
        }
        let text = std::fs::read(self.0.path()).unwrap_or_default();
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
    fn statistics_exclude_warm_ups() {
        let times: Vec<f64> = [900.0, 800.0].into_iter().chain((1..=20).map(f64::from)).collect();
        let timing = Timing::of(&times, 2, 21_000, 1.5);
        assert_eq!((timing.mean_us, timing.min, timing.max), (10.5, Some(1.0), Some(20.0)));
        assert_eq!(timing.iterations, 20);
        assert_eq!((timing.median, timing.p95, timing.first), (Some(10.5), Some(19.0), Some(900.0)));
        assert_eq!((timing.algbw, timing.busbw), (2.0, 3.0));
    }

    #[test]
    fn an_error_is_added_to_a_saved_report() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = ReportFile::new(&folder.path().join("report.json"));
        let mut report = PerfReport { version: "1", world: 2, ..PerfReport::default() };
        report.add(PerfRow {
            size: 8,
            count: 2,
            dtype: "float",
            redop: "sum",
            root: -1,
            least_us: None,
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
