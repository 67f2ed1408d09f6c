//! Positions and sizes of the elements of a drawing, in SVG user units.
//!
//! Owns lengths and fonts. Must not know what is painted.

use super::canvas::{Anchor, Font};
use flexring_plan::Rank;
use flexring_plan::fraction::Fraction;
use flexring_plan::topology::{Topology, VertexId, VertexKind};

pub(super) const MARGIN: f64 = 22.0;
/// The width at which a README shows a picture. Drawings with many columns are wider.
pub(super) const WIDTH: f64 = 940.0;
/// Least height of a bracket with two lines of text beside it.
pub(super) const TWO_LINES: f64 = 26.0;
/// Width of one column of switches, left of the nodes.
const SWITCH: f64 = 24.0;

const INK: &str = "#1F2933";
const GREY: &str = "#52606D";

pub(super) const TITLE: Font =
    Font { size: 18.0, bold: true, color: INK, anchor: Anchor::Start, halo: false };
pub(super) const SUBTITLE: Font =
    Font { size: 12.5, bold: false, color: GREY, anchor: Anchor::Start, halo: false };
pub(super) const HEAD: Font =
    Font { size: 12.5, bold: true, color: INK, anchor: Anchor::Middle, halo: false };
pub(super) const CAPTION: Font =
    Font { size: 12.0, bold: false, color: INK, anchor: Anchor::Middle, halo: false };
pub(super) const NOTE: Font =
    Font { size: 11.5, bold: false, color: GREY, anchor: Anchor::Start, halo: false };
pub(super) const OWNED: Font = Font { color: INK, ..NOTE };
pub(super) const LABEL: Font =
    Font { size: 12.0, bold: false, color: INK, anchor: Anchor::Middle, halo: false };

/// A bracket around the ranks of a node or a switch.
pub(super) struct Bracket {
    pub(super) vertex: VertexId,
    /// Number of switches between it and the root, from 1; 0 for nodes, which have a column of their own.
    pub(super) depth: usize,
    pub(super) top: f64,
    pub(super) bottom: f64,
}

/// Positions and sizes in one drawing.
pub(super) struct Geometry {
    /// The ranks from top to bottom.
    pub(super) order: Vec<Rank>,
    /// By rank, the top of its bars.
    tops: Vec<f64>,
    pub(super) bar_height: f64,
    pub(super) bar_width: f64,
    /// Width of the gap between columns.
    pub(super) gap: f64,
    /// Left edge of the first column.
    pub(super) left: f64,
    pub(super) node_width: f64,
    pub(super) columns: usize,
    /// Top of the first row and bottom of the last.
    pub(super) top: f64,
    pub(super) bottom: f64,
    pub(super) width: f64,
    pub(super) brackets: Vec<Bracket>,
}

