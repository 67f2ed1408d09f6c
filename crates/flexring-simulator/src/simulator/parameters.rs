//! What is simulated, and what the simulated machines can do.
//!
//! Owns the parameters, and the layout that they give a call. Must not know events.

use flexring_core::call::Collective;
use flexring_core::config::Config;
use flexring_core::error::{Error, Result};
use flexring_plan::calculation;
use flexring_plan::call_layout::{
    CallFacts, CallLayout, IN_PLACE_WINDOW, LinkDelivery, link_profile, slots_per_link,
};
use flexring_plan::fraction::Span;
use flexring_plan::lowering::{Movement, Plan, ProgramSpec};
use flexring_plan::pipeline::{Binding, LinkProfile};
use flexring_plan::program::HeldSpans;
use flexring_plan::tuning::TuningProfile;

/// Picoseconds of a second.
pub const PICOSECONDS: u64 = 1_000_000_000_000;

/// What to simulate.
#[derive(Clone, Copy, Debug)]
pub struct SimulationInput {
    /// Bytes of the vector that each rank contributes to an all-reduce, from 1 to
    /// [`LONGEST_VECTOR`](super::LONGEST_VECTOR).
    pub bytes: u64,
    /// Whether to record what each rank and link does, for a timeline and the critical path. Without it
    /// memory does not grow with the number of messages in flight over time.
    pub records: bool,
    /// Whether to record the timeline of each rank ([`SimulatedRun::ranks`](super::SimulatedRun::ranks)), as
    /// real runs write them.
    pub timelines: bool,
    /// Most bytes of memory that the simulation may need, by its estimate.
    pub most_memory: u64,
    /// Most messages of all ranks together, which determine how long the simulation takes.
    pub most_messages: u64,
}

impl SimulationInput {
    /// Default of `most_memory`: 4 GiB.
    pub const MOST_MEMORY: u64 = 4 << 30;
    /// Default of `most_messages`: up to two and a half minutes of processor time.
    pub const MOST_MESSAGES: u64 = 64 << 20;

    /// A simulation of this many bytes that records nothing, with the default limits.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self {
            bytes,
            records: false,
            timelines: false,
            most_memory: Self::MOST_MEMORY,
            most_messages: Self::MOST_MESSAGES,
        }
    }
}

/// Machines and settings of a simulation. The speeds of links are those of the topology.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulationParameters {
    /// Bytes of an element, 1 to 8.
    pub element_bytes: usize,
    /// Whether input and output are the same memory.
    pub in_place: bool,
    /// Bytes of a sub-chunk (`FLEXRING_SUBCHUNK`), at least an element.
    pub subchunk: usize,
    /// Slots of a rank's pool (`FLEXRING_SLOTS`). Ranks with more links have one for each.
    pub slots: usize,
    /// Most messages in flight on a link between nodes, in each direction; at least 1. TCP links have 16,
    /// RDMA links 32.
    pub window: usize,
    /// Whether a send is complete when its message has arrived, as on RDMA connections; otherwise when its
    /// last bit was sent. With a window of 1, a link then carries one message at a time, and each one begins
    /// when the one before has arrived.
    pub completes_on_arrival: bool,
    /// Bytes that a TCP connection has in flight, as a mean over those of a node (`FLEXRING_SOCKET_BUFFER`):
    /// connections divide the links that they share in proportion to what each has
    /// ([`link_shares`](flexring_plan::link_shares)). With 0 they divide them equally, as where the kernel
    /// decides, and as RDMA links do.
    pub tcp_in_flight: usize,
    /// Bytes per second that additions and copies read and write together; at least 1.
    pub memory_bandwidth: u64,
    /// Nanoseconds that each addition or copy takes besides.
    pub job_nanoseconds: u64,
}

