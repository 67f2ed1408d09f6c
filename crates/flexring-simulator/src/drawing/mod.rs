//! The drawing of a schedule, as SVG: a row for each rank, a column for the start and one for each level.
//! Each cell shows the parts of the vector that the rank holds. And the drawings of simulated runs.
//!
//! Owns what is shown. Pure: returns text and writes no file. Must not know which planner made the schedule.
//!
//! | module | owns |
//! |---|---|
//! | `holdings` | the spans that each rank holds after each level, and the flows between |
//! | `geometry` | positions and sizes |
//! | `ribbons` | the ends of flows |
//! | `palette` | colors of ranks |
//! | `timeline` | a simulated run: ranks and links over time |
//! | `sizes` | simulated times by size |
//! | `axis` | ticks and labels of both |
//! | `frame` | the frame with a title, and legends |
//! | `canvas` | SVG elements and text width |

mod axis;
mod canvas;
mod frame;
mod geometry;
mod holdings;
mod palette;
mod ribbons;
mod sizes;
mod timeline;

pub use sizes::{SizePoint, draw_sizes};
pub use timeline::{MOST_TIMELINE_RANKS, draw_timeline};

use super::level_descriptions::describe_levels;
use canvas::{Anchor, Canvas, Font, number};
use flexring_core::config::Lowering;
use flexring_plan::Rank;
use flexring_plan::fraction::Span;
use flexring_plan::lowering::{ExchangePattern, pattern_of};
use flexring_plan::schedule::{Group, Schedule};
use flexring_plan::topology::{Topology, VertexKind};
use frame::frame;
use geometry::{CAPTION, Geometry, HEAD, LABEL, MARGIN, NOTE, OWNED, TWO_LINES};
use holdings::{Flow, Holdings, flows, holdings};
use palette::color;
use ribbons::{Ribbon, ribbons};

/// Most ranks of a drawing. With more rows it is illegible.
pub const MOST_RANKS: usize = 256;

/// The color of the rate of the slowest links, where rates differ.
const SLOWEST: &str = "#C0392B";
/// The color of transfers along a chain, which carry parts of several owners.
const CHAINED: &str = "#7B8794";

/// Most flows that are drawn between two columns. More would cover the whole gap.
const MOST_FLOWS: usize = 600;

/// Labels of a drawing.
#[derive(Clone, Copy, Debug)]
pub struct Labels<'a> {
    /// The name of the topology, for the title.
    pub topology: &'a str,
    /// Elements of the vector. Without it, spans are labeled with fractions.
    pub count: Option<u64>,
    /// How groups become transfers: along a chain, as in a ring, or directly to the root.
    pub lowering: Lowering,
}

impl Labels<'_> {
    /// Whether the group exchanges data along a chain.
    fn is_chain(self, group: &Group, topology: &Topology) -> bool {
        pattern_of(&group.set, topology, self.lowering) == ExchangePattern::Chain
    }
}

/// The drawing of `schedule` as an SVG file. `topology` must have as many ranks as the schedule.
#[must_use]
pub fn draw(schedule: &Schedule, topology: &Topology, labels: Labels<'_>) -> String {
    let owned: Vec<String> = (0..schedule.world()).map(|rank| owned(schedule, rank, labels)).collect();
    let texts = owned.iter().map(|words| OWNED.width(words)).fold(0.0, f64::max);
    let geometry = Geometry::new(topology, schedule.levels().len() + 1, texts);
    let mut captions = describe_levels(schedule, topology);
    captions.last_mut().into_iter().for_each(|last| last.push_str(": every part is complete"));
    let moves_along_chain = |group: &Group| group.moves() && labels.is_chain(group, topology);
    let has_chains = schedule.levels().iter().any(|level| level.groups().iter().any(moves_along_chain));
    let painter = Painter { schedule, topology, labels, has_chains, geometry, canvas: Canvas::default() };
    painter.paint(&captions, &owned)
}

