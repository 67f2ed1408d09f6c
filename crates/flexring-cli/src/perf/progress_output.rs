//! The output of rank 0: the table on standard output, the progress bar and the JSON report.
//!
//! Owns the order of writes: a row is printed as soon as it is measured, and the report on disk is written
//! before the row is printed.

use super::gpu;
use super::options::{Memory, PerfOptions, VectorDevice};
use super::progress_bar::Progress;
use super::report::{ModelRow, PerfReport, PerfRow, RankInfo, ReportFile};
use super::table;
use flexring::{AdaptationStatistics, Error, RailStatistics, Result};
use flexring_core::config::{Config, environment};
use std::io::Write;
use std::num::NonZeroUsize;
use std::time::Instant;

/// Settings that identify a rank and its GPU. They are left out of the report because they do not affect
/// results.
const IDENTITY: [&str; 5] =
    ["FLEXRING_RANK", "FLEXRING_WORLD_SIZE", "FLEXRING_MASTER_ADDR", "FLEXRING_MASTER_PORT", "FLEXRING_GPU"];

/// The table, the progress bar and the report of one measurement.
#[derive(Debug)]
pub struct ProgressOutput {
    report: PerfReport,
    file: Option<ReportFile>,
    progress: Progress,
    /// Whether training steps are measured.
    is_model: bool,
}

impl ProgressOutput {
    /// Output for a world of `world` ranks. Writes an empty report, so that an unwritable path fails before
    /// anything is measured.
    ///
    /// # Errors
    /// `System` if the report cannot be written.
    pub fn new(options: &PerfOptions, config: &Config, world: usize) -> Result<Self> {
        let rows = config.table(environment).into_iter();
        let settings = rows.filter(|row| row.value != row.default && !IDENTITY.contains(&row.name));
        let report = PerfReport {
            version: env!("CARGO_PKG_VERSION"),
            collective: options.collective.name(),
            world,
            settings: settings.map(|row| (row.name, row.value)).collect(),
            memory: match (options.device, options.memory) {
                (VectorDevice::Cuda, Some(Memory::Registered)) => "gpu, registered",
                (VectorDevice::Cuda, _) => "gpu",
                (VectorDevice::Host, Some(Memory::Heap)) => "heap",
                (VectorDevice::Host, Some(Memory::Registered)) => "registered",
                (VectorDevice::Host, _) => "pool",
            },
            graph: options.graph.map(NonZeroUsize::get),
            ..PerfReport::default()
        };
        let file = options.json.as_deref().map(ReportFile::new);
        if let Some(file) = &file {
            file.save(&report)?;
        }
        let rows: usize = options.datatype.0.iter().map(|dtype| options.ops_of(*dtype).count()).sum();
        let rows = if options.model.is_some() { rows } else { rows * options.sizes().count() };
        let lender = options.rank_of.filter(|_| options.borrow_terminal);
        let progress = if options.rank_of.is_some() && lender.is_none() {
            Progress::hidden()
        } else {
            Progress::new(rows as u64, lender)
        };
        Ok(Self { report, file, progress, is_model: options.model.is_some() })
    }

    /// Prints the ranks, the communicator's summary, the settings and the table's head. `least` is the least
    /// time of any schedule, for each byte.
    ///
    /// # Errors
    /// `System` if standard output or the report cannot be written.
    pub fn open(
        &mut self,
        options: &PerfOptions,
        summary: &str,
        ranks_per_core: usize,
        ranks: Vec<RankInfo>,
        least: Option<f64>,
    ) -> Result<()> {
        self.report.least_seconds_per_byte = least;
        summary.clone_into(&mut self.report.summary);
        self.report.ranks = ranks;
        let report = &self.report;
        let sizes = match (&options.model, options.stepbytes) {
            (Some(model), _) => format!("model {} elements {}", model.name, model.elements()),
            (None, Some(bytes)) => {
                format!(
                    "minBytes {} maxBytes {} step: {}(bytes)",
                    options.minbytes.0, options.maxbytes.0, bytes.0
                )
            }
            (None, None) => format!(
                "minBytes {} maxBytes {} step: {}(factor)",
                options.minbytes.0, options.maxbytes.0, options.stepfactor
            ),
        };
        let mut head = format!(
            "# flexring {}, {}, {} {}\n# {sizes} warmup iters: {} iters: {} validation: {} \
             memory: {}{}\n#\n# Using ranks\n",
            report.version,
            report.collective,
            report.world,
            if report.world == 1 { "rank" } else { "ranks" },
            options.warmup(),
            options.iterations(),
            options.check,
            report.memory,
            report.graph.map_or_else(String::new, |calls| format!(" graph: {calls}")),
        );
        for RankInfo { rank, pid, host, gpu, .. } in &report.ranks {
            head += &format!("#  Rank {rank:2} Group  0 Pid {pid:6} on {host:>10}");
            if let Some(gpu) = gpu {
                head += &format!(" device {:2} [{}] {}", gpu.number, gpu.address, gpu.name);
            }
            head.push('\n');
        }
        if let Some(line) = gpu::shared(&report.ranks) {
            head += &format!("# {line}\n");
        }
        if ranks_per_core > 1 {
            head += &format!(
                "# Up to {ranks_per_core} ranks share a core: short calls also wait until the ranks get their turns\n"
            );
        }
        head += &format!("#\n# {summary}\n");
        for (name, value) in &report.settings {
            head += &format!("# {name}={value}\n");
        }
        head += &format!("#\n{}", if self.is_model { table::MODEL_HEAD } else { table::HEAD });
        self.print(&head)?;
        self.save()
    }

