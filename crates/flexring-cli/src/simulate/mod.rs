//! `flexring simulate`: how long an all-reduce takes on a described cluster, in virtual time.
//!
//! Owns the order of simulations.

mod files;
mod options;
mod report;

pub use options::SimulateOptions;

use crate::error::CommandError;
use crate::output;
use crate::perf::Progress;
use crate::plan::Planned;
use flexring_core::config::Algorithm;
use flexring_plan::lowering::Plan;
use flexring_plan::planner::{self, Details};
use flexring_simulator::simulator::{SimulatedRun, SimulationInput, SimulationParameters, simulate};
use report::{Report, SimulatedSize};
use std::time::{Duration, Instant};

/// Simulations that take longer have a progress bar.
const SHORT: Duration = Duration::from_secs(1);

/// Most messages of a run beside which the other algorithms are simulated, too.
const MOST_MESSAGES: u64 = 50_000;

/// Steps of the progress bar.
const STEPS: u64 = 1000;

/// Runs the command.
pub fn run(options: &SimulateOptions) -> Result<(), CommandError> {
    let planned = Planned::new(&options.source)?;
    files::check(options, &planned.topology)?;
    let parameters = options.parameters(planned.parameters());
    let mut sizes = Vec::new();
    for bytes in &options.sizes {
        let sized = planned.plan_of(*bytes);
        let call = SimulationInput {
            records: !options.no_path,
            timelines: options.trace.is_some(),
            most_memory: options.max_memory,
            most_messages: options.max_messages,
            ..SimulationInput::new(*bytes)
        };
        let parameters = SimulationParameters { subchunk: sized.subchunk, ..parameters };
        let run = simulated(&sized.plan, &planned, call, &parameters)?;
        let schedule = sized.plan.schedule().name().to_owned();
        let is_printed = options.json || !options.csv && options.sizes.len() == 1;
        let shows_other = options.svg.is_some() || !options.no_path && is_printed;
        let other =
            if shows_other { best_other(&planned, &schedule, &run, *bytes, &parameters) } else { None };
        sizes.push(SimulatedSize { bytes: *bytes, schedule, subchunk: sized.subchunk, run, other });
    }
    let bound = planned.bound().map_or(0.0, |bound| bound.seconds_per_byte);
    let report = Report { planned: &planned, parameters, sizes, seconds_per_byte_at_least: bound };
    files::write(options, &report)?;
    let text = match (options.json, options.csv) {
        (true, _) => report.json()?,
        (_, true) => report.csv(),
        _ => report.text(),
    };
    output::print(&text)
}

/// The fastest schedule of the other algorithms for this size, and its time in seconds. `None` if there is no
/// other that sums as many vectors, or if the simulation of `run` took more than [`MOST_MESSAGES`], because
/// this one takes several times as long.
fn best_other(
    planned: &Planned,
    schedule: &str,
    run: &SimulatedRun,
    bytes: u64,
    parameters: &SimulationParameters,
) -> Option<(String, f64)> {
    if run.messages > MOST_MESSAGES || !planned.schedule().helpers().is_empty() {
        return None;
    }
    let (topology, details) = (&planned.topology, Details::of(&planned.config));
    let call =
        SimulationInput { records: false, most_messages: 8 * MOST_MESSAGES, ..SimulationInput::new(bytes) };
    let others =
        Algorithm::ALL.iter().filter(|algorithm| **algorithm != Algorithm::Auto).filter_map(|algorithm| {
            let other = planner::plan(*algorithm, topology, &details)
                .ok()
                .filter(|other| other.name() != schedule)?;
            let name = other.name().to_owned();
            let plan = Plan::on(other, topology, planned.config.lowering);
            // One with too many messages is not fast.
            let run = simulate(&plan, topology, call, parameters, &mut |_, _| {}).ok()?;
            Some((name, run.seconds()))
        });
    others.min_by(|one, other| one.1.total_cmp(&other.1))
}

fn simulated(
    plan: &Plan,
    planned: &Planned,
    call: SimulationInput,
    parameters: &SimulationParameters,
) -> Result<SimulatedRun, CommandError> {
    let begun = Instant::now();
    let mut bar = None;
    let mut shown = 0;
    let mut progress = |done: u64, total: u64| {
        let now = Instant::now();
        if now.duration_since(begun) < SHORT {
            return;
        }
        let bar = bar.get_or_insert_with(|| Progress::new(STEPS, None));
        let steps = (u128::from(done) * u128::from(STEPS) / u128::from(total.max(1))) as u64;
        while shown < steps {
            shown += 1;
            bar.step(now, || format!("{done} of {total} sub-chunks"));
        }
    };
    Ok(simulate(plan, &planned.topology, call, parameters, &mut progress)?)
}
