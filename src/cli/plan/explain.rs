//! The output of `flexring plan --explain`: the algorithm, the reason, and the load of each link.
//!
//! Owns the text. Must not know how algorithms are selected or loads are counted.

use super::planned::Planned;
use flexring::config::Size;
use flexring::plan::captions::captions;
use flexring::plan::lowering::{Plan, ProgramSpec};
use flexring::plan::planner::ring;
use flexring::plan::selection::{ShortPlan, short_plans};
use flexring::plan::topology::{Topology, VertexId, VertexKind};
use flexring::plan::traffic::{Load, Traffic};

/// Elements that are timed without `--count`: 64 MiB of floats.
const DEFAULT_COUNT: u64 = 16 << 20;
/// Bytes of an element: a float, as in most gradients.
const ELEMENT: u64 = 4;

/// The output: algorithm, reason, captions, exceptions and costs.
pub fn text(planned: &Planned) -> String {
    let Planned { topology, schedule, selection, .. } = planned;
    let mut text = format!("{} on {}\n{}\n", schedule.name(), planned.place(), selection.reason);
    for (number, caption) in captions(schedule, topology).iter().enumerate() {
        text += &format!("  level {number}: {caption}\n");
    }
    for note in exceptions(planned) {
        text += &format!("{note}\n");
    }
    text + "\n" + &costs(planned)
}

/// Most ranks whose programs are counted. The work grows with the square of their number.
const MOST_RANKS: usize = 1024;

/// The sizes of vectors that do not use this plan.
fn exceptions(planned: &Planned) -> Vec<String> {
    let Planned { config, topology, file, .. } = planned;
    let mut notes = Vec::new();
    let short = if file.is_some() { Vec::new() } else { short_plans(config, topology) };
    for (plan, longest) in short {
        let setting = if plan == ShortPlan::Tree { "FLEXRING_SMALL" } else { "FLEXRING_DIRECT" };
        notes.push(format!("vectors of at most {} use {} instead ({setting})", Size(longest), plan.phrase()));
    }
    if topology.nodes() == 1 && topology.world() > 1 && config.small > Size(0) {
        notes.push(format!(
            "vectors of at most {} use the shared-memory mailboxes instead (FLEXRING_SMALL)",
            config.small
        ));
    }
    notes
}

/// The load and the time of each link, and the time in a ring.
fn costs(planned: &Planned) -> String {
    let Planned { topology, config, .. } = planned;
    if topology.world() > MOST_RANKS {
        return format!("the loads of the links are counted for at most {MOST_RANKS} ranks\n");
    }
    let ring = Plan::on(ring::plan(topology), topology, config.lowering);
    let [ours, rings] =
        [&planned.lowered(), &ring].map(|plan| Traffic::of(plan, topology, ProgramSpec::ALL_REDUCE));
    let count = planned.count.unwrap_or(DEFAULT_COUNT);
    let bytes = count.saturating_mul(ELEMENT);
    let Some((busiest, of_ring)) = ours.busiest(topology).zip(rings.busiest(topology)) else {
        return "nothing is sent\n".to_owned();
    };
    let vertices = topology.vertices();
    let seconds = |traffic: &Traffic, vertex: VertexId| {
        let bits = traffic.load(vertex).larger() * bytes as f64 * 8.0;
        duration(bits / vertices[vertex].uplink.bandwidth as f64)
    };
    let shown = shown(topology);
    let width = shown.iter().map(|vertex| vertices[*vertex].name.chars().count()).max().unwrap_or(0).max(4);
    let mut text = format!(
        "bytes up and down each link for every byte of the vector, and the time of {count} floats ({})\n",
        amount(bytes)
    );
    text += &format!("  {:width$}  bandwidth      up    down        time   in a ring\n", "link");
    for vertex in shown {
        let (name, speed) = (&vertices[vertex].name, vertices[vertex].uplink.bandwidth_label());
        let Load { up, down } = ours.load(vertex);
        let (time, in_ring) = (seconds(&ours, vertex), seconds(&rings, vertex));
        text += &format!("  {name:width$}  {speed:>9}  {up:>6.3}  {down:>6.3}  {time:>10}  {in_ring:>10}\n");
    }
    let ratio = of_ring.seconds_per_byte / busiest.seconds_per_byte;
    let comparison = match ratio {
        ratio if (ratio - 1.0).abs() < 0.005 => "as long".to_owned(),
        ratio if ratio > 1.0 => format!("{ratio:.2} times as long"),
        ratio => format!("{:.2} times shorter", 1.0 / ratio),
    };
    text + &format!(
        "the busiest link is that of {}: {}; in a ring it is that of {}: {}, {comparison}\n",
        vertices[busiest.vertex].name,
        seconds(&ours, busiest.vertex),
        vertices[of_ring.vertex].name,
        seconds(&rings, of_ring.vertex),
    )
}

/// The links of nodes and switches; with a single node, the links of its ranks.
fn shown(topology: &Topology) -> Vec<VertexId> {
    let between = topology.nodes() > 1;
    let vertices = topology.vertices().iter().enumerate().skip(1);
    let shown = vertices.filter(|(_, vertex)| matches!(vertex.kind, VertexKind::Rank(_)) != between);
    shown.map(|(vertex, _)| vertex).collect()
}

fn amount(bytes: u64) -> String {
    usize::try_from(bytes).map_or_else(|_| bytes.to_string(), |bytes| Size(bytes).to_string())
}

/// A time with the unit that fits: s, ms or us.
fn duration(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.2} us", s * 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_the_unit_that_fits() {
        assert_eq!([2.0, 0.0537, 0.000_012].map(duration), ["2.00 s", "53.70 ms", "12.00 us"]);
    }
}
