//! Mailboxes: the path of small messages within a node. Every rank puts its whole vector into its own box and
//! reads everybody else's. No hand-off, no acknowledgement.
//!
//! There are two boxes, used in turn. A rank that fills a box for its n-th small call has seen everybody's
//! box of call n-1, and nobody fills that one before having read all boxes of call n-2: so the box that is
//! overwritten is one that everybody has read.

use super::{ArenaLayout, ArenaRef, ControlPage, Neighbours};
use crate::call::{Call, CallWords};
use crate::error::Result;
use crate::memory::{Arena, Piece};
use crate::transport::Rank;
use crate::wake::WakeFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What stands before the bytes in a box: one cache line.
#[derive(Debug)]
#[repr(C, align(64))]
struct Head {
    /// Which small call this is for, from 1.
    number: AtomicU64,
    call: [AtomicU64; 5],
}

/// Bytes that the two boxes of a rank take.
pub(super) fn bytes(small: usize) -> usize {
    2 * box_bytes(small)
}

fn box_bytes(small: usize) -> usize {
    (size_of::<Head>() + small).next_multiple_of(64)
}

/// The two boxes of one rank.
#[derive(Debug)]
struct Boxes {
    heads: [ArenaRef<Head>; 2],
    bytes: [Piece; 2],
}

impl Boxes {
    fn new(
        layout: ArenaLayout,
        piece: impl Fn(usize, usize) -> Option<Piece>,
        held: &Arc<dyn std::any::Any + Send + Sync>,
    ) -> Result<Self> {
        let at = |which| layout.mailbox() + which * box_bytes(layout.small);
        let head = |which| ArenaRef::new(piece(at(which), size_of::<Head>()), Arc::clone(held));
        let bytes = |which| {
            piece(at(which) + size_of::<Head>(), layout.small).expect("the mailbox lies within the arena")
        };
        Ok(Self { heads: [head(0)?, head(1)?], bytes: [bytes(0), bytes(1)] })
    }
}

struct PeerMailbox {
    boxes: Boxes,
    control: ArenaRef<ControlPage>,
    wake: WakeFd,
}

/// The mailboxes of a node, as one of its ranks sees them.
pub struct Mailbox {
    mine: Boxes,
    place: usize,
    /// By place on the node; `None` for this rank.
    others: Vec<Option<PeerMailbox>>,
    ranks: Vec<Rank>,
    number: u64,
}

impl Mailbox {
    /// Joins the boxes of `arena`, laid out by `layout`, with those of the neighbours.
    ///
    /// # Errors
    /// `Internal` if the layout does not fit; `System` if a descriptor cannot be kept.
    pub fn new(arena: &Arc<Arena>, layout: ArenaLayout, neighbours: &Neighbours, me: Rank) -> Result<Self> {
        let held: Arc<dyn std::any::Any + Send + Sync> = Arc::clone(arena) as _;
        let mine = Boxes::new(layout, |offset, len| arena.piece(offset, len), &held)?;
        let mut others: Vec<Option<PeerMailbox>> = (0..=neighbours.others.len()).map(|_| None).collect();
        let mut ranks = vec![me; others.len()];
        for other in &neighbours.others {
            let held: Arc<dyn std::any::Any + Send + Sync> = Arc::clone(&other.arena) as _;
            ranks[other.place] = other.rank;
            others[other.place] = Some(PeerMailbox {
                boxes: Boxes::new(layout, |offset, len| other.arena.piece(offset, len), &held)?,
                control: ArenaRef::new(other.arena.piece(0, size_of::<ControlPage>()), held)?,
                wake: other.wake.try_clone()?,
            });
        }
        Ok(Self { mine, place: neighbours.place, others, ranks, number: 0 })
    }

    /// How many ranks share the node.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// The rank at this place on the node.
    #[must_use]
    pub fn rank_at(&self, place: usize) -> Rank {
        self.ranks[place]
    }

    /// Begins a small call and gives this rank's own box, to be filled before [`post`](Self::post).
    pub fn open(&mut self) -> Piece {
        self.number += 1;
        self.mine.bytes[self.which()]
    }

    /// Shows the box to everybody, with what this rank calls.
    pub fn post(&self, call: &Call) {
        let head = &self.mine.heads[self.which()];
        for (slot, word) in head.call.iter().zip(call.to_words()) {
            slot.store(word, Ordering::Relaxed);
        }
        head.number.store(self.number, Ordering::Release);
        for other in self.others.iter().flatten() {
            if other.control.need_wakeup.is_set() {
                other.wake.notify();
            }
        }
    }

    /// What the rank at `place` has put into its box for this call, if it has yet: its call and the bytes.
    /// `Some(None)` in front if what it says is no call.
    #[must_use]
    pub fn look(&self, place: usize) -> Option<(Option<Call>, Piece)> {
        let boxes = if place == self.place { &self.mine } else { &self.others[place].as_ref()?.boxes };
        let head = &boxes.heads[self.which()];
        if head.number.load(Ordering::Acquire) != self.number {
            return None;
        }
        let words: CallWords = std::array::from_fn(|word| head.call[word].load(Ordering::Relaxed));
        Some((Call::from_words(words), boxes.bytes[self.which()]))
    }

    fn which(&self) -> usize {
        (self.number % 2) as usize
    }
}
