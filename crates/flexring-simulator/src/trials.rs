//! The times by which `auto` chooses between plans.
//!
//! Owns what is assumed of the machines, and the times that are known. Must not know how plans are chosen.

use super::simulator::{SimulationInput, SimulationParameters, simulate};
use flexring_core::config::Config;
use flexring_plan::choice::{Trial, share_out};
use flexring_plan::topology::Topology;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Topologies whose times are kept: communicators of one process have few.
const MOST_KNOWN: usize = 8;

/// By digest of the plan and bytes of the vector, the time in picoseconds, or that there is none.
type TimesOfPlans = HashMap<(u64, u64), Option<u64>>;

/// What was simulated by topology and settings, the latest last: a process makes further communicators of the
/// same ranks without simulating again.
struct KnownTimes(Mutex<Vec<(Topology, SimulationParameters, TimesOfPlans)>>);

static KNOWN: KnownTimes = KnownTimes(Mutex::new(Vec::new()));

impl KnownTimes {
    fn of(
        &self,
        topology: &Topology,
        parameters: SimulationParameters,
        trial: (u64, u64),
        simulate: impl FnOnce() -> Option<u64>,
    ) -> Option<u64> {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |known: &(Topology, SimulationParameters, TimesOfPlans)| {
            known.1 == parameters && known.0 == *topology
        };
        let known = lock().iter().find(|known| is_same(known)).and_then(|known| known.2.get(&trial).copied());
        if let Some(time) = known {
            return time;
        }
        let time = simulate();
        let mut all = lock();
        let mut known = match all.iter().position(&is_same) {
            Some(at) => all.remove(at),
            None => (topology.clone(), parameters, HashMap::new()),
        };
        known.2.insert(trial, time);
        if all.len() >= MOST_KNOWN {
            all.remove(0);
        }
        all.push(known);
        time
    }
}

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
    KNOWN.of(topology, parameters, (trial.plan.digest(), trial.bytes), || {
        let call = SimulationInput::new(trial.bytes);
        let run = simulate(&trial.plan, topology, call, &parameters, &mut |_, _| {});
        run.ok().map(|run| run.picoseconds)
    })
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

#[cfg(test)]
mod tests {
    use super::*;
    use flexring_plan::topology_file::parse_short;

    #[test]
    fn a_trial_is_simulated_once_for_each_topology_and_settings() {
        let known = KnownTimes(Mutex::new(Vec::new()));
        let mut simulated = 0;
        let mut time = |ranks: usize, subchunk: usize, trial: (u64, u64)| {
            let topology = parse_short(&format!("{ranks}+2")).expect("short form").expect("valid");
            let parameters = SimulationParameters { subchunk, ..SimulationParameters::DEFAULT };
            let expected = (trial != (2, 4)).then_some(trial.0 + trial.1 + ranks as u64 + subchunk as u64);
            let time = known.of(&topology, parameters, trial, || {
                simulated += 1;
                expected
            });
            assert_eq!(time, expected);
        };
        for _ in 0..2 {
            // The last one cannot be simulated.
            for trial in [(1, 4), (1, 8), (2, 4)] {
                time(1, 64, trial);
                time(1, 128, trial);
                time(3, 64, trial);
            }
        }
        // Older topologies make room.
        (4..4 + MOST_KNOWN).for_each(|ranks| time(ranks, 64, (1, 4)));
        time(1, 64, (1, 4));
        assert_eq!(simulated, 9 + MOST_KNOWN + 1);
    }
}
