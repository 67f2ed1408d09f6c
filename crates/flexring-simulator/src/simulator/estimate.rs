//! What a simulation needs, estimated before it starts.
//!
//! Owns the estimate and its limits. Must not know how programs are compared.
//!
//! The number of messages is exact, and determines the time: a message takes 0.3 us of processor time where
//! the state of all ranks fits in caches, as in rings, and up to 2 us where it does not. Memory is within a
//! factor of 2 of the peak of the heap from 1 MB on; a test compares them.

use super::activity::SimulatedActivity;
use super::channels::Channel;
use super::parameters::{SimulationInput, SimulationParameters};
use super::rank_state::RankState;
use flexring_core::config::Size;
use flexring_core::error::{Error, Result};
use flexring_plan::lowering::ProgramClass;
use flexring_plan::topology::Topology;

/// Bytes of a step of a program: the step, its dependencies, and its place in the vector.
const STEP: u64 = 260;
/// Bytes of a peer of a step: its entries in the lists of messages.
const STEP_PART: u64 = 90;
/// Bytes of a message of a program that moves in waves, which lists its messages: place, entry and number.
const LISTED_MESSAGE: u64 = 20;
/// Bytes of a peer of a rank besides its [`Channel`]: the state of the link, the transfer and its rate.
const LINK: u64 = 420;
/// Bytes of a vertex of the topology: its link in both directions.
const VERTEX: u64 = 2 * 160;

/// What a simulation needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulationEstimate {
    /// Bytes of memory, besides those of the plan and the topology.
    pub memory: u64,
    /// Messages between ranks: sub-chunks that are sent.
    pub messages: u64,
}

/// What determines the memory of each rank.
#[derive(Clone, Copy, Debug)]
pub struct RankSize {
    window: u64,
    slots: u64,
    /// Whether sub-chunks move in waves.
    in_waves: bool,
    /// Whether all activities are recorded.
    records: bool,
}

impl RankSize {
    pub fn new(call: SimulationInput, parameters: &SimulationParameters, in_waves: bool) -> Self {
        let (window, slots) = (parameters.window as u64, parameters.slots as u64);
        Self { window, slots, in_waves, records: call.records }
    }
}

impl SimulationEstimate {
    /// What every simulation on this topology needs.
    pub(super) fn of_topology(topology: &Topology) -> Self {
        Self { memory: VERTEX * topology.vertices().len() as u64, messages: 0 }
    }

    /// Adds a program, which ranks may share.
    pub(super) fn add_program(&mut self, class: &ProgramClass, size: &RankSize) {
        self.memory += STEP * class.steps + STEP_PART * class.parts;
        self.memory += if size.in_waves { LISTED_MESSAGE * class.messages } else { 0 };
    }

    /// Adds a rank, of whose peers `posted` are on other nodes.
    pub(super) fn add_rank(&mut self, class: &ProgramClass, posted: usize, size: &RankSize) {
        let links = class.peers.len() as u64;
        let of_link = LINK
            + size_of::<Channel>() as u64
            + if size.in_waves { 4 * class.parts / links.max(1) } else { 0 };
        let window = 8 * size.window * posted as u64;
        let slots = 8 * size.slots.max(links);
        self.memory += size_of::<RankState>() as u64 + class.steps / 8 + links * of_link + window + slots;
        if size.records {
            // Half of the messages are those that others send. Each is a transfer or read by an addition.
            self.memory += class.messages * size_of::<SimulatedActivity>() as u64;
        }
    }

    /// Checks the limits of a call.
    ///
    /// # Errors
    /// `InvalidSetting` with the estimate, the limit and the fix.
    pub(super) fn check(&self, call: &SimulationInput, world: usize) -> Result<()> {
        let refuse = |needs: String, limit: String, fix: &str| {
            let message = format!(
                "this simulation is too large: {world} ranks {needs}, more than the limit of {limit}: {fix}"
            );
            Err(Error::invalid_setting(message))
        };
        if self.messages > call.most_messages {
            return refuse(
                format!("send {} messages, which take {} of processor time", self.messages, self.time()),
                format!("{} (--max-messages)", call.most_messages),
                "use fewer ranks, an algorithm with fewer messages, a shorter vector or longer sub-chunks, or raise the limit",
            );
        }
        if self.memory > call.most_memory {
            return refuse(
                format!("need about {} of memory or more", rounded(self.memory)),
                format!("{} (--max-memory)", Size(call.most_memory as usize)),
                if call.records {
                    "do not record activities (--no-path), use fewer ranks or a shorter vector, or raise the limit"
                } else {
                    "use fewer ranks, or an algorithm with fewer steps per rank, or raise the limit"
                },
            );
        }
        Ok(())
    }

    /// The processor time that the messages take, in words.
    fn time(&self) -> String {
        let [least, most] = [0.3e-6, 2e-6].map(|seconds| self.messages as f64 * seconds);
        let (unit, name) = if least < 60.0 { (1.0, "seconds") } else { (60.0, "minutes") };
        format!("about {:.0} to {:.0} {name}", least / unit, most / unit)
    }
}

