//! The simulator runs the programs of all ranks in virtual time, over the links of a topology.
//!
//! Owns virtual time and what a job costs in it. Must not know algorithms, nor decide what moves next: each
//! rank has the [`Pipeline`](flexring_plan::pipeline::Pipeline) that the executor drives, with the executor's
//! order, window and slots, so what is simulated is what runs.
//!
//! | module | owns |
//! |---|---|
//! | `parameters` | what the simulated machines can do |
//! | `event_queue` | the order of events |
//! | `network` | how far each transfer has come |
//! | `fair_rates` | the bandwidth of each transfer: max-min fair shares of the links on its way |
//! | `flow_weights` | in which proportion transfers share links |
//! | `token_buckets` | links that carry more than their bandwidth after a pause |
//! | `channels` | the messages from one rank to another |
//! | `pipelines` | the pipelines of all ranks, and which of them share a program |
//! | `rank_state` | a rank's pipeline, and the one thread that adds and copies |
//! | `estimate` | what a run needs, before it starts |
//! | `world` | the loop over events |
//! | `activity` | what ranks and links did when, and the critical path |
//! | `rank_timeline` | what each rank did, as the timeline of a real run |
//! | `outcome` | the results |
//!
//! # What is modelled
//!
//! - A transfer uses the uplinks on its way, each with its bandwidth in each direction; that of a node with
//!   several NICs through those of its rank ([`PhysicalLinks`]). Transfers that share a link share it max-min
//!   fairly, by default in proportion to the bytes that flexring's TCP connections have in flight
//!   ([`link_shares`](flexring_plan::link_shares)). The messages from one rank to another follow each other,
//!   as on one connection.
//! - A message arrives when its last bit was sent and the latencies on its way have passed. Its memory can be
//!   overwritten when the last bit was sent, or when it has arrived
//!   ([`SimulationParameters::completes_on_arrival`]).
//! - Within a node, the receiver reads a message where the sender has it, while it adds.
//! - Additions and copies of a rank take place one after the other. They read and write memory at one rate.
//!
//! Virtual time is a whole number of picoseconds, rates are whole thousandths of a bit per second, and events
//! at one time are handled in the order in which they were queued, so equal inputs give equal results.

mod activity;
mod channels;
mod estimate;
mod event_queue;
mod fair_rates;
mod flow_weights;
mod network;
mod outcome;
mod parameters;
mod pipelines;
mod rank_state;
mod rank_timeline;
mod token_buckets;
mod world;

pub use activity::{ActivityKind, PathSummary, SimulatedActivity};
pub use outcome::{LinkUse, SimulatedRun};
pub use parameters::{PICOSECONDS, SimulationInput, SimulationParameters};
pub use rank_timeline::RankTimeline;

use estimate::{RankSize, SimulationEstimate};
use flexring_core::error::{Error, Result};
use flexring_plan::lowering::{Plan, ProgramClasses};
use flexring_plan::physical_links::PhysicalLinks;
use flexring_plan::topology::Topology;
use pipelines::ProgramList;
use world::SimulatedWorld;

/// Most messages in a timeline: a file of about 150 MB.
const MOST_IN_TIMELINES: u64 = 1 << 17;

/// Longest simulated time in seconds: half of what picoseconds in 64 bits can express.
const LONGEST_TIME: f64 = (u64::MAX / parameters::PICOSECONDS / 2) as f64;

/// Longest vector in bytes: 2^50.
pub const LONGEST_VECTOR: u64 = 1 << 50;

/// Simulates an all-reduce. `progress` is called now and then with the number of sub-chunks that are done,
/// and of all.
///
/// # Errors
/// `InvalidSetting` if the vector is empty or too long, if the plan has another number of ranks than the
/// topology, or if the job needs more than the limits of `call`: this is estimated before programs are made.
pub fn simulate(
    plan: &Plan,
    topology: &Topology,
    call: SimulationInput,
    parameters: &SimulationParameters,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<SimulatedRun> {
    parameters.check()?;
    let (planned, world) = (plan.schedule().world(), topology.world());
    if planned != world {
        let message = format!("the plan is for {planned} ranks, but the topology has {world}");
        return Err(Error::invalid_setting(message));
    }
    if call.bytes == 0 || call.bytes > LONGEST_VECTOR {
        let message = format!(
            "a vector of {} bytes cannot be simulated: use 1 byte to {LONGEST_VECTOR} (1024 T)",
            call.bytes
        );
        return Err(Error::invalid_setting(message));
    }
    let spec = parameters.spec(plan, call.bytes);
    let binding = parameters.layout(world, call.bytes)?;
    let mut classes = ProgramClasses::of_all_reduce(plan, spec.in_waves(), &binding);
    let size = RankSize::new(call, parameters, spec.in_waves());
    let fits = |estimate: &SimulationEstimate| estimate.check(&call, world);
    let programs = ProgramList::new(&mut classes, topology, &size, true, fits)?;
    drop(classes);
    let messages = programs.estimate.messages;
    if call.timelines && messages > MOST_IN_TIMELINES {
        let message = format!(
            "this simulation is too large: {world} ranks have {messages} messages to draw, at most {MOST_IN_TIMELINES} fit: use fewer \
             ranks or a shorter vector, or no timeline"
        );
        return Err(Error::invalid_setting(message));
    }
    if longest_time(topology, call.bytes, messages, parameters) > LONGEST_TIME {
        let message = format!(
            "this simulation may take more than {LONGEST_TIME:.0} s of virtual time, its longest: check the bandwidths of the links \
             and of memory, and the latencies"
        );
        return Err(Error::invalid_setting(message));
    }
    let (ranks, peers) = programs.start(plan, topology, (spec, binding), parameters);
    SimulatedWorld::new(topology, ranks, &peers, parameters, call).run(progress)
}

/// Number of messages of an all-reduce of this many bytes: sub-chunks that all ranks send.
///
/// # Errors
/// `InvalidSetting` if a rank has too many sub-chunks.
pub(super) fn messages(plan: &Plan, bytes: u64, parameters: &SimulationParameters) -> Result<u64> {
    let binding = parameters.layout(plan.schedule().world(), bytes)?;
    Ok(ProgramClasses::of_all_reduce(plan, parameters.spec(plan, bytes).in_waves(), &binding).messages())
}

/// An upper bound of the time in seconds: all ranks send and add their data one after the other, over the
/// slowest link.
fn longest_time(topology: &Topology, bytes: u64, messages: u64, parameters: &SimulationParameters) -> f64 {
    let slowest = PhysicalLinks::new(topology).bandwidths().flatten().min().unwrap_or(1) as f64 / 8.0;
    let latencies = topology.longest_link_latency() as f64 / 1e9;
    // Two vectors in each direction. A message takes as long as on the slowest of its links. An addition
    // reads two operands and writes one.
    let sent = 4.0 * bytes as f64 * topology.world() as f64;
    let hops = topology.vertices().len() as f64;
    sent / slowest
        + 3.0 * sent / parameters.memory_bandwidth as f64
        + 2.0 * messages as f64 * (hops.min(64.0) * latencies + parameters.job_nanoseconds as f64 / 1e9)
}
