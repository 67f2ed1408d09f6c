//! The results of `flexring simulate`, as text, CSV or JSON.
//!
//! Owns the three formats.

use crate::error::CommandError;
use crate::output::{self, duration};
use crate::plan::{Planned, without_bound};
use flexring_core::config::Size;
use flexring_plan::topology::Topology;
use flexring_simulator::simulator::{SimulatedRun, SimulationParameters};
use serde_json::{Value, json};

/// A simulated size.
pub struct SimulatedSize {
    pub bytes: u64,
    /// The name of the schedule.
    pub schedule: String,
    /// Longest sub-chunk in bytes.
    pub subchunk: usize,
    pub run: SimulatedRun,
    /// The fastest schedule of the other algorithms, and its time in seconds, if it was simulated.
    pub other: Option<(String, f64)>,
}

impl SimulatedSize {
    /// `; best other: ring, 61.2 ms`, or nothing if none was simulated.
    pub fn other_clause(&self) -> String {
        let clause =
            |(name, seconds): &(String, f64)| format!("; best other: {name}, {}", duration(*seconds));
        self.other.as_ref().map(clause).unwrap_or_default()
    }
}

/// All results.
pub struct Report<'a> {
    pub planned: &'a Planned,
    pub parameters: SimulationParameters,
    pub sizes: Vec<SimulatedSize>,
    /// The lower bound of any schedule.
    pub seconds_per_byte_at_least: f64,
}

/// Most links that are listed; the rest are those of nodes and switches like the listed ones.
const MOST_LINKS: usize = 32;

impl Report<'_> {
    /// A table of sizes; for a single size also the links and the critical path.
    pub fn text(&self) -> String {
        let Planned { topology, .. } = self.planned;
        let mut text = format!("{}\n{}\n\n", self.planned.place(), self.planned.selection.reason);
        text += &format!(
            "  {:>10}  {:<16}  {:>10}  {:>8}  {:>10}  {:>8}  busiest link\n",
            "size", "schedule", "time", "of bound", "messages", "GB/s"
        );
        for size in &self.sizes {
            let SimulatedSize { bytes, schedule, run, .. } = size;
            let link = run.busiest().map_or_else(
                || "none".to_owned(),
                |link| format!("{}, busy {:.0} %", topology.link_name(link.vertex), 100.0 * link.busy),
            );
            text += &format!(
                "  {:>10}  {schedule:<16}  {:>10}  {:>8}  {:>10}  {:>8.2}  {link}\n",
                amount(*bytes),
                duration(run.seconds()),
                self.of_bound(size).map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")),
                run.messages,
                *bytes as f64 / run.seconds().max(1e-12) / 1e9,
            );
        }
        match &self.sizes[..] {
            [only] => {
                let bound = self.seconds_per_byte_at_least * only.bytes as f64;
                let bound = match self.planned.schedule().helpers().len() {
                    0 => {
                        format!("\nno schedule takes less than {}{}\n", duration(bound), only.other_clause())
                    }
                    helpers => format!("\n{}\n", without_bound(helpers)),
                };
                text + "\n" + &links(topology, &only.run) + &path(&only.run) + &bound
            }
            _ => text,
        }
    }

    /// A line for each size, after a line with the names of the columns.
    pub fn csv(&self) -> String {
        let mut text =
            "topology,schedule,ranks,bytes,seconds,bound_seconds,messages,busiest_link,busy\n".to_owned();
        let quoted = |field: &str| format!("\"{}\"", field.replace('"', "\"\""));
        for SimulatedSize { bytes, schedule, run, .. } in &self.sizes {
            let link = run.busiest();
            let name = link.map_or("", |link| self.planned.topology.link_name(link.vertex));
            text += &format!(
                "{},{},{},{bytes},{:.12},{:.12},{},{},{:.6}\n",
                quoted(&self.planned.called),
                quoted(schedule),
                self.planned.topology.world(),
                run.seconds(),
                self.seconds_per_byte_at_least * *bytes as f64,
                run.messages,
                quoted(name),
                link.map_or(0.0, |link| link.busy),
            );
        }
        text
    }

    /// All results with their links, and the parameters.
    pub fn json(&self) -> Result<String, CommandError> {
        let topology = &self.planned.topology;
        let results = self.sizes.iter().map(|SimulatedSize { bytes, schedule, subchunk, run, other }| {
            let links = run.links.iter().map(|link| {
                json!({"link": topology.link_name(link.vertex), "up": link.up, "down": link.down, "busy": link.busy})
            });
            let path = run.path_summary();
            let path = (!run.critical_path.is_empty()).then(|| {
                json!({
                    "transfers_ps": path.transfers, "jobs_ps": path.jobs, "latency_ps": path.latency,
                    "messages": path.hops,
                })
            });
            json!({
                "bytes": bytes, "schedule": schedule, "subchunk": subchunk, "picoseconds": run.picoseconds,
                "bound_seconds": self.seconds_per_byte_at_least * *bytes as f64,
                "best_other": other.as_ref().map(|(name, seconds)| json!({"schedule": name, "seconds": seconds})),
                "messages": run.messages, "critical_path": path, "links": links.collect::<Vec<Value>>(),
            })
        });
        let SimulationParameters {
            element_bytes,
            in_place,
            slots,
            window,
            completes_on_arrival,
            tcp_in_flight,
            memory_bandwidth,
            job_nanoseconds,
            // By size.
            subchunk: _,
        } = self.parameters;
        output::json(&json!({
            "topology": self.planned.called,
            "ranks": topology.world(),
            "parameters": {
                "element_bytes": element_bytes, "in_place": in_place, "slots": slots,
                "window": window, "completes_on_arrival": completes_on_arrival, "tcp_in_flight": tcp_in_flight, "memory_bandwidth": memory_bandwidth, "job_nanoseconds": job_nanoseconds,
            },
            "results": results.collect::<Vec<Value>>(),
        }))
    }

    /// The time as a multiple of the lower bound; `None` with one rank.
    fn of_bound(&self, size: &SimulatedSize) -> Option<f64> {
        let bound = self.seconds_per_byte_at_least * size.bytes as f64;
        (bound > 0.0).then(|| size.run.seconds() / bound)
    }
}

