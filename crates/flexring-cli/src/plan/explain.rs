//! The output of `flexring plan --explain`: the algorithm, the reason, the load of each link, and all
//! schedules by time.
//!
//! Owns the text.

use super::planned::{Planned, without_bound};
use crate::output::duration;
use flexring_core::config::Size;
use flexring_plan::lowering::{Plan, ProgramSpec};
use flexring_plan::planner::{Details, ring};
use flexring_plan::selection::ShortPlan;
use flexring_plan::thresholds::mailbox_limit;
use flexring_plan::topology::{Topology, TopologyLink, bandwidth_label};
use flexring_plan::traffic::{Load, Traffic};
use flexring_simulator::comparison::{Comparison, longest_latency};
use flexring_simulator::cost_model::hierarchy::{self, RingLayer};
use flexring_simulator::cost_model::lower_bound::{Limit, LowerBound, lower_bound};
use flexring_simulator::cost_model::tree;
use flexring_simulator::level_descriptions::describe_levels;
use flexring_simulator::simulator::LONGEST_VECTOR;

/// Elements that are timed without `--count`: 64 MiB of floats.
const DEFAULT_COUNT: u64 = 16 << 20;
/// Bytes of an element: a float, as in most gradients.
const ELEMENT: u64 = 4;

/// The output: algorithm, reason, levels, exceptions and costs.
pub fn text(planned: &Planned, count: Option<u64>) -> String {
    let Planned { topology, selection, .. } = planned;
    let schedule = planned.schedule();
    let name = planned.plans[planned.plans.len() - 1].name();
    let mut text = format!("{name} on {}\n{}\n", planned.place(), selection.reason);
    for (number, description) in describe_levels(schedule, topology).iter().enumerate() {
        text += &format!("  level {number}: {description}\n");
    }
    for note in exceptions(planned) {
        text += &format!("{note}\n");
    }
    let count = count.unwrap_or(DEFAULT_COUNT);
    text + "\n" + &costs(planned, count) + &comparison(planned, count)
}

/// Most switches and nodes that are named as the limit of all schedules.
const SHOWN_VERTICES: usize = 4;

/// Most ranks whose programs are counted. The work grows with the square of their number.
const MOST_RANKS: usize = 1024;

/// The sizes of vectors that do not use this plan.
fn exceptions(planned: &Planned) -> Vec<String> {
    let Planned { config, topology, plans, .. } = planned;
    let mut notes = Vec::new();
    for sized in &plans[..plans.len() - 1] {
        let (plan, reason) = match sized.short {
            Some(plan @ (ShortPlan::Tree | ShortPlan::OneTree)) => {
                (plan.phrase().to_owned(), "FLEXRING_SMALL")
            }
            Some(plan) => (plan.phrase().to_owned(), "FLEXRING_DIRECT"),
            None if planned.profile.is_some() => continue,
            None => (sized.name(), "by calculation"),
        };
        let longest = Size(sized.longest);
        notes.push(format!("vectors of at most {longest} use {plan} instead ({reason})"));
    }
    let shares_memory = config.transport.shares_memory() && topology.nodes() == 1 && topology.world() > 1;
    if shares_memory && config.mailbox > Size(0) {
        let longest = |ranks_per_core| Size(mailbox_limit(config, topology.world(), ranks_per_core));
        let (sharing, alone) = (longest(2), longest(1));
        let less =
            if alone == sharing { String::new() } else { format!(" ({alone} if every rank has a core)") };
        notes.push(format!(
            "vectors of at most {sharing}{less} use the shared-memory mailboxes instead (FLEXRING_MAILBOX)"
        ));
    }
    notes
}

