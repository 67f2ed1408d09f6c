//! Ring-AllReduce over InfiniBand: Ueno, "Technologies behind Distributed Deep Learning: AllReduce", 2018,
//! Fig. 6.
//!
//! Owns the paper's machines.

use crate::simulation::{Messages, seconds, uplink};
use flexring_core::config::Lowering;
use flexring_plan::planner;
use flexring_plan::topology::{Topology, TopologyBuilder};
use flexring_simulator::cost_model::hierarchy;
use serde_json::{Value, json};

/// Bytes per second of a port: FDR has 56 Gbit/s, of which 64 bits of 66 are data.
const PORT: f64 = 56e9 / 8.0 * 64.0 / 66.0;
/// Seconds between two nodes, assumed.
const ALPHA: f64 = 2e-6;
const NODES: usize = 8;
const BYTES: u64 = 256 << 20;
const SUBCHUNK: usize = 512 << 10;

fn nodes(ports: f64) -> Topology {
    let mut builder = TopologyBuilder::new("switch");
    for rank in 0..NODES {
        let node = builder.node(0, &format!("node {rank}"), uplink(ports * PORT, ALPHA / 2.0));
        builder.rank(node, rank, uplink(100.0 * PORT, 0.0));
    }
    builder.finish().expect("each rank is on one node")
}

/// The ring on one port of each node and on both.
pub fn results() -> Value {
    let on = |ports: f64| {
        let topology = nodes(ports);
        let ring = planner::ring::plan(&topology);
        json!({
            "model": hierarchy::ring(BYTES as f64, NODES, ALPHA, 1.0 / (ports * PORT), 1.0),
            "simulation": seconds(ring, &topology, Lowering::Chain, BYTES, Messages::Pipelined(SUBCHUNK)),
        })
    };
    json!({"nodes": NODES, "bytes": BYTES, "port": PORT, "alpha": ALPHA,
        "one_port": on(1.0), "two_ports": on(2.0)})
}