    /// Shows what is measured beside the progress bar. `message` is evaluated only when the bar is redrawn.
    pub fn show(&mut self, now: Instant, message: impl FnOnce() -> String) {
        self.progress.show(now, message);
    }

    /// Prints a row, with its notes on the lines below it, adds it to the report and advances the progress
    /// bar.
    ///
    /// # Errors
    /// `System` if standard output or the report cannot be written.
    pub fn row(&mut self, mut row: PerfRow, notes: &[String]) -> Result<()> {
        let least = self.report.least_us(row.size, [&mut row.out_of_place, &mut row.in_place]);
        row.least_us = least.map(|(least, _)| least);
        let lines = table::row(&row);
        self.report.add(row);
        self.print_row(lines, least, notes)
    }

    /// Prints a training step, as [`row`](Self::row).
    ///
    /// # Errors
    /// As for [`row`](Self::row).
    pub fn model(&mut self, mut row: ModelRow, notes: &[String]) -> Result<()> {
        let least = self.report.least_us(row.size, [&mut row.bucketed, &mut row.fused]);
        row.least_us = least.map(|(least, _)| least);
        let lines = table::model_row(&row);
        self.report.models.push(row);
        self.print_row(lines, least, notes)
    }

    /// Adds what each RDMA port has carried to the report, by rank.
    pub fn set_rails(&mut self, rails: Vec<Vec<RailStatistics>>) {
        for (rank, rails) in self.report.ranks.iter_mut().zip(rails) {
            rank.rails = rails;
        }
    }

    /// Adds links, and measured and predicted times, to the report.
    pub fn set_adaptation(&mut self, statistics: AdaptationStatistics) {
        self.report.adaptation = Some(statistics);
    }

    /// Prints the end of the table unless `error` interrupted it, and writes the final report.
    ///
    /// # Errors
    /// `System` if standard output or the report cannot be written.
    pub fn close(mut self, error: Option<String>) -> Result<()> {
        if error.is_none() {
            let wrong = self.report.wrong();
            let foot = if self.is_model {
                table::model_foot(wrong)
            } else {
                table::foot(wrong, self.report.avg_busbw)
            };
            self.print(&foot)?;
            if let Some(statistics) = &self.report.adaptation {
                self.print(&table::adaptation(statistics))?;
            }
        }
        self.report.error = error;
        self.file.as_ref().map_or(Ok(()), |file| file.finish(&self.report))
    }

    fn save(&self) -> Result<()> {
        self.file.as_ref().map_or(Ok(()), |file| file.save(&self.report))
    }

    /// Prints a row that was added to the report. `least`: the least time of any schedule, and the times of
    /// the row as multiples of it.
    fn print_row(
        &mut self,
        mut lines: String,
        least: Option<(f64, [f64; 2])>,
        notes: &[String],
    ) -> Result<()> {
        self.save()?;
        let least = least.map(|(least, ratios)| table::least(least, ratios));
        least.iter().chain(notes).for_each(|note| lines += &format!("\n#   {note}"));
        self.progress.advance();
        self.print(&lines)
    }

    fn print(&self, lines: &str) -> Result<()> {
        let write = || {
            let mut stdout = std::io::stdout().lock();
            writeln!(stdout, "{lines}").and_then(|()| stdout.flush())
        };
        self.progress.suspend(write).map_err(|cause| Error::io("cannot write to standard output", cause))
    }
}
