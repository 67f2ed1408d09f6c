//! Star, trees, BytePS and ring: Yuan, "On the Time Complexity of Common All-Reduce Methods", 2019.
//!
//! Owns machines whose links are alike. A time is a number of vectors (times M B t_m) and a number of set-ups
//! (times t_c); each is found alone, with a long vector without latency, and with one element for each part
//! of the vector.

use crate::simulation::{Messages, seconds, uplink};
use flexring_core::config::Lowering;
use flexring_plan::fraction::Span;
use flexring_plan::planner;
use flexring_plan::schedule::{Group, Schedule};
use flexring_plan::topology::{Topology, TopologyBuilder};
use flexring_simulator::cost_model::uniform;
use serde_json::{Value, json};

/// Slide "Communication between two machines": bytes per second of an adapter.
const ADAPTER: f64 = 125e6;
/// Bytes of the long vector.
const BYTES: u64 = 32 << 20;
const SUBCHUNK: usize = 128 << 10;
/// Seconds of a set-up. Any value that is much longer than the transfer of some elements gives the same
/// number.
const SET_UP: f64 = 1.0;
/// Machines: P.
const MACHINES: [usize; 6] = [2, 4, 8, 16, 32, 64];

/// Nodes of one rank each.
fn machines(number: usize, latency: f64) -> Topology {
    let mut builder = TopologyBuilder::new("switch");
    for rank in 0..number {
        let node = builder.node(0, &format!("machine {rank}"), uplink(ADAPTER, 0.0));
        builder.rank(node, rank, uplink(1e6 * ADAPTER, latency / 2.0));
    }
    builder.finish().expect("each rank is on one machine")
}

/// P workers and as many servers, which contribute nothing; each sums one part of the workers' vectors.
fn byteps(workers: usize) -> Schedule {
    let group = |part: usize| {
        let server = workers + part;
        Group::of(Span::part(part, workers), (0..workers).collect(), server)
    };
    let schedule = Schedule::new("byteps", 2 * workers, vec![(0..workers).map(group).collect()]);
    schedule.with_helpers((workers..2 * workers).collect())
}

/// The smart tree: in each round half of the machines that still have a sum send it to the other half, so
/// that none receives two vectors one after the other. All is merged at the first one.
fn smart_tree(topology: &Topology) -> Schedule {
    let world = topology.world();
    let round = |stride: usize| {
        let pairs = (0..world).step_by(2 * stride);
        pairs.map(|to| Group::of(Span::WHOLE, vec![to, to + stride], to)).collect()
    };
    Schedule::new("smart-tree", world, (0..world.ilog2()).map(|round_of| round(1 << round_of)).collect())
}

/// The time of a vector and a set-up, by the paper's table: bytes, t_m and t_c are arguments of all rows.
type Row = fn(f64, usize, f64, f64) -> f64;

fn method(name: &str, row: Row, p: usize, world: usize, schedule: &dyn Fn(&Topology) -> Schedule) -> Value {
    let lowering = if name == "ring" { Lowering::Chain } else { Lowering::Direct };
    let vectors = |subchunk| {
        let topology = machines(world, 0.0);
        seconds(schedule(&topology), &topology, lowering, BYTES, Messages::Pipelined(subchunk)) * ADAPTER
            / BYTES as f64
    };
    let topology = machines(world, SET_UP);
    let set_ups =
        seconds(schedule(&topology), &topology, lowering, 4 * world as u64, Messages::Pipelined(SUBCHUNK))
            / SET_UP;
    json!({
        "model": {"vectors": row(1.0, p, 1.0, 0.0), "set_ups": row(0.0, p, 1.0, 1.0)},
        "simulation": {
            "vectors": vectors(SUBCHUNK), "vectors_in_one_piece": vectors(BYTES as usize), "set_ups": set_ups,
        },
    })
}

/// The methods by the number of machines.
pub fn results() -> Value {
    let rows = MACHINES.iter().map(|p| {
        json!({
            "machines": p,
            "star": method("star", uniform::star, *p, *p, &planner::tree::star),
            "tree": method("tree", uniform::tree, *p, *p, &planner::tree::binary),
            "smart_tree": method("smart_tree", uniform::tree, *p, *p, &smart_tree),
            "byteps": method("byteps", uniform::byteps, *p, 2 * p, &|_| byteps(*p)),
            "ring": method("ring", uniform::ring, *p, *p, &planner::ring::plan),
            "ring_bytes": uniform::ring_bytes(1.0, *p, 1.0),
        })
    });
    json!({"bytes": BYTES, "subchunk": SUBCHUNK, "rows": rows.collect::<Vec<Value>>()})
}
