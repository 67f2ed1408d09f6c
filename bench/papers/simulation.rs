//! Simulated all-reduces in the terms of the papers: additions are hidden, and only links take time.
//!
//! Owns the parameters of the simulator that all papers share. Must not know papers.

use flexring_core::config::Lowering;
use flexring_plan::lowering::Plan;
use flexring_plan::schedule::Schedule;
use flexring_plan::topology::{Topology, Uplink};
use flexring_simulator::simulator::{SimulationInput, SimulationParameters, simulate};
use std::time::Instant;

/// How the data of a step moves.
#[derive(Clone, Copy)]
pub enum Messages {
    /// In sub-chunks of this many bytes, many of them in flight: flexring's pipeline.
    Pipelined(usize),
    /// In one message, which begins when the one before has arrived: the steps of the papers' models.
    OnePerStep,
}

/// A link of this many bytes per second, with a latency in seconds.
pub fn uplink(bytes_per_second: f64, latency: f64) -> Uplink {
    Uplink::new((bytes_per_second * 8.0).round() as u64, (latency * 1e9).round() as u64)
}

/// Seconds that `schedule` takes for a vector of `bytes`. What is simulated, and how long that took, goes to
/// standard error.
pub fn seconds(
    schedule: Schedule,
    topology: &Topology,
    lowering: Lowering,
    bytes: u64,
    messages: Messages,
) -> f64 {
    let parameters = SimulationParameters {
        memory_bandwidth: 1 << 60,
        job_nanoseconds: 0,
        // Their links are InfiniBand.
        tcp_in_flight: 0,
        ..SimulationParameters::DEFAULT
    };
    let parameters = match messages {
        Messages::Pipelined(subchunk) => SimulationParameters { subchunk, window: 32, ..parameters },
        Messages::OnePerStep => SimulationParameters {
            subchunk: bytes as usize,
            window: 1,
            completes_on_arrival: true,
            ..parameters
        },
    };
    let call = SimulationInput::new(bytes);
    let (name, begun) = (schedule.name().to_owned(), Instant::now());
    let plan = Plan::on(schedule, topology, lowering);
    let run = simulate(&plan, topology, call, &parameters, &mut |_, _| {}).expect("small enough to simulate");
    eprintln!(
        "{name}, {} ranks, {bytes} bytes: {:.3} ms of virtual time in {:.1} s",
        topology.world(),
        run.seconds() * 1e3,
        begun.elapsed().as_secs_f64()
    );
    run.seconds()
}
