//! Hierarchical rings on ABCI: Ueno and Yokota, "Exhaustive Study of Hierarchical AllReduce Patterns for
//! Large Messages Between GPUs", CCGrid 2019.
//!
//! Owns the paper's machine, from the parameters that its sections IV-D and V state, and the search for the
//! best hierarchy.

use crate::simulation::{Messages, seconds, uplink};
use flexring_core::config::Lowering;
use flexring_plan::planner;
use flexring_plan::topology::{Topology, TopologyBuilder};
use flexring_simulator::cost_model::hierarchy::{RingLayer, abci_ring, hierarchical};
use serde_json::{Value, json};

/// Section V-B: 128 MiB of floats.
const BYTES: f64 = (128 << 20) as f64;
/// Section V-B 1: seconds of latency, bytes per second of an adapter, parts of a step.
const ALPHA: f64 = 4.80e-6;
const ADAPTER: f64 = 9301.19e6;
const PARTS: f64 = 2.0;
/// Section IV-D: GPUs and adapters of a node. Two GPUs are connected by a link of four times an adapter's
/// bandwidth, rings of all GPUs of a node have 4 * 6 / 2 times that of an adapter.
const GPUS: usize = 4;
const ADAPTERS: f64 = 2.0;
const NVLINK_PAIR: f64 = 4.0 * ADAPTER;
const NVLINK: f64 = 12.0 * ADAPTER;
/// Section V: nodes of a rack, those that are used, and the part of their bandwidth that leaves the rack.
const RACK_NODES: f64 = 34.0;
const USED_NODES: usize = 32;
const BETWEEN_RACKS: f64 = RACK_NODES * ADAPTERS * ADAPTER / 3.0;
const RACK: usize = USED_NODES * GPUS;

/// flexring's pipeline: its sub-chunks are the parts of a step of the flat ring at 128 processes. With more
/// processes a step of it is one sub-chunk.
const PIPELINED: Messages = Messages::Pipelined(512 << 10);

const PROCESSES: [usize; 5] = [128, 256, 512, 1024, 2048];
/// Table II, and what sections V-B 4 a to d name.
const HIERARCHIES: [(usize, &[&[usize]]); 5] = [
    (
        128,
        &[
            &[4, 8, 4],
            &[4, 32],
            &[4, 4, 8],
            &[4, 16, 2],
            &[4, 4, 4, 2],
            &[4, 8, 2, 2],
            &[8, 16],
            &[8, 4, 4],
            &[8, 4, 2, 2],
            &[2, 2, 2, 2, 2, 2, 2],
            &[4, 2, 2, 2, 2, 2],
        ],
    ),
    (256, &[&[4, 8, 4, 2], &[4, 8, 2, 4], &[4, 8, 8]]),
    (512, &[&[4, 8, 4, 4]]),
    (1024, &[&[4, 8, 8, 4], &[4, 8, 4, 8]]),
    (2048, &[&[4, 8, 8, 8]]),
];

/// Layers of the deepest hierarchies that the paper found best, and listed hierarchies of the model.
const FEW_LAYERS: usize = 4;
const LISTED: usize = 8;

/// The layers of a hierarchy, from the innermost, each with the inverse bandwidth of the narrowest link on
/// its rings.
fn layers(dimensions: &[usize], racks: bool) -> Vec<RingLayer> {
    let mut stride = 1;
    let layer = |processes: &usize| {
        let reach = stride * processes;
        // One ring passes through a node or a rack for each of its ranks that the layer's rings begin with.
        let (of_node, of_rack) = (stride.min(GPUS) as f64, stride.min(RACK) as f64);
        stride = reach;
        let bandwidth = match reach {
            GPUS if *processes == GPUS => NVLINK,
            0..=GPUS => NVLINK_PAIR,
            _ if racks && reach > RACK => f64::min(ADAPTERS * ADAPTER / of_node, BETWEEN_RACKS / of_rack),
            _ => ADAPTERS * ADAPTER / of_node,
        };
        RingLayer { processes: *processes, beta: 1.0 / bandwidth }
    };
    dimensions.iter().map(layer).collect()
}

/// T(n) of section IV-C. `racks`: with the links between racks, which the paper's model leaves out.
fn model(dimensions: &[usize], racks: bool) -> f64 {
    hierarchical(BYTES, &layers(dimensions, racks), ALPHA, PARTS)
}

/// Seconds that a layer between nodes takes besides, whatever its length: by as much do the 13 layers
/// behind the first one of Table II's hierarchies that begin with 4 take longer than in the model, on
/// average. NCCL's bandwidth falls with the length of a message (Fig. 5), and each layer is a call of it.
const LAYER: f64 = 0.50e-3;
/// Bytes per second of layers whose rings cross racks: the mean of Table III.
const ACROSS_RACKS: f64 = 2413e6;

/// As [`model`], with what the paper measured of layers between nodes and across racks.
fn model_as_measured(dimensions: &[usize]) -> f64 {
    let (mut reach, mut between) = (1, 0);
    let mut layers = layers(dimensions, false);
    for layer in &mut layers {
        reach *= layer.processes;
        between += usize::from(reach > GPUS);
        if reach > RACK {
            layer.beta = 1.0 / ACROSS_RACKS;
        }
    }
    hierarchical(BYTES, &layers, ALPHA, PARTS) + LAYER * between as f64
}

