//! A program and the length of a call become a list of items.

use super::{DeviceProgram, ItemPlace, LinkCounts, ListItem};
use crate::call_layout::CallLayout;
use crate::pipeline::{Binding, BlockLayout, BoundPlace, BoundSteps};
use crate::program::{Body, BufferKind, Dependency, DependencyKind, OperandSource, Program, StepId};
use crate::scratch_layout::ScratchLayout;
use flexring_core::error::{Error, Result};
use std::ops::Range;

/// Elements whose bytes are whole granules, which kernels move at once, of any type.
const GRANULE: u64 = 16;

/// When a sub-chunk of a step is due: the order of items, equal for both ends of a message but for `turn`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    wave: u64,
    depth: u32,
    group: u32,
    /// The first element of the cell of its grid.
    cell: u64,
    turn: Turn,
    step: StepId,
    sub: u32,
}

/// Among the items of one sub-chunk: what they depend on comes first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    /// It prepares data of this rank.
    Local,
    Send,
    Combine,
    /// It copies data of this rank, and no item waits for that.
    Deliver,
}

impl DeviceProgram {
    /// The list for calls that are laid out like `layout`, which has at least one element, of items with at
    /// most `most_places`, at least 3; `None` for programs that no list can be made of: those whose blocks
    /// have places of their own.
    ///
    /// # Errors
    /// If an item would wait for a later one, though input and output share no memory: a bug in the program.
    pub fn new(program: &Program, layout: &CallLayout, most_places: usize) -> Result<Option<Self>> {
        if program.blocks.is_some() {
            return Ok(None);
        }
        let compile = |layout: &CallLayout| {
            let mut bound = BoundSteps::new(program);
            bound.bind(program, &layout.binding, &BlockLayout::default());
            let mut scratch = ScratchLayout::default();
            scratch.lay_out(program, &layout.binding);
            Compiler { program, layout, most_places, bound, scratch, result: Self::default() }.run()
        };
        let in_place = layout.binding.in_place || layout.copies_input;
        match if layout.copies_input { None } else { compile(layout) } {
            None if in_place => {
                let binding = Binding { in_place: false, ..layout.binding };
                Ok(compile(&CallLayout { binding, copies_input: true, ..layout.clone() }))
            }
            None => Err(Error::internal(format!(
                "rank {}: a step waits for one that is due later: please report this",
                program.rank
            ))),
            list => Ok(list),
        }
    }
}

struct Compiler<'a> {
    program: &'a Program,
    layout: &'a CallLayout,
    /// Sources and destinations of an item.
    most_places: usize,
    bound: BoundSteps,
    scratch: ScratchLayout,
    result: DeviceProgram,
}

