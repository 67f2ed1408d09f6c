//! Which ranks have all-reduce programs that are equal but for the spans and peers that they name.
//!
//! Owns the comparison, which does not make the programs: it is an order of magnitude faster.
//!
//! In a symmetric cluster most programs are equal in this sense. The ranks of a ring differ by a rotation:
//! where one sends part k to rank k + 1, another sends part k + 1 to rank k + 2. Those of a group that
//! exchanges directly differ in the order of addition, too.

use super::Plan;
use super::program_spec::{Movement, ProgramSpec};
use super::segment::{Segment, segments};
use super::transfers::TransferOp;
use crate::Rank;
use crate::fraction::Span;
use crate::pipeline::Binding;
use crate::schedule::Group;
use std::collections::HashMap;
use std::ops::Range;
use twox_hash::XxHash3_128;
use zerocopy::IntoBytes;

/// The program of a rank, without its steps: its size, and what it has in common with those of other ranks,
/// if its elements are bound.
///
/// If two ranks have equal keys, then step i of one program is step i of the other, with peers at the same
/// places of [`peers`](Self::peers), with sub-chunks of the same lengths, and with the same dependencies and
/// order of messages. The lists of a step are compared by rank, as in programs made with
/// [`SharedSteps::by_rank`](crate::program::SharedSteps::by_rank). The order of all peers by rank may differ.
/// It is that in which a [`Pipeline`](crate::pipeline::Pipeline) begins with its links, so it is equal for
/// peers to which data can be sent at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramClass {
    /// A hash of all that the programs of the class have in common (XXH3); `None` if the program has parts
    /// that are compared with none.
    pub key: Option<u128>,
    /// The ranks that this rank sends to or receives from, in the order of first use.
    pub peers: Vec<Rank>,
    /// Number of steps.
    pub steps: u64,
    /// Number of peers of all steps together: each of them is a send to, or an operand from one peer.
    pub parts: u64,
    /// Messages that the rank sends and receives.
    pub messages: u64,
}

/// The classes of the ranks of a plan in all-reduces of one length.
pub struct ProgramClasses<'a> {
    plan: &'a Plan,
    spec: ProgramSpec,
    count: u64,
    subchunk: u64,
    segments: Vec<Segment>,
    /// By level and group, its pieces as a range of `pieces`.
    pieces_of: Vec<Vec<Range<u32>>>,
    pieces: Vec<GroupSegment>,
    hops: Vec<Hop>,
    /// The ends of all pieces that the rank accesses.
    ends: Vec<u64>,
    /// By piece, its cells, if it was seen.
    seen: Vec<SeenSegment>,
    /// By rank, the last comparison in which it was a peer, and its place among the peers.
    places: Vec<(u32, u32)>,
    /// Number of the last comparison.
    comparison: u32,
    /// By cell, the part between two ends: its label, counted from 1 in the order of first use, or 0; and
    /// whether it is written.
    cells: Vec<(u32, bool)>,
    text: Vec<u64>,
}

/// A segment of a group's span, in elements.
#[derive(Clone, Copy)]
struct GroupSegment {
    start: u64,
    end: u64,
    /// The place in the grid, and the length of the grid; without waves each piece is its own grid.
    in_grid: (u64, u64),
    /// The last level that reduces it.
    level: Option<usize>,
}

impl GroupSegment {
    /// Sub-chunks of a grid that it overlaps.
    fn sub_chunks(&self, subchunk: u64) -> u64 {
        let (first, length) = (self.in_grid.0, self.end - self.start);
        if length == 0 { 0 } else { (first + length - 1) / subchunk - first / subchunk + 1 }
    }
}

/// The cells of a piece in the comparison with this number.
#[derive(Clone, Default)]
struct SeenSegment {
    comparison: u32,
    cells: Range<usize>,
}