/// All ordered factorizations of `product` into factors of at least 2.
fn factorizations(product: usize) -> Vec<Vec<usize>> {
    let mut all = if product > 1 { vec![vec![product]] } else { Vec::new() };
    for first in (2..product).filter(|first| product.is_multiple_of(*first)) {
        for mut rest in factorizations(product / first) {
            rest.insert(0, first);
            all.push(rest);
        }
    }
    all
}

/// The hierarchies that `fits` allows with their `time`, the fastest first.
fn ranked(
    processes: usize,
    time: impl Fn(&[usize]) -> f64,
    fits: impl Fn(&[usize]) -> bool,
) -> Vec<(f64, Vec<usize>)> {
    let mut all = factorizations(processes);
    all.retain(|dimensions| dimensions.len() > 1 && fits(dimensions));
    let mut all: Vec<(f64, Vec<usize>)> =
        all.into_iter().map(|dimensions| (time(&dimensions), dimensions)).collect();
    all.sort_by(|one, other| one.0.total_cmp(&other.0));
    all
}

/// Nodes of 4 GPUs in racks. A step of a ring costs s * alpha besides its bytes, so that is the latency
/// between two GPUs. The paper's steps send messages within nodes too, so GPUs are `apart`: each is a node of
/// its own at the switch of its machine. flexring reads them in place.
fn topology(processes: usize, apart: bool) -> Topology {
    let mut builder = TopologyBuilder::new("racks");
    let gpu = uplink(NVLINK, PARTS * ALPHA / 2.0);
    let mut places = (0, 0);
    for rank in 0..processes {
        if rank % RACK == 0 {
            places.0 = builder.switch(0, &format!("rack {}", rank / RACK), uplink(BETWEEN_RACKS, 0.0));
        }
        if rank % GPUS == 0 {
            let (name, adapters) = (format!("node {}", rank / GPUS), uplink(ADAPTERS * ADAPTER, 0.0));
            places.1 = if apart {
                builder.switch(places.0, &name, adapters)
            } else {
                builder.node(places.0, &name, adapters)
            };
        }
        let at = if apart { builder.node(places.1, &format!("GPU {rank}"), gpu) } else { places.1 };
        builder.rank(at, rank, if apart { uplink(NVLINK, 0.0) } else { gpu });
    }
    builder.finish().expect("each rank is on one node")
}

/// Simulations of one number of processes.
struct Simulations {
    /// With the paper's steps.
    apart: Topology,
    /// With flexring's pipeline.
    nodes: Topology,
}

impl Simulations {
    fn new(processes: usize) -> Self {
        Self { apart: topology(processes, true), nodes: topology(processes, false) }
    }

    /// Seconds of a hierarchy, or of the flat ring, with the paper's steps and with flexring's pipeline.
    fn seconds(&self, dimensions: Option<&[usize]>) -> [f64; 2] {
        [(&self.apart, Messages::OnePerStep), (&self.nodes, PIPELINED)].map(|(topology, messages)| {
            let schedule = match dimensions {
                Some(all) => {
                    planner::hierarchical::plan(topology, all).expect("factors of the number of ranks")
                }
                None => planner::ring::plan(topology),
            };
            seconds(schedule, topology, Lowering::Chain, BYTES as u64, messages)
        })
    }
}

/// A time of the model beside those of simulations, if there are any.
fn row(simulations: Option<&Simulations>, dimensions: Option<&[usize]>, model: f64) -> Value {
    let times = simulations.map(|simulations| simulations.seconds(dimensions));
    json!({
        "model": model,
        "simulation": times.map(|[steps, _]| steps),
        "pipeline": times.map(|[_, pipeline]| pipeline),
    })
}

/// For each number of processes the flat ring, the paper's hierarchies, and those that are best by the model.
/// Up to `most` processes they are simulated.
pub fn results(most: usize) -> Value {
    let timed = |all: Vec<(f64, Vec<usize>)>, most: usize| -> Vec<Value> {
        all.iter()
            .take(most)
            .map(|(time, dimensions)| json!({"dimensions": dimensions, "model": time}))
            .collect()
    };
    let by_node = |all: &[usize]| all[0] == GPUS && all.len() <= FEW_LAYERS;
    let sizes = PROCESSES.iter().map(|processes| {
        let simulations = (*processes <= most).then(|| Simulations::new(*processes));
        let named = HIERARCHIES.iter().filter(|(at, _)| at == processes).flat_map(|(_, all)| *all);
        let rows = named.map(|dimensions| {
            let mut row = row(simulations.as_ref(), Some(dimensions), model(dimensions, true));
            row["dimensions"] = json!(dimensions);
            row["model_without_racks"] = json!(model(dimensions, false));
            row
        });
        let ring = abci_ring(BYTES, processes / GPUS, ALPHA, PARTS, 1.0 / ADAPTER);
        json!({
            "processes": processes,
            "ring": row(simulations.as_ref(), None, ring),
            "hierarchies": rows.collect::<Vec<Value>>(),
            "ranked": timed(ranked(*processes, |all| model(all, true), |_| true), LISTED),
            "ranked_by_node": timed(ranked(*processes, |all| model(all, true), by_node), usize::MAX),
            "ranked_as_measured": timed(ranked(*processes, model_as_measured, by_node), usize::MAX),
        })
    });
    json!({
        "bytes": BYTES, "alpha": ALPHA, "layer": LAYER, "across_racks": ACROSS_RACKS,
        "adapter": ADAPTER, "s": PARTS, "few_layers": FEW_LAYERS,
        "sizes": sizes.collect::<Vec<Value>>(),
    })
}
