//! The times by which `auto` chooses between plans.
//!
//! Owns what is assumed of the machines. Must not know how plans are chosen.

use super::simulator::{SimulationInput, SimulationParameters, simulate};
use flexring_core::config::Config;
use flexring_plan::choice::{Trial, share_out};
use flexring_plan::topology::Topology;

/// The simulated time of a trial in picoseconds, which depends on the topology and on settings only; `None`
/// if it cannot be simulated.
#[must_use]
pub fn simulated_time(config: &Config, topology: &Topology, trial: &Trial) -> Option<u64> {
    let parameters = SimulationParameters {
        subchunk: config.subchunk.0,
        slots: config.slots,
        tcp_in_flight: config.socket_buffer.0,
        ..SimulationParameters::DEFAULT
    };
    let run = simulate(&trial.plan, topology, SimulationInput::new(trial.bytes), &parameters, &mut |_, _| {});
    run.ok().map(|run| run.picoseconds)
}

/// The times of all trials, simulated on all cores.
#[must_use]
pub fn simulate_all(config: &Config, topology: &Topology, trials: &[Trial]) -> Vec<Option<u64>> {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let shares = share_out(trials, threads);
    let share = |thread: usize| {
        let mine = trials.iter().zip(&shares).filter(move |(_, of)| **of == thread);
        mine.map(|(trial, _)| simulated_time(config, topology, trial)).collect::<Vec<_>>()
    };
    let mut times: Vec<_> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|thread| scope.spawn(move || share(thread))).collect();
        let first = share(0);
        let rest = others.into_iter().map(|other| other.join().unwrap_or_default());
        std::iter::once(first).chain(rest).map(Vec::into_iter).collect()
    });
    shares.iter().map(|thread| times[*thread].next().flatten()).collect()
}