impl Geometry {
    /// The geometry for this number of columns, with texts of width `texts` right of the last one.
    pub(super) fn new(topology: &Topology, columns: usize, texts: f64) -> Self {
        let order = topology.ranks_in_tree_order();
        let (row, bar_height) = match order.len() {
            0..=8 => (38.0, 26.0),
            9..=16 => (29.0, 20.0),
            17..=32 => (22.0, 16.0),
            _ => (17.0, 13.0),
        };
        let top = 112.0;
        let mut tops = vec![0.0; order.len()];
        let mut y = top;
        let branch = |rank: Rank| branch(topology, rank);
        for (place, rank) in order.iter().enumerate() {
            if let Some(before) = place.checked_sub(1).map(|place| order[place]) {
                y += if topology.node_of(before) == topology.node_of(*rank) { 0.0 } else { 12.0 };
                y += if branch(before) == branch(*rank) { 0.0 } else { 8.0 };
            }
            tops[*rank] = y;
            y += row;
        }
        let bottom = y - (row - bar_height);
        let brackets = brackets(topology, &order, &tops, bar_height);
        let switches = brackets.iter().map(|bracket| bracket.depth).max().unwrap_or(0);
        let names = brackets.iter().filter(|bracket| bracket.depth == 0);
        let rate = NOTE.width("500Mbit/s");
        let names = names.map(|bracket| {
            let beside = if bracket.bottom - bracket.top < TWO_LINES { rate + 5.0 } else { 0.0 };
            NOTE.width(&topology.vertices()[bracket.vertex].name) + beside
        });
        let node_width = names.fold(rate, f64::max).min(130.0);
        let left = MARGIN + SWITCH * switches as f64 + node_width + 92.0;
        let (gap, owns) = (if columns > 4 { 64.0 } else { 84.0 }, texts.clamp(50.0, 150.0) + 10.0);
        let free = WIDTH - left - owns - MARGIN - gap * (columns - 1) as f64;
        let bar_width = (free / columns as f64).clamp(130.0, 300.0);
        let width = left + (bar_width + gap) * columns as f64 - gap + owns + MARGIN;
        Self {
            order,
            tops,
            bar_height,
            bar_width,
            gap,
            left,
            node_width,
            columns,
            top,
            bottom,
            width,
            brackets,
        }
    }

    /// Left edge of a column.
    pub(super) fn column(&self, column: usize) -> f64 {
        self.left + (self.bar_width + self.gap) * column as f64
    }

    /// Top of the bars of a rank.
    pub(super) fn bar(&self, rank: Rank) -> f64 {
        self.tops[rank]
    }

    /// Baseline of a text in the vertical middle of a rank's bars.
    pub(super) fn baseline(&self, rank: Rank, font: Font) -> f64 {
        self.tops[rank] + self.bar_height / 2.0 + font.size * 0.36
    }

    /// Distance of a point of the vector from the left edge of a bar.
    pub(super) fn offset(&self, point: Fraction) -> f64 {
        point.to_f64() * self.bar_width
    }

    /// x of a bracket's line.
    pub(super) fn bracket_x(&self, bracket: &Bracket) -> f64 {
        match bracket.depth {
            0 => self.left - 84.0,
            depth => MARGIN + SWITCH * depth as f64 - 4.0,
        }
    }
}

/// The child of the root that `rank` is below; the root itself for nodes, which are not separated further.
fn branch(topology: &Topology, rank: Rank) -> VertexId {
    let up = |vertex: &VertexId| topology.vertices()[*vertex].parent.filter(|parent| *parent != 0);
    let branch = std::iter::successors(Some(topology.leaf(rank)), up).last().unwrap_or(0);
    // Only switches are separated by an additional gap.
    if topology.vertices()[branch].kind == VertexKind::Switch { branch } else { 0 }
}

/// The brackets of all nodes, and of all switches but the root.
fn brackets(topology: &Topology, order: &[Rank], tops: &[f64], bar_height: f64) -> Vec<Bracket> {
    let vertices = topology.vertices();
    let mut ends: Vec<Option<(f64, f64)>> = vec![None; vertices.len()];
    for rank in order {
        let mut at = vertices[topology.leaf(*rank)].parent;
        while let Some(vertex) = at {
            let (top, bottom) = (tops[*rank], tops[*rank] + bar_height);
            let end = ends[vertex].get_or_insert((top, bottom));
            *end = (end.0.min(top), end.1.max(bottom));
            at = vertices[vertex].parent;
        }
    }
    let depth = |vertex: VertexId| match vertices[vertex].kind {
        VertexKind::Switch => {
            std::iter::successors(Some(vertex), |vertex| vertices[*vertex].parent).count().saturating_sub(1)
        }
        _ => 0,
    };
    let known = (1..).zip(&ends[1..]).filter_map(|(vertex, ends)| ends.map(|ends| (vertex, ends)));
    known.map(|(vertex, (top, bottom))| Bracket { vertex, depth: depth(vertex), top, bottom }).collect()
}
