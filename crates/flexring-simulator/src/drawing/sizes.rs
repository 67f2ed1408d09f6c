//! The drawing of simulated times by the size of the vector.
//!
//! Owns what is shown. Must not know how times come about.

use super::axis::{decades, size_label};
use super::canvas::{Anchor, Canvas, Font, number};
use super::frame::{frame, legend};
use super::geometry::{LABEL, MARGIN, NOTE, WIDTH};

/// The time of one size.
#[derive(Clone, Debug, PartialEq)]
pub struct SizePoint {
    /// Bytes of the vector.
    pub bytes: u64,
    /// The time in seconds.
    pub seconds: f64,
    /// What no schedule can do better, in seconds; 0 if there is no bound.
    pub bound: f64,
    /// The time of the best other schedule in seconds; 0 if it is not known.
    pub other: f64,
    /// The name of the schedule.
    pub schedule: String,
}

const TIME: &str = "#5B8FD0";
const BOUND: &str = "#9AA5B1";
const OTHER: &str = "#E69F00";
const HEIGHT: f64 = 320.0;
const TOP: f64 = 98.0;
const LEFT: f64 = 80.0;
/// Least distance between the labels of two sizes.
const LABELS: f64 = 46.0;

/// The drawing as an SVG file: time by size, both logarithmic, beside the lower bound.
#[must_use]
pub fn draw_sizes(points: &[SizePoint], title: &str, subtitle: &str) -> String {
    let mut points = points.to_vec();
    points.sort_by_key(|point| point.bytes);
    let times = points.iter().flat_map(|point| [point.seconds, point.bound, point.other]);
    let times = times.filter(|time| *time > 0.0);
    let ticks = decades(times);
    let (low, high) = (ticks[0].0.log10(), ticks[ticks.len() - 1].0.log10());
    let log = |bytes: u64| (bytes.max(1) as f64).log2();
    let first = points.first().map_or(0.0, |point| log(point.bytes));
    let last = points.last().map_or(1.0, |point| log(point.bytes)).max(first + 1e-9);
    let width = WIDTH - LEFT - MARGIN - 60.0;
    let x = |bytes: u64| LEFT + width * (log(bytes) - first) / (last - first);
    let y = |seconds: f64| TOP + HEIGHT * (high - seconds.max(1e-12).log10()) / (high - low);

    let mut canvas = Canvas::default();
    let bottom = TOP + HEIGHT;
    let height = bottom + 46.0 + MARGIN;
    frame(&mut canvas, [WIDTH, height], title, subtitle);
    for (time, label) in &ticks {
        let at = y(*time);
        let style = "stroke=\"#E4E7EB\" fill=\"none\"";
        canvas.path(&format!("M{} {}H{}", number(LEFT), number(at), number(LEFT + width)), style);
        canvas.text(LEFT - 8.0, at + 4.0, Font { anchor: Anchor::End, ..NOTE }, label);
    }
    let mut free = f64::NEG_INFINITY;
    for point in &points {
        let at = x(point.bytes);
        if at >= free {
            canvas.text(at, bottom + 20.0, LABEL, &size_label(point.bytes));
            free = at + LABELS;
        }
    }
    canvas.text(
        LEFT + width / 2.0,
        bottom + 42.0,
        Font { anchor: Anchor::Middle, ..NOTE },
        "bytes of the vector",
    );
    let line = |of: fn(&SizePoint) -> f64| {
        let shown = points.iter().filter(|point| of(point) > 0.0);
        let places = shown.map(|point| format!("{} {}", number(x(point.bytes)), number(y(of(point)))));
        places.collect::<Vec<_>>().join("L")
    };
    let bounds = line(|point| point.bound);
    if !bounds.is_empty() {
        let style = format!("fill=\"none\" stroke=\"{BOUND}\" stroke-width=\"1.5\" stroke-dasharray=\"5 4\"");
        canvas.path(&format!("M{bounds}"), &style);
    }
    let others = line(|point| point.other);
    if !others.is_empty() {
        let style = format!("fill=\"none\" stroke=\"{OTHER}\" stroke-width=\"1.5\"");
        canvas.path(&format!("M{others}"), &style);
    }
    let style = format!("fill=\"none\" stroke=\"{TIME}\" stroke-width=\"2\"");
    canvas.path(&format!("M{}", line(|point| point.seconds)), &style);
    let mut before = "";
    for point in &points {
        let (at, above) = (x(point.bytes), y(point.seconds));
        canvas.raw(&format!(
            "<circle cx=\"{}\" cy=\"{}\" r=\"3.5\" fill=\"{TIME}\"/>",
            number(at),
            number(above)
        ));
        if point.schedule != before {
            canvas.text(at + 6.0, above - 8.0, Font { halo: true, ..NOTE }, &point.schedule);
            before = &point.schedule;
        }
    }
    let colors = [
        (TIME, "simulated, with the schedule where it changes"),
        (OTHER, "the best other schedule"),
        (BOUND, "the least time of any schedule"),
    ];
    legend(&mut canvas, colors.into_iter().filter(|(color, _)| *color != OTHER || !others.is_empty()));
    canvas.finish(WIDTH, height, title, subtitle)
}