/// The links of nodes and switches; with a single node, those of its ranks.
fn links(topology: &Topology, run: &SimulatedRun) -> String {
    let between = topology.links_between_nodes();
    let shown: Vec<_> = run.links.iter().filter(|link| between.binary_search(&link.vertex).is_ok()).collect();
    let names = shown.iter().take(MOST_LINKS).map(|link| topology.link_name(link.vertex));
    let width = names.map(|name| name.chars().count()).max().unwrap_or(0).max(4);
    let mut text = format!("  {:width$}  bandwidth          up        down    busy\n", "link");
    for link in shown.iter().take(MOST_LINKS) {
        text += &format!(
            "  {:width$}  {:>9}  {:>10}  {:>10}  {:>4.0} %\n",
            topology.link_name(link.vertex),
            topology.link_bandwidth_label(link.vertex),
            link.up,
            link.down,
            100.0 * link.busy
        );
    }
    match shown.len().saturating_sub(MOST_LINKS) {
        0 => text,
        more => text + &format!("  ... {more} more ...\n"),
    }
}

/// What determined the time.
fn path(run: &SimulatedRun) -> String {
    if run.critical_path.is_empty() {
        return String::new();
    }
    let path = run.path_summary();
    let part = |picoseconds: u64| {
        let percent = 100.0 * picoseconds as f64 / run.picoseconds.max(1) as f64;
        format!("{} ({percent:.0} %)", duration(picoseconds as f64 * 1e-12))
    };
    format!(
        "\nthe critical path: {} messages take {}, additions and copies {}, latency and waiting {}\n",
        path.hops,
        part(path.transfers),
        part(path.jobs),
        part(path.latency)
    )
}

pub(super) fn amount(bytes: u64) -> String {
    usize::try_from(bytes).map_or_else(|_| bytes.to_string(), |bytes| Size(bytes).to_string())
}