/// Bytes in MiB, rounded up.
fn rounded(bytes: u64) -> Size {
    Size((bytes.div_ceil(1 << 20) << 20) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulator::pipelines::ProgramList;
    use crate::simulator::simulate;
    use flexring_core::config::{Algorithm, Lowering};
    use flexring_plan::lowering::{Plan, ProgramClasses};
    use flexring_plan::planner::{self, Details};
    use flexring_plan::topology_file::parse_short;
    use flexring_testkit::fuzzing::AllocationLimit;

    fn short(topology: &str) -> Topology {
        parse_short(topology).expect("short form").expect("valid")
    }

    fn plan(algorithm: Algorithm, topology: &Topology) -> Option<Plan> {
        let schedule = planner::plan(algorithm, topology, &Details::default()).ok()?;
        Some(Plan::on(schedule, topology, Lowering::Auto))
    }

    fn estimate(
        plan: &Plan,
        topology: &Topology,
        call: SimulationInput,
        parameters: &SimulationParameters,
    ) -> SimulationEstimate {
        let spec = parameters.spec(plan, call.bytes);
        let binding = parameters.layout(topology.world(), call.bytes).expect("few sub-chunks");
        let mut classes = ProgramClasses::of_all_reduce(plan, spec.in_waves(), &binding);
        let size = RankSize::new(call, parameters, spec.in_waves());
        ProgramList::new(&mut classes, topology, &size, true, |_| Ok(())).expect("no limit").estimate
    }

    #[test]
    fn the_estimate_of_memory_is_within_a_factor_of_two_of_the_peak() {
        for (topology, algorithm, kilobytes, subchunk, records) in [
            // Two programs; hundreds; one for each rank.
            ("1x200", Algorithm::Ring, 200, 128 << 10, false),
            ("1x200", Algorithm::Ring, 8 << 10, 4 << 10, true),
            ("16x4x2", Algorithm::Hierarchical, 1 << 10, 32 << 10, false),
            ("16x4x2", Algorithm::Hierarchical, 4 << 10, 8 << 10, true),
            ("8x16", Algorithm::Flexreduce, 1 << 10, 128 << 10, false),
            ("5+3+7+2+9+4+8+1", Algorithm::Flexreduce, 8 << 10, 8 << 10, false),
            ("5@1G+3+7+2+9@3G+4+8+1+6+5+3+2", Algorithm::Weighted, 4 << 10, 128 << 10, false),
            ("100", Algorithm::Rabenseifner, 1 << 10, 128 << 10, false),
        ] {
            let topology = short(topology);
            let plan = plan(algorithm, &topology).expect("possible");
            let parameters = SimulationParameters { subchunk, ..SimulationParameters::DEFAULT };
            let call = SimulationInput { records, ..SimulationInput::new(kilobytes << 10) };
            let estimate = estimate(&plan, &topology, call, &parameters);
            let measured = AllocationLimit::start();
            simulate(&plan, &topology, call, &parameters, &mut |_, _| {}).expect("few messages");
            let ratio = estimate.memory as f64 / measured.peak() as f64;
            assert!(
                (0.5..2.0).contains(&ratio),
                "{} ranks, {}: {} bytes are {ratio} times the peak",
                topology.world(),
                algorithm.name(),
                estimate.memory
            );
        }
    }

    #[test]
    fn the_number_of_messages_is_exact() {
        for topology in ["1x9", "7", "4x4", "2+3", "2@1G+3@10G+4@2G", "((1+2)@3G+4)+(2+2)@1G"] {
            let topology = short(topology);
            for algorithm in Algorithm::ALL.iter().copied().filter(|algorithm| *algorithm != Algorithm::Auto)
            {
                let Some(plan) = plan(algorithm, &topology) else { continue };
                // Shorter than the ranks, without waves, and with waves.
                for bytes in [4, 36, 100_004, 1_000_000] {
                    let parameters =
                        SimulationParameters { subchunk: 4 << 10, ..SimulationParameters::DEFAULT };
                    let call = SimulationInput::new(bytes);
                    let estimate = estimate(&plan, &topology, call, &parameters);
                    let run =
                        simulate(&plan, &topology, call, &parameters, &mut |_, _| {}).expect("few messages");
                    assert_eq!(estimate.messages, run.messages, "{}, {bytes} bytes", algorithm.name());
                }
            }
        }
    }

    #[test]
    fn limits_are_refused_with_the_estimate_and_the_fix() {
        let topology = short("1x1024");
        let ring = plan(Algorithm::Ring, &topology).expect("possible");
        let parameters = SimulationParameters::DEFAULT;
        let refused = |call: SimulationInput| {
            let outcome = simulate(&ring, &topology, call, &parameters, &mut |_, _| {});
            outcome.expect_err("too large").message().to_owned()
        };
        let call = SimulationInput::new(1 << 20);
        assert_eq!(
            refused(SimulationInput { most_messages: 1000, ..call }),
            "this simulation is too large: 1024 ranks send 2095104 messages, which take about 1 to 4 seconds of processor time, \
             more than the limit of 1000 (--max-messages): use fewer ranks, an algorithm with fewer messages, a shorter vector or \
             longer sub-chunks, or raise the limit"
        );
        let message = refused(SimulationInput { most_memory: 1 << 20, ..call });
        assert!(
            message.contains(" of memory or more, more than the limit of 1M (--max-memory): use fewer ranks"),
            "{message}"
        );
        let message = refused(SimulationInput { records: true, most_memory: 64 << 20, ..call });
        assert!(message.contains("do not record activities (--no-path)"), "{message}");
    }
}