impl Compiler<'_> {
    /// `None` if an item would wait for a later one.
    fn run(mut self) -> Option<DeviceProgram> {
        self.result.rank = self.program.rank;
        self.result.world = self.program.world;
        self.result.scratch = self.scratch.count();
        self.result.links =
            self.program.peers().map(|peer| LinkCounts { peer, sends: 0, receives: 0 }).collect();
        let copied = self.copy_input();
        let order = self.order();
        // By step, the place in `item_of` of its first sub-chunk.
        let mut first = Vec::with_capacity(self.program.steps.len());
        let mut subs = 0;
        for step in 0..self.program.steps.len() as StepId {
            first.push(subs);
            subs += self.bound.place(step).subs as usize;
        }
        // A sub-chunk with too many places is split into several items, each of which waits for the previous
        // one.
        let mut item_of = vec![0; subs];
        let mut items = self.result.items.len() as u32;
        for due in &order {
            items += self.items_of(due.step);
            item_of[first[due.step as usize] + due.sub as usize] = items - 1;
        }
        for due in &order {
            let index = self.result.items.len() as u32;
            let first_wait = self.result.waits.len();
            self.result.waits.extend(copied);
            for dependency in self.program.dependencies(due.step) {
                let before = self.waited_for(due, *dependency);
                let items = before.map(|sub| item_of[first[dependency.on as usize] + sub as usize]);
                self.result.waits.extend(items);
            }
            let waits = &mut self.result.waits;
            waits[first_wait..].sort_unstable();
            if waits[first_wait..].last().is_some_and(|last| *last >= index) {
                return None;
            }
            self.push(due, first_wait as u32..self.result.waits.len() as u32);
        }
        Some(self.result)
    }

    /// Adds the items that copy the input, if it must be copied, and one that is done when they are: its
    /// index.
    fn copy_input(&mut self) -> Option<u32> {
        let held = self.layout.input.end - self.layout.input.start;
        if !self.layout.copies_input || held == 0 {
            return None;
        }
        self.result.copied = held;
        let mut first = 0;
        while first < held {
            let elements = (held - first).min(self.layout.binding.subchunk);
            let at = self.result.sources.len() as u32;
            self.result.sources.push(ItemPlace::Input(first));
            self.result.destinations.push(ItemPlace::InputCopy(first));
            self.result.items.push(ListItem {
                elements: elements as u32,
                scales: false,
                last: false,
                sources: at..at + 1,
                destinations: at..at + 1,
                waits: 0..0,
            });
            first += elements;
        }
        let copies = self.result.items.len() as u32;
        self.result.waits.extend(0..copies);
        self.result.items.push(ListItem {
            elements: 0,
            scales: false,
            last: false,
            sources: copies..copies,
            destinations: copies..copies,
            waits: 0..copies,
        });
        Some(copies)
    }

    /// All sub-chunks of all steps, as they are due.
    fn order(&self) -> Vec<Due> {
        let Binding { count, subchunk, .. } = self.layout.binding;
        let waves = self.program.waves.as_ref().map(|waves| (waves.number(count, subchunk), waves.lag));
        let mut order = Vec::new();
        for (number, step) in (0..).zip(&self.program.steps) {
            let place = self.bound.place(number);
            let is_awaited = |later: &StepId| {
                let names = |on: &Dependency| on.on == number && on.kind != DependencyKind::Reuse;
                self.program.dependencies(*later).iter().any(names)
            };
            let turn = match &*step.body {
                Body::Send { .. } => Turn::Send,
                Body::Combine { .. } if !step.is_local() => Turn::Combine,
                Body::Combine { .. } if self.program.dependents(number).iter().any(is_awaited) => Turn::Local,
                Body::Combine { .. } => Turn::Deliver,
            };
            order.extend((0..place.subs).map(|sub| Due {
                wave: waves.map_or(0, |waves| place.due(sub, waves, step.depth)),
                depth: step.depth,
                group: step.group,
                cell: place.origin + (place.first + u64::from(sub)) * subchunk,
                turn,
                step: number,
                sub,
            }));
        }
        order.sort_unstable();
        order
    }

    /// The elements of a sub-chunk of a step.
    fn elements(&self, step: StepId, sub: u32) -> Range<u64> {
        self.bound.place(step).elements(sub.into(), self.layout.binding.subchunk)
    }

    /// The sub-chunks of another step that an item waits for.
    fn waited_for(&self, due: &Due, dependency: Dependency) -> Range<u32> {
        let (own, on) = (self.bound.place(due.step), self.bound.place(dependency.on));
        match dependency.kind {
            DependencyKind::Elements => self.overlap(on, self.elements(due.step, due.sub)),
            DependencyKind::ElementsInPlace if !self.layout.binding.in_place => 0..0,
            DependencyKind::ElementsInPlace => self.overlap(on, self.elements(due.step, due.sub)),
            DependencyKind::Reuse => {
                // The newest sub-chunk of the other step that was at the same place. It has waited for older
                // ones.
                let earlier =
                    |cell: &u64| cell.checked_sub(own.ring).filter(|earlier| *earlier >= own.origin);
                let cells = std::iter::successors(earlier(&due.cell), earlier);
                let used = cells.map(|cell| self.overlap(on, cell..cell + self.layout.binding.subchunk));
                used.into_iter().find(|subs| !subs.is_empty()).unwrap_or(0..0)
            }
        }
    }

    /// The sub-chunks of a step that have some of these elements.
    fn overlap(&self, place: &BoundPlace, elements: Range<u64>) -> Range<u32> {
        let (start, end) = (elements.start.max(place.start), elements.end.min(place.end));
        if start >= end {
            return 0..0;
        }
        let sub_of = |element| ((element - place.origin) / self.layout.binding.subchunk - place.first) as u32;
        sub_of(start)..sub_of(end - 1) + 1
    }

    /// Where the elements from this one on are in one of this rank's vectors.
    fn place(&self, buffer: BufferKind, element: u64) -> ItemPlace {
        match (buffer, self.layout.place_of(buffer, element, None)) {
            (BufferKind::Input, Some(at)) if self.layout.copies_input => ItemPlace::InputCopy(at),
            (BufferKind::Input, Some(at)) => ItemPlace::Input(at),
            (_, Some(at)) => ItemPlace::Output(at),
            (_, None) => ItemPlace::Scratch(self.scratch.place_of(element)),
        }
    }

    fn link_of(&mut self, peer: crate::Rank) -> (u32, &mut LinkCounts) {
        let links = &mut self.result.links;
        let link = links.binary_search_by_key(&peer, |link| link.peer).expect("a peer of the program");
        (link as u32, &mut links[link])
    }

    /// How many items a sub-chunk of a step takes.
    fn items_of(&self, step: StepId) -> u32 {
        let most = self.most_places - 1;
        let items = match &*self.program.steps[step as usize].body {
            Body::Send { peers, .. } => peers.len().div_ceil(most),
            // All but the first one begin with the sum so far.
            Body::Combine { operands, .. } => 1 + operands.len().saturating_sub(most).div_ceil(most - 1),
        };
        items.max(1) as u32
    }

    /// Adds the items of a sub-chunk. Messages are numbered as they are added, which is their order at both
    /// ends.
    fn push(&mut self, due: &Due, mut waits: Range<u32>) {
        let Range { start, end } = self.elements(due.step, due.sub);
        let (mut sources, mut destinations) = (Vec::new(), Vec::new());
        let (mut scales, mut last) = (false, false);
        let program = self.program;
        match &*program.steps[due.step as usize].body {
            Body::Send { buffer, peers } => {
                sources.push(self.place(*buffer, start));
                for peer in peers {
                    let (link, counts) = self.link_of(*peer);
                    let number = counts.sends;
                    counts.sends += 1;
                    destinations.push(ItemPlace::Message { link, number });
                }
            }
            Body::Combine { operands, into, last: completes } => {
                last = *completes;
                for operand in operands {
                    let source = match operand {
                        OperandSource::Own { buffer, scaled } => {
                            scales |= scaled;
                            self.place(*buffer, start)
                        }
                        OperandSource::Received { peer } => {
                            let (link, counts) = self.link_of(*peer);
                            let number = counts.receives;
                            counts.receives += 1;
                            ItemPlace::Message { link, number }
                        }
                    };
                    sources.push(source);
                }
                destinations.push(self.place(*into, start));
            }
        }
        let elements = end - start;
        let most = self.most_places - 1;
        while sources.len() > most {
            self.result.splits_sums = true;
            // A place of its own, because `into` may be that of a source.
            let sum = ItemPlace::Scratch(self.result.scratch);
            self.result.scratch += elements.next_multiple_of(GRANULE);
            let rest = sources.split_off(most);
            self.push_item(elements, (scales, false), &sources, &[sum], waits);
            waits = self.wait_for_previous_item();
            sources = std::iter::once(sum).chain(rest).collect();
        }
        while destinations.len() > most {
            let rest = destinations.split_off(most);
            self.push_item(elements, (scales, last), &sources, &destinations, waits);
            waits = self.wait_for_previous_item();
            destinations = rest;
        }
        self.push_item(elements, (scales, last), &sources, &destinations, waits);
    }

    /// What the next item waits for, which is only the previous one.
    fn wait_for_previous_item(&mut self) -> Range<u32> {
        let wait = self.result.waits.len() as u32;
        self.result.waits.push(self.result.items.len() as u32 - 1);
        wait..wait + 1
    }

    /// Adds an item.
    fn push_item(
        &mut self,
        elements: u64,
        (scales, last): (bool, bool),
        sources: &[ItemPlace],
        destinations: &[ItemPlace],
        waits: Range<u32>,
    ) {
        let (first_source, first_destination) =
            (self.result.sources.len() as u32, self.result.destinations.len() as u32);
        self.result.sources.extend_from_slice(sources);
        self.result.destinations.extend_from_slice(destinations);
        self.result.items.push(ListItem {
            elements: elements as u32,
            scales,
            last,
            sources: first_source..self.result.sources.len() as u32,
            destinations: first_destination..self.result.destinations.len() as u32,
            waits,
        });
    }
}
