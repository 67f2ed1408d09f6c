//! FlexReduce on two and three machines: Lee, Hwang, Shah and Cho, "FlexReduce", section V-A and Fig. 4 (a)
//! to (e).
//!
//! Owns the paper's machines. It says that they are connected by local Ethernet but not by which one, so that
//! only ratios to the flat ring can be compared.

use crate::simulation::{Messages, seconds, uplink};
use flexring_core::config::Lowering;
use flexring_plan::planner;
use flexring_plan::topology::{Topology, TopologyBuilder};
use flexring_simulator::cost_model::tree::{
    TreeLevel, blueconnect, flexreduce, reduce_call_bound, reduce_scatter,
};
use serde_json::{Value, json};

/// Assumed, bytes per second: Ethernet of 1 Gbit/s, and PCI Express 3.0 with 16 lanes. The paper states
/// neither, nor a latency.
const ETHERNET: f64 = 125e6;
const PCI_EXPRESS: f64 = 15.75e9;
const ALPHA: f64 = 0.0;
/// Bytes of an item (a float).
const ITEM: u64 = 4;

/// Longer vectors have longer sub-chunks, which saves time and changes little.
fn subchunk(bytes: u64) -> usize {
    (bytes as usize / 256).clamp(128 << 10, 1 << 20)
}

/// Fig. 4 (a) and (b), and the ends of (d) and (e) with steps between them.
const FEW_ITEMS: u64 = 120_000;
const MANY_ITEMS: u64 = 120_000_000;
const ITEMS: [u64; 6] = [60_000, 120_000, 1_200_000, 12_000_000, 60_000_000, 120_000_000];

/// Machines with learners, with at most one difference between machines.
fn machines(learners: usize) -> Topology {
    let machines = if learners > 8 { 3 } else { 2 };
    let mut builder = TopologyBuilder::new("switch");
    let mut rank = 0;
    for machine in 0..machines {
        let node = builder.node(0, &format!("machine {machine}"), uplink(ETHERNET, 0.0));
        for _ in 0..(learners + machine) / machines {
            builder.rank(node, rank, uplink(PCI_EXPRESS, ALPHA));
            rank += 1;
        }
    }
    builder.finish().expect("each rank is on one machine")
}

/// Seconds of the ring, FlexReduce and BlueConnect, by the equations and simulated.
fn times(learners: usize, items: u64) -> Value {
    let topology = machines(learners);
    let bytes = items * ITEM;
    let n = bytes as f64;
    let ring = 2.0 * reduce_scatter(n, learners, ALPHA, ETHERNET);
    // Where BlueConnect does not apply, it is the ring, as in the paper.
    let dimensions = topology.dimensions().ok();
    let levels = |dimensions: &Vec<usize>| -> Vec<TreeLevel> {
        let widths = [PCI_EXPRESS, ETHERNET];
        dimensions
            .iter()
            .zip(widths)
            .map(|(degree, bandwidth)| TreeLevel { degree: *degree, bandwidth })
            .collect()
    };
    let blueconnect_time = dimensions.as_ref().map_or(ring, |all| blueconnect(n, ALPHA, &levels(all)));
    let flat = || planner::ring::plan(&topology);
    let simulated =
        |schedule| seconds(schedule, &topology, Lowering::Auto, bytes, Messages::Pipelined(subchunk(bytes)));
    let ring_simulated = simulated(flat());
    json!({
        "learners": learners,
        "items": items,
        "symmetric": dimensions.is_some(),
        "ring": {"model": ring, "simulation": ring_simulated},
        "flexreduce": {
            "model": flexreduce(n, ALPHA, &topology),
            "simulation": simulated(planner::flexreduce::plan(&topology).expect("small")),
        },
        "blueconnect": {
            "model": blueconnect_time,
            "simulation": match planner::blueconnect::plan(&topology) {
                Ok(schedule) => simulated(schedule),
                Err(_) => ring_simulated,
            },
        },
    })
}

/// Fig. 4 (c): calls for each learner and level, and the bound of Eq. 12.
fn calls(learners: usize) -> Value {
    let topology = machines(learners);
    let schedule = planner::flexreduce::plan(&topology).expect("small");
    let moving =
        |level: &flexring_plan::schedule::Level| level.groups().iter().filter(|group| group.moves()).count();
    let calls: usize = schedule.levels().iter().map(moving).sum();
    let bound = (0..learners).filter_map(|rank| reduce_call_bound(&topology, rank, 1)).max();
    json!({
        "learners": learners,
        "average": calls as f64 / (learners * schedule.levels().len()) as f64,
        "bound": bound,
    })
}

/// All panels.
pub fn results() -> Value {
    let by_learners = |items| (4..=12).map(|learners| times(learners, items)).collect::<Vec<Value>>();
    let by_items = |learners| ITEMS.iter().map(|items| times(learners, *items)).collect::<Vec<Value>>();
    json!({
        "ethernet": ETHERNET, "pci_express": PCI_EXPRESS, "alpha": ALPHA,
        "a": by_learners(FEW_ITEMS),
        "b": by_learners(MANY_ITEMS),
        "c": (4..=12).map(calls).collect::<Vec<Value>>(),
        "d": by_items(10),
        "e": by_items(12),
    })
}