impl SimulationParameters {
    /// Floats, out of place, with the default settings, over TCP, on a core that moves 20 GB/s. An addition
    /// of two vectors of 128 KiB then takes 20 us.
    pub const DEFAULT: Self = Self {
        element_bytes: 4,
        in_place: false,
        subchunk: 128 << 10,
        slots: 64,
        window: 16,
        completes_on_arrival: false,
        tcp_in_flight: 64 << 10,
        memory_bandwidth: calculation::MEMORY_BANDWIDTH,
        job_nanoseconds: calculation::JOB_NANOSECONDS,
    };

    /// What is known on the cluster of a profile, with these settings.
    #[must_use]
    pub fn measured(profile: &TuningProfile, config: &Config) -> Self {
        let rate = profile.nodes.iter().map(|node| node.reduce.min(node.copy)).min();
        Self {
            subchunk: config.subchunk.0,
            slots: config.slots,
            tcp_in_flight: if profile.cluster.transport == "tcp" { config.socket_buffer.0 } else { 0 },
            memory_bandwidth: rate.unwrap_or(Self::DEFAULT.memory_bandwidth),
            ..Self::DEFAULT
        }
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// `InvalidSetting` with the parameter that is out of range.
    pub fn check(&self) -> Result<()> {
        let ranges = [
            ("element size", self.element_bytes as u64, 1..=8),
            ("sub-chunk", self.subchunk as u64, self.element_bytes as u64..=1 << 40),
            ("number of slots", self.slots as u64, 1..=1 << 20),
            ("window", self.window as u64, 1..=1 << 20),
            ("memory bandwidth in bytes per second", self.memory_bandwidth, 1..=1 << 60),
            ("time of a job in nanoseconds", self.job_nanoseconds, 0..=1_000_000_000),
        ];
        for (name, value, range) in ranges {
            if !range.contains(&value) {
                let (least, most) = (range.start(), range.end());
                let message = format!("the {name} is {value}: use {least} to {most}");
                return Err(Error::invalid_setting(message));
            }
        }
        Ok(())
    }

    /// The variant of the program that a call of this length runs.
    pub(super) fn spec(&self, plan: &Plan, bytes: u64) -> ProgramSpec {
        let movement = Movement::through_levels(plan.moves_in_waves(bytes, self.subchunk));
        ProgramSpec { movement, ..ProgramSpec::ALL_REDUCE }
    }

    /// What a call of this length binds the pipelines to.
    ///
    /// # Errors
    /// `InvalidSetting` if it has too many sub-chunks.
    pub(super) fn layout(&self, world: usize, bytes: u64) -> Result<Binding> {
        let facts = CallFacts {
            collective: Collective::AllReduce,
            count: bytes.div_ceil(self.element_bytes as u64),
            element_bytes: self.element_bytes,
            world,
            in_place: self.in_place,
            output_bytes: bytes as usize,
            slot_bytes: self.subchunk,
        };
        let held = HeldSpans { input: Span::WHOLE, output: Span::WHOLE, disjoint: false };
        CallLayout::new(&facts, &held).map(|layout| layout.binding)
    }

    /// The links of a rank whose program has this many.
    pub(super) fn link_profile(&self, links: usize, same_node: bool) -> LinkProfile {
        let share = slots_per_link(self.slots, links).unwrap_or(1);
        match same_node {
            // Nothing is staged, so no message needs a slot.
            true => link_profile(LinkDelivery::InPlace, IN_PLACE_WINDOW, 0),
            false => link_profile(LinkDelivery::Posted { may_stage: false }, self.window, share),
        }
    }

    /// Picoseconds of a job that reads and writes `bytes`.
    pub(super) fn job_time(&self, bytes: u64) -> u64 {
        let moving = u128::from(bytes) * u128::from(PICOSECONDS) / u128::from(self.memory_bandwidth);
        moving as u64 + self.job_nanoseconds * 1_000
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexring_plan::tuning::parse;

    #[test]
    fn the_slowest_rank_determines_the_rate_of_the_model() {
        let profile = parse("f", include_str!("../../../../tests/data/tuning.toml")).expect("a profile");
        let parameters = SimulationParameters::measured(&profile, &Config::default());
        assert_eq!(parameters.memory_bandwidth, 7_000_000_000);
    }
}