/// The load and the time of each link, and the time in a ring.
fn costs(planned: &Planned, count: u64) -> String {
    let Planned { topology, config, .. } = planned;
    if topology.world() > MOST_RANKS {
        return format!("the loads of the links are counted for at most {MOST_RANKS} ranks\n");
    }
    let ring = Plan::on(ring::plan(topology), topology, config.lowering);
    let [ours, rings] =
        [planned.lowered(), &ring].map(|plan| Traffic::of(plan, topology, ProgramSpec::ALL_REDUCE));
    let bytes = count.saturating_mul(ELEMENT);
    let Some((busiest, of_ring)) = ours.busiest(topology).zip(rings.busiest(topology)) else {
        return "nothing is sent\n".to_owned();
    };
    let seconds = |traffic: &Traffic, vertex: TopologyLink| {
        duration(traffic.seconds_per_byte(topology, vertex) * bytes as f64)
    };
    let mut shown = topology.links_between_nodes();
    for vertex in [busiest.vertex, of_ring.vertex] {
        if !shown.contains(&vertex) {
            shown.push(vertex);
        }
    }
    let width = shown.iter().map(|link| topology.link_name(*link).chars().count()).max().unwrap_or(0).max(4);
    let mut text = format!(
        "bytes up and down each link for every byte of the vector, and the time of {count} floats ({})\n",
        amount(bytes)
    );
    text += &format!("  {:width$}  bandwidth      up    down        time   in a ring\n", "link");
    for vertex in shown {
        let (name, speed) = (topology.link_name(vertex), topology.link_bandwidth_label(vertex));
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
        topology.link_name(busiest.vertex),
        seconds(&ours, busiest.vertex),
        topology.link_name(of_ring.vertex),
        seconds(&rings, of_ring.vertex),
    )
}

/// All schedules by their predicted time, and what no schedule can do better.
fn comparison(planned: &Planned, count: u64) -> String {
    let Planned { topology, config, .. } = planned;
    let bytes = count.saturating_mul(ELEMENT);
    let helpers = planned.schedule().helpers().len();
    if helpers > 0 {
        return format!("\n{}\n", without_bound(helpers));
    }
    if topology.world() > MOST_RANKS || topology.world() == 1 {
        return lower_bound(topology).map_or_else(String::new, |bound| least(topology, &bound, bytes));
    }
    if bytes > LONGEST_VECTOR {
        return format!("\ntimes are predicted for vectors of at most {}\n", amount(LONGEST_VECTOR));
    }
    let details = Details::of(config);
    let comparison = Comparison::new(topology, &details, config.lowering, bytes, &planned.parameters());
    let bound = comparison.bound.as_ref().map_or(0.0, |bound| bound.seconds_per_byte * bytes as f64);
    let means = if comparison.simulated { "simulated" } else { "estimated from loads and latencies" };
    let mut text = format!("\nall schedules for {} by predicted time ({means})\n", amount(bytes));
    let width =
        comparison.candidates.iter().map(|candidate| candidate.name().len()).max().unwrap_or(0).max(9);
    text += &format!("  {:width$}        time  calculated  of bound   hops  busiest link\n", "algorithm");
    for candidate in &comparison.candidates {
        let link = candidate.busiest.map_or_else(String::new, |link| {
            format!("{}: {}", topology.link_name(link.vertex), rounded(link.bytes))
        });
        text += &format!(
            "  {:width$}  {:>10}  {:>10}  {:>8.2}  {:>5}  {link}\n",
            candidate.name(),
            duration(candidate.seconds),
            candidate.calculated.map_or_else(|| "-".to_owned(), duration),
            candidate.seconds / bound,
            candidate.hops
        );
    }
    for (algorithm, reason) in &comparison.refused {
        text += &format!("  {}: not possible: {reason}\n", algorithm.name());
    }
    for (algorithm, reason) in &comparison.not_simulated {
        text += &format!("  {}: not simulated: {reason}\n", algorithm.name());
    }
    if let Some(reason) = comparison.reason(topology) {
        text += &format!("{reason}\n");
    }
    text + &comparison.bound.as_ref().map_or_else(String::new, |bound| least(topology, bound, bytes))
        + &equations(topology, bytes, planned.parameters().subchunk)
}

