//! The drawing of a simulated run: a row for each rank and each link, over time.
//!
//! Owns what is shown, and the shares of time that rows are painted in. Must not know how a run is simulated.

use super::axis::time_ticks;
use super::canvas::{Anchor, Canvas, Font, number};
use super::frame::{frame, legend};
use super::geometry::{LABEL, MARGIN, NOTE, WIDTH};
use crate::simulator::{ActivityKind, LinkUse, PICOSECONDS, SimulatedRun};
use flexring_plan::physical_links::PhysicalLinks;
use flexring_plan::topology::{Topology, TopologyLink};

/// Most ranks of a timeline. With more rows it is illegible.
pub const MOST_TIMELINE_RANKS: usize = 64;

/// Parts of the time. A row shows in which part of each it was busy.
const BINS: usize = 300;
/// Shades of a row.
const SHADES: f64 = 8.0;

const JOBS: &str = "#1FA87C";
const SENDS: &str = "#5B8FD0";
const DOWN: &str = "#E69F00";
const GRID: &str = "stroke=\"#E4E7EB\" fill=\"none\"";

const ROW: f64 = 19.0;
const LANE: f64 = 7.0;
const LINK_ROW: f64 = 34.0;
/// Height of the area of one direction of a link.
const AREA: f64 = 13.0;
/// Room for the busy share, right of the rows of links.
const SHARE: f64 = 52.0;

/// The drawing as an SVG file: when each rank added, copied and sent, and when each link between nodes was
/// used. `run` must have recorded its activities on `topology`. The use of a link is that of each transfer's
/// mean rate.
#[must_use]
pub fn draw_timeline(run: &SimulatedRun, topology: &Topology, title: &str, subtitle: &str) -> String {
    let between = if topology.nodes() > 1 { topology.links_between_nodes() } else { Vec::new() };
    let is_between = |link: &LinkUse| between.binary_search(&link.vertex).is_ok();
    let links: Vec<LinkUse> = run.links.iter().copied().filter(is_between).collect();
    let labels = (0..topology.world()).map(|rank| rank_label(topology, rank));
    let labels = labels.chain(links.iter().map(|link| link_label(topology, link.vertex)));
    let widest = labels.map(|label| NOTE.width(&label)).fold(0.0, f64::max);
    let left = MARGIN + widest + 10.0;
    let painter = TimelinePainter {
        run,
        topology,
        left,
        width: (WIDTH - left - MARGIN - SHARE).max(300.0),
        canvas: Canvas::default(),
    };
    painter.paint(&links, title, subtitle)
}

fn rank_label(topology: &Topology, rank: usize) -> String {
    format!("rank {rank}")
        + &topology.vertices()[topology.leaf(rank)]
            .parent
            .filter(|_| topology.nodes() > 1)
            .map_or_else(String::new, |node| format!(", {}", topology.vertices()[node].name))
}

fn link_label(topology: &Topology, link: TopologyLink) -> String {
    format!("{}, {}bit/s", topology.link_name(link), topology.link_bandwidth_label(link))
}

struct TimelinePainter<'a> {
    run: &'a SimulatedRun,
    topology: &'a Topology,
    left: f64,
    width: f64,
    canvas: Canvas,
}