struct Painter<'a> {
    schedule: &'a Schedule,
    topology: &'a Topology,
    labels: Labels<'a>,
    /// Whether some groups exchange data along a chain.
    has_chains: bool,
    geometry: Geometry,
    canvas: Canvas,
}

impl Painter<'_> {
    fn paint(mut self, captions: &[String], owned: &[String]) -> String {
        let below = self.captions(captions);
        let height = self.legend(below) + MARGIN - 4.0;
        // SVG paints in order: earlier elements are behind later ones.
        let front = std::mem::take(&mut self.canvas);
        let width = self.geometry.width;
        let (title, subtitle) = self.titles();
        frame(&mut self.canvas, [width, height], &title, &subtitle);
        self.define();
        self.tree();
        let columns = holdings(self.schedule);
        for (number, level) in self.schedule.levels().iter().enumerate() {
            let flows = flows(level, |group| self.labels.is_chain(group, self.topology));
            self.flows(number, &flows);
        }
        for (number, column) in columns.iter().enumerate() {
            self.column(number, column);
        }
        self.owners(owned);
        self.canvas.append(front);
        self.canvas.finish(width, height, &title, &captions.join("; "))
    }

    /// The title, and the line below it.
    fn titles(&self) -> (String, String) {
        let world = self.schedule.world();
        let vector = match self.labels.count {
            Some(count) => format!("a vector of {count} elements"),
            None => "a vector".to_owned(),
        };
        let ranks = if world == 1 { "1 rank sums".to_owned() } else { format!("{world} ranks sum") };
        let subtitle = format!(
            "{ranks} {vector}: the reduce-scatter goes from left to right, the all-gather back the same way"
        );
        (format!("{} on {}", self.schedule.name(), self.labels.topology), subtitle)
    }

    /// Defines what all bars consist of: the vector in the pale colors of its future owners, and the hatching
    /// of spans that were sent to another rank.
    fn define(&mut self) {
        let Self { geometry, schedule, canvas, .. } = self;
        canvas.define("vector", |canvas| {
            for shard in schedule.shards() {
                let (start, end) = (geometry.offset(shard.span.start), geometry.offset(shard.span.end));
                let style = format!("fill=\"{}\" fill-opacity=\"0.42\"", color(shard.owner));
                canvas.rect([start, 0.0, end - start, geometry.bar_height], &style);
            }
        });
        canvas.raw(
            "<defs><pattern id=\"away\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\" \
             patternTransform=\"rotate(45)\"><rect width=\"5\" height=\"5\" fill=\"#FFFFFF\"/>\
             <rect width=\"1\" height=\"5\" fill=\"#CBD2D9\"/></pattern></defs>",
        );
    }

    /// The tree on the left: switches, nodes and ranks.
    fn tree(&mut self) {
        let Self { geometry, topology, canvas, .. } = self;
        let vertices = topology.vertices();
        // The link of the only node is not used.
        let has_links = topology.nodes() > 1;
        let rates = geometry.brackets.iter().map(|bracket| vertices[bracket.vertex].uplink.bandwidth);
        let slowest = rates.clone().min().filter(|least| rates.clone().any(|rate| rate != *least));
        for bracket in &geometry.brackets {
            let vertex = &vertices[bracket.vertex];
            let (x, top, bottom) = (geometry.bracket_x(bracket), bracket.top, bracket.bottom);
            let [left, tick] = [x, x + 5.0].map(number);
            let line = format!("M{tick} {}H{left}V{}H{tick}", number(top), number(bottom));
            canvas.path(&line, "fill=\"none\" stroke=\"#7B8794\" stroke-width=\"1.3\"");
            let middle = f64::midpoint(top, bottom);
            let speed = has_links.then(|| format!("{}bit/s", vertex.bandwidth_label()));
            let is_slowest = has_links && Some(vertex.uplink.bandwidth) == slowest;
            let mark = if is_slowest { Font { bold: true, color: SLOWEST, ..NOTE } } else { NOTE };
            if vertex.kind == VertexKind::Switch {
                let name = match &speed {
                    Some(speed) => format!("{}, {speed}", vertex.name),
                    None => vertex.name.clone(),
                };
                let font = Font { anchor: Anchor::Middle, ..mark };
                canvas.rotated_text(x - 6.0, middle, -90.0, font, &font.cut(&name, bottom - top));
                continue;
            }
            let font = Font { anchor: Anchor::End, ..NOTE };
            let mark = Font { size: 10.5, anchor: Anchor::End, ..mark };
            let line = middle + font.size * 0.36;
            match speed {
                Some(speed) if bottom - top >= TWO_LINES => {
                    canvas.text(x - 7.0, line - 6.5, font, &font.cut(&vertex.name, geometry.node_width));
                    canvas.text(x - 7.0, line + 6.5, mark, &speed);
                }
                Some(speed) => {
                    let width = mark.width(&speed) + 5.0;
                    let name = font.cut(&vertex.name, geometry.node_width - width);
                    canvas.text(x - 7.0 - width, line, font, &name);
                    canvas.text(x - 7.0, line, mark, &speed);
                }
                None => canvas.text(x - 7.0, line, font, &font.cut(&vertex.name, geometry.node_width)),
            }
        }
        let side = geometry.bar_height.min(11.0);
        for rank in &geometry.order {
            let font = Font { anchor: Anchor::End, ..LABEL };
            canvas.text(geometry.left - 24.0, geometry.baseline(*rank, font), font, &format!("rank {rank}"));
            let y = geometry.bar(*rank) + (geometry.bar_height - side) / 2.0;
            canvas
                .rect([geometry.left - 19.0, y, side, side], &format!("rx=\"2\" fill=\"{}\"", color(*rank)));
        }
    }

    /// One column: the vectors of all ranks after `number` levels.
    fn column(&mut self, number: usize, holdings: &Holdings) {
        let x = self.geometry.column(number);
        let head = match number {
            0 => "start".to_owned(),
            _ => format!("after level {}", number - 1),
        };
        let (geometry, canvas) = (&self.geometry, &mut self.canvas);
        canvas.text(x + geometry.bar_width / 2.0, geometry.top - 27.0, HEAD, &head);
        // The future owner of each part, once per column.
        let (strip, small) = (geometry.top - 20.0, Font { size: 10.0, ..LABEL });
        for shard in self.schedule.shards() {
            let (start, end) = (x + geometry.offset(shard.span.start), x + geometry.offset(shard.span.end));
            let style = format!("fill=\"{}\" stroke=\"#FFFFFF\" stroke-width=\"0.6\"", color(shard.owner));
            canvas.rect([start, strip, end - start, 13.0], &style);
            let name = shard.owner.to_string();
            if small.width(&name) + 2.0 <= end - start {
                canvas.text(f64::midpoint(start, end), strip + 10.0, small, &name);
            }
        }
        for (rank, held) in holdings.iter().enumerate() {
            self.bar(x, rank, held);
            // At the start every rank holds everything, as the caption says: labels would only hide the
            // parts.
            if number > 0 {
                self.label(x, rank, held);
            }
        }
    }

    fn bar(&mut self, x: f64, rank: Rank, held: &[Span]) {
        let Self { geometry, schedule, canvas, .. } = self;
        let (y, height) = (geometry.bar(rank), geometry.bar_height);
        let place = |span: Span| {
            let (start, end) = (geometry.offset(span.start), geometry.offset(span.end));
            [x + start, y, end - start, height]
        };
        canvas.show("vector", x, y);
        let mut away = Span { start: Span::WHOLE.start, end: Span::WHOLE.start };
        for span in held {
            away.end = span.start;
            if !away.is_empty() {
                canvas.rect(place(away), "fill=\"url(#away)\"");
            }
            away.start = span.end;
        }
        away.end = Span::WHOLE.end;
        if !away.is_empty() {
            canvas.rect(place(away), "fill=\"url(#away)\"");
        }
        canvas.rect(
            [x, y, geometry.bar_width, height],
            "fill=\"none\" stroke=\"#9AA5B1\" stroke-width=\"0.8\"",
        );
        for span in held {
            canvas.rect(place(*span), "fill=\"none\" stroke=\"#52606D\" stroke-width=\"0.9\"");
        }
        for shard in schedule.shards().iter().filter(|shard| shard.owner == rank) {
            for span in held.iter().map(|span| span.intersection(shard.span)).filter(|span| !span.is_empty())
            {
                let style = format!("fill=\"{}\" stroke=\"#1F2933\" stroke-width=\"1.4\"", color(rank));
                canvas.rect(place(span), &style);
            }
        }
    }

    /// Labels the spans that a rank holds.
    fn label(&mut self, x: f64, rank: Rank, held: &[Span]) {
        let Self { geometry, labels, canvas, .. } = self;
        let font = Font { size: LABEL.size.min(geometry.bar_height - 2.0), halo: true, ..LABEL };
        for span in held {
            let (start, end) = (x + geometry.offset(span.start), x + geometry.offset(span.end));
            let label = match labels.count {
                Some(count) => elements(*span, count),
                None if *span == Span::WHOLE => "whole".to_owned(),
                None => span.length().map_or_else(String::new, |length| length.to_string()),
            };
            if font.width(&label) + 4.0 <= end - start {
                canvas.text(f64::midpoint(start, end), geometry.baseline(rank, font), font, &label);
            }
        }
    }

    /// The flows between two columns, or the text "many to many" if there are too many.
    fn flows(&mut self, level: usize, flows: &[Flow]) {
        let (geometry, canvas) = (&self.geometry, &mut self.canvas);
        let (left, right) =
            (geometry.column(level) + geometry.bar_width + 3.0, geometry.column(level + 1) - 3.0);
        if flows.len() > MOST_FLOWS {
            let (middle, y) = (f64::midpoint(left, right), f64::midpoint(geometry.top, geometry.bottom));
            let font = Font { anchor: Anchor::Middle, ..NOTE };
            for (line, text) in [(-1.0, "many"), (0.0, "to"), (1.0, "many")] {
                canvas.text(middle, y + 14.0 * line, font, text);
            }
            return;
        }
        let head = if flows.len() > 60 { 0.0 } else { 5.0 };
        for Ribbon { to, is_chained, start, end, thickness } in ribbons(flows, geometry) {
            let color = if is_chained { CHAINED.to_owned() } else { color(to) };
            let (stop, middle) = (right - head, f64::midpoint(left, right));
            let [x, start, tip, stop, middle] = [left, start, right, stop, middle].map(number);
            let (y, width) = (number(end), number(thickness));
            canvas.path(
                &format!("M{x} {start}C{middle} {start} {middle} {y} {stop} {y}"),
                &format!("fill=\"none\" stroke=\"{color}\" stroke-width=\"{width}\" stroke-opacity=\"0.75\""),
            );
            if head > 0.0 {
                let half = (thickness / 2.0).max(2.2);
                let (above, below) = (number(end - half), number(end + half));
                canvas.path(
                    &format!("M{stop} {above}L{tip} {y}L{stop} {below}Z"),
                    &format!("fill=\"{color}\""),
                );
            }
        }
    }

    /// The span that each rank owns at the end, right of the last column.
    fn owners(&mut self, owned: &[String]) {
        let Self { geometry, canvas, .. } = self;
        let x = geometry.column(geometry.columns - 1) + geometry.bar_width + 10.0;
        canvas.text(x, geometry.top - 27.0, Font { anchor: Anchor::Start, ..HEAD }, "owns");
        for rank in &geometry.order {
            let text = OWNED.cut(&owned[*rank], geometry.width - x - 8.0);
            canvas.text(x, geometry.baseline(*rank, OWNED), OWNED, &text);
        }
        let font = Font { anchor: Anchor::End, ..NOTE };
        canvas.text(geometry.left - 8.0, geometry.top - 10.0, font, "owner at the end");
    }

    /// The captions of the levels, below their columns. Returns the y of the last line.
    fn captions(&mut self, captions: &[String]) -> f64 {
        let Self { geometry, canvas, .. } = self;
        let start = if self.schedule.world() == 1 {
            "the rank holds its vector"
        } else {
            "every rank holds its whole vector"
        };
        let texts = std::iter::once(start).chain(captions.iter().map(String::as_str));
        let mut below = geometry.bottom;
        for (number, text) in texts.enumerate() {
            let middle = geometry.column(number) + geometry.bar_width / 2.0;
            for (line, text) in (1..).zip(CAPTION.lines(text, geometry.bar_width + geometry.gap * 0.45)) {
                let y = geometry.bottom + 8.0 + 15.5 * f64::from(line);
                canvas.text(middle, y, CAPTION, &text);
                below = below.max(y);
            }
        }
        below
    }

    /// The legend. Returns the y of its last line.
    fn legend(&mut self, below: f64) -> f64 {
        let Self { geometry, canvas, .. } = self;
        let own = color(0);
        let swatches = [
            (format!("fill=\"{own}\" stroke=\"#1F2933\" stroke-width=\"1.4\""), "its own part"),
            (
                format!("fill=\"{own}\" fill-opacity=\"0.42\" stroke=\"#52606D\" stroke-width=\"0.9\""),
                "a partial sum for another rank",
            ),
            (
                "fill=\"url(#away)\" stroke=\"#9AA5B1\" stroke-width=\"0.8\"".to_owned(),
                "sent to another rank",
            ),
            (format!("fill=\"{own}\" fill-opacity=\"0.75\""), "a transfer, as thick as its part"),
            (format!("fill=\"{CHAINED}\" fill-opacity=\"0.75\""), "a hop of a ring"),
        ];
        // Chains only where there are some.
        let swatches = &swatches[..if self.has_chains { 5 } else { 4 }];
        let text = "color: its future owner";
        let (mut x, mut y) = (MARGIN, below + 34.0);
        canvas.path(
            &format!("M{} {}H{}", number(MARGIN), number(below + 14.0), number(geometry.width - MARGIN)),
            "stroke=\"#E4E7EB\"",
        );
        canvas.text(x, y, NOTE, text);
        x += NOTE.width(text) + 14.0;
        for (number, (style, text)) in swatches.iter().enumerate() {
            let width = 24.0 + 6.0 + NOTE.width(text);
            if x + width > geometry.width - MARGIN {
                (x, y) = (MARGIN, y + 20.0);
            }
            let thin = if number >= 3 { 4.0 } else { 0.0 };
            canvas.rect([x, y - 10.0 + thin, 24.0, 12.0 - 2.0 * thin], style);
            canvas.text(x + 30.0, y, NOTE, text);
            x += width + 14.0;
        }
        y
    }
}