/// The equations of the papers with their values, in which links are exclusive and additions take no time.
fn equations(topology: &Topology, bytes: u64, subchunk: usize) -> String {
    if topology.fabric().is_some() {
        return String::new();
    }
    let (n, alpha) = (bytes as f64, longest_latency(topology));
    let mut text = format!("by the papers, with messages of {} latency:\n", duration(alpha));
    let mut line =
        |equation: &str, seconds: f64| text += &format!("  {:>10}  {equation}\n", duration(seconds));
    line("FlexReduce, first level once (Eq. 4)", tree::flexreduce_first_level(n, alpha, topology));
    line("FlexReduce, second level once (Eq. 5)", tree::flexreduce_second_level(n, alpha, topology));
    line("FlexReduce (Eq. 6)", tree::flexreduce(n, alpha, topology));
    if let Some(levels) = tree::symmetric_levels(topology) {
        line("BlueConnect (Eq. 3)", tree::blueconnect(n, alpha, &levels));
        let (mut below, mut held, mut layers) = (1.0, n, Vec::new());
        let mut parts = 1.0f64;
        for level in levels.iter().filter(|level| level.degree > 1) {
            layers.push(RingLayer { processes: level.degree, beta: below / level.bandwidth });
            below *= level.degree as f64;
            held /= level.degree as f64;
            parts = parts.max((held / subchunk as f64).ceil());
        }
        let t = hierarchy::hierarchical(n, &layers, alpha, parts);
        line(&format!("hierarchical ring, T(n) with s = {parts} (Ueno and Yokota)"), t);
    }
    let root = topology.levels().len() - 1;
    let most = (0..topology.world()).filter_map(|rank| tree::reduce_call_bound(topology, rank, root)).max();
    text + &format!(
        "  {:>10}  reductions onto a rank at the root at most, where spans need not nest (Eq. 12)\n",
        most.unwrap_or(0)
    )
}

/// What no schedule can do better, and why.
fn least(topology: &Topology, bound: &LowerBound, bytes: u64) -> String {
    let vertices = topology.vertices();
    let limit = match &bound.limit {
        Limit::Link(vertex) => {
            format!("the link of {} carries the vector once in each direction", vertices[*vertex].name)
        }
        Limit::Region { vertices: region, branches } => {
            let names = region.iter().take(SHOWN_VERTICES).map(|vertex| vertices[*vertex].name.as_str());
            let (names, more) =
                (names.collect::<Vec<_>>().join(", "), region.len().saturating_sub(SHOWN_VERTICES));
            let around = match (region.len(), more) {
                (1, _) => format!("of {names}"),
                (_, 0) => format!("out of {names}"),
                _ => format!("out of {names} and {more} more"),
            };
            format!("the {branches} links {around} send {} vectors together", 2 * (branches - 1))
        }
        Limit::Groups { groups, vectors, bandwidth } => {
            let bandwidth = bandwidth_label(*bandwidth);
            let named = |group: &Vec<String>| match group.len().saturating_sub(SHOWN_VERTICES) {
                0 => group.join(", "),
                more => format!("{} and {more} more", group[..SHOWN_VERTICES].join(", ")),
            };
            match (&groups[..], vectors) {
                (groups, vectors) if groups.len() > 2 => {
                    let largest = groups.iter().map(Vec::len).max().unwrap_or(0);
                    let some = if largest == 1 {
                        "ranks".to_owned()
                    } else {
                        format!("groups of up to {largest} ranks and switches")
                    };
                    format!(
                        "the links between {} {some} carry {vectors} vectors with {bandwidth}bit/s together",
                        groups.len()
                    )
                }
                ([one, _], 1) => {
                    format!("the links out of {} carry the vector with {bandwidth}bit/s together", named(one))
                }
                ([one, ..], _) => {
                    format!(
                        "the links between {} and the rest carry the vector in both directions with {bandwidth}bit/s together",
                        named(one)
                    )
                }
                ([], _) => "nothing".to_owned(),
            }
        }
    };
    format!("no schedule takes less than {}: {limit}\n", duration(bound.seconds_per_byte * bytes as f64))
}

/// Bytes with a binary unit and one decimal place, for numbers that are not whole.
fn rounded(bytes: f64) -> String {
    let units = [("G", 30), ("M", 20), ("K", 10)];
    let unit = units.into_iter().find(|(_, shift)| bytes >= f64::from(1 << shift));
    let (unit, shift) = unit.unwrap_or(("", 0));
    format!("{:.1}{unit}", bytes / f64::from(1 << shift))
}

fn amount(bytes: u64) -> String {
    usize::try_from(bytes).map_or_else(|_| bytes.to_string(), |bytes| Size(bytes).to_string())
}