/// What one rank does in one group at one depth, with all pieces of the group.
struct Hop {
    depth: u32,
    receives: bool,
    level: usize,
    group: usize,
    op: TransferOp,
    /// Whether it reduces onto this rank.
    at_root: bool,
}

impl<'a> ProgramClasses<'a> {
    /// Prepares what all ranks need. `in_waves`: see [`Movement::Waves`].
    #[must_use]
    pub fn of_all_reduce(plan: &'a Plan, in_waves: bool, binding: &Binding) -> Self {
        let spec = ProgramSpec { movement: Movement::through_levels(in_waves), ..ProgramSpec::ALL_REDUCE };
        let segments = segments(&plan.schedule, &plan.group_starts, spec);
        let mut known: HashMap<Span, Range<u32>> = HashMap::new();
        let (mut pieces, mut pieces_of) = (Vec::new(), Vec::new());
        let lowering = plan.lowering_of(0, spec, &segments);
        for level in plan.schedule.levels() {
            let of_level = level.groups().iter().map(|group| {
                let range = known.entry(group.span).or_insert_with(|| {
                    let start = pieces.len() as u32;
                    pieces.extend(
                        lowering.segments_of(group.span).map(|segment| piece(&segment, in_waves, binding)),
                    );
                    start..pieces.len() as u32
                });
                range.clone()
            });
            pieces_of.push(of_level.collect());
        }
        Self {
            plan,
            spec,
            count: binding.count,
            subchunk: binding.subchunk,
            pieces_of,
            seen: vec![SeenSegment::default(); pieces.len()],
            places: vec![(0, 0); plan.schedule.world()],
            comparison: 0,
            pieces,
            segments,
            hops: Vec::new(),
            ends: Vec::new(),
            cells: Vec::new(),
            text: Vec::new(),
        }
    }

    /// Messages of all ranks together: on the way down each participant of a group sends its span once, or
    /// what it has added it to, and on the way up it gets the span once.
    #[must_use]
    pub fn messages(&self) -> u64 {
        let levels = self.plan.schedule.levels().iter().zip(&self.pieces_of);
        let groups = levels.flat_map(|(level, pieces)| level.groups().iter().zip(pieces));
        let of_group = |(group, pieces): (&Group, &Range<u32>)| {
            let senders = group.len() - usize::from(group.place_of(group.root).is_some());
            2 * senders as u64 * self.sub_chunks(pieces)
        };
        groups.map(of_group).sum()
    }

    fn sub_chunks(&self, pieces: &Range<u32>) -> u64 {
        pieces.clone().map(|number| self.pieces[number as usize].sub_chunks(self.subchunk)).sum()
    }

    /// The class of a rank.
    pub fn class_of(&mut self, rank: Rank) -> ProgramClass {
        self.find_hops(rank);
        self.find_cells();
        let peers = self.find_peers(rank);
        let mut text = std::mem::take(&mut self.text);
        let (mut labels, mut steps, mut parts, mut messages) = (0, 0, 0, 0);
        let (mut others, mut sends_at_once): (Vec<Rank>, Vec<Rank>) = (Vec::new(), Vec::new());
        text.clear();
        for hop in &self.hops {
            let ranks = hop.op.ranks();
            others.clear();
            others.extend(ranks.iter().copied().filter(|peer| *peer != rank));
            others.sort_unstable();
            let number = others.len() as u64;
            text.extend([u64::from(hop.depth), hop.op.kind(), number, ranks.len() as u64 - number]);
            text.extend(others.iter().map(|peer| u64::from(self.places[*peer].1)));
            let pieces = self.pieces_of[hop.level][hop.group].clone();
            text.push(pieces.len() as u64);
            steps += pieces.len() as u64;
            parts += pieces.len() as u64 * number;
            messages += number * self.sub_chunks(&pieces);
            for number in pieces {
                let (piece, cells) = (&self.pieces[number as usize], &self.seen[number as usize].cells);
                let completes = hop.at_root && piece.level == Some(hop.level);
                text.extend([piece.in_grid.0, piece.in_grid.1, cells.len() as u64, completes.into()]);
                if !hop.receives && self.cells[cells.clone()].iter().all(|(_, written)| !written) {
                    sends_at_once.extend(&others);
                }
                for cell in cells.clone() {
                    let (label, written) = &mut self.cells[cell];
                    *written |= hop.receives;
                    if *label == 0 {
                        labels += 1;
                        *label = labels;
                        text.push(self.ends[cell + 1] - self.ends[cell]);
                    }
                    text.push(u64::from(*label));
                }
            }
        }
        sends_at_once.sort_unstable();
        sends_at_once.dedup();
        text.extend(sends_at_once.iter().map(|peer| u64::from(self.places[*peer].1)));
        // What no step writes is copied at the end, in parts that are not compared here.
        let written = |(cell, _): &(usize, &(u32, bool))| self.cells[*cell].1;
        let written = self.cells.iter().enumerate().filter(written);
        let all: u64 = written.map(|(cell, _)| self.ends[cell + 1] - self.ends[cell]).sum();
        let key = XxHash3_128::oneshot(text.as_bytes());
        self.text = text;
        ProgramClass { key: (all == self.count).then_some(key), peers, steps, parts, messages }
    }

