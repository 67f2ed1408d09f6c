//! The program of a rank as a list of items, for a GPU's kernel that runs it without the host:
//! `kernels/items.h`. `tests/suite/device_program.rs` is the reference for it.
//!
//! Owns the order of the items, what each waits for, and which message it sends or uses. Must not know
//! addresses: a kernel gets them with the call.
//!
//! An item moves one sub-chunk of one step: it adds what is at its sources, and writes the sum to its
//! destinations. Messages go through slots of their link: message `m` through slot `m` modulo the number of
//! slots, whether the receiver's GPU maps the slots or a transport carries their bytes. So an item waits for
//! three things only: for earlier items of its rank, for the messages that it uses, and for slots that its
//! messages go to.
//!
//! # Why every list ends
//!
//! The CTAs of a rank take items in the order of the list. Lists are sorted by what all ranks know of an
//! item: when it is due, its hop, its group and the first element of its sub-chunk; a message is used after
//! it is sent. So there is one order of all items of the world, and what an item waits for comes before it,
//! slots included: the message that was in a slot before is used by an earlier item. The first unfinished
//! item of the world waits for nothing, and has a CTA or gets the next that is free. One CTA of each rank and
//! one slot of each link suffice.

mod compile;

use crate::Rank;
use std::ops::Range;

/// The items of one rank for calls of one length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceProgram {
    /// The rank that runs it.
    pub rank: Rank,
    /// Number of ranks.
    pub world: usize,
    /// In the order in which CTAs take them.
    pub items: Vec<ListItem>,
    /// The links to other ranks, in rising order of their ranks.
    pub links: Vec<LinkCounts>,
    /// Elements of scratch memory.
    pub scratch: u64,
    /// Elements of the input that are copied before other items begin: of all of it or none.
    pub copied: u64,
    /// Whether the sum of a step is that of several items, so that it is rounded in between.
    pub splits_sums: bool,
    sources: Vec<ItemPlace>,
    destinations: Vec<ItemPlace>,
    waits: Vec<u32>,
}

/// The messages of a link in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkCounts {
    /// The rank at the other end.
    pub peer: Rank,
    /// Messages to it.
    pub sends: u32,
    /// Messages from it.
    pub receives: u32,
}

/// A sub-chunk of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListItem {
    /// How many elements it has.
    pub elements: u32,
    /// Whether it multiplies what it reads from the input by this rank's factor.
    pub scales: bool,
    /// Whether it completes the sum over all ranks. An average is divided here.
    pub last: bool,
    sources: Range<u32>,
    destinations: Range<u32>,
    waits: Range<u32>,
}

/// Where an item reads or writes its elements, which lie one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ItemPlace {
    /// From this element of the caller's input on.
    Input(u64),
    /// From this element of the copy of the input on. It stands for the input where that shares memory with
    /// the output, and the order of the list would have the output written first.
    InputCopy(u64),
    /// From this element of the caller's output on.
    Output(u64),
    /// From this element of scratch memory on.
    Scratch(u64),
    /// In the slot of a message.
    Message {
        /// The index of the link in [`DeviceProgram::links`].
        link: u32,
        /// The number of the message in this direction of the link, from 0 in each call.
        number: u32,
    },
}

impl DeviceProgram {
    /// What an item adds, in this order.
    #[must_use]
    pub fn sources(&self, item: &ListItem) -> &[ItemPlace] {
        &self.sources[item.sources.start as usize..item.sources.end as usize]
    }

    /// Where an item writes the sum.
    #[must_use]
    pub fn destinations(&self, item: &ListItem) -> &[ItemPlace] {
        &self.destinations[item.destinations.start as usize..item.destinations.end as usize]
    }

    /// The indices of the items that an item waits for.
    #[must_use]
    pub fn waits(&self, item: &ListItem) -> &[u32] {
        &self.waits[item.waits.start as usize..item.waits.end as usize]
    }
}