impl TimelinePainter<'_> {
    fn paint(mut self, links: &[LinkUse], title: &str, subtitle: &str) -> String {
        let world = self.topology.world();
        let top = 98.0;
        let between = if links.is_empty() { 0.0 } else { 26.0 };
        let bottom = top + world as f64 * ROW + between + links.len() as f64 * LINK_ROW;
        let (width, height) = (self.left + self.width + SHARE + MARGIN, bottom + 24.0 + MARGIN);
        frame(&mut self.canvas, [width, height], title, subtitle);
        self.legend(!links.is_empty());
        self.axis(top - 4.0, bottom);
        let [jobs, sends] = self.busy();
        for (row, rank) in self.topology.ranks_in_tree_order().into_iter().enumerate() {
            let y = top + row as f64 * ROW;
            self.label(y + 12.0, &rank_label(self.topology, rank));
            self.lane(y + 1.5, JOBS, &jobs[rank]);
            self.lane(y + 1.5 + LANE + 1.0, SENDS, &sends[rank]);
        }
        let used = self.used(links);
        for (row, (link, [up, down])) in links.iter().zip(&used).enumerate() {
            let middle = top + world as f64 * ROW + between + row as f64 * LINK_ROW + LINK_ROW / 2.0;
            self.label(middle + 4.0, &link_label(self.topology, link.vertex));
            self.area(middle - 0.5, -AREA, SENDS, up);
            self.area(middle + 0.5, AREA, DOWN, down);
            let busy = format!("{:.0} %", 100.0 * link.busy);
            self.canvas.text(self.left + self.width + 8.0, middle + 4.0, NOTE, &busy);
        }
        self.canvas.finish(width, height, title, subtitle)
    }

    fn label(&mut self, y: f64, text: &str) {
        let font = Font { anchor: Anchor::End, ..NOTE };
        self.canvas.text(self.left - 10.0, y, font, text);
    }

    fn legend(&mut self, with_links: bool) {
        let (jobs, messages) = ((JOBS, "additions and copies"), "messages to other nodes");
        if with_links {
            let messages = format!("{messages}, and links up: the share of the bandwidth");
            legend(&mut self.canvas, [jobs, (SENDS, &messages), (DOWN, "down, below the line")]);
        } else {
            legend(&mut self.canvas, [jobs, (SENDS, messages)]);
        }
    }

    fn axis(&mut self, top: f64, bottom: f64) {
        let seconds = self.run.seconds().max(1e-12);
        for (time, label) in time_ticks(seconds, 8.0) {
            let x = self.left + self.width * time / seconds;
            let [at, top, end] = [x, top, bottom].map(number);
            self.canvas.path(&format!("M{at} {top}V{end}"), GRID);
            self.canvas.text(x, bottom + 18.0, LABEL, &label);
        }
    }

    /// By rank and part of the time, in which part of it the rank added or copied, and sent.
    fn busy(&self) -> [Vec<Vec<f64>>; 2] {
        let none = || vec![vec![0.0; BINS]; self.topology.world()];
        let [mut jobs, mut sends] = [none(), none()];
        for activity in &self.run.timeline {
            let shares = match activity.kind {
                ActivityKind::Job { rank } => &mut jobs[rank],
                ActivityKind::Transfer { from, .. } => &mut sends[from],
            };
            add_share(shares, self.run.picoseconds, (activity.start, activity.end), 1.0);
        }
        [jobs, sends]
    }

    /// By link, the used share of its bandwidth up and down.
    fn used(&self, links: &[LinkUse]) -> Vec<[Vec<f64>; 2]> {
        let physical = PhysicalLinks::new(self.topology);
        // By physical link, the number in output and the bandwidths of all its parts.
        let of_link = |link: TopologyLink| {
            let parts = physical.of(link).len();
            let bandwidths = (0..parts).map(|part| self.topology.part_bandwidths(link, part));
            let both = bandwidths.reduce(|one, other| [one[0] + other[0], one[1] + other[1]]);
            std::iter::repeat_n((link, both.unwrap_or([1; 2])), parts)
        };
        let outputs: Vec<(TopologyLink, [u64; 2])> = physical.in_output().flat_map(of_link).collect();
        let mut used = vec![[vec![0.0; BINS], vec![0.0; BINS]]; links.len()];
        let place = |vertex: TopologyLink| links.binary_search_by_key(&vertex, |link| link.vertex).ok();
        for activity in &self.run.timeline {
            let ActivityKind::Transfer { from, to } = activity.kind else { continue };
            let bits = 8.0 * activity.bytes as f64;
            let rate = bits * PICOSECONDS as f64 / (activity.end - activity.start).max(1) as f64;
            for (link, up) in physical.path(from, to) {
                let (link, bandwidths) = outputs[link];
                let Some(place) = place(link) else { continue };
                let direction = usize::from(!up);
                let share = rate / bandwidths[direction] as f64;
                let bins = &mut used[place][direction];
                add_share(bins, self.run.picoseconds, (activity.start, activity.end), share);
            }
        }
        used
    }

    /// Left edge of a part of the time.
    fn edge(&self, bin: usize) -> f64 {
        self.left + self.width * bin as f64 / BINS as f64
    }

    /// Paints the shares as shades.
    fn lane(&mut self, y: f64, color: &str, shares: &[f64]) {
        let shades: Vec<u32> = shares.iter().map(|share| (share.min(1.0) * SHADES).ceil() as u32).collect();
        let mut bin = 0;
        for equal in shades.chunk_by(|one, next| one == next) {
            let (start, end) = (self.edge(bin), self.edge(bin + equal.len()));
            bin += equal.len();
            if equal[0] > 0 {
                let opacity = number(f64::from(equal[0]) / SHADES);
                let style = format!("fill=\"{color}\" fill-opacity=\"{opacity}\"");
                self.canvas.rect([start, y, end - start, LANE], &style);
            }
        }
    }

    /// Paints the shares as an area on one side of a line.
    fn area(&mut self, y: f64, height: f64, color: &str, shares: &[f64]) {
        let start = number(self.left);
        self.canvas.path(&format!("M{start} {}H{}", number(y), number(self.left + self.width)), GRID);
        let mut commands = format!("M{start} {}", number(y));
        let levels: Vec<f64> = shares.iter().map(|share| (share.min(1.0) * 50.0).round() / 50.0).collect();
        let mut bin = 0;
        for equal in levels.chunk_by(|one, next| one == next) {
            bin += equal.len();
            commands += &format!("V{}H{}", number(y + height * equal[0]), number(self.edge(bin)));
        }
        commands += &format!("V{}Z", number(y));
        self.canvas.path(&commands, &format!("fill=\"{color}\" fill-opacity=\"0.85\""));
    }
}

/// Adds to each part of `time` the share that lies between these two times, multiplied by `weight`.
fn add_share(shares: &mut [f64], time: u64, (start, end): (u64, u64), weight: f64) {
    let scale = shares.len() as f64 / time.max(1) as f64;
    let (start, end) = (start as f64 * scale, end as f64 * scale);
    let bins = shares.len();
    let parts = (start as usize).min(bins)..(end.ceil() as usize).min(bins);
    for (bin, share) in parts.clone().zip(&mut shares[parts]) {
        let inside = end.min(bin as f64 + 1.0) - start.max(bin as f64);
        *share += weight * inside.max(0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up_to_the_time_that_is_divided() {
        let mut shares = vec![0.0; 4];
        add_share(&mut shares, 100, (10, 60), 1.0);
        add_share(&mut shares, 100, (75, 100), 0.5);
        add_share(&mut shares, 100, (30, 30), 1.0);
        assert!(
            shares.iter().zip([0.6, 1.0, 0.4, 0.5]).all(|(share, expected)| (share - expected).abs() < 1e-9),
            "{shares:?}"
        );
    }
}