/// The span that a rank owns at the end, as text.
fn owned(schedule: &Schedule, rank: Rank, labels: Labels<'_>) -> String {
    let mut spans = schedule.shards().iter().filter(|shard| shard.owner == rank).map(|shard| shard.span);
    match (spans.next(), spans.count(), labels.count) {
        (None, ..) => "nothing".to_owned(),
        (Some(span), 0, Some(count)) => elements(span, count),
        (Some(span), 0, None) => span.to_string(),
        (_, more, _) => format!("{} parts", more + 1),
    }
}

/// A span as elements of a vector of `count`.
fn elements(span: Span, count: u64) -> String {
    let range = span.elements(count, 1);
    if range.is_empty() { "none".to_owned() } else { format!("{}..{}", range.start, range.end) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexring_core::config::Algorithm;
    use flexring_plan::planner::{self, Details};
    use flexring_plan::topology_file::parse_short;

    fn drawn(text: &str, algorithm: Algorithm, count: Option<u64>) -> String {
        let topology = parse_short(text).expect("short form").expect("valid");
        let schedule = planner::plan(algorithm, &topology, &Details::default()).expect("possible");
        draw(&schedule, &topology, Labels { topology: text, count, lowering: Lowering::Auto })
    }

    #[test]
    fn a_drawing_contains_title_labels_and_captions() {
        let drawing = drawn("2+3", Algorithm::Flexreduce, None);
        for text in [
            ">flexreduce on 2+3<",
            ">start<",
            ">after level 1<",
            ">node 1<",
            ">rank 4<",
            ">1/3<",
            ">1/4<",
            ">[1/6, 5/12)<",
            "each node divides the vector among its ranks",
            ">sent to another rank<",
        ] {
            assert!(drawing.contains(text), "{text}: {drawing}");
        }
        assert!(!drawing.contains("NaN") && !drawing.contains("inf"));
        let elements = drawn("2+3", Algorithm::Flexreduce, Some(12));
        assert!(elements.contains(">2..5<") && !elements.contains(">1/4<"), "{elements}");
    }

    #[test]
    fn every_link_between_nodes_has_its_rate_and_the_slowest_is_highlighted() {
        let slowest = |drawing: &str| {
            let lines = drawing.lines().filter(|line| line.contains(SLOWEST));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        let drawing = drawn("1@1G+1@500M", Algorithm::Weighted, None);
        assert!(drawing.contains(">1Gbit/s<"), "{drawing}");
        let [only] = &slowest(&drawing)[..] else { panic!("one slowest link: {drawing}") };
        assert!(only.contains(">500Mbit/s<"), "{only}");
        let drawing = drawn("1@1G+1@1G", Algorithm::Ring, None);
        assert_eq!(drawing.matches(">1Gbit/s<").count(), 2, "{drawing}");
        assert_eq!(slowest(&drawing), Vec::<String>::new());
        assert!(drawn("(2+3)@5G+(4)@1G", Algorithm::Flexreduce, None).contains(", 5Gbit/s<"));
        // Rows that are too low for two lines.
        assert_eq!(
            drawn(&vec!["1@2G"; 20].join("+"), Algorithm::Ring, None).matches(">2Gbit/s<").count(),
            20
        );
        assert!(
            !drawn("3", Algorithm::Ring, None).contains("bit/s"),
            "the link of the only node is not used"
        );
    }

    #[test]
    fn a_ring_is_drawn_as_hops_from_each_rank_to_the_next() {
        let topology = parse_short("1+1+1+1").expect("short form").expect("valid");
        let schedule = planner::plan(Algorithm::Ring, &topology, &Details::default()).expect("possible");
        let flows = flows(&schedule.levels()[0], |_| true);
        let hops: Vec<_> = flows.iter().map(|flow| (flow.from, flow.to, flow.amount)).collect();
        assert_eq!(hops, [(0, 1, 0.75), (1, 2, 0.75), (2, 3, 0.75), (3, 0, 0.75)]);
        let labels = Labels { topology: "1+1+1+1", count: None, lowering: Lowering::Chain };
        let drawing = draw(&schedule, &topology, labels);
        assert!(drawing.contains(">a hop of a ring<") && drawing.contains(CHAINED), "{drawing}");
        assert!(!drawn("2+3", Algorithm::Flexreduce, None).contains("a hop of a ring"));
    }

    #[test]
    fn every_algorithm_and_size_can_be_drawn() {
        for text in ["1", "2", "1+1", "3+3+4", "(2+3)+(4+1)", "8+8+8+8+8+8+8+8", "64"] {
            for algorithm in Algorithm::ALL {
                let topology = parse_short(text).expect("short form").expect("valid");
                let Ok(schedule) = planner::plan(*algorithm, &topology, &Details::default()) else {
                    continue;
                };
                let labels = Labels { topology: text, count: Some(5), lowering: Lowering::Auto };
                let drawing = draw(&schedule, &topology, labels);
                assert!(drawing.ends_with("</svg>\n") && !drawing.contains("NaN"), "{text} {algorithm:?}");
            }
        }
    }
}