    /// Finds what the rank does, in the order of its steps.
    fn find_hops(&mut self, rank: Rank) {
        let lowering = self.plan.lowering_of(rank, self.spec, &self.segments);
        let hops = &mut self.hops;
        hops.clear();
        lowering.reduce_groups(|level, group, depth, op| {
            let at_root = self.plan.schedule.levels()[level].groups()[group].root == rank;
            hops.push(Hop { depth, receives: op.receives(), level, group, op, at_root });
        });
        let depth = self.plan.hops.iter().sum();
        lowering.gather_groups(depth, |level, group, depth, op| {
            hops.push(Hop { depth, receives: op.receives(), level, group, op, at_root: false });
        });
        hops.sort_by_key(|hop| (hop.depth, hop.receives, hop.group));
    }

    /// The peers in the order of first use, of which it notes the places.
    fn find_peers(&mut self, rank: Rank) -> Vec<Rank> {
        let mut peers = Vec::new();
        for peer in self.hops.iter().flat_map(|hop| hop.op.ranks()).filter(|peer| **peer != rank) {
            let (comparison, place) = &mut self.places[*peer];
            if std::mem::replace(comparison, self.comparison) != self.comparison {
                *place = peers.len() as u32;
                peers.push(*peer);
            }
        }
        peers
    }

    fn find_cells(&mut self) {
        self.comparison += 1;
        self.ends.clear();
        let mut pieces = Vec::new();
        for number in self.hops.iter().flat_map(|hop| self.pieces_of[hop.level][hop.group].clone()) {
            let seen = &mut self.seen[number as usize].comparison;
            if std::mem::replace(seen, self.comparison) != self.comparison {
                let GroupSegment { start, end, .. } = self.pieces[number as usize];
                self.ends.extend([start, end]);
                pieces.push(number as usize);
            }
        }
        self.ends.sort_unstable();
        self.ends.dedup();
        let at = |end| self.ends.partition_point(|other| *other < end);
        for number in pieces {
            let GroupSegment { start, end, .. } = self.pieces[number];
            self.seen[number].cells = at(start)..at(end);
        }
        self.cells.clear();
        self.cells.resize(self.ends.len().saturating_sub(1), (0, false));
    }
}

fn piece(segment: &Segment, in_waves: bool, binding: &Binding) -> GroupSegment {
    let Range { start, end } = segment.span.elements(binding.count, binding.align);
    let in_grid = if in_waves {
        let grid = segment.span.elements(binding.count, binding.align);
        (start - grid.start, grid.end - grid.start)
    } else {
        (0, end - start)
    };
    GroupSegment { start, end, in_grid, level: segment.shard.level }
}
